"""One hash over many rows, in their order, from which any one row can be proven (the tree of RFC 6962)."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy.typing as npt


def merkle_root(leaves: Iterable[bytes]) -> str:
    """Root over `leaves` as hex. Memory is the height of the tree; leaves and nodes are hashed apart."""
    whole: list[tuple[int, bytes]] = []  # (leaves below, hash) of the complete subtrees so far, largest first
    for leaf in leaves:
        size, node = 1, hashlib.sha256(b"\x00" + leaf).digest()
        while whole and whole[-1][0] == size:
            _, left = whole.pop()
            size, node = 2 * size, _above(left, node)
        whole.append((size, node))
    if not whole:
        return hashlib.sha256(b"").hexdigest()
    _, root = whole.pop()
    while whole:
        root = _above(whole.pop()[1], root)
    return root.hex()


def _above(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def row_leaf(ids: npt.NDArray[Any], trained: npt.NDArray[Any], positions: npt.NDArray[Any]) -> bytes:
    """Identity of a row or of one example: its tokens, what is trained, where examples begin."""
    return hashlib.sha256(b"".join(part.astype("<i4").tobytes() for part in (ids, trained, positions))).digest()
