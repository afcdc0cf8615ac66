"""What the TPU's compiler said: in docs/decisions/m38-audit.md, read from benchmarks/results/tpu_verdicts.json; beside what the
plan says, in docs/reference/plan-tpu.md, read from benchmarks/results/plan_against_compiler.json."""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import plan_against_compiler, tpu_verdicts
from docs.markdown import replaced, table, with_block

PAGE = Path("docs/decisions/m38-audit.md")
PLAN_PAGE = Path("docs/reference/plan-tpu.md")
ARRAYS = Path("benchmarks/results/tpu_arrays.txt")
"""The largest arrays of some steps with their place in memory, as the compiler lists them (XLA_FLAGS=--xla_dump_to=FOLDER)."""
GIB = 2**30
RECONSTRUCTED = ("m38", "m38_bfloat16", "published_adamw", "published_adafactor")
CUT = ("submission", "submission_kept", "gemma_2b", "gemma_2b_one_hot", "gemma_3_1b", "gemma_3_1b_one_hot")
ONE_CHIP = ("one_chip_gemma_2b", "one_chip_gemma_2b_float32", "one_chip_gemma_3_1b", "one_chip_gemma_3_270m")
PUBLISHED_GIB, USABLE_GIB = 28.59, 15.75
"""Of the predecessor's message: `Used 28.59G of 15.75G hbm`."""


def page(root: Path) -> str:
    """The audit with its three tables as they should be now."""
    text = (root / PAGE).read_text(encoding="utf-8")
    for name, block in (
        ("reconstructed", reconstructed_block),
        ("accepted", accepted_block),
        ("one_chip", one_chip_block),
    ):
        text = replaced(text, name, block(root), PAGE)
    return text


def reconstructed_block(root: Path) -> str:
    """The setting of M38 and the predecessor's step, with the distance of each from the published figure."""
    entries = tpu_verdicts.recorded(root)
    messages = [
        f"The message of the first: `{_first_line(entries['m38'])}`"
        if "m38" in entries and not entries["m38"]["fits"]
        else ""
    ]
    if adamw := entries.get("published_adamw"):
        needed = _needed(adamw)
        messages.append(
            f"The predecessor's figure is {PUBLISHED_GIB} G wanted of {USABLE_GIB} G. AdamW in its way of calling it wants "
            f"{needed / GIB:.2f} G, {abs(needed / GIB - PUBLISHED_GIB):.2f} G from it."
        )
    return "\n\n".join([_table(entries, RECONSTRUCTED), *filter(None, messages), _made_with(entries, RECONSTRUCTED)])


def accepted_block(root: Path) -> str:
    entries = tpu_verdicts.recorded(root)
    return "\n\n".join([_table(entries, CUT), _made_with(entries, CUT)])


def one_chip_block(root: Path) -> str:
    entries = tpu_verdicts.recorded(root)
    return "\n\n".join([_table(entries, ONE_CHIP), _made_with(entries, ONE_CHIP)])


def _table(entries: Mapping[str, Any], names: Iterable[str]) -> str:
    columns = (
        "what was compiled",
        "rows x tokens a chip",
        "verdict",
        "state",
        "temporaries",
        "total GiB a chip",
        "peak",
    )
    abouts = {asked.name: asked.about for asked in tpu_verdicts.CASES}
    rows = []
    for name in names:
        if name not in entries:
            rows.append((abouts[name], "", "not asked yet", "", "", "", ""))
            continue
        entry, verdict = entries[name], entries[name]["verdict"]
        size = f"{verdict['rows'] // verdict['devices']} x {verdict['tokens']}"
        if memory := verdict["memory"]:
            figures = (memory["arguments"], memory["temporaries"], entry["total"], memory["peak"])
            rows.append((entry["about"], size, "fits", *(f"{figure / GIB:.2f}" for figure in figures)))
        else:
            refusal = verdict["refusal"]
            said = f"{refusal['temporaries'] / GIB:.2f}" if refusal["temporaries"] else ""
            rows.append((entry["about"], size, "**refused**", "", said, f"over {_usable(verdict):.2f}", ""))
    return table(columns, rows)


def _made_with(entries: Mapping[str, Any], names: Iterable[str]) -> str:
    asked = [entries[name]["verdict"] for name in names if name in entries]
    versions = sorted(
        {f"jax {verdict['versions']['jax']}, libtpu {verdict['versions']['libtpu']}" for verdict in asked}
    )
    seconds = (
        f"{min(v['seconds'] for v in asked):.0f} to {max(v['seconds'] for v in asked):.0f} s to compile"
        if asked
        else ""
    )
    said = "; ".join(filter(None, (*versions, seconds)))
    with_what = f"{said}; " if said else ""
    return f"`python -m benchmarks.tpu_verdicts`; {with_what}raw output in `{tpu_verdicts.RESULTS}`. No TPU was used."


def _usable(verdict: Mapping[str, Any]) -> float:
    return (verdict["usable"] or 0) / GIB


def _needed(entry: Mapping[str, Any]) -> int:
    return entry["total"] if entry["fits"] else entry["verdict"]["refusal"]["needed"]


def _first_line(entry: Mapping[str, Any]) -> str:
    return entry["verdict"]["refusal"]["message"].splitlines()[0]


# --- the plan beside the compiler ------------------------------------------------------------------------------------


def plan_page(root: Path) -> str:
    """The page of the plan for a TPU with its table as it should be now."""
    return with_block(root, PLAN_PAGE, "plan", plan_block(root))


def plan_block(root: Path) -> str:
    """The lower bound of every compiled setting beside the compiler's figures."""
    entries = plan_against_compiler.recorded(root)
    columns = ("setting, rows on each chip", "at least GiB", "compiler's peak", "share of it", "compiler's total")
    rows = []
    for name, entry in entries.items():
        floor = f"{entry['floor_bytes'] / GIB:.2f}"
        if not entry["fits"]:
            needed = entry["verdict"]["refusal"]["needed"] / GIB
            rows.append((name, floor, "**refused**", "", f"over {needed:.2f}"))
            continue
        peak, total = (f"{entry['compiler_bytes'][kind] / GIB:.2f}" for kind in ("peak", "total"))
        rows.append((name, floor, peak, f"{entry['floor_share']:.0%}", total))
    shares = [entry["floor_share"] for entry in entries.values() if entry["fits"]]
    spread = f"The lower bound is {min(shares):.0%} to {max(shares):.0%} of the peak, median {statistics.median(shares):.0%}."
    missing = len(plan_against_compiler.ALL) - len(entries)
    versions = sorted({_versions(entry["verdict"]) for entry in entries.values()})
    left = f" {missing} settings are not compiled yet." if missing else ""
    raw = f"raw output in `{plan_against_compiler.RESULTS}`, lists of arrays in `{ARRAYS}`"
    made = f"`python -m benchmarks.plan_against_compiler`; {'; '.join(versions)}; {raw}."
    return "\n\n".join([table(columns, rows), spread, made + left])


def _versions(verdict: Mapping[str, Any]) -> str:
    return f"jax {verdict['versions']['jax']}, libtpu {verdict['versions']['libtpu']}"
