"""The last value of a text, for the lenient reading: the one given as the answer, right or wrong.

The expected answer decides the kind and the length of the value, never the place.
"""

import re
from collections.abc import Sequence
from itertools import groupby, pairwise

from tunix_rt.scoring import normalize as units
from tunix_rt.scoring.answers import (
    AROUND,
    CURRENCY,
    FACTOR,
    LONGEST_ANSWER,
    MINUS,
    NUMBER,
    UNIT,
    LastValue,
    Quantity,
    bare_answer,
    list_items,
    read_number,
    read_quantity,
    same_value,
    tokens_of,
)
from tunix_rt.scoring.normalize import braced, tidy

LONGEST_SEARCH = 20_000  # characters from the end that are searched

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


def lenient_value(text: str, expected: str) -> LastValue | None:
    """The last value in `text` of the kind of `expected`, right or wrong; None when there is none, or a hedge (`3 or 4`).

    Searched after the last `\\boxed{`, `####` or `answer is`, if something of the kind follows, else in the whole
    text. `expected` decides kind and length only, so a right value in the middle of the text is never picked out.
    """
    if len(expected) > LONGEST_ANSWER or not expected.strip():
        return None
    searched = MINUS.sub(r"\g<edge>-", tidy(text[-LONGEST_SEARCH:]))
    marked = _marked(searched)
    if marked is not None:
        if same_value(marked, expected):
            return LastValue(text=marked.strip(), quantity=read_quantity(bare_answer(marked)))
        if _has_kind(marked, expected):
            return _last_value(marked, expected)
    return _last_value(searched, expected)


# --- numbers --------------------------------------------------------------------------------------------------------


def _has_kind(span: str, expected: str) -> bool:
    """Whether `span` contains any value of the kind of `expected`."""
    bare = bare_answer(expected)
    if read_quantity(bare) is not None:
        return _IN_TEXT.search(_NO_NUMBER.sub("\0", span)) is not None
    return _last_letter(span) is not None if _is_letter(bare) else bool(tokens_of(span))


def _last_value(span: str, expected: str) -> LastValue | None:
    if len(span) <= LONGEST_ANSWER and same_value(span, expected):
        return LastValue(text=span.strip(), quantity=read_quantity(bare_answer(span)))
    bare = bare_answer(expected)
    if _is_letter(bare):
        return None if (letter := _last_letter(span)) is None else LastValue(text=letter)
    if (items := list_items(bare)) is not None:
        return _last_list(span, items)
    is_number = read_quantity(bare) is not None
    words = None if is_number and re.search("[0-9]", bare) else _last_words(span, tokens_of(bare))
    if is_number and (words is None or not same_value(words, bare)):
        return _last_quantity(span)
    return None if words is None else LastValue(text=words)


def _last_quantity(span: str) -> LastValue | None:
    """The last number of the text, unless it is denied, a bound, or a part of something: a list, a range, a sum."""
    if len(span) <= LONGEST_ANSWER:
        bare = bare_answer(span)
        if (whole := read_quantity(bare)) is not None:
            return LastValue(text=bare, quantity=whole)
        numbers = {read_quantity(item.strip(AROUND)) for item in list_items(bare) or ()}
        if len(numbers) > 1 and all(number is not None and len(number.unit) < 2 for number in numbers):
            return None
    searched = re.sub(r"(?<==) ?- (?=[$€£0-9.])", " -", _NO_NUMBER.sub("\0", _without_asides(span)))
    matches = list(_IN_TEXT.finditer(searched))[-8:]
    at = _meant(matches, searched)
    if at is None or (last := _in_text(matches[at], searched)) is None:
        return None
    if at and _OR.fullmatch(searched, matches[at - 1].end(), matches[at].start()):
        first = _in_text(matches[at - 1], searched)
        if first is None or first.number != last.number:
            return None
    elif _is_alternative(searched, matches[at].start()):
        return None
    return LastValue(text=matches[at].group().strip(), quantity=last)


def _meant(matches: Sequence[re.Match[str]], text: str) -> int | None:
    """Which number the text ends at: the last, or the 7 of `7 = 3 + 4`. None when it is a part of something."""
    gaps = [text[one.end() : other.start()] for one, other in pairwise(matches)]
    at = len(matches) - 1
    while at > 0 and _operates(gaps[at - 1]):
        at -= 1
    worked = at < len(matches) - 1
    if worked and (at == 0 or not _EQUALS.fullmatch(gaps[at - 1])):
        return None
    at -= worked
    if at < 0 or (at > 0 and (_operates(gaps[at - 1]) or _is_part(matches, gaps, at, text))):
        return None
    end = matches[at].end()
    behind = text[:end] if worked else text
    return at if _is_stated(behind, matches[at].start(), end) else None


def _is_part(matches: Sequence[re.Match[str]], gaps: Sequence[str], at: int, text: str) -> bool:
    """Whether the number is the end of a range or a share, or of a list of three or more."""
    before = matches[at - 1].start()
    if _is_together(text[max(0, before - 10) : before], gaps[at - 1]):
        return True
    return at > 1 and all(re.fullmatch(r"[,;] ?(?:and )?", gap) for gap in gaps[at - 2 : at])


def _in_text(match: re.Match[str], text: str) -> Quantity | None:
    behind = _UNIT_BEHIND.match(text, match.end())
    return read_number(match, behind[1] if behind else "", glued=behind is not None and not behind[0].startswith(" "))


def _last_list(span: str, items: Sequence[str]) -> LastValue | None:
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
        return LastValue(text=", ".join(longer[-1])) if longer and len(longer[-1]) == len(items) else None
    sentences = [part for part in _SENTENCE_END.split(span.replace(";", ",")) if tokens_of(part)]
    if not sentences:
        return None
    found = list_items(sentences[-1].strip())
    if found is None:
        words = _last_words(sentences[-1], [token for item in items for token in tokens_of(item)])
        return None if words is None else LastValue(text=words)
    if len(found) != len(items):
        return None
    first = tokens_of(found[0])[-len(tokens_of(items[0])) :]
    return LastValue(text=", ".join([" ".join(first), *found[1:]]))


def _last_words(text: str, wanted: Sequence[str]) -> str | None:
    """As many words as wanted from the end of the last sentence; of single letters the last run, which must be as long."""
    parts = [part for part in _SENTENCE_END.split(text) if tokens_of(part)]
    if not parts or not wanted:
        return None
    parts[-1] = _NOT_THE_OTHER_WORD.sub("", parts[-1])
    sentences = [tokens_of(part) for part in parts]
    last = sentences[-1]
    if all(len(token) == 1 and token.isalnum() for token in wanted):
        # `a` and `I` are English words too.
        runs = [run for tokens in sentences for run in _single_character_runs(tokens) if len(run) > 1]
        found = runs[-1] if runs else []
    else:
        found = last[-len(wanted) :]
    # `Monday or Tuesday` is no answer, `not Tuesday` neither, and `A and B` is none to a question that has one.
    before = last[: -len(wanted)]
    if before and found == last[-len(wanted) :] and before[-1].casefold() in ("or", "and", "nor", "not"):
        return None
    clause = " ".join(tokens_of(re.split(",(?= )", parts[-1])[-1])[: -len(wanted)])
    if clause and _is_denied(f"{clause} ", len(clause) + 1, len(clause) + 1):
        return None
    return " ".join(found) if len(found) == len(wanted) else None


def _single_character_runs(tokens: Sequence[str]) -> list[list[str]]:
    groups = groupby(tokens, key=lambda token: len(token) == 1 and token.isalnum())
    return [list(run) for is_single, run in groups if is_single]


_LETTER = re.compile(r"(?P<open>[(\[\"'“‘`]?)(?<![\w'])(?P<letter>[A-Za-z])(?P<close>[)\]\"'”’`]?)(?![\w'+#-]| ?[=^])")
_OTHER_CHOICE = re.compile(r"\s*(?:,|/|&|,? ?or|,? ?and)(?: maybe)?\s*")
_SAID_OF_LETTER = re.compile(r"\s+(?:is|was|because|since|as|and|or|but|with|for|by|seems|must|would|looks|fits)\b")


def _is_letter(bare: str) -> bool:
    return len(bare) == 1 and bare.isalpha()


def _last_letter(text: str) -> str | None:
    """The last letter given as an answer. The article `a` and the pronoun `I` are none, nor is one called wrong."""
    found = [match for match in _LETTER.finditer(text) if _names_a_choice(match, text)][-20:]
    found = [match for match in found if not _is_denied(text, match.start(), match.end())]
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


# --- stated, denied, bounded, or part of something larger -------------------------------------------------------------
# `5` is not stated by `it isn't 5`, `more than 5`, `x ≠ 5`, `3 + 5`, `5 hours 30 minutes` or `between 5 and 7`. Finding no value
# is better than finding one that is not meant.

NEAR = 200  # characters before and behind a value that are looked at

# The end of the clause about one value. `anything but 5` goes on.
_BREAK = re.compile(
    r"[;!?\n]+|\.+(?=\s|$)|,(?=\s)|(?<!anything)(?<!nothing)(?<! all) but\b"
    r"| (?:so|therefore|thus|hence|since|because|then)\b"
)
# Searched before a value, up to it ($), in its clause.
_DENIED_BEFORE = re.compile(
    r"\banything but |\b(?:no|except|without|excluding) $"
    r"|(?:n't|\bnot) (?:think|believe|say|mean)\b"  # `I don't think it is 5`
    # `it is not the 5`, but not `those who are not red are 5`
    r"|(?:n't|\b(?:not|never|cannot|neither|nor|wrong|incorrect|unlikely)):?"
    r"(?: (?!(?:is|are|was|were|equals?)\b)[^\W\d_]+){0,3} $",
    re.IGNORECASE,
)
_DENIED_BEHIND = re.compile(
    r"\b(?:is|was)(?:n't| not) (?:the|an?|right|correct|possible|it|valid)\b"  # `5 is not the answer`
    # `5 is wrong`, `5 (incorrect)`
    r"|(?:\b(?:is|was|seems|would be|must be) (?:[^\W\d_]+ )?|[(:-] ?)(?:wrong|incorrect|false)\b",
    re.IGNORECASE,
)
# What makes the value right behind it a bound, or a part of a sum. An operator does if something stands before it that can
# be worked with: a number, a name, not an article (`the + 2`).
_BOUND = re.compile(
    r"(?:\b(?:more|less|fewer|greater|larger|smaller|higher|lower|bigger|other) than(?: or equal to)?"
    r"|\bat (?:least|most|minimum|maximum)|\+/?-"
    r"|\b(?:over|under|above|below|beyond|exceeds?|almost|nearly|hardly|barely"
    r"|(?<!rounds )(?<!rounded )(?<!round )up to|between|from|twice|double|triple|log|ln|sin|cos|tan|sqrt)"
    r"|\b(?:half|third|quarter|root)(?: of)?"
    r"|(?<![-=>])>|[<≤≥≠±^√]|[<>!]="  # `x < 5`, but not the arrow of `-> 5`
    r"|[\w)](?<!\bthe) ?[+/×·÷]|[\w)] ?\*(?= )|[\w)]\*"  # `3 + 5`, `x * 5`, but not the bold of `is *5*`
    r"|(?:^|[\W\d])[A-Za-z0-9)] ?-(?= )|[-+*/×·÷^] ?\()"  # `20 - 5`, `3 * (5`, but not the dash of `so - 5`
    r"[ (]*(?:about |around )?$",
    re.IGNORECASE,
)
# The same, right behind the value.
_BEHIND = re.compile(
    r" ?[+×·÷^≤≥<>≠±] ?[\w(]| ?\* ?[0-9(]| ?/ ?[0-9(]"  # `5 + x`, `5/2`
    r"|[-+/](?=[\s.,)]|$)| ?- ?(?:[A-Za-z]\b|\()"  # `5+`, `5 - x`
    r"|(?: [^\W\d_]+)? (?:or|and) (?:more|less|fewer|above|below|up)\b"  # `5 apples or more`
    r"|(?: [^\W\d_]+)? at (?:least|most)\b|\?\s*(?:no|nope|not|wrong)\b",  # `5 at most`, `5? No`
    re.IGNORECASE,
)
_MAYBE_OTHER = re.compile(r"\bor (?:maybe |perhaps |even )?$", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?<![A-Za-z])[A-Za-z] ?= ?$")

# Up to two words behind the first number; none that begins a new statement about the second.
_UNIT_WORDS = (
    r"(?:(?!(?:equals?|is|are|was|were|makes?|gives?|comes?|adds?|amounts?|leads?|rounds?|totals?|sums?|has|have|which|that"
    r"|so|we|he|she|they|it|i)\b)[^\W\d_]+ ?){0,2}"
)
_OPERATES = re.compile(
    rf" ?{_UNIT_WORDS}(?:[-+*/×·÷^]"
    r"|\b(?:x|plus|minus|times|divided by|multiplied by|over|mod|modulo|choose|to the(?: power(?: of)?)?)\b) ?[($]*",
    re.IGNORECASE,
)
_TOGETHER = re.compile(
    rf" ?{_UNIT_WORDS}(?:[~&|']|\.\.+|\b(?:to|through|until|till|vs\.?|versus|by|and|(?:with )?remainder|rem|r|out of"
    r"|of(?: the| all)?)(?!\w)),? ?",
    re.IGNORECASE,
)
_ASSIGNS_TOO = re.compile(r"[,;]? ?(?:and )?[A-Za-z] ?= ?")
_THEN_UNIT = re.compile(r" ?([^\W\d_]+),? ")
_EQUALS = re.compile(rf" ?{_UNIT_WORDS}= ?")

_NUMBER_BEFORE = r"(?P<kept>[0-9][%$€£°]?(?: [^\W\d_]{1,30}){0,3})"
_ASIDE = re.compile(rf"{_NUMBER_BEFORE} \([^()\n]{{0,200}}[0-9][^()\n]{{0,200}}\)")
_NOT_THE_OTHER = re.compile(
    rf"{_NUMBER_BEFORE}(?:,(?: and| but)? not| rather than| instead of) [^,.;:!?\n]{{0,60}}(?=[.;!?\n]|$)"
)
_NOT_THE_OTHER_WORD = re.compile(r",(?: and| but)? not [^,.;:!?\n]{0,60}$", re.IGNORECASE)


def _without_asides(text: str) -> str:
    """Without asides to a number: `5 apples (2 red, 3 green)`, `42, not 43`."""
    return _NOT_THE_OTHER.sub(r"\g<kept>", _ASIDE.sub(r"\g<kept>", text))


def _is_stated(text: str, start: int, end: int) -> bool:
    """Whether nothing around the number at `start` denies it, bounds it, or works with it."""
    before, behind = text[max(0, start - NEAR) : start], text[end : end + NEAR]
    if _BOUND.search(before) or _BEHIND.match(behind) or (before.endswith("|") and text[start] == "-"):
        return False
    return not _is_denied(text, start, end)


def _is_denied(text: str, start: int, end: int) -> bool:
    """Whether the clause denies the value."""
    before, behind = text[max(0, start - NEAR) : start], text[end : end + NEAR]
    for found in _BREAK.finditer(before):
        start_of_clause = found.end()
        before = " " * start_of_clause + before[start_of_clause:]
    if closing := _BREAK.search(behind):
        behind = behind[: closing.start()]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_BEHIND.search(behind))


def _is_alternative(text: str, start: int) -> bool:
    """Whether `or` precedes it."""
    return _MAYBE_OTHER.search(text, max(0, start - 20), start) is not None


def _operates(gap: str) -> bool:
    """Whether the text between two numbers is an operation without its result."""
    return gap == "**" or (len(gap) <= NEAR and _OPERATES.fullmatch(gap) is not None)


def _is_together(before: str, gap: str) -> bool:
    """Whether two numbers are one thing: a range, a share, a remainder, two units, two variables. `before` is what precedes."""
    if len(gap) > NEAR:
        return False
    if gap == " " or _TOGETHER.fullmatch(gap) or (_ASSIGNS_TOO.fullmatch(gap) and _ASSIGNED.search(before)):
        return True
    unit = _THEN_UNIT.fullmatch(gap)
    return unit is not None and units.is_known(unit[1])
