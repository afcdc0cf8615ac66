"""CONTRIBUTING.md draws the layers that import-linter enforces, and no module has a name that a reader must guess."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_NAMES = {
    "utils", "helpers", "common", "core", "manager", "told", "gathered", "agreeing", "bringing", "asking", "fitting",
}  # fmt: skip


def test_the_diagram_in_contributing_is_the_contract_of_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawn = re.search(r"```text\n(cli >.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert drawn is not None
    assert [" ".join(layer.split()) for layer in drawn[1].split(">")] == layers


def test_no_module_is_named_by_a_participle_or_holds_whatever_is_left_over() -> None:
    nouns = {"scoring", "packing", "sharding", "profiling", "decoding", "timing", "speed", "sampling"}  # of the field
    names = {path.stem for path in (ROOT / "src").rglob("*.py")}
    assert not names & NO_NAMES
    assert not {name for name in names if name.endswith(("ing", "ed")) and name not in nouns}


def test_modules_functions_and_the_pipeline_stay_within_their_budgets() -> None:
    paths = sorted((ROOT / "src" / "tunix_rt").rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    assert lines / len(paths) > 140  # no module for a single function
    long = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        long += [f"{path.name}: {lines} lines"] if (lines := len(text.splitlines())) > 400 else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 60:
                long.append(f"{path.name}: {node.name}")
    assert long == []
    assert len((ROOT / "src" / "tunix_rt" / "pipeline.py").read_text().splitlines()) < 150


def test_engines_are_typed_and_seldom_compared_by_name() -> None:
    """What an engine supports is data in `config/capabilities.py`."""
    outside = [path for path in (ROOT / "src").rglob("*.py") if "engines" not in path.parts]
    text = "\n".join(path.read_text(encoding="utf-8") for path in outside)
    assert not re.search(r"\b(engine|backend): Any\b", text)
    assert len(re.findall(r'[=!]= "(?:jax|torch)"', text)) <= 20
