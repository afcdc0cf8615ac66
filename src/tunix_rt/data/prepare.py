"""The data stage in one call: find, read, tokenise, ask the gate, hold out, pack."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config import RunConfig
from tunix_rt.data.containers import parse, read_raw
from tunix_rt.data.formats import detect_format, to_sample
from tunix_rt.data.leaks import find_leaks
from tunix_rt.data.pack import Packing, Row, Rows, pack, rows_root
from tunix_rt.data.registry import Dataset, FileRef, find_dataset, find_evalset, read_items
from tunix_rt.data.render import Style, prompt_ids, style_of
from tunix_rt.data.rules import RULES, Finding, refuse
from tunix_rt.data.sample import Sample
from tunix_rt.data.store import Progress, Store, open_store
from tunix_rt.data.tokenise import Recipe
from tunix_rt.data.tokenizer import Tokenizer, needs_bos
from tunix_rt.data.trace import EvalItem
from tunix_rt.errors import InputError

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the data stage must know of a model that is not loaded yet."""

    vocabulary: int
    positions: int
    model_type: str = ""


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
    merkle_root: str
    """Over every training row, token by token."""
    format: str = "trace"
    findings: tuple[Finding, ...] = ()
    store: Store | None = None
    """None in tests that need no data."""

    @property
    def sentence(self) -> str:
        """What happened to the data, for the log."""
        lost = [f"{self.dropped} dropped"] * bool(self.dropped) + [f"{self.truncated} truncated"] * bool(self.truncated)
        return (
            f"{self.dataset.key}: {self.traces:,} traces to train on, {self.heldout_traces:,} held out; "
            f"{len(self.rows):,} rows, {self.tokens:,} tokens, {self.trained_tokens / self.tokens:.0%} of them trained; "
            f"template {self.style.template.name}" + (f"; too long: {', '.join(lost)}" if lost else "")
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
    of_row = np.add.reduceat(seen.lengths[packing.order], packing.starts[:-1])
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
        fill=float(of_row[:-1].mean() / max_length) if len(of_row) > 1 else float(of_row[0] / max_length),
        merkle_root=rows_root(rows),
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
    found = [*store.findings, *_about_length(config, store, dataset, model, kept, cut)]
    found += _about_vocabulary(store, dataset, tokenizer, recipe.style, model)
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


def _trained(seen: Inspected, index: npt.NDArray[Any]) -> Numbers:
    """Trained tokens of each kept example; of a cut one, of what is left."""
    counts = index["trained"][seen.kept].astype(np.int64)
    for at in np.flatnonzero(seen.lengths < index["length"][seen.kept]):
        counts[at] = int(seen.store.examples[int(seen.kept[at])].trained[: seen.lengths[at]].sum())
    return counts


# --- rules that depend on the settings and on the model --------------------------------------------------------------


def _about_length(
    config: RunConfig, store: Store, dataset: Dataset, model: ModelFacts, kept: Numbers, cut: Numbers
) -> Iterator[Finding]:
    index, limit = store.examples.entries, config.data.max_length

    def finding(rule: str, which: Numbers, seen: str) -> Finding:
        return Finding(rule=rule, count=len(which), first=_place(dataset, index[which[0]]), seen=seen)

    over = np.flatnonzero(index["length"] > limit)
    if len(over) and config.data.on_overflow == "error":
        longest = over[np.argmax(index["length"][over])]
        yield finding(
            "too_long", over,
            f"{index['length'][over[0]]} tokens, max_length is {limit}; the longest is {_place(dataset, index[longest])} "
            f"with {index['length'][longest]}",
        )  # fmt: skip
    if len(over) and config.data.on_overflow == "truncate":
        left = np.array([store.examples[i].trained[1:limit].any() for i in over.tolist()])
        if len(empty := over[~left]):
            yield finding("no_target", empty, f"nothing to train on is left after cutting at {limit}")
        inside = left & (index["answer_end"][over] > limit)
        if len(elsewhere := over[left & ~inside]):
            yield finding("truncated", elsewhere, f"{index['length'][elsewhere[0]]} tokens, cut to {limit}")
        if len(halved := over[inside]):
            reasoning = int((index["reasoning_end"][halved] > limit).sum())
            counts = f"{reasoning} are cut inside the reasoning, {len(halved) - reasoning} inside the answer"
            yield finding("cut_inside", halved, counts)
    beyond = kept[cut > model.positions]
    if len(beyond):
        yield finding(
            "beyond_positions", beyond, f"{index['length'][beyond[0]]} tokens, the model has {model.positions}"
        )


def _about_vocabulary(
    store: Store, dataset: Dataset, tokenizer: Tokenizer, style: Style, model: ModelFacts
) -> Iterator[Finding]:
    """Every id that the model will be given must have a row in its table: also those that only pad or end."""
    others = {"pads": tokenizer.pad_id, "ends a text": tokenizer.eos_id, "ends a turn": style.template.end_id}
    rows = f"the model has {model.vocabulary:,} rows of embeddings"
    if store.highest_id >= model.vocabulary:
        beyond = [i for i in range(len(store.examples)) if store.examples[i].ids.max(initial=0) >= model.vocabulary]
        first = store.examples[beyond[0]].ids
        yield Finding(
            rule="outside_vocabulary",
            count=len(beyond),
            first=_place(dataset, store.examples.entries[beyond[0]]),
            seen=f"id {int(first[first >= model.vocabulary][0])}; {rows}",
        )
        return
    for role, number in others.items():
        if number >= model.vocabulary:
            yield Finding(
                rule="outside_vocabulary", count=1, first=str(tokenizer.folder), seen=f"what {role} is id {number}; {rows}"
            )  # fmt: skip
            return


def _place(dataset: Dataset, entry: Any) -> str:
    return dataset.place(int(entry["file"]), int(entry["line"]))


# --- held out, and asked ---------------------------------------------------------------------------------------------


def _hold_out(seen: Inspected, config: RunConfig) -> npt.NDArray[np.bool_]:
    """Which of the kept examples are held out. All examples of one question go to one side; the data seed decides.

    Questions are taken in a shuffled order as long as they fit into the share; at least one is held out, the rarest, and
    one is left to train on. Case, spaces and punctuation do not make another question.
    """
    _, first, group_of = np.unique(
        seen.store.examples.entries["question"][seen.kept], return_index=True, return_inverse=True
    )
    heldout = np.zeros(len(seen.kept), dtype=np.bool_)
    if not config.data.validation_fraction or len(first) < 2:
        return heldout
    in_file_order = np.argsort(first)
    sizes = np.bincount(group_of)[in_file_order]
    seed = config.training.seed if config.training.data_seed is None else config.training.data_seed
    shuffled = np.random.Generator(np.random.PCG64([seed, len(first)])).permutation(len(first))
    wanted = min(max(1, round(config.data.validation_fraction * len(heldout))), len(heldout) - 1)
    chosen: list[int] = []
    count = 0
    for group in shuffled.tolist():
        if count + sizes[group] <= wanted:
            chosen.append(group)
            count += int(sizes[group])
    if not chosen:
        chosen = [int(shuffled[np.argmin(sizes[shuffled])])]
    return np.isin(group_of, in_file_order[chosen])


def _asked(config: RunConfig, seen: Inspected, heldout: npt.NDArray[np.bool_]) -> tuple[EvalItem, ...]:
    """The questions of the evaluation: of the named eval set, or the held-out traces that have an answer."""
    if not config.evaluation.enabled or seen.evalset is not None:
        return seen.items
    wanted = set(seen.kept[heldout].tolist())
    samples = (_askable(sample, config.data.answer_tag) for sample in _samples_at(seen, wanted))
    items = tuple(
        EvalItem(id=f"heldout-{number}", prompt=prompt, answer=answer, section="heldout")
        for number, (prompt, answer) in enumerate((pair for pair in samples if pair is not None), start=1)
    )
    if not items:
        raise InputError(
            "nothing to evaluate on: no eval set is named, and no trace with an answer is held out",
            fix="set evaluation.evalset, or data.validation_fraction above 0, or evaluation.enabled=false",
        )
    return items


def _samples_at(seen: Inspected, wanted: set[int]) -> Iterator[Sample]:
    """The records of these examples, read again: their texts are not kept."""
    for number, raw in enumerate(read_raw(seen.dataset) if wanted else ()):
        if number in wanted:
            where = seen.dataset.place(raw.file, raw.line)
            yield to_sample(parse(raw, where), seen.format, where)


def _askable(sample: Sample, answer_tag: str) -> tuple[str, str] | None:
    """(question, answer) of a sample that is one question with one answer; None for a chat or an open text."""
    before = [turn for turn in sample.turns if turn.role != "assistant"]
    said = [turn.text for turn in sample.turns if turn.role == "assistant"]
    if [turn.role for turn in before] != ["user"]:
        return None
    answer = sample.answer
    if answer is None and len(said) == 1:
        _, opened, rest = said[0].rpartition(f"<{answer_tag}>")
        text, closed, _ = rest.partition(f"</{answer_tag}>")
        answer = text.strip() if opened and closed else None
    return (before[0].text, answer) if answer else None


def _refuse_prompts(items: Sequence[EvalItem], tokenizer: Tokenizer, style: Style, model: ModelFacts) -> None:
    highest = max((max(prompt_ids(item.prompt, tokenizer, style)) for item in items), default=0)
    if highest >= model.vocabulary:
        raise InputError(
            f"the tokenizer in {tokenizer.folder} gives id {highest} for an evaluation question; the model has "
            f"{model.vocabulary:,} rows of embeddings",
            fix=RULES["outside_vocabulary"].fix,
        )
