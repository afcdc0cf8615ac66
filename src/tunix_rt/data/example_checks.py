"""The rules about one example: pure functions from a record, or a rendered example, to what is wrong with it. And those about
all examples of a dataset beside its model and its validation file: lengths, token ids, questions."""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunix_rt.config.settings import RunConfig
from tunix_rt.data.records import Sample
from tunix_rt.data.render import Rendered, Style
from tunix_rt.data.sources import Dataset
from tunix_rt.data.template import PLAIN
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.data.validation import PLACES, Finding

if TYPE_CHECKING:
    from tunix_rt.data.prepare import Inspected, ModelFacts
    from tunix_rt.data.token_cache import Store
    from tunix_rt.data.tokenize import Recipe

Numbers = npt.NDArray[np.int64]

# --- the rendered example --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rendered example as the rules see it. `turns` are decoded from the trained token ids, not read from the file."""

    sample: Sample
    rendered: Rendered
    turns: tuple[str, ...]
    style: Style
    tokenizer: Tokenizer
    needs_bos: bool


Check = Callable[[Seen], str | None]
"""What is wrong; None when nothing is."""


def _no_target(seen: Seen) -> str | None:
    return None if seen.rendered.trained[1:].any() else "nothing is trained"


def _end_not_trained(seen: Seen) -> str | None:
    shown, end_id = seen.rendered, seen.style.template.end_id
    turns = sum(turn.role == "assistant" for turn in seen.sample.turns) + bool(seen.sample.steps)
    ended = sum(end >= 0 and bool(shown.trained[end]) and shown.ids[end] == end_id for end in shown.ends)
    return None if ended == turns else f"{turns - ended} of {turns} turns end without a trained end token"


def _bos_twice(seen: Seen) -> str | None:
    bos = seen.tokenizer.bos_id
    if bos is None:
        return None
    ids = seen.rendered.ids
    # GPT-2 has one token for beginning and end, SmolLM2 one for the beginning of sequence and turn: there, only two at
    # the beginning are a mistake.
    later = ids[1:2] if _serves_twice(seen.tokenizer, seen.style) else ids[1:]
    if ids[0] == bos and (later == bos).any():
        return f"{seen.tokenizer.bos_token} stands in it {1 + int((later == bos).sum())} times"
    return None


def _serves_twice(tokenizer: Tokenizer, style: Style) -> bool:
    return tokenizer.bos_id == tokenizer.eos_id or style.template.opens_turns_with_bos


def _bos_missing(seen: Seen) -> str | None:
    if seen.needs_bos and seen.rendered.ids[0] != seen.tokenizer.bos_id:
        return f"it begins with {seen.tokenizer.inner.id_to_token(int(seen.rendered.ids[0]))!r}"
    return None


def _tagged(seen: Seen) -> Iterator[tuple[str, list[str]]]:
    """Every tag that the style uses, with an assistant turn split at its opening and closing tags.

    Only a trace, or a text that begins or ends with a tag, is checked: another text may mention tags.
    """
    names = tuple(dict.fromkeys((seen.style.reasoning_tag, seen.style.answer_tag, "think")))
    for turn in seen.turns:
        text = turn.removesuffix(seen.style.template.end_token).strip()
        own = seen.sample.texts  # without the empty block that some templates put before a text
        made_of_tags = bool(seen.sample.steps) or any(
            text.startswith((f"<{name}>", f"</{name}>")) or text.endswith((f"</{name}>", f"<{name}>")) for name in names
        )
        for name in names if made_of_tags else ():
            if f"{name}>" in text and (seen.sample.steps or any(f"{name}>" in mine for mine in own)):
                yield name, re.split(rf"(</?{re.escape(name)}>)", text)


def _orphan_tag(seen: Seen) -> str | None:
    for name, parts in _tagged(seen):
        tags = parts[1::2]
        if tags != [f"<{name}>", f"</{name}>"] * (len(tags) // 2):
            return f"the tags are {' '.join(tags[:6])}"
    return None


def _empty_tag(seen: Seen) -> str | None:
    for name, parts in _tagged(seen):
        for before, between, after in zip(parts[1::2], parts[2::2], parts[3::2], strict=False):
            if before == f"<{name}>" and after == f"</{name}>" and not between.strip():
                return f"<{name}></{name}> is empty"
    return None


def open_tag(text: str, style: Style) -> str | None:
    """The tag that is open at the end of `text`; None when there is none."""
    for name in (style.reasoning_tag, style.answer_tag):
        if text.rfind(f"<{name}>") > text.rfind(f"</{name}>"):
            return name
    return None


def _answer_missing(seen: Seen) -> str | None:
    if seen.sample.answer is None or not seen.rendered.trained.any():
        return None
    answer, trained = (_bare(text) for text in (seen.sample.answer, "".join(seen.turns)))
    return None if answer in trained else f"the answer {seen.sample.answer[:40]!r} is not in what is trained"


def _prompt_trained(seen: Seen) -> str | None:
    if not seen.style.completion_only_loss:
        return None  # requested by the settings
    shown = seen.rendered
    if shown.trained[: shown.prompt_tokens].any():
        return f"{int(shown.trained[: shown.prompt_tokens].sum())} tokens of the prompt are trained"
    return "a token holds the end of the prompt and the beginning of the completion" if shown.straddled else None


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


EXAMPLE_CHECKS: dict[str, Check] = {
    "no_target": _no_target,
    "end_not_trained": _end_not_trained,
    "bos_twice": _bos_twice,
    "bos_missing": _bos_missing,
    "orphan_tag": _orphan_tag,
    "empty_tag": _empty_tag,
    "answer_missing": _answer_missing,
    "prompt_trained": _prompt_trained,
}


# --- the text, before it is rendered ---------------------------------------------------------------------------------

TEXT_CHECKS = {
    "lone_surrogate": (re.compile("[\ud800-\udfff]"), "\\u{:04x} is not part of a pair"),
    "control_character": (
        re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]"),
        "the character \\u{:04x}",
    ),
}
"""Rule -> characters that no text may contain, and what is wrong with one of them."""
_LIKE_A_TOKEN = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]")


def spelled_control_token(sample: Sample, tokenizer: Tokenizer) -> str | None:
    """The first control token of the tokenizer that a text contains."""
    known, odd = _control_tokens(tokenizer.control_tokens)
    for text in sample.texts:
        for match in _LIKE_A_TOKEN.finditer(text):
            if match.group() in known:
                return match.group()
        for token in odd:
            if token in text:
                return token
    return None


@functools.lru_cache(maxsize=8)
def _control_tokens(tokens: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The control tokens that look like `<...>` or `[...]`, and the others."""
    usual = frozenset(token for token in tokens if _LIKE_A_TOKEN.fullmatch(token))
    return usual, tuple(token for token in tokens if token and token not in usual)


def check_text(sample: Sample, tokenizer: Tokenizer, style: Style) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong) for every rule about the text that the sample breaks."""
    for name, (characters, wrong) in TEXT_CHECKS.items():
        if match := next(filter(None, map(characters.search, sample.texts)), None):
            yield name, wrong.format(ord(match.group()))
    token = spelled_control_token(sample, tokenizer)
    if token is not None and (style.template.name == PLAIN or sample.is_text):
        yield "control_text", f"{token} is spelled out"
    elif token is not None and (token != tokenizer.bos_token or _serves_twice(tokenizer, style)):
        # otherwise the beginning-of-sequence token has a rule of its own
        yield "control_token", f"{token} is spelled out"


def check_example(seen: Seen) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong) for every rule about a rendered example that it breaks."""
    for name, check in EXAMPLE_CHECKS.items():
        if (wrong := check(seen)) is not None:
            yield name, wrong


# --- the examples of a dataset --------------------------------------------------------------------------------------


def about_length(
    config: RunConfig, recipe: "Recipe", store: "Store", model: "ModelFacts", kept: Numbers, cut: Numbers
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


def _cut_open(recipe: "Recipe", store: "Store", over: Numbers, limit: int) -> npt.NDArray[np.bool_]:
    """Which of the truncated examples end with an open tag; a completion may contain tags of its own."""
    examples = (store.examples[number] for number in over.tolist())
    completions = (recipe.tokenizer.decode(one.ids[:limit][one.trained[:limit]].tolist()) for one in examples)
    return np.array([open_tag(text, recipe.style) is not None for text in completions], dtype=np.bool_)


def about_vocabulary(recipe: "Recipe", store: "Store", model: "ModelFacts") -> Iterator[Finding]:
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
