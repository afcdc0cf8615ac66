"""`/runs/ID/answers`: every question with its generations before and after training, or of the one or two models of
`tunix-rt evaluate`; paired, filtered and searched by the address. `?show=along` has the generations during training."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunix_rt.dashboard.query import Query
from tunix_rt.dashboard.site import Page, Site
from tunix_rt.errors import TunixError
from tunix_rt.evaluate.comparison import NAMES, Side, compare_runs
from tunix_rt.evaluate.report import paragraph, remarks, table
from tunix_rt.runs.record import RunRecord
from tunix_rt.scoring.equations import Equation, equations_in
from tunix_rt.scoring.score import Prediction, Tags, read_answer, reasoning_of, score_predictions

PAGE_QUESTIONS, PAGE_ALONG = 50, 10
MOST_BYTES = 16 * 2**20
"""Of a predictions file: 10,000 questions have about 10 MB."""
LONGEST, LONGEST_NAME = 20_000, 200
"""Characters of a text, and of a name; what follows is left out."""
MOST_CHECKED = 6_000
"""Characters of an output whose equations and verdicts are checked here: a page of such outputs takes up to 3 s."""
MOST_NAMES = 100
"""Sections, categories or difficulties to choose from."""
MOST_STEPS = 50
"""Generations of one question during training: the last ones."""
GROUPS = ("section", "category", "difficulty")
SHOWS = {
    "all": "all", "gained": "gained", "lost": "lost", "both": "right both times", "neither": "wrong both times",
    "right": "right", "wrong": "wrong", "malformed": "malformed {}",
}  # fmt: skip
"""By the strict reading. `malformed`: the output of the last side, whose name follows, is not well-formed."""
OUTCOMES = {(False, True): "gained", (True, False): "lost", (True, True): "both", (False, False): "neither"}
MARKS = {"gained": "▲", "lost": "▼", "both": "✓", "neither": "✗"}
ALONG = "along"
ENDINGS = {
    "stop": "ended by itself", "tag": "ended with the answer", "length": "cut off at max_new_tokens",
    "time": "cut off at the time limit", "context": "cut off: the context was full",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One generation. `text` is its reasoning; of a malformed one, which has no `answer`, the whole output."""

    side: str
    verdict: Prediction
    answer: str | None
    text: str
    ended: str
    checked: bool
    """Whether it is short enough to be checked on this page."""
    equations: tuple[Equation, ...]
    problems: tuple[str, ...]
    """What the file records otherwise than the output beside it gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    number: int
    id: str
    prompt: str
    expected: str
    groups: str
    outcome: str
    answers: list[Answer]
    left_out: int
    """Earlier generations that are not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Paragraph of the paired comparison (empty where there are not two sides), rows of scores, remarks on them, and why
    there are none."""

    sides: tuple[str, ...] = ()
    paragraph: str = ""
    rows: list[tuple[str, ...]]
    remarks: list[str]
    problems: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswersPage:
    run_id: str
    name: str
    figures: Figures
    show: str
    shows: list[tuple[str, str, int]]
    """Name in the address, description and number of questions of each filter."""
    along: int
    """Generations during training."""
    groups: list[tuple[str, str, list[tuple[str, int]]]]
    """Kind, the chosen name, and all names with their numbers of questions."""
    words: str
    total: int
    matching: int
    first: int
    last: int
    previous: int | None
    next: int | None
    questions: list[Question]


Item = list[tuple[str, Prediction]]
"""The generations for one question, each with the name of its side."""
Chosen = tuple[list[int], Mapping[str, Counter[str]]]


def page(site: Site, query: Query, run_id: str) -> Page:
    found = site.run(run_id)
    values = answers_of(RunRecord(found.root), query, run_id=run_id, name=found.name)
    return Page(template="answers.html", title=f"Answers of {found.name}", values=values)


def answers_of(record: RunRecord, query: Query, *, run_id: str = "", name: str = "") -> AnswersPage:
    sides, samples, size = list(_sides(record)), _lines(record, "eval/samples.jsonl"), PAGE_QUESTIONS
    shows = tuple(key for key in SHOWS if key in ("all", "malformed") or (key in MARKS) == (len(sides) == 2))
    show = ALONG if samples and query.get("show") == ALONG else query.choice("show", shows)
    last = sides[-1].name if sides else ""
    items = by_question((side.name, one) for side in sides for one in side.predictions)
    matching, counts = choose(items, query, show, last)
    numbers = counts["show"]
    if show == ALONG:
        items, size = by_question((f"step {one.step}", one) for one in samples), PAGE_ALONG
        matching, counts = choose(items, query, show)
    first = query.whole("first", 0, most=max(0, len(matching) - 1)) // size * size
    end, tags = min(first + size, len(matching)), _tags(record)
    return AnswersPage(
        run_id=run_id, name=name, figures=_figures(sides, record), show=show, along=len(samples),
        shows=[(key, SHOWS[key].format(last), numbers[key]) for key in shows],
        groups=[(kind, query.get(kind), _names(counts[kind])) for kind in GROUPS],
        words=query.get("q"), total=len(items), matching=len(matching), first=min(first + 1, end), last=end,
        previous=first - size if first else None, next=end if end < len(matching) else None,
        questions=[_question(number, items[number], tags) for number in matching[first:end]],
    )  # fmt: skip


# --- the files --------------------------------------------------------------------------------------------------------


def _sides(record: RunRecord) -> Iterator[Side]:
    """Before and after training, or the models of an evaluation: those that are there."""
    whens, names, models = NAMES, NAMES, record.summary.models if record.summary else ()
    if record.is_evaluation:
        whens = names = ("base", "answers")
        names = (models[0], models[1]) if len(set(models)) == 2 else names
    for when, name in zip(whens, names, strict=True):
        if lines := _lines(record, f"eval/predictions-{when}.jsonl"):
            yield Side(name=name, predictions=lines, is_moment=not record.is_evaluation)


def _lines(record: RunRecord, name: str) -> tuple[Any, ...]:
    if (size := record.listing.files.get(name, 0)) > MOST_BYTES:
        record.problems[name] = [f"{name}: {size:,} bytes, at most {MOST_BYTES:,} are shown here"]
        return ()
    return record.read(name) or ()


def _tags(record: RunRecord) -> Tags:
    """Those of the run; of an evaluation, those that it was decoded with."""
    if (config := record.config) is not None:
        return Tags(reasoning=config.data.reasoning_tag, answer=config.data.answer_tag)
    from tunix_rt.evidence.data_checks import tags_in

    return tags_in(record.summary.decoding if record.summary else {})


def by_question(lines: Iterable[tuple[str, Prediction]]) -> list[Item]:
    """In the order of the first side. An id that comes twice on one side is two questions."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], Item] = {}
    for side, one in lines:
        seen[side, one.id] += 1
        found.setdefault((one.id, seen[side, one.id]), []).append((side, one))
    return list(found.values())


def _figures(sides: Sequence[Side], record: RunRecord) -> Figures:
    names, text, rows, notes = tuple(side.name for side in sides), "", [], []
    setting = "--max-new-tokens" if record.is_evaluation else "evaluation.max_new_tokens"
    problems = [one for known in record.problems.values() for one in known]
    try:
        scores = [score_predictions(side.predictions, side.name) for side in sides]
        text = paragraph(compare_runs(*sides)) if len(sides) == 2 else ""
        rows = [row.cells[: 3 if len(sides) == 1 else 5] for row in table(*scores)] if sides else []
        notes = remarks(*scores, names=names, tokens_setting=setting)
    except TunixError as error:
        problems.append(error.problem)
    return Figures(sides=names, paragraph=text, rows=list(rows), remarks=notes, problems=problems)


# --- filters ----------------------------------------------------------------------------------------------------------


def choose(items: Sequence[Item], query: Query, show: str, last: str = NAMES[-1]) -> Chosen:
    """The numbers of the questions that the address asks for. The counts of a filter are what choosing it would show, with
    the search and the other filters as they are."""
    words = query.get("q").casefold().split()
    wanted = {"show": show} | {kind: query.get(kind) for kind in GROUPS}
    matching, counts = [], {kind: Counter[str]() for kind in wanted}
    for number, item in enumerate(items):
        if words and not _contains(item, words):
            continue
        labels = {"show": tuple(_labels(item, last))} | {kind: (getattr(item[-1][1], kind),) for kind in GROUPS}
        missed = [kind for kind, name in wanted.items() if name and name not in labels[kind]]
        if not missed:
            matching.append(number)
        for kind in wanted:
            if missed in ([], [kind]):
                counts[kind].update(labels[kind])
    return matching, counts


def _labels(item: Item, last: str) -> Iterator[str]:
    """`last` is the side that `malformed` is about: a question that it has not answered is neither."""
    side, one = item[-1]
    yield from ("all", ALONG, "right" if one.strict else "wrong")
    if side == last and not one.well_formed:
        yield "malformed"
    if outcome := _outcome(item):
        yield outcome


def _outcome(item: Item) -> str:
    """Empty unless the question has two generations."""
    return OUTCOMES[item[0][1].strict, item[1][1].strict] if len(item) == 2 else ""


def _contains(item: Item, words: Sequence[str]) -> bool:
    texts = (text for _, one in item for text in (one.id, one.prompt, one.expected, one.output))
    whole = "\n".join(texts).casefold()
    return all(word in whole for word in words)


def _names(counts: Counter[str]) -> list[tuple[str, int]]:
    """Of those that an address can carry."""
    common = counts.most_common(MOST_NAMES)
    return sorted((name, number) for name, number in common if name.isprintable() and len(name) <= LONGEST_NAME)


# --- one question -----------------------------------------------------------------------------------------------------


def _question(number: int, item: Item, tags: Tags) -> Question:
    last, outcome = item[-1][1], _outcome(item)
    groups = dict.fromkeys(_cut(getattr(last, kind), LONGEST_NAME) for kind in GROUPS)
    return Question(
        number=number + 1, id=_cut(last.id, LONGEST_NAME), prompt=_cut(last.prompt), expected=_cut(last.expected),
        groups=", ".join(name for name in groups if name not in ("all", "none")),
        outcome=f"{MARKS[outcome]} {SHOWS[outcome]}" if outcome else "",
        answers=[_answer(side, one, tags) for side, one in item[-MOST_STEPS:]], left_out=max(0, len(item) - MOST_STEPS),
    )  # fmt: skip


def _answer(side: str, one: Prediction, tags: Tags) -> Answer:
    from tunix_rt.evidence.data_checks import verdict_problems

    tagged, checked = read_answer(one.output, tags), len(one.output) <= MOST_CHECKED
    return Answer(
        side=side, verdict=one, answer=None if tagged is None else _cut(tagged.answer),
        text=_cut(one.output if tagged is None else tagged.reasoning),
        ended=ENDINGS.get(one.ended, "how it ended is not recorded"),
        checked=checked, equations=tuple(equations_in(reasoning_of(one.output, tags))) if checked else (),
        problems=tuple(verdict_problems(one, tags)) if checked else (),
    )  # fmt: skip


def _cut(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters are left out)"
