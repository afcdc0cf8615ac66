"""The good bundles that forgeries and mutations start from: of a short real run here, what passes for one of a GPU, and
bundles of real runs on a GPU that are committed.

There need be no GPU: every static check accepts the second, which is itself the forgery `dressed_with_care`.
"""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from tests.bundles import make_repository
from tests.planted import planted_home
from tests.program import ROOT, environment, tunix_rt

REAL = ("m40_v2", "gemma3_270m_gsm8k_v1")
"""Committed bundles of runs on a GPU: one of random weights with its run on the CPU, one of a pretrained model."""

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
    return (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "good-bundle"


def make_good_bundle(folder: Path) -> Path:
    """In `folder`: `repository` with the source, `run`, and `bundle`, which comes back. Made once, whoever asks.

    Secrets are planted in the environment, and `said.txt` is what the program said: the tests of secrets look there.
    """
    return _made(folder, ("train", "smoke_tiny", *STEPS, *ASKED))


def make_good_jax_bundle(folder: Path) -> Path:
    """The same by the JAX engine, compiled in haste."""
    return _made(folder, ("train", *WITH_JAX, *STEPS, *ASKED), XLA_FLAGS=ROUGH)


def _made(folder: Path, train: tuple[object, ...], **extra: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        bundle = folder / "bundle"
        if bundle.is_dir():
            return bundle
        repository = make_repository(folder / "repository")
        source = str(repository / "src")
        cache = environment().get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # or everything is made again
        named = planted_home(folder / "home") | {"PYTHONPATH": source, "XDG_CACHE_HOME": cache} | extra
        train = (*train, "--device", "cpu", "--output", folder / "run")
        collect = ("evidence", "collect", folder / "run", "--to", bundle, "--repository", repository)
        said = ""
        for asked in (train, collect):
            done = tunix_rt(*asked, **named)
            assert done.returncode == 0, done.stderr
            said += done.stdout + done.stderr
        (folder / "said.txt").write_text(said, encoding="utf-8")
        return bundle


def base_bundle(base: str, good: Path) -> Path:
    """The bundle that a forgery of that base starts from, where `good` is of the run here."""
    if base in REAL:
        return ROOT / "submission_runs" / base
    return gpu_bundle(good) if base == "gpu" else good


def gpu_bundle(good: Path) -> Path:
    """A bundle that passes for one of a GPU: the good one, dressed with all the care there is. Beside it, made once."""
    from tests.forging.devices import forge_dressed_with_care

    folder = good.with_name("gpu-bundle")
    with FileLock(folder.with_name(".gpu-lock")):
        if not folder.is_dir():
            staged = copy_of(good, folder.with_name(".gpu-staged"))
            forge_dressed_with_care(staged)
            staged.rename(folder)
    return folder


def copy_of(bundle: Path, to: Path) -> Path:
    """A copy to edit: hard links, which the forger's tools replace and never write through; copies on another volume."""
    return Path(shutil.copytree(bundle, to, copy_function=_link))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
