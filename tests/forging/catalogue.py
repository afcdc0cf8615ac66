"""What a forgery is, and the list of all. A forgery is a function that edits the files of a copy of a good bundle."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Base = Literal["cpu", "gpu", "m40_v2", "gemma3_270m_gsm8k_v1"]
ON_A_GPU: tuple[Base, ...] = ("gpu", "m40_v2", "gemma3_270m_gsm8k_v1")
Level = Literal["L1", "L2", "L3", "L4", "missed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgery:
    """One way to lie, and the first level whose check must find it; `missed` with the reason where none can."""

    name: str
    what: str
    group: str
    bases: tuple[Base, ...]
    """The bundles it is tried on, one by one: of a run on the CPU with the embedded model, of what passes for one on a GPU, and
    committed ones of real runs on a GPU."""
    level: Level
    why: str
    forge: Callable[[Path], None]


FORGERIES: dict[str, Forgery] = {}


def forgery(
    what: str, *, group: str, level: Level = "L1", bases: tuple[Base, ...] = ("cpu",), why: str = ""
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Enter the function under its name without `forge_`. Static checks find what needs L1; `why` goes with a miss."""

    def enter(forge: Callable[[Path], None]) -> Callable[[Path], None]:
        name = forge.__name__.removeprefix("forge_")
        assert name not in FORGERIES, name
        assert (level == "missed") == bool(why), f"{name}: a miss has a reason, and only a miss"
        FORGERIES[name] = Forgery(
            name=name, what=what, group=group, bases=bases, level=level, why=why, forge=forge
        )  # fmt: skip
        return forge

    return enter


def all_forgeries() -> list[Forgery]:
    """All of them, by group and in the order they are written."""
    from tests.forging import answers, claims, devices, hostile, inputs, real, steps  # noqa: F401  each enters its own

    return list(FORGERIES.values())
