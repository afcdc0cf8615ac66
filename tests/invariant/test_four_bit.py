"""QLoRA: frozen projections in NF4 beside adapters. bitsandbytes computes on a CPU what it computes on a GPU."""

import dataclasses
import importlib.util
import sys

import pytest
import torch

from tests.invariant.test_lora import batches_of, engine_of, start, walk
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.engines.torch.quantization import QuantizedLinear
from tunix_rt.errors import ConfigError
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import Trace
from tunix_rt.train.preflight import require_peft

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


def quantized(engine):
    return {name: one for name, one in engine.model.named_modules() if isinstance(one, QuantizedLinear)}


def unpacked(engine):
    """Weights of a plain PEFT model: those that are packed are unpacked once and for all."""
    weights = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    weights |= {f"{name}.weight": one.weight for name, one in quantized(engine).items()}
    return {f"base_model.model.{name}": tensor for name, tensor in weights.items()}


def by_hand(layer):
    """The weight of `layer` from its packed bytes: the higher half of a byte first, each a level times the scale of its block."""
    packed, scales, scales_of_scales, offset = layer.stored
    state, (rows, columns) = layer.state, (layer.out_features, layer.in_features)
    levels = state.code[torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1).long()]
    blocks = state.state2.code[scales.long()] * scales_of_scales.repeat_interleave(256)[: len(scales)] + offset
    return (levels[: rows * columns] * blocks.repeat_interleave(64)[: rows * columns]).view(rows, columns)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_five_steps_are_those_of_a_plain_loop_over_unpacked_frozen_weights(small_model, family):
    import transformers
    from peft import LoraConfig, get_peft_model

    folder = small_model(family)
    how = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "load_in_4bit": True}
    engine, optimizer, training = start(folder, **how)
    batches = batches_of(folder, packing=False, accumulation=2)
    plain = transformers.AutoModelForCausalLM.from_config(engine.model.config)
    plain = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    plain.load_state_dict(unpacked(engine))
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
    assert steps == pytest.approx(expected, rel=1e-5) and steps[-1] < steps[0]


def test_a_weight_in_nf4_is_close_and_its_bytes_are_those_of_the_plan(small_model):
    folder = small_model("gemma3")
    whole, _, _ = start(folder)
    engine, _, training = start(folder, load_in_4bit=True)
    for name, one in quantized(engine).items():
        exact = whole.model.get_submodule(name).weight
        assert torch.equal(one.weight, by_hand(one))
        assert 0.05 < float((one.weight - exact).norm() / exact.norm()) < 0.13  # normal weights: 0.092
    stored = [tensor for one in quantized(engine).values() for tensor in one.stored]
    plan = predict(shape_of(engine.source.config), RunConfig(training=training), device="cpu")
    parts = next(phase.parts for phase in plan.phases if phase.name == "forward")
    packed = sum(one.packed.nbytes for one in quantized(engine).values())
    assert parts["packed_4bit"] == packed
    assert parts["packed_4bit"] + parts["scales_4bit"] == sum(tensor.nbytes for tensor in stored)
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in engine.model.parameters()}
    assert parts["weights"] == sum(distinct.values())
    assert parts["unpacked"] >= max(one.weight.nbytes for one in quantized(engine).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_saved_model_has_unpacked_weights_with_their_adapters(small_model, tmp_path, dtype):
    """The sums in float32, exactly; a forward pass in bfloat16 rounds more than the merge, so its logits are not compared."""
    import transformers

    folder = small_model("llama")
    engine, optimizer, training = start(folder, load_in_4bit=True, dtype=dtype, lora_target_modules=["q_proj"])
    walk(folder, engine, optimizer, training)
    engine_of.save(engine, tmp_path / "final_model", tokenizer_folder=folder, stop_ids=[1])
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final_model")
    for name, one in quantized(engine).items():
        expected, place = one.weight.float(), name.removesuffix(".base_layer")
        if place != name:
            expected = expected + engine.model.get_submodule(place).get_delta_weight("default").detach()
        assert torch.equal(plain.get_submodule(place).weight, expected), name
    if dtype == "float32":
        ids = torch.arange(3, 40).unsqueeze(0)
        engine.model.eval()
        with torch.no_grad():
            expected, actual = engine.model(ids).logits, plain(ids).logits
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_a_run_with_4_bit_weights_continues_exactly(small_model, tmp_path):
    folder, how = small_model("llama"), {"load_in_4bit": True, "gradient_checkpointing": True}
    whole = walk(folder, *start(folder, **how))
    engine, optimizer, training = start(folder, **how)
    steps = walk(folder, engine, optimizer, training, stop=2)
    engine_of.write_direct(engine, optimizer, tmp_path)
    engine, optimizer, training = start(folder, **how)
    engine_of.restore_state(engine, optimizer, tmp_path, step=2)
    assert steps + walk(folder, engine, optimizer, training, first=3) == whole


def test_4_bit_weights_are_refused_where_they_cannot_be_planned_or_packed(small_model, monkeypatch):
    with pytest.raises(ConfigError, match="gpt2 has projections that are no linear layers"):
        predict(
            shape_of(start(small_model("gpt2"))[0].source.config),
            RunConfig(training=Training(lora_rank=4, load_in_4bit=True)), device="cpu",
        )  # fmt: skip
    shape = shape_of(start(small_model("llama"))[0].source.config)
    cost = (0.0, 0.0)
    trace = Trace(
        layers=(), others=(), expert_parameters=0, active_experts=1.0, saved=cost, forward=cost, backward=cost, once=cost,
        behind=cost,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="llama has a traced plan"):
        predict(
            dataclasses.replace(shape, trace=trace),
            RunConfig(training=Training(lora_rank=4, load_in_4bit=True)),
            device="cpu",
        )
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else object())
    with pytest.raises(ConfigError, match="bitsandbytes is not installed"):
        require_peft(RunConfig(training=Training(lora_rank=4, load_in_4bit=True)))


def test_a_defect_of_ours_is_not_reported_as_a_broken_model(small_model, monkeypatch):
    from tunix_rt.engines.torch import load

    def defect(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr(load, "quantize", defect)
    with pytest.raises(KeyError, match="ours"):
        start(small_model("llama"), load_in_4bit=True)


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_expert_that_a_step_does_not_choose_has_a_gradient_of_zero(small_model, in_backward):
    """Its state is there from the first step on, and it learns once it is chosen."""
    from tests.invariant.test_lora import resolve_model

    folder = small_model("llama")
    training = Training(learning_rate=1e-2, optim_in_backward=in_backward, compile=False)
    engine = engine_of.load(resolve_model(str(folder), weights="random"), device="cpu", training=training)
    layer, calls = engine.model.model.layers[0], []
    layer.expert = torch.nn.Parameter(torch.zeros(()))

    def chosen_from_the_second_step(module, given, output):
        calls.append(1)
        return output + layer.expert if len(calls) > 1 else output

    layer.mlp.register_forward_hook(chosen_from_the_second_step)
    optimizer = engine_of.make_optimizer(engine, training)
    steps = engine_of.optimizer_steps(engine, optimizer, batches_of(folder), training, first=1, total=4)
    next(steps)
    assert layer.expert.item() == 0 and optimizer.state_of(layer.expert)
    next(steps)
    assert layer.expert.item() != 0
