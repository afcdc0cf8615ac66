"""Checkpoints and final models of the JAX engine, with the names and shapes of the PyTorch engine: a tensor for each layer,
`exp_avg.NAME` for optimizer states. Each engine reads the checkpoints of the other. Of several processes, each writes the shards
of its own devices, a replica once, into files of its own.

Arrays are copied to the host leaf by leaf and a block at a time: jax caches the host copy of a whole array until the next step.
Through a snapshot or directly from the devices, a checkpoint has the same bytes.
"""

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from tunix_rt.engines.checkpoint import BLOCK_BYTES, MODEL, OPTIMIZER, refuse_other_tensors, staged_model, unreadable
from tunix_rt.engines.failures import memory_errors_named, out_of_range
from tunix_rt.engines.jax.load import Engine
from tunix_rt.engines.jax.mesh import put
from tunix_rt.engines.jax.weights import TYPES, Entry, entries
from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.multimodal import restore_towers
from tunix_rt.models.safetensors import Stored, header_of, part_files, part_name, stored_tensors
from tunix_rt.storage import storage

SHARDING = "DCP_SHARDING_INFO"
"""Key of the header under which torch.distributed.checkpoint looks for the begin of every part."""
AHEAD = 4
"""Blocks that are copied to the host at once."""

_NAMES = {kind: name for name, kind in TYPES.items()}
Host = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """An array of the parameters or of the optimizer, and the names of its tensors in a file."""

    array: Any
    """On its devices, or a copy in host memory of the part that this process writes."""
    names: tuple[str, ...]
    """One for each layer, for an array of layers; else a single one."""
    of_layers: bool
    box: tuple[slice, ...] | None = None
    """The part of the whole array that this process writes; None: nothing, or the array is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self.array.shape[1:] if self.of_layers else self.array.shape)

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of the part of one tensor."""
        return tuple(one.stop - one.start for one in (self.box or ())[self.of_layers :])

    @property
    def begin(self) -> list[int]:
        """Where that part begins in the tensor."""
        return [one.start for one in (self.box or ())[self.of_layers :]]

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype)


def leaves_of(entry_list: list[Entry], layers: int, tree: Mapping[str, Any], prefix: str = "") -> Iterator[Leaf]:
    """Of a tree like the parameters; arrays that are None are skipped."""
    for entry in entry_list:
        array = (tree["layers"] if entry.of_layers else tree).get(entry.key)
        if array is not None:
            names = tuple(prefix + name for name in entry.names(layers))
            yield Leaf(array=array, names=names, of_layers=entry.of_layers)


def saved_leaves(engine: Engine) -> Iterator[Leaf]:
    """The parameters in the dtype of the final model."""
    for leaf in leaves_of(entries(engine.architecture), engine.architecture.shape.layers, engine.params):
        array = leaf.array if engine.saved_dtype is None else leaf.array.astype(engine.saved_dtype)
        yield replace(leaf, array=array, box=own_box(array))


def _files(engine: Engine, optimizer: Any) -> dict[str, list[Leaf]]:
    """The arrays of each file."""
    listed, layers = entries(engine.architecture), engine.architecture.shape.layers
    states = [leaf for slot, tree in optimizer.state.items() for leaf in leaves_of(listed, layers, tree, f"{slot}.")]
    return {MODEL: list(leaves_of(listed, layers, engine.params)), OPTIMIZER: states}


def _written(engine: Engine, optimizer: Any) -> dict[str, list[Leaf]]:
    """The arrays of each file that this process writes."""
    own: dict[str, list[Leaf]] = {}
    for name, leaves in _files(engine, optimizer).items():
        boxed = (replace(leaf, box=own_box(leaf.array)) for leaf in leaves)
        own[own_name(name)] = [leaf for leaf in boxed if leaf.box is not None]
    return own


def own_name(name: str) -> str:
    """The file of this process, of those that `name` is split into."""
    return part_name(name, jax.process_index() + 1, jax.process_count())


def own_box(array: Any) -> tuple[slice, ...] | None:
    """The part of `array` that this process writes: the first replica of every shard that its devices hold; None: nothing. The
    devices of a process are neighbours in the mesh, and so are its shards."""
    places = [shard.index for shard in array.addressable_shards if shard.replica_id == 0]
    if not places:
        return None
    ranges = [place.indices(size)[:2] for size, place in zip(array.shape, places[0], strict=True)]
    for other in places[1:]:
        ranges = [
            (min(begin, place.indices(size)[0]), max(end, place.indices(size)[1]))
            for (begin, end), size, place in zip(ranges, array.shape, other, strict=True)
        ]
    return tuple(slice(*one) for one in ranges)


# --- the file --------------------------------------------------------------------------------------------------------


def _header(leaves: list[Leaf], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and the offset of each tensor: the widest dtypes first, then by name. A file of several
    has the begin of every part, for this reader and for that of torch.distributed.checkpoint."""
    tensors = sorted((-leaf.dtype.itemsize, name, leaf) for leaf in leaves for name in leaf.names)
    described = (
        (name, _NAMES[leaf.dtype], leaf.part, math.prod(leaf.part) * leaf.dtype.itemsize) for _, name, leaf in tensors
    )
    if metadata is None and jax.process_count() > 1:
        begins = {name: {"saved_offsets": leaf.begin} for _, name, leaf in tensors}
        metadata = {SHARDING: json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    return header_of(described, metadata)


def write_leaves(path: Path, leaves: list[Leaf], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file of `leaves`, one at a time through host memory."""
    head, places = _header(leaves, metadata)
    with storage(path), path.open("wb") as file:
        file.write(head)
        for leaf in leaves:
            values = leaf.array if isinstance(leaf.array, np.ndarray) else host_copy(leaf.array)
            for name, tensor in zip(leaf.names, values if leaf.of_layers else [values], strict=True):
                file.seek(places[name])
                file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def host_copy(array: Any) -> Host:
    """A copy of the part of `array` that this process writes, from the shards on its devices; jax caches none of it."""
    box = own_box(array) or ()
    own = np.empty([one.stop - one.start for one in box], np.dtype(array.dtype))
    pending: deque[tuple[Any, Any]] = deque()

    def finish() -> None:
        place, block = pending.popleft()
        own[_within(box, place)] = np.array(block)

    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        for place, block in _blocks(shard):
            block.copy_to_host_async()
            pending.append((place, block))
            if len(pending) >= AHEAD:
                finish()
    while pending:
        finish()
    return own


def _within(box: tuple[slice, ...], place: tuple[slice, ...]) -> tuple[slice, ...]:
    """`place` of the whole array, counted from the begin of `box`."""
    ranges = (at.indices(one.stop)[:2] for one, at in zip(box, place, strict=True))
    return tuple(slice(begin - one.start, end - one.start) for one, (begin, end) in zip(box, ranges, strict=True))


def _blocks(shard: Any) -> Iterator[tuple[Any, Any]]:
    """(index in the whole array, array) of a shard split along its first dimension."""
    data = shard.data
    if data.nbytes <= BLOCK_BYTES or data.ndim == 0:
        yield shard.index, data
        return
    first, *rest = shard.index
    begin, count = first.start or 0, data.shape[0]
    rows = max(1, BLOCK_BYTES * count // data.nbytes)
    for start in range(0, count, rows):
        size = min(rows, count - start)
        yield (slice(begin + start, begin + start + size), *rest), _slice(data, start, size)


_slice = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)


# --- through host memory, or directly to the disk ---------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A copy of weights and optimizer state in host memory. Written once."""

    files: dict[str, list[Leaf]]
    """Of arrays in host memory."""
    bytes: int

    def write(self, folder: Path) -> None:
        """Write both files into `folder` and release the host memory. May be called from another thread."""
        try:
            for name, copied in self.files.items():
                write_leaves(folder / name, copied)
        finally:
            self.files = {}


@memory_errors_named("the snapshot of a checkpoint")
def snapshot(engine: Engine, optimizer: Any) -> Snapshot:
    """A snapshot of weights and optimizer state, complete on return."""
    copied = {  # leaves that refer to the copy instead of the array on the device, which the next step donates
        name: [replace(leaf, array=host_copy(leaf.array)) for leaf in leaves]
        for name, leaves in _written(engine, optimizer).items()
    }
    return Snapshot(files=copied, bytes=_size(copied))


def _size(files: Mapping[str, list[Leaf]]) -> int:
    return sum(len(_header(leaves)[0]) + sum(map(_part_bytes, leaves)) for leaves in files.values())


def _part_bytes(leaf: Leaf) -> int:
    return len(leaf.names) * math.prod(leaf.part) * leaf.dtype.itemsize


def snapshot_bytes(engine: Engine, optimizer: Any) -> int:
    """Size of both files of a checkpoint, which is the host memory that a snapshot takes."""
    return _size(_written(engine, optimizer))


def state_bytes(engine: Engine, optimizer: Any) -> int:
    """Size of the tensors of a checkpoint, of all processes together."""
    return sum(leaf.array.nbytes for leaves in _files(engine, optimizer).values() for leaf in leaves)


@memory_errors_named("the writing of a checkpoint")
def write_direct(engine: Engine, optimizer: Any, folder: Path) -> None:
    """Write both files into `folder`, one array at a time through the host. The state must not change meanwhile."""
    for name, leaves in _written(engine, optimizer).items():
        write_leaves(folder / name, leaves)


# --- back ------------------------------------------------------------------------------------------------------------


@memory_errors_named("the restoring of a checkpoint")
def restore_state(engine: Engine, optimizer: Any, folder: Path, *, step: int) -> None:
    """Restore a verified checkpoint, bit for bit, sharded over the devices of `engine`. The arrays before are deleted, also
    where a file is corrupt."""
    files = _files(engine, optimizer)
    engine.params = _restored(folder / MODEL, files[MODEL], engine.params)
    optimizer.state = _restored(folder / OPTIMIZER, files[OPTIMIZER], optimizer.state)
    optimizer.done = step


def _restored(path: Path, leaves: list[Leaf], tree: Any) -> Any:
    """`tree` with the values of `path`, each array on its devices. No array is in device memory twice."""
    values: dict[int, Any] = {}
    try:
        stored = _stored(path)
        _refuse_others(path, stored, leaves)
        for leaf in leaves:
            read, place = _read(stored, leaf), leaf.array.sharding
            leaf.array.delete()
            values[id(leaf.array)] = jax.block_until_ready(put(read, place))
    except (OSError, ValueError, MemoryError) as error:
        raise unreadable(path, error) from error
    return jax.tree.map(lambda array: values[id(array)], tree)


def _stored(path: Path) -> dict[str, Stored]:
    """The tensors of `path`, or of the files that several processes wrote in its place."""
    return stored_tensors(part_files(path.parent, path.name) or [path])


def _read(stored: Mapping[str, Stored], leaf: Leaf) -> Host:
    whole = np.empty(leaf.array.shape, leaf.dtype)
    for layer, name in enumerate(leaf.names):
        tensor = (whole[layer] if leaf.of_layers else whole).reshape(-1)
        done = 0
        for path, begin, end in stored[name].ranges(0, leaf.shape[0] if leaf.shape else 1):
            read = np.fromfile(path, np.uint8, end - begin, offset=begin).view(leaf.dtype)
            tensor[done : done + read.size] = read
            done += read.size
        if done != tensor.size:
            raise ValueError(f"{name} has {done:,} of {tensor.size:,} elements")
    return whole


def _refuse_others(path: Path, stored: Mapping[str, Stored], leaves: list[Leaf]) -> None:
    theirs = {name: f"{list(one.shape)} {_dtype_name(one.dtype)}" for name, one in stored.items()}
    own = {name: f"{list(leaf.shape)} {leaf.dtype.name}" for leaf in leaves for name in leaf.names}
    refuse_other_tensors(path, theirs, own)


def _dtype_name(stored: str) -> str:
    """A dtype of safetensors as numpy calls it, where the engine has it."""
    return TYPES[stored].name if stored in TYPES else stored


# --- the final model -------------------------------------------------------------------------------------------------


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What transformers reads from `config.json` for a model without generation_config.json."""


@memory_errors_named("the rounding of the weights")
def round_weights(engine: Engine, dtype: str) -> None:
    """Round every weight to `dtype`, in which `save` then writes it.

    In memory it keeps its dtype: the engine computes what the saved model computes once it is loaded in that dtype."""

    def rounded(path: Any, weight: Any) -> Any:
        narrow = weight.astype(dtype)  # not compiled together: XLA would remove both casts
        if not bool(jnp.isfinite(narrow).all()):
            raise out_of_range(jax.tree_util.keystr(path), dtype)
        return narrow.astype(weight.dtype)

    engine.params = jax.tree_util.tree_map_with_path(rounded, engine.params)
    engine.saved_dtype = dtype


@memory_errors_named("the saving of the final model")
def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` as a whole.

    Generation ends at `stop_ids`. `chat_template` replaces that of the tokenizer.
    """
    with staged_model(folder, tokenizer_folder=tokenizer_folder, chat_template=chat_template) as staged:
        write_leaves(staged / MODEL, list(saved_leaves(engine)), {"format": "pt"})
        _write(staged / "config.json", _config(engine))
        _write(staged / "generation_config.json", _generation(engine, stop_ids))
        if engine.source.multimodal:
            restore_towers(staged, engine.source.folder)


def _config(engine: Engine) -> dict[str, Any]:
    """The config.json of the base model, with the dtype of the saved weights."""
    config = {key: value for key, value in engine.source.config.items() if key != "torch_dtype"}  # its older name
    config.setdefault("architectures", [FAMILIES[engine.architecture.shape.model_type].class_name])
    return config | {"dtype": engine.saved_dtype or engine.recipe.weights}


def _generation(engine: Engine, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The generation settings of the base model, with `stop_ids`."""
    path = engine.source.folder / "generation_config.json"
    config = engine.source.config
    settings = {name: config[name] for name in SPECIAL if config.get(name) is not None}
    if path.is_file():
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {error}", fix="fetch the model again") from error
        settings = read if isinstance(read, dict) else settings
    return settings | {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
