"""A dataset larger than the memory that the process may have: tokenized, validated, packed, and taken in steps."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.program import ROOT, environment
from tests.stores import quiet
from tunix_rt.config.load import build_config
from tunix_rt.data.prepare import ModelFacts, prepare

MIB = 2**20
PREPARE = """
import json, re, resource, sys
from pathlib import Path
from tunix_rt.config.load import build_config
from tunix_rt.data.packing import batch_of_step
from tunix_rt.data.prepare import ModelFacts, prepare
from tunix_rt.data.tokenizer import load_tokenizer

settings, most = json.loads(sys.argv[1]), int(sys.argv[2])
tokenizer = load_tokenizer(Path("models/tiny-gemma3"), "gemma3_text")
used = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (used + most, used + most))
facts = ModelFacts(vocabulary=tokenizer.vocab_size, positions=8192)
data = prepare(build_config(settings, "test"), tokenizer, facts, lambda *given: None)
batches = [
    batch_of_step(data.rows, step, micro_batch_size=4, accumulation=1, seed=0, pad_id=0, mixture=data.mixture).sha256
    for step in range(1, 51)
]
print(json.dumps([data.merkle_root, batches, sum(len(row.ids) for row in data.heldout_rows)]))
try:
    bytearray(most)
except MemoryError:
    print("the limit holds")
"""


def write_words(path: Path, size: int, seed: int) -> str:
    """A JSONL file of so many bytes of random words."""
    drawn = random.Random(seed)
    words = ["".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(5_000)]
    with path.open("w", encoding="utf-8") as file:
        number = 0
        while file.tell() < size:
            number += 1
            text = {"prompt": f"{number} {drawn.choice(words)}", "completion": " ".join(drawn.choices(words, k=120))}
            file.write(json.dumps(text) + "\n")
    return str(path)


def in_memory(settings: dict[str, object], most: int, cache: Path) -> list[object]:
    """The Merkle root, batches and held-out tokens of a process that may take so many bytes more than it starts with."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, json.dumps(settings), str(most)], cwd=ROOT, capture_output=True, text=True,
        env=environment(XDG_CACHE_HOME=str(cache), OPENBLAS_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found, holds = done.stdout.splitlines()
    assert holds == "the limit holds"
    return json.loads(found)


def bytes_of(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*.bin"))


def of(dataset: object) -> dict[str, object]:
    data = {"dataset": dataset, "max_length": 1024, "on_overflow": "drop"}
    return {"data": data, "evaluation": {"enabled": False}}


def test_tokens_that_do_not_fit_into_memory_are_read_row_by_row(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = of({write_words(tmp_path / f"{seed}.jsonl", MIB, seed): 1 + seed for seed in (0, 1)})
    facts = ModelFacts(vocabulary=tokenizer.vocab_size, positions=8192)
    data = prepare(build_config(settings, "test"), tokenizer, facts, quiet)
    assert bytes_of(tmp_path / "cache") > 5 * MIB
    root, batches, heldout = in_memory(settings, 3 * MIB, tmp_path / "cache")
    assert (root, len(set(batches)), heldout) == (data.merkle_root, 50, sum(len(row.ids) for row in data.heldout_rows))


@pytest.mark.slow  # some minutes
def test_a_file_larger_than_memory_is_tokenized_and_trained_on(tmp_path):
    """A hub dataset is such a file in the hub's cache."""
    size, most = int(os.environ.get("TUNIX_RT_LARGE_MIB", "400")) * MIB, 200 * MIB
    settings, cache = of(write_words(tmp_path / "large.jsonl", size, 0)), tmp_path / "cache"
    first = in_memory(settings, most, cache)
    assert bytes_of(cache) > 2 * size and in_memory(settings, most, cache) == first
