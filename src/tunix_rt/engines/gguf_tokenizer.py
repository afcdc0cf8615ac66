"""A tokenizer as the facts of a GGUF file: the vocabulary, and for BPE on bytes the name under which llama.cpp has its splitting.

llama.cpp implements splitting in C++, by name. The name is found by trying: the one whose rule gives the same token ids for
texts in which the rules differ.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import gguf
import tokenizers

from tunix_rt.data.tokenizer import Tokenizer, needs_bos
from tunix_rt.errors import InputError

# What the named rules of llama.cpp split, as regular expressions; the second value is `ignore_merges`.
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "gpt-2": ((_GPT2,), False),
    "smollm": ((r"\p{N}", _GPT2), False),
    "llama-bpe": ((_CONTRACTIONS + _WORDS % r"\p{N}{1,3}",), True),
    "dbrx": ((_CONTRACTIONS + _WORDS % r"\p{N}{1,3}",), False),
    "qwen2": ((_CONTRACTIONS + _WORDS % r"\p{N}",), False),
}
PROBES = (
    "I'd say it's THEY'RE 'Ve we'LL don't; O'Neil's",
    "7 42 365 2048 31415 271828 1234567 3.14 -5 12x34 a1b22 ½ ٣٤",
    "one  two   three\tfour\t\tfive \n six\n\n\n seven\r\n\r\neight  \n",
    "def f(x):\n    return {x**2: 'y'} // 3 != 4 && z  # ok?!...\n\n\t\tend/\n",
    "Straße naïve ÉCOLE camelCase HTMLParser МоскваСПб 東京タワー 한국어 ไทย हिन्दी 🙂🙂 x⁻²",
)
SPACE, BYTE = "\u2581", re.compile(r"<0x[0-9A-F]{2}>")
BYTE_LEVEL_NORMALIZERS = (None, "NFC")
"""llama.cpp normalizes nothing; NFC changes only text that is not composed."""


def _unknown(tokenizer: Tokenizer, why: str) -> InputError:
    return InputError(
        f"llama.cpp has no tokenizer like that in {tokenizer.folder}: {why}",
        fix="export with --to hf, which every program with transformers loads",
    )


def _tokens(tokenizer: dict[str, Any], rows: int, *, pieces: bool) -> tuple[list[str], list[int]]:
    """Text and kind of each id below `rows`. Ids without a text are unused; a text without a row cannot be embedded."""
    kind, model = gguf.TokenType, tokenizer["model"]
    special = {one["id"]: one["special"] for one in tokenizer["added_tokens"]}
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {one["id"]: one["content"] for one in tokenizer["added_tokens"]}

    def kind_of(number: int) -> int:
        if number not in texts:
            return kind.UNUSED
        if pieces and texts[number] == model["unk_token"]:
            return kind.UNKNOWN
        if number in special:
            return kind.CONTROL if special[number] else kind.USER_DEFINED
        return kind.BYTE if pieces and BYTE.fullmatch(texts[number]) else kind.NORMAL

    kinds = [int(kind_of(number)) for number in range(rows)]
    # llama.cpp finds user-defined tokens in the text as it is, before spaces are replaced.
    listed = [texts.get(number, f"[PAD{number}]") for number in range(rows)]
    listed = [text.replace(SPACE, " ") if kinds[at] == kind.USER_DEFINED else text for at, text in enumerate(listed)]
    return listed, kinds


def _puts_space_first(content: dict[str, Any]) -> bool:
    steps = [content.get("normalizer") or {}, content.get("pre_tokenizer") or {}]
    steps += [inner for step in steps for inner in step.get("normalizers", step.get("pretokenizers", []))]
    return any(
        step.get("type") == "Prepend" or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )


def split_of(tokenizer: Tokenizer, content: dict[str, Any]) -> str:
    """The name of the rule with which the tokenizer gives the ids it gives now."""
    normalizer = (content.get("normalizer") or {}).get("type")
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
    """Write the facts, with one token for each of the `rows` of the embedding. Of `ends`, the tokens that end a generation, the
    first that is not EOS ends a turn. InputError where llama.cpp has no such tokenizer."""
    content = json.loads(tokenizer.inner.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise _unknown(tokenizer, f"its model is {model['type']}, llama.cpp's are BPE and SentencePiece's BPE")
    pieces = bool(model.get("byte_fallback"))
    merges = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model["merges"]]
    tokens, kinds = _tokens(content, rows, pieces=pieces)
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else split_of(tokenizer, content))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if pieces:
        ranks = {"".join(pair): -rank for rank, pair in reversed(list(enumerate(merges)))}
        normal = [kind == gguf.TokenType.NORMAL for kind in kinds]
        scores = [float(ranks.get(text, -1e6)) if normal[at] else -1000.0 for at, text in enumerate(tokens)]
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(_puts_space_first(content))
    else:
        writer.add_token_merges([" ".join(pair) for pair in merges])
    unknown = tokenizer.special_tokens.get("unk_token")
    special = {
        "bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id,
        "unk": None if unknown is None else tokenizer.inner.token_to_id(unknown),
        "eot": next((number for number in ends if number != tokenizer.eos_id), None),
    }  # fmt: skip
    for role, number in special.items():
        if number is not None and number < rows:
            getattr(writer, f"add_{role}_token_id")(number)
    writer.add_add_bos_token(needs_bos(tokenizer, model_type))
    writer.add_add_eos_token(False)
    if template is not None:
        writer.add_chat_template(template)
