"""From a prediction to a verdict: does it fit this device, what to change if not, how long, how much disk."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tunix_rt.config import RunConfig
from tunix_rt.errors import DoesNotFitError
from tunix_rt.plan.activations import DTYPE_BYTES
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.jax_limits import limits_met
from tunix_rt.plan.memory import MemoryPlan, Phase, longest_row
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.recipe import recipe_of
from tunix_rt.plan.shape import ModelShape

GIB = 2**30
SAFETY_SHARE = 0.20
"""Asked for on top of the prediction on a CPU. A choice: above the largest shortfall in benchmarks/results/memory_cpu.json (a
test holds it there), with room for what that file does not cover."""
CUDA_SAFETY_SHARE = 0.10
"""The same on a GPU, where the allocator gives out what was counted. Covers what it holds and cannot give out because it lies
in pieces: 8.5 % of what it had given out in benchmarks/results/engine_memory.json."""
SHORTEST_ADVISED_ROW = 128
"""Rows are not advised to be shorter than this: most traces would no longer fit into one."""
ADVISED_RANK = 16
"""Of adapters, where nothing else fits."""
BFLOAT16_CAPABILITY = (8, 0)
"""CUDA compute capability from which on a GPU computes in bfloat16."""

Settings = dict[str, object]


class Device(Protocol):
    """What of a chosen device matters here (the doctor's DeviceChoice has it)."""

    @property
    def device(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def capability(self) -> tuple[int, int] | None: ...


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
    """Hold the prediction against what is free. With `shape` and `config`, a run that does not fit comes with advice.

    Where there is no room for a copy of the state, checkpoints are written without one: the verdict is then over the rest.
    """
    room = choice.free_bytes - plan.context_bytes
    share = SAFETY_SHARE if plan.device == "cpu" else CUDA_SAFETY_SHARE
    predicted = plan.peak_bytes if plan.peak_bytes + math.ceil(plan.peak_bytes * share) <= room else plan.least_bytes
    safety = math.ceil(predicted * share)
    margin = room - predicted - safety
    advice = list(_advice(plan, choice, shape, config)) if margin < 0 and shape and config else []
    return Fit(
        fits=margin >= 0,
        predicted_bytes=predicted,
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
    context = f" + {plan.context_bytes / GIB:.2f} GiB for CUDA itself" if plan.context_bytes else ""
    raise DoesNotFitError(
        f"does not fit: {fit.predicted_bytes / GIB:.2f} GiB predicted + {fit.safety_bytes / GIB:.2f} GiB margin{context}, "
        f"{fit.available_bytes / GIB:.2f} GiB free on {choice.device}\n"
        f"  {_parts(plan.least)}",
        fix=_lines(fit.advice),
    )


def left_to_the_compiler(plan: MemoryPlan, choice: Device, config: RunConfig) -> str:
    """What to say where a run of the JAX engine is not judged to fit and yet goes on: weights and optimizer have room, and
    only the bound over everything else does not. XLA may do with less. Empty where the verdict stands."""
    if config.training.backend != "jax" or judge(plan, choice).fits:
        return ""
    step = next(phase for phase in plan.phases if phase.name == "step")
    if step.parts["weights"] + step.parts["optimizer"] + plan.context_bytes > choice.free_bytes:
        return ""
    return (
        f"It may not fit: up to {plan.least_bytes / GIB:.2f} GiB predicted, {choice.free_bytes / GIB:.2f} GiB free on "
        f"{choice.device}; that is an upper bound, and the compiler decides before a weight is loaded"
    )


def explain_out_of_memory(
    plan: MemoryPlan, measured_bytes: int, choice: Device, shape: ModelShape, config: RunConfig
) -> tuple[str, str]:
    """What to say, and what to advise, when memory ran out although `plan` was judged to fit.

    `measured_bytes` is the peak up to then, as the engine measures it. More could not be had, whatever was thought to be
    free, so the advice is what would fit into that; or into less than was predicted, where even that was not enough.
    """
    usable = min(measured_bytes, plan.least_bytes)
    known = _Known(device=choice.device, free_bytes=usable + plan.context_bytes, capability=choice.capability)
    problem = (
        f"out of memory: {measured_bytes / GIB:.2f} GiB were taken when no more could be had; "
        f"{plan.peak_bytes / GIB:.2f} GiB had been predicted, and {choice.free_bytes / GIB:.2f} GiB were free on "
        f"{choice.device} before\n  {_parts(plan.least)}"
    )
    return problem, _lines(list(_advice(plan, known, shape, config)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    device: str
    free_bytes: int
    capability: tuple[int, int] | None


def _parts(phase: Phase) -> str:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in phase.parts.items() if size >= GIB / 200)
    return f"in GiB at the peak ({phase.name}): {parts}"


def _lines(advice: list[str]) -> str:
    return "\n       ".join(advice)


# --- what to change --------------------------------------------------------------------------------------------------


def _advice(plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig) -> Iterator[str]:
    """As few changes as fit, as a line of `--set`; where none do, how far they lead and what is left to do."""

    def planned(changes: dict[str, Settings]) -> MemoryPlan:
        settings = {name: value for change in changes.values() for name, value in change.items()}
        return _planned_again(plan, choice, shape, config, settings)

    changes: dict[str, Settings] = {}
    tried = plan
    for rung in _changes(config, choice):
        if _refused(config, rung):
            continue
        changes |= rung
        tried = planned(changes)
        if judge(tried, choice).fits:
            break
    fits, reached = judge(tried, choice).fits, tried
    for kind in list(changes):  # leave out what turned out not to be needed
        fewer = {name: change for name, change in changes.items() if name != kind}
        without = planned(fewer)
        if judge(without, choice).fits if fits else without.least_bytes <= reached.least_bytes:
            changes, reached = fewer, without
    settings = {name: value for change in changes.values() for name, value in change.items()}
    if settings:
        line = " ".join(f"--set {name}={_yaml(value)}" for name, value in settings.items())
        verdict = "; ".join(["fits" if fits else "still not enough", *_costs(settings)])
        yield f"{line}  ({reached.least_bytes / GIB:.2f} GiB: {verdict})"
    if not fits:
        state = sum(reached.least.parts.get(name, 0) for name in ("weights", "optimizer", "gradients"))
        yield (
            f"use a smaller model or a device with more memory: weights, gradients and optimizer states of "
            f"{shape.parameters:,} parameters alone are {state / GIB:.2f} GiB"
        )
        yield from _adapters(plan, choice, shape, config)


def _refused(config: RunConfig, rung: dict[str, Settings]) -> bool:
    """Whether the engine does not honour a setting of `rung`."""
    asked = {name: value for change in rung.values() for name, value in change.items()}
    return config.training.backend == "jax" and any(limits_met(_with(config, asked).training))


def _planned_again(
    plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig, settings: Settings
) -> MemoryPlan:
    """The prediction for `config` with `settings`, for the rows that `plan` was made for: they may be known to be shorter
    than `data.max_length`, and of a run that began on another number of devices there are as many as there were then."""
    changed = _with(config, settings)
    before, now = (one.training.per_device_train_batch_size for one in (config, changed))
    return predict_run(
        shape,
        changed,
        device=plan.device,
        devices=plan.devices,
        rows=-(-plan.rows * now // before),
        row_tokens=min(plan.row_tokens, changed.data.max_length),
        target_share=plan.target_share,
        capability=choice.capability,
    )


def _changes(config: RunConfig, choice: Device) -> Iterator[dict[str, Settings]]:
    """Settings that lower memory, as {kind: settings}, those that change the result least first.

    A kind that comes again replaces what it said before; without settings it takes them back.
    """
    training, evaluation = config.training, config.evaluation
    rows, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    questions = evaluation.per_device_eval_batch_size or 1  # unset, there are never more than training leaves room for
    while questions > 1:
        questions //= 2
        yield {"questions": {"evaluation.per_device_eval_batch_size": questions}}
    if not training.optim_in_backward:
        for fewer in _divisors_below(rows):  # the step keeps its rows: fewer at a time, more often
            yield {"rows": _rows(fewer, accumulation * rows // fewer)}
    kept = recipe_of(training).kept_share
    for share, value in ((0.5, 0.5), (0.0, True)):
        if kept > share:
            yield {"recomputation": {"training.gradient_checkpointing": value}}
    if training.dtype == "float64":
        yield {"precision": {"training.dtype": "float32"}}
    narrow = _narrow_type(choice)
    if narrow and training.dtype in ("float32", "float64"):
        yield {"precision": {"training.dtype": narrow}}
    if training.lora_rank is None:
        yield from _changes_of_state(config, narrow)
    length = config.data.max_length
    while length // 2 >= SHORTEST_ADVISED_ROW:
        length //= 2
        yield {"length": {"data.max_length": length}}


def _changes_of_state(config: RunConfig, narrow: str | None) -> Iterator[dict[str, Settings]]:
    """Smaller weights, gradients and optimizer states, where every parameter is trained."""
    training = config.training
    rows, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if training.optim == "adamw":
        yield {"optimizer": {"training.optim": "adamw_8bit"}}
    if narrow == "bfloat16" and training.master_dtype != "bfloat16":
        yield {"precision": {"training.dtype": "bfloat16", "training.master_dtype": "bfloat16"}}
    # Gradients of several micro-batches have to be kept, and a float16 step may have to be computed again.
    updates: Settings = {"training.optim_in_backward": True}
    at_once: dict[str, Settings] = {"updates": updates, "rows": {}}
    if narrow == "float16":
        at_once["precision"] = {}
    if training.dtype == "float16":
        updates["training.dtype"] = "float32"
    if not training.optim_in_backward and accumulation == 1:
        yield at_once
    if training.optim != "adafactor":
        yield {"optimizer": {"training.optim": "adafactor"}}
    for fewer in _divisors_below(rows + 1 if accumulation > 1 else rows, of=rows):
        smaller = updates | _rows(fewer, 1)
        yield {**at_once, "updates": smaller}


def _divisors_below(limit: int, of: int | None = None) -> Iterator[int]:
    """Divisors of `of` (of `limit` itself unless said) below `limit`, falling."""
    return (rows for rows in range(limit - 1, 0, -1) if (of or limit) % rows == 0)


def _rows(rows: int, accumulation: int) -> Settings:
    return {"training.per_device_train_batch_size": rows, "training.gradient_accumulation_steps": accumulation}


def _narrow_type(choice: Device) -> str | None:
    """The 16-bit type that a device computes in faster than in float32; None for a CPU, which seldom has one."""
    if choice.device != "cuda":
        return None
    known = choice.capability
    return "bfloat16" if known is not None and known >= BFLOAT16_CAPABILITY else "float16"


_COSTS = {
    "training.dtype=bfloat16": "products in bfloat16",
    "training.dtype=float16": "products in float16",
    "training.master_dtype=bfloat16": "weights kept in bfloat16",
    "training.optim=adamw_8bit": "AdamW with moments of 8 bits",
    "training.optim=adafactor": "Adafactor instead of AdamW",
    "training.optim_in_backward=true": "gradients clipped tensor by tensor",
}
"""What a setting changes in the result, beyond the order of additions."""


def _costs(settings: Settings) -> Iterator[str]:
    for name, value in settings.items():
        if cost := _COSTS.get(f"{name}={_yaml(value)}"):
            yield cost
    if settings.get("training.gradient_accumulation_steps") == 1:
        yield "fewer rows in a step"
    if "data.max_length" in settings:
        yield "longer traces are left out"


def _adapters(plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig) -> Iterator[str]:
    """The last remedy, in words: it is another kind of training and never mixed into the other advice."""
    if config.training.lora_rank is not None or config.training.backend == "jax":
        return
    changes: dict[str, Settings] = {"adapters": {"training.lora_rank": ADVISED_RANK}}
    changes["whole"] = {"training.master_dtype": None, "training.optim_in_backward": False}
    for rung in _changes(_with(config, changes["adapters"] | changes["whole"]), choice):
        if "length" not in rung:
            changes |= rung
    settings = {name: value for change in changes.values() for name, value in change.items()}
    least = _planned_again(plan, choice, shape, config, settings)
    if judge(least, choice).fits:
        yield (
            f"or, only then, training.lora_rank={ADVISED_RANK}: trains adapters instead of every parameter "
            f"(from {least.least_bytes / GIB:.2f} GiB)"
        )


def _with(config: RunConfig, settings: Settings) -> RunConfig:
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
    eval_rows: int = 32,
    flops_per_second: float | None = None,
) -> TimeEstimate:
    """How long training and both evaluations take on this CPU. Times a matrix product unless given its rate."""
    rate = (flops_per_second or measure_rate()) * 4 / max(4, DTYPE_BYTES[config.training.dtype])
    step_flops = tokens_per_step * training_flops_per_token(shape, config)
    calls = 3 * config.training.gradient_accumulation_steps * shape.layers  # forward, and backward at twice its price
    asked = min(eval_items, eval_rows) if config.evaluation.enabled else 0
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
    """Forward and backward: six operations per matrix parameter (the head counted once), plus causal attention.

    Frozen matrices need four, and a layer that is computed again its forward pass twice.
    """
    length = longest_row(shape, config, config.data.max_length)
    recipe = recipe_of(config.training)
    each = 6 if recipe.frozen is None else 4
    layers = shape.layers * shape.layer_matrix_parameters
    attention = shape.layers * shape.query_size * length  # 2 products x 2 operations x half of the square
    recomputed = 1 - recipe.kept_layers(shape.layers) / shape.layers
    return each * (layers + shape.embedding_parameters) + 6 * attention + recomputed * 2 * (layers + attention)


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
    """Highest use of disk: the newest checkpoints, the best, one more being staged, the final model, answers and logs."""
    training = config.training
    run = footprint_of(shape, training, "cpu")
    # Where nothing is saved on the way: that of an interruption, and that of the end.
    checkpoints = training.save_total_limit + 2 if training.save_steps or training.eval_steps else 2
    return checkpoints * run.checkpoint + run.final_model + EVAL_BYTES
