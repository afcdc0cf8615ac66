"""One spelling for what is written in many: Unicode and simple LaTeX. It changes no value."""

import re
import unicodedata

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
    """One spelling for what is written in many: full-width digits, ½, −, x², simple LaTeX, `p.m.`. Lines stay lines."""
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
