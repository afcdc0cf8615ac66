"""The token cache: examples are tokenized once and memory-mapped afterwards, under a hash of everything that determines them.

An entry is complete or does not exist: it is staged beside its place and renamed.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from tunix_rt.assets import cache_root
from tunix_rt.data.readers import Raw, describe_line, read_raw
from tunix_rt.data.render import Computed, Example
from tunix_rt.data.sources import Dataset
from tunix_rt.data.text import Sketches
from tunix_rt.data.tokenize import INDEX, SCHEMA, TRAINED, Part, Recipe, cores, in_order, tokenize
from tunix_rt.data.validation import RULES, Finding, Tally, findings_of
from tunix_rt.errors import InputError
from tunix_rt.progress import Progress
from tunix_rt.storage import merkle_root, removed_on_error, staged_folder, storage, write_json

logger = logging.getLogger(__name__)

BATCH_BYTES = 1 << 18
BATCH_RECORDS = 1_000
ONE_PROCESS_BYTES = 32 << 20
"""Below this, starting processes takes longer than it saves; the tokenizer's threads are used instead."""
MOST_PROCESSES = 8
RELEASE_BYTES = 64 << 20
STAGED = ".staged-"
OTHER_CACHE = "free space or permissions there, or set XDG_CACHE_HOME to a folder on another volume"


class Examples(Computed[Example]):
    """The examples of a store, read from disk on access."""

    def __init__(self, folder: Path) -> None:
        self.entries = _array(_map(folder / "index.bin"), INDEX)
        self._mapped = _map(folder / "tokens.bin")
        self._tokens = _array(self._mapped, np.dtype("<u4"))
        self._read_bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def item(self, which: int) -> Example:
        entry = self.entries[which]
        stored = self._tokens[entry["start"] : entry["start"] + entry["length"]]
        example = Example(ids=(stored & ~TRAINED).astype(np.int32), trained=(stored & TRAINED).astype(np.bool_))
        self._release_pages(stored.nbytes)
        return example

    def _release_pages(self, read_bytes: int) -> None:
        """Pages of a mapped file count as memory of the process until they are released."""
        self._read_bytes += read_bytes
        if self._read_bytes > RELEASE_BYTES and hasattr(mmap, "MADV_DONTNEED") and self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)
            self._read_bytes = 0


def _map(path: Path) -> mmap.mmap | None:
    if path.stat().st_size == 0:
        return None  # an empty file cannot be mapped
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _array(mapped: mmap.mmap | None, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.empty(0, dtype) if mapped is None else np.frombuffer(mapped, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The tokens of a dataset with one tokenizer and one style."""

    folder: Path
    examples: Examples
    tokens: int
    trained_tokens: int
    highest_id: int
    merkle_root: str
    """Over the examples in file order: token ids, loss mask, positions."""
    findings: tuple[Finding, ...]
    seconds: float
    """Time to build it; 0 when it was read from the cache."""

    @property
    def summary(self) -> dict[str, Any]:
        """The part that goes into manifests."""
        return {
            "examples": len(self.examples),
            "tokens": self.tokens,
            "trained_tokens": self.trained_tokens,
            "merkle_root": self.merkle_root,
        }


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tunix-rt/tokens`, or the same below `~/.cache`."""
    return cache_root() / "tokens"


def open_store(recipe: Recipe, progress: Progress) -> Store:
    """The store of `recipe`, from the cache or built now. One process builds it, others wait for it."""
    place = cache_folder() / recipe.key
    if (known := _read(place, recipe)) is not None:  # without the lock: a shared cache may be read-only
        return known
    with storage(place, fix=OTHER_CACHE), _alone(place, progress):
        if (known := _read(place, recipe)) is not None:
            return known
        _sweep(place.parent)
        began = time.perf_counter()
        with staged_folder(place, replace=True, fix=OTHER_CACHE) as staged:
            write_json(staged / "manifest.json", _build(recipe, staged, progress))
        made = _read(place, recipe)
    assert made is not None, "it was just written"
    return replace(made, seconds=time.perf_counter() - began)


@contextlib.contextmanager
def _alone(place: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of a store. A wait for another process is logged; `progress` may raise to end it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_lock_of(place))
    waited = 0
    while True:
        try:
            held = lock.acquire(timeout=0.5 if waited else 0)
            break
        except Timeout:
            if not waited:
                logger.info("Another tunix-rt is tokenizing this dataset; waiting for it")
            waited += 1
            progress("wait for the other tunix-rt (s)", waited // 2, 3600, "")
    with held, removed_on_error(_lock_of(place)):
        yield


def _lock_of(place: Path) -> Path:
    return place.parent / f"{place.name}.lock"


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of other stores: their locks are free."""
    for leftover in folder.glob(f"{STAGED}*"):
        lock = FileLock(_lock_of(folder / leftover.name.removeprefix(STAGED).removesuffix("-replaced")))
        with contextlib.suppress(Timeout), lock.acquire(timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)


def _read(place: Path, recipe: Recipe) -> Store | None:
    """The store in `place`, or None when there is none or its files do not match its manifest."""
    if not place.is_dir():
        return None
    try:
        manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
        for name, sha256 in manifest["files"].items():
            with (place / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise ValueError(f"{name} has changed")
        return Store(
            folder=place,
            examples=Examples(place),
            **{name: manifest[name] for name in ("tokens", "trained_tokens", "highest_id", "merkle_root")},
            findings=findings_of(manifest["findings"], recipe.dataset),
            seconds=0.0,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("The cached tokens in %s are corrupt (%s) and are rebuilt", place, error)
        return None


# --- building --------------------------------------------------------------------------------------------------------


class _Counts(Tally):
    """Counts, sketches and findings of the parts so far."""

    def __init__(self) -> None:
        super().__init__()
        self.examples = self.tokens = self.trained_tokens = self.highest_id = 0
        self.sketches = Sketches()

    def add_finding(self, rule: str, entry: Any, seen: str) -> None:
        self.add(rule, [int(entry["file"]), int(entry["line"])], seen)

    def add_part(self, part: Part) -> None:
        for at, rule, wrong in part.broken:
            self.add_finding(rule, part.index[at], wrong)
        if len(part.read):
            self.sketches.add(self.examples + part.read, part.sketches)
        self.examples += len(part.index)
        self.tokens += len(part.tokens)
        self.trained_tokens += int((part.tokens & TRAINED).astype(np.bool_).sum())
        if len(part.tokens):
            self.highest_id = max(self.highest_id, int((part.tokens & ~TRAINED).max()))


def _build(recipe: Recipe, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write `tokens.bin` and `index.bin`; returns the manifest. Memory does not grow with the dataset."""
    processes = processes_for(recipe.dataset)
    tally, began = _Counts(), time.perf_counter()
    read = Reading(recipe.dataset)
    parts = in_order(tokenize, recipe, read.batches(), processes=processes)
    digests = {name: hashlib.sha256() for name in ("tokens.bin", "index.bin")}

    def leaves() -> Iterator[bytes]:
        with (folder / "tokens.bin").open("wb") as tokens, (folder / "index.bin").open("wb") as index:
            for part in parts:
                part.index["start"] += tally.tokens
                for file, content in ((tokens, part.tokens.tobytes()), (index, part.index.tobytes())):
                    file.write(content)
                    digests[Path(file.name).name].update(content)
                tally.add_part(part)
                speed = tally.tokens / (time.perf_counter() - began)
                read.report(progress, "tokenize", f"{speed:,.0f} tokens/s")
                yield from part.leaves

    root = merkle_root(leaves())
    if not tally.examples:
        raise InputError(f"{recipe.dataset.key} has no rows", fix="give a file with at least one record")
    _find_duplicates(tally, folder)
    return {
        "schema": SCHEMA,
        "dataset": {"key": recipe.dataset.key, "sha256": recipe.dataset.sha256, "format": recipe.format},
        "tokenizer_sha256": recipe.tokenizer.sha256,
        "template": recipe.style.template.name,
        "style_sha256": recipe.style.sha256,
        "examples": tally.examples,
        "tokens": tally.tokens,
        "trained_tokens": tally.trained_tokens,
        "highest_id": tally.highest_id,
        "merkle_root": root,
        "findings": [tally.by_rule[name] for name in RULES if name in tally.by_rule],
        "processes": processes,
        "seconds": time.perf_counter() - began,
        "files": {name: digest.hexdigest() for name, digest in digests.items()},
    }


def _find_duplicates(tally: _Counts, folder: Path) -> None:
    """Exact duplicates by their hash; others that are similar by their sketch."""
    index = _array(_map(folder / "index.bin"), INDEX)
    _, first = np.unique(index["content"], return_index=True)
    again = index["content"] != 0  # 0: it could not be read
    again[first] = False
    copies = np.flatnonzero(again)
    if len(copies):
        original = np.flatnonzero(index["content"] == index[copies[0]]["content"])[0]
        seen = f"the same as {_line_of(index[original], index[copies[0]])}"
        for at in copies:
            tally.add_finding("duplicate", index[at], seen)
    near = {later: earlier for later, earlier in tally.sketches.near_duplicates().items() if not again[later]}
    sampled = f" (of {tally.sketches.seen:,} records, {tally.sketches.compared:,} were compared)"
    for later in sorted(near):
        seen = f"similar to {_line_of(index[near[later]], index[later])}" + sampled * tally.sketches.sampled
        tally.add_finding("near_duplicate", index[later], seen)


def _line_of(entry: Any, beside: Any) -> str:
    """The place of an example without the name of its file: the same tokens may come from another path."""
    line = f"line {describe_line(int(entry['line']))}"
    return line if entry["file"] == beside["file"] else f"{line} of file {int(entry['file']) + 1}"


def processes_for(dataset: Dataset) -> int:
    return 1 if sum(file.bytes for file in dataset.files) < ONE_PROCESS_BYTES else min(cores(), MOST_PROCESSES)


class Reading:
    """The records of a dataset in batches, and the bytes read so far."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._total = sum(file.bytes for file in dataset.files)
        self.bytes = 0

    def report(self, progress: Progress, what: str, speed: str) -> None:
        progress(f"{what} (KiB)", min(self.bytes, self._total) // 1024, max(1, self._total // 1024), speed)

    def batches(self) -> Iterator[list[Raw]]:
        batch: list[Raw] = []
        size = file = 0
        for raw in read_raw(self._dataset):
            if raw.file != file:
                self.bytes, file = sum(f.bytes for f in self._dataset.files[: raw.file]), raw.file
            size += _size(raw.data)
            if isinstance(raw.data, bytes):
                self.bytes += len(raw.data)
            batch.append(raw)
            if len(batch) == BATCH_RECORDS or size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch
        self.bytes = sum(f.bytes for f in self._dataset.files)


def _size(value: Any) -> int:
    """Approximate bytes of a record."""
    if isinstance(value, (bytes, str)):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 8 + sum(map(_size, inner))
