"""Answers, evidence and doctor: what the pages show is what the files give, and what a file contains is shown as text."""

import hashlib
import json
import re
import shutil
import threading
import time
from collections import Counter

import pytest

from tests.conftest import ROOT
from tests.pages import Read
from tests.tables import tables
from tunix_rt.dashboard.background import Background
from tunix_rt.dashboard.pages import answers, doctor, evidence
from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Site
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import Ask, facts_from_json
from tunix_rt.errors import InputError
from tunix_rt.evaluate import comparison, generate, report
from tunix_rt.evidence.facts import LABELS, NOT_SHOWN
from tunix_rt.evidence.verify import verify
from tunix_rt.runs.record import RunRecord

render = pytest.importorskip("tunix_rt.dashboard.app").render
RUNS = ROOT / "submission_runs"
FACTS = sorted((ROOT / "tests" / "facts").glob("*.json"))


def shown(handler, site: Site, address: str = "", run_id: str = "") -> tuple[Read, str]:
    query = Query.parse(address)
    html = render(handler(site, query, run_id), "/", query)
    assert " style=" not in html and "<style" not in html and html.count("<script") == 1
    return Read(html), html


def flat(text: str) -> str:
    return " ".join(text.split())


def site_with(folder, *names: str) -> tuple[Site, list[str]]:
    """A site of copies of real runs, which a test may change, and their ids in the order of the names."""
    for name in names:
        shutil.copytree(RUNS / "demo_v1", folder / name)
    site = Site.of(folder)
    ids = {one.name: one.id for one in site.index.runs()}
    return site, [ids[name] for name in names]


def rewrite(path, change) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo_v1", "gemma3_270m_gsm8k_v1"])
def test_questions_are_found_by_words_and_groups_beside_what_is_shown(name):
    record, sides = RunRecord(RUNS / name), generate.read_both(RUNS / name)
    before, after = ({one.id: one for one in side.predictions} for side in sides)
    gained = comparison.compare_runs(*sides).gained
    items = answers.by_question((side.name, one) for side in sides for one in side.predictions)

    def ids(address: str, show: str = "all") -> list[str]:
        return [items[number][0][1].id for number in answers.choose(items, Query.parse(address), show)[0]]

    for kind, _, names in answers.answers_of(record, Query.parse("show=malformed")).groups:
        assert dict(names) == Counter(getattr(one, kind) for one in after.values() if not one.well_formed)
        for group in {getattr(one, kind) for one in after.values()}:
            wanted = [key for key in gained if getattr(after[key], kind) == group]
            assert ids(f"{kind}={group}", "gained") == wanted
    word = next(iter(after.values())).prompt.split()[0].casefold()
    texts = {key: "\n".join((one.prompt, one.output, before[key].output)).casefold() for key, one in after.items()}
    assert ids(f"q={word}") == [key for key in after if word in texts[key]] != []
    assert ids("q=no-such-word-anywhere") == []


def test_a_changed_prediction_changes_the_page_and_a_wrong_verdict_is_named(tmp_path):
    site, (run_id,) = site_with(tmp_path, "run")
    file = tmp_path / "run" / "eval" / "predictions-after.jsonl"
    original = shown(answers.page, site, "", run_id)[0].text
    planted = {"output": "<reasoning>1 + 1 = 3</reasoning><answer>4</answer>"}
    rewrite(file, lambda lines: [lines[0] | planted, *lines[1:]])
    text = flat(shown(answers.page, site, "", run_id)[0].articles[0])
    assert "strict is True, the output gives False" in text and "✗ wrong: 1 + 1 = 3" in text
    rewrite(file, lambda lines: [lines[0] | {"strict": False, "lenient": False}, *lines[1:]])
    changed = shown(answers.page, site, "", run_id)[0].text
    text = report.paragraph(comparison.compare_runs(*generate.read_both(tmp_path / "run")))
    assert text in changed and text not in original
    rewrite(file, lambda lines: [lines[0], *lines])
    assert "occurs twice in the eval set" in shown(answers.page, site, "", run_id)[0].text
    rewrite(file, lambda lines: lines[2:])
    page = shown(answers.page, site, "", run_id)[0]
    assert "different questions: 1 id(s) on one side only" in page.text and len(page.articles) == 50
    file.write_text("{}\n")
    assert "eval/predictions-after.jsonl:1: " in shown(answers.page, site, "", run_id)[0].text


def test_one_side_and_the_folders_of_evaluate_and_generations_during_training_are_shown(tmp_path):
    site, (run_id,) = site_with(tmp_path, "run")
    folder = tmp_path / "run" / "eval"
    lines = [json.loads(line) for line in (folder / "predictions-after.jsonl").read_text().splitlines()]
    assert "during training" not in shown(answers.page, site, "show=along", run_id)[0].text
    samples = [{"step": step, **line} for step in (10, 20, 30) for line in lines[:2]]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    page = shown(answers.page, site, "show=along", run_id)[0]
    before = (folder / "predictions-before.jsonl").read_text().count('"well_formed": false')
    assert "during training (6 generations)" in page.text and len(page.articles) == 2
    assert all(f"step {step} " in flat(page.articles[0]) for step in (10, 20, 30))
    bad = {"output": "no tags", "well_formed": False}  # the other questions are not answered yet
    rewrite(folder / "predictions-after.jsonl", lambda lines: [*(one | bad for one in lines[:3]), lines[3]])
    page = shown(answers.page, site, "show=malformed", run_id)[0]
    assert "malformed after (3)" in page.text and len(page.articles) == 3
    (folder / "predictions-after.jsonl").unlink()
    assert f"malformed before ({before})" in shown(answers.page, site, "", run_id)[0].text
    page = shown(answers.page, site, "show=gained", run_id)[0]
    assert "McNemar" not in page.text and page.rows[0] == ["measure", "out of", "before"] and len(page.articles) == 50
    assert len(shown(answers.page, site, "show=right", run_id)[0].articles) == 0
    (folder / "predictions-before.jsonl").unlink()
    assert "There are no answers" not in shown(answers.page, site, "", run_id)[0].text  # those during training remain

    other = tmp_path / "evaluated"
    (other / "eval").mkdir(parents=True)
    shutil.copy(RUNS / "demo_v1" / "eval" / "predictions-after.jsonl", other / "eval" / "predictions-answers.jsonl")
    view = answers.answers_of(RunRecord(other), Query())
    assert (view.figures.sides, view.total, view.figures.paragraph) == (("answers",), 100, "")
    shutil.copy(RUNS / "demo_v1" / "eval" / "predictions-before.jsonl", other / "eval" / "predictions-base.jsonl")
    view = answers.answers_of(RunRecord(other), Query())
    assert view.figures.sides == ("base", "answers") and view.figures.paragraph.startswith("answers against base: ")


def test_hostile_texts_are_shown_as_text_and_cut_at_a_length(tmp_path):
    site, (run_id,) = site_with(tmp_path, "run")
    texts = [*tables(__file__)["hostile"], "9" * 400_000]

    def planted(lines):
        for line, text in zip(lines, texts, strict=False):
            line |= {"output": text, "prompt": text, "expected": text, "section": text, "category": text}
        return lines

    for when in ("before", "after"):
        rewrite(tmp_path / "run" / "eval" / f"predictions-{when}.jsonl", planted)
    page, html = shown(answers.page, site, "", run_id)
    assert len(page.articles) == 50 and len(html) < 2_000_000
    assert page.tags["h1"] == 1 and not page.tags["img"] and page.tags["script"] == 1
    for article, text in zip(page.articles, texts[:-1], strict=False):
        visible = re.sub(r"[^\x20-\x7e\u0600-\u06ff]", lambda found: f"\\u{ord(found[0]):04x}", text)
        assert article.count(visible) >= 4, text
    assert "49" not in page.articles[1].replace("49.", "") and "380,000 characters are left out" in page.articles[8]
    assert page.text.count("Too long for its equations") == page.articles[8].count("Too long for its equations") == 2
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00-\x08\x0b-\x1f\x7f]", html)
    with (tmp_path / "run" / "eval" / "predictions-after.jsonl").open("a") as file:
        file.write(json.dumps({"output": "1" * 1_000_000}) + "\n")
    page = shown(answers.page, site, "", run_id)[0]
    assert "eval/predictions-after.jsonl:101: " in page.text
    (tmp_path / "run" / "eval" / "predictions-after.jsonl").write_bytes(b"{}\n" * 6_000_000)
    assert "18,000,000 bytes, at most 16,777,216 are shown here" in shown(answers.page, site, "", run_id)[0].text


# --- evidence ---------------------------------------------------------------------------------------------------------


def state(folder) -> dict[str, tuple[str, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def wait_for(work: Background) -> None:
    deadline = time.monotonic() + 60
    while work.running() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def finished(site: Site, run_id: str) -> Read:
    wait_for(evidence.background(site))
    return shown(evidence.page, site, "", run_id)[0]


def test_the_evidence_page_shows_what_verify_finds_until_the_folder_changes_and_leaves_it_alone(tmp_path):
    site, (bad,) = site_with(tmp_path, "bad")
    metrics = tmp_path / "bad" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1', 1))
    before = state(tmp_path)
    assert "Not checked since" in shown(evidence.page, site, "", bad)[0].text
    assert evidence.verify_run(site, bad) == {"state": "running"}
    page, verdict = finished(site, bad), verify(tmp_path / "bad")
    rows = [tuple(row) for row in page.rows if row[0] not in ("name", "level")]
    findings = [(one.level, one.check, one.problem) for one in verdict.findings]
    assert rows == findings + [(one.name, one.value, one.label, one.how) for one in verdict.claims]
    assert verdict.level == "none" and findings and f"What does not follow: {NOT_SHOWN['none']}." in page.text
    assert state(tmp_path) == before
    metrics.write_text(metrics.read_text() + "\n")
    page = shown(evidence.page, site, "", bad)[0]
    assert "has changed since" in page.text and not page.rows


def test_one_run_is_verified_at_a_time_and_its_page_shows_that_it_goes_on(tmp_path):
    site, (first, second) = site_with(tmp_path, "first", "second")
    go_on = threading.Event()
    assert evidence.background(site).start(first, "", lambda: go_on.wait(60) and None)
    page = evidence.page(site, Query(), first)
    assert page.live and page.values.seconds is not None and "Verifying for 0." in render(page, "/", Query())
    assert evidence.verify_run(site, first) == {"state": "running"}
    with pytest.raises(InputError, match="another run is being verified"):
        evidence.verify_run(site, second)
    assert evidence.page(site, Query(), second).live
    assert "Another run is being verified" in shown(evidence.page, site, "", second)[0].text
    go_on.set()
    finished(site, first)
    (tmp_path / "second" / "precommit.json").write_text('{"format": 99}')
    evidence.verify_run(site, second)
    assert "this version of tunix-rt reads format" in finished(site, second).text


def test_levels_and_labels_mean_on_the_page_what_they_mean_in_the_documentation():
    text = (ROOT / "docs" / "concepts" / "evidence.md").read_text()
    assert all(f"| {words} |" in text for words in (*NOT_SHOWN.values(), *LABELS.values()))


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_the_doctor_page_shows_cause_and_repairing_line_of_every_known_computer(tmp_path):
    causes: set[str] = set()
    for path in FACTS:
        known = json.loads(path.read_text())
        facts, ask = facts_from_json(known["facts"]), Ask(**known["ask"])
        site = Site.of(tmp_path)
        doctor.background(site).start(doctor.WORK, "", lambda facts=facts: {"torch": facts, "jax": facts}).join()
        address = f"device={ask.device}&backend={ask.backend}&dtype={ask.dtype}"
        page, _ = shown(doctor.page, site, address)
        checks = judge(facts, ask)
        wrong = [one for one in checks if one.verdict == "fail"]
        cause = known["expected"].get("cause")
        assert [one.cause for one in wrong[:1]] == ([cause] if cause else []), path.name
        assert ("Not ready" in page.text) == bool(wrong) == ("Cause: " in page.text), path.name
        for one in checks:
            if one.verdict in ("fail", "warn"):
                causes.add(one.cause)
                texts = (one.why, one.saw, one.fix, f"docs/doctor/{one.cause}.md")
                assert all(text in page.text for text in texts), path.name
    assert len(causes) > 30


def test_the_doctor_page_gathers_the_facts_of_this_computer_by_itself_and_anew_on_request(tmp_path):
    site = Site.of(tmp_path)
    page = doctor.page(site, Query.parse("device=cpu"))
    assert page.live and "Gathering facts" in render(page, "/doctor", Query())
    wait_for(doctor.background(site))
    page = doctor.page(site, Query.parse("device=cpu"))
    assert not page.live and page.values.diagnosis.ready.startswith("cpu, ")
    assert doctor.look_again(site) == {"state": "running"}
    wait_for(doctor.background(site))
