"""Rules about the installed jax and the TPU: jax falls back to the CPU, with a warning or without one."""

import re

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.doctor.facts import Ask, Check, Facts, PciDevice, check, failed, passed, skipped, visible_gpus
from tunix_rt.doctor.gpu_checks import gpu_signs, wants_gpu
from tunix_rt.doctor.wheels import INSTALL, driver_floor, number

TPU_KINDS = {
    ("0x0027", "0x004e"): "TPU v2", ("0x0027", "0x004f"): "TPU v3", ("0x005e", ""): "TPU v4", ("0x0062", ""): "TPU v5",
    ("0x0063", ""): "TPU v5 lite", ("0x006f", ""): "TPU v6 lite", ("0x0076", ""): "TPU7x",
}  # fmt: skip
"""jax's device kind by PCI device number, and by subsystem where the number is ambiguous."""
TPU_DEVICES = {
    "TPU v2": ("tpu-v2-core", 2), "TPU v3": ("tpu-v3-core", 2), "TPU v4": ("tpu-v4-chip", 1), "TPU v5": ("tpu-v5p-chip", 1),
    "TPU v5p": ("tpu-v5p-chip", 1), "TPU v5 lite": ("tpu-v5e", 1), "TPU v5e": ("tpu-v5e", 1), "TPU v6 lite": ("tpu-v6e", 1),
    "TPU v6e": ("tpu-v6e", 1), "TPU7x": ("tpu-v7x-device", 2),
}  # fmt: skip
"""jax's device kind -> id of one jax device in the catalogue, and jax devices per chip on the bus."""
OLDEST_FOR_CUDA_13 = (7, 5)
ONE_PLATFORM = "unset JAX_PLATFORMS: tunix-rt sets it to the one platform of the run"


def tpu_kind(device: PciDevice) -> str:
    known = TPU_KINDS.get((device.device, device.subsystem)) or TPU_KINDS.get((device.device, ""))
    return known or f"TPU {device.device}"


def tpu_kinds(facts: Facts) -> tuple[str, ...]:
    """The kind of each jax device: from jax, else from the chips on the bus; empty if only device nodes exist."""
    if facts.jax is not None and facts.jax.platform == "tpu" and facts.jax.devices:
        return facts.jax.devices
    kinds = [tpu_kind(device) for device in facts.tpu.pci]
    return tuple(kind for kind in kinds for _ in range(TPU_DEVICES.get(kind, ("", 1))[1]))


def has_tpu(facts: Facts) -> bool:
    """A Google device on the bus, or /dev/accel*. /dev/vfio/* alone is no sign: other passed-through devices have it."""
    return bool(facts.tpu.pci) or any(node.path.startswith("/dev/accel") for node in facts.tpu.nodes)


def wants_tpu(facts: Facts, ask: Ask) -> bool:
    """Requested, or `auto` with a TPU and no GPU; for every engine, so that none falls back to the CPU beside a TPU."""
    return ask.device == "tpu" or (ask.device == "auto" and has_tpu(facts) and not gpu_signs(facts))


def target(facts: Facts, ask: Ask) -> str:
    """The device that the rules judge: cuda, tpu or cpu."""
    return "cuda" if wants_gpu(facts, ask) else "tpu" if wants_tpu(facts, ask) else "cpu"


def jax_fix(facts: Facts, ask: Ask) -> str:
    """The command that installs jax for the device, with all of its packages, so that none keeps another version."""
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
    system = "Windows" if facts.host.wsl else facts.host.system  # WSL uses the driver of Windows
    return driver_floor(f"{cuda_major}.0", system, facts.host.machine)


def _in_place_of(plugin: str, facts: Facts, ask: Ask) -> str:
    """The command that replaces a wrong plugin, both of its packages."""
    line = jax_fix(facts, ask)
    return f"pip uninstall -y {plugin} {plugin.replace('plugin', 'pjrt')} && {line}" if line.startswith("pip") else line


def _cuda_plugins(facts: Facts) -> dict[str, str]:
    jax = facts.jax
    return {} if jax is None else {name: v for name, v in jax.plugins.items() if re.match(r"jax-cuda\d+-plugin$", name)}


# --- one function per cause -------------------------------------------------------------------------------------------


@check("no-tpu")
def tpu_is_present(facts: Facts, ask: Ask) -> Check:
    if has_tpu(facts):
        kinds = [tpu_kind(device) for device in facts.tpu.pci] or [node.path for node in facts.tpu.nodes]
        return passed(f"{len(kinds)} x {kinds[0]}")
    if not wants_tpu(facts, ask):
        return skipped("no TPU, and none requested")
    saw = "no TPU on the PCI bus, no /dev/accel*" + (f"; libtpu {facts.tpu.libtpu}" if facts.tpu.libtpu else "")
    return failed(saw, "no TPU present", "use a TPU machine (on Kaggle: check the accelerator of the session)")


@check("tpu-node-permissions", needs=lambda facts, ask: wants_tpu(facts, ask) and bool(facts.tpu.nodes))
def tpu_nodes_may_be_opened(facts: Facts, ask: Ask) -> Check:
    closed = [node.path for node in facts.tpu.nodes if not node.usable]
    if not closed:
        return passed(", ".join(node.path for node in facts.tpu.nodes))
    return failed(
        f"{', '.join(closed)}: no read and write permission", "this user cannot open the device nodes of the TPU",
        f"ls -l {closed[0]} names their group: sudo usermod -aG GROUP $USER and log in again; in a container: --privileged",
    )  # fmt: skip


@check("torch-on-tpu")
def engine_runs_on_the_tpu(facts: Facts, ask: Ask) -> Check:
    if not wants_tpu(facts, ask) or not has_tpu(facts) or ask.backend is None:
        return skipped("no TPU requested")
    if "tpu" in CAPABILITIES[ask.backend].devices:
        return passed(f"the {ask.backend} engine")
    why = f"a TPU is present, and the {ask.backend} engine does not run on it"
    return failed(f"{len(facts.tpu.pci) or len(facts.tpu.nodes)} TPU device(s)", why, "set training.backend: jax")


@check("jax-missing", engine="jax")
def jax_is_installed(facts: Facts, ask: Ask) -> Check:
    if facts.jax is not None:
        return passed(f"jax {facts.jax.version}")
    return failed("no jax in this environment", "the jax engine cannot run", jax_fix(facts, ask))


@check("jax-platforms-fall", engine="jax")
def platforms_do_not_fall(facts: Facts, ask: Ask) -> Check:
    """With `cuda,cpu` jax silently uses the CPU if the GPU fails."""
    platforms = facts.environment.get("JAX_PLATFORMS", "")
    names = [name.strip() for name in platforms.split(",") if name.strip()]
    if ask.device == "cpu" or not names:
        return skipped("JAX_PLATFORMS is not set, or the CPU is requested")
    if len(names) == 1 or "cpu" not in names:
        return passed(f"JAX_PLATFORMS={platforms}")
    return failed(
        f"JAX_PLATFORMS={platforms}", "with this list jax falls back to the CPU silently if the accelerator fails",
        ONE_PLATFORM,
    )  # fmt: skip


@check("jax-platforms-mask", engine="jax")
def platforms_name_the_device(facts: Facts, ask: Ask) -> Check:
    named = {name: facts.environment.get(name, "").strip() for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")}
    named = {name: value for name, value in named.items() if value and "," not in value}
    if not named or (ask.device == "cpu" and "JAX_PLATFORM_NAME" not in named):
        return skipped("no variable names a platform, or the CPU is requested")
    device = target(facts, ask)
    allowed = {"cuda": ("cuda", "gpu"), "tpu": ("tpu",), "cpu": ("cpu",)}[device]
    wrong = {name: value for name, value in named.items() if value not in allowed}
    if not wrong:
        return passed(", ".join(f"{name}={value}" for name, value in named.items()))
    name, value = next(iter(wrong.items()))
    why = f"{name} selects {value}, the run uses {device}"
    return failed(f"{name}={value}", why, f"unset {name} (tunix-rt sets JAX_PLATFORMS to the one platform of the run)")


@check("jax-without-plugin", engine="jax")
def jax_has_its_plugin(facts: Facts, ask: Ask) -> Check:
    """jax without a CUDA plugin warns once and trains on the CPU."""
    jax, signs = facts.jax, gpu_signs(facts)
    if jax is None or not wants_gpu(facts, ask) or not signs:
        return skipped("no GPU requested, or no jax")
    if plugins := _cuda_plugins(facts):
        return passed(", ".join(f"{name} {version}" for name, version in plugins.items()))
    saw = f"jax {jax.version} without a CUDA plugin beside {signs[0]}"
    if facts.tpu.libtpu:
        saw += f"; libtpu {facts.tpu.libtpu} is installed (google-tunix[prod] installs jax for TPUs)"
    if facts.host.system == "Windows":
        return failed(saw, "jax has no GPU build for Windows", "use WSL 2 or Linux, or --backend torch")
    return failed(saw, "a GPU is present, but this jax can only use the CPU", jax_fix(facts, ask))


@check("jax-plugin-version", engine="jax")
def plugin_is_of_the_same_version(facts: Facts, ask: Ask) -> Check:
    jax = facts.jax
    if jax is None:
        return skipped()
    parts = dict(jax.plugins) if target(facts, ask) == "cuda" else {}
    if jax.jaxlib is not None and number(jax.jaxlib)[:3] > number(jax.version)[:3]:  # an older one is allowed
        parts["jaxlib"] = jax.jaxlib
    other = {name: version for name, version in parts.items() if number(version)[:3] != number(jax.version)[:3]}
    if not other:
        return passed(f"jax {jax.version}, " + ", ".join(f"{name} {version}" for name, version in parts.items()))
    saw = f"jax {jax.version} with " + ", ".join(f"{name} {version}" for name, version in sorted(other.items()))
    exact = f"pip install jaxlib=={jax.version}"
    if target(facts, ask) != "cpu":
        exact = f'{jax_fix(facts, ask).rstrip(chr(34))}=={jax.version}"'
    return failed(saw, "the packages of jax have different versions; jax ignores such a plugin", exact)


@check("jax-driver-below-plugin", engine="jax")
def plugin_suits_the_driver(facts: Facts, ask: Ask) -> Check:
    driver = facts.nvidia.driver_version
    plugins = _cuda_plugins(facts)
    if not wants_gpu(facts, ask) or driver is None or not plugins:
        return skipped()
    for name, version in plugins.items():
        floor = _floor(_major(name), facts)
        if number(driver) < number(floor):
            return failed(
                f"driver {driver}; {name} {version} needs {floor}", "the driver is older than the jax plugin needs",
                f"{_in_place_of(name, facts, ask)}; or update the driver to {floor} or newer",
            )  # fmt: skip
    return passed(f"driver {driver}, {', '.join(plugins)}")


@check("jax-plugin-lacks-architecture", engine="jax", needs=wants_gpu)
def plugin_has_kernels(facts: Facts, ask: Ask) -> Check:
    """CUDA 13 dropped every GPU below compute capability 7.5."""
    plugins = _cuda_plugins(facts)
    if not plugins:
        return skipped()
    for gpu in visible_gpus(facts):
        for name, version in plugins.items():
            if gpu.capability is not None and gpu.capability < OLDEST_FOR_CUDA_13 and int(_major(name)) >= 13:
                saw = "{}: compute capability {}.{}; {} {}".format(gpu.name, *gpu.capability, name, version)
                why = f"CUDA 13, and so this plugin, has no kernels for {gpu.name}"
                return failed(saw, why, _in_place_of(name, facts, ask))
    return passed(", ".join(plugins))


def _major(plugin: str) -> str:
    return re.sub(r"\D", "", plugin)


@check("libtpu-missing", engine="jax")
def libtpu_is_installed(facts: Facts, ask: Ask) -> Check:
    if not wants_tpu(facts, ask):
        return skipped("no TPU requested")
    if facts.tpu.libtpu:
        return passed(f"libtpu {facts.tpu.libtpu}")
    return failed("a TPU, and no libtpu", "a TPU is present, but libtpu is not installed", jax_fix(facts, ask))


@check("jax-broken", engine="jax")
def jax_answers(facts: Facts, ask: Ask) -> Check:
    jax = facts.jax
    if jax is None:
        return skipped()
    if jax.problem is None:
        return passed("jax starts" if jax.devices is not None else "not started")
    return failed(jax.problem, "jax does not start", _fix_after(facts, ask, jax.problem))


@check("jax-sees-no-device", engine="jax")
def jax_sees_the_device(facts: Facts, ask: Ask) -> Check:
    jax, device = facts.jax, target(facts, ask)
    if jax is None or jax.platform is None or jax.asked_for != device or device == "cpu":
        return skipped("jax was not started")
    if jax.platform == {"cuda": "gpu"}.get(device, device):
        return passed(f"{len(jax.devices or ())} x {', '.join(dict.fromkeys(jax.devices or ()))}")
    saw = f"{device} requested, jax uses {jax.platform}" + (f": {jax.said}" if jax.said else "")
    return failed(saw, "jax fell back to another device", _fix_after(facts, ask, jax.said or ""))


def _fix_after(facts: Facts, ask: Ask, message: str) -> str:
    """The fix by jax's own message: a TPU serves one process, a driver that hangs needs a restart."""
    if re.search(r"already in use|in use by process|Device or resource busy", message):
        return "end the process that holds the device (one process per TPU chip), then try again"
    if "no answer within" in message:
        again = "restart the computer or the container, because jax hangs if the driver does"
        return f"{again}; else {jax_fix(facts, ask)}"
    return jax_fix(facts, ask)


@check("tpu-unknown")
def tpu_is_known(facts: Facts, ask: Ask) -> Check:
    """The plan needs the memory of the device, which for a TPU comes from the catalogue."""
    kinds = tpu_kinds(facts)
    if not wants_tpu(facts, ask) or not has_tpu(facts):
        return skipped("no TPU requested")
    if kinds and kinds[0] in TPU_DEVICES:
        return passed(kinds[0])
    if not kinds:
        saw, fix = ", ".join(node.path for node in facts.tpu.nodes), 'pip install -U "jax[tpu]", then try again'
        return failed(saw, "only device nodes of a TPU exist, so its kind is unknown", fix)
    return failed(
        kinds[0], "this kind of TPU is not in the catalogue, so its memory is unknown",
        "update tunix-rt, or use a TPU from v2 to v7x",
    )  # fmt: skip


TPU_CHECKS = (tpu_is_present, engine_runs_on_the_tpu, tpu_nodes_may_be_opened)
JAX_CHECKS = (
    jax_is_installed, platforms_do_not_fall, platforms_name_the_device, jax_has_its_plugin, libtpu_is_installed,
    plugin_is_of_the_same_version, plugin_suits_the_driver, plugin_has_kernels, jax_answers, jax_sees_the_device,
    tpu_is_known,
)  # fmt: skip
