"""The device of a run: the requested one or an error, never another. And the device as text, for logs and run folders."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tunix_rt.accelerators import accelerators
from tunix_rt.doctor.checks import first_failure, judge
from tunix_rt.doctor.facts import Ask, Facts, Gpu, visible_gpus
from tunix_rt.doctor.jax_checks import TPU_DEVICES, target, tpu_kinds
from tunix_rt.errors import ConfigError, HardwareError

GIB = 2**30
DEVICES = ("auto", "cpu", "cuda", "tpu")
CPU_ANYWAY = "or use the CPU: --device cpu"
JAX_MEMORY_SHARE = "0.92"
"""Of GPU memory, which jax preallocates: more than its default of three quarters, and less than all, because code, cuDNN and
cuBLAS need some too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The device of a run. For `cpu`, memory is RAM; for `cuda`, that of the smallest visible GPU."""

    device: str
    kind: str
    count: int
    memory_bytes: int
    free_bytes: int
    reason: str
    capability: tuple[int, int] | None = None
    """CUDA compute capability, the lowest of the visible GPUs; None without a GPU or if NVML does not report it."""


def choose_device(ask: Ask, facts: Facts) -> DeviceChoice:
    """The device of a run. HardwareError if the requested device cannot be used."""
    if ask.device not in DEVICES:
        raise ConfigError(f"training.device: no device named {ask.device!r}", fix="use auto, cpu, cuda (gpu) or tpu")
    device = target(facts, ask)
    failure = first_failure(judge(facts, ask))
    if failure is not None:
        fix = failure.fix if device == "cpu" else f"{failure.fix}; {CPU_ANYWAY}"
        raise HardwareError(f"{failure.why} ({failure.saw})", fix=fix, cause=failure.cause)
    return {"cuda": _cuda, "tpu": _tpu, "cpu": _cpu}[device](facts, ask)


def environment_for(device: str, backend: str, *, memory_share: float | None = None) -> Mapping[str, str]:
    """The variables that the libraries of an engine read at import.

    jax gets exactly one platform, never a list that ends at the CPU, and most of the GPU memory, or `memory_share` of it
    if that is less; CUDA numbers GPUs in the order of NVML.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if device == "cuda" else {}
    if backend != "jax":
        return order
    limited = memory_share is not None and memory_share < float(JAX_MEMORY_SHARE)
    share = {"XLA_CLIENT_MEM_FRACTION": f"{memory_share:.4f}" if limited else JAX_MEMORY_SHARE}
    return order | (share if device == "cuda" else {}) | {"JAX_PLATFORMS": device}


def set_environment(device: str, backend: str, *, memory_share: float | None = None) -> None:
    """Set them in this process, for the engine and its self-test in a child process. An order or a memory fraction that the
    user has set stays, unless it is more than `memory_share`; jax refuses both names of the fraction together."""
    for name, value in environment_for(device, backend, memory_share=memory_share).items():
        if name == "JAX_PLATFORMS":
            os.environ[name] = value
        elif name != "XLA_CLIENT_MEM_FRACTION":
            os.environ.setdefault(name, value)
        else:
            known = next((other for other in _SHARE_NAMES if other in os.environ), name)
            if known not in os.environ or (memory_share is not None and _more(os.environ[known], value)):
                os.environ[known] = value


_SHARE_NAMES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")


def _more(share: str, than: str) -> bool:
    """Whether the fraction that a user has set is more than `than`, or not a number."""
    try:
        return not float(share) <= float(than)
    except ValueError:
        return True


def with_virtual_devices(choice: DeviceChoice, backend: str) -> DeviceChoice:
    """A CPU that jax splits into several virtual devices, which share its memory; any other choice unchanged."""
    if backend != "jax" or choice.device != "cpu":
        return choice
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    count = flag[1] if flag else os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return replace(choice, count=int(count)) if count.isdecimal() and int(count) > 1 else choice


def _cpu(facts: Facts, ask: Ask) -> DeviceChoice:
    return DeviceChoice(
        device="cpu",
        kind=facts.host.cpu,
        count=1,
        memory_bytes=facts.host.ram_total_bytes,
        free_bytes=facts.host.ram_available_bytes,
        reason="requested" if ask.device == "cpu" else "no NVIDIA GPU or TPU present",
    )


def _cuda(facts: Facts, ask: Ask) -> DeviceChoice:
    gpus = visible_gpus(facts)
    return DeviceChoice(
        device="cuda",
        kind=", ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        count=len(gpus),
        memory_bytes=min(_total(gpu, facts) for gpu in gpus),
        free_bytes=min(_free(gpu, facts) for gpu in gpus),
        reason="requested" if ask.device == "cuda" else f"the best device here: {_why_fit(facts, ask)}",
        capability=min((gpu.capability for gpu in gpus if gpu.capability is not None), default=None),
    )


def _why_fit(facts: Facts, ask: Ask) -> str:
    driver = f"driver {facts.nvidia.driver_version}"
    if ask.backend == "torch" and facts.torch is not None:
        return f"{driver}, torch {facts.torch.version} for CUDA {facts.torch.cuda_build} has its kernels"
    return f"{driver}, jax {facts.jax.version} with its plugin" if ask.backend == "jax" and facts.jax else driver


def _total(gpu: Gpu, facts: Facts) -> int:
    """RAM, if CPU and GPU share one memory and NVML reports none."""
    return facts.host.ram_total_bytes if gpu.total_bytes is None else gpu.total_bytes


def _free(gpu: Gpu, facts: Facts) -> int:
    return facts.host.ram_available_bytes if gpu.free_bytes is None else gpu.free_bytes


def _tpu(facts: Facts, ask: Ask) -> DeviceChoice:
    kinds = tpu_kinds(facts)
    (known,) = [device for device in accelerators() if device.id == TPU_DEVICES[kinds[0]][0]]
    memory = round((known.memory_gib or 0) * GIB)
    return DeviceChoice(
        device="tpu",
        kind=kinds[0],
        count=len(kinds),
        memory_bytes=memory,
        free_bytes=memory,
        reason="requested" if ask.device == "tpu" else "the best device here",
    )


# --- the device as text -----------------------------------------------------------------------------------------------


def device_lines(choice: DeviceChoice, facts: Facts) -> list[str]:
    """The first lines of every log."""
    return [
        f"Platform: {describe_platform(facts)}",
        f"Device kind: {choice.kind}; count {choice.count}; "
        f"memory {choice.memory_bytes / GIB:.1f} GiB, {choice.free_bytes / GIB:.1f} GiB free",
        f"Reason: {choice.reason}",
        f"Using device: {choice.device}",
    ]


def describe_choice(choice: DeviceChoice) -> str:
    """`cuda, 2 x NVIDIA H200, 139.0 of 140.0 GiB free (requested)`."""
    memory = f"{choice.free_bytes / GIB:.1f} of {choice.memory_bytes / GIB:.1f} GiB free"
    count = f"{choice.count} x " if choice.count > 1 else ""
    return f"{choice.device}, {count}{choice.kind}, {memory} ({choice.reason})"


def describe_platform(facts: Facts) -> str:
    host = facts.host
    where = f" in {host.container}" if host.container else " (WSL)" if host.wsl else ""
    engines = [f"{name} {it.version}" for name, it in (("torch", facts.torch), ("jax", facts.jax)) if it]
    return ", ".join([f"{host.system} {host.release} {host.machine}{where}", f"Python {host.python}", *engines])


def summary_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """The facts that the verdict rests on."""
    host, driver = facts.host, facts.nvidia.driver_version
    alike: dict[str, list[int]] = {}
    ram = f"{host.ram_available_bytes / GIB:.1f} of {host.ram_total_bytes / GIB:.1f} GiB RAM available"
    yield "platform", describe_platform(facts)
    yield "cpu", f"{host.cpu}, {host.cpu_cores} cores, {ram}"
    for gpu in facts.nvidia.gpus:
        size = "memory shared with the CPU" if gpu.total_bytes is None else f"{gpu.total_bytes / GIB:.1f} GiB"
        code = "" if gpu.capability is None else ", compute capability {}.{}".format(*gpu.capability)
        alike.setdefault(f"{gpu.name}, {size}{code}, driver {driver}", []).append(gpu.index)
    for shown, numbers in alike.items():
        yield f"gpu {numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else ""), shown
    if count := len(facts.tpu.pci) or len(facts.tpu.nodes):
        yield "tpu", f"{count} device(s), libtpu {facts.tpu.libtpu or 'none'}"
    if facts.torch:
        build = facts.torch.cuda_build
        yield "torch", f"{facts.torch.version}, " + (f"CUDA {build}" if build else "built without CUDA")
    yield "disk", f"{host.disk_free_bytes / GIB:.1f} GiB free at {host.disk_path}"


def env_info_text(facts: Facts) -> str:
    """The text of `env_info.txt`: these facts and no others; the environment is never dumped."""
    host, nvidia = facts.host, facts.nvidia
    lines = [
        f"os: {host.system} {host.release} {host.machine}",
        f"container: {host.container or ('WSL' if host.wsl else 'no')}",
        f"python: {host.python}",
        f"cpu: {host.cpu}, {host.cpu_cores} cores",
        f"ram: {host.ram_total_bytes} bytes",
        f"torch: {facts.torch.version if facts.torch else 'not installed'}",
        f"jax: {facts.jax.version if facts.jax else 'not installed'}",
        f"driver version: {nvidia.driver_version or nvidia.nvml_problem or 'none'}",
        f"cuda version the driver reports: {nvidia.driver_cuda or 'none'}",
    ]
    if nvidia.module_version:
        lines.append(f"kernel module: {nvidia.module_version}, {nvidia.module_flavour or 'unknown flavour'}")
    for gpu in nvidia.gpus:
        size = "memory shared with the CPU" if gpu.total_bytes is None else f"{gpu.total_bytes} bytes"
        capability = "unknown" if gpu.capability is None else "{}.{}".format(*gpu.capability)
        lines.append(f"gpu {gpu.index}: {gpu.name}, {gpu.uuid}, {size}, compute capability {capability}")
    lines += [f"{name}: {value}" for name, value in sorted(facts.environment.items())]
    return "\n".join(lines) + "\n"


def torch_version_text(facts: Facts) -> str:
    """The text of `torch_version.txt`."""
    torch = facts.torch
    if torch is None:
        return "torch: not installed\n"
    arches = "unknown" if torch.arch_list is None else " ".join(torch.arch_list) or "none"
    lines = [f"torch: {torch.version}", f"cuda build: {torch.cuda_build or 'none'}", f"architectures: {arches}"]
    lines += [f"rocm build: {torch.hip_build}"] if torch.hip_build else []
    return "\n".join([*lines, f"cudnn: {torch.cudnn or 'none'}"]) + "\n"
