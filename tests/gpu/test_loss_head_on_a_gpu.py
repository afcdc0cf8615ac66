"""The chunked loss head on a GPU against float64, at the vocabularies of GPT-2, Gemma and Gemma 3.

Between its products stands a Triton kernel; the plain torch that defines it is refused here, except where it is what the
kernel is held against.
"""

import pytest
import torch

from tests.head_checks import UNIT, head_errors
from tunix_rt.engines.torch import chunked_loss as torch_head
from tunix_rt.engines.torch.chunked_loss import head_loss, kernel_unable
from tunix_rt.plan.precision import loss_rows

pytestmark = pytest.mark.gpu

TYPES = [("float32", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "bfloat16")]
KINDS = ["float32", "bfloat16", "float16"]
CUDA = torch.device("cuda", 0)

definition = torch_head._losses_and_dlogits


@pytest.fixture
def kernel(monkeypatch):
    """The module of the kernel; logits that are to be turned by plain torch are an error."""

    def refused(*_):
        raise AssertionError("plain torch between the products, not the kernel")

    monkeypatch.setattr(torch_head, "_logits", refused)
    return pytest.importorskip("tunix_rt.engines.torch.triton.cross_entropy")


def sample(kind, rows, vocabulary):
    """Logits, and targets among which are the first and the last column."""
    generator = torch.Generator(CUDA).manual_seed(rows)
    targets = torch.randint(vocabulary, (rows,), device=CUDA, generator=generator)
    targets[0], targets[-1] = 0, vocabulary - 1
    logits = torch.randn(rows, vocabulary, device=CUDA, generator=generator)
    if kind == "wide":
        return 4 * logits, targets
    if kind == "huge":
        return logits.sign() * 1e4, targets
    if kind == "equal":
        return torch.full_like(logits, -7.5), targets
    logits[:, : vocabulary // 2] = -torch.inf  # "missing": whole parts of a row
    return logits, targets.clamp(min=vocabulary // 2)


def by_kernel(kernel, logits, targets, *, softcap, scale, kind):
    """What the kernel makes of a copy of `logits`, whose padding holds no numbers."""
    room = kernel.logits_workspace(*logits.shape, CUDA)
    (room if room._base is None else room._base).fill_(torch.nan)
    room.copy_(logits)
    return kernel.losses_and_dlogits(room, targets, softcap=softcap, scale=scale, kind=kind)


def assert_turned(found, logits, targets, *, softcap, scale, kind):
    """Losses and gradients lie within a rounding of `kind`, and of float32 arithmetic, of the definition in float64."""
    losses, dlogits = found
    want_losses, want = definition(logits.double(), targets, softcap, scale)
    cap = softcap or 0.0
    bent = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
    size = scale * torch.softmax(bent, 1)
    size[torch.arange(len(targets)), targets] += scale
    off = (losses - want_losses).abs() / (1 + want_losses.abs())
    assert off.max() < (16 + 8 * cap) * UNIT[torch.float32], f"losses off by {off.max():.3g}"
    least = 2.0**-25 if kind == torch.float16 else 1e-36
    allowed = 1.001 * UNIT[kind] * want.abs() + (128 + 8 * cap) * UNIT[torch.float32] * size + least
    apart = (dlogits.double() - want).abs() / allowed
    at = divmod(int(apart.argmax()), apart.shape[1])
    assert apart.max() <= 1, (
        f"{dlogits[at]} instead of {want[at]} at {at}, target {targets[at[0]]}: {apart.max():.3g} too far"
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
@pytest.mark.parametrize(("weights", "compute"), TYPES)
@pytest.mark.parametrize("vocabulary", [50_257, 256_000, 262_144])
def test_loss_and_gradients_are_as_exact_as_their_type(kernel, vocabulary, weights, compute, softcap, tied):
    kept, products = getattr(torch, weights), getattr(torch, compute)
    torch.set_float32_matmul_precision("highest")
    assert kernel_unable(CUDA, products, vocabulary, softcap) is None
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


def test_float64_is_exact_without_the_kernel():
    assert "float32" in kernel_unable(CUDA, torch.float64, 1000, None)
    errors = head_errors(
        vocabulary=1000, hidden=64, targets=300, device="cuda", weights=torch.float64, compute=torch.float64,
        softcap=30.0, tied=True,
    )  # fmt: skip
    assert max(errors.loss, errors.states, errors.table) < 1e-11


# --- the kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["wide", "huge", "equal", "missing"])
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 256_000), (37, 50_257), (131, 262_144), (5, 1000), (3, 8193), (2, 2)]
)
def test_logits_turn_in_place_into_what_plain_torch_makes_of_them(kernel, rows, vocabulary, kind, softcap, which):
    logits, targets = sample(which, rows, vocabulary)
    how = {"softcap": softcap, "scale": 0.125, "kind": getattr(torch, kind)}
    assert_turned(by_kernel(kernel, logits, targets, **how), logits, targets, **how)


@pytest.mark.parametrize("columns", [4096, 16_384, 32_768])
@pytest.mark.parametrize("vocabulary", [50_257, 262_144])
def test_a_row_may_be_cut_into_other_parts(kernel, vocabulary, columns, monkeypatch):
    monkeypatch.setattr(kernel, "PART_COLUMNS", columns)
    logits, targets = sample("wide", 70, vocabulary)
    how = {"softcap": 30.0, "scale": 0.125, "kind": torch.bfloat16}
    assert_turned(by_kernel(kernel, logits, targets, **how), logits, targets, **how)


def test_programs_that_wait_for_each_other_find_the_same_bits_every_time(kernel):
    """32 rounds of 2,048 rows in 32 parts, far more than can run at once."""
    logits, targets = sample("wide", 2048, 256_000)
    how = {"softcap": None, "scale": 1 / 2048, "kind": torch.bfloat16}
    room = kernel.logits_workspace(2048, 256_000, CUDA)
    first = None
    for _ in range(32):
        room.copy_(logits)
        losses, dlogits = kernel.losses_and_dlogits(room, targets, **how)
        first = first or (losses, dlogits.clone())
        assert torch.equal(losses, first[0]) and torch.equal(dlogits, first[1])


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
def test_without_a_gradient_the_loss_is_the_same_and_logits_stay(kernel, softcap):
    logits, targets = sample("wide", 33, 50_257)
    room = kernel.logits_workspace(33, 50_257, CUDA).copy_(logits)
    losses, _ = kernel.losses_and_dlogits(room, targets, softcap=softcap, scale=None, kind=torch.bfloat16)
    assert torch.equal(room, logits)
    again, _ = kernel.losses_and_dlogits(room, targets, softcap=softcap, scale=1.0, kind=torch.bfloat16)
    torch.testing.assert_close(
        losses, again, rtol=5e-7, atol=0
    )  # two programs for the compiler: the last bit may differ


@pytest.mark.parametrize("target", [-1, 50_257, 50_300, 2**40])
def test_a_target_outside_of_the_vocabulary_has_no_loss(kernel, target):
    room = kernel.logits_workspace(2, 50_257, CUDA).zero_()
    losses, _ = kernel.losses_and_dlogits(
        room, torch.tensor([target, 3], device=CUDA), softcap=None, scale=1.0, kind=torch.bfloat16
    )
    assert losses.isnan().flatten().tolist() == [True, False]


def test_logits_that_are_no_numbers_end_in_a_loss_that_is_none(kernel):
    logits, targets = sample("wide", 3, 50_257)
    logits[0, 40_000], logits[1, 7] = torch.nan, torch.inf
    losses, dlogits = by_kernel(kernel, logits, targets, softcap=None, scale=1.0, kind=torch.bfloat16)
    assert losses.isnan().flatten().tolist() == [True, True, False]
    assert dlogits.isnan().any(1).tolist() == [True, True, False]


# --- in the head -----------------------------------------------------------------------------------------------------


def head_sample(targets, vocabulary, hidden):
    table = torch.nn.Parameter(torch.randn(vocabulary, hidden, device=CUDA, dtype=torch.bfloat16) / hidden**0.5)
    states = torch.randn(targets, hidden, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    return states, table, torch.randint(vocabulary, (targets,), device=CUDA)


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
@pytest.mark.parametrize("vocabulary", [50_257, 262_144])
def test_kernel_and_plain_torch_are_one_head(vocabulary, softcap, monkeypatch):
    states, table, targets = head_sample(777, vocabulary, 256)
    found = []
    for turned in ("kernel", "plain torch"):
        if turned == "plain torch":
            monkeypatch.setattr(torch_head, "_kernel_fails", lambda *_: "it is not to be used")
        states.grad = table.grad = None
        loss = head_loss(states, table, targets, scale=1 / 777, softcap=softcap, compute=torch.bfloat16, rows=200)
        loss.backward()
        found.append((loss.item(), states.grad.double(), table.grad.double()))
    (loss, *gradients), (plain_loss, *plain_gradients) = found
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for gradient, plain in zip(gradients, plain_gradients, strict=True):
        apart = ((gradient - plain).abs().amax(1) / plain.abs().amax(1).clamp(min=plain.abs().max() / 1000)).max()
        assert apart < 4 * UNIT[torch.bfloat16], f"a gradient is {apart:.3g} of its row apart"


def test_the_held_out_loss_is_that_of_training(kernel):
    states, table, targets = head_sample(777, 50_257, 256)
    how = {"scale": 1.0, "softcap": 30.0, "compute": torch.bfloat16, "rows": 200}
    trained = head_loss(states, table, targets, **how)
    with torch.no_grad():  # the same sums in float32, by code that is compiled once more and may round elsewhere
        assert head_loss(states, table, targets, **how).item() == pytest.approx(trained.item(), rel=1e-8)


def rise_of_the_head(states, table, targets, **how):
    states.grad = table.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head_loss(states, table, targets, scale=1 / len(targets), compute=torch.bfloat16, **how).backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
@pytest.mark.parametrize("turned", ["kernel", "plain torch"])
def test_the_head_needs_little_more_memory_than_its_gradients(turned, softcap, monkeypatch):
    """8,192 targets of 256,000 words: the table's gradient, the states' and one chunk of logits in float32."""
    states, table, targets = head_sample(8192, 256_000, 1024)
    if turned == "plain torch":
        monkeypatch.setattr(torch_head, "_kernel_fails", lambda *_: "it is not to be used")
    rise_of_the_head(states, table, targets, softcap=softcap)  # compiles, and makes the workspaces of the products
    rise = rise_of_the_head(states, table, targets, softcap=softcap)
    gradients = 2 * (table.numel() + states.numel())
    chunk = loss_rows(8192) * 256_000 * 4
    assert rise <= 1.02 * (gradients + chunk), f"{rise:,} bytes, gradients are {gradients:,} and a chunk {chunk:,}"
