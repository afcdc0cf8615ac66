"""L1 counts the skipped records of a run again, as far as that needs no tokenizer."""

from types import SimpleNamespace

import pytest

from tests.samples import record, write_lines
from tunix_rt.config.load import build_config
from tunix_rt.data.sources import find_dataset, find_datasets
from tunix_rt.evidence.data_checks import data_problems
from tunix_rt.evidence.facts import Inputs
from tunix_rt.runs.schemas import DatasetFacts, Seeds, ValidationFacts


@pytest.mark.parametrize(
    ("skipped", "traces", "skip_bad", "words"),
    [
        (2, 8, True, None),
        (3, 7, True, None),  # one more for its tokens: self-reported
        (None, 8, True, "0 records skipped, 2 of the dataset cannot be read"),
        (1, 9, True, "1 records skipped, 2 of the dataset cannot be read"),
        (2, 9, True, "9 + 2 traces, the dataset has 10"),
        (2, 8, False, "2 records skipped, 2 of the dataset cannot be read"),
    ],
)
def test_a_wrong_number_of_skipped_records_is_found(tmp_path, skipped, traces, skip_bad, words):
    path = write_lines(tmp_path / "a.jsonl", *map(record, range(10)), {"prompt": "?"}, [1])
    recorded = {"skipped": skipped} if skipped else {}
    problems = found((path,), {"traces": traces, **recorded}, skip_bad=skip_bad, validation_fraction=0.2)
    assert problems == ([f"precommit.json: {words}"] if words else [])


@pytest.mark.parametrize(
    ("skipped", "items", "skip_bad", "words"),
    [
        (1, 2, True, None),
        (2, 1, True, None),
        (1, 3, True, "3 traces, data.validation has 2"),
        (1, 1, True, "1 traces, data.validation has 2"),
        (1, 2, False, "1 records skipped, 1 of data.validation cannot be read"),
        (None, 2, False, "0 records skipped, 1 of data.validation cannot be read"),
        (None, 2, True, "0 records skipped, 1 of data.validation cannot be read"),
    ],
)
def test_the_skipped_records_of_the_validation_file_are_counted_the_same_way(tmp_path, skipped, items, skip_bad, words):
    path = write_lines(tmp_path / "a.jsonl", *map(record, range(10)))
    other = write_lines(tmp_path / "b.jsonl", *map(record, range(20, 22)), {"prompt": "?"})
    recorded = {"skipped": skipped} if skipped else {}
    apart = ValidationFacts(key="b", sha256=find_dataset(str(other)).sha256, items=items, **recorded)
    facts = {"traces": 10, "heldout_traces": items, "validation": apart}
    problems = found((path, other), facts, skip_bad=skip_bad, validation="b")
    assert problems == ([f"precommit.json: {words}"] if words else [])


def found(paths, recorded, **settings):
    """What L1 finds in a commitment to the first of these files."""
    hashes = {"style_sha256": "0" * 64, "merkle_root": "0" * 64, "sha256": find_dataset(str(paths[0])).sha256}
    named = {"key": "a", "heldout_traces": 2, "rows": 1, "format": "trace", "template": "plain"}
    facts = DatasetFacts(**(named | hashes | recorded))
    config = build_config({"dataset": "a", **settings}, "test")
    commitment = SimpleNamespace(dataset=facts, seeds=Seeds(seed=0, data_seed=0), evalset=None)
    run = SimpleNamespace(where="", commitment=commitment, config=config, answered=False)
    return list(data_problems(run, Inputs(data=tuple(map(str, paths)))))


def test_every_selection_of_the_named_files_is_tried_and_each_file_is_read_once(tmp_path, caplog):
    paths = [str(write_lines(tmp_path / f"{n}.jsonl", record(n))) for n in range(7)]
    (tmp_path / "page.jsonl").write_text("<html></html>")
    inputs = Inputs(data=(str(tmp_path / "page.jsonl"), *paths))
    assert inputs.dataset(find_datasets(paths[1:6:2]).sha256) == tuple(paths[1:6:2])
    assert inputs.dataset("0" * 64) is None
    assert caplog.text.count("is an HTML page") == 1
