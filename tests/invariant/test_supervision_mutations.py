"""The supervision checks can fail: each of the classic defects, put into the real code, is found by its check."""

import pytest

from tests import supervision_checks as checks
from tests.tables import parametrize, tables
from tunix_rt.data import render
from tunix_rt.data.records import Sample, Turn
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.engines.torch import loop as torch_backend


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    return load_tokenizer(checks.write_chat_tokenizer(tmp_path_factory.mktemp("chat")))


MASK = "trained[turn.first : turn.last] = True"
FILL = "np.full(len(ids), not style.completion_only_loss, dtype=np.bool_)"
SAID = "spans.append(_Span(first=start, last=len(ids) + 1, end=len(ids)))"
END = "ids.append(tokenizer.eos_id)"
ANSWER = "<{style.answer_tag}>{sample.answer}</{style.answer_tag}>"
MEAN = "scale=scale / placed.batch.target_tokens)"

QUESTION, COMPLETION, STOP = (
    checks.check_the_question_is_masked,
    checks.check_the_completion_is_taught,
    checks.check_the_end_is_taught,
)

# What the real code reads, what it reads with the defect, and the check that finds it in plain text.
EITHER_WAY = {
    "the question is not masked": (FILL, "np.full(len(ids), True)", QUESTION),
    "the mask is one token short": (MASK, "trained[turn.first - 1 : turn.last] = True", QUESTION),
    "the mask is one token long": (MASK, "trained[turn.first + 1 : turn.last] = True", COMPLETION),
    "the mask ends one token early": (MASK, "trained[turn.first : turn.last - 1] = True", STOP),
    "the mask is inverted": (MASK, "trained[:] = True; trained[turn.first : turn.last] = False", QUESTION),
    "nothing is trained": (MASK, "pass", COMPLETION),
    "the closing tag of the answer is missing": (ANSWER, "<{style.answer_tag}>{sample.answer}", COMPLETION),
    "the closing tag of the reasoning is missing": ("{steps}</{style.reasoning_tag}>", "{steps}", COMPLETION),
    "the answer is missing": (ANSWER, "<{style.answer_tag}></{style.answer_tag}>", COMPLETION),
    "the last step is missing": ('"\\n".join(sample.steps)', '"\\n".join(sample.steps[:-1])', COMPLETION),
}
IN_PLAIN = {
    "only BOS is masked": (SAID, SAID.replace("first=start", "first=len(tokenizer.prefix)"), QUESTION),
    "no end-of-sequence": (END, "pass", STOP),
    "end-of-sequence is masked": (SAID, SAID.replace("last=len(ids) + 1", "last=len(ids)"), STOP),
    "padding ends the example": (END, END.replace("eos_id", "pad_id"), STOP),
    "control tokens in the text are read": ("conversations=False", "conversations=True", STOP),
}
IN_A_TEMPLATE = tables(__file__)["in_a_template"]
SPELLED = Sample(turns=(Turn(role="user", text="What does <eos> mean?"),), steps=("<eos> ends.",), answer="the end")


@pytest.mark.parametrize("name", EITHER_WAY | IN_PLAIN)
def test_a_defect_in_plain_rendering_is_found(tokenizer, name):
    right, wrong, check = (EITHER_WAY | IN_PLAIN)[name]
    samples = [*checks.shipped_samples(20), SPELLED]
    check(render, tokenizer, samples)  # the real code passes, so the defect alone makes the difference
    with pytest.raises(AssertionError):
        check(checks.with_defect(render, right, wrong), tokenizer, samples)


@pytest.mark.parametrize("name", EITHER_WAY | IN_A_TEMPLATE)
def test_a_defect_in_rendering_a_chat_is_found(chatting, name):
    right, wrong, *_ = (EITHER_WAY | IN_A_TEMPLATE)[name]
    samples = checks.shipped_samples(20)
    checks.check_every_turn_is_taught(render, chatting, samples)
    with pytest.raises(AssertionError):
        checks.check_every_turn_is_taught(checks.with_defect(render, right, wrong), chatting, samples)


@parametrize("template", "right", "wrong")
def test_the_length_of_the_prompt_is_known_apart_from_the_mask(chatting, template, right, wrong):
    """A mask that begins too early is seen by comparing the two, which it would not be if one were made of the other."""
    [sample], way = checks.shipped_samples(1), checks.style(chatting, template)
    defective = checks.with_defect(render, right, wrong)
    for rendering, early in ((render, False), (defective, True)):
        shown = rendering.render(sample, chatting, way)
        assert shown.trained[: shown.prompt_tokens].any() == early


MEAN_DEFECTS = {
    "a mean of micro-batch means": "scale=scale / len(micro.targets) / len(placed.micro_batches))",
    "a sum of micro-batch means": "scale=scale / len(micro.targets))",
    "a mean over all tokens": "scale=scale / placed.batch.tokens)",
}


def test_the_real_step_trains_on_the_mean_over_all_its_targets(small_model):
    checks.check_a_step_trains_on_the_mean_over_all_its_targets(torch_backend, small_model("gemma3"))


@pytest.mark.parametrize("name", MEAN_DEFECTS)
def test_another_mean_in_the_step_is_found(small_model, name):
    defective = checks.with_defect(torch_backend, MEAN, MEAN_DEFECTS[name])
    with pytest.raises(AssertionError, match="not the mean over all targets"):
        checks.check_a_step_trains_on_the_mean_over_all_its_targets(defective, small_model("gemma3"))


def test_a_reported_loss_that_is_no_token_mean_is_found(small_model):
    defective = checks.with_defect(
        torch_backend, "total += loss.detach()", "total += loss.detach() / len(micro.targets)"
    )
    with pytest.raises(AssertionError, match="not the mean over all targets"):
        checks.check_a_step_trains_on_the_mean_over_all_its_targets(defective, small_model("gemma3"))
