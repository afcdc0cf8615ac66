"""Texts as normalized words: n-gram hashes and MinHash sketches that ignore case, spaces and punctuation."""

import re
import unicodedata
import zlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

OVERLAP_WORDS = 13
"""The usual n-gram length for contamination since GPT-3; shorter ones match common phrases."""
SHORT_WORDS = 5
"""A question of at least so many words, but fewer than 13, is matched as a whole."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

# Punctuation that distinguishes questions: placeholders keep it while other marks are removed.
_POINT, _FACTORIAL, _SHARP = "\ue000", "\ue001", "\ue002"
_KEPT = (
    (",", re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),  # 1,600 is 1600; 1,2,3 stays
    (".", re.compile(r"(?<=\d)\.(?=\d)"), _POINT),  # 3.5 is one number
    ("!", re.compile(r"(?<=[\d)])!"), _FACTORIAL),  # 5! is not 5
    ("#", re.compile(r"(?<=\w)#"), _SHARP),  # C# is not C
    ("-", re.compile(r"(?<![^\W\d_]{2})-|-(?![^\W\d_]{2})"), "−"),  # a - b and -5, but not twenty-five
)
_WRITTEN_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF), (0x20000, 0x3FFFF),
)  # fmt: skip


class _Table(dict[int, str]):
    """Character -> its replacement: letters, their marks and digits stay, symbols become words, the rest a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)
        if any(low <= code <= high for low, high in _WRITTEN_WITHOUT_SPACES) and kind[0] in "LMN":
            kept = f" {character} "  # Chinese, Japanese, Thai: every character counts as a word
        elif kind[0] in "LMN" or character == _POINT:
            kept = character
        elif kind[0] == "S" or character in "%*/&@\\·‰":
            kept = f" {character} "
        else:
            kept = {"'": "", "’": "", _FACTORIAL: " ! ", _SHARP: " # "}.get(character, " ")
        self[code] = kept
        return kept


_TABLE = _Table()


def words(text: str) -> list[str]:
    """Words, numbers and symbols, with case and compatibility forms folded, without punctuation and spaces."""
    plain = text.casefold() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    for mark, pattern, instead in _KEPT:
        if mark in plain:
            plain = pattern.sub(instead, plain)
    return plain.translate(_TABLE).replace(_POINT, ".").split()


def fold(text: str) -> str:
    """The normal form in which texts are compared; a text without words is compared by its characters."""
    return " ".join(words(text)) or " ".join(text.split())


def runs_of(listed: list[str], length: int) -> Hashes:
    """A 64-bit hash of every n-gram of `length` words, in order. The same on every machine and in every process."""
    count = len(listed) - length + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    each = np.fromiter(map(_number, listed), dtype=np.uint64, count=len(listed))
    mixed = np.zeros(count, dtype=np.uint64)
    for place in range(length):
        mixed = mixed * _FACTOR + each[place : place + count] + np.uint64(1)
    return mixed ^ (mixed >> np.uint64(29))


@lru_cache(maxsize=1 << 16)
def _number(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass"))


RUN_WORDS = 5
"""Similarity of two texts is the Jaccard index of their 5-grams."""
THRESHOLD = 0.8
CAPACITY = 1 << 18
"""Sketches in memory (34 MB). Of more texts a sample is compared, in which near-duplicates stay together."""

_HASHES = 32
_BANDS = 8
_DRAW = np.random.Generator(np.random.PCG64(20))
_ODD = _DRAW.integers(0, 2**63, _HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SHIFT = _DRAW.integers(0, 2**63, _HASHES, dtype=np.uint64)

Sketch = npt.NDArray[np.uint32]


def sketch(text: str) -> Sketch:
    """MinHash of 32 numbers; the fraction that two sketches share estimates the Jaccard index (within about 0.07)."""
    listed = words(text)
    runs = runs_of(listed, max(1, min(RUN_WORDS, len(listed))))
    if not len(runs):
        return np.full(_HASHES, np.iinfo(np.uint32).max, dtype=np.uint32)
    hashed = runs[None, :] * _ODD[:, None] + _SHIFT[:, None]
    return np.asarray((hashed >> np.uint64(32)).min(axis=1), dtype=np.uint32)


@dataclass(slots=True, kw_only=True)
class Sketches:
    """Sketches of a stream of texts: the CAPACITY of them whose first number is lowest."""

    _limit: int = np.iinfo(np.uint32).max
    _parts: list[tuple[npt.NDArray[np.int64], Sketch]] = field(default_factory=list)
    compared: int = 0
    seen: int = 0

    def add(self, numbers: npt.NDArray[np.int64], sketches: Sketch) -> None:
        """`numbers` are the texts that the rows of `sketches` belong to."""
        self.seen += len(numbers)
        self._keep(numbers, sketches)
        while self.compared > CAPACITY:
            self._limit //= 2
            parts, self._parts, self.compared = self._parts, [], 0
            for part in parts:
                self._keep(*part)

    def _keep(self, numbers: npt.NDArray[np.int64], sketches: Sketch) -> None:
        chosen = sketches[:, 0] <= self._limit
        if chosen.any():
            self._parts.append((numbers[chosen], sketches[chosen]))
            self.compared += int(chosen.sum())

    @property
    def sampled(self) -> bool:
        return self.compared < self.seen

    def near_duplicates(self) -> dict[int, int]:
        """Text -> an earlier similar text (estimated at or above THRESHOLD)."""
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
