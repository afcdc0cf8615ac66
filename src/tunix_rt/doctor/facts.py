"""What the doctor knows of a computer: plain values, gathered once by `probe.py`, judged by pure functions, and the same
in a file. A fact that could not be had is None or absent; nothing here is a judgement."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tunix_rt.errors import InputError

SCHEMA = "tunix-rt/facts/1"
MAKE_A_FILE = "make the file with `tunix-rt doctor --facts-only > facts.json` of the same version"


class _Strict:
    """A key that is not a fact is an error when facts come from a file."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(_Strict):
    """The computer without its accelerators. RAM is the limit of the control group where that is lower."""

    system: str = "Linux"
    """As Python names it: Linux, Windows, Darwin."""
    release: str = ""
    machine: str = "x86_64"
    """As the system names it: x86_64 (Windows: AMD64), aarch64 (macOS: arm64)."""
    python: str = "3.11"
    cpu: str = "unknown"
    cpu_cores: int = 1
    ram_total_bytes: int
    ram_available_bytes: int
    disk_path: str = "."
    """The volume the run would be written to."""
    disk_free_bytes: int
    container: str | None = None
    """docker, podman, kubernetes, lxc, or another name the container gives itself; None outside of one."""
    wsl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess(_Strict):
    """A process that holds memory of a GPU. WSL and some containers do not tell how much."""

    pid: int
    name: str | None = None
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSlice(_Strict):
    """A slice of a GPU in MIG mode; CUDA takes it for a device of its own."""

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(_Strict):
    """One NVIDIA GPU as NVML sees it, whatever is masked. A fact NVML would not tell is None."""

    index: int = 0
    name: str
    uuid: str = ""
    total_bytes: int | None = None
    """None where CPU and GPU share one memory and NVML does not tell (GB10, Jetson)."""
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    mig: bool = False
    slices: tuple[GpuSlice, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    """Processes other than ours that hold it."""
    compute_mode: str = "default"
    """default, exclusive_process or prohibited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice(_Strict):
    """A display controller or accelerator on the bus; there whether or not a driver is. Numbers as in `lspci -n`."""

    address: str
    vendor: str
    """0x10de NVIDIA, 0x1ae0 Google, 0x1002 AMD."""
    device: str
    subsystem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode(_Strict):
    """A file in /dev of a GPU or TPU."""

    path: str
    usable: bool = True
    """Whether this user may read and write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvidia(_Strict):
    """Everything about NVIDIA: bus, kernel module, nodes, library, NVML; in the order in which one hides the next."""

    pci: tuple[PciDevice, ...] = ()
    module_version: str | None = None
    """Of the kernel module `nvidia`; in a container that of the host."""
    module_flavour: str | None = None
    """open or proprietary."""
    nouveau: bool = False
    """Whether the kernel has loaded nouveau, which keeps the NVIDIA module out."""
    nodes: tuple[DeviceNode, ...] = ()
    """/dev/nvidia0 ..., /dev/nvidiactl, /dev/nvidia-uvm; on WSL /dev/dxg."""
    libcuda: tuple[str, ...] = ()
    """Places where the loader finds a libcuda.so.1, the first it would take first."""
    nvml_problem: str | None = None
    """Name of the NVML error and its text; None when NVML answered."""
    driver_version: str | None = None
    driver_cuda: str | None = None
    """Highest CUDA version the driver supports."""
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu(_Strict):
    """Signs of a Google TPU. Variables and libtpu may be there on any computer; a bus device or a node may not."""

    pci: tuple[PciDevice, ...] = ()
    nodes: tuple[DeviceNode, ...] = ()
    """/dev/accel0 ... (v2 to v4), /dev/vfio/0 ... (v5e and later)."""
    libtpu: str | None = None
    """Version of the installed package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch(_Strict):
    """The installed torch. What only a running torch can tell is None when it was not asked, or did not answer."""

    version: str
    cuda_build: str | None = None
    """CUDA version the wheel was built with; None is a wheel without CUDA."""
    hip_build: str | None = None
    """ROCm version the wheel was built with."""
    cudnn: str | None = None
    arch_list: tuple[str, ...] | None = None
    cuda_available: bool | None = None
    cuda_devices: int | None = None
    said: str | None = None
    """Warnings torch gave while it was asked."""
    problem: str | None = None
    """Why it could not be asked: a hang, a crash, an answer that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jax(_Strict):
    """The installed jax. `devices` is None when it was not asked, or did not answer."""

    version: str
    jaxlib: str | None = None
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Installed packages that bring an accelerator, with versions: jax-cuda13-plugin, jax-cuda13-pjrt, jax-rocm7-plugin."""
    asked_for: str | None = None
    """The one platform it was asked for: cpu, cuda or tpu."""
    platform: str | None = None
    """The platform it then said it has: cpu, gpu or tpu."""
    devices: tuple[str, ...] | None = None
    """device_kind of each device: `NVIDIA H200`, `TPU v5 lite`."""
    said: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(_Strict):
    """Everything the checks look at."""

    schema: str = SCHEMA
    host: Host
    nvidia: Nvidia = Nvidia()
    tpu: Tpu = Tpu()
    torch: Torch | None = None
    jax: Jax | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that decide what is seen or where memory goes (`probe.VARIABLES`); no others are read."""


def read_facts(path: Path) -> Facts:
    """The facts in a file that `tunix-rt doctor --facts-only` wrote; what is no such file is an InputError."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: {words}", fix=MAKE_A_FILE) from error
    return facts_from_json(raw, source=str(path))


def facts_from_json(raw: Any, *, source: str = "facts") -> Facts:
    """The Facts that `rundir.to_plain` made plain. Anything else is an InputError that names the place."""
    from pydantic import TypeAdapter, ValidationError

    try:
        facts = TypeAdapter(Facts).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"{source}: {place}: {first['msg']}", fix=MAKE_A_FILE) from error
    if facts.schema != SCHEMA:
        raise InputError(f"{source}: schema is {facts.schema!r}, this version reads {SCHEMA!r}", fix=MAKE_A_FILE)
    return facts
