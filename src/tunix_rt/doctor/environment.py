"""The plan of a new environment with a torch that fits this computer: obstacles, the wheel, the commands, the fallback wheel,
and the meaning of the output of a command. Pure; `install.py` runs it.

A GPU never gets a torch without CUDA, and at most one fallback is tried.
"""

import importlib.metadata
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.doctor.checks import KIND_OF, first_failure, judge
from tunix_rt.doctor.facts import Ask, Facts, Torch, visible_gpus
from tunix_rt.doctor.wheels import INDEX_BASE, TESTED_TORCH, Wheel, fitting_wheels, pip_arguments, why_no_wheel

NEEDED_GIB = {"cuda": 12, "cpu": 4}
"""Disk space of torch with CUDA libraries, or without, and of pip's temporary copies."""
DTYPE, HEAD_SIZE = "float32", 64
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "30")
LAST_RESORT = "the last resort is to build torch from source (docs/guides/gpu-environment.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    name: str
    """venv, wheel, check, packages or proof."""
    command: tuple[str, ...]

    @property
    def line(self) -> str:
        return without_password(shlex.join(self.command))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPlan:
    """`wheels` are those that fit, best first; at most one is tried after the first."""

    device: str
    path: Path
    python: Path
    """That of the new environment."""
    reason: str
    wheels: tuple[Wheel, ...]
    index_base: str

    def steps(self, wheel: Wheel) -> list[Step]:
        """The commands in order, exactly as they are run."""
        new = str(self.python)
        proof = ("--device", self.device, "--dtype", DTYPE, "--head-size", str(HEAD_SIZE))
        return [
            Step(name="venv", command=(sys.executable, "-m", "venv", str(self.path))),
            Step(name="wheel", command=(new, *PIP, *pip_arguments(wheel, self.index_base))),
            Step(name="check", command=quick_check(new, self.device)),
            # The wheel is named again, so that pip does not replace it for another package.
            Step(name="packages", command=(new, *PIP, wheel.requirement, *package_source())),
            Step(name="proof", command=(new, "-P", "-m", "tunix_rt.engines.selftest.torch", *proof)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why it failed. `kind`: wheel, driver, network, storage, proof ...; `cause`: the code within it."""

    step: str
    kind: str
    cause: str
    problem: str
    fix: str


def without_password(words: str) -> str:
    """`words` with any `user:password@` of a URL replaced."""
    return re.sub(r"(?<=://)[^/\s]+@", "****@", words)


# --- before the installation ------------------------------------------------------------------------------------------


def why_refused(facts: Facts, device: str) -> Failure | None:
    """What prevents the installation: GPU, driver, disk, or that no wheel fits."""
    free, needed = facts.host.disk_free_bytes / 2**30, NEEDED_GIB[device]
    if device == "cuda":
        cause = first_failure(judge(facts, Ask(device="cuda", backend=None, dtype=DTYPE)))
        if cause is not None:
            words = f"{cause.why} ({cause.saw})"
            return _refusal(kind=KIND_OF[cause.cause], cause=cause.cause, problem=words, fix=cause.fix)
        if refusal := _why_no_wheel(facts):
            return refusal
    if free < needed:
        words = f"{free:.1f} GiB free at {facts.host.disk_path}; the environment needs about {needed} GiB"
        fix = "free disk space, or choose another --path"
        return _refusal(kind="storage", cause="low-disk", problem=words, fix=fix)
    return None


def _why_no_wheel(facts: Facts) -> Failure | None:
    gpus, driver, host = visible_gpus(facts), facts.nvidia.driver_version, facts.host
    capabilities = [gpu.capability for gpu in gpus if gpu.capability is not None]
    if driver is None or len(capabilities) < len(gpus):
        words = f"the driver does not report {'the compute capability of every GPU' if driver else 'its version'}"
        return _refusal(kind="driver", cause="driver-tells-too-little", problem=words, fix="update the NVIDIA driver")
    place = (host.system, host.machine)
    if fitting_wheels(capabilities, driver, *place, wsl=host.wsl):
        return None
    problem, fix = why_no_wheel(capabilities, driver, *place, wsl=host.wsl)
    # Whether any driver would help: 580 is the last for old GPUs, and new ones run with any later one.
    helped = any(fitting_wheels(capabilities, other, *place) for other in ("580.65.06", "999"))
    return _refusal(kind="driver" if helped else "wheel", cause="no-wheel-fits", problem=problem, fix=fix)


_refusal = partial(Failure, step="before")


def plan_environment(facts: Facts, device: str, path: Path, index_base: str = INDEX_BASE) -> EnvironmentPlan:
    """The wheels that fit and the commands, for facts that `why_refused` accepts."""
    host = facts.host
    if device == "cuda":
        gpus, driver = visible_gpus(facts), facts.nvidia.driver_version or ""
        capabilities = [gpu.capability for gpu in gpus if gpu.capability is not None]
        wheels = fitting_wheels(capabilities, driver, host.system, host.machine, wsl=host.wsl)
        shown = dict.fromkeys(f"{gpu.name}, compute capability {major}.{minor}"
                              for gpu, (major, minor) in zip(gpus, capabilities, strict=True))  # fmt: skip
        reason = f"{'; '.join(shown)}; driver {driver}"
    else:
        wheels, reason = cpu_wheels(host.system), "for the CPU"
        if host.disk_free_bytes < NEEDED_GIB["cuda"] * 2**30 and wheels[-1].cuda:
            wheels, reason = wheels[:1], f"{reason}; too little disk for the registry's build with its CUDA libraries"
    python = python_in(path, host.system)
    return EnvironmentPlan(
        device=device, path=path, python=python, reason=reason, wheels=tuple(wheels), index_base=index_base
    )


def python_in(path: Path, system: str) -> Path:
    return path / ("Scripts/python.exe" if system == "Windows" else "bin/python")


def cpu_wheels(system: str) -> list[Wheel]:
    """PyTorch's CPU build, then the registry's, which on Linux includes CUDA libraries. macOS has the latter only."""
    known: dict[str, Any] = {
        "torch": TESTED_TORCH,
        "architectures": (),
        "platforms": (),
        "driver_from": "",
        "source": "",
    }
    registry = Wheel(cuda="13.0" if system == "Linux" else "", index="", **known)
    return [registry] if system == "Darwin" else [Wheel(cuda="", index="cpu", **known), registry]


def package_source() -> list[str]:
    """pip arguments for the running tunix-rt with its training extra: this clone, its origin, or its version."""
    package = Path(tunix_rt.__file__).parent
    clone = package.parents[1]
    if package.parent.name == "src" and (clone / "pyproject.toml").is_file():
        constraints = clone / "constraints.txt"
        return ["-e", f"{clone}[training]", *(["-c", str(constraints)] if constraints.is_file() else [])]
    try:
        origin = importlib.metadata.distribution("tunix-rt").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    if origin is None:
        return [f"tunix-rt[training]=={tunix_rt.__version__}"]
    known = json.loads(origin)
    vcs = known.get("vcs_info")
    place = f"{vcs['vcs']}+{known['url']}@{vcs['commit_id']}" if vcs else known["url"]
    return [f"tunix-rt[training] @ {place}"]


def next_wheel(fitting: Sequence[Wheel], failed: Wheel, *, step: str, kind: str = "wheel") -> Wheel | None:
    """The fallback after `failed`, by the step and kind of the failure; None if another wheel would not help.

    Not available: from another host (PyTorch's index, the registry), else from another folder of the index, else another
    version. Available, but it does not compute: one for another CUDA version.
    """
    if kind in ("storage", "permissions") or step not in ("wheel", "check", "proof"):
        return None
    others = [wheel for wheel in fitting if wheel != failed]
    if step == "wheel":
        other_host = [wheel for wheel in others if bool(wheel.index) != bool(failed.index)]
        other_folder = [wheel for wheel in others if wheel.index != failed.index]
        return next(iter([*other_host, *other_folder, *others]), None)
    return next((wheel for wheel in others if wheel.cuda != failed.cuda), None)


# --- the output of the commands ---------------------------------------------------------------------------------------


def quick_check(python: str, device: str) -> tuple[str, ...]:
    """The command that prints the build of torch in `python`, then runs one kernel: the last line is 8.0."""
    script = (
        "import json, torch; c = torch.cuda; "
        'print(json.dumps({"version": torch.__version__, "cuda_build": torch.version.cuda, "hip_build": '
        'getattr(torch.version, "hip", None), "arch_list": c.get_arch_list(), "cuda_available": c.is_available()}), '
        f'flush=True); print(torch.ones(8, device="{device}").sum().item())'
    )
    return (python, "-P", "-c", script)  # -P: do not import a torch.py of the working folder


def judge_quick_check(output: str, exit_code: int | None, device: str, facts: Facts) -> tuple[Torch, Failure | None]:
    """The torch in the output, and what is wrong with it on this computer: the checks of the doctor, then the kernel."""
    torch = _parse_torch(output)
    cause = first_failure(judge(replace(facts, torch=torch), Ask(device=device, backend="torch", dtype=DTYPE)))
    if cause is not None:
        problem, kind = f"{cause.why} ({cause.saw})", KIND_OF[cause.cause]
        return torch, Failure(step="check", kind=kind, cause=cause.cause, problem=problem, fix=cause.fix)
    if exit_code == 0 and "8.0" in output.splitlines():
        return torch, None
    code = "wheel-lacks-architecture" if "no kernel image" in output else "kernel-failed"
    problem = f"torch {torch.version} cannot run a kernel on {device} ({last_words(output)})"
    fix = f"see the output of torch in the log; {LAST_RESORT}"
    return torch, Failure(step="check", kind="wheel", cause=code, problem=problem, fix=fix)


def _parse_torch(output: str) -> Torch:
    from pydantic import TypeAdapter

    lines = output.splitlines()
    for place, line in enumerate(lines):
        if line.startswith('{"version"'):
            warnings = " ".join([*lines[:place], *lines[place + 1 :][-1:]])
            try:
                known = json.loads(line)
                known |= {"arch_list": known["arch_list"], "said": warnings[:600]}
                return TypeAdapter(Torch).validate_python(known)
            except (ValueError, KeyError, TypeError, RecursionError):
                return Torch(version="unknown", problem=f"malformed output of torch: {line[:200]!r}")
    return Torch(version="unknown", problem=f"no output of torch: {last_words(output)}")


_PIP_ERRORS = (
    ("storage", "disk-full", r"No space left on device|Disk quota exceeded|Read-only file system|Errno (28|30|122)\b",
     "free space there (and where pip keeps its cache and temporary files), or choose another --path"),
    ("permissions", "not-permitted", r"Permission denied|Errno 13\b", "choose a --path that this user can write"),
    ("network", "index-unreachable",
     r"ConnectionError|Connection (refused|reset|aborted|timed out|to \S+ timed out)|ConnectTimeout|ReadTimeout|timed out\b|"
     r"name resolution|Name or service not known|ProxyError|SSLError|CERTIFICATE_VERIFY_FAILED|Max retries exceeded|"
     r"Could not fetch URL|HTTP error 5\d\d|Network is unreachable",
     "check the network, the proxy and pip's index settings, or name a mirror of PyTorch's index: --wheel-index"),
    ("wheel", "wheel-not-there", r"No matching distribution|not a supported wheel|Could not find a version|HTTP error 4\d\d",
     "use Python 3.11, 3.12 or 3.13 on a system torch is published for, or name another index: --wheel-index"),
)  # fmt: skip
"""Kind, cause, pattern of pip's output, fix; the first match counts: without a network pip also finds no distribution."""


def judge_install(output: str, step: str, what: str) -> Failure:
    """Why `pip install` failed, from its output."""
    for kind, cause, pattern, fix in _PIP_ERRORS:
        if re.search(pattern, output):
            problem = f"pip could not get {what} ({last_words(output)})"
            return Failure(step=step, kind=kind, cause=cause, problem=problem, fix=fix)
    problem = f"pip failed on {what} ({last_words(output)})"
    return Failure(step=step, kind="environment", cause="pip-failed", problem=problem, fix="see the log")


def last_words(output: str) -> str:
    """The errors in the output of a command, or its last lines, in one line of limited length."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    ending = lines[-1:] if any(line.startswith("Traceback ") for line in lines) else lines[-3:]
    return without_password(" | ".join(errors[-3:] or ending))[-600:] or "no output"
