"""Logits, hashes and memory of a model of the JAX engine, to compare it with a saved folder that transformers loads."""

import gc
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from tunix_rt.engines.failures import memory_errors_named
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.chunked_loss import head_logits
from tunix_rt.engines.jax.load import Engine
from tunix_rt.engines.jax.mesh import rows_for
from tunix_rt.engines.jax.model import forward, lm_head_weight
from tunix_rt.engines.jax.save import host_copy, saved_leaves
from tunix_rt.engines.jax.weights import entries
from tunix_rt.plan.jax_floor import row_length


def last_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Logits of the token after each prompt, [prompts, vocabulary], in one batch that is right-padded."""
    tokens = row_length(max(map(len, prompts)), engine.device)
    rows = rows_for(engine.mesh, len(prompts))
    ids = np.zeros((rows, tokens), np.int32)
    last = np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
        last[row] = len(prompt) - 1
    run = jax.jit(
        partial(_last, engine.architecture, engine.recipe.compute, engine.attending(tokens)),
        out_shardings=NamedSharding(engine.mesh, PartitionSpec()),
    )
    with memory_errors_named("the logits of the final model"):
        logits = run(engine.params, ids, last)
    return np.array(logits, np.float32)[: len(prompts)]


def token_gaps(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[list[float]]:
    """How far the logit of each token of an answer is below the largest at its position; last, that of the best of `ends`. One
    answer at a time, whose logits are large."""
    tokens = row_length(
        max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)), engine.device
    )
    run = jax.jit(
        partial(_gaps, engine.architecture, engine.recipe.compute, engine.attending(tokens)),
        out_shardings=NamedSharding(engine.mesh, PartitionSpec()),
    )
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = np.zeros((rows_for(engine.mesh, 1), tokens), np.int32)
        ids[:, : len(prompt) + len(answer)] = [*prompt, *answer]
        with memory_errors_named("the logits of the final model"):
            next_gaps, end_gaps = (
                np.array(part, np.float32) for part in run(engine.params, ids, np.array(ends, np.int32))
            )
        last = len(prompt) + len(answer) - 1
        gaps.append([*next_gaps[len(prompt) - 1 : last].tolist(), float(end_gaps[last])])
    return gaps


def _gaps(
    architecture: Architecture, compute: str, attention: Any, params: Any, ids: Any, ends: Any
) -> tuple[Any, Any]:
    """Of the first row, at every position: the gap of the next token, and of the best of `ends`."""
    states = _states(architecture, compute, attention, params, ids)
    logits = head_logits(states[:1], lm_head_weight(params), compute=compute, softcap=architecture.logit_cap)[0]
    largest = logits.max(axis=1)
    following = jnp.take_along_axis(logits, jnp.roll(ids[0], -1)[:, None], axis=1)[:, 0]
    return largest - following, largest - logits[:, ends].max(axis=1)


def _last(architecture: Architecture, compute: str, attention: Any, params: Any, ids: Any, last: Any) -> Any:
    states = _states(architecture, compute, attention, params, ids)
    chosen = jnp.take_along_axis(states, last[:, None, None], axis=1)
    return head_logits(chosen, lm_head_weight(params), compute=compute, softcap=architecture.logit_cap)[:, 0]


def _states(architecture: Architecture, compute: str, attention: Any, params: Any, ids: Any) -> Any:
    rows, tokens = ids.shape
    # Learned positions have a limit; those of the padding are arbitrary.
    positions = jnp.broadcast_to(jnp.arange(tokens) % architecture.shape.max_positions, (rows, tokens))
    return forward(
        params, ids, positions, jnp.zeros((rows, tokens), jnp.int32), architecture, compute=compute, attention=attention
    )


@memory_errors_named("the hashes of the final model")
def tensor_hashes(engine: Engine) -> dict[str, list[Any]]:
    """dtype, shape and SHA-256 of every tensor as `save` writes it; a tied lm_head also under its own name, as in
    transformers."""
    hashes: dict[str, list[Any]] = {}
    for leaf in saved_leaves(engine):
        values = host_copy(leaf.array)
        for name, tensor in zip(leaf.names, values if leaf.of_layers else [values], strict=True):
            digest = hashlib.sha256(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data).hexdigest()
            hashes[name] = [leaf.dtype.name, list(leaf.shape), digest]
    if engine.architecture.shape.tied_head:
        hashes["lm_head.weight"] = hashes[entries(engine.architecture)[0].name]
    return hashes


def room_beside(engine: Engine) -> int:
    """0: jax reserves the device memory when it starts. On a CPU, whose memory is read elsewhere, 0."""
    return 0


def release(engine: Engine) -> None:
    """Free the memory of the model. The engine cannot be used afterwards."""
    engine.params = engine.step = None
    gc.collect()
