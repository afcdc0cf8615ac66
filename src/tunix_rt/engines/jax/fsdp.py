"""How the JAX engine lays its arrays over devices.

A mesh has two axes. Over `fsdp` parameters, gradients and optimizer state are cut, so that each device keeps its part; over
`data` they are copied. The rows of a batch are split over both. Devices may be those of a topology that is not present.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.attention import attention_named
from tunix_rt.engines.jax.chunked_loss import head_loss, looked_up
from tunix_rt.engines.jax.mesh import ROWS, parameter_shardings
from tunix_rt.engines.jax.model import Attention, Batch, Remat, forward

Array = Any
Tree = Any


def spread_loss(
    params: Tree,
    batch: Batch,
    architecture: Architecture,
    mesh: Mesh,
    *,
    compute: str,
    remat: Remat,
    chunk: int,
    attention: str,
    pieces: int = 1,
) -> Array:
    """`jax_models.summed_loss` of parameters that are cut over `mesh` and rows that are split over it."""
    shardings = parameter_shardings(mesh, params)
    table = "head" if "head" in params else "embedding"

    def states_of(params: Tree) -> Array:
        layers = Gathered.of(params["layers"], shardings["layers"], compute)
        return forward(
            {**params, "layers": layers}, batch.ids, batch.positions, batch.segments, architecture,
            compute=compute, remat=remat, attention=_over_rows(attention_named(attention, mesh), mesh),
            look_up=partial(looked_up, mesh=mesh), pieces=pieces, lean=False,
        )  # fmt: skip

    if remat == "none":  # what a layer has computed is kept, but not the weights that it gathered
        states_of = jax.checkpoint(states_of, policy=_all_but_gathered, prevent_cse=False)
    states = _laid(mesh, states_of(params), ROWS)
    return head_loss(
        states, params[table], batch.targets, batch.weights,
        compute=compute, softcap=architecture.logit_cap, chunk=chunk, mesh=mesh,
    )  # fmt: skip


def _laid(mesh: Mesh, array: Array, rows: Any) -> Array:
    """`array`, its first dimension split over the axes `rows` and nothing else cut."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(rows)))


def _over_rows(attention: Attention, mesh: Mesh) -> Attention:
    """`attention`, told that heads are split by rows: what goes in and what comes out."""

    def told(query: Array, key: Array, value: Array, **given: Any) -> Array:
        query, key, value = (_laid(mesh, array, ROWS) for array in (query, key, value))
        return _laid(mesh, attention(query, key, value, **given), ROWS)

    return told


def _all_but_gathered(primitive: Any, *given: Any, **_: Any) -> bool:
    """`_gathered` is a call with one array; kernels are such calls with several."""
    is_gathered = primitive.name == "custom_vjp_call" and len(given) == 1
    return not is_gathered and primitive.name not in ("sharding_constraint", "convert_element_type")


@jax.tree_util.register_pytree_node_class
class Gathered(Mapping[str, Array]):
    """Arrays by name, each in parts on the devices. To look one up is to gather it."""

    def __init__(self, parts: Mapping[str, Array], shardings: tuple[NamedSharding, ...], compute: str) -> None:
        self._parts, self._shardings, self._compute = parts, shardings, compute

    @classmethod
    def of(cls, layers: Mapping[str, Array], stacked: Mapping[str, NamedSharding], compute: str) -> "Gathered":
        """Of stacked arrays, to be cut into layers by a scan: a layer's array lies as the stacked one, less a dimension."""
        names = sorted(layers)
        shardings = (NamedSharding(stacked[name].mesh, PartitionSpec(*stacked[name].spec[1:])) for name in names)
        return cls(layers, tuple(shardings), compute)

    def tree_flatten(self) -> tuple[tuple[Array, ...], Any]:
        names = tuple(sorted(self._parts))
        return tuple(self._parts[name] for name in names), (names, self._shardings, self._compute)

    @classmethod
    def tree_unflatten(cls, known: Any, arrays: tuple[Array, ...]) -> "Gathered":
        names, shardings, compute = known
        return cls(dict(zip(names, arrays, strict=True)), shardings, compute)

    def __getitem__(self, name: str) -> Array:
        part = self._parts[name]
        if part.ndim > 1:  # vectors are small, and norms take them as they are
            part = part.astype(self._compute)
        return _gathered(part, self._shardings[sorted(self._parts).index(name)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(part: Array, sharding: NamedSharding) -> Array:
    """The whole array on every device. Its gradient lies as `part` does: without being told, it would be whole as well."""
    return jax.lax.with_sharding_constraint(part, NamedSharding(sharding.mesh, PartitionSpec()))


def _gathered_forward(part: Array, sharding: NamedSharding) -> tuple[Array, None]:
    return _gathered(part, sharding), None


def _gathered_backward(sharding: NamedSharding, _: None, slope: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(slope, sharding),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
