"""Repositories of the hub: from the local cache when they are complete there, else downloaded. Its errors have a way out."""

import contextlib
import errno
import fnmatch
import glob
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from tunix_rt.errors import InputError, StorageError, TunixError
from tunix_rt.models.safetensors import NOT_READ, missing_weights, no_safetensors
from tunix_rt.models.secrets import one_line, redacted
from tunix_rt.storage import sha256_file

logger = logging.getLogger(__name__)

# The files of a model that a run reads: safetensors and JSON. No pickle, no code.
WEIGHTS = "*.safetensors"
SMALL_FILES = ("*.json", "*.jinja")
GIB = 2**30
LARGE_BYTES = 10 * 2**20
"""The client writes as much at a time."""
OTHER_CACHE = "free space or permissions there, or set HF_HOME to a folder on another volume"
REVISION = {"model": "model.revision: main", "dataset": "the dataset without @REVISION"}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A repository requested from the hub, with what its errors need."""

    name: str
    revision: str
    cached: str
    """`not in the local cache`, or what is missing there."""
    ways_on: str
    kind: str = "model"
    """`model` or `dataset`."""

    @property
    def what(self) -> str:
        return f"{self.kind} {self.name!r}"


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
    about = describe(request)
    sizes = {name: file.bytes for name, file in about.files.items() if "/" not in name}
    if with_weights and not fnmatch.filter(sizes, WEIGHTS):
        where = f"on the hub at revision {request.revision}"
        raise no_safetensors(f"model {request.name!r}", where, sizes, fix=request.ways_on)
    wanted = [file for file in sizes if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)]
    refuse_full_disk(request, sum(sizes[file] for file in wanted))
    return fetch(request, wanted, about) if download else Path(about.commit)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository, with the hash that the hub has of it: SHA-256 of a large one, else git's."""

    bytes: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """The files of a repository at a commit."""

    commit: str
    files: dict[str, RemoteFile]


def describe(request: Request) -> Repository:
    """What the hub has at the revision. Downloads nothing."""
    import huggingface_hub
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        logger.info("Requesting %s from the hub", redacted(request.name))
    with _refusing(request):
        _limit_waiting()
        about = huggingface_hub.HfApi().repo_info(
            request.name, repo_type=request.kind, revision=request.revision, files_metadata=True
        )
    files = {}
    for one in about.siblings or ():
        sha256 = one.lfs.sha256 if one.lfs else None
        files[one.rfilename] = RemoteFile(bytes=one.size or 0, sha256=sha256, git_sha1=None if sha256 else one.blob_id)
    return Repository(commit=str(about.sha), files=files)


def fetch(request: Request, wanted: Sequence[str], about: Repository) -> Path:
    """The snapshot with the `wanted` files. A download that was interrupted continues where it ended."""
    import huggingface_hub

    with _refusing(request):
        try:
            for name in wanted:
                _fetch_large(request, name, about)
        except KeyboardInterrupt:
            logger.warning("Download interrupted; the same command continues it")
            raise
        # By the name of the revision, not by its commit: the cache then records the commit of that name.
        found = huggingface_hub.snapshot_download(
            request.name,
            repo_type=request.kind,
            revision=request.revision,
            allow_patterns=list(map(glob.escape, wanted)),
        )
    return Path(found)


def _fetch_large(request: Request, name: str, about: Repository) -> None:
    """Download a large file into the hub's cache, where its client finds it: the client itself begins anew in each process."""
    from huggingface_hub import constants, file_download, utils

    file = about.files[name]
    if file.sha256 is None or not LARGE_BYTES <= file.bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    repository = file_download.repo_folder_name(repo_id=request.name, repo_type=request.kind)
    cache = Path(constants.HF_HUB_CACHE)
    blob, lock = cache / repository / "blobs" / file.sha256, cache / ".locks" / repository / f"{file.sha256}.lock"
    part = blob.with_name(f"{blob.name}.part")
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):  # that of the client
        if blob.exists():
            return
        url = file_download.hf_hub_url(request.name, name, repo_type=request.kind, revision=about.commit)
        headers = utils.build_hf_headers()
        with part.open("ab") as opened:
            done = opened.tell()
            if done:
                logger.info("Resuming %s at %.1f of %.1f MiB", name, done / 2**20, file.bytes / 2**20)
            file_download.http_get(url, opened, resume_size=done, headers=headers, expected_size=file.bytes)
        if sha256_file(part) == file.sha256:
            part.replace(blob)
        else:
            logger.warning("%s was damaged on the way; fetching it again", name)
            part.unlink()


@contextlib.contextmanager
def _refusing(request: Request) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, errors.HFValidationError, errors.EntryNotFoundError, OSError, RuntimeError) as error:
        if isinstance(error, TunixError):
            raise
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


def refuse_full_disk(request: Request, needed_bytes: int) -> None:
    """Check the free space before the download: the hub client only warns."""
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed_bytes > free:
        raise StorageError(
            f"{request.what} needs up to {needed_bytes / GIB:.2f} GiB, and {place} has {free / GIB:.2f} GiB free",
            fix=OTHER_CACHE,
        )


def _refusal(error: BaseException, request: Request) -> TunixError:
    """The error of the hub, its client or the disk, as one problem and a way out."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the client hides it behind the lookup in the cache
    name, what, ways_on = request.name, request.what, request.ways_on
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return InputError(f"no {request.kind} named {name!r} on the hub, in the cache or shipped", fix=ways_on)
    if isinstance(error, errors.GatedRepoError):
        return _gated(what, request.kind, status, ways_on)
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"{what} has no revision {request.revision!r}", fix=f"set {REVISION[request.kind]}")
    if isinstance(error, errors.DisabledRepoError):
        return InputError(f"the hub has disabled access to {what}", fix=ways_on)
    refuses_token = "Invalid credentials" in str(getattr(response, "headers", {}).get("X-Error-Message", ""))
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not refuses_token):
        unseen = " that can be seen without a token (401)" if status == 401 else ""
        log_in = "; if it is private or gated, log in with `hf auth login`" if status == 401 else ""
        return InputError(
            f"no {request.kind} named {name!r} on the hub{unseen}, in the cache or shipped",
            fix=f"check the spelling{log_in}; or {ways_on}",
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return InputError(
            f"{what} is {request.cached}, and HF_HUB_OFFLINE disables the hub",
            fix=f"unset HF_HUB_OFFLINE; or {ways_on}",
        )
    if status is not None:
        return _refused_status(int(status), request)
    if _is_full_disk(error):
        return StorageError(f"{what} cannot be written to the hub's cache: {one_line(error)}", fix=OTHER_CACHE)
    return InputError(
        f"{what} is {request.cached} and the hub cannot be reached ({type(error).__name__}: {one_line(error)})",
        fix=f"check the network; the same command continues an interrupted download; or {ways_on}",
    )


def _gated(what: str, kind: str, status: Any, ways_on: str) -> InputError:
    """401: no valid token. 403: the account has no access."""
    if status == 403:
        return InputError(
            f"{what} is gated, and this account has no access (403)",
            fix=f"open the {kind}'s page on the hub, accept its licence and wait until access is granted; or {ways_on}",
        )
    return InputError(
        f"{what} is gated, and no valid token came with the request",
        fix=f"accept its licence on the hub and log in with `hf auth login` (or set HF_TOKEN); or {ways_on}",
    )


def _refused_status(status: int, request: Request) -> InputError:
    what, ways_on = request.what, request.ways_on
    token = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "the token of `hf auth login`"
    known = {
        401: (f"refuses {token} for {what} (401)", "log in again with `hf auth login`, or unset HF_TOKEN"),
        403: (f"forbids {what} to {token} (403)", "use a token that may read it"),
        429: (f"limits the rate of requests (429), for {what} too", "wait some minutes, or log in"),
    }
    problem, way = known.get(status, (f"returns {status} for {what}", "try again later"))
    return InputError(f"the hub {problem}", fix=f"{way}; or {ways_on}")


def _is_full_disk(error: BaseException) -> bool:
    """By errno; the client's own downloader has only a message."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return True
    return any(message in str(error) for message in ("No space left", "Disk quota exceeded"))
