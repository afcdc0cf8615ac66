"""The JAX engine reads a config.json as transformers does, and refuses by name what it does not support."""

import json

import numpy as np
import pytest
import torch
import transformers

from tests.conftest import _SMALL, ROOT
from tests.tables import parametrize
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.errors import InputError
from tunix_rt.models.families import families_of
from tunix_rt.models.resolve import preset_names

OLD_ROPE = {"rope_theta": 50_000.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
VARIANTS = {
    "gemma3 of old": _SMALL["gemma3"] | {
        "rope_theta": 50_000.0, "rope_local_base_freq": 20_000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3 by its pattern": _SMALL["gemma3"] | {"layer_types": None, "sliding_window_pattern": 2, "num_hidden_layers": 5},
    "gemma3 by default": _SMALL["gemma3"] | {"layer_types": None, "num_hidden_layers": 8},
    "gemma2 by default": {"model_type": "gemma2", "num_hidden_layers": 5, "vocab_size": 64},
    "gemma by default": {"model_type": "gemma", "vocab_size": 64},
    "llama of old": _SMALL["llama"] | OLD_ROPE,
    "llama 3.1": _SMALL["llama"] | {
        "rope_theta": 500_000.0, "max_position_embeddings": 8192,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 512},
    },
}  # fmt: skip


def shipped(preset):
    return json.loads((ROOT / "presets" / preset / "config.json").read_text())


KNOWN = {name: shipped(name) for name in preset_names() if shipped(name)["model_type"] in families_of("jax")} | VARIANTS


@pytest.mark.parametrize("name", KNOWN)
def test_windows_rotations_scales_and_caps_are_those_of_transformers(name, tmp_path):
    ours = architecture_of(KNOWN[name])
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name]))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert ours.logit_cap == getattr(config, "final_logit_softcapping", None)
    assert ours.score_cap == getattr(config, "attn_logit_softcapping", None)
    assert ours.embedding_scale == getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    assert ours.padding_id == model.get_input_embeddings().padding_idx
    layers = getattr(model.base_model, "layers", None) or model.base_model.h
    for layer, kind in zip(layers, ours.pattern, strict=True):
        attention = getattr(layer, "self_attn", None) or layer.attn
        assert ours.kinds[kind].window == getattr(attention, "sliding_window", None)
        assert ours.query_scale == pytest.approx(attention.scaling, rel=1e-15)
        if ours.kinds[kind].frequencies:
            turns = rotations(model, getattr(attention, "layer_type", None))
            np.testing.assert_allclose(ours.kinds[kind].frequencies, turns, rtol=5e-7)
    norm = model.base_model.norm if hasattr(model.base_model, "norm") else model.base_model.ln_f
    assert ours.epsilon == getattr(norm, "eps", getattr(norm, "variance_epsilon", None))


def rotations(model, layer_type):
    """transformers' own, computed on the CPU: on the meta device there are no numbers."""
    rotary = type(model.base_model.rotary_emb)(model.config)
    own = f"{layer_type}_inv_freq"
    return getattr(rotary, own if hasattr(rotary, own) else "inv_freq").numpy()


@parametrize("family", "change", "words")
def test_what_the_models_do_not_support_is_refused_by_name(family, change, words):
    architecture_of(_SMALL[family])
    with pytest.raises(InputError) as error:
        architecture_of(_SMALL[family] | change)
    assert words in str(error.value)


def test_the_first_gemma_releases_say_gelu_and_mean_its_approximation():
    gemma = {"model_type": "gemma", "hidden_act": "gelu"}
    assert architecture_of(gemma).activation == "gelu_tanh"
    assert architecture_of(gemma | {"model_type": "gemma2", "hidden_activation": "gelu"}).activation == "gelu"


def test_dropout_is_the_largest_probability_in_the_configuration():
    assert [architecture_of(_SMALL[name]).dropout for name in ("gpt2", "gpt2-dropout", "llama")] == [0.0, 0.1, 0.0]
