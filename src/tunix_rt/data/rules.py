"""The gate: every rule that data must pass, and what each looks for. Pure functions from what was seen to what is wrong.

A rule that refuses ends a run with exit code 3 before a weight is loaded; a rule that warns is counted and said.
`RULES` is the list; docs/reference/data-rules.md is generated from it.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tunix_rt.data.overlap import RUN_WORDS as OVERLAP_WORDS
from tunix_rt.data.render import Rendered, Style
from tunix_rt.data.sample import Sample
from tunix_rt.data.sketch import CAPACITY, RUN_WORDS, THRESHOLD
from tunix_rt.data.tokenizer import Tokenizer
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that goes wrong with data, in words: what is found, why it matters, the way out, and an example."""

    name: str
    finds: str
    because: str
    fix: str
    example: str
    refuses: bool = True


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            name="lone_surrogate",
            finds="half of a surrogate pair in a text",
            because="it is no character: the file was cut or converted badly, and no tokenizer can encode it",
            fix="write the file again as UTF-8 from its source",
            example='`"prompt": "How many \\ud83d are there?"`',
        ),
        Rule(
            name="control_character",
            finds="a control character (other than tab and line ends) in a text",
            because="it is a trace of a broken conversion, and the model would learn to write it",
            fix="remove it from the text",
            example='`"final_answer": "4\\u00002"`',
        ),
        Rule(
            name="control_token",
            finds="a control token of the tokenizer spelled out in a text",
            because="the text was put into a template before, or would end a turn where it does not end",
            fix="give the bare texts: the template adds its own tokens",
            example='`"prompt": "<start_of_turn>user\\nHow many?"`',
        ),
        Rule(
            name="template_refused",
            finds="a conversation that the chat template refuses",
            because="it was written for turns in another order, or without a system turn",
            fix="put the turns in the order the template wants, or name another: data.chat_template",
            example="two user turns after each other, and the template of Gemma",
        ),
        Rule(
            name="no_target",
            finds="an example without a trained token",
            because="it costs time and teaches nothing; in a batch of its own its loss is not a number",
            fix="give it something the assistant says, or remove it; if it was cut, raise data.max_length",
            example='`{"messages": [{"role": "user", "content": "Hello?"}]}`',
        ),
        Rule(
            name="end_not_trained",
            finds="an example whose end is not trained",
            because="the model never learns to stop, and runs on to the limit of tokens",
            fix="use a chat template that ends every turn of the assistant with a control token: data.chat_template",
            example="a tokenizer whose own template writes `assistant: {content}` and no token after it",
        ),
        Rule(
            name="bos_twice",
            finds="more than one beginning-of-sequence token in an example",
            because="the model has never seen two, and answers worse after them",
            fix="remove its text from the data; the template puts one there",
            example='`"prompt": "<bos>How many?"`',
        ),
        Rule(
            name="bos_missing",
            finds="no beginning-of-sequence token where the model needs one",
            because="a Gemma without it is no language model any more",
            fix="use a chat template that begins with {{ bos_token }}: data.chat_template; or the model's own tokenizer",
            example="a Gemma model and a chat template without `{{ bos_token }}`",
        ),
        Rule(
            name="orphan_tag",
            finds="an opening tag without its closing one, or the other way round, in what is trained",
            because="the model learns to leave its reasoning open, and no answer can be read out of it",
            fix="close the tag, or remove it",
            example='`"completion": "<reasoning>3 + 4 = 7<answer>7</answer>"`',
        ),
        Rule(
            name="empty_tag",
            finds="tags with nothing between them in what is trained",
            because="the model learns to skip its reasoning; some chat templates put an empty block there by themselves",
            fix="fill the block or remove it; for a template with a block of its own: --set data.reasoning_tag=think",
            example='`"completion": "<reasoning></reasoning><answer>7</answer>"`',
        ),
        Rule(
            name="answer_missing",
            finds="a final answer that is not in the trained text",
            because="the tokenizer or the template lost it on the way: what is trained is not what the file says",
            fix="look at the row with `tunix-rt data show`; use the model's own tokenizer, or another data.chat_template",
            example="an answer in letters that the tokenizer does not know, so that all of them become `<unk>`",
        ),
        Rule(
            name="prompt_trained",
            finds="a token of the prompt among the targets",
            because="the loss is then also on the question; at the border, a token of both is never seen in generation",
            fix="take white space from the beginning of the completion",
            example='`"content": "\\n\\nSeven."` after a template that ends in a line break, with a token for two of them',
        ),
        Rule(
            name="too_long",
            finds="an example longer than data.max_length",
            because="it would be cut, and what is cut off is the answer",
            fix="raise data.max_length, or say what to do: --set data.on_overflow=drop (or truncate)",
            example="a trace of 1,500 tokens and `max_length: 1024`",
        ),
        Rule(
            name="beyond_positions",
            finds="an example longer than the model has positions",
            because="a table of positions ends there; a model that rotates was never trained there",
            fix="set data.max_length to what the model has and data.on_overflow=drop (or truncate), or use another model",
            example="a trace of 1,500 tokens and GPT-2, which has 1,024 positions",
        ),
        Rule(
            name="outside_vocabulary",
            finds="a token id that the model has no row for",
            because="the tokenizer belongs to another model",
            fix="set model.tokenizer_name_or_path to the tokenizer of this model",
            example="Gemma 3's tokenizer writes `<image_soft_token>` as id 262144; the table ends at 262143",
        ),
        Rule(
            name="overlap_exact",
            finds="an evaluation question that is a prompt of the training data, letter by letter",
            because="an answer that was trained on measures memory, not learning",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example='`"How many are left?"` in both',
        ),
        Rule(
            name="overlap_normalised",
            finds="an evaluation question that is a training prompt but for case, spaces and punctuation",
            because="an answer that was trained on measures memory, not learning",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example='`"How many are left?"` and `"how many  are left"`',
        ),
        Rule(
            name="overlap_ngram",
            finds=f"an evaluation question that shares {OVERLAP_WORDS} words in a row with a training text",
            because="it is the same question in another dress, or it is quoted in an answer",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example="the same story about another person",
        ),
        Rule(
            name="truncated",
            finds="an example cut at data.max_length outside reasoning and answer, because data.on_overflow says truncate",
            because="its end-of-sequence is gone: it teaches to go on",
            fix="raise data.max_length, or --set data.on_overflow=drop",
            example="a chat of six turns, of which four fit",
            refuses=False,
        ),
        Rule(
            name="cut_inside",
            finds="an example cut inside its reasoning or its answer, because data.on_overflow says truncate",
            because="it teaches reasoning that leads to no answer, or half an answer",
            fix="raise data.max_length, or --set data.on_overflow=drop",
            example="a trace whose steps alone are longer than `max_length`",
            refuses=False,
        ),
        Rule(
            name="duplicate",
            finds="a record that is in the data twice",
            because="it is trained on twice as often as the others",
            fix="remove it, unless that is what you want",
            example="the same line twice",
            refuses=False,
        ),
        Rule(
            name="near_duplicate",
            finds=(
                f"a record much like an earlier one: {100 * THRESHOLD:.0f} % of their runs of {RUN_WORDS} words are shared, by "
                f"estimate (MinHash; of more than {CAPACITY:,} records a sample is compared)"
            ),
            because="many of them are one example trained on many times; across a hold-out they leak",
            fix="look at a few of them, and remove them unless that is what you want",
            example="the same story with one number changed",
            refuses=False,
        ),
    )
}


# --- one example at a time -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rendered example as the rules see it. `said` is read back from its token ids, not from the file."""

    sample: Sample
    rendered: Rendered
    said: str
    style: Style
    tokenizer: Tokenizer
    needs_bos: bool


Check = Callable[[Seen], str | None]
"""What is wrong, in a few words; None when nothing is."""


def _no_target(seen: Seen) -> str | None:
    return None if seen.rendered.trained[1:].any() else "nothing is trained"


def _end_not_trained(seen: Seen) -> str | None:
    shown = seen.rendered
    if any(end < 0 or not shown.trained[end] for end in shown.ends):
        return "what is said ends without a trained end token"
    return None


def _bos_twice(seen: Seen) -> str | None:
    bos = seen.tokenizer.bos_id
    if bos is None:
        return None
    ids = seen.rendered.ids
    # GPT-2 has one token for beginning and end: there, only two at the beginning are a mistake.
    later = ids[1:2] if bos == seen.tokenizer.eos_id else ids[1:]
    if ids[0] == bos and (later == bos).any():
        return f"{seen.tokenizer.bos_token} stands in it {1 + int((later == bos).sum())} times"
    spelled = seen.tokenizer.bos_token
    if spelled and bos != seen.tokenizer.eos_id and any(spelled in text for text in seen.sample.texts):
        return f"{spelled} is spelled out in the text"
    return None


def _bos_missing(seen: Seen) -> str | None:
    if seen.needs_bos and seen.rendered.ids[0] != seen.tokenizer.bos_id:
        return f"it begins with {seen.tokenizer.inner.id_to_token(int(seen.rendered.ids[0]))!r}"
    return None


def _tags(seen: Seen) -> Iterator[tuple[str, list[str]]]:
    """Every tag that has a meaning here, with what `said` holds from each opening or closing one to the next."""
    for name in dict.fromkeys((seen.style.reasoning_tag, seen.style.answer_tag, "think")):
        if f"{name}>" in seen.said:
            yield name, re.split(rf"(</?{re.escape(name)}>)", seen.said)


def _orphan_tag(seen: Seen) -> str | None:
    for name, parts in _tags(seen):
        found = parts[1::2]
        if found != [f"<{name}>", f"</{name}>"] * (len(found) // 2):
            return f"the tags are {' '.join(found[:6])}"
    return None


def _empty_tag(seen: Seen) -> str | None:
    for name, parts in _tags(seen):
        for before, between, after in zip(parts[1::2], parts[2::2], parts[3::2], strict=False):
            if before == f"<{name}>" and after == f"</{name}>" and not between.strip():
                return f"<{name}></{name}> is empty"
    return None


def _answer_missing(seen: Seen) -> str | None:
    if seen.sample.answer is None or not seen.rendered.trained.any():
        return None
    wanted, said = (_bare(text) for text in (seen.sample.answer, seen.said))
    return None if wanted in said else f"the answer {seen.sample.answer[:40]!r} is not in what is trained"


def _prompt_trained(seen: Seen) -> str | None:
    if not seen.style.completion_only_loss:
        return None  # asked for, and said in the log
    shown = seen.rendered
    if shown.trained[: shown.prompt_tokens].any():
        return f"{int(shown.trained[: shown.prompt_tokens].sum())} tokens of the prompt are trained"
    return "a token holds the end of the prompt and the beginning of the completion" if shown.melted else None


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

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LIKE_A_TOKEN = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]")


def _lone_surrogate(sample: Sample, tokenizer: Tokenizer) -> str | None:
    found = next((match for text in sample.texts if (match := _SURROGATE.search(text))), None)
    return f"\\u{ord(found.group()):04x} stands alone" if found else None


def _control_character(sample: Sample, tokenizer: Tokenizer) -> str | None:
    found = next((match for text in sample.texts if (match := _CONTROL.search(text))), None)
    return f"the character \\u{ord(found.group()):04x}" if found else None


def _control_token(sample: Sample, tokenizer: Tokenizer) -> str | None:
    known, odd = _control_tokens(tokenizer)
    for text in sample.texts:
        for match in _LIKE_A_TOKEN.finditer(text):
            if match.group() in known:
                return f"{match.group()} is spelled out"
        for token in odd:
            if token in text:
                return f"{token} is spelled out"
    return None


def _control_tokens(tokenizer: Tokenizer) -> tuple[frozenset[str], tuple[str, ...]]:
    """The control tokens that look like `<...>` or `[...]`, and the others. The beginning of sequence has its own rule."""
    tokens = _CONTROL_TOKENS.get(tokenizer.sha256)
    if tokens is None:
        own = {tokenizer.bos_token} if tokenizer.bos_id != tokenizer.eos_id else set()
        listed = [token for token in tokenizer.control_tokens if token and token not in own]
        usual = frozenset(token for token in listed if _LIKE_A_TOKEN.fullmatch(token))
        tokens = _CONTROL_TOKENS[tokenizer.sha256] = (usual, tuple(token for token in listed if token not in usual))
    return tokens


_CONTROL_TOKENS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {}

TEXT_CHECKS: dict[str, Callable[[Sample, Tokenizer], str | None]] = {
    "lone_surrogate": _lone_surrogate,
    "control_character": _control_character,
    "control_token": _control_token,
}


def check_text(sample: Sample, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong) for every rule about the text alone that the sample breaks."""
    for name, check in TEXT_CHECKS.items():
        if (wrong := check(sample, tokenizer)) is not None:
            yield name, wrong


def check_example(seen: Seen) -> Iterator[tuple[str, str]]:
    """(rule, what is wrong) for every rule about a rendered example that it breaks."""
    for name, check in EXAMPLE_CHECKS.items():
        if (wrong := check(seen)) is not None:
            yield name, wrong


# --- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How often a rule was broken, where first, and what was seen there."""

    rule: str
    count: int
    first: str
    """File and line."""
    seen: str

    @property
    def refuses(self) -> bool:
        return RULES[self.rule].refuses

    @property
    def sentence(self) -> str:
        return f"{self.rule}: {self.count:,} x {RULES[self.rule].finds}; first {self.first}: {self.seen}"


def gather(broken: Iterable[tuple[str, str, str]]) -> list[Finding]:
    """(rule, place, what is wrong), in the order of the file, as one Finding per rule, in the order of RULES."""
    counts: dict[str, int] = {}
    first: dict[str, tuple[str, str]] = {}
    for rule, place, wrong in broken:
        counts[rule] = counts.get(rule, 0) + 1
        first.setdefault(rule, (place, wrong))
    return [
        Finding(rule=name, count=counts[name], first=first[name][0], seen=first[name][1])
        for name in RULES
        if name in counts
    ]


def refuse(findings: Sequence[Finding]) -> None:
    """Raise InputError when a rule that refuses was broken: every such rule with its count and its first place."""
    wrong = [finding for finding in findings if finding.refuses]
    if not wrong:
        return
    fixes = list(dict.fromkeys(RULES[finding.rule].fix for finding in wrong))
    if len(wrong) == 1:
        raise InputError(wrong[0].sentence, fix=fixes[0])
    listed = "\n".join(f"  {finding.sentence}" for finding in wrong)
    raise InputError(f"the data breaks {len(wrong)} rules\n{listed}", fix="; ".join(fixes[:3]))
