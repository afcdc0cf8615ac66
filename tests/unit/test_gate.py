"""The gate: for every rule a file that only this rule speaks of, and its repaired twin that none does."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.conftest import SHIPPED
from tunix_rt.config import build_config
from tunix_rt.data import overlap, prepare, rules
from tunix_rt.data.prepare import ModelFacts, inspect
from tunix_rt.data.rules import RULES, Finding
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.errors import InputError

GEMMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


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
    asked: list[dict[str, Any]] = field(default_factory=list)
    model: ModelFacts = TINY
    good_model: ModelFacts | None = None


FIRST = trace("How much is 20 + 2?", "22", "20 + 2 = 22.")
FIRST_CHAT = chat("How much is 20 + 2?", "It is 22.")
FIRST_COMPLETION = {"prompt": "How much is 20 + 2?", "completion": "It is 22."}
SMALL = {"data": {"max_length": 48, "on_overflow": "truncate"}}
LONG = " ".join(str(number) for number in range(40))

CASES = {
    "lone_surrogate": Case(bad=[FIRST, trace("What is \ud83d?")], good=[FIRST, trace("What is \U0001f600?")]),
    "control_character": Case(bad=[FIRST, trace(answer="7\x07")], good=[FIRST, trace(step="a\tb\nc")]),
    "control_token": Case(bad=[FIRST, trace("What is <eos>?")], good=[FIRST, trace("What is <end>?")]),
    "template_refused": Case(
        bad=[FIRST_CHAT, chat("Hello.", "Hello?", "Yes.", roles=("user", "user", "assistant"))],
        good=[FIRST_CHAT, chat("Hello.", "Yes.")], template=GEMMA_LIKE,
    ),
    "no_target": Case(bad=[FIRST_CHAT, chat("Hello?")], good=[FIRST_CHAT, chat("Hello?", "Yes.")]),
    "end_not_trained": Case(
        bad=[FIRST_CHAT], good=[FIRST_CHAT], line=1, good_template=GEMMA_LIKE,
        template="{{ bos_token }}{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}",
    ),
    "bos_twice": Case(
        bad=[FIRST_CHAT, chat("<bos>How many?", "Two.")], good=[FIRST_CHAT, chat("How many?", "Two.")],
        template=GEMMA_LIKE,
    ),
    "bos_missing": Case(
        bad=[FIRST_CHAT], good=[FIRST_CHAT], line=1, template=GEMMA_LIKE.replace("{{ bos_token }}", ""),
        good_template=GEMMA_LIKE,
    ),
    "orphan_tag": Case(
        bad=[FIRST_COMPLETION, completion("<reasoning>3 + 4 = 7.<answer>7</answer>")],
        good=[FIRST_COMPLETION, completion("<reasoning>3 + 4 = 7.</reasoning><answer>7</answer>")],
    ),
    "empty_tag": Case(
        bad=[FIRST_COMPLETION, completion("<reasoning> </reasoning><answer>7</answer>")],
        good=[FIRST_COMPLETION, completion("<answer>7</answer>")],
    ),
    "answer_missing": Case(
        bad=[FIRST, trace(answer="7")], good=[FIRST, trace(answer="8")],
        template=GEMMA_LIKE.replace("{{ m.content }}", "{{ m.content | replace('7', '8') }}"),
    ),
    "prompt_trained": Case(
        bad=[FIRST_CHAT, chat("What is 3 + 4?", "\nSeven.")], good=[FIRST_CHAT, chat("What is 3 + 4?", "Seven.")],
        template=GEMMA_LIKE,
    ),
    "too_long": Case(bad=[FIRST, trace(step=LONG)], good=[FIRST, trace()], settings={"data": {"max_length": 48}}),
    "beyond_positions": Case(
        bad=[FIRST, trace(step=LONG)], good=[FIRST, trace(step=LONG)],
        model=ModelFacts(vocabulary=1024, positions=48), good_model=ModelFacts(vocabulary=1024, positions=512),
    ),
    "outside_vocabulary": Case(
        bad=[FIRST_COMPLETION, completion("<answer>7</answer>")], good=[FIRST_COMPLETION, completion("7")],
        model=ModelFacts(vocabulary=767, positions=512),
    ),
    "overlap_exact": Case(
        bad=[FIRST, trace("What is 3 + 4?")], good=[FIRST, trace("What is 3 - 4?")], asked=[question("What is 3 + 4?")],
    ),
    "overlap_normalised": Case(
        bad=[FIRST, trace("what IS  3 + 4")], good=[FIRST, trace("What is 3 - 4?")], asked=[question("What is 3 + 4?")],
    ),
    "overlap_ngram": Case(
        bad=[FIRST, trace(f"Once upon a time {STORY}. How many are left?")],
        good=[FIRST, trace(f"{' '.join(STORY.split()[:12])}. How many are left?")],
        asked=[question(f"{STORY}. How many apples does Mia have?")],
    ),
    "truncated": Case(
        bad=[FIRST_CHAT, chat("Hello.", "Hello.", LONG, "Thank you.")], good=[FIRST_CHAT, chat("Hello.", "Hello.")],
        settings=SMALL,
    ),
    "cut_inside": Case(bad=[FIRST, trace(step=LONG)], good=[FIRST, trace()], settings=SMALL),
    "duplicate": Case(bad=[trace(), FIRST, trace()], good=[trace(), FIRST], line=3),
    "near_duplicate": Case(
        bad=[trace(STORY, step=STORY), trace(STORY, step=f"{STORY} today")], good=[trace(STORY, step=STORY), FIRST],
    ),
}  # fmt: skip


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


def write_lines(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def found_in(records, case: Case, template: str | None, model: ModelFacts, folder: Path) -> list[Finding]:
    path = write_lines(folder / "my.jsonl", records)
    evaluation = {"enabled": False}
    if case.asked:
        evaluation = {"evalset": str(write_lines(folder / "asked.jsonl", case.asked))}
    raw = {"evaluation": evaluation, **case.settings}
    raw["data"] = {"dataset": str(path), **raw.get("data", {})}
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
    for rule in RULES.values():
        assert all((rule.finds, rule.because, rule.fix, rule.example)), rule.name
    assert [name for name, rule in RULES.items() if not rule.refuses] == [
        "truncated", "cut_inside", "duplicate", "near_duplicate",
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_spoken_of_by_its_rule_alone_with_count_and_line(name, tmp_path):
    findings = bad_findings(name, tmp_path)
    assert [(finding.rule, finding.count) for finding in findings] == [(name, 1)], findings
    assert findings[0].first == f"{tmp_path / 'my.jsonl'}:{CASES[name].line}"
    assert findings[0].seen


@pytest.mark.parametrize("name", CASES)
def test_its_repaired_twin_passes_every_rule(name, tmp_path):
    case = CASES[name]
    template = case.good_template or case.template
    assert found_in(case.good, case, template, case.good_model or case.model, tmp_path) == []


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.refuses])
def test_a_broken_rule_that_refuses_ends_with_exit_3_the_count_and_the_line(name, tmp_path):
    with pytest.raises(InputError) as caught:
        rules.refuse(bad_findings(name, tmp_path))
    assert caught.value.exit_code == 3
    assert caught.value.problem.startswith(f"{name}: 1 x ")
    assert f"first {tmp_path / 'my.jsonl'}:{CASES[name].line}: " in caught.value.problem
    assert caught.value.fix == RULES[name].fix


@pytest.mark.parametrize("name", [*rules.EXAMPLE_CHECKS, *rules.TEXT_CHECKS])
def test_without_its_rule_the_bad_file_would_pass(name, tmp_path, monkeypatch):
    """Each file is caught by its rule and by nothing else, so a rule that is switched off is missed by the tests above."""
    for checks in (rules.EXAMPLE_CHECKS, rules.TEXT_CHECKS):
        monkeypatch.delitem(checks, name, raising=False)
    if name == "lone_surrogate":  # nothing else can be asked about a text that cannot be encoded
        with pytest.raises((UnicodeEncodeError, TypeError)):
            bad_findings(name, tmp_path)
    else:
        assert bad_findings(name, tmp_path) == []


def test_several_broken_rules_are_said_together_and_only_warnings_refuse_nothing(tmp_path):
    records = [FIRST, trace("What is <eos>?"), trace(answer="7\x07"), trace(answer="7\x07")]
    findings = found_in(records, Case(bad=[], good=[]), None, ModelFacts(vocabulary=1024, positions=512), tmp_path)
    assert [(finding.rule, finding.count) for finding in findings] == [
        ("control_character", 2), ("control_token", 1), ("duplicate", 1),
    ]  # fmt: skip
    with pytest.raises(InputError, match="breaks 2 rules") as caught:
        rules.refuse(findings)
    assert "duplicate" not in caught.value.problem
    rules.refuse([finding for finding in findings if not finding.refuses])


def test_a_warning_is_said_and_the_run_goes_on(tmp_path, caplog):
    path = write_lines(tmp_path / "my.jsonl", [trace(), FIRST, trace()])
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


@pytest.mark.parametrize("texts", [("3 + 4", "3 - 4"), ("1,600 men", "1.600 men"), ("x^2", "x 2"), ("5 %", "5")])
def test_another_sign_or_number_is_another_question(texts):
    assert overlap.fold(texts[0]) != overlap.fold(texts[1])


@pytest.mark.parametrize(
    "texts",
    [("How many?", "how  MANY"), ("twenty-five", "twenty five"), ("1,600", "1600"), ("“Ｈi”, he said", "hi he said")],
)
def test_case_spaces_and_punctuation_make_no_other_question(texts):
    assert overlap.fold(texts[0]) == overlap.fold(texts[1])
