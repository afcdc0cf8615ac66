"""Verdicts on outputs, and scores from verdicts. Pure functions.

Two readings of the same output, always reported side by side:

    strict    `<reasoning>…</reasoning><answer>37</answer>` and nothing else; the answer block contains the expected value
    lenient   the last value of the last answer block; without one, of the last box, `####` line or `answer is` sentence,
              else of the whole text, if the model ended its generation itself

The names of the tags are settings; `reasoning` and `answer` stand for them here. The strict reading also rewards the format, so
it rises for a model that only learned the tags. The lenient one does not.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from tunix_rt.errors import InputError
from tunix_rt.scoring.answers import LastValue, lenient_same, same_value
from tunix_rt.scoring.equations import check_arithmetic
from tunix_rt.scoring.extract import has_mark, lenient_value

# Judged by the rules of `answers.py` and `extract.py`; equations, words and endings are counted.
SCORES_SCHEMA = "tunix-rt/scores/2"

STOP, TAG, LENGTH, TIME, CONTEXT = "stop", "tag", "length", "time", "context"
"""What ended a generation: an EOS token, the closing answer tag, max_new_tokens, the time limit, the model's last position."""
CUT_OFF = (LENGTH, TIME, CONTEXT)
_ANY_TAG = re.compile(r"</?[A-Za-z][^<>]*>")


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
    """Well-formed, and the answer block contains exactly the expected value. `37 apples` is not `37` here."""
    tagged = read_answer(text, tags)
    return tagged is not None and same_value(tagged.answer, expected)


def matches_lenient(text: str, expected: str, tags: Tags = TAGS) -> bool:
    """The last value of the text is the expected one. Whatever `matches_strict` accepts, this accepts too."""
    actual = _last_value(text, expected, tags)
    return actual is not None and lenient_same(actual, expected)


def _last_value(text: str, expected: str, tags: Tags) -> LastValue | None:
    block = _last_block(text, tags.answer)
    if block is not None and same_value(block, expected):
        return LastValue(text=block.strip())
    return lenient_value(_ANY_TAG.sub("\n", text if block is None else block), expected)


def _last_block(text: str, name: str) -> str | None:
    """Content of the last `<name>` that is closed."""
    opening, closing = f"<{name}>", f"</{name}>"
    start = text.rfind(opening, 0, max(text.rfind(closing), 0))
    if start < 0:
        return None
    start += len(opening)
    return text[start : text.index(closing, start)]


def reasoning_of(text: str, tags: Tags = TAGS) -> str:
    """The last reasoning block that is closed, else everything before the last answer block, else the whole text."""
    block = _last_block(text, tags.reasoning)
    if block is None:
        block = text[:start] if (start := text.rfind(f"<{tags.answer}>")) >= 0 else text
    return _ANY_TAG.sub("\n", block).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One question, the output of the model, and the verdicts. One line of `eval/predictions-*.jsonl`."""

    id: str
    prompt: str
    expected: str
    output: str
    strict: bool
    lenient: bool
    well_formed: bool
    section: str = "all"
    category: str = "all"
    difficulty: str = "none"
    ended: str = "unknown"  # stop, tag, length, time or context: what ended the output
    reasoning_words: int = 0
    equations: int = 0  # stated in the reasoning
    equations_right: int = 0


def judge(*, expected: str, output: str, ended: str = "unknown", tags: Tags = TAGS, **question: str) -> Prediction:
    """`output` with its three verdicts, and the counts over its reasoning. `question` are further fields of the Prediction.

    An output that is cut off before an answer is not right because of the number it happens to end with.
    """
    reasoning = reasoning_of(output, tags)
    arithmetic = check_arithmetic(reasoning)
    return Prediction(
        expected=expected,
        output=output,
        strict=matches_strict(output, expected, tags),
        lenient=matches_lenient(output, expected, tags) and not _is_cut_off(output, ended, tags),
        well_formed=is_well_formed(output, tags),
        ended=ended,
        reasoning_words=len(reasoning.split()),
        equations=arithmetic.stated,
        equations_right=arithmetic.right,
        **question,
    )


def _is_cut_off(output: str, ended: str, tags: Tags) -> bool:
    """Whether it reached a limit with no answer block begun and nothing marked as the answer."""
    return ended in CUT_OFF and f"<{tags.answer}>" not in output and not has_mark(_ANY_TAG.sub("\n", output))


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionScores:
    """Of the questions of one section, category or difficulty."""

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
    by_category: dict[str, SectionScores] = field(default_factory=dict)
    by_difficulty: dict[str, SectionScores] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    mean_reasoning_words: float = 0.0
    equations: int = 0
    equations_right: int = 0
    schema: str = field(default=SCORES_SCHEMA)


def score_predictions(predictions: Sequence[Prediction], when: str) -> Scores:
    """Scores over all, and by section, category and difficulty. An empty set or an id given twice is an InputError."""
    if not predictions:
        raise InputError("the eval set is empty", fix="name an eval set with at least one question")
    require_distinct_ids(predictions)
    items = len(predictions)
    return Scores(
        when=when,
        **asdict(_section(predictions)),
        correct_lenient=sum(item.lenient for item in predictions),
        well_formed=sum(item.well_formed for item in predictions),
        by_section=_grouped(predictions, [item.section for item in predictions]),
        mean_output_chars=sum(len(item.output) for item in predictions) / items,
        by_category=_grouped(predictions, [item.category for item in predictions]),
        by_difficulty=_grouped(predictions, [item.difficulty for item in predictions]),
        ended=dict(sorted(Counter(item.ended for item in predictions).items())),
        mean_reasoning_words=sum(item.reasoning_words for item in predictions) / items,
        equations=sum(item.equations for item in predictions),
        equations_right=sum(item.equations_right for item in predictions),
    )


def require_distinct_ids(predictions: Sequence[Prediction]) -> None:
    seen: set[str] = set()
    for item in predictions:
        if item.id in seen:
            raise InputError(
                f"the id {item.id!r} occurs twice in the eval set", fix="give every question an id of its own"
            )
        seen.add(item.id)


def _grouped(predictions: Sequence[Prediction], names: Sequence[str]) -> dict[str, SectionScores]:
    """Scores by name, names sorted."""
    groups: dict[str, list[Prediction]] = {name: [] for name in sorted(set(names))}
    for item, name in zip(predictions, names, strict=True):
        groups[name].append(item)
    return {name: _section(items) for name, items in groups.items()}


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
