"""From a name to rows: the file that was meant, every line of it or none, rendered with the model's own tokenizer."""

import hashlib
import json
import shutil
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, SHIPPED
from tunix_rt.data.registry import find_dataset, find_evalset, read_items, read_traces
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.data.trace import EvalItem, Trace, read_records
from tunix_rt.errors import InputError


def record(number=0, **changed):
    step = {"i": 0, "type": "compute", "content": f"{number} + 1 = {number + 1}"}
    return {"prompt": f"What is {number} + 1?", "steps": [step], "final_answer": str(number + 1), **changed}


def write_lines(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED)


# --- records ---------------------------------------------------------------------------------------------------------


def test_every_line_becomes_a_record_in_order(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(5)))
    assert [trace.final_answer for trace in read_records(path, Trace)] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n\n", "\n  \n"])
def test_line_endings_and_blank_lines_at_the_end_do_not_matter(tmp_path, ending):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(record(1)) + "\n" + json.dumps(record(2)) + ending, encoding="utf-8", newline="")
    assert len(read_records(path, Trace)) == 2


def test_a_byte_order_mark_is_not_part_of_the_first_record(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(record()) + "\n", encoding="utf-8-sig")
    assert read_records(path, Trace)[0].prompt == "What is 0 + 1?"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \t"}, "prompt: blank text"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a\x00b"}, "prompt: a NUL"),
        ({"final_answer": 42}, "final_answer"),
        ({"final_answer": None}, "final_answer"),
        ({"steps": []}, "steps"),
        ({"steps": "because"}, "steps"),
        ({"steps": [{"i": 1, "type": "fact", "content": "x"}]}, "not 0 to 0"),
        ({"steps": [{"i": 0, "type": "fact", "content": "x"}] * 2}, r"numbered \[0, 0\]"),
        ({"steps": [{"i": "0", "type": "fact", "content": "x"}]}, r"steps\.0\.i"),
        ({"steps": [{"i": False, "type": "fact", "content": "x"}]}, r"steps\.0\.i"),
        ({"steps": [{"i": 0, "type": "fact"}]}, r"steps\.0\.content"),
        ({"steps": [{"i": 0, "type": "fact", "content": "x", "text": "y"}]}, r"steps\.0\.text"),
        ({"answer": "5"}, "answer"),
        ({"meta": []}, "meta"),
        ({"id": ""}, "id"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_file_and_line(tmp_path, changed, words):
    path = write_lines(tmp_path / "x.jsonl", record(0), record(1), record(2, **changed))
    with pytest.raises(InputError, match=words) as caught:
        read_records(path, Trace)
    assert caught.value.exit_code == 3
    assert caught.value.problem.startswith(f"{path}:3: ")
    assert "correct line 3" in caught.value.fix


def test_a_number_too_long_to_show_is_not_shown(tmp_path):
    """A message of megabytes is no message."""
    for changed in ({"steps": [{"i": 10**4000, "type": "x", "content": "x"}]}, {"k" * 500_000: 1}):
        path = write_lines(tmp_path / "x.jsonl", record(0, **changed))
        with pytest.raises(InputError) as caught:
            read_records(path, Trace)
        assert len(str(caught.value)) < 2_000


# --- datasets and eval sets ------------------------------------------------------------------------------------------


def test_the_shipped_dataset_and_eval_set_are_found_by_their_keys_and_match_their_manifests():
    dataset = find_dataset("dev-reasoning-v2")
    assert dataset.path == ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl"
    assert dataset.sha256 == hashlib.sha256(dataset.path.read_bytes()).hexdigest()
    assert len(read_traces(dataset)) == 550
    assert len(read_items(find_evalset("eval_v2"))) >= 100


def test_a_path_is_a_dataset_too_and_the_working_folder_comes_before_what_is_shipped(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "mine.jsonl", record())
    assert find_dataset(str(path)).path == path
    own = tmp_path / "datasets" / "dev-reasoning-v2"
    own.mkdir(parents=True)
    write_lines(own / "dataset.jsonl", record())
    monkeypatch.chdir(tmp_path)
    assert find_dataset("dev-reasoning-v2").path == own / "dataset.jsonl"
    assert find_dataset("mine.jsonl").sha256 == find_dataset("dev-reasoning-v2").sha256


@pytest.mark.parametrize("key", ["dev-reasoning-v3", "no/such.jsonl", "~nobody-of-that-name/x", "x" * 300, "a\x00b"])
def test_a_dataset_that_is_not_there_is_refused_with_those_that_are(key):
    with pytest.raises(InputError, match="no dataset named") as caught:
        find_dataset(key)
    assert "dev-reasoning-v2" in caught.value.fix


def test_a_folder_without_a_dataset_in_it_is_refused_by_name(tmp_path):
    with pytest.raises(InputError) as caught:
        find_dataset(str(tmp_path))
    assert str(tmp_path) in caught.value.problem


def test_a_dataset_that_no_longer_matches_its_manifest_is_refused(tmp_path):
    folder = shutil.copytree(ROOT / "datasets" / "dev-reasoning-v2", tmp_path / "changed")
    assert find_dataset(str(folder)).path == folder / "dataset.jsonl"
    with (folder / "dataset.jsonl").open("a") as file:
        file.write(json.dumps(record()) + "\n")
    with pytest.raises(InputError, match="not the file its manifest speaks of"):
        find_dataset(str(folder))


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"sha256": 5}', '{"sha256": null}', "[" * 100_000, "\x00"])
def test_a_damaged_manifest_is_refused_by_name(tmp_path, manifest):
    write_lines(tmp_path / "dataset.jsonl", record())
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(InputError, match=r"manifest"):
        find_dataset(str(tmp_path))


def test_an_eval_set_that_uses_an_id_twice_is_refused_with_the_line(tmp_path):
    item = {"id": "a", "prompt": "?", "answer": "1", "section": "s"}
    path = write_lines(tmp_path / "e.jsonl", item, item | {"id": "b"}, item)
    with pytest.raises(InputError, match=r"e\.jsonl:3: id 'a' is used twice"):
        read_items(find_evalset(str(path)))
    assert read_records(write_lines(path, item), EvalItem)[0].category == "none"


def test_twenty_thousand_questions_are_read_in_a_moment(tmp_path):
    item = {"prompt": "?", "answer": "1", "section": "s"}
    ref = find_evalset(str(write_lines(tmp_path / "e.jsonl", *(item | {"id": str(n)} for n in range(20_000)))))
    started = time.process_time()
    assert len(read_items(ref)) == 20_000
    assert time.process_time() - started < 1.5, "by comparing every id with every other it takes seconds"


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def tokenizer_folder(tmp_path, *, config=None, tokenizer_config=None):
    shutil.copyfile(SHIPPED / "tokenizer.json", tmp_path / "tokenizer.json")
    for name, content in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_the_shipped_tokenizer_begins_with_bos_and_knows_its_special_ids(tokenizer):
    assert (tokenizer.prefix, tokenizer.eos_id, tokenizer.pad_id) == ((2,), 1, 0)
    assert tokenizer.vocab_size <= json.loads((SHIPPED / "config.json").read_text())["vocab_size"]
    assert tokenizer.sha256 == hashlib.sha256((SHIPPED / "tokenizer.json").read_bytes()).hexdigest()


@pytest.mark.parametrize("text", ["", "Tom has 12 pens.", " two  spaces\n\ttab", "é 日本 😀 ½", "\u2028"])
def test_text_survives_encode_and_decode_and_nothing_is_added(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & set(ids)


def test_special_ids_come_from_config_json_where_the_tokenizer_does_not_name_them(tmp_path):
    folder = tokenizer_folder(tmp_path, config={"eos_token_id": [1, 106], "bos_token_id": 2})
    loaded = load_tokenizer(folder)
    assert (loaded.eos_id, loaded.prefix) == (1, (2,))
    assert loaded.pad_id == loaded.eos_id, "without a padding token, end-of-sequence pads"


def test_a_token_may_be_named_by_an_object(tmp_path):
    folder = tokenizer_folder(tmp_path, tokenizer_config={"eos_token": {"content": "<eos>", "lstrip": False}})
    assert load_tokenizer(folder).eos_id == 1


def post_processed(tmp_path, *, single):
    """The shipped tokenizer with another post-processor and no named beginning."""
    folder = tokenizer_folder(tmp_path, tokenizer_config={"eos_token": "<eos>"})
    raw = json.loads((folder / "tokenizer.json").read_text())
    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in (("<bos>", 2), ("<eos>", 1))}
    raw["post_processor"] = single and {
        "type": "TemplateProcessing",
        "single": [{"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}} for name in single],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": special,
    }
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("single", "prefix"),
    [
        (["<bos>", "A"], (2,)),
        (["<bos>", "A", "<eos>"], (2,)),
        (["A", "<eos>"], ()),
        (["<eos>", "<bos>", "A"], (1, 2)),
        (None, ()),
    ],
)
def test_the_prefix_is_what_the_tokenizer_itself_puts_before_a_text(tmp_path, single, prefix):
    assert post_processed(tmp_path, single=single).prefix == prefix


def test_a_padding_token_without_a_row_in_the_table_beside_it_is_replaced_by_the_end(tmp_path):
    """Many published tokenizers were given a padding token after their model was trained."""
    named = {"eos_token": "<eos>", "pad_token": "<bos>"}
    assert load_tokenizer(tokenizer_folder(tmp_path, config={"vocab_size": 3}, tokenizer_config=named)).pad_id == 2
    assert load_tokenizer(tokenizer_folder(tmp_path, config={"vocab_size": 2}, tokenizer_config=named)).pad_id == 1


def test_a_defect_of_ours_is_not_called_a_bad_tokenizer(tmp_path, monkeypatch):
    def defect(text):
        raise TypeError("not about the file")

    monkeypatch.setattr("tokenizers.Tokenizer.from_str", defect, raising=True)
    with pytest.raises(TypeError, match="not about the file"):
        load_tokenizer(tokenizer_folder(tmp_path))


@pytest.mark.parametrize("number", [-1, 10**6, 10**30, 2.5, "1", None, [], [[1]], True])
def test_an_id_that_is_no_token_counts_as_not_named(tmp_path, number):
    """`pad_token_id: -1` is what many published configurations say."""
    folder = tokenizer_folder(tmp_path, config={"eos_token_id": 1, "pad_token_id": number})
    assert load_tokenizer(folder).pad_id == 1
    folder = tokenizer_folder(tmp_path, config={"eos_token_id": number})
    with pytest.raises(InputError, match="names no end-of-sequence token"):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b"\xff", b'{"model": 5}'])
def test_a_folder_without_a_usable_tokenizer_is_refused_by_name(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in caught.value.problem


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_torn_file_beside_the_tokenizer_is_refused_by_name(tmp_path, name):
    folder = tokenizer_folder(tmp_path, tokenizer_config={}, config={})
    (folder / name).write_text("{")
    with pytest.raises(InputError, match=rf"{name} cannot be read"):
        load_tokenizer(folder)
