"""Datasets that a page may name, opened once: tokenized, validated and packed as in a run, within limits of size and time.

A dataset is named by its key, a tokenizer by a shipped model or by a run of the index; no path arrives from outside.
"""

import json
import os
import pickle
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from tunix_rt import assets
from tunix_rt.config.load import quoted
from tunix_rt.config.settings import Evaluation, RunConfig
from tunix_rt.dashboard import models
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.data.packing import Rows
from tunix_rt.data.prepare import Inspected, ModelFacts, Prepared, inspect, prepare, recipe_of
from tunix_rt.data.sources import named
from tunix_rt.data.token_cache import ONE_PROCESS_BYTES
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.errors import InputError
from tunix_rt.evidence.sandbox import Limits, run_limited
from tunix_rt.models.resolve import ModelSource, resolve_architecture
from tunix_rt.plan.shape import outline_of
from tunix_rt.runs.checksums import list_folder
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.index import Indexed
from tunix_rt.runs.record import RunRecord

MOST_RECORDS = 20_000
MOST_SECONDS, WAIT_SECONDS = 20.0, 5.0
"""For a page with the tokenizer of a run, whose chat template may have no end; and for another page that is read first."""
MOST_RAM, MOST_FILE, MOST_PAGE = 4 * 2**30, 2**28, 2**22
"""Bytes that such a page takes: memory, a file of the token cache, and what it shows. A Gemma tokenizer takes 1.5 GB."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "4", "MALLOC_ARENA_MAX": "2"}
"""Threads reserve address space."""
MOST_OPENED, MOST_TOKENIZERS, MOST_KEYS = 4, 2, 1000
MOST_TOKENIZER_BYTES = 64 * 2**20
CHECK = "use the command line: tunix-rt data check, tunix-rt data show"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A dataset with one tokenizer. `prepared` is None where validation refuses it: a run has no rows then."""

    recipe: Recipe
    config: RunConfig
    seen: Inspected
    prepared: Prepared | None

    @property
    def rows(self) -> Rows | None:
        rows = self.prepared.rows if self.prepared else None
        return rows if isinstance(rows, Rows) else None

    @property
    def records(self) -> int:
        return len(self.seen.store.examples)

    @property
    def shortened(self) -> bool:
        """Whether only the first records of a longer dataset are read."""
        return self.records == MOST_RECORDS and self.config.data.max_examples == MOST_RECORDS


Answer = Callable[[Opened, Query], dict[str, Any]]


@dataclass(slots=True)
class Shelf:
    """What was opened before. One page reads at a time: the switches of a tokenizer are not for two threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    opened: dict[Any, Opened] = field(default_factory=dict)
    tokenizers: dict[Any, tuple[Tokenizer, ModelFacts]] = field(default_factory=dict)
    keys: dict[Any, str] = field(default_factory=dict)
    """Dataset of each run."""


@contextmanager
def reading(site: Site) -> Iterator[Shelf]:
    """The shelf, for one page at a time."""
    shelf: Shelf = site.cache.setdefault("data", Shelf())
    if not shelf.lock.acquire(timeout=WAIT_SECONDS):
        raise InputError("another page is still reading data", fix="try again in a moment")
    try:
        yield shelf
    finally:
        shelf.lock.release()


def _kept(shelf: dict[Any, T], key: Any, make: Callable[[], T], most: int) -> T:
    """The value of `key`, the last used ones kept."""
    value = shelf.pop(key) if key in shelf else make()
    shelf[key] = value
    while len(shelf) > most:
        del shelf[next(iter(shelf))]
    return value


# --- names ------------------------------------------------------------------------------------------------------------


def runs_of_datasets(site: Site, shelf: Shelf) -> list[tuple[Indexed, str]]:
    """Runs whose datasets have a key here, with that key."""
    here = named("datasets").keys()

    def key_of(run: Indexed) -> str:
        committed = RunRecord(run.root).commitment
        return committed.dataset.key if committed else ""

    newest = sorted(site.index.runs(), key=lambda one: one.summary.when or "", reverse=True)[: models.MOST_RUNS]
    keys = [(run, _kept(shelf.keys, (run.id, run.stamp), partial(key_of, run), MOST_KEYS)) for run in newest]
    return [(run, key) for run, key in keys if key and set(key.split(", ")) <= here]


def tokenizer_names() -> list[str]:
    folder = assets.shipped_folder("models")
    return [name for name in models.shipped_models() if (folder / name / "tokenizer.json").is_file()]


def _settings(site: Site, name: str) -> tuple[RunConfig, date | None]:
    """The settings that a dataset is read with: the defaults, or those of a run and the day on which it began."""
    today, config = None, RunConfig()
    if name in named("datasets"):
        config = RunConfig.model_validate({"data": {"dataset": name}})
    elif models.RUN_ID.fullmatch(name) and (run := site.index.find(name)) is not None:
        record = RunRecord(run.root)
        if record.config is None:
            raise InputError(f"{run.name}: its settings cannot be read", fix="choose another run, or a dataset")
        config, committed = record.config, record.commitment
        today = date.fromisoformat(committed.dataset.today) if committed and committed.dataset.today else None
    if not config.data.names or not set(config.data.names) <= named("datasets").keys():
        raise InputError(
            f"{quoted(name)} is no dataset that has a key here",
            fix="choose one of the list; `tunix-rt data import FILE --as KEY` gives a file a key",
        )
    # Names in the settings of a run lead to files: they are left out.
    limit = min(config.data.max_examples or MOST_RECORDS, MOST_RECORDS)
    data = config.data.model_copy(update={"validation": None, "max_examples": limit})
    return config.model_copy(update={"data": data, "evaluation": Evaluation(enabled=False)}), today


# --- opening ----------------------------------------------------------------------------------------------------------


def read(site: Site, shelf: Shelf, query: Query, name: str, model: str, answer: Answer) -> dict[str, Any]:
    """What `answer` gives for dataset or run `name` with the tokenizer of `model`; InputError for a name that is not listed,
    and for too much data. The chat template of a run is a program of whoever made the run: it gets a process with limits."""
    config, today = _settings(site, name)
    versions = [_version(str(named("datasets")[key])) for key in config.data.names]
    if sum(size for size, _ in versions) >= ONE_PROCESS_BYTES:
        raise InputError(f"{config.data.key}: more than {ONE_PROCESS_BYTES:,} bytes", fix=CHECK)
    if model not in tokenizer_names():
        return _read_apart((query, config, _run_with_tokenizer(site, model), today))

    def opened() -> Opened:
        source = partial(loaded, resolve_architecture(model))
        return open_dataset(config, *_kept(shelf.tokenizers, model, source, MOST_TOKENIZERS), today)

    key = (config.model_dump_json(), today, tuple(versions), model)
    return answer(_kept(shelf.opened, key, opened, MOST_OPENED), query)


def _read_apart(request: tuple[Query, RunConfig, ModelSource, date | None]) -> dict[str, Any]:
    """What `pages/data.py` answers as a program, with limits on time and memory."""
    words, environment = [sys.executable, "-P", "-m", "tunix_rt.dashboard.pages.data"], os.environ | ONE_THREAD
    limits = Limits(wall_seconds=MOST_SECONDS, address_bytes=MOST_RAM, resident_bytes=MOST_RAM, file_bytes=MOST_FILE)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        ended = run_limited(
            words, limits=limits, environment=environment, folder=Path(), stdin=pickle.dumps(request), stdout=out,
            stderr=errors,
        )  # fmt: skip
        out.seek(0)
        text = out.read(MOST_PAGE)
    try:
        found: dict[str, Any] = vars(json.loads(text, object_hook=lambda one: SimpleNamespace(**one)))
    except ValueError as error:
        why = f"takes more than {ended.breach}" if ended.breach else "fails, or takes too much memory"
        fix = f"choose another tokenizer; if you trust the chat template of this one, {CHECK}"
        raise InputError(f"reading the data with the tokenizer of this run {why}", fix=fix) from error
    if "problem" in found:
        raise InputError(found["problem"], fix=found["fix"])
    return found


def _version(path: str) -> tuple[int, int]:
    """Size and time of a regular file."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix="choose another dataset") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path}: not a regular file", fix="import the dataset again: tunix-rt data import")
    return found.st_size, found.st_mtime_ns


def _silent(what: str, done: int, total: int, note: str, /) -> None:
    """No progress."""


def open_dataset(config: RunConfig, tokenizer: Tokenizer, facts: ModelFacts, today: date | None) -> Opened:
    recipe = recipe_of(config, tokenizer, facts, today=today)
    seen = inspect(config, tokenizer, facts, _silent, today=today)
    refused = any(finding.refuses for finding in seen.findings)
    prepared = None if refused else prepare(config, tokenizer, facts, _silent, today=today)
    return Opened(recipe=recipe, config=config, seen=seen, prepared=prepared)


def _run_with_tokenizer(site: Site, name: str) -> ModelSource:
    """The final model of a run, if its tokenizer can be read."""
    run = site.index.find(name) if models.RUN_ID.fullmatch(name) else None
    if run is None:
        fix = "choose one of the list; another tokenizer: tunix-rt data show KEY --model NAME"
        raise InputError(f"{quoted(name)} is no shipped model and no run of this folder", fix=fix)
    folder, listing = RunDir(run.root).final_model.name, list_folder(run.root)
    sizes = {place: size for place, size in listing.files.items() if place.startswith(f"{folder}/")}
    text = sum(size for place, size in sizes.items() if not place.endswith(".safetensors"))
    odd = [problem for problem in listing.problems if problem.startswith(folder)]
    if f"{folder}/tokenizer.json" not in sizes or odd or text > MOST_TOKENIZER_BYTES:
        problem = odd[0] if odd else f"no tokenizer of at most {MOST_TOKENIZER_BYTES:,} bytes in its final model"
        raise InputError(f"{run.name}: {problem}", fix="choose another model")
    return models.source_of_run(run, exact=False)


def loaded(source: ModelSource) -> tuple[Tokenizer, ModelFacts]:
    kind, outline = str(source.config["model_type"]), outline_of(source.config)
    facts = ModelFacts(vocabulary=outline.vocab, positions=outline.max_positions, model_type=kind)
    return load_tokenizer(source.folder, kind), facts
