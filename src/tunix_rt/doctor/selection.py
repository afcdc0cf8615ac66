"""The device a run will use: the one that was asked for, or none."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tunix_rt.accelerators import accelerators
from tunix_rt.doctor.checks import first_failure, judge
from tunix_rt.doctor.facts import Ask, Facts, Gpu, visible_gpus
from tunix_rt.doctor.jax_checks import TPU_DEVICES, target, tpu_kinds
from tunix_rt.errors import ConfigError, HardwareError

GIB = 2**30
DEVICES = ("auto", "cpu", "cuda", "tpu")
CPU_ANYWAY = "or ask for the CPU: --device cpu"
JAX_MEMORY_SHARE = "0.92"
"""Of a GPU's memory, which jax takes when it starts: more than the three quarters that it takes by itself, and room for what
it takes besides (code, cuDNN, cuBLAS)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The device a run will use. For `cpu`, memory is RAM; for `cuda`, that of the smallest visible GPU."""

    device: str
    kind: str
    count: int
    memory_bytes: int
    free_bytes: int
    reason: str
    capability: tuple[int, int] | None = None
    """CUDA compute capability, the lowest of the visible GPUs; None where there is none or NVML does not tell."""


def choose_device(ask: Ask, facts: Facts) -> DeviceChoice:
    """The device a run will use. What was asked for and cannot be used is a HardwareError, never another device."""
    if ask.device not in DEVICES:
        raise ConfigError(f"training.device: no device named {ask.device!r}", fix="use auto, cpu, cuda (gpu) or tpu")
    device = target(facts, ask)
    failure = first_failure(judge(facts, ask))
    if failure is not None:
        way_out = failure.fix if device == "cpu" else f"{failure.fix}; {CPU_ANYWAY}"
        raise HardwareError(f"{failure.why} ({failure.saw})", fix=way_out, cause=failure.cause)
    return {"cuda": _cuda, "tpu": _tpu, "cpu": _cpu}[device](facts, ask)


def environment_for(device: str, backend: str, *, memory_share: float | None = None) -> Mapping[str, str]:
    """The variables an engine's libraries read when they are imported.

    jax gets exactly one platform, never a list that ends at the CPU, and most of a GPU's memory, or `memory_share` of it
    where that is less; CUDA counts GPUs in the order of NVML.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if device == "cuda" else {}
    if backend != "jax":
        return order
    limited = memory_share is not None and memory_share < float(JAX_MEMORY_SHARE)
    share = {"XLA_CLIENT_MEM_FRACTION": f"{memory_share:.4f}" if limited else JAX_MEMORY_SHARE}
    return order | (share if device == "cuda" else {}) | {"JAX_PLATFORMS": device}


def set_environment(device: str, backend: str, *, memory_share: float | None = None) -> None:
    """Set them in this process, for the engine and the children that prove it. An order or a share of memory that the user
    has set stays, unless the run is to take no more than `memory_share`; jax takes no two names of that share."""
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
    """Whether a share that somebody has set is more than `than`; what is no number is taken to be."""
    try:
        return not float(share) <= float(than)
    except ValueError:
        return True


def with_virtual_devices(choice: DeviceChoice, backend: str) -> DeviceChoice:
    """A CPU that jax is told to take for several devices, which share its memory; any other choice as it is."""
    if backend != "jax" or choice.device != "cpu":
        return choice
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    told = flag[1] if flag else os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return replace(choice, count=int(told)) if told.isdecimal() and int(told) > 1 else choice


def _cpu(facts: Facts, ask: Ask) -> DeviceChoice:
    return DeviceChoice(
        device="cpu",
        kind=facts.host.cpu,
        count=1,
        memory_bytes=facts.host.ram_total_bytes,
        free_bytes=facts.host.ram_available_bytes,
        reason="asked for" if ask.device == "cpu" else "no NVIDIA GPU or TPU seen",
    )


def _cuda(facts: Facts, ask: Ask) -> DeviceChoice:
    gpus = visible_gpus(facts)
    return DeviceChoice(
        device="cuda",
        kind=", ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        count=len(gpus),
        memory_bytes=min(_total(gpu, facts) for gpu in gpus),
        free_bytes=min(_free(gpu, facts) for gpu in gpus),
        reason="asked for" if ask.device == "cuda" else f"the best device here: {_why_fit(facts, ask)}",
        capability=min((gpu.capability for gpu in gpus if gpu.capability is not None), default=None),
    )


def _why_fit(facts: Facts, ask: Ask) -> str:
    driver = f"driver {facts.nvidia.driver_version}"
    if ask.backend == "torch" and facts.torch is not None:
        return f"{driver}, torch {facts.torch.version} for CUDA {facts.torch.cuda_build} has its kernels"
    return f"{driver}, jax {facts.jax.version} with its plugin" if ask.backend == "jax" and facts.jax else driver


def _total(gpu: Gpu, facts: Facts) -> int:
    """Where CPU and GPU share one memory NVML tells none: RAM it is."""
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
        reason="asked for" if ask.device == "tpu" else "the best device here",
    )
