"""Facts about a computer: plain values, gathered once by `probe.py`, judged by pure functions, the same in a file. An
unknown fact is None or absent. And `Check`, the verdict on one cause."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Literal

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
    shm_bytes: int | None = None
    """Size of /dev/shm."""
    container: str | None = None
    """docker, podman, kubernetes, lxc, or another name the container gives itself; None outside of one."""
    wsl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface(_Strict):
    """A network interface."""

    name: str
    up: bool = True
    loopback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess(_Strict):
    """A process that holds memory of a GPU. WSL and some containers do not report how much."""

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
    """One NVIDIA GPU as NVML sees it, masked or not. What NVML does not report is None."""

    index: int = 0
    name: str
    uuid: str = ""
    total_bytes: int | None = None
    """None where CPU and GPU share one memory and NVML does not report it (GB10, Jetson)."""
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
    """Paths of libcuda.so.1 in the order in which the loader looks."""
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
    """The installed torch. What only a running torch reports is None if it was not started, or failed."""

    version: str
    cuda_build: str | None = None
    """CUDA version the wheel was built with; None is a wheel without CUDA."""
    hip_build: str | None = None
    """ROCm version the wheel was built with."""
    cudnn: str | None = None
    arch_list: tuple[str, ...] | None = None
    cuda_available: bool | None = None
    cuda_devices: int | None = None
    nccl: str | None = None
    """Its version; empty: torch has none."""
    said: str | None = None
    """Warnings of torch while it was probed."""
    problem: str | None = None
    """Why the probe failed: a hang, a crash, malformed output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jax(_Strict):
    """The installed jax. `devices` is None if it was not started, or failed."""

    version: str
    jaxlib: str | None = None
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Installed accelerator plugins with versions: jax-cuda13-plugin, jax-cuda13-pjrt, jax-rocm7-plugin."""
    asked_for: str | None = None
    """The one platform it was started with: cpu, cuda or tpu."""
    platform: str | None = None
    """The platform that it reported: cpu, gpu or tpu."""
    devices: tuple[str, ...] | None = None
    """device_kind of each device: `NVIDIA H200`, `TPU v5 lite`."""
    said: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(_Strict):
    """Everything that the checks use."""

    schema: str = SCHEMA
    host: Host
    nvidia: Nvidia = Nvidia()
    tpu: Tpu = Tpu()
    torch: Torch | None = None
    jax: Jax | None = None
    interfaces: tuple[Interface, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that decide visibility and memory (`probe.VARIABLES`); no others are read."""
    log: tuple[str, ...] = ()
    """Lines of the log of a run that a rule knows."""


def read_facts(path: Path) -> Facts:
    """The facts in a file of `tunix-rt doctor --facts-only`; InputError for any other file."""
    return facts_from_json(read_facts_json(path), source=str(path))


def read_facts_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: {words}", fix=MAKE_A_FILE) from error


def facts_from_json(raw: Any, *, source: str = "facts") -> Facts:
    """The Facts in `raw`, the output of `storage.to_plain`; InputError with the path for anything else."""
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


WSL_LIBRARIES = "/usr/lib/wsl/lib"


def gpu_signs(host: Host, nvidia: Nvidia) -> list[str]:
    """Every sign of an NVIDIA GPU. /dev/dxg alone is none: every WSL 2 has it.

    A driver that fails is a sign too, except `DriverNotLoaded` where the PCI bus is visible and empty: there the driver
    has no GPU to drive.
    """
    signs = [gpu.name for gpu in nvidia.gpus]
    signs += [f"PCI device {device.address}" for device in nvidia.pci]
    signs += [node.path for node in nvidia.nodes if node.path.startswith("/dev/nvidia")]
    signs += [f"kernel module {nvidia.module_version}"] if nvidia.module_version else []
    signs += [f"{path} (WSL)" for path in nvidia.libcuda if host.wsl and path.startswith(WSL_LIBRARIES)]
    if not signs and nvidia.driver_version:
        signs.append(f"driver {nvidia.driver_version}")
    if not signs and nvidia.nvml_problem and not nvidia.nvml_problem.startswith("NVMLError_LibraryNotFound"):
        sees_bus = host.system == "Linux" and not host.wsl
        if not (sees_bus and nvidia.nvml_problem.startswith("NVMLError_DriverNotLoaded")):
            signs.append(nvidia.nvml_problem)
    return signs


def visible_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows under CUDA_VISIBLE_DEVICES: a list ends at its first invalid entry, a duplicate empties it.

    A GPU in MIG mode shows as one of its slices, with the slice's memory. Without a mask CUDA gives a process whole GPUs, or
    the first slice if there are none.
    """
    gpus = facts.nvidia.gpus
    mask = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        whole = tuple(gpu for gpu in gpus if not gpu.mig)
        slices = [shown for gpu in gpus if gpu.mig and (shown := _as_cuda_sees(gpu)) is not None]
        return whole or tuple(slices[:1])
    named: list[Gpu] = []
    for entry in mask.split(","):
        gpu = _named_by(entry.strip(), gpus)
        if gpu is None:
            break
        if any(gpu.uuid == other.uuid and gpu.index == other.index for other in named):
            return ()
        named.append(gpu)
    return tuple(named)


def _as_cuda_sees(gpu: Gpu) -> Gpu | None:
    if not gpu.mig:
        return gpu
    return _slice_of(gpu, gpu.slices[0].uuid) if gpu.slices else None


def _slice_of(gpu: Gpu, uuid: str) -> Gpu | None:
    part = next((part for part in gpu.slices if part.uuid == uuid), None)
    return replace(gpu, **asdict(part)) if part else None


def _named_by(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    if entry.startswith("MIG-"):
        return next((found for gpu in gpus if (found := _slice_of(gpu, entry)) is not None), None)
    if entry.startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return _as_cuda_sees(matching[0]) if len(matching) == 1 else None
    digits = re.match(r"\+?\d+", entry)
    if not digits:
        return None
    return next((_as_cuda_sees(gpu) for gpu in gpus if gpu.index == int(digits[0])), None)


Verdict = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a run requests. With `backend` None only the device, as for a plan: no engine has to be installed."""

    device: str = "auto"
    """auto, cpu, cuda or tpu; `gpu` is an alias of cuda."""
    backend: str | None = "torch"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.device == "gpu":
            object.__setattr__(self, "device", "cuda")


@dataclass(frozen=True, slots=True)
class Check:
    """The verdict on one cause. `saw` is the evidence; a failure or a warning has its conclusion (`why`) and its `fix`."""

    cause: str
    verdict: Verdict
    saw: str
    why: str = ""
    fix: str = ""


Rule = Callable[[Facts, Ask], Check]


def check(
    cause: str, *, engine: str | None = None, needs: Callable[[Facts, Ask], bool] = lambda _facts, _ask: True
) -> Callable[[Rule], Rule]:
    """A rule for `cause`, which is skipped where another `engine` is requested, and unless `needs` holds. The rule returns
    `passed(...)`, `failed(...)` and so on."""

    def decorate(rule: Rule) -> Rule:
        @wraps(rule)
        def judged(facts: Facts, ask: Ask) -> Check:
            if engine not in (None, ask.backend):
                return replace(skipped("another engine is requested"), cause=cause)
            return replace(rule(facts, ask) if needs(facts, ask) else skipped(), cause=cause)

        return judged

    return decorate


def skipped(saw: str = "not applicable") -> Check:
    return Check("", "skip", saw)


def passed(saw: str) -> Check:
    return Check("", "pass", saw)


def failed(saw: str, why: str, fix: str) -> Check:
    return Check("", "fail", saw, why, fix)


def warned(saw: str, why: str, fix: str) -> Check:
    return Check("", "warn", saw, why, fix)
