"""Weights for the JAX engine: every fault of a folder is named before anything is read, and nothing is read wrong."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT, write_small_model
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.errors import InputError
from tunix_rt.models.families import families_of
from tunix_rt.models.resolve import preset_names, resolve_model

weights = pytest.importorskip("tunix_rt.engines.jax.weights", exc_type=ImportError)
jax_models = pytest.importorskip("benchmarks.jax_models", exc_type=ImportError)

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def written(tmp_path):
    """A folder with a small model of a family, as transformers saves it."""

    def write(family="llama", **settings):
        folder = write_small_model(family, tmp_path / family)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        model.save_pretrained(folder, **settings)
        return folder

    return write


def spoil(folder, change, name="model.safetensors"):
    """The file again after `change` was called on its tensors."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def load(folder, **asked):
    source = resolve_model(str(folder))
    return weights.load_weights(source, architecture_of(source.config), **asked)


def refused(folder, *words, **asked):
    with pytest.raises(InputError) as error:
        load(folder, **asked)
    for word in words:
        assert word in str(error.value)


def tensors_of(folder, **asked):
    return dict(
        jax_models.named_tensors(
            load(folder, **asked), architecture_of(json.loads((folder / "config.json").read_text()))
        )
    )


# --- names and shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", preset_names())
def test_names_and_shapes_of_every_preset_are_those_of_transformers(preset):
    folder = ROOT / "presets" / preset
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in families_of("jax"):
        with pytest.raises(InputError, match=f"model_type {config['model_type']!r}"):
            architecture_of(config)
        return
    architecture = architecture_of(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    layers = architecture.shape.layers
    ours = {name: entry.shape for entry in weights.entries(architecture) for name in entry.names(layers)}
    assert ours == {name: tuple(one.shape) for name, one in model.named_parameters()}
    shapes = weights.parameter_shapes(architecture)
    arrays = [*shapes.pop("layers").values(), *shapes.values()]
    assert sum(np.prod(shape) for shape in arrays) == architecture.shape.parameters


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(written):
    folder = written()
    spoil(folder, lambda tensors: tensors.pop(QUERY))
    refused(folder, "1 of 21 tensors are missing", QUERY)


def test_a_tensor_too_many_is_named_with_its_file(written):
    folder = written()
    spoil(folder, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(64, 32)}))
    refused(
        folder, "1 tensors have no place in a llama", "first model.layers.2.mlp.up_proj.weight in model.safetensors"
    )


def test_another_shape_is_named_with_both(written):
    folder = written()
    spoil(folder, lambda tensors: tensors.update({QUERY: torch.zeros(32, 16)}))
    refused(folder, QUERY, "has shape [32, 16]", "implies [32, 32]")


def test_mixed_types_are_named_and_read_only_into_one_that_holds_them_all(written):
    folder, norm = written(), "model.norm.weight"
    spoil(folder, lambda tensors: tensors.update({norm: tensors[norm].bfloat16() + 0.5}))
    refused(folder, "several dtypes", f"BF16 (1, first {norm})", "F32 (20, first")
    refused(folder, "several dtypes", dtype="bfloat16")
    assert tensors_of(folder, dtype="float32")[norm].dtype == np.float32
    assert (tensors_of(folder, dtype="float32")[norm] == 1.5).all()


@pytest.mark.parametrize(("kind", "named"), [("int8", "I8"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F9_E7M1")])
def test_a_tensor_of_another_dtype_is_named_with_its_file_whatever_is_asked_for(written, kind, named):
    """The last is a dtype that neither NumPy nor safetensors has."""
    folder = written()
    spoil(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(getattr(torch, kind))}))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"F8_E5M2", b"F9_E7M1"))
    for dtype in (None, "float32"):
        refused(folder, f"{QUERY} in model.safetensors has dtype {named}; weights", "convert the weights", dtype=dtype)


def test_a_tied_head_may_lie_in_the_file_again_but_not_another(written):
    folder = written("gemma3")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    spoil(folder, lambda tensors: tensors.update({"lm_head.weight": table.clone()}))
    assert "head" not in load(folder)
    spoil(folder, lambda tensors: tensors.update({"lm_head.weight": table + 1}))
    refused(folder, "lm_head.weight in model.safetensors is not model.embed_tokens.weight")


# --- shards ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(written):
    """A folder of several shards, and the names of the first two."""
    folder = written(max_shard_size="100KB")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    return folder, *shards[:2]


def assert_read(folder, wanted):
    found = tensors_of(folder)
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert np.array_equal(found[name], one.numpy()), name


def test_shards_are_read_as_one(sharded):
    folder, *_ = sharded
    wanted = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
    assert_read(folder, wanted)


def test_a_missing_shard_is_named(sharded):
    folder, first, _ = sharded
    (folder / first).unlink()
    with pytest.raises(InputError, match=first):
        load(folder)


def test_a_tensor_in_two_shards_is_named_with_both(sharded):
    folder, first, second = sharded
    name, one = next(iter(load_file(folder / first).items()))
    spoil(folder, lambda tensors: tensors.update({name: one}), second)
    refused(folder, name, first, second)


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded):
    folder, first, _ = sharded
    name = next(iter(load_file(folder / first)))
    spoil(folder, lambda tensors: tensors.pop(name), first)
    refused(folder, f"{name} is in no shard", f"maps it to {first}")


def test_a_shard_that_the_index_does_not_name_is_refused(sharded):
    folder, first, _ = sharded
    (folder / "model-00009-of-00009.safetensors").write_bytes((folder / first).read_bytes())
    refused(folder, "model-00009-of-00009.safetensors is not named")


def test_a_whole_model_beside_shards_is_refused(sharded):
    folder, first, _ = sharded
    (folder / "model.safetensors").write_bytes((folder / first).read_bytes())
    refused(folder, "only one can be the model")


def test_shards_without_an_index_are_refused(sharded):
    folder, first, _ = sharded
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "neither model.safetensors nor", first)


# --- as models are published -----------------------------------------------------------------------------------------


def test_gpt2_as_it_was_published_is_read(written):
    """Without the model's prefix, and with masks beside the parameters."""
    folder = written("gpt2")
    wanted = load_file(folder / "model.safetensors")

    def publish(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(2):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 256, 256).tril()

    spoil(folder, publish)
    assert_read(folder, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_saved_in_a_type_is_loaded_in_it_by_transformers(written, tmp_path, dtype):
    folder = written()
    source = resolve_model(str(folder))
    architecture = architecture_of(source.config)
    jax_models.save_weights(load(folder, dtype=dtype), architecture, tmp_path / "out", config=source.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == getattr(torch, dtype)
    for name, one in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), one.to(model.dtype)), name
