"""A GGUF file as a model folder: converted once by a child process, and cached under the hash of its bytes.

The weights are float32: the exact values of the quantized blocks, which differ from those of the original model.
"""

import functools
import hashlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunix_rt.assets import cache_root
from tunix_rt.errors import InputError, StorageError
from tunix_rt.models.safetensors import LFS_POINTER, readable
from tunix_rt.models.secrets import redacted
from tunix_rt.progress import phase

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"
SCHEMA = "tunix-rt/gguf/1"
MANIFEST = "gguf.json"
CONVERSION = "tunix_rt.engines.gguf"
CHILD = "tunix_rt.models.child_process"
NEEDED = {"gguf": "gguf", "accelerate": "gguf", "torch": "torch", "transformers": "torch"}
"""Package -> the extra of tunix-rt that installs it."""
BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a GGUF file that override its own. Those of the tokenizer need tokenizer.json."""
OTHER_CACHE = "free space or permissions there, or set XDG_CACHE_HOME to a folder on another volume"


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no safetensors. Two are an InputError that lists them."""
    with readable(folder.name, folder):
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".gguf", ".safetensors"))
    if not files or any(path.suffix.lower() == ".safetensors" for path in files):
        return None
    if len(files) > 1:
        named = ", ".join(path.name for path in files)
        raise InputError(f"{folder} has {len(files)} GGUF files: {named}", fix="give the path of one of them")
    return files[0]


def converted(file: Path, *, with_weights: bool) -> tuple[Path, str]:
    """The model folder of a GGUF file, from the cache or converted now, and the file by name and hash.

    Without weights: configuration and tokenizer only."""
    _refuse_foreign(file)
    with readable(file.name, file):
        about = file.stat()
        sha256 = _sha256(file, about.st_size, about.st_mtime_ns)
        key = "-".join([sha256, *_hash_of_files_beside(file)])
    whole, small = (cache_root() / "gguf" / name for name in (key, f"{key}-without-weights"))
    for place in (whole,) if with_weights else (whole, small):
        if (known := read_manifest(place)) is not None:
            break
    else:
        place = whole if with_weights else small
        require_packages(f"converting {file.name}, a GGUF file,")
        logger.info("Converting %s (sha256 %s) into %s; this is done once", file.name, sha256, place)
        _convert(file, place, with_weights=with_weights)
        if (known := read_manifest(place)) is None:
            raise StorageError(f"{place} does not read back as it was written", fix=OTHER_CACHE)
    logger.info("%s has %s; weights: %s; cached in %s", file.name, known["quantisation"], known["weights"], place)
    return place, f"{file.name} sha256:{sha256}"


def _refuse_foreign(file: Path) -> None:
    with readable(file.name, file), file.open("rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise InputError(f"{file} is incomplete: a Git LFS pointer instead of the model", fix="fetch the file again")
    if start[: len(MAGIC)] != MAGIC:
        raise InputError(
            f"{file} is a file, but not GGUF by its first bytes", fix="give a model folder, or a .gguf file"
        )


@functools.lru_cache(maxsize=8)
@phase("hash GGUF")
def _sha256(file: Path, _size: int, _changed: int) -> str:
    """Hash of the file, cached while its size and time stay the same."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _hash_of_files_beside(file: Path) -> list[str]:
    found = [path for path in (file.parent / name for name in BESIDE) if path.is_file()]
    if not found:
        return []
    digest = hashlib.sha256()
    for path in found:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return [digest.hexdigest()[:16]]


def read_manifest(place: Path) -> Mapping[str, Any] | None:
    """The manifest of a conversion, or None when the folder or a file of it is missing or has another size."""
    try:
        known = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        whole = all((place / name).stat().st_size == size for name, size in known["files"].items())
        return known if whole and known["schema"] == SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def require_packages(what: str) -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        extras = ",".join(sorted({NEEDED[name] for name in missing}))
        raise InputError(f"{what} needs {', '.join(missing)}", fix=f'pip install "tunix-rt[{extras}]"')


@phase("convert GGUF")
def _convert(file: Path, place: Path, *, with_weights: bool) -> None:
    """Convert in a child process: it needs memory, and an untrusted file may crash its reader.

    The child has one end of a pipe whose other end belongs to this process: when it is killed, the child exits."""
    command = [sys.executable, "-P", "-m", CHILD, CONVERSION, str(file), str(place)]
    # Offline, and without a GPU.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    watched, held = os.pipe()
    try:
        ended = subprocess.run(
            command if with_weights else [*command, "--without-weights"],
            env=environment,
            stdin=watched,
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C goes to the parent; half a conversion is useless
        )
    finally:
        os.close(watched)
        os.close(held)
    if ended.returncode == 0:
        return
    reported = _last_line(ended.stdout)
    kind = {InputError.exit_code: InputError, StorageError.exit_code: StorageError}.get(ended.returncode)
    if kind is not None and reported.startswith("{"):
        raise kind(**json.loads(reported))
    if ended.returncode == -signal.SIGKILL:
        raise InputError(
            f"{file} was not converted: the process was killed, probably out of memory",
            fix="convert it on a computer with more memory (about 10 bytes per parameter), or use a model with safetensors",
        )
    raise InputError(
        f"{file} cannot be converted: {redacted(_last_line(ended.stderr))[:300] or f'exit code {ended.returncode}'}",
        fix="fetch the file again; if it is complete, transformers does not support it: use the model's safetensors",
    )


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[-1:]), "")
