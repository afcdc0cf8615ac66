"""Is this output right? Pure functions from (output, expected answer) to a verdict, and verdicts to scores.

Two readings of the same output, always reported side by side:

    strict    `<reasoning>…</reasoning><answer>37</answer>` and nothing else; the answer block holds the expected value
    lenient   tags apart: the last value of the last answer block, or of the whole text when there is no block

The names of the tags are settings; what is said here of `reasoning` and `answer` holds for the names a run gives them.
The strict one also rewards the format, so it rises for a model that only learned the tags. The lenient one does not.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

from tunix_rt.errors import InputError

SCORES_SCHEMA = "tunix-rt/scores/1"

_ANY_TAG = re.compile(r"</?[A-Za-z][^<>]*>")

# Marks that carry no value at the edge of an answer. Not `+ - < > = / #`: `C` is not `C++`, 5 is not -5.
_AROUND = " .,;:!?…\"'`*_()[]{}“”‘’«»"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+"
_WHOLE_NUMBER = re.compile(rf"(?:\$ ?)?[-+]?(?:\$ ?)?(?:{_DIGITS}) ?[%$]?")
# In running text: `5-3` ends in 3, not in -3; the 3 of `v3` and the last 3 of `1.2.3` are no numbers.
_NUMBER_IN_TEXT = re.compile(rf"(?<![A-Za-z0-9_])(?<![0-9]\.)[-+]?\$?(?:{_DIGITS})")
_SENTENCE_END = re.compile(r"[.;:!?…]+(?=\s|$)|\n+")


class Tags(NamedTuple):
    """Names of the two blocks of an output."""

    reasoning: str = "reasoning"
    answer: str = "answer"


TAGS = Tags()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedAnswer:
    """The two blocks of a well-formed output, without surrounding white space."""

    reasoning: str
    answer: str


def read_answer(text: str, tags: Tags = TAGS) -> TaggedAnswer | None:
    """The blocks of `text`, or None unless it is one reasoning block, then one answer block, neither empty, alone."""
    tag = re.compile(rf"</?(?:{re.escape(tags.reasoning)}|{re.escape(tags.answer)})>")
    if tag.findall(text) != [mark for name in tags for mark in (f"<{name}>", f"</{name}>")]:
        return None
    before, reasoning, between, answer, after = (part.strip() for part in tag.split(text))
    if before or between or after or not reasoning or not answer:
        return None
    return TaggedAnswer(reasoning=reasoning, answer=answer)


def is_well_formed(text: str, tags: Tags = TAGS) -> bool:
    return read_answer(text, tags) is not None


def matches_strict(text: str, expected: str, tags: Tags = TAGS) -> bool:
    """Well-formed, and the answer block holds exactly the expected value. `37 apples` is not `37` here."""
    tagged = read_answer(text, tags)
    return tagged is not None and same_value(tagged.answer, expected)


def matches_lenient(text: str, expected: str, tags: Tags = TAGS) -> bool:
    """The last value of the text is the expected one. Whatever `matches_strict` accepts, this accepts too."""
    found = lenient_answer(text, expected, tags)
    if found is None:
        return False
    if same_value(found, expected):
        return True
    return _number(expected) is None and _folded(found) == _folded(expected) != []


def lenient_answer(text: str, expected: str, tags: Tags = TAGS) -> str | None:
    """The last value in `text` of the kind of `expected`, right or wrong; None when there is none.

    A number when a number is expected. For single letters or digits (`s t a c`) the last run of them, which must be as
    long as the expected one. Otherwise as many words as expected, from the end of the last sentence. `expected` decides
    kind and length only, so a right value in the middle of the text is never picked out.
    """
    block = _last_block(text, tags.answer)
    if block is not None and same_value(block, expected):
        return block.strip()
    searched = _ANY_TAG.sub("\n", text if block is None else block).replace("−", "-")
    if _number(expected) is not None:
        numbers = [match.group() for match in _NUMBER_IN_TEXT.finditer(searched)]
        return numbers[-1] if numbers else None
    return _last_words(searched, _tokens(expected))


def same_value(found: str, expected: str) -> bool:
    """Equal as numbers when a number is expected, else as words. A blank expectation equals nothing."""
    if (wanted := _number(expected)) is not None:
        return _number(found) == wanted
    return _plain_words(found) == _plain_words(expected) != ""


def _number(text: str) -> Decimal | None:
    """`$1,600.00`, `+5`, `-3.`, `12 %` as Decimal; None for anything that is not one number."""
    bare = " ".join(text.replace("−", "-").split()).rstrip(_AROUND).lstrip(_AROUND.replace(".", ""))
    if not _WHOLE_NUMBER.fullmatch(bare):
        return None
    return Decimal(bare.translate(str.maketrans("", "", "$%, ")))


def _plain_words(text: str) -> str:
    """Lower case, single spaces, no marks around; marks alone stay, for they are the answer then."""
    collapsed = " ".join(unicodedata.normalize("NFC", text).split()).casefold()
    return collapsed.strip(_AROUND) or collapsed


def _tokens(text: str) -> list[str]:
    return [bare for word in text.split() if (bare := word.strip(_AROUND))]


def _folded(text: str) -> list[str]:
    return [_plain_words(token) for token in _tokens(text)]


def _last_block(text: str, name: str) -> str | None:
    """Content of the last `<name>` that is closed."""
    opening, closing = f"<{name}>", f"</{name}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)]


def _last_words(text: str, wanted: Sequence[str]) -> str | None:
    sentences = [tokens for part in _SENTENCE_END.split(text) if (tokens := _tokens(part))]
    if not sentences or not wanted:
        return None
    if all(len(token) == 1 and token.isalnum() for token in wanted):
        runs = [run for tokens in sentences for run in _single_character_runs(tokens)]
        # `a` and `I` are English words too: alone they are no list of letters, unless one letter is expected.
        runs = [run for run in runs if len(run) > 1 or len(wanted) == 1]
        found = runs[-1] if runs else []
    else:
        found = sentences[-1][-len(wanted) :]
    return " ".join(found) if len(found) == len(wanted) else None


def _single_character_runs(tokens: Sequence[str]) -> list[list[str]]:
    runs: list[list[str]] = [[]]
    for token in tokens:
        if len(token) == 1 and token.isalnum():
            runs[-1].append(token)
        else:
            runs.append([])
    return [run for run in runs if run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One question, what the model wrote, and the verdicts. One line of `eval/predictions-*.jsonl`."""

    id: str
    prompt: str
    expected: str
    output: str
    strict: bool
    lenient: bool
    well_formed: bool
    section: str = "all"
    category: str = "all"


def judge(
    *,
    id: str,
    prompt: str,
    expected: str,
    output: str,
    section: str = "all",
    category: str = "all",
    tags: Tags = TAGS,
) -> Prediction:
    """`output` with its three verdicts."""
    return Prediction(
        id=id,
        prompt=prompt,
        expected=expected,
        output=output,
        strict=matches_strict(output, expected, tags),
        lenient=matches_lenient(output, expected, tags),
        well_formed=is_well_formed(output, tags),
        section=section,
        category=category,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionScores:
    items: int
    correct: int
    accuracy: float
    accuracy_lenient: float
    format_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The content of `eval/before.json` and `eval/after.json`. Rates are 0..1; `accuracy` is the strict one."""

    when: str
    items: int
    accuracy: float
    accuracy_lenient: float
    format_rate: float
    correct: int
    correct_lenient: int
    well_formed: int
    by_section: dict[str, SectionScores]
    mean_output_chars: float
    schema: str = field(default=SCORES_SCHEMA)


def score_predictions(predictions: Sequence[Prediction], when: str) -> Scores:
    """Scores over all predictions and by section. An empty set or an id given twice is an InputError."""
    if not predictions:
        raise InputError("the eval set is empty", fix="name an eval set with at least one question")
    require_distinct_ids(predictions)
    items = len(predictions)
    correct = sum(item.strict for item in predictions)
    lenient = sum(item.lenient for item in predictions)
    well_formed = sum(item.well_formed for item in predictions)
    sections = sorted({item.section for item in predictions})
    return Scores(
        when=when,
        items=items,
        accuracy=correct / items,
        accuracy_lenient=lenient / items,
        format_rate=well_formed / items,
        correct=correct,
        correct_lenient=lenient,
        well_formed=well_formed,
        by_section={name: _section([item for item in predictions if item.section == name]) for name in sections},
        mean_output_chars=sum(len(item.output) for item in predictions) / items,
    )


def require_distinct_ids(predictions: Sequence[Prediction]) -> None:
    seen: set[str] = set()
    for item in predictions:
        if item.id in seen:
            raise InputError(f"the eval set has the id {item.id!r} twice", fix="give every question an id of its own")
        seen.add(item.id)


def _section(predictions: Sequence[Prediction]) -> SectionScores:
    items = len(predictions)
    correct = sum(item.strict for item in predictions)
    return SectionScores(
        items=items,
        correct=correct,
        accuracy=correct / items,
        accuracy_lenient=sum(item.lenient for item in predictions) / items,
        format_rate=sum(item.well_formed for item in predictions) / items,
    )
