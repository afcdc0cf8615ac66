"""Real tokenizers, fetched by hash: what we make of a conversation is what transformers makes of it, token for token."""

import functools

import pytest

from tests.conftest import ROOT
from tests.materials import real_tokenizer
from tests.supervision_checks import chat, shipped_samples, style
from tests.unit.test_view import NASTY, bytes_of
from tunix_rt.config.load import load_config
from tunix_rt.data.records import Sample, Turn
from tunix_rt.data.render import completion_text, prompt_ids, render, render_batch
from tunix_rt.data.template import TemplateRefusal, choose_template, conversation_text
from tunix_rt.data.tokenizer import load_tokenizer, needs_bos
from tunix_rt.errors import InputError

pytestmark = pytest.mark.registry


@pytest.fixture(scope="session")
def ours():
    return functools.cache(lambda name: load_tokenizer(real_tokenizer(name)))


@pytest.fixture(scope="session")
def theirs():
    import transformers

    return functools.cache(lambda name: transformers.AutoTokenizer.from_pretrained(real_tokenizer(name)))


ODD = "é e\u0301 日本 😀\u200d👩 \t½\r\n  two   spaces\n\n\nand 12345 </b> < > & \u2028 {{ x }}"
CONVERSATIONS = {
    "one question": chat("What is 3 + 4?", "7"),
    "told": chat("What is 3 + 4?", "7", system="Be brief."),
    "many turns": chat("a?", "b.", "c?", "d.", "e?", "f."),
    "told, many turns": chat("a?", "b.", "c?", "d.", system="Line one.\n\nLine two. "),
    "white space around": chat("  \n What is it? \n\n", "\t It is \n this. \n ", " \n", "  x"),
    "white space told": chat("x", "y", system="\n  told \n"),
    "unicode": chat(ODD, ODD, ODD[::-1], ODD * 3, system=ODD),
    "a trace": shipped_samples(1)[0],
}
WAYS = [
    ("gemma3", "tokenizer"), ("qwen3", "tokenizer"), ("llama3_2", "tokenizer"), ("mistral_nemo", "tokenizer"),
    ("gemma3", "gemma"), ("gemma2", "gemma"), ("qwen3", "chatml"),
]  # fmt: skip
SERIES = [pytest.param(*way, marks=[] if way == ("gemma3", "tokenizer") else pytest.mark.slow) for way in WAYS]
"""A real tokenizer takes seconds to load twice: by default Gemma 3's alone, and GPT-2's, which has no template."""


def turns_of(sample: Sample, way) -> list[Turn]:
    said = Turn(role="assistant", text=completion_text(sample, way))
    return [*sample.turns, said] if sample.steps else list(sample.turns)


def their_ids(tokenizer, turns, way, *, add_generation_prompt=False) -> list[int]:
    return tokenizer.apply_chat_template(
        [{"role": turn.role, "content": turn.text} for turn in turns],
        chat_template=None if way.template.name == "tokenizer" else way.template.jinja,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
    )


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize(("name", "template"), SERIES)
def test_a_conversation_has_the_tokens_that_transformers_gives_it(ours, theirs, name, template, case):
    tokenizer, way = ours(name), style(ours(name), template)
    turns = turns_of(CONVERSATIONS[case], way)
    for shown in (turns, turns[:-1]):
        for asking in (False, True):
            text = conversation_text(way.template, tokenizer, shown, add_generation_prompt=asking)
            wanted = their_ids(theirs(name), shown, way, add_generation_prompt=asking)
            assert tokenizer.encode_conversation(text) == wanted
    [rendered] = render_batch([CONVERSATIONS[case]], tokenizer, way)
    if isinstance(rendered, TemplateRefusal):
        assert template == "tokenizer" and "rewrites earlier turns" in rendered.reason
        several = (
            sum(turn.role == "assistant" for turn in turns) > 1
        )  # Qwen 3 drops reasoning from all but the last answer
        assert {"qwen3": several, "mistral_nemo": turns[0].role == "system"}[
            name
        ]  # which Mistral moves to the last question
    else:
        assert rendered.ids.tolist() == their_ids(theirs(name), turns, way)


@pytest.mark.parametrize(("name", "template"), SERIES)
def test_every_shipped_trace_has_their_tokens_and_its_answer_alone_is_taught(ours, theirs, name, template):
    tokenizer, way = ours(name), style(ours(name), template, reasoning_tag="think" if name == "qwen3" else "reasoning")
    samples = shipped_samples()[::5]
    for sample, example in zip(samples, render_batch(samples, tokenizer, way), strict=True):
        assert example.ids.tolist() == their_ids(theirs(name), turns_of(sample, way), way)
        asked = their_ids(theirs(name), sample.turns, way, add_generation_prompt=True)
        assert prompt_ids(sample.question, tokenizer, way) == asked == example.ids[: example.prompt_tokens].tolist()
        assert not example.straddled
        said = completion_text(sample, way)
        if (name, template) == ("qwen3", "tokenizer"):  # its template writes the block of its reasoning in its own way
            steps = "\n".join(sample.steps)
            said = f"<think>\n{steps}\n</think>\n\n<answer>{sample.answer}</answer>"
        spell = functools.partial(tokenizer.inner.decode, skip_special_tokens=False)
        assert spell(example.ids[example.trained].tolist()) == said + way.template.end_token
        assert example.ids[example.ends[0]] == way.template.end_id and example.trained[example.ends[0]]
        reasoning, answer = (
            spell(example.ids[example.prompt_tokens : end].tolist())
            for end in (example.reasoning_end, example.answer_end)
        )
        closing = f"</{way.reasoning_tag}>"
        # A token may hold the `<` of the next tag too.
        assert reasoning.rstrip("<\n") == said.partition(closing)[0] + closing and answer == said


@pytest.mark.slow
def test_the_ids_of_the_markers_come_from_the_tokenizer(ours):
    """`<start_of_turn>` is 105 in Gemma 3 and 106 before."""
    for name, start, end in (("gemma3", 105, 106), ("gemma2", 106, 107)):
        tokenizer = ours(name)
        ids = prompt_ids("Hi?", tokenizer, style(tokenizer, "gemma"))
        assert ids[:2] == [2, start] and choose_template("gemma", tokenizer).end_id == end


def test_our_gemma_template_is_gemma_3s_own(ours):
    tokenizer = ours("gemma3")
    for sample in CONVERSATIONS.values():
        one, other = (render(sample, tokenizer, style(tokenizer, name)) for name in ("gemma", "tokenizer"))
        assert one.ids.tolist() == other.ids.tolist() and one.trained.tolist() == other.trained.tolist()


@pytest.mark.slow
def test_qwen3_puts_an_empty_block_before_reasoning_in_other_tags(ours):
    tokenizer = ours("qwen3")
    example = render(shipped_samples(1)[0], tokenizer, style(tokenizer, "auto"))
    said = tokenizer.inner.decode(example.ids[example.trained].tolist(), skip_special_tokens=False)
    assert said.startswith("<think>\n\n</think>\n\n<reasoning>")


@pytest.mark.slow
def test_a_template_of_todays_date_is_written_with_it(ours):
    from datetime import date

    tokenizer = ours("llama3_2")
    template = choose_template("auto", tokenizer, today=date(2024, 7, 26))
    assert "Today Date: 26 Jul 2024\n" in conversation_text(template, tokenizer, [Turn(role="user", text="Hi?")])


@pytest.mark.parametrize(
    ("name", "bos"),
    [
        ("gpt2", ()),
        ("gemma3", (2,)),
        pytest.param("qwen3", (), marks=pytest.mark.slow),
        pytest.param("llama3_2", (128000,), marks=pytest.mark.slow),
    ],
)
def test_a_plain_text_begins_as_in_transformers(ours, theirs, name, bos):
    tokenizer = ours(name)
    assert tokenizer.prefix == bos and needs_bos(tokenizer, "") is bool(bos)
    assert [*tokenizer.prefix, *tokenizer.encode(ODD)] == theirs(name)(ODD).input_ids


@pytest.mark.parametrize("name", ["gemma", "chatml"])
def test_gpt2_has_no_template_and_ours_are_refused(ours, name):
    assert choose_template("auto", ours("gpt2")).name == "plain"
    with pytest.raises(InputError, match="as control tokens"):
        choose_template(name, ours("gpt2"))


@pytest.mark.parametrize("name", ["submission_local_cpu_gpt2", "submission_local_gpu_gpt2"])
def test_every_trace_fits_the_length_of_the_gpt2_configurations(ours, name):
    config = load_config(ROOT / "training" / "configs" / f"{name}.yaml")
    examples = render_batch(shipped_samples(), ours("gpt2"), style(ours("gpt2")))
    assert len(examples) == 550 and max(len(example.ids) for example in examples) <= config.data.max_length


def test_gpt2_gets_no_bos_and_ends_in_its_own_end_of_text(ours):
    tokenizer = ours("gpt2")
    assert tokenizer.prefix == () and tokenizer.eos_id == 50256
    example = render(shipped_samples(1)[0], tokenizer, style(tokenizer))
    assert example.ids[-1] == 50256 and example.trained[-1]


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_every_token_is_shown_byte_for_byte(name, ours):
    tokenizer = ours(name)
    text = NASTY + "  indented\n\n\n<answer>7</answer>"
    assert bytes_of(tokenizer, text).decode() == text
