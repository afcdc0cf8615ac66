"""Whatever is done to a data file: every line of it is read, or it is refused with exit code 3, its name and its line."""

import gzip
import json
import os
import random
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tests.program import refused, tunix_rt
from tunix_rt.cli.main import cli
from tunix_rt.data.registry import find_dataset, read_traces
from tunix_rt.errors import InputError

SEED = 20
SECONDS = 2.0
GOOD = (ROOT / "datasets" / "dev-reasoning-v2" / "dataset.jsonl").read_text(encoding="utf-8").splitlines()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A file of traces. `line` is the one a refusal must name; 0 when the file as a whole is at fault."""

    what: str
    content: bytes
    line: int = 0
    must_fail: bool = True


def with_line(number: int, line: str | bytes) -> bytes:
    """The good lines with line `number` (from 1) replaced."""
    lines: list[str | bytes] = list(GOOD)
    lines[number - 1] = line
    return b"".join((part if isinstance(part, bytes) else part.encode("utf-8")) + b"\n" for part in lines)


def changed_records(draw: random.Random) -> Iterator[tuple[str, str]]:
    """One line with a field missing, extra, empty, of another type, or out of order."""
    wrong = {
        "missing": ..., "null": None, "a number": 5, "a float": 1e300, "yes": True, "a list": ["x"], "a mapping": {"x": 1},
        "empty": "", "blank": " \t ", "NUL": "a\0b", "half a surrogate pair": "a\ud800b", "the other half": "\udfff",
    }  # fmt: skip
    for field in ("prompt", "final_answer", "steps", "id"):
        for kind, value in wrong.items():
            if (field, kind) in {("id", "missing"), ("id", "null")}:
                continue
            record = json.loads(draw.choice(GOOD))
            if value is ...:
                del record[field]
            else:
                record[field] = value
            yield f"{field} {kind}", json.dumps(record)
    for field in ("i", "type", "content"):
        for kind, value in wrong.items():
            record = json.loads(draw.choice(GOOD))
            step = draw.choice(record["steps"])
            if value is ...:
                del step[field]
            else:
                step[field] = value
            yield f"step {field} {kind}", json.dumps(record)


def changed_steps(draw: random.Random) -> Iterator[tuple[str, str]]:
    for what, order in {
        "no step": [], "from one": [1, 2], "twice zero": [0, 0], "backwards": [1, 0], "a gap": [0, 2], "negative": [-1, 0],
        "a huge number": [10**300], "a fraction": [0.5], "text": ["0"], "beyond floats": [1e308 * 10],
    }.items():  # fmt: skip
        record = json.loads(draw.choice(GOOD))
        record["steps"] = [{"i": i, "type": "fact", "content": "x"} for i in order]
        yield f"steps: {what}", json.dumps(record)
    for field in ("extra", "Prompt", "answer", "final_answer ", "", "\ud800", "meta.x"):
        record = json.loads(draw.choice(GOOD))
        yield f"extra field {field!a}", json.dumps(record | {field: 1})
    record = json.loads(draw.choice(GOOD))
    record["steps"][0]["note"] = "x"
    yield "extra field in a step", json.dumps(record)
    yield "meta a list", json.dumps(record | {"meta": []})
    yield "meta null", json.dumps(record | {"meta": None})


def raw_lines(draw: random.Random) -> Iterator[tuple[str, str | bytes]]:
    """Lines that are no JSON object."""
    good = draw.choice(GOOD)
    for cut in (1, 10, len(good) // 2, len(good) - 1):
        yield f"torn after {cut}", good[:cut]
    yield "two records", good + good
    yield "a comma after it", good + ","
    yield "a bracket before it", "[" + good
    yield "a comment", "// " + good
    yield "single quotes", good.replace('"', "'")
    yield "a list", f"[{good}]"
    for text in ("null", "true", "5", '"text"', "[]", "{}", "NaN", "undefined", "---", "\x00", "\x1a"):
        yield f"only {text!a}", text
    for constant in ("NaN", "Infinity", "-Infinity"):
        yield f"meta {constant}", good.replace('"meta": {', f'"meta": {{"x": {constant}, ', 1)
        yield f"prompt {constant}", json.dumps(json.loads(good) | {"prompt": 7}).replace("7", constant, 1)
    yield "a key given twice", good.replace('"prompt":', '"prompt": "first", "prompt":', 1)
    yield "a key given twice, deep", good.replace('"i": 0', '"i": 0, "i": 0', 1)
    yield "a key given twice in meta", good.replace('"meta": {', '"meta": {"x": 1, "x": 2, ', 1)
    yield "a raw control character", good.replace("prompt", "pro\x01mpt", 1)
    yield "a raw NUL", good.replace(" ", "\x00", 1)
    yield "five thousand digits", good.replace('"i": 0', f'"i": {"1" * 5_000}', 1)
    yield "nested a hundred thousand deep", good.replace('"meta": {', '"meta": {"x": ' + "[" * 100_000 + ", ", 1)
    yield "latin-1", good.replace("a", "\u00e9", 1).encode("latin-1")
    yield "utf-16", good.encode("utf-16-le")
    yield "cut inside a character", good.encode() + b"\xe2\x82"
    yield "overlong", good.encode().replace(b" ", b"\xc0\xa0", 1)
    yield "a surrogate in utf-8", good.encode().replace(b"prompt", b"pro\xed\xa0\x80mpt", 1)
    yield "two megabytes", good.replace('"prompt": "', '"prompt": "' + "x" * 2_000_000, 1)
    yield "a blank line", ""
    yield "spaces", "   "
    yield "a carriage return", "\r"
    yield "a byte order mark", "\ufeff" + good


def bad_lines(draw: random.Random) -> Iterator[Case]:
    for make in (changed_records, changed_steps, raw_lines):
        for what, line in make(draw):
            # A blank line at the end is no mistake and a byte order mark in the first none either: the middle.
            number = draw.randint(2, len(GOOD) - 1)
            yield Case(what=f"line {number}: {what}", content=with_line(number, line), line=number)


def whole_files() -> Iterator[Case]:
    text = "\n".join(GOOD) + "\n"
    compressed = gzip.compress(text.encode(), mtime=0)
    yield Case(what="empty", content=b"")
    yield Case(what="only newlines", content=b"\n\n\n")
    yield Case(what="only a byte order mark", content=b"\xef\xbb\xbf", line=1)
    yield Case(what="gzip", content=compressed, line=1)
    yield Case(what="zlib", content=zlib.compress(text.encode()), line=1)
    yield Case(what="zip", content=b"PK\x03\x04" + bytes(60), line=1)
    yield Case(what="parquet", content=b"PAR1" + bytes(60), line=1)
    yield Case(what="utf-16", content=text.encode("utf-16"), line=1)
    yield Case(what="one JSON list", content=json.dumps([json.loads(line) for line in GOOD]).encode(), line=1)
    yield Case(what="indented JSON", content=json.dumps(json.loads(GOOD[0]), indent=2).encode(), line=1)
    yield Case(what="comma-separated", content=b"prompt,answer\nx,y\n", line=1)
    yield Case(what="old mac line endings", content=text.replace("\n", "\r").encode(), line=1)
    yield Case(what="a blank line first", content=b"\n" + text.encode(), line=1)
    yield Case(what="windows line endings", content=text.replace("\n", "\r\n").encode(), must_fail=False)
    yield Case(what="byte order mark", content=text.encode("utf-8-sig"), must_fail=False)
    yield Case(what="no newline at the end", content=text.rstrip().encode(), must_fail=False)
    yield Case(what="blank lines at the end", content=text.encode() + b"\n \n", must_fail=False)
    yield Case(what="escaped", content="\n".join(json.dumps(json.loads(g)) for g in GOOD).encode(), must_fail=False)


def damaged(draw: random.Random) -> Iterator[Case]:
    """Bytes flipped, cut and put in by chance: it may still read, it must not crash and must not lose a line."""
    for number in range(60):
        content = bytearray("\n".join(GOOD).encode() + b"\n")
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(content))
            what = draw.choice(["flip", "cut", "insert", "end"])
            if what == "flip":
                content[place] ^= 1 << draw.randrange(8)
            elif what == "cut":
                del content[place : place + draw.randint(1, 30)]
            elif what == "insert":
                content[place:place] = draw.choice(
                    [b"\n", b"\x00", b'"', b"{", b"\\", b"\xff", b"\r\n", b"\\ud800", b"[" * 50]
                )
            else:
                del content[place + 1 :]
        yield Case(what=f"damage {number}", content=bytes(content), must_fail=False)


def make_cases() -> list[Case]:
    draw = random.Random(SEED)
    return [*bad_lines(draw), *whole_files(), *damaged(draw)]


CASES = make_cases()


def test_there_are_over_two_hundred_mutations_and_always_the_same():
    assert len(CASES) > 200
    assert make_cases() == CASES
    assert sum(case.must_fail for case in CASES) > 120


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case.what))
def test_a_mutated_data_file_is_read_whole_or_refused_by_file_and_line(case, tmp_path):
    path = tmp_path / "my.jsonl"
    path.write_bytes(case.content)
    began = time.process_time()
    try:
        traces = read_traces(find_dataset(str(path)))
    except InputError as error:
        assert error.exit_code == 3
        assert error.fix
        assert_said(case, path, str(error))
    else:
        assert not case.must_fail, "accepted"
        lines = [line for line in case.content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
        assert len(traces) == len(lines), "a line was lost"
    assert time.process_time() - began < SECONDS


def assert_said(case: Case, path: Path, said: str) -> None:
    assert len(said) < 3_000, "a message is not the file"
    if case.line:
        assert f"{path}:{case.line}: " in said, said
    elif case.must_fail:
        assert f"{path} holds no rows" in said, said
    else:
        assert f"{path}:" in said or f"{path} holds no rows" in said, said


# --- by the program --------------------------------------------------------------------------------------------------

BY_THE_PROGRAM = random.Random(SEED).sample([case for case in CASES if case.must_fail], 25)


def arguments(path: Path, output: Path) -> list[str]:
    return [
        "train", "--model", "tiny-gemma3", "--data", str(path), "--output", str(output),
        "--set", "training.max_steps=1", "--set", "training.device=cpu",
    ]  # fmt: skip


def assert_refused(output: Path, said: str, named: str) -> None:
    """What the program leaves behind: no traceback, the file and line, and a result that says so."""
    assert "Traceback" not in said
    assert "\n  fix: " in said
    assert named in said
    result = json.loads((output / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["exit_code"]) == ("refused", 3)
    assert named in result["reason"]
    assert not (output / "metrics.jsonl").exists()


@pytest.mark.parametrize("case", BY_THE_PROGRAM, ids=lambda case: ascii(case.what))
def test_the_program_refuses_a_bad_data_file_with_exit_3_and_a_result(case, tmp_path):
    path, output = tmp_path / "my.jsonl", tmp_path / "run"
    path.write_bytes(case.content)
    ended = CliRunner().invoke(cli, arguments(path, output))
    assert ended.exit_code == 3, ended.output
    assert isinstance(ended.exception, SystemExit), "the error was not handled"
    assert_refused(output, ended.stderr, f"{path}:{case.line}: " if case.line else str(path))


@pytest.mark.parametrize("case", BY_THE_PROGRAM[:2], ids=lambda case: ascii(case.what))
def test_a_real_process_refuses_it_the_same_way(case, tmp_path):
    path, output = tmp_path / "my.jsonl", tmp_path / "run"
    path.write_bytes(case.content)
    said = refused(tunix_rt(*arguments(path, output)), 3)
    assert_refused(output, said, f"{path}:{case.line}: " if case.line else str(path))


def a_folder(tmp_path: Path) -> Path:
    (tmp_path / "folder.jsonl").mkdir()
    return tmp_path / "folder.jsonl"


def a_missing_file(tmp_path: Path) -> Path:
    return tmp_path / "missing.jsonl"


def a_dangling_link(tmp_path: Path) -> Path:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "nowhere")
    return tmp_path / "link.jsonl"


def a_link_to_itself(tmp_path: Path) -> Path:
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    return tmp_path / "loop.jsonl"


def a_pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.jsonl")
    return tmp_path / "pipe.jsonl"


def an_unreadable_file(tmp_path: Path) -> Path:
    """One that exists and gives an error on reading, also to root."""
    return Path("/proc/self/mem")


def a_file_in_a_file(tmp_path: Path) -> Path:
    (tmp_path / "x").write_text("")
    return tmp_path / "x" / "y.jsonl"


@pytest.mark.parametrize(
    "make", [a_folder, a_missing_file, a_dangling_link, a_link_to_itself, a_pipe, an_unreadable_file, a_file_in_a_file]
)
def test_what_is_no_readable_file_is_refused_by_name(make, tmp_path):
    path, output = make(tmp_path), tmp_path / "run"
    ended = CliRunner().invoke(cli, arguments(path, output))
    assert ended.exit_code == 3, ended.output
    assert_refused(output, ended.stderr, str(path))
