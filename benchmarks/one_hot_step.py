"""Our training step with the loss that Tunix 0.1.7 has by default, for `tpu_verdicts.py` to compare with.

The logits of all tokens are made at once, in float32, and a one-hot table as large as they are meets their log-softmax. All
else is the step as it is: the same model, the same cuts over the devices, the same optimizer.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tunix_rt.engines.jax import aot_worker as jax_ahead_compile
from tunix_rt.engines.jax import step as jax_spread
from tunix_rt.engines.jax.chunked_loss import head_logits
from tunix_rt.engines.jax.mesh import ROWS


def head_loss(
    states: Any,
    table: Any,
    targets: Any,
    weights: Any,
    *,
    compute: Any,
    softcap: float | None = None,
    mesh: Any = None,
    **_: Any,
) -> Any:
    """In the place of `jax_head.head_loss`: the same number."""
    logits = head_logits(states, table, compute=compute, softcap=softcap)
    if mesh is not None:  # each device has the logits of its own rows
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(ROWS)))
    chosen = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype) * weights[..., None]
    return -jnp.sum(jax.nn.log_softmax(logits) * chosen)


if __name__ == "__main__":
    jax_spread.head_loss = head_loss
    sys.exit(jax_ahead_compile.main())
