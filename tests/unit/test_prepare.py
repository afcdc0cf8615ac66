"""The data stage in one call: what is held out, what is refused and why, and what the counts say."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tokenizers

from tests.samples import record, write_lines
from tests.stores import quiet
from tunix_rt.config.load import build_config
from tunix_rt.data.packing import facts_of_rows
from tunix_rt.data.prepare import ModelFacts, prepare
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.errors import InputError


def settings(path, **changed):
    return build_config({"dataset": str(path), "max_length": 64, "validation_fraction": 0.2, **changed}, "test")


def facts(tokenizer, **limits):
    return ModelFacts(**{"vocabulary": tokenizer.vocab_size, "positions": 512, **limits})


def ready(config, tokenizer, **limits):
    return prepare(config, tokenizer, facts(tokenizer, **limits), quiet)


@pytest.fixture
def with_one_long_line(tmp_path):
    """Ten traces; the one on line 7 is longer than 64 tokens."""
    records = [record(n) for n in range(10)]
    records[6]["final_answer"] = "1 2 3 4 5 " * 20
    return write_lines(tmp_path / "x.jsonl", *records)


def test_a_trace_that_is_too_long_is_refused_with_its_line_in_the_file(with_one_long_line, tokenizer):
    for seed in range(5):  # whatever is held out, the line is that of the file
        with pytest.raises(InputError, match=r"too_long: 1 x .* max_length is 64") as caught:
            ready(settings(with_one_long_line, data_seed=seed), tokenizer)
        assert f"{with_one_long_line}:7" in caught.value.problem
        assert "data.on_overflow" in caught.value.fix


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("mode", "counted"), [("drop", "1 dropped"), ("truncate", "1 truncated")])
def test_what_is_dropped_or_cut_is_counted_and_said_held_out_or_not(with_one_long_line, tokenizer, mode, counted, seed):
    config = settings(with_one_long_line, data_seed=seed, on_overflow=mode)
    data = ready(config, tokenizer)
    assert counted in data.describe()
    assert (data.dropped, data.truncated) == ((1, 0) if mode == "drop" else (0, 1))
    assert data.traces + data.heldout_traces == 10 - data.dropped
    assert data.describe().startswith(f"{with_one_long_line}: {data.traces} training traces, 2 held out; ")
    assert (data.heldout_traces, len(data.items)) == (2, 2), "what was dropped takes no place among the held out"
    assert (sum((row.positions == 0).sum() for row in data.rows), len(data.heldout_rows)) == (data.traces, 2)
    assert all(len(row.ids) <= 64 for row in (*data.rows, *data.heldout_rows))


def test_a_truncated_trace_that_has_lost_its_whole_completion_is_refused_with_its_line(tmp_path, tokenizer):
    records = [record(n) for n in range(10)]
    records[3]["prompt"] = "1 2 3 4 5 " * 20
    path = write_lines(tmp_path / "x.jsonl", *records)
    for seed in range(5):
        with pytest.raises(InputError, match=r"no_target: 1 x .*after truncation to 64") as caught:
            ready(settings(path, on_overflow="truncate", data_seed=seed), tokenizer)
        assert f"{path}:4" in caught.value.problem


def test_when_every_trace_is_too_long_nothing_is_left_to_train_on(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(3)))
    with pytest.raises(InputError, match="no trace is left"):
        ready(settings(path, max_length=8, on_overflow="drop"), tokenizer)


def test_held_out_traces_are_never_trained_on_and_asked_when_no_eval_set_is_named(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(20)))
    data = ready(settings(path, packing=False), tokenizer)
    assert (data.traces, data.heldout_traces, len(data.heldout_rows), len(data.items)) == (16, 4, 4, 4)
    trained = {tuple(row.ids.tolist()) for row in data.rows}
    assert len(trained) == 16
    assert not trained & {tuple(row.ids.tolist()) for row in data.heldout_rows}
    questions = {item.prompt for item in data.items}
    texts = {tokenizer.decode(row.ids.tolist()).split("\n")[0] for row in data.heldout_rows}
    assert questions == texts


def test_what_is_held_out_depends_on_the_data_seed_alone(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(40)))

    def chosen(**seeds):
        return [item.prompt for item in ready(settings(path, **seeds), tokenizer).items]

    assert chosen(seed=1, data_seed=7) == chosen(seed=2, data_seed=7)
    assert chosen(seed=7) == chosen(data_seed=7, seed=1)
    assert chosen(data_seed=7) != chosen(data_seed=8)
    assert chosen(data_seed=0, seed=5) == chosen(data_seed=0, seed=6), "0 is a seed, not the lack of one"


def test_nothing_held_out_and_no_eval_set_is_refused_unless_evaluation_is_off(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", record(0), record(1))
    with pytest.raises(InputError, match="nothing to evaluate: "):
        ready(settings(path, validation_fraction=0), tokenizer)
    off = settings(path, validation_fraction=0, evaluation={"enabled": False})
    assert ready(off, tokenizer).items == ()
    named = settings(path, validation_fraction=0, evaluation={"evalset": "eval_v2"})
    assert len(ready(named, tokenizer).items) >= 100


def test_a_tokenizer_of_another_model_is_refused_before_the_model_is_loaded(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", record(0), record(1))
    with pytest.raises(InputError, match="the embedding of the model has 100 rows"):
        ready(settings(path), tokenizer, vocabulary=100)


def test_the_hash_of_the_rows_notices_one_other_character(tmp_path, tokenizer):
    evaluation = {"evaluation": {"enabled": False}, "validation_fraction": 0}
    one = write_lines(tmp_path / "a.jsonl", record(0), record(1))
    other = write_lines(tmp_path / "b.jsonl", record(0), record(1, final_answer="3"))
    first = ready(settings(one, **evaluation), tokenizer)
    again = ready(settings(one, **evaluation), tokenizer)
    changed = ready(settings(other, **evaluation), tokenizer)
    assert first.merkle_root == again.merkle_root != changed.merkle_root
    assert first.merkle_root == facts_of_rows(first.rows).merkle_root
    assert first.tokens == sum(len(row.ids) for row in first.rows)
    assert 0 < first.trained_tokens < first.tokens
    assert all(row.ids.dtype == np.int32 for row in first.rows)


# --- what the model can be given -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
def test_an_example_beyond_the_positions_of_the_model_is_refused_with_its_line(with_one_long_line, tokenizer, packing):
    config = settings(with_one_long_line, max_length=512, packing=packing)
    with pytest.raises(InputError, match="the model has 64") as caught:
        ready(config, tokenizer, positions=64)
    assert caught.value.exit_code == 3
    assert f"first {with_one_long_line}:7: " in caught.value.problem
    rows = ready(config, tokenizer, positions=512).rows
    if packing:
        assert max(len(row.ids) for row in rows) > 64
    dropping = settings(with_one_long_line, max_length=64, on_overflow="drop", packing=packing)
    assert ready(dropping, tokenizer, positions=64).dropped == 1


@pytest.mark.parametrize("seed", range(8))
def test_traces_of_one_prompt_are_on_one_side(tmp_path, tokenizer, seed):
    """The second trace of a question, trained on, would give away the answer to the first."""
    records = [record(n % 10, final_answer=str(n)) for n in range(38)] + [record(9, prompt="What  is\t9 + 1? ")]
    path = write_lines(tmp_path / "x.jsonl", *records)
    data = ready(settings(path, data_seed=seed, packing=False, completion_only_loss=False), tokenizer)
    trained = {" ".join(tokenizer.decode(row.ids.tolist()).split("<reason")[0].split()) for row in data.rows}
    questions = {" ".join(item.prompt.split()) for item in data.items}
    assert len(trained) + len(questions) == 10
    assert not trained & questions
    assert 6 <= data.heldout_traces == len(data.items) <= 8, "a fifth of 39, in groups of 3 or 4"
    assert data.traces == len(data.rows) == 39 - data.heldout_traces


def test_where_every_question_is_asked_often_the_rarest_is_held_out(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *[record(0)] * 6, *[record(1)] * 4)
    assert ready(settings(path), tokenizer).heldout_traces == 4
    alone = settings(write_lines(path, *[record(0)] * 6), evaluation={"enabled": False})
    assert (ready(alone, tokenizer).traces, ready(alone, tokenizer).heldout_traces) == (6, 0)


def test_an_evaluation_question_that_is_trained_on_is_refused_with_count_and_line(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(10)))
    questions = [{"id": str(n), "prompt": f"What is {n} + 2?", "answer": "?", "section": "s"} for n in range(3)]
    known = [{**questions[0], "id": f"known {n}", "prompt": f" what is  {n} + 1\n"} for n in (4, 6)]
    evalset = write_lines(tmp_path / "e.jsonl", *questions, *known)
    with pytest.raises(InputError, match=r"overlap_normalised: 2 x a training prompt") as caught:
        ready(settings(path, validation_fraction=0, evalset=str(evalset)), tokenizer)
    assert f"first {path}:5: {evalset}:4 shares " in caught.value.problem
    assert "evaluation.evalset" in caught.value.fix
    clean = settings(path, validation_fraction=0, evalset=str(write_lines(evalset, *questions)))
    assert len(ready(clean, tokenizer).items) == 3


@pytest.fixture
def letter_by_letter(tmp_path):
    """A tokenizer in which every letter is a token and `é` is the last one, so that a text can avoid the highest id."""
    text = "".join(json.dumps(record(n)) for n in range(2)) + "?\n" + "<reasoning></reasoning><answer></answer>"
    letters = ["<eos>", *sorted(set(text)), "é"]
    model = tokenizers.models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="<eos>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    (tmp_path / "letters").mkdir()
    inner.save(str(tmp_path / "letters" / "tokenizer.json"))
    (tmp_path / "letters" / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return load_tokenizer(tmp_path / "letters")


def given_to_the_model(path, tokenizer, **changed):
    return settings(path, max_length=256, **changed), tokenizer


def test_no_id_beyond_the_table_reaches_the_model_by_any_way(tmp_path, letter_by_letter):
    table = letter_by_letter.vocab_size - 1
    assert letter_by_letter.encode("é") == [table]
    plain = write_lines(tmp_path / "x.jsonl", record(0), record(1))
    strange = write_lines(tmp_path / "y.jsonl", record(0), record(1, final_answer="é"))
    questions = write_lines(tmp_path / "e.jsonl", {"id": "a", "prompt": "é", "answer": "?", "section": "s"})
    ready(*given_to_the_model(plain, letter_by_letter), vocabulary=table)
    ways = {
        "a question": given_to_the_model(plain, letter_by_letter, evalset=str(questions)),
        "padding": given_to_the_model(plain, replace(letter_by_letter, pad_id=table)),
        "the end": given_to_the_model(plain, replace(letter_by_letter, eos_id=table)),
        "the instruction": given_to_the_model(plain, letter_by_letter, system_instruction="é"),
    }
    for seed in range(4):  # on either side
        ways[f"a trace, seed {seed}"] = given_to_the_model(strange, letter_by_letter, data_seed=seed)
    for way, (config, tokenizer) in ways.items():
        with pytest.raises(InputError, match=rf"id {table}\b.*; the embedding of the model has {table} rows"):
            pytest.fail(f"{way}: {ready(config, tokenizer, vocabulary=table).describe()}")


# --- what is counted -------------------------------------------------------------------------------------------------


def test_rows_their_fill_and_their_hash_are_of_all_rows(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(40)))
    data = ready(settings(path), tokenizer)
    assert len(data.rows) > 5
    lengths = [len(row.ids) for row in data.rows]
    assert data.fill == pytest.approx(sum(lengths[:-1]) / (len(lengths) - 1) / 64)
    assert (
        data.merkle_root
        == facts_of_rows(list(data.rows)).merkle_root
        != facts_of_rows(list(data.rows)[:-1]).merkle_root
    )
    assert data.tokens == sum(lengths)
    assert data.trained_tokens == sum(int(row.trained.sum()) for row in data.rows)


def test_the_longest_row_may_be_a_held_out_one(tmp_path, tokenizer):
    records = [record(n) for n in range(4)]
    records[1]["final_answer"] = "1 2 3 4 5 6 7 8"
    path = write_lines(tmp_path / "x.jsonl", *records)
    longest = set()
    for seed in range(12):
        data = ready(settings(path, data_seed=seed, packing=False), tokenizer)
        rows = [len(row.ids) for row in (*data.rows, *data.heldout_rows)]
        assert data.longest_row == max(rows)
        longest.add(data.longest_row > max(len(row.ids) for row in data.rows))
    assert longest == {True, False}, "both sides were tried"


def test_of_a_cut_example_only_what_is_left_is_counted_as_trained(with_one_long_line, tokenizer):
    for seed in range(5):
        data = ready(settings(with_one_long_line, data_seed=seed, on_overflow="truncate"), tokenizer)
        assert data.trained_tokens == sum(int(row.trained.sum()) for row in data.rows)


def test_of_very_many_held_out_questions_an_even_part_is_asked(tmp_path, tokenizer, monkeypatch, caplog):
    monkeypatch.setattr("tunix_rt.data.prepare.MOST_HELDOUT", 4)
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(40)))
    data = ready(settings(path), tokenizer)
    assert (data.heldout_traces, len(data.items)) == (8, 4)
    assert "Evaluation uses 4 of 8 held-out questions" in caplog.text


def test_one_question_asked_over_and_over_holds_nothing_out_and_says_so(tmp_path, tokenizer, caplog):
    path = write_lines(tmp_path / "x.jsonl", *(record(0, final_answer=str(n)) for n in range(5)))
    assert ready(settings(path, evaluation={"enabled": False}), tokenizer).heldout_traces == 0
    assert "No example is held out: all records have the same question" in caplog.text


def test_chats_can_be_held_out_but_not_asked(tmp_path, tokenizer):
    turns = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Ho."},
    ]
    chats = [{"messages": [*turns[:1], {"role": "user", "content": f"Hi {n}?"}, *turns[2:]]} for n in range(10)]
    path = write_lines(tmp_path / "x.jsonl", *chats)
    with pytest.raises(InputError, match=r"none of the 2 held-out records is one question with one answer"):
        ready(settings(path), tokenizer)
    assert len(ready(settings(path, evaluation={"enabled": False}), tokenizer).heldout_rows) == 2


def test_a_tagged_completion_is_asked_for_the_answer_in_its_tag(tmp_path, tokenizer):
    records = [{"prompt": f"{n} + 1?", "completion": f"<answer> {n + 1} </answer>"} for n in range(10)]
    data = ready(settings(write_lines(tmp_path / "x.jsonl", *records)), tokenizer)
    assert {(item.prompt, item.answer) for item in data.items} <= {(f"{n} + 1?", str(n + 1)) for n in range(10)}
    assert len(data.items) == 2


def test_training_on_the_questions_too_is_said(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(5)))
    assert "; loss on the prompts too" in ready(settings(path, completion_only_loss=False), tokenizer).describe()
    assert "prompts too" not in ready(settings(path), tokenizer).describe()


# --- own data --------------------------------------------------------------------------------------------------------


def pair(number: int) -> dict[str, str]:
    return {"Problem": f"How much is {number} and one?", "Solution": f"<answer>{number + 1}</answer>"}


COLUMNS = {"question": "problem", "answer": "SOLUTION"}


def test_several_datasets_are_read_in_order_and_the_validation_file_is_held_out_whole(tmp_path, tokenizer):
    first = write_lines(tmp_path / "a.jsonl", *map(pair, range(6)))
    (tmp_path / "more").mkdir()
    write_lines(tmp_path / "more" / "b.jsonl", *map(pair, range(6, 10)))
    held = write_lines(tmp_path / "dev.jsonl", *map(pair, range(20, 23)))
    names = [str(first), str(tmp_path / "more")]
    data = ready(settings(first, dataset=names, validation=str(held), columns=COLUMNS), tokenizer)
    assert (data.traces, data.heldout_traces, len(data.heldout_rows)) == (10, 3, 3)
    assert [item.answer for item in data.items] == ["21", "22", "23"]
    assert data.dataset.key == ", ".join(names) and f"3 held out ({held})" in data.describe()
    again = ready(settings(first, dataset=names[::-1], validation=str(held), columns=COLUMNS), tokenizer)
    assert again.dataset.sha256 != data.dataset.sha256
    write_lines(held, pair(3), pair(20))
    with pytest.raises(InputError, match=rf"in_validation: 1 x .*; first {first}:4: the question of {held}:1"):
        ready(settings(first, dataset=names, validation=str(held), columns=COLUMNS), tokenizer)


def test_a_misspelt_column_is_refused_with_the_nearest_one(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", *map(pair, range(6)))
    with pytest.raises(InputError, match="'quesion' is no column of a format") as caught:
        ready(settings(path, columns={"quesion": "problem"}), tokenizer)
    assert caught.value.fix == "did you mean `question`?"


def test_the_first_records_are_taken_and_those_behind_them_are_not_even_checked(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", *map(pair, range(8)), {"Problem": 5})
    data = ready(settings(path, max_examples=8, columns=COLUMNS), tokenizer)
    alone = ready(settings(write_lines(tmp_path / "b.jsonl", *map(pair, range(8))), columns=COLUMNS), tokenizer)
    assert data.traces + data.heldout_traces == 8 and data.merkle_root == alone.merkle_root
    with pytest.raises(InputError, match="wrong_field: 1 x"):
        ready(settings(path, max_examples=9, columns=COLUMNS), tokenizer)


def test_bad_records_are_left_out_when_asked_and_the_rest_trains_as_if_they_were_not_there(tmp_path, tokenizer, caplog):
    good = [record(n) for n in range(10)]
    orphan = record(30, prompt="Why?", steps=[{"i": 0, "type": "fact", "content": "</reasoning>"}])
    path = write_lines(tmp_path / "a.jsonl", *good[:5], {"prompt": "?"}, orphan, *good[5:])
    clean = ready(settings(write_lines(tmp_path / "b.jsonl", *good)), tokenizer)
    data = ready(settings(path, skip_bad=True), tokenizer)
    assert (data.skipped, data.merkle_root, data.items) == (2, clean.merkle_root, clean.items)
    assert "2 of 12 records skipped: wrong_field 1, orphan_tag 1" in caplog.text
    assert data.describe().endswith("2 bad records skipped")
    with pytest.raises(InputError, match="wrong_field: 1 x") as caught:
        ready(settings(write_lines(path, {"prompt": "?"}), skip_bad=True, format="trace"), tokenizer)
    assert "skip" not in caught.value.fix  # it is what was done


def test_every_token_of_a_plain_text_is_a_target_but_the_first(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("It rains.\nStill.\n\nThe sun <eos> shines.\n\n\nSnow.\n", encoding="utf-8")
    config = build_config({"dataset": str(tmp_path / "a.txt"), "validation_fraction": 0, "packing": False,
                           "evaluation": {"enabled": False}, "system_instruction": "Be brief."}, "test")  # fmt: skip
    data = ready(config, tokenizer)
    texts = [tokenizer.inner.decode(row.ids.tolist(), skip_special_tokens=False) for row in data.rows]
    assert texts[0] == "<bos>It rains.\nStill.<eos>" and len(texts) == 3
    assert all(row.trained.tolist() == [False] + [True] * (len(row.ids) - 1) for row in data.rows)
    assert tokenizer.eos_id not in data.rows[1].ids[1:-1], "a control token in a text stays text"
    assert "plain texts: no template, every token is a target" in data.describe()
