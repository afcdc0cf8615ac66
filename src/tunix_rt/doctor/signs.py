"""What shows of accelerators, usable or not: asked by the probe before it starts an engine, and by every check."""

from tunix_rt.doctor.facts import Host, Nvidia

WSL_LIBRARIES = "/usr/lib/wsl/lib"


def gpu_signs(host: Host, nvidia: Nvidia) -> list[str]:
    """Every trace of an NVIDIA GPU. /dev/dxg alone is none: every WSL 2 has it.

    A driver that fails is a trace as well. Only `DriverNotLoaded` is none where the bus can be seen and is empty: there
    the driver is installed for nothing.
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
