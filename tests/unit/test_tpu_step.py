"""The plan of a step on a TPU beside what the TPU's compiler said of it, as recorded: never below what is in use at once."""

import json
import random

import pytest

from benchmarks import plan_against_compiler as compared
from tests.conftest import ROOT
from tunix_rt.config.load import build_config
from tunix_rt.plan import tpu_step
from tunix_rt.plan.jax_memory import predict_jax
from tunix_rt.plan.shape import shape_of

RECORDED = compared.recorded(ROOT)
FITTING = {name: entry for name, entry in RECORDED.items() if entry["fits"]}
SETTING = {setting.name: setting for setting in compared.ALL}
GIB = 2**30
ABOVE, ABOVE_BYTES = 1.15, 0.4 * GIB
"""The plan may be above the peak by the larger of the two: code and gaps are much of a small step."""


@pytest.fixture(autouse=True)
def presets_alone(monkeypatch):
    """No hub is asked for a model that is also a preset."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def step(setting):
    plan = predict_jax(shape_of(setting.model()), setting.config(), device="tpu", devices=setting.devices)
    return next(phase for phase in plan.phases if phase.name == "step")


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_what_the_plan_says_now(name):
    assert step(SETTING[name]).total_bytes == RECORDED[name]["plan_bytes"]


@pytest.mark.parametrize("name", FITTING)
def test_the_plan_is_not_below_the_peak_nor_far_above(name):
    peak, planned = FITTING[name]["compiler_bytes"]["peak"], step(SETTING[name]).total_bytes
    assert peak <= planned <= max(ABOVE * peak, peak + ABOVE_BYTES)


@pytest.mark.parametrize("name", FITTING)
def test_the_plan_is_below_all_that_the_compiler_lists_by_a_quarter_at_most(name):
    assert step(SETTING[name]).total_bytes >= 0.75 * FITTING[name]["compiler_bytes"]["total"]


def test_a_third_was_held_out_by_the_draw_alone():
    drawn = random.Random(json.loads((ROOT / compared.RESULTS).read_text())["held_out_seed"])
    names = [setting.name for setting in compared.SETTINGS]
    assert {name for name, entry in RECORDED.items() if entry["held_out"]} <= set(drawn.sample(names, len(names) // 3))
    assert len(compared.held_out()) == len(names) // 3


def test_the_compiler_takes_a_step_whose_total_is_above_its_chip_and_the_plan_agrees():
    taken, refused = (RECORDED[setting.name] for setting in compared.AT_THE_LIMIT)
    usable = taken["verdict"]["usable"]
    assert (
        taken["fits"]
        and taken["compiler_bytes"]["total"] > usable > step(SETTING[compared.AT_THE_LIMIT[0].name]).total_bytes
    )
    assert not refused["fits"] and step(SETTING[compared.AT_THE_LIMIT[1].name]).total_bytes > usable


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in FITTING])
def test_what_the_compiler_refuses_the_plan_does_not_fit_in(name):
    assert step(SETTING[name]).total_bytes > RECORDED[name]["verdict"]["usable"]


def test_the_step_is_planned_in_the_pieces_in_which_it_is_computed():
    pytest.importorskip("jax")
    from tunix_rt.engines.jax import step as jax_step

    assert (tpu_step.LOSS_TOKENS, tpu_step.MLP_TOKENS) == (jax_step.TPU_LOSS_TOKENS, jax_step.TPU_MLP_TOKENS)


@pytest.mark.parametrize("recomputed", [True, 0.5, False])
@pytest.mark.parametrize("devices", [1, 8])
def test_more_rows_and_longer_ones_never_take_less(devices, recomputed):
    shape = shape_of(compared.SETTINGS[0].model())

    def planned(rows, tokens):
        asked = {
            "backend": "jax", "per_device_train_batch_size": rows, "max_length": tokens, "dtype": "bfloat16",
            "gradient_checkpointing": recomputed,
        }  # fmt: skip
        return predict_jax(shape, build_config(asked, "x"), device="tpu", devices=devices).peak_bytes

    by_rows = [planned(rows, 640) for rows in range(1, 24)]
    by_tokens = [planned(3, tokens) for tokens in range(128, 4096, 96)]
    assert by_rows == sorted(by_rows) and by_tokens == sorted(by_tokens)
