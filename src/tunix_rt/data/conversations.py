"""Conversations as records hold them: who speaks and what is said, read strictly. What would be lost is refused by its field."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunix_rt.data.readers import kind_of
from tunix_rt.data.trace import Role, Sample, Turn, as_text

Fields = Mapping[str, Any]


class Wrong(Exception):
    """A field that is wrong and what is wrong with it; `to_sample` adds where."""

    def __init__(self, field: str, words: str) -> None:
        super().__init__(field, words)
        self.field = field
        self.words = words


# --- fields ----------------------------------------------------------------------------------------------------------


def text_of(value: Any, field: str) -> str:
    """Text that says something."""
    try:
        return as_text(value)
    except ValueError as error:
        raise Wrong(field, "missing" if value is None else str(error)) from error


def optional_text(value: Any, field: str) -> str | None:
    """Text, or None where there is none or it is blank: what may be left out may be left empty."""
    if value is None or (type(value) is str and not value.strip()):
        return None
    return text_of(value, field)


# --- conversations ---------------------------------------------------------------------------------------------------

ROLES: Mapping[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
SHAREGPT_ROLES: Mapping[str, Role] = {**ROLES, "human": "user", "gpt": "assistant", "model": "assistant"}
REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    turn: Turn
    reasoning: str | None
    field: str


def _says_nothing(value: Any) -> bool:
    """Parquet gives every message every key; a null, an empty text or an empty list there holds nothing to lose."""
    return value is None or value == "" or value == [] or value == {}


def _message(value: Any, field: str, roles: Mapping[str, Role]) -> Message:
    if type(value) is not dict:
        raise Wrong(field, f"{kind_of(value)}, not an object")
    who, what = ("from", "value") if "from" in value and roles is SHAREGPT_ROLES else ("role", "content")
    role = roles.get(said) if type(said := value.get(who)) is str else None
    if role is None:
        shown = "missing" if said is None else repr(said)[:60]
        raise Wrong(f"{field}.{who}", f"{shown}; the roles are {', '.join(roles)}")
    reasoning = None
    if len(value) > 2:
        for name in value.keys() - {who, what, *REASONING}:
            if not _says_nothing(value[name]):
                raise Wrong(f"{field}.{name[:60]}", "a key that is not understood, and would be lost")
        reasoning = _reasoning(value, field)
    return Message(
        turn=Turn(role=role, text=_content(value.get(what), f"{field}.{what}")), reasoning=reasoning, field=field
    )


def _reasoning(message: Fields, field: str) -> str | None:
    given = [name for name in REASONING if not _says_nothing(message.get(name))]
    if not given:
        return None
    if any(message[name] != message[given[0]] for name in given):
        raise Wrong(f"{field}.{given[1]}", f"the reasoning is given twice, and differs from {given[0]}")
    return text_of(message[given[0]], f"{field}.{given[0]}")


def _content(value: Any, field: str) -> str:
    """The text of a message, which may come in parts."""
    if type(value) is not list:
        return text_of(value, field)
    texts = []
    for number, part in enumerate(value):
        place = f"{field}.{number}"
        if type(part) is not dict:
            raise Wrong(place, f"{kind_of(part)}, not an object")
        if part.get("type") != "text":
            raise Wrong(f"{place}.type", f"{str(part.get('type'))[:60]!r}: only parts of type text can be trained on")
        for name in part.keys() - {"type", "text"}:
            if not _says_nothing(part[name]):
                raise Wrong(f"{place}.{name[:60]}", "a key that is not understood, and would be lost")
        if type(part.get("text")) is not str:
            raise Wrong(f"{place}.text", f"{kind_of(part.get('text'))}, not text")
        texts.append(part["text"])
    return text_of(whole("".join(texts)), field)


def whole(text: str) -> str:
    """Two halves of a surrogate pair that joining brought together are one character, as they are in any file."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def messages_of(value: Any, field: str, roles: Mapping[str, Role] = ROLES) -> list[Message]:
    if type(value) is not list:
        raise Wrong(field, "missing" if value is None else f"{kind_of(value)}, not a list of messages")
    if not value:
        raise Wrong(field, "no message")
    return [_message(message, f"{field}.{number}", roles) for number, message in enumerate(value)]


def conversation(messages: Sequence[Message]) -> Sample:
    """The turns as they are; a last turn of the assistant that shows its reasoning makes a trace."""
    *before, last = messages
    turns = tuple(message.turn for message in before)
    for message in messages:
        if message.reasoning is not None and (message is not last or last.turn.role != "assistant"):
            raise Wrong(f"{message.field}.reasoning", "only the assistant's message at the end may show its reasoning")
    if last.reasoning is None:
        return Sample(turns=(*turns, last.turn))
    if not turns:
        raise Wrong(last.field, "reasoning about nothing: no message comes before it")
    return Sample(turns=turns, steps=(last.reasoning,), answer=last.turn.text)


def with_system(messages: Sequence[Message], value: Any) -> list[Message]:
    """The messages after a system turn that stands beside them in the record; one they have themselves must be the same."""
    text = optional_text(value, "system")
    own = [message for message in messages if message.turn.role == "system"]
    if text is None or [message.turn.text for message in own] == [text]:
        return list(messages)
    if own:
        raise Wrong("system", f"it differs from {own[0].field}, the conversation's own: leave one of them out")
    return [Message(turn=Turn(role="system", text=text), reasoning=None, field="system"), *messages]


def history_of(value: Any) -> list[Turn]:
    """Earlier turns, which Alpaca gives as pairs of a question and its answer."""
    if value is None:
        return []
    if type(value) is not list:
        raise Wrong("history", f"{kind_of(value)}, not a list of [question, answer] pairs")
    turns = []
    for number, pair in enumerate(value):
        field = f"history.{number}"
        if type(pair) is not list or len(pair) != 2:
            raise Wrong(field, "not a pair [question, answer]")
        turns.append(Turn(role="user", text=text_of(pair[0], f"{field}.0")))
        turns.append(Turn(role="assistant", text=text_of(pair[1], f"{field}.1")))
    return turns
