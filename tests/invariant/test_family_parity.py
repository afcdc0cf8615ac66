"""A small model of each family computes, trains and generates as plain transformers does."""

import copy
from itertools import pairwise

import pytest
import torch

from tests.invariant.test_training_is_exact import examples_for, load
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import IGNORED, batch_of_step, collate, make_rows
from tunix_rt.engines.decoding import Decoding
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch.load import _keep_float64

NEW = [
    "mistral",
    "ministral",
    "ministral3",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "smollm3",
    "cwm",
    "gemma4",
    "gemma4-e",
    "gemma4-moe",
]
TRACED = ["gpt-oss", "qwen3.5"]
"""Without a row; one example in a row."""
FLOAT32 = {"qwen3.5": 1e-5}
"""Of gradients in float64, where a layer of transformers computes in float32 all the same."""
STEPS = 20
RATES = {"gemma4-e": 1e-4}
"""Of 1e-3, five layers with gradients up to 30 make float32 runs part after ten steps; in float64 they do not."""
each_family = pytest.mark.parametrize("family", [*NEW, *TRACED])


def plain_copy(engine):
    """The model with the forward passes of transformers alone; norms in float64 where the engine has them so."""
    model = copy.deepcopy(engine.model)
    for module in model.modules():
        module.__dict__.pop("forward", None)
    if engine.compute == torch.float64:
        _keep_float64(model)
    return model


def alone(model, ids):
    """Logits of one example, as transformers computes them."""
    return model(input_ids=torch.as_tensor(ids).long()[None], use_cache=False).logits[0]


def summed(model, example):
    ids = torch.as_tensor(example.ids).long()
    targets = torch.where(torch.as_tensor(example.trained), ids, IGNORED)[1:]
    return torch.nn.functional.cross_entropy(
        alone(model, ids)[:-1], targets, ignore_index=IGNORED, reduction="sum"
    )  # fmt: skip


@each_family
def test_a_batch_has_the_loss_and_gradients_of_single_examples_in_transformers(small_model, family):
    folder = small_model(family)
    engine, examples = load(folder, "float64"), examples_for(folder, 12)
    plain = plain_copy(engine)
    rows = make_rows(examples, max_length=200, packing=family not in TRACED)
    assert len(rows) == len(examples) if family in TRACED else len(rows) < len(examples) / 2
    ours = engine_of.summed_loss(engine, collate(rows, pad_id=0))
    ours.backward()
    theirs = sum(summed(plain, example) for example in examples)
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    pairs = ({name: one.grad for name, one in model.named_parameters()} for model in (engine.model, plain))
    nearly = FLOAT32.get(family, 1e-9)
    torch.testing.assert_close(*pairs, rtol=nearly, atol=nearly)


@each_family
def test_twenty_steps_have_the_losses_of_a_plain_loop(small_model, family):
    folder = small_model(family)
    engine, examples = load(folder, "float32"), examples_for(folder, 24)
    plain = plain_copy(engine).train()
    rate = RATES.get(family, 1e-3)
    training = Training(learning_rate=rate, lr_scheduler_type="constant", max_grad_norm=1.0)
    rows = make_rows(examples, max_length=200, packing=family not in TRACED)

    def batch_of(step):
        return batch_of_step(rows, step, micro_batch_size=1, accumulation=2, seed=5, pad_id=0)

    optimizer = engine_of.make_optimizer(engine, training)
    ours = [
        step.loss for step in engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=STEPS)
    ]
    theirs, update = [], torch.optim.AdamW(plain.parameters(), lr=rate, weight_decay=0.0)
    for step in range(1, STEPS + 1):
        batch, total = batch_of(step), 0.0
        for micro in batch.micro_batches:
            starts = [*(micro.positions[0] == 0).nonzero()[0].tolist(), micro.ids.shape[1]]
            for start, end in pairwise(starts):
                logits, targets = (
                    alone(plain, micro.ids[0, start:end])[:-1],
                    torch.as_tensor(micro.labels[0, start + 1 : end]),
                )
                loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
                (loss / batch.target_tokens).backward()
                total += loss.item() / batch.target_tokens
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        update.step()
        update.zero_grad()
        theirs.append(total)
    assert ours == pytest.approx(theirs, rel=1e-5) and ours[-1] < ours[0]


@each_family
def test_greedy_answers_are_those_of_generate(small_model, family):
    folder = small_model(family)
    engine, examples = load(folder, "float32"), examples_for(folder, 6)
    prompts = [example.ids[: 3 + 5 * place].tolist() for place, example in enumerate(examples)]  # past the window of 6
    found = dict(
        engine_of.generate(
            engine, prompts, decoding=Decoding(max_new_tokens=12), stop_ids=[1], pad_id=0, decode=str,
            batch_size_at=lambda length: 4,
        )
    )  # fmt: skip
    engine.model.config._attn_implementation = engine.attention.generating
    for place, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        theirs = engine.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=1,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert found[place].ids == (theirs[: theirs.index(1)] if 1 in theirs else theirs)
