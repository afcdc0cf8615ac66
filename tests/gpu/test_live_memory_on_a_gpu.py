"""What must not lie on a GPU twice, or longer than it is needed, by the peak of torch's allocator."""

import gc
import importlib.util
import json

import numpy as np
import pytest
import torch

from tests.invariant.test_live_memory import SIZES, random_row
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.data.packing import collate
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch.chunked_loss import head_loss
from tunix_rt.engines.torch.model import hidden_states
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.footprint import TABLE_SLICE_ROWS, footprint_of
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of

pytestmark = pytest.mark.gpu
MODEL = {"model_type": "llama", **SIZES, "hidden_size": 1024, "intermediate_size": 4096}
ROUNDING = 2**20
"""The allocator gives out multiples of 512 bytes, and of 2 MiB to small blocks together."""


@pytest.fixture
def load(tmp_path):
    def load(**settings):
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        source = ModelSource(name="test", folder=tmp_path, revision="local", weights="random", config=MODEL)
        return engine_of.load(source, device="cuda", training=Training(**settings))

    return load


def rise(work):
    """How far the allocator's peak rises above what is there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, kept


def test_a_wider_gradient_of_the_table_is_computed_one_slice_at_a_time():
    table = torch.nn.Parameter(torch.randn(8 * TABLE_SLICE_ROWS, 512, device="cuda"))
    states = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(len(table), (64,), device="cuda")
    head_loss(
        states, table, targets, scale=1.0, compute=torch.bfloat16, rows=32
    ).backward()  # workspaces of the products
    table.grad = None
    risen, _ = rise(lambda: head_loss(states, table, targets, scale=1.0, compute=torch.bfloat16, rows=32).backward())
    logits, one_slice = 32 * len(table) * 6, TABLE_SLICE_ROWS * 512 * 4
    assert risen <= table.numel() * (4 + 2) + logits + one_slice + ROUNDING


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_added_to_the_weights_on_the_host(load, dtype):
    from tunix_rt.engines.torch.adapters import merged_weights

    engine = load(lora_rank=8, dtype=dtype)
    merged_weights(engine.model)
    risen, merged = rise(lambda: merged_weights(engine.model))
    assert all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in merged.values())
    config = RunConfig.model_validate({"training": {"lora_rank": 8, "dtype": dtype}})
    plan = predict(shape_of(MODEL), config, device="cuda")
    (planned,) = [phase.parts["merged"] for phase in plan.phases if phase.name == "save"]
    assert risen <= planned + ROUNDING


@pytest.mark.parametrize("training", [True, False], ids=["recomputed", "held-out"])
def test_casts_of_weights_do_not_outlive_their_product(load, training):
    settings = {"dtype": "bfloat16", "gradient_checkpointing": True}
    engine = load(**settings)
    engine_of.checkpoint_layers(engine)
    engine.model.train(training)
    micro = collate([random_row(np.random.default_rng(0), MODEL["vocab_size"])], pad_id=0)
    with torch.set_grad_enabled(training), engine.kernels():
        hidden_states(engine, micro)
        risen, _ = rise(lambda: hidden_states(engine, micro))
    run = footprint_of(shape_of(MODEL), Training(**settings), "cuda")
    activations = 192 * (10 * 1024 + 4 * 4096) * 4
    assert run.largest_cast + activations < run.casts / 2
    assert risen < run.largest_cast + activations
