"""scripts/size: the weight of the code in lines that a reader has to follow."""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCE = '''\
"""A module's docstring
over two lines."""

# a comment
import os  # counted once


def where(name: str) -> str:
    """A function's docstring."""
    "another bare string"
    text = """assigned:
    # part of the string

    """
    return os.path.join(
        name,
        text,
    )
'''


def size(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "scripts" / "size", *arguments], capture_output=True, text=True)


def totals(output: str) -> dict[str, int]:
    return {name: int(lines) for name, lines in (line.rsplit(maxsplit=1) for line in output.splitlines())}


def test_comments_docstrings_and_blank_lines_weigh_nothing_and_other_strings_do(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text("x = 1\n\n\ny = 2; z = 3\n")
    (tmp_path / "notes.txt").write_text("not Python\n")
    assert totals(size(tmp_path).stdout) == {str(tmp_path): 10 + 2, "sum": 12}
    both = size(tmp_path / "two.py", tmp_path)  # a file under two paths is counted under the first of them
    assert totals(both.stdout) == {str(tmp_path / "two.py"): 2, str(tmp_path): 10, "sum": 12}


def test_a_path_without_python_and_an_unknown_commit_are_errors(tmp_path: Path) -> None:
    for wrong in (size(tmp_path), size("--at", "no-such-commit")):
        assert wrong.returncode == 1 and wrong.stderr.startswith("error: ") and "\n  fix: " in wrong.stderr


def test_the_evidence_code_is_counted_part_by_part_and_at_any_commit() -> None:
    now = totals(size().stdout)
    assert list(now) == ["replay", "evidence", "runs", "cli/evidence.py", "sum"]
    assert now["evidence"] > 0 and now["sum"] == sum(now.values()) - now["sum"]
    baseline = "acff5a2"
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", f"{baseline}^{{commit}}"], capture_output=True).returncode:
        pytest.skip(f"this clone has no commit {baseline}")
    assert totals(size("--at", baseline).stdout)["sum"] == 5956
