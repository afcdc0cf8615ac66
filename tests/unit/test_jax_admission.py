"""When a run of the JAX engine may begin, and with what it goes on: its verdict, its copies of the state, its rows."""

import json
import logging
import math
import re

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tunix_rt.cli.main import cli
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.plan.fit import OVERSHOOT, explain_out_of_memory, left_to_the_compiler
from tunix_rt.plan.prediction import predict_run
from tunix_rt.plan.shape import shape_of
from tunix_rt.train.preflight import copies_held, with_copies_that_fit

GIB = 2**30
RESULTS = ROOT / "benchmarks" / "results"
SHAPE = shape_of({
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
})  # fmt: skip


def config(**training) -> RunConfig:
    return build_config({"training": {"backend": "jax", "dtype": "bfloat16", **training}}, "a test")


def gpu(free_bytes: float) -> DeviceChoice:
    return DeviceChoice(
        device="cuda", kind="a GPU", count=1, memory_bytes=80 * GIB, free_bytes=int(free_bytes), reason="",
        capability=(9, 0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "devices", "held"), [(2, 8, 2), (2, 1, 1), (4, 6, 2), (4, 2, 2), (3, 8, 1), (6, 4, 2), (1, 7, 1)]
)
def test_copies_of_the_state_divide_what_was_asked_for_and_the_devices(asked, devices, held):
    assert copies_held(asked, devices) == held
    assert devices % held == asked % held == 0


def test_a_continued_run_has_fewer_copies_and_says_so_and_a_fresh_one_is_left_to_be_refused(caplog):
    asked = config(data_replicas=4)
    with caplog.at_level(logging.INFO):
        assert with_copies_that_fit(asked, 6, continued=False) == asked
        assert with_copies_that_fit(asked, 8, continued=True) == asked
        assert not caplog.messages
        assert with_copies_that_fit(asked, 6, continued=True).training == asked.training.model_copy(
            update={"data_replicas": 2}
        )
    assert caplog.messages == [
        "Copies of the state: 4 were asked for, which do not divide 6 device(s); the run goes on with 2"
    ]


def test_only_what_the_compiler_may_do_with_less_of_is_left_to_it():
    asked = config(per_device_train_batch_size=64)
    plan = predict_run(SHAPE, asked, device="cuda", capability=(9, 0))
    near = math.ceil(plan.least_bytes / OVERSHOOT["cuda"]) + plan.context_bytes
    assert "It may not fit: " in left_to_the_compiler(plan, gpu(near), asked)
    assert left_to_the_compiler(plan, gpu(near - 1), asked) == "", "no bound was seen to be so far above"
    assert left_to_the_compiler(plan, gpu(2 * plan.peak_bytes + plan.context_bytes), asked) == ""
    other = config(per_device_train_batch_size=64, backend="torch")
    assert left_to_the_compiler(predict_run(SHAPE, other, device="cuda"), gpu(near), other) == ""


def test_weights_and_optimizer_that_have_no_room_are_not_left_to_the_compiler():
    asked = config(per_device_train_batch_size=1, gradient_checkpointing=True)
    plan = predict_run(shape_of({"model_type": "llama"}), asked, device="cuda", row_tokens=64, capability=(9, 0))
    step = next(phase for phase in plan.phases if phase.name == "step")
    certain = step.parts["weights"] + step.parts["optimizer"] + plan.context_bytes
    assert plan.least_bytes < OVERSHOOT["cuda"] * (certain - plan.context_bytes), "else the case shows nothing"
    assert left_to_the_compiler(plan, gpu(certain), asked) and not left_to_the_compiler(plan, gpu(certain - 1), asked)


def test_the_overshoot_that_is_allowed_for_is_the_largest_that_was_measured():
    compared = json.loads((RESULTS / "plan_against_compiler.json").read_text())["settings"].values()
    on_tpus = max(1 + one["errors"]["peak"] for one in compared if one["errors"])
    logs = [(RESULTS / name).read_text() for name in ("jax_program_h200.txt", "jax_local_gpu_h200/training_log.txt")]
    on_gpus = max(_figure(r"Fits: ([\d.]+) GiB", log) / _figure(r"asks for ([\d.]+) GiB", log) for log in logs)
    assert on_tpus <= OVERSHOOT["tpu"] < 1.05 * on_tpus
    assert on_gpus <= OVERSHOOT["cuda"] < 1.05 * on_gpus


def _figure(pattern: str, log: str) -> float:
    found = re.search(pattern, log)
    assert found
    return float(found[1])


@pytest.mark.parametrize(("backend", "factor", "exit_code"), [("jax", 1.2, 0), ("jax", 2.2, 5), ("torch", 1.2, 5)])
def test_plan_refuses_what_train_refuses_and_no_more(backend, factor, exit_code):
    asked = ["plan", "--model", "gemma-3-270m", "--backend", backend, "--set", "training.dtype=bfloat16"]
    told = json.loads(CliRunner().invoke(cli, [*asked, "--on", "h200", "--json"]).stdout)
    limit = (told["memory"]["least_bytes"] / factor + told["memory"]["context_bytes"]) / GIB
    asked += ["--on", "h200", "--set", f"training.memory_limit_gib={limit:.3f}"]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == exit_code, done.output
    assert done.stdout.startswith("may not fit: " if exit_code == 0 else "does not fit: ")
    assert ("the compiler decides before a weight is loaded" in done.stdout) is (exit_code == 0)
    told = json.loads(CliRunner().invoke(cli, [*asked, "--json"]).stdout)
    assert not told["fit"]["fits"] and told["compiler_decides"] is (exit_code == 0)


def test_advice_is_for_the_rows_that_the_run_began_with_on_other_devices():
    """Eight devices took 8 rows each; all 64 are now on one."""
    asked = config(per_device_train_batch_size=8)
    known = {"device": "cuda", "row_tokens": 512, "capability": (9, 0)}
    plan = predict_run(SHAPE, asked, rows=64, **known)
    _, fix = explain_out_of_memory(plan, int(0.7 * plan.least_bytes), gpu(80 * GIB), SHAPE, asked)
    line = fix.splitlines()[0]
    assert "training.per_device_train_batch_size=4" in line and "accumulation_steps=2" in line and ": fits" in line
    halved = predict_run(SHAPE, config(per_device_train_batch_size=4, gradient_accumulation_steps=2), rows=32, **known)
    assert f"({halved.least_bytes / GIB:.2f} GiB, about " in line
