"""Generation of the JAX engine: prompts of mixed lengths in one batch, left-padded, with a KV cache.

A generation does not depend on its batch. Programs are compiled for one number of rows and columns, so both are rounded up to
powers of two, prompts are prefilled in chunks, and rows that have ended leave only when three quarters have: a whole evaluation
needs a handful of programs. Masks, never shapes, decide what a row attends to.

Sampling uses the random numbers of the PyTorch engine, which needs 64-bit integers and floats.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix_rt.engines.decoding import NOT_A_TOKEN, Answer, Decoding, Prompt, generate_in_batches, random_bits, uniform
from tunix_rt.engines.failures import memory_errors_named
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.chunked_loss import head_logits
from tunix_rt.engines.jax.load import Engine
from tunix_rt.engines.jax.mesh import ROWS, rows_for
from tunix_rt.engines.jax.model import lm_head_weight, masked_attention, through_layers, within_window

Array = Any

PIECE = 64
"""Tokens of a prompt that are prefilled at once."""
LEAST_COLUMNS = 2 * PIECE
SHRINK_FACTOR, FEWEST_ROWS = 4, 8
"""The batch shrinks when at most one row in so many is alive, and not below so many rows, which take as long as fewer."""
LOOK_EVERY = {"cpu": 4, "cuda": 16, "tpu": 16}
"""Tokens between two reads, each of which synchronizes, where only the host finds the end of a generation: by its text, or by
the clock."""
MOST_TOKENS = 64
"""The same where stop tokens alone end generations: the loop on the device ends when enough rows have one."""
DRAWN_AT_ONCE = 4 * 2**20
"""Logits that a device samples at once: noise and sort order of a logit take some 60 bytes."""


class _Model(NamedTuple):
    """What decides the compiled program, besides shapes."""

    architecture: Architecture
    compute: Any
    """The compute dtype."""
    mesh: Mesh


class _Batch(NamedTuple):
    """The state on the devices. A column is a token, of the prompt or generated; new tokens of all rows start in the same one."""

    keys: Array
    """[layers, rows, columns, KV heads, head dim]"""
    values: Array
    begins: Array
    """[rows]: the first column that is not padding."""
    held: Array
    """Columns in the KV cache."""
    states: Array
    """[rows, 1, hidden]: the hidden states that the next token is predicted from."""


class _Sampling(NamedTuple):
    """How tokens are sampled."""

    keys: Array
    """[rows, tokens between two reads]: random bits for each new token."""
    temperature: Array
    top_p: Array | None
    """None: all tokens."""


class _Loop(NamedTuple):
    """When the loop over new tokens ends."""

    alive: Array
    """[rows]: whether the generation has not ended."""
    stops: Array
    """The stop tokens."""
    count: Array
    """The most new tokens."""
    fewest: Array
    """The loop ends when at most so many rows are alive."""


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    decoding: Decoding,
    stop_ids: Sequence[int],
    pad_id: int,
    decode: Callable[[list[int]], str],
    batch_size_at: Callable[[int], int],
    on_tokens: Callable[[int, list[int]], bool] | None = None,
    logprobs: bool = False,
) -> Iterator[tuple[int, Answer]]:
    """See `base.EngineModule.generate`."""
    with memory_errors_named("generation"):
        params = _in_compute_dtype(engine.params, engine.compute)
    yield from generate_in_batches(
        prompts,
        lambda rows: _generate(engine, params, rows, decoding, pad_id, on_tokens, logprobs),
        positions=engine.positions,
        decoding=decoding,
        stop_ids=stop_ids,
        decode=decode,
        batch_size_at=batch_size_at,
        most=len(prompts) * decoding.samples,  # jax frees the memory of deleted arrays by itself
    )


def _in_compute_dtype(params: Mapping[str, Any], compute: Any) -> dict[str, Any]:
    """The parameters with their matrices in the compute dtype, to which they would else be cast for every token. The embedding
    keeps its dtype for the lookup, so a tied lm_head becomes an array of its own."""
    if params["embedding"].dtype == compute:
        return dict(params)
    layers = params["layers"]
    matrices = {name: _cast(array, compute) if array.ndim == 3 else array for name, array in layers.items()}
    return {**params, "layers": matrices, "head": _cast(lm_head_weight(params), compute)}


@partial(jax.jit, static_argnums=1)
def _cast(array: Array, dtype: Any) -> Array:
    return array.astype(dtype)


# --- on the host -----------------------------------------------------------------------------------------------------


def _generate(
    engine: Engine,
    params: Mapping[str, Any],
    rows: Sequence[Prompt],
    decoding: Decoding,
    pad_id: int,
    on_tokens: Callable[[int, list[int]], bool] | None,
    logprobs: bool,
) -> Iterator[tuple[Prompt, Answer]]:
    """Each prompt with its generation, as they end."""
    began = time.monotonic()
    model = _Model(architecture=engine.architecture, compute=engine.compute, mesh=engine.mesh)
    by_host = decoding.closing is not None or decoding.max_seconds is not None
    most = 1 if on_tokens is not None else LOOK_EVERY[engine.device] if by_host else MOST_TOKENS
    stops = np.array(sorted(rows[0].ending.stop_ids), np.int32)
    for row in rows:
        row.restart()
    longest = max(row.max_new for row in rows)
    with memory_errors_named("generation"):
        batch = _begin(model, params, rows, longest, pad_id)
    slots: list[Prompt | None] = [*rows]  # the rows of the batch; None once a generation has ended
    keys, taken = _keys(rows, decoding, longest + most), 0
    while any(slots):
        count = min(most, max(row.max_new for row in slots if row) - taken)
        with memory_errors_named("generation"), _wide(decoding):
            sampling = _sampling(slots, keys, range(taken, taken + most), len(batch.begins), decoding)
            alive = np.array([place < len(slots) and slots[place] is not None for place in range(len(batch.begins))])
            loop = _Loop(alive=alive, stops=stops, count=np.int32(count), fewest=np.int32(_fewest(model, len(alive))))
            batch, *found = _more_tokens(model, most, params, batch, sampling, loop, logprobs)
            done, fresh, scores = int(found[0]), np.asarray(found[1]).tolist(), np.asarray(found[2]).tolist()
        taken += done
        late = decoding.max_seconds is not None and time.monotonic() - began >= decoding.max_seconds
        for place, row in [(place, row) for place, row in enumerate(slots) if row]:
            pairs = [(one, gap) for one, gap in scores[place][:done]] if logprobs else []
            answer = row.append(fresh[place][:done], late=late, model=engine.source.name, scores=pairs)
            if on_tokens is not None and on_tokens(row.index, row.ids if answer is None else answer.ids):
                answer = answer or row.cut_off()
            if answer is not None:
                slots[place] = None
                yield row, answer
        kept = [place for place, row in enumerate(slots) if row]
        if kept and SHRINK_FACTOR * _rows_for(model, max(FEWEST_ROWS, len(kept))) <= len(batch.begins):
            batch, slots = _keep(model, batch, kept), [slots[place] for place in kept]


def _rows_for(model: _Model, rows: int) -> int:
    """The rows of the program for a batch of `rows`: a power of two, and a multiple of the devices."""
    return rows_for(model.mesh, _power_of_two(rows))


def _fewest(model: _Model, rows: int) -> int:
    """Rows that are alive at most when the batch of `rows` shrinks; 0 if it does not."""
    return rows // SHRINK_FACTOR if SHRINK_FACTOR * _rows_for(model, FEWEST_ROWS) <= rows else 0


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _wide(decoding: Decoding) -> contextlib.AbstractContextManager[Any]:
    """Enables 64-bit numbers for sampling, which jax truncates to 32 bits silently."""
    return jax.enable_x64(True) if decoding.temperature else contextlib.nullcontext()


def _begin(model: _Model, params: Mapping[str, Any], rows: Sequence[Prompt], longest: int, pad_id: int) -> _Batch:
    """Left-padded and prefilled prompts: new tokens of all rows start in the same column."""
    width = -(-max(len(row.prompt) for row in rows) // PIECE) * PIECE
    columns = max(LEAST_COLUMNS, _power_of_two(width + longest))
    count = _rows_for(model, len(rows))
    ids = np.full((count, width), pad_id, np.int32)
    begins = np.full(count, width - 1, np.int32)  # a row without a prompt attends to one padding token
    for place, row in enumerate(rows):
        begins[place] = width - len(row.prompt)
        ids[place, begins[place] :] = row.prompt
    batch = _empty(model, count, columns, begins)
    for start in range(0, width, PIECE):
        batch = _read(model, params, batch, ids[:, start : start + PIECE])
    return batch


def _keys(rows: Sequence[Prompt], decoding: Decoding, count: int) -> dict[int, list[int]]:
    """Random bits of each row for `count` tokens; empty in greedy decoding."""
    return {row.index: decoding.keys(row.index, count) for row in rows} if decoding.temperature else {}


def _sampling(
    slots: Sequence[Prompt | None], keys: Mapping[int, Sequence[int]], places: range, count: int, decoding: Decoding
) -> _Sampling | None:
    """For the tokens at `places` of `count` rows; None: greedy decoding."""
    if not decoding.temperature:
        return None
    bits = np.zeros((count, len(places)), np.int64)
    for slot, row in enumerate(slots):
        if row is not None:
            bits[slot] = keys[row.index][places.start : places.stop]
    top_p = np.float64(decoding.top_p) if decoding.top_p < 1 else None
    return _Sampling(keys=bits, temperature=np.float64(decoding.temperature), top_p=top_p)


def _keep(model: _Model, batch: _Batch, places: Sequence[int]) -> _Batch:
    """The rows at `places` alone, in the smallest program; the rest are copies of the first."""
    kept = np.full(_rows_for(model, max(FEWEST_ROWS, len(places))), places[0], np.int32)
    kept[: len(places)] = places
    with memory_errors_named("generation"):
        return _kept(model, batch, kept)


# --- on the devices --------------------------------------------------------------------------------------------------


def _split(model: _Model, batch: _Batch) -> _Batch:
    """Rows are sharded as in a training step."""
    rows, of_layers = PartitionSpec(ROWS), PartitionSpec(None, ROWS)
    places = _Batch(keys=of_layers, values=of_layers, begins=rows, held=PartitionSpec(), states=rows)
    shardings = (NamedSharding(model.mesh, place) for place in places)
    return _Batch(*map(jax.lax.with_sharding_constraint, batch, shardings))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(model: _Model, rows: int, columns: int, begins: Array) -> _Batch:
    shape, kind = model.architecture.shape, model.compute
    cache = jnp.zeros((shape.layers, rows, columns, shape.kv_heads, shape.head_dim), kind)
    states = jnp.zeros((rows, 1, shape.hidden), kind)
    return _split(model, _Batch(keys=cache, values=cache, begins=begins, held=jnp.int32(0), states=states))


@partial(jax.jit, static_argnums=0)
def _kept(model: _Model, batch: _Batch, places: Array) -> _Batch:
    keys, values = batch.keys[:, places], batch.values[:, places]
    kept = batch._replace(keys=keys, values=values, begins=batch.begins[places], states=batch.states[places])
    return _split(model, kept)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(model: _Model, params: Mapping[str, Any], batch: _Batch, ids: Array) -> _Batch:
    """Prefill the next tokens of every row, [rows, tokens]."""
    return _split(model, _after(model, params, batch, ids))


@partial(jax.jit, static_argnums=(0, 1, 6), donate_argnums=3)
def _more_tokens(
    model: _Model, most: int, params: Mapping[str, Any], batch: _Batch, sampling: _Sampling | None, loop: _Loop,
    logprobs: bool,
) -> tuple[_Batch, Array, Array, Array]:  # fmt: skip
    """The number of new tokens, and so many of [rows, `most`], with their scores of [rows, `most`, 2] if `logprobs`; also of
    rows that end among them."""
    lm_head, softcap, rows = lm_head_weight(params), model.architecture.logit_cap, len(batch.begins)

    def goes_on(carried: Any) -> Array:
        number, alive, *_ = carried
        return (number < loop.count) & (alive.sum(dtype=jnp.int32) > loop.fewest)

    def one_more(carried: Any) -> Any:
        number, alive, batch, tokens, scores = carried
        logits = head_logits(batch.states, lm_head, compute=model.compute, softcap=softcap)[:, 0]
        chosen, found = _choose(model, logits, sampling, number, logprobs)
        valid = jnp.where(jnp.isnan(logits).any(axis=-1), NOT_A_TOKEN, chosen)
        tokens = jax.lax.dynamic_update_slice(tokens, valid[:, None], (jnp.int32(0), number))
        if logprobs:
            scores = jax.lax.dynamic_update_slice(scores, found[:, None], (jnp.int32(0), number, jnp.int32(0)))
        alive = alive & ~(valid[:, None] == loop.stops).any(axis=1) & (valid != NOT_A_TOKEN)
        return (
            number + jnp.int32(1),
            alive,
            _split(model, _after(model, params, batch, chosen[:, None])),
            tokens,
            scores,
        )

    tokens = jnp.zeros((rows, most), jnp.int32)
    scores = jnp.zeros((rows, most, 2) if logprobs else (0,), jnp.float32)
    number, _, batch, tokens, scores = jax.lax.while_loop(
        goes_on, one_more, (jnp.int32(0), loop.alive, batch, tokens, scores)
    )
    return batch, number, tokens, scores


def _after(model: _Model, params: Mapping[str, Any], batch: _Batch, ids: Array) -> _Batch:
    """`batch` after the columns `ids` [rows, tokens], through the layers of training."""
    architecture = model.architecture
    queries = batch.held + jnp.arange(ids.shape[1], dtype=jnp.int32)
    columns = jnp.arange(batch.keys.shape[2], dtype=jnp.int32)
    is_token = columns >= batch.begins[:, None]
    # A row that has ended is computed until the next read, with positions clamped to the last.
    positions = jnp.clip(queries - batch.begins[:, None], 0, architecture.shape.max_positions - 1)

    def mix(query: Array, key: Array, value: Array, kind: Array, memory: Any) -> tuple[Array, Any]:
        layer, *cache = memory
        place = (layer, jnp.int32(0), batch.held, jnp.int32(0), jnp.int32(0))
        cache = [
            jax.lax.dynamic_update_slice(part, new[None], place) for part, new in zip(cache, (key, value), strict=True)
        ]
        keys, values = (jax.lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in cache)
        seen = within_window(queries, columns, kind, architecture) & is_token[:, None]
        return masked_attention(query, keys, values, seen, architecture), (layer + 1, *cache)

    states, (_, keys, values) = through_layers(
        params, ids, positions, architecture, mix, (jnp.int32(0), batch.keys, batch.values), compute=model.compute
    )
    return batch._replace(keys=keys, values=values, held=batch.held + ids.shape[1], states=states[:, -1:])


# --- sampling --------------------------------------------------------------------------------------------------------


def _choose(
    model: _Model, logits: Array, sampling: _Sampling | None, number: Array, logprobs: bool
) -> tuple[Array, Array]:
    """The most likely token of each row, or a sampled one, a few rows at a time; with `logprobs` its log-probability and its
    distance from the runner-up, [rows, 2]."""
    if sampling is None:
        return _largest(logits, logits, logprobs)
    keys = jax.lax.dynamic_index_in_dim(sampling.keys, number, axis=1, keepdims=False)
    rows, vocabulary = logits.shape
    parts = 1
    while rows // model.mesh.size % (2 * parts) == 0 and rows // model.mesh.size * vocabulary > parts * DRAWN_AT_ONCE:
        parts *= 2
    if parts == 1:
        return _largest(_noisy(logits, keys, sampling), logits, logprobs)
    # Interleaved: each part has the same number of rows of each device, and nothing is moved.
    apart = [jnp.moveaxis(array.reshape(-1, parts, *array.shape[1:]), 1, 0) for array in (logits, keys)]
    found = jax.lax.map(lambda some: _largest(_noisy(some[0], some[1], sampling), some[0], logprobs), tuple(apart))
    chosen, scores = (jnp.moveaxis(part, 0, 1) for part in found)
    return chosen.reshape(rows), scores.reshape(rows, -1)


def _largest(by: Array, logits: Array, logprobs: bool) -> tuple[Array, Array]:
    """The token with the largest score of each row, and its scores."""
    chosen = jnp.argmax(by, axis=-1).astype(jnp.int32)
    if not logprobs:
        return chosen, jnp.zeros((len(logits), 0), jnp.float32)
    best, _ = jax.lax.top_k(by, 2)
    every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    logprob = jnp.take_along_axis(every, chosen[:, None], axis=-1)[:, 0]
    return chosen, jnp.stack([logprob, (best[:, 0] - best[:, 1]).astype(jnp.float32)], axis=1)


def _noisy(logits: Array, keys: Array, sampling: _Sampling) -> Array:
    """Scores whose largest is that of the sampled token (Gumbel-max sampling). Sampling by cumulative probabilities would change
    with the last bits of all of them, which depend on the batch of a row."""
    scores = logits.astype(jnp.float64)
    scores = (scores - scores.max(axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_p is not None:
        order = jnp.argsort(scores, axis=-1, descending=True)
        ordered = jnp.take_along_axis(scores, order, axis=-1)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        beyond = jnp.cumsum(probabilities, axis=-1) - probabilities >= sampling.top_p
        scores = jnp.put_along_axis(scores, order, jnp.where(beyond, -jnp.inf, ordered), axis=-1, inplace=False)
    return scores + _gumbel(keys, scores.shape[-1])


def _gumbel(keys: Array, count: int) -> Array:
    """`count` numbers of the standard Gumbel distribution for each key."""
    bits = random_bits(keys[:, None], jnp.arange(count, dtype=jnp.int64))
    return -jnp.log(-jnp.log(uniform(bits.astype(jnp.float64))))
