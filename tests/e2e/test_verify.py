"""`verify`: as a function, and as a command with its views, exit codes and refusals."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.forging.bases import copy_of
from tests.forging.edits import put
from tests.forging.sealing import reseal
from tests.tables import parametrize
from tunix_rt.cli.evidence import _show, _show_markdown
from tunix_rt.cli.main import cli
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.facts import Claim, Finding, Verdict
from tunix_rt.evidence.verify import Options, verify
from tunix_rt.storage import json_text

CLAIMS = ["loss", "accuracy", "steps", "dataset", "base model", "commit", "device", "speed", "memory", "time", "signer"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["evidence", "verify", *map(str, arguments)])


@pytest.fixture(scope="module")
def verdict(cpu_bundle: Path, source_repo: Path) -> Verdict:
    before = {path: path.read_bytes() for path in cpu_bundle.rglob("*") if path.is_file()}
    found = verify(cpu_bundle, "L1", Options(repository=source_repo))
    after = {path: path.read_bytes() for path in cpu_bundle.rglob("*") if path.is_file()}
    assert after == before, "nothing is written"
    return found


def test_verify_is_a_function_that_returns_a_verdict(verdict: Verdict) -> None:
    assert verdict.ok and (verdict.level, verdict.required, verdict.findings) == ("L1", "L1", ())
    assert [one.name for one in verdict.claims] == CLAIMS
    labels = {one.name: one.label for one in verdict.claims}
    assert labels["commit"] == labels["dataset"] == labels["base model"] == labels["steps"] == "consistent"
    assert labels["signer"] == "not checked"
    assert {labels[name] for name in ("loss", "accuracy", "device", "speed", "memory", "time")} == {"self-reported"}


def test_the_command_prints_the_verdict_for_programs_and_as_markdown(
    cpu_bundle: Path, verdict: Verdict, capsys
) -> None:
    done = invoke(cpu_bundle, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["ok"] is True and found["level"] == "L1"
    assert found["meaning"] == "level L1 (consistent)" and [one["name"] for one in found["claims"]] == CLAIMS
    assert found.keys() == {*("ok", "meaning"), *Verdict.__slots__}
    capsys.readouterr()
    _show_markdown(verdict)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["**level L1 (consistent)**", "", "| claim | value | label | how |", "|---|---|---|---|"]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[4:15]] == CLAIMS


def test_a_changed_bundle_lists_every_finding_and_ends_with_exit_code_6(cpu_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(cpu_bundle, tmp_path / "folder")
    put(folder / "training_log.txt", "x")
    put(folder / "samples.md", "x")
    done = invoke(folder)
    assert done.exit_code == 6
    for name in ("training_log.txt", "samples.md"):
        assert f"L0 hashes: {name}: changed" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{folder}: FAILED at L0 (readable), level none (not readable)"
    assert "docs/reference/bundle.md explains levels and checks" in done.stderr


def test_a_level_that_was_not_tried_for_lack_of_an_input_is_no_finding(cpu_bundle: Path) -> None:
    done = invoke(cpu_bundle, "--require", "L2")
    assert done.exit_code == 3 and "L2 needs the weights" in done.stderr and "--weights PATH" in done.stderr


@pytest.mark.parametrize("status", ["refused", "failed", "preempted"])
def test_a_run_that_did_not_complete_is_readable_and_no_more(status: str, cpu_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name in ("config.yaml", "doctor.json", "training_log.txt"):
        put(folder / name, (cpu_run / name).read_bytes())
    result = json.loads((cpu_run / "result.json").read_text())
    kept = ("schema", "reason", "started", "finished", "seconds")
    put(folder / "result.json", json_text({name: result[name] for name in kept} | {"status": status, "exit_code": 5}))
    reseal(folder)
    examined = examine(folder)
    assert (examined.level, examined.findings, examined.claims) == ("L0", [], [])
    assert examined.notes == [f"the run is {status}, not completed: L1 needs a completed run"]


# --- views ------------------------------------------------------------------------------------------------------------

HOSTILE = "x|<img src=x>`**[a](b)**_#!\\"


def hostile() -> Verdict:
    return Verdict(
        folder="f", level="L0", required="L1",
        findings=(Finding(level="L1", check="result", problem=HOSTILE),),
        claims=(Claim(name="device", value=HOSTILE, label="self-reported", how=HOSTILE),), notes=(HOSTILE,),
    )  # fmt: skip


def test_markdown_escapes_what_a_bundle_contains(capsys) -> None:
    _show_markdown(hostile())
    text = capsys.readouterr().out
    assert "<img" not in text.replace("\\<", "") and HOSTILE not in text
    row = next(line for line in text.splitlines() if line.startswith("| device"))
    assert row.replace("\\|", "").count("|") == 5, "four cells"
    assert text.splitlines()[0].startswith("**FAILED at L1")


def test_the_view_for_people_has_one_row_per_claim(capsys) -> None:
    _show(hostile())
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "self-reported" in line]
    assert row.split() == ["device", *HOSTILE.split(), "self-reported", *HOSTILE.split()], "no markup, nothing cut off"


@pytest.mark.parametrize(
    ("view", "start"), [("--markdown", "**FAILED at L0"), ("--json", "{")], ids=["markdown", "json"]
)
def test_names_in_a_folder_cannot_steer_the_terminal(view: str, start: str, cpu_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(cpu_bundle, tmp_path / "folder")
    put(folder / "\x1b[2Jcleared", "x")
    for options in ((), (view,)):
        done = invoke(folder, *options)
        assert done.exit_code == 6 and "\x1b" not in done.output and "file name" in done.stdout
    assert done.stdout.startswith(start)


# --- refusals ---------------------------------------------------------------------------------------------------------


@parametrize("options", "problem")
def test_an_option_without_effect_is_refused(options: list[str], problem: str, cpu_bundle: Path) -> None:
    done = invoke(cpu_bundle, *options)
    assert done.exit_code == 2 and problem in done.stderr


@pytest.mark.parametrize(
    "options", [["--segments", "0"], ["--segments", "some"], ["--require", "L5"], ["--time-limit", "0"]]
)
def test_a_value_outside_its_range_is_refused(options: list[str], cpu_bundle: Path) -> None:
    assert invoke(cpu_bundle, *options).exit_code == 2


def test_what_is_no_folder_of_a_run_is_a_slip_and_no_verdict(cpu_bundle: Path, tmp_path: Path) -> None:
    done = invoke(tmp_path / "nowhere")
    assert done.exit_code == 3 and "no such folder" in done.stderr
    shutil.copytree(cpu_bundle, tmp_path / "above" / "v1")
    done = invoke(tmp_path / "above")
    assert (
        done.exit_code == 3
        and "above contains 1 run(s) or bundle(s), name one" in done.stderr
        and "above/v1" in done.stderr
    )
    done = invoke(cpu_bundle, "--repository", tmp_path)
    assert done.exit_code == 2 and "not a git repository" in done.stderr
