"""One small run of the embedded model and its bundle, made once by the real program for all tests that look at one."""

import functools

import pytest

from tests.forging.bases import make_good_bundle, shared_by_workers
from tunix_rt.evidence import rescore


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory):
    return make_good_bundle(shared_by_workers(tmp_path_factory))


@pytest.fixture(scope="session")
def tiny_repo(tiny_bundle):
    return tiny_bundle.parent / "repository"


@pytest.fixture(scope="session")
def tiny_run(tiny_bundle):
    """Six steps with checkpoints at 2, 4 and 6; the questions are those of eval_v2."""
    return tiny_bundle.parent / "run"


@pytest.fixture(scope="module")
def judged_once():
    """The same answers are judged for every edit; their judge is a pure function, so that once is enough."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rescore, "judge", functools.lru_cache(maxsize=None)(rescore.judge))
        yield
