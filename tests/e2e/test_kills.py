"""kill -9 at any moment: every step that was saved is there, and the run ends with the bits of the uninterrupted one."""

import json
import subprocess
import sys

import pytest

from tests.program import ROOT, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched by means of Linux")


def killed(folder, *arguments):
    """The figures of a series. It is a program of its own, because it forks after importing torch."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--json", "--folder", str(folder), *map(str, arguments)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_run_that_is_killed_twice_ends_as_the_uninterrupted_one(tmp_path):
    """Inside a save and at a step. No fresh process loads the final models of the forks: that takes seconds of each."""
    seen = killed(tmp_path / "kills", "--kills", 2, "--seed", 1, "--unproven")
    assert seen["problems"] == [], "every process of a chain with a problem has its words in said-NNN.txt beside it"
    assert seen["kills"] == len(seen["table"]) == 2 and seen["chains_identical"] == seen["chains"] == 1
    assert all(kill["usable_after"] >= kill["committed_before"] for kill in seen["table"])


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, 100])
def test_kills_lose_nothing_that_was_saved_and_leave_nobody_behind(tmp_path, kills):
    seen = killed(tmp_path / "kills", "--kills", kills, "--seed", 1)
    assert seen["problems"] == [], "every process of a chain with a problem has its words in said-NNN.txt beside it"
    assert seen["kills"] == len(seen["table"]) == kills
    assert seen["chains_identical"] == seen["chains"]
    assert all(kill["usable_after"] >= kill["committed_before"] for kill in seen["table"])
    assert seen["inside_a_save"] >= 0.3 * kills, "too few kills inside a save to say anything"
    assert seen["in_the_first_save"] >= 1
    assert seen["program_starts"] >= 0.1 * kills
    assert seen["resumed_twice_in_an_epoch"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "found"),
    [("moved-in-parts", "lost"), ("seeded-at-first", "different"), ("leaves-a-process", "orphans")],
)
def test_a_planted_defect_is_found(tmp_path, defect, found):
    seen = killed(tmp_path / "kills", "--kills", 3, "--seed", 1, "--defect", defect)
    assert {problem["kind"] for problem in seen["problems"]} == {found}
