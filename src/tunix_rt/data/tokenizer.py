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
    try:
        content = path.read_bytes()
        inner = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:
        raise InputError(f"{path} is not a tokenizer: {str(error)[:200]}", fix="fetch the tokenizer again") from error
    inner.no_truncation()
    inner.no_padding()
    eos_id = _special_id(folder, inner, "eos_token")
    if eos_id is None:
        raise InputError(f"{folder} names no end-of-sequence token", fix="add `eos_token` to its tokenizer_config.json")
    bos_id = _special_id(folder, inner, "bos_token")
    added = list(inner.encode("", add_special_tokens=True).ids)
    pad_id = _special_id(folder, inner, "pad_token")
    return Tokenizer(
        folder=folder,
        inner=inner,
        prefix=(bos_id,) if bos_id is not None and bos_id in added else (),
        eos_id=eos_id,
        pad_id=eos_id if pad_id is None else pad_id,
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _special_id(folder: Path, inner: Any, role: str) -> int | None:
    """Id of `eos_token`, `bos_token` or `pad_token`: by its text in tokenizer_config.json, else its id in config.json."""
    text = _read(folder / "tokenizer_config.json").get(role)
    if isinstance(text, dict):
        text = text.get("content")
    if isinstance(text, str) and (found := inner.token_to_id(text)) is not None:
        return int(found)
    number = _read(folder / "config.json").get(f"{role}_id")
    if isinstance(number, list) and number:
        number = number[0]
    return number if isinstance(number, int) and inner.id_to_token(number) is not None else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}", fix="fetch the tokenizer again") from error
    return value if isinstance(value, dict) else {}
