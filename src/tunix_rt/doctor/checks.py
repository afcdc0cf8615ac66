"""Judgement of the facts: one check per cause, and the choice of a device. Pure functions; every branch is a literal away."""

import re
from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from tunix_rt.doctor.probe import Facts, Gpu
from tunix_rt.errors import ConfigError, HardwareError

GIB = 2**30
LOW_DISK_BYTES = 2 * GIB
"""Below this a warning: two checkpoints of a 60 M-parameter model. What a run really needs, `plan` says."""
LOW_RAM_BYTES = 2 * GIB
"""Below this a warning: a 124 M-parameter model no longer trains with AdamW in float32."""
DRIVER_FLOOR = {"12": "525.60.13", "13": "580.65.06"}
"""Oldest Linux driver for each CUDA major version, by NVIDIA's minor-version compatibility."""
BLACKWELL = (10, 0)
BLACKWELL_DRIVER = "570.26"
CPU_ANYWAY = "or ask for the CPU: --device cpu"
INSTALL_TORCH = 'pip install "tunix-rt[torch]"'


@dataclass(frozen=True, slots=True)
class Check:
    """One question to the facts. `saw` is the evidence, `why` what follows from it, `fix` the way out."""

    name: str
    verdict: Literal["pass", "warn", "fail", "skip"]
    saw: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The device a run will use. For `cpu`, memory is RAM; for `cuda`, that of the smallest visible GPU."""

    device: str
    kind: str
    count: int
    memory_bytes: int
    free_bytes: int
    reason: str


# --- checks ----------------------------------------------------------------------------------------------------------


def gpu_present(facts: Facts) -> Check:
    """Any sign counts, so that a GPU behind a missing driver is not called absent."""
    name = "a GPU is present"
    if facts.gpus:
        return Check(name, "pass", ", ".join(gpu.name for gpu in facts.gpus))
    if facts.nvidia_signs:
        return Check(name, "pass", ", ".join(facts.nvidia_signs))
    return Check(
        name, "skip", "no NVIDIA GPU on the PCI bus, in /dev or in NVML", "no GPU present", "use a machine with a GPU, "
        + CPU_ANYWAY,
    )  # fmt: skip


def driver_answers(facts: Facts) -> Check:
    """NVML is asked through the driver: what it says to that tells driver troubles apart."""
    name = "the NVIDIA driver answers"
    if facts.nvml_problem is None:
        saw = f"driver {facts.driver_version}, CUDA up to {facts.driver_cuda}"
        return Check(name, "pass", saw) if facts.gpus else _driver_without_gpus(name, facts, saw)
    if not facts.gpus and not facts.nvidia_signs:
        return Check(name, "skip", facts.nvml_problem)
    kind = facts.nvml_problem.partition(":")[0]
    why, fix = _DRIVER_TROUBLES.get(kind, ("the driver failed to answer", RESTART))
    return Check(name, "fail", facts.nvml_problem, why, fix)


RESTART = "restart the machine or the container, or install the NVIDIA driver again"
_DRIVER_TROUBLES = {
    "NVMLError_LibraryNotFound": (
        "the GPU is there, the driver's library is not",
        "in a container: start it with --gpus all; else install the NVIDIA driver",
    ),
    "NVMLError_DriverNotLoaded": (
        "the driver is installed but not loaded",
        "load the driver's module (nvidia), or restart",
    ),
    "NVMLError_NoPermission": (
        "this user may not use the GPU",
        "open the driver's nodes /dev/nvidia* to this user (group, rootless runtime)",
    ),
    "NVMLError_LibRmVersionMismatch": (
        "the driver was updated under the running kernel",
        "restart the machine, so that the new driver is loaded",
    ),
    "NVMLError_GpuIsLost": ("the GPU fell off the bus", "restart the machine; if it happens again, update the driver"),
}


def _driver_without_gpus(name: str, facts: Facts, saw: str) -> Check:
    if not facts.nvidia_signs:
        return Check(name, "skip", f"{saw}, no GPU")
    return Check(
        name, "fail", f"{saw}, yet it lists no GPU", "the driver does not drive this GPU",
        "in a container: start it with --gpus all; else install a driver for it (Blackwell: the open kernel modules)",
    )  # fmt: skip


def not_masked(facts: Facts) -> Check:
    """CUDA_VISIBLE_DEVICES hides GPUs from torch without a word."""
    name = "the GPU is visible"
    mask = facts.visibility.get("CUDA_VISIBLE_DEVICES")
    if not facts.gpus or mask is None:
        return Check(name, "skip" if not facts.gpus else "pass", "CUDA_VISIBLE_DEVICES is not set")
    visible = visible_gpus(facts)
    saw = f"CUDA_VISIBLE_DEVICES={mask!r} shows {len(visible)} of {len(facts.gpus)}"
    if visible:
        return Check(name, "pass", saw)
    if mask.startswith("MIG-"):
        return Check(name, "fail", saw, "slices of a GPU (MIG) are not measured here", "name a whole GPU")
    return Check(name, "fail", saw, "the GPU is masked by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")


def torch_installed(facts: Facts) -> Check:
    name = "torch is installed"
    if facts.torch is not None:
        return Check(name, "pass", f"torch {facts.torch.version}")
    return Check(name, "fail", "no torch in this environment", "the torch engine cannot run", INSTALL_TORCH)


def wheel_has_cuda(facts: Facts) -> Check:
    """A CPU wheel beside a GPU is the commonest silent fallback."""
    name = "the torch wheel is built for CUDA"
    if facts.torch is None or not _has_hardware(facts):
        return Check(name, "skip", "no GPU, or no torch")
    if facts.torch.cuda_build:
        return Check(name, "pass", f"torch {facts.torch.version}: CUDA {facts.torch.cuda_build}")
    return Check(
        name, "fail", f"torch {facts.torch.version}: built without CUDA",
        "the GPU is there, but this torch wheel is for the CPU only", wheel_advice(facts),
    )  # fmt: skip


def torch_answered(facts: Facts) -> Check:
    name = "torch can be asked"
    if facts.torch is None or facts.torch.problem is None:
        return Check(name, "skip" if facts.torch is None else "pass", "no problem seen")
    return Check(name, "fail", facts.torch.problem, "torch does not start", "reinstall torch: " + wheel_advice(facts))


def wheel_has_kernels(facts: Facts) -> Check:
    """A wheel without the GPU's architecture imports well, says CUDA is available, and dies on the first kernel."""
    name = "the torch wheel has kernels for the GPU"
    torch, gpus = facts.torch, visible_gpus(facts)
    if torch is None or not torch.cuda_build or torch.arch_list is None or not gpus:
        return Check(name, "skip", "no visible GPU, or no CUDA wheel to ask")
    shown = f"torch {torch.version}: {' '.join(torch.arch_list)}"
    for gpu in gpus:
        if gpu.capability and not fits(gpu.capability, torch.arch_list, torch.cuda_build):
            major, minor = gpu.capability
            return Check(
                name, "fail", f"{shown}; {gpu.name}: sm_{major}{minor}",
                f"this torch wheel has no kernels for {gpu.name} (sm_{major}{minor})", wheel_advice(facts),
            )  # fmt: skip
    return Check(name, "pass", shown)


def driver_new_enough(facts: Facts) -> Check:
    """CUDA 13 wheels need driver 580, CUDA 12 wheels 525; a Blackwell GPU itself needs 570."""
    name = "the driver is new enough for the wheel"
    build = facts.torch.cuda_build if facts.torch else None
    if not facts.driver_version or not build or not facts.os.startswith("Linux"):
        return Check(name, "skip", "no driver, or no CUDA wheel (or not Linux)")
    floor = DRIVER_FLOOR.get(build.partition(".")[0], "0")
    if any(gpu.capability and gpu.capability >= BLACKWELL for gpu in visible_gpus(facts)):
        floor = max(floor, BLACKWELL_DRIVER, key=Version)
    saw = f"driver {facts.driver_version}, CUDA {build} needs {floor}"
    if Version(facts.driver_version) >= Version(floor):
        return Check(name, "pass", saw)
    return Check(name, "fail", saw, f"the driver is older than {floor}", f"{wheel_advice(facts)}; or update the driver")


def torch_sees_cuda(facts: Facts) -> Check:
    """The last word: everything fits, and torch still says no."""
    name = "torch sees the GPU"
    torch = facts.torch
    if torch is None or torch.cuda_available is None or not visible_gpus(facts) or not torch.cuda_build:
        return Check(name, "skip", "torch was not asked")
    if torch.cuda_available:
        return Check(name, "pass", f"{torch.cuda_devices} CUDA device(s)")
    return Check(
        name, "fail", torch.said or "torch.cuda.is_available() is False",
        "torch cannot initialise CUDA", "restart the container or the machine, then `tunix-rt doctor` again",
    )  # fmt: skip


def tpu_present(facts: Facts) -> Check:
    name = "a TPU is present"
    if has_tpu(facts):
        return Check(name, "pass", ", ".join(facts.tpu_signs) + (f", libtpu {facts.libtpu}" if facts.libtpu else ""))
    return Check(name, "skip", "no /dev/accel*", "no TPU present", "use a TPU machine, " + CPU_ANYWAY)


def enough_disk(facts: Facts) -> Check:
    saw = f"{facts.disk_free_bytes / GIB:.1f} GiB free at {facts.disk_path}"
    if facts.disk_free_bytes >= LOW_DISK_BYTES:
        return Check("enough disk", "pass", saw)
    return Check("enough disk", "warn", saw, "checkpoints may not fit", "free space, or choose another --output")


def enough_ram(facts: Facts) -> Check:
    saw = f"{facts.ram_available_bytes / GIB:.1f} GiB of {facts.ram_total_bytes / GIB:.1f} GiB RAM available"
    if facts.ram_available_bytes >= LOW_RAM_BYTES:
        return Check("enough RAM", "pass", saw)
    return Check("enough RAM", "warn", saw, "only small models fit", "close other programs; see `tunix-rt plan`")


# In the order in which one cause hides the next.
CUDA_CHECKS = (
    driver_answers, not_masked, torch_installed, torch_answered, wheel_has_cuda, driver_new_enough, wheel_has_kernels,
    torch_sees_cuda,
)  # fmt: skip
DRIVER_CHECKS = (driver_answers, not_masked)


def run_checks(facts: Facts) -> list[Check]:
    """Every check, whatever device will be chosen."""
    every = (gpu_present, *CUDA_CHECKS, tpu_present, enough_disk, enough_ram)
    return [check(facts) for check in every]


# --- rules -----------------------------------------------------------------------------------------------------------

_OWN_CODE_ONLY = {53: {53}, 62: {62}, 72: {72}, 87: {87}, 101: {101, 110}, 110: {101, 110}}
"""Code for integrated GPUs runs on its own kind only (101 was renamed 110)."""
_NOT_ON = {50: {53}, 52: {53}, 60: {62}, 61: {62}, 70: {72}, 80: {87}, 86: {87}, 100: {101}}
"""GPUs that do not take the code of their own generation."""


def fits(capability: tuple[int, int], arch_list: tuple[str, ...], cuda_build: str) -> bool:
    """Whether code in `arch_list` runs on the GPU: same major and minor not above its own, or older PTX."""
    device = capability[0] * 10 + capability[1]
    unified = Version(cuda_build) >= Version("13.2")  # from here on integrated GPUs take 70, 80 and 86
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


def wheel_advice(facts: Facts) -> str:
    """The install line for a torch that suits the GPUs and the driver, the wheel being easier to change than the driver."""
    oldest = min((gpu.capability for gpu in visible_gpus(facts) or facts.gpus if gpu.capability), default=(7, 5))
    newest = max((gpu.capability for gpu in visible_gpus(facts) or facts.gpus if gpu.capability), default=(7, 5))
    driver = Version(facts.driver_version or DRIVER_FLOOR["13"])
    if newest >= BLACKWELL and driver < Version(BLACKWELL_DRIVER):
        return f"update the NVIDIA driver to {DRIVER_FLOOR['13']} or newer"
    if oldest < (7, 5):
        wheel, backend = "torch>=2.10,<2.15", "cu126"
    elif driver >= Version(DRIVER_FLOOR["13"]):
        wheel, backend = "torch>=2.10", "cu130"
    else:
        wheel, backend = "torch>=2.10,<2.12", "cu128"
    return f"uv pip install --reinstall '{wheel}' --torch-backend={backend}"


def visible_gpus(facts: Facts) -> tuple[Gpu, ...]:
    """The GPUs CUDA shows under CUDA_VISIBLE_DEVICES: a list ends at the first entry that names none; a repeat empties it."""
    mask = facts.visibility.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return facts.gpus
    shown: list[Gpu] = []
    for entry in mask.split(","):
        gpu = _named_by(entry.strip(), facts.gpus)
        if gpu is None:
            break
        if gpu in shown:
            return ()
        shown.append(gpu)
    return tuple(shown)


def _named_by(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    if entry.startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    number = re.match(r"\+?\d+", entry)
    return gpus[int(number[0])] if number and int(number[0]) < len(gpus) else None


def has_tpu(facts: Facts) -> bool:
    """A device node, not a variable: TPU_* variables and libtpu may be set on any machine."""
    return any(sign.startswith("/dev/") for sign in facts.tpu_signs)


def _has_hardware(facts: Facts) -> bool:
    return bool(facts.gpus or facts.nvidia_signs)


# --- the choice ------------------------------------------------------------------------------------------------------


def choose_device(requested: str, facts: Facts, backend: str | None = "torch") -> DeviceChoice:
    """The device a run will use. What was asked for and is not there is a HardwareError, never another device.

    `backend` None asks for the device alone, as a plan does: no engine has to be installed.
    """
    if requested == "cpu":
        return _cpu(facts, backend, "asked for")
    if requested in ("cuda", "gpu"):
        return _cuda(facts, backend, "asked for")
    if requested == "tpu":
        return _tpu(facts, backend)
    if requested != "auto":
        raise ConfigError(f"training.device: no device named {requested!r}", fix="use auto, cpu, cuda (gpu) or tpu")
    if _has_hardware(facts):
        return _cuda(facts, backend, "the best usable device")
    if has_tpu(facts):
        if backend == "jax":
            return _tpu(facts, backend)
        return _cpu(facts, backend, "no GPU present; the TPU is not used by the torch engine")
    return _cpu(facts, backend, "no GPU present")


def _cpu(facts: Facts, backend: str | None, reason: str) -> DeviceChoice:
    if backend == "torch" and facts.torch is None:
        raise HardwareError("torch is not installed, and the engine of this run is torch", fix=INSTALL_TORCH)
    return DeviceChoice(
        device="cpu",
        kind=facts.cpu,
        count=1,
        memory_bytes=facts.ram_total_bytes,
        free_bytes=facts.ram_available_bytes,
        reason=reason,
    )


def _cuda(facts: Facts, backend: str | None, reason: str) -> DeviceChoice:
    present = gpu_present(facts)
    if present.verdict != "pass":
        raise HardwareError(f"no GPU present ({present.saw})", fix=present.fix)
    for check in CUDA_CHECKS if backend == "torch" else DRIVER_CHECKS:
        judged = check(facts)
        if judged.verdict == "fail":
            raise HardwareError(f"{judged.why} ({judged.saw})", fix=f"{judged.fix}; {CPU_ANYWAY}")
    gpus = visible_gpus(facts)
    return DeviceChoice(
        device="cuda",
        kind=", ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        count=len(gpus),
        memory_bytes=min(gpu.total_bytes for gpu in gpus),
        free_bytes=min(gpu.free_bytes for gpu in gpus),
        reason=reason,
    )


def _tpu(facts: Facts, backend: str | None) -> DeviceChoice:
    present = tpu_present(facts)
    if present.verdict != "pass":
        raise HardwareError(f"no TPU present ({present.saw})", fix=present.fix)
    if backend == "torch":
        raise ConfigError("training.device: the torch engine does not run on a TPU", fix="set training.backend: jax")
    raise HardwareError(
        f"a TPU is present ({present.saw}), but its memory is not known to this version", fix="set training.device: cpu"
    )
