"""Small real models for tests: every architecture at two layers, with the shipped tokenizer."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.tables import tables

# One thread per process, before torch is imported: two programs that share two cores otherwise wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tokens made by tests are kept apart from a person's, and go with the tests.
_CACHE = tempfile.TemporaryDirectory(prefix="tunix-rt-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "models" / "tiny-gemma3"
REFERENCE = ROOT.parent / "shared"

_SMALL = tables(__file__)["small models"]


def write_small_model(kind: str, folder: Path) -> Path:
    """A folder with config and the shipped tokenizer; weights are drawn from the seed at load."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**_SMALL[kind], **special}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    return folder


def put_into_hub_cache(kind: str, name: str, cache: Path) -> str:
    """A small model with random weights under a hub id, laid out as the hub's own client lays it out. Returns its commit."""
    import transformers

    commit = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    repository = cache / f"models--{name.replace('/', '--')}"
    folder = write_small_model(kind, repository / "snapshots" / commit)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return commit


@pytest.fixture
def small_model(tmp_path: Path):
    return lambda kind: write_small_model(kind, tmp_path / f"model-{kind}")


@pytest.fixture(scope="session")
def tokenizer():
    """The shipped tokenizer."""
    from tunix_rt.data.tokenizer import load_tokenizer

    return load_tokenizer(SHIPPED)


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch):
    """Durability is tested with the run folder; elsewhere it would be most of the time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def reference_model() -> Path:
    """stories260K, a real pretrained model that is not part of the repository."""
    folder = REFERENCE / "weights" / "stories260K"
    if not folder.is_dir():
        pytest.skip("the reference weights stories260K are not beside this clone (../shared/weights)")
    return folder


HAS_GPU = Path("/dev/nvidiactl").exists()
collect_ignore = [] if HAS_GPU else ["gpu"]
"""Without a GPU, the modules of `tests/gpu` are not imported, unless one is named on the command line."""


def pytest_report_header() -> list[str]:
    return [] if HAS_GPU else ["tests/gpu is not collected: no NVIDIA GPU"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in () if HAS_GPU else items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
