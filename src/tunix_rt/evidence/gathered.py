"""What a run noted of itself for whoever checks it, read once: its rows, checkpoints, processes, log. The checks are pure
functions of it (`steps`, `timing`, `physics`, `resumed`). Older runs have not noted all of it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tunix_rt.errors import EvidenceError
from tunix_rt.evidence.claims import UNTOUCHED, RunFiles, read_object, require
from tunix_rt.evidence.doubtful import parse_object, read_bytes, shown
from tunix_rt.evidence.hashes import parse_hashes
from tunix_rt.ledgers import CHECKPOINTS_SCHEMA, PROCESSES_SCHEMA
from tunix_rt.rundir import RunDir

ROWS_SCHEMA = ("row", "sha256", "targets", "tokens")
DIGEST = re.compile("[0-9a-f]{64}")
MOST_TOLD = 5
"""Problems of one kind in one file that are told; the others are counted."""

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)Z ([A-Z]+) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFact:
    """One packed training row: the hash of its tokens, how many there are, how many of them count."""

    sha256: str
    tokens: int
    targets: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of the log. `at` is None for one that continues the line before it."""

    number: int
    at: datetime | None
    level: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The facts of one run. What its version did not write yet is None."""

    run: RunFiles
    hashes: Mapping[str, str]
    """Name -> hash, as the run ended."""
    log: tuple[LogLine, ...]
    rows: tuple[RowFact, ...] | None = None
    checkpoints: tuple[Mapping[str, Any], ...] | None = None
    processes: tuple[Mapping[str, Any], ...] | None = None
    model: Mapping[str, Any] | None = None
    """`config.json` of the final model."""
    heldout: tuple[Mapping[str, Any], ...] = ()
    plan: Mapping[str, Any] | None = None
    memory: Mapping[str, Any] | None = None

    @property
    def total(self) -> int:
        """Steps of the whole run, which is completed: as many as were taken."""
        planned = self.run.need("result.json", "steps_planned", int)
        if planned != len(self.run.metrics):
            raise self.run.fault(
                f"result.json: steps_planned is {planned}, metrics.jsonl has {len(self.run.metrics)} lines"
            )
        return planned

    @property
    def resumed_from(self) -> int:
        return self.run.need("result.json", "resumed_from", int)

    @property
    def chain(self) -> tuple[str, ...]:
        """The hash of each line of the metrics by its step; at 0 that of `precommit.json`."""
        following = [str(line.get("prev")) for line in self.run.metrics[1:]]
        return (self.run.run_id, *following, str(self.run.result.get("metrics_head")))


def gather(run: RunFiles, hashes: Path) -> Noted:
    """Everything noted in the folder of `run`; `hashes` is the SHA256SUMS that the run ended with. What cannot be read is an
    EvidenceError that names it."""
    folder = RunDir(run.folder)
    claimed, malformed = parse_hashes(read_bytes(hashes)[0] or b"")
    if malformed:
        raise run.fault(f"{hashes.name}: {malformed[0]}")
    model = folder.final_model / "config.json"
    return Noted(
        run=run,
        hashes=claimed,
        log=_log_lines(run),
        rows=_rows(run) if folder.rows.exists() else None,
        checkpoints=_entries(run, folder.checkpoint_list, CHECKPOINTS_SCHEMA, "checkpoints"),
        processes=_entries(run, folder.processes, PROCESSES_SCHEMA, "processes"),
        model=read_object(model, run.where) if model.exists() else None,
        heldout=tuple(_lines(folder.heldout, f"{run.where}eval/heldout.jsonl")) if folder.heldout.exists() else (),
        plan=read_object(folder.plan, run.where) if folder.plan.exists() else None,
        memory=read_object(folder.memory, run.where) if folder.memory.exists() else None,
    )


def few(problems: Iterable[str], what: str) -> Iterator[str]:
    """The first of many problems of one kind, and how many more there are."""
    more = 0
    for number, problem in enumerate(problems):
        if number < MOST_TOLD:
            yield problem
        else:
            more += 1
    if more:
        yield f"{what}: {more:,} more of the kind"


def moment(where: str, values: Mapping[str, Any], name: str) -> datetime:
    """A time in UTC, as ISO 8601 writes it."""
    told = require(where, values, name, str)
    try:
        found = datetime.fromisoformat(told)
    except ValueError:
        found = None
    if found is None or found.utcoffset() is None:
        raise EvidenceError(f"{where}: {name} is {shown(told)}, no time in UTC", fix=UNTOUCHED)
    return found.astimezone(UTC)


def _rows(run: RunFiles) -> tuple[RowFact, ...]:
    name = f"{run.where}rows.jsonl"
    found = []
    for number, line in enumerate(_lines(RunDir(run.folder).rows, name)):
        where = f"{name}:{number + 1}"
        digest = require(where, line, "sha256", str)
        if tuple(sorted(line)) != ROWS_SCHEMA or line["row"] != number or type(line["row"]) is not int:
            raise EvidenceError(f"{where} is not the row {number} with its hash, tokens and targets", fix=UNTOUCHED)
        tokens, targets = require(where, line, "tokens", int), require(where, line, "targets", int)
        if not DIGEST.fullmatch(digest) or not 0 <= targets < tokens:
            raise EvidenceError(f"{where}: {targets} targets in {tokens} tokens, or no hash", fix=UNTOUCHED)
        found.append(RowFact(sha256=digest, tokens=tokens, targets=targets))
    return tuple(found)


def _entries(run: RunFiles, path: Path, schema: str, name: str) -> tuple[Mapping[str, Any], ...] | None:
    """The objects listed in `path`; None where there is no such file."""
    if not path.exists():
        return None
    told = read_object(path, run.where)
    where = f"{run.where}{path.name}"
    listed = require(where, told, name, list)
    if set(told) != {"schema", name} or told["schema"] != schema:
        raise EvidenceError(f"{where}: not {schema}", fix=UNTOUCHED)
    if not all(isinstance(one, Mapping) for one in listed):
        raise EvidenceError(f"{where}: {name} has what is no object", fix=UNTOUCHED)
    return tuple(listed)


def _lines(path: Path, name: str) -> Iterator[dict[str, Any]]:
    data, unread = read_bytes(path)
    if data is None:
        raise EvidenceError(unread, fix=UNTOUCHED)
    *lines, rest = data.split(b"\n")
    if rest or not lines:
        raise EvidenceError(f"{name}: {'the last line is torn' if rest else 'empty'}", fix=UNTOUCHED)
    for number, line in enumerate(lines, start=1):
        found = parse_object(line)
        if isinstance(found, str):
            raise EvidenceError(f"{name}:{number}: {found}", fix=UNTOUCHED)
        yield found


def _log_lines(run: RunFiles) -> tuple[LogLine, ...]:
    data, unread = read_bytes(RunDir(run.folder).log)
    if data is None:
        raise run.fault(unread)
    text = data.decode("utf-8", "replace").removesuffix("\n")
    return tuple(_log_line(number, line) for number, line in enumerate(text.split("\n"), start=1))


def _log_line(number: int, line: str) -> LogLine:
    stamp = _STAMP.fullmatch(line)
    try:
        at = datetime.fromisoformat(stamp[1]).replace(tzinfo=UTC) if stamp else None
    except ValueError:  # the 31st of February
        at = None
    if stamp is None or at is None:
        return LogLine(number=number, at=None, level="", words=line)
    return LogLine(number=number, at=at, level=stamp[2], words=stamp[3])
