"""An import writes what was read: the same samples, a manifest that can be checked, all of it or nothing."""

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.conftest import REFERENCE
from tests.samples import read_samples
from tests.samples import write_lines as write
from tests.unit.test_formats import READS, message
from tunix_rt import __version__
from tunix_rt.cli.main import cli
from tunix_rt.data.formats import FORMATS, to_sample
from tunix_rt.data.importer import import_dataset
from tunix_rt.data.sources import find_dataset
from tunix_rt.errors import InputError

ODD = ["a\x00b", "\ud800", "x\udfff", "\ufeffa", "a\u2028b", "\U0001f600", "é\r\nz", '"\\', "<<1=1>>", "\x1c.", " x "]


def samples_of(name) -> list:
    return [sample for _, sample in read_samples(find_dataset(str(name)))]


def with_odd_texts(value, odd):
    """The record with every text of it, but for types and roles, replaced: the same text by the same odd one."""
    if isinstance(value, dict):
        kept = ("type", "role", "from", "answer")
        return {key: inner if key in kept else with_odd_texts(inner, odd) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_odd_texts(inner, odd) for inner in value]
    return odd[len(value) % len(odd)] if isinstance(value, str) and value.strip() else value


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_imported_reads_back_as_the_same_samples(name, tmp_path):
    draw = random.Random(20)
    records = [record for kind, record, _ in READS if kind == name]
    records += [with_odd_texts(draw.choice(records), draw.sample(ODD, 7)) for _ in range(30)]
    source = write(tmp_path / "x.jsonl", *records)
    done = import_dataset(find_dataset(str(source)), key="mine", folder=tmp_path / "datasets")
    written = samples_of(tmp_path / "datasets" / "mine")
    assert written == [to_sample(record, name, "x:1") for record in records]
    assert (done.format, done.container, done.rows, list(done.samples)) == (name, "jsonl", len(records), written[:3])
    assert done.written_as == ("text" if name == "text" else "trace" if name in ("trace", "gsm8k") else "messages")
    assert done.dataset.read_bytes().count(b"\n") == len(records)


def test_the_manifest_says_what_was_written_and_where_it_came_from(tmp_path, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(gzip.compress(b'{"prompt": "a", "completion": "b", "score": 1}\n'))
    table = pa.Table.from_pylist([{"prompt": "c", "completion": "d", "score": None, "source": "s"}])
    pq.write_table(table, file := io.BytesIO())
    (folder / "b.parquet").write_bytes(file.getvalue())
    monkeypatch.chdir(tmp_path)
    done = import_dataset(find_dataset("set"), key="mine", folder=tmp_path / "datasets")
    manifest = json.loads(done.manifest.read_text())
    source = find_dataset("set")
    assert manifest == {
        "key": "mine",
        "rows": 2,
        "sha256": hashlib.sha256(done.dataset.read_bytes()).hexdigest(),
        "bytes": done.dataset.stat().st_size,
        "format": "messages",
        "source": {
            "name": "set",
            "sha256": source.sha256,
            "bytes": sum(file.bytes for file in source.files),
            "format": "prompt_completion",
            "files": [
                {"name": "a.jsonl", "sha256": source.files[0].sha256, "bytes": source.files[0].bytes,
                 "container": "jsonl", "gzip": True},
                {"name": "b.parquet", "sha256": source.files[1].sha256, "bytes": source.files[1].bytes,
                 "container": "parquet"},
            ],
        },
        "unused_columns": {"score": 1, "source": 1},
        "written_by": f"tunix-rt {__version__}",
    }  # fmt: skip
    assert (done.container, done.unused) == ("jsonl in gzip; parquet", {"score": 1, "source": 1})
    assert find_dataset("mine").sha256 == manifest["sha256"] == done.sha256
    assert [entry.name for entry in (tmp_path / "datasets").iterdir()] == ["mine"]


def test_the_calculators_marks_of_gsm8k_and_all_of_a_trace_are_kept(tmp_path):
    question = {"question": "Why?", "answer": "1+2=<<1+2=3>>3\n#### 3"}
    done = import_dataset(find_dataset(str(write(tmp_path / "x", question))), key="g", folder=tmp_path)
    assert json.loads(done.dataset.read_text())["meta"] == {"marks": [["1+2=3"]]}
    again = import_dataset(find_dataset(str(done.dataset)), key="t", folder=tmp_path)
    assert again.dataset.read_bytes() == done.dataset.read_bytes()


def test_answers_of_gsm8k_with_words_behind_the_number_are_counted_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    records = [{"question": "Why?", "answer": f"So.\n#### {last}"} for last in ("3", "5 hours", "18.", "2 km")]
    write(tmp_path / "x.jsonl", *records)
    output = CliRunner().invoke(cli, ["data", "import", "x.jsonl", "--as", "g"]).stdout
    assert "2 of 4 with words after the number" in output
    answers = [json.loads(line)["final_answer"] for line in Path("datasets/g/dataset.jsonl").read_text().splitlines()]
    assert answers == ["3", "5 hours", "18", "2 km"]
    assert json.loads(Path("datasets/g/manifest.json").read_text())["answers_with_words"] == 2
    plain = import_dataset(find_dataset(str(write(tmp_path / "y", records[0]))), key="p", folder=tmp_path)
    assert plain.worded == 0 and "answers_with_words" not in json.loads(plain.manifest.read_text())


def test_an_existing_key_is_refused_unless_it_is_to_be_replaced(tmp_path):
    first, second = (write(tmp_path / name, {"prompt": name, "completion": "x"}) for name in ("a", "b"))
    import_dataset(find_dataset(str(first)), key="mine", folder=tmp_path / "d")
    with pytest.raises(InputError, match="mine exists"):
        import_dataset(find_dataset(str(second)), key="mine", folder=tmp_path / "d")
    assert samples_of(tmp_path / "d" / "mine") == samples_of(first)
    import_dataset(find_dataset(str(second)), key="mine", folder=tmp_path / "d", replace=True)
    assert samples_of(tmp_path / "d" / "mine") == samples_of(second)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["mine"]
    (tmp_path / "d" / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"more than a dataset: notes\.txt"):
        import_dataset(find_dataset(str(first)), key="mine", folder=tmp_path / "d", replace=True)


@pytest.mark.parametrize("key", ["", ".x", "-x", "a/b", "../x", "a b", "é", "x" * 65, "a\n"])
def test_a_key_that_is_no_name_of_a_folder_is_refused(tmp_path, key):
    source = write(tmp_path / "x", {"prompt": "a", "completion": "b"})
    with pytest.raises(InputError, match="is no key for a dataset"):
        import_dataset(find_dataset(str(source)), key=key, folder=tmp_path)


def test_an_import_that_ends_badly_leaves_nothing_and_what_was_there(tmp_path):
    good, folder = {"prompt": "a", "completion": "b"}, tmp_path / "d"
    bad = write(tmp_path / "bad", *[good] * 3, {"prompt": "a"})
    with pytest.raises(InputError, match="bad:4: completion: missing"):
        import_dataset(find_dataset(str(bad)), key="mine", folder=folder)
    assert list(folder.iterdir()) == []
    kept = import_dataset(find_dataset(str(write(tmp_path / "good", good))), key="mine", folder=folder).sha256
    with pytest.raises(InputError, match="bad:4"):
        import_dataset(find_dataset(str(bad)), key="mine", folder=folder, replace=True)
    assert [path.name for path in folder.iterdir()] == ["mine"]
    assert find_dataset(str(folder / "mine")).sha256 == kept


def test_what_a_killed_import_left_is_swept_away_and_the_work_of_another_is_not(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f".staged-mine-{ended.pid}", f".staged-mine-{os.getppid()}", f".staged-mine-2-{ended.pid}"]
    for name in names:
        (tmp_path / "d" / name).mkdir(parents=True)
    source = write(tmp_path / "x", {"prompt": "a", "completion": "b"})
    import_dataset(find_dataset(str(source)), key="mine", folder=tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == sorted([*names[1:], "mine"])


def test_a_record_that_no_line_can_hold_is_refused_with_its_place(tmp_path):
    (tmp_path / "long.json").write_text(json.dumps([{"prompt": "a", "completion": "x" * 1_000_000}]))
    with pytest.raises(InputError, match=r"long.json:1 \(record 1\): the record is longer than 1,000,000 bytes"):
        import_dataset(find_dataset(str(tmp_path / "long.json")), key="mine", folder=tmp_path / "d")
    step = {"i": 0, "type": "fact", "content": "x"}
    endless = {"prompt": "a", "steps": [step], "final_answer": "b", "meta": {"x": float("nan")}}
    pq.write_table(pa.Table.from_pylist([endless]), file := io.BytesIO())
    (tmp_path / "nan").write_bytes(file.getvalue())
    with pytest.raises(InputError, match=r"nan row 1: meta: "):
        import_dataset(find_dataset(str(tmp_path / "nan")), key="mine", folder=tmp_path / "d")


def test_a_chat_out_of_parquet_keeps_its_reasoning_and_nothing_of_its_nulls(tmp_path):
    rows = [{"messages": [message(), message("assistant", "So.", reasoning_content="I think.", name=None)]}]
    pq.write_table(pa.Table.from_pylist(rows), file := io.BytesIO())
    (tmp_path / "x").write_bytes(file.getvalue())
    done = import_dataset(find_dataset(str(tmp_path / "x")), key="mine", folder=tmp_path / "d")
    assert done.samples[0].steps == ("I think.",)
    assert json.loads(done.dataset.read_text())["messages"][0] == message()


@pytest.mark.reference
def test_gsm8k_is_imported_whole(tmp_path):
    path = REFERENCE / "data" / "gsm8k"
    if not path.is_dir():
        pytest.skip("GSM8K is not beside this clone (../shared/data)")
    done = import_dataset(find_dataset(str(path)), key="gsm8k", folder=tmp_path)
    assert (done.rows, done.format, done.written_as, done.unused) == (7_473, "gsm8k", "trace", {})
    assert samples_of(tmp_path / "gsm8k") == samples_of(path)
