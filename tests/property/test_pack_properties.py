"""Whatever the examples are: packing loses, repeats and overfills nothing, and a step is a pure function of its number."""

import random
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_rt.data.packing import IGNORED, batch_of_step, collate, make_rows, pack, rows_of_step, steps_per_epoch
from tunix_rt.data.render import Example

PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    examples: list[Example]
    max_length: int
    packing: bool


@st.composite
def packed(draw):
    """Examples whose ids say where they come from (example * 1000 + place), so that none can be mistaken."""
    max_length = draw(st.integers(min_value=2, max_value=40))
    lengths = draw(st.lists(st.integers(min_value=2, max_value=max_length), min_size=1, max_size=20))
    examples = []
    bits = draw(st.integers(min_value=0, max_value=2 ** sum(lengths) - 1))
    for number, length in enumerate(lengths, start=1):
        trained = np.asarray([bits >> place & 1 for place in range(length)], np.bool_)
        bits >>= length
        examples.append(Example(ids=np.arange(length, dtype=np.int32) + number * 1000, trained=trained))
    return Packed(examples=examples, max_length=max_length, packing=draw(st.booleans()))


@given(st.lists(st.integers(min_value=1, max_value=50), max_size=60), st.integers(min_value=50, max_value=120))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_packing_loses_nothing_repeats_nothing_overfills_nothing(lengths, max_length):
    rows = pack(lengths, max_length)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(len(row) and sum(lengths[index] for index in row) <= max_length for row in rows)


def first_fit_decreasing(lengths, max_length):
    """The textbook's way: look at every row."""
    rows, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((row for row, free in enumerate(room) if free >= lengths[index]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(max_length)
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


@given(st.lists(st.integers(min_value=1, max_value=60), max_size=80), st.integers(min_value=1, max_value=120))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_packing_is_first_fit_decreasing_row_by_row(lengths, max_length):
    assert [row.tolist() for row in pack(lengths, max_length)] == first_fit_decreasing(lengths, max_length)


@given(st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=60))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_packing_needs_less_than_twice_the_rows_that_the_tokens_fill(lengths):
    rows = pack(lengths, 50)
    assert len(rows) <= max(1, 2 * sum(lengths) / 50)


@given(packed())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_example_is_in_exactly_one_row_whole_and_in_order(case):
    rows = make_rows(case.examples, max_length=case.max_length, packing=case.packing)
    found = []
    for row in rows:
        assert len(row.ids) == len(row.trained) == len(row.positions) <= case.max_length
        starts = [*np.flatnonzero(row.positions == 0).tolist(), len(row.ids)]
        for start, end in pairwise(starts):
            assert row.positions[start:end].tolist() == list(range(end - start))
            found.append((row.ids[start:end].tolist(), row.trained[start:end].tolist()))
    assert sorted(found) == sorted((e.ids.tolist(), e.trained.tolist()) for e in case.examples)


@given(packed())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_label_crosses_the_boundary_of_an_example_and_padding_is_never_a_target(case):
    rows = make_rows(case.examples, max_length=case.max_length, packing=case.packing)
    batch = collate(rows, pad_id=PAD)
    for ids, labels, positions, row in zip(batch.ids, batch.labels, batch.positions, rows, strict=True):
        length = len(row.ids)
        assert (ids[length:] == PAD).all()
        assert (labels[length:] == IGNORED).all()
        padding = positions[length:].tolist()
        longest = max(len(e.ids) for e in case.examples)
        assert all(0 <= place < longest for place in padding), (
            "a longest example is all a model is sure to have room for"
        )
        assert all(then in (now + 1, 0) for now, then in pairwise([int(row.positions[-1]), *padding]))
        assert case.packing or padding == list(range(length, len(ids)))
        for place in np.flatnonzero(labels != IGNORED):
            # the loss predicts label t from the state at t - 1: both must belong to one example
            assert labels[place] == ids[place]
            assert ids[place] // 1000 == ids[place - 1] // 1000
            assert positions[place] == positions[place - 1] + 1
    wanted = sum(int(e.trained[1:].sum()) for e in case.examples)
    assert batch.targets == wanted


@given(packed(), st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 5), st.integers(1, 60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_cutting_a_step_into_micro_batches_keeps_its_rows_and_their_order(case, seed, micro, accumulation, step):
    rows = make_rows(case.examples, max_length=case.max_length, packing=case.packing)
    chosen = rows_of_step(step, row_count=len(rows), rows_per_step=micro * accumulation, seed=seed)
    batch = batch_of_step(rows, step, micro_batch_size=micro, accumulation=accumulation, seed=seed, pad_id=PAD)
    seen = [ids[ids != PAD].tolist() for part in batch.micro_batches for ids in part.ids]
    assert seen == [rows[index].ids.tolist() for index in chosen]
    sizes = [len(part.ids) for part in batch.micro_batches]
    assert len(sizes) <= accumulation
    assert all(size == micro for size in sizes[:-1]) and 1 <= sizes[-1] <= micro
    assert batch.tokens == sum(len(rows[index].ids) for index in chosen)
    assert batch.target_tokens == sum(part.targets for part in batch.micro_batches)


def walk(row_count, rows_per_step, seed):
    """The order as a loader with state would have it: shuffle, hand out, shuffle again."""
    epoch = 0
    while True:
        left = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(row_count).tolist()
        while left:
            yield left[:rows_per_step]
            left = left[rows_per_step:]
        epoch += 1


@pytest.mark.parametrize("part", range(10))
def test_step_k_is_the_kth_of_a_full_walk_for_1000_random_seeds_epochs_and_steps(part):
    draw = random.Random(part)
    for _ in range(100):
        row_count, rows_per_step = draw.randint(1, 60), draw.randint(1, 12)
        seed, epoch = draw.randrange(2**32), draw.randint(0, 6)
        per_epoch = steps_per_epoch(row_count, rows_per_step)
        step = epoch * per_epoch + draw.randint(1, per_epoch)
        expected = next(islice(walk(row_count, rows_per_step, seed), step - 1, None))
        assert rows_of_step(step, row_count=row_count, rows_per_step=rows_per_step, seed=seed) == expected


@given(
    row_count=st.integers(1, 80),
    rows_per_step=st.integers(1, 90),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_row_is_trained_once_per_epoch(row_count, rows_per_step, seed, epoch):
    per_epoch = steps_per_epoch(row_count, rows_per_step)
    steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
    seen = [i for s in steps for i in rows_of_step(s, row_count=row_count, rows_per_step=rows_per_step, seed=seed)]
    assert sorted(seen) == list(range(row_count))
