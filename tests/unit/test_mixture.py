"""Datasets with weights: shares, order and rows are functions of seed and step, and what cannot be mixed is refused."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from tests.program import in_process, refused
from tests.samples import record, write_lines
from tests.unit.test_prepare import ready, settings
from tunix_rt.config.load import dump_yaml, load_config
from tunix_rt.data.mixture import MixedDataset, mixed_order, rows_of_epoch
from tunix_rt.data.packing import rows_of_step, steps_per_epoch
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.models.secrets import refuse_addresses
from tunix_rt.plan.report import most_rows

MIXTURES = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0.01, 100)).map(
        lambda pair: MixedDataset(key="a", sha256="0" * 64, rows=pair[0], weight=pair[1])
    ),
    min_size=2, max_size=4,
).map(tuple)  # fmt: skip


@limits(max_examples=60, derandomize=True)
@given(mixture=MIXTURES, seed=st.integers(0, 2**32 - 1), per_step=st.integers(1, 9))
def test_each_epoch_has_its_shares_and_no_row_is_taken_again_before_every_other(mixture, seed, per_step):
    rows, weights = sum(part.rows for part in mixture), sum(part.weight for part in mixture)
    shares = rows_of_epoch(mixture)
    assert sum(shares) == rows
    assert all(abs(share - rows * part.weight / weights) < 1 for share, part in zip(shares, mixture, strict=True))
    taken = np.zeros(rows, dtype=int)
    for epoch in range(5):
        order = mixed_order(seed, epoch, mixture)
        steps = range(epoch * steps_per_epoch(rows, per_step), (epoch + 1) * steps_per_epoch(rows, per_step))
        drawn = [
            rows_of_step(step + 1, row_count=rows, rows_per_step=per_step, seed=seed, mixture=mixture)
            for step in reversed(steps)
        ]
        assert list(itertools.chain(*reversed(drawn))) == order.tolist(), "whatever was drawn before"
        taken += np.bincount(order, minlength=rows)
        start = 0
        for part, share in zip(mixture, shares, strict=True):
            own = taken[start : start + part.rows]
            assert own.sum() == (epoch + 1) * share and own.max() - own.min() <= 1
            start += part.rows


def test_epochs_and_seeds_have_other_orders_and_grouping_keeps_the_shares():
    mixture = tuple(MixedDataset(key=key, sha256="", rows=40, weight=weight) for key, weight in (("a", 3), ("b", 1)))
    orders = {tuple(mixed_order(seed, epoch, mixture)) for seed in (0, 1) for epoch in range(3)}
    assert len(orders) == 6
    given = {"row_count": 80, "rows_per_step": 4, "seed": 0, "mixture": mixture}
    grouped = [row for step in range(1, 21) for row in rows_of_step(step, lengths=[*range(80)], **given)]
    assert sorted(grouped) == sorted(mixed_order(0, 0, mixture)) and sum(row < 40 for row in grouped) == 60


@pytest.fixture
def two(tmp_path):
    return [
        str(write_lines(tmp_path / f"{name}.jsonl", *(record(number) for number in range(*numbers))))
        for name, numbers in (("sums", (0, 30)), ("more", (100, 110)))
    ]


def test_rows_of_datasets_are_packed_apart_and_recorded_with_their_weights(two, tokenizer):
    data = ready(settings("unused", dataset={two[0]: 1, two[1]: 3.0}, validation_fraction=0.1), tokenizer)
    plain = ready(settings("unused", dataset=two, validation_fraction=0.1), tokenizer)
    assert [(part.key, part.weight) for part in data.mixture] == [(two[0], 1.0), (two[1], 3.0)]
    assert sum(part.rows for part in data.mixture) == len(data.rows) and plain.mixture == ()
    assert (data.traces, data.heldout_traces, data.dataset.sha256, data.store.folder) == (
        plain.traces, plain.heldout_traces, plain.dataset.sha256, plain.store.folder)  # fmt: skip
    for row in range(len(data.rows)):
        texts = {int(data.store.examples.entries[at]["file"]) for at in data.rows.examples_of(row)}
        assert texts == {int(row >= data.mixture[0].rows)}
    share = rows_of_epoch(data.mixture)[1] / len(data.rows)
    assert abs(share - 0.75) < 1 / len(data.rows) and f"{two[1]} {share:.1%}" in data.describe()


def test_what_cannot_be_mixed_is_refused_with_the_way_out(two, tokenizer, tmp_path):
    copy = write_lines(tmp_path / "copy.jsonl", *(record(number) for number in range(30)))
    with pytest.raises(InputError, match="one dataset has two names"):
        ready(settings("unused", dataset={two[0]: 1, str(copy): 1}), tokenizer)
    with pytest.raises(InputError, match=r"more.jsonl: weight 1e-05 gives it no row in an epoch"):
        ready(settings("unused", dataset={two[0]: 1, two[1]: 1e-5}), tokenizer)
    with pytest.raises(InputError, match=r"more.jsonl: no example is left to train on"):
        ready(settings("unused", dataset={two[0]: 1, two[1]: 1}, max_examples=20), tokenizer)
    with pytest.raises(ConfigError, match=r"data\.dataset takes a name or a path, not a URL"):
        refuse_addresses({"data": {"dataset": {"a": 1, "https://me:word@x.example/b": 1}}})
    for wrong in ("{a: 0, b: 1}", "{a: -1, b: 1}", "{a: x, b: 1}", "{a: true, b: 1}", "{a: 1}"):
        with pytest.raises(ConfigError, match=r"data\.dataset"):
            load_config(None, overrides=[f"data.dataset={wrong}"])


def test_the_settings_come_back_and_data_check_shows_the_mixture(two, tmp_path):
    config = load_config(None, overrides=[f"data.dataset={{{two[0]}: 2, {two[1]}: 6}}"])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config and config.data.key == ", ".join(two)
    done = in_process("data", "check", "--config", tmp_path / "config.yaml", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert [(part["key"], part["weight"]) for part in facts["mixture"]] == [(two[0], 2), (two[1], 6)]
    assert sum(part["rows"] for part in facts["mixture"]) == facts["rows"]
    shown = in_process("data", "check", "--config", tmp_path / "config.yaml")
    assert re.search(r"mixture +an epoch is .* passes\)", " ".join(shown.stdout.split()))
    assert "name one in --config" in refused(in_process("data", "check"), 2)


def test_a_plan_counts_the_rows_of_every_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("a", 30), ("b", 10)):
        (tmp_path / "datasets" / name).mkdir(parents=True)
        (tmp_path / "datasets" / name / "manifest.json").write_text(json.dumps({"rows": rows}))
    for dataset, rows in (({"a": 1, "b": 3}, 40), (["a", "b"], 40), ("b", 10), ({"a": 1, "other": 1}, None)):
        assert most_rows(settings("unused", dataset=dataset, validation_fraction=0)) == rows
