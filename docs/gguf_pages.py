"""GGUF files as `benchmarks.gguf_files` measured them, for docs/guides/take-it-elsewhere.md."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.markdown import table, with_block

PAGE = Path("docs/guides/take-it-elsewhere.md")
RESULTS = Path("benchmarks/results/gguf_files.jsonl")
COLUMNS = (
    "model", "file", "MiB", "perplexity", "of the original", "change", "logits moved", "llama.cpp: perplexity",
    "of our weights",
)  # fmt: skip
ABOUT = """Perplexity is that of the last questions and answers of the GSM8K training set as plain text, float32 on a CPU. SmolLM2
(Q4_1) and Gemma (Q4_K_M) come from the registries in 4 bits and were dequantized: a second quantization to nearly the same codes
moves them less than a first one would. Logits are those after four questions, as a share of the largest; those of transformers
differ from those of the dequantized weights by at most {apart:.1g} of it. llama.cpp reads two documents, one token at a time, and
rounds activations to 8 bits where weights are quantized. `python -m benchmarks.gguf_files` measures it; raw output in
`{results}`; {versions}."""
FAMILIES = """Small models with random weights, as `f32`: the largest difference of logits between llama.cpp and transformers, as
a share of the largest. llama.cpp's GELU is a table in float16."""
ERRORS = "Types and errors of our quantizer and of llama.cpp's own, on the same weights:"


def page(root: Path) -> str:
    return with_block(root, PAGE, "gguf", block(root))


def block(root: Path) -> str:
    """Every model and file, the quantizers compared, and the families."""
    lines = [json.loads(line) for line in (root / RESULTS).read_text(encoding="utf-8").splitlines()]
    models = [line for line in lines if "files" in line]
    versions = {name: text for line in models for name, text in line["versions"].items()}
    apart = max(share for model in models for share in _transformers(model))
    compared = [file["llama_cpp"] for model in models for file in model["files"].values() if "llama_cpp" in file]
    equal = all(there["texts_equal"] == there["texts"] for there in compared)
    families = (
        (one["name"].removeprefix("family "), f"`{one['architecture']}`", f"{one['relative_difference']:.1e}")
        for one in lines
        if "architecture" in one
    )
    parts = [
        ABOUT.format(
            apart=apart,
            results=RESULTS,
            versions=", ".join(f"{name} {text}" for name, text in sorted(versions.items())),
        ),
        table(COLUMNS, (row for model in models for row in _rows(model))),
        f"Token ids of llama.cpp and of our tokenizer: {'equal for every text and file' if equal else 'NOT equal'}.",
        ERRORS,
        table(
            ("model", "file, type", "types that differ", "error, ours", "error, llama.cpp"),
            (row for model in models for row in _errors(model)),
        ),
        FAMILIES,
        table(("family", "in llama.cpp", "difference"), families),
    ]
    return "\n\n".join(parts)


def _transformers(model: dict[str, Any]) -> Iterator[float]:
    for file in model["files"].values():
        if file["transformers_difference"] is not None:
            yield file["transformers_difference"] / file["largest_logit"]


def _rows(model: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for kind, file in model["files"].items():
        there, original = file.get("llama_cpp", {}), model["original"]
        change = 100 * (file["perplexity"] / original - 1)
        moved = 100 * file["moved_logits"] / file["largest_logit"]
        yield (
            model["name"], f"`{kind}`", f"{file['bytes'] / 2**20:.1f}", f"{file['perplexity']:,.3f}", f"{original:,.3f}",
            f"{change:+.2f} %", f"{moved:.2f} %",
            *(f"{there[key]:,.3f}" if there else "" for key in ("perplexity", "perplexity_here")),
        )  # fmt: skip


def _errors(model: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for kind, file in model["files"].items():
        there = file.get("llama_cpp", {})
        for weights, error in there.get("relative_errors", {}).items():
            shares = (f"{100 * error[whose]:.2f} %" for whose in ("ours", "llama_cpp"))
            yield (model["name"], f"`{kind}`, {weights}", str(len(there["types_that_differ"])), *shares)
