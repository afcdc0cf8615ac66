"""The figures of the solver and of the speed it orders by, in docs/concepts/memory-model.md: what it proposed, and what ran.

Raw output is in benchmarks/results. What is predicted now is what the code says when the page is written.
"""

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import solver_cases
from docs.markdown import table
from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.models.resolve import resolve_architecture
from tunix_rt.plan import speed
from tunix_rt.plan.fit import predict_run, verdict
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.solver import faster, solve
from tunix_rt.plan.speed import KNOWN_RANGE, step_time

RESULTS = Path("benchmarks/results")
GIB = 2**30
H200, HOPPER = "NVIDIA H200", (9, 0)


def read(root: Path, name: str) -> Any:
    return json.loads((root / RESULTS / name).read_text(encoding="utf-8"))


@cache
def shape_named(preset: str) -> ModelShape:
    return shape_of(resolve_architecture(preset).config)


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def assigned(module: ModuleType) -> Iterator[tuple[list[str], str]]:
    """Names in capitals that are assigned together at the top of a module, and the docstring below them."""
    body = ast.parse(inspect.getsource(module)).body
    for one, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(one, ast.Assign):
            names = [node.id for target in one.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            said = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            if all(name.isupper() for name in names):
                yield names, " ".join(str(said).split())


def constants_block() -> str:
    rows = [
        (said, ", ".join(f"`{name}`" for name in names), ", ".join(_spoken(getattr(speed, name)) for name in names))
        for names, said in assigned(speed)
        if said and all(isinstance(getattr(speed, name), int | float | tuple) for name in names)
    ]
    return table(("what it stands for", "names", "values"), rows)


def _spoken(value: Any) -> str:
    return " to ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else f"{value:g}"


# --- proposals -----------------------------------------------------------------------------------------------------


def _changed(settings: Mapping[str, Any]) -> str:
    """The settings of a proposal, short enough for a table."""
    short = {
        "training.per_device_train_batch_size": "rows", "training.gradient_accumulation_steps": "accumulation",
        "training.gradient_checkpointing": "checkpointing", "evaluation.per_device_eval_batch_size": "questions",
    }  # fmt: skip
    words = [f"{short.get(name, name.partition('.')[2])} {str(value).lower()}" for name, value in settings.items()]
    return ", ".join(words) or "as written"


def proposals_block(root: Path) -> str:
    found = read(root, "solver_cases.json")["cases"]
    rows = [
        (case["name"], gib(case["predicted_as_written_bytes"]), _changed(case["settings"]), f"{case['level']}",
         gib(case["predicted_bytes"]), gib(case["peak_bytes"]) if case["peak_bytes"] else "",
         "ran" if case["fits"] else "did not run")
        for case in sorted(found, key=lambda case: str(case["name"]))
    ]  # fmt: skip
    columns = (
        "case and cap", "GiB as written", "first proposal", "level", "predicted GiB", "measured GiB", "under the cap",
    )  # fmt: skip
    return (
        table(columns, rows) + f"\n\n{sum(case['fits'] for case in found)} of {len(found)} ran. "
        f"`python -m benchmarks.solver_cases`; raw output in `{RESULTS / 'solver_cases.json'}`."
    )


def predicted_speed(preset: str, config: RunConfig) -> float:
    """Tokens in a second, by the code as it is now."""
    shape = shape_named(preset)
    layers = predict_run(shape, config, device="cuda", capability=HOPPER, device_name=H200).layers
    return step_time(
        shape, config, solver_cases.H200, device="cuda", capability=HOPPER, layers=layers,
    ).tokens_per_second  # fmt: skip


def order_block(root: Path) -> str:
    written = {name: (preset, RunConfig.model_validate(settings)) for name, preset, settings, _ in solver_cases.cases()}
    rows, within = [], 0
    for case in read(root, "solver_order.json")["cases"]:
        preset, config = written[case["name"]]
        for place, one in enumerate(case["proposals"], start=1):
            now = predicted_speed(preset, with_settings(config, one["settings"]))
            speeds = (one["predicted_tokens_per_second"], one["tokens_per_second"], now)
            within += KNOWN_RANGE[0] <= now / one["tokens_per_second"] <= KNOWN_RANGE[1]
            rows.append((
                case["name"], f"{place}", _changed(one["settings"]), *(f"{one:,.0f}" for one in speeds),
                "yes" if case["in_order"] else "no",
            ))  # fmt: skip
    columns = (
        "case and cap", "predicted place", "settings", "predicted then", "measured tokens/s", "predicted now", "in order",
    )  # fmt: skip
    low, high = KNOWN_RANGE
    return (
        table(columns, rows)
        + f"\n\nOf {len(rows)} steps, {within} took between {low:g} and {high:g} times the seconds that are "
        f"predicted now, the range that a plan states. Raw output in `{RESULTS / 'solver_order.json'}`."
    )


def auto_block(root: Path) -> str:
    found = read(root, "solver_auto.json")
    config, shape = RunConfig.model_validate(found["written"]), shape_named("gemma-2b")
    plan = predict_run(shape, config, device="cuda", capability=HOPPER, device_name=H200)
    rows, same = [], 0
    for case in found["cases"]:
        cap = solver_cases.Capped(
            device="cuda", kind=H200, free_bytes=int(case["cap_gib"] * GIB), capability=HOPPER
        )  # fmt: skip
        search = faster if verdict(plan, cap).fits else solve
        chosen = next(iter(search(plan, cap, shape, config, solver_cases.H200)), None)
        same += (chosen.settings if chosen else {}) == case["settings"]
        now = predicted_speed("gemma-2b", with_settings(config, case["settings"]))
        rows.append((
            f"{case['cap_gib']:g}", _changed(case["settings"]), f"{case['level']}", gib(case["predicted_bytes"]),
            gib(case["peak_bytes"]), f"{case['predicted_tokens_per_second']:,.0f}", f"{case['tokens_per_second']:,.0f}",
            f"{now:,.0f}",
        ))  # fmt: skip
    columns = (
        "cap GiB", "settings", "level", "predicted GiB", "measured GiB", "predicted then", "measured tokens/s", "predicted now",
    )  # fmt: skip
    return (
        table(columns, rows)
        + f"\n\nThe planner of today settles on the same for {same} of {len(rows)} caps. Raw output in "
        f"`{RESULTS / 'solver_auto.json'}`."
    )
