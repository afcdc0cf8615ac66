"""From a name to records: the files that were meant, every record of them or none; and the model's own tokenizer."""

import csv
import gzip
import hashlib
import io
import json
import os
import re
import resource
import shutil
import sys
import time
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT, SHIPPED
from tests.samples import record, write_lines
from tests.tables import parametrize
from tunix_rt.data.containers import MAX_DOCUMENT_BYTES
from tunix_rt.data.file_kinds import recognise
from tunix_rt.data.readers import pack_line, parse, read_raw, unpack_line
from tunix_rt.data.records import EvalItem, Trace, read_records
from tunix_rt.data.sources import find_dataset, find_evalset, read_items
from tunix_rt.data.splits import split_of
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.errors import InputError, StorageError


def rows_of(name) -> list[dict]:
    """Every record of a dataset."""
    dataset = find_dataset(str(name))
    return [parse(raw, dataset.place(raw.file, raw.line)) for raw in read_raw(dataset)]


def refused(name) -> InputError:
    with pytest.raises(InputError) as caught:
        rows_of(name)
    assert caught.value.exit_code == 3
    return caught.value


# --- records of our own ----------------------------------------------------------------------------------------------


def test_every_line_becomes_a_record_in_order(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", *(record(n) for n in range(5)))
    assert [trace.final_answer for trace in read_records(path, Trace)] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n\n", "\n  \n"])
def test_a_byte_order_mark_line_endings_and_blank_lines_at_the_end_do_not_matter(tmp_path, ending, encoding):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(record(0)) + "\n" + json.dumps(record(2)) + ending, encoding=encoding, newline="")
    assert [trace.prompt for trace in read_records(path, Trace)] == ["What is 0 + 1?", "What is 2 + 1?"]


@parametrize("changed", "words")
def test_a_field_that_is_wrong_is_named_with_file_and_line(tmp_path, changed, words):
    path = write_lines(tmp_path / "x.jsonl", record(0), record(1), record(2, **changed))
    with pytest.raises(InputError, match=words) as caught:
        read_records(path, Trace)
    assert caught.value.exit_code == 3
    assert caught.value.problem.startswith(f"{path}:3: ")
    assert "correct line 3" in caught.value.fix


def test_odd_characters_in_a_trace_are_left_to_the_rules_and_refused_in_an_eval_item(tmp_path):
    odd = "a\x00b\ud800c"
    path = write_lines(tmp_path / "x.jsonl", record(prompt=odd, id=odd, meta={odd: odd}))
    assert read_records(path, Trace)[0].prompt == odd
    item = {"id": "a", "prompt": "?", "answer": "1", "section": "s"}
    for text, words in (("a\ud800", "half of a surrogate pair"), ("a\x00", "a NUL")):
        with pytest.raises(InputError, match=f"e.jsonl:1: prompt: {words}"):
            read_records(write_lines(tmp_path / "e.jsonl", item | {"prompt": text}), EvalItem)


def test_a_number_too_long_to_show_is_not_shown(tmp_path):
    """A message of megabytes is no message."""
    for changed in ({"steps": [{"i": 10**4000, "type": "x", "content": "x"}]}, {"k" * 500_000: 1}):
        path = write_lines(tmp_path / "x.jsonl", record(0, **changed))
        with pytest.raises(InputError) as caught:
            read_records(path, Trace)
        assert len(str(caught.value)) < 2_000


# --- containers ------------------------------------------------------------------------------------------------------

ROWS = [record(n, meta={"x": n}) for n in range(5)]


def as_jsonl(rows=ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows=ROWS, **columns) -> bytes:
    table = pa.Table.from_pylist(rows)
    for name, column in columns.items():
        table = table.append_column(name, column)
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=2, write_page_checksum=True)
    return file.getvalue()


CONTAINERS = {
    "jsonl": as_jsonl(),
    "json": json.dumps(ROWS).encode(),
    "json, indented": json.dumps(ROWS, indent=2).encode("utf-8-sig"),
    "json in an object": json.dumps(
        {"version": "1", "tags": ["x", "y"], "n": {"a": [{}]}, "data": ROWS, "end": 1}
    ).encode(),
    "json in an object, one line each": b'{"rows": [\n' + b",\n".join(as_jsonl().splitlines()) + b"\n]}\n",
    "parquet": as_parquet(),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_is_known_by_its_content_whatever_its_name(tmp_path, name, packed):
    path = tmp_path / "data.txt"
    path.write_bytes(gzip.compress(CONTAINERS[name]) if packed else CONTAINERS[name])
    assert recognise(path) == (name.split(",")[0].split()[0], packed)
    assert rows_of(path) == ROWS
    dataset = find_dataset(str(path))
    assert (dataset.files[0].gzip, dataset.files[0].bytes) == (packed, path.stat().st_size)


def test_a_record_is_found_again_by_the_line_where_it_begins(tmp_path):
    def places(content: bytes) -> list[str]:
        (tmp_path / "x").write_bytes(content)
        dataset = find_dataset(str(tmp_path / "x"))
        return [dataset.place(raw.file, raw.line).removeprefix(str(tmp_path / "x")) for raw in read_raw(dataset)]

    indented = CONTAINERS["json, indented"]
    begins = [number for number, line in enumerate(indented.splitlines(), 1) if line == b"  {"]
    assert places(CONTAINERS["jsonl"]) == [f":{n}" for n in range(1, 6)]
    assert places(indented) == [f":{line} (record {n})" for n, line in enumerate(begins, 1)]
    assert places(CONTAINERS["json in an object"]) == [f":1 (record {n})" for n in range(1, 6)]
    assert places(CONTAINERS["json in an object, one line each"]) == [f":{n + 1} (record {n})" for n in range(1, 6)]
    assert places(CONTAINERS["parquet"]) == [f" row {n}" for n in range(1, 6)]


def test_line_and_record_of_the_largest_document_fit_into_one_stored_number():
    largest = (MAX_DOCUMENT_BYTES, MAX_DOCUMENT_BYTES // 2)
    assert unpack_line(pack_line(*largest)) == largest
    assert pack_line(*largest) < 2**63
    assert unpack_line(12) == (12, 0)


def test_one_line_that_is_one_record_is_jsonl_and_one_line_around_records_is_json(tmp_path):
    for content, container in (
        (b'{"messages": [{"role": "user", "content": "x"}]}', "jsonl"),
        (b'{"id": 1, "conversations": [{"from": "gpt", "value": "x"}]}\n', "jsonl"),
        (b'{"dialog": [{"a": 1}]}\n{"dialog": [{"a": 1}]}', "jsonl"),
        (b'{"data": [{"prompt": "x", "completion": "y"}]}', "json"),
        (b'{"data": [{"prompt": "' + b"x" * 2_000_000, "json"),
        (b'{"prompt": "' + b"x" * 2_000_000, "jsonl"),
        (b"{" + b'"a":' * 100_000, "jsonl"),
        (b'{"a":' * 100_000, "jsonl"),
        (b"", "jsonl"),
    ):
        (tmp_path / "x").write_bytes(content)
        assert recognise(tmp_path / "x") == (container, False), content[:50]


@parametrize("content", "words")
def test_a_document_that_is_not_one_list_of_records_is_refused_with_the_line(tmp_path, content, words):
    path = tmp_path / "x.json"
    path.write_bytes(content.encode("latin-1"))
    assert f"{path}{words}" in refused(path).problem
    path.write_bytes(b"[" * 100_000)
    assert f"{path}:1: not JSON" in refused(path).problem


def test_a_document_too_large_to_hold_is_refused_with_the_way_out(tmp_path, monkeypatch):
    assert MAX_DOCUMENT_BYTES == 512_000_000
    monkeypatch.setattr("tunix_rt.data.containers.MAX_DOCUMENT_BYTES", 1_000)
    (tmp_path / "x.json").write_bytes(b"[" + b" " * 2_000)
    error = refused(tmp_path / "x.json")
    assert "over 1,000 bytes" in error.problem and "JSONL" in error.fix


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04" + bytes(60), "a zip archive"),
        (b"\x28\xb5\x2f\xfd" + bytes(60), "zstd"),
        (gzip.compress(b"ARROW1\0\0" + bytes(60), mtime=0), "an Arrow file"),
        (b"PAR1" + bytes(60), "corrupt Parquet"),
        (CONTAINERS["parquet"][:-100], "corrupt Parquet"),
        (CONTAINERS["parquet"].replace(b"What is 0", b"What is 7", 1), "corrupt Parquet"),
        (as_parquet([{}] * 3), "has no columns"),
        (as_parquet(prompt=pa.array(["x"] * 5)), "has a column twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert f"{path}" in (refusal := refused(path).problem) and words in refusal


def test_torn_gzip_is_refused_at_the_line_that_is_missing(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    content = gzip.compress(as_jsonl())
    path.write_bytes(content[:-4])
    assert refused(path).problem == f"{path}:6: the gzip data is truncated"
    path.write_bytes(content + b"more")
    assert refused(path).problem.startswith(f"{path}:6: corrupt gzip data")
    path.write_bytes(content[:40] + bytes(8) + content[48:])
    assert refused(path).problem.startswith(f"{path}:1: ")


def test_endless_blank_lines_are_not_waited_for(tmp_path):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(as_jsonl() + b"\n" * 20_000_000, 1))
    began = time.process_time()
    assert refused(path).problem == f"{path}:6: over 1,000 blank lines"
    assert time.process_time() - began < 1
    path.write_bytes(gzip.compress(as_jsonl() + b"\n" * 1_000))
    assert len(rows_of(path)) == 5


def test_parquet_needs_pyarrow_and_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(CONTAINERS["parquet"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = refused(tmp_path / "x")
    assert "pyarrow is not installed" in error.problem and "pip install pyarrow" in error.fix


def test_what_is_null_in_parquet_is_left_out_and_what_json_cannot_hold_is_only_named(tmp_path):
    columns = {
        "picture": pa.array([b"x", None] * 2 + [b"y"]),
        "day": pa.array([10**18] * 5, type=pa.timestamp("ns")),
        "word": pa.array(["a", None, "b", "a", None]).dictionary_encode(),
        "none": pa.nulls(5),
    }
    (tmp_path / "x").write_bytes(as_parquet(**columns))
    rows = rows_of(tmp_path / "x")
    assert [row.get("word") for row in rows] == ["a", None, "b", "a", None]
    assert ["picture" in row for row in rows] == [True, False, True, False, True]
    assert (rows[0]["picture"].type, rows[0]["day"].type) == ("binary", "timestamp[ns]")
    assert not any("none" in row for row in rows)
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    (tmp_path / "x").write_bytes(as_parquet(word=pa.chunked_array([pa.array(["x"] * 3), bad, pa.array(["x"])])))
    assert refused(tmp_path / "x").problem == f"{tmp_path / 'x'} row 4: not UTF-8 text"


@pytest.mark.parametrize("packed", [False, True])
def test_memory_does_not_grow_with_the_file_nor_with_one_line_of_it(tmp_path, packed):
    (tmp_path / "rows").write_bytes(as_jsonl([{"a": "x" * 1_000}]) * 10_000)
    (tmp_path / "line").write_bytes(as_jsonl() + b"x" * 20_000_000)
    dataset, bomb = (
        find_dataset(str(squeezed(tmp_path / name) if packed else tmp_path / name)) for name in ("rows", "line")
    )
    tracemalloc.start()
    assert sum(1 for _ in read_raw(dataset)) == 10_000
    with pytest.raises(InputError, match=r"line(\.gz)?:6: a line of over 1,000,000 bytes"):
        list(read_raw(bomb))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_parquet_is_held_a_few_rows_at_a_time_however_often_it_repeats_a_text(tmp_path):
    pq.write_table(pa.table({"prompt": ["x" * 280_000] * 200}), tmp_path / "x", compression="zstd")
    assert (tmp_path / "x").stat().st_size < 10_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    arrow = max(pa.total_allocated_bytes() - before for _ in read_raw(find_dataset(str(tmp_path / "x"))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000 and arrow < 8_000_000


@pytest.mark.parametrize("container", ["jsonl", "json", "parquet"])
def test_one_record_has_the_same_limit_in_every_container(tmp_path, container):
    def written(text: str) -> Path:
        rows = [{"prompt": [{"role": "user", "content": refusal}], "completion": "z"} for refusal in ("x", text)]
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        content = {"jsonl": "\n".join(lines).encode(), "json": f"[{','.join(lines)}]".encode()}
        (tmp_path / "x").write_bytes(content.get(container) or as_parquet(rows))
        return tmp_path / "x"

    for fine in ("x" * 990_000, "é" * 495_000):
        assert len(rows_of(written(fine))) == 2
    where = {
        "jsonl": ":2: a line of over 1,000,000 bytes",
        "json": ":1 (record 2): the record is longer than 1,000,000 bytes",
        "parquet": " row 2: the record is longer than 1,000,000 bytes",
    }
    for longer in ("x" * 1_000_001, "é" * 500_001):
        assert refused(written(longer)).problem == f"{tmp_path / 'x'}{where[container]}"


def test_a_disk_that_is_full_while_parquet_is_unpacked_is_a_fault_of_the_disk(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(gzip.compress(CONTAINERS["parquet"]))
    dataset = find_dataset(str(tmp_path / "x"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow over it: as on a full disk, writing fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(StorageError, match=f"{tmp_path}: .* unpacked there") as caught:
            list(read_raw(dataset))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "TMPDIR" in caught.value.fix and caught.value.exit_code == 8
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nosuch"))
    with pytest.raises(StorageError, match="nosuch"):
        list(read_raw(dataset))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize(
    ("mark", "named"), [(",", "CSV, ','"), (";", "CSV, ';'"), ("\t", "TSV, tab"), ("|", "CSV, '|'")]
)
def test_a_table_is_read_whatever_its_delimiter_and_encoding_and_says_which(tmp_path, mark, named, encoding):
    rows = [["Prompt", "Completion", "No"], ["Why,\t;|\r\nthough?", 'He said "sé".', "1"], ["So?", "Yes.", ""]]
    with (tmp_path / "x.csv").open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=mark).writerows([*rows, ["", "", ""]])  # as Excel ends a sheet
    dataset = find_dataset(str(tmp_path / "x.csv"))
    read = [(dataset.place(raw.file, raw.line).rpartition(":")[2], dataset.record(raw)) for raw in read_raw(dataset)]
    assert read == [
        ("2", {"prompt": rows[1][0], "completion": rows[1][1], "No": "1"}),
        ("4", {"prompt": "So?", "completion": "Yes.", "No": ""}),
    ]
    shown = {"utf-8-sig": "utf-8 with BOM", "utf-16-le": "utf-16"}.get(encoding, encoding)
    assert dataset.files[0].describe() == f"{named}, {shown}, 3 columns: Prompt, Completion, No"


def test_rows_of_a_table_that_have_no_reading_are_refused_one_by_one(tmp_path):
    (tmp_path / "x.csv").write_text('prompt,completion\na,b\nc\n"d"e,f\ng,h\n', encoding="utf-8")
    dataset = find_dataset(str(tmp_path / "x.csv"))
    found = []
    for raw in read_raw(dataset):
        try:
            found.append(dataset.record(raw)["prompt"])
        except InputError as error:
            found.append(error.problem.removeprefix(str(tmp_path / "x.csv")))
    assert found[0::3] == ["a", "g"] and found[1] == ":3: 1 cells, and the header has 2 columns"
    assert found[2].startswith(":4: not a row of CSV")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("lines", "opened"),
    [
        (["a,b", '"c,d', "e,f"], 3),
        (["a,b", 'c,"d', 'e,"f"'], 3),
        (['"a', '""b"",",c"d,"e', "f,g", 'h,"i"'], 3),  # behind a cell of two lines
        (['a,"b', '""', "c,d"], 2),
    ],
)
def test_an_unclosed_quote_is_refused_with_the_line_where_it_opens(tmp_path, lines, opened, end):
    """What follows it is in its cell: the number of lost records is unknown, so that none may be skipped."""
    (tmp_path / "x.csv").write_text(end.join(["prompt,completion", *lines, ""]), encoding="utf-8", newline="")
    with pytest.raises(InputError, match=f"x.csv:{opened}: a quote opens here and is not closed"):
        list(read_raw(find_dataset(str(tmp_path / "x.csv"))))


def test_text_of_windows_is_read_although_two_letters_may_be_one_of_utf8(tmp_path):
    text = "text\n" + "Où est le café d'à côté, garçon ?\n" * 10 + "LE CAFÉ»\n"  # É» is one letter in UTF-8
    (tmp_path / "x.csv").write_bytes(text.encode("cp1252"))
    assert list(read_raw(find_dataset(str(tmp_path / "x.csv"))))[-1].data == {"text": "LE CAFÉ»"}


# --- a file that changes ---------------------------------------------------------------------------------------------


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def rewritten(path: Path) -> None:
    content, was = path.read_bytes(), path.stat()
    path.write_bytes(content[::-1])
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns + 1))


def replaced(path: Path) -> None:
    content, was = path.read_bytes(), path.stat()
    (other := path.with_name("other")).write_bytes(content)
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("container", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("change", [appended, rewritten, replaced])
def test_a_file_that_changed_since_it_was_hashed_is_refused(tmp_path, container, packed, change):
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(CONTAINERS[container]) if packed else CONTAINERS[container])
    dataset = find_dataset(str(path))
    change(path)
    with pytest.raises(InputError) as caught:
        next(read_raw(dataset))
    assert caught.value.problem == f"{path} changed while it was read"
    assert caught.value.fix == "wait until it is written, then run it again"


@pytest.mark.parametrize(("container", "packed"), [("jsonl", False), ("jsonl", True), ("parquet", False)])
@pytest.mark.parametrize("change", [appended, rewritten])
def test_a_file_that_changes_while_it_is_read_never_gives_its_last_record(tmp_path, container, packed, change):
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(CONTAINERS[container]) if packed else CONTAINERS[container])
    records = read_raw(find_dataset(str(path)))
    next(records)
    change(path)
    with pytest.raises(InputError, match="changed while it was read"):
        for _ in range(4):
            next(records)


def test_a_file_that_changes_while_it_is_hashed_is_refused_and_so_is_an_eval_set(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "x.jsonl", {"id": "a", "prompt": "?", "answer": "1", "section": "s"})
    digest = hashlib.file_digest
    evalset = find_evalset(str(path))
    appended(path)
    with pytest.raises(InputError, match="changed while it was read"):
        read_items(evalset)

    def slow(file, name):
        found = digest(file, name)
        appended(path)
        return found

    monkeypatch.setattr(hashlib, "file_digest", slow)
    for find in (find_dataset, find_evalset):
        with pytest.raises(InputError, match=r"x\.jsonl changed while it was read"):
            find(str(path))


def test_when_a_file_was_last_changed_is_no_part_of_its_hash(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", record())
    before = find_dataset(str(path))
    os.utime(path, ns=(1, 1))
    assert find_dataset(str(path)).sha256 == before.sha256
    assert find_dataset(str(path)).files[0].version != before.files[0].version


def squeezed(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    return packed


# --- datasets and eval sets ------------------------------------------------------------------------------------------


def test_the_shipped_dataset_and_eval_set_are_found_by_their_keys_and_match_their_manifests():
    dataset = find_dataset("dev-reasoning-v2")
    (file,) = dataset.files
    assert file.path == ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl"
    assert dataset.sha256 == file.sha256 == hashlib.sha256(file.path.read_bytes()).hexdigest()
    assert len(rows_of("dev-reasoning-v2")) == json.loads((file.path.parent / "manifest.json").read_text())["rows"]
    assert len(read_items(find_evalset("eval_v2"))) >= 100


def paths(name) -> list[str]:
    return [str(file.path) for file in find_dataset(str(name)).files]


def test_a_path_is_a_dataset_too_and_the_working_folder_comes_before_what_is_shipped(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "mine.jsonl", record())
    assert paths(path) == [str(path)]
    own = tmp_path / "datasets" / "dev-reasoning-v2"
    own.mkdir(parents=True)
    write_lines(own / "dataset.jsonl", record())
    monkeypatch.chdir(tmp_path)
    assert paths("dev-reasoning-v2") == [str(own / "dataset.jsonl")]
    assert find_dataset("mine.jsonl").sha256 == find_dataset("dev-reasoning-v2").sha256


@pytest.mark.parametrize(
    "key", ["dev-reasoning-v3", "no/such.jsonl", "~nobody-of-that-name/x", "x" * 300, "a\x00b", "*", ""]
)
def test_a_dataset_that_is_not_there_is_refused_with_those_that_are_and_an_empty_folder_by_name(
    key, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    left = tmp_path / "datasets" / ".staged-x-1"
    left.mkdir(parents=True)
    write_lines(left / "dataset.jsonl", record())
    with pytest.raises(InputError, match="no dataset named") as caught:
        find_dataset(key)
    assert "dev-reasoning-v2" in caught.value.fix and "staged" not in caught.value.fix
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=re.escape(str(tmp_path / "empty"))):
        find_dataset(str(tmp_path / "empty"))


def folder_with(tmp_path: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, record(number))
    return tmp_path / "set"


@parametrize("names", "read")
def test_a_folder_is_all_its_data_files_in_name_order(tmp_path, names, read):
    folder = folder_with(tmp_path, *names)
    assert paths(folder) == [str(folder / name) for name in read]
    hashes = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in read]
    inside = [name.removeprefix("data/") for name in read]
    listed = "".join(f"{sha256}  {name}\n" for sha256, name in zip(hashes, inside, strict=True))
    assert find_dataset(str(folder)).sha256 == hashlib.sha256(listed.encode()).hexdigest()


@parametrize("names", "readings")
def test_a_folder_with_more_than_one_reading_is_refused_with_every_path_to_give(tmp_path, names, readings):
    folder = folder_with(tmp_path, *names)
    with pytest.raises(InputError, match="is ambiguous") as caught:
        find_dataset(str(folder))
    assert caught.value.fix == f"give one of: {', '.join(str(folder / name) for name in readings)}"
    found = [path for name in readings for path in paths(folder / name)]
    assert sorted(found) == sorted(str(folder / name) for name in names)


@parametrize("names", "words")
def test_what_looks_like_data_and_would_be_left_out_of_a_folder_is_named(tmp_path, names, words):
    folder = folder_with(tmp_path, *names)
    with pytest.raises(InputError) as caught:
        find_dataset(str(folder))
    assert caught.value.problem == f"{folder} has data files {words}"


def test_a_split_is_a_word_of_the_name_and_not_a_part_of_one():
    named = {"train2.json": "train", "my-VAL.json": "validation", "test/0.json": "test"}
    for name, split in {"latest.jsonl": "", "contrain.json": "", **named}.items():
        assert split_of(name) == split, name


def test_a_folder_that_lacks_a_promised_file_is_refused_and_a_pattern_takes_what_is_there(tmp_path):
    folder = folder_with(tmp_path, "train-00000-of-00003.parquet", "train-00002-of-00003.parquet")
    with pytest.raises(InputError, match="1 of 3 files of train are missing, the first is train-00001-of-00003"):
        find_dataset(str(folder))
    assert len(paths(folder / "train-*")) == 2


def test_a_dataset_that_no_longer_matches_its_manifest_is_refused(tmp_path):
    folder = shutil.copytree(ROOT / "datasets" / "dev-reasoning-v2", tmp_path / "changed")
    assert paths(folder) == [str(folder / "dataset.jsonl")]
    with (folder / "dataset.jsonl").open("a") as file:
        file.write(json.dumps(record()) + "\n")
    with pytest.raises(InputError, match="does not match its manifest"):
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


def test_the_hash_of_a_tokenizer_is_that_of_its_file_and_of_what_is_said_beside_it(tmp_path):
    named = {"eos_token": "<eos>"}
    folder = tokenizer_folder(tmp_path, tokenizer_config=named)
    before = load_tokenizer(folder).sha256
    (folder / "README.md").write_text("x")
    assert load_tokenizer(folder).sha256 == before
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"chat_template": "{{ messages }}"}))
    templated = load_tokenizer(folder).sha256
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert len({before, templated, load_tokenizer(folder).sha256}) == 3


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


@parametrize("single", "prefix")
def test_the_prefix_is_what_the_tokenizer_itself_puts_before_a_text(tmp_path, single, prefix):
    assert post_processed(tmp_path, single=single).prefix == tuple(prefix)


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
