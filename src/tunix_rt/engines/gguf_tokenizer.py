"""A tokenizer as the facts of a GGUF file: the vocabulary, and for BPE on bytes the name under which llama.cpp has its splitting.

llama.cpp implements splitting in C++, by name. The name is found by trying: the one whose rule gives the same token ids for
texts in which the rules differ.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import tokenizers

from tunix_rt.data.tokenizer import Tokenizer, needs_bos
from tunix_rt.errors import InputError

# What the named rules of llama.cpp split, as regular expressions; the second value is `ignore_merges`.
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((_GPT2,), False),
    "smollm": ((r"\p{N}", _GPT2), False),
    "llama-bpe": ((_CONTRACTIONS + _WORDS % r"\p{N}{1,3}",), True),
    "dbrx": ((_CONTRACTIONS + _WORDS % r"\p{N}{1,3}",), False),
    "qwen2": ((_CONTRACTIONS + _WORDS % r"\p{N}",), False),
    "tekken": ((_CASED % ("", "", r"\p{N}") + _END,), True),
    "gpt-4o": ((_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}{1,3}") + _END,), False),
}
PROBES = (
    "I'd say it's THEY'RE 'Ve we'LL don't; O'Neil's",
    "7 42 365 2048 31415 271828 1234567 3.14 -5 12x34 a1b22 ½ ٣٤",
    "one  two   three\tfour\t\tfive \n six\n\n\n seven\r\n\r\neight  \n",
    "def f(x):\n    return {x**2: 'y'} // 3 != 4 && z  # ok?!...\n\n\t\tend/\n",
    "Straße naïve ÉCOLE camelCase HTMLParser МоскваСПб 東京タワー 한국어 ไทย हिन्दी 🙂🙂 x⁻²",
)
SPACE = "\u2581"
BYTE_LEVEL_NORMALIZERS = (None, "NFC")
"""llama.cpp normalizes nothing; NFC changes only text that is not composed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What `tokenizer.ggml.*` contains."""

    model: str
    """`llama`: SentencePiece with a score per token. `gpt2`: BPE on bytes with merges."""
    split: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    scores: tuple[float, ...] | None
    merges: tuple[str, ...] | None
    space_first: bool
    """A text gets a space in front."""


def vocabulary_of(tokenizer: Tokenizer, rows: int) -> Vocabulary:
    """The vocabulary with one token for each of the `rows` of the embedding. InputError where llama.cpp has no such tokenizer."""
    content = json.loads(tokenizer.inner.to_str())
    model, normalizer = content["model"], content.get("normalizer") or {}
    if model["type"] != "BPE":
        raise _unknown(tokenizer, f"its model is {model['type']}, llama.cpp's are BPE and SentencePiece's BPE")
    merges = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model["merges"]]
    pieces = bool(model.get("byte_fallback"))
    tokens, kinds = _tokens(model["vocab"], content["added_tokens"], rows, pieces=pieces, unknown=model["unk_token"])
    if not pieces:
        split = _split_of(tokenizer, content, normalizer.get("type"))
        lines = tuple(" ".join(pair) for pair in merges)
        return Vocabulary(
            model="gpt2", split=split, tokens=tokens, kinds=kinds, scores=None, merges=lines, space_first=False
        )
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = tuple(
        float(-ranks.get(token, 10**6)) if kind == 1 else -1000.0 for token, kind in zip(tokens, kinds, strict=True)
    )
    return Vocabulary(
        model="llama", split="default", tokens=tokens, kinds=kinds, scores=scores, merges=None,
        space_first=_puts_space_first(content),
    )  # fmt: skip


def _unknown(tokenizer: Tokenizer, why: str) -> InputError:
    return InputError(
        f"llama.cpp has no tokenizer like that in {tokenizer.folder}: {why}",
        fix="export with --to hf, which every program with transformers loads",
    )


def _tokens(
    vocab: Mapping[str, int], added: list[dict[str, Any]], rows: int, *, pieces: bool, unknown: str | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Text and kind of each id below `rows`. Ids without a text are unused; a text without a row cannot be embedded."""
    kind, texts = gguf.TokenType, {number: text for text, number in vocab.items()}
    special = {one["id"]: one["special"] for one in added}
    texts |= {one["id"]: one["content"] for one in added}
    found: list[tuple[str, int]] = []
    for number in range(rows):
        text = texts.get(number)
        if text is None:
            found.append((f"[PAD{number}]", kind.UNUSED))
        elif pieces and text == unknown:
            found.append((text, kind.UNKNOWN))
        elif number in special:
            # llama.cpp finds these in the text as it is, before spaces are replaced.
            found.append((text, kind.CONTROL) if special[number] else (text.replace(SPACE, " "), kind.USER_DEFINED))
        elif pieces and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            found.append((text, kind.BYTE))
        else:
            found.append((text, kind.NORMAL))
    return tuple(text for text, _ in found), tuple(int(one) for _, one in found)


def _puts_space_first(content: dict[str, Any]) -> bool:
    steps = [content.get("normalizer") or {}, content.get("pre_tokenizer") or {}]
    steps += [inner for step in steps for inner in step.get("normalizers", step.get("pretokenizers", []))]
    return any(
        step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )


def _split_of(tokenizer: Tokenizer, content: dict[str, Any], normalizer: str | None) -> str:
    """The name of the rule with which the tokenizer gives the ids it gives now."""
    if normalizer not in BYTE_LEVEL_NORMALIZERS:
        raise _unknown(tokenizer, f"it changes texts by {normalizer} before they are split")
    expected = [tokenizer.encode(text) for text in PROBES]
    for name, (patterns, ignores) in SPLITS.items():
        changed = {**content, "model": {**content["model"], "ignore_merges": ignores}}
        tried = tokenizers.Tokenizer.from_str(json.dumps(changed))
        steps = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in patterns]
        whole = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tried.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*steps, whole])
        tried.encode_special_tokens = True
        if [tried.encode(text, add_special_tokens=False).ids for text in PROBES] == expected:
            return name
    raise _unknown(tokenizer, f"it splits texts as none of {', '.join(SPLITS)} does")


def add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: Tokenizer, *, model_type: str, rows: int, ends: list[int], template: str | None
) -> None:
    """Write the facts. Of `ends`, the tokens that end a generation, the first that is not EOS ends a turn."""
    words = vocabulary_of(tokenizer, rows)
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.split)
    writer.add_token_list(list(words.tokens))
    writer.add_token_types(list(words.kinds))
    if words.scores is not None:
        writer.add_token_scores(list(words.scores))
        writer.add_add_space_prefix(words.space_first)
    if words.merges is not None:
        writer.add_token_merges(list(words.merges))
    special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    named = tokenizer.special_tokens.get("unk_token")
    special["unk"] = None if named is None else tokenizer.inner.token_to_id(named)
    special["eot"] = next((number for number in ends if number != tokenizer.eos_id), None)
    for role, number in special.items():
        if number is not None and number < rows:
            getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(needs_bos(tokenizer, model_type))
    writer.add_add_eos_token(False)
    if template is not None:
        writer.add_chat_template(template)
