"""Write the training traces and the held-out questions: `python -m recipes.dev_reasoning.generate`.

Both files are a pure function of the seed, byte for byte. Held-out questions are drawn first; their operands and any
thirteen words of theirs in a row are then closed to training.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path

from recipes.dev_reasoning.shape import Draw, Problem, Template
from recipes.dev_reasoning.strings import SYNTHETIC
from recipes.dev_reasoning.templates_chain import CHAINS
from recipes.dev_reasoning.templates_one import ONE_STEP
from recipes.dev_reasoning.templates_rich import EDGE, GOLDEN
from tunix_rt.config.settings import Data
from tunix_rt.data.formats import to_sample
from tunix_rt.data.packing import facts_of_rows, make_rows
from tunix_rt.data.render import render, style_of
from tunix_rt.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
MODEL, MODEL_TYPE, MOST_TOKENS = "tiny-gemma3", "gemma3_text", 512
SEED = 20
TEMPLATES: tuple[Template, ...] = (*ONE_STEP, *CHAINS, *SYNTHETIC, *GOLDEN, *EDGE)

DATASET = Path("datasets/dev-reasoning-v2/dataset.jsonl")
DATASET_MANIFEST = Path("datasets/dev-reasoning-v2/manifest.json")
EVALSET = Path("evalsets/eval_v2.jsonl")
EVALSET_MANIFEST = Path("evalsets/eval_v2.manifest.json")

# A model that knows only how often each answer occurs can then be right on at most 2 of 100 questions.
SAME_ANSWER_HELD_OUT = 2
# Draws without a new question before a template is called too narrow; the narrowest (sort_digits) needs under 40.
PATIENCE = 2000
# So many words in a row, or a whole question shorter than that, are never in both files.
CLOSED_WORDS = 13

Row = tuple[Template, Problem]


def generate(seed: int = SEED) -> dict[Path, bytes]:
    """All four files by their path below the root, as bytes."""
    held_out, training = generate_rows(seed)
    traces = [trace_record(row, f"dr2-{number:04d}") for number, row in enumerate(training, start=1)]
    dataset = _lines(traces)
    evalset = _lines([_question(row, f"ev2-{number:03d}") for number, row in enumerate(held_out, start=1)])
    return {
        DATASET: dataset,
        DATASET_MANIFEST: _manifest(
            "dev-reasoning-v2", dataset, seed, Counter(t.section for t, _ in training), training, tokenised(traces)
        ),
        EVALSET: evalset,
        EVALSET_MANIFEST: _manifest("eval_v2", evalset, seed, Counter(t.eval_section for t, _ in held_out), held_out),
    }


def generate_rows(seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """Held-out questions and training traces, as templates and problems."""
    taken: set[tuple[str, ...]] = set()
    held_out = _held_out_rows(seed, taken)
    asked = frozenset(run for _, problem in held_out for run in _runs_of_words(problem.prompt))
    return held_out, _training_rows(seed, taken, asked)


def _held_out_rows(seed: int, taken: set[tuple[str, ...]]) -> list[Row]:
    answers: Counter[str] = Counter()
    rows: list[Row] = []
    for template in TEMPLATES:
        draw = Draw(f"{seed}/held-out/{template.name}")
        for _ in range(template.held_out):
            full = {answer for answer, count in answers.items() if count >= SAME_ANSWER_HELD_OUT}
            problem = _fresh(template, draw, taken, full=full)
            answers[problem.answer] += 1
            rows.append((template, problem))
    sections = ("core", "trace", "edge")
    return sorted(rows, key=lambda row: sections.index(row[0].eval_section))


def _training_rows(seed: int, taken: set[tuple[str, ...]], asked: frozenset[str]) -> list[Row]:
    rows: list[Row] = []
    for template in TEMPLATES:
        draw = Draw(f"{seed}/train/{template.name}")
        rows += [(template, _fresh(template, draw, taken, asked=asked)) for _ in range(template.train)]
    return Draw(f"{seed}/order").shuffled(rows)


def _fresh(
    template: Template,
    draw: Draw,
    taken: set[tuple[str, ...]],
    *,
    full: Set[str] = frozenset(),
    asked: Set[str] = frozenset(),
) -> Problem:
    """The next problem with operands new to this wording, an answer not in `full` and none of the runs of words in
    `asked`; closes its operands.

    A problem that holds such a run is first tried with its question in front, and only then given up for another: so
    the operands stay, and with them the rows drawn later and what the base model's corpus leaves out.
    """
    for _ in range(PATIENCE):
        problem = template.build(draw)
        key = template.key(problem)
        if key in taken or problem.answer in full:
            continue
        for ordered in (problem, problem.question_first()):
            if not _holds_any(ordered, asked):
                taken.add(key)
                return ordered
    raise ValueError(
        f"{template.name}: no new question in {PATIENCE} draws; widen its number ranges or ask for fewer rows"
    )


def _holds_any(problem: Problem, runs: Set[str]) -> bool:
    text = _words(" ".join([problem.prompt, *(text for _, text in problem.steps), problem.answer]))
    return any(run in text for run in runs)


def _runs_of_words(question: str) -> list[str]:
    words = _words(question).split()
    starts = range(max(1, len(words) - CLOSED_WORDS + 1))
    return [_words(" ".join(words[start : start + CLOSED_WORDS])) for start in starts]


def _words(text: str) -> str:
    """The words in lower case without punctuation, a space around each."""
    return " ".join(["", *re.findall(r"[^\W_]+", text.casefold()), ""])


def trace_record(row: Row, identifier: str) -> dict:
    """One line of the dataset."""
    template, problem = row
    return {
        "id": identifier,
        "prompt": problem.prompt,
        "steps": [{"i": i, "type": kind, "content": text} for i, (kind, text) in enumerate(problem.steps)],
        "final_answer": problem.answer,
        "meta": {
            "section": template.section,
            "template": template.name,
            "category": template.category,
            "difficulty": template.difficulty,
        },
    }


def _question(row: Row, identifier: str) -> dict:
    template, problem = row
    return {
        "id": identifier,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "section": template.eval_section,
        "category": template.category,
        "template": template.name,
        "difficulty": template.difficulty,
    }


def _lines(records: list[dict]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def tokenised(traces: list[dict]) -> dict:
    """What the traces come to with the tokenizer of the shipped model, as `tunix-rt data import` writes it down."""
    tokenizer = load_tokenizer(ROOT / "models" / MODEL, MODEL_TYPE)
    style = style_of(Data(), tokenizer)
    samples = [to_sample(trace, "trace", trace["id"]) for trace in traces]
    examples = [render(sample, tokenizer, style) for sample in samples]
    return {
        "model": MODEL,
        "tokenizer_sha256": tokenizer.sha256,
        "template": style.template.name,
        "style_sha256": style.sha256,
        "examples": len(examples),
        "tokens": sum(len(example.ids) for example in examples),
        "trained_tokens": sum(int(example.trained.sum()) for example in examples),
        "merkle_root": facts_of_rows(make_rows(examples, max_length=MOST_TOKENS, packing=False)).merkle_root,
    }


def _manifest(
    key: str, content: bytes, seed: int, sections: Counter[str], rows: list[Row], tokenised: dict | None = None
) -> bytes:
    manifest = {
        "key": key,
        "rows": len(rows),
        "sha256": hashlib.sha256(content).hexdigest(),
        "generator": "recipes.dev_reasoning.generate",
        "seed": seed,
        "sections": dict(sorted(sections.items())),
        "templates": dict(sorted(Counter(template.name for template, _ in rows).items())),
    } | ({"tokenised": tokenised} if tokenised else {})
    return (json.dumps(manifest, indent=2) + "\n").encode()


def write_files(files: Mapping[Path, bytes], out: Path, *, check_only: bool) -> int:
    """Write what differs below `out`, or only name it. The exit code: 1 if something differs and nothing is written."""
    differing = 0
    for path, content in files.items():
        target = out / path
        same = target.is_file() and target.read_bytes() == content
        differing += not same
        if not check_only:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        state = "unchanged" if same else "differs" if check_only else "written"
        sys.stdout.write(f"{state:9}  {target}  {len(content)} bytes\n")
    return 1 if check_only and differing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Write dev-reasoning-v2 and its held-out questions.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder that holds datasets/ and evalsets/")
    parser.add_argument("--check-only", action="store_true", help="write nothing; exit 1 when a file differs")
    options = parser.parse_args()
    return write_files(generate(options.seed), options.out, check_only=options.check_only)


if __name__ == "__main__":
    sys.exit(main())
