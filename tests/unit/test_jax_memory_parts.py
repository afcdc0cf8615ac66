"""What a step keeps for its backward pass is at most what the plan says, by tracing the layers alone: nothing is computed."""

import json
import math

import pytest

from tests.conftest import ROOT
from tunix_rt.config.settings import Training
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.plan.jax_activations import kept as kept_by_plan
from tunix_rt.plan.jax_run import Run
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.shape import shape_of

jax = pytest.importorskip("jax")
jax_attention = pytest.importorskip("tunix_rt.engines.jax.attention", exc_type=ImportError)
models = pytest.importorskip("tunix_rt.engines.jax.model", exc_type=ImportError)
weights = pytest.importorskip("tunix_rt.engines.jax.weights", exc_type=ImportError)

ROWS, TOKENS = 4, 512
FAMILIES = ("gemma-2b", "gemma-2-2b", "gemma-3-1b", "llama-3.2-1b", "gpt2")
KEPT = {"none": False, "products": 0.5}
"""What is computed again -> `training.gradient_checkpointing`."""
ABOVE = 1.3
"""The plan may say so many times as much as is kept: more would refuse what has room."""


def config_of(family):
    undropped = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) if family == "gpt2" else {}
    return json.loads((ROOT / "presets" / family / "config.json").read_text()) | undropped


@pytest.fixture
def traceable(monkeypatch):
    """cuDNN is asked for its version while its attention is traced; here it has none."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91400)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)


def kept_bytes(architecture, *, compute, attention, remat):
    """Of the arrays that the backward pass is handed, stacked over the layers: all that are not parameters."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        weights.parameter_shapes(architecture),
        is_leaf=lambda node: isinstance(node, tuple),
    )
    given = [jax.ShapeDtypeStruct((ROWS, TOKENS), "int32")] * 3

    def backward(params, *batch):
        attend = jax_attention.attention_named(attention)
        return jax.vjp(
            lambda own: models.forward(
                own, *batch, architecture, compute=compute, remat=remat, attention=attend
            ),
            params,
        )[1]  # fmt: skip

    parameters = {tuple(one.shape) for one in jax.tree.leaves(params)}
    handed = jax.tree.leaves(jax.eval_shape(backward, params, *given))
    return sum(
        math.prod(one.shape) * one.dtype.itemsize
        for one in handed
        if len(one.shape) > 2 and one.shape[0] == architecture.shape.layers and tuple(one.shape) not in parameters
    )


@pytest.mark.parametrize("remat", KEPT)
@pytest.mark.parametrize(("compute", "attention"), [("bfloat16", "cudnn"), ("bfloat16", "exact"), ("float32", "exact")])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_what_the_layers_keep_and_little_more(traceable, family, compute, attention, remat):
    config = config_of(family)
    architecture, shape = architecture_of(config), shape_of(config)
    if attention == "cudnn" and architecture.score_cap is not None:
        pytest.skip("cuDNN's kernel has no soft cap of scores")
    run = Run(
        shape=shape, recipe=recipe_of(Training(dtype=compute, gradient_checkpointing=KEPT[remat])), device="cuda",
        parts=1, rows=ROWS, all_rows=ROWS, tokens=TOKENS, accumulation=1, kernel=attention == "cudnn", lean=True,
    )  # fmt: skip
    kept = kept_bytes(architecture, compute=compute, attention=attention, remat=remat)
    assert kept <= kept_by_plan(run) <= ABOVE * kept
