"""The loss over sharded parameters (FSDP): a layer's weights are all-gathered when the layer runs, and freed after it.

The embedding and the lm_head are not gathered: in the lookup and in the loss, tokens go to the shards (`chunked_loss.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix_rt.config.capabilities import refuse_unsupported
from tunix_rt.config.settings import Training
from tunix_rt.engines.base import refuse_dropout
from tunix_rt.engines.jax import optim as jax_optim
from tunix_rt.engines.jax import tunix as jax_tunix
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.attention import attention_named, choose_attention
from tunix_rt.engines.jax.chunked_loss import head_loss, looked_up, tokens_at_once
from tunix_rt.engines.jax.mesh import ROWS, batch_sharding, parameter_shardings
from tunix_rt.engines.jax.model import Attention, Batch, Remat, forward, summed_loss
from tunix_rt.engines.jax.optim import Optim, optim_of
from tunix_rt.engines.jax.weights import abstract_parameters
from tunix_rt.plan.precision import recipe_of

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


TPU_MLP_TOKENS = 1024
"""Tokens of a device in a chunk of the MLP. Half as many save 0.1 GiB of the peak of Gemma 2B; speed was not measured."""
TPU_LOSS_TOKENS = 1024
"""Tokens of all rows in a chunk of the loss on TPUs: with a vocabulary of 256,000, logits of 1 GiB over all chips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What decides the compiled step. Hashable."""

    architecture: Architecture
    compute: str
    """The compute dtype."""
    weights: str
    """dtype of parameters and gradients."""
    remat: Remat
    chunk: int
    """Tokens of each row in a chunk of the loss."""
    optim: Optim
    max_grad_norm: float
    """0: gradients are not clipped."""
    attention: str
    accumulation: int
    """Micro-batches in a step."""
    seed: int
    implementation: str = "auto"
    """`auto` for the models of this package, `tunix` for those of google-tunix."""


class State(NamedTuple):
    params: Tree
    optimizer: dict[str, Tree]


def step_plan(
    architecture: Architecture,
    training: Training,
    *,
    platform: str,
    rows: int,
    tokens: int,
    implementation: str = "auto",
) -> StepPlan:
    """What `training` configures, for micro-batches of `rows` x `tokens`. Refuses what this engine does not support."""
    refuse_unsupported(training, "jax", implementation=implementation)
    refuse_dropout(architecture.shape.model_type, architecture.dropout, {}, "jax")
    checkpointing, recipe = training.gradient_checkpointing, recipe_of(training)
    if implementation == "tunix":
        jax_tunix.config_of(architecture)  # refuses what Tunix does not support
        name = jax_tunix.ATTENTION
    else:
        name, _, _ = choose_attention(platform, architecture, recipe.compute, tokens)
    return StepPlan(
        architecture=architecture,
        compute=recipe.compute,
        weights=recipe.weights,
        remat=("layers" if checkpointing else "none") if isinstance(checkpointing, bool) else "products",
        chunk=_loss_chunk(platform, recipe.weights, rows, tokens),
        optim=optim_of(training),
        max_grad_norm=training.max_grad_norm,
        attention=name,
        accumulation=training.gradient_accumulation_steps,
        seed=training.seed,
        implementation=implementation,
    )


def _loss_chunk(platform: str, weights: str, rows: int, tokens: int) -> int:
    """Tokens of each row in a chunk of the loss: fewer on a TPU, which has little memory, unless the gradient of the lm_head is
    bfloat16, where every chunk rounds it."""
    at_once = tokens_at_once(rows, tokens)
    return min(at_once, max(1, TPU_LOSS_TOKENS // rows)) if platform == "tpu" and weights != "bfloat16" else at_once


# --- the step --------------------------------------------------------------------------------------------------------


def take_step(
    plan: StepPlan,
    state: State,
    batches: Batch,
    *,
    step: Array,
    rate: Array,
    target_tokens: Array,
    mesh: Mesh | None = None,
) -> tuple[State, Array, Array]:
    """State after step `step` (from 1 on), the mean loss over all its targets and the global norm of its gradient.

    Each of `batches` is [accumulation, rows, tokens]; `target_tokens` counts the targets of all. Where loss or norm is not
    finite, parameters and optimizer state are returned unchanged. `mesh` is that of the arrays, if on several devices.
    """
    exact = jnp.dtype(plan.compute).itemsize >= 4
    with jax.default_matmul_precision("highest" if exact else "default"):
        loss, gradients = _graded(plan, state.params, batches, target_tokens, mesh)
    norm = _norm(gradients)
    limit = plan.max_grad_norm
    scale = jnp.minimum(1.0, limit / (norm + 1e-6)) if limit > 0 else jnp.ones_like(norm)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    # The device generator is the fastest, but only threefry can be sharded: bits differ between one device and several.
    kind = "rbg" if mesh is None or mesh.size == 1 else "threefry2x32"
    key = jax.random.fold_in(jax.random.key(plan.seed, impl=kind), step)
    changed = State(*jax_optim.update(
        state.params, gradients, state.optimizer, step=step, lr=rate, scale=scale, key=key, optim=plan.optim
    ))  # fmt: skip
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), changed, state)
    return kept, loss, norm


def _graded(
    plan: StepPlan, params: Tree, batches: Batch, target_tokens: Array, mesh: Mesh | None
) -> tuple[Array, Tree]:
    """The loss of all micro-batches, and its gradient in the dtype of the parameters."""
    wide = jnp.promote_types(plan.compute, jnp.float32)
    graded = jax.value_and_grad(partial(_micro_loss, plan, jnp.asarray(target_tokens, wide), mesh))
    if plan.accumulation == 1:
        return graded(params, jax.tree.map(lambda array: array[0], batches))

    def add(sums: tuple[Array, Tree], batch: Batch) -> tuple[tuple[Array, Tree], None]:
        return jax.tree.map(jnp.add, sums, graded(params, batch)), None

    zeros = (jnp.zeros((), wide), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zeros, batches)[0]


def _micro_loss(plan: StepPlan, target_tokens: Array, mesh: Mesh | None, params: Tree, batch: Batch) -> Array:
    """The part of one micro-batch in the loss."""
    options: dict[str, Any] = {"compute": plan.compute, "remat": plan.remat, "chunk": plan.chunk}
    pieces = _mlp_pieces(plan, mesh, *batch.ids.shape)
    if plan.implementation == "tunix":  # on several devices XLA decides what is gathered
        summed = jax_tunix.summed_loss(params, batch, plan.architecture, **options)
    elif mesh is None or mesh.size == 1:
        summed = summed_loss(
            params, batch, plan.architecture, **options, attention=attention_named(plan.attention), pieces=pieces
        )
    else:
        summed = sharded_loss(
            params, batch, plan.architecture, mesh, **options, attention=plan.attention, pieces=pieces
        )
    return summed / target_tokens


def _mlp_pieces(plan: StepPlan, mesh: Mesh | None, rows: int, tokens: int) -> int:
    """Chunks of the MLP: on TPUs with activation checkpointing, so many that a device has about `TPU_MLP_TOKENS` in one."""
    if mesh is None or plan.remat != "layers" or mesh.devices.flat[0].platform != "tpu":
        return 1
    most = max(1, rows * tokens // mesh.size // TPU_MLP_TOKENS)
    return max(pieces for pieces in range(1, most + 1) if tokens % pieces == 0)


def _norm(gradients: Tree) -> Array:
    """The global norm of the gradients, in at least float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jax_optim.work_type(leaf.dtype)))) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares))


# --- from shapes alone -----------------------------------------------------------------------------------------------


def abstract_state(plan: StepPlan, mesh: Mesh) -> State:
    """Shapes, dtypes and shardings of the state on `mesh`."""
    shapes = abstract_parameters(plan.architecture, plan.weights)
    state = State(shapes, jax.eval_shape(partial(jax_optim.init, optim=plan.optim), shapes))

    def place(array: Array, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(place, state, parameter_shardings(mesh, state))


def abstract_batches(plan: StepPlan, mesh: Mesh, rows: int, tokens: int) -> Batch:
    """Shapes and dtypes of the micro-batches of a step, of `rows` x `tokens` each."""
    types = Batch(ids="int32", positions="int32", segments="int32", targets="int32", weights="float32")
    shape, sharding = (plan.accumulation, rows, tokens), batch_sharding(mesh)
    return Batch(*(jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for kind in types))


def numbers(plan: StepPlan, *, step: int, rate: float, target_tokens: int) -> dict[str, Any]:
    """The scalars of a step in the dtypes that the compiled step takes: `compiled(state, batches, **numbers(...))`."""
    wide = np.float64 if plan.weights == "float64" else np.float32
    return {"step": np.int32(step), "rate": wide(rate), "target_tokens": np.int32(target_tokens)}


def compile_step(plan: StepPlan, mesh: Mesh, rows: int, tokens: int) -> Any:
    """The executable of `take_step` for micro-batches of `rows` x `tokens`: `compiled(state, batches, **numbers(...))`.

    It donates its state. Compiling allocates nothing, and the devices of `mesh` need not be present."""
    whole = NamedSharding(mesh, PartitionSpec())
    state = abstract_state(plan, mesh)
    shardings = (jax.tree.map(lambda array: array.sharding, state), whole, whole)
    scalars = {
        name: jax.ShapeDtypeStruct((), value.dtype, sharding=whole)
        for name, value in numbers(plan, step=1, rate=0.0, target_tokens=1).items()
    }
    compiled = jax.jit(partial(take_step, plan, mesh=mesh), donate_argnums=0, out_shardings=shardings)
    return compiled.lower(state, abstract_batches(plan, mesh, rows, tokens), **scalars).compile()
