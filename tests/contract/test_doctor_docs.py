"""Every cause the doctor can name has words and a page, and the pages say what the checks say."""

import re
from pathlib import Path

import pytest

from docs import doctor_pages
from tunix_rt.doctor import wheels
from tunix_rt.doctor.causes import CAUSES, KINDS
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import Ask, Facts, Host

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "doctor"
BARE = Facts(host=Host(ram_total_bytes=2**34, ram_available_bytes=2**34, disk_free_bytes=2**40))


def test_the_causes_are_those_of_the_checks_in_their_order():
    assert list(CAUSES) == [check.cause for check in judge(BARE, Ask())]


def test_every_cause_is_of_one_of_the_nine_kinds_and_every_kind_is_explained():
    assert {cause.kind for cause in CAUSES.values()} == set(KINDS) == set(doctor_pages.KIND_WORDS)
    assert len(KINDS) == 9


@pytest.mark.parametrize("code", CAUSES)
def test_a_cause_is_told_in_whole_sentences_that_are_its_own(code):
    cause = CAUSES[code]
    assert not cause.title.endswith("."), "a title"
    assert cause.why.endswith(".") and cause.remedy.endswith(".")
    assert [source for source in cause.sources if not re.fullmatch(r"[a-z.]+\.[a-z]+/[\w./#-]+", source)] == []
    shared = [other for other in CAUSES if other != code and CAUSES[other].why == cause.why]
    assert shared == []


def test_every_cause_has_its_page_and_no_page_is_of_a_cause_that_is_gone():
    assert {page.stem for page in PAGES.glob("*.md")} == {"README", *CAUSES}


def test_every_link_between_the_pages_of_the_causes_leads_somewhere():
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
            aim = page.parent / target
            assert aim.is_file(), f"{page.name} -> {target}"
            headings = re.findall(r"^#+ (.+)", aim.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("code", [code for code in CAUSES if doctor_pages.example_of(code)])
def test_the_example_on_a_page_is_a_computer_with_that_cause(code):
    """One that fails by the cause fails by it first; of a cause that only warns it is ready, with the warning."""
    example = doctor_pages.example_of(code)
    shown = example.output()
    assert f"  more: docs/doctor/{code}.md" in shown
    assert shown.startswith("not ready" if example.expected else "ready: ")
    assert shown in (PAGES / f"{code}.md").read_text(encoding="utf-8")


def test_the_page_of_the_wheels_has_every_wheel_every_floor_and_the_date():
    page = (ROOT / "docs" / "reference" / "wheels.md").read_text(encoding="utf-8")
    said = [wheels.TABLE_DATE, wheels.BLACKWELL_DRIVER, *(f"`{wheel.requirement}`" for wheel in wheels.WHEELS)]
    said += [floor for floors in wheels.DRIVER_FLOOR.values() for floor in floors.values()]
    assert [words for words in said if words not in page] == []


def test_the_record_of_the_wheel_table_names_the_wheels_it_chooses():
    record = (ROOT / "docs" / "decisions" / "0016-wheel-table.md").read_text(encoding="utf-8")
    for capability, driver in (((12, 0), "580.65.06"), ((7, 0), "525.60.13"), ((12, 0), "570.26")):
        best = wheels.fitting_wheels([capability], driver, "Linux", "x86_64")[0]
        assert best.requirement.replace("==", " ") in record
        assert best.driver_from in record
