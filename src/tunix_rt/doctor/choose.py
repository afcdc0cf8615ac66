"""The device a run will use: the one that was asked for, or none."""

from collections.abc import Mapping
from dataclasses import dataclass

from tunix_rt.accelerators import accelerators
from tunix_rt.doctor.checks import first_failure, judge
from tunix_rt.doctor.facts import Facts, Gpu
from tunix_rt.doctor.gpu_checks import visible_gpus
from tunix_rt.doctor.jax_checks import target, tpu_kind
from tunix_rt.doctor.verdict import Ask
from tunix_rt.errors import ConfigError, HardwareError

GIB = 2**30
DEVICES = ("auto", "cpu", "cuda", "tpu")
TPU_DEVICES = {
    "TPU v2": ("tpu-v2-core", 2), "TPU v3": ("tpu-v3-core", 2), "TPU v4": ("tpu-v4-chip", 1), "TPU v5": ("tpu-v5p-chip", 1),
    "TPU v5 lite": ("tpu-v5e", 1), "TPU v6 lite": ("tpu-v6e", 1), "TPU7x": ("tpu-v7x-device", 2),
}  # fmt: skip
"""jax's device kind -> what one jax device is in the catalogue, and how many of them a chip on the bus has."""
CPU_ANYWAY = "or ask for the CPU: --device cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The device a run will use. For `cpu`, memory is RAM; for `cuda`, that of the smallest visible GPU."""

    device: str
    kind: str
    count: int
    memory_bytes: int
    free_bytes: int
    reason: str


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


def environment_for(device: str, backend: str) -> Mapping[str, str]:
    """The variables an engine's libraries read when they are imported.

    jax gets exactly one platform, never a list that ends at the CPU; CUDA counts GPUs in the order of NVML.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if device == "cuda" else {}
    return order | ({"JAX_PLATFORMS": device} if backend == "jax" else {})


def _cpu(facts: Facts, ask: Ask) -> DeviceChoice:
    return DeviceChoice(
        device="cpu",
        kind=facts.host.cpu,
        count=1,
        memory_bytes=facts.host.ram_total_bytes,
        free_bytes=facts.host.ram_available_bytes,
        reason="asked for" if ask.device == "cpu" else "no GPU or TPU present",
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
    told = facts.jax.devices if facts.jax and facts.jax.platform == "tpu" else None
    kind = told[0] if told else tpu_kind(facts.tpu.pci[0]) if facts.tpu.pci else "by its nodes alone"
    name, per_chip = TPU_DEVICES.get(kind, ("", 0))
    known = next((device for device in accelerators() if device.id == name), None)
    if known is None or known.memory_gib is None:
        raise HardwareError(
            f"a TPU is present ({kind}), and its memory is not known to this version",
            fix="update tunix-rt, or use a TPU from v2 to v7x",
            cause="jax-sees-no-device",
        )
    memory = round(known.memory_gib * GIB)
    return DeviceChoice(
        device="tpu",
        kind=kind,
        count=len(told) if told else per_chip * len(facts.tpu.pci),
        memory_bytes=memory,
        free_bytes=memory,
        reason="asked for" if ask.device == "tpu" else "the best device here",
    )
