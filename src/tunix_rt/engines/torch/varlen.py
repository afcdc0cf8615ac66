"""Document boundaries of packed rows, computed on the host and copied without a synchronization: `cu_seqlens` for varlen
attention, block masks for FlexAttention."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens of a block of the FlexAttention mask, along queries and along keys."""

LEAST_LENGTH = 128


def cumulative_lengths(positions: npt.NDArray[np.int64], device: torch.device) -> tuple[torch.Tensor, int]:
    """`cu_seqlens` of the examples of all rows, and a bound on their lengths."""
    begins = np.flatnonzero(_begins(positions))
    ends = np.append(begins[1:], positions.size)
    cumulative = on_device(device, np.append(begins, positions.size).astype(np.int32))
    # The number of examples is dynamic: another one must not recompile.
    torch._dynamo.maybe_mark_dynamic(cumulative, 0)
    # The kernel needs a bound. A power of two, at least 128: few values to compile for, and never 1, for which the kernel
    # takes another path.
    longest = max(LEAST_LENGTH, 1 << int((ends - begins).max() - 1).bit_length())
    return cumulative, longest


def with_another_bound(boundaries: dict[str, Any]) -> list[dict[str, Any]]:
    """`boundaries`, and if they have a bound on example lengths, the same with twice the bound: equal results, slower."""
    longest = boundaries.get("max_length_q")
    return [boundaries] if longest is None else [boundaries, boundaries | {"max_length_q": 2 * longest}]


def _begins(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """True where a row or an example begins: where a position is not the previous one plus 1."""
    begins = np.ones(positions.shape, dtype=np.bool_)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def on_device(device: torch.device, values: npt.NDArray[Any]) -> torch.Tensor:
    """`values` on the device, from pinned memory: other copies synchronize."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PackedRows:
    """The block masks of a micro-batch, one for each window, shared by the layers."""

    def __init__(self, positions: npt.NDArray[np.int64], device: torch.device) -> None:
        self._device = device
        self._places = np.arange(positions.shape[1])
        # [rows, tokens]: the index in the row of the first token of the same example
        self._firsts = np.maximum.accumulate(np.where(_begins(positions), self._places, 0), axis=1)
        self.made: dict[int | None, BlockMask] = {}

    def block_mask(self, window: int | None) -> BlockMask:
        return self.made[window] if window in self.made else self._make(window)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _make(self, window: int | None) -> BlockMask:
        seen = self._firsts if window is None else np.maximum(self._firsts, self._places - (window - 1))
        self.made[window] = _block_mask(seen, self._device)
        return self.made[window]


def _block_mask(firsts: npt.NDArray[np.int64], device: torch.device) -> BlockMask:
    """A mask by which token t of a row attends to `firsts[row, t]` up to itself. `firsts` does not decrease along a row.

    Partial and full blocks are computed here: PyTorch would materialize rows x tokens x tokens.
    """
    tokens = firsts.shape[1]
    lows = np.arange(0, tokens, BLOCK)
    highs = np.minimum(lows + BLOCK, tokens) - 1
    touched = (lows[None, None, :] <= highs[None, :, None]) & (highs[None, None, :] >= firsts[:, lows, None])
    whole = (highs[None, None, :] <= lows[None, :, None]) & (lows[None, None, :] >= firsts[:, highs, None])
    whole &= (lows + BLOCK <= tokens)[None, :, None]  # the last block may be shorter
    part = touched & ~whole
    starts = on_device(device, firsts.astype(np.int32))

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key >= starts[row, query])

    (parts, part_indices), (wholes, whole_indices) = (_in_order(blocks, device) for blocks in (part, whole))
    (parts_q, part_indices_q), (wholes_q, whole_indices_q) = (
        _in_order(blocks.swapaxes(1, 2), device) for blocks in (part, whole)
    )
    return BlockMask(
        seq_lengths=(tokens, tokens), kv_num_blocks=parts, kv_indices=part_indices, full_kv_num_blocks=wholes,
        full_kv_indices=whole_indices, q_num_blocks=parts_q, q_indices=part_indices_q, full_q_num_blocks=wholes_q,
        full_q_indices=whole_indices_q, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees,
    )  # fmt: skip


def _in_order(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks set in each line, and their indices first; for one head, which all heads share."""
    counts = blocks.sum(axis=2, dtype=np.int32)[:, None]
    indices = np.argsort(~blocks, axis=2, kind="stable").astype(np.int32)[:, None]
    # Compiled kernels find the row by the stride of the head, which numpy leaves at 0 for a single head.
    return tuple(on_device(device, part.ravel()).view(part.shape) for part in (counts, indices))
