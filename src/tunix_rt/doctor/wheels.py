"""Which torch wheel runs on which GPU under which driver: a table with its sources, and the rules over it.

Standard library only: `scripts/setup` runs it before anything is installed.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TABLE_DATE = "2026-11-15"
"""When the tables below were last compared with their sources."""
INDEX_BASE = "https://download.pytorch.org/whl"
OLDEST_TORCH = "2.10"
"""Older versions have known vulnerabilities in loading weights."""
TESTED_TORCH = "2.13.0"
INSTALL = {"torch": 'pip install "tunix-rt[torch]"', "jax": 'pip install "tunix-rt[jax]"'}
"""The command that installs an engine for the tunix-rt that is installed, from a wheel or a clone."""
MISFIT_WORDS = (
    "not compatible with the current PyTorch installation",
    "does not include kernels for this GPU",
    "which is of compute capability",
    "which is of cuda capability",
    "cuda capability supported by this library",
    "no longer supports this GPU",
    "compiled with an unknown compute capability",
)
"""Warnings of torch from 2.4 on about a wheel without kernels for the GPU."""

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One build of torch that is published. `index` is the folder of PyTorch's wheel index; "" is the package registry."""

    torch: str
    cuda: str
    index: str
    architectures: tuple[str, ...]
    platforms: tuple[str, ...]
    """`Linux x86_64`, `Linux aarch64`, `Windows AMD64`."""
    driver_from: str
    """Oldest driver that we install it on. NVIDIA's own minimum for all of CUDA 12 is lower, without some features."""
    source: str

    @property
    def requirement(self) -> str:
        """Exact with its local tag, so that an installed CPU build of the same version does not satisfy it."""
        return f"torch=={self.torch}+{self.index}" if self.index else f"torch=={self.torch}"


def _code(*numbers: int) -> tuple[str, ...]:
    return tuple(f"sm_{number}" for number in numbers)


_PC = ("Linux x86_64", "Windows AMD64")
_ARM = ("Linux aarch64",)
_LEGACY = _code(50, 60, 70, 75, 80, 86, 90)
_CURRENT = _code(75, 80, 86, 90, 100, 120)
_ARM_CURRENT = _code(80, 90, 100, 110, 120)
_MATRIX_213 = "pytorch RELEASE.md, matrix of 2.13 (github.com/pytorch/pytorch/pull/187075, 182849)"
_LOCKED_129 = "torch-2.13.0+cu129 for cp312, sha256 df28741fcd89..., as public lock files pin it; none for Windows"

WHEELS = (
    Wheel(torch="2.13.0", cuda="13.0", index="cu130", architectures=_CURRENT, platforms=_PC, driver_from="580.65.06",
          source=_MATRIX_213),
    Wheel(torch="2.13.0", cuda="13.0", index="cu130", architectures=_ARM_CURRENT, platforms=_ARM, driver_from="580",
          source=_MATRIX_213),
    Wheel(torch="2.13.0", cuda="12.9", index="cu129", architectures=_CURRENT, platforms=("Linux x86_64",),
          driver_from="570.26", source=_LOCKED_129),
    Wheel(torch="2.13.0", cuda="12.6", index="cu126", architectures=_LEGACY, platforms=_PC, driver_from="525.60.13",
          source=_MATRIX_213),
    Wheel(torch="2.11.0", cuda="12.8", index="cu128", architectures=_CURRENT, platforms=_PC, driver_from="570.26",
          source="pytorch RELEASE.md, matrix of 2.11; Volta dropped: github.com/pytorch/pytorch/issues/172352"),
    Wheel(torch="2.12.1", cuda="12.9", index="cu129", architectures=_CURRENT, platforms=("Linux x86_64",),
          driver_from="570.26", source="github.com/pytorch/pytorch/issues/185269 (published for 2.12.1)"),
    Wheel(torch="2.13.0", cuda="13.0", index="", architectures=_CURRENT, platforms=("Linux x86_64",),
          driver_from="580.65.06", source="arch list read out of the registry's wheel"),
    Wheel(torch="2.13.0", cuda="13.0", index="", architectures=_ARM_CURRENT, platforms=_ARM, driver_from="580",
          source="arch list read out of the registry's wheel"),
    Wheel(torch="2.12.1", cuda="12.6", index="cu126", architectures=_LEGACY, platforms=_PC, driver_from="525.60.13",
          source="pytorch RELEASE.md, matrix of 2.12 (github.com/pytorch/pytorch/pull/182849)"),
)  # fmt: skip
"""Best first: the tested version with the newest CUDA; then the fallbacks."""

DRIVER_FLOOR = {
    "Linux": {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"},
    "Linux aarch64": {11: "450.80.02", 12: "525.60.13", 13: "580"},
    "Windows": {11: "452.39", 12: "528.33", 13: "580"},
}
"""Oldest driver for each CUDA major: NVIDIA's minor-version compatibility (docs.nvidia.com/deploy/cuda-compatibility). The
driver of Jetson Thor is numbered 580.00. WSL uses the driver of Windows."""
BLACKWELL: Capability = (10, 0)
BLACKWELL_DRIVER = "570.26"
"""The first driver for any GPU of compute capability 10.0 and above (its toolkit is CUDA 12.8)."""
LAST_BRANCH_BELOW_7_5 = 580
"""Driver branch 590 dropped GPUs below compute capability 7.5 (Maxwell, Pascal, Volta)."""


def number(version: str) -> tuple[int, ...]:
    """A version as numbers that compare, without local tag: `580.65.06`, `2.13.0+cu130`, `2.10.0a0`."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def driver_floor(cuda: str, system: str, machine: str = "") -> str:
    """Oldest driver for a CUDA version on a system; versions newer than the table have the floor of its newest."""
    floors = DRIVER_FLOOR.get(f"{system} {machine}") or DRIVER_FLOOR["Windows" if system == "Windows" else "Linux"]
    return floors[max((major for major in floors if (major,) <= number(cuda)[:1]), default=min(floors))]


# --- architectures ----------------------------------------------------------------------------------------------------

_OWN_CODE_ONLY = {53: {53}, 62: {62}, 72: {72}, 87: {87}, 101: {101, 110}, 110: {101, 110}}
"""Code for an integrated GPU runs on that GPU only (101 was renamed 110)."""
_NOT_ON = {50: {53}, 52: {53}, 60: {62}, 61: {62}, 70: {72}, 80: {87}, 86: {87}, 100: {101}}
"""GPUs that do not run the code of their own generation."""


def fits(capability: Capability, arch_list: Iterable[str], cuda_build: str) -> bool:
    """Whether code in `arch_list` runs on the GPU: same major and minor not above its own, or older PTX."""
    device = capability[0] * 10 + capability[1]
    unified = number(cuda_build) >= (13, 2)  # from here on integrated GPUs run 70, 80 and 86
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)[af]?", arch)
        if not match:
            continue
        code = int(match[2])
        if match[1] == "compute":  # PTX, compiled by the driver
            runs = code <= device
        elif code in _OWN_CODE_ONLY:
            runs = device in _OWN_CODE_ONLY[code]
        else:
            refused = () if unified and code in (70, 80, 86) else _NOT_ON.get(code, ())
            runs = code // 10 == capability[0] and code % 10 <= capability[1] and device not in refused
        if runs:
            return True
    return False


# --- selection --------------------------------------------------------------------------------------------------------


def fitting_wheels(
    capabilities: Sequence[Capability], driver: str, system: str, machine: str, *, wsl: bool = False
) -> list[Wheel]:
    """The wheels that run on all of these GPUs under this driver, best first; if empty, `why_no_wheel` has the reason."""
    if number(driver)[:1] > (LAST_BRANCH_BELOW_7_5,) and any(one < (7, 5) for one in capabilities):
        return []
    return [
        wheel
        for wheel in WHEELS
        if f"{system} {machine}" in wheel.platforms
        and number(driver) >= number(_driver_for(wheel, system, machine, wsl))
        and all(fits(one, wheel.architectures, wheel.cuda) for one in capabilities)
    ]


def _driver_for(wheel: Wheel, system: str, machine: str, wsl: bool) -> str:
    """Oldest driver that both we and NVIDIA allow for the wheel."""
    return max(wheel.driver_from, driver_floor(wheel.cuda, "Windows" if wsl else system, machine), key=number)


def why_no_wheel(
    capabilities: Sequence[Capability], driver: str, system: str, machine: str, *, wsl: bool = False
) -> tuple[str, str]:
    """Why `fitting_wheels` is empty, and the fix."""
    shown = ", ".join(f"{major}.{minor}" for major, minor in dict.fromkeys(capabilities))
    platform = f"{system} {machine}"
    branch = f"branch {LAST_BRANCH_BELOW_7_5}, the last one for GPUs below compute capability 7.5"
    last_branch = f"install a driver of {branch}"
    if not any(platform in wheel.platforms for wheel in WHEELS):
        return f"no CUDA wheel of torch is published for {platform}", "use Linux (x86_64 or aarch64) or Windows on a PC"
    old = any(one < (7, 5) for one in capabilities)
    if old and number(driver)[:1] > (LAST_BRANCH_BELOW_7_5,):
        return f"driver {driver} does not support GPUs of compute capability {shown}", last_branch
    best_driver = f"{LAST_BRANCH_BELOW_7_5}.999" if old else "999"
    if better := fitting_wheels(capabilities, best_driver, system, machine, wsl=wsl):
        needed = _driver_for(better[0], system, machine, wsl)
        return (
            f"driver {driver} is too old for every wheel with kernels for compute capability {shown}",
            last_branch if old else f"update the NVIDIA driver to {needed} or newer",
        )
    fix = "build torch from source (see docs/guides/gpu-environment.md), or use another GPU"
    if len(set(capabilities)) > 1 and any(fitting_wheels([one], best_driver, system, machine) for one in capabilities):
        fix = f"use one of the GPUs alone (CUDA_VISIBLE_DEVICES, then tunix-rt env create --device cuda), or {fix}"
    return (
        f"no torch wheel of version {OLDEST_TORCH} or newer has kernels for compute capability {shown} on {platform}",
        fix,
    )


def pip_arguments(wheel: Wheel, index_base: str = INDEX_BASE) -> list[str]:
    """Arguments of `pip install` for exactly this wheel."""
    return [wheel.requirement, *(["--index-url", f"{index_base}/{wheel.index}"] if wheel.index else [])]


def install_line(wheel: Wheel) -> str:
    requirement, *rest = pip_arguments(wheel)
    return " ".join(["pip install", f'"{requirement}"', *rest])


def main(arguments: list[str]) -> int:
    """`DRIVER CAPABILITY SYSTEM MACHINE RELEASE`, the first two as nvidia-smi prints them, a line for each GPU.

    Prints the pip arguments of the best wheel and the reason; with exit 4 why there is none, and the fix.
    """
    drivers, capabilities, system, machine, release = arguments
    for output, name, pattern in (
        (drivers, "a driver version", r"\d+(\.\d+)+"),
        (capabilities, "a compute capability", r"\d{1,2}\.\d"),
    ):
        wrong = [line.strip() for line in output.splitlines() or [""] if not re.fullmatch(pattern, line.strip())]
        if wrong:
            problem = f"nvidia-smi prints {wrong[0][:200]!r} instead of {name}, so no torch wheel can be selected"
            return _print(problem, "repair or update the NVIDIA driver, until nvidia-smi lists every GPU", exit_code=4)
    driver, wsl = drivers.split()[0], "microsoft" in release.lower()
    required = [(int(major), int(minor)) for major, minor in (one.split(".") for one in capabilities.split())]
    fitting = fitting_wheels(required, driver, system, machine, wsl=wsl)
    if not fitting:
        return _print(*why_no_wheel(required, driver, system, machine, wsl=wsl), exit_code=4)
    shown = ", ".join(dict.fromkeys(capabilities.split()))
    reason = f"compute capability {shown}, NVIDIA driver {driver}: CUDA {fitting[0].cuda}"
    return _print(" ".join(pip_arguments(fitting[0])), reason, exit_code=0)


def _print(first: str, second: str, *, exit_code: int) -> int:
    sys.stdout.write(f"{first}\n{second}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
