"""The weight files of a final model, written layer by layer. `save_pretrained` of transformers has the whole model in host
memory; its one file, and its split ones where it converts no tensors, are the same to the byte."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.core_model_loading import revert_weight_conversion

from tunix_rt.engines.failures import REPORT_DEFECT
from tunix_rt.engines.torch.adapters import without_adapters
from tunix_rt.engines.torch.tensor_files import NAMES, Tensors, blocks, pieces_of, widest_first
from tunix_rt.errors import TunixError
from tunix_rt.models.safetensors import INDEX, header_of
from tunix_rt.storage import storage

FILE_BYTES = 50 * 10**9
"""The largest weight file, as transformers splits them; a larger tensor has a file of its own."""

Whole = Callable[[str], torch.Tensor | None]
"""The whole tensor of a name, in the host memory of the rank that writes; None on others. Every rank calls it for the same names
in the same order."""


def write_weights(
    folder: Path, model: Any, whole: Whole, *, dtype: torch.dtype | None, file_bytes: int = FILE_BYTES
) -> None:
    """Write the weights of `model`, in `dtype` unless that is None, into files of at most `file_bytes`, with an index where
    there are several."""
    described = {
        name: torch.empty(tensor.shape, dtype=_dtype(tensor, dtype), device="meta")
        for name, tensor in _saved(model).items()
    }
    described = revert_weight_conversion(model, described)
    split = split_torch_state_dict_into_shards(
        described, filename_pattern="model{suffix}.safetensors", max_shard_size=file_bytes
    )
    places: dict[str, tuple[Path, int]] = {}
    for file, names in split.filename_to_tensors.items():
        places |= _begin(folder / file, {name: described[name] for name in names})
    for name, tensor in layer_tensors(model, whole):
        path, offset = places.pop(name)
        _put(path, offset, tensor.to(described[name].dtype))
    if places:
        raise TunixError(f"{min(places)} of the final model was not written", fix=REPORT_DEFECT)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def layer_tensors(model: Any, whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights as files have them, those of one layer at a time in host memory. A layer has all that transformers converts
    together, such as its experts."""
    for _, names in groupby(_saved(model), key=_layer_of):
        tensors = {name: tensor for name in names if (tensor := whole(name)) is not None}
        if tensors:
            yield from revert_weight_conversion(model, tensors).items()


def _layer_of(name: str) -> str:
    """`model.layers.3` of a tensor in a layer; else its whole name."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else name


def _saved(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers that a saved model has, once each where they are tied; adapters are merged into theirs."""
    tensors, tied = without_adapters(model.state_dict(keep_vars=True).items()), model.all_tied_weights_keys
    ignored = model._keys_to_ignore_on_save or ()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name not in ignored and not (name in tied and tensor is tensors[tied[name]])
    }


def _dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _begin(path: Path, tensors: Tensors) -> dict[str, tuple[Path, int]]:
    """Write the header of a file; where each of its tensors begins."""
    described = [(name, NAMES[one.dtype], one.shape, one.nbytes) for name, one in widest_first(tensors).items()]
    head, offsets = header_of(described, {"format": "pt"})
    with storage(path):
        path.write_bytes(head)
    return {name: (path, offset) for name, offset in offsets.items()}


def _put(path: Path, offset: int, tensor: torch.Tensor) -> None:
    with storage(path), path.open("r+b") as file:
        file.seek(offset)
        for piece in pieces_of(tensor, blocks()):
            file.write(piece.cpu().numpy())
