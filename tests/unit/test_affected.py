"""`scripts/test --changed` runs the tests that a change can break, and no others."""

import pytest

from tests.affected import affected

FILES = {
    "src/tunix_rt/__init__.py": "",
    "src/tunix_rt/errors.py": "",
    "src/tunix_rt/data/__init__.py": "",
    "src/tunix_rt/data/packing.py": "from tunix_rt.errors import TunixError",
    "src/tunix_rt/data/reader.py": "from . import packing",
    "src/tunix_rt/engines/torch/loop.py": "",
    "src/tunix_rt/engines/base.py": "import_module(f'tunix_rt.engines.{name}.loop')",
    "src/tunix_rt/cli/main.py": "VERBS = {'data': ('data', ''), 'plan': ('plan', '')}\nimport_module(f'tunix_rt.cli.{verb}')",
    "src/tunix_rt/cli/data.py": "def check():\n    from tunix_rt.data.reader import read",
    "src/tunix_rt/cli/plan.py": "",
    "tests/helper.py": "from tunix_rt.data import packing",
    "tests/unit/test_packing.py": "from tunix_rt.data.packing import pack",
    "tests/unit/test_patched.py": "patch.setattr('tunix_rt.data.packing.pack', None)",
    "tests/unit/test_helped.py": "from tests.helper import packing",
    "tests/unit/test_engines.py": "from tunix_rt.engines import base",
    "tests/unit/test_errors.py": '"""Not tunix_rt.data.packing."""\nfrom tunix_rt.errors import TunixError',
    "tests/unit/test_words.py": "WORDS = ['data', 'plan']",
    "tests/unit/test_table.py": "PATH = ROOT / 'facts' / 'low-ram.json'",
    "tests/e2e/test_data.py": "from tunix_rt.cli.main import cli\ninvoke(cli, ['data', 'check'])",
    "tests/e2e/test_plan.py": "from tunix_rt.cli.main import cli\ninvoke(cli, ['plan'])",
}
ALL = sorted(name for name in FILES if "/test_" in name)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tests/unit/test_errors.py", ["unit/test_errors"]),
        ("tests/helper.py", ["unit/test_helped"]),
        (
            "src/tunix_rt/data/packing.py",
            ["e2e/test_data", "unit/test_helped", "unit/test_packing", "unit/test_patched"],
        ),
        ("src/tunix_rt/data/reader.py", ["e2e/test_data"]),
        ("src/tunix_rt/cli/plan.py", ["e2e/test_plan"]),
        ("src/tunix_rt/cli/main.py", ["e2e/test_data", "e2e/test_plan"]),
        ("src/tunix_rt/engines/torch/loop.py", ["unit/test_engines"]),
        ("src/tunix_rt/data/packing_of_old.py", []),
        ("tests/facts/low-ram.json", ["unit/test_table"]),
        ("notes.txt", []),
    ],
)
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
