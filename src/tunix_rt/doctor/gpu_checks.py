"""Rules about an NVIDIA GPU that CUDA can use: hardware, kernel module, device nodes, driver, masks; not torch or jax.

One function per cause, in the order of `GPU_CHECKS`: a cause comes before the ones that it hides.
"""

import re

from tunix_rt.doctor import facts as signs
from tunix_rt.doctor.facts import Ask, Check, Facts, Gpu, check, failed, passed, skipped, visible_gpus, warned
from tunix_rt.doctor.wheels import BLACKWELL, BLACKWELL_DRIVER, DRIVER_FLOOR, LAST_BRANCH_BELOW_7_5, number

GIB = 2**30
WSL_LIBRARIES = signs.WSL_LIBRARIES
FIRST_BLACKWELL_ID = 0x2900
"""PCI device numbers: Ada ends at 0x28xx; B200 is 0x2901, RTX 50 0x2b85 and above, GB10 0x2e12."""
FIRST_TURING_ID = 0x1E00
NEWEST_DRIVER = DRIVER_FLOOR["Linux"][13]
POD_GPUS = "give the pod a GPU: resources.limits nvidia.com/gpu: 1 (outside of Kubernetes: docker run --gpus all)"
RUN_GPUS = "start the container with its GPUs: docker run --gpus all ... (the host needs nvidia-container-toolkit)"
LOST = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")


# --- signs ------------------------------------------------------------------------------------------------------------


def gpu_signs(facts: Facts) -> list[str]:
    return signs.gpu_signs(facts.host, facts.nvidia)


def wants_gpu(facts: Facts, ask: Ask) -> bool:
    return ask.device == "cuda" or (ask.device == "auto" and bool(gpu_signs(facts)))


def wants_visible_gpu(facts: Facts, ask: Ask) -> bool:
    return wants_gpu(facts, ask) and bool(visible_gpus(facts))


def lists_no_gpu(facts: Facts, ask: Ask) -> bool:
    """A GPU is requested or present, and the driver lists none."""
    return wants_gpu(facts, ask) and not facts.nvidia.gpus


def in_container(facts: Facts, ask: Ask) -> bool:
    return wants_gpu(facts, ask) and facts.host.container is not None


def cuda_starts(facts: Facts) -> bool:
    """Whether torch started CUDA, which overrules every table."""
    return facts.torch is not None and bool(facts.torch.cuda_available)


def _driver(facts: Facts) -> str | None:
    return facts.nvidia.driver_version or facts.nvidia.module_version


def _nvml_error(facts: Facts) -> str:
    return (facts.nvidia.nvml_problem or "").partition(":")[0]


def _gpu_nodes(facts: Facts) -> list[str]:
    return [node.path for node in facts.nvidia.nodes if node.path.startswith("/dev/nvidia")]


def _with_gpus(facts: Facts) -> str:
    return POD_GPUS if facts.host.container == "kubernetes" else RUN_GPUS


def _device_numbers(facts: Facts) -> list[int]:
    return [int(one.device, 16) for one in facts.nvidia.pci if re.fullmatch(r"0x[0-9a-fA-F]+", one.device)]


def _is_old(facts: Facts) -> bool:
    """Older than Turing: not supported by driver branch 590 and the open kernel modules."""
    return any(device < FIRST_TURING_ID for device in _device_numbers(facts))


def _has_blackwell(facts: Facts) -> bool:
    on_bus = any(device >= FIRST_BLACKWELL_ID for device in _device_numbers(facts))
    return on_bus or any(gpu.capability is not None and gpu.capability >= BLACKWELL for gpu in facts.nvidia.gpus)


# --- one function per cause -------------------------------------------------------------------------------------------


@check("wsl-without-gpu")
def wsl_has_a_gpu(facts: Facts, ask: Ask) -> Check:
    """WSL uses the GPU through /dev/dxg and a library that Windows mounts."""
    if not facts.host.wsl or facts.host.container or not wants_gpu(facts, ask):
        return skipped("not WSL, or no GPU requested")
    if not any(node.path == "/dev/dxg" for node in facts.nvidia.nodes):
        return failed(
            "WSL without /dev/dxg", "this WSL cannot use a GPU: it is WSL 1, or too old",
            "in Windows: wsl --update, then wsl --set-version DISTRIBUTION 2, then wsl --shutdown",
        )  # fmt: skip
    if not gpu_signs(facts):
        return failed(
            f"WSL with /dev/dxg, no libcuda in {WSL_LIBRARIES}", "Windows has no NVIDIA driver for WSL",
            "install the current NVIDIA driver in Windows (none inside WSL), then wsl --shutdown",
        )  # fmt: skip
    return passed("/dev/dxg and the driver's library exist")


@check("no-gpu")
def gpu_is_present(facts: Facts, ask: Ask) -> Check:
    if present := gpu_signs(facts):
        return passed(", ".join(dict.fromkeys(present)))
    if not wants_gpu(facts, ask):
        return skipped("no sign of an NVIDIA GPU")
    return failed(
        "no NVIDIA GPU in the driver" + (", on the PCI bus or in /dev" if facts.host.system == "Linux" else ""),
        "no GPU present",
        "use a computer with an NVIDIA GPU"
        + ("" if facts.host.system == "Linux" else "; if it has one, install its driver"),
    )


@check("driver-not-loaded", needs=lambda facts, ask: lists_no_gpu(facts, ask) and not facts.host.wsl)
def driver_is_loaded(facts: Facts, ask: Ask) -> Check:
    nvidia = facts.nvidia
    not_loaded = _nvml_error(facts) == "NVMLError_DriverNotLoaded"
    if nvidia.module_version is None and (nvidia.pci or not_loaded) and not _gpu_nodes(facts):
        saw = ", ".join(gpu_signs(facts)) + (", nouveau loaded" if nvidia.nouveau else ", no kernel module `nvidia`")
        where = "on the host of this container: " if facts.host.container else ""
        last = f"branch {LAST_BRANCH_BELOW_7_5}, the last one for it"
        driver = last if _is_old(facts) else f"{NEWEST_DRIVER} or newer"
        first = "" if nvidia.nouveau else "sudo modprobe nvidia; if there is no such module, "
        driver += "; it replaces nouveau" if nvidia.nouveau else ""
        how = f"{first}install the NVIDIA driver ({driver}), then restart; if Secure Boot refuses its module, enrol its key"
        return failed(saw, "the GPU is on the PCI bus, the NVIDIA driver is not loaded", where + how)
    if not_loaded and not (facts.host.container and not _gpu_nodes(facts)):
        return failed(
            nvidia.nvml_problem or "", "the NVIDIA driver is installed but not running",
            f"{'on the host: ' if facts.host.container else ''}sudo modprobe -a nvidia nvidia_uvm, or restart",
        )  # fmt: skip
    return passed(f"kernel module {nvidia.module_version or 'unknown'}")


@check("container-without-runtime", needs=lambda facts, ask: lists_no_gpu(facts, ask) and in_container(facts, ask))
def container_has_gpus(facts: Facts, ask: Ask) -> Check:
    """A container shows the kernel module of its host; the device nodes only if the runtime adds them."""
    nvidia = facts.nvidia
    mask = facts.environment.get("NVIDIA_VISIBLE_DEVICES")
    hidden = mask in ("void", "none") and bool(gpu_signs(facts))
    has_nodes = bool(_gpu_nodes(facts)) or any(node.path == "/dev/dxg" for node in nvidia.nodes)
    if not hidden and (has_nodes or not (facts.host.wsl or nvidia.module_version)):
        return passed(", ".join(node.path for node in nvidia.nodes) or "no driver on the host")
    missing = "no /dev/dxg" if facts.host.wsl else "no /dev/nvidia* nodes"
    missing = f"NVIDIA_VISIBLE_DEVICES={mask}" if hidden else missing
    seen = ", ".join([*gpu_signs(facts), missing])
    saw = f"inside {facts.host.container}{' on WSL' if facts.host.wsl else ''}: {seen}"
    return failed(saw, "this container was started without the GPUs of its host", _with_gpus(facts))


@check("node-permissions", needs=wants_gpu)
def nodes_may_be_opened(facts: Facts, ask: Ask) -> Check:
    closed = [node.path for node in facts.nvidia.nodes if not node.usable]
    if not closed and _nvml_error(facts) != "NVMLError_NoPermission":
        return passed("every device node can be opened") if facts.nvidia.nodes else skipped("no device nodes")
    nodes = closed or _gpu_nodes(facts) or ["/dev/nvidiactl"]
    answer = warned if cuda_starts(facts) else failed
    return answer(
        f"{', '.join(nodes)}: no read and write permission" if closed else facts.nvidia.nvml_problem or "",
        "this user cannot open the device nodes of the GPU",
        f"ls -l {nodes[0]} names their group: sudo usermod -aG GROUP $USER and log in again; "
        "in a rootless container start it with --group-add keep-groups",
    )  # fmt: skip


@check("wsl-stub-shadowed")
def wsl_stub_comes_first(facts: Facts, ask: Ask) -> Check:
    """A Linux driver inside WSL shadows the library that talks to the driver of Windows."""
    libraries = facts.nvidia.libcuda
    if not facts.host.wsl or facts.host.container or not wants_gpu(facts, ask) or not libraries:
        return skipped("not WSL, or in a container, where the runtime puts the library elsewhere")
    if libraries[0].startswith(WSL_LIBRARIES) or cuda_starts(facts):
        return passed(libraries[0])
    return failed(
        f"libcuda.so.1 is loaded from {libraries[0]}", f"a Linux driver shadows WSL's libcuda in {WSL_LIBRARIES}",
        "uninstall the Linux driver inside WSL (sudo apt remove --purge 'libnvidia-*' 'nvidia-*'), sudo ldconfig, "
        f"so that the loader finds {WSL_LIBRARIES} first; install the driver in Windows only",
    )  # fmt: skip


@check("driver-library-missing", needs=lists_no_gpu)
def driver_library_is_there(facts: Facts, ask: Ask) -> Check:
    nvidia = facts.nvidia
    if _nvml_error(facts) != "NVMLError_LibraryNotFound":
        return passed("the driver's library is installed")
    driver = nvidia.module_version or NEWEST_DRIVER
    fix = f"install the libraries of the same driver as the kernel module ({driver})"
    if facts.host.container:
        fix = "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility (and --gpus all)"
    return failed(nvidia.nvml_problem or "", "the driver is loaded, its libraries are not installed", fix)


@check("driver-mismatch", needs=wants_gpu)
def driver_matches_its_library(facts: Facts, ask: Ask) -> Check:
    if _nvml_error(facts) != "NVMLError_LibRmVersionMismatch":
        return passed("library and kernel module have one version")
    module = facts.nvidia.module_version
    saw = (facts.nvidia.nvml_problem or "") + (f"; the loaded module is {module}" if module else "")
    fix = "restart the computer, so that the new driver is loaded"
    if facts.host.container:
        fix = "restart the host, then the container, so that both have the same driver"
    return failed(saw, "the driver was updated and the computer not restarted", fix)


@check("gpu-lost", needs=lambda facts, ask: wants_gpu(facts, ask) and _nvml_error(facts) in LOST)
def gpu_answers(facts: Facts, ask: Ask) -> Check:
    saw = facts.nvidia.nvml_problem or ""
    if facts.nvidia.gpus:
        return warned(saw, "one GPU does not respond; the others do", "restart the computer")
    return failed(
        saw, "the GPU fell off the bus or needs a reset",
        "restart the computer; if it happens again, check power, temperature and `dmesg | grep Xid`",
    )  # fmt: skip


@check("container-lost-gpu", needs=in_container)
def container_kept_its_gpu(facts: Facts, ask: Ask) -> Check:
    """`systemctl daemon-reload` on the host removes the device rules of running containers."""
    if _nvml_error(facts) != "NVMLError_Unknown":
        return passed("NVML works in this container")
    answer = warned if facts.nvidia.gpus else failed
    return answer(
        facts.nvidia.nvml_problem or "", "this container lost access to its GPU",
        "restart the container; to prevent it, configure Docker with CDI or the cgroupfs driver",
    )  # fmt: skip


@check("nvml-failed", needs=wants_gpu)
def nvml_answers(facts: Facts, ask: Ask) -> Check:
    nvidia = facts.nvidia
    if nvidia.nvml_problem is None:
        return passed(f"driver {nvidia.driver_version}, CUDA up to {nvidia.driver_cuda}")
    if nvidia.gpus:
        return warned(nvidia.nvml_problem, "the driver failed some queries", "restart if it persists")
    return failed(
        nvidia.nvml_problem, "the NVIDIA driver does not respond",
        "restart the computer (or the container); if that does not help, install the driver again",
    )  # fmt: skip


@check("blackwell-driver")
def blackwell_has_its_driver(facts: Facts, ask: Ask) -> Check:
    driver = _driver(facts)
    if not wants_gpu(facts, ask) or not _has_blackwell(facts) or driver is None or facts.host.system == "Darwin":
        return skipped("no Blackwell GPU, or its driver is unknown")
    if number(driver) >= number(BLACKWELL_DRIVER):
        return passed(f"driver {driver}")
    return failed(
        f"driver {driver} with a Blackwell GPU", "Blackwell GPUs need driver 570 or newer",
        f"update the NVIDIA driver: 570 is the oldest for it, {NEWEST_DRIVER} or newer is recommended"
        + (", with the open kernel modules" if facts.host.system == "Linux" and not facts.host.wsl else ""),
    )  # fmt: skip


@check("open-modules-needed")
def blackwell_has_open_modules(facts: Facts, ask: Ask) -> Check:
    nvidia = facts.nvidia
    if not wants_gpu(facts, ask) or not _has_blackwell(facts) or nvidia.module_flavour is None:
        return skipped("no Blackwell GPU, or the kernel module flavour is unknown")
    if nvidia.module_flavour == "open" or nvidia.gpus:
        return passed(f"{nvidia.module_flavour} kernel modules {nvidia.module_version}")
    return failed(
        f"proprietary kernel modules {nvidia.module_version}, and the driver lists no GPU",
        "Blackwell GPUs need the open kernel modules",
        "install the driver's open variant (Ubuntu: sudo apt install nvidia-driver-580-open), then restart; "
        "if that does not help, enable Above 4G Decoding and Resizable BAR in the firmware",
    )  # fmt: skip


@check("driver-lists-no-gpu", needs=wants_gpu)
def driver_lists_the_gpu(facts: Facts, ask: Ask) -> Check:
    nvidia = facts.nvidia
    if nvidia.gpus:
        return passed(", ".join(gpu.name for gpu in nvidia.gpus))
    driver = _driver(facts)
    saw = f"driver {driver}, {', '.join(gpu_signs(facts))}; NVML lists no GPU"
    old_way = f"install the proprietary driver of branch {LAST_BRANCH_BELOW_7_5}, the last one for them, then restart"
    if _is_old(facts) and driver and number(driver) >= (LAST_BRANCH_BELOW_7_5 + 1,):
        return failed(saw, f"driver branch {number(driver)[0]} does not support GPUs older than Turing", old_way)
    if _is_old(facts) and nvidia.module_flavour == "open":
        return failed(saw, "the open kernel modules do not support GPUs older than Turing", old_way)
    fix = _with_gpus(facts) if facts.host.container else (
        f"install a driver that supports this GPU ({NEWEST_DRIVER} or newer), then restart; "
        "if that does not help, enable Above 4G Decoding in the firmware"
    )  # fmt: skip
    return failed(saw, "the driver is loaded and does not support this GPU", fix)


@check("uvm-missing")
def uvm_is_there(facts: Facts, ask: Ask) -> Check:
    """NVML works without /dev/nvidia-uvm, CUDA does not: error 999."""
    nodes = _gpu_nodes(facts)
    if not wants_gpu(facts, ask) or not any(re.fullmatch(r"/dev/nvidia\d+", node) for node in nodes):
        return skipped()
    if "/dev/nvidia-uvm" in nodes:
        return passed("/dev/nvidia-uvm")
    if "tegra" in facts.host.release or cuda_starts(facts):
        return passed("CUDA starts without it here")  # a Jetson has none
    fix = "sudo modprobe nvidia-uvm && sudo nvidia-modprobe -u -c=0"
    if facts.host.container:
        fix = f"on the host: {fix}; then {_with_gpus(facts)}"
    return failed(f"{', '.join(nodes)}, no /dev/nvidia-uvm", "CUDA cannot start without /dev/nvidia-uvm", fix)


@check("masked", needs=lambda facts, ask: wants_gpu(facts, ask) and bool(facts.nvidia.gpus))
def gpu_is_not_masked(facts: Facts, ask: Ask) -> Check:
    gpus = facts.nvidia.gpus
    mask = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return passed("CUDA_VISIBLE_DEVICES is not set")
    visible = visible_gpus(facts)
    saw = f"CUDA_VISIBLE_DEVICES={mask!r} shows {len(visible)} of {len(gpus)}"
    if visible or all(gpu.mig for gpu in gpus):
        return passed(saw)
    return failed(
        saw, "the GPU is masked by CUDA_VISIBLE_DEVICES",
        "unset CUDA_VISIBLE_DEVICES, or name a GPU that exists: CUDA_VISIBLE_DEVICES=0",
    )  # fmt: skip


@check("mig-without-slice")
def mig_has_a_slice(facts: Facts, ask: Ask) -> Check:
    gpus = facts.nvidia.gpus
    if not wants_gpu(facts, ask) or not any(gpu.mig for gpu in gpus):
        return skipped("no GPU in MIG mode")
    if visible := visible_gpus(facts):
        return passed(", ".join(gpu.name for gpu in visible))
    slices = [part.uuid for gpu in gpus for part in gpu.slices]
    mask = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if not slices:
        return failed(
            f"{gpus[0].name} in MIG mode without a slice", "a GPU in MIG mode without a slice is no CUDA device",
            "create a slice: sudo nvidia-smi mig -cgi PROFILE -C (nvidia-smi mig -lgip lists the profiles), "
            "or turn MIG off: sudo nvidia-smi -mig 0",
        )  # fmt: skip
    return failed(
        f"CUDA_VISIBLE_DEVICES={mask!r} names no slice of {', '.join(slices)}", "no slice of the GPU is visible",
        f"CUDA_VISIBLE_DEVICES={slices[0]}",
    )  # fmt: skip


@check("gpu-exclusive", needs=wants_visible_gpu)
def gpu_may_be_shared(facts: Facts, ask: Ask) -> Check:
    for gpu in visible_gpus(facts):
        back = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        if gpu.compute_mode == "prohibited":
            saw = f"GPU {gpu.index}: compute mode prohibited"
            return failed(saw, "the compute mode forbids CUDA on this GPU", back)
        if gpu.compute_mode == "exclusive_process" and gpu.processes:
            return failed(
                f"GPU {gpu.index}: compute mode exclusive_process, held by {holders(gpu)}",
                "another process has exclusive use of this GPU", f"wait for it or end it; or share the GPU: {back}",
            )  # fmt: skip
    return passed("processes can share the GPU")


def holders(gpu: Gpu) -> str:
    """The processes on a GPU: `process 4711 (python, 12.5 GiB)`."""
    shown = []
    for process in gpu.processes:
        size = "memory unknown" if process.used_bytes is None else f"{process.used_bytes / GIB:.1f} GiB"
        shown.append(f"process {process.pid} ({process.name + ', ' if process.name else ''}{size})")
    return ", ".join(shown)


GPU_CHECKS = (
    wsl_has_a_gpu, container_has_gpus, gpu_is_present, driver_is_loaded, nodes_may_be_opened, wsl_stub_comes_first,
    driver_library_is_there, driver_matches_its_library, gpu_answers, container_kept_its_gpu, nvml_answers,
    blackwell_has_its_driver, blackwell_has_open_modules, driver_lists_the_gpu, uvm_is_there, gpu_is_not_masked,
    mig_has_a_slice, gpu_may_be_shared,
)  # fmt: skip
