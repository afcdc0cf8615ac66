"""Which template writes a conversation, how it is run, and what it needs of the tokenizer."""

import json
import pickle
from dataclasses import replace
from datetime import date

import pytest
import tokenizers

from tests.conftest import SHIPPED
from tests.supervision_checks import chat, style, write_chat_tokenizer
from tests.tables import parametrize, tables
from tunix_rt.data import render as rendering
from tunix_rt.data.records import Sample, Turn
from tunix_rt.data.render import prompt_ids, render, render_batch
from tunix_rt.data.template import TemplateRefusal, choose_template, conversation_text
from tunix_rt.data.tokenizer import load_tokenizer, needs_bos
from tunix_rt.errors import InputError
from tunix_rt.evaluate.generate import stop_ids

TURN = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
OWN = (
    "{{ bos_token }}{% for message in messages %}" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [Turn(role="user", text="Hi?")]
ANSWERED = chat("Hi?", "Yes.")


@pytest.fixture
def tokenizer_with(tmp_path):
    """A tokenizer with the control tokens of ChatML and Gemma, and the given template and settings."""
    return lambda template=None, **settings: load_tokenizer(
        write_chat_tokenizer(tmp_path, template=template, **settings)
    )


def spelled(tokenizer, ids):
    return tokenizer.inner.decode(list(ids), skip_special_tokens=False)


def taught(tokenizer, example):
    return spelled(tokenizer, example.ids[example.trained].tolist())


# --- the choice ------------------------------------------------------------------------------------------------------


def test_auto_is_the_tokenizers_own_template_and_plain_where_it_has_none(tokenizer_with):
    bare = tokenizer_with()
    assert (choose_template("auto", bare).name, choose_template("auto", bare).jinja) == ("plain", "")
    chosen = choose_template("auto", tokenizer_with(OWN))
    assert (chosen.name, chosen.jinja, chosen.end_token) == ("tokenizer", OWN, "<|im_end|>")


def test_the_template_in_a_file_of_its_own_wins_over_the_settings(tokenizer_with, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(OWN)
    tokenizer = tokenizer_with("not {{ this }} one")
    assert choose_template("tokenizer", tokenizer).jinja == OWN
    assert choose_template("tokenizer", tokenizer).source == str(tmp_path / "chat_template.jinja")


def test_of_several_templates_the_default_is_taken_and_without_one_the_tokenizer_is_refused(tokenizer_with):
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": OWN}]
    assert choose_template("auto", tokenizer_with(several)).jinja == OWN
    with pytest.raises(InputError, match=r"tokenizer_config.json has chat templates named 'tool_use', and none named"):
        tokenizer_with(several[:1])


def test_the_tokenizers_own_template_is_refused_where_there_is_none(tokenizer_with):
    with pytest.raises(InputError, match="has no chat template") as caught:
        choose_template("tokenizer", tokenizer_with())
    assert "data.chat_template=plain" in caught.value.fix


@pytest.mark.parametrize(("name", "markers"), [("gemma", "<start_of_turn>"), ("chatml", "<|im_start|>")])
def test_our_templates_need_their_control_tokens_and_name_plain_as_the_way_on(name, markers):
    with pytest.raises(InputError, match="as control tokens") as caught:
        choose_template(name, load_tokenizer(SHIPPED))
    assert markers in caught.value.problem and "data.chat_template=plain" in caught.value.fix


def test_a_marker_that_is_only_a_word_of_the_vocabulary_is_no_control_token(tmp_path):
    raw = json.loads((SHIPPED / "tokenizer.json").read_text())
    raw["model"]["vocab"] |= {"<start_of_turn>": 769, "<end_of_turn>": 770}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    settings = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"lacks <start_of_turn> \(only as word 769\)"):
        choose_template("gemma", load_tokenizer(tmp_path))
    named = settings | {"additional_special_tokens": ["<start_of_turn>", {"content": "<end_of_turn>"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert choose_template("gemma", load_tokenizer(tmp_path)).end_id == 770


# --- what is written -------------------------------------------------------------------------------------------------


def test_chatml_is_written_with_bos_only_where_the_tokenizer_puts_one(tokenizer_with):
    tokenizer = tokenizer_with()
    for known, begin in ((tokenizer, "<bos>"), (replace(tokenizer, prefix=()), "")):
        text = conversation_text(choose_template("chatml", known), known, ANSWERED.turns, add_generation_prompt=True)
        assert text == (
            f"{begin}<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>assistant\n"
        )


def test_gemma_puts_the_system_turn_before_the_first_question_and_trims(tokenizer_with):
    tokenizer = tokenizer_with()
    briefed = chat(" Hi? ", " Yes.\n", "So?", system="Be brief.")
    text = conversation_text(choose_template("gemma", tokenizer), tokenizer, briefed.turns, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
        "<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("roles", [("user", "user"), ("assistant", "user"), ("user", "system", "assistant")])
def test_gemma_refuses_turns_that_do_not_alternate(tokenizer_with, roles):
    tokenizer = tokenizer_with()
    sample = Sample(turns=tuple(Turn(role=role, text="x") for role in roles))
    [refusal] = render_batch([sample], tokenizer, style(tokenizer, "gemma"))
    assert isinstance(refusal, TemplateRefusal)


def test_a_template_is_run_as_transformers_runs_it(tokenizer_with):
    template = (
        "  {% for message in messages %}\n"
        "    {% if message.role == 'system' %}\n"
        "      {% continue %}\n"
        "    {% endif %}\n"
        "{{ message | tojson }}{{ tools is none }}{{ documents is none }}{{ unk_token }}\n"
        "    {% generation %}\n"
        "<|im_start|>{{ message.content }}<|im_end|>\n"
        "    {% endgeneration %}\n"
        "  {% endfor %}\n"
        "{{ strftime_now('%d %b %Y') }}\n"
    )
    tokenizer = tokenizer_with(template)
    chosen = choose_template("auto", tokenizer, today=date(2024, 7, 26))
    turns = [Turn(role="system", text="no"), Turn(role="user", text="<é>&'")]
    assert conversation_text(chosen, tokenizer, turns) == (
        '{"role": "user", "content": "<é>&\'"}TrueTrue<unk>\n<|im_start|><é>&\'<|im_end|>\n26 Jul 2024'
    )


def test_the_date_is_part_of_a_template_only_where_the_template_asks_for_it(tokenizer_with):
    first, later = date(2026, 1, 1), date(2026, 1, 2)
    asking = tokenizer_with("{{ strftime_now('%d %b') }}" + OWN)
    assert choose_template("auto", asking, today=first).sha256 != choose_template("auto", asking, today=later).sha256
    assert choose_template("auto", asking).today == date.today()
    silent = tokenizer_with(OWN)
    assert choose_template("auto", silent, today=first) == choose_template("auto", silent, today=later)


# --- templates that cannot be used -----------------------------------------------------------------------------------


@parametrize("template", "words")
def test_a_template_that_cannot_be_used_is_refused_with_its_file(tokenizer_with, tmp_path, template, words):
    with pytest.raises(InputError, match=words) as caught:
        choose_template("auto", tokenizer_with(template))
    assert str(tmp_path / "tokenizer_config.json") in caught.value.problem


def test_what_a_template_says_about_one_conversation_is_kept_and_the_others_are_written(tokenizer_with):
    template = "{% if messages | length > 2 %}{{ raise_exception('two turns at most') }}{% endif %}" + OWN
    tokenizer = tokenizer_with(template)
    long = chat("Hi?", "Yes.", "So?", "No.")
    shown = render_batch([ANSWERED, long, ANSWERED], tokenizer, style(tokenizer, "auto"))
    assert [getattr(one, "reason", None) for one in shown] == [None, "two turns at most", None]
    assert shown[0].ids.tolist() == shown[2].ids.tolist()
    with pytest.raises(InputError, match="rejects this conversation: two turns at most"):
        render(long, tokenizer, style(tokenizer, "auto"))


def test_a_conversation_that_a_template_fails_on_does_not_end_the_batch(tokenizer_with):
    tokenizer = tokenizer_with(OWN.replace("message.role +", "(message.role if loop.index < 3 else 5) +"))
    shown = render_batch([chat("a", "b", "c", "d"), ANSWERED], tokenizer, style(tokenizer, "auto"))
    assert "the chat template fails" in shown[0].reason and shown[1].trained.any()


@pytest.mark.parametrize(
    "template",
    [
        OWN.replace(TURN, TURN.replace("message.content", "('<think>' if loop.last else '') + message.content")),
        OWN.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}"),
    ],
    ids=["earlier turns lose their block", "the prompt opens a block that is not written"],
)
def test_a_template_that_rewrites_a_conversation_is_refused_and_chatml_named(tokenizer_with, template):
    tokenizer = tokenizer_with(template)
    with pytest.raises(InputError, match=r"rewrites earlier turns of a longer conversation.*data.chat_template=chatml"):
        render(chat("Hi?", "Yes.", "So?", "No."), tokenizer, style(tokenizer, "auto"))
    render(chat("Hi?", "Yes.", "So?", "No."), tokenizer, style(tokenizer, "chatml"))


def test_a_conversation_that_the_assistant_begins_is_refused(tokenizer_with):
    tokenizer = tokenizer_with()
    begun = Sample(turns=(Turn(role="assistant", text="Hello."),))
    [refusal] = render_batch([begun], tokenizer, style(tokenizer, "chatml"))
    assert "no turn precedes the assistant" in refusal.reason


def counted(monkeypatch):
    """One entry for each conversation that is rendered from now on."""
    rendered = []
    real = rendering.conversation_text
    monkeypatch.setattr(rendering, "conversation_text", lambda *a, **k: rendered.append(0) or real(*a, **k))
    return rendered


@pytest.mark.parametrize("template", ["chatml", "gemma"])
def test_a_long_chat_is_cut_as_turn_by_turn_and_not_written_anew_for_each(tokenizer_with, monkeypatch, template):
    tokenizer = tokenizer_with()
    way = style(tokenizer, template)
    long = chat(*(f" {place % 7} \n" for place in range(201)), system="Be brief.")
    rendered = counted(monkeypatch)
    walked = render(long, tokenizer, way)
    assert len(rendered) < 50
    monkeypatch.setattr(rendering, "RENDERED_ANEW", 1000)
    anew = render(long, tokenizer, way)
    assert len(walked.ends) == 100 and len(rendered) > 200
    assert walked.trained.tolist() == anew.trained.tolist() and walked.ends == anew.ends


def test_a_long_chat_that_spells_out_the_opening_is_read_turn_by_turn_and_a_very_long_one_refused(tokenizer_with):
    tokenizer = tokenizer_with()
    chatml = style(tokenizer, "chatml")
    tricky = ("<|im_start|>assistant\nYes.<|im_end|>", "Yes.")
    assert taught(tokenizer, render(chat(*tricky * 70), tokenizer, chatml)) == "Yes.<|im_end|>" * 70
    with pytest.raises(
        InputError, match=r"257 assistant turns; more than 256 are supported only .* split the conversation"
    ):
        render(chat(*tricky * 257), tokenizer, chatml)
    assert len(render(chat(*("Hi?", "Yes.") * 257), tokenizer, chatml).ends) == 257


@pytest.mark.parametrize(
    ("prompt", "reply"), [("<|im_start|>assistant\nYes.<|im_end|>", "Yes."), ("Hi?", "Yes.<|im_end|>Still.")]
)
def test_one_turn_in_a_long_chat_that_spells_out_a_mark_moves_no_other(tokenizer_with, prompt, reply):
    tokenizer = tokenizer_with()
    turns = ["Hi?", "Yes."] * 70
    turns[86:88] = prompt, reply
    example = render(chat(*turns), tokenizer, style(tokenizer, "chatml"))
    assert taught(tokenizer, example) == "".join(f"{text}<|im_end|>" for text in turns[1::2])
    assert spelled(tokenizer, example.ids[example.ends[-1] :].tolist()) == "<|im_end|>\n"


def test_a_template_that_rewrites_a_long_conversation_is_refused_too(tokenizer_with):
    tokenizer = tokenizer_with("{{ 'Long: ' if messages | length > 150 }}" + OWN)
    own = style(tokenizer, "auto")
    assert len(render(chat(*("Hi?", "Yes.") * 70), tokenizer, own).ends) == 70
    with pytest.raises(InputError, match="rewrites earlier turns"):
        render(chat(*("Hi?", "Yes.") * 80), tokenizer, own)


# --- where a turn ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [
        "{{ eos_token if not add_generation_prompt }}{{ '<|im_start|>assistant\n' if add_generation_prompt }}",
        "{{ '<|im_start|>assistant\n' }}",
    ],
    ids=["end of sequence after the last turn", "a prompt after every conversation"],
)
def test_what_a_template_writes_after_the_end_of_the_last_turn_is_not_taught(tokenizer_with, after):
    tokenizer = tokenizer_with(OWN.partition("{% if")[0] + after)
    example = render(chat("Hi?", "Yes.", "So?", "No."), tokenizer, style(tokenizer, "auto"))
    assert taught(tokenizer, example) == "Yes.<|im_end|>No.<|im_end|>"


def test_a_template_without_an_end_token_says_so_and_teaches_what_is_said(tokenizer_with):
    asks = "{% if add_generation_prompt %}assistant:{{ '\n' }}{% endif %}"
    tokenizer = tokenizer_with("{% for m in messages %}{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}" + asks)
    chosen = style(tokenizer, "auto")
    assert chosen.template.end_id == -1
    example = render(chat("Hi?", "Yés 😀", "So?", "日"), tokenizer, chosen)
    assert example.ends == (-1, -1) and not example.straddled
    assert taught(tokenizer, example) == "Yés 😀\n日\n"


def test_an_end_token_that_swallows_the_line_break_after_it_is_taught(tmp_path):
    write_chat_tokenizer(tmp_path, template=OWN)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["rstrip"] = token["content"].startswith("<|")
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(tmp_path)
    example = render(chat("Hi?", "Yes.", "So?", "No."), tokenizer, style(tokenizer, "auto"))
    assert taught(tokenizer, example) == "Yes.<|im_end|>No.<|im_end|>"
    assert not example.straddled and -1 not in example.ends


def test_an_answer_is_over_at_the_end_of_a_sequence_and_at_the_end_of_a_turn(tokenizer_with):
    tokenizer = tokenizer_with()
    assert stop_ids(tokenizer, style(tokenizer, "plain")) == [tokenizer.eos_id]
    assert stop_ids(tokenizer, style(tokenizer, "chatml")) == [
        tokenizer.eos_id,
        tokenizer.inner.token_to_id("<|im_end|>"),
    ]
    endless = tokenizer_with("{% for m in messages %}{{ m.role }}: {{ m.content }}; {% endfor %}")
    assert stop_ids(endless, style(endless, "auto")) == [tokenizer.eos_id]


# --- the border between prompt and answer ----------------------------------------------------------------------------


def test_a_token_of_prompt_and_answer_is_reported_and_not_taught(tmp_path):
    write_chat_tokenizer(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_tokens(["\n\n"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    chatml = style(tokenizer, "chatml")
    example = render(chat("Hi?", "\nYes."), tokenizer, chatml)
    assert example.straddled and taught(tokenizer, example) == "Yes.<|im_end|>"
    assert not render(chat("Hi?", "Yes.\n\n"), tokenizer, chatml).straddled


def test_a_prompt_that_is_tokenised_otherwise_alone_is_reported(tmp_path):
    """GPT-2's rule for white space: two line breaks at the end of a text are one word, before a letter they are two."""
    write_chat_tokenizer(
        tmp_path,
        template=OWN.replace("assistant\n{% endif", "assistant\n\n{% endif").replace(
            "message.role + '\n'", "message.role + '\n\n'"
        ),
    )
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["model"]["vocab"]["ĊĊ"] = 773
    raw["model"]["merges"].append(["Ċ", "Ċ"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(tmp_path)
    own = style(tokenizer, "auto")
    assert prompt_ids("Hi?", tokenizer, own)[-1] == 773
    example = render(ANSWERED, tokenizer, own)
    assert example.straddled and 773 not in example.ids
    assert taught(tokenizer, example) == "Yes.<|im_end|>"


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def bare_folder(tmp_path, **settings):
    """The shipped tokenizer, without the post-processor that puts BOS before a text."""
    raw = json.loads((SHIPPED / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"} | settings))
    return tmp_path


@parametrize("settings", "model_type", "prefix", "needed")
def test_bos_stands_before_a_plain_text_where_tokenizer_or_model_want_it(
    tmp_path, settings, model_type, prefix, needed
):
    tokenizer = load_tokenizer(bare_folder(tmp_path, **settings), model_type)
    assert (tokenizer.prefix, tokenizer.adds_bos) == (tuple(prefix), bool(prefix))
    assert needs_bos(tokenizer, model_type) is needed
    assert tokenizer.bos_token == settings.get("bos_token")


def test_the_model_names_bos_where_the_tokenizer_does_not(tmp_path):
    write_chat_tokenizer(tmp_path, bos_token=None)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 2}))
    tokenizer = load_tokenizer(tmp_path, "gemma")
    assert tokenizer.prefix == (2,)
    for name in ("plain", "gemma", "chatml"):
        assert prompt_ids("Hi?", tokenizer, style(tokenizer, name))[0] == 2


def test_special_tokens_may_be_named_in_a_file_of_their_own(tmp_path):
    bare_folder(tmp_path, pad_token="<pad>")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<bos>"}, "eos_token": "<unk>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def test_control_tokens_are_the_special_ones_and_not_the_tags(tokenizer_with):
    listed = tokenizer_with().control_tokens
    assert set(listed) == {
        "<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>",
    }  # fmt: skip


def test_the_hash_of_a_tokenizer_changes_with_what_matters_beside_tokenizer_json(tokenizer_with):
    hashes = [
        tokenizer_with(*own, **settings).sha256
        for own, settings in (
            ((), {}), ((), {"model_max_length": 7}), ((), {"eos_token": "<unk>"}), ((), {"bos_token": "<pad>"}), ((OWN,), {})
        )
    ]  # fmt: skip
    assert hashes[0] == hashes[1] and len(set(hashes)) == 4


def test_a_style_goes_to_another_process_and_every_part_of_it_changes_its_hash(tokenizer_with):
    tokenizer = tokenizer_with(OWN)
    first = style(tokenizer, "auto")
    assert pickle.loads(pickle.dumps(first)) == first  # noqa: S301  (our own bytes)
    others = [
        style(tokenizer, "chatml"), style(tokenizer, "plain"), replace(first, system_instruction="x"),
        replace(first, completion_only_loss=False), replace(first, reasoning_tag="t"), replace(first, answer_tag="t"),
    ]  # fmt: skip
    assert len({one.sha256 for one in (first, *others)}) == 7


# --- templates of families -------------------------------------------------------------------------------------------

FAMILY_TEMPLATES = tables(__file__)["templates of families"]


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
def test_a_conversation_has_the_tokens_that_transformers_writes_and_ends_at_the_family_s_token(family, tmp_path):
    """A template with the published control tokens of the family, on a small tokenizer that has them."""
    transformers = pytest.importorskip("transformers")
    facts = FAMILY_TEMPLATES[family]
    inner = tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    inner.add_special_tokens(facts["tokens"])
    inner.save(str(tmp_path / "tokenizer.json"))
    known = json.loads((SHIPPED / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known | {"chat_template": facts["template"]}))
    tokenizer, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    chosen = style(tokenizer, "auto")
    messages = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    prompt = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = theirs.apply_chat_template(messages, return_dict=False)
    assert list(prompt_ids("Hi?", tokenizer, chosen)) == prompt
    end = tokenizer.inner.token_to_id(facts["end"])
    example = render(ANSWERED, tokenizer, chosen)
    assert example.ids.tolist() == whole and example.ids[example.trained][-1] == end
    assert stop_ids(tokenizer, chosen) == sorted({tokenizer.eos_id, end}, key=[tokenizer.eos_id, end].index)
