"""A model that is cut before it is loaded has, over all ranks, every weight and every buffer of the one that is loaded whole."""

import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks import sharded_load
from tests.conftest import write_small_model
from tunix_rt.engines.torch import tensor_files
from tunix_rt.engines.torch.model_files import write_weights
from tunix_rt.engines.torch.sharded_load import fill_buffers, fill_weights, meta_model
from tunix_rt.errors import InputError
from tunix_rt.ranks import Part, part_of

WORLD = 3
OTHERS = ("gemma", "smollm3", "mistral", "phi3", "gemma4-e", "gemma4", "gemma4-moe", "olmo2", "olmo3", "granite")
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(kind, folder, *, dtype=torch.float32, limit="50GB"):
    """A folder with a real model, its weights split into files of at most `limit`."""
    if kind == "mixtral":
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MIXTRAL))
    else:
        write_small_model(kind, folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=dtype)
    for parameter in model.parameters():  # norms and biases too
        parameter.data.add_(torch.rand_like(parameter))
    model.save_pretrained(folder, max_shard_size=limit)
    return SimpleNamespace(name=kind, folder=folder)


def load_in_parts(source, world, dtype=torch.float32):
    """For each rank its rows by name, and the model whose buffers are filled."""
    config = transformers.AutoConfig.from_pretrained(source.folder)
    ranks = []
    for rank in range(world):
        model = meta_model(source, config, {"dtype": dtype, "attn_implementation": "sdpa"})
        parts = {name: part_of(tuple(one.shape), rank, world) for name, one in model.named_parameters()}
        rows = {name: torch.empty(part.rows, *part.shape[1:], dtype=dtype) for name, part in parts.items()}
        model.to_empty(device="cpu")
        saved = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
        parts |= {name: Part.whole(tuple(buffer.shape)) for name, buffer in saved.items()}
        fill_weights(model, source, rows | saved, parts, key_mapping=None)
        fill_buffers(model)
        ranks.append((rows, model))
    return ranks


@pytest.mark.parametrize(
    ("kind", "stored", "dtype"),
    [
        ("gemma3", torch.float32, torch.float32), ("gpt2", torch.float32, torch.bfloat16),
        ("llama", torch.bfloat16, torch.float32), ("mixtral", torch.float32, torch.float32),
        *(pytest.param(kind, torch.float32, torch.float32, marks=pytest.mark.slow) for kind in OTHERS),
    ],
)  # fmt: skip
def test_the_rows_of_all_ranks_are_the_model_that_is_loaded_whole(tmp_path, monkeypatch, kind, stored, dtype):
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 1000)  # most tensors lie in several
    source = write_model(kind, tmp_path / "model", dtype=stored, limit="20KB")
    assert len(list(source.folder.glob("*.safetensors"))) > 1
    whole = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=dtype)
    ranks = load_in_parts(source, WORLD, dtype)
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([rows[name] for rows, _ in ranks]), parameter), name
    buffers = dict(whole.named_buffers())
    for _, model in ranks:
        found = dict(model.named_buffers())
        assert found.keys() == buffers.keys()
        assert all(
            torch.equal(found[name], buffer) and found[name].dtype == buffer.dtype for name, buffer in buffers.items()
        )
        assert model.generation_config.to_dict() == whole.generation_config.to_dict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "1 missing keys, first model.norm.weight"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight as \[3\], config.json as"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(1024, 32)}), "ties model.embed_tokens.weight"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_refused_by_name(tmp_path, change, said):
    source = write_model("gemma3", tmp_path / "model")
    weights = load_file(source.folder / "model.safetensors")
    change(weights)
    save_file(weights, source.folder / "model.safetensors")
    with pytest.raises(InputError, match=said) as caught:
        load_in_parts(source, 2)
    assert caught.value.fix


# --- the final model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "mixtral"])
@pytest.mark.parametrize("limit", ["20KB", "50GB"])
def test_weights_streamed_by_layer_are_the_files_that_transformers_saves(tmp_path, kind, limit):
    model = transformers.AutoModelForCausalLM.from_pretrained(write_model(kind, tmp_path / "model").folder)
    held, saved = [], tmp_path / "saved"
    model.save_pretrained(saved, max_shard_size=limit)

    def whole(name):
        held.append(name)
        return model.state_dict()[name]

    written = tmp_path / "written"
    written.mkdir()
    write_weights(written, model, whole, dtype=None, file_bytes=int(limit[:2]) * 1000 ** " KMG".index(limit[2]))
    names = {path.name for path in saved.iterdir() if "safetensors" in path.name}
    assert len(held) == len(set(held)) and len(names) > (2 if limit == "20KB" else 0)
    if (
        kind != "mixtral" or limit == "50GB"
    ):  # transformers puts the experts of a layer into one file, whatever its size
        assert {path.name for path in written.iterdir()} == names
        assert all((written / name).read_bytes() == (saved / name).read_bytes() for name in names)
    model.config.save_pretrained(written)
    again = transformers.AutoModelForCausalLM.from_pretrained(written).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_a_rank_has_no_more_of_the_model_in_host_memory_than_its_rows_and_a_block(tmp_path):
    size = sharded_load.write_model(tmp_path, layers=4)
    for rank in (0, 3):
        found = sharded_load.measured(sharded_load.load_rows, tmp_path, rank, 4)
        assert (
            found["own_bytes"] <= size / 4 * 1.01
            and found["peak_bytes"] < found["own_bytes"] + 2 * tensor_files.BLOCK_BYTES
        )
