"""Every cause of the doctor has a page with an explanation and real output."""

import re
from pathlib import Path

from docs import doctor_pages
from docs.doctor_causes import CAUSES
from tunix_rt.doctor import wheels
from tunix_rt.doctor.checks import CAUSES as CAUSES_OF_KIND
from tunix_rt.doctor.checks import KIND_OF, judge
from tunix_rt.doctor.facts import Ask, Facts, Host

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "doctor"
BARE = Facts(host=Host(ram_total_bytes=2**34, ram_available_bytes=2**34, disk_free_bytes=2**40))


def test_the_causes_are_those_of_the_checks_in_their_order_and_every_kind_is_explained():
    assert list(CAUSES) == [check.cause for check in judge(BARE, Ask())]
    assert set(KIND_OF) == set(CAUSES)
    assert list(doctor_pages.KIND_WORDS) == list(CAUSES_OF_KIND) and len(CAUSES_OF_KIND) == 10


def test_a_cause_is_explained_in_whole_sentences_of_its_own():
    assert [code for code, cause in CAUSES.items() if cause.title.endswith(".")] == []
    assert [
        code for code, cause in CAUSES.items() if not (cause.why.endswith(".") and cause.remedy.endswith("."))
    ] == []
    sources = [source for cause in CAUSES.values() for source in cause.sources]
    assert [source for source in sources if not re.fullmatch(r"[a-z.]+\.[a-z]+/[\w./#-]+", source)] == []
    assert len({cause.why for cause in CAUSES.values()}) == len(CAUSES)


def test_every_cause_has_its_page_with_an_example_and_no_page_is_of_a_cause_that_is_gone():
    """An example that fails by the cause fails by it first; of a cause that only warns it is ready, with the warning."""
    assert {page.stem for page in PAGES.glob("*.md")} == {"README", *CAUSES}
    examples = {code: example for code in CAUSES if (example := doctor_pages.example_of(code))}
    wrong = [
        code
        for code, example in examples.items()
        if f"  more: docs/doctor/{code}.md" not in (shown := example.output())
        or not shown.startswith("not ready" if example.expected else "ready: ")
        or shown not in (PAGES / f"{code}.md").read_text(encoding="utf-8")
    ]
    assert wrong == [] and len(examples) > 40


def test_every_anchor_of_a_page_of_a_cause_is_a_heading():
    """contract/test_docs.py checks the files of all links."""
    links = [link for page in PAGES.glob("*.md") for link in re.findall(r"\]\(([^)\s]+)#([^)\s]+)\)", page.read_text())]
    for target, anchor in set(links):
        headings = re.findall(r"^#+ (.+)", (PAGES / target).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


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
