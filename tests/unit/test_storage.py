"""A staged folder: complete or not there, whatever fails or is killed, and never over what is not to be replaced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunix_rt.errors import InputError, StorageError
from tunix_rt.storage import staged_folder


@pytest.fixture
def place(tmp_path):
    return tmp_path / "below" / "made"


def make(place: Path, text: str, **how) -> None:
    with staged_folder(place, **how) as staged:
        (staged / "x").write_text(text)
        assert not (place / "x").exists() or (place / "x").read_text() != text


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.parent.iterdir())


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_folder_appears_complete_and_is_replaced_only_on_request(place, concurrent):
    make(place, "old", concurrent=concurrent)
    with pytest.raises(StorageError, match=r"not empty"):
        make(place, "new", concurrent=concurrent)
    assert (place / "x").read_text() == "old" and names(place) == ["made"]
    make(place, "new", replace=True, concurrent=concurrent)
    assert (place / "x").read_text() == "new" and names(place) == ["made"]
    (place / "x").unlink()
    make(place, "into an empty folder", concurrent=concurrent)
    assert names(place) == ["made"]


@pytest.mark.parametrize("error", [InputError("x", fix="y"), KeyboardInterrupt()])
def test_an_error_leaves_what_was_there_and_nothing_else(place, error):
    make(place, "old")
    with pytest.raises(type(error)), staged_folder(place, replace=True) as staged:
        (staged / "x").write_text("half")
        raise error
    assert (place / "x").read_text() == "old" and names(place) == ["made"]


def test_a_rename_that_fails_puts_the_old_folder_back(place, monkeypatch):
    make(place, "old")
    rename = Path.rename

    def fail(self, target):
        if self.name == ".staged-made":
            raise OSError(5, "Input/output error", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        make(place, "new", replace=True)
    assert (place / "x").read_text() == "old" and names(place) == ["made"]


def test_a_process_killed_between_the_two_renames_loses_nothing(place):
    make(place, "old")
    place.rename(place.with_name(".staged-made-replaced"))
    place.with_name(".staged-made").mkdir()
    with pytest.raises(InputError), staged_folder(place, replace=True):
        raise InputError("x", fix="y")
    assert (place / "x").read_text() == "old" and names(place) == ["made"]


def test_leftovers_of_ended_processes_are_removed_and_those_of_living_ones_are_not(place):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    alive = f".staged-made-{os.getppid()}"
    for name in (alive, f".staged-made-{ended.pid}", f".staged-made-{ended.pid}-replaced", ".staged-made-2-x"):
        place.with_name(name).mkdir(parents=True)
    place.mkdir()
    make(place, "new", replace=True, concurrent=True)
    assert names(place) == sorted([alive, ".staged-made-2-x", "made"])
