"""When a run of the JAX engine may begin, and with what it goes on: its verdict, its copies of the state, its rows."""

import json
import logging
import os

import pytest
from click.testing import CliRunner

from tests.samples import device
from tests.unit.test_fit_settings import SHAPE
from tunix_rt.cli.main import cli
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.selection import DeviceChoice, environment_for, set_environment, with_virtual_devices
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.report import explain_out_of_memory, left_to_the_compiler
from tunix_rt.train.preflight import adjust_data_replicas

GIB = 2**30


def config(**training) -> RunConfig:
    return build_config({"training": {"backend": "jax", "dtype": "bfloat16", **training}}, "a test")


def gpu(free_bytes: float) -> DeviceChoice:
    return device("cuda", free_bytes, memory_bytes=80 * GIB, capability=(9, 0))


@pytest.mark.parametrize(
    ("asked", "devices", "held"), [(2, 8, 2), (2, 1, 1), (4, 6, 2), (4, 2, 2), (3, 8, 1), (6, 4, 2), (1, 7, 1)]
)
def test_data_replicas_of_a_resumed_run_divide_what_was_set_and_the_devices(asked, devices, held):
    adjusted = adjust_data_replicas(config(data_replicas=asked), devices, continued=True)
    assert adjusted.training.data_replicas == held
    assert devices % held == asked % held == 0


def test_a_continued_run_has_fewer_copies_and_says_so_and_a_fresh_one_is_left_to_be_refused(caplog):
    asked = config(data_replicas=4)
    with caplog.at_level(logging.INFO):
        assert adjust_data_replicas(asked, 6, continued=False) == asked
        assert adjust_data_replicas(asked, 8, continued=True) == asked
        assert not caplog.messages
        assert adjust_data_replicas(asked, 6, continued=True).training == asked.training.model_copy(
            update={"data_replicas": 2}
        )
    assert caplog.messages == ["data_replicas=4 does not divide 6 device(s); using 2"]


def test_the_compiler_decides_where_the_lower_bound_fits():
    settings = config(per_device_train_batch_size=64)
    plan = predict_run(SHAPE, settings, device="cuda", capability=(9, 0))
    least = plan.least_bytes + plan.context_bytes
    assert left_to_the_compiler(plan, gpu(least)).startswith(f"at least {plan.least_bytes / GIB:.2f} GiB of ")
    assert left_to_the_compiler(plan, gpu(least - 1)) == "", "refused"
    other = predict_run(SHAPE, config(per_device_train_batch_size=64, backend="torch"), device="cuda")
    assert left_to_the_compiler(other, gpu(80 * GIB)) == "", "nothing is left open"


@pytest.mark.parametrize(("backend", "factor", "exit_code"), [("jax", 0.9, 0), ("jax", 1.1, 5), ("torch", 1.1, 5)])
def test_plan_refuses_what_train_refuses_and_no_more(backend, factor, exit_code):
    options = ["plan", "--model", "gemma-3-270m", "--backend", backend, "--set", "training.dtype=bfloat16"]
    free = json.loads(CliRunner().invoke(cli, [*options, "--on", "h200", "--json"]).stdout)["memory"]
    limit = (free["least_bytes"] / factor + free["context_bytes"]) / GIB
    options += ["--on", "h200", "--set", f"training.memory_limit_gib={limit:.3f}"]
    done = CliRunner().invoke(cli, options)
    assert done.exit_code == exit_code, done.output
    assert done.stdout.startswith("may fit, the compiler decides: at least " if exit_code == 0 else "does not fit: ")
    answer = json.loads(CliRunner().invoke(cli, [*options, "--json"]).stdout)
    assert answer["fit"]["fits"] is answer["compiler_decides"] is (exit_code == 0)


def test_a_run_out_of_memory_comes_with_the_settings_that_make_the_step_smaller():
    settings = config(per_device_train_batch_size=8)
    plan = predict_run(SHAPE, settings, device="cuda", rows=64, row_tokens=512, capability=(9, 0))
    problem, fix = explain_out_of_memory(plan, 3 * GIB, gpu(80 * GIB), SHAPE, settings)
    assert "3.00 GiB in use and no more available" in problem and "or more predicted" in problem
    assert fix.splitlines()[0] == "--set training.gradient_checkpointing=true"
    assert "training.per_device_train_batch_size=4 --set training.gradient_accumulation_steps=2" in fix


# --- the environment of jax --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "number", "count"),
    [("--xla_force_host_platform_device_count=8", "", 8), ("", "4", 4), ("", "", 1), ("--xla_cpu_x=true", "many", 1)],
)
def test_a_cpu_that_is_several_devices_counts_as_so_many(monkeypatch, flags, number, count):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", number)
    cpu = device("cpu", GIB)
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
