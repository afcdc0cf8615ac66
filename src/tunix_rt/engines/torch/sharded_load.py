"""Loading a model that is sharded over ranks: it is built without memory, cut, and then each rank reads its own rows.

The host of a rank never has more of the model than these rows and one block; a tensor that transformers converts while it loads,
such as stacked experts, is whole there for a moment.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from tunix_rt.engines.torch.adapters import without_adapters
from tunix_rt.engines.torch.sharding import Sharding, local_part
from tunix_rt.engines.torch.tensor_files import DTYPES, Tensors, read_rows
from tunix_rt.errors import InputError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.safetensors import Stored, model_files, stored_tensors
from tunix_rt.ranks import Part

OTHER_CONFIG = "the weights do not belong to this config.json; fetch the model again"


def meta_model(source: ModelSource, config: Any, options: Mapping[str, Any]) -> Any:
    """The model with every parameter and buffer on the meta device, where they take no memory."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    if (source.folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source.folder)
    return model.eval()


def fill_model(model: Any, source: ModelSource, sharding: Sharding, *, key_mapping: dict[str, str] | None) -> None:
    """Fill the rows that this rank has of a model that was built on the meta device, but for adapters."""
    saved = without_adapters(model.named_parameters()) | _persistent_buffers(model)
    parts = {name: sharding.part_of(one) for name, one in saved.items()}
    fill_weights(model, source, {name: local_part(one) for name, one in saved.items()}, parts, key_mapping=key_mapping)
    fill_buffers(model)


def fill_buffers(model: Any) -> None:
    """Compute the buffers of a model whose parameters are set, as transformers does after it has loaded weights."""
    for tensor in (*model.parameters(), *_persistent_buffers(model).values()):
        tensor._is_hf_initialized = True
    model.initialize_weights()


def _persistent_buffers(model: Any) -> dict[str, torch.Tensor]:
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def fill_weights(
    model: Any, source: ModelSource, tensors: Tensors, parts: Mapping[str, Part], *, key_mapping: dict[str, str] | None
) -> None:
    """Fill `tensors`, which are `parts` of the parameters and saved buffers of `model`. Refuses weights that are missing, of
    another shape, or two for parameters that are tied."""
    first, filled = _first_names(model), set[str]()
    try:
        for target, value in _values(model, stored_tensors(model_files(source.folder)), key_mapping):
            if (name := first.get(target, target)) not in tensors:
                continue
            if tuple(value.shape) != (part := parts[name]).shape:
                problem = f"has {target} as {list(value.shape)}, config.json as {list(part.shape)}"
                raise InputError(f"{source.name}: {problem}", fix=OTHER_CONFIG)
            if name not in filled:
                _put_rows(value, tensors[name], part.first)
            elif not _has_rows(value, tensors[name], part.first):
                raise InputError(f"{source.name}: config.json ties {name}, which has two values", fix=OTHER_CONFIG)
            filled.add(name)
    except (ValueError, OSError) as error:
        raise InputError(f"{source.name}: {error}", fix="fetch the model again") from error
    if missing := sorted(tensors.keys() - filled):
        raise InputError(f"{source.name}: {len(missing)} missing keys, first {missing[0]}", fix=OTHER_CONFIG)


def _first_names(model: Any) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first one; tied parameters have several."""
    both = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in without_adapters(both).items()}


def _values(
    model: Any, stored: Mapping[str, Stored], key_mapping: dict[str, str] | None
) -> Iterator[tuple[str, Stored | torch.Tensor]]:
    """Names and values of parameters of `model`, under the names and with the conversions of transformers. The model remembers
    these conversions, to be saved in the same layout."""
    transforms = get_model_conversion_mapping(model, key_mapping)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    known, prefix = without_adapters(model.state_dict().items()), model.base_model_prefix
    converted: dict[str, WeightConverter] = {}
    for key in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if target not in known and key in known:
            target, pattern = rename_source_key(key, [], [], prefix, known)
        if pattern is None:
            yield target, stored[key]
        elif target in known:
            converter = next(one for one in converters if pattern in one.source_patterns)
            mapping = converted.setdefault(target, copy.deepcopy(converter))
            mapping.add_tensor(target, key, pattern, partial(_whole, stored[key]))
    for target, mapping in converted.items():
        for name, value in mapping.convert(target, model=model, config=model.config).items():
            yield name, value[0] if isinstance(value, list) else value
    model._weight_conversions = [one for one in transforms if one.was_used()]


def _whole(stored: Stored) -> torch.Tensor:
    whole = torch.empty(stored.shape, dtype=DTYPES.get(stored.dtype))
    read_rows(stored, whole)
    return whole


def _put_rows(value: Stored | torch.Tensor, into: torch.Tensor, first: int) -> None:
    if isinstance(value, Stored):
        read_rows(value, into, first=first)
    else:
        into.detach().copy_(value[first : first + len(into)] if value.dim() else value)


def _has_rows(value: Stored | torch.Tensor, tensor: torch.Tensor, first: int) -> bool:
    other = torch.empty_like(tensor)
    _put_rows(value, other, first)
    return torch.equal(other, tensor)
