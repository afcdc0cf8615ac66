"""Rules about the installed torch: whether it fits the GPU and its driver."""

import re

from tunix_rt.doctor.facts import Ask, Check, Facts, check, failed, passed, skipped, visible_gpus
from tunix_rt.doctor.gpu_checks import wants_gpu
from tunix_rt.doctor.wheels import (
    INSTALL,
    MISFIT_WORDS,
    OLDEST_TORCH,
    Capability,
    driver_floor,
    fits,
    fitting_wheels,
    install_line,
    number,
    why_no_wheel,
)

CUDA_ERRORS = (
    (r"\b802\b", "the GPUs of this board need the fabric manager", "sudo systemctl start nvidia-fabricmanager"),
    (r"\b803\b", "driver library and kernel module have different versions", "restart the computer"),
    (r"\b804\b", "a cuda-compat library is loaded that this GPU does not support", "remove cuda-compat from LD_LIBRARY_PATH"),
    ("driver on your system is too old", "the driver is too old for torch", "update the NVIDIA driver to 580.65.06 or newer"),
    ("unknown error", "CUDA does not start", "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm, or restart"),
)  # fmt: skip
"""Pattern of a message of torch, what it means, and the fix."""


def capabilities(facts: Facts) -> list[Capability]:
    """Of the visible GPUs; of all GPUs if none is visible."""
    gpus = visible_gpus(facts) or facts.nvidia.gpus
    return [gpu.capability for gpu in gpus if gpu.capability is not None]


def wheel_fix(facts: Facts) -> str:
    """The command that installs a torch for these GPUs and this driver: a wheel is easier to change than a driver."""
    driver, host = facts.nvidia.driver_version or facts.nvidia.module_version, facts.host
    required = capabilities(facts)
    if driver is None or not required:
        return "tunix-rt env create --device cuda (it selects a wheel by driver and GPU)"
    if wheels := fitting_wheels(required, driver, host.system, host.machine, wsl=host.wsl):
        return install_line(wheels[0])
    for gpu in visible_gpus(facts):  # GPUs of different ages: one alone may have a wheel
        alone = [gpu.capability] if gpu.capability else []
        if alone and (own := fitting_wheels(alone, driver, host.system, host.machine, wsl=host.wsl)):
            return f"export CUDA_VISIBLE_DEVICES={gpu.index}  # {gpu.name} alone; its wheel: {install_line(own[0])}"
    return why_no_wheel(required, driver, host.system, host.machine, wsl=host.wsl)[1]


@check("torch-missing", engine="torch")
def torch_is_installed(facts: Facts, ask: Ask) -> Check:
    if facts.torch is not None:
        return passed(f"torch {facts.torch.version}")
    fix = INSTALL["torch"]
    if wants_gpu(facts, ask):
        fix = f"{wheel_fix(facts)} && {INSTALL['torch']}"
    return failed("no torch in this environment", "the torch engine cannot run", fix)


@check("torch-broken", engine="torch")
def torch_answers(facts: Facts, ask: Ask) -> Check:
    if facts.torch is None:
        return skipped()
    if facts.torch.problem is None:
        return passed("torch starts" if facts.torch.arch_list is not None else "not started")
    again = f"install torch again: {wheel_fix(facts) if wants_gpu(facts, ask) else INSTALL['torch']}"
    if "no answer within" in facts.torch.problem:
        again = f"restart the computer or the container, because torch hangs if the driver does; else {again}"
    return failed(facts.torch.problem, "torch does not start", again)


@check("amd-gpu", engine="torch")
def no_amd_gpu_is_ignored(facts: Facts, ask: Ask) -> Check:
    """A ROCm build implies an AMD GPU; `auto` must not fall back to the CPU silently."""
    torch = facts.torch
    if torch is None or ask.device != "auto" or wants_gpu(facts, ask) or not torch.hip_build:
        return skipped()
    saw = f"torch {torch.version}: built for ROCm {torch.hip_build}"
    return failed(saw, "tunix-rt does not train on AMD GPUs", "use a computer with an NVIDIA GPU")


@check("cpu-wheel", engine="torch")
def wheel_is_for_cuda(facts: Facts, ask: Ask) -> Check:
    """A CPU wheel beside a GPU is the commonest silent fallback."""
    torch = facts.torch
    if torch is None or not wants_gpu(facts, ask):
        return skipped("no GPU requested, or no torch")
    if torch.cuda_build:
        return passed(f"torch {torch.version}, CUDA {torch.cuda_build}")
    built = f"built for ROCm {torch.hip_build}" if torch.hip_build else "built without CUDA"
    why = "a GPU is present, but this torch wheel cannot use it"
    return failed(f"torch {torch.version}: {built}", why, wheel_fix(facts))


@check("driver-below-wheel", engine="torch")
def driver_is_new_enough(facts: Facts, ask: Ask) -> Check:
    """CUDA 13 wheels need driver 580, CUDA 12 wheels 525, on any GPU."""
    torch, driver = facts.torch, facts.nvidia.driver_version
    if torch is None or not torch.cuda_build or driver is None or not wants_gpu(facts, ask):
        return skipped("no driver, or no CUDA wheel")
    system = "Windows" if facts.host.wsl else facts.host.system  # WSL runs Windows' driver
    floor = driver_floor(torch.cuda_build, system, facts.host.machine)
    saw = f"driver {driver}; torch {torch.version} is built for CUDA {torch.cuda_build}, which needs {floor}"
    if number(driver) >= number(floor) or torch.cuda_available:  # CUDA that starts overrules the table
        return passed(saw)
    line = wheel_fix(facts)
    archs, build = torch.arch_list, torch.cuda_build
    has_kernels = archs is None or all(fits(one, archs, build) for one in capabilities(facts))
    fix = f"{line}; or update the driver to {floor} or newer" if line.startswith("pip") and has_kernels else line
    return failed(saw, f"the driver is older than this torch wheel needs ({floor})", fix)


@check("wheel-lacks-architecture", engine="torch")
def wheel_has_kernels(facts: Facts, ask: Ask) -> Check:
    """A wheel without the GPU's architecture imports, reports CUDA as available, and fails at the first kernel."""
    torch, gpus = facts.torch, visible_gpus(facts)
    if torch is None or not torch.cuda_build or not gpus or not wants_gpu(facts, ask):
        return skipped("no visible GPU, or no CUDA wheel")
    shown = f"torch {torch.version} (CUDA {torch.cuda_build}) has {' '.join(torch.arch_list or ()) or 'unknown architectures'}"
    warned = torch.said is not None and any(words in torch.said for words in MISFIT_WORDS)
    for gpu in gpus:
        misfit = gpu.capability and torch.arch_list and not fits(gpu.capability, torch.arch_list, torch.cuda_build)
        if misfit or (warned and (len(gpus) == 1 or gpu.name in (torch.said or ""))):
            code = "sm_{}{}".format(*gpu.capability) if gpu.capability else "an unknown architecture"
            why = f"this torch wheel has no kernels for {gpu.name}"
            return failed(f"{gpu.name} is {code}; {shown}", why, wheel_fix(facts))
    if torch.arch_list is None:
        return skipped("the architectures of torch are unknown")
    return passed(shown)


@check("torch-too-old", engine="torch")
def torch_is_not_too_old(facts: Facts, ask: Ask) -> Check:
    torch = facts.torch
    if torch is None:
        return skipped()
    version = number(torch.version)
    if not version or version[:2] >= number(OLDEST_TORCH):  # a local build may have no version number
        return passed(f"torch {torch.version}")
    fix = wheel_fix(facts) if wants_gpu(facts, ask) else INSTALL["torch"]
    why = f"torch below {OLDEST_TORCH} has known vulnerabilities in loading weights, and is not supported"
    return failed(f"torch {torch.version}", why, fix)


@check("torch-sees-no-gpu", engine="torch")
def torch_sees_the_gpu(facts: Facts, ask: Ask) -> Check:
    """Everything else fits, and torch still has no CUDA."""
    torch = facts.torch
    masked = facts.nvidia.gpus and not visible_gpus(facts)  # for torch too
    unseen = not wants_gpu(facts, ask) or masked
    if torch is None or torch.cuda_available is None or unseen:
        return skipped("torch was not started, or no GPU is visible")
    if torch.cuda_available:
        return passed(f"{torch.cuda_devices} CUDA device(s)")
    message = torch.said or "torch.cuda.is_available() is False, without a warning"
    for pattern, why, fix in CUDA_ERRORS:
        if re.search(pattern, message):
            return failed(message, why, fix)
    again = "restart the container or the computer, then run tunix-rt doctor again"
    return failed(message, "torch cannot start CUDA", again)


WHEEL_CHECKS = (
    torch_is_installed, torch_answers, no_amd_gpu_is_ignored, wheel_is_for_cuda,
    driver_is_new_enough, wheel_has_kernels, torch_is_not_too_old,
    torch_sees_the_gpu,
)  # fmt: skip
