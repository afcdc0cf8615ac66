"""The data stage in one call: find, read, tokenise, ask the gate, hold out, pack."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import RunConfig
from tunix_rt.data.contamination import find_leaks
from tunix_rt.data.example_checks import check_text
from tunix_rt.data.formats import detect_format, to_sample
from tunix_rt.data.length_checks import ModelFacts, Numbers, about_length, about_vocabulary
from tunix_rt.data.packing import Packing, Row, RowFacts, Rows, facts_of_rows, pack
from tunix_rt.data.readers import parse, read_raw
from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.sources import Dataset, FileRef, find_dataset, find_evalset, read_items
from tunix_rt.data.split import MOST_ASKED, askable, hold_out, items_of
from tunix_rt.data.token_cache import Progress, Store, open_store
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.tokenizer import Tokenizer, needs_bos
from tunix_rt.data.trace import EvalItem, Sample, Turn
from tunix_rt.data.validation import RULES, Finding, refuse
from tunix_rt.errors import InputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """A dataset as one configuration will see it, with everything the gate found. Nothing is refused yet."""

    dataset: Dataset
    format: str
    style: Style
    store: Store
    evalset: FileRef | None
    items: tuple[EvalItem, ...]
    """Of the named eval set; empty when the held-out traces are asked."""
    kept: Numbers
    """Examples that are left, in the order of the file."""
    lengths: Numbers
    """Of the kept examples, after cutting."""
    dropped: int
    truncated: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the model will be trained on and asked, before a weight is loaded."""

    dataset: Dataset
    style: Style
    evalset: FileRef | None
    """None when the held-out traces are asked."""
    items: tuple[EvalItem, ...]
    rows: Sequence[Row]
    heldout_rows: Sequence[Row]
    traces: int
    """Trained on; with `heldout_traces` and `dropped`, all there are."""
    heldout_traces: int
    dropped: int
    truncated: int
    tokens: int
    """Of the rows that are trained on."""
    trained_tokens: int
    longest_row: int
    """Held-out ones included."""
    fill: float
    """Tokens over room, of all rows but the last."""
    row_facts: RowFacts
    """Of every training row."""
    format: str = "trace"
    findings: tuple[Finding, ...] = ()
    store: Store | None = None
    """None in tests that need no data."""

    @property
    def merkle_root(self) -> str:
        """Over every training row, token by token."""
        return self.row_facts.merkle_root

    @property
    def sentence(self) -> str:
        """What happened to the data, for the log."""
        lost = [f"{self.dropped} dropped"] * bool(self.dropped) + [f"{self.truncated} truncated"] * bool(self.truncated)
        return (
            f"{self.dataset.key}: {self.traces:,} traces to train on, {self.heldout_traces:,} held out; "
            f"{len(self.rows):,} rows, {self.tokens:,} tokens, {self.trained_tokens / self.tokens:.0%} of them trained; "
            f"template {self.style.template.name}"
            + ("" if self.style.completion_only_loss else "; the questions are trained too")
            + (f"; too long: {', '.join(lost)}" if lost else "")
        )


def prepare(
    config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, progress: Progress, *, today: date | None = None
) -> Prepared:
    """Rows and questions for a run. Refuses data that cannot be trained on: rule, count, first file and line.

    `today` is the day a continued run began on: some templates write the date into every conversation.
    """
    seen = inspect(config, tokenizer, model, progress, today=today)
    for finding in seen.findings:
        if not finding.refuses:
            logger.warning("Data: %s. %s", finding.sentence, RULES[finding.rule].fix)
    refuse(seen.findings)
    heldout = _hold_out(seen, config)
    asked = _asked(config, seen, heldout)
    _refuse_prompts(asked, tokenizer, seen.style, model)
    max_length, index = config.data.max_length, seen.store.examples.entries
    packing = pack_rows(seen.lengths, ~heldout, max_length, packing=config.data.packing)
    alone = pack_rows(seen.lengths, heldout, max_length, packing=False)
    rows, heldout_rows = (
        Rows(seen.store.examples, Packing(seen.kept[part.order], part.starts), max_length) for part in (packing, alone)
    )
    of_row = row_lengths(seen.lengths, packing)
    return Prepared(
        dataset=seen.dataset,
        format=seen.format,
        style=seen.style,
        evalset=seen.evalset,
        items=asked,
        rows=rows,
        heldout_rows=heldout_rows,
        traces=int((~heldout).sum()),
        heldout_traces=int(heldout.sum()),
        dropped=seen.dropped,
        truncated=seen.truncated,
        tokens=int(of_row.sum()),
        trained_tokens=int(_trained(seen, index)[~heldout].sum()),
        longest_row=int(max(of_row.max(), seen.lengths[heldout].max(initial=0))),
        fill=fill_of(of_row, max_length),
        row_facts=facts_of_rows(rows),
        findings=seen.findings,
        store=seen.store,
    )


def recipe_of(config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, *, today: date | None = None) -> Recipe:
    """The dataset of a configuration, and all that decides its tokens."""
    dataset = find_dataset(config.data.dataset or "")
    return Recipe(
        dataset=dataset,
        format=detect_format(dataset, config.data.format),
        tokenizer=tokenizer,
        style=style_of(config.data, tokenizer, today=today),
        needs_bos=needs_bos(tokenizer, model.model_type),
        model_type=model.model_type,
    )


def inspect(
    config: RunConfig, tokenizer: Tokenizer, model: ModelFacts, progress: Progress, *, today: date | None = None
) -> Inspected:
    """Everything the gate has to say about `config`'s dataset. Raises only for what cannot be read at all."""
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
    found = [*store.findings, *about_length(config, recipe, store, model, kept, cut)]
    found += about_vocabulary(recipe, store, model)
    if evalset is not None:
        found += find_leaks(recipe, store.folder, items, evalset, progress)
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
        findings=tuple(sorted(found, key=lambda finding: order.index(finding.rule))),
    )


def pack_rows(lengths: Numbers, chosen: npt.NDArray[np.bool_], max_length: int, *, packing: bool) -> Packing:
    """The chosen examples in rows; indices are those of `lengths`."""
    which = np.flatnonzero(chosen)
    if not packing:
        return Packing(which, np.arange(len(which) + 1))
    packed = pack(lengths[which], max_length)
    return Packing(which[packed.order], packed.starts)


def row_lengths(lengths: Numbers, packing: Packing) -> Numbers:
    """Tokens in each row."""
    return np.asarray(np.add.reduceat(lengths[packing.order], packing.starts[:-1]))


def fill_of(of_row: Numbers, max_length: int) -> float:
    """Tokens over room, of all rows but the last."""
    return float((of_row[:-1] if len(of_row) > 1 else of_row).mean() / max_length)


def _trained(seen: Inspected, index: npt.NDArray[Any]) -> Numbers:
    """Trained tokens of each kept example; of a cut one, of what is left."""
    counts = index["trained"][seen.kept].astype(np.int64)
    for at in np.flatnonzero(seen.lengths < index["length"][seen.kept]):
        counts[at] = int(seen.store.examples[int(seen.kept[at])].trained[: seen.lengths[at]].sum())
    return counts


# --- held out, and asked ---------------------------------------------------------------------------------------------


def _hold_out(seen: Inspected, config: RunConfig) -> npt.NDArray[np.bool_]:
    """Which of the kept examples are held out; the data seed decides."""
    questions = seen.store.examples.entries["question"][seen.kept]
    if config.data.validation_fraction and len(np.unique(questions)) < 2:
        logger.warning("Nothing is held out: all records ask the same question")
    seed = config.training.seed if config.training.data_seed is None else config.training.data_seed
    return hold_out(questions, fraction=config.data.validation_fraction, seed=seed)


def _asked(config: RunConfig, seen: Inspected, heldout: npt.NDArray[np.bool_]) -> tuple[EvalItem, ...]:
    """The questions of the evaluation: of the named eval set, or the held-out traces that have an answer."""
    if not config.evaluation.enabled or seen.evalset is not None:
        return seen.items
    wanted = seen.kept[heldout]
    pairs = [pair for sample in _samples_at(seen, wanted) if (pair := askable(sample, config.data.answer_tag))]
    if not pairs:
        raise InputError(
            f"nothing to evaluate on: no eval set is named, and of the {len(wanted):,} held-out records none is one "
            "question with one answer (a chat, a system turn or an open text cannot be asked)",
            fix="set evaluation.evalset, or data.validation_fraction above 0, or evaluation.enabled=false",
        )
    if len(pairs) > MOST_ASKED:
        logger.warning(
            "Of %s held-out questions %d are asked, evenly spread; name an eval set to choose yourself",
            f"{len(pairs):,}", MOST_ASKED,
        )  # fmt: skip
    return items_of(pairs, MOST_ASKED)


def _samples_at(seen: Inspected, wanted: Numbers) -> Iterator[Sample]:
    """The records of these examples, read again: their texts are not kept."""
    numbers = set(wanted.tolist())
    for number, raw in enumerate(read_raw(seen.dataset) if numbers else ()):
        if number in numbers:
            where = seen.dataset.place(raw.file, raw.line)
            yield to_sample(parse(raw, where), seen.format, where)


def _refuse_odd_questions(
    items: Sequence[EvalItem], evalset: FileRef | None, tokenizer: Tokenizer, style: Style
) -> None:
    """A question goes through the same template as a training text, so it must be such a text."""
    for line, item in enumerate(items, start=1):
        asked = Sample(turns=(Turn(role="user", text=item.prompt),))
        for rule, wrong in check_text(asked, tokenizer, style):
            if RULES[rule].refuses and evalset is not None:
                raise InputError(f"{evalset.path}:{line}: {rule}: {wrong}", fix=RULES[rule].fix)


def _refuse_prompts(items: Sequence[EvalItem], tokenizer: Tokenizer, style: Style, model: ModelFacts) -> None:
    highest = max((max(prompt_ids(item.prompt, tokenizer, style)) for item in items), default=0)
    if highest >= model.vocabulary:
        raise InputError(
            f"the tokenizer in {tokenizer.folder} gives id {highest} for an evaluation question; the model has "
            f"{model.vocabulary:,} rows of embeddings",
            fix=RULES["outside_vocabulary"].fix,
        )
