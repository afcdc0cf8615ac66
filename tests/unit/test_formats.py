"""From a record to a sample: one reading or a refusal that lists them, whole conversations, nothing dropped in silence."""

import json
import time
from pathlib import Path

import pytest

from docs.data_examples import FORMAT_EXAMPLES
from tests.conftest import REFERENCE
from tests.samples import read_samples
from tests.tables import parametrize, tables
from tunix_rt.config.settings import Data
from tunix_rt.data import formats
from tunix_rt.data.records import Sample, Turn
from tunix_rt.data.sources import find_dataset
from tunix_rt.errors import InputError
from tunix_rt.scoring.answers import bare_answer, read_quantity


def sample_of(*pairs: tuple[str, str], **rest) -> Sample:
    return Sample(turns=tuple(Turn(role=role, text=text) for role, text in pairs), **rest)


def message(role="user", content="Why?", **more):
    return {"role": role, "content": content, **more}


def write(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


STEP = {"i": 0, "type": "fact", "content": "I think."}
SHARED = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Why?"},
    {"from": "gpt", "value": "So."},
    {"from": "user", "value": "And?"},
    {"from": "model", "value": "Yes."},
]


READS = [
    (name, record, sample_of(*sample["turns"], steps=tuple(sample.get("steps", ())), answer=sample.get("answer")))
    for name, record, sample in tables(__file__)["reads"]
]


@pytest.mark.parametrize(("name", "record", "sample"), READS)
def test_a_record_has_one_reading_and_this_is_it(name, record, sample):
    assert formats.readings(record) == [name]
    assert formats.to_sample(record, name, "x:1") == sample


def test_every_format_of_the_configuration_is_there_and_recognises_its_own_example():
    assert ("auto", *formats.FORMATS) == Data.model_fields["format"].annotation.__args__
    assert list(FORMAT_EXAMPLES) == list(formats.FORMATS)
    for name, (_, record) in FORMAT_EXAMPLES.items():
        assert formats.readings(record) == [name]
        assert formats.to_sample(dict(record), name, "x:1").texts
        assert formats.unused_columns(record, name) == []


REFUSED = tables(__file__)["refused"]


@pytest.mark.parametrize(("name", "record", "words"), REFUSED)
def test_what_cannot_be_read_whole_is_refused_with_place_and_field(name, record, words):
    with pytest.raises(InputError) as caught:
        formats.to_sample(record, name, "my.jsonl:12")
    assert caught.value.problem.startswith(f"my.jsonl:12: {words}")
    assert caught.value.fix.startswith(f"correct it: {name} needs ")


@pytest.mark.parametrize("text", ["a\x00b", "a\x01b", "\x1b[0m", "a\ud800b", "\udfff", "\ufeffa", "a\u2028b", "a\x85b"])
def test_odd_characters_pass_in_every_format_for_the_rules_to_find(text):
    for name, record in {
        "trace": {"prompt": text, "steps": [STEP | {"content": text}], "final_answer": text},
        "prompt_completion": {"prompt": text, "completion": text},
        "messages": {"messages": [message(content=text), message("assistant", text, reasoning_content=text)]},
        "sharegpt": {"conversations": [{"from": "human", "value": text}]},
        "alpaca": {"instruction": text, "output": text},
        "gsm8k": {"question": text, "answer": f"{text}\n#### 5"},
    }.items():
        assert set(formats.to_sample(record, name, "x:1").texts) - {"5"} == {text}


def test_halves_of_a_character_that_come_together_are_one_character():
    parts = [{"type": "text", "text": "\ud83d"}, {"type": "text", "text": "\ude00"}]
    assert formats.to_sample({"messages": [message(content=parts)]}, "messages", "x:1").turns[0].text == "\U0001f600"
    assert formats.to_sample({"question": "x", "answer": "\ud83d<<1=1>>\ude00\n#### 1"}, "gsm8k", "x:1").steps == (
        "\U0001f600",
    )


# --- which format it is ----------------------------------------------------------------------------------------------


def detected(path: str, wanted: str = "auto") -> str:
    return formats.detect_format(find_dataset(path), wanted)


@parametrize("record", "names")
def test_two_readings_are_refused_with_the_word_that_chooses_each(tmp_path, record, names):
    path = write(tmp_path / "x.jsonl", record)
    with pytest.raises(InputError) as caught:
        detected(path)
    assert caught.value.problem.startswith(f"{path}:1: the keys of the record can be read as {' and as '.join(names)}")
    assert all(f"--format {name} " in caught.value.fix for name in names) and "data.format" in caught.value.fix
    assert [detected(path, name) for name in names] == names


def test_no_reading_is_refused_with_the_keys_found_and_what_each_format_needs(tmp_path):
    path = write(tmp_path / "x.jsonl", {"texts": "x", "id\ud800": 1, "messages": None})
    with pytest.raises(InputError) as caught:
        detected(path)
    assert caught.value.problem == f"{path}:1: no format fits the keys of the record: texts, id\\ud800, messages"
    assert all(f"{name}: {shape.needs}" in caught.value.fix for name, shape in formats.FORMATS.items())
    with pytest.raises(InputError, match="no format is named 'chat'"):
        detected(path, "chat")


def test_all_files_of_a_dataset_must_be_of_one_format(tmp_path):
    write(tmp_path / "a.jsonl", {"prompt": "x", "completion": "y"})
    write(tmp_path / "b.jsonl", {"messages": [message()]})
    with pytest.raises(InputError, match=r"a.jsonl:1 is prompt_completion, .*b.jsonl:1 is messages"):
        detected(str(tmp_path))


def test_a_later_record_of_another_format_is_refused_with_its_line_and_the_reading_it_would_have_had(tmp_path):
    good, other = {"question": "x", "answer": "y\n#### 5"}, {"question": "x", "answer": "five"}
    path = write(tmp_path / "x.jsonl", good, good, other)
    with pytest.raises(InputError) as caught:
        list(read_samples(find_dataset(path)))
    assert caught.value.problem == (
        f"{path}:3: answer: it does not end in a line `#### N` with a number, with or without a unit; by its keys it is "
        "prompt_completion, not gsm8k"
    )
    path = write(tmp_path / "x.jsonl", {"messages": [message()]}, {"conversations": SHARED})
    with pytest.raises(InputError, match=r"x.jsonl:2: messages: missing; by its keys it is sharegpt, not messages"):
        list(read_samples(find_dataset(path)))


def test_every_record_comes_with_its_place(tmp_path):
    path = write(tmp_path / "x.jsonl", {"prompt": "a", "completion": "b", "source": "s"}, {"input": "c", "output": "d"})
    assert list(read_samples(find_dataset(path))) == [
        (f"{path}:1", sample_of(("user", "a"), ("assistant", "b"))),
        (f"{path}:2", sample_of(("user", "c"), ("assistant", "d"))),
    ]


def test_columns_that_say_something_and_are_not_read_are_named():
    record = {"prompt": "a", "completion": "b", "input": "c", "score": 0, "none": None}
    assert formats.unused_columns(record, "prompt_completion") == ["input", "score"]
    alpaca = {"instruction": "a", "input": "", "output": "b", "system": "c", "history": [["d", "e"]], "text": "f"}
    assert formats.unused_columns(alpaca, "alpaca") == ["text"]
    for name, column in (("messages", "messages"), ("sharegpt", "conversations")):
        assert formats.unused_columns({column: [message()], "system": "a", "text": "b"}, name) == ["text"]


# --- GSM8K -----------------------------------------------------------------------------------------------------------


def test_the_marks_of_a_calculator_leave_the_sentences_and_stay_in_the_trace():
    record = {"question": "Why?", "answer": "1+2=<<1+2=3>>3\nThen <<3*2=6>>6<<6=6>>.\nYes.\n#### 6"}
    trace = formats.gsm8k_trace(record)
    assert [(step["i"], step["type"]) for step in trace["steps"]] == [(0, "compute"), (1, "compute"), (2, "state")]
    assert trace["meta"] == {"marks": [["1+2=3"], ["3*2=6", "6=6"], []]}
    assert formats.to_sample(trace, "trace", "x:1") == formats.to_sample(record, "gsm8k", "x:1")


@parametrize("last", "is_number")
def test_a_number_after_the_marks_is_gsm8k_and_a_heading_is_text(last, is_number):
    record = {"question": "Why?", "answer": f"So.\n#### {last}"}
    assert formats.readings(record) == (["gsm8k"] if is_number else ["prompt_completion"])
    if is_number:
        assert formats.to_sample(record, "gsm8k", "x:1").answer == last


@parametrize("last", "answer", "words")
def test_a_gsm8k_answer_may_have_a_full_stop_or_words_behind_its_number_as_it_is_scored(last, answer, words):
    record = {"question": "Why?", "answer": f"So.\n#### {last}"}
    assert formats.to_sample(record, "gsm8k", "x:1").answer == answer == formats.gsm8k_trace(record)["final_answer"]
    assert formats.words_behind_number(record, "gsm8k") == words
    assert formats.words_behind_number(record, "prompt_completion") is None
    assert read_quantity(bare_answer(last)) == read_quantity(answer) is not None
    assert (formats.readings(record) == ["gsm8k"]) is (words is None), (
        "words are read where the format is known, and never guessed"
    )


@pytest.mark.parametrize(
    "last",
    ["", "hours", "5 or 6", "5 and 6", "5 is it", "5 not 6", "2x", "5 x", "5 squared", "5 hours 30 minutes", "3. Results",
     "x = 5", "5 #", "1,,2", "5 one two three four five", "5 -", "5 hours or more", "²", "5..", "5 hours!?"],
)  # fmt: skip
def test_a_gsm8k_answer_without_one_number_is_refused(last):
    with pytest.raises(InputError, match=r"it does not end in a line `#### N` with a number"):
        formats.to_sample({"question": "Why?", "answer": f"So.\n#### {last}"}, "gsm8k", "x:1")


def test_a_long_line_behind_the_marks_is_read_in_reasonable_time():
    began = time.process_time()
    for last in ("1" * 500_000 + " x", "5 " + "a" * 500_000, "5 " + "ab " * 200_000, "1," * 200_000):
        with pytest.raises(InputError):
            formats.to_sample({"question": "Why?", "answer": f"So.\n#### {last}"}, "gsm8k", "x:1")
    assert time.process_time() - began < 1


def test_a_format_that_is_asked_for_by_name_is_the_one_that_is_read(tmp_path):
    """As text, marks and all: that is what was asked for."""
    record = {"question": "Why?", "answer": "1+2=<<1+2=3>>3\n#### 3"}
    path = write(tmp_path / "x.jsonl", record)
    ((_, sample),) = read_samples(find_dataset(path), "prompt_completion")
    assert sample == sample_of(("user", "Why?"), ("assistant", record["answer"]))
    assert formats.unused_columns(record, "prompt_completion") == []
    began = time.process_time()
    assert formats.readings({"question": "Why?", "answer": "So.\n#### " + "1" * 500_000 + "x"}) == ["prompt_completion"]
    assert time.process_time() - began < 1


@pytest.mark.reference
def test_all_of_gsm8k_is_read_without_a_mark_left_and_at_twenty_thousand_records_a_second():
    path = REFERENCE / "data" / "gsm8k" / "train.jsonl"
    if not path.is_file():
        pytest.skip("GSM8K is not beside this clone (../shared/data)")
    samples = [sample for _, sample in read_samples(find_dataset(str(path)))]
    assert len(samples) == 7_473
    assert not any("<<" in step or ">>" in step or "####" in step for sample in samples for step in sample.steps)
    assert all(sample.answer.replace(",", "").lstrip("-").replace(".", "", 1).isdecimal() for sample in samples)
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    began = time.process_time()
    assert all(formats.to_sample(record, "gsm8k", "x:1").steps for record in records)
    assert len(records) / (time.process_time() - began) > 20_000


@pytest.mark.parametrize("side", ["prompt", "completion"])
def test_a_turn_on_the_wrong_side_of_a_pair_is_refused_by_name_not_trained_by_surprise(side):
    user, assistant = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello!"}
    record = {"prompt": [user], "completion": [assistant]}
    assert len(formats.to_sample(record, "prompt_completion", "x:1").turns) == 2
    record[side] = [user, assistant]
    with pytest.raises(
        InputError, match=rf"x:1: {side}\.[01]: a turn of the .* in the {side}: give the chat as `messages`"
    ):
        formats.to_sample(record, "prompt_completion", "x:1")
