"""The device that `tunix-rt plan` plans for: the one at hand, one that `--on` names, or one of a facts file; and `--exact`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.doctor.facts import Facts
    from tunix_rt.engines.jax.aot import Verdict
    from tunix_rt.plan.answer import PlanTarget
    from tunix_rt.plan.target import Target

DOCTOR_SCHEMA = "tunix-rt/doctor/1"
"""The schema of `tunix-rt doctor --json`, in which the facts are one key."""


def resolve_target(name: str | None, settings: "RunConfig", *, flag: str | None = None) -> "PlanTarget":
    """The device of `--on NAME`, of the facts file NAME, or without a name the one that the settings choose on this computer.
    `flag` is the value of `--device`."""
    from tunix_rt.plan.answer import PlanTarget, refuse_engine
    from tunix_rt.plan.target import target_named
    from tunix_rt.train.plan_inputs import target_of_facts

    if name is None:
        from tunix_rt.cli.views.progress import watching
        from tunix_rt.doctor.probe import gather_facts

        with watching():
            facts = gather_facts()
        return target_of_facts(facts, settings)
    if is_file(name):
        return target_of_facts(read_facts_file(Path(name)), settings, where=Path(name).name)
    target = target_named(name)
    refuse_engine(target, settings)
    check_device(target.name, (target.device,), settings, flag=flag)
    return PlanTarget(target=target)


def is_node(name: str | None) -> bool:
    """Whether `--on NAME` is a node of the catalogue."""
    from tunix_rt.accelerators import nodes

    return name is not None and name.strip().casefold() in {node.id for node in nodes()}


def on_several(target: "PlanTarget", settings: "RunConfig", shared: "dict[str, Any]") -> "PlanTarget":
    """`target` with the `--gpus`, `--nodes` and `--network` in `shared`; refused for what is not sharded over GPUs."""
    from tunix_rt.plan.cluster import refuse_cluster
    from tunix_rt.plan.target import bandwidth_named, several

    known = target.target
    if shared:
        network = bandwidth_named(shared["network"]) if "network" in shared else None
        known = several(known, gpus=shared.get("gpus"), nodes_=shared.get("nodes"), network_gbit=network)
    refuse_cluster(settings, known)
    return replace(target, target=known)


def device_flag(device: str | None, settings: "RunConfig") -> str | None:
    """The value of `--device` as the settings have it; None if it is left out or `auto`."""
    return None if device is None or settings.training.device == "auto" else settings.training.device


def check_device(name: str, kinds: tuple[str, ...], settings: "RunConfig", *, flag: str | None) -> None:
    """Refuse a `--device` that is none of `kinds`, which `--on` names; for a configuration with another device, print a note
    on stderr."""
    from tunix_rt.cli.views import text
    from tunix_rt.errors import ConfigError

    if flag is not None and flag not in kinds:
        raise ConfigError(
            f"--device {flag} and --on {name} contradict each other: it is for {' or '.join(kinds)}",
            fix="leave out one of them",
        )
    device = settings.training.device
    if flag is None and device != "auto" and kinds != (device,):
        text.show_note(f"training.device is {device}; --on {name} plans for {' and '.join(kinds)}")


def is_file(name: str) -> bool:
    """A name with a slash or the ending .json is a file, whether or not it exists."""
    return name.endswith(".json") or "/" in name or Path(name).is_file()


def read_facts_file(path: Path) -> "Facts":
    """The facts of `tunix-rt doctor --json` or `--facts-only`; anything else is an InputError that names the key."""
    from tunix_rt.doctor.facts import facts_from_json, read_facts_json
    from tunix_rt.errors import InputError

    raw = read_facts_json(path)
    if not isinstance(raw, dict) or raw.get("schema") != DOCTOR_SCHEMA:
        return facts_from_json(raw, source=str(path))
    if "facts" not in raw:
        fix = "make the file again with `tunix-rt doctor --json > facts.json`"
        raise InputError(f"{path}: facts: missing", fix=fix)
    return facts_from_json(raw["facts"], source=f"{path}: facts")


EXACT = "--exact compiles the step of the JAX engine with the TPU's own compiler"


def refuse_exact(settings: "RunConfig") -> None:
    """Refuse `--exact` for an engine without such a compiler."""
    from tunix_rt.config.capabilities import capabilities_of
    from tunix_rt.errors import ConfigError

    if not capabilities_of(settings.training).compiles_whole_step:
        raise ConfigError(
            f"{EXACT}; training.backend is {settings.training.backend}, whose plan needs no compiler",
            fix="leave out --exact, or add --backend jax --on tpu-v5e-8",
        )


def exact_topology(target: "Target") -> str:
    """The topology that `--exact` compiles for; a ConfigError if the target is no TPU that the compiler knows."""
    from tunix_rt.errors import ConfigError
    from tunix_rt.plan.target import topology_of

    if target.device != "tpu":
        raise ConfigError(
            f"{EXACT}; {target.name} is no TPU, and has no compiler that works without the device",
            fix="leave out --exact, or name a TPU: --on tpu-v5e-8",
        )
    return topology_of(target)


def run_topology(settings: "RunConfig", topology: str, as_json: bool, *, limit_seconds: float | None = None) -> None:
    """Print the verdict on stdout and progress on stderr. DoesNotFitError if the compiler refuses."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.plan import show_verdict
    from tunix_rt.engines.jax.aot import LIMIT_SECONDS, Case, ask_compiler, compiler_versions, kept_at, topology_parts
    from tunix_rt.models.resolve import resolve_architecture
    from tunix_rt.plan.fit import predict_run
    from tunix_rt.plan.jax_floor import row_length
    from tunix_rt.plan.shape import shape_of
    from tunix_rt.storage import to_plain

    topology_parts(topology)
    # Only config.json is read: the step is compiled from shapes.
    source = resolve_architecture(settings.model.model_name_or_path or "", revision=settings.model.revision)
    case = Case(
        config=source.config,
        training=settings.training,
        tokens=row_length(settings.data.max_length, "tpu"),  # as a run pads its rows
        topology=topology,
        implementation=settings.model.implementation,
    )
    from_cache = kept_at(case, compiler_versions()).exists()
    found = ask_compiler(case, say=text.show_note, limit_seconds=limit_seconds or LIMIT_SECONDS)
    floor = predict_run(shape_of(source.config), settings, device="tpu", devices=found.devices)
    if as_json:
        value = {"model": source.name, "fits": found.fits, "verdict": found, "from_cache": from_cache}
        text.show_json(to_plain(value | {"arithmetic": floor}))
    else:
        show_verdict(found, floor, from_cache=from_cache)
    refuse_if_refused(found, settings)


def refuse_if_refused(found: "Verdict", settings: "RunConfig") -> None:
    from tunix_rt.cli.views import text
    from tunix_rt.errors import DoesNotFitError
    from tunix_rt.plan.jax_floor import savings

    if found.refusal is None:
        return
    message = next(iter(found.refusal.message.splitlines()), "")
    raise DoesNotFitError(
        f"the compiler refuses this step for {found.topology}: it needs {text.gib(found.refusal.needed)} or more on a device of "
        f"{text.gib(found.refusal.usable)}: {message}",
        fix="try, one after the other:\n       " + "\n       ".join(savings(settings.training)),
    )
