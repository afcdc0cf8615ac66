"""Units as words: `kilometres`, `km` and `KM` are one unit, `km` and `miles` are two. Nothing is converted."""

import re
from fractions import Fraction

PERCENT = ("percent",)

_SIGNS = {
    "$": "dollar", "US$": "dollar", "USD": "dollar", "€": "euro", "EUR": "euro", "£": "gbp", "GBP": "gbp", "¥": "yen",
    "JPY": "yen", "₹": "rupee", "INR": "rupee", "%": "percent", "°": "degree",
}  # fmt: skip
_MULTIPLES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SPELLINGS = {
    "kilometer": "km kilometre kms", "meter": "m metre", "centimeter": "cm centimetre", "millimeter": "mm millimetre",
    "mile": "mi", "foot": "ft feet", "inch": "inches", "yard": "yd", "kilogram": "kg kilo kgs", "gram": "g gramme",
    "milligram": "mg", "pound": "lb lbs", "ounce": "oz", "second": "s sec secs", "minute": "min mins", "hour": "h hr hrs",
    "year": "yr yrs", "liter": "l litre", "milliliter": "ml millilitre", "dollar": "usd", "euro": "eur", "percent": "pct",
    "degree": "deg", "celsius": "c", "fahrenheit": "f", "person": "people", "child": "children", "man": "men",
    "woman": "women", "mouse": "mice", "tooth": "teeth", "goose": "geese", "half": "halves", "leaf": "leaves",
    "loaf": "loaves", "knife": "knives", "shelf": "shelves", "bus": "buses", "th": "st nd rd",
}  # fmt: skip
_SPELLED = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
_COMPOUND = {"mph": "mile/hour", "kmh": "kilometer/hour", "kph": "kilometer/hour"}
_SCALES = frozenset({"celsius", "fahrenheit"})
# After a number these begin no unit: `12 of them`, `12 in total`.
_NO_UNIT = frozenset({
    "a", "again", "all", "also", "altogether", "and", "are", "as", "at", "because", "but", "by", "each", "either",
    "every", "for", "from", "hence", "here", "if", "in", "is", "it", "left", "now", "of", "on", "only", "or",
    "overall", "per", "remaining", "since", "so", "still", "than", "that", "the", "then", "there", "they", "this",
    "thus", "to", "together", "total", "was", "we", "were", "when", "which", "while", "with",
})  # fmt: skip


def words(text: str) -> tuple[Fraction, tuple[str, ...]]:
    """The words behind a number: what they multiply it by (`2 million`), and the unit word by word in one spelling."""
    text = re.sub(r"\bper cent\b", "percent", text.casefold())
    parts = text.split()
    times = Fraction(1)
    while parts and parts[0] in _MULTIPLES:
        times *= _MULTIPLES[parts.pop(0)]
    text = re.sub(r" ?\b(?:per|an?) (?=\w)| ?/ ?", "/", " ".join(parts))
    text = re.sub(r"\b(?:square|sq) (\w+)", r"\1^2", re.sub(r"\b(?:cubic|cu) (\w+)", r"\1^3", text))
    parts = text.split()
    if parts == ["in"]:
        parts = ["inch"]
    return times, tuple("/".join(_one(part) for part in _COMPOUND.get(word, word).split("/")) for word in parts)


def of_signs(before: str, after: str) -> tuple[str, ...]:
    """The unit of the signs around a number. A dollar on both sides is one: LaTeX writes it so."""
    return tuple(dict.fromkeys(_SIGNS[sign] for sign in (before, after) if sign))


def joined(signs: tuple[str, ...], behind: tuple[str, ...]) -> tuple[str, ...]:
    """`$5 dollars` is in dollars, `$5/hour` in dollars an hour, `20 °C` in Celsius."""
    if signs and behind and behind[0].startswith("/"):
        return (*signs[:-1], signs[-1] + behind[0], *behind[1:])
    unit = behind if behind[: len(signs)] == signs else (*signs, *behind)
    return unit[1:] if unit[:1] == ("degree",) and unit[1:2] in (("celsius",), ("fahrenheit",)) else unit


def fits(found: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether the words behind a number in running text name the wanted unit, or none: `12 more km`, `12 in total`."""
    if ("degree",) in (found, wanted) and _SCALES & {*found, *wanted}:
        return True
    length = len(wanted)
    if any(found[at : at + length] == wanted for at in range(len(found) - length + 1)):
        return True
    return found[0] in _NO_UNIT


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
