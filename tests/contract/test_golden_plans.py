"""The planner's figures for every preset on every device of the catalogue are those of `tests/golden/plan`.

    python -m tests.contract.test_golden_plans --write      writes the files anew; commit them with the reason

The files contain numbers and settings only. Left out: prose (advice, costs, reasons), names of execution modes, the
seconds that planning took and the free disk of this computer. Parts of zero bytes are left out too. Floats have 12
significant digits and are compared to 1e-9, because `sum` of Python 3.12 rounds otherwise than that of 3.11.
"""

import json
import math
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tests.tables import tables
from tunix_rt.cli.main import cli

GOLDEN = ROOT / "tests" / "golden" / "plan"
PRESETS = sorted(folder.name for folder in (ROOT / "presets").iterdir())
RECIPES = tables(__file__)["recipes"]
"""Name -> options for `plan --on all`, and the device whose run is also planned in hours and disk space."""
MEMORY = (
    "peak_bytes",
    "least_bytes",
    "context_bytes",
    "pool_bytes",
    "parameters",
    "rows",
    "row_tokens",
    "eval_rows",
    "generation_rows",
)
PROPOSAL = ("predicted_bytes", "tokens_per_second", "level", "settings")
SHOWN = 40


def plan(preset: str, *options: str) -> tuple[int, dict[str, Any] | None]:
    done = CliRunner().invoke(cli, ["plan", "--model", preset, *options, "--json"])
    return done.exit_code, json.loads(done.stdout) if done.stdout else None


def digits(value: Any) -> Any:
    return float(f"{value:.12g}") if isinstance(value, float) else value


def summary(device: dict[str, Any]) -> dict[str, Any]:
    """The verdict, memory by phase, speed and the proposed settings for one device."""
    memory, fit = device["memory"], device["fit"]
    phases = {
        phase["name"]: {"total": phase["total_bytes"]} | {name: part for name, part in phase["parts"].items() if part}
        for phase in memory["phases"]
    }

    def listed(proposals: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: digits(one[name]) for name in PROPOSAL} for one in proposals]

    return {
        "runs": device["runs"],
        "unable": bool(device["unable"]),
        "compiler_decides": device["compiler_decides"],
        "fits": fit["fits"],
        "available_bytes": fit["available_bytes"],
        "margin_bytes": fit["margin_bytes"],
        "tokens_per_second": digits(device["time"] and device["time"]["tokens_per_second"]),
        "proposals": listed(device["proposals"]),
        "faster": listed(device["faster"]),
        "last_resorts": [re.findall(r"--set (\S+)", line) for line in device["last_resorts"]],
        "memory": {name: memory[name] for name in MEMORY} | {"phases": phases},
    }


@cache
def planned(preset: str) -> dict[str, Any]:
    """Recipe -> {"exit_code", "devices": name -> summary, "run": hours and disk on one device}."""
    found: dict[str, Any] = {}
    for recipe, (options, one) in RECIPES.items():
        code, on_all = plan(preset, *options.split(), "--on", "all")
        devices = on_all["devices"] if on_all else []
        found[recipe] = {"exit_code": code, "devices": {each["device"]["name"]: summary(each) for each in devices}}
        if on_all:
            code, single = plan(preset, *options.split(), "--on", one)
            assert single is not None
            run = {name: digits(value) for name, value in (single["run"] or {}).items()}
            found[recipe]["run"] = {"on": one, "exit_code": code, "disk_bytes": single["disk_bytes"], **run}
    return found


# --- files: a plan of memory that several devices share is written once, under the name of the first ----------------------


def written(plans: dict[str, Any]) -> str:
    """One device a line, so that a diff shows which devices changed."""
    parts = []
    for recipe, value in plans.items():
        first: dict[str, str] = {}
        memory, devices = {}, {}
        for name, device in value["devices"].items():
            owner = first.setdefault(json.dumps(device["memory"]), name)
            memory[owner] = device["memory"]
            devices[name] = {**device, "memory": owner}
        tables = {**value, "memory": memory, "devices": devices}
        parts.append(json.dumps(recipe) + ": {\n" + ",\n".join(map(_table, tables.items())) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _table(item: tuple[str, Any]) -> str:
    name, value = item
    if name not in ("memory", "devices") or not value:
        return f" {json.dumps(name)}: {json.dumps(value)}"
    lines = [f"  {json.dumps(key)}: {json.dumps(one, separators=(',', ':'))}" for key, one in value.items()]
    return f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }"


def read(path: Path) -> dict[str, Any]:
    plans: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for value in plans.values():
        memory = value.pop("memory")
        for device in value["devices"].values():
            device["memory"] = memory[device["memory"]]
    return plans


# --- comparison -------------------------------------------------------------------------------------------------------


def changes(expected: Any, actual: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    """Every changed value with its path. A key that has another name and the same values is one line."""
    if isinstance(expected, list) and isinstance(actual, list):
        expected, actual = ({str(at): one for at, one in enumerate(values)} for values in (expected, actual))
    if not (isinstance(expected, dict) and isinstance(actual, dict)):
        return [] if _equal(expected, actual) else [(path, f"{_short(expected)} -> {_short(actual)}")]
    found = []
    added = [name for name in actual if name not in expected]
    for name, value in expected.items():
        if name in actual:
            found += changes(value, actual[name], (*path, name))
            continue
        twin = next((other for other in added if not changes(value, actual[other])), None)
        if twin is not None:
            added.remove(twin)
        gone = f"renamed to {twin!r}, same values" if twin is not None else f"{_short(value)} -> missing"
        found.append(((*path, name), gone))
    return found + [((*path, name), f"missing -> {_short(actual[name])}") for name in added]


def _equal(expected: Any, actual: Any) -> bool:
    if isinstance(expected, float) or isinstance(actual, float):
        numbers = all(isinstance(value, int | float) for value in (expected, actual))
        return numbers and math.isclose(expected, actual, rel_tol=1e-9)
    return type(expected) is type(actual) and bool(expected == actual)


def _short(value: Any) -> str:
    text = f"{value:,}" if type(value) is int else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def listing(found: list[tuple[tuple[str, ...], str]]) -> str:
    """A change that several devices share is one line with their names."""
    places: dict[tuple[tuple[str, ...], str], list[str]] = defaultdict(list)
    for path, text in found:
        at = 2 if len(path) > 3 and path[1] == "devices" else None
        rest = path if at is None else (path[0], *path[at + 1 :])
        places[rest, text].append("" if at is None else path[at])
    lines = []
    for (rest, text), devices in places.items():
        more = f" and {len(devices) - 4} more" if len(devices) > 4 else ""
        where = f"  [{', '.join(devices[:4])}{more}]" if devices[0] else ""
        lines.append(f"{' / '.join(rest)}: {text}{where}")
    shown = lines[:SHOWN] + [f"and {len(lines) - SHOWN} more lines"] * (len(lines) > SHOWN)
    return "\n".join([f"{len(found):,} values changed:", *shown])


# --- promises ---------------------------------------------------------------------------------------------------------


def test_every_preset_has_golden_figures_and_no_other_does():
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_the_plan_of_a_preset_has_the_golden_figures_on_every_device(preset):
    found = changes(read(GOLDEN / f"{preset}.json"), planned(preset))
    assert not found, f"{listing(found)}\nintended: python -m tests.contract.test_golden_plans --write"


def test_a_changed_byte_is_listed_with_its_path_and_its_devices():
    plans = {"torch": {"devices": {name: {"memory": {"loss": 5}, "speed": 1.5} for name in ("t4", "l4")}}}
    changed = {"torch": {"devices": {name: {"memory": {"loss": 6}, "speed": 1.5 + 1e-12} for name in ("t4", "l4")}}}
    assert listing(changes(plans, changed)).splitlines() == [
        "2 values changed:", "torch / memory / loss: 5 -> 6  [t4, l4]",
    ]  # fmt: skip
    renamed = {"torch": {"devices": {name: {"memory": {"head": 5}, "speed": 1.5} for name in ("t4", "l4")}}}
    assert "loss: renamed to 'head', same values" in listing(changes(plans, renamed))


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        sys.exit("error: nothing to do\n  fix: python -m tests.contract.test_golden_plans --write")
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for path in GOLDEN.glob("*.json"):
        path.unlink()
    for preset in PRESETS:
        path = GOLDEN / f"{preset}.json"
        path.write_text(written(planned(preset)), encoding="utf-8")
        assert not changes(read(path), planned(preset))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
