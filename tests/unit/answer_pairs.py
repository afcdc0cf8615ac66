"""Answers and the verdicts a person gave them (`answer_pairs.jsonl`). Most were written down before any rule was run over them.

IN_BLOCK: the answer in the answer block of a well-formed output. AS_OUTPUT: the whole output, tags and all. DISAGREEMENTS are
rows where the rules knowingly differ from the person; the docs page shows them.
"""

import json
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """An answer, what was expected, both verdicts, and what it is about (of a disagreement: why the rules differ)."""

    text: str
    expected: str
    strict: bool
    lenient: bool
    reason: str


def tagged(answer: str) -> str:
    return f"<reasoning>We work it out step by step.</reasoning><answer>{answer}</answer>"


def _pairs(where: str) -> list[Pair]:
    rows = map(json.loads, Path(__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines())
    return [
        Pair(row["text"], row["expected"], row["verdict"] == "strict", row["verdict"] != "wrong", row["reason"])
        for row in rows
        if row["where"] == where
    ]


IN_BLOCK, AS_OUTPUT, DISAGREEMENTS = map(_pairs, ("block", "output", "disagreement"))
