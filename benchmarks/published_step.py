"""A training step as the predecessor's published script made it, on our model, for `tpu_verdicts.py` to compare with.

One `jax.jit` of the whole step without donation and without sharding, whole logits, optax's own AdamW or Adafactor, weights and
moments in the type of the weights. What is not its: the model (ours, its layers in a scan).
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tunix_rt.engines.jax import aot_worker as jax_ahead_compile
from tunix_rt.engines.jax import step as jax_step
from tunix_rt.engines.jax.chunked_loss import head_logits
from tunix_rt.engines.jax.model import forward, lm_head_weight


def compile_step(plan: jax_step.StepPlan, mesh: Any, rows: int, tokens: int) -> Any:
    """In the place of `jax_step.compile_step`."""
    rule = optax.adamw(1e-5) if plan.optim.kind == "adamw" else optax.adafactor(1e-5, factored=True, momentum=None)
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)

    params = placed(jax_step.abstract_state(plan, mesh).params)
    moments = placed(jax.eval_shape(rule.init, params))
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=whole),
        jax_step.abstract_batches(plan, mesh, rows, tokens),
    )

    def step(params: Any, moments: Any, batch: Any) -> tuple[Any, Any, Any]:
        def loss_of(params: Any) -> Any:
            states = forward(
                params, batch.ids, batch.positions, batch.segments, plan.architecture, compute=plan.compute
            )
            logits = head_logits(states, lm_head_weight(params), compute=plan.compute)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return jnp.sum(losses * batch.weights) / (jnp.sum(batch.weights) + 1e-9)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = rule.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    return jax.jit(step).lower(params, moments, batch).compile()


if __name__ == "__main__":
    jax_step.compile_step = compile_step
    sys.exit(jax_ahead_compile.main())
