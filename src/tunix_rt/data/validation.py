"""Validation: every rule about training data, and the findings of a dataset. `example_checks.py` implements the rules.

A refusing rule ends a run with exit code 3 before a weight is loaded; a warning is counted and logged.
docs/reference/data-rules.md is generated from `RULES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tunix_rt.data.text import CAPACITY, OVERLAP_WORDS, RUN_WORDS, SHORT_WORDS, THRESHOLD
from tunix_rt.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One defect of data: what it is, why it matters, the way out, and an example."""

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
            finds="a lone surrogate in a text",
            because="it is not a character: the file was truncated or converted badly, and no tokenizer can encode it",
            fix="write the file again as UTF-8 from its source",
            example='`"prompt": "How many \\ud83d are there?"`',
        ),
        Rule(
            name="control_character",
            finds="a control character (other than tab and line ends) in a text",
            because="it comes from a broken conversion, and the model would learn to generate it",
            fix="remove it from the text",
            example='`"final_answer": "4\\u00002"`',
        ),
        Rule(
            name="control_token",
            finds="the text of a control token in a text that goes through a chat template",
            because="it becomes that token: the text was rendered by a template before, or a turn would end in its middle",
            fix="give the bare texts, the template adds its own tokens; with data.chat_template=plain it stays text",
            example='`"prompt": "<start_of_turn>user\\nHow many?"`',
        ),
        Rule(
            name="template_refused",
            finds="a conversation that the chat template rejects",
            because="the template expects another order of turns, or no system turn",
            fix="put the turns in the order that the template expects, or choose another: data.chat_template",
            example="two consecutive user turns, and the template of Gemma",
        ),
        Rule(
            name="no_target",
            finds="an example without a trained token",
            because="it costs time and trains nothing; alone in a batch its loss is NaN",
            fix="add an assistant turn, or remove it; if it was truncated, raise data.max_length",
            example='`{"messages": [{"role": "user", "content": "Hello?"}]}`',
        ),
        Rule(
            name="end_not_trained",
            finds="an example whose end token is not trained",
            because="the model never learns to stop, and generates up to the token limit",
            fix="use a chat template that ends every assistant turn with a control token: data.chat_template",
            example="a tokenizer whose template writes `assistant: {content}` and no token after it",
        ),
        Rule(
            name="bos_twice",
            finds="more than one beginning-of-sequence token in an example",
            because="the model was pretrained with one, and generates worse after two",
            fix="remove its text from the data, the template adds one; with data.chat_template=plain it stays text",
            example='`"prompt": "<bos>How many?"`',
        ),
        Rule(
            name="bos_missing",
            finds="no beginning-of-sequence token where the model needs one",
            because="a Gemma model without it generates garbage",
            fix="use a chat template that begins with {{ bos_token }}: data.chat_template; or the model's own tokenizer",
            example="a Gemma model and a chat template without `{{ bos_token }}`",
        ),
        Rule(
            name="orphan_tag",
            finds="an opening tag without its closing one, or the other way round, in a trace or a tagged completion",
            because="the model learns to leave its reasoning open, and no answer can be extracted",
            fix="close the tag, or remove it",
            example='`"completion": "<reasoning>3 + 4 = 7<answer>7</answer>"`',
        ),
        Rule(
            name="empty_tag",
            finds="tags with nothing between them in a trace or a tagged completion",
            because="the model learns to skip its reasoning; some chat templates add an empty block before that of a trace",
            fix="fill the block or remove it; for a template that adds one: --set data.reasoning_tag=think",
            example='`"completion": "<reasoning></reasoning><answer>7</answer>"`',
        ),
        Rule(
            name="answer_missing",
            finds="a final answer that is not in the trained text",
            because="the tokenizer or the template lost it: the trained text differs from the file",
            fix="inspect the row with `tunix-rt data show`; use the model's own tokenizer, or another data.chat_template",
            example="an answer in a script that the tokenizer does not know, so that it becomes `<unk>`",
        ),
        Rule(
            name="prompt_trained",
            finds="a token of the prompt among the targets",
            because="the loss then covers the question too; a token that spans both never occurs in generation",
            fix="remove white space from the beginning of the completion",
            example='`"content": "\\n\\nSeven."` after a template that ends in a line break, with a token for two of them',
        ),
        Rule(
            name="too_long",
            finds="an example longer than data.max_length",
            because="truncation would remove its answer",
            fix="raise data.max_length, or choose: --set data.on_overflow=drop (or truncate)",
            example="a trace of 1,500 tokens and `max_length: 1024`",
        ),
        Rule(
            name="beyond_positions",
            finds="an example longer than the context of the model",
            because="learned position embeddings end there; a model with rotary ones was never trained there",
            fix="set data.max_length to the context of the model and data.on_overflow=drop (or truncate), or use another model",
            example="a trace of 1,500 tokens and GPT-2, which has 1,024 positions",
        ),
        Rule(
            name="outside_vocabulary",
            finds="a token id outside the embedding of the model",
            because="the tokenizer belongs to another model",
            fix="set model.tokenizer_name_or_path to the tokenizer of this model",
            example="Gemma 3's tokenizer writes `<image_soft_token>` as id 262144; the embedding ends at 262143",
        ),
        Rule(
            name="overlap_exact",
            finds="a training prompt that is an evaluation question, verbatim",
            because="a trained answer measures memorization, not learning",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example='`"How many are left?"` in both',
        ),
        Rule(
            name="overlap_normalised",
            finds="a training prompt that is an evaluation question up to case, spaces and punctuation",
            because="a trained answer measures memorization, not learning",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example='`"How many are left?"` and `"how many  are left"`',
        ),
        Rule(
            name="overlap_ngram",
            finds=(
                f"a training text that shares {OVERLAP_WORDS} consecutive words with an evaluation question, or contains one "
                f"of {SHORT_WORDS} to {OVERLAP_WORDS - 1} words"
            ),
            because="it is the same question rephrased, or it is quoted in an answer",
            fix="remove them, from the eval set or from the dataset, or name another eval set: evaluation.evalset",
            example="the same story about another person",
        ),
        Rule(
            name="control_text",
            finds="the text of a control token in a text, which plain rendering trains as text",
            because="the text may have been rendered by a chat template before",
            fix="if so, give the bare texts; HTML such as `<s>` is fine",
            example='`"prompt": "<start_of_turn>user\\nHow many?"` and `chat_template: plain`',
            refuses=False,
        ),
        Rule(
            name="unused_column",
            finds="a column that the format does not read",
            because="it is not trained on: a context or an instruction may be lost",
            fix="put it into the columns of the format, or ignore it on purpose",
            example='`{"question": "Who?", "answer": "Mia.", "context": "Mia came."}`',
            refuses=False,
        ),
        Rule(
            name="answer_with_words",
            finds="a GSM8K answer with words after its number",
            because="they are trained as part of the answer, while most answers of the set are a bare number",
            fix="leave only the number after `####`, unless its unit is to be learned",
            example='`"answer": "It takes 2 + 3 = 5 hours.\\n#### 5 hours"`',
            refuses=False,
        ),
        Rule(
            name="truncated",
            finds="an example truncated to data.max_length outside reasoning and answer (data.on_overflow=truncate)",
            because="its end token is lost: the model learns not to stop",
            fix="raise data.max_length, or --set data.on_overflow=drop",
            example="a chat of six turns, of which four fit",
            refuses=False,
        ),
        Rule(
            name="cut_inside",
            finds="an example truncated inside its reasoning or its answer (data.on_overflow=truncate)",
            because="the model learns reasoning without an answer, or half an answer",
            fix="raise data.max_length, or --set data.on_overflow=drop",
            example="a trace whose steps alone are longer than `max_length`",
            refuses=False,
        ),
        Rule(
            name="duplicate",
            finds="a record that occurs twice",
            because="it is trained on twice as often as the others",
            fix="remove it, unless it is intended",
            example="the same line twice",
            refuses=False,
        ),
        Rule(
            name="near_duplicate",
            finds=(
                f"a record similar to an earlier one: they share an estimated {100 * THRESHOLD:.0f} % of their {RUN_WORDS}-grams "
                f"(MinHash; of more than {CAPACITY:,} records a sample is compared)"
            ),
            because="many of them are one example trained on many times; across a held-out split they leak",
            fix="inspect a few of them, and remove them unless they are intended",
            example="the same story with one number changed",
            refuses=False,
        ),
    )
}

PLACES = 100
"""Places of a broken rule that are recorded."""


# --- findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How often a rule is broken, where first, and what is wrong there."""

    rule: str
    count: int
    first: str
    """File and line."""
    seen: str
    places: tuple[str, ...] = ()
    """The first PLACES of them."""

    @classmethod
    def at(cls, places: Sequence[str], *, rule: str, count: int, seen: str) -> "Finding":
        return cls(rule=rule, count=count, first=places[0], seen=seen, places=tuple(places[:PLACES]))

    @property
    def refuses(self) -> bool:
        return RULES[self.rule].refuses

    def describe(self) -> str:
        return f"{self.rule}: {self.count:,} x {RULES[self.rule].finds}; first {self.first}: {self.seen}"


def refuse(findings: Sequence[Finding]) -> None:
    """Raise InputError when a refusing rule is broken: every such rule with its count and first place."""
    wrong = [finding for finding in findings if finding.refuses]
    if not wrong:
        return
    fixes = list(dict.fromkeys(RULES[finding.rule].fix for finding in wrong))
    if len(wrong) == 1:
        raise InputError(wrong[0].describe(), fix=fixes[0])
    listed = "\n".join(f"  {finding.describe()}" for finding in wrong)
    raise InputError(f"the data breaks {len(wrong)} rules\n{listed}", fix="; ".join(fixes[:3]))
