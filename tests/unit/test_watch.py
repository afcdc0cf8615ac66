"""Without a terminal, long work still says where it is: at its beginning, a few times, and at least twice a minute."""

import time

import pytest

from tunix_rt.cli.views import progress as views
from tunix_rt.cli.views.progress import watching
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
