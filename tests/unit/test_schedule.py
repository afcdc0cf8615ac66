"""The learning rate is a pure function of the step, and no step is wasted on a rate of zero."""

import math

import pytest

from tunix_rt.config.optimizers import learning_rate
from tunix_rt.config.settings import Training

SHAPES = ["linear", "cosine", "constant"]


def curve(total, **settings):
    training = Training(learning_rate=1.0, **settings)
    return [learning_rate(step, total=total, training=training) for step in range(1, total + 1)]


def test_linear_falls_in_equal_parts_from_the_full_rate():
    assert curve(4) == [1.0, 0.75, 0.5, 0.25]


def test_cosine_is_half_way_at_half_time():
    assert curve(4, lr_scheduler_type="cosine") == pytest.approx(
        [1.0, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 - math.cos(math.pi / 4))]
    )


def test_constant_stays():
    assert curve(3, lr_scheduler_type="constant") == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_parts_and_ends_at_the_full_rate():
    assert curve(6, warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 2 / 3, 1 / 3])


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_from_zero_is_the_curve_of_transformers(shape):
    from torch import zeros
    from torch.nn import Parameter
    from torch.optim import SGD
    from transformers import get_scheduler

    optimizer = SGD([Parameter(zeros(1))], lr=1.0)
    name = "constant_with_warmup" if shape == "constant" else shape
    schedule = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=11)
    theirs = []
    for _ in range(11):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ours = curve(11, warmup_steps=4, warmup_from_zero=True, lr_scheduler_type=shape)
    assert ours == pytest.approx(theirs, rel=1e-12, abs=0) and ours[0] == 0


@pytest.mark.parametrize(
    ("asked", "total", "steps"), [(0.05, 200, 10), (0.1, 25, 3), (0.5, 4, 2), (0, 10, 0), (1, 10, 1)]
)
def test_warm_up_below_one_is_a_share_of_all_steps_rounded_up(asked, total, steps):
    rates = curve(total, warmup_steps=asked, lr_scheduler_type="constant")
    assert rates == pytest.approx([(i + 1) / steps for i in range(steps)] + [1.0] * (total - steps))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("total", [1, 2, 3, 10, 57])
@pytest.mark.parametrize("warmup", [0, 0.05, 0.99, 1, 5, 10, 1000])
def test_no_step_has_a_rate_of_zero_or_above_the_one_asked_for(shape, total, warmup):
    rates = curve(total, warmup_steps=warmup, lr_scheduler_type=shape)
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_warm_up_the_rate_never_rises(shape):
    rates = curve(40, warmup_steps=7, lr_scheduler_type=shape)
    assert rates[:7] == sorted(rates[:7])
    assert rates[6:] == sorted(rates[6:], reverse=True)


def test_the_rate_scales_with_the_one_asked_for():
    small = Training(learning_rate=2e-5, warmup_steps=2)
    assert learning_rate(3, total=10, training=small) == pytest.approx(2e-5 * curve(10, warmup_steps=2)[2])
