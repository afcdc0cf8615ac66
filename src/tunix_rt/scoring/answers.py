"""The value of an answer, and whether two answers have the same. Pure functions of text; nothing is rounded or evaluated.

An answer is a quantity (`$1,600.50`, `1 1/2`, `12 km`, `50%`), a list (`3, 1, 2`, or a set in braces) or words. An ambiguous
text is not read as a number. `same_value` compares two whole answers and raises for no text: a text that is too long to be an
answer is compared character by character.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tunix_rt.scoring import normalize as units
from tunix_rt.scoring.normalize import braced, has_number_word, number_in_words, tidy

LONGEST_ANSWER = 4_000  # characters; what is longer is compared as it stands
MOSTDIGITS = 1_000  # of one number; also the highest power of ten

# Marks that carry no value at the edge of an answer. Not `+ - < > = / #`: `C` is not `C++`, 5 is not -5.
AROUND = " \n\t.,;:!?…\"'`*_()[]{}“”‘’«»"
_INTERVAL = re.compile(r"\([^()\[\]]*,[^()\[\]]*\]|\[[^()\[\]]*,[^()\[\]]*\)")  # [1, 2) is not (1, 2]
_BETWEEN_ITEMS = re.compile(r"(?:,(?![0-9]{3}(?![0-9]))|;)(?: and\b)?| and ")

# --- numbers ----------------------------------------------------------------------------------------------------------

DIGITS = (
    r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]{1,2}(?![0-9.,])"  # 1.600,50: both marks, so it cannot be read otherwise
    + "".join(rf"|[0-9]{{1,3}}(?:{mark}[0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?" for mark in ",' ")
    + r"|[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
)
NUMBER = (
    r"(?:10\^\(?(?P<ten>[-+]?[0-9]+)\)?"
    rf"|(?:(?P<whole>[0-9]+) (?:and )?(?=[0-9]+ ?/))?(?P<top>{DIGITS})"
    r"(?:[eE](?P<e>[-+]?[0-9]+)| ?[x×*·] ?10\^\(?(?P<power>[-+]?[0-9]+)\)?)?"
    rf"(?: ?/ ?(?P<bottom>{DIGITS}))?)"
)
# `2x`, `2π`, `37^2` and `5 squared` are no numbers, though they begin with one.
FACTOR = r"(?! ?[π√^‰]|[abinxyzABINXYZ](?![A-Za-z])| ?(?:squared|cubed|factorial)\b)"
CURRENCY = r"(?:US\$|(?:USD|EUR|GBP|JPY|INR) |[$€£¥₹] ?)"
# A verb or `or` begins no unit, and a dash alone is none: `5 is not it`, `5 or more`, `5-`.
_UNIT_WORD = r"(?!(?:is|isn't|are|was|were|not|or|and|at)\b|[-/]+(?![^\W\d_]))(?:[^\W\d_]|[°'/-]|\^-?[0-9])+"
UNIT = rf"{_UNIT_WORD}(?: {_UNIT_WORD}){{0,3}}"
_WHOLE = re.compile(
    rf"(?P<sign>[-+] ?)?(?P<before>{CURRENCY})?(?P<sign2>[-+])?{NUMBER}{FACTOR}"
    rf" ?(?P<after>[%$€£¥₹°])? ?(?P<unit>{UNIT})?"
)
MINUS = re.compile(r"(?P<edge>^|(?<![0-9)%])[ \n])(?:minus|negative) (?=[$€£]?\.?[0-9])", re.IGNORECASE)
# A comma in brackets parts two numbers: (1,500) is a point.
_BRACKETED = re.compile(r"[(\[] ?[0-9]+(?:,[0-9]+)+ ?[)\]]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number and its unit. `by_sign`: the whole unit is a sign ($, %, °), which may be left out."""

    number: Fraction
    unit: tuple[str, ...] = ()
    by_sign: bool = False


def same_value(actual: str, expected: str) -> bool:
    """Whether two whole answers have the same value. A blank expectation equals nothing."""
    if max(len(actual), len(expected)) > LONGEST_ANSWER:
        return " ".join(actual.split()).casefold() == " ".join(expected.split()).casefold() != ""
    if _INTERVAL.fullmatch(interval := tidy(expected).strip()):
        return "".join(tidy(actual).split()).casefold() == "".join(interval.split()).casefold()
    actual, expected = bare_answer(actual), bare_answer(expected)
    if (wanted := read_quantity(expected)) is not None:
        return (got := read_quantity(actual)) is not None and _same_quantity(got, wanted)
    if list_items(expected) is not None or list_items(actual) is not None:
        # One list is enough: `Monday and Tuesday` is `Monday, Tuesday`.
        return _same_items(_parts(actual), _parts(expected), ordered=not _is_set(expected))
    return plain_words(actual) == plain_words(expected) != ""


def read_quantity(text: str) -> Quantity | None:
    """The quantity in a bare text that is one number with or without a unit."""
    if (number := number_in_words(text)) is not None:
        return Quantity(number=number)
    text = MINUS.sub(r"\g<edge>-", text)
    if "\n" in text or not (match := _WHOLE.fullmatch(text)):
        return None
    glued = match["unit"] is not None and text[match.start("unit") - 1] != " "
    return read_number(match, match["unit"] or "", glued=glued)


def is_number_as_words(text: str) -> bool:
    """Whether an answer contains a number and is still compared as words: `3 or 4`, `5 hours 30 minutes`, `1.600.000`.

    Digits with spaces between (`5 7 8 9`) are a sequence of characters. `3,5` is read as a list, though a decimal may be meant.
    """
    bare = bare_answer(text)
    if not re.search("[0-9]", bare) and not has_number_word(bare):
        return False
    if read_quantity(bare) is not None or _INTERVAL.fullmatch(bare) or re.fullmatch(r"\w(?: \w)*", bare):
        return False
    items = list_items(bare)
    numbers = items is not None and all(read_quantity(_edges_off(item)) for item in items)
    return not numbers or re.fullmatch(r"[0-9]+,[0-9]+", bare) is not None


def read_number(match: re.Match[str], unit: str, *, glued: bool) -> Quantity | None:
    """The quantity of a match, with the unit words behind it; None when it has two signs, too many digits or a variable."""
    if units.is_letter_alone(unit, glued=glued):
        return None
    parts = [match[name] for name in ("ten", "whole", "top", "e", "power", "bottom")]
    if (match["sign"] and match["sign2"]) or sum(len(part or "") for part in parts) > MOSTDIGITS:
        return None
    exponent = int(match["ten"] or match["e"] or match["power"] or 0)
    bottom = decimal(match["bottom"] or "1")
    if abs(exponent) > MOSTDIGITS or bottom == 0:
        return None
    top = Fraction(1) if match["ten"] else decimal(match["top"])
    number = int(match["whole"] or 0) + top * Fraction(10) ** exponent / bottom
    times, words = units.words(unit, glued=glued, money=bool(match["before"]))
    signs = units.of_signs((match["before"] or "").strip(), (match["after"] or "").strip())
    sign = -1 if "-" in ((match["sign"] or "") + (match["sign2"] or "")) else 1
    return Quantity(number=sign * number * times, unit=units.joined(signs, words), by_sign=bool(signs) and not words)


def decimal(digits: str) -> Fraction:
    if re.search(r"\.[0-9]{3},|\..*,", digits):
        digits = digits.replace(".", "").replace(",", ".")
    return Fraction(re.sub("[,' ]", "", digits))


def _same_quantity(actual: Quantity, wanted: Quantity) -> bool:
    if actual.number != wanted.number:
        return False
    left_out = (not actual.unit and wanted.by_sign) or (not wanted.unit and actual.by_sign)
    return actual.unit == wanted.unit or (left_out and not is_a_hundredth(actual, wanted))


def is_a_hundredth(actual: Quantity, wanted: Quantity) -> bool:
    """Whether a percent sign makes it another number: 0.75% is not 0.75, while 75% may be written for 75."""
    return actual.unit == units.PERCENT and not wanted.unit and abs(wanted.number) <= 1


# --- compared leniently ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LastValue:
    """The last value of a text, verbatim, and the quantity it is, if it is one."""

    text: str
    quantity: Quantity | None = None


def lenient_same(actual: LastValue, expected: str) -> bool:
    """As `same_value`, but a unit may be missing on either side, 50% is also 0.5, and marks between words do not count."""
    wanted = read_quantity(bare_answer(expected))
    if wanted is not None and actual.quantity is not None:
        return _nearly_same(actual.quantity, wanted)
    if same_value(actual.text, expected):
        return True
    if wanted is not None:
        return False
    texts = [bare_answer(text) for text in (actual.text, expected)]
    if all(list_items(text) is not None for text in texts):
        return False
    got, words = ([plain_words(token) for token in tokens_of(text)] for text in texts)
    return got == words != []


def _nearly_same(actual: Quantity, wanted: Quantity) -> bool:
    if actual.unit and wanted.unit:
        return actual.number == wanted.number and units.fits(actual.unit, wanted.unit)
    if wanted.unit == units.PERCENT and actual.number == wanted.number / 100:
        return True
    if actual.unit == units.PERCENT and 0 < abs(wanted.number) < 1 and actual.number / 100 == wanted.number:
        return True
    return actual.number == wanted.number and not is_a_hundredth(actual, wanted)


# --- lists and words --------------------------------------------------------------------------------------------------


def list_items(text: str) -> list[str] | None:
    """The items of a bare list; None for anything else. `and` parts items of a list with commas, or numbers."""
    parts = _parts(text)
    if len(parts) < 2 or not (re.search("[,;]", text) or all(read_quantity(part.strip(AROUND)) for part in parts)):
        return None
    return parts


def _parts(text: str) -> list[str]:
    if read_quantity(text) is not None:
        return [text]
    parts = [part.strip() for part in _BETWEEN_ITEMS.split(text) if part.strip(AROUND)]
    return [part.lstrip("([{") if at == 0 else part for at, part in enumerate(parts)]


def _is_set(text: str) -> bool:
    bare = text.strip(" \n.,;:!?")
    return bare.startswith("{") and bare.endswith("}")


def _same_items(actual: Sequence[str], wanted: Sequence[str], *, ordered: bool) -> bool:
    if ordered or max(len(actual), len(wanted)) > 50:
        return len(actual) == len(wanted) and all(map(_same_item, actual, wanted))
    return (
        bool(actual)
        and all(any(_same_item(one, other) for other in wanted) for one in actual)
        and all(any(_same_item(one, other) for one in actual) for other in wanted)
    )


def _same_item(actual: str, wanted: str) -> bool:
    actual, wanted = _edges_off(actual), _edges_off(wanted)
    if (number := read_quantity(wanted)) is not None:
        return (got := read_quantity(actual)) is not None and _same_quantity(got, number)
    return plain_words(actual) == plain_words(wanted)


def plain_words(text: str) -> str:
    """Lower case, single spaces, none around operators, no marks around; marks alone stay, for they are the answer then."""
    collapsed = " ".join(text.split()).casefold()
    spaced = re.sub(r"(?<=[0-9]) ?: ?(?=[0-9])", ":", collapsed.strip(AROUND) or collapsed)
    return re.sub(r" ?([-+*/^=<>|]) ?", r"\1", spaced)


def tokens_of(text: str) -> list[str]:
    return [bare for word in text.split() if (bare := word.strip(AROUND))]


# --- what surrounds an answer -----------------------------------------------------------------------------------------


def bare_answer(text: str) -> str:
    """A whole answer without what surrounds it: `$…$`, `\\boxed{…}`, `####`, quotes, a full stop."""
    bare = tidy(text).strip()
    for _ in range(4):
        before = bare
        if _BRACKETED.fullmatch(bare):
            bare = bare.replace(",", ", ")
        if len(bare) > 2 and bare[0] == bare[-1] == "$" and "$" not in bare[1:-1].strip("$"):
            bare = bare.strip("$").strip()
        bare = bare.removeprefix("####").strip()
        opening = re.match(r"\\f?boxed ?\{", bare)
        if (
            opening
            and (inner := braced(bare, opening.end())) is not None
            and len(inner) + opening.end() + 1 == len(bare)
        ):
            bare = inner.strip()
        if not _is_set(bare) or "," not in bare:
            bare = _edges_off(bare)
        if bare == before:
            break
    return bare or " ".join(text.split())


def _edges_off(text: str) -> str:
    """No marks around, except a point before a digit; marks alone stay."""
    return text.rstrip(AROUND).lstrip(AROUND.replace(".", "")) or text.strip()
