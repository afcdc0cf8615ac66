"""A single byte or value of a bundle changed is found, whatever it is, and nothing breaks the verifier."""

import functools
import shutil
from pathlib import Path

import pytest

from tests.forging.bases import copy_of, make_good_bundle, shared_by_workers
from tests.forging.mutating import KINDS, apply, mutations
from tunix_rt.evidence import rescore
from tunix_rt.evidence.verifying import findings_of

COUNT = 300


@pytest.fixture(scope="module", autouse=True)
def _judged_once():
    """The same answers are judged for every mutation; their judge is a pure function, so that once is enough."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rescore, "judge", functools.lru_cache(maxsize=None)(rescore.judge))
        yield


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return make_good_bundle(shared_by_workers(tmp_path_factory))


def test_300_single_mutations_are_all_found(good, tmp_path):
    accepted, kinds = [], set()
    for number, mutation in enumerate(mutations(good, COUNT, seed=1)):
        folder = copy_of(good, tmp_path / str(number))
        apply(mutation, folder)
        kinds.add(mutation.kind)
        if not findings_of(folder, None):
            accepted.append(mutation.words)
        shutil.rmtree(folder)
    assert accepted == [] and kinds == set(KINDS)


def test_a_mutation_is_a_function_of_its_seed_and_changes_one_file(good, tmp_path):
    first, again = (list(mutations(good, 30, seed=7)) for _ in range(2))
    assert first == again
    for number, mutation in enumerate(first):
        folder = copy_of(good, tmp_path / str(number))
        apply(mutation, folder)
        changed = {
            path.relative_to(good).as_posix()
            for path in good.rglob("*")
            if path.is_file() and path.read_bytes() != (folder / path.relative_to(good)).read_bytes()
        }
        assert changed - {"SHA256SUMS"} == {mutation.file} - {"SHA256SUMS"} and changed
