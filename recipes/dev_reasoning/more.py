"""More questions of the same templates: `python -m recipes.dev_reasoning.more`.

`evalsets/eval_v2_more.jsonl` has 300 questions for evaluation, `datasets/dev-reasoning-more` those that reinforcement learning
samples from. Both are a pure function of the seeds, byte for byte. None has the template and the operands of a question or trace
of `generate.py`, nor any thirteen words in a row of a question of eval_v2; those to train on have none of eval_v2_more either.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Set
from pathlib import Path

from recipes.dev_reasoning.generate import (
    SEED,
    TEMPLATES,
    Row,
    _fresh,
    _held_out_rows,
    _lines,
    _manifest,
    _question,
    _runs_of_words,
    _training_rows,
    tokenised,
    trace_record,
    write_files,
)
from recipes.dev_reasoning.shape import Draw

QUESTIONS = Path("evalsets/eval_v2_more.jsonl")
QUESTIONS_MANIFEST = Path("evalsets/eval_v2_more.manifest.json")
DATASET = Path("datasets/dev-reasoning-more/dataset.jsonl")
DATASET_MANIFEST = Path("datasets/dev-reasoning-more/manifest.json")
MORE_SEED = "rl"
EVALUATED, TRAINED = 300, 1600


def more_rows(evaluated: int = EVALUATED, trained: int = TRAINED, seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """Questions for evaluation, then those to train on. Templates occur as often as among the traces, until one has no new
    operands left."""
    taken: set[tuple[str, ...]] = set()
    held_out = _held_out_rows(seed, taken)
    asked = frozenset(run for _, problem in held_out for run in _runs_of_words(problem.prompt))
    _training_rows(seed, taken, asked)  # closes their operands
    draws = {template.name: Draw(f"{MORE_SEED}/{template.name}") for template in TEMPLATES}
    order, exhausted = Draw(f"{MORE_SEED}/order"), set[str]()
    shares = [template for template in TEMPLATES for _ in range(max(1, template.train))]

    def drawn(count: int, closed: Set[str]) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < count:
            for template in order.shuffled(shares):
                if template.name in exhausted or len(rows) == count:
                    continue
                try:
                    rows.append((template, _fresh(template, draws[template.name], taken, asked=closed)))
                except ValueError:
                    exhausted.add(template.name)
            if len(exhausted) == len(TEMPLATES):
                raise ValueError(f"only {len(rows)} more questions; ask for fewer")
        return rows

    questions = drawn(evaluated, asked)
    also = frozenset(run for _, problem in questions for run in _runs_of_words(problem.prompt))
    return questions, drawn(trained, asked | also)


def generate() -> dict[Path, bytes]:
    """All four files by their path below the root, as bytes."""
    questions, training = more_rows()
    evalset = _lines([_question(row, f"ev2m-{number:03d}") for number, row in enumerate(questions, start=1)])
    traces = [trace_record(row, f"drm-{number:04d}") for number, row in enumerate(training, start=1)]
    dataset, sections = _lines(traces), Counter(template.section for template, _ in training)
    return {
        QUESTIONS: evalset,
        QUESTIONS_MANIFEST: _manifest(
            "eval_v2_more", evalset, SEED, Counter(t.eval_section for t, _ in questions), questions
        ),
        DATASET: dataset,
        DATASET_MANIFEST: _manifest("dev-reasoning-more", dataset, SEED, sections, training, tokenised(traces)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write eval_v2_more and dev-reasoning-more.")
    parser.add_argument("--out", type=Path, default=Path(), help="folder that holds datasets/ and evalsets/")
    parser.add_argument("--check-only", action="store_true", help="write nothing; exit 1 when a file differs")
    options = parser.parse_args()
    return write_files(generate(), options.out, check_only=options.check_only)


if __name__ == "__main__":
    sys.exit(main())
