"""Our attention on a real NVIDIA GPU: as exact as plain products in the same type, blind to neighbours, repeatable."""

import numpy as np
import pytest
import torch

from tests.attention_checks import (
    CAP,
    FAMILIES,
    attend_alone,
    choose_attention,
    float64,
    packed_and_alone,
    packed_states,
    small_model,
    states_alone,
    summed_loss,
)
from tests.device_waits import nothing_waits
from tunix_rt.engines.torch import attention as torch_attention
from tunix_rt.engines.torch.attention import FLEX, VARLEN, Attention, boundaries, kernel_failure

# Compilers warn of what is none of our business: attributes they look at, kernels they would choose.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

DEVICE = torch.device("cuda")
LENGTHS = (200, 57, 128, 1, 300, 14, 90)
WINDOW = 40
VARLEN_ATTENTION = Attention(name="varlen", training=VARLEN, generating="sdpa", why="")
FLEX_ATTENTION = Attention(name="flex", training=FLEX, generating="eager", why="")


@pytest.fixture(autouse=True)
def nothing_compiled():
    """What was compiled for the sizes of one test is no part of the next."""
    torch._dynamo.reset()
    torch_attention._compiled_flex.cache_clear()


def attention_for(family: str, dtype: str) -> Attention:
    return choose_attention(
        device="cuda",
        dtype=dtype,
        capability=torch.cuda.get_device_capability(),
        softcap=family == "gemma2",
        dropout=False,
        head_dim=64,
        deterministic=False,
    )


@pytest.mark.parametrize(("name", "head_dim"), [("varlen", 64), ("varlen", 256), ("flex", 64)])
def test_both_work_here(name, head_dim):
    attention = {"varlen": VARLEN_ATTENTION, "flex": FLEX_ATTENTION}[name]
    assert kernel_failure(attention, head_dim=head_dim) is None


# --- as exact as plain products --------------------------------------------------------------------------------------


def drawn(*, kv_heads: int, size: int, dtype: torch.dtype, heads: int = 4, lengths=LENGTHS, width: int = 300):
    """Positions of packed rows, and queries, keys, values and a gradient for them as [rows, heads, tokens, size]."""
    packed, _ = packed_and_alone(lengths, width=width)
    torch.manual_seed(7)
    rows, tokens = packed.ids.shape
    shapes = [(rows, count, tokens, size) for count in (heads, kv_heads, kv_heads, heads)]
    return packed.positions, [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def results(attend, parts, upstream):
    """Output and gradients of queries, keys and values, in float64."""
    leaves = [part.detach().requires_grad_() for part in parts]
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    return [tensor.detach().double() for tensor in (out, *gradients)]


def written_out(positions, window, softcap, scale):
    """Attention one example at a time, for the layout in which a model calls it."""
    begins = boundaries(positions, DEVICE, VARLEN_ATTENTION)["cu_seq_lens_q"]

    def attend(query, key, value):
        rows, heads, tokens, size = query.shape
        flat = [part.transpose(1, 2).reshape(rows * tokens, -1, size) for part in (query, key, value)]
        before = None if window is None else window - 1
        out = attend_alone(*flat, begins=begins, longest=tokens, scale=scale, before=before, softcap=softcap)
        return out.view(rows, tokens, heads, size).transpose(1, 2)

    return attend


def ours(attention, positions, window, softcap, scale):
    told = boundaries(positions, DEVICE, attention)
    function = {VARLEN: torch_attention._varlen, FLEX: torch_attention._flex}[attention.training]

    def attend(query, key, value):
        out, _ = function(None, query, key, value, None, scaling=scale, sliding_window=window, softcap=softcap, **told)
        return out.transpose(1, 2)

    return attend


def errors_beside_plain_products(attention, parts, upstream, positions, window, softcap=None):
    """Of output and gradients: our distance from float64, and that of plain products in the type of the inputs."""
    scale = 1.3 * parts[0].shape[-1] ** -0.5
    true = results(written_out(positions, window, softcap, scale), [part.double() for part in parts], upstream.double())
    found = []
    for attend in (
        ours(attention, positions, window, softcap, scale),
        written_out(positions, window, softcap, scale),
    ):
        got = results(attend, parts, upstream)
        found.append([float((mine - right).norm() / right.norm()) for mine, right in zip(got, true, strict=True)])
    return list(zip(("out", "dq", "dk", "dv"), *found, strict=True))


@pytest.mark.parametrize("window", [None, WINDOW], ids=["all", "window"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_varlen_is_as_exact_as_plain_products_in_its_type(dtype, size, kv_heads, window):
    positions, (*parts, upstream) = drawn(kv_heads=kv_heads, size=size, dtype=dtype)
    for name, error, plain in errors_beside_plain_products(VARLEN_ATTENTION, parts, upstream, positions, window):
        assert error <= 2 * plain, name
        assert error < 0.02, name


def test_a_window_that_is_one_too_long_would_be_seen():
    """The bound above is far below what a token more or less makes."""
    positions, (*parts, upstream) = drawn(kv_heads=1, size=64, dtype=torch.bfloat16)
    right, wrong = (
        results(ours(VARLEN_ATTENTION, positions, window, None, 0.125), parts, upstream)
        for window in (WINDOW, WINDOW + 1)
    )
    for one, other in zip(right, wrong, strict=True):
        assert float((one - other).norm() / one.norm()) > 0.05


@pytest.mark.parametrize(
    ("dtype", "size", "kv_heads", "least"),
    [("bfloat16", 256, 1, 0.0), ("float16", 64, 2, 0.0), ("float32", 64, 2, 5e-6)],
)
def test_flex_with_a_soft_cap_is_as_exact_as_plain_products_in_its_type_and_repeatable(dtype, size, kv_heads, least):
    """`least` is what the exponential of the GPU costs; in a narrow type it is nothing."""
    positions, (*parts, upstream) = drawn(kv_heads=kv_heads, size=size, dtype=getattr(torch, dtype))
    for window in (None, WINDOW):
        for name, error, plain in errors_beside_plain_products(
            FLEX_ATTENTION, parts, upstream, positions, window, softcap=CAP
        ):
            assert error <= max(2 * plain, least), (name, window)
    attend = ours(FLEX_ATTENTION, positions, WINDOW, CAP, 1.3 * size**-0.5)
    first = results(attend, parts, upstream)
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(results(attend, parts, upstream), first, strict=True))


# --- blind to neighbours, repeatable, without waiting ----------------------------------------------------------------


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("attention", [VARLEN_ATTENTION, FLEX_ATTENTION], ids=lambda attention: attention.name)
def test_another_neighbour_changes_no_bit_of_output_and_gradients(attention, deterministic):
    positions, (*parts, upstream) = drawn(kv_heads=1, size=64, dtype=torch.bfloat16)
    border = int(np.flatnonzero(positions[1] == 0)[1])
    other = [part.clone() for part in parts]
    for part in other:
        part[1, :, :border] = torch.randn_like(part[1, :, :border])
    attend = ours(attention, positions, WINDOW, None, 0.125)
    for before, after in zip(results(attend, parts, upstream), results(attend, other, upstream), strict=True):
        assert torch.equal(before[1, :, border:], after[1, :, border:])
        assert torch.equal(before[0], after[0]) and torch.equal(before[2:], after[2:])
        assert not torch.equal(before[1, :, :border], after[1, :, :border])


@pytest.mark.parametrize("size", [64, 256])
def test_varlen_gives_the_same_bits_a_hundred_times_over(size, deterministic):
    positions, (*parts, upstream) = drawn(
        kv_heads=1, size=size, dtype=torch.bfloat16, heads=8, lengths=(2048, 700, 1300, 2000, 48), width=2048
    )
    attend = ours(VARLEN_ATTENTION, positions, None, None, size**-0.5)
    first = results(attend, parts, upstream)
    assert all(bool(tensor.isfinite().all()) for tensor in first)
    for _ in range(100):
        assert all(torch.equal(*pair) for pair in zip(results(attend, parts, upstream), first, strict=True))


@pytest.mark.parametrize("attention", [VARLEN_ATTENTION, FLEX_ATTENTION], ids=lambda attention: attention.name)
def test_nobody_waits_for_the_device(attention):
    positions, (*parts, upstream) = drawn(kv_heads=2, size=64, dtype=torch.bfloat16)

    def step():
        attend = ours(attention, positions, WINDOW, None, 0.125)
        leaves = [part.detach().requires_grad_() for part in parts]
        torch.autograd.grad(attend(*leaves), leaves, upstream)

    step()  # compiles
    with nothing_waits():
        step()


# --- through the models ----------------------------------------------------------------------------------------------


def loss_and_gradient(model, states_and_micros):
    loss = sum(summed_loss(model, states, micro) for states, micro in states_and_micros)
    loss.backward()
    gradient = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    return float(loss.detach().double()), gradient


def alone_in(dtype, family, alone):
    """Loss and gradient of the examples one by one, by transformers' own attention."""
    masked = "eager" if family == "gemma2" else "sdpa"
    model = small_model(family, attention=masked, window=WINDOW, head_dim=64, dtype=dtype, device=DEVICE)
    return loss_and_gradient(model, [(states_alone(model, one), one) for one in alone])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", 1e-2), ("float32", 1e-5)])
def test_packed_rows_have_the_loss_and_gradients_of_their_examples_alone(family, dtype, close):
    attention = attention_for(family, dtype)
    assert attention.name == {"bfloat16": "varlen", "float32": "sdpa"}[dtype] or family == "gemma2"
    packed, alone = packed_and_alone(LENGTHS, width=300)
    with float64():
        expected, true = alone_in(torch.float64, family, alone)
    _, plain = alone_in(getattr(torch, dtype), family, alone)
    model = small_model(
        family, attention=attention.training, window=WINDOW, head_dim=64, dtype=getattr(torch, dtype), device=DEVICE
    )
    loss, gradient = loss_and_gradient(model, [(packed_states(model, packed, attention), packed)])
    assert loss == pytest.approx(expected, rel=close)
    assert float((gradient - true).norm()) <= max(2 * float((plain - true).norm()), 1e-5 * float(true.norm()))
    border = int(np.flatnonzero(packed.positions[1] == 0)[1])
    other = packed.ids.copy()
    other[1, :border] = other[1, :border] % 63 + 1
    states, changed = (packed_states(model, packed, attention, ids=ids).detach() for ids in (packed.ids, other))
    assert torch.equal(states[1, border:], changed[1, border:]), "an example notices its neighbour"
    assert not torch.equal(states[1, :border], changed[1, :border])


def test_float32_weights_under_autocast_go_through_varlen():
    packed, alone = packed_and_alone(LENGTHS, width=300)
    expected, _ = alone_in(torch.float32, "gemma3_text", alone)
    model = small_model("gemma3_text", attention=VARLEN, window=WINDOW, head_dim=64, dtype=torch.float32, device=DEVICE)
    casting = torch.autocast("cuda", dtype=torch.bfloat16)
    loss, gradient = loss_and_gradient(
        model, [(packed_states(model, packed, VARLEN_ATTENTION, casting=casting), packed)]
    )
    assert loss == pytest.approx(expected, rel=1e-2) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_gradient_checkpointing_computes_the_same_from_the_thread_of_the_device(family):
    attention = attention_for(family, "bfloat16")
    packed, _ = packed_and_alone(LENGTHS, width=300)
    found = []
    for saving in (False, True):
        model = small_model(
            family, attention=attention.training, window=WINDOW, head_dim=64, dtype=torch.bfloat16, device=DEVICE
        ).train()
        if saving:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        found.append(loss_and_gradient(model, [(packed_states(model, packed, attention), packed)]))
    (loss, gradient), (loss_saving, gradient_saving) = found
    assert loss == loss_saving
    assert float((gradient - gradient_saving).norm() / gradient.norm()) < 1e-3


def test_compiled_layers_are_not_compiled_again_for_another_number_of_examples():
    model = small_model("llama", attention=VARLEN, head_dim=64, dtype=torch.bfloat16, device=DEVICE).train()
    plain = small_model("llama", attention=VARLEN, head_dim=64, dtype=torch.bfloat16, device=DEVICE).train()
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    graphs = []
    for lengths in (LENGTHS, (200, 57, 100, 28, 1, 300, 14, 90)):
        packed, _ = packed_and_alone(lengths, width=300)
        (loss, _), (expected, _) = (
            loss_and_gradient(one, [(packed_states(one, packed, VARLEN_ATTENTION), packed)]) for one in (model, plain)
        )
        assert loss == pytest.approx(expected, rel=1e-2)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
