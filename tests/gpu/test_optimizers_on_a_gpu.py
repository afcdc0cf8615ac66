"""The optimizers on a real NVIDIA GPU: the reference's numbers, one set of bits, no waiting, bounded memory."""

import pytest
import torch

from tests import optimizer_checks as checks
from tests.optimizer_checks import each_dtype, each_kind, make
from tunix_rt.engines.torch import update_rules as torch_rounding

pytestmark = pytest.mark.gpu

wide = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@wide
@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e6])
@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_20_updates_are_those_of_the_float64_reference(kind, dtype, size):
    checks.check_reference(kind, dtype, size=size, device="cuda")


@wide
def test_adamw_is_torchs_own_fused_one_to_the_last_bit(dtype):
    checks.check_torchs_own(dtype, device="cuda")


@each_kind
@each_dtype
def test_one_by_one_backwards_gives_the_bits_of_all_together(kind, dtype):
    checks.check_one_by_one(kind, dtype, device="cuda")


@each_kind
@each_dtype
def test_restored_after_some_steps_the_rest_is_the_same_to_the_last_bit(kind, dtype):
    checks.check_restored(kind, dtype, 3, device="cuda")


@each_kind
@each_dtype
@pytest.mark.parametrize("first", [1, 3], ids=["at the first step", "later"])
@pytest.mark.parametrize("how", checks.HOW)
def test_an_update_that_is_not_sound_changes_nothing_and_nothing_waits_for_the_gpu(kind, dtype, first, how):
    checks.check_not_finite(kind, dtype, first, device="cuda", how=how)


@each_kind
@each_dtype
@pytest.mark.parametrize("limit", [0.05, 1e6, None])
def test_clipped_by_its_own_norm_is_scaled_by_that_factor(kind, dtype, limit):
    checks.check_clipped(kind, dtype, limit, device="cuda")


def test_rounding_is_right_on_average_and_keeps_nan_and_inf():
    """0 times Inf is 0x7FFFFFFF on a GPU: with bits added it would be -0."""
    generator = torch.Generator("cuda").manual_seed(1)
    count, value = 2**20, 1.0 + 2.0**-7 * 0.3
    target = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    torch_rounding.round_to_bfloat16_(
        target, torch.full((count,), value, device="cuda"), torch_rounding.Bits(generator=generator)
    )
    assert set(target.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert target.double().mean().item() == pytest.approx(value, abs=5 * 2.0**-7 * (0.3 * 0.7 / count) ** 0.5)
    odd = torch.tensor([torch.inf, -torch.inf, 3.4e38, 0.0], device="cuda")
    odd[3] = odd[3] * torch.inf
    for seed in range(20):
        found = torch.empty(4, dtype=torch.bfloat16, device="cuda")
        torch_rounding.round_to_bfloat16_(
            found, odd.clone(), torch_rounding.Bits(generator=generator.manual_seed(seed))
        )
        assert found[:3].tolist() == [torch.inf, -torch.inf, torch_rounding.LARGEST] and found[3].isnan()


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_8_bit_codes_are_right_on_average(signed):
    encode = torch_rounding.encode_signed if signed else torch_rounding.encode_unsigned
    table = torch_rounding.tables(torch.device("cuda", 0))[0 if signed else 1]
    values = torch.rand(1, 256, generator=torch.Generator().manual_seed(1)).cuda() + 0.01
    values *= torch.where(torch.arange(256, device="cuda") % 2 == 0, 1.0, -1.0 if signed else 1.0)
    count = 4000
    codes, absmax = encode(
        values.expand(count, 256).contiguous(), torch_rounding.Bits(generator=torch.Generator("cuda").manual_seed(2))
    )
    found = torch_rounding.decode(codes, absmax, table).double().mean(dim=0)
    assert ((found - values[0]).abs() <= 5 * 0.5 * 0.13 * values[0].abs() / count**0.5).all()


@each_kind
def test_the_largest_table_of_gemma_needs_no_more_than_a_few_slices_besides(kind):
    """256,000 x 2,048 in bfloat16: in one piece, each temporary would be 2 GiB."""
    table = torch.nn.Parameter(torch.ones(256_000, 2048, dtype=torch.bfloat16, device="cuda"))
    table.grad = torch.full_like(table, 1e-3)
    optimizer = make({"table": table}, kind)
    scale, finite = torch.tensor(0.5, device="cuda"), torch.tensor(True, device="cuda")
    optimizer.begin(1, 1e-2)
    optimizer.update(table, scale=scale, finite=finite)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    optimizer.begin(2, 1e-2)
    started.record()
    optimizer.update(table, scale=scale, finite=finite)
    ended.record()
    torch.cuda.synchronize()
    besides = torch.cuda.max_memory_allocated() - held
    print(
        f"{kind}: {besides / 2**20:.0f} MiB besides, {started.elapsed_time(ended):.1f} ms for {table.numel():,} weights"
    )
    assert besides < 200 * 2**20
    assert table.isfinite().all() and table.ne(1).any()
