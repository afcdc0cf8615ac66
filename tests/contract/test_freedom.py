"""Wording and module names are free to change: a copy of the source with every log message, the README of bundles, samples.md and
all docstrings reworded and three modules renamed gives every bundle the level it had."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.program import ROOT, environment

pytestmark = pytest.mark.slow

RENAMED = {
    "tunix_rt.evaluate.comparison": "tunix_rt.evaluate.recap",
    "tunix_rt.runs.ledger": "tunix_rt.account_books",
    "tunix_rt.doctor.selection": "tunix_rt.doctor.phrases",
}
LEVELS = ("debug", "info", "warning", "error")
WORD = " (reworded)"
CHECK = """
import importlib.util, json, sys
from pathlib import Path
from tunix_rt.errors import TunixError
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.readme import readme_text

def level(folder):
    try:
        found = examine(folder)
    except TunixError as error:
        return error.problem
    text = readme_text(json.loads((folder / "run_manifest.json").read_text(encoding="utf-8")))
    other = text != (folder / "README.md").read_text(encoding="utf-8")
    return [found.level, [finding.problem for finding in found.findings], other]

bundles, renamed = json.load(sys.stdin)
names = {name: importlib.util.find_spec(name) is not None for pair in renamed.items() for name in pair}
print(json.dumps({"names": names, "levels": {bundle: level(Path(bundle)) for bundle in bundles}}))
"""


@pytest.fixture(scope="module")
def reworded(tmp_path_factory) -> tuple[Path, int]:
    """The copy, and how many log messages in it are others."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src" / "tunix_rt", copy / "src" / "tunix_rt", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("models", "presets", "datasets", "evalsets", "training"):
        (copy / name).symlink_to(ROOT / name)
    messages = 0
    for path in sorted((copy / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        messages += sum(_reword(call.args[0]) for call in _log_calls(tree))
        for part in _prose(tree, path):
            _reword_strings(part)
        _edit_docstring(tree)
        _rename_imports(tree)
        path.write_text(ast.unparse(tree) + "\n", encoding="utf-8")
    for old, new in RENAMED.items():
        before, after = (copy / "src" / f"{name.replace('.', '/')}.py" for name in (old, new))
        before.rename(after)
    return copy, messages


# --- the codemod ------------------------------------------------------------------------------------------------------


def _log_calls(tree: ast.Module) -> Iterator[ast.Call]:
    names = {f"logger.{level}" for level in LEVELS}
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names)


def _reword(node: ast.expr) -> bool:
    """Append a word to a literal or an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node.value += WORD
    elif isinstance(node, ast.JoinedStr):
        node.values.append(ast.Constant(WORD))
    else:
        return False
    return True


def _prose(tree: ast.Module, path: Path) -> Iterator[ast.AST]:
    """What the README of a bundle and samples.md are made of."""
    if path.name == "readme.py":
        yield tree
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    yield from (function for function in functions if function.name == "samples_markdown")


def _reword_strings(root: ast.AST) -> None:
    """Every sentence; not patterns."""
    patterns = [
        node for node in ast.walk(root) if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")
    ]
    skipped = {id(inner) for pattern in patterns for inner in ast.walk(pattern)}
    for node in ast.walk(root):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in skipped
        ):
            node.value += WORD


def _edit_docstring(tree: ast.Module) -> None:
    if ast.get_docstring(tree) is not None:
        first = tree.body[0]
        assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        first.value.value = f"{first.value.value}{WORD}"


def _rename_imports(tree: ast.Module) -> None:
    """`from package import module` keeps the name that the code below uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in RENAMED:
            node.module = RENAMED[node.module]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if new := RENAMED.get(f"{node.module}.{alias.name}"):
                    alias.asname, alias.name = alias.asname or alias.name, new.rpartition(".")[2]


# --- the promise ------------------------------------------------------------------------------------------------------


def test_every_bundle_keeps_its_level_when_wording_and_module_names_change(reworded):
    copy, messages = reworded
    bundles = [str(file.parent) for file in sorted((ROOT / "submission_runs").glob("*/run_manifest.json"))]
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHECK], input=json.dumps([bundles, RENAMED]), cwd=copy, text=True, capture_output=True,
        env=environment(PYTHONPATH=str(copy / "src")), timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert bundles and found["levels"] == {bundle: ["L1", [], True] for bundle in bundles}, (
        "L1, no finding, another README"
    )
    assert found["names"] == {name: name in RENAMED.values() for pair in RENAMED.items() for name in pair}
    assert messages >= 90


def test_the_copy_differs_in_every_package(reworded):
    copy, _ = reworded
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "src" / "tunix_rt").rglob("__init__.py")}
    assert len(packages) > 10
    for package in packages:
        assert any(
            WORD in (ast.get_docstring(ast.parse(path.read_text())) or "") for path in (copy / package).glob("*.py")
        )
