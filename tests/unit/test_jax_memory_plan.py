"""The plan of the JAX engine: an upper bound for each device, by named parts; what is cut is divided by the devices."""

import json
import os
from pathlib import Path

import pytest

from tunix_rt.config.load import build_config
from tunix_rt.doctor.selection import DeviceChoice, environment_for, set_environment, with_virtual_devices
from tunix_rt.plan.fit import judge
from tunix_rt.plan.jax_memory import predict_jax
from tunix_rt.plan.memory import predict
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.shape import shape_of

GIB = 2**30
GEMMA = shape_of(json.loads((Path(__file__).parents[2] / "presets" / "gemma-2b" / "config.json").read_text()))


def config(**settings):
    return build_config({"backend": "jax", "max_length": 1024, "per_device_train_batch_size": 1, **settings}, "x")


def step(plan):
    return next(phase.parts for phase in plan.phases if phase.name == "step")


def test_weights_and_moments_are_what_they_are_and_an_eighth_on_eight_devices():
    one, eight = (step(predict_jax(GEMMA, config(), device="tpu", devices=count)) for count in (1, 8))
    assert one["weights"] == 4 * GEMMA.parameters and one["optimizer"] == 8 * GEMMA.parameters
    for name in ("weights", "optimizer", "gradients"):
        assert eight[name] == one[name] // 8


def test_copies_of_the_state_are_each_cut_over_fewer_devices():
    plan = predict_jax(GEMMA, config(data_replicas=4), device="tpu", devices=8)
    assert step(plan)["weights"] == 4 * GEMMA.parameters // 2


def test_devices_of_a_cpu_share_its_memory():
    alone, shared = (predict_jax(GEMMA, config(), device=device, devices=8) for device in ("tpu", "cpu"))
    assert step(shared)["weights"] == 8 * step(alone)["weights"]


def test_less_is_kept_where_more_is_computed_again():
    kept = [
        step(predict_jax(GEMMA, config(gradient_checkpointing=share), device="tpu"))["activations"]
        for share in (False, 0.5, True)
    ]
    assert kept[0] > kept[1] > kept[2]


def test_a_full_copy_does_not_fit_a_chip_and_eight_parts_do():
    """As the TPU's own compiler says of float32 AdamW with 1 x 1024 tokens for each chip of a v5e-8."""
    chip = DeviceChoice(
        device="tpu",
        kind="TPU v5 lite",
        count=8,
        memory_bytes=round(15.75 * GIB),
        free_bytes=round(15.75 * GIB),
        reason="",
    )
    asked = config(dtype="bfloat16", gradient_checkpointing=True, evaluation={"enabled": False})
    assert judge(predict_jax(GEMMA, asked, device="tpu", devices=8), chip).fits
    assert not judge(predict_jax(GEMMA, asked, device="tpu", devices=1), chip).fits


def test_advice_for_this_engine_holds_nothing_that_it_refuses():
    chip = DeviceChoice(
        device="cuda", kind="a GPU", count=1, memory_bytes=24 * GIB, free_bytes=24 * GIB, reason="", capability=(9, 0)
    )
    asked = config(per_device_train_batch_size=8)
    fit = judge(predict_run(GEMMA, asked, device="cuda"), chip, GEMMA, asked)
    advice = "\n".join(fit.advice)
    assert not fit.fits and "training.optim=adafactor" in advice
    assert not any(word in advice for word in ("adamw_8bit", "in_backward", "=float16", "lora"))


def test_each_engine_has_its_own_prediction():
    torch = build_config({"max_length": 1024}, "x")
    assert predict_run(GEMMA, torch, device="cuda", devices=8, rows=64) == predict(GEMMA, torch, device="cuda")
    assert predict_run(GEMMA, config(), device="cuda", devices=8).devices == 8


@pytest.mark.parametrize(
    ("flags", "number", "count"),
    [("--xla_force_host_platform_device_count=8", "", 8), ("", "4", 4), ("", "", 1), ("--xla_cpu_x=true", "many", 1)],
)
def test_a_cpu_that_is_several_devices_counts_as_so_many(monkeypatch, flags, number, count):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
    cpu = DeviceChoice(device="cpu", kind="a CPU", count=1, memory_bytes=GIB, free_bytes=GIB, reason="")
    assert with_virtual_devices(cpu, "jax").count == count
    assert with_virtual_devices(cpu, "torch").count == 1


def test_jax_is_given_most_of_a_gpu_unless_the_user_said_how_much(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_PLATFORMS", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert "XLA_CLIENT_MEM_FRACTION" not in {**environment_for("tpu", "jax"), **environment_for("cpu", "jax")}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    set_environment("cuda", "jax")
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    set_environment("cuda", "jax")
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == environment_for("cuda", "jax")["XLA_CLIENT_MEM_FRACTION"]


def test_jax_is_given_no_more_of_a_gpu_than_the_run_may_take(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "JAX_PLATFORMS", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert environment_for("cuda", "jax", memory_share=0.99) == environment_for("cuda", "jax")
    for told, kept in (("0.5", "0.2500"), ("0.1", "0.1"), ("a half", "0.2500")):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", told)
        set_environment("cuda", "jax", memory_share=0.25)
        assert (os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"], "XLA_CLIENT_MEM_FRACTION" in os.environ) == (kept, False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    set_environment("cuda", "jax", memory_share=0.25)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.2500"
