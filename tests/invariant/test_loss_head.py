"""The loss head in chunks gives the loss and the gradients of the whole product, and never makes it."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.head_checks import UNIT, head_errors
from tests.invariant.test_live_memory import LiveBytes
from tunix_rt.engines.torch import chunked_loss as torch_head
from tunix_rt.engines.torch.chunked_loss import head_loss, lean_lookup
from tunix_rt.plan.precision import FEWEST_LOSS_ROWS, MOST_LOSS_CHUNKS, loss_rows

SMALL = {"vocabulary": 1000, "hidden": 48, "targets": 75, "device": "cpu"}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize("rows", [1, 7, 75, 200])
def test_chunks_of_any_size_have_the_loss_and_gradients_of_the_whole(tied, softcap, rows):
    errors = head_errors(
        **SMALL, weights=torch.float64, compute=torch.float64, softcap=softcap, tied=tied, rows=rows, micro_batches=2
    )
    assert errors.loss < 1e-13 and errors.states < 1e-10 and errors.table < 1e-10
    assert errors.lookup is None or errors.lookup < 1e-10


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "capped"])
@pytest.mark.parametrize(
    ("weights", "compute"),
    [("float32", "float32"), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "bfloat16")],
)
def test_every_precision_is_as_exact_as_its_type(weights, compute, softcap, tied):
    """Of a row's largest element: two roundings of the products' type, and one of the table's per chunk."""
    kept, products = getattr(torch, weights), getattr(torch, compute)
    errors = head_errors(**SMALL, weights=kept, compute=products, softcap=softcap, tied=tied, rows=25, micro_batches=2)
    assert errors.loss < 32 * UNIT[torch.float32]
    assert errors.states < 4 * UNIT[products] + 64 * UNIT[torch.float32]
    assert errors.table < 8 * UNIT[kept] + 4 * UNIT[products] * (compute != "float32") + 64 * UNIT[torch.float32]


@pytest.mark.parametrize("vocabulary", [50_257, 262_144])
def test_a_real_vocabulary_is_exact_in_float32(vocabulary):
    errors = head_errors(
        vocabulary=vocabulary, hidden=16, targets=40, device="cpu", weights=torch.float32, compute=torch.float32,
        softcap=30.0, tied=True, rows=16,
    )  # fmt: skip
    assert errors.loss < 1e-6 and errors.states < 2e-5 and errors.table < 2e-5


def test_a_scaled_value_cannot_be_turned_back():
    """Its table's gradient was computed on the way forward, without the factor."""
    states, table = torch.randn(4, 8, requires_grad=True), torch.nn.Parameter(torch.randn(10, 8))
    loss = head_loss(states, table, torch.arange(4), scale=0.25, compute=torch.float32)
    with pytest.raises(RuntimeError, match="not of the loss itself"):
        (2 * loss).backward()


def test_nothing_to_predict_is_a_loss_of_zero():
    states, table = torch.randn(0, 8), torch.nn.Parameter(torch.randn(10, 8))
    empty = torch.empty(0, dtype=torch.long)
    with torch.no_grad():
        assert head_loss(states, table, empty, scale=1.0, compute=torch.float32).item() == 0.0
    loss = head_loss(states.requires_grad_(), table, empty, scale=1.0, compute=torch.float32)
    loss.backward()
    assert loss.item() == 0.0


def test_a_frozen_table_gets_no_gradient():
    states, table = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8)
    head_loss(states, table, torch.arange(4), scale=1.0, compute=torch.float32).backward()
    assert table.grad is None and states.grad is not None


def test_the_padding_row_stays_as_the_model_defines_it():
    plain = torch.nn.Embedding(6, 4, padding_idx=2)
    lean = torch.nn.Embedding(6, 4, padding_idx=2)
    lean.load_state_dict(plain.state_dict())
    assert lean_lookup(lean)
    ids, upstream = torch.tensor([[1, 2, 2, 5, 1]]), torch.randn(1, 5, 4)
    for embedding in (plain, lean):
        embedding(ids).backward(upstream)
    torch.testing.assert_close(lean.weight.grad, plain.weight.grad)
    assert torch.equal(lean.weight.grad[2], torch.zeros(4))


def test_an_embedding_of_another_kind_is_left_alone():
    class Doubled(torch.nn.Embedding):
        def forward(self, input):
            return 2 * super().forward(input)

    assert not lean_lookup(Doubled(4, 2)) and not lean_lookup(torch.nn.Embedding(4, 2, max_norm=1.0))


def test_the_logits_of_all_targets_never_exist(monkeypatch):
    """The largest product made is a chunk of the targets by the vocabulary."""
    made, real = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *parts, **named: made.append(real(*parts, **named)) or made[-1])
    states, table = torch.randn(2048, 8, requires_grad=True), torch.nn.Parameter(torch.randn(3000, 8))
    head_loss(states, table, torch.randint(3000, (2048,)), scale=1.0, compute=torch.float32).backward()
    assert max(product.numel() for product in made) == FEWEST_LOSS_ROWS * 3000


def test_the_gradient_of_a_table_of_another_type_is_there_one_slice_at_a_time(monkeypatch):
    """Beside the table in the type of the products, its gradient, and chunks of logits, which are small here."""
    monkeypatch.setattr(torch_head, "TABLE_SLICE_ROWS", 512)
    states = torch.randn(8, 256, dtype=torch.bfloat16, requires_grad=True)
    table = torch.nn.Parameter(torch.randn(2048, 256, dtype=torch.bfloat16))
    live = LiveBytes()
    live.note(table)
    before = live.now
    with live:
        head_loss(states, table, torch.arange(8), scale=1.0, compute=torch.bfloat16, rows=4).backward()
    operand, gradient, one_slice, logits = 2048 * 256 * 4, 2048 * 256 * 2, 512 * 256 * 4, 4 * 2048 * 4
    assert 3 * logits < one_slice
    assert operand + gradient + one_slice < live.peak - before < operand + gradient + one_slice + 3 * logits


@pytest.mark.parametrize("targets", [1, 100, 256, 257, 1024, 8192, 16384])
def test_chunks_are_few_and_not_too_small(targets):
    rows = loss_rows(targets)
    assert rows <= targets and (rows == targets or rows >= FEWEST_LOSS_ROWS)
    assert -(-targets // rows) <= MOST_LOSS_CHUNKS


@pytest.mark.parametrize(
    ("kind", "softcap", "bytes_of_a_logit"),
    [("bfloat16", None, 6), ("bfloat16", 30.0, 8), ("float32", None, 4), ("float32", 30.0, 8)],
)
def test_where_logits_are_not_turned_in_place_fewer_are_there_at_a_time(kind, softcap, bytes_of_a_logit):
    """The plan counts four bytes for each on any device but a CPU."""
    table = torch.empty(256_000, 8, dtype=getattr(torch, kind), device="meta")
    rows = torch_head._rows_with_gradients(table, table.dtype, 8192, softcap)
    assert 0.99 * 4 * loss_rows(8192) < bytes_of_a_logit * rows <= 4 * loss_rows(8192)


# --- whether a kernel is trusted -------------------------------------------------------------------------------------


def kernel_with(defect=lambda losses, dlogits, scale: None):
    """A kernel of plain torch, in float32 and rounded once, with a `defect` in what it gives."""

    def turned(logits, targets, *, softcap, scale, kind):
        losses, dlogits = torch_head._losses_and_dlogits(logits.clone(), targets, softcap, scale)
        dlogits = dlogits.to(kind)
        defect(losses, dlogits, scale)
        return losses, dlogits

    return SimpleNamespace(
        losses_and_dlogits=turned, logits_workspace=lambda rows, columns, device: torch.empty(rows, columns)
    )


def wrong(kernel, kind="bfloat16", softcap=None, vocabulary=50_257):
    return torch_head._wrong_numbers(kernel, torch.device("cpu"), getattr(torch, kind), vocabulary, softcap)


@pytest.mark.parametrize("softcap", [None, 1.0, 30.0])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocabulary", [2, 1000, 262_144])
def test_a_kernel_that_computes_what_plain_torch_does_is_used(kind, softcap, vocabulary):
    before = torch.get_rng_state()
    assert wrong(kernel_with(), kind, softcap, vocabulary) is None
    assert torch.equal(before, torch.get_rng_state())


def zero_part(losses, dlogits, scale):
    if scale:
        dlogits[1, 8192:12_288] = 0


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(
    ("defect", "words"),
    [
        (lambda losses, dlogits, scale: losses.mul_(1.001), "losses are wrong with gradients"),
        (
            lambda losses, dlogits, scale: scale or losses[2].fill_(torch.nan),
            "losses are wrong without gradients: .* nan for",
        ),
        (zero_part, "gradients are wrong, by up to"),
    ],
)
def test_a_kernel_that_gives_wrong_numbers_is_not_used_and_it_is_said_which(defect, words, softcap):
    assert (found := wrong(kernel_with(defect), softcap=softcap)) and re.search(words, found), found


def test_a_kernel_that_ignores_the_soft_cap_is_not_used():
    plain = kernel_with()
    deaf = SimpleNamespace(
        logits_workspace=plain.logits_workspace,
        losses_and_dlogits=lambda *parts, softcap, **more: plain.losses_and_dlogits(*parts, softcap=None, **more),
    )  # fmt: skip
    assert wrong(deaf) is None
    assert "losses are wrong" in wrong(deaf, softcap=30.0)


@pytest.mark.parametrize("products", [torch.float32, torch.float64], ids=["of the weights' type", "of another"])
def test_columns_of_zeros_behind_the_vocabulary_change_no_gradient(products):
    """As a GPU has them where the vocabulary is not a multiple of 8."""
    generator = torch.Generator().manual_seed(1)
    table, expected = torch.nn.Parameter(torch.zeros(57, 16)), torch.zeros(57, 16, dtype=torch.float64)
    for _ in range(3):
        dlogits = torch.zeros(9, 64, dtype=products)
        dlogits[:, :57] = torch.randn(9, 57, generator=generator, dtype=products)
        states = torch.randn(9, 16, generator=generator, dtype=products)
        torch_head._add_product(table, dlogits, states)
        expected += (dlogits[:, :57].t() @ states).double()
    assert table.grad.shape == table.shape and table.grad.is_contiguous()
    torch.testing.assert_close(table.grad.double(), expected, rtol=1e-5, atol=1e-5)
