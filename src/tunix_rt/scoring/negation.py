"""Is a value in running text stated, or denied, bounded, part of something larger? Only what stands close to it is read.

`5` is not stated by `it isn't 5`, `more than 5`, `x ≠ 5`, `3 + 5`, `5 hours 30 minutes` or `between 5 and 7`. The judge
would rather find no value than one that is not meant.
"""

import re

from tunix_rt.scoring import normalize as units

NEAR = 200  # characters before and behind a value that are looked at

# Where what is said of one value ends. `anything but 5` goes on.
_BREAK = re.compile(
    r"[;!?\n]+|\.+(?=\s|$)|,(?=\s)|(?<!anything)(?<!nothing)(?<! all) but\b"
    r"| (?:so|therefore|thus|hence|since|because|then)\b"
)
# What is searched before a value, up to it ($), in the clause it stands in.
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
EQUALS = re.compile(rf" ?{_UNIT_WORDS}= ?")

_NUMBER_BEFORE = r"(?P<kept>[0-9][%$€£°]?(?: [^\W\d_]{1,30}){0,3})"
_ASIDE = re.compile(rf"{_NUMBER_BEFORE} \([^()\n]{{0,200}}[0-9][^()\n]{{0,200}}\)")
_NOT_THE_OTHER = re.compile(
    rf"{_NUMBER_BEFORE}(?:,(?: and| but)? not| rather than| instead of) [^,.;:!?\n]{{0,60}}(?=[.;!?\n]|$)"
)
NOT_THE_OTHER_WORD = re.compile(r",(?: and| but)? not [^,.;:!?\n]{0,60}$", re.IGNORECASE)


def without_asides(text: str) -> str:
    """Without what is said beside a number: `5 apples (2 red, 3 green)`, `42, not 43`."""
    return _NOT_THE_OTHER.sub(r"\g<kept>", _ASIDE.sub(r"\g<kept>", text))


def is_stated(text: str, start: int, end: int) -> bool:
    """Whether nothing around the number at `start` denies it, bounds it, or works with it."""
    before, behind = text[max(0, start - NEAR) : start], text[end : end + NEAR]
    if _BOUND.search(before) or _BEHIND.match(behind) or (before.endswith("|") and text[start] == "-"):
        return False
    return not is_denied(text, start, end)


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether the clause says of the value that it is not the one."""
    before, behind = text[max(0, start - NEAR) : start], text[end : end + NEAR]
    for found in _BREAK.finditer(before):
        start_of_clause = found.end()
        before = " " * start_of_clause + before[start_of_clause:]
    if closing := _BREAK.search(behind):
        behind = behind[: closing.start()]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_BEHIND.search(behind))


def is_alternative(text: str, start: int) -> bool:
    """Whether `or` stands before it."""
    return _MAYBE_OTHER.search(text, max(0, start - 20), start) is not None


def operates(gap: str) -> bool:
    """Whether the text between two numbers is an operation that was not worked out."""
    return gap == "**" or (len(gap) <= NEAR and _OPERATES.fullmatch(gap) is not None)


def is_together(before: str, gap: str) -> bool:
    """Whether two numbers are one thing: a range, a share, a remainder, two units, two variables. `before` is what precedes."""
    if len(gap) > NEAR:
        return False
    if gap == " " or _TOGETHER.fullmatch(gap) or (_ASSIGNS_TOO.fullmatch(gap) and _ASSIGNED.search(before)):
        return True
    unit = _THEN_UNIT.fullmatch(gap)
    return unit is not None and units.is_known(unit[1])
