"""The models of the JAX engine compute what transformers and the PyTorch engine compute, and files pass both ways.

JAX runs in a process of its own (jax_models_side.py): its threads would stay in this one, and no later test could fork.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.conftest import _SMALL, ROOT, SHIPPED
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import collate, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.models.resolve import resolve_model

# A long series as long as no engine uses the models.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax"),
]

GEMMA = {key: value for key, value in _SMALL["gemma3"].items() if key not in ("layer_types", "query_pre_attn_scalar")}
FAMILIES = {
    "gemma": GEMMA | {"model_type": "gemma", "num_key_value_heads": 2},
    # 3 layers: the pattern of windows does not come out even. Caps so low that they bend.
    "gemma2": GEMMA | {
        "model_type": "gemma2", "num_hidden_layers": 3, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": _SMALL["gemma3"],
    "gpt2": _SMALL["gpt2"],
    "llama": _SMALL["llama"],
    "llama 3.2": _SMALL["llama"] | {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip
each_family = pytest.mark.parametrize("family", FAMILIES)
LENGTHS = (35, 20, 17, 9)
PAD = 0
ROUGH = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Compiling takes longer than everything else here."""


def micro_batches():
    """Examples, all longer than the window of 6 tokens: packed into two rows; and each in a row of its own, no targets.

    The third holds both, to be asked at once."""
    drawn, examples = np.random.default_rng(7), []
    for length in LENGTHS:
        ids = drawn.integers(1, 1024, length).astype(np.int32)
        ids[length // 2] = PAD  # a token like any other, from which torch's tables learn nothing
        examples.append(Example(ids=ids, trained=drawn.random(length) < 0.7))
    packed = make_rows(examples, max_length=47, packing=True)
    silent = [Example(ids=one.ids, trained=np.zeros(len(one.ids), np.bool_)) for one in examples]
    alone = make_rows(silent, max_length=47, packing=False)
    assert len(packed) == 2
    return (collate(rows, pad_id=PAD) for rows in (list(packed), list(alone), [*packed, *alone]))


PACKED, ALONE, BOTH = micro_batches()


def write_model(folder, family, dtype):
    """A model whose every parameter is drawn, norms and biases too: as they begin, their faults would not show."""
    folder.mkdir(parents=True)
    config = FAMILIES[family] | {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": PAD}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)


@dataclass
class Side:
    """What the JAX side found, and the folders it found it in."""

    folder: Path
    head_bytes: int

    def found(self, name):
        return np.load(self.folder / name / "found.npz")

    def model(self, *place, **settings):
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder.joinpath(*place), **settings).eval()


@dataclass
class Asked:
    """Types of weights and products, and the ways in which the loss is to be computed."""

    weights: str = "float32"
    compute: str = "float32"
    ways: tuple[str, ...] = ("whole",)


def ask_jax(folder, asked, batch=BOTH):
    """What JAX makes of models in folders below `folder`. Those that are not there are written, of the family in their name."""
    for name, wanted in asked.items():
        if not (folder / name).exists():
            write_model(folder / name, name.split(":")[0], wanted.weights)
        (folder / name / "asked.json").write_text(json.dumps(vars(wanted)))
        np.savez(folder / name / "batch.npz", ids=batch.ids, labels=batch.labels, positions=batch.positions)
    command = [sys.executable, "-m", "tests.invariant.jax_models_side", *(str(folder / name) for name in asked)]
    wide = any(wanted.compute == "float64" for wanted in asked.values())
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(wide).lower(), "XLA_FLAGS": ROUGH}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Side(folder=folder, **json.loads(done.stdout))


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    asked = {family: Asked() for family in FAMILIES}
    asked["gemma2"] = Asked(ways=("whole", "again", "products"))
    asked |= {f"{family}:halved": Asked(weights="bfloat16", compute="bfloat16", ways=()) for family in HALVED}
    asked["gemma3:mixed"] = Asked(compute="bfloat16")
    return ask_jax(tmp_path_factory.mktemp("jax"), asked)


HALVED = ["gemma3", "gpt2", "llama"]


def off(found, wanted):
    """The largest difference, as a share of the largest number."""
    assert found.shape == wanted.shape and np.isfinite(found).all()
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def theirs(model):
    """transformers' logits of every example alone, of the tokens that are no padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ALONE.ids), use_cache=False).logits
    return [one[:length].double().numpy() for one, length in zip(logits, LENGTHS, strict=True)]


def alone(found):
    """The JAX side's logits of every example in a row of its own."""
    return [one[:length] for one, length in zip(found["logits"][len(PACKED.ids) :], LENGTHS, strict=True)]


def packed(found):
    """Of every example beside others."""
    places = {}
    for row, start in zip(*np.nonzero(PACKED.positions == 0), strict=True):
        for example, length in enumerate(LENGTHS):
            if np.array_equal(PACKED.ids[row, start : start + length], ALONE.ids[example, :length]):
                places[example] = found["logits"][row, start : start + length]
    return [places[example] for example in range(len(LENGTHS))]


def torch_loss_and_gradients(folder, dtype):
    """Of the PyTorch engine; in bfloat16 with weights of float32."""
    engine = torch_backend.load(resolve_model(str(folder)), device="cpu", training=Training(dtype=dtype))
    loss = torch_backend.summed_loss(engine, PACKED)
    loss.backward()
    return loss.item(), {name: one.grad.double().numpy() for name, one in engine.model.named_parameters()}


# --- what is computed ------------------------------------------------------------------------------------------------


@each_family
def test_logits_past_the_window_are_those_of_transformers_alone_and_packed(side, family):
    found, wanted = side.found(family), theirs(side.model(family))
    for some in (alone(found), packed(found)):
        assert max(off(one, other) for one, other in zip(some, wanted, strict=True)) < 1e-5


@each_family
def test_loss_and_every_gradient_are_those_of_the_torch_engine(side, family):
    found = side.found(family)
    loss, gradients = torch_loss_and_gradients(side.folder / family, "float32")
    assert float(found["loss.whole"]) == pytest.approx(loss, rel=1e-5)
    assert {f"gradient.whole.{name}" for name in gradients} == {name for name in found if "gradient.whole" in name}
    for name, wanted in gradients.items():
        assert off(found[f"gradient.whole.{name}"], wanted) < 1e-4, name


def test_chunks_and_what_is_computed_again_change_nothing(side):
    found = side.found("gemma2")
    for way in ("again", "products"):
        assert float(found[f"loss.{way}"]) == pytest.approx(float(found["loss.whole"]), rel=1e-6)
        for name in (name for name in found if name.startswith("gradient.whole")):
            assert off(found[name.replace("whole", way)], found[name]) < 1e-5, name


def test_what_is_outside_a_table_gives_no_number_instead_of_the_nearest_row(side):
    assert np.isnan(side.found("llama")["other ids"]).all()
    assert np.isnan(side.found("gpt2")["other positions"]).all()


def test_the_logits_of_all_tokens_never_exist(side):
    of_a_chunk, of_all = 2 * 16 * 20_000 * 4, 2 * 256 * 20_000 * 4
    assert of_a_chunk <= side.head_bytes < of_all / 3


def test_in_float64_everything_agrees_to_ten_digits(tmp_path, monkeypatch):
    """transformers rounds the rotation of a float64 model to float32, so it is told not to here."""

    def turned(self, x, position_ids, layer_type):
        angles = position_ids[..., None].double() * getattr(self, f"{layer_type}_inv_freq").double()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding, "forward", turned)
    side = ask_jax(tmp_path, dict.fromkeys(("gemma3", "gpt2"), Asked(weights="float64", compute="float64")))
    for family in ("gemma3", "gpt2"):
        found = side.found(family)
        loss, gradients = torch_loss_and_gradients(tmp_path / family, "float64")
        assert float(found["loss.whole"]) == pytest.approx(loss, rel=1e-10)
        for name, wanted in gradients.items():
            assert off(found[f"gradient.whole.{name}"], wanted) < 1e-10, name


@pytest.mark.parametrize("family", HALVED)
def test_in_bfloat16_we_are_as_close_to_the_truth_as_transformers(side, family):
    """Weights and products of bfloat16, against the same weights in float32."""
    place = f"{family}:halved"
    truth, rounded = (np.concatenate(theirs(side.model(place, dtype=dtype))) for dtype in ("float32", "bfloat16"))
    found = np.concatenate(packed(side.found(place)))
    mine, other = (np.sqrt(np.square(some - truth).mean()) for some in (found, rounded))
    assert 0 < mine < 1.3 * other


def test_with_float32_weights_and_bfloat16_products_we_are_as_close_as_the_torch_engine(side):
    found, place = side.found("gemma3:mixed"), side.folder / "gemma3:mixed"
    (loss, truth), (_, rounded) = (torch_loss_and_gradients(place, dtype) for dtype in ("float32", "bfloat16"))
    assert float(found["loss.whole"]) == pytest.approx(loss, rel=1e-2)
    for name, wanted in truth.items():
        mine, other = (
            np.sqrt(np.square(some - wanted).mean()) for some in (found[f"gradient.whole.{name}"], rounded[name])
        )
        assert 0 < mine < 2 * other, name


def test_the_shipped_model_has_the_logits_of_transformers_past_its_window(tmp_path):
    """Trained weights, stored in bfloat16, a window of 256 tokens, and 300 of them."""
    shutil.copytree(SHIPPED, tmp_path / "shipped")
    ids = np.random.default_rng(3).integers(3, 1024, 300).astype(np.int32)
    batch = collate(list(make_rows([Example(ids=ids, trained=ids < 0)], max_length=300, packing=False)), pad_id=PAD)
    side = ask_jax(tmp_path, {"shipped": Asked(ways=())}, batch)
    with torch.no_grad():
        wanted = side.model("shipped", dtype=torch.float32)(torch.from_numpy(batch.ids)).logits.double().numpy()
    assert off(side.found("shipped")["logits"], wanted) < 1e-5


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, *(f"{family}:halved" for family in HALVED)])
def test_what_is_saved_has_the_same_tensors_and_logits_in_transformers(side, name):
    first, again = (load_file(side.folder / name / place / "model.safetensors") for place in (".", "saved"))
    assert first.keys() == again.keys()
    for tensor, values in first.items():
        assert values.dtype == again[tensor].dtype and torch.equal(values, again[tensor]), tensor
    model, saved = side.model(name), side.model(name, "saved")
    assert model.dtype == saved.dtype == getattr(torch, "bfloat16" if "halved" in name else "float32")
    for one, two in zip(theirs(model), theirs(saved), strict=True):
        assert np.array_equal(one, two)
