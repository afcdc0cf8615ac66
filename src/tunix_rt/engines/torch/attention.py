"""Attention over packed rows: which kernel serves a run, and the two that are ours, as transformers calls them.

A row holds examples side by side, and no token may look across the border between two of them. transformers' own
attention learns the borders from positions that restart, by a mask of tokens x tokens in every forward pass. Ours are told
them by `boundaries`, and make no such mask:

    varlen   torch's flash attention over examples of any length, laid end to end
    flex     FlexAttention, for scores that are soft-capped

No mask is registered with transformers for their names, on purpose: then it makes none, and does not wait for the device to
find out whether one is needed. They refuse to compute where the borders are missing, or a layer asks for more than they do.
"""

import functools
import importlib.util
import inspect
import subprocess
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

from tunix_rt.engines.torch.varlen import BLOCK, PackedRows, varlen_borders
from tunix_rt.errors import InputError

VARLEN, FLEX, ASKING = "tunix_rt_varlen", "tunix_rt_flex", "tunix_rt_asking"
"""Names under which transformers knows our functions. They must not hold `flash`, `sdpa` or `flex_attention`, by which it
knows its own."""

_NARROW = ("bfloat16", "float16")
_MASKED = "transformers makes a mask of tokens x tokens from positions that restart"
_VARLEN_TAKES = frozenset(inspect.signature(varlen_attn).parameters)
_TAKES_NOT = sorted({"scale", "window_size"} - _VARLEN_TAKES)
VARLEN_LACKS = (
    f"varlen_attn of torch {torch.__version__} takes no {' and no '.join(_TAKES_NOT)}, that of torch 2.11 does"
    if _TAKES_NOT
    else None
)
"""What the installed torch's varlen_attn cannot do; None where it can."""


# --- the choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Which attention a run uses."""

    name: str
    """What the log says: varlen, flex, sdpa or eager."""
    training: str
    """Implementation for training and held-out loss, as transformers knows it. Keeps no cache."""
    generating: str
    """Implementation for `generate`, which keeps one: sdpa or eager."""
    why: str


def choose_attention(
    *,
    device: str,
    dtype: str,
    capability: tuple[int, int] | None,
    softcap: bool,
    dropout: bool,
    head_dim: int,
    deterministic: bool,
    sdpa: bool = True,
    varlen_lacks: str | None = VARLEN_LACKS,
) -> Attention:
    """The fastest attention that is exact for packed rows of such a model. `dtype` is that of the products.

    `sdpa` says whether transformers' class of the model knows that attention (`_supports_sdpa`). `flex` still has to be
    tried (`flex_works`), and a layer may ask for more than its configuration says (`fitting`).
    """
    if not sdpa and not softcap:
        why = f"transformers knows this architecture with its eager attention alone: {_MASKED}"
        return _masked(softcap, why, sdpa=False)
    if device != "cuda" or capability is None or capability < (8, 0):
        where = "on the CPU" if device != "cuda" else f"{_capability(capability)}, and our kernels need 8.0"
        return _masked(softcap, f"{where}: {_MASKED}")
    if dropout:
        return _masked(
            softcap, f"the model drops attention weights at random, which needs the plain kernels: {_MASKED}"
        )
    if softcap:
        if dtype not in (*_NARROW, "float32"):
            return _masked(softcap, f"FlexAttention knows no {dtype}: {_MASKED}")
        if head_dim < 16:
            return _masked(softcap, f"FlexAttention knows heads of 16 and more, not of {head_dim}: {_MASKED}")
        words = (
            "scores are soft-capped, which FlexAttention compiles into its kernel; blocks nobody looks at are left out"
        )
        return Attention(name="flex", training=FLEX, generating="eager", why=words)
    if dtype not in _NARROW:
        return _masked(softcap, f"flash attention knows no {dtype}: {_MASKED}")
    if refused := varlen_lacks or _without_flash(head_dim, capability):
        return _masked(softcap, f"{refused}: {_MASKED}")
    words = "every packed example goes through torch's flash attention by itself; no mask is made"
    if deterministic:
        words += "; its backward pass adds in a fixed order"
    return Attention(name="varlen", training=VARLEN, generating="sdpa", why=words)


def _masked(softcap: bool, why: str, *, sdpa: bool = True) -> Attention:
    """transformers' own; soft-capped scores, and models without `sdpa`, are known to its eager attention alone."""
    name = "sdpa" if sdpa and not softcap else "eager"
    return Attention(name=name, training=name, generating=name, why=why)


def _without_flash(head_dim: int, capability: tuple[int, int] | None) -> str | None:
    """Why flash attention has no kernel, or no backward kernel, for this head size; None where it has both."""
    if head_dim % 8 or head_dim > 256:
        return f"flash attention knows heads of 8 to 256 in steps of 8, not of {head_dim}"
    small = capability is not None and ((8, 6) <= capability <= (8, 9) or capability[0] == 12)
    if small and 192 < head_dim <= 224:  # the same rule as in torch's own dispatch (sdp_utils.cpp)
        return f"flash attention has no backward pass for heads of {head_dim} where the {_capability(capability)}"
    return None


def _capability(capability: tuple[int, int] | None) -> str:
    return f"compute capability is {'not known' if capability is None else '{}.{}'.format(*capability)}"


def register() -> None:
    """Make our names known to transformers."""
    AttentionInterface.register(VARLEN, _varlen)
    AttentionInterface.register(FLEX, _flex)
    AttentionInterface.register(ASKING, _asking)
    AttentionMaskInterface.register(ASKING, _asking_mask)


@contextmanager
def kernels(attention: Attention, *, deterministic: bool) -> Iterator[None]:
    """Kernels that `scaled_dot_product_attention` may take: with `deterministic`, those whose backward pass adds in order.

    Hold it around the backward pass as well: with gradient checkpointing, attention is computed again there.
    """
    if not deterministic:
        yield
        return
    in_order = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if attention.training == VARLEN and not in_order:
        raise ValueError("varlen adds in order only under torch.use_deterministic_algorithms(True)")
    # Flash attention heeds the switch above; the memory-efficient and the cuDNN kernel are not relied on. What flash cannot
    # take (a mask, float32) is left to plain products.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield


# --- the borders -----------------------------------------------------------------------------------------------------


def boundaries(
    positions: npt.NDArray[np.int64], device: torch.device, attention: Attention, *, windows: Sequence[int] = ()
) -> dict[str, Any]:
    """Keyword arguments for the model's forward pass that tell our attention where examples begin; else none.

    From positions on the host, so that nobody waits for the device. `windows` are the model's sliding windows: flex makes
    the masks for them now; one that is not named is made in the first layer that has it, outside of any compiled code.
    """
    if attention.training == VARLEN:
        cumulative, longest = varlen_borders(positions, device)
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
        raise _untold("varlen")
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
    """Causal attention over [tokens, heads, size], by torch. A token sees at most `before` tokens before it."""
    if VARLEN_LACKS is not None:
        raise _refusal("varlen", VARLEN_LACKS, fix="install torch 2.11 or newer")
    narrow = _computed_in(value)
    if narrow not in (torch.bfloat16, torch.float16):
        known = "flash attention knows float16 and bfloat16"
        raise _refusal("varlen", f"its values are {narrow}, and {known}", fix="set training.dtype: bfloat16 or float16")
    # Up to torch 2.11 the kernel takes fewer key heads unasked.
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
        raise _untold("flex")
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
    """Whole or not at all: in pieces it would lay out all scores, and only be slow and large."""
    return torch.compile(flex_attention, fullgraph=True)


def _computed_in(value: torch.Tensor) -> torch.dtype:
    """The type of the products. Under autocast, queries and keys may come in float32 from their rotation."""
    kind = value.device.type
    if value.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return value.dtype


def _missing(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, more: dict[str, Any]
) -> str | None:
    """What a layer asks for that our kernels do not do; None where they do it all."""
    causal = more.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return "it looks ahead"
    if dropout > 0.0:
        return "it drops attention weights"
    for name in ("s_aux", "position_bias", "head_mask"):
        if more.get(name) is not None:
            return f"it has {name}"
    if query.shape[2] != key.shape[2]:
        return f"it has {key.shape[2]} keys for {query.shape[2]} queries, so it keeps a cache"
    if query.shape[-1] != value.shape[-1]:
        return f"its keys have size {query.shape[-1]}, its values {value.shape[-1]}"
    return None


VARLEN_FIX = (
    "use a model whose layers ask for causal attention with at most a sliding window; or set training.dtype: float32, "
    "with which transformers' own attention serves"
)
FLEX_FIX = "use a model whose layers ask for causal attention with at most a sliding window and soft-capped scores"


def _refuse_unfit(name: str, missing: str | None, mask: torch.Tensor | None, fix: str) -> None:
    """Refuse a layer that asks for what the kernel lacks, or comes with a mask, which the kernel would not look at."""
    if reason := missing or ("it has a mask" if mask is not None else None):
        raise _refusal(name, reason, fix=fix)


def _untold(name: str) -> InputError:
    fix = "pass what `boundaries` gives to the model's forward pass; `generate` takes sdpa or eager attention"
    return _refusal(name, "it was not told where examples begin", fix=fix)


def _refusal(name: str, reason: str, *, fix: str) -> InputError:
    return InputError(f"a layer cannot use {name} attention: {reason}", fix=fix)


# --- what is tried ---------------------------------------------------------------------------------------------------


def works(attention: Attention, *, head_dim: int = 64, dtype: str = "bfloat16") -> str | None:
    """Why varlen or flex does not work on the GPU in use, tried forth and back on a few tokens; None where it does."""
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
        raise  # says nothing of the kernel
    except _compile_errors() as error:
        return f"{type(error).__name__}: " + " ".join(str(error).split())[:200]
    return None if finite else "it gives no finite numbers for ones"


def flex_works(*, head_dim: int = 64, dtype: str = "bfloat16") -> str | None:
    """`works` for flex, which needs Triton, a C compiler, and shared memory for its blocks. Takes seconds: it compiles."""
    return works(Attention(name="flex", training=FLEX, generating="eager", why=""), head_dim=head_dim, dtype=dtype)


def _compile_errors() -> tuple[type[Exception], ...]:
    """What a missing or failing compiler raises; errors of torch's own are RuntimeErrors."""
    known = (InputError, RuntimeError, ImportError, OSError, subprocess.SubprocessError)
    if importlib.util.find_spec("triton") is None:
        return known
    return (*known, importlib.import_module("triton.errors").TritonError)


# --- what a model's layers ask for -----------------------------------------------------------------------------------
# A configuration may hold a window that its layers do not pass on, or its layers may mask in a way of their own. So a few
# tokens go through the loaded model, and an attention function that attends to nothing notes what the layers ask of it.


def refuse_unpackable(model: Any, name: str) -> None:
    """Refuse an architecture for which no attention keeps packed examples apart."""
    kind = model.config.model_type
    if getattr(model, "_is_stateful", False):
        problem = f"{name}: {kind} carries a state along the row, which the next example in it would inherit"
    elif "position_ids" not in _arguments(model):
        problem = f"{name}: {kind} takes no positions, so it cannot be told where the next example in a row begins"
    else:
        return
    fix = "use a model whose layers are all attention and which takes positions, as Gemma, Llama, Qwen and GPT-2 do"
    raise InputError(problem, fix=fix)


def fitting(model: Any, attention: Attention) -> Attention:
    """`attention`, or transformers' own with the reason, where a layer of the model asks for more than ours does.

    Ask before adapters are added. The implementation is not switched here: `model.set_attn_implementation` does that.
    """
    if attention.training not in (VARLEN, FLEX):
        return attention
    calls: list[tuple[str | None, bool]] = []
    if any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in _arguments(model).values()):
        _ask(model, calls)
    reasons = [reason for reason, _ in calls if reason is not None]
    if not calls:
        reasons = ["its layers do not pass keyword arguments on to an attention function of transformers"]
    softcap = any(capped for _, capped in calls)
    if softcap and attention.training == VARLEN:
        reasons.append("its scores are soft-capped")
    if not reasons:
        return attention
    why = f"{attention.name} cannot serve it: {reasons[0]}; {_MASKED}"
    # sdpa takes no heed of what a class without it asks for, as of the sinks of gpt-oss
    return _masked(softcap, why, sdpa=model._supports_sdpa)


def _arguments(model: Any) -> Any:
    return inspect.signature(model.base_model.forward).parameters


def _ask(model: Any, calls: list[tuple[str | None, bool]]) -> None:
    """Two examples of two tokens through the model, as if it trained: only then a layer says that it drops weights."""
    register()
    device = next(model.parameters()).device
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    before, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = ASKING
    model.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model.base_model(
                input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, asked_of=calls
            )
    finally:
        model.config._attn_implementation = before
        model.train(training)


def _asking_mask(**asked: Any) -> torch.Tensor:
    """transformers' mask, with a note on it of what it was made for."""
    mask = sdpa_mask(**{**asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    plain = asked.get("attention_mask") is None and not asked.get("use_vmap")
    mask.made_for = (plain, asked.get("local_size"))
    return mask


def _asking(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, *,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    asked_of: list[tuple[str | None, bool]] | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attends to nothing; notes what our kernels could not do of what is asked, and whether scores are soft-capped."""
    reason = _missing(module, query, key, value, dropout, more)
    plain, window = getattr(attention_mask, "made_for", (False, None))
    if reason is None and not plain:
        reason = "it makes a mask of its own"
    elif reason is None and window != sliding_window:
        reason = f"its mask has a window of {window}, its layer says {sliding_window}"
    if asked_of is not None:
        asked_of.append((reason, softcap is not None))
    rows, heads, tokens, _ = query.shape
    return query.new_zeros(rows, tokens, heads, value.shape[-1]), None
