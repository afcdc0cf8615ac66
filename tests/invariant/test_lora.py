"""LoRA only when asked: adapters learn, everything else stays as it is, and the model that is saved needs no adapters."""

import importlib.util
import itertools
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.invariant.test_live_memory import LiveBytes
from tests.supervision_checks import shipped_samples, style
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import render_batch
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.errors import InputError
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
FAMILIES = ["gemma3", "llama", "gpt2"]


def start(folder, **settings):
    training = Training(lora_rank=4, learning_rate=1e-2, seed=3, **settings)
    engine = engine_of.load(resolve_model(str(folder), weights="random"), device="cpu", training=training)
    return engine, engine_of.make_optimizer(engine, training), training


def walk(folder, engine, optimizer, training, *, first=1, stop=4):
    """Steps `first` to `stop` of 4."""
    tokenizer = load_tokenizer(folder)
    rows = make_rows(render_batch(shipped_samples(8), tokenizer, style(tokenizer)), max_length=128, packing=True)
    batches = partial(batch_of_step, rows, micro_batch_size=2, accumulation=1, seed=5, pad_id=0)
    steps = engine_of.optimizer_steps(engine, optimizer, batches, training, first=first, total=4)
    return [step.loss for step in itertools.islice(steps, stop - first + 1)]


@needs_peft
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_adapters_learn(small_model, family):
    folder = small_model(family)
    engine, optimizer, training = start(folder)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    curve = walk(folder, engine, optimizer, training)
    moved = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert curve[-1] < curve[0]
    assert moved and all("lora_" in name for name in moved)
    assert {name for name in optimizer.tensors()} and all("lora_" in name for name in optimizer.tensors())
    assert engine.parameters == sum(p.numel() for name, p in before.items() if "lora_" not in name)


@needs_peft
@pytest.mark.parametrize("family", FAMILIES)
def test_the_saved_model_has_the_adapters_in_its_weights(small_model, tmp_path, family):
    import transformers

    folder = small_model(family)
    engine, optimizer, training = start(folder)
    walk(folder, engine, optimizer, training)
    engine_of.save(engine, tmp_path / "final_model", tokenizer_folder=folder, stop_ids=[1])
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final_model")
    assert not any("lora" in name for name, _ in plain.named_parameters())
    ids = torch.arange(3, 40).unsqueeze(0)
    engine.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, engine.model(ids).logits, rtol=1e-4, atol=1e-5)


@needs_peft
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adding_the_adapters_takes_what_is_planned_for_it(small_model, family, dtype):
    """The sums, and one adapter's part beside them; a tied table is one tensor still."""
    from tunix_rt.engines.torch.load import merged_weights

    engine, _, training = start(small_model(family), dtype=dtype)
    live = LiveBytes()
    for tensor in engine.model.state_dict().values():
        live.note(tensor)
    before = live.now
    with live:
        merged = merged_weights(engine.model)
    assert all(tensor.dtype == torch.float32 and not tensor.requires_grad for tensor in merged.values())
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in merged.values()}
    assert sum(sizes.values()) == engine.parameters
    plan = predict(shape_of(engine.source.config), RunConfig(training=training), device="cpu")
    (planned,) = [phase.parts["merged"] for phase in plan.phases if phase.name == "save"]
    assert planned == pytest.approx(live.peak - before, rel=0.03)


@needs_peft
def test_a_run_with_adapters_continues_exactly(small_model, tmp_path):
    folder = small_model("gpt2-dropout")
    whole = walk(folder, *start(folder))
    engine, optimizer, training = start(folder)
    steps = walk(folder, engine, optimizer, training, stop=2)
    engine_of.write_direct(engine, optimizer, tmp_path)
    engine, optimizer, training = start(folder)
    engine_of.restore_state(engine, optimizer, tmp_path, step=2)
    steps += walk(folder, engine, optimizer, training, first=3)
    assert steps == whole
    kept = load_file(tmp_path / "model.safetensors")
    assert kept and all("lora_" in name for name in kept), "the frozen weights are not written again and again"


def test_without_peft_it_is_refused_with_the_way_to_get_it(small_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="peft is not installed"):
        start(small_model("llama"))
