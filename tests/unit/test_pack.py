"""Rows, their order and the arrays made of them, on examples small enough to write down."""

import time

import numpy as np
import pytest

from tunix_rt.data.packing import (
    IGNORED,
    batch_of_step,
    collate,
    facts_of_rows,
    make_rows,
    pack,
    rows_of_step,
    steps_per_epoch,
    total_steps,
)
from tunix_rt.data.render import Example


def example(*ids, masked=1):
    """Ids of which the first `masked` are the question."""
    return Example(ids=np.asarray(ids, np.int32), trained=np.arange(len(ids)) >= masked)


def indices(packing):
    return [row.tolist() for row in packing]


def test_the_longest_examples_are_placed_first_and_short_ones_fill_the_gaps():
    assert indices(pack([3, 9, 4, 1, 6], max_length=10)) == [[1, 3], [4, 2], [0]]


def test_equal_lengths_keep_the_order_of_the_file():
    assert indices(pack([5, 5, 5, 5], max_length=10)) == [[0, 1], [2, 3]]


def test_a_packed_row_restarts_its_positions_with_each_example():
    [row] = make_rows([example(11, 12, 13), example(21, 22)], max_length=8, packing=True)
    assert row.ids.tolist() == [11, 12, 13, 21, 22]
    assert row.positions.tolist() == [0, 1, 2, 0, 1]
    assert row.trained.tolist() == [False, True, True, False, True]


def test_without_packing_every_example_is_a_row_in_file_order():
    rows = make_rows([example(1, 2), example(3, 4, 5), example(6, 7)], max_length=8, packing=False)
    assert [row.ids.tolist() for row in rows] == [[1, 2], [3, 4, 5], [6, 7]]


def test_labels_are_the_trained_ids_in_place_and_nothing_else():
    rows = make_rows([example(11, 12, 13, 14, masked=2), example(21, 22)], max_length=8, packing=True)
    batch = collate(rows, pad_id=99)
    assert batch.labels.tolist() == [[IGNORED, IGNORED, 13, 14, IGNORED, 22]]
    assert batch.targets == 3


def test_the_first_token_of_an_example_is_no_target_even_when_marked_trained():
    rows = make_rows([example(11, 12, masked=0), example(21, 22, masked=0)], max_length=8, packing=True)
    assert collate(rows, pad_id=0).labels.tolist() == [[IGNORED, 12, IGNORED, 22]]


def test_padding_comes_last_is_ignored_and_continues_the_positions():
    rows = make_rows([example(1, 2, 3, 4), example(5, 6)], max_length=4, packing=False)
    batch = collate(rows, pad_id=0)
    assert batch.ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.labels.tolist() == [[IGNORED, 2, 3, 4], [IGNORED, 6, IGNORED, IGNORED]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_padding_stays_below_the_longest_example_and_restarts_only_beside_packed_rows():
    """A model with 4 positions takes packed rows of 7 tokens; what pads them may not ask for a fifth."""
    rows = make_rows([example(1, 2, 3, 4), example(5, 6, 7), example(8, 9)], max_length=7, packing=True)
    batch = collate(rows, pad_id=0)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2]]
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6, 7], [8, 9, 0, 0, 0, 0, 0]]


def test_a_hundred_thousand_examples_are_packed_in_a_moment():
    lengths = 1 + np.arange(100_000) * 7919 % 1000
    started = time.process_time()
    rows = pack(lengths, 1024)
    assert time.process_time() - started < 1, "by looking at every row it takes a minute"
    assert sum(map(len, rows)) == 100_000


def test_a_target_whose_id_is_the_padding_id_stays_a_target():
    """GPT-2 pads with its end-of-sequence token, which must be learned."""
    rows = make_rows([example(5, 6, 50256), example(5, 6, 7, 50256)], max_length=8, packing=False)
    batch = collate(rows, pad_id=50256)
    assert batch.labels.tolist() == [[IGNORED, 6, 50256, IGNORED], [IGNORED, 6, 7, 50256]]


def test_the_last_step_of_an_epoch_takes_the_rows_that_are_left():
    assert steps_per_epoch(10, 4) == 3
    sizes = [len(rows_of_step(step, row_count=10, rows_per_step=4, seed=0)) for step in range(1, 7)]
    assert sizes == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"), [(1, None, 3), (3, None, 9), (0.5, None, 2), (0.01, None, 1), (3, 5, 5)]
)
def test_the_number_of_steps_follows_epochs_unless_max_steps_is_set(epochs, max_steps, steps):
    assert total_steps(10, 4, epochs=epochs, max_steps=max_steps) == steps


def rows_of(count):
    return make_rows([example(*range(1, 3 + i)) for i in range(count)], max_length=64, packing=False)


def test_the_order_differs_between_epochs_and_between_seeds():
    def order(seed, epoch):
        return [rows_of_step(epoch * 10 + step, row_count=20, rows_per_step=2, seed=seed)[0] for step in range(1, 11)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_of_the_rows_is_what_it_was():
    """Golden values: numpy may change the stream behind `permutation`, and a continued run would train on other rows."""
    assert rows_of_step(1, row_count=10, rows_per_step=10, seed=0) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert rows_of_step(2, row_count=10, rows_per_step=10, seed=0) == [9, 1, 3, 8, 7, 6, 0, 4, 2, 5]


def test_the_hash_of_a_batch_names_its_rows_and_their_order_not_how_they_are_cut():
    rows = rows_of(8)
    cut = [
        batch_of_step(rows, 1, micro_batch_size=micro, accumulation=8 // micro, seed=0, pad_id=0) for micro in (1, 2, 8)
    ]
    assert len({batch.sha256 for batch in cut}) == 1
    assert len({batch.target_tokens for batch in cut}) == 1
    other = batch_of_step(rows, 1, micro_batch_size=8, accumulation=1, seed=1, pad_id=0)
    assert other.sha256 != cut[0].sha256, "the same rows in another order are another batch"


@pytest.mark.parametrize("part", ["ids", "trained", "positions"])
def test_the_hash_of_a_row_changes_with_each_of_its_parts(part):
    from dataclasses import replace

    [row] = rows_of(1)
    changed = getattr(row, part).copy()
    changed[-1] = not changed[-1] if part == "trained" else changed[-1] + 1
    assert replace(row, **{part: changed}).sha256 != row.sha256
    assert facts_of_rows([replace(row, **{part: changed})]).merkle_root != facts_of_rows([row]).merkle_root


def test_rows_grouped_by_length_are_all_there_and_need_less_padding():
    lengths = np.random.default_rng(0).integers(5, 200, 103).tolist()

    def epoch(**more):
        return [rows_of_step(step, row_count=103, rows_per_step=4, seed=3, **more) for step in range(1, 27)]

    def padding(steps):
        return sum(max(lengths[row] for row in rows) - lengths[row] for rows in steps for row in rows)

    grouped = epoch(lengths=lengths)
    assert sorted(row for rows in grouped for row in rows) == list(range(103)) and len(grouped[-1]) == 3
    assert grouped == epoch(lengths=lengths) and padding(grouped) < padding(epoch()) / 4
    assert [max(lengths[row] for row in rows) for rows in grouped] != sorted(
        (max(lengths[row] for row in rows) for rows in grouped), reverse=True
    )
