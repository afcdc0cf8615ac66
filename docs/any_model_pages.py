"""The drawn models that no row knows, as `benchmarks.any_model` trained them, for docs/guides/models.md."""

import json
from pathlib import Path
from typing import Any

from benchmarks.any_model import STEPS, TOLERANCE
from docs.markdown import table, with_block

PAGE = Path("docs/guides/models.md")
RESULTS = Path("benchmarks/results/any_model.jsonl")


def page(root: Path) -> str:
    return with_block(root, PAGE, "any-model", block(root))


def block(root: Path) -> str:
    """A row for each model type that was tried."""
    cases = [json.loads(line) for line in (root / RESULTS).read_text(encoding="utf-8").splitlines()]
    tried = [case for case in cases if case["outcome"] != "not tried"]
    trained = [case for case in tried if case["outcome"] == "trained"]
    worst = max(case["largest_difference"] for case in trained)
    said = (
        f"{len(trained)} of {len(tried)} model types, drawn from the auto-mapping of transformers, train {STEPS} steps with each "
        f"loss equal to a plain transformers loop to {TOLERANCE:g} (largest relative difference {worst:.1g}): tiny models with "
        f"random weights on a CPU, torch {trained[0]['torch']}, transformers {trained[0]['transformers']}. "
        f"`python -m benchmarks.any_model` measures them; raw output in `{RESULTS}`."
    )
    rows = ((f"`{case['name']}`", *_cells(case)) for case in tried)
    return "\n\n".join([said, table(("model_type", "rows", "loss", "largest difference"), rows)])


def _cells(case: dict[str, Any]) -> tuple[str, str, str]:
    if case["outcome"] != "trained":
        cause, _, fix = case["why"].removeprefix("error: ").partition("   fix: ")
        return case["outcome"], f"{cause}; way out: {fix}", ""
    found = dict(line.split(": ", 1) for line in case["support"] if line.startswith(("Packing", "Loss head")))
    rows = "packed" if found["Packing"].startswith("packed rows equal") else "one example each"
    loss = "chunked" if found["Loss head"].startswith("the chunked loss equals") else "of the model's own logits"
    return rows, loss, f"{case['largest_difference']:.1e}"
