"""The loss over sharded parameters (FSDP): a layer's weights are all-gathered when the layer runs, and freed after it.

The embedding and the lm_head are not gathered: in the lookup and in the loss, tokens go to the shards (`chunked_loss.py`).
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


def sharded_loss(
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
    """`model.summed_loss` of parameters and rows that are sharded over `mesh`."""
    shardings = parameter_shardings(mesh, params)
    lm_head = "head" if "head" in params else "embedding"

    def states_of(params: Tree) -> Array:
        layers = Gathered.of(params["layers"], shardings["layers"], compute)
        return forward(
            {**params, "layers": layers}, batch.ids, batch.positions, batch.segments, architecture,
            compute=compute, remat=remat, attention=_over_rows(attention_named(attention, mesh), mesh),
            look_up=partial(looked_up, mesh=mesh), pieces=pieces, lean=False,
        )  # fmt: skip

    if remat == "none":  # layers save their activations, but not the all-gathered weights
        states_of = jax.checkpoint(states_of, policy=_saves_all_but_gathered, prevent_cse=False)
    states = _constrained(mesh, states_of(params), ROWS)
    return head_loss(
        states, params[lm_head], batch.targets, batch.weights,
        compute=compute, softcap=architecture.logit_cap, chunk=chunk, mesh=mesh,
    )  # fmt: skip


def _constrained(mesh: Mesh, array: Array, rows: Any) -> Array:
    """`array` with its first dimension sharded over the axes `rows`, and no other."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(rows)))


def _over_rows(attention: Attention, mesh: Mesh) -> Attention:
    """`attention` with inputs and output sharded by rows."""

    def constrained(query: Array, key: Array, value: Array, **given: Any) -> Array:
        query, key, value = (_constrained(mesh, array, ROWS) for array in (query, key, value))
        return _constrained(mesh, attention(query, key, value, **given), ROWS)

    return constrained


def _saves_all_but_gathered(primitive: Any, *given: Any, **_: Any) -> bool:
    """`_gathered` is a custom_vjp call with one array; kernels are such calls with several."""
    is_gathered = primitive.name == "custom_vjp_call" and len(given) == 1
    return not is_gathered and primitive.name not in ("sharding_constraint", "convert_element_type")


@jax.tree_util.register_pytree_node_class
class Gathered(Mapping[str, Array]):
    """Sharded arrays by name. Reading one all-gathers it."""

    def __init__(self, parts: Mapping[str, Array], shardings: tuple[NamedSharding, ...], compute: str) -> None:
        self._parts, self._shardings, self._compute = parts, shardings, compute

    @classmethod
    def of(cls, layers: Mapping[str, Array], stacked: Mapping[str, NamedSharding], compute: str) -> "Gathered":
        """Of stacked arrays, which a scan slices into layers: a layer has the sharding of the stack less a dimension."""
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
        if part.ndim > 1:  # norms use vectors in their own dtype
            part = part.astype(self._compute)
        return _gathered(part, self._shardings[sorted(self._parts).index(name)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(part: Array, sharding: NamedSharding) -> Array:
    """The all-gathered array. Its gradient has the sharding of `part` (reduce-scatter); XLA would replicate it."""
    return jax.lax.with_sharding_constraint(part, NamedSharding(sharding.mesh, PartitionSpec()))


def _gathered_forward(part: Array, sharding: NamedSharding) -> tuple[Array, None]:
    return _gathered(part, sharding), None


def _gathered_backward(sharding: NamedSharding, _: None, gradient: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(gradient, sharding),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
