"""The model is taught the reasoning, the answer and to stop; never the question. With the shipped tokenizer."""

import numpy as np
import pytest

from tests.conftest import SHIPPED
from tests.supervision_checks import (
    check_the_completion_is_taught,
    check_the_end_is_taught,
    check_the_question_is_masked,
    labels_of,
    shipped_traces,
)
from tunix_rt.config import build_config
from tunix_rt.data import render as rendering
from tunix_rt.data.pack import IGNORED, batch_of_step, make_rows
from tunix_rt.data.prepare import prepare
from tunix_rt.data.render import prompt_ids, render, render_all
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.data.trace import Trace, TraceStep
from tunix_rt.errors import InputError

AWKWARD = Trace(
    prompt="Wie groß ist 日本?\n\n  two   spaces ",
    steps=(TraceStep(i=0, type="fact", content="é 😀\tx\n"), TraceStep(i=1, type="conclude", content="</b> < > &")),
    final_answer="½",
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


@pytest.fixture(scope="module")
def traces():
    return [*shipped_traces(), AWKWARD]


def test_exactly_bos_and_question_are_masked_in_every_shipped_trace(tokenizer, traces):
    check_the_question_is_masked(rendering, tokenizer, traces)


def test_the_targets_of_every_shipped_trace_decode_to_its_completion(tokenizer, traces):
    check_the_completion_is_taught(rendering, tokenizer, traces)


def test_end_of_sequence_is_the_last_target_of_every_shipped_trace(tokenizer, traces):
    check_the_end_is_taught(rendering, tokenizer, traces)


@pytest.mark.parametrize("system_instruction", [None, "Think in steps.\nThen answer."])
def test_the_prompt_at_generation_is_the_prefix_of_the_training_row(tokenizer, traces, system_instruction):
    for trace in traces:
        asked = prompt_ids(trace.prompt, tokenizer, system_instruction)
        example = render(trace, tokenizer, system_instruction=system_instruction)
        assert example.ids[: len(asked)].tolist() == asked
        assert int(np.flatnonzero(example.trained)[0]) == len(asked), "the mask ends where generation begins"


def test_a_system_instruction_is_masked_with_the_question(tokenizer):
    [trace] = shipped_traces(1)
    plain = render(trace, tokenizer)
    told = render(trace, tokenizer, system_instruction="Think in steps.")
    assert told.trained.sum() == plain.trained.sum()
    assert len(told.ids) > len(plain.ids)
    assert "Think in steps." in tokenizer.decode(told.ids[~told.trained].tolist())


def test_with_completion_only_loss_off_everything_but_the_first_token_is_a_target(tokenizer):
    [trace] = shipped_traces(1)
    example = render(trace, tokenizer, completion_only_loss=False)
    assert not example.trained[0]
    assert example.trained[1:].all()


def test_masked_question_and_taught_completion_survive_packing(tokenizer):
    traces = shipped_traces(40)
    rows = make_rows(render_all(traces, tokenizer, max_length=256).examples, max_length=256, packing=True)
    batch = batch_of_step(rows, 1, micro_batch_size=len(rows), accumulation=1, seed=0, pad_id=tokenizer.pad_id)
    labels = batch.micro_batches[0].labels
    apart = [label for trace in traces for label in labels_of(rendering, trace, tokenizer)[1] if label != IGNORED]
    assert sorted(labels[labels != IGNORED].tolist()) == sorted(apart)
    assert (labels == tokenizer.eos_id).sum() == len(traces)
    assert batch.target_tokens == len(apart)


@pytest.mark.parametrize("packing", [True, False])
def test_a_prepared_run_teaches_every_completion_once_per_epoch(tokenizer, packing):
    settings = {"dataset": "dev-reasoning-v2", "packing": packing, "max_length": 256, "validation_fraction": 0.1}
    data = prepare(
        build_config(settings, "test"), tokenizer, model_vocabulary=tokenizer.vocab_size, model_positions=512
    )
    assert (data.traces, data.heldout_traces) == (495, 55)
    wanted = sum(len(tokenizer.encode(rendering.completion_text(trace))) + 1 for trace in shipped_traces())
    heldout = sum(int(row.trained.sum()) for row in data.heldout_rows)
    assert data.trained_tokens + heldout == wanted


@pytest.mark.parametrize("place", ["prompt", "content", "final_answer"])
@pytest.mark.parametrize("special", ["<eos>", "<bos>", "<pad>"])
def test_text_that_spells_a_special_token_never_becomes_that_token_unnoticed(tokenizer, place, special):
    texts = {"prompt": "How many?", "content": "One and one.", "final_answer": "2", place: f"one {special} two"}
    step = TraceStep(i=0, type="fact", content=texts["content"])
    trace = Trace(prompt=texts["prompt"], steps=(step,), final_answer=texts["final_answer"])
    try:
        example = render(trace, tokenizer)
    except InputError as refused:
        assert special in str(refused)
    else:
        inner = example.ids[len(tokenizer.prefix) : -1].tolist()
        assert tokenizer.inner.token_to_id(special) not in inner
