"""The good bundles that forgeries and mutations start from: of a short real run here, and what passes for one of a GPU.

There need be no GPU: every static check accepts the second, which is itself the forgery `dressed_with_care`.
"""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from tests.bundles import make_repository
from tests.program import tunix_rt

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
    """In `folder`: `repository` with the source, `run`, and `bundle`, which comes back. Made once, whoever asks."""
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
        train = (*train, "--device", "cpu", "--output", folder / "run")
        collect = ("evidence", "collect", folder / "run", "--to", bundle, "--repository", repository)
        for asked in (train, collect):
            done = tunix_rt(*asked, PYTHONPATH=source, **extra)
            assert done.returncode == 0, done.stderr
        return bundle


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
    """A copy to edit: hard links, which the forger's tools replace and never write through."""
    return Path(shutil.copytree(bundle, to, copy_function=_link))


def _link(source: str, target: str) -> None:
    os.link(source, target)
