"""A row is shown as it is: every token with its own text, and what is trained can be seen without colour too."""

import numpy as np
import pytest
import tokenizers
from rich.cells import cell_len

from tests.conftest import SHIPPED
from tunix_rt.cli.views.data import SAMPLE_HEAD, SAMPLE_TAIL, marks_of, row_lines, text_lines
from tunix_rt.data.packing import Row
from tunix_rt.data.preview import view_of
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer

NASTY = "Häuser 中文字 👍🏽 e\u0301 ❤\ufe0f\n\n\tdef f(x):\r\n    return \u202e\x1b[31mx\x00 🇩🇪 नमस्ते\u200b"
UTF8, ASCII = marks_of("utf-8"), marks_of("ascii")


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return load_tokenizer(SHIPPED)


def row_of(*examples: tuple[list[int], list[int]]) -> Row:
    """Examples of (masked ids, trained ids) in one row."""
    whole = [masked + trained for masked, trained in examples]
    return Row(
        ids=np.array([number for ids in whole for number in ids], dtype=np.int32),
        trained=np.array([i >= len(m) for m, t in examples for i in range(len(m) + len(t))], dtype=np.bool_),
        positions=np.array([i for ids in whole for i in range(len(ids))], dtype=np.int32),
    )


def say(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    return [*tokenizer.prefix, *tokenizer.encode(question)], [*tokenizer.encode(answer), tokenizer.eos_id]


def bytes_of(tokenizer: Tokenizer, text: str) -> bytes:
    ids = tokenizer.encode(text)
    return b"".join(token.raw for token in view_of(row_of((ids, [])), tokenizer).tokens)


# --- the text of a token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Noah has 5 pens.\nHow many?", " two  spaces ", NASTY])
def test_the_texts_of_the_tokens_are_the_text(shipped, text):
    assert bytes_of(shipped, text).decode() == text


def test_a_character_that_is_split_over_tokens_is_shown_by_its_bytes(shipped):
    view = view_of(row_of((shipped.encode("中"), [])), shipped)
    assert [token.text for token in view.tokens] == ["<0xE4>", "<0xB8>", "<0xAD>"]
    assert view.spans[0].text == "中"


def test_control_tokens_are_shown_by_name_and_their_spelling_in_a_text_is_not_one(shipped):
    view = view_of(row_of(([2, *shipped.encode("<eos>")], [1])), shipped)
    assert [token.text for token in view.tokens if token.control] == ["<bos>", "<eos>"]
    assert len(view.tokens) > 3


def test_a_vocabulary_with_byte_fallback_is_read_as_it_decodes(tmp_path):
    """As sentencepiece writes it: `▁` for a space, and bytes where the vocabulary has no character."""
    words = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: i for i, word in enumerate(words)}, [("▁", "a")], byte_fallback=True)
    )
    inner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    steps = tokenizers.decoders
    inner.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    tokenizer = load_tokenizer(tmp_path)
    view = view_of(row_of((tokenizer.encode(" aa 中\n"), [tokenizer.eos_id])), tokenizer)
    assert [token.text for token in view.tokens] == [" a", "a", " ", "<0xE4>", "<0xB8>", "<0xAD>", "\n", "<eos>"]
    assert view.spans[0].text == " aa 中\n"


# --- what is trained -------------------------------------------------------------------------------------------------


def test_the_view_shows_the_labels_the_first_token_of_an_example_is_no_target(shipped):
    view = view_of(row_of(([], [2, 20, 1]), ([2, 21], [22, 1])), shipped)
    assert [token.trained for token in view.tokens] == [False, True, True, False, False, True, True]
    assert [token.example for token in view.tokens] == [1, 1, 1, 2, 2, 2, 2]
    assert view.trained == 4 and view.lengths == (3, 4)
    assert [(span.example, span.trained, span.text) for span in view.spans] == [
        (1, False, "<bos>"), (1, True, "1<eos>"), (2, False, "<bos>2"), (2, True, "3<eos>"),
    ]  # fmt: skip


# --- in a terminal ---------------------------------------------------------------------------------------------------


def drawn(view, *, width=60, marks=UTF8, places=("a.jsonl:1", "a.jsonl:7")) -> list[str]:
    return [line.plain.rstrip() for line in row_lines(view, places=places, width=width, marks=marks)]


def test_without_colour_what_is_trained_is_underlined_and_named(shipped):
    view = view_of(row_of(say(shipped, "How many?\n", "So 7")), shipped)
    assert drawn(view) == [
        "  masked │ <bos> How ·many ?  ⏎", "5 tokens │ 2     328 325   34 202", " trained ┃ S  o  ·7  <eos>",
        "4 tokens ┃ ━  ━  ━━  ━━━━━", "         ┃ 54 82 289 1",
    ]  # fmt: skip


def test_a_terminal_without_unicode_gets_the_same_in_ascii(shipped):
    view = view_of(row_of(say(shipped, NASTY, "·中")), shipped)
    lines = drawn(view, marks=ASCII)
    assert "\n".join(lines).isascii()
    assert any("^^^" in line for line in lines) and any("\\n" in line for line in lines)


def test_the_examples_of_a_packed_row_are_named_where_they_begin(shipped):
    view = view_of(row_of(say(shipped, "One?\n", "1"), say(shipped, "Two?\n", "2")), shipped)
    rules = [line for line in drawn(view) if line.startswith("──")]
    assert [rule.strip("─ ") for rule in rules] == [
        f"example 1: a.jsonl:1, {view.lengths[0]} tokens", f"example 2: a.jsonl:7, {view.lengths[1]} tokens",
    ]  # fmt: skip
    assert {cell_len(rule) for rule in rules} == {60}


@pytest.mark.parametrize("width", [20, 41, 110])
def test_wide_and_hostile_letters_break_neither_the_columns_nor_the_terminal(width):
    """Letters of the text stand above their ids, no line is longer than the terminal, and no control character gets out."""
    tokenizer = load_tokenizer(SHIPPED)
    words = ["中文字", "👍🏽", "e\u0301", "\u0301", "❤\ufe0f", "🇩🇪", "\x1b[31mx", "\u202e", "中" * 100]
    tokenizer.inner.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    view = view_of(row_of(say(tokenizer, NASTY, NASTY + " ".join(words))), tokenizer)
    assert set(words) <= {token.text for token in view.tokens}
    lines = list(row_lines(view, places=["x"], width=width, marks=UTF8))
    assert all(letter.isprintable() for line in lines for letter in line.plain)
    assert all(cell_len(line.plain.rstrip()) <= width for line in lines)
    at = 0
    while at < len(lines):
        group = lines[at : at + (3 if "┃" in lines[at].plain else 2)]
        assert len({cell_len(line.plain) for line in group}) == 1, [line.plain for line in group]
        at += len(group)
    assert "…" in "".join(line.plain for line in lines)


def test_a_line_break_in_the_text_breaks_the_line(shipped):
    view = view_of(row_of(say(shipped, "One\nTwo\n\nTen", "1")), shipped)
    shown = [line.split("│ ")[1] for line in drawn(view) if "│" in line][::2]
    assert [line.count("⏎") for line in shown] == [1, 1, 1, 0]
    assert all(line.endswith("⏎") for line in shown[:3])


def test_a_long_sample_is_shortened_and_says_so(shipped):
    long = "x" * (SAMPLE_HEAD + SAMPLE_TAIL + 2_000)
    view = view_of(row_of(say(shipped, "Short?\n", long)), shipped)
    lines = [line.plain for line in text_lines(view, width=80, marks=UTF8)]
    assert lines[0] == " masked │ <bos>Short?" and lines[1].startswith("trained ┃ xxx")
    text = "".join(line.split(" ┃ ")[-1] for line in lines)
    assert f"[… {2_000 + len('<eos>'):,} characters left out …]" in text
    assert text.count("x") + len("<eos>") == SAMPLE_HEAD + SAMPLE_TAIL and text.endswith("x<eos>")
