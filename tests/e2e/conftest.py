"""One small run of the embedded model, and a bundle of it, made once by the real program and shared by the tests of both."""

import pytest

from tests.bundles import collect, make_repository
from tests.program import tunix_rt

SMALL = ["--max-steps", 3, "--set", "training.save_steps=3", "--set", "training.eval_steps=3"]
SMALL += ["--set", "evaluation.max_new_tokens=4"]


@pytest.fixture(scope="session")
def tiny_repo(tmp_path_factory):
    return make_repository(tmp_path_factory.mktemp("tiny") / "repo")


@pytest.fixture(scope="session")
def tiny_run(tiny_repo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-runs") / "cpu"
    done = tunix_rt(
        "train", "smoke_tiny", "--device", "cpu", "--output", folder, *SMALL, PYTHONPATH=str(tiny_repo / "src")
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny_run, tiny_repo, tmp_path_factory):
    output = tmp_path_factory.mktemp("tiny-bundles") / "new" / "v1"
    done = collect(tiny_run, output, tiny_repo)
    assert done.returncode == 0, done.stderr
    return output
