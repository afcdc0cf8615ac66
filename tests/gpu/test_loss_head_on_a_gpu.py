"""The chunked loss head on a GPU against float64, at the vocabularies of GPT-2, Gemma and Gemma 3."""

import pytest
import torch

from tests.head_checks import UNIT, head_errors

pytestmark = pytest.mark.gpu

TYPES = [("float32", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "bfloat16")]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
@pytest.mark.parametrize(("weights", "compute"), TYPES)
@pytest.mark.parametrize("vocabulary", [50_257, 256_000, 262_144])
def test_loss_and_gradients_are_as_exact_as_their_type(vocabulary, weights, compute, softcap, tied):
    kept, products = getattr(torch, weights), getattr(torch, compute)
    torch.set_float32_matmul_precision("highest")
    errors = head_errors(
        vocabulary=vocabulary, hidden=256, targets=600, device="cuda", weights=kept, compute=products, softcap=softcap,
        tied=tied, micro_batches=2,
    )  # fmt: skip
    print(f"{vocabulary} {weights}/{compute} cap {softcap} tied {tied}: {errors}")
    # A logit near the cap is off by some units of it, and its probability by as much, relatively.
    sums = (128 + 4 * (softcap or 0)) * UNIT[torch.float32]
    assert errors.loss < 32 * UNIT[torch.float32]
    assert errors.states < 4 * UNIT[products] + sums
    assert errors.table < 8 * UNIT[kept] + 4 * UNIT[products] * (compute != "float32") + sums


def test_the_head_needs_little_more_memory_than_its_gradients():
    """8,192 targets of 256,000 words: the table's gradient, the states' and one chunk of logits in float32 and bfloat16."""
    from tunix_rt.backends.torch_head import head_loss
    from tunix_rt.plan.recipe import loss_rows

    table = torch.nn.Parameter(torch.randn(256_000, 1024, device="cuda", dtype=torch.bfloat16) / 32)
    states = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(256_000, (8192,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head_loss(states, table, targets, scale=1 / 8192, compute=torch.bfloat16).backward()
    rise = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (table.numel() + states.numel())
    chunk = loss_rows(8192) * 256_000 * 6
    assert rise <= 1.02 * (gradients + chunk)
