"""The JAX engine answers as the PyTorch engine does: every family, greedy or drawn, together or one by one, cut over devices.

JAX runs in a process of its own (jax_generation_side.py), which is asked everything at once.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.invariant.jax_generation_side import CLOSING, DEVICES, tagged
from tests.invariant.test_generation import drawn_prompts
from tests.invariant.test_jax_models import FAMILIES, ROUGH, write_model
from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.models.resolve import resolve_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax"),
    pytest.mark.slow,  # by default, tests/e2e/test_jax_train.py has answers before and after training
]

each_family = pytest.mark.parametrize("family", FAMILIES)
DRAWN_FROM = ("gemma3", "gpt2")
DRAWN = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
HOT = {"temperature": 1.5, "seed": 6}
FEW = drawn_prompts(1024, count=14)
MANY = drawn_prompts(1024, count=50)
LONG = drawn_prompts(1024, count=4, lengths=(250, 255, 256, 300))
STOPS = list(range(1, 200))


def question(folder, family, prompts, rows, *, stop_ids=(1,), new_tokens=12, decoding=None, **more):
    how = {"max_new_tokens": new_tokens, **(decoding or {})}
    return {
        "model": str(folder / family), "prompts": prompts, "rows": rows, "stop_ids": list(stop_ids), "decoding": how, **more
    }  # fmt: skip


def questions(folder):
    """By name. The same shapes are asked for where it is all the same: compiling takes longer than everything else."""
    asked = {}
    for family in FAMILIES:
        asked[f"{family} greedy"] = question(folder, family, FEW, 16)
    for family in DRAWN_FROM:
        asked[f"{family} drawn"] = question(folder, family, FEW, 16, decoding=DRAWN)
    asked["together"] = question(folder, "gemma3", MANY, 64)
    asked["alone"] = question(folder, "gemma3", MANY, 1)
    asked["drawn alone"] = question(folder, "gemma3", FEW, 1, decoding=DRAWN)
    asked["hot"] = question(folder, "gemma3", FEW, 16, decoding=HOT)
    rollouts = {"temperature": 1.0, "seed": 6, "step": 3, "samples": 4}
    asked["scored"] = question(folder, "gemma3", FEW[:4], 16, stop_ids=STOPS, decoding=rollouts, logprobs=True)
    asked["stopped"] = question(folder, "gemma3", MANY, 64, stop_ids=STOPS)
    asked["heard"] = question(folder, "gemma3", FEW[:1], 1, stop_ids=STOPS, heard=True)
    asked["ended"] = asked["heard"] | {"ends": 3}
    asked["closed"] = question(folder, "gemma3", FEW, 16, decoding={"closing": CLOSING})
    for family in ("gemma3", "gpt2"):
        asked[f"{family} full"] = question(folder, family, LONG, 4)
    asked["cut"] = question(folder, "gemma3", FEW, 16, cut=True)
    asked["mixed"] = question(folder, "gemma2", FEW, 16, mixed=True, short_of=True)
    asked["scarce"] = question(folder, "gemma3", FEW, 16, memory_for=7)
    asked["damaged"] = question(folder, "damaged", FEW, 16)
    return asked


def ask_jax(folder, asked):
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.invariant.jax_generation_side", str(folder / "asked.json")]
    flags = f"{ROUGH} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return Side(folder, asked, done.stderr, json.loads((folder / "found.json").read_text()))


class Side:
    """What was asked of the JAX side, and what it said."""

    def __init__(self, folder, asked, said, found):
        self.folder, self.asked, self.said, self.found = folder, asked, said, found

    def answers(self, name):
        return [Answer(**answer) for answer in self.found[name]["answers"]]

    def answers_of_torch(self, name):
        one = self.asked[name]
        engine = torch_backend.load_for_inference(resolve_model(one["model"]), device="cpu", dtype="float32")
        found = dict(
            torch_backend.generate(
                engine, one["prompts"], decoding=Decoding(**one["decoding"]), stop_ids=one["stop_ids"], pad_id=0,
                decode=tagged, batch_size_at=lambda length: one["rows"],
                logprobs=one.get("logprobs", False),
            )
        )  # fmt: skip
        return [found[index] for index in range(len(found))]


def write_models(folder, families):
    for family in families:
        write_model(folder / family, family, "float32")
        config = json.loads((folder / family / "config.json").read_text())
        if family == "gemma":  # whose layers see everything, and a window is heeded by transformers' cache alone
            del config["sliding_window"]
        (folder / family / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax")
    write_models(folder, FAMILIES)
    write_model(folder / "damaged", "gemma3", "float32")
    weights = load_file(folder / "damaged" / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = torch.nan
    save_file(weights, folder / "damaged" / "model.safetensors", metadata={"format": "pt"})
    return ask_jax(folder, questions(folder))


def telling(answers):
    """A model that says one thing would show nothing."""
    return len({tuple(answer.ids) for answer in answers}) > len(answers) / 2


# --- as the PyTorch engine -------------------------------------------------------------------------------------------


@each_family
def test_greedy_answers_past_the_window_are_those_of_the_torch_engine(side, family):
    found = side.answers(f"{family} greedy")
    assert found == side.answers_of_torch(f"{family} greedy") and telling(found)


@pytest.mark.parametrize("family", DRAWN_FROM)
def test_drawn_answers_are_those_of_the_torch_engine(side, family):
    found = side.answers(f"{family} drawn")
    assert found == side.answers_of_torch(f"{family} drawn") and found != side.answers(f"{family} greedy")


def test_answers_drawn_from_all_tokens_are_those_of_the_torch_engine(side):
    found = side.answers("hot")
    assert found == side.answers_of_torch("hot") and found != side.answers("gemma3 drawn")


def test_samples_of_a_step_and_their_log_probabilities_are_those_of_the_torch_engine(side):
    found, expected = side.answers("scored"), side.answers_of_torch("scored")
    assert found == expected and len(found) == 16 and {answer.ended for answer in found} == {"stop", "length"}
    for one, other in zip(found, expected, strict=True):
        assert len(one.logprobs) == len(one.ids) + (one.end is not None)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.gaps == pytest.approx(other.gaps, abs=1e-4)


# --- as if alone -----------------------------------------------------------------------------------------------------


def test_50_prompts_of_mixed_lengths_are_answered_together_as_one_by_one(side):
    alone = side.answers("alone")
    assert alone == side.answers("together") and telling(alone)


def test_drawn_answers_are_a_function_of_seed_and_prompt_alone(side):
    assert side.answers("drawn alone") == side.answers("gemma3 drawn")


@pytest.mark.slow
def test_200_prompts_of_every_family_are_answered_together_as_one_by_one(tmp_path):
    write_models(tmp_path, FAMILIES)
    prompts = drawn_prompts(1024, count=200)
    side = ask_jax(
        tmp_path,
        {f"{family} {rows}": question(tmp_path, family, prompts, rows) for family in FAMILIES for rows in (1, 64)},
    )
    for family in FAMILIES:
        assert side.answers(f"{family} 1") == side.answers(f"{family} 64"), family


def test_weights_cut_over_eight_devices_answer_the_same(side):
    assert side.answers("cut") == side.answers("gemma3 greedy")


@pytest.mark.slow
@each_family
def test_weights_of_every_family_cut_over_eight_devices_answer_the_same_greedy_or_drawn(tmp_path, family):
    """50 prompts, of which most end early: rows leave, from one device to another."""
    write_models(tmp_path, [family])
    asked = {
        f"{cut} {name}": question(tmp_path, family, MANY, 64, stop_ids=STOPS, decoding=how, cut=cut)
        for cut in (True, False)
        for name, how in (("greedy", {}), ("drawn", DRAWN))
    }
    side = ask_jax(tmp_path, asked)
    for name in ("greedy", "drawn"):
        assert side.answers(f"True {name}") == side.answers(f"False {name}")


def test_products_of_bfloat16_choose_what_the_trained_model_finds_likeliest(side):
    """Up to their rounding: float32 weights, cast once for all tokens instead of in every product."""
    assert side.found["mixed"]["short_of"] < 0.02


# --- where an answer ends --------------------------------------------------------------------------------------------


def test_answers_end_at_a_stop_token_and_rows_that_ended_leave(side):
    found = side.answers("stopped")
    assert {answer.ended for answer in found} == {"stop", "length"}
    for answer, whole in zip(found, side.answers("together"), strict=True):
        ends = [place for place, token in enumerate(whole.ids) if token in STOPS]
        assert answer.ids == (whole.ids[: ends[0]] if ends else whole.ids)


def test_an_answer_that_is_heard_comes_token_by_token(side):
    [heard], [answer] = side.found["heard"]["heard"], side.answers("heard")
    assert answer == side.answers_of_torch("heard")[0]
    assert heard[-1] == answer.ids and all(
        len(one) <= len(other) <= len(one) + 1 for one, other in itertools.pairwise(heard)
    )


def test_a_caller_can_end_an_answer_that_it_hears(side):
    [whole], [ended] = side.answers("heard"), side.answers("ended")
    assert (ended.ids, ended.ended) == (whole.ids[:3], "caller") and len(whole.ids) > 3


def test_an_answer_is_over_at_the_closing_tag(side):
    found = side.answers("closed")
    assert found == side.answers_of_torch("closed") and "tag" in {answer.ended for answer in found}


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_a_full_context_ends_an_answer_and_no_position_is_beyond_it(side, family):
    found = side.answers(f"{family} full")
    assert [len(answer.ids) for answer in found] == [6, 1, 0, 0]
    assert {answer.ended for answer in found} == {"context"} and found == side.answers_of_torch(f"{family} full")


# --- programs and mishaps --------------------------------------------------------------------------------------------


def test_an_evaluation_compiles_a_handful_of_programs(side):
    """Of prompts of 1 to 47 tokens: to read, to answer; and once to answer with the few rows that are left."""
    assert side.found["together"]["programs"] <= 2
    assert side.found["stopped"]["programs"] <= 1


def test_where_memory_runs_out_half_as_many_are_asked_and_it_is_said(side):
    assert side.answers("scarce") == side.answers("gemma3 greedy")
    assert "out of memory with batch size 14, continuing with 7" in side.said


def test_a_model_of_nan_is_named_not_listened_to(side):
    assert "its logits are NaN" in side.found["damaged"]["error"]
