"""From a sample to token ids and a mask of what is trained: what the assistant says and the token that ends it, no more.

Under a chat template the whole conversation is one text, tokenised as transformers does it; what is trained is found by
where each token stands in that text. Plain, every turn is tokenised apart, so that no token can hold parts of two.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import Data
from tunix_rt.data.template import PLAIN, Template, TemplateRefusal, choose_template, conversation_text
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import Sample, Turn
from tunix_rt.errors import InputError

__all__ = [
    "Example",
    "Ids",
    "Mask",
    "Rendered",
    "Style",
    "TemplateRefusal",
    "completion_text",
    "prompt_ids",
    "render",
    "render_batch",
    "style_of",
]

# Turns of the assistant up to which the conversation is written anew for each; where the long way is the only one; and
# for how many turns of a longer conversation it is still done. The work of the long way grows with the square.
WRITTEN_ANEW, WRITTEN_ANEW_AT_MOST, PROBES = 64, 256, 16

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One rendered sample. `trained[i]` says whether token i is a target of the loss."""

    ids: Ids
    trained: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered(Example):
    """An example, and what the rules want to know about how it was made."""

    prompt_tokens: int
    """Tokens before the first thing the assistant says, counted over the prompt by itself and not from the mask."""
    ends: tuple[int, ...]
    """Where the token that ends each turn of the assistant stands; -1 for a turn that has none."""
    reasoning_end: int
    """Tokens up to and including the closing tag of the reasoning; 0 when there is none."""
    answer_end: int
    melted: bool
    """A token holds characters of the prompt and of what is said, or the prompt alone would be tokenised otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """All that decides how a sample is written and what of it is trained."""

    template: Template
    system_instruction: str | None = None
    completion_only_loss: bool = True
    reasoning_tag: str = "reasoning"
    answer_tag: str = "answer"

    @property
    def sha256(self) -> str:
        said = (self.system_instruction, self.completion_only_loss, self.reasoning_tag, self.answer_tag)
        return hashlib.sha256(json.dumps([self.template.sha256, *said]).encode()).hexdigest()


def style_of(data: Data, tokenizer: Tokenizer, *, today: date | None = None) -> Style:
    """The style that the settings ask for. `today` as in `choose_template`."""
    return Style(
        template=choose_template(data.chat_template, tokenizer, today=today),
        system_instruction=data.system_instruction,
        completion_only_loss=data.completion_only_loss,
        reasoning_tag=data.reasoning_tag,
        answer_tag=data.answer_tag,
    )


def completion_text(sample: Sample, style: Style) -> str:
    """What the model is to say last: the steps of a trace, one per line, then its answer; else the assistant's last turn."""
    if not sample.steps:
        return next((turn.text for turn in reversed(sample.turns) if turn.role == "assistant"), "")
    steps = "\n".join(sample.steps)
    return f"<{style.reasoning_tag}>{steps}</{style.reasoning_tag}>" + _answer_text(sample, style)


def _answer_text(sample: Sample, style: Style) -> str:
    return "" if sample.answer is None else f"<{style.answer_tag}>{sample.answer}</{style.answer_tag}>"


def prompt_ids(prompt: str, tokenizer: Tokenizer, style: Style) -> list[int]:
    """What generation is given: the tokens that stand before the completion of this prompt in training."""
    return conversation_ids((Turn(role="user", text=prompt),), tokenizer, style)


def conversation_ids(said: tuple[Turn, ...], tokenizer: Tokenizer, style: Style) -> list[int]:
    """The same for a conversation whose next turn is the assistant's."""
    turns = _with_instruction(said, style)
    if style.template.name == PLAIN:
        return [*tokenizer.prefix, *tokenizer.encode(_lines(turns))]
    try:
        text = conversation_text(style.template, tokenizer, turns, add_generation_prompt=True)
    except TemplateRefusal as error:
        raise _refused(error, style) from error
    return tokenizer.encode_conversation(text)


def render(sample: Sample, tokenizer: Tokenizer, style: Style) -> Rendered:
    """The sample as tokens. A conversation that the template does not take is an InputError."""
    [rendered] = render_batch([sample], tokenizer, style)
    if isinstance(rendered, TemplateRefusal):
        raise _refused(rendered, style)
    return rendered


def _refused(refusal: TemplateRefusal, style: Style) -> InputError:
    return InputError(
        f"{style.template.source}: the chat template does not take this conversation: {refusal.words}",
        fix="put the turns in the order the template wants, or name another: --set data.chat_template=chatml (or plain)",
    )


def render_batch(samples: Sequence[Sample], tokenizer: Tokenizer, style: Style) -> list[Rendered | TemplateRefusal]:
    """Every sample as tokens, or the reason why the template cannot write it. Raises for no single sample."""
    how = _plain_batch if style.template.name == PLAIN else _template_batch
    return how(samples, tokenizer, style)


def _turns(sample: Sample, style: Style) -> tuple[Turn, ...]:
    turns = _with_instruction(sample.turns, style)
    return (*turns, Turn(role="assistant", text=completion_text(sample, style))) if sample.steps else turns


def _with_instruction(turns: tuple[Turn, ...], style: Style) -> tuple[Turn, ...]:
    """The turns after the system instruction. One system turn is all a template takes, so where the sample has its own,
    the instruction comes first in it, then a blank line."""
    if not style.system_instruction:
        return turns
    if turns and turns[0].role == "system":
        both = f"{style.system_instruction}\n\n{turns[0].text}"
        return (replace(turns[0], text=both), *turns[1:])
    return (Turn(role="system", text=style.system_instruction), *turns)


# --- what is trained -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Said:
    """Tokens `first` to `last`, exclusive: one turn of the assistant. `end` is its end token, or -1."""

    first: int
    last: int
    end: int


def _rendered(
    ids: Sequence[int],
    said: Sequence[_Said],
    style: Style,
    *,
    prompt_tokens: int,
    closed: tuple[int, int],
    melted: bool = False,
) -> Rendered:
    trained = np.full(len(ids), not style.completion_only_loss, dtype=np.bool_)
    for turn in said:
        trained[turn.first : turn.last] = True
    trained[:1] = False  # the first token of a row has nothing before it to predict it from
    return Rendered(
        ids=np.array(ids, dtype=np.int32),
        trained=trained,
        prompt_tokens=prompt_tokens,
        ends=tuple(turn.end for turn in said),
        reasoning_end=closed[0],
        answer_end=closed[1],
        melted=melted,
    )


def _closing_characters(said: str, sample: Sample, style: Style) -> tuple[int, int]:
    """Where in the text `said` the closing tags of reasoning and answer end; 0 for one that is not there."""
    if not sample.steps:
        return 0, 0
    answer, closing = _answer_text(sample, style), f"</{style.reasoning_tag}>"
    start = said.rfind(answer) if answer else -1
    reasoning = said.rfind(closing, 0, start if start >= 0 else len(said))
    return reasoning + len(closing) if reasoning >= 0 else 0, start + len(answer) if start >= 0 else 0


def _starts(encoding: Any) -> list[int]:
    """The character at which each token begins, in rising order: `bisect_left(starts, stop)` tokens begin before `stop`."""
    return [start for start, _ in encoding.offsets]


# --- plain -----------------------------------------------------------------------------------------------------------


def _lines(turns: Sequence[Turn]) -> str:
    return "".join(f"{turn.text}\n" for turn in turns)


def _pieces(turns: Sequence[Turn]) -> Iterator[tuple[str, bool]]:
    """Texts that are tokenised apart, and whether the assistant says them: what lies between its turns is one text."""
    asked: list[Turn] = []
    for turn in turns:
        if turn.role != "assistant":
            asked.append(turn)
            continue
        if asked:
            yield _lines(asked), False
        yield turn.text, True
        asked = []
    if asked:
        yield _lines(asked), False


def _plain_batch(samples: Sequence[Sample], tokenizer: Tokenizer, style: Style) -> list[Rendered | TemplateRefusal]:
    pieces = [list(_pieces(_turns(sample, style))) for sample in samples]
    encodings = iter(tokenizer.encode_batch([text for of in pieces for text, _ in of], conversations=False))
    result: list[Rendered | TemplateRefusal] = []
    for sample, texts in zip(samples, pieces, strict=True):
        ids, said, closed = [*tokenizer.prefix], [], (0, 0)
        prompt_tokens = len(tokenizer.prefix)
        for place, (text, is_said) in enumerate(texts):
            encoding = next(encodings)
            if place == 0 and not is_said:
                prompt_tokens += len(encoding)
            start = len(ids)
            ids += encoding.ids
            if is_said:
                starts = _starts(encoding) if sample.steps else []
                reasoning, answer = (
                    at and start + bisect_left(starts, at) for at in _closing_characters(text, sample, style)
                )
                closed = (reasoning, answer)
                said.append(_Said(first=start, last=len(ids) + 1, end=len(ids)))
                ids.append(tokenizer.eos_id)
        result.append(_rendered(ids, said, style, prompt_tokens=prompt_tokens, closed=closed))
    return result


# --- a chat template -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Written:
    """A whole conversation, and from which character to which the assistant speaks, the end token included."""

    text: str
    said: list[tuple[int, int]]


def _template_batch(samples: Sequence[Sample], tokenizer: Tokenizer, style: Style) -> list[Rendered | TemplateRefusal]:
    written = [_write(_turns(sample, style), tokenizer, style.template) for sample in samples]
    texts = [one.text for one in written if isinstance(one, _Written)]
    encodings = iter(tokenizer.encode_batch(texts, conversations=True))
    alone: dict[str, list[int]] = {}
    return [
        one if isinstance(one, TemplateRefusal) else _read(one, next(encodings), sample, tokenizer, style, alone)
        for sample, one in zip(samples, written, strict=True)
    ]


def _write(turns: Sequence[Turn], tokenizer: Tokenizer, template: Template) -> _Written | TemplateRefusal:
    if not turns or turns[0].role == "assistant":
        return TemplateRefusal("nothing is said before the assistant speaks")
    try:
        text = conversation_text(template, tokenizer, turns)
        spans = _spans(text, turns, tokenizer, template)
    except TemplateRefusal as error:
        return TemplateRefusal(error.words)  # without the frames that the raised one keeps alive
    except InputError as error:
        return TemplateRefusal(error.problem)
    return _Written(text, spans)


def _spans(text: str, turns: Sequence[Turn], tokenizer: Tokenizer, template: Template) -> list[tuple[int, int]]:
    """`_span` of every turn of the assistant. Each writes the conversation anew, so long ones are walked through once
    and `_span` is asked about some of the turns alone, the first and the last among them."""
    said = [at for at, turn in enumerate(turns) if turn.role == "assistant"]
    if len(said) > WRITTEN_ANEW:
        walked = _walked(
            text, [turns[at].text for at in said], _opening(turns[: said[0]], tokenizer, template), template
        )
        asked = [place * (len(said) - 1) // (PROBES - 1) for place in range(PROBES)]
        if walked and all(walked[place] == _span(text, turns, said[place], tokenizer, template) for place in asked):
            return walked
        if len(said) > WRITTEN_ANEW_AT_MOST:
            raise TemplateRefusal(
                f"the assistant speaks {len(said):,} times, and over {WRITTEN_ANEW_AT_MOST} are taken only where each is "
                "written word for word between the same two marks, which no text spells out; split the conversation"
            )
    return [_span(text, turns, at, tokenizer, template) for at in said]


def _opening(turns: Sequence[Turn], tokenizer: Tokenizer, template: Template) -> str:
    """What the template adds to `turns` so that the assistant speaks; empty when it adds nothing, or rewrites them."""
    shown = conversation_text(template, tokenizer, turns)
    prompt = conversation_text(template, tokenizer, turns, add_generation_prompt=True)
    return prompt.removeprefix(shown) if prompt.startswith(shown) else ""


def _walked(text: str, said: Sequence[str], opening: str, template: Template) -> list[tuple[int, int]] | None:
    """Where each of `said` stands in `text` between `opening` and the end token, or None where there is any doubt."""
    end, spans, stop = template.end_token, [], 0
    if not opening or not end:
        return None
    for words in said:
        opened = text.find(opening, stop)
        start = opened + len(opening)
        closed = text.find(end, start)
        if opened < 0 or closed < 0 or text[start:closed].strip() != words.strip():
            return None
        stop = closed + len(end)
        spans.append((start, stop))
    return spans


def _span(text: str, turns: Sequence[Turn], at: int, tokenizer: Tokenizer, template: Template) -> tuple[int, int]:
    """From which character to which turn `at` is said in `text`, its end token included.

    What generation is given for this turn, and what it should say then, must be how the whole conversation goes. What a
    template writes after the end token of its last turn is not asked for.
    """
    prompt = conversation_text(template, tokenizer, turns[:at], add_generation_prompt=True)
    shown = text if at == len(turns) - 1 else conversation_text(template, tokenizer, turns[: at + 1])
    stop = len(shown)
    if template.end_token and (end := shown.rfind(template.end_token, len(prompt))) >= 0:
        stop = end + len(template.end_token)
    if not (shown.startswith(prompt) and text.startswith(shown[:stop])):
        raise TemplateRefusal(
            "it rewrites a conversation that goes on, so what is trained would not be what is generated; "
            "--set data.chat_template=chatml (or plain) does not"
        )
    return len(prompt), stop


def _read(
    written: _Written, encoding: Any, sample: Sample, tokenizer: Tokenizer, style: Style, alone: dict[str, list[int]]
) -> Rendered:
    """The mask, from where the tokens stand. `alone` remembers how the ends of prompts are tokenised by themselves."""
    ids, starts = encoding.ids, _starts(encoding)
    said: list[_Said] = []
    closed, melted, prompt_tokens = (0, 0), False, len(ids)
    for start, stop in written.said:
        first, last = bisect_left(starts, start), bisect_left(starts, stop)
        ends = last > first and ids[last - 1] == style.template.end_id
        straddled = _stretches_beyond(encoding, first - 1, start) or (
            not ends and _stretches_beyond(encoding, last - 1, stop)
        )
        control, tail = _prompt_alone(written.text[:start], starts, ids[:first], tokenizer, alone)
        melted |= straddled or tail != ids[control:first]
        if not said:
            prompt_tokens = control + len(tail)
        said.append(_Said(first=first, last=last, end=last - 1 if ends else -1))
        at = _closing_characters(written.text[start:stop], sample, style)
        reasoning, answer = (place and bisect_left(starts, start + place) for place in at)
        closed = (reasoning, answer)
    return _rendered(ids, said, style, prompt_tokens=prompt_tokens, closed=closed, melted=melted)


def _stretches_beyond(encoding: Any, token: int, stop: int) -> bool:
    return token >= 0 and encoding.token_to_chars(token)[1] > stop


def _prompt_alone(
    prompt: str, starts: list[int], ids: list[int], tokenizer: Tokenizer, alone: dict[str, list[int]]
) -> tuple[int, list[int]]:
    """Where the last control token of the prompt stands, and the prompt's tokens from there on, by itself.

    A control token cuts the text, so only what follows the last one can differ: a word or two, the same in every sample.
    """
    control = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in tokenizer.control_ids), 0)
    tail = prompt[starts[control] if control else 0 :]
    if (known := alone.get(tail)) is None:
        known = alone[tail] = tokenizer.encode_conversation(tail)
    return control, known
