"""The data stage in one call: find, read, tokenize, validate, hold out, pack."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import RunConfig
from tunix_rt.data.contamination import find_leaks
from tunix_rt.data.example_checks import check_text, open_tag
from tunix_rt.data.formats import detect_format, to_sample
from tunix_rt.data.packing import (
    MOST_HELDOUT,
    Packing,
    Row,
    RowFacts,
    Rows,
    as_question,
    facts_of_rows,
    hold_out,
    items_of,
    pack,
)
from tunix_rt.data.readers import parse, read_raw
from tunix_rt.data.records import EvalItem, Sample, Turn
from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.sources import Dataset, FileRef, find_dataset, find_evalset, read_items
from tunix_rt.data.token_cache import Progress, Store, open_store
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.tokenizer import Tokenizer, needs_bos
from tunix_rt.data.validation import PLACES, RULES, Finding, refuse
from tunix_rt.errors import InputError

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the data stage needs to know about a model before it is loaded."""

    vocabulary: int
    positions: int
    model_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """A dataset under one configuration, with every finding of validation."""

    dataset: Dataset
    style: Style
    evalset: FileRef | None
    """None when the held-out traces are evaluated."""
    dropped: int
    truncated: int
    format: str = "trace"
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected(Validated):
    """Nothing is refused yet."""

    store: Store
    items: tuple[EvalItem, ...]
    """Of the configured eval set; empty when the held-out traces are evaluated."""
    kept: Numbers
    """Indices of the examples that are used, in file order."""
    lengths: Numbers
    """Of these examples, after truncation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Validated):
    """The rows to train on and the questions to evaluate, ready before a weight is loaded."""

    items: tuple[EvalItem, ...]
    rows: Sequence[Row]
    heldout_rows: Sequence[Row]
    traces: int
    """In the training rows; with `heldout_traces` and `dropped`, all of the dataset."""
    heldout_traces: int
    tokens: int
    """Of the training rows."""
    trained_tokens: int
    longest_row: int
    """Held-out ones included."""
    fill: float
    """Tokens over `max_length`, mean of all rows but the last."""
    row_facts: RowFacts
    """Of every training row."""
    store: Store | None = None
    """None where the rows were not made from a dataset."""

    @property
    def merkle_root(self) -> str:
        """Over every training row, token by token."""
        return self.row_facts.merkle_root

    def describe(self) -> str:
        """One line for the log."""
        lost = [f"{self.dropped} dropped"] * bool(self.dropped) + [f"{self.truncated} truncated"] * bool(self.truncated)
        return (
            f"{self.dataset.key}: {self.traces:,} training traces, {self.heldout_traces:,} held out; "
            f"{len(self.rows):,} rows, {self.tokens:,} tokens, {self.trained_tokens / self.tokens:.0%} of them trained; "
            f"template {self.style.template.name}"
            + ("" if self.style.completion_only_loss else "; loss on the prompts too")
            + (f"; too long: {', '.join(lost)}" if lost else "")
        )


def prepare(
    config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, progress: Progress, *, today: date | None = None
) -> Prepared:
    """Rows and questions of a run. Data that breaks a refusing rule is an InputError with count, first file and line.

    `today` is the day on which a resumed run began: some templates write the date into every conversation.
    """
    seen = inspect(config, tokenizer, model, progress, today=today)
    for finding in seen.findings:
        if not finding.refuses:
            logger.warning("Data: %s. %s", finding.describe(), RULES[finding.rule].fix)
    refuse(seen.findings)
    heldout = _hold_out(seen, config)
    items = _eval_items(config, seen, heldout)
    _refuse_prompts(items, tokenizer, seen.style, model)
    max_length, index = config.data.max_length, seen.store.examples.entries
    packing = pack_rows(seen.lengths, ~heldout, max_length, packing=config.data.packing)
    alone = pack_rows(seen.lengths, heldout, max_length, packing=False)
    rows, heldout_rows = (
        Rows(seen.store.examples, Packing(seen.kept[part.order], part.starts), max_length) for part in (packing, alone)
    )
    of_row = row_lengths(seen.lengths, packing)
    return Prepared(
        **{field.name: getattr(seen, field.name) for field in fields(Validated)},
        items=items,
        rows=rows,
        heldout_rows=heldout_rows,
        traces=int((~heldout).sum()),
        heldout_traces=int(heldout.sum()),
        tokens=int(of_row.sum()),
        trained_tokens=int(_trained(seen, index)[~heldout].sum()),
        longest_row=int(max(of_row.max(), seen.lengths[heldout].max(initial=0))),
        fill=fill_of(of_row, max_length),
        row_facts=facts_of_rows(rows),
        store=seen.store,
    )


def recipe_of(config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, *, today: date | None = None) -> Recipe:
    """The dataset of a configuration, and everything that determines its tokens."""
    dataset = find_dataset(config.data.dataset or "")
    return Recipe(
        dataset=dataset,
        format=detect_format(dataset, config.data.format),
        tokenizer=tokenizer,
        style=style_of(config.data, tokenizer, today=today),
        needs_bos=needs_bos(tokenizer, model.model_type),
    )


def inspect(
    config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, progress: Progress, *, today: date | None = None
) -> Inspected:
    """Validate the dataset of `config`. Raises only for what cannot be read at all."""
    data, recipe = config.data, recipe_of(config, tokenizer, model, today=today)
    dataset = recipe.dataset
    store = open_store(recipe, progress)
    index = store.examples.entries
    lengths = index["length"].astype(np.int64)
    over = lengths > data.max_length
    kept = np.flatnonzero(~over) if data.on_overflow == "drop" else np.arange(len(index))
    cut = np.minimum(lengths[kept], data.max_length) if data.on_overflow == "truncate" else lengths[kept]
    evalset = find_evalset(config.evaluation.evalset) if config.evaluation.evalset else None
    items = tuple(read_items(evalset)) if evalset else ()
    _refuse_odd_questions(items, evalset, tokenizer, recipe.style)
    findings = [*store.findings, *about_length(config, recipe, store, model, kept, cut)]
    findings += about_vocabulary(recipe, store, model)
    if evalset is not None:
        findings += find_leaks(recipe, store.folder, items, evalset, progress)
    if not len(kept):
        raise InputError(f"no trace is left at max_length {data.max_length}", fix="raise data.max_length")
    order = list(RULES)
    return Inspected(
        dataset=dataset,
        format=recipe.format,
        style=recipe.style,
        store=store,
        evalset=evalset,
        items=items if config.evaluation.enabled else (),
        kept=kept,
        lengths=cut,
        dropped=int(over.sum()) if data.on_overflow == "drop" else 0,
        truncated=int(over.sum()) if data.on_overflow == "truncate" else 0,
        findings=tuple(sorted(findings, key=lambda finding: order.index(finding.rule))),
    )


def pack_rows(lengths: Numbers, chosen: npt.NDArray[np.bool_], max_length: int, *, packing: bool) -> Packing:
    """Pack the chosen examples; indices are those of `lengths`."""
    which = np.flatnonzero(chosen)
    if not packing:
        return Packing(which, np.arange(len(which) + 1))
    packed = pack(lengths[which], max_length)
    return Packing(which[packed.order], packed.starts)


def row_lengths(lengths: Numbers, packing: Packing) -> Numbers:
    """Tokens in each row."""
    return np.asarray(np.add.reduceat(lengths[packing.order], packing.starts[:-1]))


def fill_of(of_row: Numbers, max_length: int) -> float:
    """Tokens over `max_length`, mean of all rows but the last."""
    return float((of_row[:-1] if len(of_row) > 1 else of_row).mean() / max_length)


def _trained(seen: Inspected, index: npt.NDArray[Any]) -> Numbers:
    """Trained tokens of each used example, after truncation."""
    counts = index["trained"][seen.kept].astype(np.int64)
    for at in np.flatnonzero(seen.lengths < index["length"][seen.kept]):
        counts[at] = int(seen.store.examples[int(seen.kept[at])].trained[: seen.lengths[at]].sum())
    return counts


# --- held-out examples and evaluation questions ----------------------------------------------------------------------


def _hold_out(seen: Inspected, config: RunConfig) -> npt.NDArray[np.bool_]:
    """Which of the used examples are held out, by the data seed."""
    questions = seen.store.examples.entries["question"][seen.kept]
    if config.data.validation_fraction and len(np.unique(questions)) < 2:
        logger.warning("No example is held out: all records have the same question")
    return hold_out(questions, fraction=config.data.validation_fraction, seed=config.training.resolved_data_seed)


def _eval_items(config: RunConfig, seen: Inspected, heldout: npt.NDArray[np.bool_]) -> tuple[EvalItem, ...]:
    """The evaluation questions: the configured eval set, or the held-out traces that have an answer."""
    if not config.evaluation.enabled or seen.evalset is not None:
        return seen.items
    wanted = seen.kept[heldout]
    pairs = [pair for sample in _samples_at(seen, wanted) if (pair := as_question(sample, config.data.answer_tag))]
    if not pairs:
        raise InputError(
            f"nothing to evaluate: no eval set is configured, and none of the {len(wanted):,} held-out records is one "
            "question with one answer (a chat, a system turn or an open text cannot be scored)",
            fix="set evaluation.evalset, or data.validation_fraction above 0, or evaluation.enabled=false",
        )
    if len(pairs) > MOST_HELDOUT:
        logger.warning(
            "Evaluation uses %d of %s held-out questions, evenly spaced; set evaluation.evalset to choose them",
            MOST_HELDOUT, f"{len(pairs):,}",
        )  # fmt: skip
    return items_of(pairs, MOST_HELDOUT)


def _samples_at(seen: Inspected, wanted: Numbers) -> Iterator[Sample]:
    """The records of these examples, read again: their texts are not stored."""
    numbers = set(wanted.tolist())
    for number, raw in enumerate(read_raw(seen.dataset) if numbers else ()):
        if number in numbers:
            where = seen.dataset.place(raw.file, raw.line)
            yield to_sample(parse(raw, where), seen.format, where)


def _refuse_odd_questions(
    items: Sequence[EvalItem], evalset: FileRef | None, tokenizer: Tokenizer, style: Style
) -> None:
    """A question goes through the chat template as training texts do, so the same rules hold."""
    for line, item in enumerate(items, start=1):
        question = Sample(turns=(Turn(role="user", text=item.prompt),))
        for rule, wrong in check_text(question, tokenizer, style):
            if RULES[rule].refuses and evalset is not None:
                raise InputError(f"{evalset.path}:{line}: {rule}: {wrong}", fix=RULES[rule].fix)


def _refuse_prompts(items: Sequence[EvalItem], tokenizer: Tokenizer, style: Style, model: ModelFacts) -> None:
    highest = max((max(prompt_ids(item.prompt, tokenizer, style)) for item in items), default=0)
    if highest >= model.vocabulary:
        raise InputError(
            f"the tokenizer in {tokenizer.folder} gives id {highest} for an evaluation question; the embedding of the "
            f"model has {model.vocabulary:,} rows",
            fix=RULES["outside_vocabulary"].fix,
        )


# --- rules about lengths and ids -------------------------------------------------------------------------------------


def about_length(
    config: RunConfig, recipe: Recipe, store: Store, model: ModelFacts, kept: Numbers, cut: Numbers
) -> Iterator[Finding]:
    index, limit, dataset = store.examples.entries, config.data.max_length, recipe.dataset

    def finding(rule: str, which: Numbers, seen: str) -> Finding:
        return Finding.at(_places(dataset, index[which[:PLACES]]), rule=rule, count=len(which), seen=seen)

    over = np.flatnonzero(index["length"] > limit)
    if len(over) and config.data.on_overflow == "error":
        longest = over[np.argmax(index["length"][over])]
        yield finding(
            "too_long", over,
            f"{index['length'][over[0]]} tokens, max_length is {limit}; the longest is {_places(dataset, index[[longest]])[0]} "
            f"with {index['length'][longest]}",
        )  # fmt: skip
    if len(over) and config.data.on_overflow == "truncate":
        left = np.array([store.examples[i].trained[1:limit].any() for i in over.tolist()])
        if len(empty := over[~left]):
            yield finding("no_target", empty, f"no target is left after truncation to {limit}")
        inside = left & ((index["answer_end"][over] > limit) | _cut_open(recipe, store, over, limit))
        if len(elsewhere := over[left & ~inside]):
            yield finding("truncated", elsewhere, f"{index['length'][elsewhere[0]]} tokens, truncated to {limit}")
        if len(halved := over[inside]):
            reasoning = int((index["reasoning_end"][halved] > limit).sum())
            answer = int((index["answer_end"][halved] > limit).sum()) - reasoning
            other = f", {len(halved) - reasoning - answer} inside a tag of their own" * (
                len(halved) > reasoning + answer
            )
            yield finding(
                "cut_inside", halved, f"{reasoning} truncated inside the reasoning, {answer} inside the answer{other}"
            )
    beyond = kept[cut > model.positions]
    if len(beyond):
        yield finding(
            "beyond_positions", beyond, f"{index['length'][beyond[0]]} tokens, the model has {model.positions}"
        )


def _cut_open(recipe: Recipe, store: Store, over: Numbers, limit: int) -> npt.NDArray[np.bool_]:
    """Which of the truncated examples end with an open tag; a completion may contain tags of its own."""
    examples = (store.examples[number] for number in over.tolist())
    completions = (recipe.tokenizer.decode(one.ids[:limit][one.trained[:limit]].tolist()) for one in examples)
    return np.array([open_tag(text, recipe.style) is not None for text in completions], dtype=np.bool_)


def about_vocabulary(recipe: Recipe, store: Store, model: ModelFacts) -> Iterator[Finding]:
    """Every id must have a row in the embedding: also those of padding and of end tokens."""
    tokenizer, style, dataset = recipe.tokenizer, recipe.style, recipe.dataset
    others = {"padding": tokenizer.pad_id, "end of text": tokenizer.eos_id, "end of turn": style.template.end_id}
    rows = f"the embedding of the model has {model.vocabulary:,} rows"
    if store.highest_id >= model.vocabulary:
        beyond = [i for i in range(len(store.examples)) if store.examples[i].ids.max(initial=0) >= model.vocabulary]
        first = store.examples[beyond[0]].ids
        seen = f"id {int(first[first >= model.vocabulary][0])}; {rows}"
        places = _places(dataset, store.examples.entries[beyond[:PLACES]])
        yield Finding.at(places, rule="outside_vocabulary", count=len(beyond), seen=seen)
        return
    for role, number in others.items():
        if number >= model.vocabulary:
            yield Finding(
                rule="outside_vocabulary", count=1, first=str(tokenizer.folder), seen=f"the {role} token is id {number}; {rows}"
            )  # fmt: skip
            return


def _places(dataset: Dataset, entries: npt.NDArray[Any]) -> list[str]:
    return dataset.places(entries[["file", "line"]].tolist())
