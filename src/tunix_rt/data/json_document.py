"""JSON read strictly, and a JSON document item by item: its text is held, its records are not."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

RECORD_KEYS = frozenset(
    ("messages", "conversations", "steps", "prompt", "completion", "response", "input", "output", "question", "answer")
)
"""Keys whose list of objects is part of one record. A list of objects under any other key is a list of records."""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a value")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:60]!r} is given twice")
    return found


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_no_key_twice)
"""A key given twice and NaN are errors."""
_SPACE = re.compile(r"[ \t\n\r]*")


class _Cursor:
    """A place in a JSON text, moving forward. All that can be wrong with the text is a JSONDecodeError."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches anywhere
        return self.text[self.at : self.at + 1]

    def take(self, wanted: str) -> str:
        """The next character, which must be one of `wanted`."""
        found = self.peek()
        if not found or found not in wanted:
            raise self.wrong(f"expected {' or '.join(wanted)}")
        self.at += 1
        return found

    def key(self) -> str:
        """The key of a member of an object; its value comes next."""
        if self.peek() != '"':
            raise self.wrong("expected a key in double quotes")
        key = str(self.value())
        self.take(":")
        return key

    def value(self) -> Any:
        self.peek()
        try:
            value, self.at = DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise self.wrong(str(error)) from error
        return value

    def items(self) -> Iterator[tuple[int, Any]]:
        """The items of a list, each with the place where it begins."""
        self.take("[")
        if self.peek() == "]":
            self.take("]")
            return
        while True:
            self.peek()
            start = self.at
            yield start, self.value()
            if self.take(",]") == "]":
                return

    def wrong(self, words: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(words, self.text, self.at)


def is_document(head: bytes) -> bool:
    """Whether what begins with `{` is one object around a list of records, and not the first line of JSONL."""
    line, _, rest = head.partition(b"\n")
    if rest.strip():
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)
            return False  # a whole value in the first line, and more lines
    cursor = _Cursor(head.decode("utf-8", "ignore"))
    try:
        cursor.take("{")
        while True:
            key = cursor.key()
            if cursor.peek() == "[":
                opened = cursor.at
                cursor.take("[")
                if cursor.peek() == "{":
                    return key not in RECORD_KEYS
                cursor.at = opened
            cursor.value()
            cursor.take(",")
    except json.JSONDecodeError:
        return False


def records_of(text: str) -> Iterator[tuple[int, Any]]:
    """Items of a list of objects, or of the one list of objects in an object, each with the line where it begins."""
    line, counted = 1, 0
    for start, value in _listed(_Cursor(text)):
        line, counted = line + text.count("\n", counted, start), start
        yield line, value


def _listed(cursor: _Cursor) -> Iterator[tuple[int, Any]]:
    """Items of the one list of records of a document, each with the place where it begins."""
    if cursor.peek() == "{":
        yield from _listed_in_object(cursor)
    else:
        yield from cursor.items()
    if cursor.peek():
        raise cursor.wrong("more after the end of the document; JSONL begins with a whole object in its first line")


def _listed_in_object(cursor: _Cursor) -> Iterator[tuple[int, Any]]:
    keys: set[str] = set()
    records_in = None
    cursor.take("{")
    while True:
        key = cursor.key()
        if key in keys:
            raise cursor.wrong(f"the key {key[:60]!r} is given twice")
        keys.add(key)
        if cursor.peek() == "[":
            for place, (start, value) in enumerate(cursor.items()):
                if isinstance(value, dict) and records_in is None and place == 0:
                    records_in = key
                if records_in == key:
                    yield start, value
                elif isinstance(value, dict):
                    but = f"the records are under {records_in[:60]!r}" if records_in else "it begins with no object"
                    raise cursor.wrong(f"an object in the list under {key[:60]!r}, but {but}")
        else:
            cursor.value()
        if cursor.take(",}") == "}":
            return
