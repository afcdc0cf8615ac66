"""`plan_run` is the one entry to the planner: once with rows of `max_length`, once with the rows that there are."""

from dataclasses import replace
from typing import Any

import pytest

from tests.samples import device
from tests.unit.test_plan import GEMMA3_270M, SMOLLM2_135M, changed
from tunix_rt.config.load import load_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.packing import total_steps
from tunix_rt.plan.fit import predict_run, verdict
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.run import RowFacts, plan_run
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.timing import WRITTEN_BYTES_PER_SECOND, estimate_time, seconds_beside

GIB = 2**30
SHAPE = shape_of(SMOLLM2_135M)
H200 = device("cuda", 139 * GIB, "NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0))
CPU = device("cpu", 60 * GIB, memory_bytes=64 * GIB)
CHIPS = device("tpu", 15.75 * GIB, "TPU v5 lite", count=8, memory_bytes=16 * GIB)
ROWS = RowFacts(rows=1000, longest=700, tokens=500_000, target_tokens=200_000, packed=True, eval_items=64)


def config_of(*overrides: str) -> RunConfig:
    named = ("model.model_name_or_path=a-model", "data.dataset=some", "data.max_length=1024")
    return load_config(None, overrides=[*named, *overrides])


def test_without_rows_they_are_as_long_as_max_length_and_no_steps_are_known():
    plan = plan_run(config_of(), SHAPE, H200)
    assert plan.memory == predict_run(
        SHAPE, plan.config, device="cuda", rows=8, capability=(9, 0), device_name=H200.kind
    )
    assert (plan.memory.row_tokens, plan.memory.target_share) == (1024, 1.0)
    assert plan.steps is plan.tokens_per_step is plan.seconds is plan.fitting is None
    assert plan.fit == verdict(plan.memory, H200) and plan.verdict == "fits" and plan.disk_bytes > 0


@pytest.mark.parametrize("settings", [(), ("training.max_steps=7",), ("training.num_train_epochs=2.5",),
                                      ("training.per_device_train_batch_size=900",)])  # fmt: skip
def test_with_rows_the_steps_are_those_of_the_data_loader(settings):
    config = config_of("training.gradient_accumulation_steps=3", *settings)
    plan = plan_run(config, SHAPE, H200, ROWS)
    training = config.training
    rows = 3 * training.per_device_train_batch_size
    assert plan.steps == total_steps(1000, rows, epochs=training.num_train_epochs, max_steps=training.max_steps)
    assert plan.rows_per_step == min(rows, 1000) and plan.tokens_per_step == 500 * plan.rows_per_step
    assert (plan.memory.row_tokens, plan.memory.target_share) == (700, 0.4)
    assert plan.seconds is not None and 0 < plan.seconds[0] < plan.seconds[1]
    assert plan.memory.peak_bytes <= plan_run(config, SHAPE, H200).memory.peak_bytes


def test_the_time_on_a_cpu_follows_its_rate_and_is_unknown_without():
    config = config_of("training.max_steps=10")
    assert plan_run(config, SHAPE, CPU, ROWS).seconds is None
    plan = plan_run(config, SHAPE, CPU, ROWS, cpu_flops=1e11)
    time = estimate_time(
        SHAPE, config, tokens_per_step=4000, steps=10, eval_items=64, eval_rows=plan.memory.generation_rows,
        flops_per_second=1e11,
        target_share=0.4,
    )  # fmt: skip
    low, high = seconds_beside(SHAPE, config, 10)
    assert plan.seconds == (time.seconds_low + low, time.seconds_high + high) and 0 < low < high
    heldout = plan_run(config, SHAPE, CPU, replace(ROWS, heldout_tokens=4000), cpu_flops=1e11)
    assert plan.seconds < heldout.seconds < tuple(2 * seconds for seconds in plan.seconds), "two forward passes more"


def test_the_time_on_a_cpu_has_the_saves_before_evaluations():
    rarely, often = (config_of("training.max_steps=10", f"training.eval_steps={every}") for every in (10, 2))
    written = footprint_of(SHAPE, rarely.training, "cpu").checkpoint
    more = [b - a for a, b in zip(seconds_beside(SHAPE, rarely, 10), seconds_beside(SHAPE, often, 10), strict=True)]
    assert more == pytest.approx([4 * written / rate for rate in WRITTEN_BYTES_PER_SECOND])


def test_a_resumed_run_keeps_the_rows_of_its_micro_batches_on_other_devices():
    config = changed(config_of(), "training", backend="jax")
    began, resumed = plan_run(config, SHAPE, CHIPS), plan_run(config, SHAPE, replace(CHIPS, count=2), micro_batch=64)
    assert began.memory.rows == resumed.memory.rows == 64 and (began.memory.devices, resumed.memory.devices) == (8, 2)
    assert began.verdict == "may fit, the compiler decides"
    assert plan_run(config, SHAPE, replace(CHIPS, free_bytes=GIB // 8)).verdict == "does not fit"


# --- memory: auto -----------------------------------------------------------------------------------------------------


def test_auto_keeps_what_it_cannot_improve_and_is_not_settled_again_with_rows():
    config = config_of("training.memory=auto")
    tiny = plan_run(config, SHAPE, replace(H200, free_bytes=GIB // 4))
    assert tiny.config is config and not tiny.fit.fits
    assert tiny.fitting is not None and tiny.fitting["chosen"] == {} and "no settings" in tiny.fitting["why"]
    assert plan_run(config, SHAPE, H200, ROWS).fitting is None
    assert plan_run(config, SHAPE, H200, settle=False).fitting is None


def test_auto_leaves_the_settings_to_the_compiler_where_the_lower_bound_fits():
    config = changed(config_of("training.memory=auto"), "training", backend="jax")
    kept: Any = plan_run(config, SHAPE, CHIPS)
    assert kept.config is config and "the compiler decides" in kept.fitting["why"]
    changed_: Any = plan_run(config, SHAPE, replace(CHIPS, free_bytes=int(0.7 * kept.memory.least_bytes)))
    assert changed_.fit.fits and changed_.fitting["chosen"]


def test_settings_are_only_as_fast_on_a_cpu_as_its_rate():
    config, shape = config_of("training.memory=auto"), shape_of(GEMMA3_270M)
    written = plan_run(config, shape, CPU, settle=False).memory
    small = replace(CPU, free_bytes=int(0.8 * written.least_bytes))
    slow, fast = (plan_run(config, shape, small, cpu_flops=rate).fitting for rate in (1e10, 1e12))
    assert slow is not None and fast is not None and slow["chosen"] == fast["chosen"] != {}
    assert slow["predicted_tokens_per_second"] < fast["predicted_tokens_per_second"]
