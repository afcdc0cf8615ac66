"""Rollouts are a function of (weights, seed, step), the update trains what was sampled, and a defect in between is found."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.invariant.test_training_is_exact import digest
from tests.program import ROOT
from tunix_rt.config.load import build_config
from tunix_rt.data.packing import StepBatch
from tunix_rt.data.prepare import ModelFacts, prepare
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.decoding import Decoding
from tunix_rt.engines.on_policy import LARGEST_GAP, LARGEST_RATIO, agreement
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch import sampling
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import resolve_model
from tunix_rt.scoring.rewards import advantages
from tunix_rt.train import rollouts as rollouts_of
from tunix_rt.train.rollouts import Group, RolloutSource, batch_of_rollouts

MODEL = ROOT / "submission_runs" / "demo_v1" / "final_model"
STEPS = 4


@pytest.fixture(scope="module")
def prepared():
    """Settings, tokenizer and data of a small run."""
    rollouts = {"prompts": 3, "samples": 4, "max_new_tokens": 64}
    training = {
        "device": "cpu", "method": "grpo", "rollouts": rollouts, "max_steps": STEPS, "learning_rate": 2e-4,
        "per_device_train_batch_size": 4, "seed": 11,
    }  # fmt: skip
    config = build_config(
        {
            "model": {"model_name_or_path": str(MODEL)}, "training": training, "evaluation": {"enabled": False},
            "data": {"dataset": "dev-reasoning-more", "max_length": 192, "max_examples": 200, "packing": False},
        },
        "test",
    )  # fmt: skip
    tokenizer = load_tokenizer(MODEL, "gemma3_text")
    facts = ModelFacts(vocabulary=1024, positions=512, model_type="gemma3_text")
    return config, tokenizer, prepare(config, tokenizer, facts, lambda *_: None)


def source_of(prepared, engine=None, **changed) -> RolloutSource:
    config, tokenizer, data = prepared
    config = config.model_copy(update={"training": config.training.model_copy(update=changed)})
    engine = engine or engine_of.load(resolve_model(str(MODEL)), device="cpu", training=config.training)
    return RolloutSource(
        backend=engine_of, engine=engine, config=config, data=data, tokenizer=tokenizer, rows=4, generation_rows=64
    )


@pytest.fixture(scope="module")
def source(prepared) -> RolloutSource:
    """At the weights before the first step; tests do not train it."""
    return source_of(prepared)


def texts_of(source: RolloutSource, step: int) -> tuple[str, StepBatch]:
    texts: list[str] = []
    batch = replace(source, record=lambda step, text: texts.append(text), last={}).batch_of(step)
    return texts[0], batch


def losses_of(source: RolloutSource, batch: StepBatch) -> list[np.ndarray]:
    """Of every target, by the forward pass of an update."""
    placed = [source.engine.placing(training=True)(micro) for micro in batch.micro_batches]
    for one in placed:
        with torch.no_grad():
            engine_of.summed_loss(source.engine, one)
    return [one.losses.numpy() for one in placed]


def outputs(text: str) -> list[str]:
    import json

    return [one["output"] for line in text.splitlines() for one in json.loads(line)["rollouts"]]


# --- what a step samples ----------------------------------------------------------------------------------------------


def test_a_step_has_its_own_rollouts_and_a_repeated_one_has_the_same(source):
    first, again, second = (texts_of(source, step)[0] for step in (1, 1, 2))
    assert first == again
    assert not set(outputs(first)) & set(outputs(second))
    assert len(set(outputs(first))) > len(outputs(first)) / 2, "the samples of a prompt have noise of their own"


def test_the_noise_of_a_rollout_is_that_of_its_seed_step_prompt_sample_and_position(source):
    def keys(**changed):
        return replace(source.decoding(3), **changed).keys(5, 4)

    assert keys() == replace(source.decoding(3)).keys(5, 4)
    others = [keys(step=4), keys(seed=12), source.decoding(3).keys(6, 4), source.decoding(3).keys(1, 4)]
    assert all(other != keys() for other in others)
    assert len(set(keys())) == 4


def test_one_noise_for_all_steps_is_found(source, monkeypatch):
    """With the same prompts in two steps, a sampler that forgets the step repeats itself."""
    monkeypatch.setattr(rollouts_of, "rows_of_step", lambda step, **how: [0, 1, 2])
    assert outputs(texts_of(source, 1)[0]) != outputs(texts_of(source, 2)[0])
    real = RolloutSource.decoding
    monkeypatch.setattr(RolloutSource, "decoding", lambda self, step: replace(real(self, step), step=None))
    assert outputs(texts_of(source, 1)[0]) == outputs(texts_of(source, 2)[0])


def test_the_ending_token_is_trained_and_nothing_behind_it(source):
    for step in (1, 2, 3):
        _, batch = texts_of(source, step)
        for micro in batch.micro_batches:
            for ids, labels, weights in zip(micro.ids, micro.labels, micro.weights, strict=True):
                last = int(np.flatnonzero(labels != -100)[-1])
                assert ids[last] == source.tokenizer.eos_id
                assert not weights[last + 1 :].any() and weights[last] != 0


# --- the gate ---------------------------------------------------------------------------------------------------------


def gap_of(source: RolloutSource, batch: StepBatch) -> float:
    return agreement(1, batch, losses_of(source, batch), "float32").logprob_gap


@pytest.fixture(scope="module")
def sampled(source) -> tuple[RolloutSource, StepBatch]:
    for step in range(1, 20):
        _, batch = texts_of(source, step)
        if batch.micro_batches:
            return source, batch
    raise AssertionError("no rollout has an advantage")


def test_the_update_computes_the_log_probabilities_of_the_sampler(sampled):
    source, batch = sampled
    assert gap_of(source, batch) < LARGEST_GAP / 10


def without_bos(ids, prompt):
    return ids[1:], prompt - 1


def with_another_template(ids, prompt):
    return [*ids[: prompt - 1], ids[prompt - 1], *ids[prompt - 1 :]], prompt + 1


@pytest.mark.parametrize("change", [without_bos, with_another_template])
def test_other_prompts_in_the_update_are_found(source, monkeypatch, change):
    real = rollouts_of.rows_of_rollouts

    def changed(groups):
        for group in groups:
            prompt, _ = change(group.prompt, len(group.prompt))
            yield from real([replace(group, prompt=prompt)])

    monkeypatch.setattr(rollouts_of, "rows_of_rollouts", changed)
    _, batch = first_live(source)
    with pytest.raises(TunixError, match=r"step 1: .* row \d+, sample \d, token \d+: "):
        gap_of(source, batch)


def first_live(source: RolloutSource) -> tuple[str, StepBatch]:
    return next(found for step in range(1, 20) if (found := texts_of(source, step))[1].micro_batches)


def test_weights_of_the_step_before_are_found(prepared):
    """Rollouts that were sampled one update ago."""
    source = source_of(prepared)
    _, stale = first_live(source)
    optimizer = engine_of.make_optimizer(source.engine, source.config.training)
    next(
        engine_of.optimizer_steps(
            source.engine, optimizer, lambda step: stale, source.config.training, first=1, total=4
        )
    )
    with pytest.raises(TunixError, match="does not train what was sampled"):
        gap_of(source, stale)


def test_padding_that_the_sampler_attends_to_is_found(source):
    class Padding:
        """The engine, with prompts whose padding is not masked."""

        def generate(self, engine, prompts, *, pad_id, **how):
            return engine_of.generate(engine, [[pad_id, pad_id, *prompt] for prompt in prompts], pad_id=pad_id, **how)

    _, batch = first_live(replace(source, backend=Padding(), last={}))
    with pytest.raises(TunixError, match="does not train what was sampled"):
        gap_of(source, batch)


def test_in_16_bits_the_mean_ratio_decides(sampled):
    source, batch = sampled
    exact = losses_of(source, batch)
    noise = [loss + 0.002 * np.resize([1, -1], len(loss)) for loss in exact]
    assert agreement(1, batch, noise, "bfloat16").logprob_gap > LARGEST_GAP
    with pytest.raises(TunixError, match=f"the limit is {LARGEST_GAP}"):
        agreement(1, batch, noise, "float32")
    with pytest.raises(TunixError, match=f"mean ratio of probabilities .* the limit is {LARGEST_RATIO}"):
        agreement(1, batch, [loss + 0.01 for loss in exact], "bfloat16")


def test_log_probabilities_that_are_not_a_number_are_found(sampled):
    source, batch = sampled
    losses = losses_of(source, batch)
    losses[0][3] = np.nan
    with pytest.raises(TunixError, match="nan"):
        agreement(1, batch, losses, "bfloat16")


# --- is temperature 1 what is drawn -----------------------------------------------------------------------------------


def surprise(engine, decoding: Decoding, count: int = 96) -> float:
    """How far the mean log-probability of drawn tokens is from what the model's distribution gives, in standard errors."""
    prompt = [2, 5, 9]
    drawn = engine_of.generate(
        engine, [prompt], decoding=replace(decoding, samples=count), stop_ids=[], pad_id=0, decode=lambda ids: "",
        batch_size_at=lambda length: count,
    )  # fmt: skip
    rows = torch.tensor([[*prompt, *answer.ids] for _, answer in drawn])
    with torch.no_grad():
        logprobs = (
            engine.model(input_ids=rows, use_cache=False).logits[:, len(prompt) - 1 : -1].double().log_softmax(-1)
        )
    found = logprobs.gather(2, rows[:, len(prompt) :, None])[..., 0]
    mean = (logprobs.exp() * logprobs).sum(-1)
    variance = (logprobs.exp() * logprobs.square()).sum(-1) - mean.square()
    return float((found - mean).sum() / variance.sum().sqrt())


@pytest.fixture
def random_model(small_model):
    return engine_of.load(
        resolve_model(str(small_model("gemma3")), weights="random"), device="cpu",
        training=source_training(),
    )  # fmt: skip


def source_training():
    from tunix_rt.config.settings import Training

    return Training(dtype="float32", seed=3)


def test_drawn_tokens_follow_the_distribution_of_the_model(random_model, source):
    decoding = replace(source.decoding(1), max_new_tokens=48)
    assert abs(surprise(random_model, decoding)) < 4


def test_another_temperature_and_top_k_are_found(random_model, source, monkeypatch):
    """The log-probabilities agree where the draw is wrong: what is drawn has to be compared with them."""
    decoding = replace(source.decoding(1), max_new_tokens=48)
    assert surprise(random_model, replace(decoding, temperature=0.9)) > 5
    real = sampling._noisy

    def of_50(logits, keys, decoding):
        kept = logits >= logits.topk(50, dim=-1).values[:, -1:]
        return real(logits.masked_fill(~kept, -torch.inf), keys, decoding)

    monkeypatch.setattr(sampling, "_noisy", of_50)
    assert surprise(random_model, decoding) > 5


# --- the batch of a step ----------------------------------------------------------------------------------------------


def test_groups_without_a_difference_are_left_out_and_counted(source):
    rewards = [[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0] * 4]
    groups = [
        Group(
            row=row, prompt=[2, 5], expected="1", rollouts=[
                {"ids": [7, 1], "logprobs": [-0.5, -0.1], "output": "x", "ended": "stop", "reward": reward, "advantage": weight}
                for reward, weight in zip(of, advantages(of, "mean"), strict=True)
            ],
        )
        for row, of in enumerate(rewards)
    ]  # fmt: skip
    batch = batch_of_rollouts(groups, packing=True, max_length=16, rows=4, pad_id=0)
    assert batch.target_tokens == 8 and batch.tokens == 16
    found = rollouts_of.columns(groups, source.tags)
    assert found["zero_variance"] == pytest.approx(2 / 3) and found["trained_rollouts"] == 4
    nothing = batch_of_rollouts([groups[0], groups[2]], packing=True, max_length=16, rows=4, pad_id=0)
    assert nothing.micro_batches == () and nothing.target_tokens == 0


def test_a_step_without_an_advantage_changes_no_weight(prepared):
    source = source_of(prepared)
    empty = StepBatch(micro_batches=(), target_tokens=0, tokens=0, sha256="0" * 64)
    _, live = first_live(source)
    optimizer = engine_of.make_optimizer(source.engine, source.config.training)
    steps = engine_of.optimizer_steps(
        source.engine, optimizer, lambda step: live if step == 1 else empty, source.config.training, first=1, total=2
    )
    next(steps)
    before = digest(source.engine)
    taken = next(steps)
    assert (taken.loss, taken.grad_norm, taken.target_tokens, taken.logprob_gap) == (0.0, 0.0, 0, None)
    assert digest(source.engine) == before


def test_packing_and_the_size_of_micro_batches_change_no_gradient(prepared):
    source = source_of(prepared, dtype="float64")
    text, _ = first_live(source)
    import json

    groups = [Group(**json.loads(line)) for line in text.splitlines()]
    gradients = []
    for packing, rows in ((False, 4), (False, 1), (True, 2)):
        batch = batch_of_rollouts(groups, packing=packing, max_length=192, rows=rows, pad_id=0)
        source.engine.model.zero_grad()
        for micro in batch.micro_batches:
            engine_of.summed_loss(source.engine, micro, scale=1 / batch.target_tokens).backward()
        gradients.append({name: one.grad.clone() for name, one in source.engine.model.named_parameters()})
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-8, atol=1e-12)


# --- killed and resumed -----------------------------------------------------------------------------------------------

PLACES = ("rollout", "scoring", "update")


class Killed(BaseException):
    pass


def trained(prepared, folder: Path | None, *, first: int = 1, die: tuple[str, int] | None = None, monkeypatch=None):
    """(steps by number, rollouts by number, digest of the weights) of steps `first` to the last, saved after each in `folder`;
    `die` in a step at a place."""
    source = source_of(prepared)
    texts: dict[int, str] = {}
    source.record = texts.__setitem__
    source.engine.prepared = True  # a run prepares its steps with a batch of traces
    optimizer = engine_of.make_optimizer(source.engine, source.config.training)
    if first > 1:
        engine_of.restore_state(source.engine, optimizer, folder / f"{first - 1}", step=first - 1)
    if die is not None:
        place, at = die
        owner, name = {
            "rollout": (engine_of, "generate"), "scoring": (rollouts_of, "reward_of"), "update": (optimizer, "step"),
        }[place]  # fmt: skip
        real, calls = getattr(owner, name), [0]

        def dying(*given, **how):
            calls[0] += 1
            if (source_step[0] == at and calls[0] % 2 == 0) or (source_step[0] == at and place != "scoring"):
                raise Killed
            return real(*given, **how)

        monkeypatch.setattr(owner, name, dying)
    source_step, found = [first], {}
    for step in engine_of.optimizer_steps(
        source.engine, optimizer, source.batch_of, source.config.training, first=first, total=STEPS
    ):
        timed = {"seconds": 0.0, "peak_bytes": 0}
        columns = {name: value for name, value in source.columns(step.step).items() if not name.endswith("_seconds")}
        found[step.step] = (replace(step, **timed), columns)
        source_step[0] = step.step + 1
        if folder is not None:
            (folder / f"{step.step}").mkdir(exist_ok=True)
            engine_of.write_direct(source.engine, optimizer, folder / f"{step.step}")
    return found, texts, digest(source.engine)


@pytest.fixture(scope="module")
def uninterrupted(prepared):
    return trained(prepared, None)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow),
                                  pytest.param(4, marks=pytest.mark.slow)])  # fmt: skip
def test_a_run_that_dies_in_a_step_ends_as_the_uninterrupted_one(prepared, uninterrupted, tmp_path, step, place):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        trained(prepared, tmp_path, die=(place, step), monkeypatch=patch)
    found, texts, weights = trained(prepared, tmp_path, first=step)
    assert weights == uninterrupted[2]
    assert found == {number: line for number, line in uninterrupted[0].items() if number >= step}
    assert texts == {number: text for number, text in uninterrupted[1].items() if number >= step}
