"""The figures in docs/concepts/evidence.md: forgeries and mutations, as benchmarks/results has them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from docs import replay_pages
from docs.markdown import replaced, table

PAGE = Path("docs/concepts/evidence.md")
FORGERIES = Path("benchmarks/results/forgeries.json")
MUTATIONS = Path("benchmarks/results/mutations.json")
LEVELS = ("L1", "L2", "L3", "L4", "missed")


def _read(root: Path, path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((root / path).read_text(encoding="utf-8"))
    return told


def shares_block(root: Path) -> str:
    """How many were tried, and at which level they are rejected."""
    tried = _read(root, FORGERIES)["forgeries"]
    count = Counter(one["rejected_at"] for one in tried)
    groups = sorted({one["group"] for one in tried})
    by_group = Counter((one["group"], one["rejected_at"]) for one in tried)
    rows = [
        (
            group,
            str(sum(one["group"] == group for one in tried)),
            *(str(by_group[group, level] or "") for level in LEVELS),
        )
        for group in groups
    ]
    rows.append(("**all**", f"**{len(tried)}**", *(f"**{count[level]}**" for level in LEVELS)))
    early = sum(count[level] for level in ("L1", "L2", "L3"))
    forgeries = len({one["name"] for one in tried})
    return (
        f"{forgeries} forgeries were tried, those of a GPU on several bundles: {len(tried)} trials. "
        f"{count['L1']} are rejected by the static checks alone, {early} "
        f"({100 * early / len(tried):.1f} %) at L1 to L3, {count['L4']} at L4, and {count['missed']} are missed.\n\n"
        + table(("what is forged", "tried", *LEVELS), rows)
        + f"\n\nMade by `python -m benchmarks.forgeries --write`; each with its checks is in `{FORGERIES}`."
    )


def misses_block(root: Path) -> str:
    """Every forgery that no level up to L3 rejects, by name and with the reason."""
    rows = [
        (f"`{one['name']}`", one["what"], "L4" if one["rejected_at"] == "L4" else "never", one.get("why", ""))
        for one in _read(root, FORGERIES)["forgeries"]
        if one["rejected_at"] in ("L4", "missed")
    ]
    return table(("forgery", "what it does", "found at", "why not earlier"), rows)


def every_block(root: Path) -> str:
    """All forgeries, with the check that finds each."""
    rows = [
        (
            f"`{one['name']}`",
            one["what"],
            one["base"],
            one["rejected_at"],
            ", ".join(f"`{check}`" for check in one["checks"]),
        )
        for one in _read(root, FORGERIES)["forgeries"]
    ]
    return table(("forgery", "what it does", "on", "rejected at", "by"), rows)


def mutations_block(root: Path) -> str:
    told = _read(root, MUTATIONS)
    kinds = ", ".join(f"{count:,} of {kind}" for kind, count in told["by_kind"].items())
    named = f" Accepted: {'; '.join(told['accepted'])}." if told["accepted"] else ""
    return (
        f"{told['mutations']:,} single mutations of {len(told['bundles'])} good bundles ({', '.join(told['bundles'])}): "
        f"{kinds}. Accepted {len(told['accepted'])}, ended with an error {len(told['crashed'])}.{named} The slowest took "
        f"{told['slowest_seconds']:.2f} s."
        f"{_resealed_words(told)} Made by `scripts/mutations --write`, seed {told['seed']}; counts by check are in "
        f"`{MUTATIONS}`."
    )


def _resealed_words(told: dict[str, Any]) -> str:
    """The rate of those that a forger would have sealed again; nothing where none were tried."""
    resealed = told.get("resealed", {"mutations": 0})
    if not resealed["mutations"]:
        return ""
    accepted = len(resealed["accepted"])
    files = sorted(resealed["by_file"].items(), key=lambda one: -one[1]["accepted"])
    worst = ", ".join(f"`{name}` {share['accepted']} of {share['tried']}" for name, share in files[:5])
    return (
        f"\n\nCounted apart: {resealed['mutations']:,} changes of one value after which every hash, chain, figure and sentence "
        f"was made anew, as a forger would. {accepted:,} of them ({100 * accepted / resealed['mutations']:.1f} %) are accepted "
        f"at L1, most in {worst}: values that are the run's own word, which only a replay can doubt. The file names each.\n\n"
    )


def page(root: Path) -> str:
    """The page with all its blocks."""
    text = (root / PAGE).read_text(encoding="utf-8")
    blocks = {
        "tolerances": replay_pages.tolerances_block(root),
        "forgeries": shares_block(root),
        "misses": misses_block(root),
        "mutations": mutations_block(root),
        "every-forgery": every_block(root),
    }
    for name, block in blocks.items():
        text = replaced(text, name, block, PAGE)
    return text
