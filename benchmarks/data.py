"""Prepare data as a user would and measure it: python -m benchmarks.data gsm8k | scale [MEGABYTES ...]

`gsm8k`: GSM8K's training split with the real tokenizer of Gemma 3, packed at 2,048: fill, tokens per second, peak memory over
all processes, and a second start. `scale`: synthetic JSONL files with the real tokenizer of GPT-2: whether memory grows with
the file. Memory is the sum of what every process of the program has resident, looked at 50 times a second. The tokenizers are
taken from .cache/tokenizers, where the tests put them. Writes benchmarks/results/data_{gsm8k,scale}.json.
"""

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TOKENIZERS = ROOT / ".cache" / "tokenizers"
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"

GEMMA_3_1B = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "query_pre_attn_scalar": 256, "max_position_embeddings": 32768, "sliding_window": 512,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
PLACES = ("dataset", "model", "tokenizer", "folder", "manifest")
"""What the program says about where things lie on this machine; it is not kept."""

GPT_2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}


def model_folder(name: str, config: dict[str, Any], place: Path) -> Path:
    """A folder with the real tokenizer and the shape of the model; there are no weights, and none are needed."""
    folder = place / name
    folder.mkdir()
    for path in (TOKENIZERS / name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measured(*arguments: object, cache: Path) -> dict[str, Any]:
    """Run `tunix-rt data ...`: seconds, the peak of all its processes together, and what it printed."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "tunix_rt", "data", *map(str, arguments), "--json"]
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    peak = {"bytes": 0, "processes": 0}
    watcher = threading.Thread(target=_watch, args=(psutil.Process(child.pid), peak))
    watcher.start()
    printed = child.stdout.read() if child.stdout else ""
    if child.wait() != 0:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    seconds = time.monotonic() - began
    watcher.join()
    return {
        "seconds": seconds,
        "peak_bytes": peak["bytes"],
        "processes": peak["processes"],
        "said": {name: value for name, value in json.loads(printed).items() if name not in PLACES},
    }


def _watch(program: psutil.Process, peak: dict[str, int]) -> None:
    while program.is_running() and program.status() != psutil.STATUS_ZOMBIE:
        total = count = 0
        try:
            for process in (program, *program.children(recursive=True)):
                total += process.memory_info().rss
                count += 1
        except psutil.Error:
            pass  # it ended while it was looked at; what was counted of the others still stands
        peak["bytes"], peak["processes"] = max(peak["bytes"], total), max(peak["processes"], count)
        time.sleep(0.02)


def gsm8k(place: Path) -> dict[str, Any]:
    folder = model_folder("gemma3", GEMMA_3_1B, place)
    os.chdir(place)
    imported = measured("import", GSM8K, "--as", "gsm8k-train", "--model", folder, cache=place / "cache-import")
    check = ("check", "gsm8k-train", "--model", folder, "--set", "data.max_length=2048")
    first = measured(*check, cache=place / "cache")
    second = measured(*check, cache=place / "cache")
    return {"import": imported, "first": first, "second": second}


def synthetic(path: Path, megabytes: int) -> None:
    """Prompts and completions of words drawn by chance, short and long, none twice: nothing to find, all to carry."""
    draw = random.Random(megabytes)
    words = [f"{a}{b}" for a in ("ba", "do", "fi", "gu", "ke", "la", "mo", "ne", "pa", "ri") for b in range(200)]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1_000_000:
            count = min(400, int(draw.lognormvariate(4.6, 0.7)) + 5)
            text = " ".join(draw.choices(words, k=count))
            cut = count // 3 * 4
            written += file.write(json.dumps({"prompt": text[:cut], "completion": text[cut:].strip()}) + "\n")


def scale(place: Path, sizes: list[int]) -> list[dict[str, Any]]:
    folder = model_folder("gpt2", GPT_2, place)
    rows = []
    for megabytes in sizes:
        path = place / f"synthetic-{megabytes}.jsonl"
        synthetic(path, megabytes)
        check = ("check", path, "--model", folder, "--set", "data.max_length=1024")
        first = measured(*check, cache=place / "cache")
        second = measured(*check, cache=place / "cache")
        rows.append({"megabytes": megabytes, "bytes": path.stat().st_size, "first": first, "second": second})
        path.unlink()
        print(f"{megabytes} MB: {first['seconds']:.0f} s, {first['peak_bytes'] / 2**20:.0f} MiB; again "
              f"{second['seconds']:.1f} s, {second['peak_bytes'] / 2**20:.0f} MiB", file=sys.stderr)  # fmt: skip
    return rows


def main() -> None:
    what, *sizes = sys.argv[1:] or ["gsm8k"]
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory(prefix="tunix-rt-data-") as name:
        if what == "gsm8k":
            result: dict[str, Any] = {"machine": machine, **gsm8k(Path(name))}
        else:
            result = {"machine": machine, "rows": scale(Path(name), [int(size) for size in sizes] or [250, 1000])}
    path = RESULTS / f"data_{what}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
