"""What test_tunix_adapter.py asks of google-tunix, in a process of its own: `python adapter_side.py QUESTION FOLDER`.

FOLDER has a model in `model` and `inputs.npz` as `benchmarks.parity` writes them. One line of JSON on stdout is the answer.
"""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.jax_models import model_of, open_in_tunix, params_of
from benchmarks.parity_sides import Ours, step_inputs
from tunix_rt.engines.jax import model as jax_models
from tunix_rt.engines.jax import optim as jax_optim
from tunix_rt.engines.jax import tunix as jax_tunix
from tunix_rt.engines.jax.mesh import make_mesh, parameter_shardings
from tunix_rt.engines.jax.step import State, StepPlan, compile_step, numbers
from tunix_rt.errors import TunixError

OPTIM = jax_optim.Optim(kind="adamw", beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, stochastic=False)


def opened(folder):
    side = Ours(folder / "model", {}, implementation="tunix")
    batch, targets = side._batch(step_inputs(np.load(folder / "inputs.npz"), "packed", 0))
    return side, batch, targets


def loader(folder):
    """How Tunix's loader fares with a saved folder when it is called as its users do, and how ours fares with it."""
    from tunix.models.gemma import params_safetensors as gemma
    from tunix.models.gemma3 import params_safetensors as gemma3

    side, _, _ = opened(folder)
    family = gemma3 if side.architecture.shape.model_type == "gemma3_text" else gemma
    found = {}
    try:
        model = family.create_model_from_safe_tensors(
            str(folder / "model"), jax_tunix.config_of(side.architecture), dtype=jnp.float32
        )
        found["alone"] = _same(params_of(model, side.architecture), side.params)
    except Exception as error:  # noqa: BLE001  whatever Tunix raises is what the test wants to know
        found["alone"] = f"{type(error).__name__}: {error}"
    try:
        model = open_in_tunix(folder / "model", side.architecture)
        found["ours"] = _same(params_of(model, side.architecture), side.params)
    except TunixError as error:
        found["ours"] = str(error)
    return found


def _same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(np.array_equal(a, b) for a, b in pairs)


def restarted(folder):
    """States of packed rows: ours, those of the adapter, and those of Tunix's model told positions that restart."""
    side, batch, _ = opened(folder)
    given = (batch.ids, batch.positions, batch.segments, side.architecture)
    ours, adapter = (
        one.forward(side.params, *given, compute="float32") for one in (jax_models, jax_tunix)
    )  # fmt: skip
    model = model_of(side.params, side.architecture)
    places = np.arange(batch.ids.shape[1])
    seen = (places[:, None] >= places) & (batch.segments[:, :, None] == batch.segments[:, None, :])
    states = model.embedder.encode(batch.ids)
    for layer in model.layers:
        states = layer(states, batch.positions, None, seen)[1]
    alone = model.final_norm(states)
    return {name: float(np.abs(one - ours).max()) for name, one in (("adapter", adapter), ("alone", alone))}


def kept(folder):
    """Loss and gradients with what a layer keeps, against those of our model that keeps everything."""
    side, batch, _ = opened(folder)
    given = {"architecture": side.architecture, "compute": "float32"}
    graded = jax.jit(jax.value_and_grad(partial(jax_models.summed_loss, **given)))
    loss, gradients = graded(side.params, batch)
    found = {}
    for remat in ("none", "products", "layers"):
        mine, slopes = jax.jit(jax.value_and_grad(partial(jax_tunix.summed_loss, **given, remat=remat)))(
            side.params, batch
        )
        apart = jax.tree.map(lambda one, two: float(jnp.abs(one - two).max() / jnp.abs(one).max()), gradients, slopes)
        found[remat] = {"loss": float(abs(mine / loss - 1)), "gradient": max(jax.tree.leaves(apart))}
    return found


def steps(folder, *, compute, mesh, rate):
    """Losses of three steps, and the weights after them."""
    side, batch, targets = opened(folder)
    batch = jax.tree.map(lambda array: np.concatenate([array] * 4)[None], batch)  # 8 rows
    rows, tokens = batch.ids.shape[1:]
    plan = StepPlan(
        architecture=side.architecture, compute=compute, weights="float32", remat="none", chunk=64, optim=OPTIM,
        max_grad_norm=1.0, attention=jax_tunix.ATTENTION, accumulation=1, seed=0, implementation="tunix",
    )  # fmt: skip
    state = State(side.params, jax_optim.init(side.params, OPTIM))
    state = jax.device_put(state, parameter_shardings(mesh, state))
    step, losses = compile_step(plan, mesh, rows, tokens), []
    for number in range(1, 4):
        state, loss, _ = step(state, batch, **numbers(plan, step=number, rate=rate, target_tokens=4 * targets))
        losses.append(float(loss))
    return losses, state.params, side.params


def devices(folder):
    """Losses of three steps on one device and on all of them."""
    meshes = {"one": make_mesh(jax.devices()[:1]), "all": make_mesh()}
    found = {name: steps(folder, compute="float32", mesh=mesh, rate=1e-3)[0] for name, mesh in meshes.items()}
    return found | {"devices": len(jax.devices())}


def halved(folder):
    """The share of weights that three small steps in bfloat16 leave exactly as they were."""
    losses, after, before = steps(folder, compute="bfloat16", mesh=make_mesh(jax.devices()[:1]), rate=1e-5)
    pairs = list(zip(jax.tree.leaves(after["layers"]), jax.tree.leaves(before["layers"]), strict=True))
    same = sum(int((np.asarray(one) == two).sum()) for one, two in pairs)
    kinds = sorted({str(one.dtype) for one, _ in pairs})
    return {"unmoved": same / sum(two.size for _, two in pairs), "types": kinds, "losses": losses}


def outside(folder):
    """Whether a token that is not in the table has a state."""
    side, batch, _ = opened(folder)
    ids = batch.ids[:1].copy()
    ids[0, -1] = side.architecture.shape.vocab
    states = jax_tunix.forward(
        side.params, ids, batch.positions[:1], batch.segments[:1], side.architecture, compute="float32"
    )  # fmt: skip
    return {"no number": bool(np.isnan(states[0, -1]).all())}


if __name__ == "__main__":
    asked = {one.__name__: one for one in (loader, restarted, kept, devices, halved, outside)}
    print(json.dumps(asked[sys.argv[1]](Path(sys.argv[2]))))
