"""The tolerances of a replay in docs/concepts/evidence.md: honest noise, what is allowed, the smallest cheat. From raw output."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from docs.markdown import table
from tunix_rt.evidence.replay.compare import (
    COMPARISONS,
    FACTOR,
    MEASURED_STEPS,
    MOST_GROWTH,
    TIES,
    TOLERANCES,
    Comparison,
    Tolerance,
    grown,
)

RESULTS = Path("benchmarks/results")
FILES = {"CPU": RESULTS / "replay_noise.json", "GPU": RESULTS / "replay_noise_cuda.json"}
GAPS = {"demo": RESULTS / "answer_gaps.json", "base": RESULTS / "answer_gaps_base.json"}
PARTS = ("loss", "grad_norm", "weights")
TYPES = {"float32": "float32", "bfloat16": "16 bits"}
ONE_ROW = "one token of one row"
RAISED = (("other hardware", "bfloat16"),)
"""Set anew with the GPU's figures in view; the others were set before a GPU was measured."""


def measured(root: Path) -> list[dict[str, Any]]:
    """Every pair of both files, with the device and the steps it was measured over."""
    read = {device: json.loads((root / file).read_text(encoding="utf-8")) for device, file in FILES.items()}
    return [
        one | {"on": device, "steps": found["steps"]} for device, found in read.items() for one in found["variants"]
    ]


def tolerances_block(root: Path) -> str:
    """What stands between the markers `tolerances`."""
    variants = measured(root)
    steps = " and ".join(
        f"{count} on the {device}" for device, count in {one["on"]: one["steps"] for one in variants}.items()
    )
    columns = ("comparison, type", "", "loss", "gradient norm", "weights", "texts")
    rows = [row for name, kind in TOLERANCES for row in _rows(name, kind, TOLERANCES[name, kind], variants)]
    files = " and ".join(f"`{file}`" for file in FILES.values())
    return "\n\n".join(
        [
            "Loss: relative to the loss, or to 1 where that is more. Gradient norm: relative. Weights: distance relative to how "
            "far they moved. Texts: fraction of greedy answers with the same text from the same weights. Honest: the largest "
            "difference measured between two such machines. Smallest cheat: the least of all cheats in that column.",
            table(columns, rows),
            f"The tolerance is at least {FACTOR:g} times the honest noise. From {MEASURED_STEPS} steps after the start of a "
            f"replay it grows in proportion, up to {MOST_GROWTH['float32']:g} times in float32 and "
            f"{MOST_GROWTH['bfloat16']:g} times in 16 bits; that growth is a choice. A bitwise comparison allows nothing: all "
            f"numbers were bit-equal {_same(variants)}. In 16 bits on another machine greedy texts turn at near ties: L2 "
            "and a replay follow them token by token.",
            _ties(root),
            _below(variants),
            _cheats(variants),
            f"Steps of the shipped model: {steps}. Raw: {files} (`python -m benchmarks.replay_noise`, `--device cuda` on a GPU). "
            "One small model: a larger one may differ more. A tolerance that refuses an honest run is a defect.",
        ]
    )


def _rows(name: Comparison, kind: str, allowed: Tolerance, variants: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    honest, cheats = _honest(name, kind, variants), _cheating(kind, variants)
    by_device = {device: [one for one in honest if one["on"] == device] for device in FILES}
    one_row = [one for one in cheats if one["variant"] == ONE_ROW]
    texts = f"**{allowed.texts:.0%}**" if kind == "float32" else ""  # in 16 bits the texts are not compared so
    rows = [
        (f"honest, {device}, {len(found)} pair{'s' * (len(found) > 1)}", *_largest(found), _texts(found))
        for device, found in by_device.items()
    ]
    rows += [
        ("**allowed**", *(f"**{getattr(allowed, part):.1e}**" for part in PARTS), texts),
        ("times the largest honest", *_times(honest, allowed), ""),
        ("smallest cheat", *_smallest(cheats), ""),
        (ONE_ROW, *_smallest(one_row), ""),
    ]
    titles = [f"{name}, {TYPES[kind]}"] + [""] * (len(rows) - 1)
    return [(title, *row) for title, row in zip(titles, rows, strict=True)]


def _times(honest: list[dict[str, Any]], allowed: Tolerance) -> list[str]:
    return [f"{getattr(allowed, part) / max(one[part] for one in honest):.1f}" for part in PARTS]


def _honest(name: Comparison, kind: str, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
    pairs = [one for one in variants if one["class"] == "bitwise"]
    exact = sum(all(one.get(part, 0.0) == 0.0 for part in PARTS) and one["texts"] == 1 for one in pairs)
    return f"in {exact} of {len(pairs)} pairs"


def _ties(root: Path) -> str:
    """How far tokens of honest and of forged texts lie below the likeliest, and what L2 allows."""
    rows = []
    for model, file in GAPS.items():
        pairs = json.loads((root / file).read_text(encoding="utf-8"))["pairs"]
        for name in COMPARISONS[1:]:
            rows.append(_gap_row(f"{model}, honest, {name}", [one for one in pairs if one["kind"] == name]))
        for name in dict.fromkeys(one["texts"] for one in pairs if one["kind"] == "forged"):
            rows.append(_gap_row(f"{model}, forged: {name}", [one for one in pairs if one["texts"] == name]))
    limits = " and ".join(f"{limit:g} in {TYPES[name]}" for name, limit in TIES.items())
    return (
        "Where an answer comes out differently outside a bitwise comparison, L2 feeds the recorded text to the weights. No "
        f"logit of a recorded token, or of its end, may lie further below the largest there than {limits}. A forger who only "
        "uses tokens that nearly tie is not found. Measured in bfloat16:\n\n"
        + table(("texts", "pairs", "same text", "median of the largest gaps", "largest gap", "accepted"), rows)
        + "\n\nThe demo model is sure of its answers. The base model has never seen a question, gives much the same text to all "
        "of them and nearly ties everywhere: for such a model L2 shows less. 100 questions on one CPU with three instruction "
        "sets and both engines, the other engine as a stand-in for other hardware; no texts of a GPU. The limit was set after "
        f"the base model was measured and before the demo was. Raw: {' and '.join(f'`{file}`' for file in GAPS.values())} "
        "(`python -m benchmarks.answer_gaps`)."
    )


def _gap_row(title: str, pairs: list[dict[str, Any]]) -> tuple[str, ...]:
    gaps = [gap for one in pairs for gap in one["largest_gaps"]]
    same = [one["same_texts"] for one in pairs if "same_texts" in one]
    accepted = sum(gap <= TIES["bfloat16"] for gap in gaps) / len(gaps)
    least = f"{min(same):.0%} to {max(same):.0%}" if same else ""
    return (title, str(len(pairs)), least, f"{median(gaps):.3f}", f"{max(gaps):.3f}", f"{accepted:.1%}")


def caught(one: dict[str, Any], allowed: Tolerance, *, weights: bool) -> bool:
    """Whether a cheat of this size lies outside in anything, at the step where most is allowed. `weights` says whether those of
    the checkpoint are at hand."""
    then = grown(allowed, one["compute"], one["steps"])
    return any(one.get(part, 0.0) > getattr(then, part) for part in PARTS if weights or part != "weights")


def _below(variants: list[dict[str, Any]]) -> str:
    """Which cheats a tolerance lets pass, in words."""
    rows = []
    for (name, kind), allowed in TOLERANCES.items():
        for device in FILES:
            cheats = [one for one in _cheating(kind, variants) if one["on"] == device]
            in_view = "in sample" if device == "CPU" or (name, kind) in RAISED else "out of sample"
            passed = [_passed(cheats, allowed, weights=weights) for weights in (True, False)]
            rows.append((f"{name}, {TYPES[kind]}", f"{device}, {in_view}", *passed))
    columns = ("comparison, type", "cheats", "missed, weights at hand", "missed, without the weights")
    return (
        "Cheats that a replay alone does not find, with the weights of the checkpoints at hand (`collect "
        "--with-checkpoints`) and without. In sample: the cheats were known when the tolerances were set. Out of sample: the "
        "tolerances were set before a GPU was measured, and kept. The tolerance is taken where its growth is largest. L1 does "
        "not depend on tolerances: recorded learning rates and batches must be those of settings, seed and rows. A run that "
        "trained differently in secret, by less than the tolerance, is found in a bitwise comparison alone.\n\n"
        + table(columns, rows)
    )


def _passed(cheats: list[dict[str, Any]], allowed: Tolerance, *, weights: bool) -> str:
    missed = sorted({one["variant"] for one in cheats if not caught(one, allowed, weights=weights)})
    count = sum(not caught(one, allowed, weights=weights) for one in cheats)
    return f"{count} of {len(cheats)}" + (f": {', '.join(missed)}" if missed else "")


def _cheats(variants: list[dict[str, Any]]) -> str:
    rows = [
        (one["group"], one["variant"], *(f"{one[part]:.1e}" if part in one else "" for part in PARTS))
        for one in variants
        if one["kind"] == "cheat"
    ]
    return "<details markdown=\"1\">\n<summary>Every cheat that was measured</summary>\n\n" + table(
        ("computed by", "cheat", "loss", "gradient norm", "weights"), rows
    ) + "\n\n</details>"  # fmt: skip
