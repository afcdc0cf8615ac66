"""The facts and the verdict as text: the first lines of every log, `env_info.txt`, `torch_version.txt`, `tunix-rt doctor`."""

from collections.abc import Iterable

from tunix_rt.doctor.facts import Check, Facts
from tunix_rt.doctor.selection import GIB, DeviceChoice

PAGES = "docs/doctor"


def device_lines(choice: DeviceChoice, facts: Facts) -> list[str]:
    """The first lines of every log."""
    return [
        f"Platform: {platform_words(facts)}",
        f"Device kind: {choice.kind}; count {choice.count}; "
        f"memory {choice.memory_bytes / GIB:.1f} GiB, {choice.free_bytes / GIB:.1f} GiB free",
        f"Reason: {choice.reason}",
        f"Using device: {choice.device}",
    ]


def platform_words(facts: Facts) -> str:
    host = facts.host
    where = f" in {host.container}" if host.container else " (WSL)" if host.wsl else ""
    engines = [f"{name} {it.version}" for name, it in (("torch", facts.torch), ("jax", facts.jax)) if it]
    return ", ".join([f"{host.system} {host.release} {host.machine}{where}", f"Python {host.python}", *engines])


def verdict_lines(
    facts: Facts, checks: Iterable[Check], choice: DeviceChoice | None, asked: str, *, proven: Iterable[str] = ()
) -> list[str]:
    """The verdict, what to do, then the few facts it rests on. Everything else is in `--json`."""
    lines: list[str] = []
    if choice is not None:
        memory = f"{choice.free_bytes / GIB:.1f} of {choice.memory_bytes / GIB:.1f} GiB free"
        count = f"{choice.count} x " if choice.count > 1 else ""
        lines.append(f"ready: {choice.device}, {count}{choice.kind}, {memory} ({choice.reason})")
    failures = [check for check in checks if check.verdict == "fail"]
    for check in failures[:1]:
        lines += [f"{not_ready(asked)}: {check.why}", *_detail(check)]
    if len(failures) > 1:
        lines.append("  then: " + "; ".join(f"{check.why} [{check.cause}]" for check in failures[1:]))
    lines += proven
    for check in checks:
        if check.verdict == "warn":
            lines += [f"warning: {check.why}", *_detail(check)]
    return [*lines, "", *fact_lines(facts)]


def not_ready(asked: str) -> str:
    return "not ready" if asked == "auto" else f"not ready for {asked}"


def _detail(check: Check) -> list[str]:
    return [f"  saw:  {check.saw}", f"  fix:  {check.fix}", f"  more: {PAGES}/{check.cause}.md"]


def fact_lines(facts: Facts) -> list[str]:
    """Four or five short lines: platform, CPU, GPUs or TPU, engines, disk."""
    host, nvidia = facts.host, facts.nvidia
    lines = [
        f"platform  {platform_words(facts)}",
        f"cpu       {host.cpu}, {host.cpu_cores} cores, {host.ram_available_bytes / GIB:.1f} of "
        f"{host.ram_total_bytes / GIB:.1f} GiB RAM available",
    ]
    for words, indices in _alike(facts).items():
        lines.append(f"{'gpu ' + _span(indices):<9} {words}, driver {nvidia.driver_version}")
    if facts.tpu.pci or facts.tpu.nodes:
        lines.append(
            f"tpu       {len(facts.tpu.pci) or len(facts.tpu.nodes)} device(s), libtpu {facts.tpu.libtpu or 'none'}"
        )
    if facts.torch:
        build = facts.torch.cuda_build
        lines.append(f"torch     {facts.torch.version}, " + (f"CUDA {build}" if build else "built without CUDA"))
    return [*lines, f"disk      {host.disk_free_bytes / GIB:.1f} GiB free at {host.disk_path}"]


def _alike(facts: Facts) -> dict[str, list[int]]:
    """GPUs in words, with the numbers of those that the words are the same for."""
    found: dict[str, list[int]] = {}
    for gpu in facts.nvidia.gpus:
        size = "memory shared with the CPU" if gpu.total_bytes is None else f"{gpu.total_bytes / GIB:.1f} GiB"
        code = "" if gpu.capability is None else ", compute capability {}.{}".format(*gpu.capability)
        found.setdefault(f"{gpu.name}, {size}{code}", []).append(gpu.index)
    return found


def _span(indices: list[int]) -> str:
    return str(indices[0]) if len(indices) == 1 else f"{indices[0]}-{indices[-1]}"


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
        lines.append(f"kernel module: {nvidia.module_version}, {nvidia.module_flavour or 'of a kind not told'}")
    for gpu in nvidia.gpus:
        size = "memory shared with the CPU" if gpu.total_bytes is None else f"{gpu.total_bytes} bytes"
        capability = "not told" if gpu.capability is None else "{}.{}".format(*gpu.capability)
        lines.append(f"gpu {gpu.index}: {gpu.name}, {gpu.uuid}, {size}, compute capability {capability}")
    lines += [f"{name}: {value}" for name, value in sorted(facts.environment.items())]
    return "\n".join(lines) + "\n"


def torch_version_text(facts: Facts) -> str:
    """The text of `torch_version.txt`."""
    torch = facts.torch
    if torch is None:
        return "torch: not installed\n"
    arches = "not asked" if torch.arch_list is None else " ".join(torch.arch_list) or "none"
    lines = [f"torch: {torch.version}", f"cuda build: {torch.cuda_build or 'none'}", f"architectures: {arches}"]
    lines += [f"rocm build: {torch.hip_build}"] if torch.hip_build else []
    return "\n".join([*lines, f"cudnn: {torch.cudnn or 'none'}"]) + "\n"
