"""A model whose loss or packing is not what the loop assumes is refused before it is trained, in every precision."""

import re
import shutil

import pytest
import torch
import torch.nn.attention.flex_attention as flex_of_torch
import transformers
from transformers import masking_utils

from tests.attention_checks import FAMILIES, small_model
from tests.conftest import SHIPPED
from tunix_rt.config.settings import Training
from tunix_rt.engines.torch import attention as torch_attention
from tunix_rt.engines.torch import load as torch_load
from tunix_rt.engines.torch import model as torch_model
from tunix_rt.engines.torch import varlen as torch_borders
from tunix_rt.engines.torch.attention import FLEX, Attention
from tunix_rt.engines.torch.model import Support
from tunix_rt.errors import InputError
from tunix_rt.models.resolve import resolve_model

PRECISIONS = {
    "float32": {},
    "float32 master": {"dtype": "bfloat16"},
    "bfloat16": {"dtype": "bfloat16", "master_dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}
each_precision = pytest.mark.parametrize("precision", PRECISIONS)

LOSS = r"two packed examples give loss (\d+\.\d+), unpacked they give (\d+\.\d+)"
NEIGHBOUR = "a packed example changes with its neighbour"


@pytest.fixture
def written(tmp_path):
    """Writes a model with its weights and a tokenizer."""

    def write(model):
        folder = tmp_path / model.config.model_type
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(SHIPPED / name, folder / name)
        return folder

    return write


@pytest.fixture
def model_folder(written):
    """A small model of a family, on whose weights `spoil` was called."""

    def write(family, *, spoil=lambda model: None, **settings):
        model = small_model(family, attention="eager", dtype=torch.float32, **settings)
        with torch.no_grad():
            spoil(model)
        return written(model)

    return write


def loaded(folder, precision):
    return torch_load.load(resolve_model(str(folder)), device="cpu", training=Training(**PRECISIONS[precision]))


def refusal(folder, precision):
    with pytest.raises(InputError) as caught:
        loaded(folder, precision)
    assert folder.name in caught.value.problem
    return caught.value


@each_precision
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_taken_as_it_is(model_folder, family, precision):
    """16-bit logits differ from ours by their rounding, which is no reason to refuse a model."""
    folder = model_folder(family, initializer_range=0.4)
    assert loaded(folder, precision).parameters > 0


# --- the head --------------------------------------------------------------------------------------------------------

CAP = 10.0
"""Without it, the loss of the few tokens that are looked at is 1.5 % too high."""


def forget_the_cap(monkeypatch):
    real = torch_model.head_loss
    monkeypatch.setattr(torch_model, "head_loss", lambda *parts, **named: real(*parts, **named | {"softcap": None}))


@each_precision
def test_a_soft_cap_that_our_head_forgets_is_found(model_folder, precision, monkeypatch):
    folder = model_folder("gemma2", final_logit_softcapping=CAP)
    loaded(folder, precision)
    forget_the_cap(monkeypatch)
    error = refusal(folder, precision)
    found = re.search(LOSS, error.problem)
    assert found and "an unknown kind of lm_head" in error.fix
    ours, theirs = map(float, found.groups())
    assert 1.01 < ours / theirs < 1.02, "small enough to hold the tolerance of 16 bits"


def test_in_float32_gemmas_own_soft_cap_is_found_on_weights_as_they_are_drawn(model_folder, monkeypatch):
    """2 parts in a thousand."""
    folder = model_folder("gemma2", final_logit_softcapping=30.0)
    forget_the_cap(monkeypatch)
    assert re.search(LOSS, refusal(folder, "float32").problem)


@each_precision
def test_a_head_that_leaves_out_a_target_is_found(model_folder, precision, monkeypatch):
    folder = model_folder("llama")
    real = torch_model.head_loss
    monkeypatch.setattr(
        torch_model, "head_loss", lambda states, table, targets, **how: real(states[1:], table, targets[1:], **how)
    )
    assert re.search(LOSS, refusal(folder, precision).problem)


@each_precision
def test_a_head_with_a_bias_is_the_models_own(written, precision):
    """It is trained through the model's own logits, also where it is zero at first."""
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    phi = transformers.AutoConfig.for_model("phi", num_attention_heads=4, pad_token_id=0, **settings)
    engine = loaded(written(transformers.AutoModelForCausalLM.from_config(phi)), precision)
    assert engine.support == Support(chunked_head=False)


@pytest.mark.parametrize("head", [None, torch.nn.Identity()], ids=["none", "of another kind"])
def test_a_head_that_is_no_projection_is_refused_by_what_it_is(model_folder, head, monkeypatch):
    folder = model_folder("llama")
    monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", lambda model: head)
    error = refusal(folder, "float32")
    assert error.problem.endswith(f"its lm_head is a {type(head).__name__}") and "linear layer" in error.fix


# --- the borders -----------------------------------------------------------------------------------------------------


def no_border(position_ids):
    return None


def last_token_strays(position_ids):
    """The last token sees the first example instead of its own. It predicts nothing, so the loss is right."""
    examples = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    if int(examples.max()) > 0:
        examples[:, -1] = 0
    return examples


@each_precision
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "gpt2"])
def test_borders_that_the_masks_of_transformers_lose_are_found(model_folder, family, precision, monkeypatch):
    folder = model_folder(family)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", no_border)
    error = refusal(folder, precision)
    assert re.search(f"{LOSS}|{NEIGHBOUR}", error.problem) and "packed" in error.fix


@each_precision
def test_one_token_that_sees_the_neighbour_is_found_though_the_loss_is_right(model_folder, precision, monkeypatch):
    folder = model_folder("llama")
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", last_token_strays)
    error = refusal(folder, precision)
    assert error.problem.endswith(NEIGHBOUR) and "cannot be trained on packed rows" in error.fix


@pytest.mark.parametrize("precision", ["float32", "float32 master", "bfloat16"])
def test_borders_that_our_own_masks_lose_are_found(model_folder, precision, monkeypatch):
    """FlexAttention, here without a compiler: all scores are laid out."""
    monkeypatch.setattr(flex_of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    flex = Attention(name="flex", training=FLEX, generating="eager", why="")
    monkeypatch.setattr(torch_load, "attention_for", lambda *_: torch_attention.register() or flex)
    folder = model_folder("gemma2", head_dim=16)
    assert loaded(folder, precision).attention == flex
    real = torch_borders._begins

    def no_begin(positions):
        begins = real(positions)
        begins[:, 1:] = False
        return begins

    monkeypatch.setattr(torch_borders, "_begins", no_begin)
    assert re.search(f"{LOSS}|{NEIGHBOUR}", refusal(folder, precision).problem)


# --- the weights -----------------------------------------------------------------------------------------------------


def in_a_layer(model):
    return model.model.layers[1].mlp.up_proj.weight


def in_the_head(model):
    return model.lm_head.weight


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("where", [in_a_layer, in_the_head])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_damaged_weight_is_enough_to_refuse_a_model(model_folder, where, value, precision):
    folder = model_folder("llama", spoil=lambda model: where(model)[3, 5].fill_(value), tie_word_embeddings=False)
    error = refusal(folder, precision)
    assert re.search(r"its loss is (nan|-?inf)$", error.problem) and error.fix == "the weights are corrupt"


ARCHITECTURES = {
    "gptj": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8}, {"chunked_head": False}),  # a head with a bias
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2}, {"packing": False}),  # it takes no positions
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2}, {"packing": False}),  # it carries a state along the row
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_architecture_without_a_row_does_without_what_it_lacks(written, kind):
    settings, lacks = ARCHITECTURES[kind]
    config = transformers.AutoConfig.for_model(kind, vocab_size=64, **settings)
    folder = written(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    assert loaded(folder, "float32").support == Support(**lacks)


def test_a_model_with_eager_attention_alone_is_trained_with_it(written):
    settings = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    config = transformers.AutoConfig.for_model("gpt_neo", attention_types=[[["global"], 2]], **settings)
    folder = written(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    assert loaded(folder, "float32").attention.name == "eager"
