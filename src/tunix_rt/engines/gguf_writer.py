"""A model of the torch engine as a GGUF file, by the conventions of llama.cpp: names, layouts and types of tensors, and the facts
that its architectures read. What an architecture of llama.cpp computes otherwise than the model is refused by name.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.engines.gguf_tokenizer import add_tokenizer
from tunix_rt.engines.k_quants import Floats, quantize
from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES, SLIDING, Family

FILES: dict[str, tuple[gguf.LlamaFileType, Type]] = {
    "f32": (gguf.LlamaFileType.ALL_F32, Type.F32),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, Type.F16),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, Type.BF16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, Type.Q8_0),
    "q6_k": (gguf.LlamaFileType.MOSTLY_Q6_K, Type.Q6_K),
    "q5_k_m": (gguf.LlamaFileType.MOSTLY_Q5_K_M, Type.Q5_K),
    "q4_k_m": (gguf.LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K),
    "q4_0": (gguf.LlamaFileType.MOSTLY_Q4_0, Type.Q4_0),
}
"""Kind of file -> its number in llama.cpp, and the type of most tensors."""
NARROW = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
"""Types for rows that are no multiple of 256 weights."""
PAIRS = ("llama", "smollm3", "granite")
"""Architectures that rotate neighbouring values of a head: rows of q and k are reordered."""
USES_HF = "export with --to hf, which every program with transformers loads"
GEMMA_PERIOD, SMOLLM_PERIOD = 6, 4
"""Layers of Gemma 3 from one with full attention to the next, and of SmolLM3 without rotation, unless the file has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A tensor of the file: its name there and in the model, its type, its shape as torch has it."""

    name: str
    parameter: str
    kind: Type
    shape: tuple[int, ...]


def write_gguf(
    file: Path, model: Any, tokenizer: Tokenizer, *, kind: str, name: str, ends: list[int], template: str | None
) -> tuple[Written, ...]:
    """Write `model`, whose weights are float32. One tensor at a time is in memory twice."""
    config = model.config
    family = architecture_of(config)
    writer = gguf.GGUFWriter(file, str(family.llama_cpp))
    planned = plan_tensors(model, family, kind)
    rows = next(one.shape[0] for one in planned if one.name == "token_embd.weight")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    _add_facts(writer, config, family, rows)
    writer.add_file_type(FILES[kind][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, tokenizer, model_type=config.model_type, rows=rows, ends=ends, template=template)
    rotation = _rotation_factors(config)
    for one in planned:
        block, block_bytes = gguf.GGML_QUANT_SIZES[one.kind]
        size = math.prod(one.shape) // block * block_bytes
        writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), size, raw_dtype=one.kind)
    if rotation is not None:
        writer.add_tensor_info("rope_freqs.weight", rotation.shape, rotation.dtype, rotation.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    parameters = dict(model.named_parameters())
    for one in planned:
        values = as_llama_cpp(parameters[one.parameter].detach().float().cpu().numpy(), one, config, family)
        writer.write_tensor_data(quantize(values, one.kind))
    if rotation is not None:
        writer.write_tensor_data(rotation)
    writer.close()
    return planned


# --- tensors ---------------------------------------------------------------------------------------------------------


def plan_tensors(model: Any, family: Family, kind: str) -> tuple[Written, ...]:
    """Name, type and shape of every tensor. A tied lm_head is not among them: llama.cpp uses the embedding."""
    config = model.config
    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == family.llama_cpp)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found = []
    for parameter, values in model.named_parameters():
        stem, _, suffix = parameter.rpartition(".")
        if (known := names.get_name(stem)) is None:
            raise InputError(f"llama.cpp's {family.llama_cpp} has no tensor for {parameter}", fix=USES_HF)
        shape = tuple(reversed(values.shape)) if _is_transposed(family, parameter, values) else tuple(values.shape)
        found.append((f"{known}.{suffix}", parameter, shape))
    tied = not any(name == "output.weight" for name, _, _ in found)
    return tuple(
        Written(name=name, parameter=parameter, shape=shape, kind=tensor_type(name, shape, kind, config, tied=tied))
        for name, parameter, shape in found
    )


def tensor_type(name: str, shape: tuple[int, ...], kind: str, config: Any, *, tied: bool) -> Type:
    """The type that llama.cpp gives a tensor in a file of `kind`: more bits for the head, and for values and MLP outputs of some
    layers."""
    if len(shape) < 2 or name == "position_embd.weight":
        return Type.F32
    base = FILES[kind][1]
    block = gguf.GGML_QUANT_SIZES[base][0]
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        wanted = base if block == 1 else Type.Q8_0 if base == Type.Q8_0 or shape[-1] % block else Type.Q6_K
    elif kind in ("q4_k_m", "q5_k_m"):
        wanted = _mixed(name, base, config)
    else:
        wanted = base
    if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        wanted = NARROW.get(wanted, Type.F16)
    return wanted if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0 else Type.F16


def _mixed(name: str, base: Type, config: Any) -> Type:
    layers, sensitive = config.num_hidden_layers, (".attn_v.", ".attn_qkv.", ".ffn_down.")
    if not any(part in name for part in sensitive):
        return base
    layer, eighth = int(name.split(".")[1]), layers // 8
    if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
        return Type.Q6_K
    shared = getattr(config, "num_key_value_heads", None) not in (None, config.num_attention_heads)
    return Type.Q5_K if layers == 80 and shared and ".ffn_down." not in name else base  # models of 70B


def _is_transposed(family: Family, parameter: str, values: Any) -> bool:
    return family.layout == "gpt2" and values.ndim == 2 and (".attn." in parameter or ".mlp." in parameter)


def as_llama_cpp(values: Floats, one: Written, config: Any, family: Family, *, back: bool = False) -> Floats:
    """The values of a parameter in the layout of llama.cpp; `back`: the inverse."""
    if _is_transposed(family, one.parameter, values):
        return np.ascontiguousarray(values.T)
    if (heads := _reordered_heads(one, config, family)) is not None:
        half = values.shape[0] // heads // 2
        pairs = values.reshape(heads, half, 2, -1) if back else values.reshape(heads, 2, half, -1)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    if family.norm == "rms_plus_one" and one.name.endswith("norm.weight"):
        return values - np.float32(1) if back else values + np.float32(1)
    return values


def _reordered_heads(one: Written, config: Any, family: Family) -> int | None:
    if family.llama_cpp not in PAIRS:
        return None
    heads = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    return next((count for part, count in heads.items() if part in one.name), None)


# --- facts -----------------------------------------------------------------------------------------------------------


def architecture_of(config: Any) -> Family:
    """The family with its name in llama.cpp; InputError for a family or a setting that no file can have."""
    written = ", ".join(name for name, family in FAMILIES.items() if family.llama_cpp)
    family = FAMILIES.get(config.model_type)
    if family is None or family.llama_cpp is None:
        raise InputError(f"--gguf: no GGUF file of {config.model_type}; there are files of {written}", fix=USES_HF)
    if differences := list(_not_in_llama_cpp(config, family)):
        raise InputError(f"--gguf: llama.cpp's {family.llama_cpp} has no {'; no '.join(differences)}", fix=USES_HF)
    return family


def _not_in_llama_cpp(config: Any, family: Family) -> Iterator[str]:
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        given = getattr(config, key, None)
        if key in family.defaults and given not in (family.defaults[key], "gelu" if family.gelu_is_tanh else None):
            yield f"{key} {given!r}"
    for layer_type, rope in rotations(config).items():
        scaling = rope.get("rope_type", "default")
        if scaling not in ("default", "linear", "llama3") or (scaling != "default" and layer_type == SLIDING):
            yield f"rope_type {scaling!r} ({layer_type})"
    head = _head_size(config)
    if (scalar := getattr(config, "query_pre_attn_scalar", head)) != head and not (
        family.gguf_layers_without_scale == config.num_hidden_layers
        and scalar == config.hidden_size // config.num_attention_heads
    ):
        yield f"query_pre_attn_scalar {scalar}: its attention scale is that of head_dim {head}"
    if family.norm == "rms_plus_one" and not config.tie_word_embeddings and family.llama_cpp != "gemma3":
        yield "lm_head of its own"
    period = _window_period(config)
    window, positions = getattr(config, "sliding_window", None), config.max_position_embeddings
    slides = SLIDING in family.layer_types(config.to_dict(), config.num_hidden_layers)
    if family.llama_cpp in ("gemma2", "gemma3"):
        if period is None or (family.llama_cpp == "gemma2" and period != 2):
            yield f"layer_types {config.layer_types}"
    elif slides and window is not None and window < positions:
        yield f"sliding window ({window} of {positions} positions)"
    if family.llama_cpp == "smollm3" and any(
        bool(used) != bool((layer + 1) % SMOLLM_PERIOD) for layer, used in enumerate(config.no_rope_layers)
    ):
        yield f"no_rope_layers {config.no_rope_layers}"


def _window_period(config: Any) -> int | None:
    """The n of a model whose every n-th layer has full attention; None of another one."""
    types, layers = list(getattr(config, "layer_types", None) or []), config.num_hidden_layers
    for period in (2, GEMMA_PERIOD, *range(1, layers + 1)):
        if types == [SLIDING if (layer + 1) % period else "full_attention" for layer in range(layers)]:
            return period
    return None


def rotations(config: Any) -> dict[str, dict[str, Any]]:
    """The rotation by layer type; `full_attention` alone where all layers have one. Empty without rotation."""
    given = getattr(config, "rope_parameters", None) or {}
    return given if not given or isinstance(next(iter(given.values())), dict) else {"full_attention": given}


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_facts(writer: gguf.GGUFWriter, config: Any, family: Family, rows: int) -> None:
    head = _head_size(config)
    writer.add_vocab_size(rows)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(
        getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    )
    writer.add_head_count(config.num_attention_heads)
    if family.layout == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head)
    writer.add_value_length(head)
    rope = rotations(config)["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if family.llama_cpp in ("gemma2", "gemma3"):
        _add_windows(writer, config)
    if family.llama_cpp == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _add_windows(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.attn_logit_softcapping is not None:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        if (period := _window_period(config)) not in (None, GEMMA_PERIOD):
            writer.add_sliding_window_pattern(period)
        if local := rotations(config).get(SLIDING, {}).get("rope_theta"):
            writer.add_rope_freq_base_swa(local)


def _rotation_factors(config: Any) -> Floats | None:
    """What Llama 3 divides each frequency by: 1 for short wavelengths, `factor` for long ones, a mean in between."""
    rope = rotations(config).get("full_attention", {})
    if rope.get("rope_type") != "llama3":
        return None
    head = _head_size(config)
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = share.clamp(0, 1)
    return (1 / ((1 - share) / rope["factor"] + share)).to(torch.float32).numpy()
