"""A training step of the JAX engine over eight virtual devices, against one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tunix_rt.config.settings import Training
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.errors import ConfigError, InputError

ROOT = Path(__file__).parents[2]
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in ("gemma", "gpt2")]


def ask_jax(*words):
    command = [sys.executable, "-m", "tests.invariant.jax_step_side", *map(str, words)]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FLAGS,
        "JAX_ENABLE_X64": str("float64" in words).lower(),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def gemma3():
    return ask_jax("gemma3", "float64", 50, "one", "eight")


def off(found, one, other):
    wanted = np.asarray(found["curves"][one])
    assert np.all(np.isfinite(wanted)) and wanted[-1] < 0.98 * wanted[0], "nothing was learned"
    return np.max(np.abs(np.asarray(found["curves"][other]) - wanted) / wanted)


def test_fifty_steps_on_eight_devices_have_the_losses_of_one(gemma3):
    assert off(gemma3, "one", "eight") < 1e-8


@pytest.mark.slow  # a third program to compile
def test_micro_batches_do_not_change_the_loss():
    assert off(ask_jax("gemma3", "float64", 50, "one", "accumulated"), "one", "accumulated") < 1e-8


def test_each_device_has_an_eighth_of_every_parameter_and_moment(gemma3):
    cut = gemma3["parts"]["eight"]
    assert len(cut) == 3 * 15
    for name, (whole, *held) in cut.items():
        assert held == [whole // 8], name
    assert all(held == [whole] for whole, *held in gemma3["parts"]["one"].values())


def test_the_compiler_gives_a_device_an_eighth_of_the_state_and_uses_it_again(gemma3):
    (whole, _, _), (part, used_again, temporary) = gemma3["bytes"]["one"], gemma3["bytes"]["eight"]
    assert part < 1.05 * whole / 8 + 16 * 24 * 5 * 4
    assert used_again > 0.9 * part - 16 * 24 * 5 * 4
    assert temporary < 0.35 * gemma3["bytes"]["one"][2]


def test_a_loss_that_is_no_number_changes_nothing(gemma3):
    assert gemma3["unsound"] == {"same": True, "loss": "nan", "norm": "nan"}


@pytest.mark.slow
def test_copies_of_the_state_and_what_is_kept_change_no_loss():
    found = ask_jax("gemma3", "float64", 20, "one", "replicas", "kept")
    assert off(found, "one", "replicas") < 1e-8
    assert off(found, "one", "kept") < 1e-8
    for name, (whole, *held) in found["parts"]["replicas"].items():
        assert held == [whole // 4], name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma", "gpt2"])
def test_fifty_steps_of_other_families_have_the_losses_of_one_device(family):
    assert off(ask_jax(family, "float64", 50, "one", "eight"), "one", "eight") < 1e-8


@pytest.mark.slow  # fifty steps in float64 agree by default
@pytest.mark.parametrize("family", ["gemma3", *OTHERS])
def test_in_float32_ten_steps_agree_to_five_digits(family):
    found = ask_jax(family, "float32", 10, "one", "eight")
    curves = {way: np.asarray(curve) for way, curve in found["curves"].items()}
    assert np.max(np.abs(curves["eight"] - curves["one"]) / curves["one"]) < 1e-5


@pytest.mark.slow
def test_a_step_is_a_function_of_seed_and_number():
    assert ask_jax("gemma3", "bfloat16", 1, "seeded")["seeded"] == {"again": True, "seed": False, "step": False}


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"lora_rank": 4}, "lora_rank"), ({"dtype": "float16"}, "float16"), ({"optim": "adamw_8bit"}, "adamw_8bit")],
)
def test_what_the_engine_does_not_do_is_refused_by_name(setting, named):
    from tests.invariant.jax_step_side import CONFIGS
    from tunix_rt.engines.jax.step import step_plan

    with pytest.raises(ConfigError, match=named):
        step_plan(architecture_of(CONFIGS["gemma3"]), Training(**setting), platform="cpu", rows=1, tokens=8)


def test_dropout_that_the_model_asks_for_is_refused():
    from tests.invariant.jax_step_side import CONFIGS
    from tunix_rt.engines.jax.step import step_plan

    dropped = architecture_of(CONFIGS["gpt2"] | {"resid_pdrop": 0.1})
    with pytest.raises(InputError, match=r"dropout of 0\.1"):
        step_plan(dropped, Training(), platform="cpu", rows=1, tokens=8)
