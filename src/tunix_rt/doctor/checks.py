"""Conditions of a run on a device that can be used: precision, neighbours, disk, RAM."""

import re
from dataclasses import replace

from tunix_rt.doctor.facts import Ask, Check, Facts, failed, passed, skipped, visible_gpus, warned
from tunix_rt.doctor.gpu_checks import GIB, GPU_CHECKS, holders, wants_gpu
from tunix_rt.doctor.jax_checks import JAX_CHECKS, TPU_CHECKS
from tunix_rt.doctor.wheel_checks import WHEEL_CHECKS

LOW_DISK_BYTES = 2 * GIB
"""Below this a warning: two checkpoints of a 60 M-parameter model. What a run really needs, `plan` says."""
LOW_RAM_BYTES = 2 * GIB
"""Below this a warning: a 124 M-parameter model no longer trains with AdamW in float32."""
LEAST_FREE_SHARE = 0.1
"""Of a GPU's memory; with less left beside other programs nothing of use fits."""


def bfloat16_is_real(facts: Facts, ask: Ask) -> Check:
    """torch says that a T4 has bfloat16: it emulates it, slower than float32."""
    cause = "bf16-emulated"
    gpus = [gpu for gpu in visible_gpus(facts) if gpu.capability is not None]
    if ask.dtype != "bfloat16" or not wants_gpu(facts, ask) or not gpus:
        return skipped(cause, "no bfloat16 on a GPU asked for")
    for gpu in gpus:
        if gpu.capability is not None and gpu.capability < (8, 0):
            saw = "{}: compute capability {}.{}, bfloat16 begins at 8.0".format(gpu.name, *gpu.capability)
            return failed(cause, saw, "this GPU has bfloat16 only by emulation", "set training.dtype: float32")
    return passed(cause, ", ".join(gpu.name for gpu in gpus))


def gpu_is_free(facts: Facts, ask: Ask) -> Check:
    cause, gpus = "gpu-busy", visible_gpus(facts)
    if not wants_gpu(facts, ask) or not gpus:
        return skipped(cause)
    shared: Check | None = None
    for gpu in gpus:
        room = "memory shared with the CPU"
        nearly_full = False
        if gpu.total_bytes is not None and gpu.free_bytes is not None:
            room = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
            nearly_full = gpu.free_bytes < LEAST_FREE_SHARE * gpu.total_bytes
        saw = f"GPU {gpu.index}: {room}" + (f", {holders(gpu)}" if gpu.processes else "")
        fix = f"wait for {holders(gpu)}, or end it" if gpu.processes else "free it (nvidia-smi shows who holds it)"
        fix += ", or show the run another GPU with CUDA_VISIBLE_DEVICES" if len(facts.nvidia.gpus) > 1 else ""
        if nearly_full:
            return failed(cause, saw, "another process holds nearly all of the GPU's memory", fix)
        if gpu.processes and shared is None:
            shared = warned(cause, saw, "another process holds a part of the GPU, and slows it", fix)
    return shared or passed(cause, "no other process holds it")


def cuda_is_of_one_major(facts: Facts, ask: Ask) -> Check:
    cause = "cuda-majors-clash"
    plugins = [
        re.sub(r"\D", "", name) for name in (facts.jax.plugins if facts.jax else {}) if name.startswith("jax-cuda")
    ]
    if facts.torch is None or not facts.torch.cuda_build or not plugins:
        return skipped(cause, "not both of torch and jax for CUDA")
    major = facts.torch.cuda_build.partition(".")[0]
    saw = f"torch for CUDA {facts.torch.cuda_build}, jax plugin for CUDA {', '.join(sorted(set(plugins)))}"
    if set(plugins) == {major}:
        return passed(cause, saw)
    return warned(
        cause, saw, "two sets of NVIDIA's libraries in one environment; one may load the other's",
        f'give each its own environment, or pip install -U "jax[cuda{major}]"',
    )  # fmt: skip


def disk_is_enough(facts: Facts, ask: Ask) -> Check:
    cause = "low-disk"
    saw = f"{facts.host.disk_free_bytes / GIB:.1f} GiB free at {facts.host.disk_path}"
    if facts.host.disk_free_bytes >= LOW_DISK_BYTES:
        return passed(cause, saw)
    return warned(cause, saw, "checkpoints may not fit", "free space, or choose another --output")


def ram_is_enough(facts: Facts, ask: Ask) -> Check:
    cause, host = "low-ram", facts.host
    saw = f"{host.ram_available_bytes / GIB:.1f} of {host.ram_total_bytes / GIB:.1f} GiB RAM available"
    if host.ram_available_bytes >= LOW_RAM_BYTES:
        return passed(cause, saw)
    return warned(cause, saw, "only small models fit", "close other programs; see `tunix-rt plan`")


CONDITION_CHECKS = (bfloat16_is_real, gpu_is_free, cuda_is_of_one_major, disk_is_enough, ram_is_enough)

__all__ = ["EVERY_CHECK", "Ask", "Check", "first_failure", "judge"]

GROUPS = (GPU_CHECKS, TPU_CHECKS, WHEEL_CHECKS, JAX_CHECKS)
EVERY_CHECK = (*GPU_CHECKS, *TPU_CHECKS, *WHEEL_CHECKS, *JAX_CHECKS, *CONDITION_CHECKS)


def judge(facts: Facts, ask: Ask) -> list[Check]:
    """The answer of every check, in order. What was not asked for is `skip`, and so is what an earlier failure hides.

    In a group the first failure hides the rest: whoever has no GPU need not hear that no driver lists it. A device that
    cannot be reached at all hides what engines say of it; whether they are installed is still judged.
    """
    checks: list[Check] = []
    for group in GROUPS:
        hidden_by = ""
        for check in group:
            answer = check(facts, ask)
            if hidden_by:
                answer = skipped(answer.cause, f"hidden by {hidden_by}")
            elif answer.verdict == "fail":
                hidden_by = answer.cause
            checks.append(answer)
        if hidden_by and group in (GPU_CHECKS, TPU_CHECKS) and not facts.nvidia.gpus:
            ask = replace(ask, device="cpu")
    return checks + [check(facts, ask) for check in CONDITION_CHECKS]


def first_failure(checks: list[Check]) -> Check | None:
    """THE cause: the first that fails hides the ones behind it."""
    return next((check for check in checks if check.verdict == "fail"), None)
