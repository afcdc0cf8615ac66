"""What a run writes down of itself is for strangers."""

import json
import logging
import signal
import threading
import warnings

import pytest

from tunix_rt.errors import EvidenceError
from tunix_rt.runs.checksums import list_folder, parse_sums, sums_problems
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.journal import LONGEST_WARNING, MOST_WARNINGS, RunJournal, WithoutSecrets, without_home
from tunix_rt.storage import write_json
from tunix_rt.train.preemption import Preemption


def test_a_log_does_not_name_the_folder_of_whoever_ran_it(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    record = logging.LogRecord(
        "tunix_rt", logging.INFO, "", 0, "kept in %s", ("/home/somebody/.cache/tunix-rt/x",), None
    )
    assert WithoutSecrets("%(message)s").format(record) == "kept in ~/.cache/tunix-rt/x"


@pytest.mark.parametrize("text", ["/home/somebodyelse/x", "/data/home/x", "no path at all"])
def test_other_places_stay_as_they_are(text, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert without_home(text) == text


def test_a_home_at_the_root_strikes_nothing(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert without_home("/etc/x") == "/etc/x"


# --- warnings --------------------------------------------------------------------------------------------------------


def warned(folder, *texts, continued=False):
    """The warnings in the result of a run in which a library warned so."""
    record = RunJournal(run=RunDir(folder), continued=continued)
    with record.logged(), record.ended(), warnings.catch_warnings():
        warnings.simplefilter("always")
        if continued:
            record.accept()
        for text in texts:
            warnings.warn(text, UserWarning, stacklevel=1)
    return json.loads(record.run.result.read_text())["warnings"]


def test_the_result_lists_each_warning_of_a_library_once_on_one_line_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    said = "slow\nkernel \x1b[31m for hf_abcdefghijklmnop1234 in /home/somebody/x"
    listed = warned(tmp_path, said, said, "another")
    assert listed == ["UserWarning: slow kernel [31m for hf_*** in ~/x", "UserWarning: another"]
    assert (tmp_path / "training_log.txt").read_text().count("slow kernel") == 2


def test_the_list_of_warnings_is_bounded(tmp_path):
    listed = warned(tmp_path, *(f"{number} " + "x" * 2000 for number in range(80)))
    assert len(listed) == MOST_WARNINGS and {len(one) for one in listed} == {LONGEST_WARNING}


def test_a_run_without_warnings_lists_none(tmp_path):
    assert warned(tmp_path) == []


@pytest.mark.parametrize("before", [["first"], None, "damaged", [1, "first"]])
def test_a_resumed_run_keeps_the_warnings_of_the_process_before(tmp_path, before):
    write_json(tmp_path / "result.json", {"warnings": before})
    kept = ["first"] if isinstance(before, list) else []
    assert warned(tmp_path, "second", continued=True) == [*kept, "UserWarning: second"]


# --- the ending ------------------------------------------------------------------------------------------------------


class Awaited(logging.Handler):
    """Added last: `came` is set when all other handlers have the line of the signal."""

    def __init__(self):
        super().__init__()
        self.came = threading.Event()

    def emit(self, record):
        if "SIGINT" in record.getMessage():
            self.came.set()


@pytest.fixture
def signals():
    """The handlers of this process, which a signalled run ignores at its end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("verifies", [True, False])
def test_the_answer_to_a_signal_after_the_log_was_hashed_is_no_line_of_it(tmp_path, caplog, signals, verifies):
    caplog.set_level("INFO", logger="tunix_rt")
    stop, awaited, package = Preemption(), Awaited(), logging.getLogger("tunix_rt")

    def verify(folder):
        signal.raise_signal(signal.SIGINT)
        assert awaited.came.wait(60)
        if not verifies:
            raise EvidenceError("a file changed", fix="train again")

    journal = RunJournal(run=RunDir(tmp_path), continued=False, ending=stop.ending, verify=verify)
    try:
        with journal.logged(), stop.listening(), journal.ended():
            package.addHandler(awaited)
    except EvidenceError:
        assert not verifies
    finally:
        package.removeHandler(awaited)
    sums, _ = parse_sums(journal.run.hashes.read_bytes())
    assert sums_problems(tmp_path, list_folder(tmp_path).files, sums, may_lack=()) == []
    log = journal.run.log.read_text()
    assert "SIGINT" in caplog.text and "SIGINT" not in log and ("failed: a file changed" in log) != verifies
    assert json.loads(journal.run.result.read_text())["status"] == ("completed" if verifies else "failed")
