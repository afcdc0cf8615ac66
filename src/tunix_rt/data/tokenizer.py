"""A model's tokenizer, read from its `tokenizer.json` without transformers. Special ids come from its files."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Text to ids and back. `prefix` is what the tokenizer itself puts before a text (Gemma: `<bos>`; GPT-2: nothing)."""

    folder: Path
    inner: Any
    prefix: tuple[int, ...]
    eos_id: int
    pad_id: int
    sha256: str

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without anything added."""
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return str(self.inner.decode(ids, skip_special_tokens=True))

    @property
    def vocab_size(self) -> int:
        return int(self.inner.get_vocab_size(with_added_tokens=True))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`, or an InputError that says which file or token is missing."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            f"no tokenizer.json in {folder}", fix="set model.tokenizer_name_or_path to a folder that has one"
        )
    content, inner = _parse(path)
    inner.encode_special_tokens = True  # `<eos>` spelled out in a trace is text, not the end of it
    inner.no_truncation()
    inner.no_padding()
    eos_id = _special_id(folder, inner, "eos_token")
    if eos_id is None:
        raise InputError(f"{folder} names no end-of-sequence token", fix="add `eos_token` to its tokenizer_config.json")
    pad_id = _special_id(folder, inner, "pad_token")
    table = _read(folder / "config.json").get("vocab_size")
    if pad_id is None or (type(table) is int and pad_id >= table):
        pad_id = eos_id  # padding is never trained and never seen, so any token of the model will do
    return Tokenizer(
        folder=folder,
        inner=inner,
        prefix=_put_before_a_text(inner),
        eos_id=eos_id,
        pad_id=pad_id,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _parse(path: Path) -> tuple[bytes, Any]:
    """Content of the file, and the tokenizer it describes."""
    try:
        content = path.read_bytes()
        return content, tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {str(error)[:200]}", fix="fetch the tokenizer again") from error
    except Exception as error:  # tokenizers raises the bare class; anything else is not about the file
        if type(error) is not Exception:
            raise
        raise InputError(f"{path} is not a tokenizer: {str(error)[:200]}", fix="fetch the tokenizer again") from error


def _put_before_a_text(inner: Any) -> tuple[int, ...]:
    """Ids that the tokenizer's own post-processor puts before a text; those it puts after are no part of a prompt."""
    plain, whole = (list(inner.encode("x", add_special_tokens=added).ids) for added in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return tuple(whole[: next(starts, 0)])


def _special_id(folder: Path, inner: Any, role: str) -> int | None:
    """Id of `eos_token` or `pad_token`: by its text in tokenizer_config.json, else its id in config.json."""
    text = _read(folder / "tokenizer_config.json").get(role)
    if isinstance(text, dict):
        text = text.get("content")
    if isinstance(text, str) and (found := inner.token_to_id(text)) is not None:
        return int(found)
    number = _read(folder / "config.json").get(f"{role}_id")
    if isinstance(number, list) and number:
        number = number[0]
    if type(number) is not int or not 0 <= number < 2**31 or inner.id_to_token(number) is None:
        return None  # `pad_token_id: -1` is what many published configurations say
    return number


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}", fix="fetch the tokenizer again") from error
    return value if isinstance(value, dict) else {}
