"""A run folder that was touched is found out, whatever was touched; and its source leads back to a commit."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tunix_rt
from tunix_rt import replaying
from tunix_rt.cli.evidence import evidence
from tunix_rt.errors import ConfigError, EvidenceError, InputError, TunixError
from tunix_rt.evaluate.report import compare, samples_markdown
from tunix_rt.evaluate.score import judge, score_predictions
from tunix_rt.evaluate.summary import summary_of
from tunix_rt.evidence.agreeing import commit_problems, refuse_without_commit
from tunix_rt.evidence.findings import Finding, verdict_of
from tunix_rt.evidence.hashes import list_problems, write_hashes
from tunix_rt.evidence.record import Record
from tunix_rt.evidence.source import find_commit, require_repository, source_hash
from tunix_rt.replaying import Replayed
from tunix_rt.rundir import RunDir, json_line, sha256_text, write_json, write_jsonl, write_text

LOSSES = [3.25, 2.1, 0.1 + 0.2]


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Durability is tested elsewhere; here it would be most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def metrics_text(precommit: Path, losses=LOSSES) -> str:
    prev, text = hashlib.sha256(precommit.read_bytes()).hexdigest(), ""
    for step, loss in enumerate(losses, start=1):
        line = json_line(
            {
                "step": step,
                "loss": loss,
                "loss_hex": loss.hex(),
                "lr": 1e-3,
                "grad_norm": 1.0,
                "target_tokens": 100,
                "tokens": 200,
                "seconds": 0.5,
                "peak_bytes": 1_000_000,
                "batch": sha256_text(str(step)),
                "prev": prev,
            }
        )
        prev = sha256_text(line.removesuffix("\n"))
        text += line
    return text


def result_of(run: RunDir, **changed):
    lines = run.metrics.read_bytes().split(b"\n")[:-1]
    last = json.loads(lines[-1])
    facts = {
        "schema": "tunix-rt/result/1",
        "status": "completed",
        "exit_code": 0,
        "run_id": "r1",
        "steps_completed": last["step"],
        "steps_planned": last["step"],
        "final_loss": last["loss"],
        "final_loss_hex": last["loss_hex"],
        "metrics_head": hashlib.sha256(lines[-1]).hexdigest(),
        "device": "cpu",
    }
    return {key: value for key, value in (facts | changed).items() if value is not ...}


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    write_text(run.config, "model: {model_name_or_path: tiny, weights: random}\ntraining: {dtype: float32}\n")
    write_json(run.precommit, {"schema": "tunix-rt/precommit/1", "device": "cpu", "tokenizer_sha256": "ab" * 32})
    write_text(run.metrics, metrics_text(run.precommit))
    outputs = ["<reasoning>a</reasoning><answer>5</answer>", "5", "6"]
    predictions = [judge(id=str(n), prompt="?", expected="5", output=text) for n, text in enumerate(outputs)]
    scores = [score_predictions(predictions, when) for when in ("before", "after")]
    for side in scores:
        write_jsonl(run.predictions(side.when), predictions)
        write_json(run.scores(side.when), side)
    comparison = compare(predictions, predictions)
    write_text(run.samples, samples_markdown(predictions, predictions, comparison))
    decoding = {"max_new_tokens": 0, "temperature": 0.0, "closing": "</answer>", "style": "cd" * 32}
    decoding |= {"tokenizer": "ab" * 32, "reasoning_tag": "reasoning", "answer_tag": "answer"}
    facts = {"models": ["tiny"], "weights": "random", "evalset": "held out", "questions": 3, "device": "cpu"}
    facts |= {"dtype": "float32", "decoding": decoding}
    write_json(run.eval_summary, summary_of(*scores, comparison, **facts))
    write_text(run.checkpoints / "step-000003" / "model.safetensors", "weights")
    write_json(run.result, result_of(run))
    write_hashes(run)
    return run


def test_an_untouched_run_verifies(run):
    assert list_problems(run.root) == []


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils is not here")
def test_sha256sum_itself_accepts_the_file(run):
    done = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=run.root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(": OK\n") == 11


def test_every_file_is_listed_once_sorted_with_posix_names(run):
    names = [line.split("  ", 1)[1] for line in run.hashes.read_text().splitlines()]
    assert names == sorted(names)
    assert set(names) == {
        "checkpoints/step-000003/model.safetensors",
        "config.yaml",
        "eval/after.json",
        "eval/before.json",
        "eval/predictions-after.jsonl",
        "eval/predictions-before.jsonl",
        "eval_summary.json",
        "metrics.jsonl",
        "precommit.json",
        "result.json",
        "samples.md",
    }


def test_lock_and_staged_leftovers_are_not_part_of_the_run(run):
    (run.root / ".lock").write_text("")
    (run.root / ".result.json.staged").write_text("half")
    (run.checkpoints / ".staged-step-000004").mkdir()
    (run.checkpoints / ".staged-step-000004" / "model.safetensors").write_text("half")
    assert list_problems(run.root) == []
    before = run.hashes.read_bytes()
    write_hashes(run)
    assert run.hashes.read_bytes() == before


@pytest.mark.parametrize("claimed", ["0" * 64, "not a hash", "A" * 64, 7])
def test_a_manifest_is_believed_only_of_a_checkpoint_that_was_hashed_and_only_a_hash(run, claimed):
    """So that a process that is told to end need not read tens of gigabytes again; and a damaged one is hashed as it is."""
    checkpoint = run.checkpoints / "step-000003"
    files = {"model.safetensors": {"sha256": claimed, "bytes": 7}, "nul\0": {"sha256": claimed, "bytes": 7}}
    write_json(checkpoint / "MANIFEST.json", {"schema": "tunix-rt/checkpoint/1", "step": 3, "files": files})
    write_hashes(run)
    assert list_problems(run.root) == []
    write_hashes(run, sound={checkpoint})
    believed = ["changed: checkpoints/step-000003/model.safetensors"] if claimed == "0" * 64 else []
    assert list_problems(run.root) == believed


def test_a_missing_an_extra_and_a_changed_file_are_all_listed(run):
    run.config.unlink()
    (run.root / "extra.txt").write_text("x")
    (run.checkpoints / "step-000003" / "model.safetensors").write_text("weightz")
    assert list_problems(run.root) == [
        "missing: config.yaml",
        "not in SHA256SUMS: extra.txt",
        "changed: checkpoints/step-000003/model.safetensors",
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  config.yaml", " *config.yaml", "malformed line"),
        ("  config.yaml", "  ../config.yaml", "not a plain relative path"),
        ("  config.yaml", "  /config.yaml", "not a plain relative path"),
        ("  config.yaml", "  ./config.yaml", "not a plain relative path"),
        ("  config.yaml", "  eval\\\\config.yaml", "backslash"),
        ("  config.yaml", "  .lock", "not a file of the run"),
        ("  config.yaml", "  metrics.jsonl", "listed twice"),
        ("  config.yaml\n", "  config.yaml\n\n", "malformed line"),
        ("  config.yaml\n", "  config.yaml\r\n", "control character"),
    ],
)
def test_a_line_of_the_hashes_that_is_not_plain_is_named(run, old, new, said):
    text = run.hashes.read_bytes().decode()
    assert old in text
    run.hashes.write_bytes(text.replace(old, new).encode())
    assert any(problem.startswith("SHA256SUMS:") and said in problem for problem in list_problems(run.root))


def test_hashes_in_capitals_or_without_the_last_newline_are_not_what_was_written(run):
    original = run.hashes.read_text()
    run.hashes.write_text(original.removesuffix("\n"))
    assert "SHA256SUMS does not end with a newline" in list_problems(run.root)
    run.hashes.write_text(original[:64].upper() + original[64:])
    assert "SHA256SUMS:1: malformed line" in list_problems(run.root)


@pytest.mark.skipif(sys.platform == "win32", reason="links and such names need a POSIX file system")
@pytest.mark.parametrize("name", ["back\\slash", "new\nline", "bell\a", b"\xff".decode("utf-8", "surrogateescape")])
def test_a_name_that_cannot_stand_in_the_hashes_is_refused(run, name):
    (run.root / name).write_text("x")
    with pytest.raises(EvidenceError):
        write_hashes(run)
    assert len(list_problems(run.root)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need a POSIX file system")
@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "dangling link", "pipe"])
def test_a_link_or_a_pipe_is_refused(run, kind, tmp_path):
    odd = run.root / "eval" / "odd"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        targets = {"link to a file": run.config, "link to a folder": tmp_path, "dangling link": tmp_path / "gone"}
        odd.symlink_to(targets[kind])
    said = "not a regular file" if kind == "pipe" else "a symbolic link"
    with pytest.raises(EvidenceError, match=f"{said}: eval/odd"):
        write_hashes(run)
    assert [problem for problem in list_problems(run.root) if "eval/odd" in problem]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes need a POSIX file system")
@pytest.mark.parametrize("name", ["SHA256SUMS", "metrics.jsonl", "result.json", "precommit.json", "eval/after.json"])
@pytest.mark.parametrize("kind", ["gone", "folder", "pipe", "garbage", "empty", "deep"])
def test_no_garbage_in_place_of_a_file_causes_a_traceback_and_all_of_it_is_found(run, name, kind):
    path = run.root / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "gone":
        path.write_bytes({"garbage": b"\xff\x00\n{]\n", "empty": b"", "deep": b"[" * 100_000 + b"\n"}[kind])
    assert list_problems(run.root) != []
    if kind not in ("folder", "pipe") and name != "SHA256SUMS":
        write_hashes(run)  # whoever damaged it also hashed it anew
        assert list_problems(run.root) != []


# --- what the hashes cannot tell, because they were written anew ------------------------------------------------------


def edit_metrics(run, edit):
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    edit(lines)
    run.metrics.write_text("".join(json_line(line) for line in lines))
    write_hashes(run)


def set_loss(step, loss, loss_hex=None):
    def edit(lines):
        lines[step - 1]["loss"] = loss
        if loss_hex is not None:
            lines[step - 1]["loss_hex"] = loss_hex

    return edit


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_edited_loss_is_found_in_any_step_even_with_new_hashes(run, step):
    edit_metrics(run, set_loss(step, 1.5))
    assert f"metrics.jsonl:{step}: loss 1.5 is not loss_hex '{LOSSES[step - 1].hex()}'" in list_problems(run.root)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_edited_loss_with_its_hex_is_found_by_the_chain(run, step):
    edit_metrics(run, set_loss(step, 1.5, (1.5).hex()))
    problems = list_problems(run.root)
    if step < 3:
        assert problems == [f"metrics.jsonl:{step + 1}: the chain is broken: prev is not the hash of the line before"]
    else:  # nothing follows the last line but the result
        assert "result.json: metrics_head is not the hash of the last line of metrics.jsonl" in problems


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda lines: lines.pop(1), "step is 3, not 2"),
        (lambda lines: lines.insert(1, lines[0]), "step is 1, not 2"),
        (lambda lines: lines.reverse(), "the chain is broken"),
        (lambda lines: lines.pop(), "steps_completed is 3, metrics.jsonl has 2 lines"),
        (lambda lines: lines[1].pop("prev"), "without prev"),
        (lambda lines: lines[1].pop("loss"), "without loss"),
        (lambda lines: lines[1].update(step="2"), "step is '2', not 2"),
        (lambda lines: lines[0].update(step=True), "step is True, not 1"),
        (lambda lines: lines[1].update(loss=None), "loss None is not loss_hex"),
        (lambda lines: lines[1].update(loss_hex=2.1), "is not loss_hex"),
        (lambda lines: lines[1].update(loss_hex="nonsense"), "is not loss_hex 'nonsense'"),
        (lambda lines: lines.clear(), "steps_completed is 3, metrics.jsonl has 0 lines"),
    ],
)
def test_every_other_edit_of_the_metrics_is_named(run, edit, said):
    edit_metrics(run, edit)
    assert any(said in problem for problem in list_problems(run.root))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"step": 1, "step": 1}', "a key is given twice"),
        (b'{"loss": NaN}', "NaN is not a number"),
        (b"[1]", "not a JSON object"),
        (b"", "not JSON"),
        (b"\xff", "not UTF-8 text"),
        (b'{"step": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_line_that_is_no_object_is_named(run, line, said):
    first = run.metrics.read_bytes().split(b"\n")[0]
    run.metrics.write_bytes(run.metrics.read_bytes().replace(first, line))
    assert any(problem.startswith("metrics.jsonl:1: ") and said in problem for problem in list_problems(run.root))


def test_a_torn_last_line_is_named(run):
    run.metrics.write_bytes(run.metrics.read_bytes() + b'{"step": 4')
    assert "metrics.jsonl:4: the last line is torn" in list_problems(run.root)


def test_another_precommit_breaks_the_chain_at_its_first_line(run):
    write_json(run.precommit, json.loads(run.precommit.read_text()) | {"seed": 1})
    write_hashes(run)
    assert list_problems(run.root) == ["metrics.jsonl:1: the chain is broken: prev is not the hash of precommit.json"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema": "tunix-rt/result/2"}, "schema is 'tunix-rt/result/2'"),
        ({"status": "perfect"}, "status is 'perfect'"),
        ({"status": ["completed"]}, "status is a list"),
        ({"exit_code": 5}, "status is completed with exit code 5"),
        ({"status": "failed"}, "status is failed with exit code 0"),
        ({"steps_completed": 2}, "steps_completed is 2, metrics.jsonl has 3 lines"),
        ({"steps_completed": ...}, "steps_completed is None, metrics.jsonl has 3 lines"),
        ({"steps_completed": 3.0}, "steps_completed is 3.0"),
        ({"steps_planned": 4}, "completed with 3 of 4 steps"),
        ({"final_loss": 0.3}, "final_loss 0.3 is not the loss of the last line"),
        ({"final_loss": ...}, "final_loss None is not the loss of the last line"),
        ({"final_loss": 0.5, "final_loss_hex": (0.5).hex()}, "the last line has '0x1.3333333333334p-2'"),
        ({"final_loss_hex": ...}, "final_loss_hex is None"),
        ({"metrics_head": "0" * 64}, "metrics_head is not the hash"),
        ({"metrics_head": ...}, "metrics_head is not the hash"),
        ({"memory": {"predicted_bytes": None}}, "'memory.predicted_bytes' is null"),
        ({"scores": {"after": {"accuracy": 0.9}}}, "scores.after.accuracy is 0.9, the predictions give 0.333"),
        ({"status": "preempted", "exit_code": 7, "final_loss": 0.5}, "final_loss 0.5 is not the loss of the last line"),
        ({"status": "preempted", "exit_code": 7, "steps_completed": 2}, "steps_completed is 2"),
        ({"status": "preempted", "exit_code": 7, "metrics_head": "0" * 64}, "metrics_head is not the hash"),
    ],
)
def test_a_result_that_contradicts_the_metrics_is_named(run, changed, said):
    write_json(run.result, result_of(run, **changed))
    write_hashes(run)
    problems = list_problems(run.root)
    assert any(problem.startswith("result.json: ") and said in problem for problem in problems), problems


@pytest.mark.parametrize(("key", "value"), [("correct", 3), ("accuracy", 0.9), ("accuracy_lenient", 1), ("items", 4)])
def test_a_score_that_the_predictions_do_not_give_is_named(run, key, value):
    write_json(run.scores("after"), json.loads(run.scores("after").read_text()) | {key: value})
    write_hashes(run)
    (problem,) = list_problems(run.root)
    assert problem.startswith(f"eval/after.json: {key} is {value}, the predictions give ")


def test_a_refused_run_without_a_step_verifies_and_a_loss_in_it_does_not(tmp_path):
    run = RunDir(tmp_path)
    refused = {"schema": "tunix-rt/result/1", "status": "refused", "exit_code": 5, "steps_completed": 0}
    write_json(run.result, refused)
    write_hashes(run)
    assert list_problems(run.root) == []
    write_json(run.result, refused | {"final_loss": 0.5})
    write_hashes(run)
    assert list_problems(run.root) == ["result.json: final_loss without a step in metrics.jsonl"]


def test_a_stopped_run_may_leave_out_what_it_did_not_get_to_say(run):
    unsaid = dict.fromkeys(("steps_completed", "final_loss", "final_loss_hex", "metrics_head"), ...)
    write_json(run.result, result_of(run, status="preempted", exit_code=7, **unsaid))
    write_hashes(run)
    assert list_problems(run.root) == []


def test_a_score_in_the_result_needs_predictions(run):
    run.scores("after").unlink()
    run.predictions("after").unlink()
    run.eval_summary.unlink()
    run.samples.unlink()
    write_hashes(run)
    assert list_problems(run.root) == []
    write_json(run.result, result_of(run, scores={"after": {"accuracy": 1.0}}))
    write_hashes(run)
    assert list_problems(run.root) == ["result.json: scores.after without eval/predictions-after.jsonl"]


def test_a_run_that_has_not_ended_does_not_verify(run):
    run.result.unlink()
    write_hashes(run)
    assert list_problems(run.root) == ["result.json is missing (the run has not ended)"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_verify_says_what_it_does_and_does_not_mean(run):
    done = CliRunner().invoke(evidence, ["verify", str(run.root)])
    assert done.exit_code == 0
    assert done.stdout == f"{run.root}: level L1 (consistent); not regenerated, not replayed\n"


def test_verify_lists_every_finding_and_ends_with_exit_code_6(run):
    run.config.unlink()
    (run.root / "extra").write_text("")
    done = CliRunner().invoke(evidence, ["verify", str(run.root)])
    assert done.stdout.splitlines()[:-1] == ["L0 hashes: missing: config.yaml", "L0 hashes: not in SHA256SUMS: extra"]
    assert done.stdout.splitlines()[-1] == f"{run.root}: level L0 (malformed or contradicts itself)"
    assert isinstance(done.exception, EvidenceError) and done.exception.exit_code == 6
    assert "2 problem(s)" in done.exception.problem


def test_verify_speaks_json(run):
    good = json.loads(CliRunner().invoke(evidence, ["verify", str(run.root), "--json"]).stdout)
    assert (good["verified"], good["problems"], good["meaning"]) == (
        True,
        [],
        "level L1 (consistent); not regenerated, not replayed",
    )
    run.config.unlink()
    done = CliRunner().invoke(evidence, ["verify", str(run.root), "--json"])
    bad = json.loads(done.stdout)
    assert (bad["verified"], bad["problems"]) == (False, ["missing: config.yaml"])
    assert isinstance(done.exception, EvidenceError)


@pytest.mark.parametrize(("name", "words"), [("nowhere", "no such folder"), ("file", "is not a folder")])
def test_verify_of_what_is_no_folder_is_a_slip_and_no_verdict(tmp_path, name, words):
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(evidence, ["verify", str(tmp_path / name)])
    assert isinstance(done.exception, InputError) and words in done.exception.problem and done.stdout == ""


def test_verify_of_the_folder_above_bundles_asks_for_one(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").write_text("{}")
    done = CliRunner().invoke(evidence, ["verify", str(tmp_path)])
    assert isinstance(done.exception, InputError) and "holds 2 bundles: name one" in done.exception.problem
    assert str(tmp_path / "one") in done.exception.fix


@pytest.mark.parametrize(
    "options",
    [["--nonce", "n"], ["--model", "."], ["--require", "L4", "--segments", "2"], ["--require", "L4", "--nonce", "n"]],
)
def test_an_option_that_changes_nothing_is_refused(run, options):
    done = CliRunner().invoke(evidence, ["verify", str(run.root), *options])
    assert isinstance(done.exception, ConfigError) and options[-2] in done.exception.problem


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_the_verdict_is_the_highest_level_that_was_reached_without_a_finding():
    assert [verdict_of([], reached) for reached in ([], ["L2"], ["L2", "L3"], ["L4"])] == ["L1", "L2", "L3", "L4"]


@pytest.mark.parametrize("level", ["L2", "L3", "L4"])
def test_a_strong_check_that_failed_leaves_level_1_whatever_another_came_to(level):
    finding = Finding(level=level, check="answers", problem="otherwise")
    for reached in (["L2", "L3"], ["L2", "L4"], ["L3"], []):
        assert verdict_of([finding], reached) == "L1"


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_a_contradiction_leaves_nothing(level):
    assert verdict_of([Finding(level=level, check="hashes", problem="changed")], ["L4"]) == "L0"


def replayed(*findings, class_name="NEAR"):
    return Replayed(
        class_name=class_name, segments=(), findings=findings, words=(), seconds=1.0, recorded_seconds=1.0, nonce="n"
    )


def test_the_verdict_names_the_class(run, monkeypatch):
    monkeypatch.setattr(replaying, "replay", lambda *_, **__: replayed())
    done = CliRunner().invoke(evidence, ["verify", str(run.root), "--require", "L3"])
    assert done.stdout == f"{run.root}: level L3 (replayed, class NEAR); not regenerated\n"


def test_a_replay_that_came_out_otherwise_is_level_1_and_exit_6(run, monkeypatch):
    finding = Finding(level="L3", check="replay-loss", problem="step 1: otherwise")
    monkeypatch.setattr(replaying, "replay", lambda *_, **__: replayed(finding))
    done = CliRunner().invoke(evidence, ["verify", str(run.root), "--require", "L3"])
    assert isinstance(done.exception, EvidenceError) and "not what is recorded" in done.exception.fix
    assert done.stdout.splitlines() == [
        "L3 replay-loss: step 1: otherwise",
        f"{run.root}: level L1 (consistent); not regenerated, replayed otherwise than recorded",
    ]


def test_what_cannot_be_tried_here_is_told_and_is_no_finding(run, monkeypatch):
    def cannot(*_, **__):
        raise InputError("could not be tried here: no such model", fix="--model DIR")

    monkeypatch.setattr(replaying, "replay", cannot)
    done = CliRunner().invoke(evidence, ["verify", str(run.root), "--require", "L3"])
    assert isinstance(done.exception, InputError) and done.exception.exit_code == 3
    assert done.stdout.splitlines() == [
        "L3 could not be tried here: no such model",
        f"{run.root}: level L1 (consistent); not regenerated, not replayed",
    ]
    told = json.loads(CliRunner().invoke(evidence, ["verify", str(run.root), "--require", "L3", "--json"]).stdout)
    assert told["verified"] is False and told["findings"] == [] and list(told["untried"]) == ["L3"]


# --- from the source hash back to a commit ----------------------------------------------------------------------------


@pytest.fixture
def repo(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "test")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "test@localhost")
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    return root


def git(root, *arguments):
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(root, files, when):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    git(root, "add", "-A")
    git(root, "-c", "commit.gpgsign=false", "commit", "-q", "-m", "change", f"--date=@{when} +0000")
    return git(root, "rev-parse", "HEAD")


def test_the_commit_of_a_source_is_found_from_its_hash_alone(repo):
    package = repo / "src" / "tunix_rt"
    commits, hashes = [], []
    for number in range(4):
        source = {"src/tunix_rt/a.py": f"A = {number}\n", "src/tunix_rt/cli/b.py": "B = 'ü'\r\n"}
        source["src/tunix_rt/notes.txt"] = source["README.md"] = "not Python"
        commits.append(commit(repo, source, 1_700_000_000 + number))
        hashes.append(source_hash(package)[0])
    assert len(set(hashes)) == 4
    assert [find_commit(digest, repo) for digest in hashes] == commits
    assert find_commit("0" * 64, repo) is None


def test_a_later_commit_that_leaves_the_source_alone_does_not_change_the_answer(repo):
    first = commit(repo, {"src/tunix_rt/a.py": "A = 1\n"}, 1_700_000_000)
    commit(repo, {"README.md": "words", "src/tunix_rt/data.json": "{}"}, 1_700_000_001)
    assert find_commit(source_hash(repo / "src" / "tunix_rt")[0], repo) == first


def test_an_uncommitted_edit_belongs_to_no_commit(repo):
    commit(repo, {"src/tunix_rt/a.py": "A = 1\n"}, 1_700_000_000)
    (repo / "src" / "tunix_rt" / "a.py").write_text("A = 2\n")
    assert find_commit(source_hash(repo / "src" / "tunix_rt")[0], repo) is None


def test_a_commit_on_another_branch_is_found(repo):
    commit(repo, {"src/tunix_rt/a.py": "A = 1\n"}, 1_700_000_000)
    git(repo, "checkout", "-q", "-b", "side")
    side = commit(repo, {"src/tunix_rt/a.py": "A = 2\n"}, 1_700_000_001)
    digest = source_hash(repo / "src" / "tunix_rt")[0]
    git(repo, "checkout", "-q", "main")
    assert find_commit(digest, repo) == side


def test_a_history_without_the_package_or_without_commits_has_no_answer(repo):
    assert find_commit("0" * 64, repo) is None
    commit(repo, {"README.md": "x"}, 1_700_000_000)
    assert find_commit("0" * 64, repo) is None


def test_a_commit_that_is_named_is_found_however_old_it_is(repo, monkeypatch):
    old = commit(repo, {"src/tunix_rt/a.py": "A = 1\n"}, 1_700_000_000)
    digest = source_hash(repo / "src" / "tunix_rt")[0]
    commit(repo, {"src/tunix_rt/a.py": "A = 2\n"}, 1_700_000_001)
    monkeypatch.setattr("tunix_rt.evidence.source.NEWEST_COMMITS", 1)
    assert find_commit(digest, repo) is None
    assert find_commit(digest, repo, old) == old
    assert list(commit_problems({"commit": old, "source_sha256": digest}, repo)) == []


def test_a_named_commit_with_another_source_is_a_finding(repo):
    first = commit(repo, {"src/tunix_rt/a.py": "A = 1\n"}, 1_700_000_000)
    second = commit(repo, {"src/tunix_rt/a.py": "A = 2\n"}, 1_700_000_001)
    digest = source_hash(repo / "src" / "tunix_rt")[0]
    (problem,) = commit_problems({"commit": first, "source_sha256": digest}, repo)
    assert f"commit is {first}" in problem and second in problem
    (problem,) = commit_problems({"commit": first, "source_sha256": "0" * 64}, repo)
    assert "has another source than the run" in problem


def test_a_commit_that_a_shallow_clone_lacks_says_nothing_against_a_bundle(repo, tmp_path):
    old = commit(repo, {"src/tunix_rt/a.py": "A = 1\n"}, 1_700_000_000)
    digest = source_hash(repo / "src" / "tunix_rt")[0]
    commit(repo, {"src/tunix_rt/a.py": "A = 2\n"}, 1_700_000_001)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repo}", str(shallow))
    write_json(tmp_path / "bundle.json", {"commit": old, "source_sha256": digest})
    with pytest.raises(InputError, match=r"could not be looked up.* shallow clone") as refused:
        refuse_without_commit(tmp_path, shallow)
    assert "--unshallow" in refused.value.fix
    refuse_without_commit(tmp_path, repo)


def test_a_repository_that_is_none_is_a_setting_and_no_verdict(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="not a git repository"):
        require_repository(tmp_path / "plain")


def test_a_folder_that_is_no_repository_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    with pytest.raises(EvidenceError, match="not a git repository"):
        find_commit("0" * 64, tmp_path / "plain")


def test_the_source_hash_depends_on_names_and_content_of_python_files_only(tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "cli" / "b.py").write_text("2")
    digest, files = source_hash(tmp_path)
    assert list(files) == ["a.py", "cli/b.py"]
    (tmp_path / "notes.txt").write_text("x")
    assert source_hash(tmp_path)[0] == digest
    (tmp_path / "cli" / "b.py").rename(tmp_path / "cli" / "c.py")
    assert source_hash(tmp_path)[0] != digest
    (tmp_path / "cli" / "c.py").rename(tmp_path / "cli" / "b.py")
    (tmp_path / "a.py").write_text("2")
    assert source_hash(tmp_path)[0] not in (digest, None)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils is not here")
def test_the_hash_of_this_package_is_the_one_the_shell_computes():
    package = Path(tunix_rt.__file__).parent
    shell = "find . -name '*.py' -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    by_hand = subprocess.run(["sh", "-c", shell], cwd=package, check=True, capture_output=True, text=True).stdout
    assert source_hash(package)[0] == by_hand.split()[0]


def test_a_token_that_a_library_says_reaches_neither_the_log_nor_the_result(tmp_path):
    secret = "hf_" + "a1B2c3D4e5" * 4
    (tmp_path / "run").mkdir()
    record = Record(run=RunDir(tmp_path / "run"), continued=False)
    with pytest.raises(TunixError), record.logged(), record.ended():
        logging.getLogger("tunix_rt").warning("asked with %s", secret)
        raise TunixError(f"the hub refused {secret}", fix="log in again")
    written = "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert "asked with" in written and "the hub refused" in written and secret not in written
