"""The verdict: what fits is admitted, what does not comes with a way out that works; how long, how much disk."""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samples import device
from tests.unit.test_plan import (
    GEMMA3_270M,
    GEMMA_2B,
    GIB,
    SMALL,
    SMALLEST,
    SMOLLM2_135M,
    changed,
    run_settings,
    settings_of,
    shapes,
)
from tunix_rt.cli.main import cli
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.load import load_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.errors import DoesNotFitError
from tunix_rt.plan.fit import CUDA_SAFETY_BYTES, CUDA_SAFETY_SHARE, TRACED_SAFETY_SHARE, limited, verdict
from tunix_rt.plan.memory import predict
from tunix_rt.plan.report import explain_out_of_memory, judge, refuse_if_too_big
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.timing import disk_needed_bytes, estimate_time, measure_rate, training_flops_per_token


def chosen(free_bytes: float, kind: str = "cpu", capability: tuple[int, int] | None = None) -> DeviceChoice:
    return device(kind, free_bytes, capability=capability)


MODERN, OLD = (8, 9), (7, 5)


def named(config: RunConfig) -> RunConfig:
    """With a model and a dataset, so that it could be run."""
    return changed(changed(config, "model", model_name_or_path="a-model"), "data", dataset="some-traces")


def advised(line: str, asked: list[str]) -> RunConfig:
    """The configuration that the `--set` of an advised line make of `asked`."""
    overrides = [word for word in line.partition("  (")[0].split() if word != "--set"]
    config = load_config(None, overrides=asked + overrides)
    require_runnable(named(config))
    return config


def test_a_limit_leaves_no_more_than_it_says_and_no_more_than_there_is() -> None:
    assert limited(10 * GIB, None) == limited(10 * GIB, 12.0) == 10 * GIB
    assert limited(10 * GIB, 0.3) == round(0.3 * GIB) != int(0.3 * GIB - 1)


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_a_2b_model_in_float32_is_refused_on_8_gib_with_parts_and_a_way_out() -> None:
    shape = shape_of(GEMMA_2B)
    config = settings_of(data={"max_length": 1024}, training={"per_device_train_batch_size": 8})
    plan = predict(shape, config, device="cpu")
    with pytest.raises(DoesNotFitError) as refused:
        refuse_if_too_big(plan, chosen(8 * GIB), shape, config)
    assert refused.value.exit_code == 5
    assert f"{plan.least_bytes / GIB:.2f} GiB predicted" in refused.value.problem
    assert "8.00 GiB free on cpu" in refused.value.problem
    assert "weights 9.34" in refused.value.problem
    assert re.search(
        r"even with .*, at least 1\d\.\d\d GiB are needed to train 2,506,172,416 parameters", refused.value.fix
    )


def test_gemma_2b_fits_an_8_gb_card_with_every_parameter_trained() -> None:
    shape = shape_of(GEMMA_2B)
    config = settings_of(
        data={"max_length": 1024},
        training={**SMALLEST, "per_device_train_batch_size": 1},
        evaluation={"per_device_eval_batch_size": 8},
    )
    fit = judge(predict(shape, config, device="cuda"), chosen(7.5 * GIB, "cuda", MODERN))
    assert fit.fits
    assert fit.safety_bytes == pytest.approx(CUDA_SAFETY_SHARE * fit.predicted_bytes + CUDA_SAFETY_BYTES, abs=1)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_traced_plan_asks_for_more_room(kind: str) -> None:
    plan = predict(shape_of(GEMMA_2B), settings_of(data={"max_length": 1024}), device=kind)
    exact, traced = (
        verdict(dataclasses.replace(plan, traced=one), chosen(400 * GIB, kind, MODERN)) for one in (False, True)
    )
    assert traced.safety_bytes - exact.safety_bytes == pytest.approx(TRACED_SAFETY_SHARE * plan.peak_bytes, rel=1e-6)


@settings(max_examples=40)
@given(
    shape=shapes,
    config=run_settings(),
    free=st.integers(2**28, 2**36),
    where=st.sampled_from([("cpu", None), ("cuda", MODERN), ("cuda", OLD), ("cuda", None)]),
)
def test_what_is_advised_can_be_run_and_does_fit(
    shape: ModelShape, config: RunConfig, free: int, where: tuple[str, tuple[int, int] | None]
) -> None:
    kind, capability = where
    choice = chosen(free, kind, capability)
    fit = judge(predict(shape, config, device=kind, capability=capability), choice, shape, config)
    for line in fit.advice:
        if not line.startswith("--set"):
            continue
        plain = config.model_dump()
        for word in line.partition("  (")[0].split()[1::2]:
            section, _, rest = word.partition(".")
            key, _, value = rest.partition("=")
            plain[section][key] = json.loads(value) if value[0].isdigit() or value in ("true", "false") else value
        better = RunConfig.model_validate(plain)
        require_runnable(named(better))
        assert (
            capability == MODERN
            or better.training.dtype == config.training.dtype
            or better.training.dtype != "bfloat16"
        )
        assert better.training.lora_rank == config.training.lora_rank
        assert (
            " tokens/s: fits" in line and judge(predict(shape, better, device=kind, capability=capability), choice).fits
        )


@given(shape=shapes, config=run_settings(), free=st.integers(0, 2**40))
def test_what_is_judged_to_fit_is_never_refused_and_the_other_way_round(
    shape: ModelShape, config: RunConfig, free: int
) -> None:
    plan = predict(shape, config, device="cpu")
    fit = judge(plan, chosen(free))
    assert fit.fits == (fit.predicted_bytes + fit.safety_bytes <= free)
    assert plan.least_bytes <= fit.predicted_bytes <= plan.peak_bytes
    with contextlib.nullcontext() if fit.fits else pytest.raises(DoesNotFitError):
        refuse_if_too_big(plan, chosen(free), shape, config)


def test_a_checkpoint_is_not_what_a_run_is_refused_for() -> None:
    """Where there is no room for a copy of the state, it is written without one."""
    shape, config = shape_of({"model_type": "gpt2"}), settings_of(training={"save_steps": 10}, data={"max_length": 64})
    plan = predict(shape, config, device="cpu")
    assert plan.peak_bytes - plan.least_bytes > 12 * shape.parameters * 0.5
    assert judge(plan, chosen(1.21 * plan.least_bytes)).fits
    assert not judge(plan, chosen(1.19 * plan.least_bytes)).fits


# --- out of memory all the same ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("measured_gib", [5.0, 30.0])
def test_running_out_of_memory_is_explained_by_the_parts_and_answered_by_less(measured_gib: float) -> None:
    shape, asked = shape_of(SMOLLM2_135M), ["data.max_length=2048", "training.per_device_train_batch_size=32"]
    config = load_config(None, overrides=asked)
    choice = chosen(80 * GIB, "cuda", MODERN)
    plan = predict(shape, config, device="cuda")
    problem, fix = explain_out_of_memory(plan, int(measured_gib * GIB), choice, shape, config)
    assert f"{measured_gib:.2f} GiB in use" in problem
    assert f"{plan.peak_bytes / GIB:.2f} GiB predicted" in problem
    assert "activations" in problem
    assert fix.startswith("--set ")
    reached = predict(shape, advised(fix.splitlines()[0], asked), device="cuda").peak_bytes
    assert reached * (1 + CUDA_SAFETY_SHARE) <= min(measured_gib * GIB, plan.peak_bytes)


def test_advice_after_running_out_of_memory_is_for_the_rows_there_were() -> None:
    """Of 512 tokens with a quarter of them targets, where `data.max_length` allows 8,192."""
    shape, asked = shape_of(SMOLLM2_135M), ["data.max_length=8192", "training.per_device_train_batch_size=32"]
    config = load_config(None, overrides=[*asked, "data.packing=false"])
    rows: dict[str, Any] = {"row_tokens": 512, "target_share": 0.25}
    plan = predict(shape, config, device="cuda", **rows)
    _, fix = explain_out_of_memory(plan, int(0.6 * plan.least_bytes), chosen(80 * GIB, "cuda", MODERN), shape, config)
    line = fix.splitlines()[0]
    assert ": fits; the result stays the same" in line and "max_length" not in line and "optim" not in line
    better = advised(line, [*asked, "data.packing=false"])
    reached = predict(shape, better, device="cuda", **rows).least_bytes
    assert f"({reached / GIB:.2f} GiB, about " in line
    assert 0.3 * plan.least_bytes < reached < 0.6 * plan.least_bytes


# --- time and disk ---------------------------------------------------------------------------------------------------


def test_time_grows_with_steps_tokens_and_questions() -> None:
    shape, config = shape_of(GEMMA3_270M), settings_of()

    def of(tokens: int, steps: int, items: int) -> float:
        return estimate_time(
            shape, config, tokens_per_step=tokens, steps=steps, eval_items=items, flops_per_second=1e11
        ).seconds_high

    assert of(1024, 10, 0) < of(2048, 10, 0) < of(2048, 20, 0) < of(2048, 20, 100)
    estimate = estimate_time(shape, config, tokens_per_step=1024, steps=10, flops_per_second=1e11)
    assert 0 < estimate.seconds_low < estimate.seconds_high


def test_recomputation_costs_a_forward_pass_of_the_layers_it_covers() -> None:
    shape, config = shape_of(GEMMA_2B), settings_of(data={"max_length": 1024})
    none, half, every = (
        training_flops_per_token(shape, changed(config, "training", gradient_checkpointing=kept))
        for kept in (False, 0.5, True)
    )
    assert none == pytest.approx(15.3e9, rel=0.01), "forward and backward, the vocabulary included"
    assert half - none == pytest.approx((every - none) / 2)
    assert every - none == pytest.approx(2 * 18 * (shape.layer_matrix_parameters + 2048 * 1024))


def test_the_rate_of_this_cpu_is_measured_in_a_moment() -> None:
    assert 1e8 < measure_rate() < 1e14


def test_a_busy_computer_is_not_taken_for_a_slow_one():
    """The threads of a product wait for one another then; a product by one thread is over before its turn is."""
    alone = measure_rate()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert min(measure_rate() for _ in range(3)) >= alone / 4
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_disk_holds_the_kept_checkpoints_the_best_one_more_and_the_final_model() -> None:
    shape = shape_of({"model_type": "gpt2"})
    weights = 4 * shape.parameters
    small = disk_needed_bytes(shape, settings_of(training={"save_total_limit": 2, "save_steps": 10}))
    large = disk_needed_bytes(shape, settings_of(training={"save_total_limit": 5, "eval_steps": 10}))
    assert small > 4 * 3 * weights + weights
    assert large - small == 3 * 3 * weights
    by_time = disk_needed_bytes(shape, settings_of(training={"save_total_limit": 5}))
    assert large - by_time == 3 * weights  # no best one is kept beside the newest
    halved = disk_needed_bytes(shape, settings_of(training={**SMALLEST, "save_total_limit": 2, "save_steps": 10}))
    assert halved < 5.1 * weights / 2 + 2**27
    adapters = disk_needed_bytes(shape, settings_of(training={"lora_rank": 16, "save_total_limit": 2}))
    assert weights < adapters < 1.5 * weights


# --- the command -----------------------------------------------------------------------------------------------------


def model_folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_the_command_says_that_a_small_model_fits_from_its_config_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", {"model_type": "llama", **SMALL})
    asked = ["plan", "--model", folder, "--device", "cpu", "--set", "data.max_length=64"]
    said = CliRunner().invoke(cli, asked)
    assert said.exit_code == 0, said.stderr
    assert said.stdout.startswith("fits: ")
    assert "activations" in said.stdout
    assert "disk: up to" in said.stdout
    plan = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)
    assert plan["fit"]["fits"] is True
    assert plan["memory"]["peak_bytes"] == plan["fit"]["predicted_bytes"]


def test_the_command_names_a_model_it_does_not_know(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", {"model_type": "no-such-model"})
    said = CliRunner().invoke(cli, ["plan", "--model", folder, "--device", "cpu"])
    assert (said.exit_code, "`no-such-model`" in said.stderr) == (3, True), said.stderr
    assert CliRunner().invoke(cli, ["plan", "--device", "cpu"]).exit_code == 2
