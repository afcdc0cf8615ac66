"""Honest runs of every kind become bundles that are accepted: a verifier that doubts the truth is of no use.

Each is a short real run by the real program, collected and verified at L1 with the repository; some are replayed. Those that
are committed are verified as they are.
"""

import importlib.util
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.bundles import make_repository
from tests.forging.bases import ROUGH, WITH_JAX
from tests.program import ROOT, command, environment, tunix_rt
from tunix_rt.evidence.claims import SCHEMA
from tunix_rt.evidence.verifying import findings_of
from tunix_rt.rundir import read_json

COMMITTED = sorted(path.parent for path in (ROOT / "submission_runs").glob("*/bundle.json"))
TORCH = ("smoke_tiny",)
SHORT = ("--max-steps", 6, "--set", "training.save_steps=2", "--set", "training.eval_steps=3")
SHORT += ("--set", "evaluation.max_new_tokens=4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """One kind of run: what it is told, how its first processes end, and what is asked of its bundle."""

    name: str
    engine: tuple[object, ...] = TORCH
    settings: tuple[str, ...] = ()
    more: tuple[object, ...] = ()
    ends: tuple[object, ...] = ()
    """How each process but the last ends: a signal once three steps are taken, or the words that make it stop by itself."""
    collect: tuple[str, ...] = ()
    without_weights: bool = False
    level: str = "L1"
    extra: dict[str, str] = field(default_factory=dict)


RUNS = (
    Honest(name="torch", level="L3"),
    Honest(name="torch-deterministic", settings=("training.deterministic=true",)),
    Honest(name="torch-bf16", settings=("training.dtype=bfloat16",)),
    Honest(name="torch-adafactor", settings=("training.optim=adafactor",), level="L3"),
    Honest(name="torch-adamw-8bit", settings=("training.optim=adamw_8bit",)),
    Honest(name="torch-lora", settings=("training.lora_rank=4",), level="L3"),
    Honest(name="torch-accumulation", settings=("training.gradient_accumulation_steps=2",)),
    Honest(name="torch-one-example-per-row", settings=("data.packing=false",)),
    Honest(name="torch-without-answers", settings=("evaluation.enabled=false",)),
    Honest(
        name="torch-without-heldout",
        settings=("data.validation_fraction=0", "evaluation.evalset=eval_v2", "training.eval_steps=null"),
    ),
    Honest(name="torch-memory-auto", settings=("training.memory=auto",)),
    Honest(name="torch-profiled", more=("--profile", 2)),
    Honest(name="torch-continued", ends=(("--stop-after", 3),), level="L3"),
    Honest(name="torch-continued-twice", ends=(("--stop-after", 1), ("--stop-after", 5))),
    Honest(name="torch-sigterm", ends=(signal.SIGTERM,), settings=("training.max_steps=14",)),
    Honest(name="torch-killed", ends=(signal.SIGKILL,), settings=("training.max_steps=14",)),
    Honest(name="torch-time-budget", ends=(("--set", "training.time_budget=9"),), settings=("training.max_steps=60",)),
    Honest(name="torch-without-weights", without_weights=True),
    Honest(name="torch-with-checkpoints", collect=("--with-checkpoints", "--checkpoint-mib", "128"), level="L3"),
    Honest(name="jax", engine=WITH_JAX, level="L3"),
    Honest(name="jax-continued", engine=WITH_JAX, ends=(("--stop-after", 3),)),
    Honest(
        name="jax-four-devices", engine=WITH_JAX,
        extra={"XLA_FLAGS": f"{ROUGH} --xla_force_host_platform_device_count=4"},
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return make_repository(tmp_path_factory.mktemp("repository"))


def _train(run: Path, honest: Honest, repository: Path) -> None:
    """To the end, through all processes."""
    given = [part for setting in honest.settings for part in ("--set", setting)]
    asked = ("train", *honest.engine, "--device", "cpu", *SHORT, *given, "--output", run)
    extra = {"PYTHONPATH": str(repository / "src"), "XLA_FLAGS": ROUGH} | honest.extra
    resume: tuple[str, ...] = ()
    for end in honest.ends:
        if isinstance(end, signal.Signals):
            _interrupted(command(*asked, *resume), run, end, extra)
        else:
            done = tunix_rt(*asked, *end, *resume, **extra)
            assert done.returncode == 7, done.stderr
        resume = ("--resume",)
    done = tunix_rt(*asked, *honest.more, *resume, **extra)
    assert done.returncode == 0, done.stderr


def _interrupted(told: list[str], run: Path, how: signal.Signals, extra: dict[str, str]) -> None:
    """A process that is sent `how` once it has taken three steps."""
    with subprocess.Popen(
        told, env=environment(**extra), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as program:
        deadline = time.monotonic() + 200
        while program.poll() is None and time.monotonic() < deadline:
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= 3:
                program.send_signal(how)
                break
            time.sleep(0.002)
        assert program.wait(timeout=200) == (7 if how is signal.SIGTERM else -how)


@pytest.mark.slow
@pytest.mark.parametrize("honest", RUNS, ids=lambda one: one.name)
def test_an_honest_run_is_collected_and_its_bundle_accepted(honest, repository, tmp_path):
    if honest.name.startswith("jax") and importlib.util.find_spec("jax") is None:
        pytest.skip("needs jax")
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    _train(run, honest, repository)
    for weights in run.rglob("*.safetensors") if honest.without_weights else ():
        weights.unlink()
    done = tunix_rt("evidence", "collect", run, "--to", bundle, "--repository", repository, *honest.collect)
    assert done.returncode == 0, done.stderr
    assert findings_of(bundle, repository) == []
    asked = ("evidence", "verify", bundle, "--repository", repository, "--require", honest.level)
    done = tunix_rt(*asked, **{"XLA_FLAGS": ROUGH} | honest.extra)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("bundle", COMMITTED, ids=lambda path: path.name)
def test_a_committed_bundle_is_accepted(bundle):
    assert findings_of(bundle, None) == []


def test_at_least_twenty_honest_runs_are_tried_by_both_engines_and_on_a_gpu():
    assert len(RUNS) >= 20 and {one.name.split("-")[0] for one in RUNS} == {"torch", "jax"}
    assert any(read_json(bundle / "bundle.json")["device"] == "cuda" for bundle in COMMITTED)
    newest = [bundle for bundle in COMMITTED if read_json(bundle / "bundle.json")["schema"] == SCHEMA]
    assert {read_json(bundle / "bundle.json")["device"] for bundle in newest} == {"cpu", "cuda"}
    assert {read_json(bundle / "bundle.json")["backend"] for bundle in newest} == {"torch", "jax"}
