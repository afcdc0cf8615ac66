"""A causal language model that no row knows trains with what it is shown to support, and as a plain loop trains it."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.any_model import TOLERANCE, make, plain_losses, settings
from tests.conftest import ROOT
from tests.program import in_process, refused
from tunix_rt.cli.main import cli
from tunix_rt.config.settings import RunConfig
from tunix_rt.models.resolve import resolve_model

pytest.importorskip("torch")
from tunix_rt.engines.torch.loop import load


@pytest.fixture(autouse=True)
def no_reload(monkeypatch):
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)


@pytest.mark.parametrize(
    ("name", "packing", "head"),
    [
        pytest.param(  # it scales its logits
            "cohere", "packed rows equal single examples", "the model's own logits", marks=pytest.mark.slow
        ),
        ("olmoe", "packed rows equal single examples", "the chunked loss equals the model's own"),
        pytest.param(  # attention sinks, experts with biases
            "gpt_oss",
            "one example per row",
            "the chunked loss equals the model's own",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # linear attention, whose state crosses the boundaries of packed examples
            "qwen3_5_text", "one example per row", "the chunked loss equals the model's own", marks=pytest.mark.slow
        ),
        pytest.param(  # it soft-caps its logits, by less than a tolerance of losses would see
            "xlstm", "one example per row", "the model's own logits", marks=pytest.mark.slow
        ),
    ],
)
def test_an_unknown_family_has_the_losses_of_a_plain_loop(tmp_path, name, packing, head):
    make(name, tmp_path / "model", ROOT)
    check_trained(tmp_path / "model", tmp_path / "run", packing, head, experts=name in ("olmoe", "gpt_oss"))


def check_trained(model, run, packing, head, *, experts=False):
    done = in_process(*settings(model, run))
    assert done.returncode == 0, done.stderr
    log = (run / "training_log.txt").read_text()
    assert f"Packing: {packing}" in log and f"Loss head: {head}" in log and "a step was traced by PyTorch" in log
    assert ("parameters are active for a token" in log) == experts
    ours = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ours == pytest.approx(plain_losses(model, run), rel=TOLERANCE)
    assert in_process("evidence", "verify", run).returncode == 0


def test_a_model_that_cannot_be_packed_has_the_losses_of_a_plain_loop(tmp_path):
    make("mamba", tmp_path / "model", ROOT)
    packing, head = "one example per row, grouped by length", "the chunked loss equals the model's own"
    check_trained(tmp_path / "model", tmp_path / "run", packing, head)


@pytest.mark.slow
def test_a_model_that_cannot_be_packed_resumes_exactly_by_the_same_command(tmp_path):
    make("mamba", tmp_path / "model", ROOT)
    whole = in_process(*settings(tmp_path / "model", tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    stopped = settings(tmp_path / "model", tmp_path / "stopped")
    assert in_process(*stopped, "--stop-after", "2").returncode == 7
    done = in_process(*stopped, "--resume")
    assert done.returncode == 0, done.stderr
    one, other = ((tmp_path / name / "final_model" / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert one == other


def test_what_a_model_cannot_do_is_refused_with_its_cause(tmp_path):
    make("olmoe", tmp_path / "model", ROOT)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    words = refused(in_process(*settings(tmp_path / "model", tmp_path / "run")), 3)
    assert "auxiliary loss of the router" in words and "output_router_logits: false" in words
    words = refused(in_process(*settings(tmp_path / "model", tmp_path / "jax"), "--backend", "jax"), 3)
    assert "olmoe" in words


def test_adapters_of_an_unknown_family_are_tried_with_recomputed_layers(tmp_path):
    make("stablelm", tmp_path / "model", ROOT)
    chosen = {"lora_rank": 4, "gradient_checkpointing": True}
    training = RunConfig.model_validate({"training": chosen}).training
    assert load(resolve_model(str(tmp_path / "model")), device="cpu", training=training).support.checkpointing


@pytest.mark.slow
def test_recomputed_layers_are_tried_before_they_are_used(tmp_path):
    make("stablelm", tmp_path / "model", ROOT)
    curves = []
    for more in ((), ("--set", "training.gradient_checkpointing=true")):
        done = in_process(*settings(tmp_path / "model", tmp_path / f"run{len(more)}"), *more)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / f"run{len(more)}" / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    log = (tmp_path / "run2" / "training_log.txt").read_text()
    assert "Activation checkpointing: gradients equal those without it" in log
    assert "Activation checkpointing: 2 of 2 layers" in log


def test_every_model_generates_chats_and_evaluates_and_a_plan_needs_no_weights(tmp_path):
    make("mamba", tmp_path / "model", ROOT)
    asked = ("--evalset", "eval_v2", "--limit", "2", "--max-new-tokens", "4", "--device", "cpu", "--json")
    done = in_process("evaluate", tmp_path / "model", *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["questions"] == 2
    talk = ["chat", str(tmp_path / "model"), "--device", "cpu", "--max-new-tokens", "4"]
    chatted = CliRunner().invoke(cli, talk, input="What is 2 + 3?\n")
    assert chatted.exit_code == 0 and chatted.stdout.strip(), chatted.output
    done = in_process("generate", tmp_path / "model", "What is 2 + 3?", "--max-new-tokens", "4", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    (tmp_path / "model" / "model.safetensors").unlink()
    plan = json.loads(
        in_process("plan", "--model", tmp_path / "model", "--json", "--set", "data.max_length=128").stdout
    )
    assert plan["fit"]["fits"]


def test_the_families_are_listed_with_their_presets():
    listed = json.loads(in_process("models", "--json").stdout)
    sizes = {preset["name"]: preset["parameters"] for family in listed["exact"] for preset in family["presets"]}
    assert sizes["gemma-3-4b"] == 3_880_263_168 and "causal language model" in listed["traced"]
    shown = in_process("models")
    assert "gemma3_text" in shown.stdout and "mistral-7b (7.2B)" in shown.stdout
    assert "hub" not in shown.stderr, "presets that are also hub ids are read from here"
