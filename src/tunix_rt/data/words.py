"""Texts as sequences of words, for comparing them: the same question is the same in capitals, with other spaces or commas."""

import re
import unicodedata
import zlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)

# What would be lost as punctuation, and makes another question: each stands in for itself until the marks are gone.
_POINT, _FACTORIAL, _SHARP = "\ue000", "\ue001", "\ue002"
_KEPT = (
    (",", re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),  # 1,600 is 1600; of 1,2,3 nothing is taken
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
    """What becomes of a character: letters, their marks and digits stay, signs become words, the rest a space."""

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
    """Words, numbers and signs, with case and compatibility forms folded; punctuation and spaces are gone."""
    plain = text.casefold() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
    for mark, pattern, instead in _KEPT:
        if mark in plain:
            plain = pattern.sub(instead, plain)
    return plain.translate(_TABLE).replace(_POINT, ".").split()


def fold(text: str) -> str:
    """`text` as it is compared with others; a text without any word is compared by its characters."""
    return " ".join(words(text)) or " ".join(text.split())


def runs_of(listed: list[str], length: int) -> Hashes:
    """A 64-bit hash for every run of `length` words, in order. The same on every computer and in every process."""
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
