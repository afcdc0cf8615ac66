"""Single mutations of a good bundle, drawn by a seed: one byte of a file, or one value of a JSON, JSONL or YAML file.

Without resealing, every one must be found. With resealing, one is accepted only if the claims it touches are self-reported.
"""

import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.forging.edits import put
from tests.forging.sealing import OWN, reseal
from tunix_rt.config.load import dump_yaml
from tunix_rt.config.settings import RunConfig
from tunix_rt.evidence.examine import Examination
from tunix_rt.evidence.facts import Claim
from tunix_rt.runs.checksums import SUMS
from tunix_rt.storage import json_line, json_text

BYTE, VALUE, RESEALED = "byte", "value", "value, resealed"
UNSEALED = (BYTE, VALUE)
CHANGES = ("null", "type", "negated", "off by one", "nudged", "deleted", "doubled", "swapped", "emptied")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What is done to one file; `content` is the file afterwards."""

    kind: str
    file: str
    how: str
    content: bytes

    def describe(self) -> str:
        return f"{self.kind}: {self.file}: {self.how}"


def mutations(bundle: Path, count: int, seed: int, kinds: Sequence[str] = UNSEALED) -> Iterator[Mutation]:
    """`count` of them, each of which changes a file. Files are drawn by name: a small one as often as a large one."""
    draw = random.Random(seed)
    names = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())
    structured = [name for name in names if name.endswith((".json", ".jsonl", "config.yaml"))]
    made = 0
    while made < count:
        kind = kinds[made % len(kinds)]
        # The bundle's own files follow from the others: resealing would undo the change.
        among = names if kind == BYTE else structured if kind == VALUE else [n for n in structured if n not in OWN]
        name = draw.choice(among)
        before = (bundle / name).read_bytes()
        found = (_byte if kind == BYTE else _value)(draw, name, before)
        if found is not None and found[1] != before:
            made += 1
            yield Mutation(kind=kind, file=name, how=found[0], content=found[1])


def apply(mutation: Mutation, folder: Path) -> bool:
    """False where resealing gave back the bundle as it was: nothing is forged."""
    before = (folder / SUMS).read_bytes()
    put(folder / mutation.file, mutation.content)
    if mutation.kind == RESEALED:
        reseal(folder)
        return (folder / SUMS).read_bytes() != before
    return True


def touched(before: Examination, after: Examination) -> list[Claim]:
    """Claims whose value differs, as the verdict after the mutation has them."""
    values = {claim.name: claim.value for claim in before.claims}
    return [claim for claim in after.claims if values.get(claim.name) != claim.value]


# --- one change -------------------------------------------------------------------------------------------------------

Change = tuple[str, bytes] | None
"""What was done, and the file afterwards; None where the file cannot be changed so."""


def _byte(draw: random.Random, name: str, before: bytes) -> Change:
    if not before:
        return None
    at, flip = draw.randrange(len(before)), draw.randrange(1, 256)
    after = before[:at] + bytes([before[at] ^ flip]) + before[at + 1 :]
    return f"byte {at} is {after[at]:#04x}, was {before[at]:#04x}", after


def _value(draw: random.Random, name: str, before: bytes) -> Change:
    if name.endswith(".jsonl"):
        return _line(draw, before)
    yaml_file = name.endswith(".yaml")
    value = yaml.safe_load(before) if yaml_file else json.loads(before)
    how = _mutate(draw, value)
    return None if how is None else (how, (_yaml(value) if yaml_file else json_text(value)).encode())


def _line(draw: random.Random, before: bytes) -> Change:
    lines = before.decode("utf-8").splitlines(keepends=True)
    if not lines:
        return None
    at = draw.randrange(len(lines))
    value = json.loads(lines[at])
    how = _mutate(draw, value)
    lines[at] = json_line(value)
    return None if how is None else (f"line {at + 1}: {how}", "".join(lines).encode())


def _yaml(settings: Any) -> str:
    """In the form that tunix-rt writes, where these are settings."""
    try:
        return dump_yaml(RunConfig.model_validate(settings))
    except ValueError:
        return str(yaml.safe_dump(settings))


def _mutate(draw: random.Random, value: Any) -> str | None:
    """Change one place of `value`."""
    path, holder, key = draw.choice(list(_places("", value)))
    how, old = draw.choice(CHANGES), holder[key]
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
        holder[key] = _changed(how, old)
    return f"{path} {how}"


def _changed(how: str, old: Any) -> Any:
    """`old` by that change; itself where it has none."""
    number = type(old) in (int, float)
    if how == "null":
        return None
    if how == "type":
        return str(old) if number or isinstance(old, bool) else 1
    if how == "negated":
        return not old if isinstance(old, bool) else -old if number else old
    if how == "nudged":
        return old * 1.01 if type(old) is float else old + max(1, old // 100) if type(old) is int else old
    if how == "off by one":
        return old + 1 if number else chr(ord(old[0]) ^ 1) + old[1:] if isinstance(old, str) and old else old
    return type(old)() if isinstance(old, str | list | dict) else old


def _places(path: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield f"{path}/{key}", value, key
        yield from _places(f"{path}/{key}", inner)
