"""Compiled layers on a GPU: the losses of plain ones, nothing compiled later, and the same bits after a resume."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from tests.conftest import write_small_model
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.models.resolve import resolve_model

pytestmark = pytest.mark.gpu


def steps_of(folder, *, last, first=1, state=None, **settings):
    """Steps `first` to `last` of 12, and the weights then; from `state` where it is given. Ten rows, three at a time."""
    draw = np.random.default_rng(4)
    examples = [
        Example(ids=draw.integers(3, 1024, size, dtype=np.int32), trained=np.ones(size, dtype=np.bool_))
        for size in draw.integers(5, 60, 24).tolist()
    ]
    rows = make_rows(examples, max_length=90, packing=True)
    training = Training(seed=3, dtype="bfloat16", device="cuda", learning_rate=1e-3, **settings)
    engine = engine_of.load(resolve_model(str(folder), weights="random"), device="cuda", training=training)
    optimizer = engine_of.make_optimizer(engine, training)
    if state is not None:
        engine.model.load_state_dict(state[0])
        optimizer.restore(state[1], step=first - 1)
    batches = partial(batch_of_step, rows, micro_batch_size=3, accumulation=1, seed=5, pad_id=0)
    steps = engine_of.optimizer_steps(engine, optimizer, batches, training, first=first, total=12)
    taken = list(itertools.islice(steps, 1))
    with torch.compiler.set_stance("fail_on_recompile"):
        taken += itertools.islice(steps, last - first)
    steps.close()
    weights = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    return taken, weights, {name: tensor.clone() for name, tensor in optimizer.tensors().items()}, engine


@pytest.mark.parametrize("kind", ["gemma3", "llama", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"master_dtype": "bfloat16", "optim": "adafactor", "optim_in_backward": True, "gradient_checkpointing": True}],
    ids=["plain", "smallest"],
)
def test_losses_are_those_of_plain_layers_over_the_end_of_an_epoch(tmp_path, kind, settings):
    folder = write_small_model(kind, tmp_path)
    found, _, _, engine = steps_of(folder, last=9, compile=True, **settings)
    expected, _, _, plain = steps_of(folder, last=9, compile=False, **settings)
    assert engine.compiled and not plain.compiled
    assert bool(engine.cuda_graph) == (not settings and engine.attention.name != "flex")
    np.testing.assert_allclose([s.loss for s in found], [s.loss for s in expected], rtol=2e-2)
    print(kind, settings, max(abs(a.loss / b.loss - 1) for a, b in zip(found, expected, strict=True)))


def test_a_compiled_run_that_is_continued_has_the_bits_of_one_that_was_not(tmp_path):
    folder = write_small_model("gemma3", tmp_path)
    how = {"compile": True, "deterministic": True, "master_dtype": "bfloat16"}
    whole, weights, _, _ = steps_of(folder, last=10, **how)
    _, at_6, optimizer, _ = steps_of(folder, last=6, **how)
    rest, again, _, _ = steps_of(folder, first=7, last=10, state=(at_6, optimizer), **how)
    assert [step.loss for step in rest] == [step.loss for step in whole[6:]]
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_recorded_run_has_the_losses_and_weights_of_one_that_is_launched_kernel_by_kernel(
    tmp_path, kind, monkeypatch
):
    folder = write_small_model(kind, tmp_path)
    how = {"compile": True, "deterministic": True, "master_dtype": "bfloat16"}
    recorded, weights, _, engine = steps_of(folder, last=10, **how)
    assert engine.cuda_graph
    monkeypatch.setattr(engine_of, "captures", lambda *_: False)
    launched, others, _, plain = steps_of(folder, last=10, **how)
    assert not plain.cuda_graph
    assert [step.loss for step in recorded] == [step.loss for step in launched]
    assert all(torch.equal(weights[name], others[name]) for name in weights)
