"""The checker's own reading of a question: a pattern over the text and the calculations it calls for.

Nothing here comes from the templates: a question is recognised by its sentences alone and solved again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

Equation = tuple[int, str, int, int]
"""x, sign, y, result; with the sign % the result is the remainder of x by y."""

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x // y,
    "%": lambda x, y: x % y,
}
# The forms below ask at the end; a prompt that asks first is read as if it did too.
QUESTION_FIRST = re.compile(r"^([^.?]+\?) ([^?]+\.)$")
PARTS = {"half": 2, "one third": 3, "one quarter": 4, "one fifth": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What a question asks, worked out from its text. `constants` are the numbers it implies without writing them."""

    form: str
    operands: tuple[str, ...]
    equations: tuple[Equation, ...]
    constants: frozenset[int]
    answer: str


@dataclass(frozen=True, slots=True)
class Form:
    """A recognised kind of question.

    In `calculations` the letters are the numbers of the question in the order of the pattern's groups, r1 and r2 are
    the results so far and digits are constants. A form without calculations is solved by `solve` from the text.
    """

    name: str
    pattern: str
    calculations: str = ""
    solve: Callable[[dict[str, str]], str] | None = None


def _after_even_gaps(found: dict[str, str]) -> str:
    terms = [int(found[letter]) for letter in "abcd"]
    gaps = {after - before for before, after in pairwise(terms)}
    if len(gaps) != 1:
        raise ValueError(f"the terms {terms} do not grow evenly")
    return str(terms[-1] + gaps.pop())


def _ends_of_words(found: dict[str, str]) -> str:
    place = {"first": 0, "last": -1}[found["which"]]
    return " ".join(word.split()[place] for word in found["words"].split(", "))


def _larger_sum(found: dict[str, str]) -> str:
    a, b, c, d = (int(found[letter]) for letter in "abcd")
    if a + b == c + d:
        raise ValueError("the two sums are equal")
    return str(max(a + b, c + d))


# <who>, <thing> ... stand for one word (the same word wherever the tag comes back), #a, #b ... for a number.
HAS_NOW = r"How many <thing> does <who> have now\?"
HAS_LEFT = r"How many <thing> does <who> have left\?"
IN_ALL = r"How many <thing> are there in all\?"
FORMS = (
    Form("add_two", rf"<who> has #a <thing>\. <who> (?:buys|finds) #b more <thing>\. {HAS_NOW}", "a+b"),
    Form("sub_two", rf"<who> has #a <thing>\. <who> gives #b <thing> to <friend>\. {HAS_LEFT}", "a-b"),
    Form("sub_two", rf"<who> has #a <thing>\. <who> loses #b <thing>\. {HAS_LEFT}", "a-b"),
    Form("mul_groups", rf"There are #a <holder> with #b <thing> in each\. {IN_ALL}", "a*b"),
    Form(
        "div_share",
        r"<who> shares #a <thing> equally among #b friends\. How many <thing> does each friend get\?",
        "a/b",
    ),
    Form(
        "how_many_more",
        r"<who> has #a <thing> and <friend> has #b <thing>\. How many more <thing> does <who> have than <friend>\?",
        "a-b",
    ),
    Form(
        "missing_addend",
        r"<who> has #a <thing> and wants to have #b <thing>\. How many more <thing> does <who> need\?",
        "b-a",
    ),
    Form("price_total", r"<who> buys #a <thing> for #b dollars? each\. How many dollars does <who> pay\?", "a*b"),
    Form(
        "pages_per_day", r"A book has #a pages\. <who> reads #b pages each day\. How many days does <who> need\?", "a/b"
    ),
    Form("age_future", r"<who> is #a years old\. How old will <who> be in #b years\?", "a+b"),
    Form(
        "rectangle_area",
        r"A <place> is #a meters long and #b meters wide\. How many square meters is the <place>\?",
        "a*b",
    ),
    Form(
        "rectangle_perimeter",
        r"A <place> is #a meters long and #b meters wide\. How many meters is it around the <place>\?",
        "a+b r1*2",
    ),
    Form(
        "fraction_of",
        r"<who> has #a <thing> and (?P<part>half|one \w+) of the <thing> are red\. How many <thing> are red\?",
        "a/p",
    ),
    Form(
        "percent_of",
        r"<who> has #a <thing> and #q percent of the <thing> are blue\. How many <thing> are blue\?",
        "a/p",
    ),
    Form("add_three", rf"<who> has #a <thing>, <x> has #b <thing> and <y> has #c <thing>\. {IN_ALL}", "a+b r1+c"),
    Form(
        "add_then_sub",
        rf"<who> has #a <thing>\. <who> (?:buys|finds) #b more <thing> and then loses #c <thing>\. {HAS_LEFT}",
        "a+b r1-c",
    ),
    Form(
        "mul_then_add",
        rf"There are #a <holder> with #b <thing> in each and #c <thing> on the table\. {IN_ALL}",
        "a*b r1+c",
    ),
    Form(
        "price_change",
        r"<who> buys #a <thing> for #b dollars each and pays with #c dollars\. How many dollars does <who> get back\?",
        "a*b c-r1",
    ),
    Form(
        "two_prices",
        r"<who> has #a dollars\. <who> pays #b dollars for <thing> and #c dollars for <x>\. "
        r"How many dollars are left\?",
        "a-b r1-c",
    ),
    Form(
        "double_then",
        rf"<friend> has #a <thing>\. <who> has twice as many and finds #b more <thing>\. {HAS_NOW}",
        "a*2 r1+b",
    ),
    Form(
        "half_then",
        r"<who> has #a <thing>\. <who> gives half of the <thing> to <friend> and then buys #b more <thing>\. "
        rf"{HAS_NOW}",
        "a/2 r1+b",
    ),
    Form("total_of_two", rf"<friend> has #a <thing>\. <who> has #b more <thing> than <friend>\. {IN_ALL}", "a+b r1+a"),
    Form(
        "div_leftover",
        r"<who> has #a <thing> and fills bags with #b <thing> in each\. How many <thing> are left over\?",
        "a%b",
    ),
    Form("hours_to_minutes", r"A <x> takes #a hours and #b minutes\. How many minutes is that\?", "a*60 r1+b"),
    Form("days_in_weeks", r"A <x> takes #a weeks and #b days\. How many days is that\?", "a*7 r1+b"),
    Form(
        "distractor_age",
        rf"<who> is #a years old and has #b <thing>\. <who> buys #c more <thing>\. {HAS_NOW}",
        "b+c",
    ),
    Form(
        "distractor_things",
        r"<who> has #a red <thing>, #b <other> and #c blue <thing>\. How many <thing> does <who> have\?",
        "a+c",
    ),
    Form("extra_number", rf"<who> has #a <thing> and #b <other>\. <who> loses #c <thing>\. {HAS_LEFT}", "a-c"),
    Form(
        "zero_left",
        rf"<who> has #a <thing>\. <who> gives #b <thing> to <friend> and then buys #c more <thing>\. {HAS_NOW}",
        "a-b r1+c",
    ),
    Form(
        "shop_trip",
        r"<who> buys #a <thing> for #b dollars each and #c <x> for #d dollars each and pays with #e dollars\. "
        r"How many dollars does <who> get back\?",
        "a*b c*d r1+r2 e-r3",
    ),
    Form(
        "school_trip",
        r"#a classes with #b children each and #c teachers go on a trip\. Each car takes #d people\. "
        r"How many cars do they need\?",
        "a*b r1+c r2/d",
    ),
    Form(
        "garden_rows",
        r"<who> plants #a rows of #b roses and #c rows of #d beans\. #e plants dry up\. How many plants are left\?",
        "a*b c*d r1+r2 r3-e",
    ),
    Form(
        "savings_plan",
        r"<who> has #a dollars and saves #b dollars each week for #c weeks\. Then <who> pays #d dollars for a gift\. "
        r"How many dollars are left\?",
        "b*c r1+a r2-d",
    ),
    Form(
        "bus_ride",
        r"#a people are on a bus\. #b people get off and #c people get on\. Then #d people get off\. "
        r"How many people are left\?",
        "a-b r1+c r2-d",
    ),
    Form("sum_of_list", r"What is the sum of #a, #b and #c\?", "a+b r1+c"),
    Form("sequence_next", r"What number comes next: #a, #b, #c, #d\?", "b-a d+r1", _after_even_gaps),
    Form("larger_sum", r"Write the larger sum: #a \+ #b or #c \+ #d", "a+b c+d", _larger_sum),
    Form(
        "reverse_letters",
        r"Write the letters in reverse order: (?P<letters>[a-z](?: [a-z])+)",
        solve=lambda found: found["letters"][::-1],
    ),
    Form("first_letters", r"Write the (?P<which>first) letter of each word: (?P<words>[a-z, ]+)", solve=_ends_of_words),
    Form("last_letters", r"Write the (?P<which>last) letter of each word: (?P<words>[a-z, ]+)", solve=_ends_of_words),
    Form(
        "count_letter",
        r"How many times is (?P<letter>[a-z]) in this row: (?P<row>[a-z](?: [a-z])+)",
        solve=lambda found: str(found["row"].split().count(found["letter"])),
    ),
    Form(
        "sort_digits",
        r"Sort the digits from small to large: (?P<digits>\d(?: \d)+)",
        solve=lambda found: " ".join(sorted(found["digits"].split())),
    ),
)


def _compile(pattern: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def word(match: re.Match[str]) -> str:
        tag = match[1]
        if tag in seen:
            return f"(?P={tag})"
        seen.add(tag)
        return f"(?P<{tag}>[A-Za-z]+)"

    with_numbers = re.sub(r"#([a-z])", r"(?P<\1>\\d+)", pattern)
    return re.compile(re.sub(r"(?<!P)<(\w+)>", word, with_numbers))


_COMPILED = tuple((form, _compile(form.pattern)) for form in FORMS)


def solve(prompt: str) -> Solution:
    """The question worked out from its text; ValueError when no form, or more than one, fits it or it has no answer."""
    asked_last = QUESTION_FIRST.sub(r"\2 \1", prompt)
    fits = [(form, match) for form, pattern in _COMPILED if (match := pattern.fullmatch(asked_last))]
    if len(fits) != 1:
        raise ValueError(f"{len(fits)} known questions fit, 1 expected")
    form, match = fits[0]
    found = match.groupdict()
    equations, constants = _work_out(form.calculations, found)
    answer = form.solve(found) if form.solve else str(equations[-1][3])
    operand_names = ("part", "words", "letters", "letter", "row", "digits", *"abcdeq")
    operands = [found[name] for name in operand_names if name in found]
    if form.name == "sort_digits":
        operands = found["digits"].split()
    if "words" in found:
        operands = found["words"].split(", ")
    return Solution(
        form=form.name,
        operands=tuple(sorted(operands)),
        equations=equations,
        constants=constants,
        answer=answer,
    )


def _work_out(calculations: str, found: dict[str, str]) -> tuple[tuple[Equation, ...], frozenset[int]]:
    values = {name: int(text) for name, text in found.items() if text.isdigit() and len(name) == 1}
    constants: set[int] = set()
    if "part" in found:
        values["p"] = PARTS[found["part"]]
        constants.add(values["p"])
    if "q" in values:
        if values["q"] == 0 or 100 % values["q"]:
            raise ValueError(f"{values['q']} percent is no whole part")
        values["p"] = 100 // values["q"]
        constants.add(values["p"])
    equations: list[Equation] = []
    for number, calculation in enumerate(calculations.split(), start=1):
        left, sign, right = re.fullmatch(r"(\w+)([-+*/%])(\w+)", calculation).groups()
        if right.isdigit():
            constants.add(int(right))
        x, y = values[left], int(right) if right.isdigit() else values[right]
        if sign in "/%" and (y == 0 or (sign == "/" and x % y)):
            raise ValueError(f"{x} / {y} is not a whole number")
        if sign == "-" and x < y:
            raise ValueError(f"{x} - {y} is below zero")
        values[f"r{number}"] = OPERATIONS[sign](x, y)
        equations.append((x, sign, y, values[f"r{number}"]))
    return tuple(equations), frozenset(constants)
