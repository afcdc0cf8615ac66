"""An answer on the screen: cut into its parts as it grows, and shown without anything that steers a terminal."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tunix_rt.cli.views.progress import ANSWER, OTHER, REASONING, Parts, StreamPrinter, printable

ANSWERED = "well <reasoning>3 < 4\n</reasoning>\n<answer>7</answer> bye"


def parts() -> Parts:
    return Parts(reasoning_tag="reasoning", answer_tag="answer")


def joined(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one kind as one."""
    found: list[tuple[str, str]] = []
    for kind, piece in pieces:
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + piece)
        else:
            found.append((kind, piece))
    return found


def at_once(text: str) -> list[tuple[str, str]]:
    return list(parts().more(text, whole=True))


snippets = st.sampled_from(
    [
        "<reasoning>", "</reasoning>", "<answer>", "</answer>", "<", "</", "<ans", "<b>", ">", "\ufffd", "3 < 4", "\n",
        "ü", "x",
    ]
)  # fmt: skip
texts = st.lists(snippets, max_size=12).map("".join)


@given(text=texts, cuts=st.lists(st.integers(0, 80)))
def test_a_text_has_the_same_parts_however_it_comes(text, cuts):
    growing = parts()
    pieces = [piece for cut in sorted(cuts) for piece in growing.more(text[:cut])]
    pieces += growing.more(text, whole=True)
    assert joined(pieces) == joined(at_once(text))


@given(text=texts)
def test_nothing_but_the_tags_is_left_out(text):
    said = "".join(piece for _, piece in at_once(text))
    assert said == re.sub(r"</?(?:reasoning|answer)>", "", text)


def test_reasoning_and_answer_are_told_apart():
    assert at_once(ANSWERED) == [
        (OTHER, "well "), (REASONING, "3 < 4\n"), (OTHER, "\n"), (ANSWER, "7"), (OTHER, " bye"),
    ]  # fmt: skip


def test_a_sign_that_is_no_tag_does_not_cut_a_sentence():
    assert at_once("<b>3 < 4</b>") == [(OTHER, "<b>3 < 4</b>")]


def test_the_beginning_of_a_tag_waits_for_the_rest():
    growing = parts()
    assert list(growing.more("so <rea")) == [(OTHER, "so ")]
    assert list(growing.more("so <reasoning")) == []
    assert list(growing.more("so <reasoning>3")) == [(REASONING, "3")]
    assert list(growing.more("so <reasoning>3 <4")) == [(REASONING, " <4")]


def test_the_beginning_of_a_tag_is_shown_when_nothing_more_comes():
    growing = parts()
    assert list(growing.more("so </ans")) == [(OTHER, "so ")]
    assert list(growing.more("so </ans", whole=True)) == [(OTHER, "</ans")]


def test_a_letter_that_is_not_whole_yet_waits():
    growing = parts()
    assert list(growing.more("f\ufffd")) == [(OTHER, "f")]
    assert list(growing.more("fü")) == [(OTHER, "ü")]
    assert list(growing.more("fü\ufffd", whole=True)) == [(OTHER, "\ufffd")]


def test_tags_have_the_names_a_run_gives_them():
    named = Parts(reasoning_tag="think", answer_tag="final")
    assert list(named.more("<think>a</think><final>b</final><answer>", whole=True)) == [
        (REASONING, "a"), (ANSWER, "b"), (OTHER, "<answer>"),
    ]  # fmt: skip


@given(text=st.text())
def test_nothing_that_steers_a_terminal_is_shown(text):
    seen = printable(text)
    assert len(seen) == len(text)
    assert all(letter.isprintable() or letter in "\n\t" for letter in seen)


def test_an_escape_sequence_is_shown_as_a_question_mark():
    assert printable("a\x1b[2Jb\r\x07\u202e\x9b") == "a?[2Jb????"


@pytest.fixture
def spoken(monkeypatch):
    """Say a text letter by letter to a terminal or a pipe; gives what arrived there, and what was said beside it."""
    import rich.console

    def say(text: str, *, terminal: bool, words: str = "") -> tuple[str, str]:
        out, aside = io.StringIO(), io.StringIO()

        def console(stderr: bool = False, **settings: object) -> Console:
            file = aside if stderr else out
            return Console(
                file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=20, **settings
            )

        with monkeypatch.context() as patched:
            patched.setattr(rich.console, "Console", console)
            printer = StreamPrinter(parts())
        for end in range(len(text)):
            printer.update(text[:end])
        printer.update(text, whole=True)
        printer.end(words)
        return out.getvalue(), aside.getvalue()

    return say


def test_on_a_terminal_reasoning_is_dim_and_the_answer_bright(spoken):
    screen, _ = spoken("<reasoning>why</reasoning><answer>7</answer>", terminal=True)
    assert re.findall("\x1b\\[2m(.)\x1b\\[0m", screen) == ["w", "h", "y"]
    assert "\x1b[1m7\x1b[0m" in screen
    assert "reasoning" not in screen and "answer" not in screen


def test_in_a_pipe_there_are_no_styles_and_a_part_begins_a_line(spoken):
    piped, _ = spoken("<reasoning>why</reasoning><answer>7</answer>", terminal=False)
    assert piped == "why\n7\n"


def test_an_answer_arrives_letter_by_letter_as_the_model_wrote_it(spoken):
    text = "[bold]a\tb[/bold] :smile: http://x 12\n  indented, and far longer than the screen is wide   \n\nend"
    assert spoken(text, terminal=False) == (f"{text}\n", "")


def test_why_an_answer_is_not_whole_is_said_beside_it(spoken):
    assert spoken("3 + 4", terminal=False, words="cut off: [no] more") == ("3 + 4\n", "(cut off: [no] more)\n")
