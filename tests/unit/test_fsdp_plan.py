"""The memory of a rank: as an H200 gave it out, as fake tensors count it, and what follows from the number of ranks."""

import subprocess
import sys

import pytest

from benchmarks.memory_of_ranks import case_of, drawn, plan_of, predicted_bytes
from docs.solver_pages import HOPPER, read, shape_named
from tests.conftest import ROOT
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan import fsdp
from tunix_rt.plan.memory import predict
from tunix_rt.plan.phases import Phase

GIB = 2**30
RECORDED = read(ROOT, "memory_ranks_h200.json")["cases"]
BAND = 0.005
"""No recorded peak is further off."""


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
