"""Checkpoints and final models of the PyTorch engine. A checkpoint has the trained parameters in `model.safetensors`, optimizer
state and the float16 loss scale in `optimizer.safetensors`; random numbers are a function of (seed, step).

Of several ranks each writes two files of its own, with the rows that it has (`model-00001-of-00008.safetensors`). Any number of
ranks reads either. Through a snapshot in host memory or directly from the device, a checkpoint has the same bytes.
"""

import contextlib
import copy
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from tunix_rt.engines import checkpoint
from tunix_rt.engines.checkpoint import BLOCK_BYTES, MODEL, OPTIMIZER, refuse_other_tensors, staged_model, unreadable
from tunix_rt.engines.failures import out_of_range
from tunix_rt.engines.torch.adapters import merged_weights, merging, without_adapters
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.model_files import Whole, layer_tensors, write_weights
from tunix_rt.engines.torch.optim import Optimizer
from tunix_rt.engines.torch.sharding import Sharding, local_part
from tunix_rt.engines.torch.tensor_files import (
    DTYPES,
    Tensors,
    blocks,
    header,
    pieces_of,
    read_rows,
    widest_first,
    write_file,
)
from tunix_rt.models.multimodal import restore_towers
from tunix_rt.models.safetensors import part_files, part_name, stored_tensors
from tunix_rt.models.secrets import one_line
from tunix_rt.ranks import Part
from tunix_rt.storage import WrittenFile, storage

_idle_blocks: list[torch.Tensor] = []
"""Pinned blocks that no snapshot uses. Pinning is slow, so they are reused."""


# --- what a checkpoint has -------------------------------------------------------------------------------------------


def _live(engine: Engine, optimizer: Optimizer) -> dict[str, Tensors]:
    """The tensors of each file as this rank has them."""
    scale = engine.loss_scale.tensors() if engine.loss_scale is not None else {}
    return {MODEL: engine.weights, OPTIMIZER: {**optimizer.tensors(), **scale}}


def _parts(engine: Engine, optimizer: Optimizer) -> dict[str, Part]:
    """Of each tensor, the rows that this rank has."""
    scale = engine.loss_scale.tensors() if engine.loss_scale is not None else {}
    weights = {name: optimizer.part_of(one) for name, one in engine.weights.items()}
    return weights | optimizer.parts() | {name: Part.whole(tuple(one.shape)) for name, one in scale.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file that this process writes."""

    tensors: Tensors
    header: bytes

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors.values())


def _files(engine: Engine, optimizer: Optimizer) -> dict[str, _File]:
    """The files of this process by name, with live tensors; none in a replica but the first."""
    live = _live(engine, optimizer)
    if (sharding := engine.sharding) is None:
        ordered = {name: widest_first(tensors) for name, tensors in live.items()}
        return {name: _File(tensors=tensors, header=header(tensors)) for name, tensors in ordered.items()}
    if sharding.world.rank >= sharding.shards:
        return {}
    parts, shard = _parts(engine, optimizer), sharding.shard
    return {
        part_name(name, shard + 1, sharding.shards): _rank_file(tensors, parts, first=shard == 0)
        for name, tensors in live.items()
    }


def _rank_file(tensors: Tensors, parts: Mapping[str, Part], *, first: bool) -> _File:
    """The file of a rank: its rows, and of the `first` rank also what every rank has. The metadata is what the
    HuggingFaceStorageReader of torch.distributed.checkpoint expects."""
    own = widest_first({
        name: tensor for name, tensor in tensors.items() if (first if parts[name].everywhere else parts[name].rows)
    })  # fmt: skip
    offsets = {
        name: {"saved_offsets": [parts[name].first, *[0] * (tensor.dim() - 1)][: tensor.dim()]}
        for name, tensor in own.items()
    }
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets, sort_keys=True), "DCP_VERSION": "1.0", "format": "pt"}
    return _File(tensors=own, header=header(own, metadata))


# --- through host memory ---------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Copies:
    """Copies of tensors, contiguous in blocks of host memory."""

    pinned: bool
    blocks: list[torch.Tensor] = field(default_factory=list)
    left: int = 0
    """Bytes at the end of the last block that are free."""

    def add(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for piece in pieces_of(tensor, self._room()):
            start = BLOCK_BYTES - self.left
            place = self.blocks[-1][start : start + piece.numel()]
            place.copy_(piece, non_blocking=True)
            self.left -= piece.numel()
            yield place

    def _room(self) -> Iterator[int]:
        while True:
            if not self.left:
                self.blocks.append(self._block())
                self.left = BLOCK_BYTES
            yield self.left

    def _block(self) -> torch.Tensor:
        if not self.pinned:
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        if _idle_blocks:
            return _idle_blocks.pop()
        try:
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the system limits pinned memory; the copy is slower then, and as exact
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def release(self) -> None:
        _idle_blocks.extend(block for block in self.blocks if self.pinned and block.is_pinned())
        self.blocks.clear()


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A copy of weights and optimizer state in host memory. Written once."""

    files: dict[str, tuple[bytes, list[torch.Tensor]]]
    """Header and content of each file."""
    copies: _Copies
    copied: torch.cuda.Event | None
    """Recorded at the end of the asynchronous copies; None where they were synchronous."""
    bytes: int
    sync: bool
    """Whether the files are made durable here: each rank does it on its host."""

    def write(self, folder: Path) -> dict[str, WrittenFile]:
        """Write the files into `folder` and release the host memory. May be called from another thread."""
        try:
            if self.copied is not None:
                self.copied.synchronize()
            files = self.files.items()
            return {name: write_file(folder / name, head, pieces, sync=self.sync) for name, (head, pieces) in files}
        finally:
            self.files = {}
            self.copies.release()


def snapshot(engine: Engine, optimizer: Optimizer) -> Snapshot:
    """A snapshot of weights and optimizer state.

    On a GPU the copies are asynchronous: `await_copy` must precede the next update.
    """
    files, sync = _files(engine, optimizer), engine.sharding is not None
    if engine.device.type != "cuda":
        return _copy(files, _Copies(pinned=False), None, sync=sync)
    await_copy(engine)
    aside = torch.cuda.Stream(engine.device)
    aside.wait_stream(torch.cuda.current_stream(engine.device))
    copied = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
    with torch.cuda.stream(aside):
        taken = _copy(files, _Copies(pinned=True), copied, sync=sync)
        copied.record(aside)
    for tensor in (tensor for file in files.values() for tensor in file.tensors.values() if tensor.is_cuda):
        tensor.record_stream(aside)  # a temporary tensor must outlive its copy
    engine.pending_copy = copied
    return taken


def _copy(files: dict[str, _File], copies: _Copies, copied: torch.cuda.Event | None, *, sync: bool) -> Snapshot:
    made = {
        name: (file.header, [place for tensor in file.tensors.values() for place in copies.add(tensor)])
        for name, file in files.items()
    }
    size = sum(file.bytes for file in files.values())
    return Snapshot(bytes=size, files=made, copies=copies, copied=copied, sync=sync)


def await_copy(engine: Engine) -> None:
    """Order the next kernels after the copies of the last snapshot. The host does not wait."""
    if engine.pending_copy is not None:
        torch.cuda.current_stream(engine.device).wait_event(engine.pending_copy)
        engine.pending_copy = None


def begin_update(engine: Engine) -> None:
    """The weights change next: a stop can no longer save those of the last step, and a checkpoint may still be reading them."""
    engine.before_update()
    await_copy(engine)


def snapshot_bytes(engine: Engine, optimizer: Optimizer) -> int:
    """Size of a checkpoint, that of all ranks together, which is the host memory that a snapshot takes."""
    if engine.sharding is None:
        return sum(file.bytes for file in _files(engine, optimizer).values())
    parts, live = _parts(engine, optimizer), _live(engine, optimizer)
    return sum(
        math.prod(parts[name].shape) * tensor.element_size()
        for tensors in live.values()
        for name, tensor in tensors.items()
    )


def host_has_room(needed_bytes: int) -> bool:
    """Whether the host has memory for a snapshot; idle pinned blocks are reused."""
    return checkpoint.host_has_room(needed_bytes - len(_idle_blocks) * BLOCK_BYTES)


# --- directly to the disk, and back -----------------------------------------------------------------------------------


def write_direct(engine: Engine, optimizer: Optimizer, folder: Path) -> dict[str, WrittenFile]:
    """Write the files into `folder`, one block at a time through the host. The state must not change meanwhile."""

    def pieces(tensors: Tensors) -> Iterator[torch.Tensor]:
        return (piece.cpu() for tensor in tensors.values() for piece in pieces_of(tensor, blocks()))

    files = _files(engine, optimizer)
    sync = engine.sharding is not None
    return {
        name: write_file(folder / name, file.header, pieces(file.tensors), sync=sync) for name, file in files.items()
    }


def restore_state(engine: Engine, optimizer: Optimizer, folder: Path, *, step: int) -> None:
    """Restore a verified checkpoint, bit for bit; of several ranks each reads its rows, whatever number of them wrote it."""
    parts = _parts(engine, optimizer)
    _fill(folder, MODEL, engine.weights, parts)
    scale = engine.loss_scale.tensors() if engine.loss_scale is not None else {}
    optimizer.refill(lambda states: _fill(folder, OPTIMIZER, {**states, **scale}, parts), step=step)
    if engine.loss_scale is not None:
        engine.loss_scale.restore(scale)


def _fill(folder: Path, name: str, tensors: Tensors, parts: Mapping[str, Part]) -> None:
    """Fill `tensors` with their rows in the file `name`, or in the files that it is split into."""
    path = folder / name
    try:
        stored = stored_tensors(part_files(folder, name) or [path])
        refuse_other_tensors(
            path,
            {name: f"{list(one.shape)} {_plain(DTYPES.get(one.dtype, one.dtype))}" for name, one in stored.items()},
            {name: f"{list(parts[name].shape)} {_plain(one.dtype)}" for name, one in tensors.items()},
        )
        for one, tensor in tensors.items():
            read_rows(stored[one], tensor, first=parts[one].first)
    except (ValueError, OSError, MemoryError) as error:
        raise unreadable(path, error) from error


def _plain(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


# --- the final model -------------------------------------------------------------------------------------------------


def round_weights(engine: Engine, dtype: str) -> None:
    """Round every weight to `dtype`, in which `save` then writes it.

    In memory it keeps its dtype: the engine computes what the saved model computes once it is loaded in that dtype."""
    for name, tensor in engine.model.state_dict().items():
        weight = local_part(tensor)
        if weight.is_floating_point():
            rounded = weight.to(getattr(torch, dtype))
            if not rounded.isfinite().all():
                raise out_of_range(name, dtype)
            weight.copy_(rounded)
    engine.saved_dtype = dtype


def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` as a whole.

    Adapters are merged into their weights. Generation ends at `stop_ids`. `chat_template` replaces that of the tokenizer.
    """
    if (sharding := engine.sharding) is not None and not sharding.world.is_lead:
        deque(layer_tensors(engine.model, _gather(engine, sharding)))
        return
    settings = copy.deepcopy(engine.model.generation_config)
    settings.eos_token_id = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    with (
        staged_model(folder, tokenizer_folder=tokenizer_folder, chat_template=chat_template) as staged,
        _disk_errors(folder),
    ):
        if sharding is None:
            engine.model.save_pretrained(staged, state_dict=saved_weights(engine))
        else:
            engine.model.save_pretrained(staged, state_dict={})  # its configuration
            write_weights(staged, engine.model, _gather(engine, sharding), dtype=_saved_dtype(engine))
        if (dtype := _saved_name(engine)) is not None:  # transformers casts to the dtype of config.json
            config = json.loads((staged / "config.json").read_text(encoding="utf-8"))
            (staged / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2), encoding="utf-8")
        settings.save_pretrained(staged)
        if engine.source.multimodal:
            restore_towers(staged, engine.source.folder)


def saved_weights(engine: Engine) -> dict[str, torch.Tensor] | None:
    """Weights as `save` writes them, on the host, where they differ from those in memory: with merged adapters, or in another
    dtype. Tied tensors stay tied. None where they do not differ."""
    if engine.recipe.frozen is not None:
        return merged_weights(engine.model)
    if (kind := _saved_dtype(engine)) is None:
        return None
    cast = dict[tuple[int, torch.Size], torch.Tensor]()
    named = {}
    for name, tensor in engine.model.state_dict().items():
        place = tensor.data_ptr(), tensor.shape
        if place not in cast:
            cast[place] = tensor.to("cpu", kind if tensor.is_floating_point() else None)
        named[name] = cast[place]
    return named


def _saved_name(engine: Engine) -> str | None:
    """The dtype of the saved weights: float32 where adapters are merged, None for that in memory."""
    return "float32" if engine.recipe.frozen is not None else engine.saved_dtype


def _saved_dtype(engine: Engine) -> torch.dtype | None:
    return None if (name := _saved_name(engine)) is None else getattr(torch, name)


def _gather(engine: Engine, sharding: Sharding) -> Whole:
    tensors = engine.model.state_dict(keep_vars=True)

    def whole(name: str) -> torch.Tensor | None:
        return sharding.gathered(local_part(tensors[name]), sharding.part_of(tensors[name]))

    return whole if engine.recipe.frozen is None else merging(engine.model, whole)


def whole_weights(engine: Engine, sharding: Sharding) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor as `save` writes it, one at a time in the host memory of rank 0; nothing elsewhere. Every rank walks it."""
    whole = _gather(engine, sharding)
    for name in without_adapters(engine.model.state_dict().items()):
        if (tensor := whole(name)) is not None:
            yield name, tensor.to(_saved_dtype(engine) if tensor.is_floating_point() else None)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """safetensors raises disk errors (full, read-only) as SafetensorError, which is no OSError."""
    with storage(folder):
        try:
            yield
        except SafetensorError as error:
            raise OSError(None, one_line(error), str(folder)) from error
