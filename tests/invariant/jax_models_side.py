"""The JAX side of test_jax_models.py, in a process of its own: `python -m tests.invariant.jax_models_side FOLDER ...`.

In each FOLDER it reads a model, asked.json and batch.npz, and writes found.npz and the model again to `saved`.
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np

from benchmarks.jax_models import named_tensors, save_weights
from tunix_rt.data.packing import MicroBatch
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.jax.chunked_loss import head_logits, head_loss
from tunix_rt.engines.jax.model import batch_of, forward, lm_head_weight, summed_loss
from tunix_rt.engines.jax.weights import load_weights, parameter_shapes
from tunix_rt.models.resolve import resolve_model

WAYS = {"whole": {}, "again": {"remat": "layers", "chunk": 7}, "products": {"remat": "products", "chunk": 64}}


def logits_of(params, batch, architecture, compute):
    states = forward(params, batch.ids, batch.positions, batch.segments, architecture, compute=compute)
    return head_logits(states, lm_head_weight(params), compute=compute, softcap=architecture.logit_cap)


def answer(folder):
    asked = json.loads((folder / "asked.json").read_text())
    source = resolve_model(str(folder))
    architecture = architecture_of(source.config)
    params = load_weights(source, architecture, dtype=asked["weights"])
    assert jax.tree.map(np.shape, params) == parameter_shapes(architecture)
    batch = batch_of(MicroBatch(**np.load(folder / "batch.npz")))
    given = {"architecture": architecture, "compute": asked["compute"]}
    logits = jax.jit(partial(logits_of, **given))
    found = {"logits": logits(params, batch)}
    found["other ids"] = logits(params, batch._replace(ids=batch.ids + architecture.shape.vocab))[:, -1]
    if architecture.shape.learned_positions:
        beyond = batch.positions + architecture.shape.max_positions
        found["other positions"] = logits(params, batch._replace(positions=beyond))[:, -1]
    for way in asked["ways"]:
        graded = jax.jit(jax.value_and_grad(partial(summed_loss, **given, **WAYS[way])))
        found[f"loss.{way}"], gradients = graded(params, batch)
        found |= {f"gradient.{way}.{name}": array for name, array in named_tensors(gradients, architecture)}
    np.savez(folder / "found.npz", **{name: np.asarray(array).astype("float64") for name, array in found.items()})
    save_weights(params, architecture, folder / "saved", config=source.config)


def head_bytes():
    """Temporary memory that the compiler gives to the gradient of a head, where all logits would take 41 MB."""
    kinds = {"states": (2, 256, 8), "table": (20_000, 8), "targets": (2, 256), "weights": (2, 256)}
    given = [jax.ShapeDtypeStruct(kind, "int32" if name == "targets" else "float32") for name, kind in kinds.items()]
    graded = jax.grad(partial(head_loss, compute="float32", chunk=16), argnums=(0, 1))
    return jax.jit(graded).lower(*given).compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    for place in sys.argv[1:]:
        answer(Path(place))
    print(json.dumps({"head_bytes": head_bytes()}))
