"""A text followed token by token: the gaps are those of the logits, and a text that the weights do not give is seen."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.chain_model import write_chain_model
from tunix_rt.config.settings import Data, Training
from tunix_rt.data.records import EvalItem
from tunix_rt.data.render import prompt_ids, style_of
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.base import load_backend
from tunix_rt.evaluate.generate import Questions, decoding_of, generate_predictions
from tunix_rt.evidence.replay.session import largest_gaps
from tunix_rt.models.resolve import resolve_model


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_gaps_are_those_between_the_logits_of_each_prefix(name):
    backend = load_backend(name)
    engine = backend.load(resolve_model("tiny-gemma3"), device="cpu", training=Training(backend=name, dtype="float32"))
    prompts, answers, ends = [[2, 5, 6, 7], [2, 9]], [[8, 300, 4], []], [1, 107]
    found = backend.token_gaps(engine, prompts, answers, ends)
    for prompt, answer, gaps in zip(prompts, answers, found, strict=True):
        logits = backend.last_logits(engine, [[*prompt, *answer[:place]] for place in range(len(answer) + 1)])
        wanted = [row.max() - row[token] for row, token in zip(logits, answer, strict=False)]
        assert gaps == pytest.approx([*wanted, logits[-1].max() - logits[-1][ends].max()], abs=2e-4)
        assert np.min(gaps) >= 0 and len(gaps) == len(answer) + 1


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A model that says `The sum is four` to everything, its question, and what it really answers."""
    probe = load_tokenizer(resolve_model("tiny-gemma3").folder)
    style = style_of(Data(), probe)
    items = [EvalItem(id="q", prompt="What?", answer="4", section="all")]
    last = probe.decode([prompt_ids("What?", probe, style)[-1]])
    folder = write_chain_model(tmp_path_factory.mktemp("chain"), {last: "The sum is four"})
    backend = load_backend("torch")
    engine = backend.load(resolve_model(str(folder)), device="cpu", training=Training(dtype="bfloat16"))
    questions = Questions(items=items, tokenizer=probe, style=style, decoding=decoding_of(style, max_new_tokens=40))
    silent = {"progress": lambda *_: None, "stop": lambda: None}
    (given,) = generate_predictions(backend, engine, questions, what="", batch_size_at=lambda length: 1, **silent)
    return backend, engine, questions, given


def gap(asked, **changed):
    backend, engine, questions, given = asked
    return largest_gaps(backend, engine, questions, {0: replace(given, **changed)}, positions=256)[0]


def test_what_the_weights_say_is_followed_and_what_they_do_not_say_is_not(asked):
    assert asked[3].output.strip() == "The sum is four" and asked[3].ended == "stop"
    assert gap(asked) == 0
    for invented in ("The sum is five", "<answer>4</answer>", "The sum is", "", "The sum is four and more"):
        assert gap(asked, output=invented) > 1, invented


def test_an_end_that_cannot_have_been_is_not_followed(asked):
    for ended in ("length", "tag", "context", "time", "unknown"):
        assert gap(asked, ended=ended) == math.inf
    assert gap(asked, output="", ended="length") == math.inf
    assert gap(asked, output="four " * 1000) == math.inf
