"""The last value of a text, as a judge reads it who sets the tags apart: which one is given as the answer, right or wrong.

The expected answer decides the kind and the length of what is looked for, never the place.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tunix_rt.scoring import negation as clauses
from tunix_rt.scoring import normalize as units
from tunix_rt.scoring.answers import (
    AROUND,
    CURRENCY,
    FACTOR,
    LONGEST_ANSWER,
    MINUS,
    NUMBER,
    UNIT,
    Quantity,
    bare_answer,
    is_a_hundredth,
    list_items,
    plain_words,
    read_number,
    read_quantity,
    same_value,
    tokens_of,
)
from tunix_rt.scoring.normalize import braced, tidy

LONGEST_SEARCH = 20_000  # characters from the end in which the last value is looked for

_SENTENCE_END = re.compile(r"[.;:!?…]+(?=\s|$)|\n+")
# In running text: `5-3` ends in 3, not in -3; the 3 of `v3` and the 4 of `GPT-4` are no numbers.
_IN_TEXT = re.compile(
    r"(?<![A-Za-z0-9_^√])(?<![0-9]\.)(?<![A-Za-z]-)"
    rf"(?P<sign>[-+])?(?P<before>{CURRENCY})?(?P<sign2>[-+])?{NUMBER}{FACTOR}(?P<after>\$| ?[%€£°])?"
    r"(?!\.?[0-9]|[A-Za-z]{1,3}[0-9])"
)
_UNIT_BEHIND = re.compile(rf" ?({UNIT})")
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]{0,6}\.?"
# Dates, times, ratios, versions, roots and points: their digits are no numbers.
_NO_NUMBER = re.compile(
    rf"\b(?:{_MONTH} [0-9]{{1,2}}(?:st|nd|rd|th)?,?|[0-9]{{1,2}}(?:st|nd|rd|th)?(?: of)? {_MONTH},?) [0-9]{{4}}\b|"
    r"[(\[{] ?[0-9.]{1,20}(?:, ?[0-9.]{1,20})+ ?[)\]}]|"
    r"(?<![0-9])(?:[0-9]{1,20}([-/:])[0-9]{1,20}(?:\1[0-9]{1,20})+|[0-9]{1,20}:[0-9]+"
    r"|[0-9]{1,20}\.[0-9]{1,20}(?:\.[0-9]{1,20})+(?![0-9]|,[0-9]))"
    r"|\\?sqrt ?[({][^(){}\n]{0,40}[)}]"
)
_OR = re.compile(r"[^.;:!?\n]{0,60}\bor\b(?! so\b)[^.;:!?\n]{0,30}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The last value of a text as it stands there, and what it says where it is a quantity."""

    text: str
    quantity: Quantity | None = None


def lenient_value(text: str, expected: str) -> Found | None:
    """The last value in `text` of the kind of `expected`, right or wrong; None when there is none, or a hedge (`3 or 4`).

    Looked for after the last `\\boxed{`, `####` or `answer is`, if something of the kind stands there, else in the whole
    text. `expected` decides kind and length only, so a right value in the middle of the text is never picked out.
    """
    if len(expected) > LONGEST_ANSWER or not expected.strip():
        return None
    searched = MINUS.sub(r"\g<edge>-", tidy(text[-LONGEST_SEARCH:]))
    marked = _marked(searched)
    if marked is not None:
        if same_value(marked, expected):
            return Found(text=marked.strip(), quantity=read_quantity(bare_answer(marked)))
        if _has_kind(marked, expected):
            return _last_value(marked, expected)
    return _last_value(searched, expected)


def lenient_same(found: Found, expected: str) -> bool:
    """As `same_value`, but a unit may be missing on either side, 50% is also 0.5, and marks between words do not count."""
    wanted = read_quantity(bare_answer(expected))
    if wanted is not None and found.quantity is not None:
        return _nearly_same(found.quantity, wanted)
    if same_value(found.text, expected):
        return True
    if wanted is not None:
        return False
    items = list_items(bare_answer(expected))
    got = list_items(bare_answer(found.text))
    if items is not None and got is not None:
        return False
    return _folded(found.text) == _folded(expected) != []


def _nearly_same(found: Quantity, wanted: Quantity) -> bool:
    if found.unit and wanted.unit:
        return found.number == wanted.number and units.fits(found.unit, wanted.unit)
    if wanted.unit == units.PERCENT and found.number == wanted.number / 100:
        return True
    if found.unit == units.PERCENT and 0 < abs(wanted.number) < 1 and found.number / 100 == wanted.number:
        return True
    return found.number == wanted.number and not is_a_hundredth(found, wanted)


def _folded(text: str) -> list[str]:
    return [plain_words(token) for token in tokens_of(bare_answer(text))]


# --- numbers --------------------------------------------------------------------------------------------------------


def _has_kind(span: str, expected: str) -> bool:
    """Whether `span` holds any value of the kind of `expected`."""
    bare = bare_answer(expected)
    if read_quantity(bare) is not None:
        return _IN_TEXT.search(_NO_NUMBER.sub("\0", span)) is not None
    return _last_letter(span) is not None if _is_letter(bare) else bool(tokens_of(span))


def _last_value(span: str, expected: str) -> Found | None:
    if len(span) <= LONGEST_ANSWER and same_value(span, expected):
        return Found(text=span.strip(), quantity=read_quantity(bare_answer(span)))
    bare = bare_answer(expected)
    if _is_letter(bare):
        return None if (letter := _last_letter(span)) is None else Found(text=letter)
    if (items := list_items(bare)) is not None:
        return _last_list(span, items)
    is_number = read_quantity(bare) is not None
    words = None if is_number and re.search("[0-9]", bare) else _last_words(span, tokens_of(bare))
    if is_number and (words is None or not same_value(words, bare)):
        return _last_quantity(span)
    return None if words is None else Found(text=words)


def _last_quantity(span: str) -> Found | None:
    """The last number of the text, unless it is denied, a bound, or a part of something: a list, a range, a sum."""
    if len(span) <= LONGEST_ANSWER:
        bare = bare_answer(span)
        if (whole := read_quantity(bare)) is not None:
            return Found(text=bare, quantity=whole)
        numbers = {read_quantity(item.strip(AROUND)) for item in list_items(bare) or ()}
        if len(numbers) > 1 and all(number is not None and len(number.unit) < 2 for number in numbers):
            return None
    searched = re.sub(r"(?<==) ?- (?=[$€£0-9.])", " -", _NO_NUMBER.sub("\0", clauses.without_asides(span)))
    matches = list(_IN_TEXT.finditer(searched))[-8:]
    at = _meant(matches, searched)
    if at is None or (last := _in_text(matches[at], searched)) is None:
        return None
    if at and _OR.fullmatch(searched, matches[at - 1].end(), matches[at].start()):
        first = _in_text(matches[at - 1], searched)
        if first is None or first.number != last.number:
            return None
    elif clauses.is_alternative(searched, matches[at].start()):
        return None
    return Found(text=matches[at].group().strip(), quantity=last)


def _meant(matches: Sequence[re.Match[str]], text: str) -> int | None:
    """Which number the text ends at: the last, or the 7 of `7 = 3 + 4`. None when it is a part of something."""
    gaps = [text[one.end() : other.start()] for one, other in pairwise(matches)]
    at = len(matches) - 1
    while at > 0 and clauses.operates(gaps[at - 1]):
        at -= 1
    worked = at < len(matches) - 1
    if worked and (at == 0 or not clauses.EQUALS.fullmatch(gaps[at - 1])):
        return None
    at -= worked
    if at < 0 or (at > 0 and (clauses.operates(gaps[at - 1]) or _is_part(matches, gaps, at, text))):
        return None
    end = matches[at].end()
    behind = text[:end] if worked else text
    return at if clauses.is_stated(behind, matches[at].start(), end) else None


def _is_part(matches: Sequence[re.Match[str]], gaps: Sequence[str], at: int, text: str) -> bool:
    """Whether the number is the end of a range or a share, or of a list of three or more."""
    before = matches[at - 1].start()
    if clauses.is_together(text[max(0, before - 10) : before], gaps[at - 1]):
        return True
    return at > 1 and all(re.fullmatch(r"[,;] ?(?:and )?", gap) for gap in gaps[at - 2 : at])


def _in_text(match: re.Match[str], text: str) -> Quantity | None:
    behind = _UNIT_BEHIND.match(text, match.end())
    return read_number(match, behind[1] if behind else "", glued=behind is not None and not behind[0].startswith(" "))


def _last_list(span: str, items: Sequence[str]) -> Found | None:
    """The last list of the text if it is as long as the expected one; numbers may have nothing but white space between."""
    if all(read_quantity(item.strip(AROUND)) for item in items):
        runs: list[list[str]] = [[]]
        end = -1
        for match in _IN_TEXT.finditer(masked := _NO_NUMBER.sub("\0", span)):
            if end < 0 or not re.fullmatch(r"[\s,;&]*(?:(?:and|then)\s+)?", masked[end : match.start()]):
                runs.append([])
            runs[-1].append(match.group().strip())
            end = match.end()
        longer = [run for run in runs if len(run) > 1]
        return Found(text=", ".join(longer[-1])) if longer and len(longer[-1]) == len(items) else None
    sentences = [part for part in _SENTENCE_END.split(span.replace(";", ",")) if tokens_of(part)]
    if not sentences:
        return None
    found = list_items(sentences[-1].strip())
    if found is None:
        words = _last_words(sentences[-1], [token for item in items for token in tokens_of(item)])
        return None if words is None else Found(text=words)
    if len(found) != len(items):
        return None
    first = tokens_of(found[0])[-len(tokens_of(items[0])) :]
    return Found(text=", ".join([" ".join(first), *found[1:]]))


def _last_words(text: str, wanted: Sequence[str]) -> str | None:
    """As many words as wanted from the end of the last sentence; of single letters the last run, which must be as long."""
    parts = [part for part in _SENTENCE_END.split(text) if tokens_of(part)]
    if not parts or not wanted:
        return None
    parts[-1] = clauses.NOT_THE_OTHER_WORD.sub("", parts[-1])
    sentences = [tokens_of(part) for part in parts]
    last = sentences[-1]
    if all(len(token) == 1 and token.isalnum() for token in wanted):
        runs = [run for tokens in sentences for run in _single_character_runs(tokens)]
        runs = [run for run in runs if len(run) > 1]  # `a` and `I` are English words too
        found = runs[-1] if runs else []
    else:
        found = last[-len(wanted) :]
    # `Monday or Tuesday` is no answer, `not Tuesday` neither, and `A and B` is none to a question that has one.
    before = last[: -len(wanted)]
    if before and found == last[-len(wanted) :] and before[-1].casefold() in ("or", "and", "nor", "not"):
        return None
    clause = " ".join(tokens_of(re.split(",(?= )", parts[-1])[-1])[: -len(wanted)])
    if clause and clauses.is_denied(f"{clause} ", len(clause) + 1, len(clause) + 1):
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


_LETTER = re.compile(r"(?P<open>[(\[\"'“‘`]?)(?<![\w'])(?P<letter>[A-Za-z])(?P<close>[)\]\"'”’`]?)(?![\w'+#-]| ?[=^])")
_OTHER_CHOICE = re.compile(r"\s*(?:,|/|&|,? ?or|,? ?and)(?: maybe)?\s*")
_SAID_OF_LETTER = re.compile(r"\s+(?:is|was|because|since|as|and|or|but|with|for|by|seems|must|would|looks|fits)\b")


def _is_letter(bare: str) -> bool:
    return len(bare) == 1 and bare.isalpha()


def _last_letter(text: str) -> str | None:
    """The last letter given as an answer. The article `a` and the pronoun `I` are none, nor is one called wrong."""
    found = [match for match in _LETTER.finditer(text) if _names_a_choice(match, text)][-20:]
    found = [match for match in found if not clauses.is_denied(text, match.start(), match.end())]
    if not found:
        return None
    last = found[-1]["letter"]
    if len(found) > 1 and found[-2]["letter"].casefold() != last.casefold():
        between = text[found[-2].end() : found[-1].start()]
        return None if _OTHER_CHOICE.fullmatch(between) else last
    return last


def _names_a_choice(match: re.Match[str], text: str) -> bool:
    if match["open"] or match["close"] or match["letter"] not in "AaIi":
        return True
    rest = text[match.end() : match.end() + 40]
    if match["letter"] == "A":
        return not re.match(r" +\w", rest) or _SAID_OF_LETTER.match(rest) is not None
    return not re.match(r"[ ,]*\w", rest)


# --- marks of an answer ----------------------------------------------------------------------------------------------

_WHETHER = re.compile(r"(?:\b(?:whether|if|doubt|not think)|n't think)\b[^.;:!?\n]{0,80}$", re.IGNORECASE)
_TAKEN_BACK = re.compile(r"(?:^|[.;:!?\n])\s*(?:no|wait|actually|sorry|oops|hmm|correction)\b[,.:! ]", re.IGNORECASE)
_MARK = re.compile(r"\\f?boxed ?\{|####|\banswer\b ?(?:is|was|=|:|would be|must be)(?: ?:)?", re.IGNORECASE)


def has_mark(text: str) -> bool:
    """Whether something is marked as the answer by a box, `####` or `answer is`."""
    return _marked(tidy(text[-LONGEST_SEARCH:])) is not None


def _marked(text: str) -> str | None:
    """What follows the last mark of an answer: the content of the box, the line after ####, the sentence after `answer is`.

    `whether the answer is 5` marks nothing. What is taken back (`No, it must be 6`) is followed by the answer.
    """
    for match in reversed(list(_MARK.finditer(text))[-5:]):
        if _WHETHER.search(text, max(0, match.start() - 100), match.start()):
            continue
        rest = text[match.end() :].lstrip(" \n*_:")
        span: str | None = rest
        if match.group().endswith("{"):
            span = braced(text, match.end())
        elif match.group() == "####":
            span = rest.partition("\n")[0]
        elif end := _SENTENCE_END.search(rest):
            span = rest[: end.start()]
        if span is not None and span.strip():
            taken_back = list(_TAKEN_BACK.finditer(text, match.end() + len(span)))
            later = text[taken_back[-1].end() :] if taken_back else ""
            return later if tokens_of(later) else span
    return None
