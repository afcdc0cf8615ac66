"""`tunix_rt.api` computes what the verbs compute, and its page says what it has."""

import inspect
import json
import re
import subprocess
import sys
import threading

import pytest

from tests.program import ROOT, in_process
from tunix_rt import api
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError, TunixError

PAGE = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
TWO_STEPS = {
    "training.max_steps": 2, "training.device": "cpu", "evaluation.enabled": False, "data.max_length": 128,
    "data.on_overflow": "drop", "data.validation_fraction": 0, "training.eval_steps": None, "training.save_steps": 1,
}  # fmt: skip


def test_the_page_has_every_function_with_its_signature():
    functions = [name for name in api.__all__ if inspect.isfunction(getattr(api, name))]
    assert sorted(re.findall(r"^## (\w+)", PAGE, re.MULTILINE)) == functions
    for name in functions:
        signature = inspect.signature(getattr(api, name))
        bare = signature.replace(
            parameters=[one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
        returned = getattr(signature.return_annotation, "__name__", str(signature.return_annotation)).strip("\"'")
        assert f"\n{name}{bare} -> {returned}\n" in PAGE


def test_a_configuration_is_a_name_a_mapping_or_an_object_and_mistakes_are_listed():
    by_name = api.configured("smoke_tiny", {"training.seed": 7})
    assert isinstance(by_name, RunConfig) and by_name.training.seed == 7
    assert api.configured(by_name) == by_name
    assert api.configured({"training": {"lr": 0.5}}, {"data.max_length": 64}).data.max_length == 64
    with pytest.raises(ConfigError, match="2 mistake"):
        api.configured({"training": {"seed": -1}}, {"data.max_length": 1})


def test_a_plan_is_that_of_the_verb():
    answer = api.plan("smoke_tiny", on="t4")
    printed = json.loads(in_process("plan", "smoke_tiny", "--on", "t4", "--json").stdout)
    assert answer.outlook.fit.fits and answer.outlook.plan.peak_bytes == printed["memory"]["peak_bytes"]
    assert not api.plan({"model": {"model_name_or_path": "llama-3.1-8b"}}, on="t4").outlook.fit.fits


@pytest.fixture
def failed(tmp_path):
    """A run whose callback raises at the second of its steps, and the steps that it got."""
    steps = []

    def stop_at_the_second(step):
        steps.append(step.step)
        if step.step == 2:
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        api.train("smoke_tiny", tmp_path / "run", settings=TWO_STEPS, on_step=stop_at_the_second)
    return tmp_path / "run", steps


def test_every_step_is_passed_on_once_it_is_recorded_and_what_a_callback_raises_ends_the_run(failed):
    folder, steps = failed
    assert steps == [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    with pytest.raises(ConfigError, match="already contains a run"):
        api.train("smoke_tiny", folder, settings=TWO_STEPS)


@pytest.mark.slow
def test_a_run_that_a_callback_ended_is_resumed(failed):
    folder, steps = failed
    run = api.train("smoke_tiny", folder, settings=TWO_STEPS, resume=True, on_step=lambda one: steps.append(one.step))
    assert steps == [1, 2, 2] and run.record.result.status == "completed" and api.verify(folder).level == "L1"


def test_a_thread_is_refused_and_nothing_heavy_is_imported_before_it_is_used():
    caught = []

    def call():
        try:
            api.train("smoke_tiny", "nowhere")
        except TunixError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "in a thread" in caught[0].problem
    code = "import sys, tunix_rt.api; print(sorted({'torch', 'jax', 'transformers', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True ") and "completed L1" in done.stdout


def test_an_evaluation_is_that_of_the_verb():
    how = {"evalset": "eval_v2", "limit": 4, "device": "cpu", "max_new_tokens": 8}
    words = [word for name, value in how.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert api.evaluate("tiny-gemma3", **how).summary == json.loads(
        in_process("evaluate", "tiny-gemma3", *words, "--json").stdout
    )
