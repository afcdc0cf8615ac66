"""Memory of the GPU while a run trains, under our own process id: what NVML and nvidia-smi say, not what torch says."""

import contextlib
import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

SMI_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """`by` is `nvml` for what NVML lists under `pid`; `device` for all that is in use where NVML hides process ids."""

    step: int
    pid: int
    used_bytes: int
    by: str
    at: str
    """When, in UTC."""


def gpu_memory(step: int, uuids: Collection[str], *, pid: int | None = None) -> GpuMemory | None:
    """What this process holds on the GPUs with these uuids now; None where NVML does not tell at all."""
    import pynvml

    pid = os.getpid() if pid is None else pid
    own: list[int] = []
    in_use = 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        for uuid in uuids:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            in_use += int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            if uuid.startswith("MIG-"):  # processes are listed by the whole GPU
                handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            own += [int(process.usedGpuMemory) for process in listed if process.pid == pid and process.usedGpuMemory]
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    at = datetime.now(UTC).isoformat(timespec="seconds")
    if own:
        return GpuMemory(step=step, pid=pid, used_bytes=sum(own), by="nvml", at=at)
    return GpuMemory(step=step, pid=pid, used_bytes=in_use, by="device", at=at) if in_use else None


def driver_version() -> str | None:
    """Of the driver of NVIDIA, by NVML; None where it does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def nvidia_smi_text(sample: GpuMemory | None, step: int) -> str:
    """The text of `nvidia_smi.txt`: what the program prints now, under a line that says when and for which process."""
    held = "NVML told nothing of it"
    if sample is not None:
        whose = "under our process id" if sample.by == "nvml" else "in use on the device (NVML hides process ids here)"
        held = f"{sample.used_bytes} bytes {whose}"
    head = f"after step {step}; our process id {os.getpid()}; NVML: {held}"
    try:
        done = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, check=False
        )
        said = done.stdout or done.stderr
    except FileNotFoundError:
        said = "nvidia-smi is not installed here; the line above is NVML's own\n"
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"nvidia-smi gave no answer: {error}\n"
    return f"{head}\n\n{said}"
