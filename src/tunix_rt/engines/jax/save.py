"""What a checkpoint of the JAX engine holds, under the names and in the shapes of the PyTorch engine: a tensor for each
layer, `exp_avg.NAME` for its moments. A checkpoint of either can be read by the other.

Arrays come to the host leaf by leaf and a piece at a time: what jax would keep of an array that was looked at whole would
stay in memory until the next step. Both ways to a file give the same bytes.
"""

import json
import shutil
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.base import out_of_range
from tunix_rt.engines.jax.load import Engine, memory_is_named
from tunix_rt.engines.jax.weights import TYPES, Entry, entries
from tunix_rt.errors import InputError, StorageError, TunixError
from tunix_rt.storage import settle_files, storage, sync_folder

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
BLOCK_BYTES = 64 * 2**20
"""An array comes to the host in pieces of about this size."""
AHEAD = 4
"""Pieces that are on their way at once."""
HOST_RESERVE_BYTES = 2**30
"""Host memory that a copy of the state leaves to everything else."""

_NAMES = {kind: name for name, kind in TYPES.items()}
Host = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """An array of the parameters or of the optimizer: where it is, and its tensors in a file."""

    array: Any
    names: tuple[str, ...]
    """One for each layer, of an array of layers; else a single one."""
    of_layers: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self.array.shape[1:] if self.of_layers else self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype)


def leaves_of(entry_list: list[Entry], layers: int, tree: Mapping[str, Any], prefix: str = "") -> Iterator[Leaf]:
    """Of a tree as the parameters are; an array that is not kept (None) is left out."""
    for entry in entry_list:
        array = (tree["layers"] if entry.of_layers else tree).get(entry.key)
        if array is not None:
            names = tuple(prefix + name for name in entry.names(layers))
            yield Leaf(array=array, names=names, of_layers=entry.of_layers)


def saved_leaves(engine: Engine) -> Iterator[Leaf]:
    """The parameters in the type in which the final model is written."""
    for leaf in leaves_of(entries(engine.architecture), engine.architecture.shape.layers, engine.params):
        yield leaf if engine.saved_dtype is None else replace(leaf, array=leaf.array.astype(engine.saved_dtype))


def _files(engine: Engine, optimizer: Any) -> dict[str, list[Leaf]]:
    """The arrays of each file."""
    listed, layers = entries(engine.architecture), engine.architecture.shape.layers
    states = [leaf for slot, tree in optimizer.state.items() for leaf in leaves_of(listed, layers, tree, f"{slot}.")]
    return {MODEL: list(leaves_of(listed, layers, engine.params)), OPTIMIZER: states}


# --- the file --------------------------------------------------------------------------------------------------------


def _header(leaves: list[Leaf], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and where in the file each tensor lies: the widest types first, then by name."""
    tensors = sorted((-leaf.dtype.itemsize, name, leaf) for leaf in leaves for name in leaf.names)
    found: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    places, end = {}, 0
    for _, name, leaf in tensors:
        begin, end = end, end + int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize
        found[name] = {"dtype": _NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [begin, end]}
        places[name] = begin
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + begin for name, begin in places.items()}


def write_leaves(path: Path, leaves: list[Leaf], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file of `leaves`, of which one at a time is in host memory."""
    head, places = _header(leaves, metadata)
    with storage(path), path.open("wb") as file:
        file.write(head)
        for leaf in leaves:
            _write_leaf(file, leaf, host_copy(leaf.array), places)


def _write_leaf(file: Any, leaf: Leaf, values: Host, places: Mapping[str, int]) -> None:
    for name, tensor in zip(leaf.names, values if leaf.of_layers else [values], strict=True):
        file.seek(places[name])
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def host_copy(array: Any) -> Host:
    """The whole of `array`, wherever its parts lie; nothing of it stays behind in jax."""
    if not array.is_fully_addressable:
        raise TunixError(
            f"an array of {list(array.shape)} lies on the devices of several hosts; they cannot be saved from one of them",
            fix="run on the devices of one host; several are not supported yet",
        )
    whole = np.empty(array.shape, np.dtype(array.dtype))
    seen = set()
    waiting: deque[tuple[Any, Any]] = deque()

    def take() -> None:
        place, piece = waiting.popleft()
        whole[place] = np.array(piece)

    for shard in array.addressable_shards:
        index = tuple((part.start, part.stop) for part in shard.index)
        if index in seen:  # a copy on another device
            continue
        seen.add(index)
        for place, piece in _pieces(shard):
            piece.copy_to_host_async()
            waiting.append((place, piece))
            if len(waiting) >= AHEAD:
                take()
    while waiting:
        take()
    return whole


def _pieces(shard: Any) -> Iterator[tuple[Any, Any]]:
    """(place in the whole array, array) of a shard cut along its first dimension."""
    data = shard.data
    if data.nbytes <= BLOCK_BYTES or data.ndim == 0:
        yield shard.index, data
        return
    first, *rest = shard.index
    begin, count = first.start or 0, data.shape[0]
    rows = max(1, BLOCK_BYTES * count // data.nbytes)
    for start in range(0, count, rows):
        size = min(rows, count - start)
        yield (slice(begin + start, begin + start + size), *rest), _cut(data, start, size)


def _cut(data: Any, start: int, size: int) -> Any:
    return _CUT(data, start, size)


_CUT = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)


# --- through host memory, or straight to the disk ---------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The state of one moment in host memory, whatever is trained afterwards. To be written once."""

    files: dict[str, list[tuple[Leaf, Host]]]
    bytes: int

    def write(self, folder: Path) -> None:
        """Both files into `folder`. May be called from another thread; the host memory is free for others afterwards."""
        try:
            for name, copied in self.files.items():
                head, places = _header([leaf for leaf, _ in copied])
                with storage(folder / name), (folder / name).open("wb") as file:
                    file.write(head)
                    for leaf, values in copied:
                        _write_leaf(file, leaf, values, places)
        finally:
            self.files = {}


@memory_is_named("the copy of the state for a checkpoint")
def snapshot(engine: Engine, optimizer: Any) -> Snapshot:
    """Host copies of everything that must be kept, made before it returns."""
    files = _files(engine, optimizer)
    copied = {name: [_copied(leaf) for leaf in leaves] for name, leaves in files.items()}
    return Snapshot(files=copied, bytes=_size(files))


def _copied(leaf: Leaf) -> tuple[Leaf, Host]:
    """The copy, and a leaf that holds on to it instead of the array on the device, which the next step uses up."""
    values = host_copy(leaf.array)
    return Leaf(array=values, names=leaf.names, of_layers=leaf.of_layers), values


def _size(files: Mapping[str, list[Leaf]]) -> int:
    return sum(len(_header(leaves)[0]) + sum(leaf.array.nbytes for leaf in leaves) for leaves in files.values())


def snapshot_bytes(engine: Engine, optimizer: Any) -> int:
    """Bytes of both files of a checkpoint now, which is what a snapshot takes of host memory."""
    return _size(_files(engine, optimizer))


def host_has_room(needed_bytes: int) -> bool:
    """Whether the host can hold a snapshot of so many bytes besides all else; in a container, within its limit."""
    return needed_bytes + HOST_RESERVE_BYTES <= host_facts().ram_available_bytes


@memory_is_named("the writing of a checkpoint")
def write_direct(engine: Engine, optimizer: Any, folder: Path) -> None:
    """Both files into `folder`, one array at a time through the host. Nothing may be trained meanwhile."""
    for name, leaves in _files(engine, optimizer).items():
        write_leaves(folder / name, leaves)


# --- back ------------------------------------------------------------------------------------------------------------


@memory_is_named("the checkpoint")
def restore_state(engine: Engine, optimizer: Any, folder: Path, *, step: int) -> None:
    """Put the state of a verified checkpoint back, bit for bit, over however many devices there are now. What was there
    before is used up, also where a file turns out to be unreadable."""
    listed, layers = entries(engine.architecture), engine.architecture.shape.layers
    engine.params = _restored(folder / MODEL, list(leaves_of(listed, layers, engine.params)), engine.params)
    leaves = [leaf for slot, tree in optimizer.state.items() for leaf in leaves_of(listed, layers, tree, f"{slot}.")]
    optimizer.state = _restored(folder / OPTIMIZER, leaves, optimizer.state)
    optimizer.done = step


def _restored(path: Path, leaves: list[Leaf], tree: Any) -> Any:
    """`tree` with the values that `path` has for its arrays, each where it was. No array is there twice."""
    values: dict[int, Any] = {}
    try:
        with safe_open(path, framework="np") as file:
            _refuse_others(path, file, leaves)
            for leaf in leaves:
                read, place = _read(file, leaf), leaf.array.sharding
                leaf.array.delete()
                values[id(leaf.array)] = jax.block_until_ready(jax.device_put(read, place))
    except (SafetensorError, OSError) as error:
        problem = f"{path}: {' '.join(str(error).split())[:300]}"
        raise StorageError(
            problem, fix="the checkpoint cannot be read; delete it to go on from the one before"
        ) from error
    return jax.tree.map(lambda array: values[id(array)], tree)


def _read(file: Any, leaf: Leaf) -> Host:
    whole = np.empty(leaf.array.shape, leaf.dtype)
    for place, name in enumerate(leaf.names):
        whole[place if leaf.of_layers else ...] = file.get_tensor(name)
    return whole


def _refuse_others(path: Path, file: Any, leaves: list[Leaf]) -> None:
    """Name the first tensor of `path` that is missing, foreign, or of another shape or type."""
    fix = "the checkpoint is of another model; begin anew with another --output"
    stored, wanted = set(file.keys()), {name: leaf for leaf in leaves for name in leaf.names}
    if strange := sorted(stored ^ wanted.keys()):
        fault = "lacks" if strange[0] in wanted else "has what this model does not train,"
        raise InputError(f"{path} {fault} {strange[0]}; {len(strange)} tensors differ in name", fix=fix)
    for name, leaf in wanted.items():
        view = file.get_slice(name)
        kind = TYPES.get(view.get_dtype())
        said = f"{list(view.get_shape())} {kind.name if kind is not None else view.get_dtype()}"
        own = f"{list(leaf.shape)} {leaf.dtype.name}"
        if said != own:
            raise InputError(f"{path} has {name} as {said}; this model has it as {own}", fix=fix)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
CLASSES = {
    "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM",
}  # fmt: skip
"""The class of transformers that a `config.json` names; other programs go by it."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What transformers takes over from `config.json` where a model has no settings for generation."""


@memory_is_named("the rounding of the weights")
def round_weights(engine: Engine, dtype: str) -> None:
    """Round every weight to `dtype`, in which `save` writes it from here on.

    In memory it keeps its type: the engine computes what the saved model computes once it is loaded in that type."""

    def rounded(path: Any, weight: Any) -> Any:
        narrow = weight.astype(dtype)  # by itself: a compiler that sees both casts leaves them out
        if not bool(jnp.isfinite(narrow).all()):
            raise out_of_range(jax.tree_util.keystr(path), dtype)
        return narrow.astype(weight.dtype)

    engine.params = jax.tree_util.tree_map_with_path(rounded, engine.params)
    engine.saved_dtype = dtype


@memory_is_named("the saving of the final model")
def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    """The model in Hugging Face layout, with its tokenizer, as plain transformers loads it. Replaces `folder` whole.

    What it generates ends at `stop_ids`, whatever the base model says. `chat_template` takes the place of the tokenizer's
    own; None leaves that.
    """
    staged = folder.with_name(f".staged-{folder.name}")
    with storage(folder):
        for leftover in (staged, folder):
            if leftover.exists():
                shutil.rmtree(leftover)
        staged.mkdir(parents=True)
        write_leaves(staged / MODEL, list(saved_leaves(engine)), {"format": "pt"})
        _write(staged / "config.json", _config(engine))
        _write(staged / "generation_config.json", _generation(engine, stop_ids))
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, staged / name)
        if chat_template is not None:
            (staged / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="\n")
        settle_files(staged)  # `result.json` will say completed: the model must outlive a power cut by then
        staged.rename(folder)
        sync_folder(folder.parent)


def _config(engine: Engine) -> dict[str, Any]:
    """That of the base model, with the type of the weights that lie beside it."""
    said = {key: value for key, value in engine.source.config.items() if key != "torch_dtype"}  # its older name
    said.setdefault("architectures", [CLASSES[engine.architecture.shape.model_type]])
    return said | {"dtype": engine.saved_dtype or engine.recipe.weights}


def _generation(engine: Engine, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The base model's own settings, where it has some; the end is ours."""
    path = engine.source.folder / "generation_config.json"
    config = engine.source.config
    said = {name: config[name] for name in SPECIAL if config.get(name) is not None}
    if path.is_file():
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} cannot be read: {error}", fix="fetch the model again") from error
        said = read if isinstance(read, dict) else said
    return said | {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
