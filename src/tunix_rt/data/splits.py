"""Splits and shards in the names of data files: which files are read together, and which names are ambiguous."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tunix_rt.errors import InputError

ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
NOT_READ_ENDINGS = (".xlsx", ".xls", ".arrow", ".zst", ".xz", ".zip", ".bz2")
NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "manifest.json"}
"""Metadata files with the extension of a data file."""
SPLITS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "validation": "validation",
    "valid": "validation", "val": "validation", "dev": "validation", "eval": "validation", "evaluation": "validation",
    "heldout": "validation", "holdout": "validation",
}  # fmt: skip
SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


Given = Callable[[str], str]
"""From a path inside a folder to the name that a user gives for it."""


def has_data_name(path: str) -> bool:
    name = path.rpartition("/")[2].lower()
    return not name.startswith(".") and name.removesuffix(".gz").endswith(ENDINGS) and name not in NOT_DATA


def split_of(inside: str) -> str:
    """The split in the name of a file, or else of its folder; empty without one."""
    folder, _, name = inside.rpartition("/")
    if shard := SHARD.match(name):
        return shard["split"]
    words = [word.lower() for part in (name, folder) for word in re.split(r"[^A-Za-z]+", part)]
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def refuse_two_readings(inside: Sequence[str], folder: Path, given: Given) -> None:
    """Refuse an ambiguous folder: several splits, files here and below, or the same name in two folders."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in inside:
        groups.setdefault((name.rpartition("/")[0], split_of(name)), []).append(name)
    splits = {split for _, split in groups if split}
    unnamed = any(not split for _, split in groups)
    here_and_below = len({bool(parent) for parent, _ in groups}) > 1
    names = [name.rpartition("/")[2] for name in inside]
    held_out_beside = unnamed and any(_is_held_out(split) for split in splits)
    if len(splits) <= 1 and not held_out_beside and not here_and_below and len(set(names)) == len(names):
        return
    readings = [
        given(path) for (parent, split), group in groups.items() for path in _as_paths(parent, split, group, inside)
    ]
    shown = ", ".join(sorted(splits)) if len(splits) > 1 or held_out_beside else "several folders"
    others = " and files without a split in their names" if held_out_beside else ""
    raise InputError(
        f"{folder} is ambiguous ({len(groups)} readings): it has {shown}{others}",
        fix=f"give one of: {', '.join(readings[:12])}{' ...' if len(readings) > 12 else ''}",
    )


def _is_held_out(split: str) -> bool:
    """Whether a split is not for training; that of a shard may have more words (`test_sft`)."""
    return any(SPLITS.get(word, "train") != "train" for word in re.split(r"[^a-z]+", split.lower()))


def _as_paths(parent: str, split: str, group: Sequence[str], inside: Sequence[str]) -> Sequence[str]:
    """Names for these files: one path, their folder, a pattern that matches them alone, or every path."""
    if len(group) == 1:
        return group
    if parent and [name for name in inside if name.rpartition("/")[0] == parent] == list(group):
        return [parent]
    pattern = f"{parent}/{split}*" if parent else f"{split}*"
    return [pattern] if fnmatch.filter(inside, pattern) == list(group) else group


def refuse_missing_shards(inside: Sequence[str], folder: Path) -> None:
    """`train-00000-of-00003` implies two more shards."""
    found: dict[tuple[str, str], set[int]] = {}
    for name in inside:
        if shard := SHARD.match(name):
            found.setdefault((shard["split"], shard["count"]), set()).add(int(shard["number"]))
    for (split, count), numbers in found.items():
        if missing := sorted(set(range(int(count))) - numbers):
            raise InputError(
                f"{folder}: {len(missing)} of {int(count)} files of {split} are missing, "
                f"the first is {split}-{missing[0]:05d}-of-{count}",
                fix="fetch the rest, or name the files you want: a path, or a pattern with *",
            )
