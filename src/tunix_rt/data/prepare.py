"""The data stage in one call: find, read, hold out, render, pack."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tunix_rt.config import RunConfig
from tunix_rt.data.pack import Row, make_rows, rows_sha256
from tunix_rt.data.registry import FileRef, find_dataset, find_evalset, read_items, read_traces
from tunix_rt.data.render import Example, prompt_ids, render_all
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
    """Trained on; with `heldout_traces` and `dropped`, all there are."""
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


def prepare(config: RunConfig, tokenizer: Tokenizer, *, model_vocabulary: int, model_positions: int) -> Prepared:
    """Rows and questions for a run. Refuses data that cannot be trained on, with file and line or counts."""
    dataset = find_dataset(config.data.dataset or "")
    traces = read_traces(dataset)
    places = [f"{dataset.path}:{line}" for line in range(1, len(traces) + 1)]
    rendered = render_all(
        traces,
        tokenizer,
        max_length=config.data.max_length,
        on_overflow=config.data.on_overflow,
        system_instruction=config.data.system_instruction,
        completion_only_loss=config.data.completion_only_loss,
        places=places,
    )
    _refuse_beyond_positions(rendered.examples, [places[index] for index in rendered.kept], model_positions)
    kept = [traces[index] for index in rendered.kept]
    heldout = _hold_out([_question(trace.prompt) for trace in kept], config)
    training = [index for index in range(len(kept)) if index not in heldout]
    asked = [kept[index] for index in sorted(heldout)]
    rows, heldout_rows = (
        tuple(
            make_rows([rendered.examples[index] for index in part], max_length=config.data.max_length, packing=packing)
        )
        for part, packing in ((training, config.data.packing), (sorted(heldout), False))
    )
    evalset = find_evalset(config.evaluation.evalset) if config.evaluation.evalset else None
    items = tuple(read_items(evalset) if evalset else _items_of(asked)) if config.evaluation.enabled else ()
    if evalset:
        _refuse_trained_questions(items, evalset, {_question(kept[index].prompt) for index in training})
    prompts = [prompt_ids(item.prompt, tokenizer, config.data.system_instruction) for item in items]
    _refuse_ids_outside((*rows, *heldout_rows), prompts, model_vocabulary, tokenizer)
    return Prepared(
        dataset=dataset,
        evalset=evalset,
        items=items,
        rows=rows,
        heldout_rows=heldout_rows,
        traces=len(training),
        heldout_traces=len(asked),
        dropped=rendered.dropped,
        truncated=rendered.truncated,
    )


def _question(prompt: str) -> str:
    """A prompt as it is compared with others: runs of white space do not make another question."""
    return " ".join(prompt.split())


def _hold_out(questions: list[str], config: RunConfig) -> set[int]:
    """Indices of the held-out traces. All traces of one question go to one side; the choice follows from the data seed.

    Questions are taken in a shuffled order as long as they fit into the share; at least one is held out, the rarest, and
    one is left to train on.
    """
    groups: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        groups.setdefault(question, []).append(index)
    if not config.data.validation_fraction or len(groups) < 2:
        return set()
    seed = config.training.seed if config.training.data_seed is None else config.training.data_seed
    order = np.random.Generator(np.random.PCG64([seed, len(groups)])).permutation(len(groups)).tolist()
    shuffled = [list(groups.values())[place] for place in order]
    wanted = max(1, round(config.data.validation_fraction * len(questions)))
    chosen: set[int] = set()
    for group in shuffled:
        if len(chosen) + len(group) <= min(wanted, len(questions) - 1):
            chosen.update(group)
    rarest = min(shuffled, key=len)
    return chosen or set(rarest)


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


def _refuse_beyond_positions(examples: Sequence[Example], places: Sequence[str], positions: int) -> None:
    """A model with a table of positions has none beyond it; one that rotates was never trained there."""
    beyond = [(len(example.ids), place) for example, place in zip(examples, places, strict=True)]
    beyond = [(length, place) for length, place in beyond if length > positions]
    if beyond:
        length, place = max(beyond, key=lambda pair: pair[0])
        raise InputError(
            f"{len(beyond)} of {len(examples)} traces are longer than the {positions} positions of the model; "
            f"the longest is {place} with {length} tokens",
            fix=f"--set data.max_length={positions} --set data.on_overflow=drop (or truncate), or use another model",
        )


def _refuse_trained_questions(items: Sequence[EvalItem], evalset: FileRef, trained: set[str]) -> None:
    """An answer that was trained on measures memory, not learning."""
    known = [line for line, item in enumerate(items, start=1) if _question(item.prompt) in trained]
    if known:
        raise InputError(
            f"{len(known)} of {len(items)} evaluation questions are prompts of the training traces; "
            f"the first is {evalset.path}:{known[0]}",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
        )


def _refuse_ids_outside(
    rows: Sequence[Row], prompts: Sequence[list[int]], model_vocabulary: int, tokenizer: Tokenizer
) -> None:
    """Every id that the model will be given must have a row in its table: also those that only pad, end or ask."""

    def highest_of_each() -> Iterator[int]:
        yield from (tokenizer.pad_id, tokenizer.eos_id)
        yield from (int(row.ids.max()) for row in rows)
        yield from (max(prompt) for prompt in prompts)

    if (highest := max(highest_of_each())) >= model_vocabulary:
        raise InputError(
            f"the tokenizer in {tokenizer.folder} gives id {highest}; the model has {model_vocabulary} rows of embeddings",
            fix="this tokenizer does not belong to this model: set model.tokenizer_name_or_path",
        )
