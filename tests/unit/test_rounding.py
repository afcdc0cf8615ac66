"""Rounding at random is right on average, exact where there is nothing to round, and loses neither NaN nor Inf."""

import numpy as np
import pytest
import torch

from tunix_rt.engines.torch import update_rules as rounding

SIGNED, UNSIGNED = rounding.tables(torch.device("cpu"))
DEVIATIONS = 5
"""Standard deviations that a mean may be off: once in two million draws of a normal number, and seeds are fixed."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def bits(seed=0):
    return rounding.Bits(generator=generator(seed))


def rounded(values, seed=0):
    values = torch.as_tensor(values, dtype=torch.float32).clone()
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    rounding.round_to_bfloat16_(target, values, bits(seed))
    return target


def floats(*patterns):
    return torch.from_numpy(np.array(patterns, dtype=np.uint32).view(np.float32))


def patterns_of(target):
    return target.view(torch.int16).numpy().view(np.uint16)


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_seed_step_and_index_each_make_other_bits():
    drawn = [rounding.seed_of(*where, "cuda") for where in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (12, 3, 4))]
    assert len(set(drawn)) == len(drawn)
    assert rounding.seed_of(1, 2, 3, "cuda") == drawn[0]


@pytest.mark.parametrize("shape", [(1000,), (5, 256)])
def test_the_shards_of_a_slice_draw_the_bits_of_the_whole_slice(shape):
    whole = bits(7).like(torch.empty(shape), 0, 1 << 16)
    found, rows = [], shape[0] // 5
    for first in range(0, shape[0], rows):
        shard = bits(7)
        shard.skipped, shard.elements = first * whole[0].numel(), whole.numel()
        found.append(shard.like(torch.empty(rows, *shape[1:]), 0, 1 << 16))
    assert torch.equal(torch.cat(found), whole)


def test_a_seed_fits_the_generator_that_takes_it():
    many = [(rounding.seed_of(0, step, 7, "cpu"), rounding.seed_of(0, step, 7, "cuda")) for step in range(200)]
    assert max(cpu for cpu, _ in many) < 2**32 and len({cpu for cpu, _ in many}) == 200
    assert 2**62 < max(cuda for _, cuda in many) < 2**63
    torch.Generator().manual_seed(max(cuda for _, cuda in many))  # torch takes it as it is


# --- weights ---------------------------------------------------------------------------------------------------------


def test_every_bfloat16_there_is_stays_as_it_is():
    patterns = np.arange(2**16, dtype=np.uint32)
    exact = torch.from_numpy((patterns << 16).view(np.float32))
    is_nan = exact.isnan().numpy()
    for seed in range(30):  # enough for every one of the 65,536 random numbers to be drawn for some of them
        found = rounded(exact, seed)
        assert np.array_equal(patterns_of(found)[~is_nan], patterns[~is_nan].astype(np.uint16))
        assert found.isnan().numpy()[is_nan].all()


@pytest.mark.parametrize(
    "low",
    [
        0x3F80_0000, 0xBF80_0000, 0x3FFF_0000, 0x0000_0000, 0x8000_0000, 0x007F_0000, 0x4049_0000, 0x0001_0000,
        0x7F7E_0000,
    ],
    ids=["1", "-1", "below 2", "0", "-0", "the last denormal", "3.14", "the first denormal", "below the largest"],
)  # fmt: skip
@pytest.mark.parametrize("share", [1, 0x0800, 0x8000, 0xFFFF])
def test_the_upper_neighbour_is_taken_with_the_share_of_the_way_to_it(low, share):
    count = 2**16
    found = patterns_of(rounded(floats(low | share).expand(count), seed=low + share))
    lower, upper = low >> 16, (low >> 16) + 1
    assert set(np.unique(found)) <= {lower, upper}
    expected = share / 2**16
    bound = DEVIATIONS * np.sqrt(expected * (1 - expected) / count)
    assert abs((found == upper).mean() - expected) <= bound


def test_the_mean_of_many_roundings_is_the_number():
    values = torch.randn(64, generator=generator(1)) * torch.logspace(-30, 30, 64)
    count = 4000
    drawn = rounded(values.expand(count, 64).reshape(-1), seed=2).view(count, 64).double()
    spacing = torch.from_numpy(np.spacing(values.abs().numpy())).double() * 2**16
    error = (drawn.mean(dim=0) - values.double()).abs()
    assert (error <= DEVIATIONS * 0.5 * spacing / count**0.5).all()


def test_a_negative_number_is_rounded_like_its_magnitude():
    values = torch.randn(1000, generator=generator(4))
    assert torch.equal(rounded(-values, seed=5), -rounded(values, seed=5))


def test_a_finite_number_never_becomes_inf():
    """To the nearest, the upper half of these would. They are cut to the largest bfloat16."""
    beyond = floats(0x7F7F_0000, 0x7F7F_0001, 0x7F7F_8000, 0x7F7F_FFFF)
    for sign in (1, -1):
        for seed in range(200):
            found = rounded(beyond * sign, seed)
            assert (found == sign * rounding.LARGEST).all()


def test_nan_and_inf_stay_what_they_are():
    """0x7FFFFFFF is the NaN a GPU computes: with bits added it would be -0."""
    inf = floats(0x7F80_0000, 0xFF80_0000)
    nan = floats(0x7FC0_0000, 0xFFC0_0000, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x7FFF_0000, 0x7F81_0000)
    for seed in range(50):
        assert torch.equal(rounded(inf, seed), inf.bfloat16())
        assert rounded(nan, seed).isnan().all()
    computed = torch.tensor([0.0, torch.inf]) * torch.tensor([torch.inf, 0.0])
    assert rounded(computed).isnan().all()


def test_the_same_generator_gives_the_same_bits_and_another_seed_others():
    values = torch.randn(1000, generator=generator(6))
    assert torch.equal(rounded(values, seed=1), rounded(values, seed=1))
    assert not torch.equal(rounded(values, seed=1), rounded(values, seed=2))


# --- moments ---------------------------------------------------------------------------------------------------------


def packed(values, encode, table, seed=0):
    codes, absmax = encode(values, bits(seed))
    assert codes.dtype == torch.uint8 and absmax.shape == (len(values), 1)
    return rounding.decode(codes, absmax, table)


KINDS = [
    pytest.param(rounding.encode_signed, SIGNED, id="signed"),
    pytest.param(rounding.encode_unsigned, UNSIGNED, id="unsigned"),
]


@pytest.mark.parametrize(("encode", "table"), KINDS)
def test_every_code_comes_back_as_itself(encode, table):
    levels = table.view(1, 256)
    found = packed(levels, encode, table)
    torch.testing.assert_close(found, levels, rtol=3e-6, atol=0)


def test_levels_lie_6_to_13_percent_apart_and_reach_down_as_far_as_they_say():
    magnitudes = SIGNED[:128]
    for levels in (UNSIGNED, magnitudes[magnitudes > 20 * rounding.FOOT]):
        apart = (levels[1:] / levels[:-1] - 1).numpy()
        assert apart.min() > 0.062 and apart.max() < 0.135
    assert UNSIGNED[0].item() == pytest.approx(2.6e-10, rel=0.01) and UNSIGNED[-1].item() == pytest.approx(1, rel=2e-6)
    assert magnitudes[0] == 0 and magnitudes[1].item() == pytest.approx(1.9e-6, rel=0.01)
    assert 1.7e-5 < rounding.FOOT < 1.72e-5
    assert torch.equal(SIGNED[128:], -magnitudes)


@pytest.mark.parametrize(("encode", "table"), KINDS)
def test_the_mean_of_many_packings_is_the_moment(encode, table):
    """Each packing is off by less than the gap it fell into, so its variance is at most a quarter of the gap squared."""
    values = torch.randn(1, 256, generator=generator(1)) * torch.logspace(-7, 0, 256)
    values = values if table is SIGNED else values.square().clamp(min=1e-8)
    count, stream = 3000, bits(2)
    codes, absmax = encode(values.expand(count, 256).contiguous(), stream)
    drawn = rounding.decode(codes, absmax, table).double()
    levels = table[:128] if table is SIGNED else table
    shares = (values / absmax[0]).abs().view(-1)
    above = torch.bucketize(shares, levels).clamp(1, len(levels) - 1)
    gap = ((levels[above] - levels[above - 1]) * absmax[0]).double()
    error = (drawn.mean(dim=0) - values.double().view(-1)).abs()
    # The last term is float32: a share that is rounded before it is placed.
    assert (error <= DEVIATIONS * 0.5 * gap / count**0.5 + 1e-6 * values.abs().view(-1)).all()
    assert (drawn.std(dim=0) <= 0.51 * gap + 1e-6 * values.abs().view(-1)).all()


def test_the_largest_of_a_block_keeps_size_and_sign():
    """A carry beyond the last level would turn it into 0 or change its sign."""
    largest = torch.randn(20_000, generator=generator(3)) * torch.logspace(-35, 35, 20_000)
    blocks = torch.zeros(len(largest), 256)
    blocks[:, 7] = largest
    torch.testing.assert_close(packed(blocks, rounding.encode_signed, SIGNED)[:, 7], largest, rtol=2e-6, atol=0)
    found = packed(blocks.abs(), rounding.encode_unsigned, UNSIGNED)[:, 7]
    torch.testing.assert_close(found, largest.abs(), rtol=2e-6, atol=0)


def test_float32_never_carries_the_largest_of_a_block_beyond_the_last_level():
    largest = torch.rand(2**20, generator=generator(4)) + 0.5
    assert (largest * (rounding.SIGNED_SHARE / largest)).add(rounding.FOOT).max() <= 1.0
    assert (largest * (rounding.HEADROOM / largest)).max() <= 1.0


def test_a_second_moment_that_is_too_small_is_rounded_up_and_never_to_0():
    block = torch.full((1, 256), 1e-20)
    block[0, 0], block[0, 1] = 1.0, 0.0
    found = packed(block, rounding.encode_unsigned, UNSIGNED)[0]
    assert found[1:].eq(UNSIGNED[0]).all() and UNSIGNED[0] > 0


@pytest.mark.parametrize(("encode", "table"), KINDS)
def test_a_block_of_zeros_stays_zero_and_one_with_nan_is_not_made_sound(encode, table):
    assert encode(torch.zeros(1, 256), bits())[0].eq(0).all()
    assert packed(torch.zeros(1, 256), encode, table).eq(0).all()
    assert rounding.decode(torch.zeros(1, 256, dtype=torch.uint8), torch.zeros(1, 1), table).eq(0).all()
    spoilt = torch.ones(2, 256)
    spoilt[0, 3] = torch.nan
    found = packed(spoilt, encode, table)
    assert not found[0].isfinite().any() and found[1].isfinite().all()


def test_rounded_to_the_nearest_a_slow_mean_would_stand_still_and_at_random_it_moves():
    """A mean that forgets 0.1 % a step moves by less than half a gap, so the nearest level is always the one it is on.

    The block's first element stays at 1 and holds the levels where they are; the others should fall from 0.5 to 0.05."""
    beta, steps, start, target = 0.999, 2000, 0.5, 0.05
    expected = target + (start - target) * beta**steps
    at_random = torch.full((32, 256), start)
    to_nearest = at_random.clone()
    at_random[:, 0] = to_nearest[:, 0] = 1.0
    towards = torch.full((32, 256), target)
    towards[:, 0] = 1.0
    stream = bits(1)
    edges = (UNSIGNED[1:] + UNSIGNED[:-1]) / 2
    for _ in range(steps):
        codes, absmax = rounding.encode_unsigned(at_random.lerp(towards, 1 - beta), stream)
        at_random = rounding.decode(codes, absmax, UNSIGNED)
        to_nearest = UNSIGNED[torch.bucketize(to_nearest.lerp(towards, 1 - beta), edges)]
    torch.testing.assert_close(to_nearest[:, 1:], torch.full((32, 255), start), rtol=2e-6, atol=0)  # it never moved
    found = at_random[:, 1:]
    assert found.mean().item() == pytest.approx(expected, rel=0.02)
    assert 0.05 < (found.std() / found.mean()).item() < 0.5
