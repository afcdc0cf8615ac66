"""Whether the steps of a trace are true: every equation, stated fact and claim about letters, from the text."""

import re

from recipes.dev_reasoning.check_questions import OPERATIONS, PARTS, Equation, Solution

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
REMAINDER = re.compile(r"(\d+) = (\d+) \* (\d+) \+ (\d+)")
KINDS = ("fact", "compute", "conclude")
# The words a plan may name, and the sign each one stands for.
PLAN = {"add": "+", "take away": "-", "multiply": "*", "divide": "/", "double": "*", "halve": "/"}
# How many claims lead to the conclusion where no equation does.
CLAIMS = {"reverse_letters": 2, "first_letters": 3, "last_letters": 3, "count_letter": 2, "sort_digits": 2}
# Words a step may use without the question having used them.
# fmt: off
STEP_WORDS = frozenset((
    "so", "we", "add", "then", "take", "away", "multiply", "divide", "double", "halve", "to", "get", "by", "half",
    "one", "third", "quarter", "fifth", "percent", "the", "age", "do", "does", "not", "matter", "hour", "has",
    "minutes", "week", "days", "there", "are", "is", "it", "more", "needs", "pays", "will", "be", "years", "old",
    "gets", "left", "over", "each", "starts", "ends", "with", "number", "goes", "up", "next", "sum", "larger",
    "order", "smallest", "and", "largest", "between", "them", "at", "place", "places", "times", "look", "letters",
    "backwards", "back", "they", "need", "cars", "around",
))
# fmt: on


def step_problems(prompt: str, steps: list[dict], answer: str, solution: Solution) -> list[str]:
    """What is wrong with the steps, in words; empty when every one of them holds."""
    problems = _layout_problems(steps)
    known = {int(number) for number in re.findall(r"\d+", prompt)} | solution.constants
    written: list[Equation] = []
    for step in steps:
        text = step["content"]
        where = f"step {step['i']} ({text!r})"
        unknown = _words(text) - _words(prompt) - STEP_WORDS
        problems += [f"{where}: word not in the question: {word}" for word in sorted(unknown)]
        if step["type"] == "conclude":
            problems += [f"{where}: does not state {answer}"] if not _states(text, answer) else []
        elif step["type"] == "fact" or not solution.equations:
            problems += [] if _claim_holds(text, prompt, solution) else [f"{where}: not a claim that holds here"]
        else:
            equations, faults = _read_equations(text, known)
            written += equations
            problems += [f"{where}: {fault}" for fault in faults]
    if not solution.equations and len({step["content"] for step in steps}) != CLAIMS[solution.form] + 1:
        problems.append(f"{CLAIMS[solution.form]} different claims and a conclusion expected")
    if tuple(written) != solution.equations:
        problems.append(f"the question calls for {_show(solution.equations)}, the steps write {_show(written)}")
    return problems


def _layout_problems(steps: list[dict]) -> list[str]:
    problems = []
    if not 2 <= len(steps) <= 4:
        problems.append(f"{len(steps)} steps, 2 to 4 expected")
    if [step["i"] for step in steps] != list(range(len(steps))):
        problems.append("steps are not numbered 0, 1, 2 ...")
    if [step["type"] == "conclude" for step in steps] != [False] * (len(steps) - 1) + [True]:
        problems.append("the last step and no other must be the conclusion")
    problems += [f"step {step['i']}: type {step['type']!r}" for step in steps if step["type"] not in KINDS]
    problems += [f"step {step['i']}: over 60 characters" for step in steps if len(step["content"]) > 60]
    return problems


def _read_equations(text: str, known: set[int]) -> tuple[list[Equation], list[str]]:
    """The equations of one step with what is wrong in them; adds the results to `known`."""
    faults: list[str] = []
    equations: list[Equation] = []
    if division := REMAINDER.fullmatch(text):
        whole, divisor, quotient, rest = map(int, division.groups())
        if whole != divisor * quotient + rest or rest >= divisor:
            faults.append("false")
        equations.append((whole, "%", divisor, rest))
        known |= {quotient, rest}
        operands = [whole, divisor]
    else:
        operands = []
        for x, sign, y, result in EQUATION.findall(text):
            x, y, result = int(x), int(y), int(result)
            if (sign == "/" and (y == 0 or x % y)) or OPERATIONS[sign](x, y) != result:
                faults.append("false")
            operands += [x, y]
            equations.append((x, sign, y, result))
        known |= {result for *_, result in equations}
        if EQUATION.sub("", text).strip() not in ("", "and"):
            faults.append("more than equations")
    faults += [f"{number} comes from nowhere" for number in operands if number not in known]
    return equations, faults


def _claim_holds(text: str, prompt: str, solution: Solution) -> bool:
    """Whether a sentence is one the checker knows and is true of this question."""
    letters = prompt.split(": ")[-1]
    signs = [sign.replace("%", "/") for _, sign, _, _ in solution.equations]
    if text.startswith("Each number goes up by "):
        return text == f"Each number goes up by {solution.equations[0][3]}."
    if aside := re.fullmatch(r"The (\w+) do(?:es)? not matter\. (.*)", text):
        named, text = aside.groups()
        asked = re.search(r"How many (\w+)", prompt)[1]
        counted = re.search(rf"\d {named}\b", prompt) or (named == "age" and "years old" in prompt)
        if named == asked or not counted:
            return False
    if text.startswith("We ") and text != "We look at each place.":
        steps = text.removesuffix(".").split(", then ")
        return [PLAN.get(step.removeprefix("We ").removeprefix("we ")) for step in steps] == signs
    if part := re.fullmatch(r"To get (.+) we divide by (\d+)\.", text):
        percent = re.fullmatch(r"(\d+) percent", part[1])
        same_part = f"{part[1]} of the" in prompt
        return same_part and (int(percent[1]) * int(part[2]) == 100 if percent else PARTS.get(part[1]) == int(part[2]))
    if text in ("One hour has 60 minutes.", "One week has 7 days."):
        return f" {text.split()[1]}s and " in prompt
    return _letters_claim_holds(text, letters, prompt)


def _letters_claim_holds(text: str, letters: str, prompt: str) -> bool:
    row = letters.split()
    numbered = [f"{place} {letter}" for place, letter in enumerate(row, start=1)]
    if text.startswith("Places: "):
        return text == f"Places: {', '.join(numbered)}."
    if text.startswith("Backwards: "):
        return text == f"Backwards: {', '.join(numbered[::-1])}."
    if end := re.fullmatch(r"([a-z ]+) (starts|ends) with ([a-z])\.", text):
        which, place = {"starts": ("first", 0), "ends": ("last", -1)}[end[2]]
        return f"the {which} letter" in prompt and end[1] in letters.split(", ") and end[1][place] == end[3]
    if found := re.fullmatch(r"([a-z]) is at places ([\d ]+)\.", text):
        truth = [place for place, letter in enumerate(row, start=1) if letter == found[1]]
        return f" is {found[1]} in this row" in prompt and list(map(int, found[2].split())) == truth
    if ends := re.fullmatch(r"The smallest is (\d) and the largest is (\d)\.", text):
        return (ends[1], ends[2]) == (min(row), max(row))
    if middle := re.fullmatch(r"Between them are (\d) and (\d)\.", text):
        return [middle[1], middle[2]] == sorted(row)[1:-1]
    return text == "We look at each place." and " in this row" in prompt


def _states(text: str, answer: str) -> bool:
    """Whether a conclusion holds the answer and no other number."""
    if re.fullmatch(r"[\d ]+", answer):
        return text.startswith("So ") and re.findall(r"\d+", text) == answer.split()
    return text.startswith("So ") and text.endswith(f" {answer}.") and not re.search(r"\d", text)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{2,}", text.lower()))


def _show(equations: list[Equation] | tuple[Equation, ...]) -> str:
    return "; ".join(f"{x} {sign} {y} = {result}" for x, sign, y, result in equations) or "no equation"
