"""The gate: every rule that data must pass, in words, and what was found of each. What they look at is in `checks.py`.

A rule that refuses ends a run with exit code 3 before a weight is loaded; a rule that warns is counted and said.
docs/reference/data-rules.md is generated from `RULES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tunix_rt.data.text import CAPACITY, OVERLAP_WORDS, RUN_WORDS, SHORT_WORDS, THRESHOLD
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
            finds="a control token of the tokenizer spelled out in a text that goes through a chat template",
            because="it becomes that token: the text was put into a template before, or would end a turn where it does not",
            fix="give the bare texts, the template adds its own tokens; with data.chat_template=plain it stays text",
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
            fix="remove its text from the data, the template puts one there; with data.chat_template=plain it stays text",
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
            finds="an opening tag without its closing one, or the other way round, in a trace or a tagged completion",
            because="the model learns to leave its reasoning open, and no answer can be read out of it",
            fix="close the tag, or remove it",
            example='`"completion": "<reasoning>3 + 4 = 7<answer>7</answer>"`',
        ),
        Rule(
            name="empty_tag",
            finds="tags with nothing between them in a trace or a tagged completion",
            because="the model learns to skip its reasoning; some chat templates put an empty block before the one of a trace",
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
            finds="a training prompt that is an evaluation question, letter by letter",
            because="an answer that was trained on measures memory, not learning",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example='`"How many are left?"` in both',
        ),
        Rule(
            name="overlap_normalised",
            finds="a training prompt that is an evaluation question but for case, spaces and punctuation",
            because="an answer that was trained on measures memory, not learning",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example='`"How many are left?"` and `"how many  are left"`',
        ),
        Rule(
            name="overlap_ngram",
            finds=(
                f"a training text that shares {OVERLAP_WORDS} words in a row with an evaluation question, or holds the whole "
                f"of one of {SHORT_WORDS} to {OVERLAP_WORDS - 1} words"
            ),
            because="it is the same question in another dress, or it is quoted in an answer",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example="the same story about another person",
        ),
        Rule(
            name="control_text",
            finds="a control token of the tokenizer spelled out in a text, which plain rendering trains as text",
            because="the text may have been put into a chat template before",
            fix="if so, give the bare texts; HTML such as `<s>` is fine",
            example='`"prompt": "<start_of_turn>user\\nHow many?"` and `chat_template: plain`',
            refuses=False,
        ),
        Rule(
            name="unused_column",
            finds="a column of a record that its format does not read",
            because="what it says is not trained on: a context or an instruction of its own may be lost",
            fix="put it into the columns of the format, or leave it out on purpose",
            example='`{"question": "Who?", "answer": "Mia.", "context": "Mia came."}`',
            refuses=False,
        ),
        Rule(
            name="answer_with_words",
            finds="a GSM8K answer with words behind its number",
            because="they are trained as a part of the answer, where most answers of the set are a bare number",
            fix="leave the number alone behind `####`, unless its unit is to be learned",
            example='`"answer": "It takes 2 + 3 = 5 hours.\\n#### 5 hours"`',
            refuses=False,
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

PLACES = 100
"""How many places of a broken rule are remembered."""


# --- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How often a rule was broken, where first, and what was seen there."""

    rule: str
    count: int
    first: str
    """File and line."""
    seen: str
    places: tuple[str, ...] = ()
    """The first PLACES of them."""

    @property
    def refuses(self) -> bool:
        return RULES[self.rule].refuses

    @property
    def sentence(self) -> str:
        return f"{self.rule}: {self.count:,} x {RULES[self.rule].finds}; first {self.first}: {self.seen}"


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
