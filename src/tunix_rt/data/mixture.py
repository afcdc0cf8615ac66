"""Datasets with weights: which share of each epoch is rows of which dataset. A pure function of seed and epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDataset:
    """One dataset of a mixture. The rows of the datasets follow each other."""

    key: str
    sha256: str
    weight: float
    rows: int


def rows_of_epoch(parts: Sequence[MixedDataset]) -> list[int]:
    """Rows of each dataset in an epoch, which has as many as there are rows: by weight, the largest remainders rounded up."""
    total, weights = sum(part.rows for part in parts), sum(part.weight for part in parts)
    exact = [total * part.weight / weights for part in parts]
    taken = [int(share) for share in exact]
    for place in sorted(range(len(parts)), key=lambda place: taken[place] - exact[place])[: total - sum(taken)]:
        taken[place] += 1
    return taken


def mixed_order(seed: int, epoch: int, parts: Sequence[MixedDataset]) -> npt.NDArray[np.int64]:
    """The rows of an epoch, shuffled. A dataset goes on where it was in the epoch before: each of its rows is taken once before
    one is taken again."""
    chosen, start = [], 0
    for number, (part, taken) in enumerate(zip(parts, rows_of_epoch(parts), strict=True)):
        (first, since), (last, until) = (divmod(at * taken, part.rows) for at in (epoch, epoch + 1))
        begun, ended = (_drawn([seed, one, 2, number], part.rows) for one in (first, last))
        whole = np.tile(np.arange(part.rows), max(0, last - first - 1))  # its order is that of the shuffle below
        own = [begun[since:until]] if first == last else [begun[since:], whole, ended[:until]]
        chosen.append(start + np.concatenate(own))
        start += part.rows
    together = np.concatenate(chosen)
    return together[_drawn([seed, epoch, 3], len(together))]


def _drawn(of: list[int], count: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64(of)).permutation(count)


def describe_mixture(parts: Sequence[MixedDataset]) -> str:
    """Share and passes of each dataset in an epoch."""
    taken = rows_of_epoch(parts)
    shares = [
        f"{part.key} {count / sum(taken):.1%} ({part.rows:,} rows, {count / part.rows:.2f} passes)"
        for part, count in zip(parts, taken, strict=True)
    ]
    return f"an epoch is {', '.join(shares)}"
