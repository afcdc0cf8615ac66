"""What disks, people and other programs do to a run folder: a run goes on exactly, or says what is wrong and the way out."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT, SHIPPED
from tests.integrity import list_problems
from tests.program import environment, in_process, refused
from tunix_rt import storage
from tunix_rt.engines.torch import save as torch_save
from tunix_rt.engines.torch import tensor_files
from tunix_rt.errors import InputError, StorageError
from tunix_rt.ranks import Part
from tunix_rt.runs import checksums, folder
from tunix_rt.runs.folder import RunDir, list_checkpoints

STEPS = 6
SETTINGS = [
    "training.save_steps=2", "training.eval_steps=3", "data.max_length=128", "data.on_overflow=drop",
    "training.per_device_train_batch_size=1", "evaluation.max_new_tokens=4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_reload(monkeypatch):
    """A fresh process that loads the final model is a promise of its own."""
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    rows = (ROOT / "datasets/dev-reasoning-v2/dataset.jsonl").read_text().splitlines(keepends=True)[:40]
    data = tmp_path_factory.mktemp("faults") / "rows.jsonl"
    data.write_text("".join(rows))
    told = ["train", "smoke_tiny", "--device", "cpu", "--data", data, "--max-steps", STEPS]
    return [*told, *(word for setting in SETTINGS for word in ("--set", setting))]


@pytest.fixture(scope="module")
def train(words):
    return lambda run, *more: in_process(*words, "--output", run.root, *more)


@pytest.fixture(scope="module")
def once(train, tmp_path_factory):
    """A finished run, and one that stopped after step 5 with checkpoints of steps 4 and 5."""
    place = tmp_path_factory.mktemp("once")
    finished, stopped = RunDir(place / "finished"), RunDir(place / "stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
        done = train(finished)
        assert done.returncode == 0, done.stderr
        assert train(stopped, "--stop-after", "5").returncode == 7
    return finished, stopped


@pytest.fixture
def stopped(once, tmp_path):
    return RunDir(shutil.copytree(once[1].root, tmp_path / "run"))


@pytest.fixture
def killed(stopped):
    """As after kill -9: without an ending."""
    stopped.result.unlink()
    stopped.hashes.unlink()
    return stopped


def weights(run: RunDir) -> bytes:
    return (run.final_model / "model.safetensors").read_bytes()


def losses(run: RunDir) -> list[str]:
    return [json.loads(line)["loss_hex"] for line in run.metrics.read_bytes().splitlines()]


def content(run: RunDir) -> dict[str, bytes]:
    paths = (path for path in run.root.rglob("*") if path.is_file() and not path.is_symlink() and path.name != ".lock")
    return {str(path.relative_to(run.root)): path.read_bytes() for path in paths}


def went_on(done: subprocess.CompletedProcess[str], run: RunDir, finished: RunDir) -> None:
    """To the same end as the run that nothing happened to, with evidence that verifies."""
    assert done.returncode == 0, done.stderr
    assert weights(run) == weights(finished) and losses(run) == losses(finished)
    assert list_problems(run.root) == []


# --- evidence and the checkpoint it belongs to ------------------------------------------------------------------------


def test_all_that_was_measured_is_on_the_disk_before_the_checkpoint_after_it(train, tmp_path, monkeypatch):
    """What a power cut leaves is the bytes of the last fsync: here, each file as it was then."""
    run, synced, at_commit = RunDir(tmp_path / "run"), {}, {}
    real, publish = os.fsync, folder.publish_folder

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path] = path.read_bytes() if path.is_file() else b""
        real(descriptor)

    def committed(staged: Path, path: Path, **how: bool) -> None:
        at_commit[path.name] = {file.name: synced.get(file) for file in (run.metrics, run.heldout, run.log)}
        publish(staged, path, **how)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr(folder, "publish_folder", committed)
    assert train(run, "--stop-after", "4").returncode == 7
    assert len(at_commit["step-000004"]["metrics.jsonl"].splitlines()) == 4
    assert [json.loads(line)["step"] for line in at_commit["step-000004"]["heldout.jsonl"].splitlines()] == [0, 3]
    assert b"step 3  held-out loss" in at_commit["step-000004"]["training_log.txt"]
    assert {file: synced[file] for file in (run.metrics, run.heldout, run.log)} == {
        file: file.read_bytes() for file in (run.metrics, run.heldout, run.log)
    }, "and with the ending, what came after it"


@pytest.mark.parametrize("damage", ["lost", "other", "gone"])
def test_a_run_that_lost_a_measurement_of_an_earlier_step_is_refused_untouched(killed, train, damage):
    lines = killed.heldout.read_bytes().splitlines(keepends=True)
    changed = {
        "lost": lines[:1],
        "other": [lines[0], lines[1].replace(b'"loss": ', b'"loss": 1')],
    }
    killed.heldout.unlink()
    if damage != "gone":
        killed.heldout.write_bytes(b"".join(changed[damage]))
    before = content(killed)
    told = refused(train(killed, "--resume"), 1)
    assert f"{killed.heldout}: the held-out loss of step {0 if damage == 'gone' else 3} is missing or corrupt" in told
    assert "restore the file from a copy; or move step-000005 out of the run folder" in told
    assert content(killed) == before


def test_the_way_out_of_a_lost_measurement_works(killed, train, once, tmp_path):
    killed.heldout.write_bytes(killed.heldout.read_bytes().splitlines(keepends=True)[0])
    for step in ("step-000005", "step-000004"):
        assert f"or move {step} out of the run folder" in refused(train(killed, "--resume"), 1)
        (killed.checkpoints / step).rename(tmp_path / step)
    went_on(train(killed, "--resume"), killed, once[0])  # from step 3, where it is measured again


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_settings_that_lost_their_hash_are_written_again(killed, train, once, damage, caplog):
    before = killed.config.read_bytes()
    killed.config.unlink()
    if damage == "flipped":
        killed.config.write_bytes(b"\xff" + before[1:])
    done = train(killed, "--resume")
    assert "config.yaml is missing or corrupt; writing it again" in caplog.text
    assert killed.config.read_bytes() == before
    went_on(done, killed, once[0])


def test_records_that_cannot_be_made_again_are_refused_untouched(killed, train):
    entries = json.loads(killed.checkpoint_list.read_text())["checkpoints"]
    damages = {
        killed.checkpoint_list: json.dumps({"schema": "tunix-rt/checkpoints/1", "checkpoints": [5, *entries[1:]]}),
        killed.processes: '{"schema": "tunix-rt/processes/1", "processes": []}',
    }
    for path, text in damages.items():
        whole = path.read_bytes()
        path.write_text(text)
        before = content(killed)
        assert str(path) in refused(train(killed, "--resume"), 1)
        assert content(killed) == before
        path.write_bytes(whole)


def test_generations_before_training_that_are_not_those_scored_are_made_again(killed, train, once, caplog):
    killed.predictions("before").write_bytes(
        killed.predictions("before").read_bytes().replace(b'"strict": false', b'"strict": true')
    )
    done = train(killed, "--resume")
    assert "Generating again before training" in caplog.text
    went_on(done, killed, once[0])


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval/heldout.jsonl"])
def test_a_file_that_another_program_deletes_in_a_live_run_never_ends_in_exit_0(train, tmp_path, name, monkeypatch):
    from tunix_rt.train import loop

    run, show = RunDir(tmp_path / "run"), loop._show_step

    def meddle(context, step, pace):
        if step.step == 4:
            (run.root / name).unlink()
        show(context, step, pace)

    monkeypatch.setattr(loop, "_show_step", meddle)
    told = refused(train(run), 8 if name == "metrics.jsonl" else 6)
    assert name.rpartition("/")[2] in told or "held-out" in told
    result = json.loads(run.result.read_text())
    assert (result["status"], result["exit_code"]) == ("failed", 8 if name == "metrics.jsonl" else 6)


# --- checkpoints are not dropped ----------------------------------------------------------------------------------------


def test_a_checkpoints_folder_that_is_away_costs_no_step(stopped, train, once, tmp_path):
    away, before = tmp_path / "away", content(stopped)
    stopped.checkpoints.rename(away)
    for stand_in in ("nothing", "link", "file", "empty folder"):
        if stand_in == "link":
            stopped.checkpoints.symlink_to("/nowhere")
        elif stand_in == "file":
            stopped.checkpoints.write_text("")
        elif stand_in == "empty folder":
            stopped.checkpoints.mkdir()
        assert str(stopped.checkpoints) in refused(train(stopped, "--resume"), 8)
        if stand_in == "empty folder":
            stopped.checkpoints.rmdir()
        else:
            stopped.checkpoints.unlink(missing_ok=True)
    away.rename(stopped.checkpoints)
    assert content(stopped) == before
    went_on(train(stopped, "--resume"), stopped, once[0])


@pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
def test_valid_checkpoints_are_not_dropped_for_their_metrics(stopped, train, damage):
    lines = stopped.metrics.read_bytes().splitlines(keepends=True)
    stopped.metrics.unlink()
    if damage != "gone":
        stopped.metrics.write_bytes(b"".join(lines[:3]) if damage == "cut" else b"")
    before = content(stopped)
    told = refused(train(stopped, "--resume"), 1)
    assert f"{stopped.metrics}:{4 if damage == 'cut' else 1} is missing or breaks the hash chain" in told
    assert "the valid step-000005 was saved after it" in told and content(stopped) == before


def test_what_file_managers_leave_in_a_checkpoint_is_not_looked_at(stopped, train, once):
    for checkpoint in list_checkpoints(stopped.checkpoints):
        for name in (".DS_Store", "Thumbs.db", "._state.json"):
            (checkpoint / name).write_text("x")
    went_on(train(stopped, "--resume"), stopped, once[0])


def test_a_valid_checkpoint_with_a_stranger_s_file_is_kept_and_the_file_named(stopped, train, once):
    stranger = list_checkpoints(stopped.checkpoints)[0] / "notes.txt"
    stranger.write_text("mine")
    told = refused(train(stopped, "--resume"), 1)
    assert "step-000005 is valid, but has a file not in the manifest: notes.txt" in told
    stranger.unlink()
    went_on(train(stopped, "--resume"), stopped, once[0])


def test_a_run_without_a_valid_checkpoint_starts_at_0_only_when_told(stopped, train, once):
    for checkpoint in list_checkpoints(stopped.checkpoints):
        (checkpoint / "model.safetensors").unlink()
    before = content(stopped)
    told = refused(train(stopped, "--resume"), 8)
    assert "saved steps before, and now no checkpoint is valid" in told and content(stopped) == before
    shutil.rmtree(stopped.checkpoints)  # the way out that it names
    stopped.checkpoint_list.unlink()
    stopped.metrics.unlink()
    went_on(train(stopped, "--resume"), stopped, once[0])


# --- leftovers --------------------------------------------------------------------------------------------------------


def test_a_leftover_that_cannot_be_deleted_ends_no_run(stopped, train, once, monkeypatch, caplog):
    """An immutable file, the file of a reader on NFS, a failing disk."""
    left = stopped.checkpoints / ".staged-step-000006"
    shutil.copytree(list_checkpoints(stopped.checkpoints)[0], left)
    (stopped.root / ".staged-final_model").write_text("a file")
    real = shutil.rmtree

    def rmtree(path, *given, **named):
        if Path(path) == left or Path(path).name == ".step-000004.staged":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), "state.json")
        real(path, *given, **named)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    done = train(stopped, "--resume")
    assert f"{left} cannot be deleted (Operation not permitted)" in caplog.text
    assert left.is_dir() and (stopped.checkpoints / ".step-000004.staged").is_dir()
    went_on(done, stopped, once[0])


def test_an_error_of_a_nested_delete_names_the_whole_path(tmp_path):
    with (
        pytest.raises(StorageError, match=rf"{tmp_path}: state\.json: Operation not permitted"),
        storage.storage(tmp_path),
    ):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), "state.json")


# --- what is not a plain file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "eval/heldout.jsonl", "final_model"])
def test_a_link_is_refused_before_anything_is_trained(stopped, train, name, tmp_path):
    target = stopped.root / name
    if not target.exists():
        target.mkdir()
    target.rename(tmp_path / "elsewhere")
    target.symlink_to(tmp_path / "elsewhere")
    before = content(stopped)
    assert f"{target} is a symbolic link" in refused(train(stopped, "--resume"), 8)
    assert content(stopped) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "memory.json", "eval/before.json"])
@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused_at_the_start(stopped, train, name, kind):
    path = stopped.root / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    before = content(stopped)
    told = refused(train(stopped, "--resume"), 8)
    assert f"{path} is a {'special file' if kind == 'fifo' else 'folder, where a run writes a file'}" in told
    assert content(stopped) == before


def test_a_file_in_the_place_of_the_final_model_is_refused_at_the_start(stopped, train):
    stopped.final_model.write_text("")
    assert f"{stopped.final_model} is a file, where a run has a folder" in refused(train(stopped, "--resume"), 8)


# --- errors of the disk -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["precommit.json", "checkpoints/step-000005/state.json"])
def test_a_file_that_cannot_be_read_is_an_error_of_the_disk_not_of_the_file(stopped, train, name, monkeypatch):
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path == stopped.root / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    before = content(stopped)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    told = refused(train(stopped, "--resume"), 8)
    assert f"{stopped.root / name}: Input/output error" in told and "corrupt; run again" not in told
    monkeypatch.undo()
    assert content(stopped) == before


def test_a_folder_that_cannot_be_listed_when_the_run_is_hashed_is_an_error_of_the_disk(once, monkeypatch):
    real = os.scandir

    def scandir(path):
        if Path(path).name == "checkpoints":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(checksums.os, "scandir", scandir)
    with pytest.raises(StorageError, match=r"checkpoints: Permission denied") as caught:
        checksums.write_sums(once[0])
    assert "remove" not in caught.value.fix


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")])
def test_a_checkpoint_that_the_disk_does_not_give_is_an_error_of_the_disk(once, error, monkeypatch):
    def read(file, size):
        raise error

    monkeypatch.setattr(tensor_files, "_read", read)
    checkpoint = once[1].checkpoints / "step-000005"
    weights = load_file(checkpoint / torch_save.MODEL)
    with pytest.raises(StorageError, match=f"{checkpoint / torch_save.MODEL} cannot be read: ") as caught:
        torch_save._fill(
            checkpoint, torch_save.MODEL, weights, {n: Part.whole(tuple(t.shape)) for n, t in weights.items()}
        )
    assert "corrupt" not in str(caught.value)


def test_a_stat_that_fails_after_a_commit_ends_no_run(stopped, train, once, monkeypatch, caplog):
    real, calls = Path.is_dir, []

    def is_dir(path: Path) -> bool:
        saving = threading.current_thread().name == "tunix-rt-save"
        if path == stopped.checkpoints and saving and os.path.exists(path / "step-000006"):
            calls.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    done = train(stopped, "--resume")
    assert calls and "Older checkpoints could not be deleted" in caplog.text
    went_on(done, stopped, once[0])


def test_lines_and_lists_that_are_no_records_raise_nothing(stopped, train, once, monkeypatch):
    from tunix_rt.runs.ledger import list_checkpoint

    with stopped.metrics.open("ab") as file:
        file.write(b"[" * 200_000 + b"\n")
    went_on(train(stopped, "--resume"), stopped, once[0])
    stopped.checkpoint_list.write_text('{"checkpoints": [5]}')
    assert list(list_checkpoint(stopped, list_checkpoints(stopped.checkpoints)[0])) == ["6"]


def test_the_result_is_written_also_when_the_ending_meets_a_second_error(train, tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")

    def fails(*given, **named):
        raise StorageError("SHA256SUMS: Input/output error", fix="check the volume")

    monkeypatch.setattr("tunix_rt.runs.journal.write_sums", fails)
    assert train(run, "--stop-after", "2").returncode == 7
    assert json.loads(run.result.read_text())["status"] == "preempted"


# --- one process --------------------------------------------------------------------------------------------------------


def test_a_deleted_lock_file_does_not_give_the_folder_to_a_second_process(tmp_path):
    run = RunDir(tmp_path / "run")
    holds = (
        f"from pathlib import Path; from tunix_rt.runs.folder import RunDir; run = RunDir(Path({str(run.root)!r}))\n"
    )
    with run.locked():
        run.lock_file.unlink()
        tried = subprocess.run(
            [sys.executable, "-c", f"{holds}with run.locked(): pass"], env=environment(), capture_output=True, text=True
        )
    assert "in use by another tunix-rt" in tried.stderr
    with run.locked():
        pass


# --- models and settings ------------------------------------------------------------------------------------------------


def model_with(tmp_path: Path, **changes: object) -> Path:
    model = shutil.copytree(SHIPPED, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    return model


@pytest.mark.parametrize(
    "key, value",
    [("layer_types", ["full_attention"]), ("rms_norm_eps", "x"), ("hidden_size", None), ("sliding_window", None),
     ("pad_token_id", 10**400)],
)  # fmt: skip
def test_a_model_that_transformers_refuses_is_refused_by_name(tmp_path, words, key, value):
    model = model_with(tmp_path, **{key: value})
    told = refused(in_process(*words, "--model", model, "--output", tmp_path / "run"), 3)
    assert "config.json" in told
    assert key in told or key == "pad_token_id"  # of which torch says "padding_idx"


def test_a_plan_refuses_layers_that_do_not_fit_their_list_and_absurd_sizes_at_once(tmp_path):
    shortened = model_with(tmp_path, num_hidden_layers=1)
    told = refused(in_process("plan", "smoke_tiny", "--model", shortened, "--device", "cpu"), 3)
    assert "layers, num_hidden_layers is 1" in told
    absurd = model_with(tmp_path / "absurd", num_hidden_layers=10**9, layer_types=None)
    told = refused(in_process("plan", "smoke_tiny", "--model", absurd, "--device", "cpu"), 3)
    assert "num_hidden_layers is 1,000,000,000, at most 10,000 layers are planned" in told


def test_a_config_without_an_end_is_not_read(tmp_path):
    model = model_with(tmp_path)
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("/dev/zero")
    assert "config.json is no file" in refused(in_process("plan", "smoke_tiny", "--model", model, "--device", "cpu"), 3)
    (model / "config.json").unlink()
    with (model / "config.json").open("wb") as file:
        file.truncate(2**34)
    assert "at most 16 MiB" in refused(in_process("plan", "smoke_tiny", "--model", model, "--device", "cpu"), 3)


@pytest.mark.parametrize("written, value", [("1:30", 90), ("0x10", 16), ("010", 8), ("0b11", 3), ("1:30.5", 90.5)])
def test_a_number_that_yaml_reads_in_another_base_is_refused_with_the_number(tmp_path, words, written, value):
    told = refused(in_process(*words, "--output", tmp_path / "run", "--set", f"training.max_steps={written}"), 2)
    assert f"{written} is {value} in YAML: write {value}" in told
    assert not (tmp_path / "run").exists()


def test_scratch_folders_and_locks_of_what_failed_are_cleaned_up(tmp_path, monkeypatch):
    from tunix_rt.engines.gguf import convert

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    left, live = tmp_path / f"tunix-rt-reload-{gone.pid}-abc", tmp_path / f"tunix-rt-reload-{os.getpid()}-abc"
    for one in (left, live):
        one.mkdir()
        (one / "request.json").write_text("{}")
    with storage.scratch_folder("tunix-rt-reload-") as scratch:
        assert scratch.is_dir() and not left.exists() and live.exists()
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(InputError):
        convert(broken, tmp_path / "cache" / "made", with_weights=False)
    assert not [*(tmp_path / "cache").iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("series, every", [("syscalls", 7), ("damage", 9), ("live", 2), ("power", 1)])
def test_series_of_faults_lose_nothing(tmp_path, series, every):
    """All of them: python -m benchmarks.faults SERIES --into FOLDER"""
    if series == "syscalls" and shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    told = [sys.executable, "-m", "benchmarks.faults", series, "--every", str(every), "--into", str(tmp_path)]
    done = subprocess.run(told, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == 0
