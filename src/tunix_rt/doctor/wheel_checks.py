"""Does the installed torch fit the GPU and its driver?"""

import re

from tunix_rt.doctor.facts import Ask, Check, Facts, failed, passed, skipped, visible_gpus
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

CUDA_WORDS = (
    (r"\b802\b", "the GPUs of this board wait for the fabric manager", "sudo systemctl start nvidia-fabricmanager"),
    (r"\b803\b", "driver library and kernel module are of different versions", "restart the computer"),
    (r"\b804\b", "a cuda-compat library was taken that this GPU does not allow", "take cuda-compat out of LD_LIBRARY_PATH"),
    ("driver on your system is too old", "torch finds the driver too old", "update the NVIDIA driver to 580.65.06 or newer"),
    ("unknown error", "CUDA could not start", "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm, or restart"),
)  # fmt: skip
"""Words of torch that tell the cause, what they mean, and the way out."""


def capabilities(facts: Facts) -> list[Capability]:
    """Of the visible GPUs; of all of them when none is visible."""
    gpus = visible_gpus(facts) or facts.nvidia.gpus
    return [gpu.capability for gpu in gpus if gpu.capability is not None]


def wheel_fix(facts: Facts) -> str:
    """The line that installs a torch for these GPUs and this driver: the wheel is easier to change than the driver."""
    driver, host = facts.nvidia.driver_version or facts.nvidia.module_version, facts.host
    wanted = capabilities(facts)
    if driver is None or not wanted:
        return "tunix-rt env create --device cuda (it reads driver and GPU, and chooses)"
    found = fitting_wheels(wanted, driver, host.system, host.machine, wsl=host.wsl)
    if found:
        return install_line(found[0])
    for gpu in visible_gpus(facts):  # GPUs of different ages: one alone may have a wheel
        if gpu.capability and (
            own := fitting_wheels([gpu.capability], driver, host.system, host.machine, wsl=host.wsl)
        ):
            return f"export CUDA_VISIBLE_DEVICES={gpu.index}  # {gpu.name} alone; its wheel: {install_line(own[0])}"
    return why_no_wheel(wanted, driver, host.system, host.machine, wsl=host.wsl)[1]


def torch_is_installed(facts: Facts, ask: Ask) -> Check:
    cause = "torch-missing"
    if ask.backend != "torch":
        return skipped(cause, "another engine was asked for")
    if facts.torch is not None:
        return passed(cause, f"torch {facts.torch.version}")
    fix = INSTALL["torch"]
    if wants_gpu(facts, ask):
        fix = f"{wheel_fix(facts)} && {INSTALL['torch']}"
    return failed(cause, "no torch in this environment", "the torch engine cannot run", fix)


def torch_answers(facts: Facts, ask: Ask) -> Check:
    cause = "torch-broken"
    if ask.backend != "torch" or facts.torch is None:
        return skipped(cause)
    if facts.torch.problem is None:
        return passed(cause, "torch was asked and answered" if facts.torch.arch_list is not None else "not asked")
    again = f"install torch again: {wheel_fix(facts) if wants_gpu(facts, ask) else INSTALL['torch']}"
    if "no answer within" in facts.torch.problem:
        again = f"restart the computer or the container, because a driver that hangs makes torch hang; else {again}"
    return failed(cause, facts.torch.problem, "torch does not start", again)


def no_amd_gpu_is_passed_over(facts: Facts, ask: Ask) -> Check:
    """A build for ROCm says that there is an AMD GPU; `auto` must not take the CPU beside it in silence."""
    cause, torch = "amd-gpu", facts.torch
    if ask.backend != "torch" or torch is None or ask.device != "auto" or wants_gpu(facts, ask) or not torch.hip_build:
        return skipped(cause)
    saw = f"torch {torch.version}: built for ROCm {torch.hip_build}"
    return failed(cause, saw, "tunix-rt does not train on AMD GPUs", "use a computer with an NVIDIA GPU")


def wheel_is_for_cuda(facts: Facts, ask: Ask) -> Check:
    """A CPU wheel beside a GPU is the commonest silent fallback."""
    cause, torch = "cpu-wheel", facts.torch
    if ask.backend != "torch" or torch is None or not wants_gpu(facts, ask):
        return skipped(cause, "no GPU asked for, or no torch")
    if torch.cuda_build:
        return passed(cause, f"torch {torch.version}, CUDA {torch.cuda_build}")
    built = f"built for ROCm {torch.hip_build}" if torch.hip_build else "built without CUDA"
    return failed(
        cause,
        f"torch {torch.version}: {built}",
        "the GPU is there, but this torch wheel cannot use it",
        wheel_fix(facts),
    )


def driver_is_new_enough(facts: Facts, ask: Ask) -> Check:
    """CUDA 13 wheels need driver 580, CUDA 12 wheels 525, on any GPU."""
    cause, torch, driver = "driver-below-wheel", facts.torch, facts.nvidia.driver_version
    if ask.backend != "torch" or torch is None or not torch.cuda_build or driver is None or not wants_gpu(facts, ask):
        return skipped(cause, "no driver, or no CUDA wheel")
    system = "Windows" if facts.host.wsl else facts.host.system  # WSL runs Windows' driver
    floor = driver_floor(torch.cuda_build, system, facts.host.machine)
    saw = f"driver {driver}; torch {torch.version} is built for CUDA {torch.cuda_build}, which needs {floor}"
    if number(driver) >= number(floor) or torch.cuda_available:  # that CUDA starts is worth more than the table
        return passed(cause, saw)
    line = wheel_fix(facts)
    has_kernels = torch.arch_list is None or all(
        fits(one, torch.arch_list, torch.cuda_build) for one in capabilities(facts)
    )
    fix = f"{line}; or update the driver to {floor} or newer" if line.startswith("pip") and has_kernels else line
    return failed(cause, saw, f"the driver is older than this torch wheel needs ({floor})", fix)


def wheel_has_kernels(facts: Facts, ask: Ask) -> Check:
    """A wheel without the GPU's architecture imports well, says CUDA is available, and dies on the first kernel."""
    cause, torch, gpus = "wheel-lacks-architecture", facts.torch, visible_gpus(facts)
    if ask.backend != "torch" or torch is None or not torch.cuda_build or not gpus or not wants_gpu(facts, ask):
        return skipped(cause, "no visible GPU, or no CUDA wheel")
    shown = (
        f"torch {torch.version} (CUDA {torch.cuda_build}) has {' '.join(torch.arch_list or ()) or 'an unknown list'}"
    )
    warned = torch.said is not None and any(words in torch.said for words in MISFIT_WORDS)
    for gpu in gpus:
        misfit = gpu.capability and torch.arch_list and not fits(gpu.capability, torch.arch_list, torch.cuda_build)
        if misfit or (warned and (len(gpus) == 1 or gpu.name in (torch.said or ""))):
            code = "sm_{}{}".format(*gpu.capability) if gpu.capability else "an unknown architecture"
            return failed(
                cause,
                f"{gpu.name} is {code}; {shown}",
                f"this torch wheel has no kernels for {gpu.name}",
                wheel_fix(facts),
            )
    if torch.arch_list is None:
        return skipped(cause, "torch was not asked for its architectures")
    return passed(cause, shown)


def torch_is_not_too_old(facts: Facts, ask: Ask) -> Check:
    cause, torch = "torch-too-old", facts.torch
    if ask.backend != "torch" or torch is None:
        return skipped(cause)
    if not number(torch.version) or number(torch.version)[:2] >= number(OLDEST_TORCH):  # a build may have no number
        return passed(cause, f"torch {torch.version}")
    fix = wheel_fix(facts) if wants_gpu(facts, ask) else INSTALL["torch"]
    why = f"torch below {OLDEST_TORCH} has known holes in reading weights, and is not supported"
    return failed(cause, f"torch {torch.version}", why, fix)


def torch_sees_the_gpu(facts: Facts, ask: Ask) -> Check:
    """The last word: everything fits, and torch still says no."""
    cause, torch = "torch-sees-no-gpu", facts.torch
    unseen = not wants_gpu(facts, ask) or (
        facts.nvidia.gpus and not visible_gpus(facts)
    )  # a mask hides it from torch too
    if ask.backend != "torch" or torch is None or torch.cuda_available is None or unseen:
        return skipped(cause, "torch was not asked, or no GPU is visible")
    if torch.cuda_available:
        return passed(cause, f"{torch.cuda_devices} CUDA device(s)")
    said = torch.said or "torch.cuda.is_available() is False, without a word"
    for words, why, fix in CUDA_WORDS:
        if re.search(words, said):
            return failed(cause, said, why, fix)
    return failed(
        cause, said, "torch cannot start CUDA", "restart the container or the computer, then tunix-rt doctor again"
    )


WHEEL_CHECKS = (
    torch_is_installed, torch_answers, no_amd_gpu_is_passed_over, wheel_is_for_cuda,
    driver_is_new_enough, wheel_has_kernels, torch_is_not_too_old,
    torch_sees_the_gpu,
)  # fmt: skip
