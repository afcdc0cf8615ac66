"""Gathers the facts about this computer. Imports neither torch nor jax: they are started in child processes with a time
limit, and only if there is a sign of an accelerator."""

import contextlib
import hashlib
import os
import platform
import re
import shutil
from pathlib import Path

import psutil

from tunix_rt.doctor.child_process import NO_ANSWER
from tunix_rt.doctor.facts import Facts, Host, Interface, Tpu, gpu_signs
from tunix_rt.doctor.nvidia import device_nodes, nvidia_facts, pci_devices, read_text
from tunix_rt.doctor.packages import ask_jax, ask_torch, installed_jax, installed_torch, version_of
from tunix_rt.progress import phase

ROOT = Path("/")
# Variables without paths and secrets in their values. LD_LIBRARY_PATH has its effect in `Nvidia.libcuda`.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "WORLD_SIZE",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
GOOGLE_VENDOR = "0x1ae0"
# v2 and v3, one without a public name, v4, v5p, v5e, v6e, TPU7x. Google's network cards have the same vendor.
TPU_DEVICES = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
CONTAINER_FILES = {".dockerenv": "docker", "run/.containerenv": "podman", ".singularity.d": "apptainer"}
CONTAINER_GROUPS = {
    "kubepods": "kubernetes",
    "docker": "docker",
    "libpod": "podman",
    "lxc": "lxc",
    "containerd": "containerd",
}


@phase("detect hardware and packages")
def gather_facts(
    output: Path | None = None, *, backend: str = "torch", device: str = "auto", deep: bool = False
) -> Facts:
    """The facts of this computer now.

    The engine of `backend` is started (seconds) only if there is a sign of an accelerator that `device` allows, and not
    after NVML timed out: it would hang on the same driver. With `deep` both engines are started in any case.
    """
    host, nvidia, tpu = host_facts(output), nvidia_facts(), tpu_facts()
    torch, jax = installed_torch(), installed_jax()
    hung = NO_ANSWER in (nvidia.nvml_problem or "")
    gpu = bool(gpu_signs(host, nvidia)) and not hung
    if torch is not None and (deep or (backend == "torch" and gpu and device not in ("cpu", "tpu"))):
        torch = ask_torch(torch)
    platform_ = jax_platform(device, gpu=gpu, tpu=bool(tpu.pci or tpu.nodes), deep=deep)
    if jax is not None and platform_ is not None and (deep or backend == "jax"):
        jax = ask_jax(jax, platform_)
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return Facts(
        host=host, nvidia=nvidia, tpu=tpu, torch=torch, jax=jax, interfaces=interfaces(), environment=environment
    )


def interfaces() -> tuple[Interface, ...]:
    found = psutil.net_if_stats().items()
    return tuple(Interface(name=name, up=one.isup, loopback="loopback" in one.flags) for name, one in sorted(found))


def jax_platform(device: str, *, gpu: bool, tpu: bool, deep: bool = False) -> str | None:
    """The one platform that jax is started with, whatever JAX_PLATFORMS is; None: it is not started."""
    if gpu and device not in ("cpu", "tpu"):
        return "cuda"
    if tpu and device in ("auto", "tpu"):
        return "tpu"
    return "cpu" if deep or (device == "cpu" and (gpu or tpu)) else None


def tpu_facts(root: Path = ROOT) -> Tpu:
    """Signs of a TPU. Numbered VFIO nodes belong to any passed-through device, so they need a TPU on the bus."""
    pci = tuple(device for _, device in pci_devices(root, GOOGLE_VENDOR) if device.device in TPU_DEVICES)
    nodes = device_nodes(root, "accel[0-9]*", *(["vfio/[0-9]*"] if pci else []))
    return Tpu(pci=pci, nodes=nodes, libtpu=version_of("libtpu") or version_of("libtpu-nightly"))


# --- host ------------------------------------------------------------------------------------------------------------


def host_facts(output: Path | None = None, root: Path = ROOT) -> Host:
    """The computer without its accelerators, and the volume of `output`, whose path is kept as given."""
    total, available = _memory(root)
    disk = _existing(output or Path("."))
    return Host(
        system=platform.system(),
        release=platform.release(),
        machine=platform.machine(),
        python=platform.python_version(),
        cpu=_cpu_name(root),
        cpu_cores=cores(),
        ram_total_bytes=total,
        ram_available_bytes=available,
        disk_path=str(disk),
        disk_free_bytes=shutil.disk_usage(disk).free,
        shm_bytes=shutil.disk_usage(root / "dev/shm").total if os.path.isdir(root / "dev/shm") else None,
        container=_container(root),
        wsl="microsoft" in read_text(root / "proc/version").lower(),
    )


def _cpu_name(root: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo"), flags=re.MULTILINE | re.IGNORECASE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cpu_facts(root: Path = ROOT) -> dict[str, str]:
    """What decides the numerics of a CPU: name, instruction set, Python version.

    The instruction set is a hash of its sorted names in /proc/cpuinfo; elsewhere of the name of the architecture."""
    text = read_text(root / "proc/cpuinfo")
    match = re.search(r"^(?:flags|features)\s*:\s*(.+)$", text, flags=re.MULTILINE | re.IGNORECASE)
    flags = " ".join(sorted(set(match[1].split()))) if match else platform.machine()
    return {
        "cpu": _cpu_name(root),
        "cpu_flags_sha256": hashlib.sha256(flags.encode()).hexdigest(),
        "python": platform.python_version(),
    }


def cores() -> int:
    """Cores of this process, in a container or under taskset fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory(root: Path) -> tuple[int, int]:
    """Total and available bytes; the limit of the control group if that is lower.

    Its usage counts the page cache too, of which `inactive_file` is reclaimable and so available.
    """
    memory = psutil.virtual_memory()
    group = root / "sys/fs/cgroup"
    limit = _first_number(group / "memory.max", group / "memory/memory.limit_in_bytes")
    if limit is None or limit >= memory.total:
        return memory.total, memory.available
    used = _first_number(group / "memory.current", group / "memory/memory.usage_in_bytes") or 0
    in_use = max(0, used - _reclaimable(group / "memory.stat", group / "memory/memory.stat"))
    return limit, min(memory.available, max(0, limit - in_use))


def _first_number(*paths: Path) -> int | None:
    for path in paths:
        with contextlib.suppress(ValueError):  # absent, or the word `max`
            return int(read_text(path))
    return None


def _reclaimable(*paths: Path) -> int:
    """Bytes of `inactive_file` in the first memory.stat; version 1 has nested groups in `total_`."""
    for path in paths:
        if text := read_text(path):
            with contextlib.suppress(ValueError):
                counted = dict(line.split(maxsplit=1) for line in text.splitlines())
                return int(counted.get("total_inactive_file", counted.get("inactive_file", 0)))
    return 0


def _existing(path: Path) -> Path:
    """`path`, or its nearest parent that exists and is readable."""
    return next((folder for folder in (path, *path.parents) if os.path.isdir(folder)), Path("."))


def _container(root: Path) -> str | None:
    """The kind of container of this process, by the files and variables of its engine, last by control groups."""
    for name, kind in CONTAINER_FILES.items():
        if os.path.exists(root / name):
            return kind
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    first = re.search(r"(?:^|\0)container=([^\0]*)", read_text(root / "proc/1/environ"))
    own = os.environ.get("container", "")  # noqa: SIM112 (systemd writes it in small letters)
    for named in (first[1] if first else "", own, read_text(root / "run/systemd/container")):
        if re.fullmatch(r"[\w.-]{1,40}", named) and named != "wsl":
            return named
    groups = read_text(root / "proc/1/cgroup")
    return next((kind for name, kind in CONTAINER_GROUPS.items() if name in groups), None)
