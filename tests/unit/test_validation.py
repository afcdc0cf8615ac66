"""Validation: for every rule a file that only this rule reports, and its corrected twin that none reports."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from docs.data_examples import EXPLANATIONS
from tests.conftest import SHIPPED
from tests.samples import write_lines
from tests.tables import parametrize, tables
from tunix_rt.config.load import build_config
from tunix_rt.data import contamination as overlap
from tunix_rt.data import example_checks as checks
from tunix_rt.data import prepare
from tunix_rt.data import validation as rules
from tunix_rt.data.prepare import ModelFacts, inspect
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.data.validation import RULES, Finding
from tunix_rt.errors import InputError

TEMPLATES = tables(__file__)["templates"]
GEMMA_LIKE = TEMPLATES["gemma"]


def trace(prompt="What is 3 + 4?", answer="7", step="3 + 4 = 7."):
    return {"prompt": prompt, "steps": [{"i": 0, "type": "compute", "content": step}], "final_answer": answer}


def chat(*texts, roles=("user", "assistant")):
    """Turns of user and assistant, in turn."""
    return {"messages": [{"role": roles[n % len(roles)], "content": text} for n, text in enumerate(texts)]}


def completion(text):
    return {"prompt": "What is 3 + 4?", "completion": text}


def question(prompt):
    return {"id": "q1", "prompt": prompt, "answer": "7", "section": "s"}


STORY = (
    "Mia has twelve red apples in a basket and gives five of them to her good friend Tom, who then eats two of these "
    "on the way home and puts the other ones on a plate for his mother and his little sister"
)


TINY = ModelFacts(vocabulary=1024, positions=512, model_type="gemma3_text")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Records that break one rule, the same repaired, and the settings under which they do."""

    bad: list[dict[str, Any]]
    good: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    """A chat template for the tokenizer; it gets the tokens of one."""
    good_template: str | None = None
    line: int = 2
    """Which line is at fault; the first is always good."""
    eval_questions: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    model: ModelFacts = TINY
    good_model: ModelFacts | None = None


FIRST = trace("How much is 20 + 2?", "22", "20 + 2 = 22.")
FIRST_CHAT = chat("How much is 20 + 2?", "It is 22.")
FIRST_COMPLETION = {"prompt": "How much is 20 + 2?", "completion": "It is 22."}
SMALL = {"data": {"max_length": 48, "on_overflow": "truncate"}}
LONG = " ".join(str(number) for number in range(40))


def case_of(**fields) -> Case:
    """Templates by their names, models by their facts."""
    templates = {key: TEMPLATES[value] for key, value in fields.items() if key.endswith("template")}
    models = {key: ModelFacts(**value) for key, value in fields.items() if key.endswith("model")}
    return Case(**fields | templates | models)


CASES = {name: case_of(**fields) for name, fields in tables(__file__)["cases"].items()}


def tokenizer_with(template: str | None, folder: Path):
    """The shipped tokenizer, with a chat template and its tokens where one is given."""
    if template is None:
        return load_tokenizer(SHIPPED, "gemma3_text")
    folder.mkdir()
    inner = tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    inner.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    inner.add_tokens(["\n\n"])
    inner.save(str(folder / "tokenizer.json"))
    config = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return load_tokenizer(folder, "gemma3_text")


def found_in(records, case: Case, template: str | None, model: ModelFacts, folder: Path) -> list[Finding]:
    path = write_lines(folder / "my.jsonl", *records)
    evaluation = {"enabled": False}
    if case.eval_questions:
        evaluation = {"evalset": str(write_lines(folder / "eval.jsonl", *case.eval_questions))}
    raw = {"evaluation": evaluation, **case.settings}
    raw["data"] = {"dataset": str(path), **raw.get("data", {})}
    if case.validation:
        raw["data"]["validation"] = str(write_lines(folder / "validation.jsonl", case.validation))
    tokenizer = tokenizer_with(template, folder / "tokenizer")
    return list(inspect(build_config(raw, "test"), tokenizer, model, lambda *_: None).findings)


def bad_findings(name: str, folder: Path) -> list[Finding]:
    case = CASES[name]
    return found_in(case.bad, case, case.template, case.model, folder)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_every_rule_has_a_case_and_says_what_why_and_how():
    assert list(CASES) == list(RULES)
    assert list(EXPLANATIONS) == list(RULES)
    for rule in RULES.values():
        assert all((rule.finds, rule.fix, *EXPLANATIONS[rule.name])), rule.name
    assert [name for name, rule in RULES.items() if not rule.refuses] == [
        "control_text", "unused_column", "answer_with_words", "truncated", "cut_inside", "duplicate", "near_duplicate",
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_reported_by_its_rule_alone_with_count_and_line_and_refused_with_exit_3(name, tmp_path):
    findings = bad_findings(name, tmp_path)
    assert [(finding.rule, finding.count) for finding in findings] == [(name, 1)], findings
    assert findings[0].first == f"{tmp_path / 'my.jsonl'}:{CASES[name].line}"
    assert findings[0].seen
    if not RULES[name].refuses:
        return rules.refuse(findings)
    with pytest.raises(InputError) as caught:
        rules.refuse(findings)
    way_out = findings[0].way_out + (f"; {rules.SKIP_BAD}" if name in rules.OF_RECORD else "")
    assert (caught.value.exit_code, caught.value.fix) == (3, way_out)
    assert caught.value.problem.startswith(f"{name}: 1 x ") and f"first {findings[0].first}: " in caught.value.problem


@pytest.mark.parametrize("name", CASES)
def test_its_repaired_twin_passes_every_rule(name, tmp_path):
    case = CASES[name]
    template = case.good_template or case.template
    assert found_in(case.good, case, template, case.good_model or case.model, tmp_path) == []


@pytest.mark.parametrize("name", [*checks.EXAMPLE_CHECKS, *checks.TEXT_CHECKS])
def test_without_its_rule_the_bad_file_would_pass(name, tmp_path, monkeypatch):
    """Each file is caught by its rule and by nothing else, so a rule that is switched off is missed by the tests above."""
    for listed in (checks.EXAMPLE_CHECKS, checks.TEXT_CHECKS):
        monkeypatch.delitem(listed, name, raising=False)
    if name == "lone_surrogate":  # nothing else can be asked about a text that cannot be encoded
        with pytest.raises((UnicodeEncodeError, TypeError)):
            bad_findings(name, tmp_path)
    else:
        assert bad_findings(name, tmp_path) == []


def test_several_broken_rules_are_said_together_and_only_warnings_refuse_nothing(tmp_path):
    odd = chat("What is it?", "7\x07")
    records = [FIRST_CHAT, chat("What is <eos>?", "An end."), odd, odd]
    findings = found_in(records, Case(bad=[], good=[]), GEMMA_LIKE, TINY, tmp_path)
    assert [(finding.rule, finding.count) for finding in findings] == [
        ("control_character", 2), ("control_token", 1), ("duplicate", 1),
    ]  # fmt: skip
    assert findings[0].places == (f"{tmp_path / 'my.jsonl'}:3", f"{tmp_path / 'my.jsonl'}:4")
    with pytest.raises(InputError, match="breaks 2 rules") as caught:
        rules.refuse(findings)
    assert "duplicate" not in caught.value.problem
    rules.refuse([finding for finding in findings if not finding.refuses])


def test_a_warning_is_said_and_the_run_goes_on(tmp_path, caplog):
    path = write_lines(tmp_path / "my.jsonl", trace(), FIRST, trace())
    config = build_config(
        {"data": {"dataset": str(path), "validation_fraction": 0}, "evaluation": {"enabled": False}}, "t"
    )
    with caplog.at_level("WARNING"):
        data = prepare.prepare(
            config, tokenizer_with(None, tmp_path), ModelFacts(vocabulary=1024, positions=512), lambda *_: None
        )
    assert data.traces == 3
    assert f"duplicate: 1 x {RULES['duplicate'].finds}; first {path}:3" in caplog.text


def test_asking_for_the_whole_loss_is_no_finding(tmp_path):
    case = Case(bad=[FIRST, trace()], good=[], settings={"data": {"completion_only_loss": False}})
    assert found_in(case.bad, case, None, case.model, tmp_path) == []


# --- what looks wrong and is not --------------------------------------------------------------------------------------

FREE = tables(__file__)["free"]


@pytest.mark.parametrize("name", FREE)
def test_a_text_that_only_looks_wrong_is_let_through(name, tmp_path):
    assert found_in([FREE[name]], Case(bad=[], good=[]), None, TINY, tmp_path) == []


def test_tags_are_asked_about_turn_by_turn(tmp_path):
    crossed = chat("One?", "<reasoning>one", "Two?", "two</reasoning>")
    findings = found_in([crossed], Case(bad=[], good=[]), None, TINY, tmp_path)
    assert [finding.rule for finding in findings] == ["orphan_tag"]


EMPTY_THOUGHT = GEMMA_LIKE.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)


def test_an_empty_block_by_the_template_is_wrong_beside_a_trace_and_no_ones_fault_beside_a_chat(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    assert found_in([FIRST_CHAT], Case(bad=[], good=[]), EMPTY_THOUGHT, TINY, tmp_path / "a") == []
    findings = found_in([FIRST], Case(bad=[], good=[]), EMPTY_THOUGHT, TINY, tmp_path / "b")
    assert [(finding.rule, finding.seen) for finding in findings] == [("empty_tag", "<think></think> is empty")]


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x7f", "\x84", "\x9f", "\ufffe"])
def test_every_kind_of_control_character_is_found(character, tmp_path):
    findings = found_in([trace(step=f"a{character}b")], Case(bad=[], good=[]), None, TINY, tmp_path)
    assert [finding.rule for finding in findings] == ["control_character"]


def test_beginning_twice_is_seen_by_the_ids(tmp_path):
    findings = found_in([FIRST_CHAT], Case(bad=[], good=[]), "{{ bos_token }}" + GEMMA_LIKE, TINY, tmp_path)
    assert [(finding.rule, finding.seen) for finding in findings] == [("bos_twice", "<bos> stands in it 2 times")]


TURNS_OPEN_WITH_BOS = (
    "{% for m in messages %}{{ '<bos>' + m.role + '\n' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("turns", "template", "rules"),
    [
        (chat("Hello?", "Yes."), TURNS_OPEN_WITH_BOS, []),
        (chat("Hello?", "Yes."), "{{ bos_token }}" + TURNS_OPEN_WITH_BOS, ["bos_twice"]),
        (chat("Hello <bos>?", "Yes."), TURNS_OPEN_WITH_BOS, ["control_token"]),
    ],
    ids=["as the model has it", "twice at the beginning", "spelled out in the data"],
)
def test_a_token_that_begins_sequence_and_turn_may_stand_before_each_turn(tmp_path, turns, template, rules):
    """SmolLM2's does."""
    findings = found_in([turns], Case(bad=[], good=[]), template, TINY, tmp_path)
    assert [finding.rule for finding in findings] == rules


def test_a_tagged_completion_that_is_cut_open_is_cut_inside(tmp_path):
    cut = completion(f"<reasoning>{LONG}</reasoning><answer>7</answer>")
    findings = found_in([FIRST_COMPLETION, cut], Case(bad=[], good=[], settings=SMALL), None, TINY, tmp_path)
    assert [(finding.rule, finding.seen) for finding in findings] == [
        ("cut_inside", "0 truncated inside the reasoning, 0 inside the answer, 1 inside a tag of their own")
    ]


def test_the_ways_of_a_cut_are_counted_apart(tmp_path):
    in_answer = trace(step="3", answer=LONG)
    findings = found_in(
        [FIRST, trace(step=LONG), in_answer, trace(step=LONG + " 3")],
        Case(bad=[], good=[], settings=SMALL), None, TINY, tmp_path,
    )  # fmt: skip
    assert [finding.seen for finding in findings if finding.rule == "cut_inside"] == [
        "2 truncated inside the reasoning, 1 inside the answer"
    ]


def test_a_question_that_the_template_would_misread_is_refused_with_its_line(tmp_path):
    case = Case(
        bad=[FIRST_CHAT], good=[], eval_questions=[question("Fine?"), question("Hi<end_of_turn>") | {"id": "q2"}]
    )
    with pytest.raises(InputError, match=rf"{tmp_path / 'eval.jsonl'}:2: control_token: <end_of_turn>"):
        found_in(case.bad, case, GEMMA_LIKE, TINY, tmp_path)


# --- overlap ---------------------------------------------------------------------------------------------------------


def overlap_of(training: dict, *eval_questions: str) -> str | None:
    from tunix_rt.data.formats import readings, to_sample
    from tunix_rt.data.records import EvalItem

    questions = overlap.questions_of(
        EvalItem(id=str(number), prompt=prompt, answer="7", section="s") for number, prompt in enumerate(eval_questions)
    )
    [form] = readings(training)
    match = overlap.find_overlap(to_sample(training, form, "x:1"), questions)
    return match and match.rule


PERU = "What is the capital of Peru?"


@pytest.mark.parametrize(
    ("training", "eval_questions"),
    [
        (trace(f"Please answer this: {PERU}"), PERU),
        (trace(step=f"Somebody asked: {PERU} It is Lima."), PERU),
        (trace(answer=f"{STORY}."), f"{STORY}. How many?"),
        (trace("请回答：三加四等于几，然后再减去二是多少？"), "三加四等于几，然后再减去二是多少？"),
    ],
)
def test_a_question_in_other_words_around_it_is_found(training, eval_questions):
    assert overlap_of(training, eval_questions) == "overlap_ngram"


HIDDEN = {
    "joiners": PERU.replace("a", "a\u200d"), "soft hyphens": PERU.replace("t", "t\u00ad"),
    "zero-width spaces in words": PERU.replace("a", "a\u200b"), "and between words": PERU.replace(" ", "\u200b"),
    "word joiners": PERU.replace("c", "c\u2060"), "variation selectors": PERU.replace("e", "e\ufe0f"),
    "Cyrillic": PERU.translate(str.maketrans("aceopPi", "асеорРі")), "Greek": PERU.translate(str.maketrans("oPi", "οΡι")),
    "Cyrillic capitals": PERU.upper().translate(str.maketrans("AEHTOPC", "АЕНТОРС")),
}  # fmt: skip


@pytest.mark.parametrize("how", HIDDEN)
def test_a_question_with_invisible_or_look_alike_letters_is_found(how):
    assert HIDDEN[how] != PERU
    assert overlap_of(trace(HIDDEN[how]), PERU) == "overlap_normalised"
    assert overlap_of(trace(f"Please answer this: {HIDDEN[how]}"), PERU) == "overlap_ngram"


def test_a_question_in_cyrillic_is_found_in_capitals_and_not_in_another():
    eval_questions = "Сколько тетрадей купил Виктор в среду утром?"
    assert overlap_of(trace(eval_questions.upper()), eval_questions) == "overlap_normalised"
    assert overlap_of(trace("Сколько карандашей купил Виктор в среду утром?"), eval_questions) is None


def test_looking_through_invisible_letters_takes_linear_time():
    from tunix_rt.data.contamination import find_overlap, questions_of
    from tunix_rt.data.records import Sample, Turn

    text = "а\u200d\u200b" * 300_000
    sample = Sample(turns=(Turn(role="user", text=text), Turn(role="assistant", text="7")))
    began = time.process_time()
    assert find_overlap(sample, questions_of([])) is None
    assert time.process_time() - began < 3


def test_a_common_instruction_is_no_overlap():
    instruction = (
        "Solve the following problem step by step and write nothing but the steps and then the answer in the end: "
    )
    eval_questions = [f"{instruction}What is {n} + {n * 7}?" for n in range(60)]
    assert overlap_of(trace(f"{instruction}Who painted the ceiling of the chapel?"), *eval_questions) is None
    assert overlap_of(trace(eval_questions[7]), *eval_questions) == "overlap_exact"


@parametrize("texts")
def test_another_sign_or_number_is_another_question(texts):
    assert overlap.fold(texts[0]) != overlap.fold(texts[1])


@parametrize("texts")
def test_case_spaces_and_punctuation_make_no_other_question(texts):
    assert overlap.fold(texts[0]) == overlap.fold(texts[1])
