"""The memory of a rank: as an H200 gave it out, as fake tensors count it, and what follows from the number of ranks."""

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.memory_of_ranks import case_of, drawn, plan_of, predicted_bytes
from benchmarks.memory_of_ranks_on_gpu import predicted_bytes as predicted_bytes_on_gpu
from docs.solver_pages import HOPPER, read, shape_named
from tests.conftest import ROOT
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan import fsdp
from tunix_rt.plan.fit import least_room, verdict
from tunix_rt.plan.memory import predict
from tunix_rt.plan.phases import Phase
from tunix_rt.plan.target import Target

GIB = 2**30
RECORDED = read(ROOT, "memory_ranks_h200.json")["cases"]
BAND = 0.005
"""No recorded peak is further off."""
ENGINE = [case for case in read(ROOT, "memory_ranks_cuda.json")["cases"] if "failed" not in case]
ENGINE_BAND = 0.016


def plan(preset="gemma-2b", devices=8, tokens=1024, **training):
    training = {"dtype": "bfloat16", "master_dtype": "bfloat16", "gradient_checkpointing": True, **training}
    config = RunConfig.model_validate({
        "data": {"max_length": tokens, "validation_fraction": 0}, "evaluation": {"enabled": False},
        "training": {"per_device_train_batch_size": 1, "compile": False, **training},
    })  # fmt: skip
    return predict(shape_named(preset), config, device="cuda", capability=HOPPER, devices=devices)


def phase(found, name) -> Phase:
    return next(one for one in found.phases if one.name == name)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['preset']} {case['world']} {case['peak_gib']}")
def test_a_rank_needs_what_an_h200_gave_out(monkeypatch, case):
    monkeypatch.setattr(fsdp, "REDUCED_WIDTH", case["reduce_bytes"])
    settings = {name: case[name] for name in ("gradient_checkpointing", "compile")}
    found = plan(case["preset"], case["world"], case["tokens"], **settings)
    assert found.peak_bytes / GIB == pytest.approx(case["peak_gib"], rel=BAND)


@pytest.mark.parametrize("case", ENGINE, ids=lambda case: case["name"])
def test_a_rank_of_the_engine_needs_what_an_h200_gave_out(case):
    assert predicted_bytes_on_gpu(case) == pytest.approx(case["measured_bytes"], rel=ENGINE_BAND)


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "adafactor"])
def test_shards_add_up_to_what_one_device_has(optim):
    alone, rank = (phase(plan(devices=count, optim=optim), "update").parts for count in (1, 8))
    assert 8 * rank["weights"] == pytest.approx(alone["weights"], rel=1e-3)
    whole = 8 if optim == "adafactor" else 1  # every rank has the column sums of every matrix
    assert alone["optimizer"] <= 8 * rank["optimizer"] <= whole * 1.01 * alone["optimizer"]


def test_padding_is_counted():
    """A matrix of 256 rows on 1,024 ranks: each allocates a row, and all are gathered."""
    few, many = (phase(plan("gemma-2b", count), "forward").parts["gathered"] for count in (64, 1024))
    assert many > few


def test_the_ranks_of_a_cpu_share_its_memory():
    config = RunConfig.model_validate({"evaluation": {"enabled": False}, "data": {"max_length": 128}})
    alone, two = (predict(shape_named("gemma-3-270m"), config, device="cpu", devices=count) for count in (1, 2))
    assert two.peak_bytes < alone.peak_bytes and (alone.sharing, two.sharing) == (1, 2)
    free = least_room(two)
    cpu = Target(
        name="", device="cpu", memory_bytes=free, free_bytes=free, capability=None,
    )  # fmt: skip
    assert verdict(two, cpu).fits and not verdict(two, replace(cpu, free_bytes=free - 64)).fits


def test_a_run_keeps_its_rows_on_another_number_of_ranks():
    on_two = predict(shape_named("gemma-3-270m"), RunConfig(), device="cuda", devices=2, rows=8)
    config = RunConfig.model_validate({"training": {"per_device_train_batch_size": 4}})
    assert on_two == predict(shape_named("gemma-3-270m"), config, device="cuda", devices=2)


def counted(cases) -> list[int]:
    """In a process of its own: FakeTensorMode and a process group are states of the whole process."""
    program = f"from benchmarks.memory_of_ranks import count_each; print(*count_each({cases!r}))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(map(int, done.stdout.split()))


def test_a_rank_needs_what_fake_tensors_count():
    case = case_of("smollm2-135m", world=8, layers=3, tokens=512, gradient_checkpointing=True)
    (tracked,) = counted([case])
    assert predicted_bytes(plan_of(case)) == pytest.approx(tracked, rel=0.02)
    assert predicted_bytes(plan_of({**case, "world": 4})) != pytest.approx(tracked, rel=0.02), "ranks count"


@pytest.mark.slow
def test_24_drawn_ranks_need_what_fake_tensors_count():
    cases = [case for case, _ in zip(drawn(27), range(24), strict=False)]
    errors = {
        case["name"]: predicted_bytes(plan_of(case)) / tracked - 1
        for case, tracked in zip(cases, counted(cases), strict=True)
    }
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}
