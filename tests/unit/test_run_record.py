"""The one reader of a run folder: live, torn, foreign or hostile, it shows the valid part, names the rest, and never raises."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forging.edits import edited, lines_of, put, read
from tests.forging.sealing import reseal
from tests.program import ROOT
from tests.tables import parametrize
from tunix_rt.errors import InputError
from tunix_rt.evidence.examine import examine
from tunix_rt.runs import checksums as reading
from tunix_rt.runs.checksums import FEW, MOST_FILES, read_file
from tunix_rt.runs.record import MOST_PROSE, RunRecord, require_format
from tunix_rt.storage import json_text

REAL = sorted((ROOT / "submission_runs").glob("m39_cpu_v*"))[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The facts of a real run, in the form of a run folder."""
    left = ("README.md", "run_manifest.json", "bundle.json", "provenance.intoto.json", "run-SHA256SUMS", "SHA256SUMS")
    copy = Path(shutil.copytree(REAL, tmp_path / "run", ignore=shutil.ignore_patterns(*left)))
    with edited(copy / "precommit.json") as committed:
        committed |= {"format": 4, "numerics": committed.get("numerics", 1)}
    return copy


def problems(folder: Path) -> list[str]:
    return list(RunRecord(folder).schema_problems())


def test_a_real_run_has_no_problem_and_every_fact(folder: Path) -> None:
    record = RunRecord(folder)
    assert list(record.schema_problems()) == [] and not record.is_bundle and not record.is_evaluation
    assert record.commitment and record.config and record.result and record.doctor and record.plan and record.memory
    assert len(record.metrics) == record.result.steps_completed == record.metrics[-1].step
    assert record.rows and record.checkpoints and record.processes
    assert record.read("no-such-file.json") is None and record.predictions("never") == ()


# --- what is no plain file --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "result.json: a symbolic link"),
        (lambda path: path.symlink_to("/nowhere"), "result.json: a symbolic link"),
        (lambda path: path.symlink_to("/dev/zero"), "result.json: a symbolic link"),
        (os.mkfifo, "result.json: not a regular file"),
    ],
    ids=["link", "dangling link", "device", "pipe"],
)
def test_a_link_or_a_pipe_is_named_and_not_opened(folder: Path, make: Callable[[Path], object], problem: str) -> None:
    (folder / "result.json").unlink()
    make(folder / "result.json")
    record = RunRecord(folder)
    assert record.listing.problems == (problem,)
    assert record.result is None and record.commitment is not None


def test_a_folder_that_is_a_link_is_not_entered(folder: Path, tmp_path: Path) -> None:
    (folder / "profile").symlink_to(tmp_path)
    assert RunRecord(folder).listing.problems == ("profile: a symbolic link",)
    data, problem = read_file(folder, "profile/run/result.json", 10**6)
    assert data is None and "profile/run/result.json: cannot be read" in problem


@pytest.mark.parametrize("name", ["back\\slash", "new\nline", "esc\x1b[31m", "bidi\u202etxt", "\udcff"])
def test_a_name_that_is_not_plain_is_named_in_one_printable_line(folder: Path, name: str) -> None:
    (folder / name).write_text("x")
    (problem,) = RunRecord(folder).listing.problems
    assert problem.isprintable() and problem.isascii() and "file name" in problem


# --- a live folder ----------------------------------------------------------------------------------------------------


def test_a_live_folder_shows_its_valid_part(folder: Path) -> None:
    whole = lines_of(folder / "metrics.jsonl")
    data = (folder / "metrics.jsonl").read_bytes()
    put(folder / "metrics.jsonl", data[: data.rindex(b"\n", 0, -1) + 20])
    (folder / "result.json").unlink()
    record = RunRecord(folder)
    assert len(record.metrics) == len(whole) - 1 and record.result is None
    assert record.problems == {} and record.torn == ["metrics.jsonl"]
    assert list(record.schema_problems()) == ["metrics.jsonl: the last line is torn"], (
        "complete is what evidence requires"
    )


def test_files_of_trackers_and_file_managers_are_not_part_of_the_run(folder: Path) -> None:
    for name in (
        ".DS_Store",
        "eval/._after.json",
        "Thumbs.db",
        "tensorboard/events.1",
        "wandb/run/x",
        "mlruns/0/meta.yaml",
    ):
        put(folder / name, "x")
    (folder / "tensorboard" / "link").symlink_to("/dev/zero")
    record = RunRecord(folder)
    assert list(record.schema_problems()) == [] and record.listing.problems == ()
    assert record.listing.outside == (".DS_Store", "Thumbs.db", "mlruns", "tensorboard", "wandb", "eval/._after.json")


# --- what a file contains ---------------------------------------------------------------------------------------------


def test_an_unknown_file_an_unknown_key_and_a_key_given_twice_are_named(folder: Path) -> None:
    put(folder / "eval" / "verified.json", "{}")
    with edited(folder / "result.json") as result:
        result["verified"] = "L4"
    text = json_text(read(folder / "memory.json"))
    put(folder / "memory.json", text.replace("{", '{"status": "completed",', 1))
    assert set(problems(folder)) == {
        "result.json: verified: unknown key",
        "memory.json: not JSON: a key is given twice",
        "eval/verified.json: no run writes such a file",
    }


@pytest.mark.parametrize("content", [b"", b"\0", b"[]", b"{", b'{"a": NaN}', b"\xff\xfe", b"[" * 200_000])
@pytest.mark.parametrize("name", ["precommit.json", "metrics.jsonl", "config.yaml", "SHA256SUMS", "eval/after.json"])
def test_no_content_raises(folder: Path, name: str, content: bytes) -> None:
    put(folder / name, content)
    found = problems(folder)
    assert len(found) <= FEW + 1 and all(problem.isprintable() for problem in found)
    assert found or (content == b"" and name in ("metrics.jsonl", "SHA256SUMS"))
    assert examine(folder).level == "none"


def test_of_many_problems_in_one_file_fifty_are_listed(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result |= {f"key{number}": 1 for number in range(500)}
    assert 50 <= len(problems(folder)) <= FEW + 1
    examined = examine(folder)
    assert len(examined.findings) <= FEW + 1 and {one.check for one in examined.findings} == {"schema"}


def test_files_over_their_limits_are_not_read(folder: Path) -> None:
    for name, size in (("result.json", 10**10), ("training_log.txt", MOST_PROSE + 1), ("config.yaml", 10**10)):
        (folder / name).unlink(missing_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(size)
    found = problems(folder)
    assert len(found) == 3 and all(f"{10**10:,} bytes" in one or f"{MOST_PROSE + 1:,} bytes" in one for one in found)


def test_too_many_files_and_folders_too_deep_are_one_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_FILES", 5)
    assert any("more than 5 files" in one for one in RunRecord(folder).listing.problems)
    monkeypatch.setattr(reading, "MOST_FILES", MOST_FILES)
    put(folder / "a/b/c/d/e/f", "x")
    assert any("deeper than 4" in one for one in RunRecord(folder).listing.problems)


# --- the format -------------------------------------------------------------------------------------------------------


@parametrize("number", "named", "fix")
def test_a_run_of_another_format_is_refused_by_name(folder: Path, number: object, named: str, fix: str) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["format"] = number
        if number is None:
            del committed["format"]
        committed["key of another format"] = 1
    reseal(folder)
    for refuse in (lambda: require_format(RunRecord(folder)), lambda: examine(folder)):
        with pytest.raises(
            InputError, match=f"the run is in {named}, this version of tunix-rt reads format 4"
        ) as caught:
            refuse()
        assert caught.value.exit_code == 3 and caught.value.fix.startswith(fix)
