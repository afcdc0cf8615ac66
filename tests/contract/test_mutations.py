"""A single byte or value of a bundle that is changed is found; sealed again, it touches no claim that is more than self-reported.

`scripts/mutations` tries 12,000 of them; the counts are in docs/concepts/evidence.md.
"""

import shutil

import pytest

from benchmarks.mutations import REMEMBERED, is_defect, outcome, remember_answers
from tests.forging.bases import copy_of
from tests.forging.edits import edited
from tests.forging.mutating import RESEALED, UNSEALED, Mutation, apply, mutations, touched
from tests.forging.sealing import reseal
from tunix_rt.evidence.examine import examine


@pytest.fixture(scope="module")
def original(cpu_bundle):
    with pytest.MonkeyPatch.context() as patched:
        for module, function in REMEMBERED:
            patched.setattr(module, function, getattr(module, function))
        remember_answers()
        yield examine(cpu_bundle)


def rows_of(cpu_bundle, original, folder, count, kinds):
    for number, mutation in enumerate(mutations(cpu_bundle, count, 1, kinds)):
        copy = copy_of(cpu_bundle, folder / str(number))
        yield {"kind": mutation.kind, "file": mutation.file, "how": mutation.how} | outcome(mutation, copy, original)
        shutil.rmtree(copy)


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_single_mutations_are_all_found(count, cpu_bundle, original, tmp_path):
    rows = list(rows_of(cpu_bundle, original, tmp_path, count, UNSEALED))
    assert [row for row in rows if row["outcome"] != "found"] == []
    assert {row["kind"] for row in rows} == set(UNSEALED) and len({row["file"] for row in rows}) > 15


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_no_resealed_mutation_changes_a_claim_that_was_checked(count, cpu_bundle, original, tmp_path):
    rows = list(rows_of(cpu_bundle, original, tmp_path, count, (RESEALED,)))
    assert [row for row in rows if is_defect(row)] == []
    outcomes = [row["outcome"] for row in rows]
    assert outcomes.count("found") > outcomes.count("accepted") > 0, "some values only the run states"


def test_a_changed_claim_counts_as_touched_with_its_label(cpu_bundle, original, tmp_path):
    folder = copy_of(cpu_bundle, tmp_path / "slower")
    with edited(folder / "result.json") as result:
        result["seconds"] += 100
    reseal(folder)
    after = examine(folder)
    assert after.findings == [] and [(one.name, one.label) for one in touched(original, after)] == [
        ("time", "self-reported")
    ]
    accepted = {"kind": RESEALED, "outcome": "accepted", "claims": {"steps": "consistent"}}
    assert is_defect(accepted) and not is_defect(accepted | {"claims": {"time": "self-reported"}})
    assert is_defect({"kind": UNSEALED[0], "outcome": "accepted", "claims": {}})


def test_a_value_that_resealing_computes_again_is_no_mutation(cpu_bundle, tmp_path):
    folder = copy_of(cpu_bundle, tmp_path / "bundle")
    forged = (folder / "result.json").read_bytes().replace(b'"metrics_head": "', b'"metrics_head": "0', 1)
    assert not apply(Mutation(kind=RESEALED, file="result.json", how="head", content=forged), folder)
    assert examine(folder).findings == []


def test_mutations_are_a_function_of_the_seed(cpu_bundle):
    first, again, other = (list(mutations(cpu_bundle, 30, seed)) for seed in (7, 7, 8))
    assert first == again != other
