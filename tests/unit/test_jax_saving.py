"""State of the JAX engine on its way to a file and back, and batches on their way to the devices."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import MicroBatch
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.errors import DoesNotFitError

jax = pytest.importorskip("jax")
state = pytest.importorskip("tunix_rt.engines.jax.save", exc_type=ImportError)
optim = pytest.importorskip("tunix_rt.engines.jax.optim", exc_type=ImportError)
weights = pytest.importorskip("tunix_rt.engines.jax.weights", exc_type=ImportError)
backend = pytest.importorskip("tunix_rt.engines.jax.loop", exc_type=ImportError)
batches = pytest.importorskip("tunix_rt.engines.jax.loop", exc_type=ImportError)

SMALL = architecture_of({
    "model_type": "gemma", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
})  # fmt: skip


def trained(seed):
    """A model and an optimizer whose arrays hold some numbers."""
    drawn = np.random.default_rng(seed)

    def filled(shape):
        return jax.device_put(drawn.standard_normal(shape, np.float32))

    params = jax.tree.map(filled, weights.parameter_shapes(SMALL), is_leaf=lambda node: isinstance(node, tuple))
    moments = jax.tree.map(lambda array: filled(array.shape), optim.init(params, optim.optim_of(Training())))
    return SimpleNamespace(params=params, architecture=SMALL), SimpleNamespace(state=moments, done=0)


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


def test_a_checkpoint_is_put_back_bit_for_bit_without_a_second_copy_on_the_devices(tmp_path, monkeypatch):
    saved = trained(0)
    state.write_direct(*saved, tmp_path)
    wanted = [np.array(array) for array in jax.tree.leaves((saved[0].params, saved[1].state))]
    engine, optimizer = trained(1)
    before, seen, put = live_bytes(), [], jax.device_put

    def watched(*given):
        found = put(*given)
        seen.append(live_bytes())
        return found

    monkeypatch.setattr(state.jax, "device_put", watched)
    state.restore_state(engine, optimizer, tmp_path, step=3)
    assert len(seen) == len(wanted) and max(seen) <= before
    found = jax.tree.leaves((engine.params, optimizer.state))
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert optimizer.done == 3


def test_memory_that_runs_out_while_a_checkpoint_is_made_is_said_to_be_that(tmp_path, monkeypatch):
    engine, optimizer = trained(0)

    def no_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(state, "host_copy", no_room)
    for made in (lambda: state.snapshot(engine, optimizer), lambda: state.write_direct(engine, optimizer, tmp_path)):
        with pytest.raises(DoesNotFitError, match="checkpoint"):
            made()


@pytest.mark.parametrize(("kernel", "starts", "said"), [("cudnn", 8, 1), ("cudnn", 32, 0), ("exact", 8, 0)])
def test_rows_of_more_examples_than_a_kernel_takes_are_warned_of(caplog, kernel, starts, said):
    """Rows of 96 tokens may have 3 examples; those of 8 tokens are 12."""
    positions = np.arange(96)[None] % starts
    micro = MicroBatch(ids=np.ones((1, 96), np.int64), labels=np.ones((1, 96), np.int64), positions=positions)
    filled = batches.filled_batch(micro, rows=1, tokens=96)
    examples = batches.most_examples(filled)
    assert examples == 96 // starts
    engine = SimpleNamespace(tokens=96, attention=SimpleNamespace(name=kernel))
    with caplog.at_level(logging.WARNING):
        assert backend._warns_of_many_examples(engine, 7, examples) is bool(said)
    assert [one for one in caplog.messages if "Step 7: a packed row has 12 examples" in one] == caplog.messages
    assert len(caplog.messages) == said
