"""Records to tokens, a batch at a time, in whichever process: parse, read, render, and ask every rule about the example."""

import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tunix_rt.data.example_checks import Seen, check_example, check_text
from tunix_rt.data.formats import to_sample, unused_columns, words_behind_number
from tunix_rt.data.readers import Raw, parse
from tunix_rt.data.render import Rendered, Style, render_batch
from tunix_rt.data.sources import Dataset
from tunix_rt.data.split import hash8, question_hash
from tunix_rt.data.template import TemplateRefusal
from tunix_rt.data.text import sketch
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.data.trace import Sample
from tunix_rt.errors import InputError, TunixError
from tunix_rt.storage import row_leaf

SCHEMA = "tunix-rt/tokens/1"

TRAINED = np.uint32(1 << 31)  # the highest bit of a stored token says whether it is a target; ids are below it
INDEX = np.dtype(
    [
        ("start", "<i8"),
        ("length", "<i4"),
        ("trained", "<i4"),
        ("reasoning_end", "<i4"),
        ("answer_end", "<i4"),
        ("file", "<i4"),
        ("line", "<i8"),
        ("question", "<u8"),
        ("content", "<u8"),
    ]
)
"""One entry per example: where its tokens are, where it came from, and hashes to find the same question or text by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides the tokens of a dataset, apart from the code."""

    dataset: Dataset
    format: str
    tokenizer: Tokenizer
    style: Style
    needs_bos: bool
    model_type: str

    @property
    def key(self) -> str:
        """Name of the store. Another file, tokenizer, template, setting or version of the code is another store."""
        parts = {
            "schema": SCHEMA,
            "dataset": self.dataset.sha256,
            "files": [file.sha256 for file in self.dataset.files],
            "format": self.format,
            "tokenizer": self.tokenizer.sha256,
            "style": self.style.sha256,
            "needs_bos": self.needs_bos,
            "tokenizers": importlib.metadata.version("tokenizers"),
            "code": _code_sha256(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _code_sha256() -> str:
    """Over the sources of this package: tokens made by other code are not ours."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sources)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One batch, tokenised. `failure` is a record that cannot be read at all: (problem, fix)."""

    tokens: npt.NDArray[np.uint32]
    index: npt.NDArray[Any]
    leaves: list[bytes]
    broken: list[tuple[int, str, str]]
    """(place in the batch, rule, what is wrong)"""
    sketches: npt.NDArray[np.uint32]
    failure: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    dataset: Dataset
    format: str
    tokenizer: Tokenizer
    style: Style
    needs_bos: bool


_worker: _Worker | None = None


def begin_settings(recipe: Recipe, *, alone: bool) -> tuple[Any, ...]:
    """What `begin` is told. Another process reads the tokenizer from its folder; this one has it."""
    known = recipe.tokenizer if alone else None
    folder = recipe.tokenizer.folder
    return known, folder, recipe.model_type, recipe.dataset, recipe.format, recipe.style, recipe.needs_bos


def begin(
    known: Tokenizer | None, folder: Path, model_type: str, dataset: Dataset, format: str, style: Style, needs_bos: bool
) -> None:
    global _worker
    tokenizer = known or load_tokenizer(folder, model_type)
    _worker = _Worker(dataset=dataset, format=format, tokenizer=tokenizer, style=style, needs_bos=needs_bos)


def tokenise(batch: list[Raw]) -> Part:
    """Records to tokens, with everything the rules say about each."""
    worker = _worker
    assert worker is not None, "begun"
    broken: list[tuple[int, str, str]] = []
    samples: list[Sample] = []
    try:
        for at, raw in enumerate(batch):
            where = worker.dataset.place(raw.file, raw.line)
            record = parse(raw, where)
            samples.append(to_sample(record, worker.format, where))
            if unused := unused_columns(record, worker.format):
                broken.append((at, "unused_column", ", ".join(repr(name)[1:-1][:60] for name in unused[:20])))
            if words := words_behind_number(record, worker.format):
                broken.append((at, "answer_with_words", repr(words)[1:-1][:60]))
    except InputError as error:
        return _empty_part((error.problem, error.fix))
    for at, sample in enumerate(samples):
        broken += [(at, *wrong) for wrong in check_text(sample, worker.tokenizer, worker.style)]
    unreadable = {at for at, rule, _ in broken if rule == "lone_surrogate"}
    readable = [at for at in range(len(samples)) if at not in unreadable]
    shown = dict(
        zip(readable, render_batch([samples[at] for at in readable], worker.tokenizer, worker.style), strict=True)
    )
    rendered = {at: one for at, one in shown.items() if isinstance(one, Rendered)}
    broken += [(at, "template_refused", one.words) for at, one in shown.items() if isinstance(one, TemplateRefusal)]
    turns = [list(_turns(one)) for one in rendered.values()]
    texts = iter(worker.tokenizer.inner.decode_batch([ids for of in turns for ids in of], skip_special_tokens=False))
    for (at, one), said in zip(rendered.items(), turns, strict=True):
        seen = Seen(
            sample=samples[at],
            rendered=one,
            said=tuple(next(texts) for _ in said),
            style=worker.style,
            tokenizer=worker.tokenizer,
            needs_bos=worker.needs_bos,
        )
        broken += [(at, *wrong) for wrong in check_example(seen)]
    return _part(batch, samples, rendered, sorted(broken))


def _turns(one: Rendered) -> Iterator[list[int]]:
    """The trained ids of each turn that the model says; of the last also what has no end token."""
    start = one.prompt_tokens
    for end in one.ends:
        stop = end + 1 if end >= 0 else len(one.ids)
        yield one.ids[start:stop][one.trained[start:stop]].tolist()
        start = stop


def _part(
    batch: Sequence[Raw], samples: Sequence[Sample], rendered: dict[int, Rendered], broken: list[tuple[int, str, str]]
) -> Part:
    index = np.zeros(len(batch), dtype=INDEX)
    stored: list[npt.NDArray[np.uint32]] = []
    leaves: list[bytes] = []
    start = 0
    for at, (raw, sample) in enumerate(zip(batch, samples, strict=True)):
        one = rendered.get(at)
        length = 0 if one is None else len(one.ids)
        counts = (0, 0, 0) if one is None else (int(one.trained.sum()), one.reasoning_end, one.answer_end)
        index[at] = (start, length, *counts, raw.file, raw.line, question_hash(sample), _content(sample))
        if one is not None:
            stored.append(one.ids.astype(np.uint32) | np.where(one.trained, TRAINED, np.uint32(0)))
            leaves.append(row_leaf(one.ids, one.trained, np.arange(length, dtype=np.int32)))
        start += length
    return Part(
        tokens=np.concatenate(stored) if stored else np.empty(0, dtype=np.uint32),
        index=index,
        leaves=leaves,
        broken=broken,
        sketches=np.stack([sketch(" ".join(sample.texts)) for sample in samples]),
    )


def _empty_part(failure: tuple[str, str]) -> Part:
    return Part(
        tokens=np.empty(0, dtype=np.uint32), index=np.zeros(0, dtype=INDEX), leaves=[], broken=[],
        sketches=np.empty((0, 32), dtype=np.uint32), failure=failure,
    )  # fmt: skip


def _content(sample: Sample) -> int:
    """The same for records that say the same, whatever else they hold."""
    return hash8("\0".join((*(turn.role for turn in sample.turns), "", *sample.texts)))


Batch = TypeVar("Batch")
Result = TypeVar("Result")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HAS_GROUPS = os.name == "posix"
AHEAD = 2
"""Batches per process that are read before the first of them is back."""


def in_order(
    work: Callable[[Batch], Result],
    batches: Iterable[Batch],
    *,
    processes: int,
    begin: Callable[..., None],
    settings: tuple[Any, ...],
) -> Iterator[Result]:
    """`work` of every batch, in their order. `begin(*settings)` runs once in each process before.

    One process is this one. More are started afresh, not forked: a fork of a process with threads may hang.
    """
    if processes == 1:
        begin(*settings)
        yield from map(work, batches)
        return
    pool = ProcessPoolExecutor(
        max_workers=processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_alone,
        initargs=(begin, settings),
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            with _signals_wait():  # a process that is being started has them wait too, until it is ready for them
                waiting.append(pool.submit(work, batch))
            if len(waiting) >= AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise TunixError(
            "a process that prepares the data ended without a word; the system may have run out of memory",
            fix="free some memory and run it again; nothing half-made was kept",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    if not _HAS_GROUPS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_alone(begin: Callable[..., None], settings: tuple[Any, ...]) -> None:
    """In a new process: leave signals to the parent, end when it ends, and use one thread.

    A terminal and many schedulers signal the whole group, so the process leaves it. The parent stops its workers by
    itself, for which they must still listen to SIGTERM: one that ignored it could never be ended after another had died.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # forgets one that came to the group while we were starting
    if _HAS_GROUPS:
        os.setpgrp()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    begin(*settings)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
