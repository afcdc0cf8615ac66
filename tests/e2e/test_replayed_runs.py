"""Steps of real runs taken again, and answers given again, by real processes; and forged records held against the truth.

The default tests compute the run that all tests share again once; what came out then is held against many forged records of it:
a replay computes from settings and data, so what comes out does not depend on what was recorded. The slow tests train the cheats
for real.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.bundles import chain, edit_json, edit_text
from tests.forging.bases import ASKED, STEPS
from tests.program import ROOT, tunix_rt
from tunix_rt import regenerating, replaying
from tunix_rt.config import load_config
from tunix_rt.data.pack import rows_of_step
from tunix_rt.data.prepare import prepare
from tunix_rt.errors import InputError
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.pipeline import find_tokenizer
from tunix_rt.recompute.process import _make_working_folder
from tunix_rt.rundir import RunDir, sha256_file, write_text

SILENT = ["--set", "evaluation.enabled=false"]


@pytest.fixture(scope="module")
def repo(tiny_repo):
    return tiny_repo


def train(repo, folder, *settings, code=0, **environment):
    done = tunix_rt(
        "train", "smoke_tiny", "--device", "cpu", "--output", folder, *STEPS, *settings, PYTHONPATH=str(repo / "src"),
        **environment,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return folder


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run


def replay(folder, repo, **changed):
    asked = {"model": None, "count": 3, "nonce": "nonce", "progress": lambda *_: None}
    return replaying.replay(folder, repository=repo, **asked | changed)


@pytest.fixture(scope="module")
def honest(run, repo, tmp_path_factory):
    """The honest replay, from the base model to the end, and what its process answered."""
    answers = []
    compute = replaying.compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "compute", lambda *asked, **how: answers.append(compute(*asked, **how)) or answers[-1])
        return replay(without_checkpoints(run, tmp_path_factory.mktemp("bare") / "run"), repo), answers


@pytest.fixture
def truth(honest, monkeypatch):
    """Every replay of this test is given what the honest one computed."""
    _, (answer,) = honest
    monkeypatch.setattr(replaying, "compute", lambda *asked, **how: answer)


def without_checkpoints(run, folder):
    """As a bundle has it: the hashes of the states, without the states."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    return folder


def checks(replayed):
    return {finding.check for finding in replayed.findings}


def edit_lines(path: Path, step: int, **changed) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = [line | changed if line["step"] == step else line for line in lines]
    write_text(path, "".join(json.dumps(line, sort_keys=True) + "\n" for line in told))


def test_an_honest_run_comes_out_bit_by_bit_on_the_machine_that_made_it(honest, run):
    replayed, _ = honest
    assert replayed.findings == () and replayed.class_name == "SAME"
    first, drawn, last = ((one.start, one.stop) for one in replayed.segments)  # drawn by the run's own hash
    assert (first, last) == ((0, 2), (4, 6)) and drawn in ((2, 3), (3, 4))
    said = "\n".join(replayed.words)
    assert "nonce nonce: 3 of 4 segments" in said and "every bit is compared" in said
    assert re.search(r"steps 1 to 6 from the base model: 6 steps, the same bits; \d state\(s\) hashed", said), said
    assert f"the run took {json.loads((run / 'result.json').read_text())['seconds']:.1f} s" in said


FORGED = {
    "an edited loss": ("metrics.jsonl", {"loss": 1.25, "loss_hex": (1.25).hex()}, "replay-loss"),
    "an edited gradient norm": ("metrics.jsonl", {"grad_norm": 1.0}, "replay-grad-norm"),
    "an edited learning rate": ("metrics.jsonl", {"lr": 1e-3}, "replay-learning-rate"),
    "another batch": ("metrics.jsonl", {"batch": "d" * 64}, "replay-batch"),
    "more tokens": ("metrics.jsonl", {"tokens": 7}, "replay-tokens"),
    "an edited held-out loss": ("eval/heldout.jsonl", {"loss": 0.5, "loss_hex": (0.5).hex()}, "held-out"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_number_edited_in_the_record_is_found_though_every_hash_was_made_anew(name, run, repo, truth, tmp_path):
    file, changed, check = FORGED[name]
    folder = without_checkpoints(run, tmp_path / "forged")
    edit_lines(folder / file, 3, **changed)
    chain(RunDir(folder))
    write_hashes(RunDir(folder))
    assert checks(replay(folder, repo)) == {check}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_state_that_training_does_not_give_is_found_by_its_hash(file, run, repo, truth, tmp_path):
    folder = without_checkpoints(run, tmp_path / "forged")
    listed = json.loads((folder / "checkpoints.json").read_text())["checkpoints"]
    listed[0]["files"][file]["sha256"] = "e" * 64
    edit_json(folder / "checkpoints.json", checkpoints=listed)
    write_hashes(RunDir(folder))
    (finding,) = replay(folder, repo).findings
    assert finding.check == "replay-checkpoint" and "after step 2" in finding.problem and file in finding.problem


def test_another_final_model_is_found_by_its_hash(run, repo, truth, tmp_path):
    folder = without_checkpoints(run, tmp_path / "forged")
    weights = folder / "final_model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    write_hashes(RunDir(folder))
    assert checks(replay(folder, repo)) == {"final-model"}


def test_steps_that_are_missing_at_the_end_are_found(run, repo, truth, tmp_path):
    folder = without_checkpoints(run, tmp_path / "forged")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    write_text(folder / "metrics.jsonl", "".join(lines[:5]))
    write_hashes(RunDir(folder))
    assert "replay-steps" in checks(replay(folder, repo))


def test_a_run_on_a_gpu_computed_again_here_is_cross_and_never_called_exact(run, repo, truth, tmp_path):
    folder = without_checkpoints(run, tmp_path / "dressed")
    (process,) = json.loads((folder / "processes.json").read_text())["processes"]
    gpu = {"name": "NVIDIA H200", "capability": "9.0", "driver": "580", "cuda": "13.0", "cudnn": "91000"}
    process["machine"] |= {"device": "cuda", "gpu": gpu, "deterministic": True}
    edit_json(folder / "processes.json", processes=[process])
    write_hashes(RunDir(folder))
    replayed = replay(folder, repo)
    assert replayed.class_name == "CROSS" and replayed.findings == ()
    said = "\n".join(replayed.words)
    assert "class CROSS, not exact (recorded on cuda, computed again on cpu)" in said and "same bits" not in said


def test_a_run_that_does_not_say_its_machine_is_near_with_the_reason(run, repo, truth, tmp_path):
    folder = without_checkpoints(run, tmp_path / "older")
    (folder / "processes.json").unlink()
    (folder / "checkpoints.json").unlink()
    write_hashes(RunDir(folder))
    replayed = replay(folder, repo)
    assert replayed.class_name == "NEAR" and "not recorded" in "\n".join(replayed.words)
    assert not replayed.findings


def test_a_source_that_is_not_the_recorded_one_and_not_in_the_repository_is_at_most_near(run, truth, tmp_path):
    folder = without_checkpoints(run, tmp_path / "other")
    edit_json(folder / "precommit.json", source_sha256="f" * 64)
    replayed = replay(folder, None)
    assert replayed.class_name == "NEAR" and "the source here is not the recorded one" in "\n".join(replayed.words)


def test_targets_of_a_row_edited_in_the_record_are_found(run, repo, tmp_path):
    folder = without_checkpoints(run, tmp_path / "rows")
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[3])
    lines[3] = lines[3].replace(f'"targets": {row["targets"]}', f'"targets": {row["targets"] + 1}')
    write_text(folder / "rows.jsonl", "".join(lines))
    write_hashes(RunDir(folder))
    assert checks(replay(folder, repo)) == {"rows"}


def test_a_model_that_is_not_here_or_another_could_not_be_tried_and_is_no_finding(run, repo, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"could not be tried here: .*nowhere"):
        replay(run, repo, model=str(tmp_path / "nowhere"))
    other = shutil.copytree(ROOT / "models" / "tiny-gemma3", tmp_path / "other")
    edit_text(other / "config.json", "{", "{ ")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"could not be tried here: .*config.json") as refused:
        replay(run, repo, model="other")
    assert "leave --model out" in refused.value.fix


@pytest.mark.parametrize("where", ["in the bundle", "in the working folder"])
def test_nothing_in_the_bundle_or_the_working_folder_is_run(where, run, repo, tmp_path, monkeypatch):
    """Python runs a sitecustomize.py of any folder that it imports from, and an empty entry is the working folder."""
    folder, ran = without_checkpoints(run, tmp_path / "bundle"), tmp_path / "ran"
    working = folder if where == "in the bundle" else tmp_path / "working"
    working.mkdir(exist_ok=True)
    for name in ("sitecustomize.py", "usercustomize.py", "tunix_rt.py", "torch.py"):
        (working / name).write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(ROOT / "src"), ""]))
    monkeypatch.chdir(working)
    with pytest.raises(InputError, match="nowhere"):
        replay(folder, repo, model="nowhere")
    assert not ran.exists()


def test_a_replay_finds_data_by_their_names_where_it_was_called(run, tmp_path, monkeypatch):
    folder = without_checkpoints(run, tmp_path / "bundle")
    edit_text(folder / "config.yaml", "dataset: dev-reasoning-v2", "dataset: own/data-*.jsonl")
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    _make_working_folder(tmp_path / "there", folder)
    assert [(place.name, place.readlink()) for place in (tmp_path / "there").iterdir()] == [("own", tmp_path / "own")]
    monkeypatch.chdir(folder)
    _make_working_folder(tmp_path / "nothing", folder)
    assert list((tmp_path / "nothing").iterdir()) == []


# --- the slow ones: real processes for everything ---------------------------------------------------------------------


@pytest.mark.slow
def test_parts_begin_at_checkpoints_that_are_in_the_folder(run, repo):
    replayed = replay(run, repo)
    assert replayed.findings == () and replayed.class_name == "SAME"
    assert any("steps 5 to 6 from the checkpoint of step 4: 2 steps, the same bits" in word for word in replayed.words)


@pytest.mark.slow
def test_a_checkpoint_in_the_folder_that_was_changed_is_a_finding(run, repo, tmp_path):
    folder = shutil.copytree(run, tmp_path / "changed")
    weights = folder / "checkpoints" / "step-000004" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    (finding,) = replay(folder, repo).findings
    assert finding.check == "replay-checkpoint" and "step-000004: changed: model.safetensors" in finding.problem


KINDS = {
    "jax": ["--set", "training.backend=jax"],
    "adapters": ["--set", "training.lora_rank=4"],
    "accumulated": ["--set", "training.gradient_accumulation_steps=3"],
    "not packed": ["--set", "data.packing=false"],
    "deterministic": ["--set", "training.deterministic=true"],
    "bfloat16": ["--set", "training.dtype=bfloat16"],
    "jax, bfloat16 weights": ["--set", "training.backend=jax", "--set", "training.dtype=bfloat16",
                              "--set", "training.master_dtype=bfloat16"],
    "random weights": ["--weights", "random"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_comes_out_bit_by_bit(kind, repo, tmp_path):
    folder = train(repo, tmp_path / "run", *SILENT, *KINDS[kind])
    replayed = replay(folder, repo)
    assert (replayed.class_name, replayed.findings) == ("SAME", ())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_that_was_stopped_and_continued_comes_out_bit_by_bit(backend, repo, tmp_path):
    chosen = [*SILENT, "--set", f"training.backend={backend}"]
    folder = train(repo, tmp_path / "run", *chosen, "--stop-after", 3, code=7)
    train(repo, folder, *chosen, "--resume")
    assert len(json.loads((folder / "processes.json").read_text())["processes"]) == 2
    replayed = replay(folder, repo)
    assert (replayed.class_name, replayed.findings) == ("SAME", ())


@pytest.mark.slow
def test_other_threads_are_near_and_within_the_tolerances(repo, tmp_path):
    folder = train(repo, tmp_path / "run", *SILENT, OMP_NUM_THREADS="1")
    (process,) = json.loads((folder / "processes.json").read_text())["processes"]
    assert process["machine"]["threads"] == 1
    process["machine"]["threads"] = 2
    edit_json(folder / "processes.json", processes=[process])  # computed with one, said to be two
    edit_json(
        folder / "processes.json", processes=[process | {"machine": process["machine"] | {"cpu_capability": "AVX"}}]
    )
    replayed = replay(folder, repo)
    assert (replayed.class_name, replayed.findings) == ("NEAR", ())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_whole_run_is_reproduced_with_its_answers_and_its_final_model(backend, repo, tmp_path):
    folder = train(repo, tmp_path / "run", *ASKED, "--set", f"training.backend={backend}")
    replayed = replay(folder, repo, whole=True)
    assert (replayed.class_name, replayed.findings) == ("SAME", ())
    assert "the whole run: 6 steps" in replayed.words[0]
    edit_text(folder / "eval" / "predictions-before.jsonl", '"output": "', '"output": "I say ')
    assert checks(replay(folder, repo, whole=True)) == {"replay-answers"}


CHEATS = {
    "another learning rate": ["--set", "training.learning_rate=0.00051"],
    "another seed of the order": ["--set", "training.data_seed=5"],
    "no weight decay": ["--set", "training.weight_decay=0.1"],
    "not clipped": ["--set", "training.max_grad_norm=0"],
    "another type": ["--set", "training.dtype=bfloat16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_run_that_did_otherwise_than_it_says_is_refused(cheat, run, repo, truth, tmp_path):
    other = train(repo, tmp_path / "other", *SILENT, *CHEATS[cheat])
    assert "replay-loss" in checks(replay(disguised(other, run, tmp_path / "forged"), repo))


@pytest.mark.slow
def test_a_run_on_data_with_one_other_byte_is_refused(run, repo, truth, tmp_path):
    dataset = tmp_path / "data"
    shutil.copytree(ROOT / "datasets" / "dev-reasoning-v2", dataset)
    rows = next(dataset.glob("*.jsonl"))
    content = rows.read_text(encoding="utf-8")
    changed = content.replace(*one_other_letter(content, trained_text(run)))
    assert sum(one != two for one, two in zip(content, changed, strict=True)) == 1
    write_text(rows, changed)
    other = train(repo, tmp_path / "other", *SILENT, "--set", f"data.dataset={rows}")
    assert "replay-loss" in checks(replay(disguised(other, run, tmp_path / "forged"), repo))


def trained_text(run: Path) -> str:
    """What the second step of the run read."""
    config = load_config(RunDir(run).config)
    tokenizer, facts = find_tokenizer(config)
    data = prepare(config, tokenizer, facts, lambda *_: None)
    seed = config.training.seed if config.training.data_seed is None else config.training.data_seed
    (place,) = rows_of_step(2, row_count=len(data.rows), rows_per_step=1, seed=seed)
    return tokenizer.decode(list(map(int, data.rows[place].ids)))


def one_other_letter(content: str, text: str) -> tuple[str, str]:
    """A line of the dataset that is in the text, and the same with one letter of its first step changed."""
    traces = [line for line in content.splitlines() if json.loads(line)["prompt"] in text]
    step = json.loads(traces[0])["steps"][0]["content"]
    at = next(place for place, letter in enumerate(step) if letter in "aeiou")
    other = step[:at] + ("o" if step[at] != "o" else "u") + step[at + 1 :]
    return traces[0], traces[0].replace(step, other, 1)


def disguised(other: Path, claimed: Path, folder: Path) -> Path:
    """The record of `claimed` with the losses, norms, states and weights of `other`: all that is static agrees."""
    without_checkpoints(claimed, folder)
    lines = []
    for said, did in zip(*((one / "metrics.jsonl").read_text().splitlines() for one in (claimed, other)), strict=True):
        took = {name: json.loads(did)[name] for name in ("loss", "loss_hex", "grad_norm")}
        lines.append(json.dumps(json.loads(said) | took, sort_keys=True) + "\n")
    write_text(folder / "metrics.jsonl", "".join(lines))
    for name in ("checkpoints.json", "eval/heldout.jsonl", "final_model/model.safetensors"):
        shutil.copyfile(other / name, folder / name)
    chain(RunDir(folder))
    write_hashes(RunDir(folder))
    return folder


# --- answers ----------------------------------------------------------------------------------------------------------


def regenerate(folder, weights, repo, **changed):
    asked = {"count": 50, "nonce": "nonce", "progress": lambda *_: None, "repository": repo}
    return regenerating.regenerate(folder, weights, **asked | changed)


@pytest.mark.slow
def test_answers_are_given_again_by_the_weights_that_gave_them_and_invented_ones_are_not(run, repo, tmp_path):
    told = regenerate(run, run / "final_model", repo, count=10)
    assert (told.findings, told.class_name, told.asked, told.same) == ((), "SAME", 10, 10)
    assert "nonce nonce: 10 of 100 answers" in told.words[0]
    folder = shutil.copytree(run, tmp_path / "invented")
    lines = [json.loads(line) for line in RunDir(folder).predictions("after").read_text().splitlines()]
    told_lines = [line | {"output": f"<answer>{line['expected']}</answer>"} for line in lines]
    write_text(RunDir(folder).predictions("after"), "".join(json.dumps(line) + "\n" for line in told_lines))
    write_hashes(RunDir(folder))
    (finding,) = regenerate(folder, folder, repo).findings
    assert finding.check == "regenerated-answers" and finding.level == "L2" and "50 of 50" in finding.problem


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "adapters", "bfloat16", "random weights"])
def test_answers_of_every_kind_of_run_are_given_again(kind, repo, tmp_path):
    folder = train(repo, tmp_path / "run", *ASKED, *KINDS[kind])
    told = regenerate(folder, folder, repo)
    assert told.findings == () and told.asked == 50
    assert told.class_name == ("NEAR" if kind == "adapters" else "SAME")


@pytest.mark.slow
def test_answers_in_16_bits_of_a_machine_with_other_instructions_are_followed_and_invented_ones_are_not(repo, tmp_path):
    older = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    folder = train(repo, tmp_path / "run", "--set", "evaluation.max_new_tokens=32", *KINDS["bfloat16"], **older)
    told = regenerate(folder, folder, repo)
    said = "\n".join(told.words)
    assert (told.findings, told.asked, told.same, told.followed) == ((), 28, 28, True), said
    assert told.class_name == "NEAR" and "not exact" in said and "the kernels chosen for the CPU: DEFAULT then" in said
    lines = [json.loads(line) for line in RunDir(folder).predictions("after").read_text().splitlines()]
    for number, line in enumerate(lines):
        if number % 3 == 0:
            line["output"] = f"<reasoning>We add.</reasoning><answer>{line['expected']}</answer>"
            line["ended"] = "tag"
    write_text(RunDir(folder).predictions("after"), "".join(json.dumps(line) + "\n" for line in lines))
    write_hashes(RunDir(folder))
    (finding,) = regenerate(folder, folder, repo).findings
    assert finding.check == "followed-answers" and finding.level == "L2" and "10 of 28" in finding.problem


def test_weights_that_are_not_those_of_the_run_are_refused_before_they_are_asked(run, repo, tmp_path):
    swapped = shutil.copytree(run / "final_model", tmp_path / "swapped")
    (swapped / "model.safetensors").write_bytes((ROOT / "models/tiny-gemma3/model.safetensors").read_bytes())
    more = shutil.copytree(run / "final_model", tmp_path / "more")
    shutil.copyfile(more / "model.safetensors", more / "other.safetensors")
    for weights, named in ((swapped, "model.safetensors are not what the run saved"), (more, "other.safetensors")):
        told = regenerate(run, weights, repo)
        assert told.asked == 0 and any(one.check == "weights" and named in one.problem for one in told.findings)
    with pytest.raises(InputError, match="no model folder"):
        regenerate(run, tmp_path, repo)


def test_a_hash_of_the_base_model_that_is_not_here_is_a_finding(run, repo, tmp_path):
    folder = without_checkpoints(run, tmp_path / "base")
    committed = json.loads((folder / "precommit.json").read_text())
    committed["base_model"]["files"]["model.safetensors"] = sha256_file(folder / "config.yaml")
    edit_json(folder / "precommit.json", base_model=committed["base_model"])
    assert checks(replay(folder, repo)) == {"base-model"}
