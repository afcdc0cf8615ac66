"""What the rules look at: pure functions from one record, or one rendered example, to what is wrong with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import RunConfig
from tunix_rt.data.example_checks import open_tag
from tunix_rt.data.sources import Dataset
from tunix_rt.data.token_cache import Store
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.validation import PLACES, Finding

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the data stage must know of a model that is not loaded yet."""

    vocabulary: int
    positions: int
    model_type: str = ""


def about_length(
    config: RunConfig, recipe: Recipe, store: Store, model: ModelFacts, kept: Numbers, cut: Numbers
) -> Iterator[Finding]:
    index, limit, dataset = store.examples.entries, config.data.max_length, recipe.dataset

    def finding(rule: str, which: Numbers, seen: str) -> Finding:
        places = tuple(_place(dataset, entry) for entry in index[which[:PLACES]])
        return Finding(rule=rule, count=len(which), first=places[0], seen=seen, places=places)

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
        inside = left & ((index["answer_end"][over] > limit) | _cut_open(recipe, store, over, limit))
        if len(elsewhere := over[left & ~inside]):
            yield finding("truncated", elsewhere, f"{index['length'][elsewhere[0]]} tokens, cut to {limit}")
        if len(halved := over[inside]):
            reasoning = int((index["reasoning_end"][halved] > limit).sum())
            answer = int((index["answer_end"][halved] > limit).sum()) - reasoning
            other = f", {len(halved) - reasoning - answer} inside a tag of their own" * (
                len(halved) > reasoning + answer
            )
            yield finding(
                "cut_inside", halved, f"{reasoning} are cut inside the reasoning, {answer} inside the answer{other}"
            )
    beyond = kept[cut > model.positions]
    if len(beyond):
        yield finding(
            "beyond_positions", beyond, f"{index['length'][beyond[0]]} tokens, the model has {model.positions}"
        )


def _cut_open(recipe: Recipe, store: Store, over: Numbers, limit: int) -> npt.NDArray[np.bool_]:
    """Which of the examples would end with a tag that is still open; a completion may bring its own tags."""

    def said(number: int) -> str:
        example = store.examples[number]
        return recipe.tokenizer.decode(example.ids[:limit][example.trained[:limit]].tolist())

    return np.array([open_tag(said(number), recipe.style) is not None for number in over.tolist()], dtype=np.bool_)


def about_vocabulary(recipe: Recipe, store: Store, model: ModelFacts) -> Iterator[Finding]:
    """Every id that the model will be given must have a row in its table: also those that only pad or end."""
    tokenizer, style, dataset = recipe.tokenizer, recipe.style, recipe.dataset
    others = {"pads": tokenizer.pad_id, "ends a text": tokenizer.eos_id, "ends a turn": style.template.end_id}
    rows = f"the model has {model.vocabulary:,} rows of embeddings"
    if store.highest_id >= model.vocabulary:
        beyond = [i for i in range(len(store.examples)) if store.examples[i].ids.max(initial=0) >= model.vocabulary]
        first = store.examples[beyond[0]].ids
        places = tuple(_place(dataset, store.examples.entries[i]) for i in beyond[:PLACES])
        yield Finding(
            rule="outside_vocabulary",
            count=len(beyond),
            first=places[0],
            seen=f"id {int(first[first >= model.vocabulary][0])}; {rows}",
            places=places,
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
