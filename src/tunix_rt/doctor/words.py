"""The facts as text: the first lines of every log, `env_info.txt`, `torch_version.txt`."""

from tunix_rt.doctor.checks import GIB, DeviceChoice
from tunix_rt.doctor.probe import Facts


def device_lines(choice: DeviceChoice, facts: Facts) -> list[str]:
    """The first lines of every log."""
    torch = f", torch {facts.torch.version}" if facts.torch else ""
    return [
        f"Platform: {facts.os}, Python {facts.python}{torch}",
        f"Device kind: {choice.kind}; count {choice.count}; "
        f"memory {choice.memory_bytes / GIB:.1f} GiB, {choice.free_bytes / GIB:.1f} GiB free",
        f"Reason: {choice.reason}",
        f"Using device: {choice.device}",
    ]


def env_info_text(facts: Facts) -> str:
    """The text of `env_info.txt`: these facts and no others; the environment is never dumped."""
    lines = [
        f"os: {facts.os}",
        f"python: {facts.python}",
        f"cpu: {facts.cpu}, {facts.cpu_cores} cores",
        f"ram: {facts.ram_total_bytes} bytes",
        f"torch: {facts.torch.version if facts.torch else 'not installed'}",
        f"jax: {facts.jax or 'not installed'}",
        f"driver: {facts.driver_version or facts.nvml_problem or 'none'}",
        f"driver cuda: {facts.driver_cuda or 'none'}",
    ]
    for gpu in facts.gpus:
        capability = "unknown" if gpu.capability is None else "{}.{}".format(*gpu.capability)
        lines.append(f"gpu {gpu.index}: {gpu.name}, {gpu.total_bytes} bytes, compute capability {capability}")
    lines += [f"{name}: {value}" for name, value in sorted(facts.visibility.items())]
    return "\n".join(lines) + "\n"


def torch_version_text(facts: Facts) -> str:
    """The text of `torch_version.txt`."""
    if facts.torch is None:
        return "torch: not installed\n"
    arches = "not asked" if facts.torch.arch_list is None else " ".join(facts.torch.arch_list) or "none"
    return f"torch: {facts.torch.version}\ncuda build: {facts.torch.cuda_build or 'none'}\narchitectures: {arches}\n"
