"""Every kind of file that users bring: it is read as it is, or refused by its name with a fix that works when it is followed."""

import gzip
import io
import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.program import in_process, refused
from tests.tables import tables

KINDS = tables(__file__)["kinds"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def content_of(kind: dict[str, Any]) -> bytes:
    pack = kind.get("pack")
    if pack == "parquet":
        pq.write_table(pa.Table.from_pylist(kind["rows"]), file := io.BytesIO())
        return file.getvalue()
    if pack in ("xlsx", "zip"):
        with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
            archive.writestr("xl/workbook.xml" if pack == "xlsx" else "a.jsonl", kind.get("inside", ""))
        return file.getvalue()
    text = kind["content"]
    if "grow" in kind:
        mark, size = kind["grow"]
        text = text.replace(mark, "word " * (size // 5))
    content = text.encode(kind.get("encoding", "utf-8"), "surrogateescape")
    return gzip.compress(content) if pack == "gzip" else content


def check(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return in_process("data", "check", name, "--json", *options)


def accepted(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def follow(step: dict[str, Any], kind: dict[str, Any], fix: str) -> dict[str, Any]:
    """The outcome of `data check` after the fix: an option it prints, a command it prints, or the change it describes."""
    name, options = kind["file"], list(step.get("options", ()))
    settings = [word for setting in kind.get("settings", ()) for word in ("--set", setting)]
    if options:
        assert shlex.join(options) in fix
    if "found" in step:
        options = ["--set", re.search(step["found"], fix).group()]
    if "command" in step:
        command = re.search(r'python (-c ".*?".*)$', fix, flags=re.MULTILINE).group(1)
        for word, value in step.get("replace", {}).items():
            command = command.replace(word, value)
        subprocess.run(f"{sys.executable} -S {command}", shell=True, check=True)
        name = step["command"]
    if "edit" in step:
        old, new = (part.encode("utf-8", "surrogateescape") for part in step["edit"])
        Path(name).write_bytes(content_of(kind).replace(old, new))
    if "recode" in step:
        Path(name).write_text(kind["content"], encoding=step["recode"])
    if "write" in step:
        Path(step["write"][0]).write_text(step["write"][1], encoding="utf-8", newline="")
    if "unzip" in step:
        zipfile.ZipFile(name).extract(step["unzip"])
    return accepted(check(step.get("use", name), *settings, *options))


@pytest.mark.parametrize("kind", KINDS, ids=[kind["kind"] for kind in KINDS])
def test_a_file_is_read_or_refused_by_its_name_and_every_fix_works(kind: dict[str, Any]) -> None:
    Path(kind["file"]).write_bytes(content_of(kind))
    settings = [word for setting in kind.get("settings", ()) for word in ("--set", setting)]
    done = check(kind["file"], *settings, *kind.get("options", ()))
    if "format" in kind:
        seen = accepted(done)
        assert (seen["dataset"]["format"], seen["examples"]) == (kind["format"], kind["examples"])
        assert [finding["rule"] for finding in seen["findings"]] == kind.get("warns", [])
        if "how" in kind:
            assert f"{kind['file']}: {kind['how']}" in " ".join(
                in_process("data", "check", kind["file"]).stdout.split()
            )
        return
    message = refused(done, 3)
    assert [words for words in kind["says"] if words not in message] == [], message
    fix = message.partition("  fix: ")[2]
    for step in kind["then"]:
        Path(kind["file"]).write_bytes(content_of(kind))
        seen = follow(step, kind, fix)
        assert (seen["examples"], seen["skipped"]) == (step["examples"], step.get("skipped", 0)), step


def test_there_are_as_many_kinds_as_users_brought() -> None:
    assert len(KINDS) >= 73 and len({kind["kind"] for kind in KINDS}) == len(KINDS)
