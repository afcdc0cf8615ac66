"""Single mutations of a good bundle: one byte anywhere, or one value of a JSON file, by a generator with a seed.

A byte is flipped with the hashes as they were or with `SHA256SUMS` made anew; a value always with. Whatever else the bundle
says stays, so that each of these must be found. Counted apart: a value changed, and then everything that follows from it made
anew as a forger would. Of these not all can be found: some values are the run's own word.
"""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forging.folder import put
from tests.forging.sealing import reseal, reseal_run_sums, reseal_sums
from tunix_rt.rundir import json_line, json_text

SUMS = "SHA256SUMS"
OWN = ("bundle.json", "run_manifest.json", "provenance.intoto.json", "README.md", "run-SHA256SUMS")
"""The bundle's own files, which no hash of the run covers: half of all mutations are of these."""
KINDS = ("byte", "byte with new hashes", "value with new hashes")
"""All of these must be rejected."""
RESEALED = "value, everything resealed"
VALUES = ("null", "type", "negated", "off by one", "nudged", "deleted", "doubled", "swapped", "emptied")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What is done to one file; `content` is what it holds afterwards."""

    kind: str
    file: str
    how: str
    content: bytes

    @property
    def words(self) -> str:
        return f"{self.kind}: {self.file}: {self.how}"


def mutations(bundle: Path, count: int, seed: int, kinds: tuple[str, ...] = KINDS) -> Iterator[Mutation]:
    """`count` of them, each of which changes something. Files are drawn by name, so that small ones are not passed over."""
    draw = random.Random(seed)
    names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    made = 0
    while made < count:
        kind = kinds[made % len(kinds)]
        name = _drawn(draw, kind, names)
        before = (bundle / name).read_bytes()
        mutated = (_byte if kind in KINDS[:2] else _value)(draw, kind, name, before)
        if mutated is not None and mutated.content != before:
            made += 1
            yield mutated


def _drawn(draw: random.Random, kind: str, names: list[str]) -> str:
    """The file to mutate. Of those made anew by resealing there is nothing to change: it would be undone."""
    structured = [name for name in names if name.endswith((".json", ".jsonl"))]
    if kind == RESEALED:
        return draw.choice([one for one in structured if one not in OWN])
    among = structured if kind == KINDS[2] else names if kind == KINDS[0] else [one for one in names if one != SUMS]
    return draw.choice([one for one in among if one in OWN] if draw.random() < 0.5 else among)


def apply(mutation: Mutation, folder: Path) -> bool:
    """False where resealing gave back the bundle as it was: the value follows from others, and nothing is forged."""
    before = (folder / SUMS).read_bytes()
    put(folder / mutation.file, mutation.content)
    if mutation.kind == RESEALED:
        _reseal_as_far_as_it_goes(folder)
        return (folder / SUMS).read_bytes() != before
    if mutation.kind != KINDS[0]:
        reseal_sums(folder)
    return True


def _reseal_as_far_as_it_goes(folder: Path) -> None:
    try:
        reseal(folder)
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ):  # a shape that no chain can be made of
        reseal_run_sums(folder)
        reseal_sums(folder)


def _byte(draw: random.Random, kind: str, name: str, before: bytes) -> Mutation | None:
    if not before:
        return None
    at, flip = draw.randrange(len(before)), draw.randrange(1, 256)
    after = before[:at] + bytes([before[at] ^ flip]) + before[at + 1 :]
    return Mutation(kind=kind, file=name, how=f"byte {at} is {after[at]:#04x}, was {before[at]:#04x}", content=after)


# --- values -----------------------------------------------------------------------------------------------------------


def _value(draw: random.Random, kind: str, name: str, before: bytes) -> Mutation | None:
    if name.endswith(".json"):
        value = json.loads(before)
        how = _mutate(draw, value)
        return None if how is None else Mutation(kind=kind, file=name, how=how, content=json_text(value).encode())
    lines = before.decode("utf-8").splitlines(keepends=True)
    if not lines:
        return None
    at = draw.randrange(len(lines))
    value = json.loads(lines[at])
    how = _mutate(draw, value)
    if how is None:
        return None
    lines[at] = json_line(value)
    return Mutation(kind=kind, file=name, how=f"line {at + 1}: {how}", content="".join(lines).encode())


def _mutate(draw: random.Random, value: Any) -> str | None:
    """Change one place of `value`; what was done, or None where the place cannot be changed so."""
    path, holder, key = draw.choice(list(_places("", value)))
    how = draw.choice(VALUES)
    old = holder[key]
    if how == "deleted":
        del holder[key]
    elif how == "doubled":
        if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(old))
        else:
            holder[f"{key}_2"] = copy.deepcopy(old)
    elif how == "swapped":
        others = [one for one in (holder if isinstance(holder, dict) else range(len(holder))) if one != key]
        if not others:
            return None
        other = draw.choice(list(others))
        holder[key], holder[other] = holder[other], old
    else:
        changed = _changed(how, old)
        if changed is _SAME:
            return None
        holder[key] = changed
    return f"{path} {how}"


_SAME = object()


def _changed(how: str, old: Any) -> Any:
    """`old` by that change, or `_SAME` where it has none."""
    number = type(old) in (int, float)
    if how == "null":
        return None
    if how == "type":
        return str(old) if number or isinstance(old, bool) else 1
    if how == "negated":
        return not old if isinstance(old, bool) else -old if number else _SAME
    if how == "nudged":
        return old * 1.01 if type(old) is float else old + max(1, old // 100) if type(old) is int else _SAME
    if how == "off by one":
        if number:
            return old + 1
        return chr(ord(old[0]) ^ 1) + old[1:] if isinstance(old, str) and old else _SAME
    return type(old)() if isinstance(old, str | list | dict) else _SAME


def _places(path: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield f"{path}/{key}", value, key
        yield from _places(f"{path}/{key}", inner)
