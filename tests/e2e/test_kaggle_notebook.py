"""The Kaggle notebook, cell by cell from its file, over two sessions: on eight virtual devices of a CPU, with the embedded model.

No TPU run has been made by this project; this is what stands in for one, beside the verdicts of the TPU compiler.
"""

import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.forging.bases import ROUGH
from tests.integrity import list_problems
from tests.program import ROOT, environment

NOTEBOOK = ROOT / "notebooks" / "kaggle_tpu.ipynb"
GUIDE = ROOT / "docs" / "guides" / "kaggle-tpu.md"
STEPS = 12
# What runs the notebook: the code cells in their order, in one process, with the variables they leave each other.
RUNNER = """\
import json, sys
shared = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"the cell {cell['id']}", "exec"), shared)
"""
CONFIG = Path(__file__).with_name("kaggle_notebook.yaml").read_text()


def cells() -> list[dict]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def source_of(name: str) -> str:
    (cell,) = [cell for cell in cells() if cell["id"] == name]
    return "".join(cell["source"])


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A folder for the sessions, and the environment in which their notebooks are opened."""
    folder = tmp_path_factory.mktemp("kaggle")
    questions = (ROOT / "evalsets" / "eval_v2.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "two.jsonl").write_text("".join(questions[:2]), encoding="utf-8")
    settings = f"{CONFIG.replace('EVALSET', str(folder / 'two.jsonl'))}"
    (folder / "small.yaml").write_text(settings.replace("training:\n", f"training:\n  max_steps: {STEPS}\n"))

    def opened(name: str, **extra: str) -> subprocess.Popen[str]:
        given = {
            "TUNIX_RT_SOURCE": str(ROOT), "TUNIX_RT_CONFIG": str(folder / "small.yaml"), "TUNIX_RT_DEVICE": "cpu",
            "TUNIX_RT_OUTPUT": str(folder / name / "temp"), "TUNIX_RT_KEEP": str(folder / name / "kept"),
            "TUNIX_RT_PREVIOUS": str(folder / "first" / "kept"), "TUNIX_RT_TIME_BUDGET": "1h",
            "XLA_FLAGS": f"{ROUGH} --xla_force_host_platform_device_count=8",
        }  # fmt: skip
        clean = environment(**(given | extra))
        clean.pop("JAX_PLATFORMS", None)
        return subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(NOTEBOOK)], env=clean, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip

    return folder, opened


def stop_after(steps: int, notebook: subprocess.Popen[str], output: Path) -> None:
    """Ask the training process of the notebook to stop once it has taken so many steps, as the end of its time would."""
    metrics, until = output / "metrics.jsonl", time.monotonic() + 600
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        if notebook.poll() is not None or time.monotonic() > until:
            pytest.fail(f"no step {steps}: {notebook.communicate()[0]}")
        time.sleep(0.01)
    training = [
        child for child in psutil.Process(notebook.pid).children() if "training/run_train_jax.py" in child.cmdline()
    ]
    assert len(training) == 1
    training[0].terminate()


@pytest.fixture(scope="module")
def first(session):
    """The session that was stopped: what it said, and what it kept."""
    folder, opened = session
    notebook = opened("first")
    stop_after(2, notebook, folder / "first" / "temp")
    said = notebook.communicate(timeout=600)[0]
    assert notebook.returncode == 0, said
    return said, folder / "first" / "kept"


@pytest.fixture(scope="module")
def second(session, first):
    """The session after it, with what the first one kept as its input."""
    folder, opened = session
    notebook = opened("second")
    said = notebook.communicate(timeout=200)[0]
    assert notebook.returncode == 0, said
    return said, folder / "second" / "kept"


@pytest.mark.slow  # of every run tests/contract/test_jax_shims.py trains by the notebook's command
def test_a_session_that_is_stopped_keeps_one_checkpoint_and_says_what_comes_next(first):
    said, kept = first
    assert "tunix-rt can be imported: nothing is installed" in said
    assert "begins a run in" in said and f"not complete: saved in {kept}" in said
    assert len(list((kept / "checkpoints").glob("step-*"))) == 1
    result = json.loads((kept / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("preempted", 7)


@pytest.mark.slow
def test_the_next_session_goes_on_where_it_stopped_and_completes_the_run(first, second):
    before = json.loads((first[1] / "result.json").read_text())
    said, kept = second
    after = json.loads((kept / "result.json").read_text())
    assert "continues the run in" in said
    assert (after["status"], after["steps_completed"]) == ("completed", STEPS)
    assert after["resumed_from"] == before["steps_completed"] < STEPS
    lines = (kept / "metrics.jsonl").read_bytes().splitlines()
    assert lines[: before["steps_completed"]] == (first[1] / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    assert (kept / "samples.md").read_text() in said


@pytest.mark.slow
def test_a_complete_run_is_kept_with_its_final_model_and_without_the_weights_of_its_checkpoints(second):
    _, kept = second
    assert (kept / "final_model" / "model.safetensors").is_file()
    assert list((kept / "checkpoints").rglob("*.safetensors")) == []
    assert list_problems(kept, may_lack_weights=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "second"])
def test_the_run_was_on_eight_devices(request, which):
    said, kept = request.getfixturevalue(which)
    assert "count 8" in said and "Devices: 8 x cpu" in (kept / "training_log.txt").read_text()


@pytest.mark.skipif(any(Path(node).exists() for node in ("/dev/accel0", "/dev/vfio/0")), reason="there is a TPU here")
def test_without_a_tpu_the_notebook_ends_at_the_doctor_and_no_run_is_begun(session):
    folder, opened = session
    notebook = opened("third", TUNIX_RT_DEVICE="tpu", HF_TOKEN="none")
    said = notebook.communicate(timeout=200)[0]
    assert notebook.returncode == 1 and "no run would work here" in said and "no TPU present" in said
    assert not (folder / "third").exists()


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").iterdir()), ids=lambda path: path.stem)
def test_the_notebook_is_a_notebook_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    for cell in notebook["cells"]:
        of_code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | of_code and cell["metadata"] == {}
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
        assert "".join(cell["source"]).splitlines(keepends=True) == cell["source"]


def test_every_setting_of_the_first_cell_can_be_given_by_the_environment_and_the_guide_names_each():
    assigned = {node.targets[0].id for node in ast.parse(source_of("settings")).body if isinstance(node, ast.Assign)}
    asked = set(re.findall(r'os\.environ\.get\("(\w+)"', source_of("settings")))
    assert asked == {f"TUNIX_RT_{name}" for name in assigned}
    assert asked <= set(re.findall(r"`(TUNIX_RT_\w+)`", GUIDE.read_text(encoding="utf-8")))


def test_as_it_is_the_notebook_runs_the_command_for_submission():
    defaults = dict(re.findall(r'os\.environ\.get\("TUNIX_RT_(\w+)", "([^"]*)"\)', source_of("settings")))
    assert (defaults["CONFIG"], defaults["DATASET"], defaults["DEVICE"], defaults["MODEL"]) == (
        "training/configs/submission_tpu.yaml", "dev-reasoning-v2", "tpu", "",
    )  # fmt: skip


def test_the_guide_shows_the_cell_of_the_notebook():
    shown = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert shown == [source_of("train") + "\n"]


def test_the_notebook_and_the_pages_about_tpus_say_that_no_tpu_run_was_made():
    texts = [source_of("title")] + [
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("guides/kaggle-tpu.md", "guides/tpu-submission.md", "decisions/gemma-choice.md")
    ]
    for text in texts:
        assert "No TPU run has been made by this project" in " ".join(text.split())
        assert "virtual" in text
