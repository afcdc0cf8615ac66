"""Batches made ahead by a thread are those that would have been made in time, and its troubles are those of the loop."""

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines.torch.attention import Attention
from tunix_rt.engines.torch.model import Placing, placed_steps
from tunix_rt.errors import InputError

pytestmark = pytest.mark.gpu

ATTENTION = Attention(name="varlen", training="tunix_rt_varlen", generating="sdpa", why="")
PLACING = Placing(device=torch.device("cuda"), attention=ATTENTION, windows=(), least=(4, 256))


def batch_of():
    draw = np.random.default_rng(0)
    examples = [
        Example(ids=draw.integers(3, 1000, size, dtype=np.int32), trained=np.ones(size, dtype=np.bool_))
        for size in draw.integers(5, 60, 120).tolist()
    ]
    rows = make_rows(examples, max_length=250, packing=True)
    return partial(batch_of_step, rows, micro_batch_size=4, accumulation=2, seed=1, pad_id=0)


def parts(placed):
    return [placed.ids, placed.positions, placed.places, placed.targets, placed.boundaries["cu_seq_lens_q"]]


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_what_the_thread_lays_out_is_what_the_loop_would_have():
    for step, ready in placed_steps(batch_of(), PLACING, first=1, total=20):
        placed = ready()
        placed.wait()
        torch.cuda._sleep(2_000_000)  # the next batch is copied while this one waits for its turn
        expected = [PLACING(micro) for micro in batch_of()(step).micro_batches]
        for one, other in zip(placed.micro_batches, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))
    assert not workers()


def test_an_error_while_a_batch_is_made_is_raised_where_the_batch_is_wanted():
    def broken(step):
        if step == 3:
            raise InputError("the row is gone", fix="fetch it")
        return batch_of()(step)

    taken = []
    with pytest.raises(InputError, match="the row is gone"):
        for step, ready in placed_steps(broken, PLACING, first=1, total=5):
            ready()
            taken.append(step)
    assert taken == [1, 2] and not workers()


def test_a_loop_that_is_left_leaves_no_thread_behind():
    def slow(step):
        time.sleep(0.2)
        return batch_of()(step)

    steps = placed_steps(slow, PLACING, first=1, total=50)
    next(steps)[1]()
    steps.close()
    assert not workers()
