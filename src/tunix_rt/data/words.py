"""Texts as sequences of words, for comparing them: the same question is the same in capitals, with other spaces or commas."""

import re
import unicodedata
import zlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

# A number with its point and commas, a run of letters, or a sign: 3 + 4 is another question than 3 - 4. The hyphen of
# `twenty-five` is no sign.
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[+*/^=<>%×÷√−]|-(?=\s?\d)")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """Words, numbers and signs, with case and compatibility forms folded; other marks and spaces are gone."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    found = _WORD.findall(plain.casefold())
    return [word.replace(",", "") for word in found] if "," in plain else found


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
