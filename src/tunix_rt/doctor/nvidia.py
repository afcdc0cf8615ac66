"""Facts about NVIDIA GPUs, from the bottom up: bus, kernel module, device nodes, libcuda, NVML.

Run as a program it prints what NVML reports. Only that child loads the driver's library, because a broken driver can hang or
crash the process that does; it imports the standard library and pynvml alone and takes tens of milliseconds."""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from tunix_rt.doctor.facts import DeviceNode, Gpu, GpuProcess, GpuSlice, Nvidia, PciDevice

T = TypeVar("T")

NVML_COMMAND = (sys.executable, "-P", "-m", "tunix_rt.doctor.nvidia")
NVML_SECONDS = 20.0  # eight GPUs without the persistence daemon take more than ten
LDCONFIG_SECONDS = 5.0
NVIDIA_VENDOR = "0x10de"
COMPUTE_MODES = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
LDCONFIG_MACHINES = {"x86_64": "x86-64", "aarch64": "AArch64"}


def nvidia_facts(root: Path = Path("/")) -> Nvidia:
    """All facts about NVIDIA GPUs. `root` is the root folder of the bus, the module and the nodes."""
    version, flavour = _module(root)
    driver_version, driver_cuda, gpus, problem = ask_nvml()
    return Nvidia(
        pci=tuple(device for kind, device in pci_devices(root, NVIDIA_VENDOR) if kind.startswith("0x03")),
        module_version=version,
        module_flavour=flavour,
        nouveau=(root / "sys/module/nouveau").is_dir(),
        nodes=device_nodes(root, "nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "dxg"),
        libcuda=_libcuda(root),
        nvml_problem=problem,
        driver_version=driver_version,
        driver_cuda=driver_cuda,
        gpus=gpus,
    )


# --- bus, module, nodes, libcuda -------------------------------------------------------------------------------------


def pci_devices(root: Path, vendor: str) -> list[tuple[str, PciDevice]]:
    """The devices of a vendor on the bus, each with its class (0x03.... is a display controller)."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if read_text(folder / "vendor") == vendor:
            device, subsystem = (read_text(folder / name) for name in ("device", "subsystem_device"))
            one = PciDevice(address=folder.name, vendor=vendor, device=device, subsystem=subsystem)
            found.append((read_text(folder / "class"), one))
    return found


def device_nodes(root: Path, *patterns: str) -> tuple[DeviceNode, ...]:
    """The files of /dev that match, in the order of the patterns, and whether this user can read and write each."""
    dev, rights = root / "dev", os.R_OK | os.W_OK
    globs = (sorted(dev.glob(pattern), key=lambda path: (len(path.name), path)) for pattern in patterns)
    found = [(f"/dev/{path.relative_to(dev)}", os.access(path, rights)) for paths in globs for path in paths]
    return tuple(DeviceNode(path=path, usable=usable) for path, usable in found)


def read_text(path: Path) -> str:
    """The text of a small system file, stripped; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _module(root: Path) -> tuple[str | None, str | None]:
    """Version and flavour of the loaded kernel module."""
    line = read_text(root / "proc/driver/nvidia/version").partition("\n")[0]
    version = read_text(root / "sys/module/nvidia/version")
    if not version and (match := re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]*\d)(\s|$)", line)):
        version = match[1]
    flavour = ("open" if "Open Kernel Module" in line else "proprietary") if line else None
    return version or None, flavour


def _libcuda(root: Path) -> tuple[str, ...]:
    """Paths of libcuda.so.1 for the loader: LD_LIBRARY_PATH, then its cache, then the folder of WSL."""
    from tunix_rt.doctor.packages import plain_words

    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    places = [str(folder / "libcuda.so.1") for folder in folders if os.path.exists(folder / "libcuda.so.1")]
    places += cached_libraries(_loader_cache(), "libcuda.so.1", platform.machine())
    if (root / "usr/lib/wsl/lib/libcuda.so.1").exists():
        places.append("/usr/lib/wsl/lib/libcuda.so.1")
    return tuple(dict.fromkeys(plain_words(place) for place in places))


def _loader_cache() -> str:
    command = ["/sbin/ldconfig", "-p"]
    try:
        listing = subprocess.run(command, capture_output=True, timeout=LDCONFIG_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listing.stdout.decode(errors="replace")


def cached_libraries(listing: str, name: str, machine: str) -> list[str]:
    """Paths of a library in the output of `ldconfig -p`, without those for another machine, which the loader skips."""
    label = LDCONFIG_MACHINES.get(machine, "")
    lines = re.findall(rf"^\s*{re.escape(name)} \(([^)]*)\) => (.+)$", listing, flags=re.MULTILINE)
    return [path.strip() for flags, path in lines if label in flags]


# --- NVML, in a child process ----------------------------------------------------------------------------------------


def ask_nvml(
    command: Sequence[str] = NVML_COMMAND, seconds: float = NVML_SECONDS
) -> tuple[str | None, str | None, tuple[Gpu, ...], str | None]:
    """Driver, CUDA of the driver, GPUs, and the problem. A GPU that failed is in the problem, the others in the list."""
    from tunix_rt.doctor.packages import NoAnswer, ask_child, plain_words  # not needed in the child

    try:
        report = ask_child(command, who="NVML", seconds=seconds)
    except NoAnswer as none:
        return None, None, (), str(none)
    try:
        gpus = tuple(_gpu_from(plain) for plain in report["gpus"])
        return report["driver_version"], report["driver_cuda"], gpus, "; ".join(report["problems"]) or None
    except (KeyError, TypeError, ValueError):
        return None, None, (), f"NVML: malformed output {plain_words(str(report))!r}"


def _gpu_from(plain: dict[str, Any]) -> Gpu:
    others = [process for process in plain["processes"] if process["pid"] != os.getpid()]
    return Gpu(
        **{
            **plain,
            "capability": tuple(plain["capability"]) if plain["capability"] else None,
            "slices": tuple(GpuSlice(**one) for one in plain["slices"]),
            "processes": tuple(GpuProcess(**(one | {"name": _process_name(one["pid"])})) for one in others),
        }
    )


def _process_name(pid: int) -> str | None:
    import psutil

    with contextlib.suppress(psutil.Error):  # ended by now, of another user, or outside of this container
        return psutil.Process(pid).name()
    return None


# --- NVML, in the child ----------------------------------------------------------------------------------------------


def read_nvml() -> dict[str, Any]:
    """What NVML reports, as plain values, with the name and text of every error in `problems`."""
    import pynvml

    report: dict[str, Any] = {"driver_version": None, "driver_cuda": None, "gpus": [], "problems": []}
    try:
        with _nvml():
            report["driver_version"] = pynvml.nvmlSystemGetDriverVersion()
            if cuda := _unless_unknown(pynvml.nvmlSystemGetCudaDriverVersion_v2):
                report["driver_cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    report["gpus"].append(asdict(_read_gpu(index)))
                except pynvml.NVMLError as error:
                    report["problems"].append(f"{type(error).__name__}: {error} (GPU {index})")
    except pynvml.NVMLError as error:
        report["problems"].append(f"{type(error).__name__}: {error}")
    return report


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _read_gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _unless_unknown(pynvml.nvmlDeviceGetMemoryInfo, handle)
    mig = (_unless_unknown(pynvml.nvmlDeviceGetMigMode, handle) or [0])[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    mode = _unless_unknown(pynvml.nvmlDeviceGetComputeMode, handle) or 0
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=_unless_unknown(pynvml.nvmlDeviceGetUUID, handle) or "",
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        capability=_unless_unknown(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        mig=mig,
        slices=_read_slices(handle) if mig else (),
        processes=_read_processes(handle),
        compute_mode=COMPUTE_MODES.get(mode, f"unknown mode {mode}"),
    )


def _read_slices(handle: Any) -> tuple[GpuSlice, ...]:
    import pynvml

    slices = []
    for index in range(_unless_unknown(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:  # this place is not taken
            continue
        memory = _unless_unknown(pynvml.nvmlDeviceGetMemoryInfo, part)
        if memory is not None:  # else a slice of somebody else, which this user may not use
            uuid, name = pynvml.nvmlDeviceGetUUID(part), pynvml.nvmlDeviceGetName(part)
            slices.append(GpuSlice(uuid=uuid, name=name, total_bytes=int(memory.total), free_bytes=int(memory.free)))
    return tuple(slices)


def _read_processes(handle: Any) -> tuple[GpuProcess, ...]:
    """Each process once, also one that computes and draws. The function names are those of drivers from 510 on."""
    import pynvml

    used: dict[int, int | None] = {}
    for query in (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3):
        for process in _unless_unknown(query, handle) or []:
            used[process.pid] = used.get(process.pid) or process.usedGpuMemory
    return tuple(GpuProcess(pid=pid, used_bytes=bytes_) for pid, bytes_ in sorted(used.items()))


def _unless_unknown(query: Callable[..., T], *arguments: Any) -> T | None:
    """The result; None if this driver, GPU or user has none for this query. Other errors are raised."""
    import pynvml

    try:
        return query(*arguments)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):
        return None


# --- memory of a run, in its own process ------------------------------------------------------------------------------

SMI_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """`by` is `nvml` for memory that NVML lists under `pid`; `device` for all used memory, if NVML hides process ids."""

    step: int
    pid: int
    used_bytes: int
    by: str
    at: str
    """Time, in UTC."""


def gpu_memory(step: int, uuids: Collection[str], *, pid: int | None = None) -> GpuMemory | None:
    """Memory that this process holds on the GPUs with these uuids; None if NVML reports none."""
    import pynvml

    pid = os.getpid() if pid is None else pid
    own: list[int] = []
    in_use = 0
    try:
        with _nvml():
            for uuid in uuids:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
                in_use += int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
                if uuid.startswith("MIG-"):  # NVML lists processes for the whole GPU
                    handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                own += [int(one.usedGpuMemory) for one in listed if one.pid == pid and one.usedGpuMemory]
    except pynvml.NVMLError:
        return None
    at = datetime.now(UTC).isoformat(timespec="seconds")
    if own:
        return GpuMemory(step=step, pid=pid, used_bytes=sum(own), by="nvml", at=at)
    return GpuMemory(step=step, pid=pid, used_bytes=in_use, by="device", at=at) if in_use else None


def driver_version() -> str | None:
    """Version of the NVIDIA driver from NVML; None if it is unknown."""
    import pynvml

    try:
        with _nvml():
            return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def nvidia_smi_text(sample: GpuMemory | None, step: int) -> str:
    """The text of `nvidia_smi.txt`: the output of the program, below a line with the step and our process id."""
    held = "no memory reported"
    if sample is not None:
        whose = "under our process id" if sample.by == "nvml" else "in use on the device (NVML hides process ids here)"
        held = f"{sample.used_bytes} bytes {whose}"
    head = f"after step {step}; our process id {os.getpid()}; NVML: {held}"
    try:
        done = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, check=False
        )
        output = done.stdout or done.stderr
    except FileNotFoundError:
        output = "nvidia-smi is not installed; the line above is from NVML\n"
    except (OSError, subprocess.TimeoutExpired) as error:
        output = f"nvidia-smi failed: {error}\n"
    return f"{head}\n\n{output}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_nvml()) + "\n")
