"""How closely two machines compute: `bitwise` gives the same bits, `same hardware` the same numbers but for rounding, `other
hardware` less. The recorded side is self-reported; claiming another machine only trades bits for a tolerance, and where all
losses come out bit-equal the states and the final model are held to bits all the same."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunix_rt.runs.schemas import Machine

Comparison = Literal["bitwise", "same hardware", "other hardware"]
COMPARISONS: tuple[Comparison, ...] = ("bitwise", "same hardware", "other hardware")

_OF_A_CPU = {
    "cpu_flags_sha256": "CPU instruction set", "cpu_capability": "CPU kernels", "threads": "threads",
}  # fmt: skip
_OF_A_GPU = ("capability", "driver", "cuda", "cudnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How results may be compared, and everything that stands against a closer comparison."""

    name: Comparison
    reasons: tuple[str, ...] = ()

    def at_most(self, name: Comparison, reason: str) -> "Match":
        return Match(name=loosest([self.name, name]), reasons=(*self.reasons, reason))

    def describe(self) -> str:
        if self.name == "bitwise":
            return "bitwise: same numerics, engine versions and machine"
        return f"within tolerance, not bitwise ({self.name}: {'; '.join(self.reasons)})"


def loosest(names: Iterable[Comparison]) -> Comparison:
    return max(names, key=COMPARISONS.index, default="bitwise")


def match_machines(recorded: Machine, here: Mapping[str, Any]) -> Match:
    """Python's own version decides no bit and is not compared."""
    theirs = recorded.model_dump(exclude_none=True)
    gpu, own_gpu = theirs.get("gpu", {}), here.get("gpu") or {}
    for name in ("backend", "device"):
        if theirs[name] != here.get(name):
            return Match(name="other hardware", reasons=(f"{name} {theirs[name]} recorded, {here.get(name)} here",))
    if gpu.get("name") != own_gpu.get("name"):
        return Match(name="other hardware", reasons=(f"{gpu.get('name')} recorded, {own_gpu.get('name')} here",))
    reasons = [*_versions(theirs["versions"], here.get("versions", {})), *_other("devices", "devices", theirs, here)]
    if here.get("device") == "cpu":
        reasons += [reason for name, words in _OF_A_CPU.items() for reason in _other(name, words, theirs, here)]
    elif here.get("device") == "cuda":
        reasons += [reason for name in _OF_A_GPU for reason in _other(name, f"GPU {name}", gpu, own_gpu)]
        reasons += ["recorded without training.deterministic"] * (not recorded.deterministic)
    else:
        reasons.append(f"no bitwise comparison is known for {here.get('device')}")
    return Match(name="same hardware" if reasons else "bitwise", reasons=tuple(reasons))


def _versions(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    return [f"{name} {theirs.get(name)} recorded, {ours.get(name)} here" for name in names]


def _other(name: str, words: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    if theirs.get(name) == ours.get(name):
        return []
    if name.endswith("sha256"):
        return [f"another {words}"]
    return [f"{words} {theirs.get(name)} recorded, {ours.get(name)} here"]
