"""Every row of the table of model families is what transformers does with a config.json of that family."""

import dataclasses

import pytest
import transformers

from tests.tables import tables
from tunix_rt.models.families import FAMILIES, FULL, SLIDING, families_of
from tunix_rt.plan.shape import shape_of

NO_FIELDS = {"sliding_window_pattern", "head_dim", "global_head_dim", "num_global_key_value_heads"}
"""Keys that a configuration class may read without having them as a field."""
LAYER_SETTINGS = tables(__file__)["layer_settings"]
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@each_family
def test_defaults_are_those_of_the_configuration_class(family):
    fields = dataclasses.fields(type(transformers.AutoConfig.for_model(family.model_type)))
    expected = {field.name: field.default for field in fields if field.name in family.defaults}
    assert {key: value for key, value in family.defaults.items() if key in expected} == expected
    assert set(family.defaults) - set(expected) <= NO_FIELDS


@each_family
def test_the_class_is_the_one_for_causal_language_modeling(family):
    kind = type(transformers.AutoConfig.for_model(family.model_type))
    assert family.class_name == transformers.MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__


@each_family
def test_the_bases_of_the_rotation_are_those_of_the_configuration_class(family):
    rope = getattr(transformers.AutoConfig.for_model(family.model_type), "rope_parameters", None)
    if family.layout == "gpt2":
        assert rope is None
    elif family.local_rope_theta is None:
        assert rope["rope_theta"] == family.rope_theta
    else:
        bases = (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"])
        assert bases == (family.rope_theta, family.local_rope_theta)


@pytest.mark.parametrize("settings", LAYER_SETTINGS, ids=str)
@each_family
def test_layer_types_and_windows_are_those_of_transformers(family, settings):
    if family.model_type in ("gemma4_text", "cwm"):  # whose class takes no null for the window
        settings = {key: value for key, value in settings.items() if value is not None}
    config = transformers.AutoConfig.for_model(family.model_type, **settings)
    written = {"model_type": family.model_type, **settings}
    shape = shape_of(written)
    only = SLIDING if family.one_mask and config.sliding_window else FULL
    types = (None if family.one_mask else getattr(config, "layer_types", None)) or [only] * shape.layers
    assert family.layer_types(written, shape.layers) == types
    assert shape.window == (config.sliding_window if SLIDING in types else None)


def test_engines_have_the_families_of_their_rows():
    assert families_of("torch") == tuple(sorted(FAMILIES))
    assert families_of("jax") == ("gemma", "gemma2", "gemma3_text", "gpt2", "llama")
    assert families_of("tunix") == ("gemma", "gemma2", "gemma3_text")


def test_gguf_files_that_transformers_converts_have_their_architecture_in_the_row():
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    names = {family.model_type: family.gguf for family in FAMILIES.values()}
    assert {name for name in names.values() if name} <= set(GGUF_CONFIG_MAPPING)
    assert {kind for kind, name in names.items() if name is None} & set(GGUF_CONFIG_MAPPING) == set()
