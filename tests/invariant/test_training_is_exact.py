"""The loop computes one loss, however its rows are cut, packed, padded, interrupted or repeated."""

import hashlib
import json
from functools import partial

import numpy as np
import pytest
import torch

from tests.supervision_checks import shipped_samples, style
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step, collate, make_rows
from tunix_rt.data.render import Example, prompt_ids, render_batch
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.decoding import Decoding
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.models.resolve import resolve_model

FAMILIES = ["gemma3", "llama", "gpt2"]
TRAINING = Training(learning_rate=1e-3, warmup_steps=2, max_grad_norm=1.0, weight_decay=0.01)


def load(folder, dtype="float64", weights="random", **settings):
    return engine_of.load(
        resolve_model(str(folder), weights=weights), device="cpu", training=Training(dtype=dtype, seed=3, **settings)
    )


def examples_for(folder, count=24):
    tokenizer = load_tokenizer(folder)
    return render_batch(shipped_samples(count), tokenizer, style(tokenizer))


def losses(engine, rows, *, micro, accumulation, steps=6, first=1, optimizer=None, training=TRAINING):
    optimizer = optimizer or engine_of.make_optimizer(engine, training)
    batches = partial(batch_of_step, rows, micro_batch_size=micro, accumulation=accumulation, seed=5, pad_id=0)
    walked = engine_of.optimizer_steps(engine, optimizer, batches, training, first=first, total=first + steps - 1)
    return [step.loss for step in walked]


def digest(engine):
    content = b"".join(p.detach().numpy().tobytes() for _, p in sorted(engine.model.named_parameters()))
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("family", [*FAMILIES, "smollm3"])
def test_accumulation_1x8_2x4_8x1_give_one_curve_in_float64(small_model, family):
    folder = small_model(family)
    rows = make_rows(examples_for(folder), max_length=128, packing=False)
    curves = [losses(load(folder), rows, micro=micro, accumulation=8 // micro) for micro in (1, 2, 8)]
    np.testing.assert_allclose(curves[1], curves[0], rtol=0, atol=1e-9)
    np.testing.assert_allclose(curves[2], curves[0], rtol=0, atol=1e-9)


def test_accumulation_gives_one_curve_over_20_steps_in_float32(small_model):
    folder = small_model("gemma3")
    rows = make_rows(examples_for(folder), max_length=128, packing=False)
    curves = [losses(load(folder, "float32"), rows, micro=m, accumulation=8 // m, steps=20) for m in (1, 2, 8)]
    assert curves[0][-1] < curves[0][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    np.testing.assert_allclose(curves[2], curves[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"), [(f, *how) for f in FAMILIES for how in (("float64", 1e-9), ("float32", 1e-5))]
)
def test_packed_rows_have_the_loss_and_gradients_of_their_examples_alone(small_model, family, dtype, tolerance):
    folder = small_model(family)
    engine, examples = load(folder, dtype), examples_for(folder)
    alone = make_rows(examples, max_length=128, packing=False)
    packed = make_rows(examples, max_length=200, packing=True)
    assert len(packed) < len(alone) / 2
    loss_alone, targets_alone = engine_of.heldout_loss(engine, alone, batch_size=5, pad_id=0)
    loss_packed, targets_packed = engine_of.heldout_loss(engine, packed, batch_size=3, pad_id=0)
    assert targets_packed == targets_alone
    assert loss_packed == pytest.approx(loss_alone, rel=tolerance)
    gradients = []
    for rows in (packed, alone):  # as a step computes them: the held-out loss has no backward pass
        engine.model.zero_grad()
        engine_of.summed_loss(engine, collate(rows, pad_id=0)).backward()
        gradients.append({name: one.grad / len(examples) for name, one in engine.model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


@pytest.mark.reference
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
def test_a_real_pretrained_model_has_one_loss_packed_and_alone(reference_model, dtype, tolerance):
    engine = load(reference_model, dtype, weights="pretrained")
    ids = load_tokenizer(reference_model).encode(
        "Once upon a time, there was a little girl named Lily. She loved to play outside."
    )
    row = make_rows_of([ids, ids[: len(ids) // 2]])
    packed, _ = engine_of.heldout_loss(engine, row(packing=True), batch_size=1, pad_id=0)
    alone, _ = engine_of.heldout_loss(engine, row(packing=False), batch_size=2, pad_id=0)
    assert packed == pytest.approx(alone, rel=tolerance)
    assert alone < 3.0, "a wrong loader gives over 10 nats on this sentence"


def make_rows_of(sequences):
    examples = [Example(ids=np.asarray(ids, np.int32), trained=np.ones(len(ids), np.bool_)) for ids in sequences]
    return partial(make_rows, examples, max_length=256)


def test_the_same_seed_gives_identical_losses_and_weights(small_model):
    folder = small_model("gpt2-dropout")
    rows = make_rows(examples_for(folder), max_length=128, packing=False)
    first, second = load(folder, "float32"), load(folder, "float32")
    assert losses(first, rows, micro=4, accumulation=2) == losses(second, rows, micro=4, accumulation=2)
    assert digest(first) == digest(second)


def test_another_seed_gives_other_losses(small_model):
    folder = small_model("gpt2-dropout")
    rows = make_rows(examples_for(folder), max_length=128, packing=False)
    other = TRAINING.model_copy(update={"seed": 9})
    assert losses(load(folder), rows, micro=4, accumulation=1) != losses(
        load(folder), rows, micro=4, accumulation=1, training=other
    )


@pytest.mark.parametrize("stops", [(1,), (4,), (2, 3), (1, 5, 6)])
def test_interrupted_and_resumed_runs_end_in_identical_weights(small_model, tmp_path, stops):
    folder = small_model("gpt2-dropout")
    rows = make_rows(examples_for(folder, count=10), max_length=128, packing=False)  # an epoch is 3 steps
    batches = partial(batch_of_step, rows, micro_batch_size=2, accumulation=2, seed=5, pad_id=0)
    total = 8
    whole = load(folder, "float32")
    optimizer = engine_of.make_optimizer(whole, TRAINING)
    uninterrupted = [
        s.loss for s in engine_of.optimizer_steps(whole, optimizer, batches, TRAINING, first=1, total=total)
    ]
    seen, done = [], 0
    for stop in (*stops, total):
        engine = load(folder, "float32")
        optimizer = engine_of.make_optimizer(engine, TRAINING)
        if done:
            engine_of.restore_state(engine, optimizer, tmp_path, step=done)
        for step in engine_of.optimizer_steps(engine, optimizer, batches, TRAINING, first=done + 1, total=total):
            seen.append(step.loss)
            if step.step == stop:
                break
        engine_of.write_direct(engine, optimizer, tmp_path)
        done = stop
    assert seen == uninterrupted
    assert digest(engine) == digest(whole)


@pytest.mark.parametrize("share", [True, 0.5])
def test_gradient_checkpointing_changes_nothing(small_model, share):
    folder = small_model("gemma3")
    rows = make_rows(examples_for(folder), max_length=128, packing=True)
    plain = losses(load(folder), rows, micro=2, accumulation=1)
    saving = losses(load(folder, gradient_checkpointing=share), rows, micro=2, accumulation=1)
    np.testing.assert_allclose(saving, plain, rtol=1e-12)


def test_the_shipped_model_loses_nothing_through_save_and_plain_transformers(tmp_path):
    import transformers

    source = resolve_model("tiny-gemma3")
    engine = engine_of.load(source, device="cpu", training=Training())
    engine_of.save(engine, tmp_path / "final_model", tokenizer_folder=source.folder, stop_ids=[1])
    settings = json.loads((tmp_path / "final_model" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == 1 and not (tmp_path / "final_model" / "chat_template.jinja").exists()
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final_model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "final_model")
    ids = tokenizer("Tom has 12 pens. Tom buys 7 more pens.", return_tensors="pt").input_ids
    assert ids[0].tolist() == [2, *load_tokenizer(source.folder).encode("Tom has 12 pens. Tom buys 7 more pens.")]
    engine.model.eval()
    with torch.no_grad():
        assert torch.equal(reloaded(ids).logits, engine.model(ids).logits)


def test_an_answer_ends_before_the_first_of_the_tokens_that_end_it(small_model):
    folder = small_model("gemma3")
    engine, tokenizer = load(folder, "float32"), load_tokenizer(folder)
    prompts = [prompt_ids(sample.question, tokenizer, style(tokenizer)) for sample in shipped_samples(5)]

    def ask(stop_ids):
        found = engine_of.generate(
            engine, prompts, decoding=Decoding(max_new_tokens=12), stop_ids=stop_ids, pad_id=0, decode=str,
            batch_size_at=lambda length: 2,
        )  # fmt: skip
        return {index: answer.ids for index, answer in found}

    whole = ask(stop_ids=[1023])
    assert sorted(whole) == list(range(5)) and all(len(ids) == 12 for ids in whole.values())
    stops = [whole[0][4], whole[1][7]]
    cut = {index: next((at for at, token in enumerate(ids) if token in stops), 12) for index, ids in whole.items()}
    assert cut[0] < 12 and cut[1] < 12
    assert ask(stop_ids=stops) == {index: ids[: cut[index]] for index, ids in whole.items()}
