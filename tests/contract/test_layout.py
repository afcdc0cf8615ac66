"""CONTRIBUTING.md draws the layers that import-linter enforces, and no module has a name that a reader must guess."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_NAMES = {
    "utils",
    "helpers",
    "common",
    "core",
    "manager",
    "told",
    "gathered",
    "agreeing",
    "bringing",
    "asking",
    "fitting",
}


def test_the_diagram_in_contributing_is_the_contract_of_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawn = re.search(r"```text\n(cli >.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert drawn is not None
    assert [" ".join(layer.split()) for layer in drawn[1].split(">")] == layers


def test_no_module_is_named_by_a_participle_or_holds_whatever_is_left_over() -> None:
    nouns = {"scoring", "packing", "profiling", "decoding", "timing", "speed"}  # of the field
    names = {path.stem for path in (ROOT / "src").rglob("*.py")}
    assert not names & NO_NAMES
    assert not {name for name in names if name.endswith(("ing", "ed")) and name not in nouns}
