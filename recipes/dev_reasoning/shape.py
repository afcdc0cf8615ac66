"""What a template is and what it returns, and the seeded source of names, things and numbers it draws from."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

# fmt: off
NAMES = (
    "Mia", "Leo", "Zoe", "Sam", "Ben", "Ana", "Eva", "Max", "Tom", "Lily", "Noah", "Emma",
    "Jack", "Ruby", "Omar", "Nina", "Ivan", "Sara", "Luis", "Kate", "Adam", "Rosa", "Finn", "Tara",
)
THINGS = (
    "pens", "books", "apples", "cups", "shells", "stones", "coins", "cards", "eggs", "plums", "kites", "balls",
    "hats", "beads", "stamps", "seeds", "cakes", "rings", "nuts", "bricks", "toys", "bells", "keys", "boats",
)
# fmt: on
HOLDERS = ("boxes", "bags", "jars", "trays")

Step = tuple[str, str]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with its worked steps. `operands` is what must differ between training and held-out rows."""

    operands: tuple[int | str, ...]
    prompt: str
    steps: tuple[Step, ...]
    answer: str

    def question_first(self) -> "Problem":
        """The same problem with its question before what is given; itself when the prompt is one sentence."""
        given, _, question = self.prompt.rpartition(". ")
        return replace(self, prompt=f"{question} {given}.") if given else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One kind of question: how it is built, and how many rows each file takes of it.

    `wording` names another template whose sentences this one borrows (the edge cases do); the two share one
    pool of operands, so that an edge case held out is not an ordinary row of training.
    """

    build: Callable[["Draw"], Problem]
    category: str
    difficulty: str
    section: str
    train: int
    eval_section: str
    held_out: int
    wording: str = ""

    @property
    def name(self) -> str:
        return self.build.__name__

    def key(self, problem: Problem) -> tuple[str, ...]:
        """The wording and the operands in sorted order: 3 + 4 and 4 + 3 of one template are the same key."""
        return (self.wording or self.name, *sorted(map(str, problem.operands)))


def fact(text: str) -> Step:
    return ("fact", text)


def compute(text: str) -> Step:
    return ("compute", text)


def conclude(text: str) -> Step:
    return ("conclude", text)


class Draw:
    """A seeded source of names, things and numbers, small enough to reckon with: factors run from 2 to 12."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self._random.randrange(low, high + 1)

    def pick(self, *options: Item) -> Item:
        return options[self._random.randrange(len(options))]

    def shuffled(self, items: list[Item]) -> list[Item]:
        order = list(items)
        self._random.shuffle(order)
        return order

    def names(self, count: int) -> list[str]:
        return self._distinct(NAMES, count)

    def things(self, count: int) -> list[str]:
        return self._distinct(THINGS, count)

    def holder(self) -> str:
        return self.pick(*HOLDERS)

    def sum_pair(self) -> tuple[int, int]:
        """A larger and a smaller addend; one pair in four adds a round ten."""
        if self.between(1, 4) == 1:
            return self.between(11, 69), 10 * self.between(1, 5)
        return self.between(8, 69), self.between(2, 15)

    def difference_pair(self) -> tuple[int, int]:
        """A whole and a part to take away that leaves at least 2; one pair in four takes a round ten."""
        if self.between(1, 4) == 1:
            part = 10 * self.between(1, 5)
            return part + self.between(2, 45), part
        return self.between(17, 90), self.between(2, 15)

    def factors(self) -> tuple[int, int]:
        return self.between(2, 12), self.between(2, 12)

    def _distinct(self, pool: tuple[str, ...], count: int) -> list[str]:
        chosen: list[str] = []
        while len(chosen) < count:
            item = self.pick(*pool)
            if item not in chosen:
                chosen.append(item)
        return chosen
