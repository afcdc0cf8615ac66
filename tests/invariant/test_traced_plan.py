"""The plan of a traced model: a model whose family has a row is traced as if it had none, and both plans are compared."""

import json

import pytest

from tunix_rt.config.settings import RunConfig
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.shape import shape_of

pytest.importorskip("torch")
from tunix_rt.plan import trace

BESIDE = 0.04
"""Largest difference of a traced phase of a step from the exact one."""


@pytest.mark.parametrize(
    "training",
    [
        {"dtype": "bfloat16", "gradient_checkpointing": False},  # weights in float32, which autocast casts
        pytest.param({"dtype": "bfloat16", "master_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32", "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_a_traced_step_has_the_memory_of_the_exact_plan(tmp_path, monkeypatch, training):
    preset = resolve_model("olmo-2-1b", weights="random")
    (tmp_path / "config.json").write_text(json.dumps({**preset.config, "num_hidden_layers": 4}))
    source = resolve_model(str(tmp_path), weights="random")
    settings = {
        "data": {"max_length": 1024},
        "training": {"per_device_train_batch_size": 4, "compile": False, **training},
        "evaluation": {"per_device_eval_batch_size": 4},
    }
    config = RunConfig.model_validate(settings)
    exact = shape_of(source.config)
    monkeypatch.setattr(trace, "FAMILIES", {})
    traced = trace.shape_of_any(source, config.training)
    plans = [predict_run(shape, config, device="cuda", capability=(9, 0)) for shape in (exact, traced)]
    sizes = [{phase.name: phase.total_bytes for phase in plan.phases} for plan in plans]
    for phase in ("forward", "loss", "backward", "update", "held-out loss"):
        assert sizes[1][phase] == pytest.approx(sizes[0][phase], rel=BESIDE), phase
