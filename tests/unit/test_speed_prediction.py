"""The predicted time of a step: beside every step that was measured, and in the right order everywhere else."""

import json
import statistics
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from benchmarks import solver_cases
from tests.conftest import ROOT
from tests.unit.test_plan import changed, settings_of
from tunix_rt.config.load import load_config, with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.speed import KNOWN_RANGE, UNKNOWN_RANGE, Rates, StepTime, rates_for, rates_of, step_time
from tunix_rt.plan.timing import run_time

RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "benchmarks" / "configs"
H200 = rates_of(989, 66.9, 4800)
H200_NAME = "NVIDIA H200"
HOPPER = (9, 0)
BAND = 0.12
"""No step that the constants were fitted to is further from its prediction, as a share of what was measured, but for those of
`BEFORE`."""


@cache
def shape_named(preset: str) -> ModelShape:
    return shape_of(resolve_model(preset, weights="random").config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step on an H200: its settings and its median seconds."""

    name: str
    preset: str
    config: RunConfig
    seconds: float
    example_tokens: int | None = None
    layers: str | None = None
    """None: what the plan says of them."""
    target_share: float = 1.0


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def asked(file: str, rows: int, length: int) -> RunConfig:
    overrides = [f"training.per_device_train_batch_size={rows}", f"data.max_length={length}"]
    return load_config(CONFIGS / file, overrides=overrides)


def contended() -> list[Measured]:
    """Ours of the comparisons, without their first three steps."""
    found = []
    for file in ("speed_compare", "speed_models", "speed_models_unrecorded", "speed_least_memory"):
        raw = read(f"{file}.json")
        for case in raw["cases"]:
            ours = case["contenders"]["ours"]
            job = ours["job"]
            steps = [seconds for one in ours["rounds"] for seconds in one["step_seconds"][3:]]
            found.append(
                Measured(
                    name=f"{file} {case['preset']}",
                    preset=case["preset"],
                    config=asked(raw["settings"]["config"], job["rows"], job["length"]),
                    seconds=statistics.median(steps),
                    example_tokens=sum(job["tokens"]) // sum(job["examples"]),
                    layers="compiled" if file == "speed_models_unrecorded" else None,
                )
            )
    return found


def programs() -> list[Measured]:
    """`tunix-rt train`, from its metrics: the PyTorch engine, an epoch of it, and twice the JAX engine."""
    whole = asked("gemma-1-2b-h200.yaml", 8, 2048)
    program = statistics.median(step["seconds"] for step in read("speed_program.json")["metrics"][5:])
    epoch = read("speed_epoch.json")["runs"]["ours"]
    warm = epoch["step_seconds"][epoch["warmup_steps"] :]
    jax = changed(whole, "training", backend="jax", gradient_checkpointing=0.5)
    log = (RESULTS / "jax_program_h200.txt").read_text(encoding="utf-8").splitlines()
    rates = [float(line.split("tokens/s")[0].split()[-1].replace(",", "")) for line in log if line.startswith("step ")]
    local = load_config(RESULTS / "jax_local_gpu_h200" / "config.yaml")
    of_local = [
        json.loads(line) for line in (RESULTS / "jax_local_gpu_h200" / "metrics.jsonl").read_text().splitlines()
    ]
    share = sum(step["target_tokens"] for step in of_local) / (len(of_local) * 4 * 128)
    named: dict[str, Any] = {"preset": "gemma-2b", "example_tokens": 163}
    kept, none = (
        statistics.median(read(f"{name}.json")["step_seconds"][3:]) for name in ("jax_speed", "jax_speed_none")
    )
    return [
        Measured(name="jax_speed", config=jax, seconds=kept, **named),
        Measured(name="jax_speed_none", config=changed(jax, "training", gradient_checkpointing=False), seconds=none, **named),
        Measured(name="speed_program", config=whole, seconds=program, **named),
        Measured(name="speed_epoch", config=whole, seconds=statistics.mean(warm[:2]), preset="gemma-2b", example_tokens=75),
        Measured(name="jax_program_h200", config=jax, seconds=16_262 / statistics.median(rates[1:]), **named),
        Measured(
            name="jax_local_gpu_h200", config=local, target_share=share,
            seconds=statistics.median(step["seconds"] for step in of_local[5:]), **{**named, "example_tokens": 92},
        ),
    ]  # fmt: skip


def of_an_earlier_engine() -> list[Measured]:
    """Layers that are not compiled were only measured before the updates became kernels; those in backward took long."""
    smallest = read("engine_memory.json")["cases"][0]
    config = load_config(RESULTS / "smollm2_gsm8k" / "config.yaml", overrides=["training.compile=false"])
    steps = [json.loads(line) for line in (RESULTS / "smollm2_gsm8k" / "metrics.jsonl").read_text().splitlines()][5:]
    return [
        Measured(
            name="engine_memory", preset=smallest["preset"], seconds=smallest["step_seconds"], example_tokens=1024,
            config=settings_of(training={**smallest["settings"], "compile": False}, data={"max_length": 1024}), layers="plain",
        ),
        Measured(
            name="smollm2_gsm8k", preset="smollm2-135m", config=config, example_tokens=150, layers="plain",
            seconds=statistics.median(step["seconds"] for step in steps),
            target_share=sum(step["target_tokens"] for step in steps) / sum(step["tokens"] for step in steps),
        ),
    ]  # fmt: skip


BEFORE = {"engine_memory": -0.75}
"""Steps of the engine as it was before its kernels, and how far below them the prediction for today's may lie."""


def of_the_solver() -> list[Measured]:
    """What the solver proposed, without its first three steps, and predicted as `plan` does. No constant was fitted to most of
    these, and hosts were slower in them."""
    written = {name: (preset, RunConfig.model_validate(settings)) for name, preset, settings, _ in solver_cases.cases()}
    auto = read("solver_auto.json")
    found = [(*written[case["name"]], one) for case in read("solver_order.json")["cases"] for one in case["proposals"]]
    found += [("gemma-2b", RunConfig.model_validate(auto["written"]), case) for case in auto["cases"]]
    return [
        Measured(
            name=f"{one['name']}, {one['line']}",
            preset=preset,
            config=with_settings(config, one["settings"]),
            seconds=statistics.median(one["step_seconds"][solver_cases.ORDER_WARM_UP :]),
            layers=one["layers"],
        )
        for preset, config, one in found
    ]


def predicted(one: Measured, rates: Rates = H200) -> StepTime:
    shape = shape_named(one.preset)
    named: dict[str, Any] = {"device": "cuda", "capability": HOPPER, "target_share": one.target_share}
    layers = one.layers or predict_run(shape, one.config, device_name=H200_NAME, **named).layers
    return step_time(shape, one.config, rates, example_tokens=one.example_tokens, layers=layers, **named)


MEASURED = [*contended(), *programs(), *of_an_earlier_engine()]
OF_THE_SOLVER = of_the_solver()


@pytest.mark.parametrize("one", MEASURED, ids=lambda one: one.name)
def test_a_measured_step_took_as_long_as_is_predicted(one: Measured) -> None:
    step = predicted(one)
    error = step.seconds / one.seconds - 1
    print(
        f"{one.name}: {1000 * one.seconds:.1f} ms measured, {1000 * step.seconds:.1f} predicted ({error:+.1%}), {step.layers}"
    )
    assert BEFORE.get(one.name, -BAND) <= error <= BAND
    if one.name not in BEFORE:
        assert step.seconds_low <= one.seconds <= step.seconds_high


@pytest.mark.parametrize("one", OF_THE_SOLVER, ids=lambda one: one.name)
def test_a_step_that_nothing_was_fitted_to_lies_within_the_range_that_is_stated(one: Measured) -> None:
    step = predicted(one)
    print(f"{one.name}: {one.seconds / step.seconds:.2f} of the prediction, {step.layers}")
    assert step.seconds_low <= one.seconds <= step.seconds_high
    assert (step.seconds_low, step.seconds_high) == tuple(share * step.seconds for share in KNOWN_RANGE)


def test_every_measured_speed_of_ours_is_among_them() -> None:
    assert len(MEASURED) == 1 + 4 + 2 + 1 + 6 + 2
    assert len(OF_THE_SOLVER) == 3 * 3 + 6
    assert [predicted(one).layers for one in MEASURED if one.preset == "gpt2"] == ["recorded", "compiled"]


def test_the_parts_of_the_profiled_step_are_near_the_measured_ones() -> None:
    """Gemma 2B, 8 x 2048, in benchmarks/results/speed_profile.txt, in milliseconds."""
    profile = (RESULTS / "speed_profile.txt").read_text(encoding="utf-8")
    ms = {row[1]: float(row[2]) for line in profile.splitlines() if len(row := [c.strip() for c in line.split("|")]) == 8
          and row[2].replace(".", "").isdigit()}  # fmt: skip
    parts = {name: 1000 * seconds for name, seconds in predicted(MEASURED[0]).parts.items()}
    assert parts["products"] == pytest.approx(ms["matrix products of the layers"], rel=0.1)
    assert parts["head"] == pytest.approx(ms["loss head: products"] + ms["loss head: everything else"], rel=0.1)
    assert parts["attention"] == pytest.approx(ms["attention"], rel=0.15)
    assert parts["update"] == pytest.approx(ms["optimizer"], rel=0.15)
    assert parts["elementwise"] == pytest.approx(
        ms["norms, activations, rotations and other element-wise work"], rel=0.15
    )


# --- the right order -------------------------------------------------------------------------------------------------

DEVICES = {"h200": H200, "rtx3060": rates_of(25.5, 12.7, 360), "unknown": rates_of(None, None, None)}


@pytest.mark.parametrize("rates", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("preset", ["gpt2", "smollm2-135m", "gemma-3-1b", "gemma-2b"])
@pytest.mark.parametrize(
    "training", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "gradient_checkpointing": True}], ids=str
)
def test_more_rows_take_longer_and_are_not_slower_by_the_token(
    preset: str, training: dict[str, Any], rates: Rates
) -> None:
    """Where the layers are launched in the same way: a step large enough is no longer replayed as a graph."""
    shape = shape_named(preset)
    steps = []
    for rows in range(1, 33):
        config = settings_of(training={**training, "per_device_train_batch_size": rows}, data={"max_length": 384})
        steps.append(step_time(shape, config, rates, device="cuda", capability=(8, 6)))
    for fewer, more in pairwise(steps):
        assert fewer.seconds <= more.seconds
        assert fewer.layers != more.layers or fewer.tokens_per_second <= more.tokens_per_second * (1 + 1e-12)


def test_a_run_of_several_devices_takes_the_rows_of_one() -> None:
    shape, config = shape_named("gemma-2b"), settings_of(training={"backend": "jax", "dtype": "bfloat16"})
    one = step_time(shape, config, rates_of(197, None, 819), device="tpu")
    eight = step_time(shape, config, rates_of(197, None, 819), device="tpu", devices=8)
    assert (eight.seconds, eight.tokens) == (one.seconds, 8 * one.tokens)


@pytest.mark.parametrize(
    "training", [{"compile": False}, {"compile": True}, {"compile": True, "gradient_accumulation_steps": 2}], ids=str
)
@pytest.mark.parametrize("name", [H200_NAME, "NVIDIA GeForce RTX 3060", None])
def test_what_becomes_of_the_layers_is_what_the_plan_says_unless_it_is_given(
    name: str | None, training: dict[str, Any]
) -> None:
    shape, config = shape_named("gpt2"), settings_of(training=training, data={"max_length": 512})
    found = step_time(shape, config, H200, device="cuda", device_name=name)
    assert found.layers == predict_run(shape, config, device="cuda", device_name=name).layers
    kinds = ("recorded", "compiled", "plain")
    steps = [step_time(shape, config, H200, device="cuda", device_name=name, layers=layers) for layers in kinds]
    assert tuple(step.layers for step in steps) == kinds and found in steps
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)


# --- rates ----------------------------------------------------------------------------------------------------------


def chosen(device: str, kind: str, memory_gib: float) -> DeviceChoice:
    size = int(memory_gib * 2**30)
    return DeviceChoice(device=device, kind=kind, count=1, memory_bytes=size, free_bytes=size, reason="")


def test_a_device_has_the_published_rates_of_its_name_or_assumed_ones() -> None:
    assert rates_for(chosen("cuda", "NVIDIA H200", 139.8)) == H200 and H200.known
    assert rates_for(chosen("cuda", "a card of next year", 48)) == rates_of(None, None, None)
    assert not rates_for(chosen("cuda", "a card of next year", 48)).known
    assert rates_for(chosen("cpu", "NVIDIA H200", 139.8)).flops_per_second < 1e12
    turing = rates_for(chosen("cuda", "Tesla T4", 14.74))
    assert not turing.known and turing.fp32_flops_per_second == 8.1e12 < turing.flops_per_second
    assert rates_of(197, None, 819).known, "a TPU has no published rate of float32"


def test_the_range_is_wider_where_the_rates_are_assumed() -> None:
    shape, config = shape_named("gemma-2b"), settings_of()
    known, guessed = (step_time(shape, config, rates, device="cuda") for rates in (H200, rates_of(None, None, None)))
    assert known.seconds_high / known.seconds == pytest.approx(KNOWN_RANGE[1])
    assert guessed.seconds_high / guessed.seconds == pytest.approx(UNKNOWN_RANGE[1])
    assert known.seconds_low < known.seconds < known.seconds_high


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_has_the_steps_of_its_rows_or_those_it_was_asked_for() -> None:
    shape, config = (
        shape_named("gemma-2b"),
        settings_of(training={"num_train_epochs": 2.0, "per_device_train_batch_size": 8}),
    )
    step = step_time(shape, config, H200, device="cuda")
    run = run_time(step, config, rows=599, rows_per_step=8)
    assert run is not None
    assert (run.steps, run.tokens) == (150, 150 * step.tokens)
    assert run.hours == pytest.approx(150 * step.seconds / 3600)
    assert run.hours_low < run.hours < run.hours_high
    assert run_time(step, config, rows_per_step=8) is None, "nothing says how many steps there are"
    asked_for = run_time(step, changed(config, "training", max_steps=7), rows_per_step=8)
    assert asked_for is not None and asked_for.steps == 7
    small = run_time(step, config, rows=2, rows_per_step=8)
    assert small is not None and (small.steps, small.tokens) == (2, 2 * step.tokens // 4), "all the rows there are"
