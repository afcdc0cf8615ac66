"""Attention over packed rows, as transformers calls it. `plan/attention_kernels.py` decides which implementation serves a run.

A row contains several examples, and no token may attend across the boundary between two of them. transformers' own attention
derives the boundaries from positions that restart, with a mask of tokens x tokens in every forward pass. The two functions here
get them from `boundaries` and need no such mask:

    varlen   torch's flash attention over examples of any length, laid end to end
    flex     FlexAttention, for soft-capped scores

No mask function is registered with transformers for their names, on purpose: it then makes no mask and does not synchronize
with the device. Both refuse to compute without boundaries, or if a layer needs more than they support.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from tunix_rt.engines.failures import compiler_errors
from tunix_rt.engines.torch.varlen import BLOCK, PackedRows, cumulative_lengths
from tunix_rt.errors import InputError
from tunix_rt.plan.attention_kernels import MASKED

VARLEN, FLEX, PROBE = "tunix_rt_varlen", "tunix_rt_flex", "tunix_rt_probe"
"""Names of our functions in transformers. They must not contain `flash`, `sdpa` or `flex_attention`, the names of its own."""
OURS = {"varlen": VARLEN, "flex": FLEX}

_VARLEN_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
_TAKES_NOT = sorted({"scale", "window_size"} - _VARLEN_TAKES)
VARLEN_LACKS = (
    f"varlen_attn of torch {torch.__version__} has no argument {' or '.join(_TAKES_NOT)}; torch 2.11 has it"
    if _TAKES_NOT
    else None
)
"""What the installed torch's varlen_attn cannot do; None if nothing is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Which attention a run uses."""

    name: str
    """varlen, flex, sdpa or eager."""
    training: str
    """Implementation for training and held-out loss, under its name in transformers. Has no cache."""
    generating: str
    """Implementation for `generate`, with a cache: sdpa or eager."""
    why: str


def attention_of(name: str, why: str) -> Attention:
    """The attention that `torch_attention` names. Generation has a cache, and eager attention where scores are soft-capped.

    varlen and flex still have to be tried (`kernel_failure`), and a layer may need more than its configuration says
    (`supported_attention`).
    """
    generating = {"varlen": "sdpa", "flex": "eager"}.get(name, name)
    return Attention(name=name, training=OURS.get(name, name), generating=generating, why=why)


def register() -> None:
    """Register our functions with transformers."""
    AttentionInterface.register(VARLEN, _varlen)
    AttentionInterface.register(FLEX, _flex)
    AttentionInterface.register(PROBE, _probe)
    AttentionMaskInterface.register(PROBE, _probe_mask)


@contextmanager
def kernels(attention: Attention, *, deterministic: bool) -> Iterator[None]:
    """Restrict `scaled_dot_product_attention` to kernels whose backward pass adds in a fixed order, with `deterministic`.

    Enter it around the backward pass as well: gradient checkpointing recomputes attention there.
    """
    if not deterministic:
        yield
        return
    in_order = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if attention.training == VARLEN and not in_order:
        raise ValueError("varlen is deterministic only under torch.use_deterministic_algorithms(True)")
    # Flash attention respects the switch above; the memory-efficient and the cuDNN kernel are not relied on. What flash does
    # not support (a mask, float32) is left to plain matmuls.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield


# --- document boundaries ------------------------------------------------------------------------------------------------


def boundaries(
    positions: npt.NDArray[np.int64], device: torch.device, attention: Attention, *, windows: Sequence[int] = ()
) -> dict[str, Any]:
    """Keyword arguments of the model's forward pass with the document boundaries for our attention; else none.

    Computed from positions on the host, without synchronizing with the device. `windows` are the model's sliding windows: the
    block masks of flex are made for them now, and for others in the first layer that has one, outside of compiled code.
    """
    if attention.training == VARLEN:
        cumulative, longest = cumulative_lengths(positions, device)
        return {"cu_seq_lens_q": cumulative, "max_length_q": longest}
    if attention.training == FLEX:
        packed = PackedRows(positions, device)
        for window in (None, *windows):
            packed.block_mask(window)
        return {"packed_rows": packed}
    return {}


# --- the kernels -----------------------------------------------------------------------------------------------------


def _varlen(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None, max_length_q: int | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: [rows, heads, tokens, size] in, [rows, tokens, heads, size] out."""
    missing = (
        "its scores are soft-capped" if softcap is not None else _missing(module, query, key, value, dropout, more)
    )
    _refuse_unfit("varlen", missing, attention_mask, VARLEN_FIX)
    if cu_seq_lens_q is None or max_length_q is None:
        raise _without_boundaries("varlen")
    rows, heads, tokens, size = query.shape
    flat = [part.transpose(1, 2).reshape(rows * tokens, -1, size) for part in (query, key, value)]
    out = varlen_kernel(
        *flat,
        begins=cu_seq_lens_q,
        longest=max_length_q,
        scale=size**-0.5 if scaling is None else scaling,
        # transformers counts the token itself, the kernel only those before it
        before=None if sliding_window is None else sliding_window - 1,
    )
    return out.reshape(rows, tokens, heads, size), None


def varlen_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, begins: torch.Tensor, longest: int, scale: float,
    before: int | None,
) -> torch.Tensor:  # fmt: skip
    """torch's causal attention over [tokens, heads, size]. A token attends to at most `before` tokens before it."""
    if VARLEN_LACKS is not None:
        raise _refusal("varlen", VARLEN_LACKS, fix="install torch 2.11 or newer")
    narrow = _computed_in(value)
    if narrow not in (torch.bfloat16, torch.float16):
        supported = "flash attention supports float16 and bfloat16"
        raise _refusal("varlen", f"its values are {narrow}; {supported}", fix="set training.dtype: bfloat16 or float16")
    # Up to torch 2.11 the kernel takes fewer key heads without an argument.
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in _VARLEN_TAKES else {}
    window = (-1 if before is None else before, 0)
    parts = [part.to(narrow) for part in (query, key, value)]
    return varlen_attn(*parts, begins, begins, longest, longest, scale=scale, window_size=window, **grouped)


def _flex(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    packed_rows: PackedRows | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: [rows, heads, tokens, size] in, [rows, tokens, heads, size] out."""
    _refuse_unfit("flex", _missing(module, query, key, value, dropout, more), attention_mask, FLEX_FIX)
    if packed_rows is None:
        raise _without_boundaries("flex")
    kind = _computed_in(value)

    def capped(score: torch.Tensor, row: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    attend = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
    out = attend(
        *[part.to(kind) for part in (query, key, value)],
        score_mod=None if softcap is None else capped,
        block_mask=packed_rows.block_mask(sliding_window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2), None


@functools.cache
def _compiled_flex() -> Any:
    """`fullgraph`: with graph breaks it would materialize the scores."""
    return torch.compile(flex_attention, fullgraph=True)


def _computed_in(value: torch.Tensor) -> torch.dtype:
    """The compute dtype. Under autocast, queries and keys may be float32 after their rotation."""
    kind = value.device.type
    if value.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return value.dtype


def _missing(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, more: dict[str, Any]
) -> str | None:
    """What a layer needs and our kernels do not support; None if nothing."""
    if reason := needs_more(module, dropout, more):
        return reason
    if query.shape[2] != key.shape[2]:
        return f"it has {key.shape[2]} keys for {query.shape[2]} queries, so it has a cache"
    if query.shape[-1] != value.shape[-1]:
        return f"its keys have size {query.shape[-1]}, its values {value.shape[-1]}"
    return None


def needs_more(module: Any, dropout: float, more: dict[str, Any]) -> str | None:
    """What a layer passes beside causal attention with a window and a soft cap; None if nothing."""
    causal = more.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "it is not causal"
    if dropout > 0.0:
        return "it has attention dropout"
    for name in ("s_aux", "position_bias", "head_mask"):
        if more.get(name) is not None:
            return f"it has {name}"
    return None


FLEX_FIX = "use a model with causal attention, sliding windows and soft-capped scores at most"
VARLEN_FIX = (
    "use a model with causal attention and sliding windows at most; or set training.dtype: float32, which uses transformers' "
    "own attention"
)


def _refuse_unfit(name: str, missing: str | None, mask: torch.Tensor | None, fix: str) -> None:
    """Refuse a layer that needs what the kernel lacks, or comes with a mask, which the kernel would ignore."""
    if reason := missing or ("it has a mask" if mask is not None else None):
        raise _refusal(name, reason, fix=fix)


def _without_boundaries(name: str) -> InputError:
    fix = "pass the result of `boundaries` to the model's forward pass; `generate` needs sdpa or eager attention"
    return _refusal(name, "the document boundaries are missing", fix=fix)


def _refusal(name: str, reason: str, *, fix: str) -> InputError:
    return InputError(f"a layer cannot use {name} attention: {reason}", fix=fix)


# --- a trial of the kernels ------------------------------------------------------------------------------------------


def kernel_failure(attention: Attention, *, head_dim: int = 64, dtype: str = "bfloat16") -> str | None:
    """Why varlen or flex fails on the current GPU, tried forward and backward on a few tokens; None if it works."""
    attend: Any = _varlen if attention.training == VARLEN else functools.partial(_flex, softcap=50.0)
    device = torch.device("cuda")
    positions = np.concatenate([np.arange(BLOCK), np.arange(BLOCK)])[None]
    try:
        shape = (1, 2, positions.size, head_dim)
        parts = [torch.ones(shape, device=device, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3)]
        out, _ = attend(None, *parts, None, **boundaries(positions, device, attention))
        gradients = torch.autograd.grad(out.sum(), parts)
        finite = all(bool(tensor.isfinite().all()) for tensor in (out, *gradients))
    except torch.OutOfMemoryError:
        raise  # not a failure of the kernel
    except compiler_errors(InputError, RuntimeError) as error:
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]
    return None if finite else "its results are not finite for an input of ones"


# --- what the layers of a model need ---------------------------------------------------------------------------------
# A configuration may contain a window that the layers do not pass on, or the layers may make a mask of their own. So a few
# tokens go through the loaded model, with an attention function that computes nothing and records what the layers pass to it.


def unpackable(model: Any) -> str | None:
    """Why no attention separates packed examples of an architecture; None if one may."""
    kind = model.config.model_type
    if getattr(model, "_is_stateful", False):
        return f"{kind} carries a state along the row, from one packed example into the next"
    if "position_ids" not in _arguments(model):
        return f"{kind} takes no positions, so it cannot separate the packed examples of a row"
    return None


def supported_attention(model: Any, attention: Attention) -> Attention:
    """`attention`, or transformers' own with the reason, if a layer of the model needs more than ours supports.

    Call it before adapters are added. It does not switch the implementation: `model.set_attn_implementation` does.
    """
    if attention.name not in OURS:
        return attention
    calls: list[tuple[str | None, bool]] = []
    arguments = _arguments(model)
    passes_on = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    if passes_on and "position_ids" in arguments:
        _record_calls(model, calls)
    reasons = [reason for reason, _ in calls if reason is not None]
    if not calls:
        reasons = ["its layers do not pass keyword arguments on to an attention function of transformers"]
    softcap = any(capped for _, capped in calls)
    if softcap and attention.training == VARLEN:
        reasons.append("its scores are soft-capped")
    if not reasons:
        return attention
    # sdpa ignores what a class without it needs, for example the sinks of gpt-oss
    name = "sdpa" if model._supports_sdpa and not softcap else "eager"
    return attention_of(name, f"{attention.name} does not support this model: {reasons[0]}; {MASKED}")


def _arguments(model: Any) -> Any:
    return inspect.signature(model.base_model.forward).parameters


def _record_calls(model: Any, calls: list[tuple[str | None, bool]]) -> None:
    """Two examples of two tokens through the model, in training mode: only then a layer passes its dropout."""
    register()
    device = next(model.parameters()).device
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    before, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = PROBE
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model.base_model(
                input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, probe_calls=calls
            )
    finally:
        model.config._attn_implementation = before
        model.train(training)


def _probe_mask(**arguments: Any) -> torch.Tensor:
    """transformers' mask, with an attribute that records its arguments."""
    mask = sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    plain = arguments.get("attention_mask") is None and not arguments.get("use_vmap")
    mask.made_for = (plain, arguments.get("local_size"))
    return mask


def _probe(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    probe_calls: list[tuple[str | None, bool]] | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Returns zeros; records what the layer needs and our kernels do not support, and whether scores are soft-capped."""
    reason = _missing(module, query, key, value, dropout, more)
    plain, window = getattr(attention_mask, "made_for", (False, None))
    if reason is None and not plain:
        reason = "it makes a mask of its own"
    elif reason is None and window != sliding_window:
        reason = f"its mask has a window of {window}, its layer one of {sliding_window}"
    if probe_calls is not None:
        probe_calls.append((reason, softcap is not None))
    rows, heads, tokens, _ = query.shape
    return query.new_zeros(rows, tokens, heads, value.shape[-1]), None
