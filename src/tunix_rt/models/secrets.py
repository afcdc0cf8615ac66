"""Words without secrets: tokens of the hub must reach no message, no log and no run folder."""

import os
import re
from collections.abc import Mapping
from typing import Any

from tunix_rt.errors import ConfigError

SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "WANDB_API_KEY", "KAGGLE_KEY")
SHORTEST_SECRET = 6
"""A shorter value is no secret: it would be struck out of words that merely contain it."""

NAMES = {
    "model": ("model_name_or_path", "tokenizer_name_or_path"),
    "data": ("dataset",),
    "evaluation": ("evalset",),
}
"""Settings, by section, that name something to be found."""

_PATTERNS = (
    (re.compile(r"(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"\b(hf_|api_org_)[A-Za-z0-9]{16,}"), r"\1***"),
    (re.compile(r"(\w+://)[^/\s@]+@"), r"\1***@"),  # https://user:token@host
    # Links to stored files are signed: whoever has one can fetch the file.
    (re.compile(r"(?i)([?&](?:[\w-]*token|[\w-]*signature|api_?key|key-pair-id|policy|sig)=)[^&\s\"')]+"), r"\1***"),
)


def redacted(text: str) -> str:
    """`text` with every hub token, password in an address and signature of a link replaced by `***`.

    What the variables above hold is replaced whatever it looks like."""
    for secret in (os.environ.get(name, "").strip() for name in SECRET_VARIABLES):
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, "***")
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


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
