"""A folder as one commit of a model repository on the hub. The token is the client's; it reaches no file and no message."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tunix_rt.errors import ConfigError, InputError, TunixError
from tunix_rt.models.secrets import one_line, redacted, refuse_address

CARD = "README.md"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
REFUSED = {
    401: ("refuses the token", LOG_IN),
    403: ("forbids this token to write there", "use a token that may, or another owner"),
    404: ("knows no such owner", "check the spelling of OWNER"),
}


def refuse_repository(name: str) -> None:
    refuse_address("the repository", name)
    if not REPOSITORY.fullmatch(name):
        raise ConfigError(f"{redacted(name)!r} is no repository of the hub", fix="give OWNER/NAME")


def upload(name: str, files: Mapping[str, Path], card: str, *, private: bool, message: str) -> str:
    """Create the repository if there is none, and commit `files` with the model card. The address of the commit.

    A failed upload leaves the repository as it was: all files are one commit."""
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.get_token() is None:
        raise InputError("the hub needs a token for an upload, and there is none", fix=LOG_IN)
    api, add = huggingface_hub.HfApi(), huggingface_hub.CommitOperationAdd
    added = [*(add(path, str(file)) for path, file in files.items()), add(CARD, card.encode())]
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.repo_info(name).private:
            fix = "make it private on its page on the hub, push to another name, or leave --private out"
            raise InputError(f"--private: {name} exists and is public", fix=fix)
        return str(api.create_commit(name, added, commit_message=message).commit_url)
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, TunixError):
            raise
        raise _refusal(error, name) from None


def _refusal(error: BaseException, name: str) -> InputError:
    while error.__cause__ is not None and getattr(error, "response", None) is None:
        error = error.__cause__  # the client wraps what happens to a file
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in REFUSED:
        problem, fix = REFUSED[status]
        whose = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "`hf auth login`"
        return InputError(f"{name} was not uploaded: the hub {problem} ({status}; {whose})", fix=fix)
    why = f"{status or type(error).__name__}: {redacted(one_line(error))}"
    return InputError(
        f"{name} was not uploaded ({why})", fix="check the network, and push again: the commit is made at the end"
    )
