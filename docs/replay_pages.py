"""The tolerances of a replay in docs/concepts/evidence.md: honest noise, what is allowed, the smallest cheat. From raw output."""

import json
from pathlib import Path
from typing import Any

from docs.markdown import table
from tunix_rt.evidence.machine_class import Class
from tunix_rt.evidence.tolerances import FACTOR, MEASURED_STEPS, MOST_GROWTH, TOLERANCES, Tolerance

RESULTS = Path("benchmarks/results")
FILES = (RESULTS / "replay_noise.json", RESULTS / "replay_noise_cuda.json")
PARTS = ("loss", "grad_norm", "weights")
TYPES = {"float32": "float32", "bfloat16": "16 bits"}
ONE_ROW = "one token of one row"


def tolerances_block(root: Path) -> str:
    """What stands between the markers `tolerances`."""
    read = [json.loads((root / file).read_text(encoding="utf-8")) for file in FILES if (root / file).is_file()]
    variants = [one for found in read for one in found["variants"]]
    steps = " and ".join(str(count) for count in sorted({found["steps"] for found in read}))
    columns = ("class, type", "", "loss", "gradient norm", "weights", "texts")
    rows = [row for name, kind in TOLERANCES for row in _rows(name, kind, TOLERANCES[name, kind], variants)]
    files = ", ".join(f"`{file}`" for file in FILES if (root / file).is_file())
    return "\n\n".join(
        [
            "Losses as shares of the loss or of 1, gradient norms as shares of the norm, weights as a share of the way they "
            "went, texts as the share of greedy answers that the same weights gave again. Honest: the largest difference that "
            "was measured between machines of that class. Smallest cheat: the least of all cheats in that column.",
            table(columns, rows),
            f"Allowed are at least {FACTOR:g} times the honest noise. {MEASURED_STEPS} steps after a replay began the allowance "
            f"grows in proportion, up to {MOST_GROWTH['float32']:g} times in float32 and {MOST_GROWTH['bfloat16']:g} times in 16 "
            f"bits; that growth is a choice. Class SAME allows nothing: everything came out bit by bit {_same(variants)}. Texts "
            "in 16 bits outside SAME are not held against a replay, since near ties turn; L2 asks for them all the same, and "
            "is to be had on the recorded machine.",
            _below(variants),
            _cheats(variants),
            f"Measured over {steps} steps of the shipped model: {files} (`python -m benchmarks.replay_noise`, `--device cuda` "
            "on a GPU). One small model, so a larger one may lie further apart; a tolerance that refuses an honest run is a "
            "defect.",
        ]
    )


def _rows(name: Class, kind: str, allowed: Tolerance, variants: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    honest, cheats = _honest(name, kind, variants), _cheating(kind, variants)
    one_row = [one for one in cheats if one["variant"] == ONE_ROW]
    title = f"{name}, {TYPES[kind]}"
    return [
        (title, f"honest, {len(honest)} pairs", *_largest(honest), _texts(honest)),
        ("", "**allowed**", *(f"**{getattr(allowed, part):.1e}**" for part in PARTS), f"**{allowed.texts:.0%}**"),
        ("", "smallest cheat", *_smallest(cheats), ""),
        ("", ONE_ROW, *_smallest(one_row), ""),
    ]


def _honest(name: Class, kind: str, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in variants if (one["kind"], one["class"], one["compute"]) == ("honest", name, kind)]


def _cheating(kind: str, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in variants if (one["kind"], one["compute"]) == ("cheat", kind)]


def _largest(found: list[dict[str, Any]]) -> list[str]:
    return [f"{max((one[part] for one in found if part in one), default=0.0):.1e}" for part in PARTS]


def _smallest(found: list[dict[str, Any]]) -> list[str]:
    return [f"{min((one[part] for one in found if part in one), default=0.0):.1e}" for part in PARTS]


def _texts(found: list[dict[str, Any]]) -> str:
    shares = [one["texts"] for one in found if "texts" in one]
    return f"{min(shares):.0%}" if shares else ""


def _same(variants: list[dict[str, Any]]) -> str:
    pairs = [one for one in variants if one["class"] == "SAME"]
    exact = sum(all(one.get(part, 0.0) == 0.0 for part in PARTS) and one["texts"] == 1 for one in pairs)
    return f"in {exact} of {len(pairs)} pairs"


def caught(one: dict[str, Any], allowed: Tolerance) -> bool:
    """Whether a cheat of this size lies outside in anything."""
    return any(one.get(part, 0.0) > getattr(allowed, part) for part in PARTS)


def _below(variants: list[dict[str, Any]]) -> str:
    """Which cheats a tolerance lets pass, in words."""
    said = []
    for (name, kind), allowed in TOLERANCES.items():
        cheats = _cheating(kind, variants)
        missed = sorted({one["variant"] for one in cheats if not caught(one, allowed)})
        words = f"lets pass: {', '.join(missed)}" if missed else "lets none pass"
        said.append(f"- {name}, {TYPES[kind]}: {words} ({len(cheats)} cheats)")
    return (
        "What each class lets pass of the cheats that were in view when its tolerances were set, "
        "when its numbers are all there is to go by, the weights of the checkpoint among them. The "
        "checks of L1 do not depend on a tolerance: learning rates and batches of every step must agree in any class, so a "
        "schedule or data that the record itself names are found there. A change that trains otherwise in secret, and is "
        "smaller than the honest noise, is found in class SAME alone.\n\n" + "\n".join(said)
    )


def _cheats(variants: list[dict[str, Any]]) -> str:
    rows = [
        (one["group"], one["variant"], *(f"{one[part]:.1e}" if part in one else "" for part in PARTS))
        for one in variants
        if one["kind"] == "cheat"
    ]
    return "<details><summary>Every cheat that was measured</summary>\n\n" + table(
        ("computed by", "cheat", "loss", "gradient norm", "weights"), rows
    ) + "\n\n</details>"  # fmt: skip
