"""The rules about the examples of a dataset beside its model and its validation file: lengths, token ids, questions."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import RunConfig
from tunix_rt.data.example_checks import open_tag
from tunix_rt.data.sources import Dataset
from tunix_rt.data.token_cache import Store
from tunix_rt.data.tokenize import Recipe
from tunix_rt.data.validation import PLACES, Finding

if TYPE_CHECKING:
    from tunix_rt.data.prepare import Inspected, ModelFacts

Numbers = npt.NDArray[np.int64]


def about_length(
    config: RunConfig, recipe: Recipe, store: Store, model: "ModelFacts", kept: Numbers, cut: Numbers
) -> Iterator[Finding]:
    index, limit, dataset = store.examples.entries, config.data.max_length, recipe.dataset

    def finding(rule: str, which: Numbers, seen: str, fix: str = "") -> Finding:
        return Finding.at(places_of(dataset, index[which[:PLACES]]), rule=rule, count=len(which), seen=seen, fix=fix)

    usable = index["length"] * ~(index["bad"] & config.data.skip_bad)
    over = np.flatnonzero(usable > limit)
    if len(over) and config.data.on_overflow == "error" and limit <= model.positions:
        longest = over[np.argmax(index["length"][over])]
        most = int(index["length"][longest])
        drop = "--set data.on_overflow=drop (or truncate)"
        yield finding(
            "too_long", over,
            f"{index['length'][over[0]]} tokens, max_length is {limit}; the longest is {places_of(dataset, index[[longest]])[0]} "
            f"with {most}",
            drop if most > model.positions else f"--set data.max_length={most}, or {drop}",
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
            "beyond_positions", beyond, f"{index['length'][beyond[0]]} tokens, the model has {model.positions} positions",
            f"--set data.max_length={min(limit, model.positions)} --set data.on_overflow=drop (or truncate), "
            "or use a model with a longer context",
        )  # fmt: skip


def _cut_open(recipe: Recipe, store: Store, over: Numbers, limit: int) -> npt.NDArray[np.bool_]:
    """Which of the truncated examples end with an open tag; a completion may contain tags of its own."""
    examples = (store.examples[number] for number in over.tolist())
    completions = (recipe.tokenizer.decode(one.ids[:limit][one.trained[:limit]].tolist()) for one in examples)
    return np.array([open_tag(text, recipe.style) is not None for text in completions], dtype=np.bool_)


def about_vocabulary(recipe: Recipe, store: Store, model: "ModelFacts") -> Iterator[Finding]:
    """Every id must have a row in the embedding: also those of padding and of end tokens."""
    tokenizer, style, dataset = recipe.tokenizer, recipe.style, recipe.dataset
    others = {"padding": tokenizer.pad_id, "end of text": tokenizer.eos_id, "end of turn": style.template.end_id}
    rows = f"the embedding of the model has {model.vocabulary:,} rows"
    if store.highest_id >= model.vocabulary:
        beyond = [i for i in range(len(store.examples)) if store.examples[i].ids.max(initial=0) >= model.vocabulary]
        first = store.examples[beyond[0]].ids
        seen = f"id {int(first[first >= model.vocabulary][0])}; {rows}"
        places = places_of(dataset, store.examples.entries[beyond[:PLACES]])
        yield Finding.at(places, rule="outside_vocabulary", count=len(beyond), seen=seen)
        return
    for role, number in others.items():
        if number >= model.vocabulary:
            yield Finding(
                rule="outside_vocabulary", count=1, first=str(tokenizer.folder), seen=f"the {role} token is id {number}; {rows}"
            )  # fmt: skip
            return


def places_of(dataset: Dataset, entries: npt.NDArray[Any]) -> list[str]:
    return dataset.places(entries[["file", "line"]].tolist())


def about_validation(dataset: Dataset, entries: npt.NDArray[Any], validation: "Inspected") -> Iterator[Finding]:
    known = validation.store.examples.entries[validation.kept]
    both = entries[np.isin(entries["question"], known["question"])]
    if len(both):
        same = known[known["question"] == both[0]["question"]][:1]
        seen = f"the question of {places_of(validation.dataset, same)[0]}"
        yield Finding.at(places_of(dataset, both[:PLACES]), rule="in_validation", count=len(both), seen=seen)
