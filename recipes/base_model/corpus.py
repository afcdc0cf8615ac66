"""The text the base model reads: plain stories with their sums worked out, drills, letters, and questions without answers.

It tells the same kinds of situations as the traces, as statements with the sums worked out: the base model knows how such
stories go. It holds no tag and no question that is answered, and no situation with the operands of a trace or of a
held-out question: those are passed over when drawn from the templates. The bare sums of the drills are not filtered.
"""

import random
import re
from collections.abc import Iterator

from recipes.dev_reasoning.generate import TEMPLATES, generate_rows
from recipes.dev_reasoning.shape import Draw, Problem

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_SENTENCE_END = re.compile(r"(?<=[.?]) ")


def closed_keys() -> frozenset[tuple[str, ...]]:
    """(template, operands) of every trace and every held-out question: never told in the corpus."""
    return frozenset(template.key(problem) for rows in generate_rows() for template, problem in rows)


def documents(seed: str, count: int, closed: frozenset[tuple[str, ...]]) -> Iterator[str]:
    """`count` short texts, a pure function of the seed."""
    chance, draw = random.Random(f"{seed}/kind"), Draw(f"{seed}/draw")
    for _ in range(count):
        kind = chance.random()
        if kind < 0.55:
            yield "\n".join(_story(_open_problem(chance, draw, closed), chance) for _ in range(chance.randint(1, 3)))
        elif kind < 0.75:
            yield "\n".join(_sum(chance) for _ in range(chance.randint(4, 12)))
        elif kind < 0.85:
            yield "\n".join(_letters(chance) for _ in range(chance.randint(2, 4)))
        else:
            yield "\n".join(_open_problem(chance, draw, closed).prompt for _ in range(chance.randint(2, 4)))


def _open_problem(chance: random.Random, draw: Draw, closed: frozenset[tuple[str, ...]]) -> Problem:
    while True:
        template = TEMPLATES[chance.randrange(len(TEMPLATES))]
        problem = template.build(draw)
        if template.key(problem) not in closed:
            return problem


def _story(problem: Problem, chance: random.Random) -> str:
    """The situation and how it comes out, as statements: what was asked, and why one calculates so, is left out."""
    told = [part for part in _SENTENCE_END.split(problem.prompt) if not part.endswith("?")]
    told = [part.partition(": ")[2] or part for part in told]
    for kind, text in problem.steps:
        if kind == "fact" and (text.startswith("We ") or "matter" in text):
            continue
        told.append(text.removeprefix("So ") if kind == "conclude" else text)
    told = [part if part.endswith(".") else f"{part}." for part in told]
    told = [part[0].upper() + part[1:] if len(part.split()[0]) > 1 else part for part in told]
    return (" " if chance.random() < 0.7 else "\n").join(told)


def _sum(chance: random.Random) -> str:
    kind = chance.randrange(7)
    if kind == 0:
        a, b = chance.randint(0, 99), chance.randint(0, 99)
        return f"{a} + {b} = {a + b}"
    if kind == 1:
        a, b = chance.randint(0, 150), chance.randint(0, 60)
        return f"{max(a, b)} - {min(a, b)} = {max(a, b) - min(a, b)}"
    if kind == 2:
        a, b = chance.randint(0, 12), chance.randint(0, 12)
        return f"{a} * {b} = {a * b}"
    if kind == 3:
        a, b = chance.randint(2, 12), chance.randint(1, 30)
        return f"{a * b} / {a} = {b}"
    if kind == 4:
        a, b = chance.randint(2, 12), chance.randint(1, 12)
        rest = chance.randrange(a)
        return f"{a * b + rest} = {a} * {b} + {rest}"
    if kind == 5:
        a, b = 100 * chance.randint(1, 9), 100 * chance.randint(1, 9)
        return f"{a} + {b} = {a + b}"
    a, b = chance.randint(2, 60), chance.choice((2, 3, 4, 5, 7, 10, 60))
    return f"{a} * {b} = {a * b}"


def _letters(chance: random.Random) -> str:
    letters = [chance.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(chance.randint(3, 9))]
    row = " ".join(letters)
    kind = chance.randrange(4)
    if kind == 0:
        return f"{row} starts with {letters[0]}."
    if kind == 1:
        return f"{row} ends with {letters[-1]}."
    if kind == 2:
        places = ", ".join(f"{place} {letter}" for place, letter in enumerate(letters, start=1))
        return f"{row} has the places: {places}."
    few = [chance.choice(letters[:2]) for _ in letters]
    places = " ".join(str(place) for place, letter in enumerate(few, start=1) if letter == few[0])
    return f"{' '.join(few)} has {few[0]} at places {places}."
