"""Every scripted forgery is found at the level it is written for, and nothing it does breaks the verifier."""

import functools
import re
from pathlib import Path

import pytest

from tests.forging.bases import base_bundle, copy_of, gpu_bundle, make_good_bundle, shared_by_workers
from tests.forging.catalogue import Base, Forgery, all_forgeries
from tests.program import tunix_rt
from tunix_rt.evidence import rescore
from tunix_rt.evidence.findings import Finding
from tunix_rt.evidence.verifying import findings_of

FORGERIES = all_forgeries()
TRIALS = [
    pytest.param(
        one, base, id=one.name if len(one.bases) == 1 else f"{one.name}-{base}",
        # What is tried on several bundles is tried by default on the smaller real one.
        marks=[pytest.mark.slow] * (len(one.bases) > 1 and base != "m40_v2"),
    )
    for one in FORGERIES
    for base in one.bases
]  # fmt: skip
STATIC = [trial for trial in TRIALS if trial.values[0].level == "L1"]
DEEPER = [trial for trial in TRIALS if trial.values[0].level != "L1"]
UNPRINTED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@pytest.fixture(scope="module", autouse=True)
def _judged_once():
    """The same answers are judged for every forgery; their judge is a pure function, so that once is enough."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rescore, "judge", functools.lru_cache(maxsize=None)(rescore.judge))
        yield


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return make_good_bundle(shared_by_workers(tmp_path_factory))


def findings_after(forgery: Forgery, base: Base, good: Path, folder: Path) -> list[Finding]:
    copy_of(base_bundle(base, good), folder)
    forgery.forge(folder)
    looked_up = forgery.group == "source" and base == "cpu"  # which takes as long as all other checks together
    return findings_of(folder, good.parent / "repository" if looked_up else None)


def test_the_good_bundles_are_accepted(good):
    assert findings_of(good, good.parent / "repository") == []
    assert findings_of(gpu_bundle(good), None) == []


@pytest.mark.parametrize(("forgery", "base"), STATIC)
def test_a_forgery_that_a_static_check_can_find_is_found(forgery, base, good, tmp_path):
    found = findings_after(forgery, base, good, tmp_path / "bundle")
    assert {one.level for one in found} & {"L0", "L1"}, f"{forgery.what}: accepted"
    assert [one.problem for one in found if UNPRINTED.search(one.problem)] == []


@pytest.mark.parametrize(("forgery", "base"), DEEPER)
def test_a_forgery_left_to_a_deeper_check_is_not_found_by_a_static_one(forgery, base, good, tmp_path):
    """Else the table in the documentation would say that it needs more than it does."""
    assert findings_after(forgery, base, good, tmp_path / "bundle") == []


def test_there_are_enough_forgeries_and_few_are_missed():
    assert len(FORGERIES) >= 60
    missed = [one for one in FORGERIES if one.level == "missed"]
    assert all(one.why for one in missed) and len(missed) / len(FORGERIES) <= 0.05


def test_the_program_says_what_is_wrong_with_a_forgery_and_exits_with_6(good, tmp_path):
    forgery = next(one for one in FORGERIES if one.name == "escape_in_name")
    copy_of(good, tmp_path / "bundle")
    forgery.forge(tmp_path / "bundle")
    done = tunix_rt("evidence", "verify", tmp_path / "bundle")
    assert done.returncode == 6 and "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "run_manifest.json" in done.stdout
