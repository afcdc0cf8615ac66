"""Files of a dataset on the hub: in its cache, or fetched into it, pinned to a commit and compared with the hashes of the hub."""

import fnmatch
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tunix_rt import assets
from tunix_rt.data.splits import (
    ENDINGS,
    NOT_READ_ENDINGS,
    has_data_name,
    refuse_missing_shards,
    refuse_two_readings,
    split_of,
)
from tunix_rt.errors import InputError
from tunix_rt.models.hub import RemoteFile, Request, describe, fetch, refuse_full_disk
from tunix_rt.storage import storage, write_json

logger = logging.getLogger(__name__)

Wanted = Callable[[Sequence[str]], list[str]]
"""From the files of a repository to those that a name stands for; an InputError for an ambiguous name."""


def hub_files(name: str, revision: str, inside: str, *, unknown: InputError) -> tuple[Path, list[str]]:
    """The snapshot of a dataset, and the files in it that `inside` means. A branch that is in the cache is used as it was when it
    was fetched. `unknown` is the error of a name that is no dataset of another kind either."""
    from huggingface_hub import constants

    wanted = partial(_wanted, name, name if revision == "main" else f"{name}@{revision}", inside)
    is_path = name.lower().removesuffix(".gz").endswith((*ENDINGS, *NOT_READ_ENDINGS))  # one that does not exist
    download = not is_path and not constants.HF_HUB_OFFLINE
    cached = _snapshot(name, revision)
    listed = _listing(name, cached.name) if cached else None
    if cached and (files := _complete(cached, listed, wanted, strict=not download)):
        return cached, files
    if not download:
        state = (
            f"only partly in the local cache of the hub ({cached.name[:12]})"
            if cached
            else "not in the local cache of the hub"
        )
        raise InputError(
            f"{unknown.problem}: no such file or folder, and {name} is {state}",
            fix=f"{unknown.fix}; or fetch it: unset HF_HUB_OFFLINE, or `hf download --repo-type dataset {name}`",
        )
    here = "only partly in the local cache" if cached else "not in the local cache"
    request = Request(name=name, revision=revision, cached=here, ways_on=unknown.fix, kind="dataset")
    about = describe(request)
    files = wanted(sorted(about.files))
    present = _snapshot(name, about.commit)
    new = [file for file in files if present is None or not (present / file).is_file()]
    size = sum(about.files[file].bytes for file in new)
    refuse_full_disk(request, size)
    logger.info("Fetching %s: %d file(s), %.1f MiB, commit %s", name, len(new), size / 2**20, about.commit)
    write_listing(name, about.commit, about.files)
    folder = fetch(request, files, about)
    for file in new:
        _refuse_other_bytes(folder / file, about.files[file], f"{name}:{file}")
    return folder, files


def _snapshot(name: str, revision: str) -> Path | None:
    """The snapshot in the cache, whole or not."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True)
        )
    except errors.LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)
        return Path(partial) if partial else None
    except (errors.HFValidationError, OSError, ValueError):
        return None


def _wanted(name: str, given: str, inside: str, names: Sequence[str]) -> list[str]:
    """The files among `names` that `inside` means; InputError for none, an ambiguous name, or a missing shard."""
    chosen = _chosen(names, inside)
    if not chosen:
        known = ", ".join(sorted(filter(has_data_name, names))[:12])
        raise InputError(
            f"no {inside or 'data file'!r} in {name}", fix=f"give {name}:PATH; there are: {known or 'no data files'}"
        )
    unread = [file for file in names if file.lower().removesuffix(".gz").endswith(NOT_READ_ENDINGS)]
    if not inside and unread:
        raise InputError(
            f"{name} has data files of a kind that is not read, which would be left out: {', '.join(unread[:5])}",
            fix=f"name the files you want: {given}:PATH, or a pattern with *",
        )
    if "*" not in inside:
        refuse_two_readings(chosen, Path(name), lambda path: f"{given}:{path}")
    refuse_missing_shards(chosen, Path(name))
    return chosen


def _chosen(names: Sequence[str], inside: str) -> list[str]:
    """All data files, one file, a folder, a pattern, a split, or `CONFIG/SPLIT`."""
    data = sorted(filter(has_data_name, names))
    if not inside or inside in names:
        return [inside] if inside else data
    below = [name for name in data if name.startswith(f"{inside.rstrip('/')}/")]
    config, slash, split = inside.rpartition("/")
    default = "" if any(map(split_of, data)) else "train"  # as the hub's own library has it
    of_split = [name for name in data if (split_of(name) or default) == split and name.startswith(config + slash)]
    return below or sorted(fnmatch.filter(names, inside)) or of_split


def _complete(folder: Path, listed: Mapping[str, RemoteFile] | None, wanted: Wanted, *, strict: bool) -> list[str]:
    """The wanted files, if all of them are in the snapshot. Without a list of what the hub has, what is there counts as all;
    unless `strict`, the hub is asked where that is not enough."""
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    try:
        files = wanted(there if listed is None else sorted(listed))
    except InputError:
        if strict or listed is not None:
            raise
        return []
    whole = all(
        (folder / file).is_file() and (listed is None or (folder / file).stat().st_size == listed[file].bytes)
        for file in files
    )
    return files if whole else []


# --- the list of files ------------------------------------------------------------------------------------------------


def _listing_path(name: str, commit: str) -> Path:
    return assets.cache_root() / "hub-datasets" / f"{name.replace('/', '--')}-{commit}.json"


def write_listing(name: str, commit: str, files: Mapping[str, RemoteFile]) -> None:
    path = _listing_path(name, commit)
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {file: asdict(about) for file, about in files.items()})


def _listing(name: str, commit: str) -> dict[str, RemoteFile] | None:
    """What the hub had at a commit; None where it was not fetched by tunix-rt."""
    try:
        known = json.loads(_listing_path(name, commit).read_text(encoding="utf-8"))
        return {file: RemoteFile(**about) for file, about in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _refuse_other_bytes(path: Path, about: RemoteFile, what: str) -> None:
    """InputError for a file with another hash than the hub has of it; it is deleted, so that it is fetched again."""
    with storage(path), path.open("rb") as file:
        if about.sha256:
            expected, actual = about.sha256, hashlib.file_digest(file, "sha256").hexdigest()
        elif about.git_sha1:
            digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
            while part := file.read(2**20):
                digest.update(part)
            expected, actual = about.git_sha1, digest.hexdigest()
        else:
            return
    if actual != expected:
        with storage(path):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
        raise InputError(
            f"{what} has hash {actual[:12]}, and the hub has {expected[:12]}: it was damaged on the way",
            fix="run the same command again, which fetches it again",
        )
