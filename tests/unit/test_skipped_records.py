"""L1 counts the skipped records of a run again, as far as that needs no tokenizer."""

from types import SimpleNamespace

import pytest

from tests.samples import record, write_lines
from tunix_rt.config.load import build_config
from tunix_rt.data.sources import find_dataset
from tunix_rt.evidence.data_checks import data_problems
from tunix_rt.evidence.facts import Inputs
from tunix_rt.runs.schemas import DatasetFacts, Seeds


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
    sha256 = find_dataset(str(path)).sha256
    hashes = dict.fromkeys(("style_sha256", "merkle_root"), "0" * 64)
    facts = DatasetFacts(
        key="a", sha256=sha256, traces=traces, heldout_traces=2, rows=1, format="trace", template="plain", **hashes,
        **({"skipped": skipped} if skipped else {}),
    )  # fmt: skip
    config = build_config({"dataset": "a", "skip_bad": skip_bad, "validation_fraction": 0.2}, "test")
    commitment = SimpleNamespace(dataset=facts, seeds=Seeds(seed=0, data_seed=0), evalset=None)
    run = SimpleNamespace(where="", commitment=commitment, config=config, answered=False)
    problems = list(data_problems(run, Inputs(data=(str(path),))))
    assert problems == ([f"precommit.json: {words}"] if words else [])
