"""Does the installed jax reach the GPU or the TPU? It falls to the CPU with a warning, or without one."""

import re

from tunix_rt.doctor.facts import Ask, Check, Facts, PciDevice, failed, passed, skipped, visible_gpus
from tunix_rt.doctor.gpu_checks import gpu_signs, wants_gpu
from tunix_rt.doctor.wheels import INSTALL, driver_floor, number

TPU_KINDS = {
    ("0x0027", "0x004e"): "TPU v2", ("0x0027", "0x004f"): "TPU v3", ("0x005e", ""): "TPU v4", ("0x0062", ""): "TPU v5",
    ("0x0063", ""): "TPU v5 lite", ("0x006f", ""): "TPU v6 lite", ("0x0076", ""): "TPU7x",
}  # fmt: skip
"""jax's device kind by PCI device number, and by subsystem where that alone tells."""
TPU_DEVICES = {
    "TPU v2": ("tpu-v2-core", 2), "TPU v3": ("tpu-v3-core", 2), "TPU v4": ("tpu-v4-chip", 1), "TPU v5": ("tpu-v5p-chip", 1),
    "TPU v5p": ("tpu-v5p-chip", 1), "TPU v5 lite": ("tpu-v5e", 1), "TPU v5e": ("tpu-v5e", 1), "TPU v6 lite": ("tpu-v6e", 1),
    "TPU v6e": ("tpu-v6e", 1), "TPU7x": ("tpu-v7x-device", 2),
}  # fmt: skip
"""jax's device kind -> what one jax device is in the catalogue, and how many of them a chip on the bus has."""
OLDEST_FOR_CUDA_13 = (7, 5)
ONE_PLATFORM = "unset JAX_PLATFORMS: tunix-rt sets it to the one platform of the run"


def tpu_kind(device: PciDevice) -> str:
    known = TPU_KINDS.get((device.device, device.subsystem)) or TPU_KINDS.get((device.device, ""))
    return known or f"TPU {device.device}"


def tpu_kinds(facts: Facts) -> tuple[str, ...]:
    """The kind of each jax device: as jax told, else by the chips on the bus; empty where only nodes show."""
    if facts.jax is not None and facts.jax.platform == "tpu" and facts.jax.devices:
        return facts.jax.devices
    kinds = [tpu_kind(device) for device in facts.tpu.pci]
    return tuple(kind for kind in kinds for _ in range(TPU_DEVICES.get(kind, ("", 1))[1]))


def has_tpu(facts: Facts) -> bool:
    """A device of Google's on the bus, or /dev/accel*. /dev/vfio/* alone is none: other passed-through devices have it."""
    return bool(facts.tpu.pci) or any(node.path.startswith("/dev/accel") for node in facts.tpu.nodes)


def wants_tpu(facts: Facts, ask: Ask) -> bool:
    """Asked for, or `auto` where one shows and no GPU does; whatever the engine, so that none falls to the CPU beside it."""
    return ask.device == "tpu" or (ask.device == "auto" and has_tpu(facts) and not gpu_signs(facts))


def target(facts: Facts, ask: Ask) -> str:
    """The device that a run would be judged for: cuda, tpu or cpu."""
    return "cuda" if wants_gpu(facts, ask) else "tpu" if wants_tpu(facts, ask) else "cpu"


def jax_fix(facts: Facts, ask: Ask) -> str:
    """The line that installs a jax for the device. All of its packages are named, so that none keeps another version."""
    if target(facts, ask) == "tpu":
        return 'pip install -U "jax[tpu]"'
    if target(facts, ask) == "cpu":
        return INSTALL["jax"]
    driver = facts.nvidia.driver_version or facts.nvidia.module_version
    if driver is not None and number(driver) < number(_floor("12", facts)):
        return f"update the NVIDIA driver to {_floor('13', facts)} or newer"
    gpus = visible_gpus(facts) or facts.nvidia.gpus
    old = any(gpu.capability is not None and gpu.capability < OLDEST_FOR_CUDA_13 for gpu in gpus)
    new_driver = driver is None or number(driver) >= number(_floor("13", facts))
    return f'pip install -U "jax[{"cuda13" if new_driver and not old else "cuda12"}]"'


def _floor(cuda_major: str, facts: Facts) -> str:
    system = "Windows" if facts.host.wsl else facts.host.system  # WSL runs Windows' driver
    return driver_floor(f"{cuda_major}.0", system, facts.host.machine)


def _in_place_of(plugin: str, facts: Facts, ask: Ask) -> str:
    """The line that takes a wrong plugin out and the right one in; its halves would stay otherwise."""
    line = jax_fix(facts, ask)
    return f"pip uninstall -y {plugin} {plugin.replace('plugin', 'pjrt')} && {line}" if line.startswith("pip") else line


def _cuda_plugins(facts: Facts) -> dict[str, str]:
    jax = facts.jax
    return {} if jax is None else {name: v for name, v in jax.plugins.items() if re.match(r"jax-cuda\d+-plugin$", name)}


# --- one function per cause -------------------------------------------------------------------------------------------


def tpu_is_present(facts: Facts, ask: Ask) -> Check:
    cause = "no-tpu"
    if has_tpu(facts):
        kinds = [tpu_kind(device) for device in facts.tpu.pci] or [node.path for node in facts.tpu.nodes]
        return passed(cause, f"{len(kinds)} x {kinds[0]}")
    if not wants_tpu(facts, ask):
        return skipped(cause, "no TPU, none asked for")
    saw = "no TPU on the PCI bus, no /dev/accel*" + (f"; libtpu {facts.tpu.libtpu}" if facts.tpu.libtpu else "")
    return failed(
        cause, saw, "no TPU present", "use a TPU machine (on Kaggle: check that the session has its accelerator)"
    )


def tpu_nodes_may_be_opened(facts: Facts, ask: Ask) -> Check:
    cause = "tpu-node-permissions"
    closed = [node.path for node in facts.tpu.nodes if not node.usable]
    if not wants_tpu(facts, ask) or not facts.tpu.nodes:
        return skipped(cause)
    if not closed:
        return passed(cause, ", ".join(node.path for node in facts.tpu.nodes))
    return failed(
        cause, f"{', '.join(closed)}: no read and write", "this user may not open the TPU's device nodes",
        f"ls -l {closed[0]} names their group: sudo usermod -aG GROUP $USER and log in again; in a container: --privileged",
    )  # fmt: skip


def engine_runs_on_the_tpu(facts: Facts, ask: Ask) -> Check:
    cause = "torch-on-tpu"
    if not wants_tpu(facts, ask) or not has_tpu(facts) or ask.backend is None:
        return skipped(cause, "no TPU asked for")
    if ask.backend == "jax":
        return passed(cause, "the jax engine")
    why = "a TPU is present, and the torch engine does not run on it"
    return failed(
        cause, f"{len(facts.tpu.pci) or len(facts.tpu.nodes)} TPU device(s)", why, "set training.backend: jax"
    )


def jax_is_installed(facts: Facts, ask: Ask) -> Check:
    cause = "jax-missing"
    if ask.backend != "jax":
        return skipped(cause, "another engine was asked for")
    if facts.jax is not None:
        return passed(cause, f"jax {facts.jax.version}")
    return failed(cause, "no jax in this environment", "the jax engine cannot run", jax_fix(facts, ask))


def platforms_do_not_fall(facts: Facts, ask: Ask) -> Check:
    """With `cuda,cpu` jax takes the CPU without a word when the GPU does not answer."""
    cause, wanted = "jax-platforms-fall", facts.environment.get("JAX_PLATFORMS", "")
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if ask.backend != "jax" or ask.device == "cpu" or not names:
        return skipped(cause, "JAX_PLATFORMS is not set, or the CPU was asked for")
    if len(names) == 1 or "cpu" not in names:
        return passed(cause, f"JAX_PLATFORMS={wanted}")
    return failed(
        cause, f"JAX_PLATFORMS={wanted}", "with this list jax falls to the CPU in silence when the accelerator fails",
        ONE_PLATFORM,
    )  # fmt: skip


def platforms_name_the_device(facts: Facts, ask: Ask) -> Check:
    cause = "jax-platforms-mask"
    named = {name: facts.environment.get(name, "").strip() for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")}
    named = {name: value for name, value in named.items() if value and "," not in value}
    if ask.backend != "jax" or not named or (ask.device == "cpu" and "JAX_PLATFORM_NAME" not in named):
        return skipped(cause, "no platform is named by a variable, or the CPU was asked for")
    device = target(facts, ask)
    allowed = {"cuda": ("cuda", "gpu"), "tpu": ("tpu",), "cpu": ("cpu",)}[device]
    wrong = {name: value for name, value in named.items() if value not in allowed}
    if not wrong:
        return passed(cause, ", ".join(f"{name}={value}" for name, value in named.items()))
    name, value = next(iter(wrong.items()))
    why = f"jax is told to use {value}, while the run would use {device}"
    return failed(
        cause, f"{name}={value}", why, f"unset {name} (tunix-rt sets JAX_PLATFORMS to the one platform of the run)"
    )


def jax_has_its_plugin(facts: Facts, ask: Ask) -> Check:
    """jax without a CUDA plugin beside a GPU warns once and trains on the CPU."""
    cause, jax, signs = "jax-without-plugin", facts.jax, gpu_signs(facts)
    if ask.backend != "jax" or jax is None or not wants_gpu(facts, ask) or not signs:
        return skipped(cause, "no GPU asked for, or no jax")
    if plugins := _cuda_plugins(facts):
        return passed(cause, ", ".join(f"{name} {version}" for name, version in plugins.items()))
    saw = f"jax {jax.version} without a CUDA plugin beside {signs[0]}"
    if facts.tpu.libtpu:
        saw += f"; libtpu {facts.tpu.libtpu} is installed (google-tunix[prod] brings jax for TPUs)"
    if facts.host.system == "Windows":
        return failed(cause, saw, "jax has no GPU build for Windows", "use WSL 2 or Linux, or --backend torch")
    return failed(cause, saw, "the GPU is there, but this jax can only use the CPU", jax_fix(facts, ask))


def plugin_is_of_the_same_version(facts: Facts, ask: Ask) -> Check:
    cause, jax = "jax-plugin-version", facts.jax
    if ask.backend != "jax" or jax is None:
        return skipped(cause)
    parts = dict(jax.plugins) if target(facts, ask) == "cuda" else {}
    if jax.jaxlib is not None and number(jax.jaxlib)[:3] > number(jax.version)[:3]:  # an older one is allowed
        parts["jaxlib"] = jax.jaxlib
    other = {name: version for name, version in parts.items() if number(version)[:3] != number(jax.version)[:3]}
    if not other:
        return passed(cause, f"jax {jax.version}, " + ", ".join(f"{name} {version}" for name, version in parts.items()))
    saw = f"jax {jax.version} with " + ", ".join(f"{name} {version}" for name, version in sorted(other.items()))
    line = jax_fix(facts, ask)
    exact = (
        f'{line.rstrip(chr(34))}=={jax.version}"'
        if target(facts, ask) != "cpu"
        else f"pip install jaxlib=={jax.version}"
    )
    return failed(cause, saw, "the parts of jax are of different versions; it drops such a plugin", exact)


def plugin_suits_the_driver(facts: Facts, ask: Ask) -> Check:
    cause, driver = "jax-driver-below-plugin", facts.nvidia.driver_version
    plugins = _cuda_plugins(facts)
    if ask.backend != "jax" or not wants_gpu(facts, ask) or driver is None or not plugins:
        return skipped(cause)
    for name, version in plugins.items():
        floor = _floor(_major(name), facts)
        if number(driver) < number(floor):
            return failed(
                cause, f"driver {driver}; {name} {version} needs {floor}", "the driver is older than jax's plugin needs",
                f"{_in_place_of(name, facts, ask)}; or update the driver to {floor} or newer",
            )  # fmt: skip
    return passed(cause, f"driver {driver}, {', '.join(plugins)}")


def plugin_has_kernels(facts: Facts, ask: Ask) -> Check:
    """CUDA 13 dropped every GPU below compute capability 7.5."""
    cause, plugins = "jax-plugin-lacks-architecture", _cuda_plugins(facts)
    if ask.backend != "jax" or not wants_gpu(facts, ask) or not plugins:
        return skipped(cause)
    for gpu in visible_gpus(facts):
        for name, version in plugins.items():
            if gpu.capability is not None and gpu.capability < OLDEST_FOR_CUDA_13 and int(_major(name)) >= 13:
                saw = "{}: compute capability {}.{}; {} {}".format(gpu.name, *gpu.capability, name, version)
                why = f"CUDA 13, and so this plugin, has no code for {gpu.name}"
                return failed(cause, saw, why, _in_place_of(name, facts, ask))
    return passed(cause, ", ".join(plugins))


def _major(plugin: str) -> str:
    return re.sub(r"\D", "", plugin)


def libtpu_is_installed(facts: Facts, ask: Ask) -> Check:
    cause = "libtpu-missing"
    if ask.backend != "jax" or not wants_tpu(facts, ask):
        return skipped(cause, "no TPU asked for")
    if facts.tpu.libtpu:
        return passed(cause, f"libtpu {facts.tpu.libtpu}")
    return failed(cause, "a TPU, and no libtpu", "the TPU is there, but jax has no library for it", jax_fix(facts, ask))


def jax_answers(facts: Facts, ask: Ask) -> Check:
    cause, jax = "jax-broken", facts.jax
    if ask.backend != "jax" or jax is None:
        return skipped(cause)
    if jax.problem is None:
        return passed(cause, "jax was asked and answered" if jax.devices is not None else "not asked")
    return failed(cause, jax.problem, "jax does not start", _after_trouble(facts, ask, jax.problem))


def jax_sees_the_device(facts: Facts, ask: Ask) -> Check:
    cause, jax, device = "jax-sees-no-device", facts.jax, target(facts, ask)
    if ask.backend != "jax" or jax is None or jax.platform is None or jax.asked_for != device or device == "cpu":
        return skipped(cause, "jax was not asked")
    if jax.platform == {"cuda": "gpu"}.get(device, device):
        return passed(cause, f"{len(jax.devices or ())} x {', '.join(dict.fromkeys(jax.devices or ()))}")
    saw = f"asked for {device}, jax has {jax.platform}" + (f": {jax.said}" if jax.said else "")
    return failed(cause, saw, "jax fell to another device", _after_trouble(facts, ask, jax.said or ""))


def _after_trouble(facts: Facts, ask: Ask, words: str) -> str:
    """The way out that jax's own words lead to: a TPU serves one process, a driver that hangs wants a restart."""
    if re.search(r"already in use|in use by process|Device or resource busy", words):
        return "end the process that holds the device (one process per TPU chip), then ask again"
    if "no answer within" in words:
        return f"restart the computer or the container, because a driver that hangs makes jax hang; else {jax_fix(facts, ask)}"
    return jax_fix(facts, ask)


def tpu_is_known(facts: Facts, ask: Ask) -> Check:
    """The plan needs the memory of a device, and only the catalogue has that of a TPU."""
    cause, kinds = "tpu-unknown", tpu_kinds(facts)
    if not wants_tpu(facts, ask) or not has_tpu(facts):
        return skipped(cause, "no TPU asked for")
    if kinds and kinds[0] in TPU_DEVICES:
        return passed(cause, kinds[0])
    if not kinds:
        why = "a TPU shows by its nodes alone, and nobody says of which kind it is"
        return failed(
            cause, ", ".join(node.path for node in facts.tpu.nodes), why, 'pip install -U "jax[tpu]", then ask again'
        )
    return failed(
        cause, kinds[0], "this kind of TPU is not in the catalogue, so its memory is not known",
        "update tunix-rt, or use a TPU from v2 to v7x",
    )  # fmt: skip


TPU_CHECKS = (tpu_is_present, engine_runs_on_the_tpu, tpu_nodes_may_be_opened)
JAX_CHECKS = (
    jax_is_installed, platforms_do_not_fall, platforms_name_the_device, jax_has_its_plugin, libtpu_is_installed,
    plugin_is_of_the_same_version, plugin_suits_the_driver, plugin_has_kernels, jax_answers, jax_sees_the_device,
    tpu_is_known,
)  # fmt: skip
