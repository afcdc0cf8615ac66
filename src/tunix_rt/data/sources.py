"""From a name to files and their hashes: a key, a file, a folder, or a dataset of the hub.

A file that does not match its manifest is refused, and so is a folder whose file names have more than one split.
"""

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunix_rt import assets
from tunix_rt.data.containers import Version, printable, refuse_changed, version_of
from tunix_rt.data.file_kinds import recognise
from tunix_rt.data.hub_files import hub_files
from tunix_rt.data.readers import Raw, describe_line, parse
from tunix_rt.data.records import COLUMNS, EvalItem, known_columns, read_records
from tunix_rt.data.splits import (
    ENDINGS,
    NOT_READ_ENDINGS,
    Given,
    has_data_name,
    refuse_missing_shards,
    refuse_two_readings,
)
from tunix_rt.data.tables import describe_container
from tunix_rt.errors import InputError, did_you_mean

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[^:@]+))?(:(?P<inside>.+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """An existing data file: the name it was given by, its path, hash and version."""

    key: str
    path: Path
    sha256: str
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a dataset. `container` is its decompressed content: jsonl, json, parquet, csv or text."""

    path: Path
    sha256: str
    bytes: int
    container: str
    version: Version
    """Of the file that was hashed; not part of any hash."""
    gzip: bool = False

    def describe(self) -> str:
        return describe_container(self.container, self.path, self.version) + " in gzip" * self.gzip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The files of a dataset, in order, and its name. `sha256` is that of the file; of several, over their `sha256  name` lines,
    with names relative to their common folder; of several datasets, over the lines of their hashes."""

    key: str
    files: tuple[DataFile, ...]
    sha256: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our columns -> those of the files."""
    limit: int | None = None
    """Only so many of the first records are read."""
    parts: tuple[tuple["Dataset", float], ...] = ()
    """The datasets of a mixture, whose files these are in order, with their weights."""
    commits: Mapping[str, str] = field(default_factory=dict)
    """Of the datasets of the hub among them, by name."""

    def record(self, raw: Raw) -> dict[str, Any]:
        """One record, with its columns under our names; a BadRecord names its place."""
        return known_columns(parse(raw, self.place(raw.file, raw.line)), self.columns)

    def place(self, file: int, line: int) -> str:
        """The place of a record, for errors. `line` is that of a `Raw`."""
        source = self.files[file]
        return f"{source.path} row {line}" if source.container == "parquet" else f"{source.path}:{describe_line(line)}"

    def places(self, records: Iterable[Sequence[int]]) -> list[str]:
        """`place` of records given as (file, line)."""
        return [self.place(int(file), int(line)) for file, line in records]


def find_datasets(
    names: Sequence[str], *, columns: Mapping[str, str] | None = None, limit: int | None = None,
    weights: Sequence[float] = (),
) -> Dataset:  # fmt: skip
    """The datasets of these names, one after the other, read with these columns and up to that many records; with `weights`, a
    mixture."""
    if unknown := sorted(set(columns or {}) - COLUMNS):
        fix = did_you_mean(unknown[0], COLUMNS, otherwise=f"map one of: {', '.join(sorted(COLUMNS))}")
        raise InputError(f"{unknown[0]!r} is no column of a format", fix=fix)
    found = [find_dataset(name) for name in names]
    parts = tuple(zip(found, weights, strict=True)) if weights else ()
    if len({part.sha256 for part, _ in parts}) < len(parts):
        raise InputError("one dataset has two names in data.dataset", fix="name it once, with the sum of its weights")
    return replace(join_datasets(found), columns=dict(columns or {}), limit=limit, parts=parts)


def join_datasets(found: Sequence[Dataset]) -> Dataset:
    """Datasets as one, in order."""
    sha256 = hashlib.sha256("".join(f"{one.sha256}\n" for one in found).encode()).hexdigest()
    key, files = ", ".join(one.key for one in found), tuple(file for one in found for file in one.files)
    commits = {name: commit for one in found for name, commit in one.commits.items()}
    return found[0] if len(found) == 1 else Dataset(key=key, files=files, sha256=sha256, commits=commits)


def find_dataset(key: str) -> Dataset:
    """The dataset `key`: a file, a key on the search path, a folder, a pattern (`data/train-*`), or a dataset of the hub
    (`owner/name`, `owner/name:data/train-*`, `owner/name@COMMIT:CONFIG/SPLIT`), which is fetched unless it is in its cache."""
    path = os.path.expanduser(key)
    if os.path.isfile(path):  # unlike pathlib, os.path does not raise for an invalid name
        return _dataset(key, [Path(path)])
    if KEY.fullmatch(key) and (found := assets.find("datasets", f"{key}/dataset.jsonl")) is not None:
        return _dataset_folder(key, found.parent)
    if os.path.isdir(path):
        return _from_folder(key, Path(path), lambda inside: str(Path(path) / inside))
    if files := _matching(path):
        return _dataset(key, files)
    if hub := HUB_ID.fullmatch(key):
        return _from_hub(key, hub["id"], hub["revision"] or "main", hub["inside"] or "")
    raise _unknown(key, "datasets", "the path of a file or folder")


def find_evalset(key: str) -> FileRef:
    """Eval set `key` on the search path, or the JSONL file at that path."""
    if os.path.isfile(path := os.path.expanduser(key)):
        return _file_ref(key, Path(path))
    if (found := assets.find("evalsets", f"{key}.jsonl")) is not None and found.is_file():
        ref = _file_ref(key, found)
        _compare_with_manifest(found, ref.sha256, found.parent / f"{key}.manifest.json")
        return ref
    raise _unknown(key, "evalsets", "the path of a JSONL file")


def read_items(ref: FileRef) -> list[EvalItem]:
    items = read_records(ref.path, EvalItem, ref.version)
    seen: set[str] = set()
    for number, item in enumerate(items, start=1):
        if item.id in seen:
            raise InputError(f"{ref.path}:{number}: id {item.id!r} is used twice", fix="ids must be unique")
        seen.add(item.id)
    return items


def named(kind: str) -> dict[str, Path]:
    """Every dataset or eval set on the search path. Of two with one name, the first is used."""
    pattern = {"datasets": "*/dataset.jsonl", "evalsets": "*.jsonl"}[kind]
    paths = [path for root in assets.search_path(kind) for path in root.glob(pattern)][::-1]
    names = {(path.parent.name if kind == "datasets" else path.stem): path for path in paths}
    # The name of an interrupted import begins with a dot.
    return {name: names[name] for name in sorted(filter(KEY.fullmatch, names))}


def _unknown(key: str, kind: str, otherwise: str) -> InputError:
    known = named(kind)
    ways = f"use one of: {', '.join(known)}; or {otherwise}" if known else f"give {otherwise}"
    return InputError(f"no {kind[:-1]} named {key!r}", fix=ways)


# --- files -----------------------------------------------------------------------------------------------------------


def _dataset(key: str, paths: Sequence[Path]) -> Dataset:
    files = tuple(_data_file(path) for path in paths)
    if len(files) == 1:
        return Dataset(key=key, files=files, sha256=files[0].sha256)
    root = os.path.commonpath([path.parent for path in paths])
    lines = (f"{file.sha256}  {file.path.relative_to(root).as_posix()}\n" for file in files)
    return Dataset(
        key=key, files=files, sha256=hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    )


def _data_file(path: Path) -> DataFile:
    sha256, version = _describe(path)
    container, packed = recognise(path)
    return DataFile(path=path, sha256=sha256, bytes=version[0], container=container, version=version, gzip=packed)


def _file_ref(key: str, path: Path) -> FileRef:
    sha256, version = _describe(path)
    return FileRef(key=key, path=path, sha256=sha256, version=version)


def _describe(path: Path) -> tuple[str, Version]:
    """Hash of the file, streamed, and its version, which must not change meanwhile."""
    try:
        with path.open("rb") as file:
            version = version_of(file)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            refuse_changed(path, file, version)
            return sha256, version
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix="check the path and its permissions") from error


def _dataset_folder(key: str, folder: Path) -> Dataset:
    """A folder like `datasets/<key>`: one file and its manifest."""
    dataset = _dataset(key, [folder / "dataset.jsonl"])
    _compare_with_manifest(dataset.files[0].path, dataset.sha256, folder / "manifest.json")
    return dataset


def _compare_with_manifest(path: Path, sha256: str, manifest: Path) -> None:
    if not manifest.is_file():
        return
    try:
        claimed = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
        shown = claimed[:12]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{manifest} cannot be read: {error!r}"
        raise InputError(problem, fix="import it again: tunix-rt data import") from error
    if claimed != sha256:
        raise InputError(
            f"{path} does not match its manifest (sha256 {sha256[:12]}, manifest {shown})",
            fix="restore the file, or import the dataset again, which writes its manifest too",
        )


# --- folders ---------------------------------------------------------------------------------------------------------


def _from_folder(key: str, folder: Path, given: Given) -> Dataset:
    """All data files of a folder, or of the folders one level below it, in name order."""
    if (folder / "dataset.jsonl").is_file() and (folder / "manifest.json").is_file():
        return _dataset_folder(key, folder)
    try:
        inside = sorted(path.relative_to(folder).as_posix() for path in _data_files_in(folder))
        inside = inside or sorted(path.name for path in folder.glob("*.txt"))  # beside data, a text is a description
        _refuse_left_out(folder)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror or error}", fix="check the path and its permissions") from error
    if not inside:
        raise InputError(
            f"no data file in {folder} nor one level below it",
            fix=f"give the path of a file, or a folder with files that end in {', '.join(ENDINGS)} (also with .gz)",
        )
    refuse_two_readings(inside, folder, given)
    refuse_missing_shards(inside, folder)
    return _dataset(key, [folder / name for name in inside])


def _data_files_in(folder: Path) -> Iterable[Path]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from (file for file in path.iterdir() if _is_data(file))
        elif _is_data(path):
            yield path


def _refuse_left_out(folder: Path) -> None:
    """Refuse a folder with data files that would not be read: of another kind, or deeper than one level."""
    unread: list[str] = []
    deep: list[str] = []
    for parent, below, names in os.walk(folder, onerror=_raise):
        below[:] = sorted(name for name in below if not name.startswith("."))
        inside = Path(parent).relative_to(folder)
        for path in (inside / name for name in sorted(names) if not name.startswith(".")):
            if path.name.lower().removesuffix(".gz").endswith(NOT_READ_ENDINGS):
                unread.append(path.as_posix())
            elif len(path.parts) > 2 and _is_data(folder / path):
                deep.append(path.as_posix())
        if len(unread) + len(deep) > 20:
            break  # enough for the error; the tree may be large
    for left_out, why, way_out in (
        (unread, "of a kind that is not read", "convert them to JSONL, or move them away"),
        (deep, "more than one level down", "give the folder that holds them, or move them away"),
    ):
        if left_out:
            shown = ", ".join(printable(name) for name in left_out[:5]) + (" ..." if len(left_out) > 5 else "")
            raise InputError(
                f"{folder} has data files {why}, which would be left out: {shown}",
                fix=f"{way_out}; or name the files you want: a path, or a pattern with *",
            )


def _raise(error: OSError) -> None:
    raise error


def _is_data(path: Path) -> bool:
    """By its name: a folder also has licences, scripts and descriptions. Its content is checked later."""
    return has_data_name(path.name) and path.is_file()


def _matching(pattern: str) -> list[Path]:
    """The files a pattern with `*` means, in name order. It is a choice made by hand: splits are not looked at."""
    if "*" not in pattern or "\0" in pattern:
        return []
    return [Path(path) for path in sorted(glob.glob(pattern)) if os.path.isfile(path)]


# --- the hub -----------------------------------------------------------------------------------------------------------


def _from_hub(key: str, name: str, revision: str, inside: str) -> Dataset:
    """The files of a hub dataset that a name stands for, from its cache or fetched."""
    if os.path.isabs(inside) or ".." in Path(inside).parts:
        raise InputError(f"{key!r}: {inside!r} is not inside the dataset", fix=f"give {name}:PATH, seen from its top")
    folder, files = hub_files(name, revision, inside, unknown=_unknown(key, "datasets", "the path of a file or folder"))
    return replace(_dataset(key, [folder / file for file in files]), commits={key: folder.name})
