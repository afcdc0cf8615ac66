"""Rows, and their order. A row is one or more examples side by side; which rows step k trains on is a pure function."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunix_rt.data.render import Example, Ids, Mask

IGNORED = -100
"""Label of a token that is no target (the number torch's cross entropy ignores)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Packed examples. `positions` restart at 0 with each example: that is the boundary nobody may look across."""

    ids: Ids
    trained: Mask
    positions: Ids

    @property
    def sha256(self) -> bytes:
        """Identity of the row: its tokens, what is trained, where examples begin."""
        content = b"".join(part.astype("<i4").tobytes() for part in (self.ids, self.trained, self.positions))
        return hashlib.sha256(content).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass, padded on the right to the longest: arrays of shape [rows, tokens]."""

    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]

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


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """First-fit-decreasing: indices of the examples that share each row. Loses nothing, overfills nothing.

    The room of every row is a leaf of a tree whose nodes hold the most room below them: the first row with enough is found
    in log(n) looks, not n. Rows that are not begun yet are leaves with all their room, so a new row is found the same way.
    """
    rows: list[list[int]] = []
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [max_length] * (2 * leaves)  # room[1] is the root, the children of n are 2n and 2n + 1
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length, node = lengths[index], 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if room[node] < length:  # longer than a whole row: a row of its own
            node = leaves + len(rows)
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def make_rows(examples: Sequence[Example], *, max_length: int, packing: bool) -> list[Row]:
    """The rows of a dataset, in a fixed order that `rows_of_step` shuffles."""
    groups = pack([len(e.ids) for e in examples], max_length) if packing else [[i] for i in range(len(examples))]
    return [
        Row(
            ids=np.concatenate([examples[i].ids for i in group]),
            trained=np.concatenate([examples[i].trained for i in group]),
            positions=np.concatenate([np.arange(len(examples[i].ids), dtype=np.int32) for i in group]),
        )
        for group in groups
    ]


def steps_per_epoch(row_count: int, rows_per_step: int) -> int:
    return math.ceil(row_count / rows_per_step)


def total_steps(row_count: int, rows_per_step: int, *, epochs: float, max_steps: int | None) -> int:
    return max_steps or max(1, math.ceil(epochs * steps_per_epoch(row_count, rows_per_step)))


def rows_of_step(step: int, *, row_count: int, rows_per_step: int, seed: int) -> list[int]:
    """Indices of the rows that step `step` (counted from 1) trains on. Every row once per epoch; no state, no walking."""
    epoch, place = divmod(step - 1, steps_per_epoch(row_count, rows_per_step))
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(row_count)
    return [int(i) for i in order[place * rows_per_step : (place + 1) * rows_per_step]]


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
        # The first token of an example is predicted by nothing: the token before it belongs to a neighbour.
        labels[place, :length] = np.where(row.trained & (row.positions > 0), row.ids, IGNORED)
        positions[place, :length] = row.positions
        positions[place, length:] = (row.positions[-1] + 1 + np.arange(width - length)) % longest
    return MicroBatch(ids=ids, labels=labels, positions=positions)


def batch_of_step(
    rows: Sequence[Row], step: int, *, micro_batch_size: int, accumulation: int, seed: int, pad_id: int
) -> StepBatch:
    """The micro-batches of one optimizer step: a pure function of (rows, seed, step)."""
    chosen = rows_of_step(step, row_count=len(rows), rows_per_step=micro_batch_size * accumulation, seed=seed)
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


def rows_sha256(rows: Sequence[Row]) -> str:
    """One hash over every row, in dataset order."""
    return hashlib.sha256(b"".join(row.sha256 for row in rows)).hexdigest()
