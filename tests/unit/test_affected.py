"""`scripts/test --changed` runs the tests that a change can break, and no others."""

import pytest

from scripts.affected import affected
from tests.tables import parametrize, tables

FILES = tables(__file__)["files"]
ALL = sorted(name for name in FILES if "/test_" in name)


@parametrize("changed", "expected")
def test_a_change_affects_the_tests_that_depend_on_it_and_no_others(tmp_path, changed, expected):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert affected(tmp_path, [changed]) == [f"tests/{name}.py" for name in expected]
    if changed in FILES and "/test_" not in changed:
        (tmp_path / changed).unlink()
        assert affected(tmp_path, [changed]) == [f"tests/{name}.py" for name in expected], (
            "deleted, it is missed by the same"
        )


@pytest.mark.parametrize("changed", ["pyproject.toml", "tests/conftest.py", "tests/e2e/conftest.py", "scripts/setup"])
def test_what_configures_all_tests_affects_all(tmp_path, changed):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert affected(tmp_path, [changed, "notes.txt"]) == ALL
