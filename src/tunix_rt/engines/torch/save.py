"""Checkpoints and final models of the PyTorch engine. A checkpoint has the trained parameters in `model.safetensors`, optimizer
state and the float16 loss scale in `optimizer.safetensors`; random numbers are a function of (seed, step).

Through a snapshot in host memory or directly from the device, a checkpoint has the same bytes. The `safetensors` library is not
used to write it: it copies all tensors of a file to the host first.
"""

import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tunix_rt.engines import checkpoint
from tunix_rt.engines.checkpoint import BLOCK_BYTES, MODEL, OPTIMIZER, refuse_other_tensors, staged_model, unreadable
from tunix_rt.engines.failures import out_of_range
from tunix_rt.engines.torch.adapters import merged_weights
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.optim import Optimizer, described
from tunix_rt.engines.torch.sharding import Sharding, local_part
from tunix_rt.models.multimodal import restore_towers
from tunix_rt.models.safetensors import header_of
from tunix_rt.models.secrets import one_line
from tunix_rt.ranks import Part
from tunix_rt.storage import storage

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_idle_blocks: list[torch.Tensor] = []
"""Pinned blocks that no snapshot uses. Pinning is slow, so they are reused."""

Tensors = Mapping[str, torch.Tensor]


def _files(engine: Engine, optimizer: Optimizer) -> dict[str, Tensors]:
    """The live tensors of each file, the widest dtypes first, so that each is aligned to its width. Above one rank they are
    gathered by rank 0, and the others have no file."""
    live = _live(engine, optimizer)
    if (sharding := engine.sharding) is None:
        return live
    parts = _parts(engine, optimizer)
    gathered = {
        file: {name: sharding.gathered(one, parts[file][name]) for name, one in tensors.items()}
        for file, tensors in live.items()
    }
    if not sharding.world.is_lead:
        return {}
    return {file: {name: one for name, one in tensors.items() if one is not None} for file, tensors in gathered.items()}


def _live(engine: Engine, optimizer: Optimizer) -> dict[str, Tensors]:
    """The tensors of each file as this rank has them."""
    state = {**optimizer.tensors(), **(engine.loss_scale.tensors() if engine.loss_scale is not None else {})}
    return {
        file: dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
        for file, tensors in ((MODEL, engine.weights), (OPTIMIZER, state))
    }


def _parts(engine: Engine, optimizer: Optimizer) -> dict[str, dict[str, Part]]:
    """Of each tensor of each file, the rows that this rank has."""
    scale = engine.loss_scale.tensors() if engine.loss_scale is not None else {}
    return {
        MODEL: {name: optimizer.part_of(one) for name, one in engine.weights.items()},
        OPTIMIZER: optimizer.parts() | {name: Part.whole(tuple(one.shape)) for name, one in scale.items()},
    }


def _header(tensors: Tensors) -> bytes:
    """The header of a safetensors file with `tensors` in this order."""
    return header_of((name, _NAMES[one.dtype], one.shape, one.nbytes) for name, one in tensors.items())[0]


def _pieces(tensor: torch.Tensor, lengths: Iterator[int]) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in pieces of at most the lengths that `lengths` yields."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    begin = 0
    while begin < flat.numel():
        end = min(flat.numel(), begin + next(lengths))
        yield flat[begin:end]
        begin = end


def _write(path: Path, header: bytes, pieces: Iterable[torch.Tensor]) -> None:
    with storage(path), path.open("wb") as file:
        file.write(header)
        for piece in pieces:
            file.write(piece.numpy())


# --- through host memory ---------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Copies:
    """Copies of tensors, contiguous in blocks of host memory."""

    pinned: bool
    blocks: list[torch.Tensor] = field(default_factory=list)
    left: int = 0
    """Bytes at the end of the last block that are free."""

    def add(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for piece in _pieces(tensor, self._room()):
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

    def write(self, folder: Path) -> None:
        """Write both files into `folder` and release the host memory. May be called from another thread."""
        try:
            if self.copied is not None:
                self.copied.synchronize()
            for name, (header, pieces) in self.files.items():
                _write(folder / name, header, pieces)
        finally:
            self.files = {}
            self.copies.release()


def snapshot(engine: Engine, optimizer: Optimizer) -> Snapshot:
    """A snapshot of weights and optimizer state.

    On a GPU the copies are asynchronous: `await_copy` must precede the next update.
    """
    files = _files(engine, optimizer)
    if engine.device.type != "cuda" or engine.sharding is not None:
        return _copy(files, _Copies(pinned=False), None)
    await_copy(engine)
    aside = torch.cuda.Stream(engine.device)
    aside.wait_stream(torch.cuda.current_stream(engine.device))
    copied = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
    with torch.cuda.stream(aside):
        taken = _copy(files, _Copies(pinned=True), copied)
        copied.record(aside)
    for tensor in (tensor for tensors in files.values() for tensor in tensors.values() if tensor.is_cuda):
        tensor.record_stream(aside)  # a temporary tensor must outlive its copy
    engine.pending_copy = copied
    return taken


def _copy(files: dict[str, Tensors], copies: _Copies, copied: torch.cuda.Event | None) -> Snapshot:
    made = {
        name: (_header(tensors), [place for tensor in tensors.values() for place in copies.add(tensor)])
        for name, tensors in files.items()
    }
    return Snapshot(bytes=_size(files), files=made, copies=copies, copied=copied)


def await_copy(engine: Engine) -> None:
    """Order the next kernels after the copies of the last snapshot. The host does not wait."""
    if engine.pending_copy is not None:
        torch.cuda.current_stream(engine.device).wait_event(engine.pending_copy)
        engine.pending_copy = None


def begin_update(engine: Engine) -> None:
    """The weights change next: a stop can no longer save those of the last step, and a checkpoint may still be reading them."""
    engine.before_update()
    await_copy(engine)


def _size(files: dict[str, Tensors]) -> int:
    return sum(len(_header(tensors)) + sum(t.nbytes for t in tensors.values()) for tensors in files.values())


def snapshot_bytes(engine: Engine, optimizer: Optimizer) -> int:
    """Size of both files of a checkpoint, which is the host memory that a snapshot takes."""
    live = _live(engine, optimizer)
    if engine.sharding is None:
        return _size(live)
    parts = _parts(engine, optimizer)
    return _size({
        file: {name: torch.empty(parts[file][name].shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
        for file, tensors in live.items()
    })  # fmt: skip


def host_has_room(needed_bytes: int) -> bool:
    """Whether the host has memory for a snapshot; idle pinned blocks are reused."""
    return checkpoint.host_has_room(needed_bytes - len(_idle_blocks) * BLOCK_BYTES)


# --- directly to the disk, and back -----------------------------------------------------------------------------------


def write_direct(engine: Engine, optimizer: Optimizer, folder: Path) -> None:
    """Write both files into `folder`, one block at a time through the host. The state must not change meanwhile."""

    def blocks() -> Iterator[int]:
        while True:
            yield BLOCK_BYTES

    for name, tensors in _files(engine, optimizer).items():
        pieces = (piece.cpu() for tensor in tensors.values() for piece in _pieces(tensor, blocks()))
        _write(folder / name, _header(tensors), pieces)


def restore_state(engine: Engine, optimizer: Optimizer, folder: Path, *, step: int) -> None:
    """Restore a verified checkpoint, bit for bit."""
    weights, parts = engine.weights, _parts(engine, optimizer)
    stored = _rows(folder / MODEL, parts[MODEL])
    refuse_other_tensors(folder / MODEL, described(stored), described(weights))
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(stored[name])
    stored = _rows(folder / OPTIMIZER, parts[OPTIMIZER])
    if engine.loss_scale is not None:
        scale = engine.loss_scale.tensors()
        stored_scale = {name: stored.pop(name) for name in scale.keys() & stored.keys()}
        refuse_other_tensors(folder / OPTIMIZER, described(stored_scale), described(scale))
        engine.loss_scale.restore(stored_scale)
    optimizer.restore(stored, step=step)


def _rows(path: Path, parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """The tensors of `path`, memory-mapped; of those in `parts` with the same whole shape, the rows of this rank."""
    try:
        stored = load_file(path)
        return {name: _cut(one, parts.get(name)) for name, one in stored.items()}
    except (SafetensorError, OSError, RuntimeError, MemoryError) as error:
        raise unreadable(path, error) from error


def _cut(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    if part is None or part.everywhere or part.shape != tensor.shape:
        return tensor
    return tensor[part.first : part.first + part.rows]


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
    state = saved_weights(engine)
    if engine.sharding is not None and not engine.sharding.world.is_lead:
        return
    settings = copy.deepcopy(engine.model.generation_config)
    settings.eos_token_id = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    with (
        staged_model(folder, tokenizer_folder=tokenizer_folder, chat_template=chat_template) as staged,
        _disk_errors(folder),
    ):
        engine.model.save_pretrained(staged, state_dict=state)
        dtype = "float32" if engine.recipe.frozen is not None else engine.saved_dtype
        if dtype is not None:  # transformers casts to the dtype of config.json
            config = json.loads((staged / "config.json").read_text(encoding="utf-8"))
            (staged / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2), encoding="utf-8")
        settings.save_pretrained(staged)
        if engine.source.multimodal:
            restore_towers(staged, engine.source.folder)


def saved_weights(engine: Engine) -> dict[str, torch.Tensor] | None:
    """Weights as `save` writes them, on the host, where they differ from those in memory: with merged adapters, or in another
    dtype. Tied tensors stay tied. None where they do not differ."""
    if engine.sharding is not None:
        return _whole_weights(engine, engine.sharding)
    if engine.recipe.frozen is not None:
        return merged_weights(engine.model)
    if engine.saved_dtype is None:
        return None
    kind, cast = getattr(torch, engine.saved_dtype), dict[tuple[int, torch.Size], torch.Tensor]()
    named = {}
    for name, tensor in engine.model.state_dict().items():
        place = tensor.data_ptr(), tensor.shape
        if place not in cast:
            cast[place] = tensor.to("cpu", kind if tensor.is_floating_point() else None)
        named[name] = cast[place]
    return named


def _whole_weights(engine: Engine, sharding: Sharding) -> dict[str, torch.Tensor]:
    """Every tensor as `save` writes it, gathered by rank 0, one after the other; empty elsewhere."""
    kind = None if engine.saved_dtype is None else getattr(torch, engine.saved_dtype)
    known: dict[int, torch.Tensor | None] = {}
    found = {}
    for name, tensor in engine.model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            whole = sharding.gathered(local_part(tensor), sharding.part_of(tensor))
            known[id(tensor)] = whole.to(kind) if kind and whole is not None and whole.is_floating_point() else whole
        if (whole := known[id(tensor)]) is not None:
            found[name] = whole
    return found


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """safetensors raises disk errors (full, read-only) as SafetensorError, which is no OSError."""
    with storage(folder):
        try:
            yield
        except SafetensorError as error:
            raise OSError(None, one_line(error), str(folder)) from error
