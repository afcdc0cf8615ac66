"""Datasets that a page may name, opened once: tokenized, validated and packed as in a run, within limits of size and time.

A dataset is named by its key, a tokenizer by a shipped model or by a run of the index; no path arrives from outside.
"""

import ctypes
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Any, TypeVar

from tunix_rt import assets
from tunix_rt.config.load import quoted
from tunix_rt.config.settings import Evaluation, RunConfig
from tunix_rt.dashboard import models
from tunix_rt.dashboard.site import Site
from tunix_rt.data.packing import Rows
from tunix_rt.data.prepare import Inspected, ModelFacts, Prepared, inspect, prepare, recipe_of
from tunix_rt.data.sources import named
from tunix_rt.data.token_cache import ONE_PROCESS_BYTES
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.errors import InputError
from tunix_rt.models.resolve import ModelSource, resolve_architecture
from tunix_rt.plan.shape import outline_of
from tunix_rt.progress import Progress
from tunix_rt.runs.checksums import list_folder
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.index import Indexed
from tunix_rt.runs.record import RunRecord

MOST_RECORDS = 20_000
MOST_SECONDS, END_SECONDS, WAIT_SECONDS = 20.0, 25.0, 5.0
"""For tokenizing a dataset; for a whole page, as a chat template of a run may loop without end; and for another page that is
reading one."""
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
    thread, guard = ctypes.c_ulong(threading.get_ident()), threading.Lock()

    def expire() -> None:
        with guard:
            if timer.finished.is_set():  # the page was done just before
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TooLong))

    timer = threading.Timer(END_SECONDS, expire)
    timer.start()
    try:
        try:
            yield shelf
        finally:
            with guard:
                timer.cancel()
    except _TooLong as error:
        raise _too_long(END_SECONDS) from error
    finally:
        shelf.lock.release()


class _TooLong(BaseException):
    """Raised in the thread of a page by its timer. No `except Exception` around a chat template catches it."""


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


def open_dataset(site: Site, shelf: Shelf, name: str, model: str) -> Opened:
    """Dataset or run `name` with the tokenizer of `model`. InputError for a name that is not listed, and for too much data."""
    config, today = _settings(site, name)
    versions = [_version(str(named("datasets")[key])) for key in config.data.names]
    if sum(size for size, _ in versions) >= ONE_PROCESS_BYTES:
        raise InputError(f"{config.data.key}: more than {ONE_PROCESS_BYTES:,} bytes", fix=CHECK)
    stamp, find = _tokenizer(site, model)

    def opened() -> Opened:
        tokenizer, facts = _kept(shelf.tokenizers, (model, stamp), find, MOST_TOKENIZERS)
        return _open(config, tokenizer, facts, today)

    return _kept(shelf.opened, (config.model_dump_json(), today, tuple(versions), model, stamp), opened, MOST_OPENED)


def _version(path: str) -> tuple[int, int]:
    """Size and time of a regular file."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", fix="choose another dataset") from error
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path}: not a regular file", fix="import the dataset again: tunix-rt data import")
    return found.st_size, found.st_mtime_ns


def _open(config: RunConfig, tokenizer: Tokenizer, facts: ModelFacts, today: date | None) -> Opened:
    progress = _deadline(MOST_SECONDS)
    recipe = recipe_of(config, tokenizer, facts, today=today)
    seen = inspect(config, tokenizer, facts, progress, today=today)
    refused = any(finding.refuses for finding in seen.findings)
    prepared = None if refused else prepare(config, tokenizer, facts, progress, today=today)
    return Opened(recipe=recipe, config=config, seen=seen, prepared=prepared)


def _deadline(seconds: float) -> Progress:
    until = time.monotonic() + seconds

    def progress(what: str, done: int, total: int, note: str, /) -> None:
        if time.monotonic() > until:
            raise _too_long(seconds)

    return progress


def _too_long(seconds: float) -> InputError:
    return InputError(f"reading the data takes more than {seconds:.0f} s", fix=CHECK)


def _tokenizer(site: Site, name: str) -> tuple[Any, Callable[[], tuple[Tokenizer, ModelFacts]]]:
    """The version of a tokenizer, and the function that loads it."""
    if name in tokenizer_names():
        source = resolve_architecture(name)
        return "", lambda: _loaded(source)
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
    found = models.source_of_run(run, exact=False)
    return tuple(sorted(sizes.items())), lambda: _loaded(found)


def _loaded(source: ModelSource) -> tuple[Tokenizer, ModelFacts]:
    kind, outline = str(source.config["model_type"]), outline_of(source.config)
    facts = ModelFacts(vocabulary=outline.vocab, positions=outline.max_positions, model_type=kind)
    return load_tokenizer(source.folder, kind), facts
