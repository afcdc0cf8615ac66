"""A model of the hub: from the local cache when it is complete there, else downloaded. Errors of the hub with a way out."""

import errno
import fnmatch
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunix_rt.errors import InputError, StorageError, TunixError
from tunix_rt.models.safetensors import NOT_READ, missing_weights, no_safetensors
from tunix_rt.models.secrets import one_line, redacted

logger = logging.getLogger(__name__)

# The files of a model that a run reads: safetensors and JSON. No pickle, no code.
WEIGHTS = "*.safetensors"
SMALL_FILES = ("*.json", "*.jinja")
GIB = 2**30
OTHER_CACHE = "free space or permissions there, or set HF_HOME to a folder on another volume"
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A model requested from the hub, with what its errors need."""

    name: str
    revision: str
    cached: str
    """`not in the local cache`, or what is missing there."""
    ways_on: str


def from_hub(
    name: str, revision: str, *, with_weights: bool, ways_on: Callable[[Path | None], str], download: bool = True
) -> tuple[Path, str]:
    """Folder and commit of a hub model: the local cache first, then the hub. `ways_on` are those of an error, given what the
    cache has. Without `download` the hub is only asked whether it has the model.

    A cached branch is used as it was when it was downloaded; the commit identifies it."""
    patterns = [WEIGHTS, *SMALL_FILES] if with_weights else list(SMALL_FILES)
    folder, lacking = _from_cache(name, revision, patterns, with_weights)
    if folder is None or lacking:
        cached = lacking or "not in the local cache"
        request = Request(name=name, revision=revision, ways_on=ways_on(folder), cached=cached)
        folder = _fetch(request, patterns, with_weights=with_weights, download=download)
    return folder, folder.name


def cached_config(name: str, revision: str) -> Path | None:
    """The snapshot in the cache that has config.json."""
    folder, lacking = _from_cache(name, revision, list(SMALL_FILES), with_weights=False)
    return None if lacking else folder


def _from_cache(name: str, revision: str, patterns: list[str], with_weights: bool) -> tuple[Path | None, str]:
    """The snapshot in the cache, or None; and a description of what it lacks."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except errors.LocalEntryNotFoundError as error:
        found = getattr(error, "snapshot_path", None)  # set for an incomplete snapshot
        if found is None:
            return None, ""
    except (errors.HFValidationError, OSError, ValueError):
        return None, ""
    folder = Path(found)
    lacks = [] if (folder / "config.json").is_file() else ["config.json"]
    if with_weights:
        lacks += missing_weights(folder)
        others = [path.name for path in folder.iterdir() if path.suffix in NOT_READ]
        if not lacks and not any(folder.glob(WEIGHTS)):
            lacks = [f"any {WEIGHTS} (it has {others[0]})" if others else f"any {WEIGHTS}"]
    return folder, f"only partly in the local cache (without {lacks[0]})" if lacks else ""


def _fetch(request: Request, patterns: list[str], *, with_weights: bool, download: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors

    if not constants.HF_HUB_OFFLINE:
        logger.info("Requesting %s from the hub", redacted(request.name))
    try:
        _limit_waiting()
        about = huggingface_hub.HfApi().model_info(request.name, revision=request.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in about.siblings or () if "/" not in file.rfilename}
        wanted = [file for file in sizes if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)]
        if with_weights and not fnmatch.filter(sizes, WEIGHTS):
            where = f"on the hub at revision {request.revision}"
            raise no_safetensors(f"model {request.name!r}", where, sizes, fix=request.ways_on)
        _refuse_full_disk(request.name, sum(sizes[file] for file in wanted))
        if not download:
            return Path(str(about.sha))
        # By the name of the revision, not by its commit: the cache then records the commit of that name.
        return Path(huggingface_hub.snapshot_download(request.name, revision=request.revision, allow_patterns=wanted))
    except (errors.HTTPError, errors.HFValidationError, errors.EntryNotFoundError, OSError, RuntimeError) as error:
        raise _refusal(error, request) from None


def _limit_waiting() -> None:
    """Give every request of the hub client the timeout HF_HUB_ETAG_TIMEOUT (10 s).

    The client has it for downloads, and none for the request that describes a model and lists its files."""
    from huggingface_hub import constants, utils

    def limit(request: Any) -> None:
        given = request.extensions.get("timeout", {})
        kinds = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {kind: given.get(kind) or constants.HF_HUB_ETAG_TIMEOUT for kind in kinds}

    session = utils.get_session()
    hooks = session.event_hooks
    if not any(hook.__qualname__ == limit.__qualname__ for hook in hooks["request"]):
        session.event_hooks = {**hooks, "request": [*hooks["request"], limit]}


def _refuse_full_disk(name: str, needed_bytes: int) -> None:
    """Check the free space before the download: the hub client only warns."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed_bytes > free:
        raise StorageError(
            f"model {name!r} needs up to {needed_bytes / GIB:.2f} GiB, and {place} has {free / GIB:.2f} GiB free",
            fix=OTHER_CACHE,
        )


def _refusal(error: BaseException, request: Request) -> TunixError:
    """The error of the hub, its client or the disk, as one problem and a way out."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the client hides it behind the lookup in the cache
    name, ways_on = request.name, request.ways_on
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return InputError(f"no model named {name!r} on the hub, in the cache or shipped", fix=ways_on)
    if isinstance(error, errors.GatedRepoError):
        return _gated(name, status, ways_on)
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"model {name!r} has no revision {request.revision!r}", fix="set model.revision: main")
    if isinstance(error, errors.DisabledRepoError):
        return InputError(f"the hub has disabled access to model {name!r}", fix=ways_on)
    refuses_token = "Invalid credentials" in str(getattr(response, "headers", {}).get("X-Error-Message", ""))
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not refuses_token):
        unseen = " that can be seen without a token (401)" if status == 401 else ""
        log_in = "; if it is private or gated, log in with `hf auth login`" if status == 401 else ""
        return InputError(
            f"no model named {name!r} on the hub{unseen}, in the cache or shipped",
            fix=f"check the spelling{log_in}; or {ways_on}",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return InputError(
            f"model {name!r} is {request.cached}, and HF_HUB_OFFLINE disables the hub",
            fix=f"unset HF_HUB_OFFLINE; or {ways_on}",
        )
    if status is not None:
        return _refused_status(int(status), name, ways_on)
    if _is_full_disk(error):
        return StorageError(f"model {name!r} cannot be written to the hub's cache: {one_line(error)}", fix=OTHER_CACHE)
    return InputError(
        f"model {name!r} is {request.cached} and the hub cannot be reached ({type(error).__name__}: {one_line(error)})",
        fix=f"check the network; or {ways_on}",
    )


def _gated(name: str, status: Any, ways_on: str) -> InputError:
    """401: no valid token. 403: the account has no access."""
    if status == 403:
        return InputError(
            f"model {name!r} is gated, and this account has no access (403)",
            fix=f"open the model's page on the hub, accept its licence and wait until access is granted; or {ways_on}",
        )
    return InputError(
        f"model {name!r} is gated, and no valid token came with the request",
        fix=f"accept its licence on the hub and log in with `hf auth login` (or set HF_TOKEN); or {ways_on}",
    )


def _refused_status(status: int, name: str, ways_on: str) -> InputError:
    token = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the token of `hf auth login`"
    known = {
        401: (f"refuses {token} for model {name!r} (401)", "log in again with `hf auth login`, or unset HF_TOKEN"),
        403: (f"forbids model {name!r} to {token} (403)", "use a token that may read this model"),
        429: (f"limits the rate of requests (429), for model {name!r} too", "wait some minutes, or log in"),
    }
    problem, way = known.get(status, (f"returns {status} for model {name!r}", "try again later"))
    return InputError(f"the hub {problem}", fix=f"{way}; or {ways_on}")


def _is_full_disk(error: BaseException) -> bool:
    """By errno; the client's own downloader has only a message."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return True
    return any(message in str(error) for message in ("No space left", "Disk quota exceeded"))
