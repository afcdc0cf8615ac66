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
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
FAMILIES = ["gemma3", "llama", "gpt2"]


def start(folder, **settings):
    training = Training(lora_rank=4, learning_rate=1e-2, seed=3, **settings)
    engine = engine_of.load(resolve_model(str(folder), weights="random"), device="cpu", training=training)
    return engine, engine_of.make_optimizer(engine, training), training


def batches_of(folder, *, packing=True, accumulation=1):
    tokenizer = load_tokenizer(folder)
    rows = make_rows(render_batch(shipped_samples(8), tokenizer, style(tokenizer)), max_length=128, packing=packing)
    return partial(batch_of_step, rows, micro_batch_size=2, accumulation=accumulation, seed=5, pad_id=0)


def walk(folder, engine, optimizer, training, *, first=1, stop=4, accumulation=1):
    """Steps `first` to `stop` of 4."""
    batches = batches_of(folder, accumulation=accumulation)
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
    from tunix_rt.engines.torch.adapters import merged_weights

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


TARGETED = {"lora_alpha": 3.5, "lora_dropout": 0.2, "lora_target_modules": ["c_attn", "mlp.c_proj"]}


@needs_peft
@pytest.mark.parametrize("how", [{}, TARGETED], ids=["everywhere", "dropout"])
def test_a_run_with_adapters_continues_exactly(small_model, tmp_path, how):
    folder = small_model("gpt2-dropout")
    whole = walk(folder, *start(folder, **how), accumulation=2)
    engine, optimizer, training = start(folder, **how)
    steps = walk(folder, engine, optimizer, training, stop=2, accumulation=2)
    engine_of.write_direct(engine, optimizer, tmp_path)
    engine, optimizer, training = start(folder, **how)
    engine_of.restore_state(engine, optimizer, tmp_path, step=2)
    steps += walk(folder, engine, optimizer, training, first=3, accumulation=2)
    assert steps == whole
    kept = load_file(tmp_path / "model.safetensors")
    assert kept and all("lora_" in name for name in kept), "the frozen weights are not written again and again"


@needs_peft
def test_five_steps_are_those_of_peft_and_plain_transformers(small_model):
    """The same rank, alpha and targets on one model: losses and adapters, in float32."""
    import transformers
    from peft import LoraConfig, get_peft_model

    folder = small_model("llama")
    targets = ["q_proj", "v_proj", "down_proj"]
    how = {"lora_alpha": 6, "lora_target_modules": targets, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    engine, optimizer, training = start(folder, **how)
    batches = batches_of(folder, packing=False, accumulation=2)
    plain = transformers.AutoModelForCausalLM.from_config(engine.model.config)
    plain = get_peft_model(plain, LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"))
    weights = {f"base_model.model.{name}": tensor.clone() for name, tensor in engine.model.state_dict().items()}
    plain.load_state_dict(weights)  # every name, so that the same modules have adapters
    adam = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    expected = []
    for step in range(1, 6):
        batch, total = batches(step), 0.0
        for micro in batch.micro_batches:
            ids, labels = torch.from_numpy(micro.ids).long(), torch.from_numpy(micro.labels).long()
            logits = plain(input_ids=ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (loss / batch.target_tokens).backward()
            total += loss.item() / batch.target_tokens
        adam.step()
        adam.zero_grad()
        expected.append(total)
    steps = [step.loss for step in engine_of.optimizer_steps(engine, optimizer, batches, training, first=1, total=5)]
    assert steps == pytest.approx(expected, rel=1e-6) and steps[-1] < steps[0]
    ours = {f"base_model.model.{name}": tensor for name, tensor in engine.model.state_dict().items()}
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-6, msg=name)


@needs_peft
def test_dropout_of_adapters_is_a_function_of_seed_step_and_micro_batch(small_model):
    """Recomputed layers draw the masks of the forward pass again; another seed and none at all give other losses."""
    folder = small_model("llama")

    def losses(**settings):
        return walk(folder, *start(folder, **({"lora_dropout": 0.3} | settings)), accumulation=2)

    dropped = losses()
    assert losses() == dropped == losses(gradient_checkpointing=True)
    assert losses(lora_dropout=0.0) != dropped
    engine, *_ = start(folder, lora_dropout=0.3)
    engine.model.eval()
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(engine.model(ids).logits, engine.model(ids).logits), "answers have no dropout"


@needs_peft
@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj", "wq"], "'wq' matches no projection of .*model-llama"),
        ("q_proj", "'q_proj' matches no projection"),
        ("(q_proj", "is no regular expression: missing"),
        (".*(q_proj|lm_head)", "lm_head of .* is the lm_head, which is never adapted"),
        (".*layers.0.*", r"model\.layers\.0 of .* is a LlamaDecoderLayer, not a projection"),
        (["q_proj", "norm"], "'norm' matches no projection"),
    ],
)
def test_a_target_that_is_no_projection_is_refused_with_those_of_the_model(small_model, targets, words):
    with pytest.raises(ConfigError, match=words) as caught:
        start(small_model("llama"), lora_target_modules=targets)
    assert "q_proj" in caught.value.fix


def test_without_peft_it_is_refused_with_the_way_to_get_it(small_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match="peft is not installed"):
        start(small_model("llama"))
