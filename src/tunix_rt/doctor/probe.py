"""Facts about this computer, gathered once. Judges nothing, and never imports torch or jax: a probe that initialises CUDA
in the trainer, or hangs it, does harm. torch is asked in a child process with a time limit."""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "JAX_PLATFORMS")
TORCH_CHILD_SECONDS = 20.0
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
CGROUP_USES = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
CGROUP_STATS = (Path("/sys/fs/cgroup/memory.stat"), Path("/sys/fs/cgroup/memory/memory.stat"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as NVML sees it, whatever is masked. A fact NVML would not tell is None."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The installed torch. What only a running torch can tell is None when it was not asked, or did not answer."""

    version: str
    cuda_build: str | None = None
    """CUDA version the wheel was built with; None is a wheel without CUDA."""
    arch_list: tuple[str, ...] | None = None
    cuda_available: bool | None = None
    cuda_devices: int | None = None
    said: str | None = None
    """Warnings torch gave while it was asked."""
    problem: str | None = None
    """Why it could not be asked: a hang, a crash, an answer that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything the checks look at. A sign of NVIDIA hardware without a driver is kept apart from what NVML lists."""

    os: str
    python: str
    cpu: str
    cpu_cores: int
    ram_total_bytes: int
    ram_available_bytes: int
    disk_path: str
    disk_free_bytes: int
    gpus: tuple[Gpu, ...] = ()
    nvidia_signs: tuple[str, ...] = ()
    """Traces of NVIDIA hardware that need no driver: PCI devices, device nodes, the kernel module."""
    nvml_problem: str | None = None
    driver_version: str | None = None
    driver_cuda: str | None = None
    """Highest CUDA version the driver supports."""
    visibility: Mapping[str, str]
    """The visibility variables that are set."""
    tpu_signs: tuple[str, ...] = ()
    libtpu: str | None = None
    torch: Torch | None = None
    jax: str | None = None


def gather_facts(output: Path | None = None, *, deep: bool = False) -> Facts:
    """The facts of this computer now. torch is run (seconds) only where a GPU is present, or with `deep`."""
    gpus, nvidia = _nvidia()
    signs = _nvidia_signs()
    torch = _installed_torch()
    if torch is not None and (deep or gpus or signs):
        torch = ask_torch(torch)
    total, available = _memory()
    disk = _existing(output or Path.cwd())
    return Facts(
        os=platform.platform(),
        python=platform.python_version(),
        cpu=_cpu_name(),
        cpu_cores=_cores(),
        ram_total_bytes=total,
        ram_available_bytes=available,
        disk_path=str(disk),
        disk_free_bytes=shutil.disk_usage(disk).free,
        gpus=gpus,
        nvidia_signs=signs,
        nvml_problem=nvidia.get("problem"),
        driver_version=nvidia.get("driver"),
        driver_cuda=nvidia.get("cuda"),
        visibility={name: os.environ[name] for name in VISIBILITY_VARIABLES if name in os.environ},
        tpu_signs=_tpu_signs(),
        libtpu=_version("libtpu"),
        torch=torch,
        jax=_version("jax"),
    )


def facts_from_json(raw: Mapping[str, Any]) -> Facts:
    """The Facts that `rundir.to_plain` made plain, for reading `doctor.json` back."""
    plain = dict(raw)
    gpus = [dict(gpu) for gpu in plain.pop("gpus", ())]
    torch = plain.pop("torch", None)
    for gpu in gpus:
        gpu["capability"] = tuple(gpu["capability"]) if gpu.get("capability") else None
    if torch:
        torch = {**torch, "arch_list": None if torch.get("arch_list") is None else tuple(torch["arch_list"])}
    for name in ("nvidia_signs", "tpu_signs"):
        plain[name] = tuple(plain.get(name, ()))
    return Facts(**plain, gpus=tuple(Gpu(**gpu) for gpu in gpus), torch=Torch(**torch) if torch else None)


# --- host ------------------------------------------------------------------------------------------------------------


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores this process may run on, which in a container or under taskset are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> tuple[int, int]:
    """Total and available bytes; the limit of the control group where that is lower.

    Its use counts pages of files too. Those not in use (`inactive_file`) make room when asked, so they are available.
    """
    memory = psutil.virtual_memory()
    limit, used = _first_number(CGROUP_LIMITS), _first_number(CGROUP_USES)
    if limit is None or limit >= memory.total:
        return memory.total, memory.available
    in_use = max(0, (used or 0) - _reclaimable(CGROUP_STATS))
    return limit, min(memory.available, max(0, limit - in_use))


def _first_number(paths: tuple[Path, ...]) -> int | None:
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # absent, or the word `max`
            return int(path.read_text())
    return None


def _reclaimable(paths: tuple[Path, ...]) -> int:
    """Bytes of `inactive_file` in the first memory.stat there is; version 1 counts the groups below in `total_`."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            counted = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
            return int(counted.get("total_inactive_file", counted.get("inactive_file", 0)))
    return 0


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


# --- NVIDIA ----------------------------------------------------------------------------------------------------------


def _nvidia() -> tuple[tuple[Gpu, ...], dict[str, str]]:
    """GPUs, and `driver` and `cuda` or the `problem` that kept NVML from telling."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), {"problem": _nvml_words(error)}
    found: dict[str, str] = {}
    gpus: list[Gpu] = []
    try:
        found["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        found["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpus.append(_gpu(pynvml, index))
    except pynvml.NVMLError as error:
        found["problem"] = _nvml_words(error)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return tuple(gpus), found


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability: tuple[int, int] | None = None
    with contextlib.suppress(pynvml.NVMLError):  # unknown to an old driver
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    return Gpu(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=capability,
    )


def _nvml_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def _nvidia_signs() -> tuple[str, ...]:
    """NVIDIA hardware that shows without any driver library, such as a GPU behind a container without its runtime."""
    signs = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            if vendor == "0x10de" and kind.startswith("0x03"):  # NVIDIA, display controller
                signs.append(f"PCI device {device.name}")
    signs += [str(node) for node in sorted(Path("/dev").glob("nvidia[0-9]*"))]
    module = Path("/sys/module/nvidia/version")
    with contextlib.suppress(OSError):
        signs.append(f"kernel module {module.read_text().strip()}")
    return tuple(signs)


def _tpu_signs() -> tuple[str, ...]:
    """Device nodes of TPUs and the names (not the values) of their environment variables."""
    nodes = [str(node) for node in sorted(Path("/dev").glob("accel[0-9]*"))]
    return tuple(nodes + sorted(name for name in os.environ if name.startswith("TPU_")))


# --- torch and jax ---------------------------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _installed_torch() -> Torch | None:
    """torch by its metadata alone: version, and the CUDA of its local tag (`+cu130`, `+cpu`) or of `torch/version.py`."""
    version = _version("torch")
    if version is None:
        return None
    tag = version.partition("+")[2]
    if match := re.fullmatch(r"cu(\d+)(\d)", tag):
        return Torch(version=version, cuda_build=f"{match[1]}.{match[2]}")
    return Torch(version=version, cuda_build=None if tag == "cpu" else _cuda_in_version_file())


def _cuda_in_version_file() -> str | None:
    path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, flags=re.MULTILINE)
    return match[1] if match else None


TORCH_SCRIPT = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    facts = {
        "cuda_build": torch.version.cuda,
        "arch_list": torch.cuda.get_arch_list(),
        "cuda_available": torch.cuda.is_available(),
        "cuda_devices": torch.cuda.device_count(),
    }
facts["said"] = " | ".join(" ".join(str(w.message).split()) for w in said if issubclass(w.category, UserWarning)) or None
print(json.dumps(facts))
"""


def ask_torch(torch: Torch, *, script: str = TORCH_SCRIPT, seconds: float = TORCH_CHILD_SECONDS) -> Torch:
    """`torch` completed by what it says in a process of its own, or with the `problem` that kept it from answering."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _torch(torch, problem=f"torch gave no answer within {seconds:g} s")
    except OSError as error:
        return _torch(torch, problem=f"no process for torch: {error}")
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no words"])[-1][:300]
        return _torch(torch, problem=f"torch ended with code {child.returncode}: {last}")
    try:
        answer = json.loads(child.stdout.strip().splitlines()[-1])
        return _torch(
            torch,
            cuda_build=answer["cuda_build"],
            arch_list=tuple(str(arch) for arch in answer["arch_list"]),
            cuda_available=bool(answer["cuda_available"]),
            cuda_devices=int(answer["cuda_devices"]),
            said=answer["said"],
        )
    except (ValueError, KeyError, TypeError, IndexError):
        return _torch(torch, problem=f"torch answered {child.stdout.strip()[-200:]!r}")


def _torch(known: Torch, **more: Any) -> Torch:
    return Torch(**({"version": known.version, "cuda_build": known.cuda_build} | more))
