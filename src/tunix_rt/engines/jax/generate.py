"""Answers of the JAX engine: prompts of mixed lengths in one batch, padded on the left, with a cache of keys and values.

A prompt is answered as if it were alone. Compiled code is for one number of rows and one of columns, so both are rounded up
to powers of two, prompts are read a piece at a time, and rows that are done leave only when three quarters can go: a whole
evaluation is answered by a handful of programs. What a row sees of its batch is decided by masks, never by a shape.

Tokens are drawn by the same random numbers as in the PyTorch engine, which takes integers and floats of 64 bits.
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

from tunix_rt.engines.decoding import NOT_A_TOKEN, Answer, Decoding, Row, answer_in_batches, random_keys, row_of
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.chunked_loss import head_logits
from tunix_rt.engines.jax.load import Engine, memory_is_named
from tunix_rt.engines.jax.mesh import ROWS, rows_for
from tunix_rt.engines.jax.model import head_table, masked_attention, through_layers, within_window

Array = Any

PIECE = 64
"""Tokens of a prompt that are read at once."""
LEAST_COLUMNS = 2 * PIECE
KEPT_SHARE, FEWEST_ROWS = 4, 8
"""Rows leave when no more than one in so many goes on, unless there are but a few, which take as long as fewer."""
LOOK_EVERY = {"cpu": 4, "cuda": 16, "tpu": 16}
"""Tokens between two looks at answers, of which each waits for the device."""
DRAWN_AT_ONCE = 4 * 2**20
"""Logits on a device whose tokens are drawn at once: noise and order of a logit take some 60 bytes."""


class _Model(NamedTuple):
    """What decides the compiled code, beside shapes."""

    architecture: Architecture
    compute: Any
    """The type of products."""
    mesh: Mesh


class _Batch(NamedTuple):
    """What lies on the devices. A column is a token, of the prompt or of the answer; answers of all rows start in one."""

    keys: Array
    """[layers, rows, columns, heads of keys, head size]"""
    values: Array
    begins: Array
    """[rows]: the first column that is a token, and no padding."""
    held: Array
    """Columns that are in the cache."""
    states: Array
    """[rows, 1, hidden]: what the next token is chosen by."""


class _Draw(NamedTuple):
    """How tokens are drawn."""

    keys: Array
    """[rows, tokens between two looks], one for each new token."""
    temperature: Array
    top_p: Array | None
    """None: every token may be drawn."""


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    decoding: Decoding,
    stop_ids: Sequence[int],
    pad_id: int,
    decode: Callable[[list[int]], str],
    rows_at: Callable[[int], int],
    heard: Callable[[int, list[int]], None] | None = None,
) -> Iterator[tuple[int, Answer]]:
    """(number of the prompt, its answer) as answers come to their end; the longest prompts are asked first.

    `rows_at` says how many prompts of a length are asked at once. Where the device has no memory for so many, half of them
    are, and it is said. `heard` is told a prompt's tokens so far, as soon as there are any new ones.
    """
    positions = engine.architecture.shape.max_positions
    with memory_is_named("generation"):
        params = _ready_for_products(engine.params, engine.compute)
    yield from answer_in_batches(
        [
            row_of(index, prompt, positions=positions, decoding=decoding, stop_ids=stop_ids, decode=decode)
            for index, prompt in enumerate(prompts)
        ],
        lambda rows: _answers(engine, params, rows, decoding, pad_id, heard),
        rows_at=rows_at,
        most=len(prompts),
        free_memory=lambda: None,  # jax gives back what no array lies in
    )


def _ready_for_products(params: Mapping[str, Any], compute: Any) -> dict[str, Any]:
    """The parameters with their matrices in the type of products, to which they would else be cast for every token. The
    table of tokens keeps its type where it is looked up, so a head that is tied becomes one of its own if it is cast."""
    if params["embedding"].dtype == compute:
        return dict(params)
    layers = params["layers"]
    matrices = {name: _cast(array, compute) if array.ndim == 3 else array for name, array in layers.items()}
    return {**params, "layers": matrices, "head": _cast(head_table(params), compute)}


@partial(jax.jit, static_argnums=1)
def _cast(array: Array, kind: Any) -> Array:
    return array.astype(kind)


# --- answers, on the host --------------------------------------------------------------------------------------------


def _answers(
    engine: Engine,
    params: Mapping[str, Any],
    rows: Sequence[Row],
    decoding: Decoding,
    pad_id: int,
    heard: Callable[[int, list[int]], None] | None,
) -> Iterator[tuple[Row, Answer]]:
    """Each row with its answer, as they end."""
    began = time.monotonic()
    model = _Model(architecture=engine.architecture, compute=engine.compute, mesh=engine.mesh)
    looked = LOOK_EVERY[engine.device] if heard is None else 1
    for row in rows:
        row.begin_anew()
    longest = max(row.room for row in rows)
    with memory_is_named("generation"):
        batch = _begin(model, params, rows, longest, pad_id)
    slots: list[Row | None] = [*rows]  # each row of the batch, as long as its answer goes on
    keys, taken = _keys(rows, decoding, longest + looked), 0
    while any(slots):
        count = min(looked, max(row.room for row in slots if row) - taken)
        with memory_is_named("generation"), _wide(decoding):
            draw = _draw(slots, keys, range(taken, taken + looked), len(batch.begins), decoding)
            batch, tokens = _more_tokens(model, looked, params, batch, draw, np.int32(count))
            fresh = np.asarray(tokens)[:, :count].tolist()
        taken += count
        late = decoding.max_seconds is not None and time.monotonic() - began >= decoding.max_seconds
        for place, row in [(place, row) for place, row in enumerate(slots) if row]:
            answer = row.take(fresh[place], late=late, model=engine.source.name)
            if heard is not None:
                heard(row.index, row.ids if answer is None else answer.ids)
            if answer is not None:
                slots[place] = None
                yield row, answer
        kept = [place for place, row in enumerate(slots) if row]
        if kept and KEPT_SHARE * _rows_for(model, max(FEWEST_ROWS, len(kept))) <= len(batch.begins):
            batch, slots = _keep(model, batch, kept), [slots[place] for place in kept]


def _rows_for(model: _Model, rows: int) -> int:
    """How many rows a batch of `rows` is given: a power of two on as many devices."""
    return rows_for(model.mesh, _power_of_two(rows))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _wide(decoding: Decoding) -> contextlib.AbstractContextManager[Any]:
    """Numbers of 64 bits, for tokens that are drawn: without this, jax makes 32 of them in silence."""
    return jax.enable_x64(True) if decoding.temperature else contextlib.nullcontext()


def _begin(model: _Model, params: Mapping[str, Any], rows: Sequence[Row], longest: int, pad_id: int) -> _Batch:
    """Prompts padded on the left, so that every answer starts in the same column, and read."""
    width = -(-max(len(row.prompt) for row in rows) // PIECE) * PIECE
    columns = max(LEAST_COLUMNS, _power_of_two(width + longest))
    count = _rows_for(model, len(rows))
    ids = np.full((count, width), pad_id, np.int32)
    begins = np.full(count, width - 1, np.int32)  # a row without a prompt reads one token of padding
    for place, row in enumerate(rows):
        begins[place] = width - len(row.prompt)
        ids[place, begins[place] :] = row.prompt
    batch = _empty(model, count, columns, begins)
    for start in range(0, width, PIECE):
        batch = _read(model, params, batch, ids[:, start : start + PIECE])
    return batch


def _keys(rows: Sequence[Row], decoding: Decoding, count: int) -> dict[int, list[int]]:
    """Of each row, for `count` tokens; none where none is drawn."""
    return {row.index: random_keys(decoding.seed, row.index, count) for row in rows} if decoding.temperature else {}


def _draw(
    slots: Sequence[Row | None], keys: Mapping[int, Sequence[int]], places: range, count: int, decoding: Decoding
) -> _Draw | None:
    """For the tokens at `places` of `count` rows; None takes the likeliest."""
    if not decoding.temperature:
        return None
    given = np.zeros((count, len(places)), np.int64)
    for slot, row in enumerate(slots):
        if row is not None:
            given[slot] = keys[row.index][places.start : places.stop]
    top_p = np.float64(decoding.top_p) if decoding.top_p < 1 else None
    return _Draw(keys=given, temperature=np.float64(decoding.temperature), top_p=top_p)


def _keep(model: _Model, batch: _Batch, places: Sequence[int]) -> _Batch:
    """The rows at `places` alone, in as few rows as that takes; the others are copies of the first."""
    kept = np.full(_rows_for(model, max(FEWEST_ROWS, len(places))), places[0], np.int32)
    kept[: len(places)] = places
    with memory_is_named("generation"):
        return _kept(model, batch, kept)


# --- tokens, on the devices ------------------------------------------------------------------------------------------


def _split(model: _Model, batch: _Batch) -> _Batch:
    """Rows lie on the devices as those of a training step."""
    places = {"keys": (None, ROWS), "values": (None, ROWS), "begins": (ROWS,), "held": (), "states": (ROWS,)}
    return _Batch(
        **{
            name: jax.lax.with_sharding_constraint(
                getattr(batch, name), NamedSharding(model.mesh, PartitionSpec(*place))
            )
            for name, place in places.items()
        }
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _empty(model: _Model, rows: int, columns: int, begins: Array) -> _Batch:
    shape, kind = model.architecture.shape, model.compute
    cache = jnp.zeros((shape.layers, rows, columns, shape.kv_heads, shape.head_dim), kind)
    states = jnp.zeros((rows, 1, shape.hidden), kind)
    return _split(model, _Batch(keys=cache, values=cache, begins=begins, held=jnp.int32(0), states=states))


@partial(jax.jit, static_argnums=0)
def _kept(model: _Model, batch: _Batch, places: Array) -> _Batch:
    return _split(
        model,
        _Batch(
            keys=batch.keys[:, places],
            values=batch.values[:, places],
            begins=batch.begins[places],
            held=batch.held,
            states=batch.states[places],
        ),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read(model: _Model, params: Mapping[str, Any], batch: _Batch, ids: Array) -> _Batch:
    """The next tokens of every row, [rows, tokens], are known."""
    return _split(model, _after(model, params, batch, ids))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _more_tokens(
    model: _Model, most: int, params: Mapping[str, Any], batch: _Batch, draw: _Draw | None, count: Array
) -> tuple[_Batch, Array]:
    """The next `count` tokens of every row, of [rows, `most`]. Rows that ended got some in vain."""
    table, softcap = head_table(params), model.architecture.logit_cap

    def one_more(number: Array, carried: tuple[_Batch, Array]) -> tuple[_Batch, Array]:
        batch, tokens = carried
        logits = head_logits(batch.states, table, compute=model.compute, softcap=softcap)[:, 0]
        chosen = _choose(model, logits, draw, number)
        told = jnp.where(jnp.isnan(logits).any(axis=-1), NOT_A_TOKEN, chosen)
        tokens = jax.lax.dynamic_update_slice(tokens, told[:, None], (jnp.int32(0), number))
        return _split(model, _after(model, params, batch, chosen[:, None])), tokens

    tokens = jnp.zeros((len(batch.begins), most), jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), count, one_more, (batch, tokens))


def _after(model: _Model, params: Mapping[str, Any], batch: _Batch, ids: Array) -> _Batch:
    """`batch` with the columns `ids` [rows, tokens] behind those it holds. Through the same layers as in training."""
    architecture = model.architecture
    looking = batch.held + jnp.arange(ids.shape[1], dtype=jnp.int32)
    columns = jnp.arange(batch.keys.shape[2], dtype=jnp.int32)
    is_token = columns >= batch.begins[:, None]
    # A row that ended is carried on until the next look, and has no position beyond the last.
    positions = jnp.clip(looking - batch.begins[:, None], 0, architecture.shape.max_positions - 1)

    def mix(query: Array, key: Array, value: Array, kind: Array, memory: Any) -> tuple[Array, Any]:
        layer, *cache = memory
        place = (layer, jnp.int32(0), batch.held, jnp.int32(0), jnp.int32(0))
        cache = [
            jax.lax.dynamic_update_slice(part, new[None], place) for part, new in zip(cache, (key, value), strict=True)
        ]
        keys, values = (jax.lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in cache)
        seen = within_window(looking, columns, kind, architecture) & is_token[:, None]
        return masked_attention(query, keys, values, seen, architecture), (layer + 1, *cache)

    states, (_, keys, values) = through_layers(
        params, ids, positions, architecture, mix, (jnp.int32(0), batch.keys, batch.values), compute=model.compute
    )
    return batch._replace(keys=keys, values=values, held=batch.held + ids.shape[1], states=states[:, -1:])


# --- the choice of a token -------------------------------------------------------------------------------------------


def _choose(model: _Model, logits: Array, draw: _Draw | None, number: Array) -> Array:
    """The likeliest token of each row; or one drawn by its share, a few rows at a time."""
    if draw is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.lax.dynamic_index_in_dim(draw.keys, number, axis=1, keepdims=False)
    rows, vocabulary = logits.shape
    parts = 1
    while rows // model.mesh.size % (2 * parts) == 0 and rows // model.mesh.size * vocabulary > parts * DRAWN_AT_ONCE:
        parts *= 2
    if parts == 1:
        return _drawn(logits, keys, draw)
    # Every so many rows apart: of each device as many, which are there already.
    apart = [jnp.moveaxis(array.reshape(-1, parts, *array.shape[1:]), 1, 0) for array in (logits, keys)]
    chosen = jax.lax.map(lambda some: _drawn(some[0], some[1], draw), tuple(apart))
    return jnp.moveaxis(chosen, 0, 1).reshape(rows)


def _drawn(logits: Array, keys: Array, draw: _Draw) -> Array:
    """By adding noise to every logit and taking the largest (Gumbel). A draw by summed shares would move with the last bits
    of all of them, which depend on the batch that a row is computed in."""
    scores = logits.astype(jnp.float64)
    scores = (scores - scores.max(axis=-1, keepdims=True)) / draw.temperature
    if draw.top_p is not None:
        order = jnp.argsort(scores, axis=-1, descending=True)
        ordered = jnp.take_along_axis(scores, order, axis=-1)
        shares = jax.nn.softmax(ordered, axis=-1)
        beyond = jnp.cumsum(shares, axis=-1) - shares >= draw.top_p
        scores = jnp.put_along_axis(scores, order, jnp.where(beyond, -jnp.inf, ordered), axis=-1, inplace=False)
    return jnp.argmax(scores + _gumbel(keys, scores.shape[-1]), axis=-1).astype(jnp.int32)


def _gumbel(keys: Array, count: int) -> Array:
    """`count` numbers of the standard Gumbel distribution for each key, by the mixing function of splitmix64."""
    places = jnp.arange(1, count + 1, dtype=jnp.uint64)
    mixed = keys.astype(jnp.uint64)[:, None] + places * jnp.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> jnp.uint64(shift))) * jnp.uint64(factor)
    mixed = mixed ^ (mixed >> jnp.uint64(31))
    uniform = ((mixed >> jnp.uint64(12)).astype(jnp.float64) + 0.5) * 2.0**-52  # 52 bits: with 53 the last would be 1
    return -jnp.log(-jnp.log(uniform))
