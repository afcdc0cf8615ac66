"""google-tunix's models in our loop: what fails in them without a word is handled or refused by name."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks import parity
from benchmarks.jax_models import open_in_tunix
from tests.conftest import ROOT, SHIPPED
from tests.program import tunix_rt
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.errors import ConfigError

pytest.importorskip("jax", reason="needs jax")
from tunix_rt.engines.jax import tunix as jax_tunix

WITH_TUNIX = importlib.util.find_spec("tunix") is not None
pytestmark = pytest.mark.tunix
needs_tunix = pytest.mark.skipif(not WITH_TUNIX, reason="needs google-tunix: run scripts/tunix")
GEMMA3 = parity.TINY["gemma3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny models and inputs, by family."""
    return {
        name.removeprefix("tiny "): folder
        for name, folder in parity.prepare_tiny(tmp_path_factory.mktemp("adapter")).items()
    }


def ask(question: str, folder: Path, flags: str = "") -> dict:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{parity.ROUGH} {flags}", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.tunix.adapter_side", question, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(WITH_TUNIX, reason="google-tunix is installed here")
def test_without_google_tunix_the_setting_is_refused_with_the_way_to_it():
    with pytest.raises(ConfigError, match="google-tunix, which is not installed") as refused:
        jax_tunix.config_of(architecture_of(GEMMA3))
    assert "scripts/tunix" in refused.value.fix


@needs_tunix
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05; it has 1e-06"),
        ({"hidden_activation": "silu"}, "an activation silu; it has gelu_tanh"),
        ({"query_pre_attn_scalar": 24}, "scores times 0.204124; it has 0.25 or 0.353553"),
        ({"attn_logit_softcapping": 20.0}, "soft-capped scores in a Gemma 3"),
        ({"tie_word_embeddings": False}, "an lm_head weight of its own"),
        ({"attention_bias": True}, "biases"),
        ({"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, "windows .* are 6, all;"),
        (parity.TINY["gemma"] | {"rope_theta": 5000.0}, "Gemma 1 and 2 have base 10000"),
        ({"model_type": "llama", "hidden_act": "silu"}, "supports gemma, gemma2, gemma3_text, not llama"),
    ],
)  # fmt: skip
def test_what_tunix_would_compute_otherwise_is_refused_by_name(changed, words):
    with pytest.raises(ConfigError, match=words):
        jax_tunix.config_of(architecture_of(GEMMA3 | changed))


@needs_tunix
def test_the_epsilon_of_a_gguf_file_which_is_rounded_to_float32_is_no_other():
    jax_tunix.config_of(architecture_of(GEMMA3 | {"rms_norm_eps": float(np.float32(1e-6))}))


@needs_tunix
def test_the_shipped_model_is_refused_since_its_last_layer_has_no_window():
    with pytest.raises(ConfigError, match="256, 256, 256, 256, all"):
        jax_tunix.config_of(architecture_of(json.loads((SHIPPED / "config.json").read_text())))


@needs_tunix
@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0, 123_457.0])
@pytest.mark.parametrize("factor", [None, 8.0])
def test_base_and_factor_of_a_rotation_are_found_in_its_frequencies(base, factor):
    full = {"rope_type": "default" if factor is None else "linear", "rope_theta": base}
    full |= {} if factor is None else {"factor": factor}
    sliding = {"rope_type": "default", "rope_theta": 10_000.0}
    rope = {"full_attention": full, "sliding_attention": sliding}
    config = jax_tunix.config_of(
        architecture_of(GEMMA3 | {"head_dim": 256, "rope_parameters": rope, "query_pre_attn_scalar": 256})
    )
    assert (config.global_base_frequency, config.global_scale_factor) == (base, factor or 1.0)
    assert (config.local_base_frequency, config.local_scale_factor) == (10_000.0, 1.0)


@needs_tunix
def test_the_configuration_of_a_real_model_is_the_one_that_tunix_names():
    from tunix.models.gemma3.model import ModelConfig

    sizes = {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "intermediate_size": 2048,
        "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 512, "max_position_embeddings": 32768,
    }  # fmt: skip
    ours, theirs = jax_tunix.config_of(architecture_of(sizes)), ModelConfig.gemma3_270m()
    apart = {
        field.name for field in dataclasses.fields(ours) if getattr(ours, field.name) != getattr(theirs, field.name)
    }
    assert apart == {
        "shd_config",
        "param_dtype",
    }  # the axes of our mesh, which has no `tp`; and weights keep their type


# --- what is handled -------------------------------------------------------------------------------------------------


@needs_tunix
@pytest.mark.parametrize("family", parity.TINY)
def test_a_saved_folder_loads_in_tunix_and_gemma_1_by_our_key_map_alone(models, family):
    found = ask("loader", models[family])
    assert found["ours"] is True
    if family == "gemma":
        assert found["alone"] is not True
    else:
        assert found["alone"] is True


@needs_tunix
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            "1 of .* missing, first model.layers.1.mlp.up",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].astype(np.float16)}),
            "of several types: F16, F32; Tunix's loader reads one",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_type_is_named(models, tmp_path, damage, words):
    tensors = load_file(models["gemma2"] / "model" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    architecture = architecture_of(json.loads((models["gemma2"] / "model" / "config.json").read_text()))
    with pytest.raises(Exception, match=words):
        open_in_tunix(tmp_path, architecture)


@needs_tunix
def test_gemma_2_is_right_past_its_window_where_tunix_alone_is_not(models):
    apart = ask("restarted", models["gemma2"])
    assert apart["adapter"] < 1e-4
    assert apart["alone"] > 0.1


@needs_tunix
def test_what_a_layer_keeps_changes_neither_loss_nor_gradient(models):
    for found in ask("kept", models["gemma2"]).values():
        assert found["loss"] < 1e-6
        assert found["gradient"] < 1e-5


@needs_tunix
def test_small_steps_in_bfloat16_move_every_weight_for_the_master_is_float32(models):
    found = ask("halved", models["gemma"])
    assert found["types"] == ["float32"]
    assert found["unmoved"] < 0.01
    assert np.isfinite(found["losses"]).all()


@needs_tunix
def test_several_devices_compute_what_one_computes(models):
    found = ask("devices", models["gemma"], "--xla_force_host_platform_device_count=8")
    assert found["devices"] == 8
    assert found["all"] == pytest.approx(found["one"], rel=1e-5)


@needs_tunix
def test_an_id_outside_the_table_gives_no_number(models):
    assert ask("outside", models["gemma"]) == {"no number": True}


# --- through the program ---------------------------------------------------------------------------------------------


@needs_tunix
def test_twenty_steps_of_tunix_rt_train_are_the_same_with_tunix_and_with_ours(models, tmp_path):
    """And what was trained loads in Tunix."""
    model = models["gemma3"] / "model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((SHIPPED / name).read_bytes())
    losses = {}
    for implementation in ("auto", "tunix"):
        config = {
            "model": {"model_name_or_path": str(model), "implementation": implementation},
            "data": {"dataset": "dev-reasoning-v2", "max_length": 192},
            "training": {
                "backend": "jax", "device": "cpu", "dtype": "float32", "max_steps": 20, "learning_rate": 1e-3,
                "per_device_train_batch_size": 2, "save_steps": 20, "seed": 3,
            },
            "evaluation": {"enabled": False},
        }  # fmt: skip
        path, run = tmp_path / f"{implementation}.yaml", tmp_path / implementation
        path.write_text(json.dumps(config))
        done = tunix_rt("train", path, "--output", run, JAX_PLATFORMS="cpu", XLA_FLAGS=parity.ROUGH)
        assert done.returncode == 0, done.stderr[-3000:]
        log = (run / "training_log.txt").read_text()
        assert ("Model: training uses google-tunix" in log) == (implementation == "tunix")
        losses[implementation] = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses["auto"]) == 20
    assert losses["auto"][-1] < 0.95 * losses["auto"][0]
    assert losses["tunix"] == pytest.approx(losses["auto"], rel=1e-4)
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "model").symlink_to(tmp_path / "tunix" / "final_model", target_is_directory=True)
    (tmp_path / "asked" / "inputs.npz").write_bytes((models["gemma3"] / "inputs.npz").read_bytes())
    assert ask("loader", tmp_path / "asked") == {"alone": True, "ours": True}
