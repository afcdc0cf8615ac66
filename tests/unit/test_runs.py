"""`tunix-rt runs` tells what is in a run folder, also of a run that is under way, was killed, or was damaged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tests.tables import parametrize
from tunix_rt.cli.runs import read_run, runs
from tunix_rt.cli.views import text
from tunix_rt.errors import InputError
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.progress import duration
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.index import list_runs
from tunix_rt.scoring.score import judge, score_predictions
from tunix_rt.storage import to_plain, write_json, write_jsonl, write_text

PARTS = MemoryPlan(
    device="cpu", dtype="float32", parameters=1_234_567, rows=1, row_tokens=16, target_share=1.0, phases=(),
    peak_phase="steps", peak_bytes=3 * 2**30, least_bytes=3 * 2**30, context_bytes=0, eval_rows=1, generation_rows=1,
)  # fmt: skip
MEMORY = {
    "schema": "tunix-rt/memory/2", "status": "completed", "predicted_bytes": 3 * 2**30,
    "predicted_parts": to_plain(PARTS), "measured_bytes": 2 * 2**30, "measured_as": "resident memory", "error": 0.5, "phases": {},
}  # fmt: skip
RIGHT, WRONG = "<reasoning>a</reasoning><answer>5</answer>", "6"


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Durability is tested elsewhere; here it would be most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def scores(when, right):
    outputs = [RIGHT] * right + [WRONG] * (4 - right)
    return score_predictions(
        [judge(id=str(n), prompt="?", expected="5", output=output) for n, output in enumerate(outputs)], when
    )


def step_line(step, loss):
    return {
        "step": step, "loss": loss, "loss_hex": loss.hex(), "lr": 1e-3, "grad_norm": 1.0, "target_tokens": 8,
        "tokens": 16, "seconds": 0.5, "peak_bytes": 0, "batch": "b" * 64, "prev": "c" * 64,
    }  # fmt: skip


def heldout_line(step, loss):
    return {"step": step, "loss": loss, "loss_hex": loss.hex(), "target_tokens": 8}


def make_unfinished(root, losses=(3.0, 2.0, 1.0)):
    run = RunDir(root)
    write_text(run.config, "model:\n  model_name_or_path: tiny-gemma3\ndata:\n  dataset: dev-reasoning-v2\n")
    run.precommit.write_bytes((ROOT / "submission_runs" / "m39_cpu_v1" / "precommit.json").read_bytes())
    write_jsonl(run.metrics, [step_line(step, loss) for step, loss in enumerate(losses, start=1)])
    write_json(run.scores("before"), scores("before", right=1))
    return run


def make_finished(root, *, finished="2026-01-02T03:04:05+00:00", **changed):
    run = make_unfinished(root)
    write_json(run.scores("after"), scores("after", right=3))
    write_jsonl(run.heldout, [heldout_line(2, 2.5), heldout_line(3, 1.5)])
    write_json(run.memory, MEMORY)
    write_text(run.samples, "# Samples\n")
    write_text(run.final_model / "config.json", "{}")
    for step in (2, 3):
        (run.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    result = {
        "schema": "tunix-rt/result/1", "status": "completed", "exit_code": 0, "reason": "all steps taken",
        "started": "2026-01-01T00:00:00+00:00", "steps_completed": 3, "steps_planned": 3, "final_loss": 1.0,
        "device": "cpu", "parameters": 1_234_567, "seconds": 75.0, "finished": finished,
    }  # fmt: skip
    write_json(run.result, result | changed)
    return run


def invoke(*arguments):
    return CliRunner().invoke(runs, [str(argument) for argument in arguments])


def test_runs_lists_every_run_below_a_folder_newest_first(tmp_path):
    make_finished(tmp_path / "old", finished="2026-01-01T00:00:00+00:00")
    make_finished(tmp_path / "deep" / "er" / "new", finished="2026-01-03T00:00:00+00:00", status="failed")
    make_finished(tmp_path / "old" / "checkpoints" / "not-a-run-of-its-own")
    make_finished(tmp_path / ".hidden")
    listed = json.loads(invoke(tmp_path, "--json").stdout)
    assert [(run["folder"], run["status"]) for run in listed] == [
        (str(tmp_path / "deep" / "er" / "new"), "failed"),
        (str(tmp_path / "old"), "completed"),
    ]
    assert listed[1] == {
        "folder": str(tmp_path / "old"),
        "status": "completed",
        "model": "gpt2",
        "weights": "random",
        "evalset": "eval_v2",
        "questions": 100,
        "steps_completed": 3,
        "steps_planned": 3,
        "final_loss": 1.0,
        "accuracy_before": 0.25,
        "accuracy_after": 0.75,
        "lenient_before": 0.25,
        "lenient_after": 0.75,
        "tokens_per_second": 32.0,
        "predicted_bytes": 3 * 2**30,
        "measured_bytes": 2 * 2**30,
        "device": "cpu",
        "when": "2026-01-01T00:00:00+00:00",
        "is_bundle": False,
        "losses": [3.0, 2.0, 1.0],
        "damaged": [],
    }


def test_the_list_for_people_has_the_same_facts(tmp_path):
    make_finished(tmp_path / "a")
    shown = invoke(tmp_path).stdout
    for fact in (
        f"in {tmp_path}",
        " a  ",
        "completed",
        "3/3",
        "1.000",
        "25->75",
        "cpu",
        text.short_date("2026-01-02T03:04:05+00:00"),
    ):
        assert fact in shown


def test_runs_alone_looks_below_runs_and_a_fresh_clone_has_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = invoke()
    assert (empty.exit_code, empty.stdout, empty.stderr) == (0, "", "no runs below runs\n")
    assert json.loads(invoke("--json").stdout) == []
    make_finished(tmp_path / "runs" / "first")
    assert "completed" in invoke().stdout
    assert json.loads(invoke("--json").stdout)[0]["folder"] == "runs/first"


def test_a_folder_that_was_named_and_is_not_there_is_an_error(tmp_path):
    done = invoke(tmp_path / "nowhere")
    assert isinstance(done.exception, InputError) and "nowhere" in done.exception.problem


def test_an_unfinished_run_is_running_or_interrupted_and_shows_how_far_it_got(tmp_path):
    run = make_unfinished(tmp_path / "a")
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 4, "lo')
    (listed,) = list_runs(tmp_path)
    assert (listed.status, listed.steps_completed, listed.final_loss) == ("running or interrupted", 3, None)
    assert (listed.accuracy_before, listed.accuracy_after, listed.damaged) == (0.25, None, ())
    shown = invoke("show", tmp_path / "a").stdout
    assert "running or interrupted" in shown
    assert "the last line of metrics.jsonl is torn" in shown
    assert "25->?" in invoke(tmp_path).stdout


def test_show_tells_everything_about_a_run(tmp_path):
    run = make_finished(tmp_path / "a")
    shown = "\n".join(line.rstrip() for line in invoke("show", run.root).stdout.split("\n"))
    for fact in (
        "completed",
        "tiny-gemma3",
        "1,234,567",
        "dev-reasoning-v2",
        "1 min 15 s",
        "█▅▁\n",
        "3.0000 at step 1, 1.0000 at step 3, lowest 1.0000 at step 3",
        "2.5000 at step 2, 1.5000 at step 3",
        "predicted 3.00 GiB, measured 2.00 GiB, prediction +50.0 %",
        "accuracy, lenient",
        "+50.0",
        str(run.final_model),
        str(run.checkpoints / "step-000003"),
    ):
        assert fact in shown


def test_show_speaks_json_with_the_same_facts(tmp_path):
    run = make_finished(tmp_path / "a")
    told = json.loads(invoke("show", run.root, "--json").stdout)
    assert told["summary"]["status"] == "completed"
    assert told["losses"] == [[1, 3.0], [2, 2.0], [3, 1.0]]
    assert told["heldout"] == [[2, 2.5], [3, 1.5]]
    assert told["table"][0] == {
        "measure": "accuracy, strict",
        "items": 4,
        "before": 0.25,
        "after": 0.75,
        "gain_points": 50.0,
    }
    assert (told["predicted_bytes"], told["measured_bytes"]) == (3 * 2**30, 2 * 2**30)
    assert told["reason"] == "all steps taken" and told["summary"]["damaged"] == []


def test_show_tells_where_a_run_went_on_what_it_passed_over_and_which_checkpoint_is_best(tmp_path):
    skipped = [{"name": "step-000003", "problems": ["changed: model.safetensors", "missing: state.json"]}]
    told = {"resumed_from": 2, "best_step": 2, "best_heldout_loss": 1.25, "skipped_checkpoints": skipped}
    make_finished(tmp_path / "a", **told)
    shown = invoke("show", tmp_path / "a").stdout
    for fact in (
        "after step 2",
        "step-000003: changed: model.safetensors, missing: state.json",
        "step 2, held-out loss 1.2500",
    ):
        assert fact in shown
    as_json = json.loads(invoke("show", tmp_path / "a", "--json").stdout)
    assert (as_json["resumed_from"], as_json["best_step"], as_json["best_heldout_loss"]) == (2, 2, 1.25)
    assert as_json["skipped_checkpoints"] == ["step-000003: changed: model.safetensors, missing: state.json"]
    make_finished(tmp_path / "b", resumed_from=0)
    shown = invoke("show", tmp_path / "b").stdout
    assert not any(word in shown for word in ("continued", "passed over", "best checkpoint"))


@pytest.mark.parametrize("odd", ["x", {"name": 1}, [None, 3, {"problems": 4}, {"name": "s", "problems": {}}], -1.5])
@pytest.mark.parametrize("key", ["resumed_from", "best_step", "best_heldout_loss", "skipped_checkpoints"])
def test_a_value_that_no_run_writes_names_the_result_damaged_and_the_rest_is_shown(tmp_path, key, odd):
    make_finished(tmp_path / "a", **{key: odd})
    done = json.loads(invoke("show", tmp_path / "a", "--json").stdout)
    assert done["summary"]["damaged"] == ["result.json"] and done["summary"]["status"] == "unknown"
    assert any(note.startswith(f"result.json: {key}") for note in done["notes"])
    assert done["losses"][-1] == [3, 1.0] and done["model"] == "tiny-gemma3"


def test_show_finds_a_run_by_its_name_below_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_finished(tmp_path / "runs" / "first")
    assert "completed" in invoke("show", "first").stdout
    missing = invoke("show", "second")
    assert isinstance(missing.exception, InputError) and "runs/first" in missing.exception.fix


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "config.yaml", "memory.json", "eval/before.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\n", b"{\n", b"[]\n", b"null\n", b"[" * 100_000 + b"\n", b'{"status": 5, "step": "x"}\n', b"9" * 5000],
    ids=["empty", "not text", "torn", "list", "null", "deep", "odd values", "huge number"],
)
def test_no_damaged_file_stops_the_list_or_the_page_of_a_run(tmp_path, name, content):
    run = make_finished(tmp_path / "a")
    (run.root / name).write_bytes(content)
    for arguments in ((tmp_path,), (tmp_path, "--json"), ("show", run.root), ("show", run.root, "--json")):
        done = invoke(*arguments)
        assert done.exit_code == 0, done.exception


def test_a_damaged_file_is_named_in_the_list_and_on_the_page(tmp_path):
    run = make_finished(tmp_path / "a")
    run.result.write_text("{")
    run.config.write_text("a: [")
    assert read_run(run.root).summary.damaged == ("config.yaml", "result.json")
    assert "corrupt: result.json" in invoke(tmp_path).stdout
    shown = invoke("show", run.root).stdout
    assert "note: result.json: not JSON" in shown and "note: config.yaml" in shown
    assert "1.0000 at step 3" in shown, "the rest is shown"


def test_a_line_in_the_middle_of_the_metrics_that_cannot_be_read_is_named(tmp_path):
    run = make_finished(tmp_path / "a")
    lines = run.metrics.read_text()
    assert '"loss": 2.0' in lines
    run.metrics.write_text(lines.replace('"loss": 2.0', '"loss": NaN'))
    detail = read_run(run.root)
    assert detail.losses == [(1, 3.0)], "the lines before it are shown"
    assert detail.notes == ("metrics.jsonl:2: not JSON: NaN is not a number",)


def test_words_from_a_run_folder_cannot_steer_the_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "\x1b[31mred\x07 [bold]x[bold] :smile:"
    make_finished(tmp_path / "runs" / words, reason=f"because {words}")
    for shown in (invoke().stdout, invoke("show", words).stdout):
        assert "\x1b" not in shown and "\x07" not in shown
        assert "?[31mred? [bold]x[bold] :smile:" in shown
    assert "because ?[31mred? [bold]x[bold] :smile:" in shown


def test_a_device_that_no_run_has_is_named_and_steers_no_terminal(tmp_path):
    make_finished(tmp_path / "a", device="\x1b[31mred\x07")
    for shown in (invoke(tmp_path).stdout, invoke("show", tmp_path / "a").stdout):
        assert "\x1b" not in shown and "\x07" not in shown and "result.json" in shown


def test_looking_at_a_run_changes_nothing_in_it(tmp_path):
    run = make_finished(tmp_path / "a")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.root.rglob("*")}
    invoke(tmp_path)
    invoke("show", run.root)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.root.rglob("*")} == before


@parametrize("values", "drawn")
def test_a_sparkline_goes_from_lowest_to_highest(values, drawn):
    assert text.sparkline(values) == drawn


def test_a_long_curve_is_drawn_by_means_and_keeps_its_ends():
    drawn = text.sparkline([float(value) for value in range(1000, 0, -1)], columns=8)
    assert drawn == "█▇▆▅▄▃▂▁"


@parametrize("seconds", "said")
def test_durations_are_said_as_a_person_says_them(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("size", "said"), [(0, "0.00 GiB"), (2**30, "1.00 GiB"), (2**20, "0.0010 GiB"), (34 * 2**30, "34.00 GiB")]
)
def test_bytes_are_said_in_gib(size, said):
    assert text.gib(size) == said


def test_the_commands_can_be_listed_without_loading_anything_heavy():
    code = (
        "import sys, tunix_rt.cli.runs, tunix_rt.cli.evidence, tunix_rt.cli.views.text\n"
        "heavy = {'pydantic', 'numpy', 'rich', 'yaml', 'torch', 'transformers', 'jax', 'filelock'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="no list of locks on this system")
def test_a_run_whose_folder_a_process_holds_is_running_and_looking_takes_no_lock(tmp_path):
    run = make_unfinished(tmp_path / "a")
    with run.locked():
        assert [one.status for one in list_runs(tmp_path)] == ["running"]
    assert [one.status for one in list_runs(tmp_path)] == ["running or interrupted"]
    with run.locked():  # nothing that looked still holds it
        make_finished(tmp_path / "b")
        assert {one.status for one in list_runs(tmp_path)} == {"running", "completed"}
