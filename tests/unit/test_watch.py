"""Where there is no terminal, long work still says a few times where it is."""

import pytest

from tunix_rt.cli.views.progress import watching


@pytest.fixture
def said(capsys):
    def lines(*calls: tuple[str, int, int, str]) -> list[str]:
        with watching() as progress:
            for call in calls:
                progress(*call)
        return capsys.readouterr().err.splitlines()

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
