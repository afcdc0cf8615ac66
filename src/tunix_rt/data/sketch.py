"""Near-duplicates by MinHash, in bounded memory: a sketch of 32 numbers per text, compared only within shared bands."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tunix_rt.data.words import runs_of, words

RUN_WORDS = 5
"""Two texts are as alike as the runs of five words they share, of all that either has (the Jaccard index)."""
THRESHOLD = 0.8
CAPACITY = 1 << 18
"""Sketches kept (34 MB). Of more texts a sample is compared; near-duplicates tend to be in the sample together."""

_HASHES = 32
_BANDS = 8
_DRAW = np.random.Generator(np.random.PCG64(20))
_ODD = _DRAW.integers(0, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SHIFT = _DRAW.integers(0, 2**63, _HASHES, dtype=np.uint64)

Sketch = npt.NDArray[np.uint32]


def sketch(text: str) -> Sketch:
    """32 numbers; the share that two sketches agree on estimates how alike their texts are (within about 0.07)."""
    listed = words(text)
    runs = runs_of(listed, max(1, min(RUN_WORDS, len(listed))))
    if not len(runs):
        return np.full(_HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
    spread = runs[None, :] * _ODD[:, None] + _SHIFT[:, None]
    return np.asarray((spread >> np.uint64(32)).min(axis=1), dtype=np.uint32)


@dataclass(slots=True, kw_only=True)
class Sketches:
    """Sketches of a stream of texts, at most CAPACITY of them: those whose first number is lowest."""

    _limit: int = np.iinfo(np.uint32).max
    _parts: list[tuple[npt.NDArray[np.int64], Sketch]] = field(default_factory=list)
    _kept: int = 0
    seen: int = 0

    def add(self, numbers: npt.NDArray[np.int64], sketches: Sketch) -> None:
        """`numbers` says which texts the rows of `sketches` belong to."""
        self.seen += len(numbers)
        self._keep(numbers, sketches)
        while self._kept > CAPACITY:
            self._limit //= 2
            parts, self._parts, self._kept = self._parts, [], 0
            for part in parts:
                self._keep(*part)

    def _keep(self, numbers: npt.NDArray[np.int64], sketches: Sketch) -> None:
        chosen = sketches[:, 0] <= self._limit
        if chosen.any():
            self._parts.append((numbers[chosen], sketches[chosen]))
            self._kept += int(chosen.sum())

    @property
    def sampled(self) -> bool:
        return self._kept < self.seen

    @property
    def compared(self) -> int:
        return self._kept

    def near_duplicates(self) -> dict[int, int]:
        """Text -> an earlier text that it is like (at or above THRESHOLD, by estimate)."""
        if not self._parts:
            return {}
        numbers = np.concatenate([part[0] for part in self._parts])
        sketches = np.concatenate([part[1] for part in self._parts])
        found: dict[int, int] = {}
        width = _HASHES // _BANDS
        for band in range(_BANDS):
            columns = sketches[:, band * width : (band + 1) * width].astype(np.uint64)
            key = columns[:, 0]
            for column in columns.T[1:]:
                key = key * np.uint64(0x100000001B3) ^ column
            order = np.lexsort((numbers, key))
            begins = np.concatenate([[True], key[order][1:] != key[order][:-1]])
            first = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
            others = np.flatnonzero(~begins)
            alike = (sketches[order[others]] == sketches[first[others]]).mean(axis=1) >= THRESHOLD
            for later, earlier in zip(order[others[alike]], first[others[alike]], strict=True):
                found.setdefault(int(numbers[later]), int(numbers[earlier]))
        return found
