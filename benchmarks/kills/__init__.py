"""Kill a run at 100 random moments with kill -9, go on with it each time, and keep the figures: python -m benchmarks.kills

`series.py` says how it is done. Every kill is a row of the table in benchmarks/results/kills.json, with the seed that
draws its moment. `--device cuda --deterministic --kills 5` does it on a GPU and writes kills_cuda.json;
`python -m benchmarks.kills.trainer` does it to the Trainer of transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs import markdown

RESULTS = Path("benchmarks/results")
COMMAND = "python -m benchmarks.kills"
ROWS = {
    "kills": "kills",
    "inside_a_save": "of these inside a save",
    "lost": "saved steps lost",
    "resumes_failed": "resumes that ended with an error",
    "resumes_strayed": "resumes from another than the newest whole checkpoint",
    "orphans": "processes left behind",
    "chains": "runs that were killed, and gone on with to the end",
    "chains_without_help": "of these without a person's help",
    "chains_identical": "of these with the final weights of the uninterrupted run, bit for bit",
}


def recorded(root: Path) -> dict[str, Mapping[str, Any]]:
    """What was recorded: the name of a column -> the figures of its series."""
    ours, cuda, trainer = (root / RESULTS / f"{name}.json" for name in ("kills", "kills_cuda", "kills_trainer"))
    results = {"tunix-rt": json.loads(ours.read_text(encoding="utf-8"))}
    if cuda.is_file():
        on_gpu = json.loads(cuda.read_text(encoding="utf-8"))
        results[f"tunix-rt on {on_gpu['machine']}"] = on_gpu
    if trainer.is_file():
        theirs = json.loads(trainer.read_text(encoding="utf-8"))
        results |= {"Trainer": theirs["default"], "Trainer, `full_determinism`": theirs["full_determinism"]}
    return results


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The series side by side, in markdown."""
    rows = [(words, *(f"{figures[name]:,}" for figures in results.values())) for name, words in ROWS.items()]
    return markdown.table(("what", *results), rows)


def block(root: Path) -> str:
    """The table with what it was made of, for a page."""
    results = recorded(root)
    ours = results["tunix-rt"]
    said = (
        f"{ours['steps']} steps of a small GPT-2 with dropout, a save every {ours['save_steps']} steps, an epoch of "
        f"{ours['steps_in_an_epoch']}. {ours['in_the_first_save']} kills came inside the first save; "
        f"{ours['resumed_twice_in_an_epoch']} runs went on from two places of one epoch. The steps since the last commit are "
        f"taken again: {ours['steps_again_median']:g} at the median, {ours['steps_again_most']} at most, where the save before "
        f"was still being written. Measured on {ours['machine']} by `{COMMAND}`, seed {ours['seed']}; every kill with its "
        f"moment is in `{RESULTS / 'kills.json'}`."
    )
    if "Trainer" in results:
        theirs = json.loads((root / RESULTS / "kills_trainer.json").read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {version}" for name, version in theirs["versions"].items())
        said += (
            f"\n\nThe Trainer is that of {versions}: the same model, steps, saves, seed and kinds of kills, "
            "`save_total_limit=2`, all else as it comes. It writes into `checkpoint-N` itself and goes on from the highest N: "
            "after a kill inside a save that one is half written, and the resume ends with an error until a person deletes it. "
            "Here that was done each time, and counted."
        )
    return f"{table(results)}\n\n{said}"


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """As JSON, with one kill in a line."""

    def shown(value: Any, depth: int) -> str:
        inside, after = "  " * (depth + 1), "  " * depth
        if isinstance(value, Mapping) and value:
            inner = [f"{inside}{json.dumps(key)}: {shown(item, depth + 1)}" for key, item in value.items()]
            return "{\n" + ",\n".join(inner) + f"\n{after}}}"
        if isinstance(value, list) and value:
            return "[\n" + ",\n".join(f"{inside}{json.dumps(item)}" for item in value) + f"\n{after}]"
        return json.dumps(value)

    path.write_text(shown(results, 0) + "\n", encoding="utf-8")
