"""`training.save_dtype`: the saved files have that type, and the saved model gives the answers that were recorded."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.conftest import SHIPPED
from tunix_rt.config.settings import Training
from tunix_rt.engines.base import load_backend
from tunix_rt.engines.decoding import Decoding
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import resolve_model

PROMPTS = [[2, 40, 41, 42], [2, 99, 7, 300, 12, 5]]
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def loaded(backend, name, training):
    return backend.load(resolve_model(str(name)), device="cpu", training=training)


def moved(name, engine) -> None:
    """Weights as training leaves them: those that are shipped were bfloat16 once."""
    if name == "torch":
        for tensor in engine.model.parameters():
            tensor.data.mul_(1.001)
    else:
        import jax

        engine.params = jax.tree.map(lambda array: array * 1.001, engine.params)


def answers(backend, engine):
    asked = {
        "decoding": Decoding(max_new_tokens=12),
        "stop_ids": [1],
        "pad_id": 0,
        "decode": str,
        "batch_size_at": lambda _: 2,
    }
    return {index: list(answer.ids) for index, answer in backend.generate(engine, PROMPTS, **asked)}


def saved(backend, engine, folder: Path) -> set[str]:
    """Save the engine; the types of the tensors in its file."""
    backend.save(engine, folder, tokenizer_folder=SHIPPED, stop_ids=[1])
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  not a mapping


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("torch", Training()),
        ("torch", Training(dtype="bfloat16")),
        ("torch", Training(dtype="bfloat16", master_dtype="bfloat16")),
        ("jax", Training(backend="jax")),
    ],
    ids=["torch-float32", "torch-mixed", "torch-bfloat16", "jax-float32"],
)
def test_the_saved_model_is_of_that_type_and_computes_what_the_engine_computes(tmp_path, name, training, dtype):
    if name == "jax":
        pytest.importorskip("jax")
    backend = load_backend(name)
    engine = loaded(backend, "tiny-gemma3", training)
    moved(name, engine)
    before = backend.last_logits(engine, PROMPTS)
    backend.round_weights(engine, dtype)
    assert saved(backend, engine, tmp_path / "final") == {TYPES[dtype]}
    assert json.loads((tmp_path / "final" / "config.json").read_text())["dtype"] == dtype
    again = loaded(backend, tmp_path / "final", training)
    kept = backend.last_logits(engine, PROMPTS)
    # A float32 file is mapped into memory where it lies: products of the same numbers may be summed in another order.
    assert np.allclose(kept, backend.last_logits(again, PROMPTS), rtol=0, atol=1e-5 if dtype == "float32" else 0)
    assert answers(backend, engine) == answers(backend, again)
    narrower = engine.recipe.weights == "float32" and dtype != "float32"
    assert np.array_equal(before, kept) is not narrower, "rounding is seen where there is something to round"
    listed = backend.tensor_hashes(engine)
    backend.round_weights(again, dtype)
    assert backend.tensor_hashes(again) == listed and {kind for kind, _, _ in listed.values()} == {dtype}


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_weights_that_float16_cannot_hold_are_an_error_with_their_name(name):
    pytest.importorskip(name)
    backend = load_backend(name)
    engine = loaded(backend, "tiny-gemma3", Training(backend=name))
    if name == "torch":
        engine.model.get_input_embeddings().weight.data[3, 3] = 1e5
    else:
        engine.params["embedding"] = engine.params["embedding"].at[3, 3].set(1e5)
    with pytest.raises(TunixError, match=r"embed.* too large for float16"):
        backend.round_weights(engine, "float16")
