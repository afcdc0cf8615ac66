"""A model's tokenizer, loaded from its files without transformers. Special ids come from these files alone."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from tunix_rt.errors import InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.resolve import A_TOKENIZER
from tunix_rt.progress import phase
from tunix_rt.storage import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Text to ids and back. `prefix` are the ids before a plain text (Gemma: `<bos>`; GPT-2: none)."""

    folder: Path
    inner: Any
    prefix: tuple[int, ...]
    eos_id: int
    pad_id: int
    bos_id: int | None
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and the like from the tokenizer's files: the variables of a chat template."""
    control_tokens: tuple[str, ...]
    """Texts that are encoded as one control token in a conversation."""
    control_ids: frozenset[int]
    chat_template: str | None
    """The tokenizer's own chat template, if it has one."""
    chat_template_file: Path | None
    sha256: str
    """Over tokenizer.json and the facts of the files beside it: special tokens, prefix, chat template."""

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_id is None else str(self.inner.id_to_token(self.bos_id))

    @property
    def adds_bos(self) -> bool:
        """Whether a plain text begins with the beginning-of-sequence token."""
        return self.bos_id is not None and self.bos_id in self.prefix

    def encode(self, text: str) -> list[int]:
        """Ids of the text, nothing added; `<eos>` in it is text, not a control token."""
        self.inner.encode_special_tokens = True
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def encode_conversation(self, text: str) -> list[int]:
        """Ids of a rendered conversation: control tokens are parsed, nothing is added."""
        self.inner.encode_special_tokens = False
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str], *, conversations: bool) -> list[Any]:
        """Encodings (ids and offsets) of many texts, on all cores: as `encode_conversation` does, or as `encode`."""
        self.inner.encode_special_tokens = not conversations
        return list(self.inner.encode_batch(texts, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """Text of the ids without bos, eos and padding. Other special tokens stay: an answer tag may be one."""
        around = {self.bos_id, self.eos_id, self.pad_id}
        return str(self.inner.decode([number for number in ids if number not in around], skip_special_tokens=False))

    @property
    def vocab_size(self) -> int:
        return int(self.inner.get_vocab_size(with_added_tokens=True))


def needs_bos(tokenizer: Tokenizer, model_type: str) -> bool:
    """Whether a sequence must begin with the BOS token: the tokenizer adds it, or the model's family needs it.

    Without it a Gemma generates garbage, and no loss curve shows why.
    """
    return tokenizer.adds_bos or _family_needs_bos(model_type)


def _family_needs_bos(model_type: str) -> bool:
    return model_type in FAMILIES and FAMILIES[model_type].needs_bos


@phase("load the tokenizer")
def load_tokenizer(folder: Path, model_type: str = "") -> Tokenizer:
    """The tokenizer in `folder` for a model of `model_type`, or an InputError that names the missing file or token."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"no tokenizer.json in {folder}", fix=A_TOKENIZER)
    content, inner = _parse(path)
    inner.no_truncation()
    inner.no_padding()
    settings, model = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    special = _named_tokens(_read(folder / "special_tokens_map.json")) | _named_tokens(settings)
    _make_control_tokens(inner, [*special.values(), *_more_special_tokens(settings)])
    eos_id, pad_id, bos_id = (_special_id(inner, special, model, f"{role}_token") for role in ("eos", "pad", "bos"))
    if eos_id is None:
        raise InputError(f"{folder} names no end-of-sequence token", fix="add `eos_token` to its tokenizer_config.json")
    vocabulary = model.get("vocab_size")
    if pad_id is None or (type(vocabulary) is int and pad_id >= vocabulary):
        pad_id = eos_id  # padding is neither trained nor attended to, so any token will do
    prefix = _put_before_a_text(inner)
    wanted = settings.get("add_bos_token") is True or _family_needs_bos(model_type)
    if bos_id is not None and bos_id not in prefix and wanted:
        prefix = (bos_id, *prefix)
    named = {eos_id, *((bos_id,) if bos_id is not None else ())}
    control = named | {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    chat_template, chat_template_file = _own_chat_template(folder, settings)
    digest = hashlib.sha256(content).hexdigest()
    facts = [digest, prefix, eos_id, pad_id, bos_id, special, sorted(control), chat_template]
    return Tokenizer(
        folder=folder,
        inner=inner,
        prefix=prefix,
        eos_id=eos_id,
        pad_id=pad_id,
        bos_id=bos_id,
        special_tokens=special,
        control_tokens=tuple(str(inner.id_to_token(number)) for number in sorted(control)),
        control_ids=frozenset(control),
        chat_template=chat_template,
        chat_template_file=chat_template_file,
        sha256=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
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
    """Ids that the tokenizer's post-processor adds before a text; those after it are not part of a prompt."""
    plain, whole = (list(inner.encode("x", add_special_tokens=added).ids) for added in (False, True))
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return tuple(whole[: next(starts, 0)])


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`{"eos_token": "<eos>", ...}`: every setting that is a token, as a string or an object with `content`."""
    more = settings.get("extra_special_tokens")
    both = settings | (more if isinstance(more, dict) else {})
    texts = {name: _text_of(value) for name, value in both.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text}


def _more_special_tokens(settings: dict[str, Any]) -> list[str]:
    lists = (settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens"))
    return [text for listed in lists if isinstance(listed, list) for value in listed if (text := _text_of(value))]


def _text_of(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _make_control_tokens(inner: Any, texts: Sequence[str]) -> None:
    """Make the words of the vocabulary that are configured as special control tokens; no word is added to it."""
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    inner.add_special_tokens([text for text in texts if text not in known and inner.token_to_id(text) is not None])


def _special_id(inner: Any, special: Mapping[str, str], model: dict[str, Any], role: str) -> int | None:
    """Id of `eos_token` and the like: by its text in the tokenizer's settings, else the id in the model's config.json."""
    if role in special and (found := inner.token_to_id(special[role])) is not None:
        return int(found)
    number = model.get(f"{role}_id")
    if isinstance(number, list) and number:
        number = number[0]
    if type(number) is not int or not 0 <= number < 2**31 or inner.id_to_token(number) is None:
        return None  # many published configurations have `pad_token_id: -1`
    return number


def _own_chat_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, Path | None]:
    """The template in `chat_template.jinja`, else in tokenizer_config.json, and its file."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read: {error}", fix="fetch the tokenizer again") from error
    path, found = folder / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(found, list) and found:
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        if "default" not in named:
            raise InputError(
                f"{path} has chat templates named {', '.join(map(repr, named))}, and none named 'default'",
                fix="give the one to use the name `default`",
            )
        found = named["default"]
    if found and not isinstance(found, str):
        raise InputError(f"{path}: chat_template is not a string", fix="fetch the tokenizer again")
    return (found, path) if found else (None, None)


def _read(path: Path) -> dict[str, Any]:
    value = read_json(path, InputError, fix="fetch the tokenizer again") if path.is_file() else {}
    return value if isinstance(value, dict) else {}
