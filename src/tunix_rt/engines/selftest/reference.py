"""What kernels are compared with: numpy in float64, every gradient written out by hand. No engine takes part."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Output of attention, and the gradients of sum(out * upstream)."""

    out: Array
    dq: Array
    dk: Array
    dv: Array
    of_query: Array
    """Root of the summed squares of the weights with which a query sees its keys [rows, heads, tokens, 1]: the size of
    its row of `out` where v is standard normal."""
    of_key: Array
    """The same of the weights with which a key is seen [rows, kv_heads, tokens, 1]: the size of its row of `dv`."""


def seen(
    tokens: int, *, examples: np.ndarray[Any, Any] | None = None, window: int | None = None
) -> np.ndarray[Any, Any]:
    """Which key (column) a query (row) of a row of `tokens` sees: no later one, none of another of the packed `examples`
    [tokens], and of its own the last `window`, itself among them."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None, :]
    visible = key <= query
    if examples is not None:
        visible &= examples[:, None] == examples[None, :]
    if window is not None:
        visible &= query - key < window
    return visible


def attention(
    q: Array,
    k: Array,
    v: Array,
    upstream: Array,
    *,
    examples: np.ndarray[Any, Any] | None = None,
    window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Attention:
    """Causal attention, scores times `scaling` (one over the root of the head size), bent by `softcap` where given.

    q is [rows, heads, tokens, size]; k and v may have fewer heads, each shared by a group of neighbouring query heads.
    `examples` and `window` as in `seen`."""
    rows, heads, tokens, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    scale = size**-0.5 if scaling is None else scaling
    k_all, v_all = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    raw = (q @ k_all.swapaxes(-1, -2)) * scale
    bent = np.tanh(raw / softcap) if softcap else raw
    scores = np.where(seen(tokens, examples=examples, window=window), bent * softcap if softcap else raw, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    # out = weights @ v, weights = softmax(scores), scores = cap(scale * q @ k^T)
    d_weights = upstream @ v_all.swapaxes(-1, -2)
    d_scores = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True)) * scale
    if softcap:
        d_scores *= 1.0 - bent**2
    dk = d_scores.swapaxes(-1, -2) @ q
    dv = weights.swapaxes(-1, -2) @ upstream
    shared = (rows, kv_heads, group, tokens, size)  # a shared head gets the gradients of all its query heads
    squares = weights**2
    return Attention(
        out=weights @ v_all,
        dq=d_scores @ k_all,
        dk=dk.reshape(shared).sum(axis=2),
        dv=dv.reshape(shared).sum(axis=2),
        of_query=np.sqrt(squares.sum(axis=-1))[..., None],
        of_key=np.sqrt(squares.sum(axis=-2).reshape(shared[:-1]).sum(axis=2))[..., None],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Summed cross entropy and its gradients."""

    loss: float
    d_states: Array
    d_head: Array
    of_target: Array
    """Root of the summed squares of a target's gradients of the logits [targets, 1]: the size of its row of `d_states`
    where the head is standard normal."""
    of_token: Array
    """The same for a token of the vocabulary [vocabulary, 1], and its row of `d_head`."""


def cross_entropy(states: Array, head: Array, targets: np.ndarray[Any, Any], *, softcap: float | None = None) -> Loss:
    """Cross entropy summed over `targets`. `states` is [targets, hidden], `head` [vocabulary, hidden]."""
    raw = states @ head.T
    bent = np.tanh(raw / softcap) if softcap else raw
    logits = bent * softcap if softcap else raw
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(axis=-1))
    at = np.arange(len(targets))
    d_logits = np.exp(shifted - log_sums[:, None])
    d_logits[at, targets] -= 1.0
    d_raw = d_logits * (1.0 - bent**2) if softcap else d_logits
    return Loss(
        loss=float((log_sums - shifted[at, targets]).sum()),
        d_states=d_raw @ head,
        d_head=d_raw.T @ states,
        of_target=np.sqrt((d_raw**2).sum(axis=1))[:, None],
        of_token=np.sqrt((d_raw**2).sum(axis=0))[:, None],
    )
