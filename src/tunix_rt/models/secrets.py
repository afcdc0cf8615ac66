"""Words without secrets: tokens of the hub must reach no message, no log and no run folder."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tunix_rt.errors import ConfigError

SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY", "KAGGLE_KEY")
SECRET_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "APIKEY", "PAT"})
"""A variable with one of these between its underscores holds a secret, whoever reads it."""
SHORTEST_SECRET, SHORTEST_OF_OTHERS = 6, 12
"""A shorter value is no secret: it would be struck out of words that merely contain it. The second is for variables that only
sound like one."""

NAMES = {
    "model": ("model_name_or_path", "tokenizer_name_or_path"),
    "data": ("dataset",),
    "evaluation": ("evalset",),
}
"""Settings, by section, that name something to be found."""

_IN_WORDS = (re.compile(r"(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***")
"""Of a header. In the text of a person it may be two plain words."""
_PATTERNS = (
    (re.compile(r"\b(hf_|api_org_)[A-Za-z0-9]{16,}"), r"\1***"),
    (re.compile(r"\b(gh[a-z]_|github_pat_|AKIA|sk-|KGAT_)[A-Za-z0-9_-]{16,}"), r"\1***"),
    (re.compile(r"(?<=\w)(://)[^/\s@]+@"), r"\1***@"),  # https://user:token@host
    # The same without its scheme. A name begins where a word does; behind `:` or `/`, after the first dot or dash of it.
    (re.compile(r"((?<![\w.:/-])|(?<=[:/])\w*+[.-])[\w.-]++:[^/\s@:]{3,}+@(?=[\w.-])"), r"\1***@"),
    # Links to stored files are signed: whoever has one can fetch the file.
    (
        re.compile(
            r"(?i)([?&](?:[\w-]*(?:token|signature|secret|key)|passw(?:or)?d|key-pair-id|policy|sig)=)"
            r"[^&\s\"')]+"
        ),
        r"\1***",
    ),
)


def redacted(text: str) -> str:
    """`text` with every hub token, password in an address and signature of a link replaced by `***`.

    What variables of the environment hold whose name says so is replaced whatever it looks like."""
    return _without(text, (_IN_WORDS, *_PATTERNS))


def _without(text: str, patterns: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for secret in _held_by_variables():
        text = text.replace(secret, "***")
    for pattern, instead in patterns:
        text = pattern.sub(instead, text)
    return text


def _held_by_variables() -> list[str]:
    """The longest first: one may be part of another. A path is where a secret lies, and no secret itself."""
    found = []
    for name, value in os.environ.items():
        least = SHORTEST_SECRET if name in SECRET_VARIABLES else SHORTEST_OF_OTHERS
        named = name in SECRET_VARIABLES or not SECRET_WORDS.isdisjoint(name.upper().split("_"))
        if named and len(value.strip()) >= least and not value.strip().startswith(("/", "~", "./")):
            found.append(value.strip())
    return sorted(found, key=len, reverse=True)


def refuse_secrets(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a ConfigError for the first setting, as `section.name`, that holds a secret: settings are written down.

    To be asked before a run folder is opened. Nothing of the value is repeated."""
    for section, values in settings.items():
        for name, value in values.items():
            if isinstance(value, str) and _without(value, _PATTERNS) != value:
                raise ConfigError(
                    f"{section}.{name} holds what looks like a token or a password, and settings are written into the run",
                    fix="take it out; a token of the hub goes into HF_TOKEN, or `hf auth login`",
                )


def one_line(error: BaseException) -> str:
    """What an error says, without secrets, in one line of at most 300 characters."""
    return redacted(" ".join(str(error).split()))[:300]


def refuse_addresses(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a ConfigError for the first setting, as `section.name`, that is an address where a name belongs.

    To be asked before a run folder is opened: an address may carry a password, and the settings are written down there."""
    for section, names in NAMES.items():
        for name in names:
            refuse_address(f"{section}.{name}", settings.get(section, {}).get(name))


def refuse_address(what: str, name: str | None) -> None:
    """The same for one name. Nothing of it but its scheme is repeated."""
    if name and "://" in name:
        scheme = redacted(name.partition("://")[0])[-20:]
        raise ConfigError(
            f"{what} takes a name or a path, not an address ({scheme}://...)",
            fix="give the hub's owner/name, the key of what is shipped, or the path of a file or folder",
        )
