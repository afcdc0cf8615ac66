"""How alike two machines compute: SAME gives the same bits, NEAR the same numbers but for rounding, CROSS is other hardware.

Judged from what a run wrote into `processes.json` and what the process that takes its steps again says of itself. A run that
says nothing false about its machine gains nothing by saying little: it is held to a tolerance, and called so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Class = Literal["SAME", "NEAR", "CROSS"]
CLASSES: tuple[Class, ...] = ("SAME", "NEAR", "CROSS")

OF_A_CPU = ("cpu_flags_sha256", "cpu_capability", "threads")
OF_A_GPU = ("capability", "driver", "cuda", "cudnn")
NAMES = {
    "cpu_flags_sha256": "the CPU's instructions",
    "cpu_capability": "the kernels chosen for the CPU",
    "threads": "the threads",
    "devices": "the number of devices",
    "versions": "the versions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A class, and everything that keeps it from being a better one."""

    name: Class
    reasons: tuple[str, ...] = ()

    def at_most(self, name: Class, reason: str) -> "Match":
        """This, or `name` where that promises less, with the reason added."""
        return Match(name=worst([self.name, name]), reasons=(*self.reasons, reason))


def worst(names: Iterable[Class]) -> Class:
    """Of several, the one that promises least; SAME of none."""
    return max(names, key=CLASSES.index, default="SAME")


def class_of(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Match:
    """`recorded` may be as little as the device. Python's own version decides no bit, and is not asked."""
    if other := _other_hardware(recorded, here):
        return Match(name="CROSS", reasons=other)
    reasons = [_difference(name, recorded, here) for name in ("versions", "devices")]
    device = here.get("device")
    if device == "cpu":
        reasons += [_difference(name, recorded, here) for name in OF_A_CPU]
    elif device == "cuda":
        theirs, ours = _gpu(recorded), _gpu(here)
        reasons += [_difference(name, theirs, ours) for name in OF_A_GPU]
        if not recorded.get("deterministic"):
            reasons.append("its steps were not deterministic: a GPU adds up in another order each time")
    else:
        reasons.append(f"whether {_shown(device)} gives the same bits twice is not known")
    said = tuple(reason for reason in reasons if reason)
    return Match(name="NEAR" if said else "SAME", reasons=said)


def _other_hardware(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, ...]:
    for name in ("device", "backend"):
        theirs, ours = recorded.get(name), here.get(name)
        if theirs is not None and theirs != ours:
            return (f"recorded on {_shown(theirs)}, computed again on {_shown(ours)}",)
    theirs, ours = _gpu(recorded).get("name"), _gpu(here).get("name")
    if here.get("device") != "cpu" and theirs != ours:
        return (f"recorded on {_shown(theirs)}, computed again on {_shown(ours)}",)
    return ()


def _gpu(machine: Mapping[str, Any]) -> Mapping[str, Any]:
    told = machine.get("gpu")
    return told if isinstance(told, Mapping) else {}


def _difference(name: str, recorded: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What differs, or is not recorded; empty where both say the same."""
    theirs, ours = recorded.get(name), here.get(name)
    if theirs == ours and (theirs is not None or name == "cpu_capability"):  # jax has none to tell
        return ""
    what = NAMES.get(name, f"the GPU's {name}")
    if theirs is None:
        return f"{what} were not recorded" if what.endswith("s") else f"{what} was not recorded"
    if isinstance(theirs, str) and len(theirs) == 64:
        return f"{what} differ"
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        names = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
        told = ", ".join(f"{_shown(key)} {_shown(theirs.get(key))} then, {_shown(ours.get(key))} now" for key in names)
        return f"{what}: {told}"
    return f"{what}: {_shown(theirs)} then, {_shown(ours)} now"


def _shown(value: Any) -> str:
    """Of a file that nobody vouches for: short, and nothing that moves a cursor."""
    text = "none" if value is None else str(value)
    return "".join(letter for letter in text[:60] if letter.isprintable())
