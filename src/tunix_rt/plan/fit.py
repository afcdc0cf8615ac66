"""From a prediction to a verdict: does it fit this device, what to change if not, how long, how much disk."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tunix_rt.config import RunConfig
from tunix_rt.errors import DoesNotFitError
from tunix_rt.plan.memory import DTYPE_BYTES, MemoryPlan, predict
from tunix_rt.plan.shape import ModelShape

GIB = 2**30
SAFETY_SHARE = 0.15
"""Asked for on top of the prediction: its largest shortfall in benchmarks/results/memory_cpu.json, rounded up."""
SHORTEST_ADVISED_ROW = 128
"""Rows are not advised to be shorter than this: most traces would no longer fit into one."""


class Device(Protocol):
    """What of a chosen device matters here (the doctor's DeviceChoice has it)."""

    @property
    def device(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The verdict. `margin_bytes` is what would stay free after the prediction and its safety share; below 0: refused."""

    fits: bool
    predicted_bytes: int
    safety_bytes: int
    available_bytes: int
    margin_bytes: int
    advice: list[str]


def judge(plan: MemoryPlan, choice: Device, shape: ModelShape | None = None, config: RunConfig | None = None) -> Fit:
    """Hold the prediction against what is free. With `shape` and `config`, a run that does not fit comes with advice."""
    safety = math.ceil(plan.peak_bytes * SAFETY_SHARE)
    margin = choice.free_bytes - plan.peak_bytes - safety
    advice = list(_advice(plan, choice, shape, config)) if margin < 0 and shape and config else []
    return Fit(
        fits=margin >= 0,
        predicted_bytes=plan.peak_bytes,
        safety_bytes=safety,
        available_bytes=choice.free_bytes,
        margin_bytes=margin,
        advice=advice,
    )


def refuse_if_too_big(plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig) -> None:
    """Raise DoesNotFitError, with the parts and what to change, unless the run fits."""
    fit = judge(plan, choice, shape, config)
    if fit.fits:
        return
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.peak.parts.items() if size >= GIB / 200)
    raise DoesNotFitError(
        f"does not fit: {fit.predicted_bytes / GIB:.2f} GiB predicted + {fit.safety_bytes / GIB:.2f} GiB margin, "
        f"{fit.available_bytes / GIB:.2f} GiB free on {choice.device}\n"
        f"  in GiB at the peak ({plan.peak_phase}): {parts}",
        fix="\n       ".join(fit.advice),
    )


# --- what to change --------------------------------------------------------------------------------------------------


def _advice(plan: MemoryPlan, choice: Device, shape: ModelShape | None, config: RunConfig | None) -> Iterator[str]:
    """Lines of `--set`, each lowering the prediction further than the one before, until it fits."""
    if shape is None or config is None:
        return
    settings: dict[str, object] = {}
    best = plan.peak_bytes
    for change in _changes(config):
        tried = predict(shape, _with(config, settings | change), device=plan.device)
        if tried.peak_bytes >= best:
            continue
        settings, best = settings | change, tried.peak_bytes
        fits = judge(tried, choice).fits
        line = " ".join(f"--set {name}={_yaml(value)}" for name, value in settings.items())
        yield f"{line}  ({best / GIB:.2f} GiB{', fits' if fits else ', not enough alone'})"
        if fits:
            return
    state = 4 * shape.parameters * DTYPE_BYTES[config.training.dtype]
    yield (
        f"use a smaller model or a device with more memory: weights, gradients and two moments of "
        f"{shape.parameters:,} parameters alone are {state / GIB:.2f} GiB"
    )


def _changes(config: RunConfig) -> Iterator[dict[str, object]]:
    """Settings that lower memory, those that change the result least first."""
    training, evaluation = config.training, config.evaluation
    if training.dtype == "float64":
        yield {"training.dtype": "float32"}
    if evaluation.per_device_eval_batch_size > 1:
        yield {"evaluation.per_device_eval_batch_size": 1}
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    while batch > 1 and batch % 2 == 0:  # the step keeps its rows: half as many at a time, twice as often
        batch, accumulation = batch // 2, accumulation * 2
        yield {"training.per_device_train_batch_size": batch, "training.gradient_accumulation_steps": accumulation}
    if batch > 1:
        yield {"training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": batch * accumulation}
    if not training.gradient_checkpointing:
        yield {"training.gradient_checkpointing": True}
    length = config.data.max_length
    while length // 2 >= SHORTEST_ADVISED_ROW:
        length //= 2
        yield {"data.max_length": length}


def _with(config: RunConfig, settings: dict[str, object]) -> RunConfig:
    plain = config.model_dump()
    for name, value in settings.items():
        section, key = name.split(".")
        plain[section][key] = value
    return RunConfig.model_validate(plain)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- time and disk ---------------------------------------------------------------------------------------------------

RATE_SECONDS = 0.08
"""How long the matrix product that measures this CPU is repeated."""
PRODUCT_SIZE = 512
"""Its side: large enough to run at full rate, small enough to repeat."""
EFFICIENCY = (0.2, 0.65)
"""Share of that rate which the products of a step reach: with all cores busy elsewhere, and alone (2 cores;
`rate_share` in benchmarks/results/memory_cpu.json)."""
UPDATE_SECONDS = (2e-9, 1e-8)
"""Clipping and AdamW, per parameter: memory traffic that no batch makes smaller (the `1x8` cases there)."""
LAYER_CALL_SECONDS = (0.0004, 0.002)
"""One layer's forward pass over single tokens, which is calls and little arithmetic (`layer_call_seconds` there)."""
ANSWER_SHARE = (0.3, 1.0)
"""Share of `max_new_tokens` that answers use: short ones end early, an untrained model goes on to the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A range, not a promise: the machine's rate was measured for a moment, the share of it that is reached varies."""

    seconds_low: float
    seconds_high: float


def estimate_time(
    shape: ModelShape,
    config: RunConfig,
    *,
    tokens_per_step: int,
    steps: int,
    eval_items: int = 0,
    flops_per_second: float | None = None,
) -> TimeEstimate:
    """How long training and both evaluations take on this CPU. Times a matrix product unless given its rate."""
    rate = (flops_per_second or measure_rate()) * 4 / max(4, DTYPE_BYTES[config.training.dtype])
    step_flops = tokens_per_step * training_flops_per_token(shape, config)
    calls = 3 * config.training.gradient_accumulation_steps * shape.layers  # forward, and backward at twice its price
    batches = math.ceil(eval_items / config.evaluation.per_device_eval_batch_size) if config.evaluation.enabled else 0
    answer_calls = 2 * batches * config.evaluation.max_new_tokens * shape.layers  # before and after training
    answer_flops = 2 * eval_items * config.evaluation.max_new_tokens * 2 * shape.parameters if batches else 0

    def seconds(efficiency: float, update: float, call: float, share: float) -> float:
        training = steps * (step_flops / (rate * efficiency) + shape.parameters * update + calls * call)
        return training + share * (answer_calls * call + answer_flops / (rate * efficiency))

    return TimeEstimate(
        seconds_low=seconds(EFFICIENCY[1], UPDATE_SECONDS[0], LAYER_CALL_SECONDS[0], ANSWER_SHARE[0]),
        seconds_high=seconds(EFFICIENCY[0], UPDATE_SECONDS[1], LAYER_CALL_SECONDS[1], ANSWER_SHARE[1]),
    )


def training_flops_per_token(shape: ModelShape, config: RunConfig) -> float:
    """Forward and backward: six operations per matrix parameter (the head counted once), plus causal attention."""
    length = min(config.data.max_length, shape.max_positions)
    matrices = shape.layers * shape.layer_matrix_parameters + shape.embedding_parameters
    attention = shape.layers * shape.query_size * length  # 2 products x 2 operations x half of the square
    recomputed = 4 / 3 if config.training.gradient_checkpointing else 1.0
    return recomputed * (6 * matrices + 6 * attention)


def measure_rate() -> float:
    """Float32 operations per second of this CPU: the fastest of the matrix products that fit into `RATE_SECONDS`.

    The fastest, because a product that waits for a core someone else holds takes ten times as long.
    """
    import numpy as np

    left = np.ones((PRODUCT_SIZE, PRODUCT_SIZE), dtype=np.float32)
    product = left @ left  # starts the threads
    fastest, until = math.inf, time.perf_counter() + RATE_SECONDS
    while math.isinf(fastest) or time.perf_counter() < until:
        started = time.perf_counter()
        np.matmul(left, left, out=product)
        fastest = min(fastest, time.perf_counter() - started)
    return 2.0 * PRODUCT_SIZE**3 / fastest


EVAL_BYTES = 64 * 2**20
"""Room for answers, metrics and logs: thousands of answers of a few kilobytes."""


def disk_needed_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Highest use of disk: the checkpoints kept, one more being staged, the final model, answers and logs."""
    weights = shape.parameters * DTYPE_BYTES[config.training.dtype]
    checkpoint = 3 * weights
    return (config.training.save_total_limit + 1) * checkpoint + weights + EVAL_BYTES
