"""From a prediction to a verdict: does it fit this device, what to change if not, how long, how much disk."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tunix_rt.config import RunConfig
from tunix_rt.errors import DoesNotFitError
from tunix_rt.plan.memory import DTYPE_BYTES, MemoryPlan, longest_row, predict
from tunix_rt.plan.shape import ModelShape

GIB = 2**30
SAFETY_SHARE = 0.20
"""Asked for on top of the prediction. A choice: above the largest shortfall in benchmarks/results/memory_cpu.json (a test
holds it there), with room for what that file does not cover."""
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
    margin = choice.free_bytes - plan.context_bytes - plan.peak_bytes - safety
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


def _advice(plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig) -> Iterator[str]:
    """As few changes as fit, as a line of `--set`; where none do, how far they lead and what is left to do."""

    def peak_with(changes: dict[str, dict[str, object]]) -> MemoryPlan:
        settings = {name: value for change in changes.values() for name, value in change.items()}
        return predict(shape, _with(config, settings), device=plan.device)

    changes: dict[str, dict[str, object]] = {}
    tried = plan
    for kind, change in _changes(config):
        changes[kind] = change
        tried = peak_with(changes)
        if judge(tried, choice).fits:
            break
    fits, reached = judge(tried, choice).fits, tried.peak_bytes
    for kind in list(changes):  # leave out what turned out not to be needed
        fewer = {name: change for name, change in changes.items() if name != kind}
        without = peak_with(fewer)
        if judge(without, choice).fits if fits else without.peak_bytes <= reached:
            changes, reached = fewer, without.peak_bytes
    if changes:
        line = " ".join(f"--set {name}={_yaml(value)}" for change in changes.values() for name, value in change.items())
        yield f"{line}  ({reached / GIB:.2f} GiB: {'fits' if fits else 'still not enough'})"
    if not fits:
        state = 4 * shape.parameters * DTYPE_BYTES[config.training.dtype]
        yield (
            f"use a smaller model or a device with more memory: weights, gradients and two moments of "
            f"{shape.parameters:,} parameters alone are {state / GIB:.2f} GiB"
        )


def _changes(config: RunConfig) -> Iterator[tuple[str, dict[str, object]]]:
    """Settings that lower memory, as (kind, settings), those that change the result least first."""
    training, evaluation = config.training, config.evaluation
    questions = evaluation.per_device_eval_batch_size
    while questions > 1:
        questions //= 2
        yield "questions", {"evaluation.per_device_eval_batch_size": questions}
    for rows in range(training.per_device_train_batch_size - 1, 0, -1):
        times, rest = divmod(training.per_device_train_batch_size, rows)
        if rest == 0:  # the step keeps its rows: fewer at a time, more often
            accumulation = training.gradient_accumulation_steps * times
            yield (
                "rows",
                {
                    "training.per_device_train_batch_size": rows,
                    "training.gradient_accumulation_steps": accumulation,
                },
            )
    if not training.gradient_checkpointing:
        yield "checkpointing", {"training.gradient_checkpointing": True}
    if training.dtype == "float64":
        yield "dtype", {"training.dtype": "float32"}
    length = config.data.max_length
    while length // 2 >= SHORTEST_ADVISED_ROW:
        length //= 2
        yield "length", {"data.max_length": length}


def _with(config: RunConfig, settings: dict[str, object]) -> RunConfig:
    plain = config.model_dump()
    for name, value in settings.items():
        section, key = name.split(".")
        plain[section][key] = value
    return RunConfig.model_validate(plain)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- time and disk; pairs are the fast end and the slow end of a range ------------------------------------------------

FEWEST_PRODUCTS = 8
"""The product that measures this CPU is repeated at least so often: on a busy computer the first ones wait for a core."""
RATE_SECONDS = 0.08
"""How long the matrix product that measures this CPU is repeated."""
PRODUCT_SIZE = 256
"""Its side. Larger products come nearer to the full rate, but on a busy machine wait for a core more often."""
EFFICIENCY = (0.75, 0.25)
"""Share of that rate which the products of a step reach, as a range. A choice around `rate_share` of the larger cases in
benchmarks/results/memory_cpu.json (2 cores)."""
UPDATE_SECONDS = (2e-9, 1e-8)
"""Clipping and AdamW, per parameter: memory traffic that no batch makes smaller. A choice around the `1x8` cases there."""
LAYER_CALL_SECONDS = (0.0009, 0.003)
"""One layer's forward pass over single tokens, which is calls and little arithmetic: on idle and on busy cores. A choice."""
CACHE_BYTES_PER_SECOND = (1.2e10, 3e9)
"""Rate at which a layer's keys and values are copied to grow by a token and repeated per head. A choice."""
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
    asked = min(eval_items, config.evaluation.per_device_eval_batch_size) if config.evaluation.enabled else 0
    new_tokens = config.evaluation.max_new_tokens
    answer_calls = 2 * math.ceil(eval_items / asked) * new_tokens * shape.layers if asked else 0  # before and after
    cache = asked * new_tokens * 4 * (shape.kv_size + shape.query_size) * DTYPE_BYTES[config.training.dtype]
    products = 2 * asked * shape.parameters / shape.layers

    def seconds(end: int) -> float:
        flops, call = rate * EFFICIENCY[end], LAYER_CALL_SECONDS[end]
        step = step_flops / flops + shape.parameters * UPDATE_SECONDS[end] + calls * call
        answer = call + cache / CACHE_BYTES_PER_SECOND[end] + products / flops
        return steps * step + ANSWER_SHARE[end] * answer_calls * answer

    return TimeEstimate(seconds_low=seconds(0), seconds_high=seconds(1))


def training_flops_per_token(shape: ModelShape, config: RunConfig) -> float:
    """Forward and backward: six operations per matrix parameter (the head counted once), plus causal attention."""
    length = longest_row(shape, config, config.data.max_length)
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
    fastest, products, until = math.inf, 0, time.perf_counter() + RATE_SECONDS
    while products < FEWEST_PRODUCTS or time.perf_counter() < until:
        started, products = time.perf_counter(), products + 1
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
