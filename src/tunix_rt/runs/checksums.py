"""SHA256SUMS: one hash per file, readable by `sha256sum -c`."""

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.rundir import RunDir, list_checkpoints, read_json, sha256_file, sha256_text, write_text
from tunix_rt.runs.reading import few, is_leftover, list_folder, open_regular, plain, shown

SUMS = "SHA256SUMS"
RUN_SUMS = "run-SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00-\x1f\x7f\\]{1,400})")


def write_sums(run: RunDir, *, pending: Mapping[Path, str] | None = None, verified: Collection[Path] = ()) -> Path:
    """Write `SHA256SUMS` over every file of the folder. A link, a special file or an odd name is an EvidenceError.

    `pending` are files whose text is settled but which are written after their hash. `verified` are checkpoints that the
    caller has hashed itself, so that their manifests hold; all other files are read.
    """
    listing = list_folder(run.root)
    if listing.problems:
        raise EvidenceError(
            f"{run.root} cannot be hashed\n" + "\n".join(f"  {problem}" for problem in few(listing.problems)),
            fix="a run folder contains plain files with plain names; remove what is listed",
        )
    coming = {path.relative_to(run.root).as_posix(): sha256_text(text) for path, text in (pending or {}).items()}
    known = _hashes_at_commit(run, verified) | coming
    names = [name for name in listing.files if name not in (SUMS, SIGNATURE)]
    digests = {name: known.get(name) or sha256_file(run.root / name) for name in names} | coming
    write_text(run.hashes, sums_text(digests))
    return run.hashes


def sums_text(digests: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def _hashes_at_commit(run: RunDir, verified: Collection[Path]) -> dict[str, str]:
    """Hashes in the manifests of `verified` checkpoints: tens of gigabytes that a process told to end has no time to read."""
    found: dict[str, str] = {}
    for checkpoint in (path for path in list_checkpoints(run.checkpoints) if path in verified):
        try:
            claimed = read_json(checkpoint / "MANIFEST.json")["files"]
            for name, facts in claimed.items():
                fits = (checkpoint / name).stat().st_size == facts["bytes"]
                if fits and re.fullmatch("[0-9a-f]{64}", facts["sha256"]):
                    found[(checkpoint / name).relative_to(run.root).as_posix()] = facts["sha256"]
        except (TunixError, OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # corrupt: its files are read
    return found


def parse_sums(data: bytes, file: str = SUMS) -> tuple[dict[str, str], list[str]]:
    """Name -> hash, and every line that is not in the form that `write_sums` writes: sorted by name, each once."""
    claimed: dict[str, str] = {}
    problems: list[str] = []
    *lines, rest = data.split(b"\n")
    if rest:
        problems.append(f"{file} does not end with a newline")
    before = ""
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.decode("utf-8", "surrogateescape"))
        name = match[2] if match else ""
        if match is None or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
            problems.append(f"{file}:{number}: malformed line")
        elif name <= before or is_leftover(name) or name == SUMS or "\udc80" <= max(name) <= "\udfff":
            problems.append(f"{file}:{number}: {shown(name)} is not in order, or not a file of the run")
        else:
            claimed[name] = match[1]
            before = name
        if len(problems) > 50:
            break
    return claimed, problems


def sha256_below(root: Path, name: str) -> str:
    """The hash of the regular file `name` below `root`; an OSError where there is none."""
    with open(open_regular(root, name), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_problems(
    root: Path, present: Collection[str], claimed: Mapping[str, str], *, may_lack: Collection[str]
) -> list[str]:
    """How the files differ from the hashes. `may_lack` may be absent; present, they must fit."""
    problems = [f"{plain(name)}: missing" for name in sorted(claimed.keys() - set(present) - set(may_lack))]
    problems += [f"{plain(name)}: not in {SUMS}" for name in sorted(set(present) - claimed.keys() - {SUMS, SIGNATURE})]
    for name in sorted(claimed.keys() & set(present)):
        try:
            if sha256_below(root, name) != claimed[name]:
                problems.append(f"{plain(name)}: changed, its hash is not the one in {SUMS}")
        except OSError as error:
            problems.append(f"{plain(name)}: cannot be read: {error.strerror or os.strerror(error.errno or 0)}")
    return problems


def is_weights(name: str) -> bool:
    """Whether the file of a run by that name contains weights or optimizer states: too big to travel with its facts."""
    return name.startswith(("checkpoints/", "final_model/")) and name.endswith(".safetensors")
