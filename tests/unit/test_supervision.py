"""The model is taught what the assistant says and to stop; never the question. With the shipped tokenizer."""

import json

import numpy as np
import pytest

from tests.supervision_checks import (
    CONVERSATIONS,
    chat,
    check_every_turn_is_taught,
    check_the_completion_is_taught,
    check_the_end_is_taught,
    check_the_question_is_masked,
    labels_of,
    shipped_samples,
    style,
    write_chat_tokenizer,
)
from tunix_rt.config.load import build_config
from tunix_rt.data import render as rendering
from tunix_rt.data.packing import IGNORED, batch_of_step, make_rows
from tunix_rt.data.prepare import ModelFacts, prepare
from tunix_rt.data.records import Sample, Turn
from tunix_rt.data.render import completion_text, prompt_ids, render, render_batch
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.scoring.score import matches_strict

AWKWARD = Sample(
    turns=(Turn(role="user", text="Wie groß ist 日本?\n\n  two   spaces "),),
    steps=("é 😀\tx\n", "</b> < > &"),
    answer="½",
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    return load_tokenizer(write_chat_tokenizer(tmp_path_factory.mktemp("chat")))


@pytest.fixture(scope="module")
def samples():
    return [*shipped_samples(), AWKWARD]


def test_exactly_bos_and_question_are_masked_in_every_shipped_trace(tokenizer, samples):
    check_the_question_is_masked(rendering, tokenizer, samples)


def test_the_targets_of_every_shipped_trace_decode_to_its_completion(tokenizer, samples):
    check_the_completion_is_taught(rendering, tokenizer, samples)


def test_end_of_sequence_is_the_last_target_of_every_shipped_trace(tokenizer, samples):
    check_the_end_is_taught(rendering, tokenizer, samples)


def test_under_a_chat_template_every_turn_of_the_assistant_and_its_end_are_taught_and_nothing_else(chatting, samples):
    check_every_turn_is_taught(rendering, chatting, [*samples[:50], AWKWARD])


@pytest.mark.parametrize("system_instruction", [None, "Think in steps.\nThen answer."])
@pytest.mark.parametrize("template", ["plain", "chatml", "gemma"])
def test_the_prompt_at_generation_is_the_prefix_of_the_training_row(chatting, samples, template, system_instruction):
    way = style(chatting, template, system_instruction=system_instruction)
    some = samples[::-9]
    for sample, example in zip(some, render_batch(some, chatting, way), strict=True):
        asked = prompt_ids(sample.question, chatting, way)
        assert example.ids[: len(asked)].tolist() == asked
        assert int(np.flatnonzero(example.trained)[0]) == len(asked) == example.prompt_tokens
        assert not example.straddled


def test_a_system_instruction_is_masked_with_the_question(tokenizer):
    [sample] = shipped_samples(1)
    plain = render(sample, tokenizer, style(tokenizer))
    told = render(sample, tokenizer, style(tokenizer, system_instruction="Think in steps."))
    assert told.trained.sum() == plain.trained.sum()
    masked = tokenizer.decode(told.ids[~told.trained].tolist())
    assert masked == f"Think in steps.\n{sample.question}\n"


@pytest.mark.parametrize("template", ["plain", "chatml"])
def test_with_completion_only_loss_off_everything_but_the_first_token_is_a_target(chatting, template):
    [sample] = shipped_samples(1)
    example = render(sample, chatting, style(chatting, template, completion_only_loss=False))
    assert not example.trained[0]
    assert example.trained[1:].all()


def test_a_plain_chat_is_lines_in_which_every_turn_of_the_assistant_ends_the_sequence(tokenizer):
    example = render(chat("a", "b", "c", "d", system="told"), tokenizer, style(tokenizer, system_instruction="first"))
    end = tokenizer.eos_id
    asked, said, asked_again, said_again = (tokenizer.encode(text) for text in ("first\n\ntold\na\n", "b", "c\n", "d"))
    assert example.ids.tolist() == [*tokenizer.prefix, *asked, *said, end, *asked_again, *said_again, end]
    assert [int(example.ids[i]) for i in np.flatnonzero(example.trained)] == [*said, end, *said_again, end]
    assert example.ends == (len(asked) + len(said) + 1, len(example.ids) - 1)


@pytest.mark.parametrize("template", ["plain", "chatml", "gemma"])
@pytest.mark.parametrize("tags", [("reasoning", "answer"), ("think", "final")])
def test_the_example_says_where_reasoning_and_answer_end(chatting, samples, template, tags):
    way = style(chatting, template, reasoning_tag=tags[0], answer_tag=tags[1])
    for sample in samples[::60]:
        example = render(sample, chatting, way)
        said = completion_text(sample, way)
        reasoning, answer = (
            chatting.inner.decode(example.ids[example.prompt_tokens : end].tolist(), skip_special_tokens=False)
            for end in (example.reasoning_end, example.answer_end)
        )
        assert reasoning.startswith(said.split(f"<{tags[1]}>")[0]) and len(reasoning) - len(said) < 4
        assert answer == said
        assert example.ids[example.ends[0]] == way.template.end_id and example.ends[0] == example.answer_end


@pytest.mark.parametrize("sample", CONVERSATIONS)
def test_a_chat_that_is_no_trace_has_no_end_of_reasoning(chatting, sample):
    example = render(sample, chatting, style(chatting, "chatml"))
    assert (example.reasoning_end, example.answer_end) == (0, 0)
    assert len(example.ends) == sum(turn.role == "assistant" for turn in sample.turns)


def test_masked_question_and_taught_completion_survive_packing(tokenizer):
    samples, plain = shipped_samples(40), style(tokenizer)
    rows = make_rows(render_batch(samples, tokenizer, plain), max_length=256, packing=True)
    batch = batch_of_step(rows, 1, micro_batch_size=len(rows), accumulation=1, seed=0, pad_id=tokenizer.pad_id)
    labels = batch.micro_batches[0].labels
    apart = [
        label for sample in samples for label in labels_of(rendering, sample, tokenizer, plain)[1] if label != IGNORED
    ]
    assert sorted(labels[labels != IGNORED].tolist()) == sorted(apart)
    assert (labels == tokenizer.eos_id).sum() == len(samples)
    assert batch.target_tokens == len(apart)


@pytest.mark.parametrize("packing", [True, False])
def test_a_prepared_run_teaches_every_completion_once_per_epoch(tokenizer, packing):
    settings = {"dataset": "dev-reasoning-v2", "packing": packing, "max_length": 256, "validation_fraction": 0.1}
    facts = ModelFacts(vocabulary=tokenizer.vocab_size, positions=512)
    data = prepare(build_config(settings, "test"), tokenizer, facts, lambda *_: None)
    assert (data.traces, data.heldout_traces) == (495, 55)
    plain = style(tokenizer)
    wanted = sum(len(tokenizer.encode(completion_text(sample, plain))) + 1 for sample in shipped_samples())
    heldout = sum(int(row.trained.sum()) for row in data.heldout_rows)
    assert data.trained_tokens + heldout == wanted


def test_tags_that_are_special_tokens_are_read_back_and_what_surrounds_a_text_is_not(tmp_path):
    tags = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    write_chat_tokenizer(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["special"] |= token["content"] in tags
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    special = load_tokenizer(tmp_path)
    assert set(tags) <= set(special.control_tokens)
    [sample], chatml = shipped_samples(1), style(special, "chatml")
    example = render(sample, special, chatml)
    said = example.ids[example.prompt_tokens : example.ends[0]].tolist()
    output = special.decode([special.bos_id, *said, special.eos_id, special.pad_id])
    assert output == completion_text(sample, chatml)
    assert matches_strict(output, sample.answer)


@pytest.mark.parametrize("place", ["prompt", "step", "answer"])
@pytest.mark.parametrize("special", ["<eos>", "<bos>", "<pad>"])
def test_in_plain_text_that_spells_a_control_token_never_becomes_that_token(tokenizer, place, special):
    texts = {"prompt": "How many?", "step": "One and one.", "answer": "2", place: f"one {special} two"}
    sample = Sample(turns=(Turn(role="user", text=texts["prompt"]),), steps=(texts["step"],), answer=texts["answer"])
    example = render(sample, tokenizer, style(tokenizer))
    inner = example.ids[len(tokenizer.prefix) : -1].tolist()
    assert tokenizer.inner.token_to_id(special) not in inner
