"""What a model of the JAX engine holds and says, to be compared with what others make of the folder it is saved in."""

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

from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.chunked_loss import head_logits
from tunix_rt.engines.jax.load import Engine, memory_is_named
from tunix_rt.engines.jax.mesh import rows_for
from tunix_rt.engines.jax.model import forward, head_table
from tunix_rt.engines.jax.save import host_copy, saved_leaves
from tunix_rt.engines.jax.weights import entries
from tunix_rt.plan.jax_memory import row_length


def last_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Logits of the token after each prompt, [prompts, vocabulary]. All are asked at once, padded on the right, where
    nobody looks."""
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
    with memory_is_named("the last look at the model"):
        found = run(engine.params, ids, last)
    return np.array(found, np.float32)[: len(prompts)]


def token_gaps(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[list[float]]:
    """How far the logit of each token of an answer lies below the largest in its place; last, the best of `ends` after it.
    One is asked at a time: its logits are many."""
    tokens = row_length(
        max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)), engine.device
    )
    run = jax.jit(
        partial(_gaps, engine.architecture, engine.recipe.compute, engine.attending(tokens)),
        out_shardings=NamedSharding(engine.mesh, PartitionSpec()),
    )
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = np.zeros((rows_for(engine.mesh, 1), tokens), np.int32)
        ids[:, : len(prompt) + len(answer)] = [*prompt, *answer]
        with memory_is_named("the last look at the model"):
            next_gaps, end_gaps = (
                np.array(part, np.float32) for part in run(engine.params, ids, np.array(ends, np.int32))
            )
        last = len(prompt) + len(answer) - 1
        found.append([*next_gaps[len(prompt) - 1 : last].tolist(), float(end_gaps[last])])
    return found


def _gaps(
    architecture: Architecture, compute: str, attention: Any, params: Any, ids: Any, ends: Any
) -> tuple[Any, Any]:
    """Of the first row, in every place: the gap of the token that follows, and of the best of `ends`."""
    states = _states(architecture, compute, attention, params, ids)
    logits = head_logits(states[:1], head_table(params), compute=compute, softcap=architecture.logit_cap)[0]
    largest = logits.max(axis=1)
    following = jnp.take_along_axis(logits, jnp.roll(ids[0], -1)[:, None], axis=1)[:, 0]
    return largest - following, largest - logits[:, ends].max(axis=1)


def _last(architecture: Architecture, compute: str, attention: Any, params: Any, ids: Any, last: Any) -> Any:
    states = _states(architecture, compute, attention, params, ids)
    chosen = jnp.take_along_axis(states, last[:, None, None], axis=1)
    return head_logits(chosen, head_table(params), compute=compute, softcap=architecture.logit_cap)[:, 0]


def _states(architecture: Architecture, compute: str, attention: Any, params: Any, ids: Any) -> Any:
    rows, tokens = ids.shape
    # Learned positions end somewhere; what stands behind a prompt may have any.
    positions = jnp.broadcast_to(jnp.arange(tokens) % architecture.shape.max_positions, (rows, tokens))
    return forward(
        params, ids, positions, jnp.zeros((rows, tokens), jnp.int32), architecture, compute=compute, attention=attention
    )


@memory_is_named("the hashing of the final model")
def tensor_hashes(engine: Engine) -> dict[str, list[Any]]:
    """Type, shape and SHA-256 of every tensor as `save` writes it; of a tied head also under its own name, as transformers
    lists it."""
    found: dict[str, list[Any]] = {}
    for leaf in saved_leaves(engine):
        values = host_copy(leaf.array)
        for name, tensor in zip(leaf.names, values if leaf.of_layers else [values], strict=True):
            digest = hashlib.sha256(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data).hexdigest()
            found[name] = [leaf.dtype.name, list(leaf.shape), digest]
    if engine.architecture.shape.tied_head:
        found["lm_head.weight"] = found[entries(engine.architecture)[0].name]
    return found


def room_beside(engine: Engine) -> int:
    """Memory of the devices that another process can have: none, since jax takes it all when it starts. On a CPU, which is
    asked elsewhere, 0."""
    return 0


def release(engine: Engine) -> None:
    """Let go of the model and of the memory it took. The engine is of no use afterwards."""
    engine.params = engine.step = None
    gc.collect()
