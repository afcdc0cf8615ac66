"""The data stage in one call: find, read, hold out, render, pack."""

from dataclasses import dataclass

import numpy as np

from tunix_rt.config import RunConfig
from tunix_rt.data.pack import Row, make_rows, rows_sha256
from tunix_rt.data.registry import FileRef, find_dataset, find_evalset, read_items, read_traces
from tunix_rt.data.render import render_all
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.trace import EvalItem, Trace
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the model will be trained on and asked, before a weight is loaded."""

    dataset: FileRef
    evalset: FileRef | None
    """None when the held-out traces are asked."""
    items: tuple[EvalItem, ...]
    rows: tuple[Row, ...]
    heldout_rows: tuple[Row, ...]
    traces: int
    heldout_traces: int
    dropped: int
    truncated: int

    @property
    def tokens(self) -> int:
        return sum(len(row.ids) for row in self.rows)

    @property
    def longest_row(self) -> int:
        return max(len(row.ids) for row in (*self.rows, *self.heldout_rows))

    @property
    def trained_tokens(self) -> int:
        return sum(int(row.trained.sum()) for row in self.rows)

    @property
    def sha256(self) -> str:
        """Over every training row, token by token."""
        return rows_sha256(self.rows)

    @property
    def sentence(self) -> str:
        """What happened to the data, for the log."""
        lost = [f"{self.dropped} dropped"] * bool(self.dropped) + [f"{self.truncated} truncated"] * bool(self.truncated)
        return (
            f"{self.dataset.key}: {self.traces:,} traces to train on, {self.heldout_traces:,} held out; "
            f"{len(self.rows):,} rows, {self.tokens:,} tokens, {self.trained_tokens / self.tokens:.0%} of them trained"
            + (f"; too long: {', '.join(lost)}" if lost else "")
        )


def prepare(config: RunConfig, tokenizer: Tokenizer, *, model_vocabulary: int) -> Prepared:
    """Rows and questions for a run. Refuses data that cannot be trained on, with file and line or counts."""
    dataset = find_dataset(config.data.dataset or "")
    traces = read_traces(dataset)
    training, heldout = _hold_out(traces, config)
    rendering = {
        "max_length": config.data.max_length,
        "on_overflow": config.data.on_overflow,
        "system_instruction": config.data.system_instruction,
        "completion_only_loss": config.data.completion_only_loss,
    }
    rendered = render_all(training, tokenizer, **rendering)  # type: ignore[arg-type]
    rows = make_rows(rendered.examples, max_length=config.data.max_length, packing=config.data.packing)
    _refuse_ids_outside(rows, model_vocabulary, tokenizer)
    heldout_rows: list[Row] = []
    if heldout:
        examples = render_all(heldout, tokenizer, **rendering).examples  # type: ignore[arg-type]
        heldout_rows = make_rows(examples, max_length=config.data.max_length, packing=False)
    evalset = find_evalset(config.evaluation.evalset) if config.evaluation.evalset else None
    return Prepared(
        dataset=dataset,
        evalset=evalset,
        items=tuple(read_items(evalset) if evalset else _items_of(heldout)) if config.evaluation.enabled else (),
        rows=tuple(rows),
        heldout_rows=tuple(heldout_rows),
        traces=len(training),
        heldout_traces=len(heldout),
        dropped=rendered.dropped,
        truncated=rendered.truncated,
    )


def _hold_out(traces: list[Trace], config: RunConfig) -> tuple[list[Trace], list[Trace]]:
    """Training and held-out traces, each in file order; the choice is a function of the data seed alone."""
    fraction = config.data.validation_fraction
    count = min(len(traces) - 1, max(1, round(fraction * len(traces)))) if fraction else 0
    seed = config.training.seed if config.training.data_seed is None else config.training.data_seed
    chosen = set(np.random.Generator(np.random.PCG64([seed, len(traces)])).permutation(len(traces))[:count].tolist())
    training = [trace for index, trace in enumerate(traces) if index not in chosen]
    return training, [trace for index, trace in enumerate(traces) if index in chosen]


def _items_of(heldout: list[Trace]) -> list[EvalItem]:
    if not heldout:
        raise InputError(
            "nothing to evaluate on: no eval set is named and no trace is held out",
            fix="set evaluation.evalset, or data.validation_fraction above 0, or evaluation.enabled=false",
        )
    return [
        EvalItem(id=f"heldout-{number}", prompt=trace.prompt, answer=trace.final_answer, section="heldout")
        for number, trace in enumerate(heldout, start=1)
    ]


def _refuse_ids_outside(rows: list[Row], model_vocabulary: int, tokenizer: Tokenizer) -> None:
    highest = max(int(row.ids.max()) for row in rows)
    if highest >= model_vocabulary:
        raise InputError(
            f"the tokenizer in {tokenizer.folder} gives id {highest}; the model has {model_vocabulary} rows of embeddings",
            fix="this tokenizer does not belong to this model: set model.tokenizer_name_or_path",
        )
