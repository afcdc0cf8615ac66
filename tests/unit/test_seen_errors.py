"""The record of how wrong predictions were: nothing is lost, no corrupt line hides the rest, and no run fails for it."""

import json
import logging
import multiprocessing
import os
from pathlib import Path

import pytest

from tunix_rt.plan import calibration as seen_errors
from tunix_rt.plan.calibration import Band, SeenError, add, record_path

GIB = 2**30


@pytest.fixture(autouse=True)
def an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def seen(predicted: int = 100, measured: int = 100, **named) -> SeenError:
    given = {
        "device": "NVIDIA H200", "backend": "torch", "layers": "plain", "recipe": "float32 AdamW", "model": "gpt2",
        "parameters": 124_000_000, "predicted_bytes": predicted, "measured_bytes": measured,
    }  # fmt: skip
    return SeenError(**{**given, **named})


def band(device: str = "NVIDIA H200", backend: str = "torch", **named) -> Band | None:
    alike = {"layers": "plain", "recipe": "float32 AdamW", "parameters": 124_000_000}
    return seen_errors.band(device, backend, **{**alike, **named})


def test_the_band_is_of_similar_runs_on_this_device_and_one_run_is_none():
    add(seen(98))
    assert band() is None, "a run seen for the first time says nothing about the next"
    unlike = (
        {"device": "NVIDIA L4"},
        {"backend": "jax"},
        {"layers": "compiled"},
        {"recipe": "bfloat16"},
        {"parameters": 10**9},
    )
    for named in ({}, {}, *unlike):
        add(seen(105, **named))
    assert band() == Band(runs=3, lowest=98 / 100 - 1, median=105 / 100 - 1, highest=105 / 100 - 1)
    assert band().describe() == "median error +5.0 % over 3 similar runs (-2.0 % to +5.0 %)"
    assert [band(**named) for named in unlike] == [None] * len(unlike)


def test_an_error_is_a_percentage_only_where_the_model_outweighs_the_libraries():
    mib = 2**20
    assert seen_errors.describe_error(550 * mib, 500 * mib) == "+10.0 %"
    assert seen_errors.describe_error(510 * mib, 512 * mib) == "-0.4 %"
    assert seen_errors.describe_error(178 * mib, 100 * mib) == "+78 MiB"
    assert seen_errors.describe_error(100 * mib, 178 * mib) == "-78 MiB"
    assert seen_errors.describe_error(1, 0) == "+0 MiB"


def test_a_corrupt_line_is_named_and_hides_no_other(caplog):
    add(seen(90))
    record_path().write_bytes(
        record_path().read_bytes() + b'{"schema": "tunix-rt/seen-error/1", "device"\n\xff\xfe\n[]\n'
        + json.dumps({**json.loads(record_path().read_bytes()), "measured_bytes": -1}).encode() + b"\n\n"
        + json.dumps({**json.loads(record_path().read_bytes()), "device": 7}).encode() + b"\n" + b"[" * 100_000
    )  # fmt: skip
    add(seen(110))
    (low, high) = (90 / 100 - 1, 110 / 100 - 1)
    assert band() == Band(runs=2, lowest=low, median=(low + high) / 2, highest=high)
    assert caplog.messages == [f"{record_path()}: 6 corrupt line(s) skipped: 2, 3, 4, 5, 7 ..."]


def test_the_newest_part_of_a_very_long_record_is_read(monkeypatch, caplog):
    for predicted in (10, 110, 120):
        add(seen(predicted))
    monkeypatch.setattr(seen_errors, "LONGEST_READ", len(record_path().read_bytes()) - 5)
    (low, high) = (110 / 100 - 1, 120 / 100 - 1)
    assert band() == Band(runs=2, lowest=low, median=(low + high) / 2, highest=high)
    assert not caplog.messages, "half of a line at its beginning is no damage"


def test_a_record_that_cannot_be_written_is_said_once_and_fails_nothing(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where a folder belongs")
    assert add(seen()) is None
    assert len(caplog.messages) == 1 and "is not saved: " in caplog.messages[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into any folder")
def test_a_read_only_cache_is_said_once(tmp_path, caplog):
    (tmp_path / "cache" / "tunix-rt").mkdir(parents=True)
    (tmp_path / "cache" / "tunix-rt").chmod(0o500)
    assert add(seen()) is None
    assert len(caplog.messages) == 1 and "Permission denied" in caplog.messages[0]


def test_a_record_that_another_process_holds_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(seen_errors, "LOCK_SECONDS", 0.05)
    record_path().parent.mkdir(parents=True)
    with seen_errors.FileLock(record_path().with_name(f".{record_path().name}.lock")):
        assert add(seen()) is None
    assert "is locked by another process" in caplog.messages[0]
    assert add(seen()) == record_path()


def _add_many(number: int) -> None:
    for one in range(40):
        add(seen(1000 + 100 * number + one))


def test_processes_that_write_at_once_lose_no_line(caplog):
    caplog.set_level(logging.WARNING)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.map(_add_many, range(3))
    assert sorted(one.predicted_bytes for one in seen_errors.seen_errors()) == [
        1000 + 100 * number + one for number in range(3) for one in range(40)
    ]
    assert not caplog.messages


def test_the_tests_write_into_no_cache_of_a_person(monkeypatch):
    monkeypatch.undo()
    assert Path.home() not in record_path().parents and "tunix-rt-tests-" in str(record_path())
