"""Compiled layers train as the plain ones do; answers and held-out losses take the plain ones, and what fails is said."""

import logging

import numpy as np
import pytest
import torch
from torch._inductor.exc import InductorError

from tests.conftest import write_small_model
from tests.invariant.test_step_promises import Run, drawn_rows
from tunix_rt.data.packing import filled_up
from tunix_rt.engines.torch import compile as torch_compile
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.errors import HardwareError
from tunix_rt.plan.compile_policy import COMPILE_SECONDS, choose_compiling, waits_for_the_host


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_model("gemma3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiled(folder):
    run = Run(folder, at_once=3, compile=True, gradient_checkpointing=0.5)
    return run, run.walk(last=3)


@pytest.mark.slow  # Inductor takes 15 s for it; tests/gpu has compiled steps too
def test_compiled_steps_give_the_losses_of_plain_ones(folder, compiled):
    run, steps = compiled
    plain = Run(folder, at_once=3, compile=False, gradient_checkpointing=0.5)
    expected = plain.walk(last=3)
    assert run.engine.compiled and not plain.engine.compiled
    np.testing.assert_allclose([s.loss for s in steps], [s.loss for s in expected], rtol=1e-5)
    np.testing.assert_allclose([s.grad_norm for s in steps], [s.grad_norm for s in expected], rtol=1e-4)
    assert [s.batch for s in steps] == [s.batch for s in expected]


@pytest.mark.slow  # Inductor takes 15 s for it; tests/gpu has compiled steps too
def test_nothing_is_compiled_after_the_first_step_not_even_at_the_end_of_an_epoch(compiled):
    """Ten rows, three at a time: the fourth step has one row, then the next epoch begins."""
    run, _ = compiled
    assert run.rows == 10 and run.engine.compiled_shape == (3, 64)
    with torch.compiler.set_stance("fail_on_recompile"):
        again = run.walk(first=4, last=8, total=8)
    assert again[0].tokens < again[1].tokens / 2


@pytest.mark.slow  # Inductor takes 15 s for it; tests/gpu has compiled steps too
def test_heldout_losses_are_those_of_layers_that_are_not_compiled_to_the_bit(folder, compiled):
    run, _ = compiled
    rows = drawn_rows()[:3]
    with torch.compiler.set_stance("fail_on_recompile"):
        found = engine_of.heldout_loss(run.engine, rows, batch_size=2, pad_id=0)
    plain = Run(folder, compile=False)
    plain.engine.model.load_state_dict(run.engine.model.state_dict())
    assert found == engine_of.heldout_loss(plain.engine, rows, batch_size=2, pad_id=0)


def test_rows_are_filled_up_to_the_longest_of_the_run_not_of_its_first_batch(folder):
    sample = Run(folder, compile=False).batch(1).micro_batches[0]
    assert sample.ids.shape[1] <= 48
    assert torch_compile.shape_of_steps(sample, 0) == (2, 64)
    assert torch_compile.shape_of_steps(sample, 70) == (2, 128)
    assert torch_compile.shape_of_steps(sample, 0, ranks=2) == (1, 64), "a rank pads its own share of the rows"


@pytest.mark.parametrize("least", [(2, 64), (3, 48), (5, 128), (0, 0)])
def test_filling_up_adds_no_target_and_no_neighbour(folder, least):
    run = Run(folder, compile=False)
    micro = run.batch(1).micro_batches[0]
    full = filled_up(micro, least)
    assert full.ids.shape == tuple(max(pair) for pair in zip(micro.ids.shape, least, strict=True))
    assert full.targets == micro.targets and full.positions.max() == micro.positions.max()
    rows, tokens = micro.ids.shape
    for name in ("ids", "labels", "positions"):
        np.testing.assert_array_equal(getattr(full, name)[:rows, :tokens], getattr(micro, name))
    one, other = (engine_of.summed_loss(run.engine, batch).item() for batch in (micro, full))
    assert other == pytest.approx(one, rel=1e-6)


def test_a_compiler_that_fails_is_an_error_where_it_was_asked_for_and_said_where_it_was_not(
    folder, monkeypatch, caplog
):
    def broken(*args, **kwargs):
        raise InductorError(OSError("no working C compiler"), None)

    monkeypatch.setattr(torch_compile, "_warm_up", broken)
    with pytest.raises(HardwareError, match="cannot be compiled here: InductorError: OSError: no working C compiler"):
        Run(folder, compile=True).walk(last=1)
    run = Run(folder, compile=False)
    monkeypatch.setattr(torch_compile, "choose_compiling", lambda *a, **k: choose_compiling("auto", **LONG))
    with caplog.at_level(logging.WARNING):
        assert len(run.walk(last=1)) == 1
    assert not run.engine.compiled and "using eager layers" in caplog.text


LONG = {
    "device": "cuda", "device_name": "NVIDIA H200", "parameters": 2_506_172_416, "tokens": 16_384, "steps": 5000,
    "packed": True, "adapters": False,
}  # fmt: skip


def test_a_defect_is_not_taken_for_a_failing_compiler(folder, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch_compile, "_warm_up", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        Run(folder, compile=True).walk(last=1)


def test_auto_compiles_long_runs_on_a_gpu_and_says_what_it_reckons_with():
    assert choose_compiling("auto", **LONG).wanted
    short = choose_compiling("auto", **(LONG | {"steps": 20}))
    assert not short.wanted and f"{COMPILE_SECONDS:.0f} s" in short.why
    assert not choose_compiling("auto", **(LONG | {"parameters": 135_000_000, "steps": 500})).wanted
    assert not choose_compiling("auto", **(LONG | {"device": "cpu", "device_name": None})).wanted
    assert not choose_compiling("auto", **(LONG | {"adapters": True})).wanted
    assert not choose_compiling("auto", **(LONG | {"packed": False})).wanted
    assert choose_compiling(True, **(LONG | {"steps": 1})).required
    assert not choose_compiling(False, **LONG).wanted


@pytest.mark.parametrize(
    ("parameters", "layers", "tokens", "waits"),
    [(124_000_000, 12, 8192, True), (135_000_000, 30, 8192, True), (1_000_000_000, 26, 8192, False),
     (2_500_000_000, 18, 16_384, False), (2_500_000_000, 18, 512, True)],
)  # fmt: skip
def test_layers_are_recorded_where_a_gpu_would_wait_for_the_host(parameters, layers, tokens, waits):
    assert waits_for_the_host("NVIDIA H200", parameters=parameters, layers=layers, tokens=tokens) is waits
