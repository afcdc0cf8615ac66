"""From a key or a path to the file it means, with its hash. A file that no longer matches its manifest is refused."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from tunix_rt import assets
from tunix_rt.data.trace import EvalItem, Trace, read_records
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """A data file that exists: the name it was asked by, where it lies, and what it is."""

    key: str
    path: Path
    sha256: str


def find_dataset(key: str) -> FileRef:
    """Dataset `key` on the search path, or the JSONL file of that path."""
    return _find(key, kind="datasets", pattern="{key}/dataset.jsonl", manifest="manifest.json")


def find_evalset(key: str) -> FileRef:
    """Eval set `key` on the search path, or the JSONL file of that path."""
    return _find(key, kind="evalsets", pattern="{key}.jsonl", manifest="{key}.manifest.json")


def read_traces(ref: FileRef) -> list[Trace]:
    return read_records(ref.path, Trace)


def read_items(ref: FileRef) -> list[EvalItem]:
    items = read_records(ref.path, EvalItem)
    seen: set[str] = set()
    for number, item in enumerate(items, start=1):
        if item.id in seen:
            raise InputError(f"{ref.path}:{number}: id {item.id!r} is used twice", fix="ids must be unique")
        seen.add(item.id)
    return items


def _find(key: str, *, kind: str, pattern: str, manifest: str) -> FileRef:
    if os.path.isfile(path := os.path.expanduser(key)):  # unlike their twins in pathlib, these never raise
        return FileRef(key=key, path=Path(path), sha256=_sha256(Path(path)))
    if (found := assets.find(kind, pattern.format(key=key))) is not None and found.is_file():
        ref = FileRef(key=key, path=found, sha256=_sha256(found))
        _compare_with_manifest(ref, found.parent / manifest.format(key=key))
        return ref
    roots = assets.search_path(kind)
    known = sorted({_key_of(path) for root in roots for path in root.glob(pattern.format(key="*"))})
    ways = f"use one of: {', '.join(known)}; or the path of a JSONL file" if known else "give the path of a JSONL file"
    raise InputError(f"no {kind[:-1]} named {key!r}", fix=ways)


def _key_of(path: Path) -> str:
    return path.parent.name if path.name == "dataset.jsonl" else path.stem


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix="check the path and its permissions") from error


def _compare_with_manifest(ref: FileRef, manifest: Path) -> None:
    if not manifest.is_file():
        return
    try:
        claimed = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
        shown = claimed[:12]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{manifest} cannot be read: {error!r}", fix="make the dataset again") from error
    if claimed != ref.sha256:
        raise InputError(
            f"{ref.path} is not the file its manifest speaks of (sha256 {ref.sha256[:12]}, manifest {shown})",
            fix="restore the file, or make the dataset again so that its manifest is written too",
        )
