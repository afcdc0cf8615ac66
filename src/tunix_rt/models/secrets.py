"""Redaction: tokens of the hub must not reach a message, a log or a run folder."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tunix_rt.errors import ConfigError

SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY", "KAGGLE_KEY")
SECRET_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "APIKEY", "PAT"})
"""A variable with one of these between its underscores is a secret."""
SHORTEST_SECRET, SHORTEST_OF_OTHERS = 6, 12
"""Shorter values are not redacted: other words contain them. The second is for variables that only have such a name."""

NAMES = {
    "model": ("model_name_or_path", "tokenizer_name_or_path"),
    "data": ("dataset", "validation"),
    "evaluation": ("evalset",),
}
"""Settings, by section, that are names of models, datasets and eval sets."""

_IN_WORDS = (re.compile(r"(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***")
"""In an HTTP header. In prose it may be two plain words."""
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
    """`text` with every hub token, password in a URL and signature of a link replaced by `***`.

    Values of environment variables with the name of a secret are replaced whatever they look like."""
    return _without(text, (_IN_WORDS, *_PATTERNS))


def _without(text: str, patterns: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for secret in _secret_variables():
        text = text.replace(secret, "***")
    for pattern, instead in patterns:
        text = pattern.sub(instead, text)
    return text


def _secret_variables() -> list[str]:
    """Values of secret variables, the longest first: one may be part of another. A path is not a secret."""
    values = []
    for name, value in os.environ.items():
        least = SHORTEST_SECRET if name in SECRET_VARIABLES else SHORTEST_OF_OTHERS
        named = name in SECRET_VARIABLES or not SECRET_WORDS.isdisjoint(name.upper().split("_"))
        if named and len(value.strip()) >= least and not value.strip().startswith(("/", "~", "./")):
            values.append(value.strip())
    return sorted(values, key=len, reverse=True)


def refuse_secrets(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a ConfigError for the first setting, as `section.name`, that contains a secret.

    Call it before a run folder is opened: settings are written there. The error does not repeat the value."""
    for section, values in settings.items():
        for name, value in values.items():
            text = str(value) if isinstance(value, str | tuple | dict) else ""
            if _without(text, _PATTERNS) != text:
                raise ConfigError(
                    f"{section}.{name} contains what looks like a token or a password, and settings are written into the run",
                    fix="remove it; a token of the hub goes into HF_TOKEN, or `hf auth login`",
                )


def one_line(error: BaseException) -> str:
    """The message of an error, redacted, in one line of at most 300 characters."""
    return redacted(" ".join(str(error).split()))[:300]


def refuse_addresses(settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise a ConfigError for the first setting, as `section.name`, that is a URL instead of a name.

    Call it before a run folder is opened: a URL may contain a password, and settings are written there."""
    for section, names in NAMES.items():
        for name in names:
            given = settings.get(section, {}).get(name)
            for one in given if isinstance(given, tuple | dict) else (given,):
                refuse_address(f"{section}.{name}", one)


def refuse_address(what: str, name: str | None) -> None:
    """`refuse_addresses` for one name. The error repeats only the scheme."""
    if name and "://" in name:
        scheme = redacted(name.partition("://")[0])[-20:]
        raise ConfigError(
            f"{what} takes a name or a path, not a URL ({scheme}://...)",
            fix="give the hub's owner/name, the key of what is shipped, or the path of a file or folder",
        )
