"""The reasons and examples of docs/reference/data-rules.md and data-formats.md. Tests read every example."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Explanation(NamedTuple):
    """Why a rule of validation matters, and data that breaks it."""

    because: str
    example: str


EXPLANATIONS: Mapping[str, Explanation] = {
    "unreadable": Explanation(
        because="part of the file is missing or was written by another program, and a record may be lost",
        example="a blank line between two records, or `{'prompt': 'Why?'}` in Python's notation",
    ),
    "wrong_field": Explanation(
        because="a text to train on is missing, or would be dropped",
        example='`{"prompt": "Why?", "completion": ""}`',
    ),
    "unsupported": Explanation(
        because="trained as an answer it teaches the opposite (`label: false`), or half of it is missing (tools, images)",
        example='`{"prompt": "Why?", "completion": "No idea.", "label": false}`',
    ),
    "lone_surrogate": Explanation(
        because="it is not a character: the file was truncated or converted badly, and no tokenizer can encode it",
        example='`"prompt": "How many \\ud83d are there?"`',
    ),
    "control_character": Explanation(
        because="it comes from a broken conversion, and the model would learn to generate it",
        example='`"final_answer": "4\\u00002"`',
    ),
    "control_token": Explanation(
        because="it becomes that token: the text was rendered by a template before, or a turn would end in its middle",
        example='`"prompt": "<start_of_turn>user\\nHow many?"`',
    ),
    "template_refused": Explanation(
        because="the template expects another order of turns, or no system turn",
        example="two consecutive user turns, and the template of Gemma",
    ),
    "no_target": Explanation(
        because="it costs time and trains nothing; alone in a batch its loss is NaN",
        example='`{"messages": [{"role": "user", "content": "Hello?"}]}`',
    ),
    "end_not_trained": Explanation(
        because="the model never learns to stop, and generates up to the token limit",
        example="a tokenizer whose template writes `assistant: {content}` and no token after it",
    ),
    "bos_twice": Explanation(
        because="the model was pretrained with one, and generates worse after two",
        example='`"prompt": "<bos>How many?"`',
    ),
    "bos_missing": Explanation(
        because="a Gemma model without it generates garbage",
        example="a Gemma model and a chat template without `{{ bos_token }}`",
    ),
    "orphan_tag": Explanation(
        because="the model learns to leave its reasoning open, and no answer can be extracted",
        example='`"completion": "<reasoning>3 + 4 = 7<answer>7</answer>"`',
    ),
    "empty_tag": Explanation(
        because="the model learns to skip its reasoning; some chat templates add an empty block before that of a trace",
        example='`"completion": "<reasoning></reasoning><answer>7</answer>"`',
    ),
    "answer_missing": Explanation(
        because="the tokenizer or the template lost it: the trained text differs from the file",
        example="an answer in a script that the tokenizer does not know, so that it becomes `<unk>`",
    ),
    "prompt_trained": Explanation(
        because="the loss then covers the question too; a token that spans both never occurs in generation",
        example='`"content": "\\n\\nSeven."` after a template that ends in a line break, with a token for two of them',
    ),
    "too_long": Explanation(
        because="truncation would remove its answer", example="a trace of 1,500 tokens and `max_length: 1024`"
    ),
    "beyond_positions": Explanation(
        because="learned position embeddings end there; a model with rotary ones was never trained there",
        example="a trace of 1,500 tokens and GPT-2, which has 1,024 positions",
    ),
    "outside_vocabulary": Explanation(
        because="the tokenizer belongs to another model",
        example="Gemma 3's tokenizer writes `<image_soft_token>` as id 262144; the embedding ends at 262143",
    ),
    "in_validation": Explanation(
        because="its loss there measures memorization, not learning", example="the same question in both files"
    ),
    "overlap_exact": Explanation(
        because="a trained answer measures memorization, not learning", example='`"How many are left?"` in both'
    ),
    "overlap_normalised": Explanation(
        because="a trained answer measures memorization, not learning",
        example='`"How many are left?"` and `"how many  are left"`',
    ),
    "overlap_ngram": Explanation(
        because="it is the same question rephrased, or it is quoted in an answer",
        example="the same story about another person",
    ),
    "control_text": Explanation(
        because="the text may have been rendered by a chat template before",
        example='`"prompt": "<start_of_turn>user\\nHow many?"` and `chat_template: plain`',
    ),
    "unused_column": Explanation(
        because="it is not trained on: a context or an instruction may be lost",
        example='`{"question": "Who?", "answer": "Mia.", "context": "Mia came."}`',
    ),
    "answer_with_words": Explanation(
        because="they are trained as part of the answer, while most answers of the set are a bare number",
        example='`"answer": "It takes 2 + 3 = 5 hours.\\n#### 5 hours"`',
    ),
    "truncated": Explanation(
        because="its end token is lost: the model learns not to stop", example="a chat of six turns, of which four fit"
    ),
    "cut_inside": Explanation(
        because="the model learns reasoning without an answer, or half an answer",
        example="a trace whose steps alone are longer than `max_length`",
    ),
    "duplicate": Explanation(because="it is trained on twice as often as the others", example="the same line twice"),
    "near_duplicate": Explanation(
        because="many of them are one example trained on many times; across a held-out split they leak",
        example="the same story with one number changed",
    ),
}


class FormatExample(NamedTuple):
    """How a record of a format becomes a conversation, and such a record."""

    description: str
    record: Mapping[str, Any]


FORMAT_EXAMPLES: Mapping[str, FormatExample] = {
    "trace": FormatExample(
        description="The native format. Steps and answer are put into the reasoning and answer tags, after the prompt.",
        record={
            "prompt": "Tom has 3 pens and buys 4. How many has he?",
            "steps": [{"i": 0, "type": "compute", "content": "3 + 4 = 7"}],
            "final_answer": "7",
        },
    ),
    "prompt_completion": FormatExample(
        description="One user turn and one assistant turn; or on both sides a list of messages: no assistant turn in the "
        "prompt, no other in the completion.",
        record={"prompt": "What is the capital of France?", "completion": "Paris."},
    ),
    "messages": FormatExample(
        description="A chat, kept whole; a `system` beside it is its first turn. Where the assistant's last message has "
        "`reasoning_content` (or `reasoning`, `thinking`), that is the step of a trace and its content the answer.",
        record={
            "messages": [
                {"role": "user", "content": "What is 3 + 4?"},
                {"role": "assistant", "content": "7", "reasoning_content": "3 + 4 = 7"},
            ]
        },
    ),
    "sharegpt": FormatExample(
        description="A chat, kept whole; a `system` beside it is its first turn. `role` and `content` are read instead of "
        "`from` and `value` too.",
        record={"conversations": [{"from": "human", "value": "What is 3 + 4?"}, {"from": "gpt", "value": "7"}]},
    ),
    "alpaca": FormatExample(
        description="The user turn is the instruction and, after an empty line, the input if there is one; the assistant turn "
        "is the output. The pairs of the history are turns before them.",
        record={"instruction": "Name the largest number.", "input": "3, 9, 4", "output": "9"},
    ),
    "gsm8k": FormatExample(
        description="Every line of the answer is one step, without its `<<3+4=7>>` annotations; the answer follows `####`: a "
        "number, with its unit if it has one (`#### 5 hours`).",
        record={"question": "Tom has 3 pens and buys 4. How many?", "answer": "He has 3+4=<<3+4=7>>7 pens.\n#### 7"},
    ),
    "text": FormatExample(
        description="A plain text: no chat template and no system instruction, the end-of-sequence token behind it, and every "
        "token is a target. A `.txt` file has one text per block of lines, with blank lines between them.",
        record={"text": "Water boils at 100 degrees Celsius."},
    ),
}
