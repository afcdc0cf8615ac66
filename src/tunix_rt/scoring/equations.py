"""The arithmetic in a reasoning: every `12 + 5 = 17` is parsed and evaluated exactly, in fractions.

Parsed: numbers with or without units, `+ - * / ^`, parentheses, `20% of 50`, LaTeX's spellings, chains of `=`, and GSM8K's
`<<48/2=24>>`. An equation that cannot be parsed whole (a variable, a word in the middle, mixed units) is not counted at all.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from tunix_rt.scoring import normalize as units
from tunix_rt.scoring.answers import DIGITS, decimal
from tunix_rt.scoring.normalize import tidy

LONGEST_TEXT = 100_000  # characters; equations behind are not searched
LONGEST_SEGMENT = 120  # tokens
LONGEST_NUMBER = 40  # digits
HIGHEST_POWER = 64

_TOKEN = re.compile(
    rf"(?P<number>(?:{DIGITS})(?: ?%)?)"
    r"|(?P<equals>==|=|≈)"
    r"|(?P<operator>[-+*/^()×·÷])"
    r"|(?P<word>(?:/ ?)?[^\W\d_](?:[^\W\d_]|['-](?=[^\W\d_]))*(?:/[^\W\d_]+)?)"
    r"|(?P<nothing>[$€£¥₹¢\\ ]+)"
    r"|(?P<other>[<>!]=|.|\n)"
)
_LIST_MARK = re.compile(r"^[ \t]*(?:[-*•]|[0-9]{1,3}[.)])[ \t]+", re.MULTILINE)
_AFTER_WORD = re.compile(r"[^\W\d_][ #$]*$")
_CLOCK = re.compile(r"(?<![0-9])(?:[01]?[0-9]|2[0-4]):[0-5][0-9](?![0-9])")  # 6:30 + 45 minutes = 7:15 has a letter
_MIXED = re.compile(r"(?<![0-9.,])[0-9]{1,20} and [0-9]{1,20}/[0-9]{1,20}")  # 17/3 = 5 and 2/3
_OVER_LINES = re.compile(r"=[ \t]*\n[ \t]*(?=[-$€£(0-9])|\n[ \t]*=(?=[ \t]*[-$€£(0-9])")
_CENT_SIGN = re.compile(r"(?<=[0-9]) ?¢")
_ANNOTATION = re.compile(r"<<([^<>\n]{1,200})>>")
# Adding up two of these needs a conversion, which is not done here: 2 hours + 30 minutes = 2.5 hours.
_CONVERTED = frozenset({
    "cent", "centimeter", "day", "dollar", "euro", "foot", "gram", "hour", "inch", "kilogram", "kilometer", "liter", "meter",
    "mile", "milligram", "milliliter", "millimeter", "minute", "month", "ounce", "pound", "second", "week", "yard",
    "year",
})  # fmt: skip
_REMAINDER = frozenset({"r", "rem", "remainder", "remainders"})
# Words that are no part of a unit.
_PROSE = frozenset({
    "and", "are", "because", "but", "equals", "for", "from", "if", "is", "minus", "or", "plus", "since", "so", "than",
    "that", "then", "times", "to", "was", "were", "when", "which", "with",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticCheck:
    """How many equations a text states, how many of them are right, and the wrong ones verbatim."""

    stated: int
    right: int
    wrong: tuple[str, ...]


class Equation(NamedTuple):
    """A stated equation, verbatim but for its spaces."""

    text: str
    right: bool


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int
    unit: str = ""
    sign: str = ""
    """Of a number: the currency before it, as a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side of an equation, evaluated. `literal` is the number it consists of, as written, if it is one."""

    value: Fraction
    first: Fraction
    start: int
    end: int
    literal: str = ""
    operators: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    signs: frozenset[str] = frozenset()


def check_arithmetic(text: str) -> ArithmeticCheck:
    """How many of the stated equations are right."""
    found = list(equations_in(text))
    wrong = tuple(one.text for one in found if not one.right)
    return ArithmeticCheck(stated=len(found), right=len(found) - len(wrong), wrong=wrong)


def equations_in(text: str) -> Iterator[Equation]:
    """Every stated equation, checked. A division may be rounded: 10/3 = 3.33 is right, 3.34 and 3 are not, `≈ 3` is.

    An equation has an operation on one side at least: `x = 5` and `1 hour = 60 minutes` state none. In a chain,
    a running total counts as right (`2+3=5+1=6`), though the signs of equality are not; `12+5=17=18` states two things.
    """
    text = _LIST_MARK.sub("", tidy(text[:LONGEST_TEXT]).replace("**", " "))
    text = _MIXED.sub(" t ", _CLOCK.sub(" t ", _OVER_LINES.sub(" = ", _CENT_SIGN.sub(" cents", text))))
    inside = "\n".join(_ANNOTATION.findall(text))
    for part in (_ANNOTATION.sub("", text), inside):
        for segment in _segments(f"{part}\n"):  # words at the very end belong to the number before them, too
            for right, start, end in _links(segment, part):
                yield Equation(" ".join(part[start:end].split()), right)


def _segments(text: str) -> Iterator[list[_Token]]:
    """Runs of tokens that can belong to one equation. Words behind a number are its unit; other words end the run."""
    run: list[_Token] = []
    words: list[_Token] = []
    sign = ""
    for match in _TOKEN.finditer(text):
        token = _Token(str(match.lastgroup), match.group(), match.start(), match.end(), sign=sign)
        if token.kind == "nothing":
            sign = _currency(token.text)
            continue
        sign = ""
        if token.kind == "word":
            words.append(token)
            continue
        if words and not _joined(run, words, token):
            yield run
            # A word before an operator is a variable: what follows is not the whole of its side.
            operates = token.kind == "operator" and token.text not in "()"
            run = [words[-1]] if operates or (token.text == "(" and words[-1].end == token.start) else []
        words = []
        aside = token.text == "(" and len(run) > 1 and run[-2].kind == "equals" and run[-1].end < token.start
        if token.kind == "other" or aside:  # 2 * 3 = 6 (and 6 = 2 * 3)
            yield run
            run = [token] if aside else []
        else:
            run.append(token)
    yield run


def _joined(run: list[_Token], words: Sequence[_Token], after: _Token) -> bool:
    """Whether `words` belong between the run and the next token, as `times`, unit or variable; they are added then."""
    if not run:
        return False
    last, phrase = run[-1], " ".join(word.text for word in words).casefold()
    first = [word.text.casefold() for word in words[:8]]
    if last.kind == "number" and (units.multiple(first[0]) is not None or not _REMAINDER.isdisjoint(first)):
        run.append(words[0])  # 2 dozen, 3 remainder 1: a side with a word in it is not read
        return True
    closed = last.kind == "number" or last.text == ")"
    if phrase in ("x", "of") and closed and (after.kind == "number" or after.text == "("):
        share = last.text.endswith("%") or (len(run) > 1 and run[-2].text in ("/", "÷"))
        if phrase == "x" or share:
            run.append(_Token("operator", "*", words[0].start, words[0].end))
            return True
    letters = [word for word in words if len(word.text) == 1 and (word.text != "a" or len(words) == 1)]
    if any(word.text.casefold() in "xyzabnk" or word.start == last.end for word in letters):
        run.append(letters[0])
        return True
    goes_on = after.kind in ("equals", "other") or after.text in ("+", "-", "*", "/", ")", "×", "·", "÷")
    if last.kind == "number" and goes_on and len(words) <= 3 and not any(word.text in _PROSE for word in words):
        _, unit = units.words(phrase)
        run[-1] = last._replace(unit=unit[-1] if unit else "", end=words[-1].end)
        return True
    return False


def _currency(signs: str) -> str:
    """The unit of the first currency among signs that carry no value."""
    found = re.search("[$€£¥₹¢]", signs)
    if found is None:
        return ""
    return "cent" if found[0] == "¢" else units.of_signs(found[0], "")[0]


def _links(segment: Sequence[_Token], text: str) -> Iterator[tuple[bool, int, int]]:
    """(right, start, end) of every `=` of a segment that has two readable sides."""
    if not 3 <= len(segment) <= LONGEST_SEGMENT:
        return
    parts: list[list[_Token]] = [[]]
    signs = []
    for token in segment:
        if token.kind == "equals":
            signs.append(token.text)
            parts.append([])
        else:
            parts[-1].append(token)
    sides = [_side(part, last=at == len(parts) - 1) for at, part in enumerate(parts)]
    for at, sign in enumerate(signs):
        left, right = sides[at], sides[at + 1]
        if left is None or right is None:
            continue
        if not (left.operators or right.operators):
            if at and _is_false_end(sides[at - 1], left, right):
                yield False, left.start, right.end
            continue
        # `house 2 = 35 + 35` and `5 friends = 250 / 5` give something a name.
        if left.literal and (left.named or _AFTER_WORD.search(text, max(0, left.start - 3), left.start)):
            continue
        both = left.operators | right.operators
        if both & {"+", "-"} and len((left.named | right.named | left.signs | right.signs) & _CONVERTED) > 1:
            continue
        running = at + 2 < len(sides) and left.value == right.first
        yield running or _equal(left, right, rounded=sign == "≈"), left.start, right.end


def _is_false_end(worked: _Side | None, left: _Side, right: _Side) -> bool:
    """Whether a chain goes on from its result to another number: the 18 of `12 + 5 = 17 = 18`. Units may be converted."""
    if worked is None or not worked.operators or left.named | right.named or left.signs != right.signs:
        return False
    return left.value != right.value and not _equal(worked, right, rounded=True)


def _equal(left: _Side, right: _Side, *, rounded: bool) -> bool:
    if left.value == right.value:
        return True
    for stated, worked in ((right, left), (left, right)):
        if not stated.literal:
            continue
        written = stated.literal.rstrip(" %")
        number, places = decimal(written), len(written.partition(".")[2])
        may_round = rounded or (places > 0 and "/" in worked.operators)
        slack = Fraction(1, 2 * 10**places) if may_round else Fraction(0)
        # 10/50 = 20% and 10/50*100 = 20% are both written, and both are meant.
        meant = (worked.value * 100, worked.value) if stated.literal.endswith("%") else (worked.value,)
        if any(abs(value - number) <= slack for value in meant):
            return True
    return False


def _side(tokens: Sequence[_Token], *, last: bool) -> _Side | None:
    """One side evaluated; None when it cannot be. Parentheses around the equation and a dash behind it are removed."""
    tokens = list(tokens)
    while last and tokens and tokens[-1].text == "-":
        tokens.pop()
    opened = sum((token.text == "(") - (token.text == ")") for token in tokens)
    while opened > 0 and tokens and tokens[0].text == "(":
        tokens.pop(0)
        opened -= 1
    while last and opened < 0 and tokens and tokens[-1].text == ")":
        tokens.pop()
        opened += 1
    if not tokens or any(token.kind == "word" for token in tokens):
        return None
    numbers = [token for token in tokens if token.kind == "number"]
    reader = _Reader(tokens)
    try:
        value = reader.expression()[0]
    except _Unparsable:
        return None
    if reader.at < len(tokens):
        return None
    return _Side(
        value=value,
        first=decimal(numbers[0].text.rstrip(" %")),
        start=tokens[0].start,
        end=tokens[-1].end,
        literal=tokens[0].text if len(tokens) == 1 else "",
        operators=frozenset(reader.operators),
        named=frozenset(token.unit for token in numbers if token.unit),
        signs=frozenset(token.sign for token in numbers if token.sign),
    )


class _Unparsable(Exception):
    """The tokens are no expression, or one too large to evaluate."""


class _Reader:
    """Parses an expression by precedence. Every method returns (value, whether it is a percentage)."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.operators: set[str] = set()

    def expression(self, above: int = 0) -> tuple[Fraction, bool]:
        """Terms joined by operators that bind more tightly than `above`: 1 for sums, 2 for products."""
        value, percent = self.signed()
        while (sign := self.take("+-*/×·÷" if above == 0 else "*/×·÷" if above == 1 else "")) is not None:
            self.operators.add({"×": "*", "·": "*", "÷": "/"}.get(sign, sign))
            other, also = self.expression(1 if sign in "+-" else 2)
            if sign in "+-" and percent != also:  # 50 + 10% can mean two things
                raise _Unparsable
            if sign in "+-":
                value += other if sign == "+" else -other
                continue
            if sign in "/÷" and other == 0:
                raise _Unparsable
            value, percent = value / other if sign in "/÷" else value * other, False
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4096:
                raise _Unparsable
        return value, percent

    def signed(self) -> tuple[Fraction, bool]:
        minus = self.take("-") is not None
        value, percent = self.power()
        return -value if minus else value, percent

    def power(self) -> tuple[Fraction, bool]:
        value, percent = self.atom()
        if self.take("^") is None:
            return value, percent
        exponent, _ = self.signed()
        self.operators.add("^")
        too_large = max(value.numerator.bit_length(), value.denominator.bit_length()) > 128
        if exponent.denominator != 1 or abs(exponent) > HIGHEST_POWER or too_large or (value == 0 and exponent < 0):
            raise _Unparsable
        return Fraction(value ** int(exponent)), False

    def atom(self) -> tuple[Fraction, bool]:
        if self.take("(") is not None:
            inside = self.expression()
            if self.take(")") is None:
                raise _Unparsable
            return inside
        if self.at == len(self.tokens) or self.tokens[self.at].kind != "number":
            raise _Unparsable
        text = self.tokens[self.at].text
        self.at += 1
        if len(text) > LONGEST_NUMBER:
            raise _Unparsable
        number = decimal(text.rstrip(" %"))
        if (under := self.tight_fraction()) is not None:
            return number / under, False
        return (number / 100, True) if text.endswith("%") else (number, False)

    def tight_fraction(self) -> Fraction | None:
        """In `28 / 1/5` the denominator of the number just read: written without spaces behind a division with spaces."""
        if not 2 <= self.at < len(self.tokens) - 1:
            return None
        before, number, stroke, under = self.tokens[self.at - 2 : self.at + 2]
        spaced = before.text in ("/", "÷") and before.end < number.start
        if not (spaced and stroke.text == "/" and number.end == stroke.start and stroke.end == under.start):
            return None
        value = (
            decimal(under.text.rstrip(" %")) if under.kind == "number" and len(under.text) <= LONGEST_NUMBER else None
        )
        if not value:
            return None
        self.at += 2
        self.operators.add("/")
        return value

    def take(self, signs: str) -> str | None:
        """The next token if it is one of these operators."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if token is None or token.kind != "operator" or token.text not in signs:
            return None
        self.at += 1
        return token.text
