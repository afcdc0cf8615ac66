"""Packed rows and their order. A row is one or more examples; the rows of step k are a pure function of seed and step."""

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tunix_rt.data.mixture import MixedDataset, mixed_order
from tunix_rt.data.render import Computed, Example, Ids, Mask
from tunix_rt.storage import merkle_root, row_leaf

Numbers = npt.NDArray[np.float64]
IGNORED = -100
"""Label of a token that is not a target (`ignore_index` of torch's cross entropy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Packed examples. `positions` restart at 0 with each example: attention does not cross that document boundary."""

    ids: Ids
    trained: Mask
    positions: Ids
    weights: Numbers | None = None
    """Of the loss of each token; None: all 1."""
    logprobs: Numbers | None = None
    """Log-probability of each token by whoever sampled it, where the row was sampled."""
    names: tuple[str, ...] = ()
    """Of its examples, for an error."""

    @property
    def sha256(self) -> bytes:
        """Hash of the row: token ids, loss mask, positions, and weights where it has any."""
        leaf = row_leaf(self.ids, self.trained, self.positions)
        return leaf if self.weights is None else hashlib.sha256(leaf + self.weights.astype("<f8").tobytes()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass, padded on the right to the longest: arrays of shape [rows, tokens]."""

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    weights: Numbers | None = None
    """Of the loss of each label; None: all 1."""
    logprobs: Numbers | None = None
    """Of each label, by whoever sampled the rows."""
    names: tuple[tuple[str, ...], ...] = ()
    """Of the examples in each row, where they have any."""

    @property
    def targets(self) -> int:
        """Number of target tokens. The first label of a row predicts nothing and is always ignored."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything one optimizer step trains on."""

    micro_batches: tuple[MicroBatch, ...]
    target_tokens: int
    tokens: int
    """Tokens of the rows, padding not counted."""
    sha256: str
    """Over the identities of the rows, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing(Computed[npt.NDArray[np.int64]]):
    """Which examples share each row: indices only, in two arrays. Row r is `order[starts[r]:starts[r + 1]]`."""

    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def item(self, row: int) -> npt.NDArray[np.int64]:
        index = range(len(self))[row]
        return self.order[self.starts[index] : self.starts[index + 1]]


def pack(lengths: Sequence[int] | npt.NDArray[np.integer], max_length: int) -> Packing:
    """First-fit-decreasing: each example, longest first, goes into the first row that has room for it.

    Examples of one length are placed together: in the order of the rows, each takes as many as fit. That is what
    placing them one by one comes to, at the price of one pass over the open rows per distinct length.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    falling = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    room = np.empty(0, dtype=np.int64)  # of the open rows, in the order they were begun
    numbers = np.empty(0, dtype=np.int64)
    rows = done = 0
    values, counts = np.unique(sizes, return_counts=True)
    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        fits = room // max(size, 1)
        before = np.cumsum(fits) - fits
        taken = np.clip(count - before, 0, fits)
        left = count - int(taken.sum())
        each = max(1, max_length // max(size, 1))  # longer than a row: a row of its own
        fresh = math.ceil(left / each)
        new = np.full(fresh, each, dtype=np.int64)
        if fresh:
            new[-1] = left - each * (fresh - 1)
        room = np.concatenate([room - taken * size, max_length - new * size])
        numbers = np.concatenate([numbers, np.arange(rows, rows + fresh)])
        row_of[falling[done : done + count]] = np.repeat(numbers, np.concatenate([taken, new]))
        rows, done = rows + fresh, done + count
        is_open = room >= values[0]
        room, numbers = room[is_open], numbers[is_open]
    placed = row_of[falling]
    order = falling[np.argsort(placed, kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(placed, minlength=rows))]).astype(np.int64)
    return Packing(order, starts)


class Rows(Computed[Row]):
    """The rows of a dataset, in a fixed order that `rows_of_step` shuffles. A row is assembled on access."""

    def __init__(self, examples: Sequence[Example], packing: Packing, max_length: int) -> None:
        self._examples, self._packing, self._max_length = examples, packing, max_length

    def __len__(self) -> int:
        return len(self._packing)

    def item(self, row: int) -> Row:
        chosen = [self._examples[index] for index in self._packing[row].tolist()]
        ids = [example.ids[: self._max_length] for example in chosen]
        return Row(
            ids=np.concatenate(ids),
            trained=np.concatenate([example.trained[: self._max_length] for example in chosen]),
            positions=np.concatenate([np.arange(len(part), dtype=np.int32) for part in ids]),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def examples_of(self, row: int) -> list[int]:
        """Which examples are in a row."""
        return [int(index) for index in self._packing[row]]


def make_rows(examples: Sequence[Example], *, max_length: int, packing: bool) -> Rows:
    """The rows of examples in memory; an example longer than `max_length` is truncated."""
    lengths = [min(len(example.ids), max_length) for example in examples]
    alone = Packing(np.arange(len(examples)), np.arange(len(examples) + 1))
    return Rows(examples, pack(lengths, max_length) if packing else alone, max_length)


def steps_per_epoch(row_count: int, rows_per_step: int) -> int:
    return math.ceil(row_count / rows_per_step)


def total_steps(row_count: int, rows_per_step: int, *, epochs: float, max_steps: int | None) -> int:
    return max_steps or max(1, math.ceil(epochs * steps_per_epoch(row_count, rows_per_step)))


GROUPED_STEPS = 64
"""Steps among which rows are sorted by length."""


def rows_of_step(
    step: int, *, row_count: int, rows_per_step: int, seed: int, lengths: Sequence[int] | None = None,
    mixture: tuple[MixedDataset, ...] = (),
) -> list[int]:  # fmt: skip
    """Indices of the rows that step `step` (counted from 1) trains on. Every row once per epoch, unless `mixture` has weights; no
    state, no walking.

    With the `lengths` of the rows, those of a step are of similar length, and need little padding."""
    epoch, place = divmod(step - 1, steps_per_epoch(row_count, rows_per_step))
    if lengths is None:
        order = _order_of_epoch(seed, epoch, row_count, mixture)
    else:
        order = _grouped_order(seed, epoch, rows_per_step, np.asarray(lengths, dtype=np.int32).tobytes(), mixture)
    return [int(i) for i in order[place * rows_per_step : (place + 1) * rows_per_step]]


@lru_cache(maxsize=2)
def _order_of_epoch(seed: int, epoch: int, row_count: int, mixture: tuple[MixedDataset, ...]) -> npt.NDArray[np.int64]:
    """The rows of an epoch, shuffled. Kept for its next step: drawing it takes as long as the dataset is large."""
    if mixture:
        return mixed_order(seed, epoch, mixture)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(row_count)


@lru_cache(maxsize=2)
def _grouped_order(
    seed: int, epoch: int, rows_per_step: int, lengths: bytes, mixture: tuple[MixedDataset, ...]
) -> npt.NDArray[np.int64]:
    """The same, sorted by length within `GROUPED_STEPS`, whose steps are then shuffled. The last, smaller step stays last."""
    sizes = np.frombuffer(lengths, dtype=np.int32)
    order = _order_of_epoch(seed, epoch, len(sizes), mixture).copy()
    whole = len(order) // rows_per_step * rows_per_step
    for start in range(0, whole, GROUPED_STEPS * rows_per_step):
        part = order[start : min(whole, start + GROUPED_STEPS * rows_per_step)]
        part[:] = part[np.argsort(-sizes[part], kind="stable")]
    steps = order[:whole].reshape(-1, rows_per_step)
    shuffled = np.random.Generator(np.random.PCG64([seed, epoch, 1])).permutation(len(steps))
    return np.concatenate([steps[shuffled].ravel(), order[whole:]])


def collate(rows: Sequence[Row], *, pad_id: int) -> MicroBatch:
    """Rows as padded arrays. Padding comes last, so under causal attention no real token sees it; its labels are ignored.

    Padding continues the positions, but only up to the longest example here, then from 0 again: a packed row may be longer
    than the positions a model has. Without packing nothing restarts, and a batch needs no mask of its own.
    """
    width = max(len(row.ids) for row in rows)
    longest = max(int(row.positions.max()) for row in rows) + 1
    shape = (len(rows), width)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    positions = np.zeros(shape, dtype=np.int64)
    for place, row in enumerate(rows):
        length = len(row.ids)
        ids[place, :length] = row.ids
        labels[place, :length] = np.where(_is_target(row), row.ids, IGNORED)
        positions[place, :length] = row.positions
        positions[place, length:] = (row.positions[-1] + 1 + np.arange(width - length)) % longest
    return MicroBatch(
        ids=ids, labels=labels, positions=positions, weights=_padded([row.weights for row in rows], width),
        logprobs=_padded([row.logprobs for row in rows], width), names=tuple(row.names for row in rows if row.names),
    )  # fmt: skip


def _padded(parts: Sequence[Numbers | None], width: int) -> Numbers | None:
    """The rows padded with zeros; None where they have no such numbers."""
    there = [np.pad(part, (0, width - len(part))) for part in parts if part is not None]
    if there and len(there) < len(parts):
        raise ValueError("some rows have such numbers, and some have none")
    return np.stack(there) if there else None


def _is_target(row: Row) -> Mask:
    """The first token of an example is predicted by nothing: the token before it belongs to a neighbour."""
    return row.trained & (row.positions > 0)


def filled_up(micro: MicroBatch, least: tuple[int, int]) -> MicroBatch:
    """`micro`, padded to at least so many rows of so many tokens. Padding has no targets, and no token attends to it."""
    missing = tuple(max(0, wanted - there) for wanted, there in zip(least, micro.ids.shape, strict=True))
    if not any(missing):
        return micro
    rows, width = (there + more for there, more in zip(micro.ids.shape, missing, strict=True))
    # As in `collate`, positions go on behind a row, up to the longest there is and then from 0 again.
    longest = int(micro.positions.max()) + 1
    positions = np.broadcast_to(np.arange(width) % longest, (rows, width)).astype(micro.positions.dtype)
    behind = (micro.positions[:, -1:] + 1 + np.arange(missing[1])) % longest
    positions[: len(micro.ids)] = np.concatenate([micro.positions, behind], axis=1)
    added = ((0, missing[0]), (0, missing[1]))
    return replace(
        micro,
        ids=np.pad(micro.ids, added, mode="edge"),
        labels=np.pad(micro.labels, added, constant_values=IGNORED),
        positions=positions,
        weights=None if micro.weights is None else np.pad(micro.weights, added),
        logprobs=None if micro.logprobs is None else np.pad(micro.logprobs, added),
    )


def share_of(micro: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """The rows of `micro` that are those of `rank`. One without a row has the first, with no targets."""
    first, stop = (number * len(micro.ids) // ranks for number in (rank, rank + 1))
    if first < stop:
        own = slice(first, stop)
    else:
        own, micro = slice(0, 1), replace(micro, labels=np.full_like(micro.labels, IGNORED))
    return MicroBatch(
        ids=micro.ids[own], labels=micro.labels[own], positions=micro.positions[own], names=micro.names[own],
        weights=None if micro.weights is None else micro.weights[own],
        logprobs=None if micro.logprobs is None else micro.logprobs[own],
    )  # fmt: skip


def batch_of_step(
    rows: Sequence[Row], step: int, *, micro_batch_size: int, accumulation: int, seed: int, pad_id: int,
    lengths: Sequence[int] | None = None, mixture: tuple[MixedDataset, ...] = (),
) -> StepBatch:  # fmt: skip
    """The micro-batches of one optimizer step: a pure function of (rows, seed, step)."""
    per_step = micro_batch_size * accumulation
    chosen = rows_of_step(
        step, row_count=len(rows), rows_per_step=per_step, seed=seed, lengths=lengths, mixture=mixture
    )
    picked = [rows[i] for i in chosen]
    micro = tuple(
        collate(picked[start : start + micro_batch_size], pad_id=pad_id)
        for start in range(0, len(picked), micro_batch_size)
    )
    return StepBatch(
        micro_batches=micro,
        target_tokens=sum(batch.targets for batch in micro),
        tokens=sum(len(row.ids) for row in picked),
        sha256=hashlib.sha256(b"".join(row.sha256 for row in picked)).hexdigest(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What there is to know of every row without its tokens, in dataset order: 40 bytes of each."""

    hashes: bytes
    """The identities of the rows, one after the other."""
    tokens: Sequence[int]
    targets: Sequence[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def identities(self) -> Iterator[bytes]:
        return (self.hashes[start : start + 32] for start in range(0, len(self.hashes), 32))

    @property
    def merkle_root(self) -> str:
        """Merkle root over the hashes of the rows."""
        return merkle_root(self.identities())

    def lines(self) -> Iterator[str]:
        """The lines of `rows.jsonl`, as `json_line` writes them, which takes several times as long."""
        for row, (identity, tokens, targets) in enumerate(
            zip(self.identities(), self.tokens, self.targets, strict=True)
        ):
            yield f'{{"row": {row}, "sha256": "{identity.hex()}", "targets": {targets}, "tokens": {tokens}}}\n'


def facts_of_rows(rows: Iterable[Row]) -> RowFacts:
    """One pass over the rows: assembling them takes longer than everything that is computed from them."""
    hashes, tokens, targets = bytearray(), array("I"), array("I")
    for row in rows:
        hashes += row.sha256
        tokens.append(len(row.ids))
        targets.append(int(np.count_nonzero(_is_target(row))))
    return RowFacts(hashes=bytes(hashes), tokens=tokens, targets=targets)
