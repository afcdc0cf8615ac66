"""Every rule in order, `judge`; and the rules about a device that works: precision, other processes, disk, RAM."""

import re
from collections.abc import Mapping
from dataclasses import replace

from tunix_rt.doctor.facts import Ask, Check, Facts, check, failed, passed, skipped, visible_gpus, warned
from tunix_rt.doctor.gpu_checks import GIB, GPU_CHECKS, holders, wants_gpu, wants_visible_gpu
from tunix_rt.doctor.jax_checks import JAX_CHECKS, TPU_CHECKS
from tunix_rt.doctor.process_checks import PROCESS_CHECKS
from tunix_rt.doctor.wheel_checks import WHEEL_CHECKS

CAUSES: Mapping[str, tuple[str, ...]] = {
    "hardware": ("no-gpu", "gpu-lost", "no-tpu", "amd-gpu", "tpu-unknown", "bf16-emulated"),
    "driver": (
        "wsl-without-gpu", "driver-not-loaded", "wsl-stub-shadowed", "driver-library-missing", "driver-mismatch",
        "nvml-failed", "blackwell-driver", "open-modules-needed", "driver-lists-no-gpu", "uvm-missing",
        "driver-below-wheel", "torch-sees-no-gpu", "jax-driver-below-plugin",
    ),
    "wheel": (
        "cpu-wheel", "wheel-lacks-architecture", "torch-too-old", "jax-without-plugin", "libtpu-missing",
        "jax-plugin-version", "jax-plugin-lacks-architecture",
    ),
    "masked": ("masked", "mig-without-slice", "jax-platforms-mask"),
    "container": ("container-without-runtime", "container-lost-gpu"),
    "permissions": ("node-permissions", "tpu-node-permissions"),
    "environment": (
        "torch-on-tpu", "torch-missing", "torch-broken", "jax-missing", "jax-platforms-fall", "jax-broken",
        "jax-sees-no-device", "cuda-majors-clash",
    ),
    "busy": ("gpu-exclusive", "gpu-busy", "low-ram"),
    "storage": ("low-disk",),
    "processes": (
        "mixed-versions", "mixed-drivers", "mixed-gpus", "gpu-duplicate", "nccl-missing", "shm-small",
        "wrong-interface", "port-taken", "process-lost", "process-hangs",
    ),
}  # fmt: skip
"""Kind -> its causes: what has to change. docs/doctor has a page for each cause."""
PAGES = "docs/doctor"
KIND_OF = {cause: kind for kind, causes in CAUSES.items() for cause in causes}

LOW_DISK_BYTES = 2 * GIB
"""Below this a warning: two checkpoints of a 60 M-parameter model. `tunix-rt plan` predicts what a run needs."""
LOW_RAM_BYTES = 2 * GIB
"""Below this a warning: too little to train 124 M parameters with AdamW in float32."""
LEAST_FREE_SHARE = 0.1
"""Of a GPU's memory; with less free, nothing useful fits."""


@check("bf16-emulated")
def bfloat16_is_real(facts: Facts, ask: Ask) -> Check:
    """torch reports bfloat16 support on a T4, which emulates it, slower than float32."""
    gpus = [gpu for gpu in visible_gpus(facts) if gpu.capability is not None]
    if ask.dtype != "bfloat16" or not wants_gpu(facts, ask) or not gpus:
        return skipped("no bfloat16 on a GPU requested")
    for gpu in gpus:
        if gpu.capability is not None and gpu.capability < (8, 0):
            saw = "{}: compute capability {}.{}, bfloat16 needs 8.0".format(gpu.name, *gpu.capability)
            return failed(saw, "this GPU emulates bfloat16", "set training.dtype: float32")
    return passed(", ".join(gpu.name for gpu in gpus))


@check("gpu-busy", needs=wants_visible_gpu)
def gpu_is_free(facts: Facts, ask: Ask) -> Check:
    shared: Check | None = None
    for gpu in visible_gpus(facts):
        memory = "memory shared with the CPU"
        nearly_full = False
        if gpu.total_bytes is not None and gpu.free_bytes is not None:
            memory = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
            nearly_full = gpu.free_bytes < LEAST_FREE_SHARE * gpu.total_bytes
        saw = f"GPU {gpu.index}: {memory}" + (f", {holders(gpu)}" if gpu.processes else "")
        fix = f"wait for {holders(gpu)}, or end it" if gpu.processes else "free it (nvidia-smi lists the processes)"
        fix += ", or select another GPU with CUDA_VISIBLE_DEVICES" if len(facts.nvidia.gpus) > 1 else ""
        if nearly_full:
            return failed(saw, "another process holds nearly all of the GPU memory", fix)
        if gpu.processes and shared is None:
            shared = warned(saw, "another process uses the GPU, which slows the run", fix)
    return shared or passed("no other process uses it")


@check("cuda-majors-clash")
def cuda_is_of_one_major(facts: Facts, ask: Ask) -> Check:
    installed = facts.jax.plugins if facts.jax else {}
    plugins = [re.sub(r"\D", "", name) for name in installed if name.startswith("jax-cuda")]
    if facts.torch is None or not facts.torch.cuda_build or not plugins:
        return skipped("torch and jax are not both CUDA builds")
    major = facts.torch.cuda_build.partition(".")[0]
    saw = f"torch for CUDA {facts.torch.cuda_build}, jax plugin for CUDA {', '.join(sorted(set(plugins)))}"
    if set(plugins) == {major}:
        return passed(saw)
    return warned(
        saw, "two sets of NVIDIA libraries in one environment; torch and jax may load each other's",
        f'use an environment for each, or pip install -U "jax[cuda{major}]"',
    )  # fmt: skip


@check("low-disk")
def disk_is_enough(facts: Facts, ask: Ask) -> Check:
    saw = f"{facts.host.disk_free_bytes / GIB:.1f} GiB free at {facts.host.disk_path}"
    if facts.host.disk_free_bytes >= LOW_DISK_BYTES:
        return passed(saw)
    return warned(saw, "checkpoints may not fit", "free space, or choose another --output")


@check("low-ram")
def ram_is_enough(facts: Facts, ask: Ask) -> Check:
    host = facts.host
    saw = f"{host.ram_available_bytes / GIB:.1f} of {host.ram_total_bytes / GIB:.1f} GiB RAM available"
    if host.ram_available_bytes >= LOW_RAM_BYTES:
        return passed(saw)
    return warned(saw, "only small models fit", "close other programs; see `tunix-rt plan`")


CONDITION_CHECKS = (bfloat16_is_real, gpu_is_free, cuda_is_of_one_major, disk_is_enough, ram_is_enough)
GROUPS = (GPU_CHECKS, TPU_CHECKS, WHEEL_CHECKS, JAX_CHECKS, PROCESS_CHECKS)
EVERY_CHECK = (*GPU_CHECKS, *TPU_CHECKS, *WHEEL_CHECKS, *JAX_CHECKS, *PROCESS_CHECKS, *CONDITION_CHECKS)


def judge(facts: Facts, ask: Ask) -> list[Check]:
    """The verdict of every rule, in order. A rule that does not apply, or that an earlier failure hides, is skipped.

    In a group the first failure hides the rest: without a GPU, no driver lists one. A device that cannot be used at all
    hides the rules about engines on it; whether they are installed is still judged.
    """
    checks: list[Check] = []
    for group in GROUPS:
        hidden_by = ""
        for rule in group:
            found = rule(facts, ask)
            if hidden_by:
                found = replace(skipped(f"hidden by {hidden_by}"), cause=found.cause)
            elif found.verdict == "fail":
                hidden_by = found.cause
            checks.append(found)
        if hidden_by and group in (GPU_CHECKS, TPU_CHECKS) and not facts.nvidia.gpus:
            ask = replace(ask, device="cpu")
    return checks + [rule(facts, ask) for rule in CONDITION_CHECKS]


def page_of(cause: str) -> str:
    """The documentation of a cause."""
    return f"{PAGES}/{cause}.md"


def first_failure(checks: list[Check]) -> Check | None:
    """The cause that is reported."""
    return next((one for one in checks if one.verdict == "fail"), None)
