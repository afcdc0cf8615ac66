"""Bring a dataset home: whatever it was, as `datasets/<key>/dataset.jsonl` with a manifest that says where it came from."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tunix_rt import __version__
from tunix_rt.data.formats import detect_format, gsm8k_trace, to_sample, unused_columns, words_behind_number
from tunix_rt.data.readers import MAX_LINE_BYTES, parse, read_raw
from tunix_rt.data.sources import KEY, Dataset, find_dataset
from tunix_rt.data.streams import printable
from tunix_rt.data.trace import Sample
from tunix_rt.errors import InputError
from tunix_rt.storage import settle_files, storage, sync_folder, write_json

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import recognised and wrote."""

    key: str
    source: Dataset
    format: str
    """How the records were read."""
    written_as: str
    """How they were written: trace or messages."""
    rows: int
    unused: Mapping[str, int]
    """Columns that were not read, with the number of records in which they said something."""
    worded: int
    """Records whose answer has words behind its number: GSM8K's `#### 5 hours`."""
    dataset: Path
    manifest: Path
    sha256: str
    samples: tuple[Sample, ...]
    """The first three."""

    @property
    def container(self) -> str:
        """What the files were, in words."""
        kinds = {f"{file.container} in gzip" if file.gzip else file.container for file in self.source.files}
        return ", ".join(sorted(kinds))


def import_dataset(name: str, *, key: str, format: str = "auto", replace: bool = False, folder: Path) -> Imported:
    """Read the dataset `name` whole and write it as `folder/key`. Nothing is there before all of it is."""
    if not KEY.fullmatch(key):
        raise InputError(
            f"{key[:80]!r} is no key for a dataset",
            fix="up to 64 letters, digits, dots, hyphens and underscores, the first a letter or digit",
        )
    final = folder / key
    _refuse_existing(final, replace)
    source = find_dataset(name)
    chosen = detect_format(source, format)
    with _staged(folder, key) as staged:
        written = _write_records(source, chosen, staged / "dataset.jsonl")
        facts = {
            "key": key,
            "rows": written.rows,
            "sha256": written.sha256,
            "bytes": written.bytes,
            "format": _written_as(chosen),
            "source": {
                "name": printable(name),
                "sha256": source.sha256,
                "bytes": sum(file.bytes for file in source.files),
                "format": chosen,
                "files": [
                    {
                        "name": printable(file.path.name),
                        "sha256": file.sha256,
                        "bytes": file.bytes,
                        "container": file.container,
                    }
                    | ({"gzip": True} if file.gzip else {})
                    for file in source.files
                ],
            },
            "unused_columns": written.unused,
            **({"answers_with_words": written.worded} if written.worded else {}),
            "written_by": f"tunix-rt {__version__}",
        }
        write_json(staged / "manifest.json", facts)
        settle_files(staged)
        _put_in_place(staged, final, replace=replace)
    return Imported(
        key=key,
        source=source,
        format=chosen,
        written_as=_written_as(chosen),
        rows=written.rows,
        unused=written.unused,
        worded=written.worded,
        dataset=final / "dataset.jsonl",
        manifest=final / "manifest.json",
        sha256=written.sha256,
        samples=written.samples,
    )


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    rows: int
    bytes: int
    sha256: str
    unused: dict[str, int]
    worded: int
    samples: tuple[Sample, ...]


def _write_records(source: Dataset, format: str, path: Path) -> _Written:
    digest, unused = hashlib.sha256(), Counter[str]()
    samples: list[Sample] = []
    rows = size = worded = 0
    with path.open("wb") as file:
        for raw in read_raw(source):
            where = source.place(raw.file, raw.line)
            record = parse(raw, where)
            sample = to_sample(record, format, where)
            line = _line(_to_write(record, sample, format), where)
            file.write(line)
            digest.update(line)
            unused.update(printable(column) for column in unused_columns(record, format))
            rows, size = rows + 1, size + len(line)
            worded += words_behind_number(record, format) is not None
            if rows <= SHOWN:
                samples.append(sample)
    return _Written(
        rows=rows,
        bytes=size,
        sha256=digest.hexdigest(),
        unused=dict(sorted(unused.items())),
        worded=worded,
        samples=tuple(samples),
    )


def _written_as(format: str) -> str:
    return "trace" if format in ("trace", "gsm8k") else "messages"


def _to_write(record: dict[str, Any], sample: Sample, format: str) -> Mapping[str, Any]:
    """A record of ours that reads back as the same sample."""
    if format == "trace":
        return record
    if format == "gsm8k":
        return gsm8k_trace(record)
    messages: list[dict[str, str]] = [{"role": turn.role, "content": turn.text} for turn in sample.turns]
    if sample.answer is not None:
        messages.append({"role": "assistant", "reasoning_content": sample.steps[0], "content": sample.answer})
    return {"messages": messages}


def _line(record: Mapping[str, Any], where: str) -> bytes:
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        try:
            content = line.encode("utf-8") + b"\n"
        except UnicodeEncodeError:  # half a surrogate pair has no bytes of its own; the rules will speak of it
            content = json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:  # only `meta` of a trace can hold what JSON cannot
        raise InputError(f"{where}: meta: {error}", fix="JSON must be able to hold it; leave it out") from error
    if len(content) > MAX_LINE_BYTES:
        raise InputError(
            f"{where}: the record is longer than {MAX_LINE_BYTES:,} bytes, the most a line may have",
            fix="divide it, or leave it out",
        )
    return content


# --- places ----------------------------------------------------------------------------------------------------------


def _refuse_existing(final: Path, replace: bool) -> None:
    if not os.path.lexists(final):
        return
    if not replace:
        raise InputError(f"{final} is there already", fix="choose another key, or add --replace")
    with storage(final):
        others = sorted(path.name for path in final.iterdir() if path.name not in ("dataset.jsonl", "manifest.json"))
    if others:
        raise InputError(
            f"{final} holds more than a dataset: {', '.join(others[:5])}", fix="move it away, or choose another key"
        )


@contextmanager
def _staged(folder: Path, key: str) -> Iterator[Path]:
    """An empty folder beside the final one. It is gone afterwards; what a killed import left is swept away at the next."""
    begins = f".staged-{key}-"
    staged = folder / f"{begins}{os.getpid()}"
    with storage(folder):
        for leftover in folder.glob(f"{begins}*"):
            process = leftover.name.removeprefix(begins)
            if process.isdecimal() and (leftover == staged or not psutil.pid_exists(int(process))):
                shutil.rmtree(leftover)
        staged.mkdir(parents=True)
        try:
            yield staged
        finally:
            shutil.rmtree(staged, ignore_errors=True)


def _put_in_place(staged: Path, final: Path, *, replace: bool) -> None:
    """Two renames when something is replaced: the old one is gone only when the new one is there."""
    old = staged.with_name(f"{staged.name}-replaced")
    if replace and os.path.lexists(final):
        final.rename(old)
    try:
        staged.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
