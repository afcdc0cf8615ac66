"""The data stage in one call: find, read, tokenize, validate, hold out, pack."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import Data, RunConfig
from tunix_rt.data.contamination import find_leaks
from tunix_rt.data.example_checks import about_length, about_validation, about_vocabulary, check_text
from tunix_rt.data.formats import detect_format, to_sample
from tunix_rt.data.holdout import MOST_ALARM_ITEMS, MOST_HELDOUT, as_question, hold_out, items_of, longest_update
from tunix_rt.data.mixture import MixedDataset, describe_mixture, rows_of_epoch
from tunix_rt.data.packing import Packing, Row, RowFacts, Rows, facts_of_rows, pack
from tunix_rt.data.readers import read_raw
from tunix_rt.data.records import EvalItem, Sample, Turn
from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.sources import Dataset, FileRef, find_datasets, find_evalset, read_items
from tunix_rt.data.token_cache import Store, open_store
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.tokenizer import Tokenizer, needs_bos
from tunix_rt.data.validation import OF_RECORD, RULES, Finding, refuse
from tunix_rt.errors import InputError
from tunix_rt.progress import Progress

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]
TEXTS = "plain texts: no template, every token is a target"


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
    skipped: int = 0
    """Records that `data.skip_bad` leaves out."""
    heldout_from: "Validated | None" = None
    """`data.validation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected(Validated):
    """Nothing is refused yet."""

    heldout_from: "Inspected | None" = None
    store: Store
    items: tuple[EvalItem, ...]
    """Of the configured eval set; empty when the held-out traces are evaluated."""
    kept: Numbers
    """Indices of the examples that are used, in file order."""
    lengths: Numbers
    """Of these examples, after truncation."""
    bad: tuple[Finding, ...] = ()
    """About the skipped records."""


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
    mixture: tuple[MixedDataset, ...] = ()
    """The datasets with weights; their rows follow each other."""
    prompts: tuple[EvalItem, ...] = ()
    """The question and the answer of each row, where the model is trained on its own rollouts; such a row is one trace."""
    alarm_items: tuple[EvalItem, ...] = ()
    """Held-out questions of such a run, for its alarms."""

    @property
    def merkle_root(self) -> str:
        """Over every training row, token by token."""
        return self.row_facts.merkle_root

    def describe(self) -> str:
        """One line for the log."""
        lost = [f"{self.dropped} dropped"] * bool(self.dropped) + [f"{self.truncated} truncated"] * bool(self.truncated)
        source = f" ({self.heldout_from.dataset.key})" if self.heldout_from else ""
        return (
            f"{self.dataset.key}: {self.traces:,} training traces, {self.heldout_traces:,} held out{source}; "
            f"{len(self.rows):,} rows, {self.tokens:,} tokens, {self.trained_tokens / self.tokens:.0%} of them trained; "
            + (TEXTS if self.format == "text" else f"template {self.style.template.name}")
            + ("" if self.style.completion_only_loss else "; loss on the prompts too")
            + (f"; too long: {', '.join(lost)}" if lost else "")
            + (f"; {self.skipped:,} bad records skipped" if self.skipped else "")
            + (f"; {describe_mixture(self.mixture)}" if self.mixture else "")
        )


def prepare(
    config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, progress: Progress, *, today: date | None = None
) -> Prepared:
    """Rows and questions of a run. Data that breaks a refusing rule is an InputError with count, first file and line.

    `today` is the day on which a resumed run began: some templates write the date into every conversation.
    """
    seen = inspect(config, tokenizer, model, progress, today=today)
    _log_findings(seen, config, model)
    refuse(seen.findings)
    heldout = _hold_out(seen, config)
    out, chosen = (seen, heldout) if seen.heldout_from is None else (seen.heldout_from, seen.heldout_from.lengths > 0)
    items = _eval_items(config, seen, out, chosen)
    _refuse_prompts(items, tokenizer, seen.style, model)
    max_length, index = config.data.max_length, seen.store.examples.entries
    rollouts = config.training.rollouts
    split = config.data.model_copy(update={"packing": False}) if rollouts else config.data
    packing, mixture = pack_parts(seen, ~heldout, split)
    prompts = _prompts(seen, packing, config) if rollouts else ()
    updated = longest_update(prompts, tokenizer, seen.style, min(max_length, model.positions), config)
    alone = pack_rows(out.lengths, chosen, max_length, packing=False)
    rows, heldout_rows = (
        Rows(one.store.examples, Packing(one.kept[part.order], part.starts), max_length)
        for one, part in ((seen, packing), (out, alone))
    )
    of_row = row_lengths(seen.lengths, packing)
    return Prepared(
        **{field.name: getattr(seen, field.name) for field in fields(Validated)},
        items=items,
        rows=rows,
        heldout_rows=heldout_rows,
        traces=int((~heldout).sum()),
        heldout_traces=int(chosen.sum()),
        tokens=int(of_row.sum()),
        trained_tokens=int(_trained(seen, index)[~heldout].sum()),
        longest_row=int(max(updated or of_row.max(), out.lengths[chosen].max(initial=0))),
        fill=fill_of(of_row, max_length),
        row_facts=facts_of_rows(rows),
        store=seen.store,
        mixture=mixture,
        prompts=prompts,
        alarm_items=_alarm_items(out, chosen, config) if rollouts else (),
    )


def _log_findings(seen: Inspected, config: RunConfig, model: ModelFacts) -> None:
    """How tables and texts are read, warnings, and the records that are skipped."""
    for one in filter(None, (seen, seen.heldout_from)):
        for file in one.dataset.files:
            if file.container in ("csv", "text"):
                logger.info("Data: %s: %s", file.path, file.describe())
        if one.skipped:
            counts = ", ".join(f"{finding.rule} {finding.count:,}" for finding in one.bad)
            total = f"{len(one.store.examples):,}"
            logger.warning(
                "Data: %s of %s records skipped: %s; first %s", f"{one.skipped:,}", total, counts, one.bad[0].first
            )
    if sentence := config.data.beyond_positions(model.positions):
        logger.info("Data: %s", sentence)
    for finding in seen.findings:
        if not finding.refuses:
            logger.warning("Data: %s. %s", finding.describe(), finding.way_out)


def recipe_of(config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, *, today: date | None = None) -> Recipe:
    """The dataset of a configuration, and everything that determines its tokens."""
    data = config.data
    dataset = find_datasets(data.names or ("",), columns=data.columns, limit=data.max_examples, weights=data.weights)
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
    store = open_store(recipe, progress)
    index = store.examples.entries
    bad = tuple(finding for finding in store.findings if finding.rule in OF_RECORD) if data.skip_bad else ()
    used = ~index["bad"] if bad else np.ones(len(index), dtype=np.bool_)
    if not used.any():
        refuse(bad, skip_bad=True)
    lengths = index["length"].astype(np.int64)
    over = used & (lengths > data.max_length)
    kept = np.flatnonzero(used & ~over) if data.on_overflow == "drop" else np.flatnonzero(used)
    cut = np.minimum(lengths[kept], data.max_length) if data.on_overflow == "truncate" else lengths[kept]
    evalset = find_evalset(config.evaluation.evalset) if config.evaluation.evalset else None
    items = tuple(read_items(evalset)) if evalset else ()
    _refuse_odd_questions(items, evalset, tokenizer, recipe.style)
    findings = [finding for finding in store.findings if finding not in bad]
    findings += [*about_length(config, recipe, store, model, kept, cut), *about_vocabulary(recipe, store, model)]
    if evalset is not None:
        findings += find_leaks(recipe, store.folder, items, evalset, progress)
    if not len(kept):
        raise InputError(f"no trace is left at max_length {data.max_length}", fix="raise data.max_length")
    validation = _inspect_validation(config, tokenizer, model, progress, today=today) if data.validation else None
    if validation is not None:
        findings += [*validation.findings, *about_validation(recipe.dataset, index[kept], validation)]
    order = list(RULES)
    return Inspected(
        dataset=recipe.dataset,
        format=recipe.format,
        style=recipe.style,
        store=store,
        evalset=evalset,
        items=items if config.evaluation.enabled else (),
        kept=kept,
        lengths=cut,
        dropped=int(over.sum()) if data.on_overflow == "drop" else 0,
        truncated=int(over.sum()) if data.on_overflow == "truncate" else 0,
        skipped=int((~used).sum()),
        bad=bad,
        heldout_from=validation,
        findings=tuple(sorted(findings, key=lambda finding: order.index(finding.rule))),
    )


def _inspect_validation(
    config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, progress: Progress, *, today: date | None
) -> Inspected:
    """`data.validation` by itself, whole: evaluation questions may be in it."""
    changes = {"data.dataset": config.data.validation, "data.validation": None, "data.max_examples": None}
    alone = with_settings(config, changes | {"evaluation.evalset": None})
    return inspect(alone, tokenizer, model, progress, today=today)


def pack_rows(lengths: Numbers, chosen: npt.NDArray[np.bool_], max_length: int, *, packing: bool) -> Packing:
    """Pack the chosen examples; indices are those of `lengths`."""
    which = np.flatnonzero(chosen)
    if not packing:
        return Packing(which, np.arange(len(which) + 1))
    packed = pack(lengths[which], max_length)
    return Packing(which[packed.order], packed.starts)


def pack_parts(seen: Inspected, chosen: npt.NDArray[np.bool_], data: Data) -> tuple[Packing, tuple[MixedDataset, ...]]:
    """Pack the chosen examples; of a mixture, those of each dataset apart, so that its rows can be weighted."""
    if not seen.dataset.parts:
        return pack_rows(seen.lengths, chosen, data.max_length, packing=data.packing), ()
    file, start = seen.store.examples.entries["file"][seen.kept], 0
    packed, parts = [], []
    for dataset, weight in seen.dataset.parts:
        own = chosen & (file >= start) & (file < start + len(dataset.files))
        start += len(dataset.files)
        if not own.any():
            raise InputError(f"{dataset.key}: no example is left to train on", fix="leave it out of data.dataset")
        packed.append(pack_rows(seen.lengths, own, data.max_length, packing=data.packing))
        parts.append(MixedDataset(key=dataset.key, sha256=dataset.sha256, weight=weight, rows=len(packed[-1])))
    for part, rows in zip(parts, rows_of_epoch(parts), strict=True):
        if not rows:
            fix = "give it a larger weight, or leave it out"
            raise InputError(f"{part.key}: weight {part.weight:g} gives it no row in an epoch", fix=fix)
    ends = np.cumsum([0, *(row for one in packed for row in np.diff(one.starts))])
    return Packing(np.concatenate([one.order for one in packed]), ends), tuple(parts)


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
    """Which of the used examples are held out, by the data seed; none where `data.validation` is."""
    if seen.heldout_from is not None:
        return np.zeros(len(seen.kept), dtype=np.bool_)
    questions = seen.store.examples.entries["question"][seen.kept]
    if config.data.validation_fraction and len(np.unique(questions)) < 2:
        logger.warning("No example is held out: all records have the same question")
    return hold_out(questions, fraction=config.data.validation_fraction, seed=config.training.resolved_data_seed)


def _eval_items(
    config: RunConfig, seen: Inspected, out: Inspected, chosen: npt.NDArray[np.bool_]
) -> tuple[EvalItem, ...]:
    """The evaluation questions: the configured eval set, or the traces held `out` that have an answer."""
    if not config.evaluation.enabled or seen.evalset is not None:
        return seen.items
    wanted = out.kept[chosen]
    pairs = [pair for sample in _samples_at(out, wanted) if (pair := as_question(sample, config.data.answer_tag))]
    if not pairs:
        raise InputError(
            f"nothing to evaluate: no eval set is configured, and none of the {len(wanted):,} held-out records is one "
            "question with one answer that can be scored: a chat, a system turn, or a completion without "
            f"<{config.data.answer_tag}> cannot",
            fix=f"write answers as <{config.data.answer_tag}>42</{config.data.answer_tag}> or `#### 42`, set "
            f"evaluation.evalset, or evaluation.enabled=false{_or_hold_out(config)}",
        )
    if len(pairs) > MOST_HELDOUT:
        logger.warning(
            "Evaluation uses %d of %s held-out questions, evenly spaced; set evaluation.evalset to choose them",
            MOST_HELDOUT, f"{len(pairs):,}",
        )  # fmt: skip
    return items_of(pairs, MOST_HELDOUT)


def _or_hold_out(config: RunConfig) -> str:
    return "" if config.data.holds_out else ", or hold some out: data.validation_fraction above 0"


def _samples_at(seen: Inspected, wanted: Numbers) -> Iterator[Sample]:
    """The records of these examples, read again: their texts are not stored."""
    numbers = set(wanted.tolist())
    for number, raw in enumerate(read_raw(seen.dataset) if numbers else ()):
        if number in numbers:
            yield to_sample(seen.dataset.record(raw), seen.format, seen.dataset.place(raw.file, raw.line))


def _prompts(seen: Inspected, packing: Packing, config: RunConfig) -> tuple[EvalItem, ...]:
    """Question and answer of every row, in the order of the rows."""
    wanted = seen.kept[packing.order]
    found = dict(zip(sorted(wanted.tolist()), _samples_at(seen, wanted), strict=True))
    pairs = [as_question(found[number], config.data.answer_tag) for number in wanted.tolist()]
    if lacking := [number for number, pair in zip(wanted.tolist(), pairs, strict=True) if pair is None]:
        raise InputError(
            f"{len(lacking):,} of {len(pairs):,} records are not one question with one answer that can be scored, the first is "
            f"record {min(lacking) + 1}",
            fix=f"write answers as <{config.data.answer_tag}>42</{config.data.answer_tag}> or `#### 42`, or set "
            "training.method: sft",
        )
    questions = (pair for pair in pairs if pair)
    return tuple(EvalItem(id=f"row-{row}", prompt=one, answer=other) for row, (one, other) in enumerate(questions))


def _alarm_items(out: Inspected, chosen: npt.NDArray[np.bool_], config: RunConfig) -> tuple[EvalItem, ...]:
    samples = _samples_at(out, out.kept[chosen])
    pairs = [pair for sample in samples if (pair := as_question(sample, config.data.answer_tag))]
    return items_of(pairs, MOST_ALARM_ITEMS)


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
