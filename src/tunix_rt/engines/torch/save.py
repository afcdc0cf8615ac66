"""What a checkpoint of the PyTorch engine holds: the trained parameters in `model.safetensors`; the optimizer's tensors, and
float16's loss scale, in `optimizer.safetensors`. Random numbers need no file: they are a function of (seed, step).

Both ways to a file, through a copy in host memory and straight from the device, give the same bytes. They are written here
and not by `safetensors`, which copies all tensors of a file to the host before it writes the first.
"""

import contextlib
import copy
import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.base import out_of_range
from tunix_rt.engines.torch.model import Engine
from tunix_rt.errors import InputError, StorageError
from tunix_rt.models.secrets import one_line
from tunix_rt.storage import settle_files, storage, sync_folder

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
BLOCK_BYTES = 64 * 2**20
"""Host memory is taken in pieces of this size. A power of two, because torch rounds what it pins up to one."""
HOST_RESERVE_BYTES = 2**30
"""Host memory that a copy of the state leaves to everything else."""

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_idle_blocks: list[torch.Tensor] = []
"""Pinned blocks that no snapshot holds. Pinning is slow, so they are kept for the next one."""

Tensors = Mapping[str, torch.Tensor]


def _files(engine: Any, optimizer: Any) -> dict[str, Tensors]:
    """The live tensors of each file, the widest types first, so that each lies at a multiple of its width."""
    weights = {name: parameter for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    kept = {**optimizer.tensors(), **(engine.loss_scale.tensors() if engine.loss_scale is not None else {})}
    return {
        file: dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
        for file, tensors in ((MODEL, weights), (OPTIMIZER, kept))
    }


def _header(tensors: Tensors) -> bytes:
    """The beginning of a safetensors file: its length in 8 bytes, then names, types, shapes and places as JSON."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _pieces(tensor: torch.Tensor, lengths: Iterator[int]) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in pieces of at most the lengths that `lengths` gives."""
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
    """Copies of tensors, one behind the other in blocks of host memory."""

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
        except RuntimeError:  # the system limits what may be pinned; the copy is slower then, and as exact
            return torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def release(self) -> None:
        _idle_blocks.extend(block for block in self.blocks if self.pinned and block.is_pinned())
        self.blocks.clear()


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The state of one moment in host memory, whatever is trained afterwards. To be written once."""

    files: dict[str, tuple[bytes, list[torch.Tensor]]]
    """Header and content of each file."""
    copies: _Copies
    copied: torch.cuda.Event | None
    """Reached once the device has made the copies; None where they were made at once."""
    bytes: int

    def write(self, folder: Path) -> None:
        """Both files into `folder`. May be called from another thread; the host memory is free for others afterwards."""
        try:
            if self.copied is not None:
                self.copied.synchronize()
            for name, (header, pieces) in self.files.items():
                _write(folder / name, header, pieces)
        finally:
            self.files = {}
            self.copies.release()


def snapshot(engine: Any, optimizer: Any) -> Snapshot:
    """Host copies of everything that must be kept.

    On a GPU it returns before they are made: the next update must be preceded by `await_copy`.
    """
    files = _files(engine, optimizer)
    if engine.device.type != "cuda":
        return _copy(files, _Copies(pinned=False), None)
    await_copy(engine)
    aside = torch.cuda.Stream(engine.device)
    aside.wait_stream(torch.cuda.current_stream(engine.device))
    copied = torch.cuda.Event(blocking=True)  # who waits for it sleeps
    with torch.cuda.stream(aside):
        taken = _copy(files, _Copies(pinned=True), copied)
        copied.record(aside)
    for tensor in (tensor for tensors in files.values() for tensor in tensors.values() if tensor.is_cuda):
        tensor.record_stream(aside)  # one made for us alone must outlive its copy
    engine.pending_copy = copied
    return taken


def _copy(files: dict[str, Tensors], copies: _Copies, copied: torch.cuda.Event | None) -> Snapshot:
    made = {
        name: (_header(tensors), [place for tensor in tensors.values() for place in copies.add(tensor)])
        for name, tensors in files.items()
    }
    return Snapshot(bytes=_size(files), files=made, copies=copies, copied=copied)


def await_copy(engine: Any) -> None:
    """Let the device finish the copies of the last snapshot before what it is told next. The host goes on."""
    if engine.pending_copy is not None:
        torch.cuda.current_stream(engine.device).wait_event(engine.pending_copy)
        engine.pending_copy = None


def _size(files: dict[str, Tensors]) -> int:
    return sum(len(_header(tensors)) + sum(t.nbytes for t in tensors.values()) for tensors in files.values())


def snapshot_bytes(engine: Any, optimizer: Any) -> int:
    """Bytes of both files of a checkpoint now, which is what a snapshot takes of host memory."""
    return _size(_files(engine, optimizer))


def host_has_room(needed_bytes: int) -> bool:
    """Whether the host can hold a snapshot of so many bytes besides all else; in a container, within its limit."""
    held = len(_idle_blocks) * BLOCK_BYTES
    return needed_bytes - held + HOST_RESERVE_BYTES <= host_facts().ram_available_bytes


# --- straight to the disk, and back -----------------------------------------------------------------------------------


def write_direct(engine: Any, optimizer: Any, folder: Path) -> None:
    """Both files into `folder`, one block at a time through the host. Nothing may be trained meanwhile."""

    def blocks() -> Iterator[int]:
        while True:
            yield BLOCK_BYTES

    for name, tensors in _files(engine, optimizer).items():
        pieces = (piece.cpu() for tensor in tensors.values() for piece in _pieces(tensor, blocks()))
        _write(folder / name, _header(tensors), pieces)


def restore_state(engine: Any, optimizer: Any, folder: Path, *, step: int) -> None:
    """Put the state of a verified checkpoint back, bit for bit. A tensor that does not belong there is named."""
    weights = {name: parameter for name, parameter in engine.model.named_parameters() if parameter.requires_grad}
    stored = _read(folder / MODEL)
    _refuse_others(folder / MODEL, stored, weights)
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(stored[name])
    stored = _read(folder / OPTIMIZER)
    if engine.loss_scale is not None:
        scale = engine.loss_scale.tensors()
        found = {name: stored.pop(name) for name in scale.keys() & stored.keys()}
        _refuse_others(folder / OPTIMIZER, found, scale)
        engine.loss_scale.restore(found)
    optimizer.restore(stored, step=step)


def _read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of `path`, which the system reads as they are copied."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        problem = f"{path}: {' '.join(str(error).split())[:300]}"
        raise StorageError(
            problem, fix="the checkpoint cannot be read; delete it to go on from the one before"
        ) from error


def _refuse_others(path: Path, stored: Tensors, wanted: Tensors) -> None:
    """Name the first tensor of `path` that is missing, foreign, or of another shape or type."""
    fix = "the checkpoint is of another model; begin anew with another --output"
    if strange := sorted(stored.keys() ^ wanted.keys()):
        fault = "lacks" if strange[0] in wanted else "has what this model does not train,"
        raise InputError(f"{path} {fault} {strange[0]}; {len(strange)} tensors differ in name", fix=fix)
    for name, tensor in wanted.items():
        said = [f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in (stored[name], tensor)]
        if said[0] != said[1]:
            raise InputError(f"{path} has {name} as {said[0]}; this model has it as {said[1]}", fix=fix)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def round_weights(engine: Engine, dtype: str) -> None:
    """Round every weight to `dtype`, in which `save` writes it from here on.

    In memory it keeps its type: the engine computes what the saved model computes once it is loaded in that type."""
    for name, weight in engine.model.state_dict().items():
        if weight.is_floating_point():
            rounded = weight.to(getattr(torch, dtype))
            if not rounded.isfinite().all():
                raise out_of_range(name, dtype)
            weight.copy_(rounded)
    engine.saved_dtype = dtype


def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` whole.

    Adapters are added to the weights they stand beside. What it generates ends at `stop_ids`, whatever the base model
    says. `chat_template` takes the place of the tokenizer's own; None leaves that.
    """
    settings = copy.deepcopy(engine.model.generation_config)
    settings.eos_token_id = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)
    staged = folder.with_name(f".staged-{folder.name}")
    for leftover in (staged, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    with _disk_is_named(folder):
        engine.model.save_pretrained(staged, state_dict=saved_weights(engine))
        dtype = "float32" if engine.recipe.frozen is not None else engine.saved_dtype
        if dtype is not None:  # what is loaded later is rounded to the type that the configuration names
            config = json.loads((staged / "config.json").read_text(encoding="utf-8"))
            (staged / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2), encoding="utf-8")
        settings.save_pretrained(staged)
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, staged / name)
        if chat_template is not None:
            (staged / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="\n")
        settle_files(staged)  # `result.json` will say completed: the model must outlive a power cut by then
        staged.rename(folder)
        sync_folder(folder.parent)


def saved_weights(engine: Engine) -> dict[str, torch.Tensor] | None:
    """Weights as `save` writes them where they are not those in memory: with merged adapters, or in another type. On the
    host; names of one tensor, as of a tied embedding, stay names of one."""
    if engine.recipe.frozen is not None:
        from tunix_rt.engines.torch.lora import merged_weights

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


@contextlib.contextmanager
def _disk_is_named(folder: Path) -> Iterator[None]:
    """safetensors wraps what the disk says (full, read-only) in an error of its own that is no OSError."""
    with storage(folder):
        try:
            yield
        except SafetensorError as error:
            raise OSError(None, one_line(error), str(folder)) from error
