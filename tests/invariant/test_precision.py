"""Every precision and every optimizer takes the same road, continues exactly, and stops before it does harm."""

import itertools
import math
from functools import partial

import pytest
import torch

from tests.invariant.test_loading_promises import PRECISIONS
from tests.supervision_checks import shipped_samples, style
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import render_batch
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import resolve_model

OPTIMIZERS = ["adamw", "adamw_8bit", "adafactor"]


class Run:
    """A small model with its optimizer; the rows are the same for all."""

    def __init__(self, folder, **settings):
        self.training = Training(learning_rate=1e-3, seed=3, **settings)
        source = resolve_model(str(folder), weights="random")
        self.engine = engine_of.load(source, device="cpu", training=self.training)
        self.optimizer = engine_of.make_optimizer(self.engine, self.training)
        tokenizer = load_tokenizer(folder)
        rows = make_rows(render_batch(shipped_samples(10), tokenizer, style(tokenizer)), max_length=128, packing=True)
        self.batches = partial(batch_of_step, rows, micro_batch_size=2, accumulation=1, seed=5, pad_id=0)

    def walk(self, *, first=1, stop=6, total=6):
        steps = engine_of.optimizer_steps(
            self.engine, self.optimizer, self.batches, self.training, first=first, total=total
        )
        return list(itertools.islice(steps, stop - first + 1))

    def weights(self):
        return {name: p.detach().clone() for name, p in self.engine.model.named_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_every_kind_of_run_learns_and_continues_exactly(small_model, tmp_path, precision, optim):
    folder, settings = small_model("gpt2-dropout"), {"optim": optim, **PRECISIONS[precision]}
    whole = Run(folder, **settings)
    curve = [step.loss for step in whole.walk()]
    assert curve[-1] < curve[0]
    first = Run(folder, **settings)
    seen = [step.loss for step in first.walk(stop=2)]
    engine_of.write_direct(first.engine, first.optimizer, tmp_path)
    second = Run(folder, **settings)
    engine_of.restore_state(second.engine, second.optimizer, tmp_path, step=2)
    seen += [step.loss for step in second.walk(first=3)]
    assert seen == curve
    assert same(second.weights(), whole.weights())


@pytest.mark.parametrize("precision", ["float32", "float32 master", "bfloat16"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_an_update_in_backward_is_the_update_after_it(small_model, precision, optim):
    """Without clipping, which alone differs, bit for bit."""
    folder = small_model("gemma3")
    settings = {"optim": optim, "max_grad_norm": 0.0, "gradient_checkpointing": True, **PRECISIONS[precision]}
    after, within = Run(folder, **settings), Run(folder, optim_in_backward=True, **settings)
    steps = [run.walk(stop=3) for run in (after, within)]
    assert [step.loss for step in steps[0]] == [step.loss for step in steps[1]]
    assert same(after.weights(), within.weights())
    norms = [[step.grad_norm for step in run] for run in steps]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2 if precision == "bfloat16" else 1e-5)


def test_in_backward_gradients_are_never_all_there(small_model):
    run = Run(small_model("llama"), optim_in_backward=True)
    alive, real = [], run.optimizer.update

    def watched(parameter, **named):
        alive.append(sum(p.grad is not None for p in run.engine.model.parameters()))
        real(parameter, **named)

    run.optimizer.update = watched
    run.walk(stop=1)
    tensors = sum(1 for _ in run.engine.model.parameters())
    assert len(alive) == tensors and max(alive) <= 3, "one at a time, and the two tables of the vocabulary"
    assert all(p.grad is None for p in run.engine.model.parameters())


def test_in_backward_each_tensor_is_clipped_by_itself(small_model):
    folder = small_model("llama")
    plain = Run(folder, optim_in_backward=True, optim="adafactor", max_grad_norm=0.0)
    clipped = Run(folder, optim_in_backward=True, optim="adafactor", max_grad_norm=1e-3)
    scales, real = [], clipped.optimizer.update

    def watched(parameter, *, scale=None, finite=None):
        norm = torch.linalg.vector_norm(parameter.grad)
        scales.append((norm.item(), scale.item()))
        real(parameter, scale=scale, finite=finite)

    clipped.optimizer.update = watched
    norms = [run.walk(stop=1)[0].grad_norm for run in (plain, clipped)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6), "the norm that is told is the one before clipping"
    assert math.sqrt(sum(norm**2 for norm, _ in scales)) == pytest.approx(norms[0], rel=1e-5)
    for norm, scale in scales:
        assert scale == pytest.approx(min(1.0, 1e-3 / (norm + 1e-6)), rel=1e-5)


@pytest.mark.parametrize("within", [False, True], ids=["after", "in backward"])
def test_a_gradient_that_is_not_finite_stops_the_run(small_model, within):
    """After backward nothing has been updated; within it, nothing from the bad tensor on."""
    run = Run(small_model("llama"), optim_in_backward=within)
    before = run.weights()
    bad = run.engine.model.model.layers[0].mlp.up_proj.weight
    bad.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(TunixError, match=r"step 1: .*gradient norm nan") as caught:
        run.walk(stop=1)
    now = run.weights()
    changed = {name for name in now if not torch.equal(now[name], before[name])}
    assert all(value.isfinite().all() for value in now.values())
    earlier = {name for name in now if name.startswith("model.layers.1.") or name == "model.norm.weight"}
    assert changed <= (earlier | {name for name in now if "layers.0.mlp" in name} if within else set())
    assert ("tensors are updated" in caught.value.problem) == within


@pytest.mark.parametrize("within", [False, True], ids=["after", "in backward"])
def test_a_loss_that_is_not_finite_updates_nothing(small_model, within):
    run = Run(small_model("llama"), optim_in_backward=within)
    with torch.no_grad():
        run.engine.model.lm_head.weight[5] = float("nan")
    before = run.weights()
    with pytest.raises(TunixError, match="step 1: loss nan"):
        run.walk(stop=1)
    now = run.weights()
    assert all(torch.equal(now[name].nan_to_num(), before[name].nan_to_num()) for name in now)


def test_a_float16_step_that_overflows_is_computed_again_with_a_smaller_scale(small_model, caplog):
    caplog.set_level("INFO", logger="tunix_rt")
    run, calm = (Run(small_model("gemma3"), dtype="float16") for _ in range(2))
    run.engine.loss_scale.value = 2.0**40
    steps, right = run.walk(stop=2), calm.walk(stop=2)
    assert "overflowed; recomputing them" in caplog.text
    assert run.engine.loss_scale.value < 2.0**40
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in right], rel=1e-3), "no step is left out"
    assert steps[0].grad_norm == pytest.approx(right[0].grad_norm, rel=1e-2), "the norm is that of the loss itself"


def test_float16_that_overflows_at_any_scale_stops(small_model):
    run = Run(small_model("gemma3"), dtype="float16")
    run.engine.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(TunixError, match="gradient norm"):
        run.walk(stop=1)


def test_bfloat16_to_nearest_loses_what_stochastic_rounding_keeps(small_model):
    folder = small_model("gemma3")
    moved = {}
    for stochastic in (True, False):
        run = Run(folder, dtype="bfloat16", master_dtype="bfloat16", stochastic_rounding=stochastic)
        run.training = run.training.model_copy(update={"learning_rate": 1e-5})
        before = run.weights()
        run.walk(stop=3)
        now = run.weights()
        moved[stochastic] = sum(int((now[n] != before[n]).sum()) for n in now) / run.engine.parameters
    assert moved[True] > 3 * moved[False]
