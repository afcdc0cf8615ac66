"""What no device can do: hold less than the weights, more than its memory, or compute faster than its data sheet.

Bounds are drawn wide, so that nothing honest falls outside: they find a run that was relabelled, not one that was slow.
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tunix_rt.accelerators import accelerators_named, find_accelerator
from tunix_rt.evidence.claims import gpu_of, memory_samples, require, value_at
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import Noted
from tunix_rt.plan.flops import step_flops
from tunix_rt.plan.recipe import recipe_to_ask
from tunix_rt.plan.shape import ModelShape, shape_of

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
OVER_PEAK = 1.05
"""A data sheet's peak is at a clock that a card may exceed a little."""
LEAST_SHARE = 0.002
"""Of the published peak. A CPU that is called a GPU does less; so does a GPU that waits for steps with little to do."""
LEAST_PARAMETERS = 50e6
LEAST_WORK = LEAST_PARAMETERS * 512
"""Parameters x tokens of a step, below which a GPU mostly waits and its rate says nothing."""
CORE_TFLOPS = 4.0
"""No core of a CPU does more, matrix units included."""


def shape_noted(noted: Noted) -> ModelShape:
    return shape_of(noted.model or {})


def parameter_problems(noted: Noted) -> Iterator[str]:
    """The number of parameters, which the shape of the model gives, is the same wherever it is told."""
    run, told = noted.run, noted.run.need("result.json", "parameters", int)
    given = {"plan.json": value_at(noted.plan, "memory.parameters")} if noted.plan is not None else {}
    if noted.model is not None:
        given["final_model/config.json"] = shape_noted(noted).parameters
    for file, count in given.items():
        if count != told:
            yield f"{run.where}result.json: {told:,} parameters, {run.where}{file} gives {shown(count)}"


def account_problems(noted: Noted) -> Iterator[str]:
    """What was predicted and measured is the same in the plan, in the account and in the result; no step held more."""
    run, where = noted.run, noted.run.where
    told = run.need("result.json", "memory", dict)
    for name in ("predicted_bytes", "measured_bytes"):
        if noted.memory is not None and noted.memory.get(name) != told.get(name):
            yield f"{where}memory.json: {name} is {shown(noted.memory.get(name))}, result.json has {shown(told.get(name))}"
    if noted.plan is not None and noted.plan.get("peak_bytes") != told.get("predicted_bytes"):
        yield f"{where}plan.json: peak_bytes is not what result.json says was predicted"
    measured = run.need("result.json", "memory.measured_bytes", int)
    peaks = [require(f"{where}metrics.jsonl", line, "peak_bytes", int) for line in run.metrics[noted.resumed_from :]]
    if max(peaks, default=0) > measured:
        yield f"{where}metrics.jsonl: a step held {max(peaks):,} bytes, result.json says at most {measured:,}"


def memory_problems(noted: Noted) -> Iterator[str]:
    """On a GPU: every peak holds at least the weights, and at most the card; so does every sample."""
    run, name = noted.run, f"{noted.run.where}metrics.jsonl"
    gpu = gpu_of(run)
    yield from _size_problems(noted, gpu)
    devices = gpu.get("count", 1)
    kept = value_at(run.config, "training.master_dtype") or run.need("config.yaml", "training.dtype", str)
    if value_at(run.config, "training.lora_rank") is not None:
        kept = run.need("config.yaml", "training.dtype", str)
    if kept not in BYTES:
        yield f"{run.where}config.yaml: {shown(kept)} is no type of weights"
        return
    least = run.need("result.json", "parameters", int) * min(BYTES[kept], 4) // max(devices, 1)
    for number, line in enumerate(run.metrics, start=1):
        peak = require(f"{name}:{number}", line, "peak_bytes", int)
        if not least <= peak <= gpu["memory_bytes"]:
            yield (
                f"{name}:{number}: peak_bytes is {peak:,}; the weights alone take {least:,}, the device has "
                f"{gpu['memory_bytes']:,}"
            )
            return
    for sample in [*memory_samples(run, "nvml"), *memory_samples(run, "device")]:
        if sample["used_bytes"] > gpu["memory_bytes"] * devices:
            yield f"{run.where}result.json: gpu_memory has {sample['used_bytes']:,} bytes, more than the device"


def _size_problems(noted: Noted, gpu: Mapping[str, Any]) -> Iterator[str]:
    """The memory of the card against the catalogue. Less than NVML lists is a slice of it, or what a limit left."""
    listed = [value_at(one, "total_bytes") for one in noted.run.need("doctor.json", "facts.nvidia.gpus", list)]
    sizes = [size for size in listed if type(size) is int]
    where, size = f"{noted.run.where}doctor.json", gpu["memory_bytes"]
    if size > max(sizes, default=0):
        yield f"{where}: the GPU chosen has {size:,} bytes, none that NVML lists has as much"
    elif size in sizes and accelerators_named(gpu["name"]) and find_accelerator(gpu["name"], size) is None:
        yield f"{where}: no {gpu['name']} has {size:,} bytes of memory"


def rate_problems(noted: Noted) -> Iterator[str]:
    """Operations per second after the first step, against the device's published peak, or a bound for a CPU's cores."""
    run, shape = noted.run, shape_noted(noted)
    steps = run.metrics[1:]
    if not steps:
        return
    where = f"{run.where}metrics.jsonl"
    tokens, targets = (sum(require(where, line, name, int) for line in steps) for name in ("tokens", "target_tokens"))
    seconds = sum(require(where, line, "seconds", float) for line in steps)
    if seconds <= 0:
        yield f"{run.where}metrics.jsonl: steps of no time"
        return
    frozen = "float32" if value_at(run.config, "training.lora_rank") is not None else None
    counted = step_flops(
        shape, replace(recipe_to_ask("float32"), frozen=frozen), lengths=[tokens], positions=tokens, targets=targets
    )
    flops = counted.layers + counted.head  # without the attention: nobody knows how long the examples were
    tflops = flops / seconds / 1e12
    # A step that compiled again after a continuation makes the whole slower; the step in the middle it does not.
    usual = flops / len(steps) / statistics.median(float(line["seconds"]) for line in steps) / 1e12
    if run.result["device"] == "cpu":
        most = CORE_TFLOPS * run.need("doctor.json", "facts.host.cpu_cores", int)
        if tflops > most:
            yield f"{run.where}metrics.jsonl: {tflops:,.2f} TFLOP/s, no CPU of that many cores does more than {most:,.0f}"
        return
    yield from _against_the_peak(noted, tflops, max(tflops, usual), tokens / len(steps), shape)


def unpublished(noted: Noted) -> str:
    """Why a GPU cannot be held to its data sheet; empty where it can."""
    if noted.run.result.get("device") != "cuda" or accelerators_named(name := gpu_of(noted.run)["name"]):
        return ""
    return f"nothing is published here of a {shown(name)}"


def _against_the_peak(
    noted: Noted, tflops: float, usual: float, tokens_per_step: float, shape: ModelShape
) -> Iterator[str]:
    gpu, where = gpu_of(noted.run), f"{noted.run.where}metrics.jsonl"
    devices = max(gpu.get("count", 1), 1)
    published = [one for one in accelerators_named(gpu["name"]) if one.fp32_tflops or one.bf16_tflops]
    if not published:
        return
    # float32 products may run on the units for shorter types: the highest figure is the bound for all.
    most = devices * max(max(one.bf16_tflops or 0, one.fp32_tflops or 0) for one in published)
    if tflops > OVER_PEAK * most:
        yield f"{where}: {tflops:,.1f} TFLOP/s, a {gpu['name']} does at most {most:,.0f}"
    of_type = "fp32_tflops" if noted.run.need("config.yaml", "training.dtype", str) == "float32" else "bf16_tflops"
    peak = devices * min((getattr(one, of_type) or most for one in published), default=most)
    big = shape.parameters >= LEAST_PARAMETERS and shape.parameters * tokens_per_step >= LEAST_WORK
    if big and usual < LEAST_SHARE * peak:
        yield (
            f"{where}: {usual:,.3f} TFLOP/s on a {gpu['name']}, whose peak is {peak:,.0f}: steps of that size are not so slow"
        )
