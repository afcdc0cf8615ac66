"""One configuration through every stage, by the real program."""

import hashlib
import json
import shutil
import stat
from importlib.metadata import version

import pytest

from tests.conftest import write_small_model
from tests.program import ROOT, in_process, refused, tunix_rt
from tunix_rt.data.packing import rows_of_step
from tunix_rt.storage import merkle_root

METRICS_KEYS = {
    "step", "loss", "loss_hex", "lr", "grad_norm", "target_tokens", "tokens", "seconds", "peak_bytes", "batch", "prev",
}  # fmt: skip
SMALL = ["--set", "training.max_steps=6", "--set", "training.save_steps=2", "--set", "evaluation.enabled=false"]


@pytest.fixture(scope="module")
def finished(tiny_run):
    """What the program printed, and the folder of the run that all tests share: `smoke_tiny`, saved at 2, 3, 4 and 6."""
    return (tiny_run.parent / "said.txt").read_text(encoding="utf-8"), tiny_run


def test_a_run_completes_and_says_where_it_is(finished):
    printed, folder = finished
    assert " " in str(folder) and not str(folder).isascii(), "a space and a letter beyond ASCII, as people have"
    assert str(folder) in printed
    assert "accuracy, strict" in printed


def test_the_folder_holds_every_file_of_a_run(finished):
    names = {str(path.relative_to(finished[1])) for path in finished[1].rglob("*") if path.is_file()}
    wanted = {
        "config.yaml", "doctor.json", "plan.json", "precommit.json", "training_log.txt", "metrics.jsonl", "env_info.txt",
        "torch_version.txt", "samples.md", "memory.json", "result.json", "SHA256SUMS", "eval/before.json",
        "eval/after.json", "eval/predictions-before.jsonl", "eval/predictions-after.jsonl", "eval/heldout.jsonl",
        "final_model/model.safetensors", "final_model/config.json", "final_model/tokenizer.json",
        "checkpoints/step-000006/model.safetensors", "checkpoints/step-000006/optimizer.safetensors",
        "checkpoints/step-000006/state.json", "checkpoints/step-000006/MANIFEST.json", "rows.jsonl", "checkpoints.json",
        "processes.json",
    }  # fmt: skip
    assert wanted <= names
    assert not [name for name in names if "staged" in name]


def test_metrics_have_the_fixed_keys_and_chain_from_the_precommitment(finished):
    lines = (finished[1] / "metrics.jsonl").read_bytes().splitlines()
    head = hashlib.sha256((finished[1] / "precommit.json").read_bytes()).hexdigest()
    assert len(lines) == 6
    recorded = {}
    for number, line in enumerate(lines, start=1):
        record = json.loads(line)
        assert set(record) - {"states"} == METRICS_KEYS
        recorded |= record.get("states", {})
        assert all(int(step) < number for step in recorded)
        assert record["step"] == number and record["prev"] == head
        assert float.fromhex(record["loss_hex"]) == record["loss"]
        assert record["target_tokens"] < record["tokens"] and record["seconds"] > 0 and record["peak_bytes"] > 0
        head = hashlib.sha256(line).hexdigest()
    result = json.loads((finished[1] / "result.json").read_text())
    assert result["metrics_head"] == head and result["status"] == "completed" and result["exit_code"] == 0
    listed = json.loads((finished[1] / "checkpoints.json").read_text())["checkpoints"]
    states = {
        str(one["step"]): hashlib.sha256(
            "".join(
                f"{one['files'][name]['sha256']}  {name}\n" for name in ("model.safetensors", "optimizer.safetensors")
            ).encode()
        ).hexdigest()
        for one in listed
    }
    assert list(states) == ["2", "3", "4", "6"] and {**recorded, "6": result["final_state"]} == states


def test_the_precommitment_names_what_determines_the_run(finished):
    committed = json.loads((finished[1] / "precommit.json").read_text())
    assert set(committed) == {
        "schema", "format", "numerics", "created", "device", "versions", "config_sha256", "source_sha256", "source_files",
        "dataset", "base_model", "tokenizer_sha256", "seeds", "evalset",
    }  # fmt: skip
    assert committed["device"] == "cpu"
    assert committed["versions"] == {name: version(name) for name in ("tunix-rt", "torch", "transformers")}
    sums = {"config_sha256": "config.yaml"}
    for key, name in sums.items():
        assert committed[key] == hashlib.sha256((finished[1] / name).read_bytes()).hexdigest()
    shipped = ROOT / "models" / "tiny-gemma3" / "model.safetensors"
    assert committed["base_model"]["files"]["model.safetensors"] == hashlib.sha256(shipped.read_bytes()).hexdigest()
    data = ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl"
    assert committed["dataset"]["sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()


def test_the_batch_of_every_step_follows_from_the_seed_and_the_rows(finished):
    folder = finished[1]
    committed = json.loads((folder / "precommit.json").read_text())
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    hashes = [bytes.fromhex(row["sha256"]) for row in rows]
    assert (len(rows), merkle_root(hashes)) == (committed["dataset"]["rows"], committed["dataset"]["merkle_root"])
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        taken = rows_of_step(step["step"], row_count=len(rows), rows_per_step=4, seed=committed["seeds"]["data_seed"])
        assert step["batch"] == hashlib.sha256(b"".join(hashes[row] for row in taken)).hexdigest()
        assert step["tokens"] == sum(rows[row]["tokens"] for row in taken)
        assert step["target_tokens"] == sum(rows[row]["targets"] for row in taken)


def test_the_machine_and_the_checkpoints_are_written_down(finished):
    folder = finished[1]
    [process] = json.loads((folder / "processes.json").read_text())["processes"]
    assert process["first_step"] == 1 and process["machine"]["backend"] == "torch"
    assert set(process["machine"]) == {
        "backend", "device", "devices", "cpu", "cpu_flags_sha256", "cpu_capability", "threads", "python", "versions",
        "deterministic",
    }  # fmt: skip
    listed = json.loads((folder / "checkpoints.json").read_text())["checkpoints"]
    assert [entry["step"] for entry in listed] == [2, 3, 4, 6]
    assert {"  rows.jsonl", "  checkpoints.json", "  processes.json"} <= {
        line[64:] for line in (folder / "SHA256SUMS").read_text().splitlines()
    }


def test_the_memory_prediction_is_held_against_the_measurement(finished):
    memory = json.loads((finished[1] / "memory.json").read_text())
    assert memory["predicted_bytes"] == pytest.approx(memory["measured_bytes"], rel=0.25)
    measured = {name: phase["measured_bytes"] for name, phase in memory["phases"].items()}
    assert 0 < measured["load"] < measured["steps"] <= memory["measured_bytes"] == max(measured.values())


def test_a_finished_run_verifies_and_is_listed(finished):
    assert tunix_rt("evidence", "verify", finished[1]).returncode == 0
    listed = tunix_rt("runs", finished[1].parent, "--json")
    assert json.loads(listed.stdout)
    shown = in_process("runs", "show", finished[1])
    assert shown.returncode == 0 and "completed" in shown.stdout


def test_the_final_model_is_the_last_checkpoint_in_plain_transformers(finished):
    import torch
    import transformers
    from safetensors.torch import load_file

    model = transformers.AutoModelForCausalLM.from_pretrained(finished[1] / "final_model")
    saved = load_file(finished[1] / "checkpoints" / "step-000006" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, saved[name]), name


def test_the_final_model_can_be_read_by_whom_the_umask_lets_read(finished, tmp_path):
    (tmp_path / "plain").write_text("")
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    models = [finished[1] / "final_model", finished[1] / "checkpoints" / "step-000006"]
    assert {stat.S_IMODE(path.stat().st_mode) for folder in models for path in folder.iterdir()} == {usual}


def test_a_finished_folder_is_not_written_over(finished, tmp_path):
    folder = shutil.copytree(finished[1], tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "already contains a run (completed)" in refused(in_process("train", "smoke_tiny", "--output", folder), 2)
    assert "is complete" in refused(in_process("train", "smoke_tiny", "--output", folder, "--resume"), 2)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture(scope="module")
def without_yaml(tmp_path_factory):
    """A run by flags alone: a person's file, random weights, charts, on a computer whose shell says much of GPUs."""
    folder = tmp_path_factory.mktemp("flags")
    traces = (ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl").read_text().splitlines()[:40]
    (folder / "mine.jsonl").write_text("\n".join(traces) + "\n")
    done = in_process(
        "train", "--model", write_small_model("gpt2", folder / "model"), "--weights", "random", "--data",
        folder / "mine.jsonl", "--output", folder / "run", "--device", "cpu", *SMALL, "--set", "data.max_length=128",
        "--set", "training.report_to=tensorboard", "--json", CUDA_VISIBLE_DEVICES="7",
        XLA_PYTHON_CLIENT_MEM_FRACTION="0.9", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, folder / "run"


def test_training_needs_no_yaml_and_takes_any_file_of_traces(without_yaml):
    done, folder = without_yaml
    assert json.loads(done.stdout)["status"] == "completed"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    lines = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [one.step for one in events.Tensors("train/loss")] == lines
    assert [one.step for one in events.Tensors("evaluation/accuracy")] == [0, lines[-1]]


def test_random_weights_are_said_everywhere(without_yaml):
    _, folder = without_yaml
    assert "The weights are random" in (folder / "training_log.txt").read_text()
    assert json.loads((folder / "precommit.json").read_text())["base_model"]["weights"] == "random"


def test_a_folder_with_a_file_of_somebody_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    words = refused(in_process("train", "smoke_tiny", "--output", tmp_path, "--device", "cpu"), 2)
    assert "already contains notes.txt, which no run writes" in words and "move it out" in words
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == ["notes.txt"]


def test_training_visibly_teaches_the_embedded_model_to_reason(tmp_path):
    questions = (ROOT / "evalsets" / "eval_v2.jsonl").read_text().splitlines(keepends=True)[:40]
    (tmp_path / "forty.jsonl").write_text("".join(questions))
    shorter = {
        "evaluation.evalset": tmp_path / "forty.jsonl",
        "training.per_device_train_batch_size": 16,
        "training.learning_rate": 1e-3,
    }
    settings = [word for name, value in shorter.items() for word in ("--set", f"{name}={value}")]
    done = in_process("train", "demo", *settings, "--output", tmp_path / "run", "--max-steps", 50, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    scores = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]
    assert scores["before"]["accuracy_lenient"] <= 0.05
    assert scores["after"]["accuracy"] >= 0.30, "an eighth of the demo must already gain 30 points"
    assert "<reasoning>" in (tmp_path / "run" / "samples.md").read_text()
    assert "Preflight: model=tiny-gemma3 revision=shipped " in (tmp_path / "run" / "training_log.txt").read_text()
