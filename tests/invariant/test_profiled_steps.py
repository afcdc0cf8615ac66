"""Steps that are recorded are the steps that are taken without: same bits, and nothing is left running."""

import contextlib
import gzip
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import write_small_model
from tests.invariant.test_step_promises import Run, drawn_rows
from tunix_rt.data.packing import rows_of_step
from tunix_rt.engines import step_time as parts
from tunix_rt.engines.step_time import breakdown
from tunix_rt.engines.torch.profile import dense_product, profiled, region
from tunix_rt.engines.trace import FORWARD, read_trace
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.timing import step_flops
from tunix_rt.train.profiling import computed_positions, example_lengths


def is_running():
    return torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_model("gemma3", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "settings", [{}, {"optim_in_backward": True, "max_grad_norm": 1.0}, {"gradient_checkpointing": True}]
)
def test_recorded_steps_are_the_same_steps_and_their_parts_sum_to_their_time(folder, tmp_path, settings):
    plain = Run(folder, **settings)
    wanted = [(step.step, step.loss.hex(), step.grad_norm) for step in plain.steps(total=6)]
    run, trace, told = Run(folder, **settings), tmp_path / "profile" / "trace.json.gz", []
    steps = profiled(run.steps(total=6), run.engine, trace, passed=2, count=3, done=lambda: told.append(is_running()))
    taken = [(step.step, step.loss.hex(), step.grad_norm) for step in steps]
    assert taken == wanted and told == [False] and not is_running()
    for name, parameter in plain.parameters.items():
        assert torch.equal(parameter, run.parameters[name]), name
    with gzip.open(trace, "rt") as file:
        assert len(json.load(file)["traceEvents"]) > 1000
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]
    found = breakdown(read_trace(trace))
    assert found.steps == 3 and not found.on_gpu
    assert math.fsum(part.milliseconds for part in found.parts) == pytest.approx(found.milliseconds, rel=1e-9)
    names = {part.name for part in found.parts}
    assert names == {
        parts.LAYER_MATMULS, parts.HEAD_MATMULS, parts.HEAD_REST, parts.ATTENTION, parts.ELEMENTWISE, parts.UPDATE,
        parts.LOOKUP, parts.BETWEEN,
    }, "nothing is unknown"  # fmt: skip


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_nothing_is_recorded_any_more_when_the_steps_are_given_up(folder, tmp_path, taken):
    """While it passes steps, while the profiler warms up, and while it records."""
    run = Run(folder)
    inner = run.steps(total=6)
    steps = profiled(inner, run.engine, tmp_path / "trace.json.gz", passed=2, count=2, done=lambda: None)
    with contextlib.closing(steps):
        for _ in range(taken):
            next(steps)
        assert is_running() == (taken == 3)
    assert not is_running() and (inner.gi_frame is None or not taken), "closed, unless it never began"
    assert not list(tmp_path.iterdir())


def test_nothing_is_recorded_any_more_after_an_error(folder, tmp_path):
    run = Run(folder)

    def failing():
        yield from run.walk(last=2)
        raise ZeroDivisionError

    steps = profiled(failing(), run.engine, tmp_path / "trace.json.gz", passed=1, count=2, done=lambda: None)
    with pytest.raises(ZeroDivisionError):
        list(steps)
    assert not is_running() and not list(tmp_path.iterdir())


def test_a_region_without_a_profiler_does_nothing():
    assert isinstance(region(FORWARD), contextlib.nullcontext)


def test_the_plain_product_is_timed_without_touching_the_random_numbers(folder):
    engine = Run(folder).engine
    before = torch.get_rng_state()
    found = dense_product(engine)
    assert found.tflops > 0 and found.dtype == "float32" and found.size >= 256
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["gemma3", "llama", "gpt2"])
@pytest.mark.parametrize("again", [False, 0.5, True])
def test_the_counted_operations_are_those_that_torch_counts(tmp_path, kind, again):
    """torch counts every product that runs; ours is from the shape alone. Attention is not compared: torch counts the whole
    square."""
    run = Run(write_small_model(kind, tmp_path / kind), gradient_checkpointing=again)
    batch = run.batch(1)
    taken = rows_of_step(1, row_count=len(drawn_rows()), rows_per_step=2, seed=5)
    lengths = [length for row in taken for length in example_lengths(drawn_rows()[row].positions)]
    assert sum(lengths) == batch.tokens
    counter = FlopCounterMode(display=False)
    with counter:
        run.walk(last=1)
    products = counter.get_flop_counts()["Global"]
    counted = sum(flops for op, flops in products.items() if op.__name__.split(".")[0] in ("mm", "addmm"))
    ours = step_flops(
        shape_of(run.engine.source.config), run.engine.recipe, lengths=lengths,
        positions=batch.micro_batches[0].ids.size, targets=batch.target_tokens,
    )  # fmt: skip
    assert counted == pytest.approx(ours.executed_layers + ours.head, rel=1e-9)


@pytest.mark.parametrize("compiled_shape", [None, (2, 4), (2, 128), (3, 128), (1, 4096)])
def test_positions_are_counted_as_rows_are_filled_up_for_compiled_layers(folder, compiled_shape):
    run = Run(folder, accumulation=2)
    run.engine.compiled_shape = compiled_shape
    for step in (1, 2):
        batch, placing = run.batch(step), run.engine.placing(training=True)
        laid_out = sum(placing(micro).ids.numel() for micro in batch.micro_batches)
        assert computed_positions(batch, compiled_shape) == laid_out
