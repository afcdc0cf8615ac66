"""Validation: every rule about training data, and the findings of a dataset. `example_checks.py` implements the rules.

A refusing rule ends a run with exit code 3 before a weight is loaded; a warning is counted and logged.
docs/reference/data-rules.md is generated from `RULES` and docs/data_examples.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tunix_rt.data.sources import Dataset
from tunix_rt.data.text import CAPACITY, OVERLAP_WORDS, RUN_WORDS, SHORT_WORDS, THRESHOLD
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One defect of data: what it is, and the way out. docs/data_examples.py has why it matters, and an example."""

    name: str
    finds: str
    fix: str
    refuses: bool


_OTHER_EVALSET = "remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset"
# Name -> what it finds, and the way out.
_REFUSING = {
    "unreadable": (
        "a line or row that is not one record: blank, truncated, not JSON, not UTF-8",
        "correct it, or write the file again from its source",
    ),
    "wrong_field": (
        "a record that does not fit the format: a field is missing, blank, or of another type",
        "correct it; docs/reference/data-formats.md has the fields of every format",
    ),
    "unsupported": (
        "a record for another method than supervised training on text: preference pairs, KTO labels, tool calls, images",
        "remove it; docs/reference/data-formats.md has what is trained",
    ),
    "lone_surrogate": ("a lone surrogate in a text", "write the file again as UTF-8 from its source"),
    "control_character": ("a control character (other than tab and line ends) in a text", "remove it from the text"),
    "control_token": (
        "the text of a control token in a text that goes through a chat template",
        "give the bare texts, the template adds its own tokens; with data.chat_template=plain it stays text",
    ),
    "template_refused": (
        "a conversation that the chat template rejects",
        "put the turns in the order that the template expects, or choose another: data.chat_template",
    ),
    "no_target": (
        "an example without a trained token",
        "add an assistant turn, or remove it; if it was truncated, raise data.max_length",
    ),
    "end_not_trained": (
        "an example whose end token is not trained",
        "use a chat template that ends every assistant turn with a control token: data.chat_template",
    ),
    "bos_twice": (
        "more than one beginning-of-sequence token in an example",
        "remove its text from the data, the template adds one; with data.chat_template=plain it stays text",
    ),
    "bos_missing": (
        "no beginning-of-sequence token where the model needs one",
        "use a chat template that begins with {{ bos_token }}: data.chat_template; or the model's own tokenizer",
    ),
    "orphan_tag": (
        "an opening tag without its closing one, or the other way round, in a trace or a tagged completion",
        "close the tag, or remove it",
    ),
    "empty_tag": (
        "tags with nothing between them in a trace or a tagged completion",
        "fill the block or remove it; for a template that adds one: --set data.reasoning_tag=think",
    ),
    "answer_missing": (
        "a final answer that is not in the trained text",
        "inspect the row with `tunix-rt data show`; use the model's own tokenizer, or another data.chat_template",
    ),
    "prompt_trained": (
        "a token of the prompt among the targets",
        "remove white space from the beginning of the completion",
    ),
    "too_long": (
        "an example longer than data.max_length",
        "raise data.max_length, or choose: --set data.on_overflow=drop (or truncate)",
    ),
    "beyond_positions": (
        "an example longer than the context of the model",
        "set data.max_length to the context of the model and data.on_overflow=drop (or truncate), or use another model",
    ),
    "outside_vocabulary": (
        "a token id outside the embedding of the model",
        "set model.tokenizer_name_or_path to the tokenizer of this model",
    ),
    "in_validation": (
        "a training record with a question of data.validation, up to case, spaces and punctuation",
        "remove it from one of them, or leave data.validation out to hold out questions of the dataset",
    ),
    "overlap_exact": ("a training prompt that is an evaluation question, verbatim", _OTHER_EVALSET),
    "overlap_normalised": (
        "a training prompt that is an evaluation question up to case, spaces and punctuation",
        _OTHER_EVALSET,
    ),
    "overlap_ngram": (
        f"a training text that shares {OVERLAP_WORDS} consecutive words with an evaluation question, or contains one "
        f"of {SHORT_WORDS} to {OVERLAP_WORDS - 1} words",
        _OTHER_EVALSET,
    ),
}
_WARNING = {
    "control_text": (
        "the text of a control token in a text, which plain rendering trains as text",
        "if so, give the bare texts; HTML such as `<s>` is fine",
    ),
    "unused_column": (
        "a column that the format does not read",
        "put it into the columns of the format, or ignore it on purpose",
    ),
    "answer_with_words": (
        "a GSM8K answer with words after its number",
        "leave only the number after `####`, unless its unit is to be learned",
    ),
    "truncated": (
        "an example truncated to data.max_length outside reasoning and answer (data.on_overflow=truncate)",
        "raise data.max_length, or --set data.on_overflow=drop",
    ),
    "cut_inside": (
        "an example truncated inside its reasoning or its answer (data.on_overflow=truncate)",
        "raise data.max_length, or --set data.on_overflow=drop",
    ),
    "duplicate": ("a record that occurs twice", "remove it, unless it is intended"),
    "near_duplicate": (
        f"a record similar to an earlier one: they share an estimated {100 * THRESHOLD:.0f} % of their {RUN_WORDS}-grams "
        f"(MinHash; of more than {CAPACITY:,} records a sample is compared)",
        "inspect a few of them, and remove them unless they are intended",
    ),
}
RULES = {
    name: Rule(name=name, finds=finds, fix=fix, refuses=refuses)
    for rules, refuses in ((_REFUSING, True), (_WARNING, False))
    for name, (finds, fix) in rules.items()
}

OF_RECORD = frozenset(list(_REFUSING)[: list(_REFUSING).index("too_long")])
"""Refusing rules about one record alone: `data.skip_bad` leaves out the records that break them."""
SKIP_BAD = "or leave out every such record: --skip-bad (data.skip_bad: true)"
PLACES, LISTED = 100, 20
"""Places of a broken rule that are recorded; those of all rules that an error lists, with what is wrong at each."""


# --- findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How often a rule is broken, where first, and what is wrong there."""

    rule: str
    count: int
    first: str
    """File and line."""
    seen: str
    places: tuple[str, ...] = ()
    """The first PLACES of them."""
    each: tuple[str, ...] = ()
    """What is wrong at the first LISTED places; empty where `seen` is about all of them."""
    fix: str = ""
    """The way out in this case; empty for that of the rule."""

    @classmethod
    def at(cls, places: Sequence[str], *, rule: str, count: int, seen: str, **more: Any) -> Self:
        return cls(rule=rule, count=count, first=places[0], seen=seen, places=tuple(places[:PLACES]), **more)

    @property
    def way_out(self) -> str:
        return self.fix or RULES[self.rule].fix

    @property
    def refuses(self) -> bool:
        return RULES[self.rule].refuses

    def describe(self) -> str:
        return f"{self.rule}: {self.count:,} x {RULES[self.rule].finds}; first {self.first}: {self.seen}"


class Tally:
    """Broken rules as they are recorded: by name, a count, what is wrong at the first place, and the first PLACES places."""

    def __init__(self) -> None:
        self.by_rule: dict[str, dict[str, Any]] = {}

    def add(self, rule: str, place: Any, seen: str) -> None:
        known = self.by_rule.setdefault(rule, {"rule": rule, "count": 0, "seen": seen, "places": [], "each": []})
        known["count"] += 1
        if len(known["places"]) < PLACES:
            known["places"].append(place)
        if len(known["each"]) < LISTED:
            known["each"].append(seen)


def findings_of(recorded: Iterable[Mapping[str, Any]], dataset: Dataset, beside: str = "") -> tuple[Finding, ...]:
    """The findings of a `Tally` whose places are (file, line) of `dataset`. `beside` precedes what is wrong."""
    return tuple(
        Finding.at(
            dataset.places(one["places"]),
            rule=one["rule"],
            count=one["count"],
            seen=f"{beside}{one['seen']}",
            each=tuple(f"{beside}{seen}" for seen in one["each"]),
        )
        for one in recorded
    )


def refuse(findings: Sequence[Finding], *, skip_bad: bool = False) -> None:
    """Raise InputError when a refusing rule is broken: every such rule with its count, and the first records that break it.
    With `skip_bad`, every record breaks one, and leaving them out is no way out."""
    wrong = [finding for finding in findings if finding.refuses]
    if not wrong:
        return
    fixes = list(dict.fromkeys(finding.way_out for finding in wrong))[:3]
    if not skip_bad and all(finding.rule in OF_RECORD for finding in wrong):
        fixes.append(SKIP_BAD)
    problem = wrong[0].describe()
    if len(wrong) > 1:
        problem = f"the data breaks {len(wrong)} rules\n" + "\n".join(f"  {finding.describe()}" for finding in wrong)
    raise InputError("\n".join([problem, *listed(wrong)]), fix="; ".join(fixes))


def listed(findings: Sequence[Finding]) -> list[str]:
    """A line for each of the first LISTED records with findings; nothing where the findings name all of them."""
    if all(finding.count == 1 for finding in findings):
        return []
    of_each = [
        f"  {place}: {finding.rule}: {seen}"
        for finding in findings
        for place, seen in zip(finding.places, finding.each, strict=False)
    ]
    more = sum(finding.count for finding in findings if finding.each) - min(len(of_each), LISTED)
    return [*of_each[:LISTED], *([f"  and {more:,} more"] if more and of_each else [])]
