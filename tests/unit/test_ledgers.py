"""What a run notes of its rows, checkpoints and processes is true whatever moment it is killed at."""

import hashlib
import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_train_log import train
from tunix_rt.data.packing import Row, batch_of_step, facts_of_rows, rows_of_step
from tunix_rt.doctor.probe import cpu_facts
from tunix_rt.errors import ConfigError, Preempted
from tunix_rt.runs.folder import RunDir, list_checkpoints
from tunix_rt.runs.ledger import has_rows, note_process
from tunix_rt.storage import json_line, merkle_root, read_json, sha256_file, write_json, write_lines
from tunix_rt.train.preemption import Preemption

TOTAL = 7


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def new_run(folder: Path, rows: list[Row]) -> RunDir:
    run = RunDir(folder)
    write_json(run.precommit, {"dataset": {"merkle_root": facts_of_rows(rows).merkle_root, "rows": len(rows)}})
    write_lines(run.rows, facts_of_rows(rows).lines())
    return run


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Eleven rows of one to three examples."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(11):
        lengths = draw.integers(2, 9, size=number % 3 + 1)
        positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        ids = draw.integers(0, 500, size=len(positions)).astype(np.int32)
        made.append(Row(ids=ids, trained=draw.random(len(ids)) < 0.6, positions=positions))
    return made


@pytest.fixture
def run(tmp_path: Path, rows: list[Row]) -> RunDir:
    return new_run(tmp_path / "run", rows)


@pytest.fixture
def whole(tmp_path: Path, rows: list[Row]) -> RunDir:
    """The same run, never interrupted."""
    whole = new_run(tmp_path / "whole", rows)
    train(whole, total=TOTAL)
    return whole


def listed(run: RunDir) -> list[int]:
    return [entry["step"] for entry in read_json(run.checkpoint_list)["checkpoints"]]


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_lines_of_the_rows_give_the_hash_and_the_counts_of_every_step(run: RunDir, rows: list[Row]) -> None:
    lines = [json.loads(line) for line in run.rows.read_text().splitlines()]
    assert run.rows.read_text() == "".join(json_line(line) for line in lines)
    assert [line["row"] for line in lines] == list(range(len(rows)))
    assert merkle_root(bytes.fromhex(line["sha256"]) for line in lines) == facts_of_rows(rows).merkle_root
    for step in range(1, 9):
        batch = batch_of_step(rows, step, micro_batch_size=2, accumulation=2, seed=3, pad_id=0)
        chosen = [lines[row] for row in rows_of_step(step, row_count=len(rows), rows_per_step=4, seed=3)]
        told = hashlib.sha256(b"".join(bytes.fromhex(line["sha256"]) for line in chosen)).hexdigest()
        assert told == batch.sha256
        assert sum(line["tokens"] for line in chosen) == batch.tokens
        assert sum(line["targets"] for line in chosen) == batch.target_tokens


def test_rows_that_are_missing_damaged_or_others_are_told_apart(run: RunDir, rows: list[Row]) -> None:
    facts = facts_of_rows(rows)
    assert has_rows(run.rows, facts)
    assert not has_rows(run.rows, facts_of_rows(rows[:-1]))
    run.rows.write_text(run.rows.read_text()[:-1])
    assert not has_rows(run.rows, facts)
    run.rows.unlink()
    assert not has_rows(run.rows, facts)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_every_checkpoint_is_listed_also_those_deleted_since(whole: RunDir) -> None:
    assert listed(whole) == [2, 4, 6, 7]
    kept = list_checkpoints(whole.checkpoints)
    assert len(kept) == 2
    entries = {entry["step"]: entry for entry in read_json(whole.checkpoint_list)["checkpoints"]}
    for checkpoint in kept:
        entry = entries[int(checkpoint.name[-6:])]
        assert entry["manifest_sha256"] == sha256_file(checkpoint / "MANIFEST.json")
        assert entry["files"] == read_json(checkpoint / "MANIFEST.json")["files"]


class KilledNow(BaseException):
    """Nobody catches it, and nothing is written after it."""


def until_killed(real: Any, left: list[int]) -> Any:
    """`real`, a method of Path, as long as `left` counts down to nothing."""

    def counted(path: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KilledNow
        return real(path, target)

    return counted


def test_a_kill_before_any_write_leaves_a_run_that_continues_to_the_same_lists(
    tmp_path: Path, whole: RunDir, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the nth rename on, no file gets its name: checkpoints, their states and manifests, and the list among them."""
    died = 0
    for nth in range(100):
        run = new_run(tmp_path / f"killed-{nth}", rows)
        with monkeypatch.context() as patch:
            left = [nth]
            for name in ("rename", "replace"):
                patch.setattr(Path, name, until_killed(getattr(Path, name), left))
            try:
                train(run, total=TOTAL)
                break
            except KilledNow:
                died += 1
        train(run, total=TOTAL, resume=True)
        assert run.metrics.read_bytes() == whole.metrics.read_bytes()
        assert run.checkpoint_list.read_bytes() == whole.checkpoint_list.read_bytes()
    assert died >= 4 * len(listed(whole)), "each save has a state, a manifest, a name and an entry"


def test_a_checkpoint_committed_just_before_a_kill_gains_its_entry(
    run: RunDir, whole: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(run: RunDir, checkpoint: Path) -> None:
        raise KilledNow

    with monkeypatch.context() as patch, pytest.raises(KilledNow):
        patch.setattr("tunix_rt.train.loop.list_checkpoint", killed)
        train(run, total=TOTAL)
    assert listed(run) == [] and [path.name for path in list_checkpoints(run.checkpoints)] == ["step-000002"]
    train(run, total=TOTAL, resume=True)
    assert run.checkpoint_list.read_bytes() == whole.checkpoint_list.read_bytes()


def test_entries_of_steps_that_are_taken_again_are_dropped(run: RunDir, whole: RunDir) -> None:
    with pytest.raises(Preempted):
        train(run, total=TOTAL, stop_after=5)
    assert listed(run) == [2, 4, 5]
    (run.checkpoints / "step-000005" / "model.safetensors").write_text("999")
    train(run, total=TOTAL, resume=True)
    assert run.checkpoint_list.read_bytes() == whole.checkpoint_list.read_bytes()


@pytest.mark.parametrize("damage", ["", "[]", '{"checkpoints": 3}', '{"checkpoints": [4, {"step": 2}]}', None])
def test_a_damaged_list_is_made_of_what_is_still_there_and_that_is_said(
    run: RunDir, damage: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Preempted):
        train(run, total=TOTAL, stop_after=6)
    if damage is None:
        run.checkpoint_list.unlink()
    else:
        run.checkpoint_list.write_text(damage)
    with caplog.at_level(logging.WARNING):
        train(run, total=TOTAL, resume=True)
    assert ("lists only the checkpoints that still exist" in caplog.text) == (damage is None or "[4" not in damage)
    assert listed(run) == [4, 6, 7]


# --- processes --------------------------------------------------------------------------------------------------------


def test_every_process_is_noted_and_the_first_begins_the_list(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for first_step, first in ((1, True), (1, True), (4, False)):
        note_process(run, {"cpu": "x"}, first_step=first_step, started=noon, first=first)
    told = read_json(run.processes)
    assert told["schema"] == "tunix-rt/processes/1"
    assert [entry["first_step"] for entry in told["processes"]] == [1, 4]
    wanted = {"pid": os.getpid(), "started": "2026-01-01T12:00:00+00:00", "first_step": 4, "machine": {"cpu": "x"}}
    assert told["processes"][1] == wanted
    run.processes.write_text("{")
    with caplog.at_level(logging.WARNING):
        note_process(run, {}, first_step=9, started=noon, first=False)
    assert "lists only later processes" in caplog.text
    assert [entry["first_step"] for entry in read_json(run.processes)["processes"]] == [9]


def test_the_instructions_of_a_cpu_are_one_hash_whatever_their_order(tmp_path: Path) -> None:
    def facts(text: str) -> dict[str, str]:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/cpuinfo").write_text(text)
        return cpu_facts(tmp_path)

    first = facts("model name : An x86\nflags : avx sse fma\nmodel name : An x86\nflags : avx sse fma\n")
    assert first["cpu"] == "An x86"
    assert first["cpu_flags_sha256"] == hashlib.sha256(b"avx fma sse").hexdigest()
    assert facts("flags: fma avx sse")["cpu_flags_sha256"] == first["cpu_flags_sha256"]
    assert facts("Features : fp asimd")["cpu_flags_sha256"] != first["cpu_flags_sha256"]
    assert len(facts("")["cpu_flags_sha256"]) == 64


# --- --stop-after -----------------------------------------------------------------------------------------------------


def test_a_step_to_stop_after_that_is_not_taken_is_refused() -> None:
    Preemption().refuse_if_never(done=3, total=3)
    for done, after in ((0, 1), (0, 7), (3, 4)):
        Preemption(after_step=after).refuse_if_never(done=done, total=7)
    for done, after, words in ((0, 8, "steps 1 to 7"), (3, 3, "steps 4 to 7"), (7, 7, "no step")):
        with pytest.raises(ConfigError, match=f"--stop-after {after}: this process takes {words}"):
            Preemption(after_step=after).refuse_if_never(done=done, total=7)


def test_a_stop_is_asked_for_once_the_step_is_taken() -> None:
    stop = Preemption(after_step=3)
    stop.step = 2
    assert stop.why() == ""
    stop.step = 3
    assert stop.why() == "stopped after step 3 (--stop-after)"
