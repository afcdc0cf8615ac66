"""The plan of the JAX engine: the least that each device needs, sharded, and below what compilers need."""

import json

import pytest

from benchmarks import plan_against_compiler as compared
from tests.conftest import ROOT
from tests.samples import device
from tests.unit.test_plan import changed
from tunix_rt.config.load import build_config
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.jax_floor import predict_jax, row_length, savings
from tunix_rt.plan.memory import predict
from tunix_rt.plan.report import judge
from tunix_rt.plan.shape import shape_of

GIB = 2**30
GEMMA = shape_of(json.loads((ROOT / "presets" / "gemma-2b" / "config.json").read_text()))
RECORDED = compared.recorded(ROOT)
SETTING = {setting.name: setting for setting in compared.ALL}


def config(**settings):
    return build_config({"backend": "jax", "max_length": 1024, "per_device_train_batch_size": 1, **settings}, "x")


def step(plan):
    (found,) = [phase.parts for phase in plan.phases if phase.name == "step"]
    return found


def test_state_and_gradients_are_an_eighth_on_eight_devices():
    one, eight = (step(predict_jax(GEMMA, config(), device="tpu", devices=count)) for count in (1, 8))
    assert one["weights"] == one["gradients"] == 4 * GEMMA.parameters and one["optimizer"] == 8 * GEMMA.parameters
    for name in ("weights", "optimizer", "gradients"):
        assert eight[name] == one[name] // 8
    assert eight["activations"] == one["activations"], "each device has its own rows"


def test_arrays_that_no_number_of_devices_divides_are_replicated():
    odd = shape_of({
        "model_type": "llama", "vocab_size": 1001, "hidden_size": 33, "intermediate_size": 77, "num_hidden_layers": 8,
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 11, "max_position_embeddings": 64,
    })  # fmt: skip
    one, eight = (step(predict_jax(odd, config(), device="tpu", devices=count)) for count in (1, 8))
    assert eight["weights"] == one["weights"], "the layers are a dimension that is not sharded"


def test_data_replicas_are_each_sharded_over_fewer_devices():
    plan = predict_jax(GEMMA, config(data_replicas=4), device="tpu", devices=8)
    assert step(plan)["weights"] == 4 * GEMMA.parameters // 2


def test_devices_of_a_cpu_share_its_memory():
    alone, shared = (predict_jax(GEMMA, config(), device=device, devices=8) for device in ("tpu", "cpu"))
    assert step(shared)["weights"] == 8 * step(alone)["weights"]


def test_the_rows_count_padded_as_they_are_compiled():
    plan = predict_jax(GEMMA, config(max_length=130, per_device_train_batch_size=3), device="tpu")
    assert row_length(130, "tpu") == 256 and row_length(130, "cuda") == 192
    assert step(plan)["activations"] == GEMMA.layers * 3 * 256 * GEMMA.hidden * 4


def test_evaluation_batches_are_those_of_the_other_engine_unless_one_is_set():
    torch = changed(config(), "training", backend="torch")
    assert (
        predict_jax(GEMMA, config(), device="cuda", devices=8).eval_rows
        == predict(GEMMA, torch, device="cuda").eval_rows
    )
    fixed = config(evaluation={"per_device_eval_batch_size": 5})
    assert predict_jax(GEMMA, fixed, device="cuda").eval_rows == 5


def test_each_engine_has_its_own_prediction():
    torch = build_config({"max_length": 1024}, "x")
    assert predict_run(GEMMA, torch, device="cuda", devices=8) == predict(GEMMA, torch, device="cuda", devices=8)
    assert predict_run(GEMMA, config(), device="cuda", devices=8).devices == 8
    assert (
        not predict(GEMMA, torch, device="cuda").lower_bound and predict_run(GEMMA, config(), device="cpu").lower_bound
    )


def test_a_full_copy_does_not_fit_a_chip_and_eight_shards_do():
    """As the TPU's own compiler decides for float32 AdamW with 1 x 1024 tokens on each chip of a v5e-8."""
    free = round(15.75 * GIB)
    chip = device("tpu", free, "TPU v5 lite", count=8)
    settings = config(dtype="bfloat16", gradient_checkpointing=True)
    assert judge(predict_jax(GEMMA, settings, device="tpu", devices=8), chip).fits
    assert not judge(predict_jax(GEMMA, settings, device="tpu", devices=1), chip).fits


def test_advice_for_this_engine_has_nothing_that_it_refuses():
    chip = device("cuda", 24 * GIB, capability=(9, 0))
    settings = config(per_device_train_batch_size=8)
    fit = judge(predict_run(GEMMA, settings, device="cuda"), chip, GEMMA, settings)
    advice = "\n".join(fit.advice)
    assert not fit.fits and "training.optim=adafactor" in advice and "may fit" in advice
    assert not any(word in advice for word in ("adamw_8bit", "in_backward", "=float16", "lora"))


def test_savings_are_settings_that_are_not_set_yet():
    every = savings(config(per_device_train_batch_size=8, data_replicas=2).training)
    assert [line.split("=")[0] for line in every[:-1]] == [
        "--set training.data_replicas", "--set training.gradient_checkpointing", "--set training.per_device_train_batch_size",
        "--set training.dtype", "--set training.optim",
    ]  # fmt: skip
    least = config(gradient_checkpointing=True, dtype="bfloat16", master_dtype="bfloat16", optim="adafactor")
    assert savings(least.training) == every[-1:]


# --- beside the TPU's compiler ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDED)
def test_the_lower_bound_is_below_the_peak_of_the_compiler_and_as_recorded(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    entry, parts = RECORDED[name], compared.lower_bound(SETTING[name])
    assert (sum(parts.values()), parts) == (entry["floor_bytes"], entry["floor_parts"])
    if entry["fits"]:
        assert entry["floor_bytes"] <= entry["compiler_bytes"]["peak"]


def test_the_compiler_accepts_a_step_whose_total_is_above_its_chip():
    accepted, refused = (RECORDED[setting.name] for setting in compared.AT_THE_LIMIT)
    usable = accepted["verdict"]["usable"]
    assert accepted["fits"] and accepted["compiler_bytes"]["total"] > usable > accepted["compiler_bytes"]["peak"]
    assert not refused["fits"]
