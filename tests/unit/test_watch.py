"""Without a terminal, long work still says where it is: at its beginning, a few times, and at least twice a minute."""

import contextlib
import io
import logging
import os
import pty
import sys
import threading
import time

import pytest
from rich.console import Console
from rich.live import Live

from tunix_rt.cli.views import progress as views
from tunix_rt.cli.views.progress import _Bars, _Lines, watching
from tunix_rt.progress import close_displays, phase


@pytest.fixture
def said(capsys):
    def lines(*calls: tuple[str, int, int, str]) -> list[str]:
        with watching() as progress:
            for call in calls:
                progress(*call)
        return [line.rpartition(", ")[0] for line in capsys.readouterr().err.splitlines()]  # without the time

    return lines


def test_work_speaks_once_a_quarter_however_large_its_strides(said):
    steps = [("tokenise (KiB)", done, 1_000, "9 tokens/s") for done in (10, 240, 260, 270, 900, 990, 1_000, 1_000)]
    assert said(*steps) == [
        "tokenise (KiB): 260 of 1,000, 9 tokens/s",
        "tokenise (KiB): 900 of 1,000, 9 tokens/s",
        "tokenise (KiB): 1,000 of 1,000, 9 tokens/s",
    ]


def test_each_piece_of_work_has_its_own_count_and_begins_anew_when_it_is_done_again(said):
    work = [("evaluate before", 3, 3, ""), ("evaluate after", 3, 3, ""), ("evaluate after", 0, 3, "")]
    assert said(*work, ("evaluate after", 3, 3, "")) == [
        "evaluate before: 3 of 3", "evaluate after: 3 of 3", "evaluate after: 3 of 3",
    ]  # fmt: skip


def test_training_is_left_to_its_own_log_lines(said):
    assert said(*(("train", step, 4, "loss 1.0") for step in range(1, 5))) == []


def test_a_phase_is_announced_before_it_starts_and_heard_of_while_a_call_does_not_return(capsys, monkeypatch):
    monkeypatch.setattr(views, "REPEATED_SECONDS", 0.05)
    monkeypatch.setattr(views, "SILENT_SECONDS", 0.25)
    with watching(), phase("load the weights"):
        assert capsys.readouterr().err == "load the weights ...\n"
        with phase("held-out loss", 347) as report:
            assert capsys.readouterr().err == "held-out loss: 0 of 347\n"
            report(40, "")
            time.sleep(0.5)
    silent = capsys.readouterr().err.splitlines()
    assert len(silent) >= 2 and all(
        line.startswith("held-out loss: 40 of 347, ") and " left" in line for line in silent
    )


def test_a_short_phase_that_is_repeated_is_announced_once(capsys):
    with watching():
        for _ in range(3):
            with phase("save the checkpoint"):
                pass
    assert capsys.readouterr().err == "save the checkpoint ...\n"


def test_without_a_display_phases_are_free_and_after_it_is_closed_nothing_is_shown(capsys):
    with phase("load the weights") as report:
        report(1, "")
    with watching() as progress:
        close_displays()
        assert progress._over.is_set()
    assert capsys.readouterr().err == ""


# --- threads and closed terminals ---------------------------------------------------------------------------------------


def test_the_thread_that_draws_and_a_phase_that_begins_never_wait_for_each_other(monkeypatch):
    """Both hold the lock of the terminal and that of the tasks, always in that order."""
    held, drawing, draw = threading.Event(), threading.Event(), Live.refresh

    def refresh(live):
        if threading.current_thread().name == "tunix-rt-progress":
            held.wait()
            drawing.set()
        draw(live)

    monkeypatch.setattr(Live, "refresh", refresh)
    bars = _Bars(Console(file=io.StringIO(), force_terminal=True))

    def begin():
        with bars._live._lock:
            held.set()
            drawing.wait()  # the thread now waits for the terminal
            bars.begin("load the weights", None, 0)

    beginning = threading.Thread(target=begin, daemon=True)
    beginning.start()
    beginning.join(60)
    assert not beginning.is_alive()
    bars.close()


def test_a_phase_leaves_the_tasks_and_the_pending_ones_at_once():
    """Else the thread looks a pending one up in vain, and ends."""
    taken = []

    class Pending(list):
        def __iter__(self):
            other = threading.Thread(target=lambda: taken.append(lines._guard.acquire(blocking=False)))
            other.start()
            other.join()
            return super().__iter__()

    lines = _Lines()
    lines._announced.add("save")
    lines.begin("save", None, 0)
    lines._pending = Pending(lines._pending)
    lines.end("save")
    lines.close()
    assert taken == [False] and lines._pending == []


@pytest.mark.parametrize("terminal", [False, True])
def test_a_pipe_or_terminal_that_is_closed_ends_no_run(terminal, monkeypatch, caplog):
    reader, writer = pty.openpty() if terminal else os.pipe()
    stderr = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with watching() as progress:
        os.close(reader)
        with phase("load the weights"):
            logging.getLogger("tunix_rt").warning("a line")
            progress.refresh()
    assert isinstance(progress, _Bars if terminal else _Lines) and "a line" in caplog.text
    with contextlib.suppress(OSError):
        stderr.close()
