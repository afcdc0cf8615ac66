"""Small real models for tests: every architecture at two layers, with the shipped tokenizer."""

import json
import os
import tempfile
from pathlib import Path

import pytest

# One thread per process, before torch is imported: two programs that share two cores otherwise wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tokens made by tests are kept apart from a person's, and go with the tests.
_CACHE = tempfile.TemporaryDirectory(prefix="tunix-rt-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "models" / "tiny-gemma3"
REFERENCE = ROOT.parent / "shared"

_SMALL = {
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "query_pre_attn_scalar": 16, "max_position_embeddings": 256, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.2,
    },
    "gemma": {
        "model_type": "gemma", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
    },
    "llama": {
        "model_type": "llama", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "initializer_range": 0.2,
    },
    "smollm3": {
        "model_type": "smollm3", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "no_rope_layers": [1, 0],
        "initializer_range": 0.2,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2,
    },
    "gpt2-dropout": {
        "model_type": "gpt2", "vocab_size": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.2,
    },
}  # fmt: skip


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
