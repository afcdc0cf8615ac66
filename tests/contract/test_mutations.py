"""A single byte or value of a bundle changed is found, whatever it is, and nothing breaks the verifier.

The bundles are committed ones of real runs, on a GPU and on a CPU; `scripts/mutations` tries 10,000, on fresh runs too.
"""

import functools
import shutil

import pytest

from tests.forging.bases import REAL, copy_of
from tests.forging.mutating import KINDS, RESEALED, Mutation, apply, mutations
from tests.program import ROOT
from tunix_rt.evidence import rescore
from tunix_rt.evidence.verifying import findings_of

RUNS = ROOT / "submission_runs"
COUNTS = {"m40_v2": 100, "m39_cpu_v2": 185, "gemma3_270m_gsm8k_v1": 15}
"""Together 300. The last takes longest."""
LARGEST_SHARE = 0.35
"""Of changes with everything resealed that are accepted; the share that `scripts/mutations` counts is in the documentation."""


@pytest.fixture(scope="module", autouse=True)
def _judged_once():
    """The same answers are judged for every mutation; their judge is a pure function, so that once is enough."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rescore, "judge", functools.lru_cache(maxsize=None)(rescore.judge))
        yield


@pytest.mark.parametrize("name", COUNTS)
def test_300_single_mutations_are_all_found(name, tmp_path):
    accepted, kinds = [], set()
    for number, mutation in enumerate(mutations(RUNS / name, COUNTS[name], seed=1)):
        folder = copy_of(RUNS / name, tmp_path / str(number))
        assert apply(mutation, folder)
        kinds.add(mutation.kind)
        if not findings_of(folder, None):
            accepted.append(mutation.words)
        shutil.rmtree(folder)
    assert accepted == [] and kinds == set(KINDS)


def test_the_mutated_bundles_are_300_times_real_ones():
    assert sum(COUNTS.values()) == 300 and set(REAL) <= COUNTS.keys()


def test_most_values_changed_are_found_though_everything_was_resealed(tmp_path):
    """Not all: seconds, names of a machine and the like are the run's own word."""
    bundle, accepted, tried = RUNS / "m40_v2", [], 0
    for number, mutation in enumerate(mutations(bundle, 40, seed=1, kinds=(RESEALED,))):
        folder = copy_of(bundle, tmp_path / str(number))
        if apply(mutation, folder):
            tried += 1
            accepted += [mutation.words] if not findings_of(folder, None) else []
        shutil.rmtree(folder)
    assert tried >= 25, "most changes survive resealing"
    assert len(accepted) <= LARGEST_SHARE * tried, accepted


def test_a_value_that_resealing_computes_again_is_no_mutation(tmp_path):
    folder = copy_of(RUNS / "m40_v2", tmp_path / "bundle")
    forged = (folder / "result.json").read_bytes().replace(b'"metrics_head": "', b'"metrics_head": "0', 1)
    undone = Mutation(kind=RESEALED, file="result.json", how="the head of the chain", content=forged)
    assert not apply(undone, folder) and findings_of(folder, None) == []


def test_a_mutation_is_a_function_of_its_seed_and_changes_one_file(tmp_path):
    good = RUNS / "m40_v2"
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
