"""How many questions are answered at once: what the memory at hand allows, and in a run no more than training needs."""

import pytest

from tests.program import ROOT
from tunix_rt.config.load import build_config
from tunix_rt.engines.torch import model as torch_model
from tunix_rt.plan.generation import MOST_ROWS, rows_that_fit
from tunix_rt.plan.memory import EVAL_ROWS, predict
from tunix_rt.plan.shape import shape_of
from tunix_rt.storage import read_json

GIB = 2**30
GEMMA = shape_of(read_json(ROOT / "presets" / "gemma-3-270m" / "config.json"))


@pytest.mark.parametrize("device", MOST_ROWS)
def test_more_memory_and_shorter_prompts_allow_more_and_one_is_always_asked(device):
    how = {"dtype": "bfloat16", "device": device, "max_new_tokens": 256}
    by_memory = [
        rows_that_fit(GEMMA, length=512, free_bytes=free, **how) for free in (0, GIB, 4 * GIB, 16 * GIB, 10**15)
    ]
    assert by_memory == sorted(by_memory) and by_memory[0] == 1 and by_memory[-1] == MOST_ROWS[device]
    assert by_memory[0] < by_memory[2]
    by_length = [rows_that_fit(GEMMA, length=length, free_bytes=GIB, **how) for length in (16, 128, 1024, 8192)]
    assert by_length == sorted(by_length, reverse=True) and by_length[0] > by_length[-1]


def test_memory_at_hand_is_that_of_the_container(monkeypatch):
    class Host:
        ram_available_bytes = 12345

    class Engine:
        device = torch_model.torch.device("cpu")

    monkeypatch.setattr(torch_model, "host_facts", Host)
    assert torch_model.free_bytes(Engine()) == 12345


@pytest.mark.parametrize("save_steps", [None, 10])
@pytest.mark.parametrize("new_tokens", [16, 1024])
@pytest.mark.parametrize("enabled", [True, "along"])
def test_an_evaluation_is_never_the_reason_why_a_run_does_not_fit(enabled, new_tokens, save_steps):
    settings = {
        "data": {"max_length": 256},
        "training": {"per_device_train_batch_size": 1, "save_steps": save_steps},
        "evaluation": {"max_new_tokens": new_tokens, "enabled": enabled},
    }
    for device in ("cpu", "cuda"):
        chosen = predict(GEMMA, build_config(settings, "test"), device=device)
        assert chosen.eval_rows in EVAL_ROWS
        single = settings | {"evaluation": settings["evaluation"] | {"per_device_eval_batch_size": 1}}
        one = predict(GEMMA, build_config(single, "test"), device=device)
        assert (one.eval_rows, chosen.least_bytes) == (1, one.least_bytes)
        asked = settings | {"evaluation": settings["evaluation"] | {"per_device_eval_batch_size": 17}}
        assert predict(GEMMA, build_config(asked, "test"), device=device).eval_rows == 17


def test_a_gpu_generates_in_the_largest_batch_that_needs_no_more_than_training():
    """Where the plan chooses: not where a batch size is set, not on a CPU, not without an evaluation."""
    training = {"per_device_train_batch_size": 8}

    def chosen(device="cuda", **evaluation):
        settings = {"training": training, "evaluation": {"enabled": True, "max_new_tokens": 128} | evaluation}
        return predict(GEMMA, build_config(settings, "test"), device=device)

    plan, single = chosen(), chosen(per_device_eval_batch_size=1)
    assert (plan.eval_rows, plan.generation_rows) == (64, 256)
    assert plan.least_bytes == single.least_bytes
    assert single.generation_rows == 1
    assert chosen("cpu").generation_rows <= 64
    assert chosen(enabled=False).generation_rows <= 64
    longer = chosen(max_new_tokens=4096)
    assert longer.generation_rows < 256
    assert longer.least_bytes == single.least_bytes
