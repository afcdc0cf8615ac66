"""The supervision checks can fail: each of the classic defects, put into the real code, is found by its check."""

import pytest

from tests.conftest import SHIPPED
from tests.supervision_checks import (
    check_a_step_trains_on_the_mean_over_all_its_targets,
    check_the_completion_is_taught,
    check_the_end_is_taught,
    check_the_question_is_masked,
    shipped_traces,
    with_defect,
)
from tunix_rt.backends import torch_backend
from tunix_rt.data import render
from tunix_rt.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


MASK = "trained[: len(question) if completion_only_loss else 1] = False"
END = "completion = [*tokenizer.encode(completion_text(trace)), tokenizer.eos_id]"
MEAN = "(loss / batch.target_tokens).backward()"

RENDER_DEFECTS = {
    "the question is not masked": (MASK, "trained[:1] = False", check_the_question_is_masked),
    "only BOS is masked": (MASK, "trained[: len(tokenizer.prefix)] = False", check_the_question_is_masked),
    "the mask is one token short": (MASK, "trained[: len(question) - 1] = False", check_the_question_is_masked),
    "the mask is one token long": (MASK, "trained[: len(question) + 1] = False", check_the_completion_is_taught),
    "the mask is inverted": (MASK, "trained[len(question) :] = False", check_the_question_is_masked),
    "no end-of-sequence": (END, "completion = tokenizer.encode(completion_text(trace))", check_the_end_is_taught),
    "end-of-sequence is masked": (
        MASK, "trained[: len(question)] = False; trained[-1] = False", check_the_end_is_taught,
    ),
    "padding ends the example": (END, END.replace("eos_id", "pad_id"), check_the_end_is_taught),
    "the closing tag of the answer is missing": (
        "{trace.final_answer}</answer>", "{trace.final_answer}", check_the_completion_is_taught,
    ),
    "the closing tag of the reasoning is missing": (
        "{steps}</reasoning>", "{steps}", check_the_completion_is_taught,
    ),
    "the answer is missing": ("<answer>{trace.final_answer}", "<answer>", check_the_completion_is_taught),
    "the last step is missing": ("in trace.steps)", "in trace.steps[:-1])", check_the_completion_is_taught),
}  # fmt: skip


@pytest.mark.parametrize("name", RENDER_DEFECTS)
def test_a_defect_in_rendering_is_found(tokenizer, name):
    right, wrong, check = RENDER_DEFECTS[name]
    traces = shipped_traces(20)
    check(render, tokenizer, traces)  # the real code passes, so the defect alone makes the difference
    with pytest.raises(AssertionError):
        check(with_defect(render, right, wrong), tokenizer, traces)


MEAN_DEFECTS = {
    "a mean of micro-batch means": "(loss / micro.targets / len(batch.micro_batches)).backward()",
    "a sum of micro-batch means": "(loss / micro.targets).backward()",
    "a mean over all tokens": "(loss / batch.tokens).backward()",
}


def test_the_real_step_trains_on_the_mean_over_all_its_targets(small_model):
    check_a_step_trains_on_the_mean_over_all_its_targets(torch_backend, small_model("gemma3"))


@pytest.mark.parametrize("name", MEAN_DEFECTS)
def test_another_mean_in_the_step_is_found(small_model, name):
    defective = with_defect(torch_backend, MEAN, MEAN_DEFECTS[name])
    with pytest.raises(AssertionError, match="not that of the mean loss"):
        check_a_step_trains_on_the_mean_over_all_its_targets(defective, small_model("gemma3"))


def test_a_reported_loss_that_is_no_token_mean_is_found(small_model):
    defective = with_defect(
        torch_backend, "loss_sum += loss.detach().double()", "loss_sum += loss.detach().double() / micro.targets"
    )
    with pytest.raises(AssertionError, match="not the mean over all targets"):
        check_a_step_trains_on_the_mean_over_all_its_targets(defective, small_model("gemma3"))
