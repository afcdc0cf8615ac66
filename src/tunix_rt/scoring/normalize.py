"""One spelling for many: Unicode, simple LaTeX, numbers in words, units. It changes no value."""

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
    """One spelling for many: full-width digits, ½, −, x², simple LaTeX, `p.m.`. Lines stay lines.

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
    """The text between the brace before `start` and the one that closes it."""
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


PERCENT = ("percent",)

_SIGNS = {
    "$": "dollar", "US$": "dollar", "USD": "dollar", "€": "euro", "EUR": "euro", "£": "gbp", "GBP": "gbp", "¥": "yen",
    "JPY": "yen", "₹": "rupee", "INR": "rupee", "%": "percent", "°": "degree",
}  # fmt: skip
_MULTIPLES = {
    "dozen": 12, "score": 20, "hundred": 100, "thousand": 10**3, "k": 10**3, "lakh": 10**5, "million": 10**6, "mil": 10**6,
    "mn": 10**6, "crore": 10**7, "billion": 10**9, "bn": 10**9, "trillion": 10**12,
}  # fmt: skip
_SPELLINGS = {
    "kilometer": "km kilometre kms", "meter": "m metre", "centimeter": "cm centimetre", "millimeter": "mm millimetre",
    "mile": "mi", "foot": "ft feet", "inch": "inches", "yard": "yd", "kilogram": "kg kilo kgs", "gram": "g gramme",
    "milligram": "mg", "pound": "lb lbs", "ounce": "oz", "second": "s sec secs", "minute": "min mins", "hour": "h hr hrs",
    "year": "yr yrs", "liter": "l litre", "milliliter": "ml millilitre", "dollar": "usd", "euro": "eur", "percent": "pct",
    "degree": "deg", "celsius": "c", "fahrenheit": "f", "person": "people", "child": "children", "man": "men",
    "woman": "women", "mouse": "mice", "tooth": "teeth", "goose": "geese", "half": "halves", "leaf": "leaves",
    "loaf": "loaves", "knife": "knives", "shelf": "shelves", "bus": "buses", "th": "st nd rd", "am": "", "pm": "",
}  # fmt: skip
_SPELLED = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
# In a symbol of one to three letters the case counts (mW, MW), unless it is a common unit that has no such twin.
_WORD = re.compile(r"[^\W\d_]+")
_LIKE_A_WORD = re.compile(r"(?=.*[AEIOUYaeiouy])(?:[A-Za-z][a-z]*|[A-Z]+)")
_TWINS = frozenset({"M", "Mm", "Mg", "Ml", "ML", "G", "S"})
_KNOWN = frozenset({*_SPELLED, *_SPELLINGS})
_COMPOUND = {"mph": "mile/hour", "kmh": "kilometer/hour", "kph": "kilometer/hour"}
_SCALES = frozenset({"celsius", "fahrenheit"})
# After a number these begin no unit: `12 of them`, `12 in total`.
_NO_UNIT = frozenset({
    "a", "again", "all", "also", "altogether", "and", "are", "as", "at", "because", "but", "by", "each", "either",
    "every", "for", "from", "hence", "here", "if", "in", "is", "it", "left", "now", "of", "on", "only", "or",
    "overall", "per", "remaining", "since", "so", "still", "than", "that", "the", "then", "there", "they", "this",
    "thus", "to", "together", "total", "was", "we", "were", "when", "which", "while", "with",
})  # fmt: skip


def words(text: str, *, glued: bool = False, money: bool = False) -> tuple[Fraction, tuple[str, ...]]:
    """The words behind a number: what they multiply it by (`2 million`), and the unit word by word in one spelling.

    `glued`: the first stands right behind the number, so that `5K` is 5,000 and `300 K` are kelvins. `money` has none.
    """
    text = _folded(text)
    text = re.sub(r"\b(?:per cent|percentage points?)\b", "percent", text)
    parts = text.split()
    times = Fraction(1)
    if parts[:1] == ["K"] and (glued or money):
        parts[0] = "k"
    elif parts[:1] == ["M"]:
        parts[0] = "million"
    while parts and (by := multiple(parts[0])) is not None:
        times *= by
        parts.pop(0)
    text = re.sub(r" ?\b(?:per|an?) (?=\w)| ?/ ?", "/", " ".join(parts))
    text = re.sub(r"\b(?:square|sq) (\w+)", r"\1^2", re.sub(r"\b(?:cubic|cu) (\w+)", r"\1^3", text))
    parts = text.split()
    if parts == ["in"]:
        parts = ["inch"]
    return times, tuple("/".join(_one(part) for part in _COMPOUND.get(word, word).split("/")) for word in parts)


def multiple(word: str) -> int | None:
    """What a word in lower case multiplies a number by: 12 for `dozen` and `dozens`; None for most words."""
    return _MULTIPLES.get(word) or _MULTIPLES.get(word.removesuffix("s"))


def is_known(word: str) -> bool:
    """Whether it is one of the common units, in any of their spellings."""
    return _one(_folded(word)) in _SPELLINGS


def is_letter_alone(text: str, *, glued: bool) -> bool:
    """Whether a number is followed by nothing but a single letter that is no unit: the x of `12 x`, the q of `5q`."""
    first = text.split(" ")[0]
    if len(first) != 1 or not first.isalpha() or first in "kKM" or is_known(first):
        return False
    # `5 N` and `5 V` are units, `12 a day` has an article, and `12 I think` a pronoun.
    return glued or (first.islower() and first != "a")


def _folded(text: str) -> str:
    """Lower case, except for symbols whose case distinguishes two units."""
    return _WORD.sub(lambda word: word[0] if _case_counts(word[0]) else word[0].casefold(), text)


def _case_counts(word: str) -> bool:
    if word in _TWINS:
        return True
    return len(word) <= 3 and word.casefold() not in _KNOWN and not _LIKE_A_WORD.fullmatch(word)


def of_signs(before: str, after: str) -> tuple[str, ...]:
    """The unit of the signs around a number. A dollar on both sides is one: LaTeX writes it so."""
    return tuple(dict.fromkeys(_SIGNS[sign] for sign in (before, after) if sign))


def joined(signs: tuple[str, ...], behind: tuple[str, ...]) -> tuple[str, ...]:
    """`$5 dollars` is in dollars, `$5/hour` in dollars an hour, `20 °C` in Celsius."""
    if signs and behind and behind[0].startswith("/"):
        return (*signs[:-1], signs[-1] + behind[0], *behind[1:])
    unit = behind if behind[: len(signs)] == signs else (*signs, *behind)
    return unit[1:] if unit[:1] == ("degree",) and unit[1:2] in (("celsius",), ("fahrenheit",)) else unit


def fits(actual: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether the words behind a number in running text name the wanted unit, or none: `12 more km`, `12 in total`."""
    if ("degree",) in (actual, wanted) and _SCALES & {*actual, *wanted}:
        return True
    length = len(wanted)
    if any(actual[at : at + length] == wanted for at in range(len(actual) - length + 1)):
        return True
    return actual[0] in _NO_UNIT


def _one(word: str) -> str:
    """The singular in its usual spelling, with its power."""
    name, caret, power = word.partition("^")
    if name in _SPELLED or name in _SPELLINGS:
        return _SPELLED.get(name, name) + caret + power
    if len(name) > 3 and name.endswith("ies"):
        name = name[:-3] + "y"
    elif re.search(r"(?:ch|sh|ss|x|z)es$", name):
        name = name[:-2]
    elif len(name) > 2 and name.endswith("s") and not name.endswith("ss"):
        name = name[:-1]
    return _SPELLED.get(name, name) + caret + power
