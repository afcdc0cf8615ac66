"""What `tunix-rt plan` is made for: the device at hand, one that `--on` names, or one of a computer whose facts are in a file."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_rt.config import RunConfig
    from tunix_rt.doctor.facts import Facts
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
    from tunix_rt.cli import text
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
    from tunix_rt.doctor.choose import choose_device, with_virtual_devices
    from tunix_rt.doctor.verdict import Ask
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
