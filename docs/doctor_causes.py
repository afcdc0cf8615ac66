"""The causes that the doctor reports, for people: the symptom, the explanation and the fix of each. The pages of docs/doctor
are generated from this table, which has the order of `checks.EVERY_CHECK`: a cause hides the ones below it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """Text in backquotes is the output of a program, with its version where known."""

    title: str
    symptom: str
    why: str
    remedy: str
    """The general fix; the doctor prints the exact command for a computer."""
    sources: tuple[str, ...] = ()


_TORCH = "github.com/pytorch/pytorch"
_TOOLKIT = "github.com/NVIDIA/nvidia-container-toolkit"
_OPEN_MODULES = "github.com/NVIDIA/open-gpu-kernel-modules/issues/862"
_COMPATIBILITY = "docs.nvidia.com/deploy/cuda-compatibility"
_WSL = "docs.nvidia.com/cuda/wsl-user-guide"
_JAX_INSTALL = "docs.jax.dev/en/latest/installation.html"

_HARDWARE_AND_DRIVER: Mapping[str, Cause] = {
    "wsl-without-gpu": Cause(
        "WSL cannot use the GPU",
        "Windows shows the GPU, and inside WSL `nvidia-smi` is missing or lists nothing. torch prints "
        "`Found no NVIDIA driver on your system.`, and `torch.cuda.is_available()` is False without a warning.",
        "WSL 2 uses the GPU through /dev/dxg and a libcuda that the Windows driver puts into /usr/lib/wsl/lib. WSL 1 "
        "has neither; Windows without the NVIDIA driver lacks the second.",
        "Update WSL and convert the distribution to WSL 2, or install the NVIDIA driver in Windows. Install none inside WSL.",
        (_WSL,)),
    "container-without-runtime": Cause(
        "The container was started without the GPUs of its host",
        "On the host `nvidia-smi` works, in the container it is missing or finds no driver. torch prints "
        "`Found no NVIDIA driver on your system.`",
        "A container shares the kernel of its host, so it shows the driver's module. The runtime adds device nodes and driver "
        "libraries only to a container that is started with GPUs. NVIDIA_VISIBLE_DEVICES=void excludes them.",
        "Start it again with `--gpus all`, on a host that has nvidia-container-toolkit.", (_TOOLKIT,)),
    "no-gpu": Cause(
        "There is no NVIDIA GPU",
        "`torch.cuda.is_available()` is False without a warning; forced, torch 2.15 prints `Found no NVIDIA driver on your "
        "system.` jax 0.10.2 uses the CPU without a warning.",
        "No NVIDIA GPU is on the PCI bus, in /dev or in NVML. A virtual machine without a passed-through GPU looks the same.",
        "Use a computer that has one, or pass it through to the virtual machine."),
    "driver-not-loaded": Cause(
        "The NVIDIA driver is not loaded",
        "`nvidia-smi` prints `NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.`; NVML returns "
        "error 9, DriverNotLoaded.",
        "The GPU is on the bus, and the kernel module `nvidia` is not loaded. It is not installed, not built for the "
        "running kernel, or rejected by Secure Boot, or nouveau drives the GPU.",
        "Load the module; if there is none, install the driver and restart. With Secure Boot, enrol its key.",
        ()),
    "node-permissions": Cause(
        "This user cannot open the device nodes of the GPU",
        "`nvidia-smi` prints `Failed to initialize NVML: Insufficient Permissions`; as root it works.",
        "/dev/nvidia* belong to a group without this user, or a rootless container has dropped its groups.",
        "Join the group that owns the nodes and log in again; in a rootless container keep the groups."),
    "wsl-stub-shadowed": Cause(
        "A Linux driver inside WSL shadows the driver of Windows",
        "`nvidia-smi` and torch worked in WSL until an NVIDIA package was installed there; now they find no device.",
        "In WSL libcuda is a small library that talks to the driver of Windows. A Linux driver installs another one, which "
        "has no kernel module to talk to, and the loader finds it first.",
        "Remove every Linux driver package inside WSL; a CUDA toolkit without driver may stay.", (_WSL,)),
    "driver-library-missing": Cause(
        "The driver is loaded, its libraries are not installed",
        "NVML returns error 12, LibraryNotFound; `nvidia-smi` is missing; torch prints `Found no NVIDIA driver on your "
        "system.` although /dev/nvidia0 exists.",
        "A driver has two parts, a kernel module and libraries; only the first is present. In a container "
        "NVIDIA_DRIVER_CAPABILITIES selects the libraries: `compute` adds libcuda, `utility` NVML.",
        "Install the libraries of the same version as the module, or start the container with both capabilities.", (_TOOLKIT,)),
    "driver-mismatch": Cause(
        "The driver was updated and the computer was not restarted",
        "`Failed to initialize NVML: Driver/library version mismatch`; torch may print `Unexpected error from "
        "cudaGetDeviceCount()` with error 803.",
        "An update, often an unattended one, replaced the driver's libraries on disk while the old module is still loaded. "
        "The two are incompatible.",
        "Restart; for a container, first the host.", (f"{_TOOLKIT}/issues/394",)),
    "gpu-lost": Cause(
        "The GPU does not respond",
        "`nvidia-smi` prints `Unable to determine the device handle for GPU` or `ERR!`; NVML returns error 15, GpuIsLost, or "
        "16, ResetRequired.",
        "The GPU fell off the bus or needs a reset, because of power, heat, a loose riser or a defect. The "
        "kernel log has an `Xid` with the reason.",
        "Restart. If it happens again, check power, temperature, seating and the Xid."),
    "container-lost-gpu": Cause(
        "The container lost its GPU while it ran",
        "A container that trained for hours fails with `Failed to initialize NVML: Unknown Error`; torch reports 999, "
        "`CUDA unknown error`. The host is fine.",
        "`systemctl daemon-reload` on the host, which any package update may call, rewrites the device rules of running "
        "containers, without the GPU that the runtime had added.",
        "Restart the container. To prevent it, configure Docker with CDI or the cgroupfs driver.",
        ("github.com/NVIDIA/nvidia-docker/issues/1730", f"{_TOOLKIT}/issues/1227")),
    "nvml-failed": Cause(
        "The NVIDIA driver does not respond",
        "`nvidia-smi` hangs or fails.",
        "NVML, the management library of the driver, returned an error that no other cause explains, or timed out. "
        "Without it nothing is known about the GPUs.",
        "Restart the computer or the container; if that does not help, install the driver again."),
    "blackwell-driver": Cause(
        "The driver is too old for a Blackwell GPU",
        "`nvidia-smi` prints `No devices were found`, or the first kernel of torch fails, on an RTX 50, B200 or GB10.",
        "GPUs of compute capability 10.0 and above came with CUDA 12.8; no driver before branch 570 supports them, with any "
        "wheel.",
        "Update the driver to 580.65.06 or newer, in its open variant: then CUDA 13 wheels run too.", (_COMPATIBILITY,)),
    "open-modules-needed": Cause(
        "A Blackwell GPU needs the open kernel modules",
        "`nvidia-smi` prints `No devices were found` with a new driver and a new GPU.",
        "NVIDIA ships each driver with two kinds of kernel modules. The proprietary ones do not support Blackwell; they load, "
        "and list nothing. With the open ones the same message can mean that Above 4G Decoding is off in the firmware.",
        "Install the open variant of the same driver and restart; then check the firmware.",
        (_OPEN_MODULES, "github.com/NVIDIA/open-gpu-kernel-modules/issues/872")),
    "driver-lists-no-gpu": Cause(
        "The driver is loaded and does not support this GPU",
        "`nvidia-smi` prints `No devices were found`; `lspci` shows the GPU.",
        "The driver does not support the GPU: it is older than the GPU, or so new that it has dropped it (branch 590 dropped "
        "GPUs before Turing), or the firmware gives the GPU too small an address window.",
        "Install a driver branch that supports the GPU: 580 for Maxwell, Pascal and Volta, 580 or newer for the rest.",
        (_OPEN_MODULES,)),
    "uvm-missing": Cause(
        "/dev/nvidia-uvm is missing",
        "`nvidia-smi` works, and torch prints `CUDA unknown error - this may be due to an incorrectly set up environment` and "
        "reports zero devices (cudaErrorUnknown, 999).",
        "NVML needs only /dev/nvidiactl; CUDA also needs the module nvidia-uvm and its node, which may not be loaded on a "
        "computer without a desktop.",
        "Load the module and create its node; for a container on the host, then start the container again."),
    "masked": Cause(
        "CUDA_VISIBLE_DEVICES hides the GPU",
        "`nvidia-smi` shows the GPU; torch raises `RuntimeError: No CUDA GPUs are available`, and "
        "`torch.cuda.is_available()` is False without a warning.",
        "The variable names no existing GPU: it is empty, -1, an index too high, an unknown identifier, or a duplicate, which "
        "CUDA treats as none. A shell profile, a notebook or a scheduler often sets it.",
        "Unset it, or name a GPU that `nvidia-smi -L` lists."),
    "mig-without-slice": Cause(
        "The GPU is in MIG mode and no slice is visible",
        "`nvidia-smi` shows the GPU with `MIG M.` Enabled; torch raises `No CUDA GPUs are available`.",
        "In MIG mode only slices of a GPU are CUDA devices. There is none, or CUDA_VISIBLE_DEVICES names none: the identifier "
        "of a slice starts with MIG-.",
        "Create a slice, name one, or turn MIG mode off."),
    "gpu-exclusive": Cause(
        "Another process has exclusive use of the GPU",
        "torch raises `CUDA error: all CUDA-capable devices are busy or unavailable`.",
        "The compute mode of the GPU allows one process (exclusive_process) or none (prohibited). Clusters set it so that "
        "jobs do not share a GPU.",
        "Wait for the other process, or set the compute mode back to DEFAULT."),
    "no-tpu": Cause(
        "There is no TPU",
        "jax 0.10.2 with `JAX_PLATFORMS=tpu` prints `Unable to initialize backend 'tpu'`; without the variable it uses the CPU. "
        "A Kaggle session that requested a TPU can run on a machine without one, without a warning.",
        "No Google device is on the PCI bus, and there is no /dev/accel*. libtpu and TPU variables are no sign: images "
        "have them on any machine.",
        "Use a TPU machine; on Kaggle check the accelerator of the session, not the setting of the notebook.",
        ("github.com/Kaggle/kaggle-cli/issues/1197",)),
    "torch-on-tpu": Cause(
        "The torch engine does not run on a TPU",
        "torch finds no GPU and uses the CPU of an expensive TPU machine.",
        "torch uses TPUs only through torch_xla, which tunix-rt does not use. Its engine for TPUs is jax.",
        "Set training.backend to jax, or request the CPU."),
    "tpu-node-permissions": Cause(
        "This user cannot open the device nodes of the TPU",
        "jax cannot initialise the backend `tpu`; as root it works.",
        "/dev/accel* (v2 to v4) or /dev/vfio/* (v5e and later) belong to a group without this user, or the container "
        "has no access to the devices.",
        "Join the group and log in again; run the container privileged."),
}  # fmt: skip

_TORCH_ENGINE: Mapping[str, Cause] = {
    "torch-missing": Cause(
        "torch is not installed",
        "`ModuleNotFoundError: No module named 'torch'`",
        "tunix-rt does not depend on torch: the right build depends on the GPU and its driver.",
        "Install the build that fits, then the extra `torch`; `tunix-rt env create` does both."),
    "torch-broken": Cause(
        "torch is installed and does not start",
        "`import torch` fails, often with `ImportError` and the name of a library, or hangs.",
        "An incomplete installation, libraries of another CUDA in LD_LIBRARY_PATH, or a driver on which every "
        "call hangs. The doctor starts torch in a process with a time limit, so that it does not hang itself.",
        "Install torch again in a new environment, with LD_LIBRARY_PATH unset."),
    "amd-gpu": Cause(
        "There is an AMD GPU, and it is not used",
        "torch is a build for ROCm; `torch.version.hip` is set, and `torch.cuda.is_available()` may even be True.",
        "A build for ROCm is installed where there is an AMD GPU. tunix-rt trains on NVIDIA GPUs, on TPUs and on CPUs; AMD GPUs "
        "are untested. `auto` does not fall back to the CPU of a computer that has a GPU.",
        "Use a computer with an NVIDIA GPU, or request the CPU."),
    "cpu-wheel": Cause(
        "The installed torch is a CPU build",
        "`AssertionError: Torch not compiled with CUDA enabled`; `torch.cuda.is_available()` is False without a warning, and a "
        "program that only checks it trains on the CPU.",
        "The registry's wheel for Windows has no CUDA (seen in 2.10.0 and 2.15.0), nor has the one for Linux on ARM up to "
        "2.10.0. A build from the index `cpu` satisfies `torch==2.13.0` as well, so pip does not replace it. ROCm builds do "
        "not run on NVIDIA GPUs either.",
        "Install a CUDA build by its exact local tag, such as +cu130, from PyTorch's index.",
        ("github.com/vllm-project/vllm/issues/9701", "packaging.python.org/en/latest/specifications/version-specifiers")),
    "driver-below-wheel": Cause(
        "The driver is older than the torch wheel needs",
        "`CUDA initialization: The NVIDIA driver on your system is too old (found version 12080).` and then "
        "`torch.cuda.is_available()` is False; seen with a CUDA 13 build on driver branch 570.",
        "Every wheel of a CUDA major needs the same driver: 525.60.13 for CUDA 12, 580.65.06 for CUDA 13. The version in the "
        "header of `nvidia-smi` is the highest that the driver supports, not an installed one.",
        "Install a wheel of the older major, which is easier to change than a driver; or update the driver.",
        (f"{_TORCH}/issues/162531", _COMPATIBILITY)),
    "wheel-lacks-architecture": Cause(
        "The torch wheel has no kernels for this GPU",
        "`torch.cuda.is_available()` is True, and the first kernel fails with `CUDA error: no kernel image is available for "
        "execution on the device`. A warning precedes it: `with CUDA capability sm_120 is not compatible with the current "
        "PyTorch installation`, or from 2.13 on `does not include kernels for this GPU`.",
        "A wheel has machine code for a list of architectures and, in the registry from 2.8 on, no PTX that a driver could "
        "compile for another. CUDA 12.6 builds end at sm_90, so an RTX 50 does not run; CUDA 13 builds begin at sm_75, so a "
        "P100 or V100 does not. Code runs on GPUs of the same major and an equal or higher minor number.",
        "Install the wheel that the doctor names, or build torch from source. torch's own hint may name an index without it: "
        "that of 2.15 still names cu126.",
        (f"{_TORCH}/issues/172352", f"{_TORCH}/issues/190385", "github.com/Kaggle/kaggle-cli/issues/1151")),
    "torch-too-old": Cause(
        "The installed torch is too old",
        "None: an old torch trains.",
        "Versions below 2.10 have known vulnerabilities in loading weights, and tunix-rt is not tested with them.",
        "Install the version the doctor names."),
    "torch-sees-no-gpu": Cause(
        "Everything fits, and torch still sees no GPU",
        "`Unexpected error from cudaGetDeviceCount().` with a number, or `CUDA driver initialization failed, you might not "
        "have a CUDA gpu.`",
        "CUDA itself does not start. The number is the reason: 802, the fabric manager of a board with NVSwitch is not running; "
        "803, library and module differ; 804, a cuda-compat library is loaded that supports data-center GPUs only; 999, other.",
        "Follow the fix for the number; else restart the container or the computer.", (_COMPATIBILITY,)),
}  # fmt: skip

_JAX_ENGINE: Mapping[str, Cause] = {
    "jax-missing": Cause(
        "jax is not installed",
        "`ModuleNotFoundError: No module named 'jax'`",
        "The jax engine is an extra, and jax for a GPU or a TPU is an extra of jax.",
        "Install jax for the device: jax[cuda13], jax[cuda12] or jax[tpu].", (_JAX_INSTALL,)),
    "jax-platforms-fall": Cause(
        "JAX_PLATFORMS lets jax fall back to the CPU silently",
        "None. With `JAX_PLATFORMS=cuda,cpu` and a GPU that fails, jax 0.10.2 uses the CPU without a warning.",
        "The variable lists allowed platforms, in order. jax warns about a GPU that it cannot use only if the variable is not "
        "set.",
        "Unset it. tunix-rt sets it to the one platform of the run."),
    "jax-platforms-mask": Cause(
        "JAX_PLATFORMS names another device",
        "`JAX_PLATFORMS=cpu` hides a GPU without a warning; `JAX_PLATFORMS=cuda` without one ends in a bare `AssertionError` "
        "with an empty message (0.10.2).",
        "jax uses the platform that the variable names and no other, whatever the program requests.",
        "Unset it, or request the device that it names."),
    "jax-without-plugin": Cause(
        "The installed jax can only use the CPU",
        "`An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed. Falling back to cpu.` "
        "(0.10.2), once, in the log; with JAX_PLATFORMS=cuda `Backend 'cuda' is not in the list of known backends`.",
        "`pip install jax` is a CPU jax; CUDA is a plugin. google-tunix[prod] installs jax for TPUs, which on a GPU machine "
        "is a CPU jax too. There is no plugin for Windows.",
        "Install jax[cuda13], or jax[cuda12] below driver 580 or compute capability 7.5.", (_JAX_INSTALL,)),
    "libtpu-missing": Cause(
        "jax has no library for the TPU",
        "`A Google TPU may be present on this machine, but either a TPU-enabled jaxlib or libtpu is not installed. Falling "
        "back to cpu.` or `Failed to open libtpu.so` (0.10.2)",
        "jax uses a TPU through libtpu, which only jax[tpu] installs, in the matching version.",
        "Install jax[tpu].", (_JAX_INSTALL,)),
    "jax-plugin-version": Cause(
        "The packages of jax have different versions",
        "jax warns that the plugin's version is not compatible, ignores the plugin, and uses the CPU.",
        "jax, jaxlib, the plugin and its pjrt are four packages of one version. An update of one leaves the others behind.",
        "Install all of them together, through the extra, at one version.", (_JAX_INSTALL,)),
    "jax-driver-below-plugin": Cause(
        "The driver is older than the jax plugin needs",
        "`CUDA backend failed to initialize: ...` as a warning, and jax uses the CPU.",
        "The plugin for CUDA 13 needs driver 580.65.06, the one for CUDA 12 525.60.13, for any GPU.",
        "Install jax[cuda12] and remove the other plugin, or update the driver.", (_JAX_INSTALL, _COMPATIBILITY)),
    "jax-plugin-lacks-architecture": Cause(
        "The jax CUDA plugin has no kernels for this GPU",
        "jax lists the GPU, and the first array fails with `no kernel image is available for execution on the device`.",
        "`jax[cuda13]` is built with CUDA 13, which dropped every GPU below compute capability 7.5: P100, V100, GTX 10.",
        "Replace the CUDA 13 plugin with the CUDA 12 plugin.", (_JAX_INSTALL,)),
    "jax-broken": Cause(
        "jax is installed and does not start",
        "`import jax` fails or hangs, or `Unable to load CUDA. Is it installed?`; on a TPU the second process on a chip fails.",
        "Libraries in LD_LIBRARY_PATH that precede those of the wheels, an incomplete installation, or a TPU that another "
        "process holds: a chip serves one process.",
        "End the process that holds the TPU; else install jax again in a new environment, with LD_LIBRARY_PATH unset.",
        ("github.com/jax-ml/jax/issues/17497",)),
    "jax-sees-no-device": Cause(
        "jax uses another device than the requested one",
        "The program runs, slowly: `jax.default_backend()` is `cpu`.",
        "Started with one platform in a process of its own, jax reported another; the evidence contains its message.",
        "Install jax for the device again, all of its packages in one command.", (_JAX_INSTALL,)),
    "tpu-unknown": Cause(
        "The kind of TPU is unknown",
        "jax may list the device, under a kind that is not in the catalogue.",
        "The plan needs the memory of one device. For a TPU it comes from the catalogue, by the kind that jax or the PCI bus "
        "reports; a kind newer than the catalogue, or a TPU with device nodes only, has no entry.",
        "Install jax for TPUs, which reports the kind; for a newer kind, update tunix-rt."),
}  # fmt: skip

_NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide"
_PROCESSES: Mapping[str, Cause] = {
    "mixed-versions": Cause(
        "The processes of a run have different software",
        "Process 0 ends with `has other software than`, or NCCL prints `Mismatched NCCL version detected`.",
        "Every process computes a part of each step. Other versions compile other collectives, which wait for each other.",
        "Use one image or one lock file on every host."),
    "mixed-drivers": Cause(
        "The hosts of a run have different NVIDIA drivers",
        "Process 0 ends with `has NVIDIA driver`; without that check, some hosts fail and the others wait for them.",
        "An update reached some of the hosts only.",
        "Install one driver version on all hosts."),
    "mixed-gpus": Cause(
        "The GPUs of a run differ",
        "A run over all GPUs is as slow as on the slowest, or ends with `has 2 x`; NCCL may print `unhandled system error`.",
        "Every GPU gets an equal part of the model and of the rows. What fits is set by the smallest, the time by the slowest.",
        "Select GPUs of one kind with CUDA_VISIBLE_DEVICES."),
    "gpu-duplicate": Cause(
        "Two processes of a run use one GPU",
        "`NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 45000`",
        "There are more processes than GPUs, or each process has a mask that shows it the same GPU.",
        "Start one process for each GPU, all with the same mask."),
    "nccl-missing": Cause(
        "torch has no NCCL",
        "`torch.distributed.is_nccl_available()` is False; a run ends with `Distributed package doesn't have NCCL`.",
        "Wheels for Windows, and builds with USE_NCCL=0, have no NCCL, which exchanges data between GPUs.",
        "Use Linux or WSL2 with a wheel of pytorch.org."),
    "shm-small": Cause(
        "/dev/shm is too small",
        "`NCCL WARN Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)`",
        "NCCL connects the GPUs of a host through /dev/shm where they have no peer access. docker gives 64 MB. Files of killed "
        "runs stay there.",
        "Give the container more, and delete /dev/shm/nccl-* that no process uses.",
        ("github.com/NVIDIA/nccl/issues/525", f"{_NCCL}/docs/troubleshooting.html")),
    "wrong-interface": Cause(
        "A process cannot reach another one through its network interface",
        "A run over hosts hangs at its start, or prints `Bootstrap : no socket interface found`, `is neither AF_INET(2) nor "
        "AF_INET6(10)`, or `socketStartConnect: Connect to 172.17.0.1<41213> failed`.",
        "NCCL and gloo take the first interface that is not `lo` or `docker*`, unless NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
        "name another. A bridge of containers or a VPN does not lead to the other hosts.",
        "Name the interface of the cluster network in both variables, or unset them.",
        ("github.com/NVIDIA/nccl/issues/1837", "github.com/NVIDIA/nccl/issues/286")),
    "port-taken": Cause(
        "Another program listens on the port of the run",
        "`EADDRINUSE`, `address already in use`, `MASTER_PORT: node1:29500 is in use`, or process 0 `cannot listen on`.",
        "An earlier run still ends, another run of the host has the same port, or torchrun keeps MASTER_PORT for its own store.",
        "Wait for the earlier run, or choose another port."),
    "process-lost": Cause(
        "A process of a run ended, and the others with it",
        "`rank 1 on node2 (pid 4711) was lost`, `process 1 (node2, pid 4711) has ended during step 17`, `Connection closed by "
        "remote peer`, or from torchrun `exitcode : -9`.",
        "Every step needs all processes. One was killed, often for memory, or its host was taken back.",
        "Read its log, then run the same command with --resume in every process."),
    "process-hangs": Cause(
        "A process does not reach a computation in which the others wait",
        "`step 17: rank 1 on node2 (pid 4711) has not joined the others for 60 s`, `a process hangs: process 1 (node2, pid 4711) "
        "is in step 17`, or after 10 minutes `Watchdog caught collective operation timeout`.",
        "A process waits for a disk, is stopped, or takes another path through the program. jax and NCCL see it as a long step.",
        "Look at what that process does (py-spy dump), end it, and run the same command with --resume in every process.",
        ("github.com/pytorch/pytorch/issues/118369",)),
}  # fmt: skip

_CONDITIONS: Mapping[str, Cause] = {
    "bf16-emulated": Cause(
        "The GPU emulates bfloat16",
        "`torch.cuda.is_bf16_supported()` is True on a T4, and training is slower than in float32.",
        "bfloat16 needs compute capability 8.0. Below, torch emulates it with float32, and reports that as support unless "
        "called with including_emulation=False.",
        "Set training.dtype to float32, or use a GPU from Ampere on."),
    "gpu-busy": Cause(
        "Another process holds GPU memory",
        "`torch.OutOfMemoryError: CUDA out of memory.` at a size that should fit.",
        "A notebook that was left open, a second run or a desktop holds memory. jax alone preallocates 75 % of a GPU at its "
        "first use.",
        "End the process that the doctor names, wait for it, or select another GPU. With less than a tenth free the run is "
        "refused; else this is a warning, and the plan decides.",
        ("docs.jax.dev/en/latest/201/gpu-memory.html",)),
    "cuda-majors-clash": Cause(
        "torch and jax are built for different CUDA majors",
        "Either may fail to load a library, or load the other's: `Outdated cuDNN installation found` (jax plugin, 0.10.2).",
        "Each installs the NVIDIA libraries of its own major into one environment, and a process uses the first that is "
        "loaded. It may work, so this is a warning.",
        "Use an environment for each engine, or pair a CUDA 13 torch with jax[cuda13], a CUDA 12 one with jax[cuda12].",
        ("github.com/jax-ml/jax/issues/18032", "github.com/jax-ml/jax/issues/19004")),
    "low-disk": Cause(
        "The disk is nearly full",
        "`OSError: [Errno 28] No space left on device` while a checkpoint is written.",
        "A checkpoint contains weights and optimizer states; with AdamW, three times the weights. This is a warning below "
        "2 GiB; `tunix-rt plan` predicts what a run needs, and a run that does not fit is refused.",
        "Free space, or write to another volume with --output."),
    "low-ram": Cause(
        "Little memory is available",
        "The process ends with `Killed`, and the kernel log names the out-of-memory killer.",
        "Weights are loaded through RAM, and a CPU run stays there. The limit of a container counts, not the memory of the "
        "computer. This is a warning below 2 GiB; `tunix-rt plan` predicts whether the model fits.",
        "Close other programs, raise the limit of the container, or choose a smaller model."),
}  # fmt: skip

CAUSES: Mapping[str, Cause] = {**_HARDWARE_AND_DRIVER, **_TORCH_ENGINE, **_JAX_ENGINE, **_PROCESSES, **_CONDITIONS}
