"""What a row says, token by token: its own text, and whether it is trained. For people; nothing trains on what is here."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np

from tunix_rt.data.packing import Row
from tunix_rt.data.readers import read_raw
from tunix_rt.data.tokenize import TRAINED, Recipe, begin, begin_settings, tokenise
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.validation import RULES
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token of a row. `raw` holds its bytes: a character may be split over tokens, and then none of them has text."""

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
        """The token's own text; bytes that are no whole character by their names, `<0xE2>`."""
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
    """`row` as it can be shown. Like the labels, the first token of an example counts as masked: nothing predicts it."""
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
    """The text of `raw`; what is no UTF-8 in it by the names of its bytes."""
    text = raw.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match.group()) - 0xDC00:02X}>", text)


# --- from a token to its bytes ---------------------------------------------------------------------------------------


def _bytes_of(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """How this tokenizer writes its tokens down, read from its decoder: byte-level letters, or words with `▁` for a space.

    One token cannot be given to the decoder itself: it strips the space before a first word, and half a character.
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
            # A word that was added to the vocabulary stands there as it is written.
            if number in added or any(letter not in _BYTE_OF for letter in name):
                return str(name).encode()
            return bytes(_BYTE_OF[letter] for letter in name)
        if "ByteFallback" in kinds and (found := _BYTE_NAME.fullmatch(name)):
            return bytes([int(found[1], 16)])
        for space in spaces:
            name = name.replace(space, " ")
        return str(name).encode()

    return bytes_of


def _decoder_steps(inner: object) -> list[dict[str, Any]]:
    """What the decoder does, in order; empty when the tokenizer has none."""
    decoder = getattr(inner, "decoder", None)
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself if it shows, else the next free above 255."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTE_OF = _byte_letters()


# --- one record of a dataset -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    """One record as a row of its own, and which rules it breaks: (rule, what was seen)."""

    place: str
    row: Row
    broken: tuple[tuple[str, str], ...]


def read_record(recipe: Recipe, number: int) -> RecordRow:
    """Record `number` (from 1) of the dataset, tokenised as a run would. The records before it are read, not tokenised."""
    counted = 0
    for counted, raw in enumerate(islice(read_raw(recipe.dataset), number), start=1):
        if counted < number:
            continue
        begin(*begin_settings(recipe, alone=True))
        part = tokenise([raw])
        if part.failure is not None:
            raise InputError(part.failure[0], fix=part.failure[1])
        place = recipe.dataset.place(raw.file, raw.line)
        broken = tuple((rule, seen) for _, rule, seen in part.broken)
        if not len(part.tokens):
            words = "; ".join(f"{rule}: {seen}" for rule, seen in broken)
            raise InputError(f"{place}: no tokens can be made of it ({words})", fix=RULES[broken[0][0]].fix)
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
