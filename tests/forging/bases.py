"""The real bundles that forgeries and mutations start from: recorded ones, and one that the real program makes once for all tests
and their processes, for what needs checkpoints or the secrets in its environment."""

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.bundles import git, make_repository, make_source_repository
from tests.planted import planted_home
from tests.program import ROOT, environment, tunix_rt
from tunix_rt.evidence import data_checks as answers
from tunix_rt.runs.checksums import RUN_SUMS, SUMS
from tunix_rt.runs.record import MANIFEST, README
from tunix_rt.storage import read_json

CPU, GPU = (ROOT / "submission_runs" / name for name in ("m39_cpu_v1", "m40_v1"))
"""20 steps with checkpoints at 10 and 20, without weights; on the GPU, with its CPU companion run."""

STEPS = ["--max-steps", 6, "--set", "training.save_steps=2", "--set", "training.eval_steps=3"]
ASKED = ["--set", "evaluation.evalset=eval_v2", "--set", "evaluation.max_new_tokens=8"]
ROUGH = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
WITH_JAX = [
    "--model", "tiny-gemma3", "--data", "dev-reasoning-v2", "--backend", "jax", "--set", "data.max_length=64",
    "--set", "data.on_overflow=drop", "--set", "training.per_device_train_batch_size=2",
]  # fmt: skip


def shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests that all its processes see."""
    mine = tmp_path_factory.getbasetemp()
    return (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "good bundle é"


def make_good_bundle(folder: Path) -> Path:
    """In `folder`: `repository` with the source, `run` (6 steps on the CPU, checkpoints at 2, 3, 4 and 6, of which 4 and 6 are
    kept), `bundle` without weights, which is returned, and `replayable` with the final model and the checkpoint of step 4.

    Secrets are planted in the environment, and `said.txt` is what the program printed: the tests of secrets look there.
    """
    return _made(folder, ("train", "smoke_tiny", *STEPS, *ASKED))


def make_good_jax_bundle(folder: Path) -> Path:
    """The same by the JAX engine, compiled in haste."""
    return _made(folder, ("train", *WITH_JAX, *STEPS, *ASKED), XLA_FLAGS=ROUGH)


def _made(folder: Path, train: tuple[object, ...], **extra: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        bundle, replayable = folder / "bundle", folder / "replayable"
        if replayable.is_dir():
            return bundle
        repository = make_repository(folder / "repository")
        cache = environment().get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # or everything is made again
        named = planted_home(folder / "home") | {"PYTHONPATH": str(repository / "src"), "XDG_CACHE_HOME": cache} | extra
        collect = ("evidence", "collect", folder / "run", "--repository", repository, "--run-id", "base", "--to")
        printed = ""
        for command in (
            (*train, "--device", "cpu", "--output", folder / "run"),
            (*collect, bundle),
            (*collect, replayable, "--with-model", "--with-checkpoints"),
        ):
            done = tunix_rt(*command, **named)
            assert done.returncode == 0, done.stderr
            printed += done.stdout + done.stderr
        (folder / "said.txt").write_text(printed, encoding="utf-8")
        return bundle


def copy_of(bundle: Path, to: Path) -> Path:
    """A copy to edit: hard links, which `edits` replaces and never writes through; copies on another volume."""
    return Path(shutil.copytree(bundle, to, copy_function=_link))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def run_of(bundle: Path, to: Path) -> Path:
    """The run folder that a bundle was collected from, as far as the bundle contains it: without its weights."""
    shutil.copytree(bundle, to, ignore=shutil.ignore_patterns(SUMS, MANIFEST, README, "cpu"))
    (to / RUN_SUMS).rename(to / SUMS)
    return to


# --- fixtures, for the conftest.py of every folder that uses them -----------------------------------------------------


@pytest.fixture(scope="session")
def cpu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a recorded bundle: no test writes to submission_runs."""
    return Path(shutil.copytree(CPU, tmp_path_factory.mktemp("recorded") / "bundle"))


@pytest.fixture(scope="session")
def gpu_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(GPU, tmp_path_factory.mktemp("recorded") / "bundle"))


@pytest.fixture(scope="session")
def cpu_run(cpu_bundle: Path) -> Path:
    return run_of(cpu_bundle, cpu_bundle.with_name("run"))


@pytest.fixture(scope="session")
def source_repo(cpu_bundle: Path) -> Path:
    """A small repository with the source of the recorded runs on its branch main."""
    if git(ROOT, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this copy has no history to take the source of the recorded runs from")
    return make_source_repository(read_json(cpu_bundle / MANIFEST)["commit"], cpu_bundle.with_name("repository"))


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without weights, made here: takes twenty seconds."""
    return make_good_bundle(shared_by_workers(tmp_path_factory))


@pytest.fixture(scope="session")
def tiny_replayable(tiny_bundle: Path) -> Path:
    """The same with the final model and the checkpoint of step 4."""
    return tiny_bundle.with_name("replayable")


@pytest.fixture(scope="session")
def tiny_repo(tiny_bundle: Path) -> Path:
    return tiny_bundle.with_name("repository")


@pytest.fixture(scope="session")
def tiny_run(tiny_bundle: Path) -> Path:
    """The run folder of both."""
    return tiny_bundle.with_name("run")


@pytest.fixture(scope="session")
def rollout_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on rollouts: three steps of the demo's model, with alarms after the second. Takes ten seconds."""
    folder = shared_by_workers(tmp_path_factory).with_name("rollout run")
    with FileLock(f"{folder}.lock"):
        if not (folder / "result.json").is_file():
            rollouts = "training.rollouts={prompts: 4, samples: 4, max_new_tokens: 64}"
            more = (
                "training.eval_steps=2",
                "training.save_steps=1",
                "data.max_examples=120",
                "evaluation.enabled=false",
            )
            settings = [word for one in (rollouts, *more) for word in ("--set", one)]
            done = tunix_rt("train", "demo_grpo", "--max-steps", 3, *settings, "--output", folder)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def judged_once() -> Iterator[None]:
    """The same answers are judged for every forgery; their judge is a pure function, so that once is enough."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(answers, "judge", functools.lru_cache(maxsize=None)(answers.judge))
        yield
