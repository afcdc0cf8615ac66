"""Blocks about answers: how many are right before and after training (README.md), and how fast they come
(docs/guides/did-it-help.md). Both are read from benchmarks/results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.markdown import table
from tunix_rt.errors import TunixError

DEMO = Path("benchmarks/results/demo.json")
DEMO_COMMAND = "python -m benchmarks.demo"
ANSWERS = Path("benchmarks/results/generation_cuda.json")
ANSWERS_COMMAND = "python -m benchmarks.generation --model DIR --questions FILE --device cuda"


def read_demo(root: Path) -> Mapping[str, Any] | None:
    path = root / DEMO
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def demo_block(demo: Mapping[str, Any] | None) -> str:
    """The table of README.md; a note where the demo's figures were not recorded yet."""
    if demo is None:
        return f"The figures are not recorded yet. `{DEMO_COMMAND}` records them."
    try:
        measures = {
            "right, strict": "accuracy",
            "right, lenient": "accuracy_lenient",
            "well-formed": "format_rate",
        }
        rows = [
            (words, *(f"{100 * demo[when][key]:.1f} %" for when in ("before", "after", "control")))
            for words, key in measures.items()
        ]
        facts = (
            f"{demo['minutes']:.1f} minutes on {demo['machine']}, {demo['tokens_per_second']:,.0f} tokens/s in training. "
            f"Peak memory: {demo['predicted_bytes'] / 2**20:,.0f} MiB predicted, "
            f"{demo['measured_bytes'] / 2**20:,.0f} MiB measured.\n\n"
            f"What the base model knew: given the situation of a held-out question as a story, it worked out "
            f"{demo['told_before']['worked_out']} of {demo['told_before']['situations']} before any training. Given the "
            f"question, it answered with another question. The training teaches it to take a question apart into steps "
            f"and to answer it in a form that can be read; the arithmetic it had."
        )
    except (KeyError, TypeError) as error:
        raise TunixError(f"{DEMO} lacks or misspells {error}", fix=f"record it again: {DEMO_COMMAND}") from error
    return table(("answers to held-out questions", "before", "after", "control"), rows) + f"\n\n{facts}"


def answers_block(root: Path) -> str:
    """Answers per second beside transformers' own `generate`; says so where they were not measured."""
    if not (root / ANSWERS).is_file():
        return f"Not measured yet; `{ANSWERS_COMMAND}` measures it."
    try:
        found = json.loads((root / ANSWERS).read_text(encoding="utf-8"))
        about, rows = found["about"], []
        for run in found["runs"]:
            at_best = (
                run["dtype"],
                f"tunix-rt, {run['rows']:,}, by itself",
                f"{run['items_per_second']:.1f}",
                "",
            )
            rows.append(at_best)
            for beside in run["transformers"]:
                same = f"{beside['ours_at_these_rows_items_per_second']:.1f}"
                differ = f"{beside['answers_that_differ']:,} of {about['questions']:,}"
                rows.append((run["dtype"], f"tunix-rt, {beside['rows']:,}", same, ""))
                rows.append(
                    (run["dtype"], f"transformers, {beside['rows']:,}", f"{beside['items_per_second']:.1f}", differ)
                )
        said = (
            f"{about['model']}, {about['parameters']:,} parameters, {about['questions']:,} questions, at most "
            f"{about['max_new_tokens']} new tokens, each way timed once. `{ANSWERS_COMMAND}`; {about['device']}, torch "
            f"{about['torch']}, transformers {about['transformers']}."
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TunixError(f"{ANSWERS} lacks or misspells {error}", fix=f"measure it again: {ANSWERS_COMMAND}") from error
    columns = ("type", "prompts at once", "answers/s", "answers that differ from tunix-rt's")
    return f"{table(columns, rows)}\n\n{said}"


DECODE = Path("benchmarks/results/decode")
DECODE_COMMAND = "python -m benchmarks.decode_speed"
DECODE_POINTS = (
    "gemma-3-270m",
    "gemma-3-270m-transformers",
    "gemma-3-1b",
    "gemma-3-1b-transformers",
    "gemma-3-270m-1-row",
)


def decode_block(root: Path) -> str:
    """Generated tokens per second beside transformers' `generate`, and the time of the draw."""
    rows = []
    for name in DECODE_POINTS:
        one = json.loads((root / DECODE / f"{name}.json").read_text(encoding="utf-8"))
        preset, theirs = name.removesuffix("-transformers").removesuffix("-1-row"), name.endswith("-transformers")
        who = "transformers" if theirs else "tunix-rt"
        rows.append((preset, who, str(one["rows"]), f"{one['tokens_per_second']:,}", f"{one['peak_gib']:.2f}"))
    draw = json.loads((root / DECODE / "draw.json").read_text(encoding="utf-8"))
    times = draw["milliseconds"]
    said = (
        f"bfloat16, {one['prompt_tokens']} prompt and {one['new_tokens']} sampled tokens for each row, random weights, prefill "
        f"included, the median of three calls. Sampling {draw['rows']} tokens from {draw['vocabulary']:,} logits each takes "
        f"{times['drawn']:.2f} ms, {times['drawn, scored']:.2f} ms with log-probabilities, and "
        f"{times['by operators of torch']:.1f} ms by operators of torch. `{DECODE_COMMAND}`; {one['device']}, torch "
        f"{one['torch']}, transformers {one['transformers']}."
    )
    return f"{table(('model', 'generated by', 'rows', 'tokens/s', 'peak GiB'), rows)}\n\n{said}"
