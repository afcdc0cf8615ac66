"""A row token by token, with the text of each and the loss mask. For people; training does not use it."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np

from tunix_rt.config.settings import Data
from tunix_rt.data.packing import Row
from tunix_rt.data.readers import read_raw
from tunix_rt.data.tokenize import TRAINED, Recipe, tokenize
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.validation import RULES
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token of a row. `raw` are its bytes: a character may be split over tokens."""

    position: int
    """In the row, from 0."""
    id: int
    raw: bytes
    control: bool
    trained: bool
    """Whether it is a target of the loss."""
    example: int
    """Of the row, from 1."""

    @property
    def text(self) -> str:
        """The text of the token; bytes that are not a whole character as `<0xE2>`."""
        return spelled(self.raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring tokens of one example that are all trained, or all masked."""

    example: int
    trained: bool
    tokens: tuple[TokenView, ...]

    @property
    def text(self) -> str:
        return spelled(b"".join(token.raw for token in self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    tokens: tuple[TokenView, ...]

    @property
    def trained(self) -> int:
        return sum(token.trained for token in self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each example in the row."""
        return tuple(len(list(group)) for _, group in groupby(self.tokens, key=lambda token: token.example))

    @property
    def spans(self) -> tuple[Span, ...]:
        groups = groupby(self.tokens, key=lambda token: (token.example, token.trained))
        return tuple(
            Span(example=example, trained=trained, tokens=tuple(group)) for (example, trained), group in groups
        )


def view_of(row: Row, tokenizer: Tokenizer) -> RowView:
    """`row` for display. As in the labels, the first token of an example is masked: nothing predicts it."""
    bytes_of = _bytes_of(tokenizer)
    begins = row.positions == 0
    columns = (row.ids, row.trained & ~begins, np.cumsum(begins))
    return RowView(
        tokens=tuple(
            TokenView(
                position=position,
                id=number,
                raw=bytes_of(number),
                control=number in tokenizer.control_ids,
                trained=trained,
                example=example,
            )
            for position, (number, trained, example) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        )
    )


def spelled(raw: bytes) -> str:
    """The text of `raw`; bytes that are not UTF-8 as `<0xE2>`."""
    text = raw.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match.group()) - 0xDC00:02X}>", text)


# --- from a token to its bytes ---------------------------------------------------------------------------------------


def _bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Token id -> bytes, by the kind of the tokenizer's decoder: byte-level letters, or words with `▁` for a space.

    The decoder itself does not work on one token: it strips the space before a first word, and half a character.
    """
    inner = tokenizer.inner
    added = {number: token.content for number, token in inner.get_added_tokens_decoder().items()}
    steps = _decoder_steps(inner)
    kinds = {step["type"] for step in steps}
    spaces = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
    spaces += [
        step["pattern"]["String"]
        for step in steps
        if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
    ]

    def bytes_of(number: int) -> bytes:
        name = inner.id_to_token(number)
        if name is None:
            return f"<id {number}>".encode()
        if number in tokenizer.control_ids:
            return str(name).encode()
        if "ByteLevel" in kinds:
            # A word that was added to the vocabulary is written as it is.
            if number in added or any(letter not in _BYTE_OF for letter in name):
                return str(name).encode()
            return bytes(_BYTE_OF[letter] for letter in name)
        if "ByteFallback" in kinds and (match := _BYTE_NAME.fullmatch(name)):
            return bytes([int(match[1], 16)])
        for space in spaces:
            name = name.replace(space, " ")
        return str(name).encode()

    return bytes_of


def _decoder_steps(inner: object) -> list[dict[str, Any]]:
    """The steps of the decoder, in order; empty when the tokenizer has none."""
    decoder = getattr(inner, "decoder", None)
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letter of each byte in a byte-level vocabulary: itself if it is visible, else the next free one above 255."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_letters()


# --- one record of a dataset -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    """One record as a row, and the rules that it breaks: (rule, what is wrong)."""

    place: str
    row: Row
    broken: tuple[tuple[str, str], ...]


def as_in_a_run(found: RecordRow, data: Data) -> tuple[Row, str]:
    """The row that a run makes of a record, and a line about one that is longer than `data.max_length`."""
    row, limit, length = found.row, data.max_length, len(found.row.ids)
    if length <= limit:
        return row, ""
    becomes = {"error": "a run refuses it", "drop": "a run drops it", "truncate": "truncated here as in a run"}
    if data.on_overflow == "truncate":
        row = Row(ids=row.ids[:limit], trained=row.trained[:limit], positions=row.positions[:limit])
    return row, f"too long: {length:,} tokens, data.max_length is {limit:,}; {becomes[data.on_overflow]}"


def read_record(recipe: Recipe, number: int) -> RecordRow:
    """Record `number` (from 1) of the dataset, tokenized as in a run. The records before it are read, not tokenized."""
    counted = 0
    for counted, raw in enumerate(islice(read_raw(recipe.dataset), number), start=1):
        if counted < number:
            continue
        part = tokenize(recipe, [raw])
        place = recipe.dataset.place(raw.file, raw.line)
        broken = tuple((rule, seen) for _, rule, seen in part.broken)
        if not len(part.tokens):
            reasons = "; ".join(f"{rule}: {seen}" for rule, seen in broken)
            raise InputError(f"{place}: it cannot be tokenized ({reasons})", fix=RULES[broken[0][0]].fix)
        ids = (part.tokens & ~TRAINED).astype(np.int32)
        trained = (part.tokens & TRAINED).astype(np.bool_)
        return RecordRow(
            place=place,
            row=Row(ids=ids, trained=trained, positions=np.arange(len(ids), dtype=np.int32)),
            broken=broken,
        )
    raise InputError(
        f"there is no record {number:,}: {recipe.dataset.key} has {counted:,}", fix=f"give a number from 1 to {counted}"
    )
