"""Import a dataset: any source becomes `datasets/<key>/dataset.jsonl` with a manifest of its origin."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt import __version__
from tunix_rt.data.containers import printable
from tunix_rt.data.formats import detect_format, gsm8k_trace, to_sample, unused_columns, words_behind_number
from tunix_rt.data.readers import MAX_LINE_BYTES, BadRecord, read_raw
from tunix_rt.data.records import Sample
from tunix_rt.data.sources import KEY, Dataset
from tunix_rt.data.validation import Tally, findings_of, refuse
from tunix_rt.errors import InputError
from tunix_rt.storage import staged_folder, storage, write_json

SHOWN = 3
WRITTEN_AS = {"trace": "trace", "gsm8k": "trace", "text": "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import read and wrote."""

    key: str
    source: Dataset
    format: str
    """Of the source."""
    written_as: str
    """Format of the imported dataset: trace or messages."""
    rows: int
    unused: Mapping[str, int]
    """Columns that were not read, with the number of records that have a value there."""
    worded: int
    """Records whose answer has words after its number: GSM8K's `#### 5 hours`."""
    dataset: Path
    manifest: Path
    sha256: str
    samples: tuple[Sample, ...]
    """The first three."""
    skipped: Mapping[str, int]
    """Records that were left out, by the rule they break."""

    @property
    def container(self) -> str:
        """How the source files were read, for people."""
        return "; ".join(sorted({file.describe() for file in self.source.files}))


def import_dataset(source: Dataset, *, key: str, format: str = "auto", replace: bool = False, skip_bad: bool = False,
                   folder: Path) -> Imported:  # fmt: skip
    """Read all of the dataset `source` and write it as `folder/key`, which appears when it is complete."""
    if not KEY.fullmatch(key):
        raise InputError(
            f"{key[:80]!r} is no key for a dataset",
            fix="up to 64 letters, digits, dots, hyphens and underscores, the first a letter or digit",
        )
    final = folder / key
    _refuse_existing(final, replace)
    chosen = detect_format(source, format)
    with staged_folder(final, replace=replace, concurrent=True) as staged:
        imported = _write_records(source, chosen, final, staged, skip_bad=skip_bad)
        write_json(staged / "manifest.json", _manifest(imported, (staged / "dataset.jsonl").stat().st_size))
    return imported


def _manifest(imported: Imported, size: int) -> dict[str, Any]:
    source = imported.source
    files = [
        {"name": printable(file.path.name), "sha256": file.sha256, "bytes": file.bytes, "container": file.container}
        | ({"gzip": True} if file.gzip else {})
        for file in source.files
    ]
    return {
        "key": imported.key,
        "rows": imported.rows,
        "sha256": imported.sha256,
        "bytes": size,
        "format": imported.written_as,
        "source": {
            "name": printable(source.key),
            "sha256": source.sha256,
            "bytes": sum(file.bytes for file in source.files),
            "format": imported.format,
            "files": files,
        },
        "unused_columns": imported.unused,
        **({"answers_with_words": imported.worded} if imported.worded else {}),
        **({"skipped": imported.skipped} if imported.skipped else {}),
        "written_by": f"tunix-rt {__version__}",
    }


# --- records ---------------------------------------------------------------------------------------------------------


def _write_records(source: Dataset, format: str, final: Path, staged: Path, *, skip_bad: bool) -> Imported:
    digest, unused = hashlib.sha256(), Counter[str]()
    samples: list[Sample] = []
    rows, worded, bad = 0, 0, Tally()
    with (staged / "dataset.jsonl").open("wb") as file:
        for raw in read_raw(source):
            where = source.place(raw.file, raw.line)
            try:
                record = source.record(raw)
                sample = to_sample(record, format, where)
            except BadRecord as error:
                bad.add(error.rule, (raw.file, raw.line), error.seen)
                continue
            line = _line(_to_write(record, sample, format), where)
            file.write(line)
            digest.update(line)
            unused.update(printable(column) for column in unused_columns(record, format))
            rows += 1
            worded += words_behind_number(record, format) is not None
            if rows <= SHOWN:
                samples.append(sample)
    if not (skip_bad and rows):
        refuse(findings_of(bad.by_rule.values(), source), skip_bad=skip_bad)
    return Imported(
        key=final.name,
        source=source,
        format=format,
        written_as=WRITTEN_AS.get(format, "messages"),
        rows=rows,
        unused=dict(sorted(unused.items())),
        worded=worded,
        dataset=final / "dataset.jsonl",
        manifest=final / "manifest.json",
        sha256=digest.hexdigest(),
        samples=tuple(samples),
        skipped={rule: one["count"] for rule, one in bad.by_rule.items()},
    )


def _to_write(record: dict[str, Any], sample: Sample, format: str) -> Mapping[str, Any]:
    """A record that is read back as the same sample."""
    if format == "trace":
        return record
    if sample.is_text:
        return {"text": sample.turns[0].text}
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
        except UnicodeEncodeError:  # a lone surrogate has no UTF-8 bytes; validation reports it
            content = json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:  # only `meta` of a trace can contain what JSON cannot
        raise InputError(
            f"{where}: meta: {error}", fix="use values that JSON can represent, or leave it out"
        ) from error
    if len(content) > MAX_LINE_BYTES:
        raise InputError(
            f"{where}: the record is longer than {MAX_LINE_BYTES:,} bytes, the limit of a line",
            fix="split it, or leave it out",
        )
    return content


# --- the folder ------------------------------------------------------------------------------------------------------


def _refuse_existing(final: Path, replace: bool) -> None:
    if not os.path.lexists(final):
        return
    if not replace:
        raise InputError(f"{final} exists", fix="choose another key, or add --replace")
    with storage(final):
        others = sorted(path.name for path in final.iterdir() if path.name not in ("dataset.jsonl", "manifest.json"))
    if others:
        raise InputError(
            f"{final} contains more than a dataset: {', '.join(others[:5])}", fix="move it away, or choose another key"
        )
