"""The tolerances of a replay in docs/concepts/evidence.md: honest noise, what is allowed, the smallest cheat. From raw output."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from docs.markdown import table
from tunix_rt.evidence.machine_class import Class
from tunix_rt.evidence.tolerances import FACTOR, MEASURED_STEPS, MOST_GROWTH, TIES, TOLERANCES, Tolerance, grown

RESULTS = Path("benchmarks/results")
FILES = {"CPU": RESULTS / "replay_noise.json", "GPU": RESULTS / "replay_noise_cuda.json"}
GAPS = RESULTS / "answer_gaps.json"
PARTS = ("loss", "grad_norm", "weights")
TYPES = {"float32": "float32", "bfloat16": "16 bits"}
ONE_ROW = "one token of one row"
RAISED = (("CROSS", "bfloat16"),)
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
    columns = ("class, type", "", "loss", "gradient norm", "weights", "texts")
    rows = [row for name, kind in TOLERANCES for row in _rows(name, kind, TOLERANCES[name, kind], variants)]
    files = " and ".join(f"`{file}`" for file in FILES.values())
    return "\n\n".join(
        [
            "Losses as shares of the loss or of 1, gradient norms as shares of the norm, weights as a share of the way they "
            "went, texts as the share of greedy answers that the same weights gave again. Honest: the largest difference that "
            "was measured between machines of that class. Smallest cheat: the least of all cheats in that column.",
            table(columns, rows),
            f"Allowed are at least {FACTOR:g} times the honest noise. {MEASURED_STEPS} steps after a replay began the allowance "
            f"grows in proportion, up to {MOST_GROWTH['float32']:g} times in float32 and {MOST_GROWTH['bfloat16']:g} times in 16 "
            f"bits; that growth is a choice. Class SAME allows nothing: everything came out bit by bit {_same(variants)}. Texts "
            "in 16 bits outside SAME are not held against a replay, since near ties turn; L2 follows them token by token.",
            _ties(root),
            _below(variants),
            _cheats(variants),
            f"Measured over {steps} steps of the shipped model: {files} (`python -m benchmarks.replay_noise`, `--device cuda` "
            "on a GPU). One small model, so a larger one may lie further apart; a tolerance that refuses an honest run is a "
            "defect.",
        ]
    )


def _rows(name: Class, kind: str, allowed: Tolerance, variants: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    honest, cheats = _honest(name, kind, variants), _cheating(kind, variants)
    by_device = {device: [one for one in honest if one["on"] == device] for device in FILES}
    one_row = [one for one in cheats if one["variant"] == ONE_ROW]
    rows = [
        (f"honest, {device}, {len(found)} pair{'s' * (len(found) > 1)}", *_largest(found), _texts(found))
        for device, found in by_device.items()
    ]
    rows += [
        ("**allowed**", *(f"**{getattr(allowed, part):.1e}**" for part in PARTS), f"**{allowed.texts:.0%}**"),
        ("times the largest honest", *_times(honest, allowed), ""),
        ("smallest cheat", *_smallest(cheats), ""),
        (ONE_ROW, *_smallest(one_row), ""),
    ]
    titles = [f"{name}, {TYPES[kind]}"] + [""] * (len(rows) - 1)
    return [(title, *row) for title, row in zip(titles, rows, strict=True)]


def _times(honest: list[dict[str, Any]], allowed: Tolerance) -> list[str]:
    return [f"{getattr(allowed, part) / max(one[part] for one in honest):.1f}" for part in PARTS]


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


def _ties(root: Path) -> str:
    """How far tokens of honest and of forged texts lie below the likeliest, and what L2 allows."""
    told = json.loads((root / GAPS).read_text(encoding="utf-8"))
    rows = []
    for kind, limit in ((name, TIES[name]) for name in TIES):
        rows.append(_gap_row(f"honest, {kind}", [one for one in told["pairs"] if one["kind"] == kind], limit))
    for name in dict.fromkeys(one["texts"] for one in told["pairs"] if one["kind"] == "forged"):
        rows.append(
            _gap_row(f"forged: {name}", [one for one in told["pairs"] if one["texts"] == name], max(TIES.values()))
        )
    limits = " and ".join(f"{limit:g} in {name}" for name, limit in TIES.items())
    return (
        "In 16 bits on another machine L2 gives the weights the recorded text and asks for each token, and for the end, how far "
        f"its logit lies below the largest there. Allowed are {limits}, for at least "
        f"{TOLERANCES['CROSS', 'bfloat16'].texts:.0%} of the texts. A forger who keeps to tokens that nearly tie is not found, "
        "and has no more room than that.\n\n"
        + table(("texts", "pairs", "same text", "median of the largest gaps", "largest", "accepted"), rows)
        + f"\n\nThe model of the demo, {len(told['pairs'][0]['largest_gaps'])} questions, on one CPU with three kinds of "
        "instructions and by both engines, the other engine as the stand-in for CROSS; texts of a GPU were not followed. The "
        f"limit was set with these figures in view. Raw: `{GAPS}` (`python -m benchmarks.answer_gaps`)."
    )


def _gap_row(title: str, pairs: list[dict[str, Any]], limit: float) -> tuple[str, ...]:
    gaps = [gap for one in pairs for gap in one["largest_gaps"]]
    same = [one["same_texts"] for one in pairs if "same_texts" in one]
    accepted = sum(gap <= limit for gap in gaps) / len(gaps)
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
    columns = ("class, type", "cheats", "pass, weights at hand", "pass, without the weights")
    return (
        "What each class lets pass when its numbers are all there is to go by, with the weights of the checkpoints at hand "
        "(`collect --with-checkpoints`) and without. In sample: the cheats were known when the tolerances were set. Out of "
        "sample: the tolerances were set before any GPU was measured, and stood. What is allowed is taken where the growth has "
        "made it largest. The checks of L1 do not depend on a tolerance: learning rates and batches of every step must agree in "
        "any class, so a schedule or data that the record itself names are found there. A change that trains otherwise in "
        "secret, and is smaller than what is allowed, is found in class SAME alone.\n\n" + table(columns, rows)
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
    return "<details><summary>Every cheat that was measured</summary>\n\n" + table(
        ("computed by", "cheat", "loss", "gradient norm", "weights"), rows
    ) + "\n\n</details>"  # fmt: skip
