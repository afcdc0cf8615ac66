"""The planner is held against the tensors themselves: bytes of all that are alive at once while the engine takes steps.

That is what a GPU's allocator gives out, counted here on a CPU: no allocator, no library and no noise in between.
"""

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.test_plan import BFLOAT16, MLP, QUERY_VALUE, SMALLEST
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.packing import Row, StepBatch, collate
from tunix_rt.engines.decoding import Decoding
from tunix_rt.engines.torch import loop as torch_backend
from tunix_rt.engines.torch.model import Engine, hidden_states
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of

ALLOWED_ERROR = 0.03
ROWS, LENGTH, STEPS = 2, 192, 2
SIZES = {
    "vocab_size": 3000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 3000, "n_embd": 256, "n_head": 4, "n_layer": 4, "n_positions": 512,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
KINDS = ("llama", "gemma", "gemma3_text", "qwen3", "smollm3")
MODELS = {"gpt2": GPT2, **{kind: {"model_type": kind, **SIZES} for kind in KINDS}}
RECIPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "recomputed": {"gradient_checkpointing": True},
    "half recomputed": {"gradient_checkpointing": 0.5},
    "accumulation": {"gradient_accumulation_steps": 2},
    "products in bfloat16": {"dtype": "bfloat16"},
    "products in bfloat16, recomputed": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "products in bfloat16, half recomputed": {"dtype": "bfloat16", "gradient_checkpointing": 0.5},
    "bfloat16, 8-bit moments": {**BFLOAT16, "optim": "adamw_8bit"},
    "in backward": {"optim_in_backward": True},
    "smallest": SMALLEST,
    "LoRA": {"lora_rank": 8},
    "LoRA in bfloat16": {"lora_rank": 8, "dtype": "bfloat16"},
    "LoRA of query and value": {"lora_rank": 8, "lora_target_modules": QUERY_VALUE, "dtype": "bfloat16"},
    "LoRA of the MLP, dropout": {"lora_rank": 8, "lora_target_modules": MLP, "lora_dropout": 0.1},
}


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation gives back until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            return
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, which: int) -> None:
        self.now -= self._sizes.pop(which)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        return made


def random_row(random: np.random.Generator, vocabulary: int) -> Row:
    """Two examples of equal length, every token a target."""
    positions = np.tile(np.arange(LENGTH // 2, dtype=np.int32), 2)
    ids = random.integers(1, vocabulary, LENGTH).astype(np.int32)
    return Row(ids=ids, trained=np.ones(LENGTH, dtype=bool), positions=positions)


def loaded(model: dict[str, Any], config: RunConfig, folder: Path) -> tuple[Engine, LiveBytes]:
    """The model with random weights, and what is alive of it."""
    (folder / "config.json").write_text(json.dumps(model))
    source = ModelSource(name="test", folder=folder, revision="local", weights="random", config=model)
    engine = torch_backend.load(source, device="cpu", training=config.training)
    live = LiveBytes()
    for tensor in engine.model.state_dict().values():
        live.note(tensor)
    return engine, live


def live_peak(model: dict[str, Any], config: RunConfig, folder: Path) -> int:
    """Of two steps of the real engine, so that the states of the optimizer are there in the second."""
    training, random = config.training, np.random.default_rng(0)

    def batch_of(step: int) -> StepBatch:
        micro = tuple(
            collate([random_row(random, model["vocab_size"]) for _ in range(ROWS)], pad_id=0)
            for _ in range(training.gradient_accumulation_steps)
        )
        targets = sum(batch.targets for batch in micro)
        return StepBatch(micro_batches=micro, target_tokens=targets, tokens=targets, sha256=str(step))

    engine, live = loaded(model, config, folder)
    optimizer = torch_backend.make_optimizer(engine, training)
    with live:
        for _ in torch_backend.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=STEPS):
            pass
    return live.peak


ALWAYS = {
    ("gemma", "float32"), ("gemma", "products in bfloat16, half recomputed"), ("gemma", "LoRA"), ("llama", "smallest"),
}  # fmt: skip
PAIRS = [
    pytest.param(kind, recipe, marks=[] if (kind, recipe) in ALWAYS else pytest.mark.slow)
    for kind in MODELS
    for recipe in RECIPES
]


@pytest.mark.parametrize(("kind", "recipe"), PAIRS)
def test_what_is_counted_is_what_is_alive_at_once(kind: str, recipe: str, tmp_path: Path) -> None:
    if "LoRA" in recipe:
        pytest.importorskip("peft")
    config = RunConfig.model_validate(
        {"data": {"max_length": LENGTH}, "training": {"per_device_train_batch_size": ROWS, **RECIPES[recipe]}}
    )
    plan = predict(shape_of(MODELS[kind]), config, device="cpu")
    besides = ("overhead", "allocator_slack")
    counted = max(
        sum(size for name, size in phase.parts.items() if name not in besides)
        for phase in plan.phases
        if phase.name in ("forward", "loss", "backward", "update")
    )
    assert counted == pytest.approx(live_peak(MODELS[kind], config, tmp_path), rel=ALLOWED_ERROR)


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
@pytest.mark.parametrize("training", [True, False], ids=["recomputed", "held-out"])
def test_casts_of_weights_do_not_outlive_their_product_where_no_backward_pass_needs_them(
    kind: str, training: bool, tmp_path: Path
) -> None:
    settings = {"dtype": "bfloat16", "gradient_checkpointing": True}
    config = RunConfig.model_validate({"training": settings})
    engine, live = loaded(MODELS[kind], config, tmp_path)
    torch_backend.checkpoint_layers(engine)
    engine.model.train(training)
    micro = collate([random_row(np.random.default_rng(0), 3000)], pad_id=0)
    before = live.now
    with live, torch.set_grad_enabled(training):
        states = hidden_states(engine, micro)
    assert torch.isfinite(states).all()
    run = footprint_of(shape_of(MODELS[kind]), config.training, "cpu")
    activations = (5 if training else 0) * LENGTH * 256 * 4 + 4 * LENGTH * 1024 * 4
    assert run.largest_cast < live.peak - before < run.largest_cast + activations < run.casts


@pytest.mark.parametrize("recipe", [{}, {"dtype": "bfloat16"}, BFLOAT16], ids=["float32", "products", "bfloat16"])
@pytest.mark.parametrize("kind", ["gemma2", pytest.param("llama", marks=pytest.mark.slow)])
def test_what_is_counted_for_answers_is_enough_and_not_far_above(
    kind: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Soft-capped scores exist then, whatever attention trains them."""
    model, rows, answer = {"model_type": kind, **SIZES}, 4, 8
    evaluation = {"per_device_eval_batch_size": rows, "max_new_tokens": answer}
    settings = {"data": {"max_length": LENGTH}, "training": recipe, "evaluation": evaluation}
    config = RunConfig.model_validate(settings)
    engine, live = loaded(model, config, tmp_path)
    prompts, before = [[5] * (LENGTH - place) for place in range(rows)], live.now
    with live:
        list(
            torch_backend.generate(
                engine, prompts, decoding=Decoding(max_new_tokens=answer), stop_ids=[], pad_id=0, decode=str,
                batch_size_at=lambda length: rows,
            )
        )  # fmt: skip
    parts = next(
        phase.parts for phase in predict(shape_of(model), config, device="cpu").phases if phase.name == "generation"
    )
    counted = sum(parts[name] for name in ("casts", "kv_cache", "activations", "loss_head"))
    assert live.peak - before <= counted <= 1.35 * (live.peak - before)
