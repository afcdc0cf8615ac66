"""`tunix-rt train --backend jax` through the real program: the same run as on the PyTorch engine, killed and continued, and
spread over more or fewer devices. Every process is one of its own: eight devices are told to jax before it starts."""

import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import time
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.bundles import collect, make_repository
from tests.conftest import ROOT, SHIPPED, write_small_model
from tests.e2e.test_pipeline import METRICS_KEYS
from tests.integrity import list_problems
from tests.program import command, environment, in_process, refused, tunix_rt
from tests.tables import tables
from tunix_rt.config.load import load_config
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step
from tunix_rt.data.prepare import prepare
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.models.resolve import resolve_model
from tunix_rt.train.context import find_tokenizer

jax_weights = pytest.importorskip("tunix_rt.engines.jax.weights", exc_type=ImportError)
jax_models = pytest.importorskip("benchmarks.jax_models", exc_type=ImportError)
pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")

ROUGH = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiling takes longer than everything else here."""
STEPS, SAVED = 4, 2
ROWS = 8


def flags(devices=1):
    """Of a process whose CPU is so many devices."""
    return {"XLA_FLAGS": f"{ROUGH} --xla_force_host_platform_device_count={devices}"}


def asked(*, backend="jax", rows=ROWS, steps=STEPS, **changed):
    """The arguments of a run that takes seconds."""
    given = [part for name, value in (settings(rows) | changed).items() for part in ("--set", f"{name}={value}")]
    named = ["--model", "tiny-gemma3", "--data", "dev-reasoning-v2", "--device", "cpu", "--backend", backend]
    return ["train", *named, "--max-steps", steps, *given]


def settings(rows):
    return {
        "data.max_length": 64, "data.on_overflow": "drop", "training.per_device_train_batch_size": rows,
        "training.save_steps": SAVED, "training.learning_rate": 5e-4, "evaluation.enabled": "false",
        "evaluation.per_device_eval_batch_size": 8,
    }  # fmt: skip


def settled(backend):
    """The configuration of that run."""
    named = {
        "model.model_name_or_path": "tiny-gemma3", "data.dataset": "dev-reasoning-v2", "training.backend": backend,
        "training.device": "cpu", "training.max_steps": STEPS,
    }  # fmt: skip
    return load_config(None, overrides=[f"{name}={value}" for name, value in settings(ROWS).items()], flags=named)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def header(path):
    with path.open("rb") as file:
        return file.read(struct.unpack("<Q", file.read(8))[0])


def run_killed(run, arguments, *, step, devices):
    """Start a run and end it with SIGKILL as soon as the checkpoint of `step` is there."""
    process = subprocess.Popen(
        command(*arguments, "--output", run),
        cwd=ROOT,
        env=environment(**flags(devices)),
        stderr=subprocess.PIPE,
        text=True,
    )
    saved, ends = run / "checkpoints" / f"step-{step:06d}" / "MANIFEST.json", time.monotonic() + 200
    while process.poll() is None and not saved.exists() and time.monotonic() < ends:
        time.sleep(0.002)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL and saved.exists(), said
    assert len(metrics(run)) < STEPS, "the run was over before it was killed"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short run. Its final model was answered with, and reloaded in a fresh process."""
    run = tmp_path_factory.mktemp("jax") / "run"
    done = tunix_rt(*asked(), "--output", run, **flags())
    assert done.returncode == 0, done.stderr
    return run


@dataclass(frozen=True)
class OnTorch:
    steps: list[dict[str, Any]]
    heldout: float
    """Before the first step."""
    checkpoint: Path


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory):
    """The same steps by the PyTorch engine, in this process."""
    config = settled("torch")
    tokenizer, facts = find_tokenizer(config)
    data = prepare(config, tokenizer, facts, lambda *_: None)
    engine = torch_backend.load(resolve_model("tiny-gemma3"), device="cpu", training=config.training)
    optimizer = torch_backend.make_optimizer(engine, config.training)
    heldout, _ = torch_backend.heldout_loss(engine, data.heldout_rows, batch_size=8, pad_id=tokenizer.pad_id)
    batch_of = partial(batch_of_step, data.rows, micro_batch_size=ROWS, accumulation=1, seed=0, pad_id=tokenizer.pad_id)
    taken = torch_backend.optimizer_steps(engine, optimizer, batch_of, config.training, first=1, total=STEPS)
    steps = [asdict(step) for step in taken]
    folder = tmp_path_factory.mktemp("torch")
    torch_backend.write_direct(engine, optimizer, folder)
    return OnTorch(steps=steps, heldout=heldout, checkpoint=folder)


def test_the_log_names_devices_model_and_what_the_compiler_asks_for(finished):
    lines = (finished / "training_log.txt").read_text()
    for said in (
        "Device kind: ", "; count 1; memory ", "Using device: cpu", "Preflight: model=tiny-gemma3 revision=shipped",
        "parameters=2,873,760 device=cpu dtype=float32", "Compiled in ", "the compiler asks for ",
    ):  # fmt: skip
        assert said in lines
    memory = json.loads((finished / "memory.json").read_text())
    predicted = f"{memory['predicted_bytes'] / 2**30:.3f} GiB"
    assert f"the compiler asks for {predicted} a device" in lines and f"Memory: predicted {predicted}, " in lines
    assert memory["predicted_parts"]["peak_phase"] == "compiled step" and abs(memory["error"]) < 0.3


def test_a_run_completes_and_what_determines_it_is_written_down(finished):
    result = json.loads((finished / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["steps_completed"]) == ("completed", 0, STEPS)
    assert result["final_model"]["proven"] and result["final_model"]["tensors"] == 68
    committed = json.loads((finished / "precommit.json").read_text())
    assert committed["batch"] == {"rows": ROWS, "devices": 1}
    assert committed["versions"] == {name: version(name) for name in ("tunix-rt", "jax", "jaxlib")}
    state = json.loads((finished / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    assert state["batch"] == {"rows": ROWS, "devices": 1} and state["code"]["layers"] == "xla"
    assert tunix_rt("evidence", "verify", finished).returncode == 0


@pytest.mark.slow
def test_a_run_is_collected_and_its_bundle_verifies(finished, tmp_path):
    repository, bundle = make_repository(tmp_path / "repository"), tmp_path / "v1"
    done = collect(finished, bundle, repository)
    assert done.returncode == 0, done.stderr
    verified = tunix_rt("evidence", "verify", bundle, "--repository", repository)
    assert verified.returncode == 0, verified.stdout
    versions = json.loads((bundle / "run_manifest.json").read_text())["versions"]
    assert {name: versions.get(name) for name in ("jax", "jaxlib", "torch")} == {
        "jax": version("jax"), "jaxlib": version("jaxlib"), "torch": None,
    }  # fmt: skip


def test_the_machine_the_rows_and_the_checkpoints_are_written_down(finished):
    [process] = json.loads((finished / "processes.json").read_text())["processes"]
    machine = process["machine"]
    assert (machine["backend"], machine["device"], machine["devices"]) == ("jax", "cpu", 1)
    assert machine["versions"] == {name: version(name) for name in ("jax", "jaxlib")}
    rows = (finished / "rows.jsonl").read_text().splitlines()
    assert len(rows) == json.loads((finished / "precommit.json").read_text())["dataset"]["rows"]
    listed = json.loads((finished / "checkpoints.json").read_text())["checkpoints"]
    assert listed[-1]["step"] == STEPS and list_problems(finished) == []


def test_both_engines_take_the_same_rows_and_come_to_the_same_losses(finished, on_torch):
    ours = metrics(finished)
    assert all(set(one) - {"states"} == METRICS_KEYS for one in ours) and len(ours) == len(on_torch.steps) == STEPS
    assert {one["step"]: list(one["states"]) for one in ours if "states" in one} == {STEPS: [str(SAVED)]}
    for name in ("step", "lr", "tokens", "target_tokens", "batch"):
        assert [one[name] for one in ours] == [one[name] for one in on_torch.steps], name
    assert ours[0]["loss"] == pytest.approx(on_torch.steps[0]["loss"], rel=1e-5)
    for one, other in zip(ours, on_torch.steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3) and one["peak_bytes"] > 0
    held = json.loads((finished / "eval" / "heldout.jsonl").read_text().splitlines()[0])
    assert held["step"] == 0 and held["loss"] == pytest.approx(on_torch.heldout, rel=1e-5)


def test_the_final_model_is_the_last_checkpoint_in_plain_transformers(finished):
    model = transformers.AutoModelForCausalLM.from_pretrained(finished / "final_model")
    saved = load_file(finished / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    assert model.generation_config.eos_token_id == 1


def test_a_checkpoint_of_either_engine_is_one_of_the_other(finished, on_torch):
    ours = finished / "checkpoints" / f"step-{STEPS:06d}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert header(ours / name) == header(on_torch.checkpoint / name)
    engine = torch_backend.load(resolve_model("tiny-gemma3"), device="cpu", training=Training())
    optimizer = torch_backend.make_optimizer(engine, Training())
    torch_backend.restore_state(engine, optimizer, ours, step=STEPS)
    stored = load_file(ours / "optimizer.safetensors")
    assert all(tensor.equal(stored[name]) for name, tensor in optimizer.tensors().items())


def test_a_checkpoint_of_pytorch_is_read_as_weights(on_torch, tmp_path):
    for path in (on_torch.checkpoint / "model.safetensors", SHIPPED / "config.json"):
        shutil.copy(path, tmp_path)
    source = resolve_model(str(tmp_path))
    architecture = architecture_of(source.config)
    found = dict(jax_models.named_tensors(jax_weights.load_weights(source, architecture), architecture))
    stored = load_file(tmp_path / "model.safetensors")
    assert found.keys() == stored.keys() and all(np.array_equal(found[name], stored[name]) for name in stored)


@pytest.fixture(params=["cut", pytest.param("killed", marks=pytest.mark.slow)])
def unfinished(request, finished, tmp_path):
    """A run whose newest checkpoint is of step 2: of the finished one what a kill after that step leaves, or one killed there."""
    run = tmp_path / "run"
    if request.param == "killed":
        run_killed(run, asked(), step=SAVED, devices=1)
        return run
    shutil.copytree(finished, run)
    for made_later in (run / "final_model", run / "checkpoints" / f"step-{STEPS:06d}"):
        shutil.rmtree(made_later)
    for ending in ("result.json", "SHA256SUMS"):
        (run / ending).unlink()
    return run


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(finished, unfinished):
    run = unfinished
    done = tunix_rt(*asked(), "--output", run, "--resume", **flags())
    assert done.returncode == 0 and f"Resumed from step-{SAVED:06d}" in done.stderr, done.stderr
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, whole = (folder / "checkpoints" / f"step-{STEPS:06d}" / name for folder in (run, finished))
        assert ours.read_bytes() == whole.read_bytes(), name


@pytest.mark.parametrize(
    ("first", "then"), [pytest.param(8, 1, marks=pytest.mark.slow), pytest.param(1, 8, marks=pytest.mark.slow)]
)
def test_a_run_goes_on_with_its_rows_on_another_number_of_devices(finished, tmp_path, first, then):
    run, rows = tmp_path / "run", ROWS // first
    run_killed(run, asked(rows=rows), step=SAVED, devices=first)
    done = tunix_rt(*asked(rows=rows), "--output", run, "--resume", **flags(then))
    assert done.returncode == 0, done.stderr
    assert f"as on the {first} device(s) the run began on; now on {then}" in done.stderr
    for one, other in zip(metrics(run), metrics(finished), strict=True):
        assert one["batch"] == other["batch"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    state = json.loads((run / "checkpoints" / f"step-{STEPS:06d}" / "state.json").read_text())
    assert state["batch"] == {"rows": ROWS, "devices": then}
    assert json.loads((run / "precommit.json").read_text())["batch"] == {"rows": ROWS, "devices": first}


def test_a_model_with_dropout_is_refused_before_its_data_is_read(tmp_path):
    folder = write_small_model("gpt2-dropout", tmp_path / "model")
    done = in_process(*asked(), "--model", folder, "--weights", "random", "--output", tmp_path / "run")
    assert "dropout of 0.1 (attn_pdrop, embd_pdrop, resid_pdrop)" in refused(done, 3)


# --- long series ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_before_and_after_and_along_the_way_are_given_on_this_engine(tmp_path):
    answering = {"evaluation.enabled": "along", "evaluation.max_new_tokens": 4, "training.eval_steps": 2}
    done = tunix_rt(*asked(**answering), "--output", tmp_path / "run", **flags(2))
    assert done.returncode == 0, done.stderr
    for when in ("before", "after"):
        assert json.loads((tmp_path / "run" / "eval" / f"{when}.json").read_text())["items"] == 15
    along = [json.loads(line) for line in (tmp_path / "run" / "eval" / "samples.jsonl").read_text().splitlines()]
    assert [one["step"] for one in along] == [0, 0, 0, 2, 2, 2, 4, 4, 4]


@pytest.mark.slow
def test_twenty_steps_of_both_engines_agree(tmp_path):
    settings = {"data.validation_fraction": 0, "training.gradient_accumulation_steps": 2}
    for backend in ("jax", "torch"):
        done = tunix_rt(
            *asked(backend=backend, steps=20, rows=4, **settings), "--output", tmp_path / backend, **flags()
        )
        assert done.returncode == 0, done.stderr
    pairs = list(zip(metrics(tmp_path / "jax"), metrics(tmp_path / "torch"), strict=True))
    assert pairs[0][0]["loss"] == pytest.approx(pairs[0][1]["loss"], rel=1e-5)
    assert all(one["loss"] == pytest.approx(other["loss"], rel=1e-4) for one, other in pairs)


OTHERS = tables(__file__)["others"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_settings_are_trained_killed_and_continued_bit_for_bit(tmp_path, kind):
    arguments = asked(rows=2, steps=STEPS, **OTHERS[kind])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = tunix_rt(*arguments, "--output", whole, **flags(4))
    assert done.returncode == 0, done.stderr
    run_killed(cut, arguments, step=SAVED, devices=4)
    done = tunix_rt(*arguments, "--output", cut, "--resume", **flags(4))
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (run / "checkpoints" / f"step-{STEPS:06d}" / name for run in (cut, whole))
        assert ours.read_bytes() == theirs.read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma3", "llama", "gpt2"])
def test_random_weights_are_trained_and_load_in_plain_transformers(tmp_path, kind):
    folder = write_small_model(kind, tmp_path / "model")
    done = tunix_rt(*asked(), "--model", folder, "--weights", "random", "--output", tmp_path / "run", **flags(2))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["final_model"]["proven"]
