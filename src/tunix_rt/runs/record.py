"""`RunRecord`: the one reader of a run folder, for `runs`, resume, `evidence` and whatever looks at runs.

The folder may be live, torn or hostile. Nothing is written, no link is followed, no exception leaves for what a file contains:
what is wrong is in `problems` by file name, and the valid part is there. Only `evidence` requires completeness.
"""

import os
import re
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from tunix_rt.config.settings import RunConfig
from tunix_rt.config.strict_yaml import MAX_CONFIG_BYTES, parse_yaml
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.runs import checksums, schemas
from tunix_rt.runs.folder import FORMAT
from tunix_rt.runs.schemas import Schema, problems_of, schema_of
from tunix_rt.runs.schemas_host import Extension, Extensions
from tunix_rt.runs.schemas_rollouts import AlongLine

M = TypeVar("M")

MANIFEST = "run_manifest.json"
README = "README.md"
MOST_SUMS = 8 * 2**20
MOST_PROSE = 64 * 2**20
PROSE = re.compile(
    r"(?:README|samples|comparison)\.md|(?:training_log|env_info|torch_version|cuda_check|nvidia_smi)\.txt|profile/profile\.md"
)
"""For people: hashed, never parsed."""
OPAQUE = re.compile(
    r"config\.yaml|checkpoints/step-\d{6,9}/(?:model|optimizer)(?:-\d{5}-of-\d{5})?\.safetensors|profile/trace\.json\.gz"
    r"|final_model(?:-refused)?/[A-Za-z0-9][A-Za-z0-9_.-]{0,200}\.(?:json|jinja|safetensors|txt|md|model)"
)
"""Not in a schema of ours: settings have the schema of `RunConfig`, a model folder that of transformers."""


class _File(Generic[M]):
    """An attribute of a record: what the file contains."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, record: "RunRecord", owner: type) -> M:
        found: M = record.read(self.name)
        return found


class RunRecord:
    """One run folder, or a bundle, or the output of `tunix-rt evaluate`."""

    def __init__(self, root: Path, where: str = "", *, quick: bool = False) -> None:
        """`where` stands before file names in problems: `cpu/` for the second run of a bundle. A `quick` record is for a list of
        many: the folder is not walked, and a key that an object has twice is not noticed."""
        self.root, self.where, self._quick = root, where, quick
        self.problems: dict[str, list[str]] = {}
        self.torn: list[str] = []
        self._known: dict[str, Any] = {}

    @cached_property
    def listing(self) -> checksums.Listing:
        return checksums.list_folder(self.root)

    def __contains__(self, name: str) -> bool:
        return os.path.lexists(self.root / name) if self._quick else name in self.listing.files

    # --- any file -----------------------------------------------------------------------------------------------------

    def data(self, name: str, most_bytes: int | None = None) -> bytes | None:
        """The content of a file; None where it is missing, which is no problem, or cannot be read, which is one.

        Of a file with a schema, at most as much is read as that allows."""
        if name not in self:
            return None
        schema = schema_of(name)
        data, problem = checksums.read_file(self.root, name, most_bytes or (schema.most_bytes if schema else MOST_SUMS))
        if data is None:
            self._problem(name, problem)
        return data

    def read(self, name: str) -> Any:
        """The object in a file with a schema, or None where it has another shape; or its lines, up to the first that has. A
        last line without newline is still being written."""
        schema = schema_of(name)
        if schema is not None and not schema.kept:
            return tuple(self._each_line(schema, name))
        if name not in self._known and schema is not None and schema.lines:
            self._known[name] = tuple(self._each_line(schema, name))
        elif name not in self._known and schema is not None and (data := self.data(name)) is not None:
            self._known[name] = self._validated(schema, name, name, data)
        return self._known.get(name)

    def raw_lines(self, name: str) -> list[bytes]:
        """The whole lines of `name` without their newlines, up to one that is longer than any run writes."""
        lines = list(self._lines(name))
        return lines[:-1] if lines and len(lines[-1]) > checksums.LONGEST_LINE else lines

    def _lines(self, name: str) -> Iterator[bytes]:
        """Line by line: of a file that is one endless line no more is in memory than is looked at. That one ends it."""
        schema = schema_of(name)
        most = schema.most_bytes if schema else MOST_SUMS
        for line in checksums.read_lines(self.root, name, most, partial(self._problem, name)) if name in self else ():
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) > checksums.LONGEST_LINE:
                yield line
            elif name not in self.torn:
                self.torn.append(name)

    def _each_line(self, schema: Schema, name: str) -> Iterator[Any]:
        for number, line in enumerate(self._lines(name), start=1):
            one = self._validated(schema, name, f"{name}:{number}", line)
            if one is None:
                return
            yield one

    def _validated(self, schema: Schema, name: str, place: str, data: bytes) -> Any:
        too_long = schema.lines and len(data) > checksums.LONGEST_LINE
        value = (
            f"a line of more than {checksums.LONGEST_LINE:,} bytes"
            if too_long
            else None
            if self._quick
            else checksums.parse_object(data)
        )
        if isinstance(value, str):
            self._problem(name, f"{place}: {value}")
            return None
        try:
            return schema.validate(data)
        except ValidationError as error:
            for problem in problems_of(error):
                self._problem(name, f"{place}: {problem}")
            return None

    def _problem(self, name: str, problem: str) -> None:
        known, problem = self.problems.setdefault(name, []), self.where + problem
        if len(known) < checksums.FEW and problem not in known:
            known.append(problem)

    # --- the files of a run -------------------------------------------------------------------------------------------

    @cached_property
    def config(self) -> RunConfig | None:
        data = self.data("config.yaml", MAX_CONFIG_BYTES)
        if data is None:
            return None
        try:
            return RunConfig.model_validate(parse_yaml(data.decode("utf-8"), "config.yaml"))
        except UnicodeDecodeError:
            self._problem("config.yaml", "config.yaml: not UTF-8 text")
        except ConfigError as error:
            self._problem("config.yaml", error.problem)
        except ValidationError as error:
            for problem in problems_of(error):
                self._problem("config.yaml", f"config.yaml: {problem}")
        return None

    commitment = _File[schemas.Commitment | None]("precommit.json")
    result = _File[schemas.Result | None]("result.json")
    metrics = _File[tuple[schemas.StepLine, ...]]("metrics.jsonl")
    rows = _File[tuple[schemas.RowLine, ...]]("rows.jsonl")
    heldout = _File[tuple[schemas.HeldoutLine, ...]]("eval/heldout.jsonl")
    along = _File[tuple[AlongLine, ...]]("eval/along.jsonl")
    doctor = _File[schemas.Doctor | None]("doctor.json")
    plan = _File[schemas.Plan | None]("plan.json")
    memory = _File[schemas.MemoryReport | None]("memory.json")
    summary = _File[schemas.EvalSummary | None]("eval_summary.json")
    manifest = _File[schemas.Manifest | None](MANIFEST)

    @property
    def checkpoints(self) -> tuple[schemas.CheckpointEntry, ...]:
        found: schemas.Checkpoints | None = self.read("checkpoints.json")
        return found.checkpoints if found else ()

    @property
    def processes(self) -> tuple[schemas.Process, ...]:
        found: schemas.Processes | None = self.read("processes.json")
        return found.processes if found else ()

    @property
    def extensions(self) -> tuple[Extension, ...]:
        found: Extensions | None = self.read("extensions.json")
        return found.extensions if found else ()

    def predictions(self, when: str) -> tuple[schemas.PredictionLine, ...]:
        found: tuple[schemas.PredictionLine, ...] | None = self.read(f"eval/predictions-{when}.jsonl")
        return found or ()

    def scores(self, when: str) -> schemas.ScoresFile | None:
        found: schemas.ScoresFile | None = self.read(f"eval/{when}.json")
        return found

    @cached_property
    def sums(self) -> dict[str, str]:
        return self._sums(checksums.SUMS)

    @cached_property
    def run_sums(self) -> dict[str, str]:
        """The hashes that the run ended with; in a run folder that is SHA256SUMS itself."""
        return self._sums(checksums.RUN_SUMS) if self.is_bundle else self.sums

    def _sums(self, name: str) -> dict[str, str]:
        claimed, problems = checksums.parse_sums(self.data(name) or b"", name)
        for problem in checksums.few(problems):
            self._problem(name, problem)
        return claimed

    @property
    def is_bundle(self) -> bool:
        return MANIFEST in self

    @property
    def is_evaluation(self) -> bool:
        """Whether the folder is the `--output` of `tunix-rt evaluate`: answers, and nothing of a run."""
        of_run = ("precommit.json", "metrics.jsonl", "result.json", "config.yaml")
        return "eval/predictions-answers.jsonl" in self and not any(name in self for name in of_run)

    # --- everything at once -------------------------------------------------------------------------------------------

    def is_foreign(self, name: str) -> bool:
        """Whether no run writes a file of this name."""
        return schema_of(name) is None and not self._is_declared(name)

    def schema_problems(self) -> Iterator[str]:
        """Every file against its declared shape, and every name that no run writes."""
        for name in self.listing.files:
            self.read(name)
            if self.is_foreign(name):
                self._problem(name, f"{checksums.plain(name)}: no run writes such a file")
            elif PROSE.fullmatch(name) and self.listing.files[name] > MOST_PROSE:
                self._problem(name, f"{checksums.plain(name)}: {self.listing.files[name]:,} bytes of text")
        _ = (self.config, self.sums, self.run_sums)
        for name in self.torn:
            self._problem(name, f"{name}: the last line is torn")
        for problems in self.problems.values():
            yield from problems

    def _is_declared(self, name: str) -> bool:
        own = (checksums.SUMS, "SHA256SUMS.sig", *((checksums.RUN_SUMS,) if self.is_bundle else ()))
        inside = self.is_bundle and name.startswith("cpu/")  # a record of its own
        return bool(name in own or inside or PROSE.fullmatch(name) or OPAQUE.fullmatch(name))


def require_format(record: RunRecord) -> None:
    """Refuse a run of another format, before its files are validated by the schemas of this one."""
    found = checksums.parse_object(record.data("precommit.json") or b"")
    if isinstance(found, str):
        return
    number = found.get("format")
    if type(number) is not int or number != FORMAT:
        newer = type(number) is int and number > FORMAT
        raise InputError(
            f"{record.root}: the run is in {'a format before 4' if number is None else f'format {checksums.shown(number)}'}, "
            f"this version of tunix-rt reads format {FORMAT}",
            fix="update tunix-rt" if newer else "record the run again, or verify it with the version that made it",
        )
