"""A preset is the real model in everything but its weights: every size to the parameter, no setting ignored."""

import json
import re
import tomllib

import pytest

from tests.conftest import ROOT
from tests.tables import tables
from tunix_rt import assets
from tunix_rt.config.load import build_config
from tunix_rt.errors import InputError
from tunix_rt.models.resolve import PRESET_OF, preset_names, resolve_model
from tunix_rt.plan.shape import shape_of
from tunix_rt.train.context import find_tokenizer

PARAMETERS = tables(__file__)["parameters"]


def config_of(name: str) -> dict:
    return json.loads((ROOT / "presets" / name / "config.json").read_text(encoding="utf-8"))


def test_the_presets_are_those_that_were_asked_for():
    assert preset_names() == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_plan_counts_a_preset_to_the_parameter(name):
    assert shape_of(config_of(name)).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_transformers_builds_a_preset_of_that_size_and_ignores_none_of_its_settings(name):
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(ROOT / "presets" / name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    known, said = config.to_dict(), config_of(name)
    # Gemma 4 reads two keys into the settings of its layers with full attention.
    of_layers = {"global_head_dim", "num_global_key_value_heads"} if "per_layer_config" in known else set()
    names = {key: known[key] for key in said if key in type(config)().to_dict()}
    assert names == {key: said[key] for key in names}
    assert set(said) - set(names) <= {"dtype", "architectures", *of_layers}, (
        "a key that the class does not know would be ignored"
    )
    assert (known["dtype"], [type(model).__name__]) == (said["dtype"], said["architectures"])


def test_windows_softcaps_and_rotations_are_those_of_the_published_models():
    gemma2, small, large = (config_of(name) for name in ("gemma-2-2b", "gemma-3-270m", "gemma-3-1b"))
    assert (gemma2["attn_logit_softcapping"], gemma2["final_logit_softcapping"], gemma2["sliding_window"]) == (
        50,
        30,
        4096,
    )
    assert gemma2["layer_types"] == ["sliding_attention", "full_attention"] * 13
    for config in (small, large):
        full = [at for at, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
        assert full == list(range(5, config["num_hidden_layers"], 6)) and config["sliding_window"] == 512
        bases = {kind: rope["rope_theta"] for kind, rope in config["rope_parameters"].items()}
        assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}
    bases = {
        name: config_of(name)["rope_parameters"]["rope_theta"]
        for name in ("llama-3.2-1b", "qwen-3-0.6b", "smollm2-135m", "smollm3-3b")
    }
    assert bases == {"llama-3.2-1b": 5e5, "qwen-3-0.6b": 1e6, "smollm2-135m": 1e5, "smollm3-3b": 5e6}
    assert config_of("smollm3-3b")["no_rope_layers"] == [1, 1, 1, 0] * 9
    assert config_of("llama-3.2-1b")["rope_parameters"]["factor"] == 32


def test_a_run_on_a_preset_without_a_tokenizer_is_refused_with_the_setting_that_names_one():
    named = {"model_name_or_path": "smollm2-135m", "weights": "random"}
    with pytest.raises(InputError, match=r"no tokenizer\.json") as caught:
        find_tokenizer(build_config({"model": named}, "test"))
    assert "model.tokenizer_name_or_path" in caught.value.fix
    tokenizer, facts = find_tokenizer(
        build_config({"model": {**named, "tokenizer_name_or_path": "tiny-gemma3"}}, "test")
    )
    assert (tokenizer.vocab_size, facts.vocabulary) == (769, 49_152)


def test_the_wheel_has_the_presets_where_they_are_looked_for(tmp_path, monkeypatch):
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"]["presets"] == "tunix_rt/packaged/presets"
    assert "presets" in build["sdist"]["include"]
    packaged = tmp_path / "packaged"
    (packaged / "presets").mkdir(parents=True)
    (packaged / "presets" / "gemma-2b").symlink_to(ROOT / "presets" / "gemma-2b")
    monkeypatch.setattr(assets, "_PACKAGED", packaged)
    assert resolve_model("gemma-2b", weights="random").folder == packaged / "presets" / "gemma-2b"


def test_the_guide_has_every_preset_with_its_parameters_and_its_names_on_the_hub():
    page = (ROOT / "docs" / "guides" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)` \| ([\d,]+) \| (.+) \|$", page, flags=re.MULTILINE)
    told = {name: (int(count.replace(",", "")), re.findall(r"`([^`]+)`", ids)) for name, count, ids in rows}
    ids = {name: sorted(hub_id for hub_id, preset in PRESET_OF.items() if preset == name) for name in PARAMETERS}
    assert told == {name: (PARAMETERS[name], ids[name]) for name in PARAMETERS}
