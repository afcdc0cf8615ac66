"""Computers as files: what a person with each of them would be told.

Every file in tests/facts is one computer: its facts, what was asked, and the answer, written by hand from the hardware's
rules or from a published report. `reported` names the facts that the report itself gives (a card's name stands for its
number on the bus); the others are what such a computer plausibly has.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tunix_rt.doctor.causes import CAUSES
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import Ask, facts_from_json
from tunix_rt.doctor.selection import choose_device
from tunix_rt.errors import HardwareError

FILES = sorted((Path(__file__).parents[1] / "facts").glob("*.json"))
WARN_ONLY = {"cuda-majors-clash", "low-disk", "low-ram"}  # never keep a run from its device


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_computer_is_told_its_cause_and_its_way_out(path: Path) -> None:
    file = read(path)
    expected, facts, ask = file["expected"], facts_from_json(file["facts"], source=path.name), Ask(**file["ask"])
    checks = judge(facts, ask)
    failing = [check for check in checks if check.verdict == "fail"]
    warning = {check.cause for check in checks if check.verdict == "warn"}
    assert set(expected.get("warns", ())) <= warning

    if expected["cause"] is None:
        assert [f"{check.cause}: {check.saw}" for check in failing] == []
        assert choose_device(ask, facts).device == expected["device"]
        return

    with pytest.raises(HardwareError) as refusal:
        choose_device(ask, facts)
    assert (failing[0].cause, refusal.value.cause) == (expected["cause"], expected["cause"])
    for fix in (failing[0].fix, refusal.value.fix):
        assert [part for part in expected.get("fix_says", ()) if part not in fix] == [], fix
        assert [part for part in expected.get("fix_never_says", ()) if part in fix] == [], fix


def test_the_files_cover_every_cause_the_doctor_knows() -> None:
    files = [read(path) for path in FILES]
    causes = {file["expected"]["cause"] for file in files} - {None}
    warnings = {code for file in files for code in file["expected"].get("warns", ())}
    assert causes | WARN_ONLY == set(CAUSES)
    assert warnings == WARN_ONLY | {"gpu-busy"}


def test_enough_of_the_files_come_from_published_reports() -> None:
    linked = [file for file in map(read, FILES) if file["source"].startswith("https://")]
    assert len(FILES) >= 46
    assert len(linked) >= 16
    assert len({file["source"] for file in linked}) >= 16


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_says_where_it_comes_from_and_which_facts_were_reported(path: Path) -> None:
    file = read(path)
    linked = file["source"].startswith("https://")
    assert file["about"] and (linked or file["source"].startswith("made: "))
    assert linked == bool(file.get("reported"))
    assert [fact for fact in file.get("reported", ()) if not list(_values(file["facts"], fact.split(".")))] == []


def test_no_two_files_are_the_same_computer() -> None:
    count = Counter(json.dumps(file["facts"], sort_keys=True) for file in map(read, FILES))
    assert max(count.values()) == 1


def _values(facts: Any, path: list[str]) -> Iterator[Any]:
    """Every value at the path; a list stands for each of its items."""
    if isinstance(facts, list) and path:
        for item in facts:
            yield from _values(item, path)
    elif not path:
        yield facts
    elif path[0] in facts:
        yield from _values(facts[path[0]], path[1:])
