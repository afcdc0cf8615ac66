"""One training step of the JAX engine: a pure function of state and batch, compiled once from shapes alone.

On several devices parameters and optimizer state are cut over them (`mesh.py`), and so are gradients and updates. A layer's
weights are gathered when the layer is computed, in the type of its products, and dropped again. The table of the vocabulary
is never gathered: where it is looked up and where the loss is made, tokens go to the parts of the table.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix_rt.config.settings import Training
from tunix_rt.engines.jax import optim as jax_optim
from tunix_rt.engines.jax import tunix as jax_tunix
from tunix_rt.engines.jax.architecture import Architecture
from tunix_rt.engines.jax.attention import attention_named, choose_attention
from tunix_rt.engines.jax.chunked_loss import tokens_at_once
from tunix_rt.engines.jax.fsdp import spread_loss
from tunix_rt.engines.jax.mesh import batch_sharding, parameter_shardings
from tunix_rt.engines.jax.model import Batch, Remat, summed_loss
from tunix_rt.engines.jax.optim import Optim, optim_of
from tunix_rt.engines.jax.weights import parameter_shapes
from tunix_rt.errors import ConfigError
from tunix_rt.plan.precision import recipe_of

Array = Any
Tree = Any


TPU_MLP_TOKENS = 1024
"""Of a device, whose wide activations exist at once. Half as many save 0.1 GiB of Gemma 2B's peak; no speed was measured."""
TPU_LOSS_TOKENS = 1024
"""Of all rows, that meet the vocabulary at once on TPUs: with 256,000 entries their logits are 1 GiB, over all chips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What decides the compiled code of a step. Can be hashed."""

    architecture: Architecture
    compute: str
    """Type of the products."""
    weights: str
    """Type in which parameters are kept, and their gradients are."""
    remat: Remat
    chunk: int
    """Tokens of each row that meet the vocabulary at once."""
    optim: Optim
    max_grad_norm: float
    """0: gradients are not scaled down."""
    attention: str
    accumulation: int
    """Micro-batches in a step."""
    seed: int
    implementation: str = "auto"
    """Whose model: `auto` is ours, `tunix` google-tunix's."""


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
    """What `training` asks for, for micro-batches of `rows` x `tokens`; what this engine does not do is refused by name."""
    _refuse(architecture, training)
    asked, recipe = training.gradient_checkpointing, recipe_of(training)
    if implementation == "tunix":
        jax_tunix.config_of(architecture)  # refuses what Tunix's model does otherwise
        name = jax_tunix.ATTENTION
    else:
        name, _, _ = choose_attention(platform, architecture, recipe.compute, tokens)
    return StepPlan(
        architecture=architecture,
        compute=recipe.compute,
        weights=recipe.weights,
        remat=("layers" if asked else "none") if isinstance(asked, bool) else "products",
        chunk=_loss_chunk(platform, recipe.weights, rows, tokens),
        optim=optim_of(training),
        max_grad_norm=training.max_grad_norm,
        attention=name,
        accumulation=training.gradient_accumulation_steps,
        seed=training.seed,
        implementation=implementation,
    )


def _loss_chunk(platform: str, weights: str, rows: int, tokens: int) -> int:
    """Tokens of each row that meet the vocabulary at once: fewer on a TPU, which has little memory, unless the gradient of the
    table is kept in bfloat16, where every chunk rounds it."""
    at_once = tokens_at_once(rows, tokens)
    return min(at_once, max(1, TPU_LOSS_TOKENS // rows)) if platform == "tpu" and weights != "bfloat16" else at_once


def _refuse(architecture: Architecture, training: Training) -> None:
    use_torch = "or use training.backend: torch"
    if training.lora_rank is not None:
        raise ConfigError("training.lora_rank: the JAX engine trains every parameter", fix=f"leave it out, {use_torch}")
    if training.dtype == "float16":
        raise ConfigError("training.dtype: float16 is not there for the JAX engine", fix=f"use bfloat16, {use_torch}")
    if architecture.dropout > 0:
        raise ConfigError(
            f"config.json asks for dropout of {architecture.dropout:g} in training, which the JAX engine does not do",
            fix=f"set the model's dropout to 0, {use_torch}",
        )


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
    """State after the step with number `step` (from 1 on), the loss over all its targets and the norm of its gradient.

    Each of `batches` is [accumulation, rows, tokens], and `target_tokens` counts the targets of all. Where loss or norm is
    not finite, parameters and optimizer state come back as they were. `mesh` is where the arrays lie, if on several devices.
    """
    exact = jnp.dtype(plan.compute).itemsize >= 4
    with jax.default_matmul_precision("highest" if exact else "default"):
        loss, gradients = _graded(plan, state.params, batches, target_tokens, mesh)
    norm = _norm(gradients)
    limit = plan.max_grad_norm
    scale = jnp.minimum(1.0, limit / (norm + 1e-6)) if limit > 0 else jnp.ones_like(norm)
    sound = jnp.isfinite(loss) & jnp.isfinite(norm)
    # A device's own generator is the fastest, but only jax's can be cut over several: bits differ between one and many.
    kind = "rbg" if mesh is None or mesh.size == 1 else "threefry2x32"
    key = jax.random.fold_in(jax.random.key(plan.seed, impl=kind), step)
    changed = State(*jax_optim.update(
        state.params, gradients, state.optimizer, step=step, rate=rate, scale=scale, key=key, optim=plan.optim
    ))  # fmt: skip
    kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), changed, state)
    return kept, loss, norm


def _graded(
    plan: StepPlan, params: Tree, batches: Batch, target_tokens: Array, mesh: Mesh | None
) -> tuple[Array, Tree]:
    """The loss of all micro-batches, and its gradient in the type of the parameters."""
    wide = jnp.promote_types(plan.compute, jnp.float32)
    graded = jax.value_and_grad(partial(_share, plan, jnp.asarray(target_tokens, wide), mesh))
    if plan.accumulation == 1:
        return graded(params, jax.tree.map(lambda array: array[0], batches))

    def add(sums: tuple[Array, Tree], batch: Batch) -> tuple[tuple[Array, Tree], None]:
        return jax.tree.map(jnp.add, sums, graded(params, batch)), None

    zeros = (jnp.zeros((), wide), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, zeros, batches)[0]


def _share(plan: StepPlan, target_tokens: Array, mesh: Mesh | None, params: Tree, batch: Batch) -> Array:
    """What one micro-batch adds to the loss."""
    given: dict[str, Any] = {"compute": plan.compute, "remat": plan.remat, "chunk": plan.chunk}
    pieces = _mlp_pieces(plan, mesh, *batch.ids.shape)
    if plan.implementation == "tunix":  # on several devices the compiler decides what is gathered
        summed = jax_tunix.summed_loss(params, batch, plan.architecture, **given)
    elif mesh is None or mesh.size == 1:
        summed = summed_loss(
            params, batch, plan.architecture, **given, attention=attention_named(plan.attention), pieces=pieces
        )
    else:
        summed = spread_loss(params, batch, plan.architecture, mesh, **given, attention=plan.attention, pieces=pieces)
    return summed / target_tokens


def _mlp_pieces(plan: StepPlan, mesh: Mesh | None, rows: int, tokens: int) -> int:
    """Into how many pieces tokens are cut for the MLP: on TPUs, where memory is asked to be saved, so many that a device has
    about `TPU_MLP_TOKENS` in one."""
    if mesh is None or plan.remat != "layers" or mesh.devices.flat[0].platform != "tpu":
        return 1
    most = max(1, rows * tokens // mesh.size // TPU_MLP_TOKENS)
    return max(pieces for pieces in range(1, most + 1) if tokens % pieces == 0)


def _norm(gradients: Tree) -> Array:
    """Of all gradients together, in at least float32."""
    squares = [jnp.sum(jnp.square(leaf.astype(jax_optim.work_type(leaf.dtype)))) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares))


# --- from shapes alone -----------------------------------------------------------------------------------------------


def abstract_state(plan: StepPlan, mesh: Mesh) -> State:
    """The state's shapes and types, and how it lies on the devices of `mesh`."""
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, plan.weights),
        parameter_shapes(plan.architecture),
        is_leaf=lambda found: isinstance(found, tuple),
    )
    return _placed(mesh, State(shapes, jax.eval_shape(partial(jax_optim.init, optim=plan.optim), shapes)))


def _placed(mesh: Mesh, state: State) -> State:
    def place(array: Array, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(place, state, parameter_shardings(mesh, state))


def abstract_batches(plan: StepPlan, mesh: Mesh, rows: int, tokens: int) -> Batch:
    """Shapes and types of the micro-batches of a step of `rows` x `tokens` each."""
    types = Batch(ids="int32", positions="int32", segments="int32", targets="int32", weights="float32")
    shape, sharding = (plan.accumulation, rows, tokens), batch_sharding(mesh)
    return Batch(*(jax.ShapeDtypeStruct(shape, kind, sharding=sharding) for kind in types))


def numbers(plan: StepPlan, *, step: int, rate: float, target_tokens: int) -> dict[str, Any]:
    """The numbers of a step in the types that a compiled one takes: `compiled(state, batches, **numbers(...))`."""
    wide = np.float64 if plan.weights == "float64" else np.float32
    return {"step": np.int32(step), "rate": wide(rate), "target_tokens": np.int32(target_tokens)}


def compile_step(plan: StepPlan, mesh: Mesh, rows: int, tokens: int) -> Any:
    """The executable of `take_step` for micro-batches of `rows` x `tokens`: `compiled(state, batches, **numbers(...))`.

    The state that it is given is used up. Nothing is allocated, and the devices of `mesh` need not be present."""
    whole = NamedSharding(mesh, PartitionSpec())
    state = abstract_state(plan, mesh)
    shardings = (jax.tree.map(lambda array: array.sharding, state), whole, whole)
    given = {
        name: jax.ShapeDtypeStruct((), value.dtype, sharding=whole)
        for name, value in numbers(plan, step=1, rate=0.0, target_tokens=1).items()
    }
    compiled = jax.jit(partial(take_step, plan, mesh=mesh), donate_argnums=0, out_shardings=shardings)
    return compiled.lower(state, abstract_batches(plan, mesh, rows, tokens), **given).compile()
