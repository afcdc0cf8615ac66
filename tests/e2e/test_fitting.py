"""`memory: auto`, a limit of memory, an attempt against the plan, and the account of memory, on real runs of the tiny model.

On a CPU nothing holds a run to its limit, so that a run which the plan refuses can be watched to its end.
"""

import json
import logging
import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from tests.e2e.test_recovery import at, crash, losses, terminate
from tests.integrity import list_problems
from tests.stores import quiet
from tunix_rt.cli.main import cli
from tunix_rt.config.load import dump_yaml, find_config, load_config
from tunix_rt.config.settings import Training
from tunix_rt.engines import memory_meter
from tunix_rt.engines.base import load_backend
from tunix_rt.engines.memory_meter import PhasePeak
from tunix_rt.errors import ConfigError, DoesNotFitError, Preempted
from tunix_rt.models.resolve import resolve_model
from tunix_rt.pipeline import run_pipeline
from tunix_rt.plan.calibration import seen_errors
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.shape import shape_of
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.journal import RunJournal
from tunix_rt.storage import read_json
from tunix_rt.train import memory_report, preflight
from tunix_rt.train.memory_report import PREDICTED_BY, Phases, record_ending

GIB = 2**30
ROWS, STEPS = 16, 4
LIMIT = 0.25
"""GiB: too little for sixteen rows at once, enough for four."""
SPLIT = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


@pytest.fixture(autouse=True, scope="module")
def everything_is_said_and_nothing_proven():
    """As the program sets it up; a fresh process that loads the final model takes seconds, and is a promise of its own."""
    package = logging.getLogger("tunix_rt")
    before = package.level
    package.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)
        yield
    package.setLevel(before)


@pytest.fixture(autouse=True)
def an_empty_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(memory_report, "TINY_BYTES", 0)


SMALL = [
    "training.device=cpu", f"training.max_steps={STEPS}", "training.save_steps=2", "training.eval_steps=2", "data.max_length=128",
    "evaluation.enabled=false", "data.on_overflow=drop", "data.validation_fraction=0.02",
    f"training.per_device_train_batch_size={ROWS}",
]  # fmt: skip


def configured(*overrides: str, memory: str = "auto", limit: float | None = LIMIT, resume: bool = False):
    asked = [*SMALL, f"training.memory={memory}", f"training.memory_limit_gib={'null' if limit is None else limit}"]
    flags = {"training.resume_from_checkpoint": "auto" if resume else None}
    return load_config(find_config("smoke_tiny"), overrides=[*asked, *overrides], flags=flags)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A whole run under the limit."""
    run = RunDir(tmp_path_factory.mktemp("fitted") / "run")
    run_pipeline(configured(), run.root, progress=quiet)
    return run


@pytest.fixture(scope="module")
def crashed_once(tmp_path_factory):
    """The same, crashed right after step 3: its newest checkpoint is of step 2."""
    run = RunDir(tmp_path_factory.mktemp("crashed") / "run")
    with pytest.raises(KeyboardInterrupt):
        run_pipeline(configured(), run.root, progress=at(("train", 3), crash))
    return run


@pytest.fixture
def crashed(crashed_once, tmp_path):
    return RunDir(shutil.copytree(crashed_once.root, tmp_path / "run"))


def split_of(run: RunDir) -> tuple[int, int]:
    """Rows at once and how often, as the run was trained."""
    training = load_config(run.config).training
    return training.per_device_train_batch_size, training.gradient_accumulation_steps


# --- memory: auto -----------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_fit_takes_the_best_settings_that_do_and_says_so(fitted):
    with pytest.raises(DoesNotFitError, match="does not fit: "):
        run_pipeline(configured(memory="as_written"), fitted.root.with_name("refused"), progress=quiet)
    rows, often = split_of(fitted)
    assert rows < ROWS == rows * often, "the rows of a step are kept"
    committed, plan = read_json(fitted.precommit), read_json(fitted.plan)
    fitting = committed["fitting"]
    assert fitting["chosen"] == dict(zip(SPLIT, (rows, often), strict=True))
    assert fitting["written"] == dict(zip(SPLIT, (ROWS, 1), strict=True))
    assert fitting["predicted_bytes"] <= fitting["available_bytes"] == LIMIT * GIB and not fitting["changes_the_result"]
    assert plan["fitting"] == fitting and plan["memory_limit_bytes"] == LIMIT * GIB and plan["fit"]["fits"]
    assert plan["fit"]["available_bytes"] == LIMIT * GIB
    said = fitted.log.read_text()
    assert f"Memory: auto sets {SPLIT[0]}={rows}, {SPLIT[1]}={often}: " in said and "as written, " in said
    assert "only the plan is judged by it: nothing limits a run on a CPU" in said
    assert list_problems(fitted.root) == []


@pytest.mark.parametrize("limit", [None, pytest.param(8.0, marks=pytest.mark.slow)])
def test_a_continued_run_goes_on_with_what_was_chosen_whatever_is_free_now(crashed, fitted, limit):
    before, chosen = crashed.precommit.read_bytes(), split_of(crashed)
    run_pipeline(configured(limit=limit, resume=True), crashed.root, progress=quiet)
    assert crashed.precommit.read_bytes() == before and split_of(crashed) == chosen
    assert losses(crashed) == losses(fitted)
    assert read_json(crashed.plan)["fitting"] == json.loads(before)["fitting"]
    assert crashed.log.read_text().count("Memory: auto, as the run began: ") == 1
    assert list_problems(crashed.root) == []


def test_a_continued_run_that_no_longer_fits_is_refused_and_solves_nothing(crashed):
    before = {path: path.read_bytes() for path in crashed.root.rglob("*") if path.is_file()}
    with pytest.raises(DoesNotFitError, match="does not fit: ") as caught:
        run_pipeline(configured(limit=0.06, resume=True), crashed.root, progress=quiet)
    assert caught.value.exit_code == 5
    assert {path: path.read_bytes() for path in crashed.root.rglob("*") if path.is_file()} == before


def test_a_run_is_continued_by_its_own_config_too_and_by_no_other(crashed, tmp_path):
    (tmp_path / "own.yaml").write_text(dump_yaml(load_config(crashed.config)))
    flags = {"training.resume_from_checkpoint": "auto"}
    with pytest.raises(ConfigError, match=rf"{SPLIT[0]} is "):
        run_pipeline(configured(f"{SPLIT[0]}=2", resume=True), crashed.root, progress=quiet)
    with pytest.raises(ConfigError, match=r"training\.memory"):
        run_pipeline(configured(memory="as_written", resume=True), crashed.root, progress=quiet)
    run_pipeline(load_config(tmp_path / "own.yaml", flags=flags), crashed.root, progress=quiet)
    assert read_json(crashed.result)["status"] == "completed"


def test_where_nothing_fits_the_run_is_refused_as_it_is_written(tmp_path):
    with pytest.raises(DoesNotFitError, match="does not fit: "):
        run_pipeline(configured(limit=0.02), tmp_path / "run", progress=quiet)
    assert load_config(RunDir(tmp_path / "run").config).training.per_device_train_batch_size == ROWS


def test_what_fits_and_cannot_be_faster_stays_as_written(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="tunix_rt")
    run = RunDir(tmp_path / "run")
    run_pipeline(configured("training.max_steps=1", limit=None), run.root, progress=quiet)
    fitting = read_json(run.precommit)["fitting"]
    assert fitting["chosen"] == {} and any(
        "auto keeps the settings as written: it fits" in one for one in caplog.messages
    )
    assert split_of(run) == (ROWS, 1) and "memory_limit_bytes" not in read_json(run.plan)


# --- an attempt -------------------------------------------------------------------------------------------------------


def asked_for(folder, *more: str) -> list[str]:
    settings = [*SMALL, "training.max_steps=2", f"training.memory_limit_gib={LIMIT}"]
    return ["train", "smoke_tiny", "--output", str(folder), *(f"--set={one}" for one in settings), *more]


def test_an_attempt_is_made_against_the_plan_alone_aloud_and_written_down(tmp_path):
    from click.testing import CliRunner

    refused = CliRunner().invoke(cli, asked_for(tmp_path / "run"))
    assert refused.exit_code == 5
    done = CliRunner().invoke(cli, asked_for(tmp_path / "run", "--allow-oom-attempt", "--json"))
    assert done.exit_code == 0, done.output
    run = RunDir(tmp_path / "run")
    attempt = read_json(run.result)["oom_attempt"]
    assert attempt == read_json(run.plan)["oom_attempt"] and not read_json(run.plan)["fit"]["fits"]
    assert attempt["predicted_bytes"] > attempt["available_bytes"] == LIMIT * GIB
    said = run.log.read_text()
    assert said.count("Continuing because of --allow-oom-attempt: does not fit: ") == 1
    other = CliRunner().invoke(cli, [*asked_for(tmp_path / "other", "--allow-oom-attempt"), "--device", "cuda"])
    assert other.exit_code == 4, "no other refusal is overridden"


def test_an_attempt_that_runs_out_of_memory_ends_with_what_was_predicted_and_measured(tmp_path, monkeypatch):
    backend = load_backend("torch")
    real, tried = backend.summed_loss, []

    def exhausted(*given, **named):
        tried.append(named)
        if len(tried) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return real(*given, **named)

    monkeypatch.setattr(backend, "summed_loss", exhausted)
    run = RunDir(tmp_path / "run")
    with pytest.raises(
        DoesNotFitError, match=r"(?s)out of memory in .*GiB in use and no more available; .* GiB predicted"
    ) as caught:
        run_pipeline(configured(memory="as_written"), run.root, progress=quiet, oom_attempt=True)
    assert caught.value.exit_code == 5 and caught.value.fix
    result, memory = read_json(run.result), read_json(run.memory)
    assert (result["status"], result["exit_code"]) == ("failed", 5) and "oom_attempt" in result
    assert "error" not in memory["phases"]["out_of_memory"]
    measured = memory["phases"]["out_of_memory"]["measured_bytes"]  # 0 in a process that had so much room from before
    assert 0 <= measured <= result["memory"]["measured_bytes"] == memory["measured_bytes"]
    assert seen_errors() == [], "what was cut off says nothing of how wrong a prediction was"


# --- the account ------------------------------------------------------------------------------------------------------


SUPERVISED = PREDICTED_BY.keys() - {"held-out questions"}
"""Phases of a run that does not train on rollouts."""


def test_every_phase_is_predicted_and_measured(tmp_path):
    run = RunDir(tmp_path / "run")
    settings = ["evaluation.enabled=along", "evaluation.max_new_tokens=4"]
    run_pipeline(configured(*settings, memory="as_written", limit=None), run.root, progress=quiet)
    memory, steps = read_json(run.memory), [json.loads(line) for line in run.metrics.read_bytes().splitlines()]
    assert memory["schema"] == "tunix-rt/memory/2"
    assert set(memory["phases"]) == SUPERVISED
    for phase in memory["phases"].values():
        assert phase["error"] == pytest.approx(phase["predicted_bytes"] / max(1, phase["measured_bytes"]) - 1)
    peaks = {name: phase["measured_bytes"] for name, phase in memory["phases"].items()}
    assert memory["measured_bytes"] == max(peaks.values()) >= max(step["peak_bytes"] for step in steps)
    assert memory["error"] == pytest.approx(memory["predicted_bytes"] / memory["measured_bytes"] - 1)
    assert [step["peak_bytes"] for step in steps] == sorted(step["peak_bytes"] for step in steps), (
        "of the whole process"
    )
    assert memory["measured_as"] == f"{memory_meter.MEASURE}; up to the end of each phase"
    (seen,) = seen_errors()
    assert (seen.predicted_bytes, seen.measured_bytes) == (memory["predicted_bytes"], memory["measured_bytes"])
    assert (seen.backend, seen.layers, seen.recipe, seen.parameters) == (
        "torch",
        "plain",
        recipe_of(Training()).describe(),
        read_json(run.result)["parameters"],
    )


def test_a_run_that_was_stopped_has_its_account_and_goes_on_from_it(tmp_path, signals_heard_again):
    run = RunDir(tmp_path / "run")
    settings = ["evaluation.enabled=along", "evaluation.max_new_tokens=4"]
    with pytest.raises(Preempted):
        run_pipeline(
            configured(*settings, memory="as_written", limit=None), run.root, progress=at(("train", 2), terminate)
        )
    stopped = read_json(run.memory)
    assert stopped["status"] == "preempted" == read_json(run.result)["status"]
    assert {"load", "generation", "held-out", "first_step", "interrupted"} <= set(stopped["phases"])
    assert "error" not in stopped["phases"]["interrupted"]
    assert read_json(run.result)["memory"]["measured_bytes"] == stopped["measured_bytes"]
    assert list_problems(run.root) == [] and seen_errors() == []
    run_pipeline(configured(*settings, memory="as_written", limit=None, resume=True), run.root, progress=quiet)
    whole = read_json(run.memory)
    assert whole["status"] == "completed" and set(whole["phases"]) == SUPERVISED | {"interrupted", "resume"}
    for name, phase in stopped["phases"].items():
        assert whole["phases"][name]["measured_bytes"] >= phase["measured_bytes"]
    (seen,) = seen_errors()
    assert seen.measured_bytes == whole["measured_bytes"] >= stopped["measured_bytes"]
    assert list_problems(run.root) == []


def test_a_run_that_failed_has_its_account_too(crashed):
    told = read_json(crashed.memory)
    assert told["status"] == "failed" and {"load", "first_step", "checkpoint"} <= set(told["phases"])
    assert "interrupted" not in told["phases"] and list_problems(crashed.root) == []


def test_a_run_that_is_ended_in_the_middle_of_a_call_has_what_was_measured_before(tmp_path):
    config = configured(memory="as_written", limit=None)
    shape = shape_of(resolve_model(config.model.model_name_or_path, weights="random").config)
    report, phases = RunJournal(run=RunDir(tmp_path), continued=False), Phases()
    peak = PhasePeak(used_bytes=7, measure="bytes", alone=True)
    phases.end(SimpleNamespace(take_peak=lambda: peak), "load")
    plan = predict_run(shape, config, device="cpu")
    context = SimpleNamespace(journal=report, run=report.run, plan=plan, phases=phases)
    report.before_end.append(partial(record_ending, context))
    report.end_now(Preempted("the grace is over", fix="go on"))
    told, result = read_json(report.run.memory), read_json(report.run.result)
    assert told["status"] == result["status"] == "preempted" and result["memory"]["measured_bytes"] == 7
    assert list(told["phases"]) == ["load"] and "memory.json" in report.run.hashes.read_text()


def test_a_run_that_takes_more_than_was_predicted_says_so_at_its_end(tmp_path, monkeypatch, caplog):
    real = preflight.plan_run

    def too_little(*given, **named):
        planned = real(*given, **named)
        return replace(planned, memory=replace(planned.memory, peak_bytes=2**16))

    def warnings_of(name, **how):
        caplog.clear()
        run_pipeline(
            configured("training.max_steps=1", memory="as_written", limit=None), tmp_path / name, progress=quiet, **how
        )
        return [one for one in caplog.messages if re.match("Measured memory is [0-9.]+ % above the prediction", one)]

    assert warnings_of("as-predicted") == [] and len(seen_errors()) == 1
    monkeypatch.setattr(preflight, "plan_run", too_little)
    assert warnings_of("profiled", profile=1) == [] and len(seen_errors()) == 1, "a profile is in the measurement"
    (line,) = warnings_of("run")
    assert "more than its margin" in line and read_json(tmp_path / "run" / "memory.json")["error"] < -0.2
    assert len(seen_errors()) == 2
    monkeypatch.setattr(memory_report, "TINY_BYTES", 2**40)
    assert warnings_of("tiny") == [] and len(seen_errors()) == 2
