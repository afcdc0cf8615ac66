"""The rules for answers beside those of math-verify, over the pairs judged by hand.

`python -m benchmarks.answers_against_math_verify`. The scorer does not use math-verify, and it is no dependency: install
`math-verify==0.9.0` where this is to run. Every answer of `tests/unit/answer_pairs.py` is given to both as it would stand
in an answer block; math-verify gets it as text and, between dollar signs, as LaTeX, and one of the two is enough. It has
one verdict, which is set against the lenient one here. Writes benchmarks/results/answers_math_verify.json with every pair
on which they differ.
"""

import json
import logging
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from math_verify import parse, verify

from tests.unit.answer_pairs import IN_BLOCK, tagged
from tunix_rt.scoring.score import matches_lenient, matches_strict

RESULT = Path(__file__).parent / "results" / "answers_math_verify.json"


def theirs(answer: str, expected: str) -> bool:
    texts = [(expected, answer), (f"${expected}$", f"${answer}$")]
    return any(verify(parse(wanted), parse(found)) for wanted, found in texts)


def main() -> None:
    logging.disable(logging.CRITICAL)  # it logs a trace for every text it cannot read
    verdicts: Counter[str] = Counter()
    as_the_person = 0
    differ = []
    for answer, expected, strict, lenient, reason, _ in IN_BLOCK:
        output = tagged(answer)
        ours = (matches_strict(output, expected), matches_lenient(output, expected))
        said = "right" if ours[0] else "value only" if ours[1] else "wrong"
        there = theirs(answer, expected)
        verdicts[f"{said} here, {'right' if there else 'wrong'} there"] += 1
        as_the_person += there == lenient
        if there != ours[1]:
            person = "right" if strict else "value only" if lenient else "wrong"
            row = {"answer": answer, "expected": expected, "about": reason, "person": person, "here": said}
            differ.append(row | {"math_verify": "right" if there else "wrong"})
    found = {
        "schema": "tunix-rt/answers-math-verify/1",
        "math_verify": version("math-verify"),
        "latex2sympy2_extended": version("latex2sympy2_extended"),
        "pairs": len(IN_BLOCK),
        "agree": len(IN_BLOCK) - len(differ),
        "math_verify_as_the_person": as_the_person,
        "verdicts": dict(sorted(verdicts.items())),
        "differ_by_subject": dict(sorted(Counter(row["about"] for row in differ).items())),
        "differ": differ,
    }
    RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(IN_BLOCK)} pairs, {len(differ)} judged otherwise; {dict(verdicts)}")


if __name__ == "__main__":
    main()
