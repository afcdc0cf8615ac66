"""Computers as files: the verdict on each of them.

Every file in tests/facts is one computer: its facts, what a run requests, and the expected verdict, written by hand from the
rules of the hardware or from a published report. `reported` names the facts of the report itself (the name of a card stands
for its number on the bus); the others are what such a computer plausibly has.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix_rt.doctor.checks import KIND_OF, judge
from tunix_rt.doctor.facts import Ask, facts_from_json
from tunix_rt.doctor.selection import choose_device
from tunix_rt.errors import HardwareError

FILES = {path.stem: path for path in sorted((Path(__file__).parents[1] / "facts").glob("*.json"))}
COMPUTERS: dict[str, Any] = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
WARN_ONLY = {
    "cuda-majors-clash",
    "low-disk",
    "low-ram",
    "mixed-gpus",
    "nccl-missing",
}  # never keep a run from its device


def test_each_computer_has_its_cause_and_its_fix() -> None:
    wrong = {name: list(problems) for name, file in COMPUTERS.items() if (problems := list(_verdict_problems(file)))}
    assert wrong == {}


def _verdict_problems(file: dict[str, Any]) -> Iterator[str]:
    expected, facts, ask = file["expected"], facts_from_json(file["facts"]), Ask(**file["ask"])
    checks = judge(facts, ask)
    failing = [check for check in checks if check.verdict == "fail"]
    warning = {check.cause for check in checks if check.verdict == "warn"}
    yield from (f"no warning {cause}" for cause in set(expected.get("warns", ())) - warning)
    try:
        device, refusal = choose_device(ask, facts).device, None
    except HardwareError as error:
        device, refusal = None, error
    if refusal is None or expected["cause"] is None:
        if (device, failing) != (expected.get("device"), []) or expected["cause"]:
            yield f"{device}, {[(check.cause, check.saw) for check in failing]}"
        return
    if not failing[0].cause == refusal.cause == expected["cause"]:
        yield f"{failing[0].cause}, {refusal.cause}"
    for fix in (failing[0].fix, refusal.fix):
        yield from (f"not in {fix!r}: {part}" for part in expected.get("fix_says", ()) if part not in fix)
        yield from (f"in {fix!r}: {part}" for part in expected.get("fix_never_says", ()) if part in fix)


def test_the_files_cover_every_cause_the_doctor_knows() -> None:
    causes = {file["expected"]["cause"] for file in COMPUTERS.values()} - {None}
    warnings = {code for file in COMPUTERS.values() for code in file["expected"].get("warns", ())}
    assert causes | WARN_ONLY == set(KIND_OF)
    assert warnings == WARN_ONLY | {"gpu-busy", "shm-small"}


def test_a_file_names_its_source_and_the_facts_of_the_report_and_many_are_published() -> None:
    wrong = []
    for name, file in COMPUTERS.items():
        linked, reported = file["source"].startswith("https://"), file.get("reported", ())
        absent = [fact for fact in reported if not list(_values(file["facts"], fact.split(".")))]
        named = file["about"] and (linked or file["source"].startswith("made: "))
        if absent or not named or linked != bool(reported):
            wrong.append((name, absent))
    assert wrong == []
    assert len({file["source"] for file in COMPUTERS.values() if file["source"].startswith("https://")}) >= 16


def test_no_two_files_are_the_same_computer() -> None:
    count = Counter(json.dumps(file["facts"], sort_keys=True) for file in COMPUTERS.values())
    assert max(count.values()) == 1 and len(COMPUTERS) >= 46


def _values(facts: Any, path: list[str]) -> Iterator[Any]:
    """Every value at the path; a list stands for each of its items."""
    if isinstance(facts, list) and path:
        for item in facts:
            yield from _values(item, path)
    elif not path:
        yield facts
    elif path[0] in facts:
        yield from _values(facts[path[0]], path[1:])
