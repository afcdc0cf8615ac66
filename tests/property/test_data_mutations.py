"""Whatever is done to a data file: every record of it is read, or it is refused with exit code 3, its name and its line."""

import copy
import gzip
import io
import json
import os
import random
import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.program import refused, tunix_rt
from tests.samples import read_samples
from tests.tables import tables
from tunix_rt.cli.main import cli
from tunix_rt.data.sources import find_dataset
from tunix_rt.errors import InputError

SEED = 20
SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A data file. `line` is the one a refusal must name; 0 when the file as a whole is at fault."""

    what: str
    content: bytes
    line: int = 0
    must_fail: bool = True
    row: bool = False
    """Whether `line` is a row of Parquet."""


# --- good files ------------------------------------------------------------------------------------------------------

STEPS = [{"i": 0, "type": "fact", "content": "one is given"}, {"i": 1, "type": "compute", "content": "1 + 1 = 2"}]
GOOD = tables(__file__)["good"]
FIELDS = tables(__file__)["fields"]
TEXTS = {name: [field for field in fields if field[-1] not in ("i", "steps", "messages", "conversations", "role", "from")
                and not isinstance(field[-1], int)] for name, fields in FIELDS.items()}  # fmt: skip


def good(draw: random.Random, name: str) -> list[dict[str, Any]]:
    """A few records, no two alike."""
    records = [copy.deepcopy(GOOD[name]) for _ in range(draw.randint(3, 9))]
    for number, record in enumerate(records):
        *inside, last = TEXTS[name][0]
        at(record, inside)[last] = f"How many are {number}?"
    return records


def one_of(draw: random.Random, name: str, records: list[Any]) -> int:
    """Number of a record. Not Alpaca's first: without its instruction it is a good pair, and the second the stranger."""
    return draw.randrange(1 if name == "alpaca" else 0, len(records))


def at(value: Any, path: Any) -> Any:
    for part in path:
        value = value[part]
    return value


def jsonl(records: list[Any]) -> bytes:
    return b"".join(as_bytes(record) + b"\n" for record in records)


def as_bytes(record: Any) -> bytes:
    return record if isinstance(record, bytes) else json.dumps(record).encode()


def document(draw: random.Random, records: list[Any]) -> tuple[bytes, int]:
    """The records as one JSON document, each on a line of its own, and the line of the first."""
    opens, closes, first = draw.choice(
        [(b"[\n", b"\n]", 2), (b'{"data": [', b"]}\n", 1), (b'{"version": 1,\n"rows":\n[\n', b"]}", 4), (b"[", b"]", 1)]
    )
    return opens + b",\n".join(as_bytes(record) for record in records) + closes, first


def parquet(draw: random.Random, records: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist(records),
        file,
        row_group_size=draw.randint(1, 10),
        compression=draw.choice(["none", "snappy", "zstd"]),
        write_page_checksum=True,
    )
    return file.getvalue()


def packed(draw: random.Random, content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0) if draw.random() < 0.3 else content


def laid_out(draw: random.Random, name: str, records: list[Any], number: int) -> tuple[bytes, int]:
    """A file of the records, JSONL or JSON, perhaps packed; and the line where record `number` begins."""
    content, first = (jsonl(records), 1) if draw.random() < 0.6 else document(draw, records)
    return packed(draw, content), first + number


# --- what is done to them --------------------------------------------------------------------------------------------

WRONG = [None, 5, 1e300, True, ["x"], {"x": 1}, "", " \t ", ..., -1, 10**30, [[]], [None]]


def changed_field(draw: random.Random) -> Case:
    """A field that is missing, empty or of another type."""
    name = draw.choice(list(GOOD))
    records, field, wrong = good(draw, name), draw.choice(FIELDS[name]), draw.choice(WRONG)
    number = one_of(draw, name, records)
    *inside, last = field
    holder = at(records[number], inside)
    if wrong is ... and not isinstance(last, int):
        del holder[last]
    else:
        holder[last] = None if wrong is ... else wrong
    content, line = laid_out(draw, name, records, number)
    return Case(what=f"{name} {field} {wrong!a}", content=content, line=line)


def not_understood(draw: random.Random) -> Case:
    """Something in a record that would be lost."""
    name = draw.choice(["trace", "messages", "sharegpt"])
    records, fine = good(draw, name), False
    number = draw.randrange(len(records))
    record = records[number]
    if name == "trace":
        holder = draw.choice([record, record["steps"][0]])
        holder[draw.choice(["extra", "Prompt", "answer", "final_answer ", "", "\ud800", "meta.x"])] = 1
        if draw.random() < 0.5:
            holder.clear()
            holder.update(GOOD["trace"] | {"steps": [{"i": i, "type": "x", "content": "x"} for i in draw.choice(
                [[], [1, 2], [0, 0], [1, 0], [0, 2], [-1], [10**300], [0.5], ["0"]])]})  # fmt: skip
    else:
        message = draw.choice(at(record, [next(iter(record))]))
        message[draw.choice(["tool_calls", "name", "weight", "", "\udfff", "x" * 500])] = draw.choice(
            [0, "x", [1], False]
        )
        if draw.random() < 0.3:
            message["role" if name == "messages" else "from"] = draw.choice(
                ["tool", "function", "User", "developer", ""]
            )
        # Only assistant turns are trained: a weight of 0 changes no other.
        fine = message.get("weight") == 0 and (message.get("role") or message.get("from")) in (
            "user",
            "human",
            "developer",
        )
    content, line = laid_out(draw, name, records, number)
    return Case(what=f"{name} not understood", content=content, line=line, must_fail=not fine)


def odd_text(draw: random.Random) -> Case:
    """Characters that the rules will speak of; reading does not."""
    name = draw.choice(list(GOOD))
    records = good(draw, name)
    *inside, last = draw.choice([field for field in TEXTS[name] if field != ("answer",)])
    at(draw.choice(records), inside)[last] = draw.choice(
        ["a\0b", "\ud800", "x\udfff", "\x1b[1m", "\ufeffx", "\u2028.", "\x7f"]
    )
    content, _ = laid_out(draw, name, records, 0)
    return Case(what=f"{name} odd text", content=content, must_fail=False)


def null_in_parquet(draw: random.Random) -> Case:
    name = draw.choice(list(GOOD))
    records = good(draw, name)
    number = one_of(draw, name, records)
    *inside, last = draw.choice(TEXTS[name])
    at(records[number], inside)[last] = draw.choice([None, "", " "])
    content = packed(draw, parquet(draw, records))
    return Case(what=f"{name} null in Parquet", content=content, line=number + 1, row=True)


def bad_line(draw: random.Random) -> Case:
    """A line of JSONL that is no JSON object, or not one record."""
    name = draw.choice(list(GOOD))
    records: list[Any] = good(draw, name)
    whole = json.dumps(draw.choice(records))
    what, line = draw.choice(_BAD_LINES)(draw, whole)
    # A blank line at the end is no mistake and a byte order mark in the first none either: in the middle.
    number = draw.randrange(1, len(records) - 1)
    records[number] = line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
    return Case(what=f"{name}: {what}", content=packed(draw, jsonl(records)), line=number + 1)


_BAD_LINES: list[Callable[[random.Random, str], tuple[str, str | bytes]]] = [
    lambda draw, good: ("torn", good[: draw.randrange(1, len(good))]),
    lambda draw, good: ("two records", good + good),
    lambda draw, good: ("around it", draw.choice([good + ",", "[" + good, f"[{good}]", "// " + good, good + "]", "," + good])),
    lambda draw, good: ("single quotes", good.replace('"', "'")),
    lambda draw, good: ("no object", draw.choice(["null", "true", "5", '"text"', "[]", "{}", "NaN", "\0", "\x1a", "\ufeff"])),
    lambda draw, good: ("constant", good[:-1] + f', "x": {draw.choice(["NaN", "Infinity", "-Infinity", "nan"])}}}'),
    lambda draw, good: ("key twice", good[:-1] + f", {good[1:]}"),
    lambda draw, good: ("key twice, deep", good[:-1] + ', "x": [{"y": {"a": 1, "a": 1}}]}'),
    lambda draw, good: ("raw control", good.replace("How", f"H{draw.choice(chr(0) + chr(1) + chr(9) + chr(31))}w", 1)),
    lambda draw, good: ("digits", good[:-1] + f', "x": {"1" * 5_000}}}'),
    lambda draw, good: ("deep", good[:-1] + ', "x": ' + draw.choice("[{") * draw.choice([3_000, 100_000]) + "}"),
    lambda draw, good: ("deep and closed", good[:-1] + ', "x": ' + "[" * 50_000 + "]" * 50_000 + "}"),
    lambda draw, good: ("latin-1", good.replace("o", "\u00e9", 1).encode("latin-1")),
    lambda draw, good: ("utf-16", good.encode("utf-16-le")),
    lambda draw, good: ("cut inside a character", good.encode() + b"\xe2\x82"),
    lambda draw, good: ("overlong", good.encode().replace(b" ", b"\xc0\xa0", 1)),
    lambda draw, good: ("a surrogate in utf-8", good.encode().replace(b"How", b"H\xed\xa0\x80w", 1)),
    lambda draw, good: ("two megabytes", good.replace("How", "x" * 2_000_000, 1)),
    lambda draw, good: ("blank", draw.choice(["", "   ", "\r", "\t \r", "\x0c"])),
    lambda draw, good: ("byte order mark", "\ufeff" + good),
    lambda draw, good: ("parquet", b"PAR1" + bytes(20)),
]  # fmt: skip


def whole_file(draw: random.Random) -> Case:
    """A file that is none, or a good one in an unusual dress."""
    name = draw.choice(list(GOOD))
    records = good(draw, name)
    text, count = jsonl(records), len(records)
    listed, _ = document(draw, records)
    table = parquet(draw, records)
    zipped = gzip.compress(text, 1, mtime=0)
    cut = draw.randrange(1, 12)
    bad: list[tuple[str, bytes, int]] = [
        ("empty", b"", 0), ("newlines", b"\n\n\n", 0), ("byte order mark", b"\xef\xbb\xbf", 0), ("spaces", b"  ", 0),
        ("empty gzip", gzip.compress(b"", mtime=0), 0), ("empty list", b"[]", 0), ("list in a list", b"[[{}]]", 1),
        ("zlib", zlib.compress(text), 1), ("zip", b"PK\x03\x04" + bytes(60), 0), ("zstd", b"\x28\xb5\x2f\xfd" + bytes(9), 0),
        ("utf-16", text.decode().encode("utf-16"), 1), ("Python's notation", b"{'prompt': 'x'}\n", 1),
        ("indented", json.dumps(records[0], indent=2).encode(), 1), ("old line ends", text.replace(b"\n", b"\r"), 1),
        ("blank line first", b"\n" + text, 1), ("scalars", b"[1, 2]", 1), ("two documents", listed.rstrip() + b"\n{}", -1),
        ("torn list", listed[: -draw.randrange(2, 30)], -1), ("two lists", b'{"a": [%b],\n"b": [{}]}' % as_bytes(records[0]), 2),
        ("gzip in gzip", gzip.compress(zipped, mtime=0), 1), ("torn gzip", zipped[:-cut], -1),
        ("gzip and more", zipped + b"more", count + 1), ("wrong sum", zipped[:-8] + bytes(4) + zipped[-4:], -1),
        ("only the magic", b"\x1f\x8b", -1), ("torn parquet", table[:-cut], 0), ("torn parquet", table[: len(table) // 2], 0),
        ("parquet's magic", b"PAR1" + bytes(draw.randrange(30)) + b"PAR1", 0), ("parquet's end", table[-20:], 1),
        ("torn packed parquet", gzip.compress(table, 1, mtime=0)[:-cut], 0), ("endless gzip line", _BOMB, 1),
    ]  # fmt: skip
    fine = {
        "windows line ends": text.replace(b"\n", b"\r\n"), "byte order mark": b"\xef\xbb\xbf" + text,
        "no newline at the end": text.rstrip(), "blank lines at the end": text + b"\n \n", "packed": zipped,
        "two members": zipped + zipped, "list": listed, "list with byte order mark": b"\xef\xbb\xbf \n" + listed,
        "packed list": gzip.compress(listed, 1, mtime=0), "indented list": json.dumps(records, indent=1).encode(),
        "parquet": table, "packed parquet": gzip.compress(table, 1, mtime=0), "zeros after gzip": zipped + bytes(9),
    }  # fmt: skip
    if draw.random() < 0.3:
        what = draw.choice(list(fine))
        return Case(what=f"{name} {what}", content=fine[what], must_fail=False)
    what, content, line = draw.choice(bad)
    return Case(what=f"{name} {what}", content=content, line=line)


_BOMB = gzip.compress(b"{" + bytes(20_000_000), 1, mtime=0)


def damaged(draw: random.Random) -> Case:
    """Bytes flipped, cut and put in by chance: it may still read, it must not crash and must not lose a record."""
    name = draw.choice(list(GOOD))
    records = good(draw, name)
    whole = draw.choice([jsonl(records), jsonl(records), document(draw, records)[0], parquet(draw, records)])
    content = bytearray(packed(draw, whole))
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(content) or 1)
        what = draw.choice(["flip", "cut", "insert", "end"])
        if what == "flip" and content:
            content[place] ^= 1 << draw.randrange(8)
        elif what == "cut":
            del content[place : place + draw.randint(1, 30)]
        elif what == "insert":
            content[place:place] = draw.choice(
                [b"\n", b"\0", b'"', b"{", b"\\", b"\xff", b"\r\n", b"\\ud800", b"[" * 50, b"\x1f\x8b"]
            )
        else:
            del content[place + 1 :]
    return Case(what=f"{name} damaged", content=bytes(packed(draw, bytes(content))), must_fail=False)


def too_large(draw: random.Random) -> Case:
    """One record that is longer than a line may be, in whichever container."""
    records = good(draw, "prompt_completion")
    number = draw.randrange(len(records))
    records[number]["completion"] = "é" * 600_000
    if draw.random() < 0.5:
        content = packed(draw, parquet(draw, records))
        return Case(what="too large a row", content=content, line=number + 1, row=True)
    content, line = laid_out(draw, "prompt_completion", records, number)
    return Case(what="too large a record", content=content, line=line)


def fifty_megabytes(draw: random.Random) -> Case:
    records = good(draw, "messages")
    return Case(what="fifty megabytes", content=jsonl(records) + b"x" * 50_000_000, line=len(records) + 1)


KINDS = (
    changed_field, not_understood, odd_text, null_in_parquet, bad_line, bad_line, whole_file, whole_file, damaged,
    damaged,
)  # fmt: skip


def make_case(number: int) -> Case:
    """Case `number` of the series, always the same."""
    draw = random.Random(f"{SEED}-{number}")
    if number % 100 == 50:
        return too_large(draw)
    return fifty_megabytes(draw) if number == 100 else KINDS[number % len(KINDS)](draw)


# --- the promise -----------------------------------------------------------------------------------------------------


def rows_in(content: bytes) -> int:
    """How many records a file holds, by another way than ours."""
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    if content.startswith(b"PAR1"):
        return pq.read_table(io.BytesIO(content)).num_rows
    text = content.removeprefix(b"\xef\xbb\xbf")
    lines = [line for line in text.split(b"\n") if line.strip()]
    if text.lstrip().startswith(b"[") or (lines[0].startswith((b'{"data": [', b'{"version": 1,'))):
        value = json.loads(text)
        return len(value if isinstance(value, list) else value.get("data", value.get("rows")))
    return len(lines)


def hold(number: int, folder: Path) -> bool:
    """Whether case `number` was refused, after checking that it was read whole or refused as it must be."""
    case = make_case(number)
    path = folder / f"{number}.{random.Random(number).choice(['jsonl', 'json', 'parquet', 'gz', 'txt'])}"
    path.write_bytes(case.content)
    what = f"case {number}, {case.what}"
    began = time.process_time()
    try:
        rows = sum(1 for _ in read_samples(find_dataset(str(path))))
    except InputError as error:
        assert error.exit_code == 3 and error.fix, what
        assert_reported(case, path, error.problem, what)
        return True
    finally:
        took = time.process_time() - began
        path.unlink()
        assert took < SECONDS, f"{what} took {took:.1f} s"
    assert not case.must_fail, f"{what} was accepted"
    assert rows == rows_in(case.content), f"{what}: a record was lost"
    return False


RECORD = r"( \(record \d+\))?"
"""Out of a JSON document, where a line may hold many."""


def named_in(case: Case, path: Path) -> str:
    """The place that a refusal must name, as a pattern."""
    place = f" row {case.line}: " if case.row else rf":{case.line}{RECORD}: " if case.line > 0 else ""
    return re.escape(str(path)) + place


def assert_reported(case: Case, path: Path, reported: str, what: str) -> None:
    assert len(reported) < 2_000, f"{what}: a message is not the file"
    assert reported.isprintable(), f"{what}: {reported!a}"
    if case.line > 0:
        assert re.search(named_in(case, path), reported), f"{what}: {reported}"
    elif case.line < 0 or not case.must_fail:
        whole = r" (is |has )|: (corrupt|the gzip data|Parquet)"
        assert re.match(rf"{re.escape(str(path))}(:\d+{RECORD}: | row \d+: |{whole})", reported), f"{what}: {reported}"
    else:
        assert reported.startswith(str(path)), f"{what}: {reported}"


def test_the_series_is_always_the_same_and_most_of_it_must_be_refused():
    cases = [make_case(number) for number in range(60)]
    assert cases == [make_case(number) for number in range(60)]
    assert sum(case.must_fail for case in cases) > 30


@pytest.mark.parametrize("block", range(20))
def test_a_mutated_data_file_is_read_whole_or_refused_by_file_and_line(block, tmp_path):
    refusals = [hold(number, tmp_path) for number in range(block * 10, block * 10 + 10)]
    assert any(refusals)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_five_thousand_mutated_data_files_are_read_whole_or_refused(block, tmp_path):
    for number in range(block * 100, block * 100 + 100):
        hold(number, tmp_path)


# --- by the program --------------------------------------------------------------------------------------------------

BY_THE_PROGRAM = [number for number in range(20) if make_case(number).must_fail][:7]


def arguments(path: Path, output: Path) -> list[str]:
    return [
        "train", "--model", "tiny-gemma3", "--data", str(path), "--output", str(output),
        "--set", "training.max_steps=1", "--set", "training.device=cpu",
    ]  # fmt: skip


def assert_refused(output: Path, reported: str, named: str) -> None:
    """What the program leaves behind: no traceback, the file and line, and a result that says so."""
    assert "Traceback" not in reported
    assert "\n  fix: " in reported
    assert re.search(named, reported)
    result = json.loads((output / "result.json").read_text(encoding="utf-8"))
    assert (result["status"], result["exit_code"]) == ("refused", 3)
    assert re.search(named, result["reason"])
    assert not (output / "metrics.jsonl").exists()


@pytest.mark.parametrize("number", BY_THE_PROGRAM)
def test_the_program_refuses_a_bad_data_file_with_exit_3_and_a_result(number, tmp_path):
    case, path, output = make_case(number), tmp_path / "my.jsonl", tmp_path / "run"
    path.write_bytes(case.content)
    ended = CliRunner().invoke(cli, arguments(path, output))
    assert ended.exit_code == 3, ended.output
    assert isinstance(ended.exception, SystemExit), "the error was not handled"
    assert_refused(output, ended.stderr, named_in(case, path))


def test_a_real_process_refuses_it_the_same_way(tmp_path):
    case, path, output = make_case(BY_THE_PROGRAM[0]), tmp_path / "my.jsonl", tmp_path / "run"
    path.write_bytes(case.content)
    reported = refused(tunix_rt(*arguments(path, output)), 3)
    assert_refused(output, reported, named_in(case, path))


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
    assert_refused(output, ended.stderr, re.escape(str(path)))
