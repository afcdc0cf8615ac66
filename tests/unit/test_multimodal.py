"""A multimodal checkpoint is its text model with towers that nothing touches."""

import json

import pytest

from tests.conftest import SHIPPED
from tests.program import in_process, refused
from tunix_rt.models.multimodal import text_config, text_names
from tunix_rt.models.resolve import resolve_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

TEXT = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "max_position_embeddings": 256, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TRAIN = [
    "train", "--data", "dev-reasoning-v2", "--device", "cpu", "--max-steps", "2", "--set", "data.max_length=128",
    "--set", "evaluation.enabled=false", "--set", "training.per_device_train_batch_size=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multimodal") / "model"
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    return folder


def test_the_text_model_trains_and_the_towers_stay_as_they_were_to_the_byte(checkpoint, tmp_path):
    done = in_process(*TRAIN, "--model", checkpoint, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    before, after = (
        load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "run" / "final_model")
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(text_names(before)) and len(changed) < len(before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final_model")
    assert type(loaded).__name__ == "Gemma3ForConditionalGeneration"
    log = (tmp_path / "run" / "training_log.txt").read_text()
    assert "Multimodal checkpoint: the text model trains" in log and "tensors bitwise equal" in log


def test_files_of_both_ages_give_the_same_text_model(checkpoint, tmp_path):
    """Names changed with transformers 4.52: `language_model.model.` became `model.language_model.`."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    renamed = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        ours = name.startswith("language_model.model.")
        renamed[name.replace("language_model.model.", "model.language_model.") if ours else f"model.{name}"] = tensor
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    from tunix_rt.engines.torch.load import load_for_inference

    one, other = (
        load_for_inference(resolve_model(str(folder)), device="cpu", dtype="float32")
        for folder in (checkpoint, tmp_path)
    )
    ids = torch.tensor([[2, 5, 9, 33]])
    assert torch.equal(one.model(input_ids=ids).logits, other.model(input_ids=ids).logits)


def test_the_config_of_a_text_model_is_its_own():
    assert text_config({"model_type": "llama"}) == {"model_type": "llama"}
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 8}}
    assert text_config(nested) == {"model_type": "gemma3_text", "hidden_size": 8}
    assert text_names(["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]) == {}


def test_random_weights_are_those_of_the_text_model_alone(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    assert "--weights random" in refused(in_process(*TRAIN, "--model", folder, "--output", tmp_path / "no"), 3)
    assert not resolve_model(str(folder), weights="random").multimodal


def test_the_towers_of_gemma_4_stay_as_they_were_to_the_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("tunix_rt.export.export.check_round_trip", lambda *given, **named: None)  # loaded below
    text = {
        **TEXT, "global_head_dim": 32, "num_kv_shared_layers": 1, "num_hidden_layers": 3, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 1024, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16, "patch_size": 4, "position_embedding_size": 64,
    }  # fmt: skip
    del text["query_pre_attn_scalar"]
    torch.manual_seed(0)
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    folder, run = tmp_path / "model", tmp_path / "run"
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    done = in_process(*TRAIN, "--model", folder, "--output", run)
    assert done.returncode == 0, done.stderr
    before, after = (load_file(one / "model.safetensors") for one in (folder, run / "final_model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    text_model = {name for name in text_names(before) if not name.endswith("layer_scalar")}
    assert before.keys() == after.keys() and changed == text_model and len(changed) < len(before)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(run / "final_model")
    assert type(loaded).__name__ == "Gemma4ForConditionalGeneration"
