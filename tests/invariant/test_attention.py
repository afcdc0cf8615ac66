"""Attention over packed rows is attention over each example alone, whichever kernel computes it."""

import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex_of_torch
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from tests.attention_checks import (
    CAP,
    FAMILIES,
    SLIDING,
    attend_alone,
    choose_attention,
    float64,
    packed_and_alone,
    packed_states,
    small_model,
    states_alone,
    summed_loss,
)  # fmt: skip
from tests.tables import parametrize
from tunix_rt.data.packing import collate, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines.torch import attention as torch_attention
from tunix_rt.engines.torch import varlen as torch_borders
from tunix_rt.engines.torch.attention import (
    FLEX,
    VARLEN,
    Attention,
    boundaries,
    kernels,
    supported_attention,
    unpackable,
)
from tunix_rt.errors import InputError

GPU = {"device": "cuda", "dtype": "bfloat16", "capability": (9, 0), "softcap": False, "dropout": False, "head_dim": 64}
VARLEN_ATTENTION = choose_attention(**GPU, deterministic=False)
FLEX_ATTENTION = choose_attention(**GPU | {"softcap": True}, deterministic=False)
WINDOWS = {"shorter than an example": 4, "longer than a row": 64}


def on_cpu(family: str) -> Attention:
    return choose_attention(
        device="cpu", dtype="float64", capability=None, softcap=family == "gemma2", dropout=False, head_dim=8,
        deterministic=False,
    )  # fmt: skip


@pytest.fixture
def written_out(monkeypatch):
    """Attention written out, in the place of the CUDA kernel: all around it is the code of a run."""
    monkeypatch.setattr(torch_attention, "varlen_kernel", attend_alone)


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention without a compiler: the same mask and the same score function, all scores laid out."""
    monkeypatch.setattr(flex_of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


# --- packed and alone ------------------------------------------------------------------------------------------------


def loss_and_gradients(model, states_and_micros):
    with float64():
        loss = sum(summed_loss(model, states, micro) for states, micro in states_and_micros())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_difference(family: str, attention: Attention, window: int) -> float:
    """Of the loss, and of any gradient over its norm, between packed rows and the same examples alone."""
    packed, alone = packed_and_alone()
    model = small_model(family, attention=attention.training, window=window)
    plain = small_model(family, attention=on_cpu(family).training, window=window)
    loss, gradients = loss_and_gradients(model, lambda: [(packed_states(model, packed, attention), packed)])
    expected, true = loss_and_gradients(plain, lambda: [(states_alone(plain, one), one) for one in alone])
    assert np.isfinite(loss)
    errors = [float((gradients[name] - true[name]).norm() / true[name].norm()) for name in true]
    return max(abs(loss - expected) / expected, *errors)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_cpu_packed_rows_have_the_loss_and_gradients_of_their_examples_alone(family, window):
    assert largest_difference(family, on_cpu(family), window) < 1e-9


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_what_varlen_passes_to_its_kernel_gives_the_loss_and_gradients_of_the_examples_alone(
    family, window, written_out
):
    assert largest_difference(family, VARLEN_ATTENTION, window) < 1e-9


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_masks_and_soft_caps_of_flex_give_the_states_of_the_examples_alone(family, window, uncompiled):
    assert flex_difference(family, window) < 1e-9


def flex_difference(family: str, window: int) -> float:
    """FlexAttention has no backward pass on a CPU: states are compared, not gradients."""
    packed, alone = packed_and_alone()
    model = small_model(family, attention=FLEX, window=window)
    plain = small_model(family, attention=on_cpu(family).training, window=window)
    with torch.no_grad(), float64():
        loss = summed_loss(model, packed_states(model, packed, FLEX_ATTENTION), packed)
        expected = sum(summed_loss(plain, states_alone(plain, one), one) for one in alone)
    return float((loss - expected).abs() / expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_example_notices_its_neighbour_and_every_example_notices_itself(family, written_out):
    attention = on_cpu(family) if family == "gemma2" else VARLEN_ATTENTION
    packed, _ = packed_and_alone()
    model = small_model(family, attention=attention.training)
    border = int(np.flatnonzero(packed.positions[0] == 0)[1])
    other = packed.ids.copy()
    other[0, :border] = other[0, :border] % 63 + 1
    with torch.no_grad(), float64():
        states, changed = (packed_states(model, packed, attention, ids=ids) for ids in (packed.ids, other))
    assert torch.equal(states[0, border:], changed[0, border:]) and torch.equal(states[1:], changed[1:])
    assert not torch.isclose(states[0, :border], changed[0, :border]).any(dim=-1).all()


def test_gradient_checkpointing_recomputes_with_the_boundaries(written_out):
    packed, _ = packed_and_alone()
    gradients = []
    for saving in (False, True):
        model = small_model("gemma3_text", attention=VARLEN).train()
        if saving:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        summed_loss(model, packed_states(model, packed, VARLEN_ATTENTION), packed).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, saved) for plain, saved in zip(*gradients, strict=True))


# --- planted defects: the comparisons above can fail -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The written-out kernel, with something wrong."""

    shift: int = 0
    scale: float = 1.0
    mixed: bool = False

    def __call__(self, query, key, value, *, before, scale, **borders):
        if self.mixed:  # key heads belong to query heads in turn, not in groups
            heads = torch.arange(query.shape[1]) % key.shape[1]
            key, value = key[:, heads], value[:, heads]
        before = None if before is None else before + self.shift
        return attend_alone(query, key, value, before=before, scale=scale * self.scale, **borders)


def without_border(keep):
    begins = torch_borders._begins

    def fewer(positions):
        found = begins(positions)
        found[keep(found)] = False
        return found

    return fewer


def second_border(found):
    rows, tokens = np.nonzero(found)
    return rows[1:2], tokens[1:2]


def first_of_the_second_row(found):
    return np.array([1]), np.array([0])


PLANTED = {
    "the window is one too long": ("gemma3_text", "varlen_kernel", Kernel(shift=1)),
    "the window is one too short": ("qwen3", "varlen_kernel", Kernel(shift=-1)),
    "the scale is a little off": ("llama", "varlen_kernel", Kernel(scale=1.001)),
    "heads are grouped wrongly": ("llama", "varlen_kernel", Kernel(mixed=True)),
    "a border inside a row is lost": ("gpt2", "_begins", without_border(second_border)),
    "the border between rows is lost": ("gemma", "_begins", without_border(first_of_the_second_row)),
}


@pytest.mark.parametrize("defect", PLANTED)
def test_a_defect_planted_into_varlen_is_found(defect, written_out, monkeypatch):
    family, name, wrong = PLANTED[defect]
    monkeypatch.setattr(torch_borders if name == "_begins" else torch_attention, name, wrong)
    assert largest_difference(family, VARLEN_ATTENTION, 4) > 1e-6


def a_token_more(sliding_window):
    return lambda row, head, query, key: key >= query - sliding_window


def no_border(position_ids):
    return None


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "qwen3"])
@pytest.mark.parametrize(
    ("name", "wrong"), [("sliding_window_overlay", a_token_more), ("find_packed_sequence_indices", no_border)]
)
def test_a_defect_planted_into_the_masks_of_transformers_is_found(family, name, wrong, monkeypatch):
    packed, alone = packed_and_alone()
    plain = small_model(family, attention=on_cpu(family).training)
    with torch.no_grad(), float64():
        expected = sum(summed_loss(plain, states_alone(plain, one), one) for one in alone)
        monkeypatch.setattr(masking_utils, name, wrong)
        loss = summed_loss(plain, packed_states(plain, packed, on_cpu(family)), packed)
    assert float((loss - expected).abs() / expected) > 1e-6


@pytest.mark.parametrize(
    ("family", "defect"),
    [*((family, defect) for family in SLIDING for defect in ("window", "border")), ("gemma2", "cap")],
)
def test_a_defect_planted_into_flex_is_found(family, defect, uncompiled, monkeypatch):
    """A window that is one too long, a border that is lost, a cap that is forgotten."""
    make, attend = torch_borders.PackedRows._make, torch_attention.flex_attention
    if defect == "window":
        monkeypatch.setattr(torch_borders.PackedRows, "_make", lambda rows, w: make(rows, w and w + 1))
    elif defect == "border":
        monkeypatch.setattr(torch_borders, "_begins", without_border(second_border))
    else:
        monkeypatch.setattr(torch_attention, "flex_attention", lambda *parts, score_mod, **how: attend(*parts, **how))
    assert flex_difference(family, 4) > 1e-6


# --- the borders -----------------------------------------------------------------------------------------------------


@st.composite
def packings(draw):
    """Positions of a few padded rows of packed examples, as `collate` makes them, and the lengths of the examples."""
    width = draw(st.integers(1, 24))
    lengths = draw(st.lists(st.integers(1, width), min_size=1, max_size=12))
    examples = [Example(ids=np.ones(size, dtype=np.int32), trained=np.ones(size, dtype=np.bool_)) for size in lengths]
    rows = make_rows(examples, max_length=width, packing=draw(st.booleans()))
    return collate(list(rows)[: draw(st.integers(1, 4))], pad_id=0).positions


@given(packings())
def test_the_borders_cut_the_tokens_into_examples_that_stay_in_their_row(positions):
    borders = boundaries(positions, torch.device("cpu"), VARLEN_ATTENTION)
    cuts, longest = borders["cu_seq_lens_q"], borders["max_length_q"]
    assert cuts.dtype == torch.int32 and cuts[0] == 0 and cuts[-1] == positions.size
    lengths = np.diff(cuts.numpy())
    assert (lengths > 0).all() and lengths.sum() == positions.size
    assert longest >= max(128, lengths.max()) and longest & (longest - 1) == 0
    assert longest == 128 or longest < 2 * lengths.max()
    for low, high in pairwise(cuts.tolist()):
        assert positions.ravel()[low:high].tolist() == list(range(high - low))
        assert low // positions.shape[1] == (high - 1) // positions.shape[1]


@settings(deadline=None, max_examples=60)
@given(packings(), st.sampled_from([None, 1, 2, 5, 100]), st.sampled_from([1, 3, 4]))
def test_the_blocks_of_flex_are_those_that_torch_finds_by_asking_for_every_pair(positions, window, block):
    """The same function asked for every pair, and the pairs against the borders themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_borders, "BLOCK", block)
        ours = torch_borders.PackedRows(positions, torch.device("cpu")).block_mask(window)
    rows, tokens = positions.shape
    theirs = flex_of_torch.create_block_mask(ours.mask_mod, rows, 1, tokens, tokens, device="cpu", BLOCK_SIZE=block)
    for counts, indices in [
        ("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices"),
    ]:  # fmt: skip
        ours_counted, theirs_counted = getattr(ours, counts), getattr(theirs, counts)
        assert torch.equal(ours_counted, theirs_counted), counts
        for laid_out in (ours_counted, getattr(ours, indices)):  # compiled kernels rely on the stride of a single head
            assert laid_out.stride() == torch.empty(laid_out.shape).stride(), counts
        for found, right, count in zip(
            getattr(ours, indices).flatten(0, 2),
            getattr(theirs, indices).flatten(0, 2),
            ours_counted.flatten(),
            strict=True,
        ):
            assert found.dtype == torch.int32 and found[:count].tolist() == right[:count].tolist()
    place = np.arange(tokens)
    example = np.cumsum(torch_borders._begins(positions), axis=1)
    sees = (example[:, :, None] == example[:, None, :]) & (place[None, :] <= place[:, None])
    if window is not None:
        sees &= place[None, :] > place[:, None] - window
    asked = flex_of_torch.create_mask(ours.mask_mod, rows, 1, tokens, tokens, device="cpu")
    assert np.array_equal(asked[:, 0].numpy(), sees)


def test_layers_share_one_mask_per_window_and_a_mask_that_was_not_named_is_made_on_demand():
    packed, _ = packed_and_alone()
    named = boundaries(packed.positions, torch.device("cpu"), FLEX_ATTENTION, windows=[4])["packed_rows"]
    assert set(named.made) == {None, 4} and named.block_mask(4) is named.made[4]
    unnamed = boundaries(packed.positions, torch.device("cpu"), FLEX_ATTENTION)["packed_rows"]
    assert set(unnamed.made) == {None} and unnamed.block_mask(4) is unnamed.block_mask(4)
    assert torch.equal(unnamed.block_mask(4).kv_indices, named.made[4].kv_indices)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_attention_of_transformers_gets_positions_only(name):
    attention = Attention(name=name, training=name, generating=name, why="")
    assert boundaries(np.zeros((1, 1), dtype=np.int64), torch.device("cpu"), attention) == {}


# --- the choice ------------------------------------------------------------------------------------------------------


@parametrize("changed", "name", "words")
def test_the_choice_follows_device_type_and_what_the_model_needs(changed, name, words):
    changed = {key: tuple(value) if isinstance(value, list) else value for key, value in changed.items()}
    chosen = choose_attention(**{**GPU, "deterministic": False, **changed})
    assert chosen.name == name and words in chosen.why
    assert chosen.generating == ("eager" if changed.get("softcap") or name == "eager" else "sdpa")
    assert chosen.training == {"varlen": VARLEN, "flex": FLEX}.get(name, name)


def test_the_reason_for_varlen_names_the_fixed_order_of_a_deterministic_run():
    assert "fixed order" in choose_attention(**GPU, deterministic=True).why


def test_the_installed_torch_has_a_varlen_attention_that_we_can_call():
    assert torch_attention.VARLEN_LACKS is None


def test_a_deterministic_run_allows_only_kernels_that_add_in_order():
    assert not torch.are_deterministic_algorithms_enabled()
    flags = torch.backends.cuda
    sdpa = on_cpu("llama")
    with kernels(sdpa, deterministic=False):
        assert flags.mem_efficient_sdp_enabled() and flags.cudnn_sdp_enabled()
    with kernels(sdpa, deterministic=True):
        assert flags.math_sdp_enabled() and flags.flash_sdp_enabled()
        assert not flags.mem_efficient_sdp_enabled() and not flags.cudnn_sdp_enabled()
    assert flags.mem_efficient_sdp_enabled() and flags.cudnn_sdp_enabled()
    with pytest.raises(ValueError, match="use_deterministic_algorithms"), kernels(VARLEN_ATTENTION, deterministic=True):
        pass


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [VARLEN_ATTENTION, FLEX_ATTENTION], ids=lambda attention: attention.name)
def test_without_boundaries_nothing_is_computed(attention):
    model = small_model("llama", attention=attention.training)
    with pytest.raises(InputError, match="document boundaries are missing") as caught:
        model(torch.ones(1, 6, dtype=torch.long), use_cache=False)
    assert "pass the result of `boundaries`" in caught.value.fix, "another model would not help"


@pytest.mark.parametrize("attention", [VARLEN_ATTENTION, FLEX_ATTENTION], ids=lambda attention: attention.name)
def test_a_cache_is_refused(attention):
    packed, _ = packed_and_alone()
    model = small_model("llama", attention="sdpa")
    with torch.no_grad():
        past = model(torch.ones(2, 6, dtype=torch.long), use_cache=True).past_key_values
        model.set_attn_implementation(attention.training)
        with pytest.raises(InputError, match="7 keys for 1 queries"):
            model(torch.ones(2, 1, dtype=torch.long), past_key_values=past,
                  **boundaries(packed.positions[:2, :1], model.device, attention))  # fmt: skip


@pytest.mark.parametrize("attention", [VARLEN_ATTENTION, FLEX_ATTENTION], ids=lambda attention: attention.name)
@pytest.mark.parametrize(
    ("needed", "words"),
    [
        ({"dropout": 0.1}, "it has attention dropout"),
        ({"is_causal": False}, "is not causal"),
        ({"s_aux": torch.zeros(2)}, "it has s_aux"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "it has a mask"),
    ],
)
def test_what_our_kernels_do_not_support_is_refused_by_name(attention, needed, words):
    attend = {VARLEN: torch_attention._varlen, FLEX: torch_attention._flex}[attention.training]
    parts = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    borders = boundaries(np.arange(4)[None], torch.device("cpu"), attention)
    with pytest.raises(InputError, match=words):
        attend(None, *parts, **{"attention_mask": None, **needed}, **borders)


def test_varlen_refuses_soft_capped_scores_and_wide_types():
    parts = [torch.zeros(1, 2, 4, 8) for _ in range(3)]
    borders = boundaries(np.arange(4)[None], torch.device("cpu"), VARLEN_ATTENTION)
    with pytest.raises(InputError, match="soft-capped") as caught:
        torch_attention._varlen(None, *parts, None, softcap=CAP, **borders)
    assert "soft-capped" not in caught.value.fix, "that is what it cannot do"
    with pytest.raises(InputError, match=r"its values are torch\.float32") as caught:
        torch_attention._varlen(None, *parts, None, **borders)
    assert caught.value.fix == "set training.dtype: bfloat16 or float16"


def test_under_autocast_the_kernel_gets_one_narrow_type(monkeypatch):
    """Queries and keys leave their norm and their rotation in float32."""
    seen = []

    def kernel(query, key, value, begins, ends, most, longest, *, scale, window_size, enable_gqa):
        seen.append(({part.dtype for part in (query, key, value)}, window_size, enable_gqa))
        assert begins is ends and most == longest
        before = None if window_size[0] < 0 else window_size[0]
        return attend_alone(query, key, value, begins=begins, longest=longest, scale=scale, before=before)

    monkeypatch.setattr(torch_attention, "varlen_attn", kernel)
    monkeypatch.setattr(torch_attention, "_VARLEN_TAKES", {"scale", "window_size", "enable_gqa"})
    packed, _ = packed_and_alone()
    model = small_model("gemma3_text", attention=VARLEN, dtype=torch.float32)
    with torch.no_grad():
        packed_states(model, packed, VARLEN_ATTENTION, casting=torch.autocast("cpu", dtype=torch.bfloat16))
    assert seen == [({torch.bfloat16}, (3, 0), True), ({torch.bfloat16}, (-1, 0), True)]


# --- what the layers of a model need ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_family_need_what_its_attention_supports(family):
    attention = FLEX_ATTENTION if family == "gemma2" else VARLEN_ATTENTION
    model = small_model(family, attention=attention.training).eval()
    assert supported_attention(model, attention) is attention
    assert model.config._attn_implementation == attention.training and not model.training
    masked = on_cpu(family)
    assert supported_attention(model, masked) is masked


_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 2,
}  # fmt: skip


@parametrize("kind", "more", "words")
def test_a_layer_that_needs_more_gets_the_attention_of_transformers_and_the_reason(kind, more, words):
    torch_attention.register()
    config = AutoConfig.for_model(kind, **_SMALL | more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = torch.get_rng_state()
    actual = supported_attention(model, VARLEN_ATTENTION)
    assert actual.name == ("eager" if kind in ("gemma2", "gpt_oss") else "sdpa") and words in actual.why
    assert torch.equal(torch.get_rng_state(), state) and model.config._attn_implementation == "eager"


@parametrize("kind", "more", "words")
def test_an_architecture_that_cannot_separate_examples_is_refused_by_name(kind, more, words):
    settings = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, **more}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    assert re.search(words, unpackable(model))
    assert unpackable(small_model("llama", attention="sdpa")) is None


def test_transformers_generates_with_the_attention_chosen_for_it():
    """After training with varlen, on the CPU as it would be on a GPU: the caches belong to sdpa."""
    model = small_model("gemma3_text", attention=VARLEN).eval()
    plain = small_model("gemma3_text", attention="sdpa").eval()
    model.set_attn_implementation(VARLEN_ATTENTION.generating)
    wanted = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    ids = torch.tensor([[3, 9, 27], [0, 5, 25]])
    answers = [m.generate(ids, attention_mask=(ids > 0).long(), generation_config=wanted) for m in (model, plain)]
    assert torch.equal(*answers)
