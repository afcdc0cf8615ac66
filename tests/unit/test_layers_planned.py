"""What computes the layers of a run: decided once, by the plan, and obeyed by the engine."""

from typing import Any

import pytest

from tests.samples import device
from tests.tables import parametrize
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.compile_policy import layers_planned
from tunix_rt.plan.fit import least_room, predict_run
from tunix_rt.plan.run import RowFacts, plan_run
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape

GIB = 2**30
SMOLLM2 = shape_of(resolve_model("smollm2-135m", weights="random").config)
GEMMA_1B = shape_of(resolve_model("gemma-3-1b", weights="random").config)
GPU = {"device": "cuda", "device_name": "NVIDIA GeForce RTX 5090"}


def configured(rows: int, length: int, **training: Any) -> RunConfig:
    given = {"per_device_train_batch_size": rows, "dtype": "bfloat16", **training}
    return RunConfig.model_validate({"data": {"max_length": length}, "training": given})


def prepared(rows: int, longest: int, *, examples: int | None = None) -> RowFacts:
    tokens = rows * longest
    packed = (examples or 3 * rows) > rows
    return RowFacts(rows=rows, longest=longest, tokens=tokens, target_tokens=tokens, packed=packed)


def layers_for_data(
    config: RunConfig, shape: ModelShape, chosen: DeviceChoice, rows: RowFacts, batch: int
) -> str | None:
    return plan_run(config, shape, chosen, rows, micro_batch=batch).memory.layers


def gpu(free_bytes: int) -> DeviceChoice:
    return device("cuda", free_bytes, GPU["device_name"], memory_bytes=32 * GIB, capability=(12, 0))


def room_of(shape: ModelShape, config: RunConfig, longest: int, layers: str) -> int:
    plan = predict_run(shape, config, device="cuda", row_tokens=longest, capability=(12, 0), layers=layers)
    return least_room(plan)


@parametrize("steps", "asked", "layers")
def test_a_short_run_is_not_compiled_unless_it_is_asked_for(steps, asked, layers):
    config = configured(8, 1024, compile=asked)
    assert layers_planned(config, GEMMA_1B, steps=steps, **GPU) == layers


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        ({"capability": (6, 0)}, "plain"),
        ({"capability": (7, 0)}, "compiled"),
        ({"packed": False}, "plain"),
        ({"device": "cpu"}, "plain"),
    ],
)
def test_where_nothing_could_be_compiled_nothing_is_planned_to_be(changed, layers):
    assert layers_planned(configured(8, 1024), GEMMA_1B, **(GPU | changed)) == layers


def test_layers_that_wait_for_their_host_are_recorded():
    assert layers_planned(configured(8, 512), SMOLLM2, **GPU) == "recorded"
    for setting in ({"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}):
        assert layers_planned(configured(8, 512, **setting), SMOLLM2, **GPU) == "compiled"


def test_shorter_rows_do_not_slip_past_the_gate_by_being_recorded():
    """At 1,024 tokens the layers are compiled; at the 512 that the data has they would be recorded, which takes more."""
    config, data = configured(8, 1024), prepared(100_000, 512)
    compiled, recorded = (room_of(SMOLLM2, config, 512, layers) for layers in ("compiled", "recorded"))
    assert compiled < recorded
    assert layers_for_data(config, SMOLLM2, gpu(recorded), data, 8) == "recorded"
    assert layers_for_data(config, SMOLLM2, gpu(recorded - 1), data, 8) == "compiled"


def test_a_short_run_is_compiled_where_it_fits_in_no_other_way():
    config, data = configured(8, 1024, max_steps=3), prepared(100, 1024)
    plain, compiled = (room_of(GEMMA_1B, config, 1024, layers) for layers in ("plain", "compiled"))
    assert layers_for_data(config, GEMMA_1B, gpu(plain), data, 8) == "plain"
    assert layers_for_data(config, GEMMA_1B, gpu(compiled), data, 8) == "compiled"
    assert layers_for_data(config, GEMMA_1B, gpu(compiled - 1), data, 8) == "plain", "for the plan to refuse"


def test_rows_of_one_example_each_are_not_compiled_whatever_the_setting_of_packing_says():
    config = configured(8, 1024, max_steps=10**6)
    alone = prepared(100, 1024, examples=100)
    assert layers_for_data(config, GEMMA_1B, gpu(400 * GIB), alone, 8) == "plain"
    assert layers_for_data(config, GEMMA_1B, gpu(1 * GIB), alone, 8) == "plain"
