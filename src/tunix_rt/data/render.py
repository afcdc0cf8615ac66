"""From a sample to token ids and a loss mask: the assistant's turns and the token that ends each are trained.

With a chat template, the conversation is one text, tokenized as in transformers, and the mask follows from the offsets of
the tokens. Plain, every turn is tokenized separately, so that no token spans two turns.
"""

import hashlib
import json
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import groupby
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import Data
from tunix_rt.data.records import Sample, Turn
from tunix_rt.data.template import PLAIN, Template, TemplateRefusal, choose_template, conversation_text
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.errors import InputError

RENDERED_ANEW, MOST_RENDERED_ANEW, PROBES = 64, 256, 16
"""Assistant turns up to which the conversation is rendered once for each; up to which it is where no other way works; and
the number of turns of a longer conversation that are checked so. Rendering for each turn is quadratic."""

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Item = TypeVar("Item")


class Computed(Sequence[Item]):
    """A sequence whose items are computed on access; a slice is a list."""

    __slots__ = ()

    @abstractmethod
    def item(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self.item(one) for one in range(*index.indices(len(self)))]
        return self.item(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One rendered sample. `trained` is the loss mask: whether token i is a target."""

    ids: Ids
    trained: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered(Example):
    """An example, with the facts that validation needs."""

    prompt_tokens: int
    """Tokens before the first assistant turn, counted from the prompt alone and not from the mask."""
    ends: tuple[int, ...]
    """Index of the token that ends each assistant turn; -1 for a turn without one."""
    reasoning_end: int
    """Tokens up to and including the closing tag of the reasoning; 0 when there is none."""
    answer_end: int
    straddled: bool
    """A token spans prompt and completion, or the prompt alone would be tokenized differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Everything that determines how a sample is rendered and masked."""

    template: Template
    system_instruction: str | None = None
    completion_only_loss: bool = True
    reasoning_tag: str = "reasoning"
    answer_tag: str = "answer"

    @property
    def sha256(self) -> str:
        settings = (self.system_instruction, self.completion_only_loss, self.reasoning_tag, self.answer_tag)
        return hashlib.sha256(json.dumps([self.template.sha256, *settings]).encode()).hexdigest()


def style_of(data: Data, tokenizer: Tokenizer, *, today: date | None = None) -> Style:
    """The style of the settings. `today` as in `choose_template`."""
    return Style(
        template=choose_template(data.chat_template, tokenizer, today=today),
        system_instruction=data.system_instruction,
        completion_only_loss=data.completion_only_loss,
        reasoning_tag=data.reasoning_tag,
        answer_tag=data.answer_tag,
    )


def completion_text(sample: Sample, style: Style) -> str:
    """The last completion: the steps of a trace, one per line, then its answer; else the assistant's last turn."""
    if not sample.steps:
        return next((turn.text for turn in reversed(sample.turns) if turn.role == "assistant"), "")
    steps = "\n".join(sample.steps)
    return f"<{style.reasoning_tag}>{steps}</{style.reasoning_tag}>" + _answer_text(sample, style)


def _answer_text(sample: Sample, style: Style) -> str:
    return "" if sample.answer is None else f"<{style.answer_tag}>{sample.answer}</{style.answer_tag}>"


def prompt_ids(prompt: str, tokenizer: Tokenizer, style: Style) -> list[int]:
    """The prompt of generation: the tokens that precede the completion of this prompt in training."""
    return conversation_ids((Turn(role="user", text=prompt),), tokenizer, style)


def conversation_ids(turns: tuple[Turn, ...], tokenizer: Tokenizer, style: Style) -> list[int]:
    """`prompt_ids` of a conversation whose next turn is the assistant's."""
    turns = _with_instruction(turns, style)
    if style.template.name == PLAIN:
        return [*tokenizer.prefix, *tokenizer.encode(_lines(turns))]
    try:
        text = conversation_text(style.template, tokenizer, turns, add_generation_prompt=True)
    except TemplateRefusal as error:
        raise _refused(error, style) from error
    return tokenizer.encode_conversation(text)


def render(sample: Sample, tokenizer: Tokenizer, style: Style) -> Rendered:
    """The sample as tokens. A conversation that the template rejects is an InputError."""
    [rendered] = render_batch([sample], tokenizer, style)
    if isinstance(rendered, TemplateRefusal):
        raise _refused(rendered, style)
    return rendered


def _refused(refusal: TemplateRefusal, style: Style) -> InputError:
    return InputError(
        f"{style.template.source}: the chat template rejects this conversation: {refusal.reason}",
        fix="put the turns in the order that the template expects, or choose another: --set data.chat_template=chatml (or plain)",
    )


def render_batch(samples: Sequence[Sample], tokenizer: Tokenizer, style: Style) -> list[Rendered | TemplateRefusal]:
    """Every sample as tokens, or the reason why the template rejects it. No single sample raises."""
    if samples and samples[0].is_text:
        return [*_text_batch(samples, tokenizer, style)]
    render_all = _plain_batch if style.template.name == PLAIN else _template_batch
    return render_all(samples, tokenizer, style)


def _text_batch(samples: Sequence[Sample], tokenizer: Tokenizer, style: Style) -> Iterator[Rendered]:
    """Plain texts, as TRL reads a `text` column: no template, the end-of-sequence token behind, every token a target."""
    for encoding in tokenizer.encode_batch([sample.turns[0].text for sample in samples], conversations=False):
        ids = [*tokenizer.prefix, *encoding.ids, tokenizer.eos_id]
        whole = _rendered(ids, [_Span(first=0, last=len(ids), end=-1)], style, prompt_tokens=0, closed=(0, 0))
        yield replace(whole, ends=())


def _turns(sample: Sample, style: Style) -> tuple[Turn, ...]:
    turns = _with_instruction(sample.turns, style)
    return (*turns, Turn(role="assistant", text=completion_text(sample, style))) if sample.steps else turns


def _with_instruction(turns: tuple[Turn, ...], style: Style) -> tuple[Turn, ...]:
    """The turns with the system instruction. Templates take one system turn: in a sample that has one, the instruction is
    put before its text and a blank line."""
    if not style.system_instruction:
        return turns
    if turns and turns[0].role == "system":
        both = f"{style.system_instruction}\n\n{turns[0].text}"
        return (replace(turns[0], text=both), *turns[1:])
    return (Turn(role="system", text=style.system_instruction), *turns)


# --- the loss mask ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Span:
    """Tokens `first` to `last`, exclusive: one assistant turn. `end` is its end token, or -1."""

    first: int
    last: int
    end: int


def _rendered(
    ids: Sequence[int], spans: Sequence[_Span], style: Style, *, prompt_tokens: int, closed: tuple[int, int],
    straddled: bool = False,
) -> Rendered:  # fmt: skip
    trained = np.full(len(ids), not style.completion_only_loss, dtype=np.bool_)
    for turn in spans:
        trained[turn.first : turn.last] = True
    trained[:1] = False  # nothing precedes the first token of a row, so nothing predicts it
    return Rendered(
        ids=np.array(ids, dtype=np.int32),
        trained=trained,
        prompt_tokens=prompt_tokens,
        ends=tuple(turn.end for turn in spans),
        reasoning_end=closed[0],
        answer_end=closed[1],
        straddled=straddled,
    )


def _closing_characters(text: str, sample: Sample, style: Style) -> tuple[int, int]:
    """Where the closing tags of reasoning and answer end in `text`; 0 for a missing one."""
    if not sample.steps:
        return 0, 0
    answer, closing = _answer_text(sample, style), f"</{style.reasoning_tag}>"
    start = text.rfind(answer) if answer else -1
    reasoning = text.rfind(closing, 0, start if start >= 0 else len(text))
    return reasoning + len(closing) if reasoning >= 0 else 0, start + len(answer) if start >= 0 else 0


def _starts(encoding: Any) -> list[int]:
    """The first character of each token, ascending: `bisect_left(starts, stop)` tokens begin before `stop`."""
    return [start for start, _ in encoding.offsets]


# --- plain -----------------------------------------------------------------------------------------------------------


def _lines(turns: Sequence[Turn]) -> str:
    return "".join(f"{turn.text}\n" for turn in turns)


def _pieces(turns: Sequence[Turn]) -> Iterator[tuple[str, bool]]:
    """Texts that are tokenized separately, and whether each is an assistant turn; the turns between two are one text."""
    for is_reply, group in groupby(turns, key=lambda turn: turn.role == "assistant"):
        if is_reply:
            yield from ((turn.text, True) for turn in group)
        else:
            yield _lines([*group]), False


def _plain_batch(samples: Sequence[Sample], tokenizer: Tokenizer, style: Style) -> list[Rendered | TemplateRefusal]:
    pieces = [list(_pieces(_turns(sample, style))) for sample in samples]
    encodings = iter(tokenizer.encode_batch([text for of in pieces for text, _ in of], conversations=False))
    result: list[Rendered | TemplateRefusal] = []
    for sample, texts in zip(samples, pieces, strict=True):
        ids, spans, closed = [*tokenizer.prefix], [], (0, 0)
        prompt_tokens = len(tokenizer.prefix)
        for place, (text, is_reply) in enumerate(texts):
            encoding = next(encodings)
            if place == 0 and not is_reply:
                prompt_tokens += len(encoding)
            start = len(ids)
            ids += encoding.ids
            if is_reply:
                starts = _starts(encoding) if sample.steps else []
                reasoning, answer = (
                    at and start + bisect_left(starts, at) for at in _closing_characters(text, sample, style)
                )
                closed = (reasoning, answer)
                spans.append(_Span(first=start, last=len(ids) + 1, end=len(ids)))
                ids.append(tokenizer.eos_id)
        result.append(_rendered(ids, spans, style, prompt_tokens=prompt_tokens, closed=closed))
    return result


# --- a chat template -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Written:
    """A whole conversation, and the characters of each assistant turn, the end token included."""

    text: str
    replies: list[tuple[int, int]]


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
        return TemplateRefusal("no turn precedes the assistant's first")
    try:
        text = conversation_text(template, tokenizer, turns)
        spans = _spans(text, turns, tokenizer, template)
    except TemplateRefusal as error:
        return TemplateRefusal(error.reason)  # without the frames that the raised one keeps alive
    except InputError as error:
        return TemplateRefusal(error.problem)
    return _Written(text, spans)


def _spans(text: str, turns: Sequence[Turn], tokenizer: Tokenizer, template: Template) -> list[tuple[int, int]]:
    """`_span` of every assistant turn. Each renders the conversation anew, so a long one is searched once and `_span`
    checks a sample of its turns, the first and the last among them."""
    replies = [at for at, turn in enumerate(turns) if turn.role == "assistant"]
    if len(replies) > RENDERED_ANEW:
        opening = _opening(turns[: replies[0]], tokenizer, template)
        walked = _walked(text, [turns[at].text for at in replies], opening, template)
        checked = [place * (len(replies) - 1) // (PROBES - 1) for place in range(PROBES)]
        if walked and all(
            walked[place] == _span(text, turns, replies[place], tokenizer, template) for place in checked
        ):
            return walked
        if len(replies) > MOST_RENDERED_ANEW:
            raise TemplateRefusal(
                f"{len(replies):,} assistant turns; more than {MOST_RENDERED_ANEW} are supported only where the template "
                "writes each verbatim between the same two markers, which no text contains; split the conversation"
            )
    return [_span(text, turns, at, tokenizer, template) for at in replies]


def _opening(turns: Sequence[Turn], tokenizer: Tokenizer, template: Template) -> str:
    """The generation prompt that the template adds to `turns`; empty when it adds none, or rewrites them."""
    shown = conversation_text(template, tokenizer, turns)
    prompt = conversation_text(template, tokenizer, turns, add_generation_prompt=True)
    return prompt.removeprefix(shown) if prompt.startswith(shown) else ""


def _walked(text: str, replies: Sequence[str], opening: str, template: Template) -> list[tuple[int, int]] | None:
    """Where each of `replies` is in `text` between `opening` and the end token, or None where that is ambiguous."""
    end, spans, stop = template.end_token, [], 0
    if not opening or not end:
        return None
    for reply in replies:
        opened = text.find(opening, stop)
        start = opened + len(opening)
        closed = text.find(end, start)
        if opened < 0 or closed < 0 or text[start:closed].strip() != reply.strip():
            return None
        stop = closed + len(end)
        spans.append((start, stop))
    return spans


def _span(text: str, turns: Sequence[Turn], at: int, tokenizer: Tokenizer, template: Template) -> tuple[int, int]:
    """First and last character, exclusive, of turn `at` in `text`, its end token included.

    The prompt of generation for this turn, followed by the turn, must be a prefix of the whole conversation. What a
    template writes after the end token of its last turn is not compared.
    """
    prompt = conversation_text(template, tokenizer, turns[:at], add_generation_prompt=True)
    shown = text if at == len(turns) - 1 else conversation_text(template, tokenizer, turns[: at + 1])
    stop = len(shown)
    if template.end_token and (end := shown.rfind(template.end_token, len(prompt))) >= 0:
        stop = end + len(template.end_token)
    if not (shown.startswith(prompt) and text.startswith(shown[:stop])):
        raise TemplateRefusal(
            "it rewrites earlier turns of a longer conversation, so training would differ from generation; "
            "--set data.chat_template=chatml (or plain) does not"
        )
    return len(prompt), stop


def _read(
    written: _Written, encoding: Any, sample: Sample, tokenizer: Tokenizer, style: Style, alone: dict[str, list[int]]
) -> Rendered:
    """The loss mask, from the offsets of the tokens. `alone` caches how the ends of prompts are tokenized by themselves."""
    ids, starts = encoding.ids, _starts(encoding)
    spans: list[_Span] = []
    closed, straddled, prompt_tokens = (0, 0), False, len(ids)
    for start, stop in written.replies:
        first, last = bisect_left(starts, start), bisect_left(starts, stop)
        ends = last > first and ids[last - 1] == style.template.end_id
        straddled |= _ends_after(encoding, first - 1, start) or (not ends and _ends_after(encoding, last - 1, stop))
        control, tail = _prompt_alone(written.text[:start], starts, ids[:first], tokenizer, alone)
        straddled |= tail != ids[control:first]
        if not spans:
            prompt_tokens = control + len(tail)
        spans.append(_Span(first=first, last=last, end=last - 1 if ends else -1))
        at = _closing_characters(written.text[start:stop], sample, style)
        reasoning, answer = (place and bisect_left(starts, start + place) for place in at)
        closed = (reasoning, answer)
    return _rendered(ids, spans, style, prompt_tokens=prompt_tokens, closed=closed, straddled=straddled)


def _ends_after(encoding: Any, token: int, stop: int) -> bool:
    return token >= 0 and encoding.token_to_chars(token)[1] > stop


def _prompt_alone(
    prompt: str, starts: list[int], ids: list[int], tokenizer: Tokenizer, alone: dict[str, list[int]]
) -> tuple[int, list[int]]:
    """Index of the last control token of the prompt, and the tokens of the prompt alone from there on.

    Control tokens split the text, so only what follows the last one can differ: a word or two, the same in every sample.
    """
    control = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in tokenizer.control_ids), 0)
    tail = prompt[starts[control] if control else 0 :]
    if (known := alone.get(tail)) is None:
        known = alone[tail] = tokenizer.encode_conversation(tail)
    return control, known
