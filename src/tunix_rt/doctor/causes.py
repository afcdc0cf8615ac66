"""Every cause a check can answer with, for people: what they see without the doctor, what is going on, the way out.

The pages in docs/doctor are made from this table. In the order of `checks.EVERY_CHECK`: a cause hides the ones below it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "hardware", "driver", "wheel", "masked", "container", "permissions", "environment", "busy", "storage"
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause in words. Text in backquotes is what a program prints, with the version it was read in where known."""

    title: str
    kind: Kind
    symptom: str
    why: str
    remedy: str
    """The general way; the exact line for a computer is what the doctor prints there."""
    sources: tuple[str, ...] = ()


_TORCH = "github.com/pytorch/pytorch"
_TOOLKIT = "github.com/NVIDIA/nvidia-container-toolkit"
_OPEN_MODULES = "github.com/NVIDIA/open-gpu-kernel-modules/issues/862"
_COMPATIBILITY = "docs.nvidia.com/deploy/cuda-compatibility"
_WSL = "docs.nvidia.com/cuda/wsl-user-guide"
_JAX_INSTALL = "docs.jax.dev/en/latest/installation.html"

_HARDWARE_AND_DRIVER: Mapping[str, Cause] = {
    "wsl-without-gpu": Cause(
        "WSL has no way to the GPU", "driver",
        "Windows shows the GPU, and inside WSL `nvidia-smi` is not found or lists nothing. torch says "
        "`Found no NVIDIA driver on your system.`, and `torch.cuda.is_available()` is False without a word.",
        "WSL 2 reaches the GPU through /dev/dxg and a libcuda that the Windows driver puts into /usr/lib/wsl/lib. WSL 1 "
        "has neither; a Windows without NVIDIA's driver lacks the second.",
        "Update WSL and make the distribution WSL 2, or install NVIDIA's driver in Windows. Inside WSL no driver belongs.",
        (_WSL,)),
    "container-without-runtime": Cause(
        "The container was started without its host's GPUs", "container",
        "On the host `nvidia-smi` works, in the container it does not exist or finds no driver. torch says "
        "`Found no NVIDIA driver on your system.`",
        "A container shares the host's kernel, so the driver's module shows in it. The device nodes and the driver's "
        "libraries are put in only when the container is started with its GPUs. NVIDIA_VISIBLE_DEVICES=void keeps them out.",
        "Start it again with `--gpus all`, on a host that has nvidia-container-toolkit.", (_TOOLKIT,)),
    "no-gpu": Cause(
        "There is no NVIDIA GPU", "hardware",
        "`torch.cuda.is_available()` is False without a word; forced, torch 2.15 says `Found no NVIDIA driver on your "
        "system.` jax 0.10.2 takes the CPU and says nothing at all.",
        "No GPU of NVIDIA is on the PCI bus, no node of one is in /dev, and NVML knows none. A virtual machine to which no "
        "GPU was passed through looks just like this.",
        "Use a computer that has one, or pass it through to the virtual machine.", ()),
    "driver-not-loaded": Cause(
        "The NVIDIA driver is not in the kernel", "driver",
        "`nvidia-smi` says `NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.`; NVML gives error "
        "9, DriverNotLoaded.",
        "The GPU is on the bus, and the kernel module `nvidia` is not loaded. It was never installed, was not built for the "
        "kernel that runs, was refused by Secure Boot, or nouveau has taken the GPU first.",
        "Load the module; if there is none, install the driver and restart. With Secure Boot its key has to be enrolled.",
        ()),
    "node-permissions": Cause(
        "This user may not open the GPU's device nodes", "permissions",
        "`nvidia-smi` says `Failed to initialize NVML: Insufficient Permissions`; as root it works.",
        "/dev/nvidia* belong to a group that this user is not in, or a rootless container has dropped its groups.",
        "Join the group that owns the nodes and log in again; in a rootless container keep the groups.", ()),
    "wsl-stub-shadowed": Cause(
        "A Linux driver inside WSL hides the one of Windows", "driver",
        "`nvidia-smi` and torch worked in WSL until a package of NVIDIA was installed there; now no device is found.",
        "In WSL libcuda is a small library that talks to the driver of Windows. A Linux driver brings another one, which "
        "finds no kernel module to talk to, and the loader takes it first.",
        "Remove every Linux driver package inside WSL; a CUDA toolkit without driver may stay.", (_WSL,)),
    "driver-library-missing": Cause(
        "The driver is in the kernel, its libraries are not installed", "driver",
        "NVML gives error 12, LibraryNotFound; `nvidia-smi` is missing; torch says `Found no NVIDIA driver on your system.` "
        "although /dev/nvidia0 is there.",
        "A driver has two halves, a kernel module and libraries, and here is only the first. In a container the libraries "
        "are put in by NVIDIA_DRIVER_CAPABILITIES: `compute` brings libcuda, `utility` NVML.",
        "Install the libraries of the module's own version, or start the container with both capabilities.", (_TOOLKIT,)),
    "driver-mismatch": Cause(
        "The driver was updated and the computer was not restarted", "driver",
        "`Failed to initialize NVML: Driver/library version mismatch`; torch may say `Unexpected error from "
        "cudaGetDeviceCount()` with error 803.",
        "An update replaced the driver's libraries on the disk, often by itself at night, while the old module is still in "
        "the kernel. The two refuse each other.",
        "Restart; in a container the host, then the container.", (f"{_TOOLKIT}/issues/394",)),
    "gpu-lost": Cause(
        "The GPU no longer answers", "hardware",
        "`nvidia-smi` says `Unable to determine the device handle for GPU` or shows `ERR!`; NVML gives error 15, GpuIsLost, or "
        "16, ResetRequired.",
        "The GPU fell off the bus or waits for a reset, after too little power, too much heat, a loose riser or a fault. The "
        "kernel's log has an `Xid` with the reason.",
        "Restart. If it comes again, look at power, heat, seat and the Xid.", ()),
    "container-lost-gpu": Cause(
        "The container lost its GPU while it ran", "container",
        "A container that trained for hours says `Failed to initialize NVML: Unknown Error`; torch gives 999, "
        "`CUDA unknown error`. The host is fine.",
        "`systemctl daemon-reload` on the host, which any package update may call, wrote the device rules of running "
        "containers anew, without the GPU that the runtime had added by hand.",
        "Restart the container. So that it lasts, let Docker use CDI, or the cgroupfs driver.",
        ("github.com/NVIDIA/nvidia-docker/issues/1730", f"{_TOOLKIT}/issues/1227")),
    "nvml-failed": Cause(
        "The NVIDIA driver does not answer", "driver",
        "`nvidia-smi` hangs, or ends with an error of its own.",
        "NVML, the driver's own interface, gave an error that none of the other causes explains, or did not return in time. "
        "Nothing about the GPUs can be known without it.",
        "Restart the computer or the container; if it stays so, install the driver again.", ()),
    "blackwell-driver": Cause(
        "The driver is too old for a Blackwell GPU", "driver",
        "`nvidia-smi` says `No devices were found`, or torch's first kernel fails, on an RTX 50, B200 or GB10.",
        "GPUs of compute capability 10.0 and above came with CUDA 12.8; no driver before branch 570 knows them, whatever the "
        "wheel.",
        "Update the driver to 580.65.06 or newer, in its open variant: then CUDA 13 wheels run too.", (_COMPATIBILITY,)),
    "open-modules-needed": Cause(
        "A Blackwell GPU needs the open kernel modules", "driver",
        "`nvidia-smi` says `No devices were found` with a new driver and a new GPU.",
        "NVIDIA ships each driver with two kinds of kernel modules. The proprietary ones do not drive Blackwell; they load, "
        "and list nothing. With the open ones the same text can mean that the firmware keeps Above 4G Decoding off.",
        "Install the open variant of the same driver and restart; then look at the firmware.",
        (_OPEN_MODULES, "github.com/NVIDIA/open-gpu-kernel-modules/issues/872")),
    "driver-lists-no-gpu": Cause(
        "The driver runs and does not drive this GPU", "driver",
        "`nvidia-smi` says `No devices were found`; `lspci` shows the GPU.",
        "The driver does not know the GPU: it is older than the GPU, or so new that it has dropped it (branch 590 ends before "
        "Turing), or the firmware gives the GPU too small a window.",
        "Install a driver branch that names the GPU: 580 for Maxwell, Pascal and Volta, 580 or newer for the rest.",
        (_OPEN_MODULES,)),
    "uvm-missing": Cause(
        "/dev/nvidia-uvm is missing", "driver",
        "`nvidia-smi` works, and torch says `CUDA unknown error - this may be due to an incorrectly set up environment` and "
        "sets the devices to zero (cudaErrorUnknown, 999).",
        "NVML needs /dev/nvidiactl alone; CUDA also needs the module nvidia-uvm and its node, which on a computer without a "
        "desktop nobody may have loaded since it was started.",
        "Load the module and make its node; in a container do it on the host, then start the container anew.", ()),
    "masked": Cause(
        "CUDA_VISIBLE_DEVICES hides the GPU", "masked",
        "`nvidia-smi` shows the GPU; torch says `RuntimeError: No CUDA GPUs are available`, and `torch.cuda.is_available()` is "
        "False without a word.",
        "The variable names no GPU that is there: empty, -1, an index too high, an unknown identifier, or one twice, which "
        "CUDA reads as none. A shell profile, a notebook or a queue often sets it.",
        "Unset it, or name a GPU that `nvidia-smi -L` lists.", ()),
    "mig-without-slice": Cause(
        "The GPU is in MIG mode and no slice is visible", "masked",
        "`nvidia-smi` shows the GPU with `MIG M.` Enabled; torch says `No CUDA GPUs are available`.",
        "In MIG mode a GPU is used by slices only. There is none, or CUDA_VISIBLE_DEVICES names none of them: a slice is named "
        "by its own identifier, which begins with MIG-.",
        "Make a slice, name one, or switch MIG mode off.", ()),
    "gpu-exclusive": Cause(
        "Another process has the GPU for itself", "busy",
        "torch says `CUDA error: all CUDA-capable devices are busy or unavailable`.",
        "The compute mode of the GPU lets in one process (exclusive_process) or none (prohibited). Clusters set it so that "
        "jobs do not share.",
        "Wait for the other process, or set the compute mode back to DEFAULT.", ()),
    "no-tpu": Cause(
        "There is no TPU", "hardware",
        "jax 0.10.2 with `JAX_PLATFORMS=tpu` says `Unable to initialize backend 'tpu'`; without the variable it takes the CPU. "
        "A Kaggle session that asked for a TPU can run on a machine without one, and say nothing.",
        "No device of Google's is on the PCI bus, and there is no /dev/accel*. libtpu and TPU variables prove nothing: images "
        "have them on any machine.",
        "Use a TPU machine; on Kaggle look at the session's accelerator, not at the notebook's setting.",
        ("github.com/Kaggle/kaggle-cli/issues/1197",)),
    "torch-on-tpu": Cause(
        "The torch engine does not run on a TPU", "environment",
        "torch finds no GPU and takes the CPU, on a machine that is paid for by its TPU.",
        "torch reaches TPUs only through another package, torch_xla, which tunix-rt does not use. Its engine for TPUs is jax.",
        "Set training.backend to jax, or ask for the CPU.", ()),
    "tpu-node-permissions": Cause(
        "This user may not open the TPU's device nodes", "permissions",
        "jax cannot initialise the backend `tpu`; as root it works.",
        "/dev/accel* (v2 to v4) or /dev/vfio/* (v5e and later) belong to a group that this user is not in, or the container "
        "was not given the devices.",
        "Join the group and log in again; a container has to be privileged.", ()),
}  # fmt: skip

_TORCH_ENGINE: Mapping[str, Cause] = {
    "torch-missing": Cause(
        "torch is not installed", "environment",
        "`ModuleNotFoundError: No module named 'torch'`",
        "The core of tunix-rt does not bring torch: which build is right depends on the GPU and its driver.",
        "Install the build that fits, then the extra `torch`; `tunix-rt env create` does both.", ()),
    "torch-broken": Cause(
        "torch is installed and does not start", "environment",
        "`import torch` fails, often with `ImportError` and the name of a library, or hangs.",
        "A half-done installation, libraries of another CUDA that LD_LIBRARY_PATH puts first, or a driver on which every "
        "call hangs. The doctor asks torch in a process of its own with a time limit, so that it does not hang too.",
        "Install torch again in a new environment, with LD_LIBRARY_PATH unset.", ()),
    "amd-gpu": Cause(
        "There is an AMD GPU, and it is not used", "hardware",
        "torch is a build for ROCm; `torch.version.hip` is set, and `torch.cuda.is_available()` may even be True.",
        "A build for ROCm is installed where there is an AMD GPU. tunix-rt trains on NVIDIA GPUs, on TPUs and on CPUs; what "
        "nobody has tried there is not offered. `auto` does not take the CPU beside a GPU without being told.",
        "Use a computer with an NVIDIA GPU, or ask for the CPU.", ()),
    "cpu-wheel": Cause(
        "The installed torch is a CPU build", "wheel",
        "`AssertionError: Torch not compiled with CUDA enabled`; `torch.cuda.is_available()` is False without a word, and a "
        "program that only asks trains on the CPU.",
        "The registry's wheel for Windows has no CUDA (read in 2.10.0 and 2.15.0), nor has the one for Linux on ARM up to "
        "2.10.0. A build from the index `cpu` satisfies `torch==2.13.0` as well, so pip does not replace it. ROCm builds do "
        "not run on NVIDIA GPUs either.",
        "Install a CUDA build by its exact local tag, such as +cu130, from PyTorch's index.",
        ("github.com/vllm-project/vllm/issues/9701", "packaging.python.org/en/latest/specifications/version-specifiers")),
    "driver-below-wheel": Cause(
        "The driver is older than the torch wheel needs", "driver",
        "`CUDA initialization: The NVIDIA driver on your system is too old (found version 12080).` and then "
        "`torch.cuda.is_available()` is False; seen with a CUDA 13 build on driver branch 570.",
        "Every wheel of one CUDA major has the same floor: 525.60.13 for CUDA 12, 580.65.06 for CUDA 13. The version in the "
        "head of `nvidia-smi` is the highest that the driver supports, not one that is installed.",
        "Take a wheel of the older major, which is easier to change than a driver; or update the driver.",
        (f"{_TORCH}/issues/162531", _COMPATIBILITY)),
    "wheel-lacks-architecture": Cause(
        "The torch wheel has no kernels for this GPU", "wheel",
        "`torch.cuda.is_available()` is True, and the first kernel dies with `CUDA error: no kernel image is available for "
        "execution on the device`. Before it a warning: `with CUDA capability sm_120 is not compatible with the current "
        "PyTorch installation`, or from 2.13 on `does not include kernels for this GPU`.",
        "A wheel carries machine code for a list of architectures and, from 2.8 on in the registry, nothing a driver could "
        "compile for another. CUDA 12.6 builds end at sm_90, so an RTX 50 does not run; CUDA 13 builds begin at sm_75, so a "
        "P100 or V100 does not. Code runs on its own generation and on a minor number not below its own.",
        "Install the wheel that the doctor names. torch's own hint may lead to an index without it: that of 2.15 still "
        "names cu126.",
        (f"{_TORCH}/issues/172352", f"{_TORCH}/issues/190385", "github.com/Kaggle/kaggle-cli/issues/1151")),
    "torch-too-old": Cause(
        "The installed torch is too old", "wheel",
        "Nothing: an old torch trains.",
        "Versions below 2.10 have known holes in reading files of weights, and are not what tunix-rt is tested with.",
        "Install the version the doctor names.", ()),
    "torch-sees-no-gpu": Cause(
        "Everything fits, and torch still sees no GPU", "driver",
        "`Unexpected error from cudaGetDeviceCount().` with a number, or `CUDA driver initialization failed, you might not "
        "have a CUDA gpu.`",
        "CUDA itself could not start. The number tells why: 802, the fabric manager of a board with NVSwitch is not up; 803, "
        "library and module differ; 804, a cuda-compat library was taken that works on data-center GPUs only; 999, the rest.",
        "Follow the line for the number; else restart the container or the computer.", (_COMPATIBILITY,)),
}  # fmt: skip

_JAX_ENGINE: Mapping[str, Cause] = {
    "jax-missing": Cause(
        "jax is not installed", "environment",
        "`ModuleNotFoundError: No module named 'jax'`",
        "The jax engine is an extra, and jax for a GPU or a TPU is an extra of jax.",
        "Install jax for the device: jax[cuda13], jax[cuda12] or jax[tpu].", (_JAX_INSTALL,)),
    "jax-platforms-fall": Cause(
        "JAX_PLATFORMS lets jax fall to the CPU in silence", "environment",
        "Nothing. With `JAX_PLATFORMS=cuda,cpu` and no GPU that answers, jax 0.10.2 takes the CPU without a warning.",
        "The variable is a list of what may be used, in order. jax speaks of a GPU it could not use only when the variable is "
        "not set.",
        "Unset it. tunix-rt sets it to the one platform of the run.", ()),
    "jax-platforms-mask": Cause(
        "JAX_PLATFORMS names another device", "masked",
        "`JAX_PLATFORMS=cpu` hides a GPU without a word; `JAX_PLATFORMS=cuda` without one ends in a bare `AssertionError` "
        "with an empty message (0.10.2).",
        "jax uses the platform that the variable names and no other, whatever the program asks for.",
        "Unset it, or ask for the device that it names.", ()),
    "jax-without-plugin": Cause(
        "The installed jax can only use the CPU", "wheel",
        "`An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib is not installed. Falling back to cpu.` "
        "(0.10.2), once, in the log; with JAX_PLATFORMS=cuda `Backend 'cuda' is not in the list of known backends`.",
        "`pip install jax` is a CPU jax; CUDA comes in a plugin. google-tunix[prod] brings jax for TPUs, which beside a GPU is "
        "a CPU jax too. For Windows there is no plugin.",
        "Install jax[cuda13], or jax[cuda12] below driver 580 or compute capability 7.5.", (_JAX_INSTALL,)),
    "libtpu-missing": Cause(
        "jax has no library for the TPU", "wheel",
        "`A Google TPU may be present on this machine, but either a TPU-enabled jaxlib or libtpu is not installed. Falling "
        "back to cpu.` or `Failed to open libtpu.so` (0.10.2)",
        "jax reaches a TPU through libtpu, which only jax[tpu] brings, in the one version that suits it.",
        "Install jax[tpu].", (_JAX_INSTALL,)),
    "jax-plugin-version": Cause(
        "The parts of jax are of different versions", "wheel",
        "jax warns that the plugin's version is not compatible, drops the plugin, and goes on with the CPU.",
        "jax, jaxlib, the plugin and its pjrt are four packages of one version. Updating one by itself leaves the others "
        "behind.",
        "Install all of them at once, through the extra, at one version.", (_JAX_INSTALL,)),
    "jax-driver-below-plugin": Cause(
        "The driver is older than jax's plugin needs", "driver",
        "`CUDA backend failed to initialize: ...` as a warning, and jax goes on with the CPU.",
        "The plugin for CUDA 13 needs driver 580.65.06, the one for CUDA 12 525.60.13, whatever the GPU.",
        "Install jax[cuda12] and remove the other plugin, or update the driver.", (_JAX_INSTALL, _COMPATIBILITY)),
    "jax-plugin-lacks-architecture": Cause(
        "jax's CUDA plugin has no code for this GPU", "wheel",
        "jax lists the GPU, and the first array dies with `no kernel image is available for execution on the device`.",
        "`jax[cuda13]` is built with CUDA 13, which dropped every GPU below compute capability 7.5: P100, V100, GTX 10.",
        "Take the plugin of CUDA 13 out and that of CUDA 12 in.", (_JAX_INSTALL,)),
    "jax-broken": Cause(
        "jax is installed and does not start", "environment",
        "`import jax` fails or hangs, or `Unable to load CUDA. Is it installed?`; on a TPU the second process on a chip fails.",
        "Libraries that LD_LIBRARY_PATH puts before those of the wheels, a half-done installation, or a TPU that another "
        "process holds: a chip serves one process.",
        "End the process that holds the TPU; else install jax again in a new environment, with LD_LIBRARY_PATH unset.",
        ("github.com/jax-ml/jax/issues/17497",)),
    "jax-sees-no-device": Cause(
        "jax has another device than the one asked for", "environment",
        "The program runs, slowly: `jax.default_backend()` is `cpu`.",
        "Asked for one platform in a process of its own, jax came up with another; what it said is in the evidence.",
        "Install jax for the device again; all of its packages, in one step.", (_JAX_INSTALL,)),
    "tpu-unknown": Cause(
        "The kind of TPU is not known", "hardware",
        "jax may well list the device, under a kind that no table here has.",
        "Whether a run fits is judged by the memory of one device. For a TPU that comes from the catalogue, by the kind that "
        "jax or the bus tells; a kind that is newer than the catalogue, or a TPU that shows by its nodes alone, has none.",
        "Install jax for TPUs, so that it can be asked; for a newer kind, update tunix-rt.", ()),
}  # fmt: skip

_CONDITIONS: Mapping[str, Cause] = {
    "bf16-emulated": Cause(
        "The GPU has bfloat16 only by emulation", "hardware",
        "`torch.cuda.is_bf16_supported()` is True on a T4, and training is slower than in float32.",
        "bfloat16 units begin with compute capability 8.0. Below, torch computes by way of float32, and counts that as "
        "support unless it is asked with including_emulation=False.",
        "Set training.dtype to float32, or use a GPU from Ampere on.", ()),
    "gpu-busy": Cause(
        "Another process holds the GPU's memory", "busy",
        "`torch.OutOfMemoryError: CUDA out of memory.` at a size that should fit.",
        "Memory is given to who asks first: a notebook that was left open, a second run, a desktop. jax alone takes 75 % of a "
        "GPU at its first use.",
        "End the process that the doctor names, wait for it, or show the run another GPU. Only when less than a tenth is "
        "free the run is refused; else it is a warning, and the plan decides.",
        ("docs.jax.dev/en/latest/201/gpu-memory.html",)),
    "cuda-majors-clash": Cause(
        "torch and jax are built for different CUDA majors", "environment",
        "Either may fail to load a library, or load the other's: `Outdated cuDNN installation found` (jax plugin, 0.10.2).",
        "Each brings NVIDIA's libraries of its own major into one environment, and a process takes the first that is loaded. It "
        "may work, so this is a warning.",
        "Give each engine its own environment, or pair a CUDA 13 torch with jax[cuda13], a CUDA 12 one with jax[cuda12].",
        ("github.com/jax-ml/jax/issues/18032", "github.com/jax-ml/jax/issues/19004")),
    "low-disk": Cause(
        "The disk is nearly full", "storage",
        "`OSError: [Errno 28] No space left on device` in the middle of a checkpoint.",
        "A checkpoint holds weights and optimizer state; with AdamW, three times the weights. This is a warning below 2 GiB; "
        "what a run needs is predicted by `tunix-rt plan`, and refused where it does not fit.",
        "Free space, or write to another volume with --output.", ()),
    "low-ram": Cause(
        "Little memory is available", "busy",
        "The process ends with `Killed`, and the kernel's log names the out-of-memory killer.",
        "Weights pass through memory on their way to the GPU, and on a CPU everything stays there. A container's limit counts, "
        "not the computer's memory. This is a warning below 2 GiB; whether the model fits is said by `tunix-rt plan`.",
        "Close other programs, raise the container's limit, or choose a smaller model.", ()),
}  # fmt: skip

CAUSES: Mapping[str, Cause] = {**_HARDWARE_AND_DRIVER, **_TORCH_ENGINE, **_JAX_ENGINE, **_CONDITIONS}
