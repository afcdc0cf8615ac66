"""A run folder survives a crash at any moment, and a checkpoint that differs from its manifest in any way is found."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tunix_rt import storage
from tunix_rt.errors import StorageError, TunixError
from tunix_rt.runs import folder as run_folder

# --- single files ----------------------------------------------------------------------------------------------------


def test_a_write_replaces_the_file_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "er" / "result.json"
    storage.write_text(path, "old, and much longer than the new text\n")
    storage.write_text(path, "new\n")
    assert path.read_bytes() == b"new\n"
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch, call):
    path = tmp_path / "result.json"
    storage.write_text(path, "old\n")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(call, fail)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        storage.write_text(path, "new\n")
    assert caught.value.exit_code == 8
    assert str(path) in caught.value.problem
    assert path.read_text() == "old\n"


def test_the_content_is_on_the_disk_before_the_name_moves_and_the_folder_after(tmp_path, monkeypatch):
    order = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor):
        order.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "content")
        real_fsync(descriptor)

    def replace(self, target):
        order.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr("os.fsync", fsync)
    monkeypatch.setattr("pathlib.Path.replace", replace)
    storage.write_text(tmp_path / "plan.json", "{}\n")
    assert order == ["content", "rename", "folder"]


def test_a_folder_that_cannot_be_made_is_a_storage_error_that_names_it(tmp_path):
    (tmp_path / "runs").write_text("a file where a folder should be")
    with pytest.raises(StorageError, match="runs"):
        storage.write_text(tmp_path / "runs" / "result.json", "{}\n")


LIMITED = """
import sys
from pathlib import Path
from tunix_rt.errors import TunixError
try:
    %s
except TunixError as error:
    print(error)
    raise SystemExit(error.exit_code)
"""


def run_limited(statement: str, path: Path, *, file_bytes: int) -> subprocess.CompletedProcess[str]:
    """Run `statement` on `path` (`sys.argv[1]`) in a process that may write no file longer than `file_bytes`: a full disk."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED % statement, str(path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_full_disk_ends_a_write_with_exit_8_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old\n")
    write = 'from tunix_rt.storage import write_text; write_text(Path(sys.argv[1]), "x" * 50_000)'
    ended = run_limited(write, path, file_bytes=10_000)
    assert ended.returncode == 8, ended.stderr
    assert "File too large" in ended.stdout
    assert path.read_text() == "old\n"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_not_written(tmp_path, number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.write_json(tmp_path / "memory.json", {"loss": [1.0, number]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.write_jsonl(tmp_path / "metrics.jsonl", [{"loss": number}])
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True, slots=True)
class Fact:
    path: Path
    pair: tuple[int, int]


def test_dataclasses_tuples_and_paths_are_written_plainly_with_sorted_keys(tmp_path):
    storage.write_json(tmp_path / "x.json", {"b": Fact(Path("a/b"), (1, 2)), "a": "é"})
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == (
        '{\n  "a": "é",\n  "b": {\n    "pair": [\n      1,\n      2\n    ],\n    "path": "a/b"\n  }\n}\n'
    )
    assert storage.to_plain({1: (Path("x"),)}) == {"1": ["x"]}


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe", b"[" * 100_000])
def test_a_missing_or_torn_json_file_is_an_error_that_names_it(tmp_path, content):
    path = tmp_path / "result.json"
    with pytest.raises(TunixError, match=r"result\.json is missing"):
        storage.read_json(path)
    path.write_bytes(content)
    with pytest.raises(TunixError, match=r"result\.json cannot be read"):
        storage.read_json(path)


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert storage.sha256_file(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()
    with pytest.raises(StorageError):
        storage.sha256_file(tmp_path / "missing")


def test_only_a_folder_with_traces_of_a_run_holds_one(tmp_path):
    run = run_folder.RunDir(tmp_path)
    assert not run.holds_a_run()
    storage.write_text(run.log, "words\n")
    assert not run.holds_a_run()
    storage.write_json(run.precommit, {})
    assert run.holds_a_run()


# --- room on the disk -------------------------------------------------------------------------------------------------


def test_a_volume_without_room_is_a_storage_error_with_both_numbers(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    storage.require_space(tmp_path / "not" / "yet", free // 2, what="the run")
    with pytest.raises(StorageError) as caught:
        storage.require_space(tmp_path / "not" / "yet", 2 * free, what="the run")
    assert caught.value.exit_code == 8
    said = re.search(r"^(.*): the run needs ([\d,]+) MiB on disk, ([\d,]+) MiB are free$", caught.value.problem)
    assert said[1] == str(tmp_path), "the volume of the nearest folder there is"
    assert int(said[2].replace(",", "")) == pytest.approx(2 * free / 2**20, rel=0.01)
    assert int(said[3].replace(",", "")) == pytest.approx(free / 2**20, rel=0.05)


def test_the_advice_names_the_number_of_checkpoints_only_where_it_can_be_lowered(tmp_path):
    for keep, named in ((2, False), (3, True)):
        with pytest.raises(StorageError) as caught:
            storage.require_space(tmp_path, 2 * shutil.disk_usage(tmp_path).free, what="the run", keep=keep)
        assert ("training.save_total_limit" in caught.value.fix) == named


def test_the_bytes_of_a_folder_are_those_of_all_its_files(tmp_path):
    assert storage.bytes_below(tmp_path / "missing") == 0
    for name in ("a", "b/c"):
        storage.write_text(tmp_path / name, "x" * 1000)
    assert storage.bytes_below(tmp_path) == 2000


# --- the lock --------------------------------------------------------------------------------------------------------

HOLD = """
    import sys, time
    from pathlib import Path
    from tunix_rt.runs.folder import RunDir
    with RunDir(Path(sys.argv[1])).locked():
        print("held", flush=True)
        time.sleep(60)
    """


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the run folder."""
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_cannot_take_a_run_folder_until_the_first_is_killed(tmp_path, holder):
    run = run_folder.RunDir(tmp_path)
    with pytest.raises(StorageError, match="in use by another tunix-rt") as caught, run.locked():
        pass
    assert caught.value.exit_code == 8
    holder.kill()
    holder.wait()
    assert run.lock_file.exists(), "the file stays, the lock does not"
    with run.locked():
        pass


def test_the_lock_is_let_go_when_the_run_fails(tmp_path):
    run = run_folder.RunDir(tmp_path / "new")
    with pytest.raises(RuntimeError), run.locked():
        raise RuntimeError
    with run.locked():
        pass


# --- links -----------------------------------------------------------------------------------------------------------

PLACES = (
    "training_log.txt", "eval", "checkpoints", "checkpoints/step-000001", "checkpoints/step-000001/model.safetensors",
    "checkpoints/.staged-step-000002", "final_model/config.json", "profile/profile.md", "tensorboard/events", "eval/after.json",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_with_a_link_where_a_run_writes_is_refused_by_name(tmp_path, place):
    run = run_folder.RunDir(tmp_path / "run")
    (run.root / place).parent.mkdir(parents=True)
    run.refuse_links()
    (tmp_path / "elsewhere").mkdir()
    (run.root / place).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=f"{place} is a symbolic link") as caught:
        run.refuse_links()
    assert caught.value.exit_code == 8 and "another --output" in caught.value.fix


def test_a_special_file_is_refused_and_never_opened(tmp_path):
    os.mkfifo(tmp_path / "result.json")
    with pytest.raises(StorageError, match=r"result\.json is a special file"):
        run_folder.RunDir(tmp_path).refuse_links()


def test_a_folder_that_is_not_there_or_reached_through_a_link_is_fine(tmp_path):
    run_folder.RunDir(tmp_path / "new").refuse_links()
    (tmp_path / "real" / "notes").mkdir(parents=True)
    (tmp_path / "real" / "notes" / "mine").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    run_folder.RunDir(tmp_path / "linked").refuse_links()


# --- checkpoints -----------------------------------------------------------------------------------------------------

FILES = {"model.safetensors": b"weights" * 100, "optimizer.safetensors": b"moments" * 100, "state.json": b"{}\n"}


def fill(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_bytes(content)


@pytest.fixture
def checkpoint(tmp_path, no_waiting_for_the_disk):
    return run_folder.publish_checkpoint(run_folder.stage_checkpoint(tmp_path, 50, fill))


def rewrite_manifest(checkpoint: Path, **changed: object) -> None:
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest | changed))


def test_a_committed_checkpoint_verifies_and_nothing_staged_is_left(tmp_path, checkpoint):
    assert checkpoint == tmp_path / "step-000050"
    assert run_folder.checkpoint_problems(checkpoint) == []
    assert [p.name for p in tmp_path.iterdir()] == ["step-000050"]
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    assert manifest["step"] == 50
    assert manifest["files"]["state.json"] == {"sha256": hashlib.sha256(b"{}\n").hexdigest(), "bytes": 3}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_flipped_bit_in_any_file_is_found(checkpoint, name, place):
    content = bytearray((checkpoint / name).read_bytes())
    content[place] ^= 1
    (checkpoint / name).write_bytes(content)
    assert run_folder.checkpoint_problems(checkpoint) == [f"changed: {name}"]


def swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES = {
    "changed: {0}": [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:1]),
        lambda path: path.write_bytes(b""),
    ],
    "missing: {0}": [Path.unlink],
    "not in the manifest: x.bin": [lambda path: path.with_name("x.bin").write_bytes(b"")],
    "MANIFEST.json is missing": [lambda path: path.with_name("MANIFEST.json").unlink()],
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("problem", "damage"), [(problem, one) for problem, some in DAMAGES.items() for one in some])
def test_each_kind_of_damage_to_any_file_is_named(checkpoint, name, problem, damage):
    damage(checkpoint / name)
    assert run_folder.checkpoint_problems(checkpoint) == [problem.format(name)]


def test_swapped_names_are_found(checkpoint):
    swap(checkpoint / "model.safetensors", checkpoint / "optimizer.safetensors")
    assert run_folder.checkpoint_problems(checkpoint) == [
        "changed: model.safetensors",
        "changed: optimizer.safetensors",
    ]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"step": 50}', '{"step": 50, "files": []}', "[" * 10**5]
)
def test_a_damaged_manifest_is_found(checkpoint, content):
    (checkpoint / "MANIFEST.json").write_text(content)
    assert run_folder.checkpoint_problems(checkpoint)


def test_the_manifest_of_another_step_and_a_renamed_checkpoint_are_found(tmp_path, checkpoint):
    later = run_folder.publish_checkpoint(run_folder.stage_checkpoint(tmp_path, 51, fill))
    (checkpoint / "MANIFEST.json").write_bytes((later / "MANIFEST.json").read_bytes())
    assert run_folder.checkpoint_problems(checkpoint) == ["the manifest is of step 51"]
    assert run_folder.checkpoint_problems(later.rename(tmp_path / "step-000099")) == ["the manifest is of step 51"]


@pytest.mark.parametrize("step", ["x", None, [50], {}, True, -1, 49.9, float("inf"), float("nan")])
def test_a_manifest_whose_step_is_no_count_is_found(checkpoint, step):
    rewrite_manifest(checkpoint, step=step)
    assert run_folder.checkpoint_problems(checkpoint)


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_anywhere_in_the_manifest_is_found(checkpoint, bit):
    path = checkpoint / "MANIFEST.json"
    written = path.read_bytes()
    for place in range(len(written)):
        path.write_bytes(written[:place] + bytes([written[place] ^ 1 << bit]) + written[place + 1 :])
        assert run_folder.checkpoint_problems(checkpoint), f"byte {place}"
    path.write_bytes(written)
    assert run_folder.checkpoint_problems(checkpoint) == []


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_the_place_of_a_file_is_found(checkpoint, name):
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    assert any(name in problem for problem in run_folder.checkpoint_problems(checkpoint))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no file here fails when it is read")
@pytest.mark.parametrize("name", ["MANIFEST.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_no_damage_but_a_storage_error(checkpoint, name):
    """The memory of this process is a regular file whose first byte is an input/output error."""
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to("/proc/self/mem")
    with pytest.raises(StorageError, match=f"{name}: Input/output error"):
        run_folder.checkpoint_problems(checkpoint)


def test_the_files_of_a_checkpoint_are_on_the_disk_after_the_folder_it_lies_in_and_before_its_name(
    tmp_path, monkeypatch
):
    synced, real = [], os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    run_folder.publish_checkpoint(run_folder.stage_checkpoint(tmp_path / "checkpoints", 7, fill))
    assert synced.pop(0) == str(tmp_path), "the first checkpoint makes the folder it lies in"
    staged = str(tmp_path / "checkpoints" / ".staged-step-000007")
    assert {f"{staged}/{name}" for name in FILES} <= set(synced[:3])
    assert synced[-1] == str(tmp_path / "checkpoints"), "the folder that holds the new name comes last"


@pytest.mark.parametrize("moment", ["writing", "syncing", "renaming"])
def test_a_commit_that_fails_leaves_only_what_was_committed_before(tmp_path, checkpoint, monkeypatch, moment):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if moment == "syncing":
        monkeypatch.setattr("os.fsync", fail)
    if moment == "renaming":
        monkeypatch.setattr("pathlib.Path.rename", fail)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        run_folder.publish_checkpoint(run_folder.stage_checkpoint(tmp_path, 51, fail if moment == "writing" else fill))
    assert caught.value.exit_code == 8
    assert run_folder.list_checkpoints(tmp_path) == [checkpoint]
    assert run_folder.checkpoint_problems(checkpoint) == []
    if moment != "renaming":
        assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name], "what is half-made holds no space"
    monkeypatch.undo()
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    later = run_folder.publish_checkpoint(run_folder.stage_checkpoint(tmp_path, 52, fill))
    assert sorted(p.name for p in tmp_path.iterdir()) == [checkpoint.name, later.name], "the leftover is gone"


def test_files_that_other_ranks_hashed_are_not_read_and_one_that_is_not_here_is_not_committed(tmp_path):
    facts = {"sha256": "d" * 64, "bytes": 4}

    def write(folder: Path) -> dict[str, dict[str, object]]:
        (folder / "model-00001-of-00002.safetensors").write_bytes(b"rows")
        return {f"model-{rank:05d}-of-00002.safetensors": facts for rank in present}

    present = [1]
    staged = run_folder.stage_checkpoint(tmp_path, 1, write)
    files = json.loads((staged / "MANIFEST.json").read_text())["files"]
    assert files == {"model-00001-of-00002.safetensors": facts}
    present.append(2)
    with pytest.raises(
        StorageError, match=r"model-00002-of-00002\.safetensors has 0 bytes, its rank wrote 4"
    ) as caught:
        run_folder.stage_checkpoint(tmp_path, 2, write)
    assert "all hosts share" in caught.value.fix and not [*tmp_path.glob(".staged-step-000002*")]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path, checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"")
    run_folder.publish_checkpoint(run_folder.stage_checkpoint(tmp_path, 50, fill))
    assert run_folder.checkpoint_problems(checkpoint) == []


def make_empty(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / run_folder.checkpoint_name(step)).mkdir(parents=True)


def test_pruning_keeps_the_newest_by_step_whatever_the_clock_says(tmp_path):
    make_empty(tmp_path, 100, 50, 150, 200)
    for age, step in enumerate([200, 150, 100, 50]):  # the newest step looks oldest
        os.utime(tmp_path / run_folder.checkpoint_name(step), (age, age))
    run_folder.prune_checkpoints(tmp_path, keep=2, newest=200, previous=150)
    assert [p.name for p in run_folder.list_checkpoints(tmp_path)] == ["step-000200", "step-000150"]


def test_steps_of_seven_digits_come_after_those_of_six(tmp_path):
    make_empty(tmp_path, 999_950, 1_000_000, 1_000_050)
    assert [p.name for p in run_folder.list_checkpoints(tmp_path)] == ["step-1000050", "step-1000000", "step-999950"]
    run_folder.prune_checkpoints(tmp_path, keep=2, newest=1_000_050, previous=1_000_000)
    assert [p.name for p in run_folder.list_checkpoints(tmp_path)] == ["step-1000050", "step-1000000"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_checkpoint_that_was_passed_over_does_not_count_whatever_its_number(tmp_path, keep):
    """250, 300 and 350 were damaged, so the run went on from 200 and has just saved 270."""
    make_empty(tmp_path, 100, 150, 200, 250, 270, 300, 350)
    run_folder.prune_checkpoints(tmp_path, keep=keep, newest=270, previous=200)
    assert [p.name for p in run_folder.list_checkpoints(tmp_path)] == ["step-000270", "step-000200", "step-000150"][
        :keep
    ]


@pytest.mark.parametrize(
    ("best", "kept"), [(None, [200, 150]), (200, [200, 150]), (50, [200, 150, 50]), (120, [200, 150])]
)
def test_the_best_is_kept_besides_the_newest_and_one_that_is_not_there_does_not_matter(tmp_path, best, kept):
    make_empty(tmp_path, 50, 100, 150, 200)
    run_folder.prune_checkpoints(tmp_path, keep=2, newest=200, previous=150, best=best)
    assert [run_folder.checkpoint_step(path) for path in run_folder.list_checkpoints(tmp_path)] == kept


def test_a_checkpoint_goes_in_one_move_and_what_a_crash_leaves_of_it_goes_with_the_next(tmp_path, monkeypatch):
    """Half a folder under the name of a checkpoint would have to be told from one that is damaged."""
    make_empty(tmp_path, 50, 100, 150)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_folder.prune_checkpoints(tmp_path, keep=2, newest=150, previous=100)
    assert [run_folder.checkpoint_step(path) for path in run_folder.list_checkpoints(tmp_path)] == [150, 100]
    assert (tmp_path / ".step-000050.staged").is_dir()
    run_folder.publish_checkpoint(run_folder.stage_checkpoint(tmp_path, 200, fill))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000100", "step-000150", "step-000200"]


def test_a_folder_that_a_person_put_beside_the_checkpoints_is_neither_counted_nor_pruned(tmp_path):
    make_empty(tmp_path, 50, 100)
    (tmp_path / "step-000100-copy").mkdir()
    (tmp_path / "step-best").mkdir()
    run_folder.prune_checkpoints(tmp_path, keep=2, newest=100, previous=50)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000050", "step-000100", "step-000100-copy", "step-best"]


def test_a_folder_without_checkpoints_lists_none(tmp_path):
    assert run_folder.list_checkpoints(tmp_path / "checkpoints") == []
