"""FLOPs of a step, the length of a run in steps and hours, the time on this CPU, and the disk that a run needs."""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.activations import DTYPE_BYTES
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.memory import longest_row
from tunix_rt.plan.precision import Recipe, recipe_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.speed import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Of forward and backward pass. `model` is what the method needs; `executed` adds padding and recomputation."""

    layers: float
    head: float
    attention: float
    executed_layers: float
    executed_attention: float

    @property
    def model(self) -> float:
        return self.layers + self.head + self.attention

    @property
    def executed(self) -> float:
        return self.executed_layers + self.head + self.executed_attention


def step_flops(shape: ModelShape, recipe: Recipe, *, lengths: Sequence[int], positions: int, targets: int) -> StepFlops:
    """A step on examples of these `lengths`, in rows with `positions` tokens in all and `targets` targets of the loss.

    Six operations per matrix parameter and token, four if it is frozen: a matmul forward, and one for each gradient. Attention is
    causal and stays within an example; sliding windows (Gemma 2 and 3) are ignored, so longer examples count too much. LoRA
    adapters are not counted, nor what attention recomputes in its own backward pass.
    """
    each = 6 if recipe.frozen is None else 4
    matrices = shape.layers * shape.layer_matrix_parameters
    # 2 matmuls x 2 operations x half of the square, with its diagonal
    attended = shape.layers * shape.query_size * 2 * sum(length * (length + 1) for length in lengths)
    again = shape.layers - recipe.kept_layers(shape.layers)
    # Recomputation ends with the last value that the backward pass needs: without a norm after it, the last matmul of the layer
    # is skipped.
    last = 0 if shape.post_norms else shape.hidden * shape.ffn
    return StepFlops(
        layers=each * matrices * sum(lengths),
        head=each * shape.embedding_parameters * targets,
        attention=3 * attended,
        executed_layers=(each * matrices + 2 * again * (shape.layer_matrix_parameters - last)) * positions,
        executed_attention=(3 + again / shape.layers) * attended,
    )


# --- a run, from the time of its steps --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """A whole training, in hours with a range. Evaluation, saving and compiling are not included."""

    steps: int
    tokens: int
    tokens_per_second: float
    hours: float
    hours_low: float
    hours_high: float


def run_time(step: StepTime, config: RunConfig, *, rows: int | None = None, rows_per_step: int) -> RunTime | None:
    """Steps, tokens and hours of a run of such steps over a dataset of `rows` rows; None if neither the rows nor
    `training.max_steps` is known.

    A step has `rows_per_step` rows, or all there are. The last step of an epoch may have fewer, and counts as a whole one.
    """
    steps = steps_of_run(config, rows=rows, rows_per_step=rows_per_step)
    if steps is None:
        return None
    in_step = rows_per_step if rows is None else max(1, min(rows_per_step, rows))
    share = in_step / rows_per_step
    each = share / 3600
    return RunTime(
        steps=steps,
        tokens=round(steps * step.tokens * share),
        tokens_per_second=step.tokens_per_second,
        hours=steps * step.seconds * each,
        hours_low=steps * step.seconds_low * each,
        hours_high=steps * step.seconds_high * each,
    )


def steps_of_run(config: RunConfig, *, rows: int | None, rows_per_step: int) -> int | None:
    """Optimizer steps over a dataset of `rows` rows; None if neither they nor `training.max_steps` are known."""
    training = config.training
    if training.max_steps is not None or rows is None:
        return training.max_steps
    in_step = max(1, min(rows_per_step, rows))
    return max(1, math.ceil(training.num_train_epochs * math.ceil(rows / in_step)))


# --- on this CPU; pairs are the fast and the slow end of a range ---------------------------------------------------

FEWEST_MATMULS = 8
"""Least number of matmuls that measure this CPU: on a busy computer the first ones wait for a core."""
RATE_SECONDS = 0.08
"""How long the matmul that measures this CPU is repeated."""
MATMUL_SIZE = 256
"""Its size. Larger matmuls come nearer to the full rate, but wait for a core more often on a busy computer."""
SINGLE_THREAD_SIZE = 64
"""Size of a matmul that one thread computes in microseconds, without waiting for others."""
EFFICIENCY = (0.75, 0.25)
"""Fraction of that rate that the matmuls of a step reach, as a range. A choice around `rate_share` of the larger cases in
benchmarks/results/memory_cpu.json (2 cores)."""
UPDATE_SECONDS = (2e-9, 1e-8)
"""Clipping and AdamW, per parameter: memory traffic that does not depend on the batch. A choice around the `1x8` cases there."""
LAYER_CALL_SECONDS = (0.0009, 0.003)
"""Forward pass of one layer over single tokens, mostly call overhead: on idle and on busy cores. A choice."""
CACHE_BYTES_PER_SECOND = (1.2e10, 3e9)
"""Rate at which the KV cache of a layer is copied to grow by a token and repeated per head. A choice."""
ANSWER_SHARE = (0.3, 1.0)
"""Fraction of `max_new_tokens` that generations use: short ones end early, an untrained model reaches the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A range: the rate is measured for a moment, and the fraction of it that a step reaches varies."""

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
    target_share: float = 1.0,
    heldout_tokens: int = 0,
) -> TimeEstimate:
    """How long training, held-out losses and both evaluations take on this CPU. Measures its rate unless it is given."""
    rate = (flops_per_second or rate_under_load()) * 4 / max(4, DTYPE_BYTES[config.training.dtype])
    every = config.training.eval_steps or steps
    # A forward pass is a third of a step; before the first step and at every evaluation.
    losses = heldout_tokens / 3 * (1 + math.ceil(steps / max(1, every))) if steps else 0.0
    each_token = training_flops_per_token(shape, config, target_share=target_share)
    step_flops = (tokens_per_step + losses / max(1, steps)) * each_token
    # A backward pass counts as two forward passes.
    calls = 3 * config.training.gradient_accumulation_steps * shape.layers
    batch = min(eval_items, eval_rows) if config.evaluation.enabled else 0
    new_tokens = config.evaluation.max_new_tokens
    answer_calls = 2 * math.ceil(eval_items / batch) * new_tokens * shape.layers if batch else 0  # before and after
    cache = batch * new_tokens * 4 * (shape.kv_size + shape.query_size) * DTYPE_BYTES[config.training.dtype]
    matmuls = 2 * batch * shape.parameters / shape.layers

    def seconds(end: int) -> float:
        flops, call = rate * EFFICIENCY[end], LAYER_CALL_SECONDS[end]
        step = step_flops / flops + shape.parameters * UPDATE_SECONDS[end] + calls * call
        answer = call + cache / CACHE_BYTES_PER_SECOND[end] + matmuls / flops
        return steps * step + ANSWER_SHARE[end] * answer_calls * answer

    return TimeEstimate(seconds_low=seconds(0), seconds_high=seconds(1))


LOADING_SECONDS = (8.0, 40.0)
"""Importing the engine, twice: in the run, and in the fresh process of the reload check. A choice: idle and busy cores."""
WRITTEN_BYTES_PER_SECOND = (6e8, 1e8)
"""Weights that are hashed, loaded, written or compared. A choice."""


def seconds_beside(shape: ModelShape, config: RunConfig, steps: int) -> tuple[float, float]:
    """How long a run of `steps` loads, saves its last checkpoint, those before evaluations and the final model, and checks that
    a fresh process loads it. Checkpoints by `save_steps` are written while it trains. Those by time, for which training waits
    on a CPU, take at most 2 % of its time and are not included."""
    run = footprint_of(shape, config.training, "cpu")
    saves = max(1, math.ceil(steps / (config.training.eval_steps or steps or 1)))
    size = saves * run.checkpoint + 4 * run.final_model
    low, high = (fixed + size / rate for fixed, rate in zip(LOADING_SECONDS, WRITTEN_BYTES_PER_SECOND, strict=True))
    return low, high


def training_flops_per_token(shape: ModelShape, config: RunConfig, *, target_share: float = 1.0) -> float:
    """Forward and backward: six operations per matrix parameter, plus causal attention. The lm_head computes the
    `target_share` of tokens that are trained.

    Frozen matrices need four, and checkpointed layers a second forward pass.
    """
    length = longest_row(shape, config, config.data.max_length)
    recipe = recipe_of(config.training)
    each = 6 if recipe.frozen is None else 4
    layers = shape.layers * shape.layer_matrix_parameters
    attention = shape.layers * shape.query_size * length  # 2 matmuls x 2 operations x half of the square
    recomputed = 1 - recipe.kept_layers(shape.layers) / shape.layers
    return (
        each * (layers + target_share * shape.embedding_parameters)
        + 6 * attention
        + recomputed * 2 * (layers + attention)
    )


def measure_rate() -> float:
    """Float32 operations per second of this CPU: of a matmul by all threads, or of one by a single thread, times the cores.

    Whichever is more: on a busy computer the threads of a matmul wait for one another, and it takes a hundred times as long.
    """
    import psutil

    cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count() or 1
    return max(_matmul_rate(MATMUL_SIZE), cores * _matmul_rate(SINGLE_THREAD_SIZE))


def rate_under_load() -> float:
    """The part of `measure_rate` that other busy processes leave. Those are counted now and over the last minute, of which the
    lower counts: what has just ended, or has just begun, does not."""
    minute, now = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, math.inf
    with contextlib.suppress(OSError, ValueError, IndexError):
        now = float(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].split("/")[0])
    cores, others = os.cpu_count() or 1, max(0.0, min(minute, now) - 1)
    return _rate_of_this_cpu() * cores / (cores + others)


_rate_of_this_cpu = cache(measure_rate)  # once per process: a server plans many times


def _matmul_rate(size: int) -> float:
    """Of the fastest matmul of that size within `RATE_SECONDS`; those that wait for a core do not count."""
    import numpy as np

    left = np.ones((size, size), dtype=np.float32)
    result = left @ left  # starts the threads
    fastest, count, until = math.inf, 0, time.perf_counter() + RATE_SECONDS / 2
    while count < FEWEST_MATMULS or time.perf_counter() < until:
        started, count = time.perf_counter(), count + 1
        np.matmul(left, left, out=result)
        fastest = min(fastest, time.perf_counter() - started)
    return 2.0 * size**3 / fastest


# --- disk ------------------------------------------------------------------------------------------------------------

EVAL_BYTES = 64 * 2**20
"""For generations, metrics and logs: thousands of generations of a few kilobytes."""


def disk_needed_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Peak disk usage: the newest checkpoints, the best, one being staged, the final model, generations and logs."""
    training = config.training
    run = footprint_of(shape, training, "cpu")
    # Saved by time alone, there is no best one beside the newest.
    checkpoints = training.save_total_limit + (2 if training.save_steps or training.eval_steps else 1)
    return checkpoints * run.checkpoint + run.final_model + EVAL_BYTES
