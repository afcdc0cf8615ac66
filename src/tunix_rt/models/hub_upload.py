"""A folder as one commit of a model repository on the hub. The token is the client's; it reaches no file and no message."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_rt.errors import ConfigError, InputError, TunixError
from tunix_rt.models.secrets import one_line, redacted, refuse_address

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
CARD = "README.md"


def refuse_repository(name: str) -> None:
    """ConfigError for a name that is not OWNER/NAME."""
    from huggingface_hub import errors, utils

    refuse_address("the repository", name)
    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        raise ConfigError(f"{redacted(name)!r} is no repository: {one_line(error)}", fix="give OWNER/NAME") from None
    if name.count("/") != 1:
        raise ConfigError(f"{name!r} is no repository: its owner is missing", fix="give OWNER/NAME")


def upload(name: str, files: Mapping[str, Path], card: str, *, private: bool, message: str) -> str:
    """Create the repository if there is none, and commit `files` with the model card. The address of the commit.

    A failed upload leaves the repository as it was: all files are one commit."""
    import huggingface_hub
    from huggingface_hub import errors

    if huggingface_hub.get_token() is None:
        raise InputError("the hub needs a token for an upload, and there is none", fix=LOG_IN)
    api = huggingface_hub.HfApi()
    added = [huggingface_hub.CommitOperationAdd(path, str(file)) for path, file in files.items()]
    added.append(huggingface_hub.CommitOperationAdd(CARD, card.encode()))
    try:
        api.create_repo(name, repo_type="model", private=private or None, exist_ok=True)
        if private and not api.repo_info(name, repo_type="model").private:
            fix = "make it private on its page on the hub, push to another name, or leave --private out"
            raise InputError(f"--private: {name} exists and is public", fix=fix)
        return str(api.create_commit(name, added, commit_message=message, repo_type="model").commit_url)
    except (errors.HTTPError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, TunixError):
            raise
        raise _refusal(error, name) from None


def _refusal(error: BaseException, name: str) -> InputError:
    from huggingface_hub import errors

    while error.__cause__ is not None and getattr(error, "response", None) is None:
        error = error.__cause__  # the client wraps what happens to a file
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return InputError(f"{name} was not uploaded: HF_HUB_OFFLINE disables the hub", fix="unset HF_HUB_OFFLINE")
    token = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the token of `hf auth login`"
    known = {
        401: (f"refuses {token}", LOG_IN),
        403: (f"forbids {token} to write to {name}", "use a token that may write there, or another owner"),
        404: (f"has no owner like that of {name}", "check the spelling of OWNER"),
        413: ("refuses the size of a file", "push a smaller file, such as one of `tunix-rt export --gguf q4_k_m`"),
        429: ("limits the rate of requests", "wait some minutes"),
    }
    if status in known:
        problem, fix = known[status]
        return InputError(f"{name} was not uploaded: the hub {problem} ({status})", fix=fix)
    why = f"{status or type(error).__name__}: {redacted(one_line(error))}"
    return InputError(
        f"{name} was not uploaded ({why})", fix="check the network, and push again: the commit is made at the end"
    )
