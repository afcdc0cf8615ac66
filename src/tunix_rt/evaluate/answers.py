"""What does an answer say, and do two answers say the same? Pure functions of text; no number is rounded, nothing is evaluated.

An answer is a quantity (`$1,600.50`, `1 1/2`, `12 km`, `50%`), a list (`3, 1, 2`, or a set in braces) or words. What can
be read in two ways is not read as a number. `same_value` compares two whole answers; `lenient_value` looks for the last
value in a text. Neither raises, whatever it is given: text too long to be an answer is compared letter by letter.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tunix_rt.evaluate import units
from tunix_rt.evaluate.spelling import braced, tidy

LONGEST_ANSWER = 4_000  # characters; what is longer is compared as it stands
LONGEST_SEARCH = 20_000  # characters from the end in which the last value is looked for
MOSTDIGITS = 1_000  # of one number; also the highest power of ten

# Marks that carry no value at the edge of an answer. Not `+ - < > = / #`: `C` is not `C++`, 5 is not -5.
_AROUND = " \n\t.,;:!?…\"'`*_()[]{}“”‘’«»"
_INTERVAL = re.compile(r"\([^()\[\]]*,[^()\[\]]*\]|\[[^()\[\]]*,[^()\[\]]*\)")  # [1, 2) is not (1, 2]
_BETWEEN_ITEMS = re.compile(r"(?:,(?![0-9]{3}(?![0-9]))|;)(?: and\b)?| and ")
_SENTENCE_END = re.compile(r"[.;:!?…]+(?=\s|$)|\n+")

# --- numbers ----------------------------------------------------------------------------------------------------------

DIGITS = (
    r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]{1,2}(?![0-9.,])"  # 1.600,50: both marks, so it cannot be read otherwise
    + "".join(rf"|[0-9]{{1,3}}(?:{mark}[0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?" for mark in ",' ")
    + r"|[0-9]+(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
)
_NUMBER = (
    r"(?:10\^\(?(?P<ten>[-+]?[0-9]+)\)?"
    rf"|(?:(?P<whole>[0-9]+) (?=[0-9]+ ?/))?(?P<top>{DIGITS})"
    r"(?:[eE](?P<e>[-+]?[0-9]+)| ?[x×*·] ?10\^\(?(?P<power>[-+]?[0-9]+)\)?)?"
    rf"(?: ?/ ?(?P<bottom>{DIGITS}))?)"
)
# `2x`, `2π` and `37^2` are no numbers, though they begin with one.
_FACTOR = r"(?! ?[π√^]|[abinxyzABINXYZ](?![A-Za-z]))"
_CURRENCY = r"(?:US\$|(?:USD|EUR|GBP|JPY|INR) |[$€£¥₹] ?)"
_UNIT_WORD = r"(?:[^\W\d_]|[°'/-]|\^-?[0-9])+"
_UNIT = rf"{_UNIT_WORD}(?: {_UNIT_WORD}){{0,3}}"
_WHOLE = re.compile(
    rf"(?P<sign>[-+] ?)?(?P<before>{_CURRENCY})?(?P<sign2>[-+])?{_NUMBER}{_FACTOR}"
    rf" ?(?P<after>[%$€£¥₹°])? ?(?P<unit>{_UNIT})?"
)
# In running text: `5-3` ends in 3, not in -3; the 3 of `v3` and the 4 of `GPT-4` are no numbers.
_IN_TEXT = re.compile(
    r"(?<![A-Za-z0-9_^√])(?<![0-9]\.)(?<![A-Za-z]-)"
    rf"(?P<sign>[-+])?(?P<before>{_CURRENCY})?(?P<sign2>[-+])?{_NUMBER}{_FACTOR}(?P<after>\$| ?[%€£°])?"
    r"(?!\.?[0-9]|[A-Za-z]{1,3}[0-9])"
)
_UNIT_BEHIND = re.compile(rf" ?({_UNIT})")
# Dates, times, ratios, versions and roots: their digits are no numbers.
_NO_NUMBER = re.compile(
    r"(?<![0-9])(?:[0-9]{1,20}([-/:])[0-9]{1,20}(?:\1[0-9]{1,20})+|[0-9]{1,20}:[0-9]+"
    r"|[0-9]{1,20}\.[0-9]{1,20}(?:\.[0-9]{1,20})+(?![0-9]|,[0-9]))"
    r"|\\?sqrt ?[({][^(){}\n]{0,40}[)}]"
)
_MINUS = re.compile(r"(?P<edge>^|(?<![0-9)%])[ \n])(?:minus|negative) (?=[$€£]?\.?[0-9])", re.IGNORECASE)
_NOT = re.compile(r"\bnot $", re.IGNORECASE)
_OR = re.compile(r"[^.;:!?\n]{0,60}\bor\b(?! so\b)[^.;:!?\n]{0,30}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number and its unit. `by_sign`: the whole unit is a sign ($, %, °), which may be left out."""

    number: Fraction
    unit: tuple[str, ...] = ()
    by_sign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The last value of a text as it stands there, and what it says where it is a quantity."""

    text: str
    quantity: Quantity | None = None


def same_value(found: str, expected: str) -> bool:
    """Whether two whole answers say the same. A blank expectation equals nothing."""
    if max(len(found), len(expected)) > LONGEST_ANSWER:
        return " ".join(found.split()).casefold() == " ".join(expected.split()).casefold() != ""
    if _INTERVAL.fullmatch(interval := tidy(expected).strip()):
        return "".join(tidy(found).split()).casefold() == "".join(interval.split()).casefold()
    found, expected = _bare(found), _bare(expected)
    if (wanted := _quantity(expected)) is not None:
        return (got := _quantity(found)) is not None and _same_quantity(got, wanted)
    if _items(expected) is not None or _items(found) is not None:
        # One list is enough: `Monday and Tuesday` is `Monday, Tuesday`.
        return _same_items(_parts(found), _parts(expected), ordered=not _is_set(expected))
    return _plain(found) == _plain(expected) != ""


def lenient_value(text: str, expected: str) -> Found | None:
    """The last value in `text` of the kind of `expected`, right or wrong; None when there is none, or a hedge (`3 or 4`).

    Looked for after the last `\\boxed{`, `####` or `answer is`, if something of the kind stands there, else in the whole
    text. `expected` decides kind and length only, so a right value in the middle of the text is never picked out.
    """
    if len(expected) > LONGEST_ANSWER or not expected.strip():
        return None
    searched = _MINUS.sub(r"\g<edge>-", tidy(text[-LONGEST_SEARCH:]))
    marked = _marked(searched)
    if marked is not None:
        if same_value(marked, expected):
            return Found(text=marked.strip(), quantity=_quantity(_bare(marked)))
        if _has_kind(marked, expected):
            return _last_value(marked, expected)
    return _last_value(searched, expected)


def lenient_same(found: Found, expected: str) -> bool:
    """As `same_value`, but a unit may be missing on either side, 50% is also 0.5, and marks between words do not count."""
    wanted = _quantity(_bare(expected))
    if wanted is not None and found.quantity is not None:
        return _nearly_same(found.quantity, wanted)
    if same_value(found.text, expected):
        return True
    if wanted is not None:
        return False
    items = _items(_bare(expected))
    got = _items(_bare(found.text))
    if items is not None and got is not None:
        return False
    return _folded(found.text) == _folded(expected) != []


def _quantity(text: str) -> Quantity | None:
    """What a bare text says when it is one number with or without a unit."""
    text = _MINUS.sub(r"\g<edge>-", text)
    if "\n" in text or not (match := _WHOLE.fullmatch(text)):
        return None
    return _read(match, match["unit"] or "")


def _read(match: re.Match[str], unit: str) -> Quantity | None:
    """The quantity of a match, with the unit words behind it; None when it has two signs or too many digits."""
    parts = [match[name] for name in ("ten", "whole", "top", "e", "power", "bottom")]
    if (match["sign"] and match["sign2"]) or sum(len(part or "") for part in parts) > MOSTDIGITS:
        return None
    exponent = int(match["ten"] or match["e"] or match["power"] or 0)
    bottom = decimal(match["bottom"] or "1")
    if abs(exponent) > MOSTDIGITS or bottom == 0:
        return None
    top = Fraction(1) if match["ten"] else decimal(match["top"])
    number = int(match["whole"] or 0) + top * Fraction(10) ** exponent / bottom
    times, words = units.words(unit)
    signs = units.of_signs((match["before"] or "").strip(), (match["after"] or "").strip())
    sign = -1 if "-" in ((match["sign"] or "") + (match["sign2"] or "")) else 1
    return Quantity(number=sign * number * times, unit=units.joined(signs, words), by_sign=bool(signs) and not words)


def decimal(digits: str) -> Fraction:
    if re.search(r"\.[0-9]{3},|\..*,", digits):
        digits = digits.replace(".", "").replace(",", ".")
    return Fraction(re.sub("[,' ]", "", digits))


def _same_quantity(found: Quantity, wanted: Quantity) -> bool:
    if found.number != wanted.number:
        return False
    left_out = (not found.unit and wanted.by_sign) or (not wanted.unit and found.by_sign)
    return found.unit == wanted.unit or left_out


def _nearly_same(found: Quantity, wanted: Quantity) -> bool:
    if not (found.unit and wanted.unit):
        parts = [item.number / 100 if item.unit == units.PERCENT else item.number for item in (found, wanted)]
        return found.number == wanted.number or parts[0] == parts[1]
    return found.number == wanted.number and units.fits(found.unit, wanted.unit)


# --- lists and words --------------------------------------------------------------------------------------------------


def _items(text: str) -> list[str] | None:
    """The items of a bare list; None for anything else. `and` parts items of a list with commas, or numbers."""
    parts = _parts(text)
    if len(parts) < 2 or not (re.search("[,;]", text) or all(_quantity(part.strip(_AROUND)) for part in parts)):
        return None
    return parts


def _parts(text: str) -> list[str]:
    if _quantity(text) is not None:
        return [text]
    parts = [part.strip() for part in _BETWEEN_ITEMS.split(text) if part.strip(_AROUND)]
    return [part.lstrip("([{") if at == 0 else part for at, part in enumerate(parts)]


def _is_set(text: str) -> bool:
    bare = text.strip(" \n.,;:!?")
    return bare.startswith("{") and bare.endswith("}")


def _same_items(found: Sequence[str], wanted: Sequence[str], *, ordered: bool) -> bool:
    if ordered or max(len(found), len(wanted)) > 50:
        return len(found) == len(wanted) and all(map(_same_item, found, wanted))
    return (
        bool(found)
        and all(any(_same_item(one, other) for other in wanted) for one in found)
        and all(any(_same_item(one, other) for one in found) for other in wanted)
    )


def _same_item(found: str, wanted: str) -> bool:
    found, wanted = _edges_off(found), _edges_off(wanted)
    if (number := _quantity(wanted)) is not None:
        return (got := _quantity(found)) is not None and _same_quantity(got, number)
    return _plain(found) == _plain(wanted)


def _plain(text: str) -> str:
    """Lower case, single spaces, none around operators, no marks around; marks alone stay, for they are the answer then."""
    collapsed = " ".join(text.split()).casefold()
    spaced = re.sub(r"(?<=[0-9]) ?: ?(?=[0-9])", ":", collapsed.strip(_AROUND) or collapsed)
    return re.sub(r" ?([-+*/^=<>|]) ?", r"\1", spaced)


def _tokens(text: str) -> list[str]:
    return [bare for word in text.split() if (bare := word.strip(_AROUND))]


def _folded(text: str) -> list[str]:
    return [_plain(token) for token in _tokens(_bare(text))]


# --- the last value of a text -----------------------------------------------------------------------------------------


def _has_kind(span: str, expected: str) -> bool:
    """Whether `span` holds any value of the kind of `expected`."""
    bare = _bare(expected)
    if _quantity(bare) is None:
        return bool(_tokens(span))
    return _IN_TEXT.search(_NO_NUMBER.sub("\0", span)) is not None


def _last_value(span: str, expected: str) -> Found | None:
    if len(span) <= LONGEST_ANSWER and same_value(span, expected):
        return Found(text=span.strip(), quantity=_quantity(_bare(span)))
    bare = _bare(expected)
    if _quantity(bare) is not None:
        return _last_quantity(span)
    if (items := _items(bare)) is not None:
        return _last_list(span, items)
    words = _last_words(span, _tokens(bare))
    return None if words is None else Found(text=words)


def _last_quantity(span: str) -> Found | None:
    if len(span) <= LONGEST_ANSWER and (whole := _quantity(_bare(span))) is not None:
        return Found(text=_bare(span), quantity=whole)
    searched = re.sub(r"(?<==) ?- (?=[$€£0-9.])", " -", _NO_NUMBER.sub("\0", span))
    matches = list(_IN_TEXT.finditer(searched))
    if not matches:
        return None
    found = [_in_text(match, searched) for match in matches[-2:]]
    last = found[-1]
    if last is None or _NOT.search(searched, max(0, matches[-1].start() - 10), matches[-1].start()):
        return None
    if len(found) == 2 and _OR.fullmatch(searched, matches[-2].end(), matches[-1].start()):
        first = found[0]
        if first is None or first.number != last.number:
            return None
    return Found(text=matches[-1].group().strip(), quantity=last)


def _in_text(match: re.Match[str], text: str) -> Quantity | None:
    behind = _UNIT_BEHIND.match(text, match.end())
    return _read(match, behind[1] if behind else "")


def _last_list(span: str, items: Sequence[str]) -> Found | None:
    """The last list of the text if it is as long as the expected one; numbers may have nothing but white space between."""
    if all(_quantity(item.strip(_AROUND)) for item in items):
        runs: list[list[str]] = [[]]
        end = -1
        for match in _IN_TEXT.finditer(masked := _NO_NUMBER.sub("\0", span)):
            if end < 0 or not re.fullmatch(r"[\s,;&]*(?:(?:and|then)\s+)?", masked[end : match.start()]):
                runs.append([])
            runs[-1].append(match.group().strip())
            end = match.end()
        longer = [run for run in runs if len(run) > 1]
        return Found(text=", ".join(longer[-1])) if longer and len(longer[-1]) == len(items) else None
    sentences = [part for part in _SENTENCE_END.split(span.replace(";", ",")) if _tokens(part)]
    if not sentences:
        return None
    found = _items(sentences[-1].strip())
    if found is None:
        words = _last_words(sentences[-1], [token for item in items for token in _tokens(item)])
        return None if words is None else Found(text=words)
    if len(found) != len(items):
        return None
    first = _tokens(found[0])[-len(_tokens(items[0])) :]
    return Found(text=", ".join([" ".join(first), *found[1:]]))


def _last_words(text: str, wanted: Sequence[str]) -> str | None:
    """As many words as wanted from the end of the last sentence; of single letters the last run, which must be as long."""
    sentences = [tokens for part in _SENTENCE_END.split(text) if (tokens := _tokens(part))]
    if not sentences or not wanted:
        return None
    last = sentences[-1]
    if all(len(token) == 1 and token.isalnum() for token in wanted):
        runs = [run for tokens in sentences for run in _single_character_runs(tokens)]
        # `a` and `I` are English words too: alone they are no list of letters, unless one letter is expected.
        runs = [run for run in runs if len(run) > 1 or len(wanted) == 1]
        found = runs[-1] if runs else []
    else:
        found = last[-len(wanted) :]
    # `Monday or Tuesday` is no answer, `not Tuesday` neither, and `A and B` is none to a question that has one.
    before = last[: -len(wanted)]
    if before and found == last[-len(wanted) :] and before[-1].casefold() in ("or", "and", "nor", "not"):
        return None
    return " ".join(found) if len(found) == len(wanted) else None


def _single_character_runs(tokens: Sequence[str]) -> list[list[str]]:
    runs: list[list[str]] = [[]]
    for token in tokens:
        if len(token) == 1 and token.isalnum():
            runs[-1].append(token)
        else:
            runs.append([])
    return [run for run in runs if run]


# --- what stands around an answer -----------------------------------------------------------

_MARK = re.compile(r"\\f?boxed ?\{|####|\banswer\b ?(?:is|was|=|:|would be|must be)(?: ?:)?", re.IGNORECASE)


def _bare(text: str) -> str:
    """A whole answer without what is written around it: `$…$`, `\\boxed{…}`, `####`, quotes, a full stop."""
    bare = tidy(text).strip()
    for _ in range(4):
        before = bare
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
    return text.rstrip(_AROUND).lstrip(_AROUND.replace(".", "")) or text.strip()


def _marked(text: str) -> str | None:
    """What follows the last mark of an answer: the content of the box, the line after ####, the sentence after `answer is`."""
    for match in reversed(list(_MARK.finditer(text))[-5:]):
        rest = text[match.end() :].lstrip(" \n*_:")
        span: str | None = rest
        if match.group().endswith("{"):
            span = braced(text, match.end())
        elif match.group() == "####":
            span = rest.partition("\n")[0]
        elif end := _SENTENCE_END.search(rest):
            span = rest[: end.start()]
        if span is not None and span.strip():
            return span
    return None
