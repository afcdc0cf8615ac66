"""Records to tokens, in batches and worker processes: parse, convert, render, and check every rule about an example."""

import contextlib
import copyreg
import functools
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
from tunix_rt.data.holdout import hash8, question_hash
from tunix_rt.data.readers import BadRecord, Raw
from tunix_rt.data.records import Sample
from tunix_rt.data.render import Rendered, Style, render_batch
from tunix_rt.data.sources import Dataset
from tunix_rt.data.template import TemplateRefusal
from tunix_rt.data.text import sketch
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.validation import RULES
from tunix_rt.errors import InputError, TunixError
from tunix_rt.storage import row_leaf

SCHEMA = "tunix-rt/tokens/1"

TRAINED = np.uint32(1 << 31)  # the highest bit of a stored token marks a target of the loss; ids are below it
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
        ("bad", "?"),
    ]
)
"""One entry per example: where its tokens are, where it came from, and hashes of its question and of its text, and
whether it breaks a refusing rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines the tokens of a dataset, except the code."""

    dataset: Dataset
    format: str
    tokenizer: Tokenizer
    style: Style
    needs_bos: bool

    @property
    def key(self) -> str:
        """Name in the token cache. Another file, tokenizer, template, setting or version of the code has another key."""
        parts = {
            "schema": SCHEMA,
            "dataset": self.dataset.sha256,
            "files": [file.sha256 for file in self.dataset.files],
            "columns": dict(self.dataset.columns),
            "limit": self.dataset.limit,
            "format": self.format,
            "tokenizer": self.tokenizer.sha256,
            "style": self.style.sha256,
            "needs_bos": self.needs_bos,
            "tokenizers": importlib.metadata.version("tokenizers"),
            "code": _code_sha256(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _code_sha256() -> str:
    """Over the sources of this package: other code may produce other tokens."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in sources)).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tokenized batch."""

    tokens: npt.NDArray[np.uint32]
    index: npt.NDArray[Any]
    leaves: list[bytes]
    broken: list[tuple[int, str, str]]
    """(index in the batch, rule, what is wrong)"""
    read: npt.NDArray[np.int64]
    """Indices of the records that could be read."""
    sketches: npt.NDArray[np.uint32]
    """Of these."""


def tokenize(recipe: Recipe, batch: list[Raw]) -> Part:
    """Records to tokens, with every rule that each of them breaks."""
    dataset, tokenizer, style = recipe.dataset, recipe.tokenizer, recipe.style
    broken: list[tuple[int, str, str]] = []
    samples: dict[int, Sample] = {}
    for at, raw in enumerate(batch):
        try:
            record = dataset.record(raw)
            samples[at] = to_sample(record, recipe.format, dataset.place(raw.file, raw.line))
        except BadRecord as error:
            broken.append((at, error.rule, error.seen))
            continue
        if unused := unused_columns(record, recipe.format):
            broken.append((at, "unused_column", ", ".join(repr(name)[1:-1][:60] for name in unused[:20])))
        if words := words_behind_number(record, recipe.format):
            broken.append((at, "answer_with_words", repr(words)[1:-1][:60]))
    for at, sample in samples.items():
        broken += [(at, *wrong) for wrong in check_text(sample, tokenizer, style)]
    unreadable = {at for at, rule, _ in broken if rule == "lone_surrogate"}
    readable = [at for at in samples if at not in unreadable]
    shown = dict(zip(readable, render_batch([samples[at] for at in readable], tokenizer, style), strict=True))
    rendered = {at: one for at, one in shown.items() if isinstance(one, Rendered)}
    broken += [(at, "template_refused", one.reason) for at, one in shown.items() if isinstance(one, TemplateRefusal)]
    turns = [list(_turns(one)) for one in rendered.values()]
    texts = iter(tokenizer.inner.decode_batch([ids for of in turns for ids in of], skip_special_tokens=False))
    for (at, one), spans in zip(rendered.items(), turns, strict=True):
        decoded = tuple(next(texts) for _ in spans)
        seen = Seen(
            sample=samples[at],
            rendered=one,
            turns=decoded,
            style=style,
            tokenizer=tokenizer,
            needs_bos=recipe.needs_bos,
        )
        broken += [(at, *wrong) for wrong in check_example(seen)]
    return _part(batch, samples, rendered, sorted(broken))


def _turns(one: Rendered) -> Iterator[list[int]]:
    """The trained ids of each assistant turn; of the last one also those without an end token."""
    start = one.prompt_tokens
    for end in one.ends:
        stop = end + 1 if end >= 0 else len(one.ids)
        yield one.ids[start:stop][one.trained[start:stop]].tolist()
        start = stop


def _part(
    batch: Sequence[Raw], samples: dict[int, Sample], rendered: dict[int, Rendered], broken: list[tuple[int, str, str]]
) -> Part:
    index = np.zeros(len(batch), dtype=INDEX)
    stored: list[npt.NDArray[np.uint32]] = []
    leaves: list[bytes] = []
    bad = {at for at, rule, _ in broken if RULES[rule].refuses}
    start = 0
    for at, raw in enumerate(batch):
        one, sample = rendered.get(at), samples.get(at)
        length = 0 if one is None else len(one.ids)
        counts = (0, 0, 0) if one is None else (int(one.trained.sum()), one.reasoning_end, one.answer_end)
        hashes = (0, 0) if sample is None else (question_hash(sample), _content(sample))
        index[at] = (start, length, *counts, raw.file, raw.line, *hashes, at in bad)
        if one is not None:
            stored.append(one.ids.astype(np.uint32) | np.where(one.trained, TRAINED, np.uint32(0)))
            leaves.append(row_leaf(one.ids, one.trained, np.arange(length, dtype=np.int32)))
        start += length
    return Part(
        tokens=np.concatenate(stored) if stored else np.empty(0, dtype=np.uint32),
        index=index,
        leaves=leaves,
        broken=broken,
        read=np.array(list(samples), dtype=np.int64),
        sketches=np.array([sketch(" ".join(sample.texts)) for sample in samples.values()], dtype=np.uint32),
    )


def _content(sample: Sample) -> int:
    """Hash of the turns of a record; columns that are not used do not change it."""
    return hash8("\0".join((*(turn.role for turn in sample.turns), "", *sample.texts)))


State = TypeVar("State")
Batch = TypeVar("Batch")
Result = TypeVar("Result")

# Workers raise InputError too, and pickle keeps the positional arguments of an exception alone.
copyreg.pickle(InputError, lambda error: (functools.partial(InputError, fix=error.fix), (error.problem,)))
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HAS_GROUPS = os.name == "posix"
AHEAD = 2
"""Batches per process that are read before the first result is taken."""


def in_order(
    work: Callable[[State, Batch], Result], state: State, batches: Iterable[Batch], *, processes: int
) -> Iterator[Result]:
    """`work(state, batch)` of every batch, in order. One process is this one; every other one gets `state` once.

    Workers are spawned, not forked: a fork of a process with threads can deadlock.
    """
    if processes == 1:
        yield from (work(state, batch) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        max_workers=processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(work, state),
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for batch in batches:
            with _signals_blocked():  # a worker inherits the mask until it has set its handlers
                waiting.append(pool.submit(_work, batch))
            if len(waiting) >= AHEAD * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise TunixError(
            "a worker process of the tokenization died; the system may be out of memory",
            fix="free some memory and run it again; no partial result was kept",
        ) from error
    finally:
        # After an interruption the garbage collector may close this generator in any thread, even in one of the pool's own, which
        # would wait for itself.
        pool.shutdown(wait=threading.current_thread() is threading.main_thread(), cancel_futures=True)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    if not _HAS_GROUPS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple[Callable[[Any, Any], Any], Any] | None = None


def _start_worker(work: Callable[[State, Batch], Result], state: State) -> None:
    """Set a new process up: it leaves signals to its parent, exits with it, and uses one thread.

    A terminal and many schedulers signal the whole process group, so the worker leaves it. The parent terminates its
    workers with SIGTERM, which they must not ignore.
    """
    global _worker
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # drops one that is pending from before the group was left
    if _HAS_GROUPS:
        os.setpgrp()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (work, state)


def _work(batch: Any) -> Any:
    assert _worker is not None, "started"
    work, state = _worker
    return work(state, batch)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
