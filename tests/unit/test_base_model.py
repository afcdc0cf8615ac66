"""The embedded model: small, of the architecture it says, and made from text that gives nothing away."""

import hashlib
import json
import re

import pytest

from recipes.base_model.corpus import TAGS, closed_keys, documents
from recipes.dev_reasoning.generate import generate_rows
from tests.conftest import ROOT, SHIPPED
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.plan.shape import shape_of


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return list(documents("test", 1500, closed_keys()))


def test_the_corpus_is_a_function_of_its_seed(corpus):
    assert list(documents("test", 50, closed_keys())) == corpus[:50]
    assert list(documents("other", 50, closed_keys())) != corpus[:50]


def test_no_tag_is_in_the_corpus(corpus):
    assert not [text for text in corpus if any(tag in text for tag in TAGS) or "reasoning" in text or "answer" in text]


def test_no_question_in_the_corpus_is_answered(corpus):
    """A document that asks anything only asks: every line of it is a question or an order."""
    orders = ("Write ", "Sort ")
    asking = [text for text in corpus if "?" in text or any(order in text for order in orders)]
    assert len(asking) > 100
    for text in asking:
        for line in text.splitlines():
            assert line.endswith("?") or line.startswith(orders) or " in this row: " in line, text


def test_no_trace_and_no_held_out_question_is_in_the_corpus(corpus):
    held_out, training = generate_rows()
    prompts = {problem.prompt for _, problem in (*held_out, *training)}
    told = "\n".join(corpus)
    assert not [prompt for prompt in prompts if prompt in told]


def test_held_out_situations_are_passed_over_even_with_other_names():
    """Every (template, operands) of traces and questions is closed, whatever the names and things."""
    held_out, training = generate_rows()
    closed = closed_keys()
    assert all(template.key(problem) in closed for template, problem in (*held_out, *training))
    assert len(closed) == len(held_out) + len(training) == 650
    told = "\n".join(documents("again", 1500, closed))
    for template, problem in held_out:
        if template.name in ("sub_two", "missing_addend", "price_total", "how_many_more"):
            lead = [part for part in re.split(r"(?<=[.?]) ", problem.prompt) if not part.endswith("?")]
            assert not lead or " ".join(lead) not in told


def test_every_kind_of_situation_is_told_and_none_says_why_it_is_worked_so(corpus):
    said = "\n".join(corpus)
    for words in ("twice as many", "each week for", "percent of", "square meters", "are left over", "go on a trip"):
        assert words in said
    assert "We add" not in said and "So " not in said and "matter" not in said


def test_the_shipped_model_is_small_and_is_the_one_its_manifest_names():
    manifest = json.loads((SHIPPED / "manifest.json").read_text())
    weights = (SHIPPED / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == manifest["sha256"]
    assert len(weights) <= 8_000_000
    assert shape_of(json.loads((SHIPPED / "config.json").read_text())).parameters == manifest["parameters"] <= 3_000_000


def test_tags_are_single_tokens_and_digits_stand_alone():
    tokenizer = load_tokenizer(SHIPPED)
    assert all(len(tokenizer.encode(tag)) == 1 for tag in TAGS)
    assert len(tokenizer.encode(" 1234")) == 4
    text = "Tom has 12 pens.\n<reasoning>5 * 6 = 30</reasoning> é 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_recipes_configuration_is_the_shipped_one():
    from recipes.base_model.pretrain import CONFIG

    assert json.loads((SHIPPED / "config.json").read_text()) == CONFIG
    assert load_tokenizer(SHIPPED).vocab_size == 769 <= CONFIG["vocab_size"], "the rest of the rows are unused"
    assert (ROOT / "recipes" / "base_model" / "README.md").is_file()
