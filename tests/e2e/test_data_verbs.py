"""`tunix-rt data import`, `check` and `show`, as a user types them."""

import gzip
import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.program import command, environment, in_process, refused, tunix_rt
from tests.tables import tables

GOOD = tables(__file__)["good"]
BAD = [
    {"prompt": "What is 3 + 4?", "completion": "<reasoning>3 + 4 = 7<answer>7</answer>"},
    {"prompt": "What is 3 + 5?", "completion": "<reasoning>3 + 5 = 8</reasoning><answer>8</answer>"},
    {"prompt": "What is 3 + 5?", "completion": "<reasoning>3 + 5 = 8</reasoning><answer>8</answer>"},
]


def write(path: Path, records: list[dict]) -> Path:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def on_a_terminal(*arguments: object, cwd: Path, **extra: str) -> str:
    """What the program writes on a terminal of 110 columns, colours included."""
    ours, theirs = pty.openpty()
    env = environment(COLUMNS="110", TERM="xterm-256color", **extra)
    with subprocess.Popen(command(*arguments), cwd=cwd, env=env, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:  # how Linux says that the other side is closed
            assert process.wait(300) == 0
        os.close(ours)
    return written.decode()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder in which a dataset was imported."""
    folder = tmp_path_factory.mktemp("home")
    write(folder / "mine.jsonl.gz", GOOD)
    done = tunix_rt("data", "import", "mine.jsonl.gz", "--as", "mine", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "import.txt").write_text(done.stdout, encoding="utf-8")
    return folder


def test_an_import_says_what_it_recognised_shows_samples_and_what_to_type_next(home):
    output = (home / "import.txt").read_text(encoding="utf-8")
    for words in (
        "mine.jsonl.gz: jsonl in gzip", "gsm8k written as trace", "by (1 of 4 records)", "datasets/mine/dataset.jsonl",
        "tokenizer of tiny-gemma3 (the shipped model", "dataset.jsonl:3: ", " masked │ <bos>Noah has 3 pens",
        "trained ┃ <reasoning>He has 3 + 4 = 7 pens.</reasoning><answer>7</answer><eos>",
        "validation: no findings  (tunix-rt data check mine)",
        "next: tunix-rt train --model tiny-gemma3 --data mine --output runs/mine",
    ):  # fmt: skip
        assert words in output, words
    assert "\x1b" not in output


def test_the_manifest_says_what_the_dataset_came_to(home):
    manifest = json.loads((home / "datasets" / "mine" / "manifest.json").read_text(encoding="utf-8"))
    checked = json.loads(in_process("data", "check", "mine", "--json", cwd=home).stdout)
    tokenised = manifest["tokenised"]
    assert manifest["rows"] == tokenised["examples"] == 4 and tokenised["model"] == "tiny-gemma3"
    same = ("template", "style_sha256", "examples", "tokens", "trained_tokens", "merkle_root")
    assert {name: tokenised[name] for name in same} == {name: checked[name] for name in same}
    assert tokenised["tokenizer_sha256"] == checked["tokenizer"]["sha256"]
    assert checked["dataset"]["sha256"] == manifest["sha256"]


def test_an_existing_dataset_is_replaced_only_when_told(tmp_path):
    write(tmp_path / "one.jsonl", GOOD[:1])
    importing = ("data", "import", "one.jsonl", "--as", "one", "--json")
    assert json.loads(in_process(*importing, cwd=tmp_path).stdout)["manifest"]["rows"] == 1
    write(tmp_path / "one.jsonl", GOOD[:2])
    refused(in_process(*importing, cwd=tmp_path), 3)
    assert json.loads(in_process(*importing, "--replace", cwd=tmp_path).stdout)["manifest"]["rows"] == 2


def test_a_model_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    write(tmp_path / "one.jsonl", GOOD[:1])
    done = in_process("data", "import", "one.jsonl", "--as", "one", "--model", "./no-model", cwd=tmp_path)
    assert "no-model" in refused(done, 3)
    assert not (tmp_path / "datasets").exists()


def test_findings_do_not_stop_an_import_and_are_printed(tmp_path):
    write(tmp_path / "bad.jsonl", BAD)
    done = in_process("data", "import", "bad.jsonl", "--as", "bad", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "validation: would refuse it: orphan_tag (1); warnings: duplicate (1)" in done.stdout
    assert done.stdout.rstrip().endswith("next: tunix-rt data check bad")


def test_check_counts_packs_and_lets_good_data_through(home):
    done = in_process("data", "check", "mine", "--set", "data.max_length=100", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "rules have no findings" in done.stdout and done.stdout.rstrip().endswith("ready to train on")
    assert "rows of 100 tokens" in done.stdout and "from the cache" in done.stdout
    checked = json.loads(in_process("data", "check", "mine", "--set", "data.max_length=100", "--json", cwd=home).stdout)
    rows = [
        json.loads(in_process("data", "show", "mine", "--row", number, "--json", cwd=home).stdout)
        for number in range(1, 5)
    ]
    lengths = sorted(len(row["tokens"]) for row in rows)
    assert checked["lengths"]["max"] == lengths[-1] and checked["lengths"]["median"] in lengths
    assert checked["tokens"] == sum(lengths)
    assert checked["trained_tokens"] == sum(row["trained_tokens"] for row in rows)
    assert 0 < checked["fill"] <= 1 and checked["from_cache"] and not checked["refused"]


def test_check_refuses_with_3_after_saying_everything(tmp_path):
    write(tmp_path / "bad.jsonl", BAD)
    done = in_process("data", "check", "bad.jsonl", cwd=tmp_path)
    assert "orphan_tag" in refused(done, 3)
    for words in ("orphan_tag", "bad.jsonl:1", "fix: close the tag", "duplicate", "bad.jsonl:3", "warns"):
        assert words in done.stdout, words
    assert done.stdout.rstrip().endswith("refused: orphan_tag; 1 warning")
    result = in_process("data", "check", "bad.jsonl", "--json", cwd=tmp_path)
    refused(result, 3)
    findings = {finding["rule"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert findings["orphan_tag"]["refuses"] and findings["orphan_tag"]["count"] == 1
    assert not findings["duplicate"]["refuses"] and findings["duplicate"]["first"].endswith("bad.jsonl:3")


def test_show_tells_every_token_with_its_text_and_whether_it_is_trained(home):
    row = json.loads(in_process("data", "show", "mine", "--row", "3", "--json", cwd=home).stdout)
    assert row["row"] == 3 and row["place"].endswith("dataset.jsonl:3") and row["template"] == "plain"
    assert [token["position"] for token in row["tokens"]] == list(range(len(row["tokens"])))
    trained = "".join(token["text"] for token in row["tokens"] if token["trained"])
    assert trained == "<reasoning>Each has 4.\nSo 2 * 4 = 8 legs.</reasoning><answer>8</answer><eos>"
    masked = "".join(token["text"] for token in row["tokens"] if not token["trained"])
    assert masked == "<bos>How many legs do 2 cats have? <0xF0><0x9F><0x90><0x88>\n"


def test_show_on_a_terminal_has_colours_and_says_the_same_as_in_a_pipe(home):
    plain = in_process("data", "show", "mine", "--row", "3", cwd=home, COLUMNS="110").stdout
    coloured = on_a_terminal("data", "show", "mine", "--row", "3", cwd=home)
    colourless = on_a_terminal("data", "show", "mine", "--row", "3", cwd=home, NO_COLOR="1")
    assert "\x1b[1;32m" in coloured and ";32m" not in colourless and "\x1b" not in plain
    assert "trained ┃ <reasoning> " in plain and "┃ ━━━━━━━━━━━ " in plain
    lines = [line for line in plain.splitlines() if "┃" in line or "│" in line]
    assert max(map(len, lines)) <= 110
    assert not plain.isascii()
    assert tunix_rt("data", "show", "mine", cwd=home, PYTHONIOENCODING="ascii").stdout.isascii()


def test_a_packed_row_is_its_records_side_by_side_each_named_where_it_begins(home):
    settings = ("--set", "data.max_length=300", "--set", "data.validation_fraction=0")
    packed = json.loads(in_process("data", "show", "mine", "--packed", "1", "--json", *settings, cwd=home).stdout)
    lines = [int(place.rpartition(":")[2]) for place in packed["places"]]
    assert packed["packed"] == packed["rows"] == 1 and sorted(lines) == [1, 2, 3, 4]
    alone = [
        json.loads(in_process("data", "show", "mine", "--row", n, "--json", cwd=home).stdout)["tokens"] for n in lines
    ]
    assert [(token["id"], token["trained"]) for token in packed["tokens"]] == [
        (token["id"], token["trained"]) for tokens in alone for token in tokens
    ]
    assert [token["example"] for token in packed["tokens"]] == [n for n in range(1, 5) for _ in alone[n - 1]]
    shown = in_process("data", "show", "mine", "--packed", "1", *settings, cwd=home).stdout
    for number, line in enumerate(lines, start=1):
        assert f"── example {number}: datasets/mine/dataset.jsonl:{line}, {len(alone[number - 1])} tokens ──" in shown


def test_a_row_that_is_not_there_is_refused_and_a_question_asked_twice_is_a_mistake_in_the_command(home):
    assert "mine has 4" in refused(in_process("data", "show", "mine", "--row", "5", cwd=home), 3)
    assert "mine has 1" in refused(in_process("data", "show", "mine", "--packed", "2", cwd=home), 3)
    assert "no dataset named" in refused(in_process("data", "show", "not-there", cwd=home), 3)
    assert in_process("data", "show", "mine", "--row", "1", "--packed", "1", cwd=home).returncode == 2
    assert in_process("data", "show", "mine", "--row", "0", cwd=home).returncode == 2


def test_a_row_that_is_cut_is_shown_cut(home):
    settings = ("--set", "data.max_length=20", "--set", "data.on_overflow=truncate")
    row = json.loads(in_process("data", "show", "mine", *settings, "--json", cwd=home).stdout)
    assert len(row["tokens"]) == 20 < row["record_tokens"]
    assert "truncated here as in a run" in in_process("data", "show", "mine", *settings, cwd=home).stdout


def test_nothing_in_the_data_steers_the_terminal(tmp_path):
    hostile = "\x1b[2J\u202e\x07\x9b31m\r"
    write(tmp_path / "h.jsonl", [{"prompt": f"a{hostile}b", "completion": f"c{hostile}d"}])
    for arguments in (("show", "h.jsonl"), ("check", "h.jsonl"), ("import", "h.jsonl", "--as", "h")):
        done = in_process("data", *arguments, cwd=tmp_path)
        for written in (done.stdout, done.stderr):
            assert all(letter.isprintable() for line in written.split("\n") for letter in line), arguments


def test_the_shipped_dataset_with_the_configuration_of_the_demo_passes():
    done = in_process("data", "check", "dev-reasoning-v2", "--config", "demo", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "550" in done.stdout and done.stdout.rstrip().endswith("ready to train on")
