"""One spelling for what is written in many: Unicode, simple LaTeX, numbers in words. It changes no value."""

import re
import unicodedata
from fractions import Fraction

_BULLET = re.compile(r"^[ \t]*[-*•] +(?=\S)", re.MULTILINE)  # of Markdown
_MINUS_FIRST = re.compile("^[ \t]*\u2212 +(?=[$€£0-9.])", re.MULTILINE)
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_LATEX = (
    (re.compile(r"\\[()\[\]]|\\[,;: ]|(?<=\w)~(?=[\w\\])|\\q?quad\b"), " "),
    (re.compile(r"\\!|\\left\b|\\right\b|\\displaystyle\b"), ""),
    (re.compile(r"\^ ?(?:\\circ\b|\{\\circ\})|\\degree\b"), "°"),
    (re.compile(r"\\([$%#&{}])"), r"\1"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\times\b"), "×"),
    (re.compile(r"\\pi\b"), "π"),
    (re.compile(r"\\cdot\b"), "·"),
    (re.compile(r"\\div\b"), "÷"),
    (re.compile(r"\\approx\b"), "≈"),
    (re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox|operatorname) ?\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dt]?frac ?\{ ?([0-9.,]+) ?\} ?\{ ?([0-9.,]+) ?\}"), r" \1/\2"),
    (re.compile(r"\\[dt]?frac ?([0-9]) ?([0-9])(?![0-9])"), r" \1/\2"),
    (re.compile(r"\^ ?\{([^{}]*)\}"), r"^\1"),
)


def tidy(text: str) -> str:
    """One spelling for what is written in many: full-width digits, ½, −, x², simple LaTeX, `p.m.`. Lines stay lines.

    The marks of a Markdown list go: `- 42` on a line of its own is 42.
    """
    text = _MINUS_FIRST.sub("-", _BULLET.sub("", text))
    text = re.sub("[¼-¾⅐-⅞]", lambda one: f" {unicodedata.normalize('NFKC', one[0])}", text)
    text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda some: f"^{some[0].translate(_SUPERSCRIPT)}", text)
    text = re.sub("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]", "", unicodedata.normalize("NFKC", text))
    text = re.sub("[\u2010-\u2013\u2212]", "-", text).replace("\u2044", "/").replace("\u2019", "'")
    for pattern, plain in _LATEX if "\\" in text or "{" in text or "~" in text else ():
        text = pattern.sub(plain, text)
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r"(?<=[0-9]) ?([AaPp])\.? ?[Mm]\b\.?", r" \1m", text)


def braced(text: str, start: int) -> str | None:
    """What stands between the brace before `start` and the one that closes it."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return None


_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL = {word: value for value, word in enumerate(_ONES)} | {word: 10 * value for value, word in enumerate(_TENS, 2)}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {"half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4}


def number_in_words(text: str) -> Fraction | None:
    """The value of a text that is number words and nothing else: `minus twenty-one`, `three quarters`, `a dozen`, `half`."""
    words = text.casefold().replace("-", " ").split()[:20]
    sign = -1 if words[:1] in (["minus"], ["negative"]) else 1
    words = words[1:] if sign < 0 else words
    if words in (["half"], ["a", "half"], ["a", "quarter"]):
        return Fraction(sign, _PARTS[words[-1]])
    if words in (["a", "dozen"], ["dozen"]):
        return Fraction(sign * 12)
    if words[:1] == ["a"] and words[1:2] and words[1] in ("hundred", *_LARGE):
        words[0] = "one"
    if len(words) == 2 and words[1] in _PARTS and 0 < _SMALL.get(words[0], 0) < 20:
        return Fraction(sign * _SMALL[words[0]], _PARTS[words[1]])
    value = _counted(words)
    return None if value is None else Fraction(sign * value)


def has_number_word(text: str) -> bool:
    """Whether a number is written in it as a word. `one` is none: it is a pronoun as well."""
    return any(word in _SMALL and word != "one" for word in re.findall(r"[a-z]+", text.casefold()))


def _counted(words: list[str]) -> int | None:
    """A whole number: below a thousand, then thousands and more, the largest first. `twenty twenty` is none."""
    total, group, lowest = 0, -1, 10**15
    for at, word in enumerate(words):
        small = _SMALL.get(word)
        after_tens = group % 100 >= 20 and group % 10 == 0 and small in range(1, 10)
        if small is not None and (group < 0 or group % 100 == 0 < group or after_tens):
            group = max(group, 0) + small
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word in _LARGE and group > 0 and _LARGE[word] < lowest:
            lowest = _LARGE[word]
            total, group = total + group * lowest, -1
        elif word != "and" or at in (0, len(words) - 1) or words[at - 1] not in ("hundred", *_LARGE):
            return None
    return total + max(group, 0) if words and (group >= 0 or total) else None
