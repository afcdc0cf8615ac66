"""A second look at the generated files, from their text alone: `python -m recipes.dev_reasoning.check`.

Every equation and stated fact is evaluated, every question is solved again by the checker's own reading of it, and
the two files are compared for shared questions. No template module is imported, and no row goes unread.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from recipes.dev_reasoning.check_questions import Solution, solve
from recipes.dev_reasoning.check_steps import step_problems

DATASET = Path("datasets/dev-reasoning-v2/dataset.jsonl")
EVALSET = Path("evalsets/eval_v2.jsonl")

TRACE_SECTIONS = {"reasoning": 385, "synthetic": 110, "golden": 35, "edge": 20}
QUESTION_SECTIONS = {"core": 60, "trace": 25, "edge": 15}
LARGEST_SHARE = 0.08
SMALLEST_TEMPLATE = 12  # rows; golden and edge templates may have fewer
FEWEST_TEMPLATES = 30
LONGEST_PROMPT, LONGEST_TRACE, LARGEST_VOCABULARY = 170, 300, 500
SAME_ANSWER_HELD_OUT = 2
SHARED_WORDS = 13  # in a row, or a whole question shorter than that: in both files is too many
EASY_TO_GUESS = 3  # held-out questions whose answer more than one in five training rows of their template share
# Edge templates ask in the sentences of an ordinary one.
BORROWED = {
    "times_one": "price_total",
    "times_zero": "mul_then_add",
    "equal_numbers": "add_three",
    "large_round": "add_two",
    "no_leftover": "div_leftover",
}

TRACE_KEYS = {"id": str, "prompt": str, "steps": list, "final_answer": str, "meta": dict}
META_KEYS = {"section": str, "template": str, "category": str, "difficulty": str}
QUESTION_KEYS = {"id": str, "prompt": str, "answer": str, **META_KEYS}
STEP_KEYS = {"i": int, "type": str, "content": str}
DIFFICULTIES = ("easy", "medium", "hard")

Read = tuple[str, dict, Solution]
"""Where a row stands (file:line), the row, and the question worked out."""


def list_problems(dataset_path: Path, evalset_path: Path) -> list[str]:
    """Everything that is wrong with the two files, each with file and line; empty when nothing is."""
    traces, problems = _read(dataset_path)
    questions, more = _read(evalset_path)
    problems += more
    problems += _kind_problems(traces, traces=True) + _kind_problems(questions, traces=False)
    if problems:
        return problems  # the counts below are of whole, readable files
    problems += _count_problems(dataset_path, [row["meta"]["section"] for _, row, _ in traces], TRACE_SECTIONS)
    problems += _count_problems(evalset_path, [row["section"] for _, row, _ in questions], QUESTION_SECTIONS)
    problems += _share_problems(dataset_path, traces)
    problems += _uniqueness_problems(traces + questions)
    problems += _guess_problems(evalset_path, traces, questions)
    return problems + _overlap_problems(traces, questions) + shared_words_problems(traces, questions)


def manifest_problems(path: Path, manifest_path: Path) -> list[str]:
    """Where the manifest does not tell the truth about the file."""
    content = path.read_bytes()
    manifest = json.loads(manifest_path.read_text())
    rows = [json.loads(line) for line in content.splitlines()]
    labels = [row.get("meta", row) for row in rows]
    truth = {
        "rows": len(rows),
        "sha256": hashlib.sha256(content).hexdigest(),
        "sections": dict(Counter(label["section"] for label in labels)),
        "templates": dict(Counter(label["template"] for label in labels)),
    }
    return [
        f"{manifest_path}: {key} is {manifest.get(key)}, the file has {value}"
        for key, value in truth.items()
        if manifest.get(key) != value
    ]


def row_problems(row: object) -> list[str]:
    """What is wrong with one trace or one held-out question by itself."""
    return _read_row(row)[1]


def _read(path: Path) -> tuple[list[Read], list[str]]:
    rows: list[Read] = []
    problems: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"{where}: not JSON: {error}")
            continue
        solution, faults = _read_row(row)
        problems += [f"{where}: {fault}" for fault in faults]
        if solution:
            rows.append((where, row, solution))
    return rows, problems


def _read_row(row: object) -> tuple[Solution | None, list[str]]:
    if problems := _shape_problems(row):
        return None, problems
    try:
        solution = solve(row["prompt"])
    except ValueError as error:
        return None, [f"question not solved: {error}"]
    return solution, _content_problems(row, solution)


def _key_problems(record: object, keys: dict[str, type], name: str) -> list[str]:
    if not isinstance(record, dict) or set(record) != set(keys):
        return [f"{name} must have exactly the keys {', '.join(keys)}"]
    return [
        f"{name}.{key} must be a {kind.__name__}" for key, kind in keys.items() if not isinstance(record[key], kind)
    ]


def _shape_problems(row: object) -> list[str]:
    if not isinstance(row, dict) or "meta" not in row:
        return _key_problems(row, QUESTION_KEYS, "question")
    if problems := _key_problems(row, TRACE_KEYS, "trace"):
        return problems
    problems = _key_problems(row["meta"], META_KEYS, "meta")
    for step in row["steps"]:
        problems += _key_problems(step, STEP_KEYS, "step")
    return problems


def _content_problems(row: dict, solution: Solution) -> list[str]:
    label = row.get("meta", row)
    answer = row["final_answer"] if "meta" in row else row["answer"]
    problems = []
    if BORROWED.get(label["template"], label["template"]) != solution.form:
        problems.append(f"labelled {label['template']}, but the question is one of {solution.form}")
    if label["difficulty"] not in DIFFICULTIES:
        problems.append(f"difficulty {label['difficulty']!r}")
    if answer != solution.answer:
        problems.append(f"the answer is {solution.answer}, the row says {answer}")
    if len(row["prompt"]) > LONGEST_PROMPT:
        problems.append(f"prompt of {len(row['prompt'])} characters")
    if "meta" in row:
        if len(_whole_text(row)) > LONGEST_TRACE:
            problems.append(f"trace of {len(_whole_text(row))} characters")
        problems += step_problems(row["prompt"], row["steps"], answer, solution)
    return problems


def _whole_text(row: dict) -> str:
    return " ".join([row["prompt"], *(step["content"] for step in row["steps"]), row["final_answer"]])


def _kind_problems(rows: list[Read], *, traces: bool) -> list[str]:
    kind = "trace" if traces else "held-out question"
    return [f"{where}: not a {kind}" for where, row, _ in rows if ("meta" in row) != traces]


def _count_problems(path: Path, sections: list[str], wanted: dict[str, int]) -> list[str]:
    found = Counter(sections)
    return [
        f"{path}: {found[section]} rows of section {section}, {wanted.get(section, 0)} expected"
        for section in sorted(set(found) | set(wanted))
        if found[section] != wanted.get(section, 0)
    ]


def _share_problems(path: Path, traces: list[Read]) -> list[str]:
    counts = Counter((row["meta"]["template"], row["meta"]["section"]) for _, row, _ in traces)
    problems = (
        [] if len(counts) >= FEWEST_TEMPLATES else [f"{path}: {len(counts)} templates, {FEWEST_TEMPLATES} expected"]
    )
    for (template, section), count in counts.items():
        if count > LARGEST_SHARE * len(traces):
            problems.append(f"{path}: {template} has {count} rows, over {LARGEST_SHARE:.0%}")
        if section in ("reasoning", "synthetic") and count < SMALLEST_TEMPLATE:
            problems.append(f"{path}: {template} has {count} rows, {SMALLEST_TEMPLATE} expected")
    words = {word for _, row, _ in traces for word in re.findall(r"[A-Za-z]+", _whole_text(row))}
    if len(words) > LARGEST_VOCABULARY:
        problems.append(f"{path}: {len(words)} different words, at most {LARGEST_VOCABULARY} expected")
    return problems


def _uniqueness_problems(rows: list[Read]) -> list[str]:
    problems = []
    for field in ("id", "prompt"):
        first_seen: dict[str, str] = {}
        for where, row, _ in rows:
            if (earlier := first_seen.setdefault(row[field], where)) != where:
                problems.append(f"{where}: same {field} as {earlier}")
    return problems


def _guess_problems(path: Path, traces: list[Read], questions: list[Read]) -> list[str]:
    answers = Counter(row["answer"] for _, row, _ in questions)
    problems = [
        f"{path}: {count} questions have the answer {answer}, at most {SAME_ANSWER_HELD_OUT} expected"
        for answer, count in answers.items()
        if count > SAME_ANSWER_HELD_OUT
    ]
    easy = easy_to_guess(traces, questions)
    if len(easy) > EASY_TO_GUESS:
        problems.append(
            f"{path}: {len(easy)} answers are easy to guess, at most {EASY_TO_GUESS} expected: {', '.join(easy)}"
        )
    return problems


def easy_to_guess(traces: list[Read], questions: list[Read]) -> list[str]:
    """Ids of held-out questions whose answer is that of more than a fifth of the training rows of their template.

    Templates under twelve rows are too few for a share to mean anything; there only a constant answer counts.
    """
    by_template: dict[str, Counter[str]] = {}
    for _, row, _ in traces:
        by_template.setdefault(row["meta"]["template"], Counter())[row["final_answer"]] += 1
    found = []
    for _, row, _ in questions:
        answers = by_template.get(row["template"], Counter())
        share = answers[row["answer"]] / max(1, answers.total())
        if share > (0.2 if answers.total() >= SMALLEST_TEMPLATE else 0.99):
            found.append(row["id"])
    return found


def _overlap_problems(traces: list[Read], questions: list[Read]) -> list[str]:
    """Held-out questions asked in training with other names or things, or with the operands in another order.

    A question without its names and things is its form and operands, so equal prompts after renaming are found too.
    """
    trained = {(solution.form, solution.operands): where for where, _, solution in traces}
    return [
        f"{where}: same {asked.form} with {', '.join(asked.operands)} as {trained[asked.form, asked.operands]}"
        for where, _, asked in questions
        if (asked.form, asked.operands) in trained
    ]


def shared_words_problems(traces: list[Read], questions: list[Read]) -> list[str]:
    """Traces that say thirteen words in a row, or the whole, of a held-out question, whatever case and punctuation."""
    asked: dict[tuple[str, ...], str] = {}
    for where, row, _ in questions:
        words = _words(row["prompt"])
        asked.update((run, where) for run in _runs(words, min(SHARED_WORDS, len(words))))
    lengths = sorted({len(run) for run in asked})
    problems = []
    for where, row, _ in traces:
        words = _words(_whole_text(row))
        shared = next((run for length in lengths for run in _runs(words, length) if run in asked), None)
        if shared:
            problems.append(f"{where}: says {' '.join(shared)!r} of {asked[shared]}")
    return problems


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _runs(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def _figures(dataset_path: Path, evalset_path: Path) -> str:
    traces, _ = _read(dataset_path)
    questions, _ = _read(evalset_path)
    templates = Counter(row["meta"]["template"] for _, row, _ in traces)
    texts = [_whole_text(row) for _, row, _ in traces]
    trained = {equation for _, _, solution in traces for equation in solution.equations}
    asked = [equation for _, _, solution in questions for equation in solution.equations]
    name, most = templates.most_common(1)[0]
    return "\n".join(
        (
            f"traces       {len(traces)}, templates {len(templates)}, largest {name} {most} ({most / len(traces):.1%})",
            f"questions    {len(questions)}, {len({row['answer'] for _, row, _ in questions})} different answers, "
            f"{len(easy_to_guess(traces, questions))} easy to guess",
            f"equations    {sum(len(solution.equations) for _, _, solution in traces)} in training, "
            f"{len(trained)} different; {sum(e in trained for e in asked)} of {len(asked)} held-out ones among them",
            f"characters   longest trace {max(map(len, texts))}, mean {sum(map(len, texts)) / len(texts):.0f}",
            f"words        {len({word for text in texts for word in re.findall('[A-Za-z]+', text)})} different",
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Check dev-reasoning-v2 and its held-out questions from their text.")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder that holds datasets/ and evalsets/")
    root = parser.parse_args().root
    dataset, evalset = root / DATASET, root / EVALSET
    problems = list_problems(dataset, evalset)
    problems += manifest_problems(dataset, dataset.with_name("manifest.json"))
    problems += manifest_problems(evalset, evalset.with_suffix(".manifest.json"))
    if problems:
        sys.stdout.write("\n".join(problems) + f"\n{len(problems)} problems\n")
        return 1
    sys.stdout.write(_figures(dataset, evalset) + "\nno problem found\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
