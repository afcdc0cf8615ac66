"""The reference page of other trainers' keys, from the tables that `tunix-rt convert` reads; the parity with TRL in the guide."""

import json
from pathlib import Path

from docs.markdown import WRITTEN, table, with_block
from tunix_rt.config.dialects.conversion import DIALECTS, convert

PAGE = Path("docs/reference/dialects.md")
GUIDE = Path("docs/guides/from-other-trainers.md")
PARITY = Path("benchmarks/results/trl_parity.json")
KINDS = ("mapped", "without effect", "refused")


def page(root: Path) -> str:
    parts = [
        "# Keys of other trainers",
        WRITTEN,
        "What `tunix-rt convert`, `train` and `plan` make of each key. A key that is in no table is "
        "refused. A refused key that is off (false, null, 0, `none`) is without effect. The guide is "
        "[coming from another trainer](../guides/from-other-trainers.md).",
        "## Example files",
        examples(root),
    ]
    for module in DIALECTS.values():
        rows = sorted((rule.kind, rule.describe, key) for key, rule in module.TABLE.items())
        merged: dict[tuple[str, str], list[str]] = {}
        for kind, text, key in rows:
            merged.setdefault((kind, text), []).append(f"`{key}`")
        lines = [
            (", ".join(keys), kind, text.replace("|", "\\|"))
            for (kind, text), keys in sorted(merged.items(), key=lambda one: KINDS.index(one[0][0]))
        ]
        defaults = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in module.DEFAULTS.items())
        parts += [f"## {module.TITLE}", f"Set where no key does: {defaults}.", table(("keys", "", "here"), lines)]
    return "\n\n".join(parts) + "\n"


def examples(root: Path) -> str:
    """Counts of the files in tests/dialects."""
    rows = []
    folder = root / "tests" / "dialects"
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        found = convert(file.read_text(encoding="utf-8"), file.name, folder=folder)
        names = ", ".join(f"`{line.key}`" for line in found.refused)
        rows.append((file.name, found.title, str(len(found.mapped)), str(len(found.without_effect)), names or "none"))
    return table(("file of `tests/dialects`", "trainer", "keys mapped", "without effect", "refused"), rows)


def guide(root: Path) -> str:
    """Each case of benchmarks/trl_parity.py in a row."""
    found = json.loads((root / PARITY).read_text(encoding="utf-8"))
    rows = []
    for name, case in found["cases"].items():
        equal = case["same_ids"] and case["same_masks"] and case["same_counts"]
        largest = case["largest_loss_difference"]
        rows.append((
            name, f"{case['examples']}, {case['tokens'][0]:,}, {case['targets'][0]:,}", "equal" if equal else "NOT equal",
            f"{case['rate_difference']:.1e}", f"{case['first_loss_difference']:.1e}", "" if largest is None else f"{largest:.1e}",
        ))  # fmt: skip
    versions = ", ".join(f"{name} {one}" for name, one in next(iter(found["cases"].values()))["versions"].items())
    columns = (
        "case",
        "examples, tokens, targets of a step",
        "ids, masks, counts",
        "learning rates",
        "loss of step 1",
        "any loss",
    )
    return with_block(root, GUIDE, "parity", f"{table(columns, rows)}\n\n{versions}; 8 steps, float32 on a CPU.")
