"""What `tunix-rt plan` is made for: the device at hand, one that `--on` names, or one of a computer whose facts are in a file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.doctor.facts import Facts
    from tunix_rt.plan.target import Target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from tunix_rt.config.settings import RunConfig
    from tunix_rt.engines.jax.aot import Verdict
    from tunix_rt.plan.memory import MemoryPlan
    from tunix_rt.plan.target import Target

DOCTOR_SCHEMA = "tunix-rt/doctor/1"
"""What `tunix-rt doctor --json` writes: the facts are one of its keys."""
HERE = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The device. `kind` is the name that runs on it are recorded by; it and the disk are None where no computer is meant."""

    target: "Target"
    kind: str | None = None
    disk_free_bytes: int | None = None
    here: bool = False
    """Whether it is a device of this computer."""


def asked_for(name: str | None, settings: "RunConfig", *, flag: str | None = None) -> Asked:
    """The device of `--on NAME`, of the facts in the file NAME, or without a name the one of this computer. `flag` is what
    `--device` names, if it does; a computer has several devices, of which the settings choose."""
    from tunix_rt.plan.target import target_named

    if name is None:
        from tunix_rt.doctor.probe import gather_facts

        return _of_facts(gather_facts(), settings, where=HERE)
    if is_file(name):
        return _of_facts(read_facts_file(Path(name)), settings, where=Path(name).name)
    target = target_named(name)
    refuse_engine(target, settings)
    refuse_or_say_device(target.name, (target.device,), settings, flag=flag)
    return Asked(target=target)


def of_flag(device: str | None, settings: "RunConfig") -> str | None:
    """What `--device` names, as settings call it; None where it is left out or leaves the choice open."""
    return None if device is None or settings.training.device == "auto" else settings.training.device


def refuse_or_say_device(name: str, kinds: tuple[str, ...], settings: "RunConfig", *, flag: str | None) -> None:
    """`--on` names a device of one of `kinds`: a `--device` of another kind is refused, a configuration that is for another
    is said to be, on stderr."""
    from tunix_rt.cli.views import text
    from tunix_rt.errors import ConfigError

    if flag is not None and flag not in kinds:
        raise ConfigError(
            f"--device {flag} and --on {name} contradict each other: it is for {' or '.join(kinds)}",
            fix="leave out one of them",
        )
    asked = settings.training.device
    if flag is None and asked != "auto" and kinds != (asked,):
        line = f"training.device is {asked}; the plan is for {' and '.join(kinds)}, as --on {name} says"
        print(text.printable(line), file=sys.stderr)


def is_file(name: str) -> bool:
    """A name with a folder or an ending is meant to be a file, whether or not there is one."""
    return name.endswith(".json") or "/" in name or Path(name).is_file()


def read_facts_file(path: Path) -> "Facts":
    """The facts in a file of `tunix-rt doctor --json` or `--facts-only`; anything else is an InputError that names the key."""
    import json

    from tunix_rt.doctor.facts import facts_from_json, read_facts
    from tunix_rt.errors import InputError

    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError):
        return read_facts(path)  # says what is wrong with it
    if not isinstance(raw, dict) or raw.get("schema") != DOCTOR_SCHEMA:
        return facts_from_json(raw, source=str(path))
    if "facts" not in raw:
        raise InputError(
            f"{path}: facts: missing", fix="make the file again with `tunix-rt doctor --json > facts.json`"
        )
    return facts_from_json(raw["facts"], source=f"{path}: facts")


def refuse_engine(target: "Target", settings: "RunConfig") -> None:
    """Refuse what no run does on such a device, in the words of a run."""
    from tunix_rt.errors import ConfigError

    if target.device == "tpu" and settings.training.backend != "jax":
        raise ConfigError(f"--on {target.name}: the PyTorch engine does not train on TPUs", fix="add --backend jax")


def _of_facts(facts: "Facts", settings: "RunConfig", *, where: str) -> Asked:
    from tunix_rt.doctor.facts import Ask
    from tunix_rt.doctor.selection import choose_device, with_virtual_devices
    from tunix_rt.plan.target import target_here

    choice = choose_device(Ask(device=settings.training.device, backend=None), facts)  # planning needs no engine
    if where == HERE:
        choice = with_virtual_devices(choice, settings.training.backend)
    return Asked(
        target=target_here(choice, where=where),
        kind=choice.kind,
        disk_free_bytes=facts.host.disk_free_bytes,
        here=where == HERE,
    )


NO_TPU = "said by the TPU's compiler; no TPU was used, and speed is not part of it"


EXACT = "--exact asks the TPU's own compiler for the step of the JAX engine"


def refuse_exact(settings: "RunConfig") -> None:
    """Refuse `--exact` for an engine that has no such compiler, before any device is looked for."""
    from tunix_rt.errors import ConfigError

    if settings.training.backend != "jax":
        raise ConfigError(
            f"{EXACT}; training.backend is {settings.training.backend}, of which the plan is arithmetic alone",
            fix="leave out --exact, or add --backend jax --on tpu-v5e-8",
        )


def exact_topology(target: "Target") -> str:
    """The topology that `--exact` asks the compiler for; a ConfigError where the target is no TPU that it knows."""
    from tunix_rt.errors import ConfigError
    from tunix_rt.plan.target import topology_of

    if target.device != "tpu":
        raise ConfigError(
            f"{EXACT}; {target.name} is no TPU, and has no compiler that works without the device",
            fix="leave out --exact, or name a TPU: --on tpu-v5e-8",
        )
    return topology_of(target)


def run_topology(settings: "RunConfig", topology: str, as_json: bool, *, limit_seconds: float | None = None) -> None:
    """Show the verdict on stdout, with progress on stderr. A DoesNotFitError when the compiler refuses."""
    from tunix_rt.cli.views import text
    from tunix_rt.engines.jax.aot import LIMIT_SECONDS, Case, ask_compiler, compiler_versions, kept_at, topology_parts
    from tunix_rt.models.resolve import resolve_architecture
    from tunix_rt.plan.jax_memory import row_length
    from tunix_rt.storage import to_plain

    topology_parts(topology)
    # Only config.json is read: the step is compiled from shapes.
    source = resolve_architecture(settings.model.model_name_or_path or "", revision=settings.model.revision)
    case = Case(
        config=source.config,
        training=settings.training,
        tokens=row_length(settings.data.max_length, "tpu"),  # as a run fills its rows up
        topology=topology,
        implementation=settings.model.implementation,
    )
    asked_before = kept_at(case, compiler_versions()).exists()
    found = ask_compiler(
        case,
        say=lambda line: print(text.printable(line), file=sys.stderr, flush=True),
        limit_seconds=limit_seconds or LIMIT_SECONDS,
    )
    arithmetic = arithmetic_of(found, settings, source.config)
    if as_json:
        value = {"model": source.name, "fits": found.fits, "verdict": found, "from_cache": asked_before}
        text.show_json(to_plain(value | {"arithmetic": arithmetic}))
    else:
        show_verdict(found, arithmetic, asked_before=asked_before)
    refuse_if_refused(found)


def arithmetic_of(found: "Verdict", settings: "RunConfig", model: "Mapping[str, Any]") -> "MemoryPlan":
    """What the plan without a compiler says of the same step."""
    from tunix_rt.plan.prediction import predict_run
    from tunix_rt.plan.shape import shape_of

    return predict_run(shape_of(model), settings, device="tpu", devices=found.devices)


def show_verdict(found: "Verdict", arithmetic: "MemoryPlan | None" = None, *, asked_before: bool = False) -> None:
    """One line with the verdict, one with what was compiled, then the bytes of one device by kind."""
    from tunix_rt.cli.views import text

    where = f"each of {found.devices} x {found.device_kind} ({found.topology})"
    of_usable = f" of {text.gib(found.usable)}" if found.usable else ""
    when = "the compiler was asked before; this is its answer of then, from the cache" if asked_before else ""
    lines = [
        f"{found.parameters:,} parameters in {found.replicas} {'copy' if found.replicas == 1 else 'copies'}, "
        f"{found.accumulation} x {found.rows} rows of {found.tokens} tokens a step",
        found.step,
        f"jax {found.versions['jax']}, libtpu {found.versions['libtpu']}, compiled in {text.duration(found.seconds)}; {NO_TPU}",
        when,
        _beside(found, arithmetic) if arithmetic else "",
    ]
    verdict = f"does not fit: refused for {where}"
    if found.memory is not None:
        verdict = f"fits: {text.gib(found.memory.peak)} at the peak{of_usable} on {where}"
    text.show_lines([verdict, *(line for line in lines if line)])
    if found.memory is None:
        return
    kinds = ("arguments", "outputs", "aliased", "temporaries", "code", "total", "peak")
    rows = [(kind, f"{getattr(found.memory, kind) / 2**30:.3f}") for kind in kinds]
    text.show_table(("GiB on a device", ""), rows, numbers=[""])


def _beside(found: "Verdict", arithmetic: "MemoryPlan") -> str:
    """The step by arithmetic, beside the compiler's figure where it gave one."""
    from tunix_rt.cli.views import text

    step = next(phase for phase in arithmetic.phases if phase.name == "step")
    said = f"by arithmetic, without the compiler: {text.gib(step.total_bytes)} for the step"
    if found.memory is None:
        return said
    return f"{said}, {100 * (step.total_bytes / found.memory.peak - 1):+.1f} %"


def refuse_if_refused(found: "Verdict") -> None:
    from tunix_rt.cli.views import text
    from tunix_rt.errors import DoesNotFitError

    if found.refusal is None:
        return
    words = next(iter(found.refusal.message.splitlines()), "")
    fixes = [
        "training.data_replicas: 1, which cuts the state over all devices" if found.replicas > 1 else "",
        "training.gradient_checkpointing: true",
        "training.master_dtype: bfloat16",
        "fewer rows or shorter ones",
        "a topology with more chips",
    ]
    raise DoesNotFitError(
        f"the compiler refuses this step for {found.topology}: {text.gib(found.refusal.needed)} or more wanted on a device of "
        f"{text.gib(found.refusal.usable)}: {words}",
        fix=f"try, one after the other: {'; '.join(fix for fix in fixes if fix)}",
    )
