"""The notebook for a free GPU: its plan is the program's, its settings are documented, and its cells run in order."""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.e2e.test_kaggle_notebook import RUNNER
from tests.program import ROOT, environment, in_process

NOTEBOOK = ROOT / "notebooks" / "gpu.ipynb"
GUIDE = ROOT / "docs" / "guides" / "notebook-gpu.md"
GIB = 2**30
CELLS = {cell["id"]: "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]}


def planned(device: str) -> dict:
    done = in_process("plan", "submission_local", "--model", "gemma-3-1b", "--on", device, "--json")
    return json.loads(done.stdout)


@pytest.mark.parametrize("device", ["t4", "l4"])
def test_the_first_cell_has_the_figures_of_the_plan(device):
    plan = planned(device)
    row = re.search(rf"^\| {device.upper()} \| (.*) \|$", CELLS["title"], flags=re.MULTILINE)
    assert row is not None
    memory, as_written, chosen = row[1].split(" | ")
    fit = plan["fit"]
    assert memory == f"{fit['available_bytes'] / GIB:.2f} GiB"
    predicted, margin = fit["predicted_bytes"] / GIB, fit["safety_bytes"] / GIB
    verdict = "fits" if fit["fits"] else "does not fit"
    assert as_written == f"{predicted:.2f} GiB and a margin of {margin:.2f} GiB: {verdict}"
    if not fit["fits"]:
        first = plan["proposals"][0]
        assert chosen == f"{', '.join(first['costs'])}: {first['predicted_bytes'] / GIB:.2f} GiB"


def test_every_setting_can_be_given_by_the_environment_and_the_guide_names_each():
    assigned = {node.targets[0].id for node in ast.parse(CELLS["settings"]).body if isinstance(node, ast.Assign)}
    read = set(re.findall(r'os\.environ\.get\("(\w+)"', CELLS["settings"]))
    assert read == {f"TUNIX_RT_{name}" for name in assigned - {"KAGGLE", "ROOM"}}
    assert read <= set(re.findall(r"`(TUNIX_RT_\w+)`", GUIDE.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_its_cells_run_from_the_first_to_the_last_and_a_second_pass_continues_the_run(tmp_path):
    given = {
        "TUNIX_RT_SOURCE": str(ROOT), "TUNIX_RT_CONFIG": "training/configs/smoke_tiny.yaml", "TUNIX_RT_DEVICE": "cpu",
        "TUNIX_RT_OUTPUT": str(tmp_path / "run"), "TUNIX_RT_PREVIOUS": str(tmp_path / "none"),
    }  # fmt: skip

    def opened(budget: str) -> str:
        variables = environment(**given, TUNIX_RT_TIME_BUDGET=budget)
        words = [sys.executable, "-c", RUNNER, str(NOTEBOOK)]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "not complete: saved" in opened("1s")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["exit_code"] == 7
    assert "completed" in opened("1h")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"
    assert (tmp_path / "run-pages" / "index.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["notebook-gpu.md", "kaggle-tpu.md"])
def test_the_commands_for_a_laptop_run_the_notebook(tmp_path, guide):
    section = (
        (ROOT / "docs" / "guides" / guide).read_text(encoding="utf-8").split("## On a laptop\n")[1].split("\n## ")[0]
    )
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", section, flags=re.M | re.S))
    script = re.sub(r"^\.venv/bin/python -m pip .*\n", "", lines, flags=re.M)
    script = script.replace("$PWD/runs", str(tmp_path)).replace(".venv/bin/python", sys.executable)
    done = subprocess.run(
        ["bash", "-ec", script], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "notebook" / "result.json").read_text())["status"] == "completed"
