"""docs/reference/torch-engine.md: what was measured of the PyTorch engine, read from benchmarks/results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.markdown import WRITTEN, table

RESULTS = Path("benchmarks/results")
GIB = 2**30


def page(root: Path) -> str:
    parts = [
        "# The PyTorch engine, measured",
        WRITTEN,
        "Each part names the command that measured it; its raw output is in `benchmarks/results`. The parts are "
        "explained in [optimizers](../concepts/optimizers.md), [packed attention](../concepts/packed-attention.md), "
        "[checkpoints](../concepts/checkpoints.md) and [the loss head](../decisions/0017-the-loss-head.md).",
        *_memory(_read(root, "engine_memory.json")),
        *_curves(_read(root, "engine_curves.json")),
        *_rounding(_read(root, "engine_rounding.json")),
        *_real(root),
        *_heads(_read(root, "engine_head.json"), _read(root, "engine_head_liger.json")),
        *_cpu_heads(_read(root, "engine_head_cpu.json")),
    ]
    return "\n\n".join(parts) + "\n"


def _read(root: Path, name: str) -> Any:
    return json.loads((root / RESULTS / name).read_text(encoding="utf-8"))


def _on(found: Mapping[str, Any]) -> str:
    about = found["about"]
    return f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}"


def _memory(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            f"{case['preset']}, {case['parameters']:,}",
            f"{case['rows']} x {case['length']}",
            f"{case['peak_allocated_bytes'] / GIB:.3f}",
            f"{case['peak_reserved_bytes'] / GIB:.3f}",
            f"{case['tokens_per_second']:,.0f}",
        )
        for case in found["cases"]
    ]
    return [
        "## The smallest memory",
        f"Every parameter trained, inside a cap of {found['cap_gib']} GiB on what the allocator may take: bfloat16 weights "
        "rounded stochastically, Adafactor in backward, every layer computed again, the loss in chunks. Random weights in "
        "the exact shape, random tokens.",
        table(("model, parameters", "rows x tokens", "GiB allocated", "GiB reserved", "tokens/s"), rows),
        f"`python -m benchmarks.engine_gpu memory`; {_on(found)}.",
    ]


def _curves(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, run in found["runs"].items():
        losses = run["losses"]
        rows.append((
            name, f"{run['settings']['learning_rate']:g}", f"{losses[0]:.4f}", f"{losses[len(losses) // 2 - 1]:.4f}",
            f"{run['mean_of_last_20']:.4f}", f"{run['beside_float32']:+.2%}", f"{run['heldout_loss']:.4f}",
            f"{run['peak_bytes'] / GIB:.2f}",
        ))  # fmt: skip
    columns = ("setting", "rate", "first loss", "half-way", "last 20", "beside float32", "held-out", "peak GiB")
    return [
        "## The same against float32 AdamW",
        f"{found['preset']} from random weights, {found['steps']} steps of one row of 1,024 tokens of GSM8K, the same rows in "
        "the same order. Equal in both: seed, linear schedule with 20 steps of warm-up, no decay. Different: the optimizer "
        "(Adafactor has no first moment), the type of the weights, and the clipping (AdamW by the norm of all gradients, "
        "Adafactor in backward each tensor by its own, and its update by its own mean square).",
        table(columns, rows),
        f"`python -m benchmarks.engine_gpu curves`; {_on(found)}.",
    ]


def _rounding(found: Mapping[str, Any]) -> list[str]:
    first = found["runs"]["float32"]["mean_of_last_20"]
    rows = [
        (
            name, f"{run['losses'][0]:.4f}", f"{run['mean_of_last_20']:.4f}", f"{run['mean_of_last_20'] / first - 1:+.2%}",
            f"{run['heldout_loss']:.4f}", f"{run['share_of_weights_moved']:.1%}",
        )
        for name, run in found["runs"].items()
    ]  # fmt: skip
    columns = ("weights", "first loss", "last 20", "beside float32", "held-out", "weights that moved")
    return [
        "## What rounding does",
        f"{found['model']} with its pretrained weights on {found['data']}, {found['steps']} steps of {found['rows']} rows of up "
        f"to {found['length']} tokens, AdamW at {found['rate']:g}. A weight has moved when it is not the number it was.",
        table(columns, rows),
        f"`python -m benchmarks.engine_gpu rounding --device {found['device']}`; {_on(found)}.",
    ]


def _real(root: Path) -> list[str]:
    folder = root / RESULTS / "smollm2_gsm8k"
    result, before, after, loss = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("result.json", "before.json", "after.json", "heldout_before.json")
    )
    last = json.loads((folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    memory = result["memory"]
    rows = [
        ("held-out loss", f"{loss['loss']:.4f}", f"{last['loss']:.4f}"),
        ("loss of the first and the last step", f"{steps[0]['loss']:.4f}", f"{steps[-1]['loss']:.4f}"),
        ("answers well-formed", f"{before['format_rate']:.1%}", f"{after['format_rate']:.1%}"),
        ("answers right, strict", f"{before['accuracy']:.1%}", f"{after['accuracy']:.1%}"),
    ]
    speed = sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
    return [
        "## Real weights",
        f"SmolLM2-135M-Instruct, dequantised from a GGUF file of 4 bits, {result['steps_completed']} steps on GSM8K by `tunix-rt "
        f"train` on a GPU, float32 weights and bfloat16 products; {before['items']} questions held out.",
        table(("measure", "before", "after"), rows),
        f"{speed:,.0f} tokens/s; memory {memory['predicted_bytes'] / GIB:.3f} GiB predicted, "
        f"{memory['measured_bytes'] / GIB:.3f} GiB measured. Answers before and after: "
        "`benchmarks/results/smollm2_gsm8k/samples.md`. The held-out loss before was measured afterwards, on a CPU "
        "(`python -m benchmarks.heldout_before`). A model of this size learns the form in so few steps, not the arithmetic.",
    ]


def _heads(found: Mapping[str, Any], with_liger: Mapping[str, Any]) -> list[str]:
    liger = [
        case | {"name": f"{case['name']}, in another run"} for case in with_liger["heads"] if "Liger" in case["name"]
    ]
    rows = [
        (case["name"], f"{1000 * case['seconds']:.1f}", f"{case['times_the_products']:.2f}", f"{case['rise_bytes'] / GIB:.2f}",
         f"{case['times_the_gradients']:.2f}")
        for case in [*found["heads"], *liger]
    ]  # fmt: skip
    targets, hidden, vocabulary = found["shape"]
    columns = ("head", "ms", "of three products", "GiB", "of its gradients")
    return [
        "## Loss heads",
        f"{targets:,} targets, hidden size {hidden:,}, {vocabulary:,} words, bfloat16, loss and all gradients. Three products of "
        f"this size alone take {1000 * found['three_products_seconds']:.1f} ms; the gradients alone are "
        f"{found['gradient_bytes'] / GIB:.2f} GiB.",
        table(columns, rows),
        f"`python -m benchmarks.engine_gpu head`; {_on(found)}. The run with Liger 0.8.5 had its three products in "
        f"{1000 * with_liger['three_products_seconds']:.1f} ms. torch's own `linear_cross_entropy` comes with torch 2.13, which "
        "this machine did not have.",
    ]


def _cpu_heads(found: Mapping[str, Any]) -> list[str]:
    targets, hidden, vocabulary = found["shape"]
    rows = [
        (case["name"], f"{1000 * case['seconds']:,.0f}", f"{case['times_the_products']:.2f}") for case in found["heads"]
    ]
    return [
        f"On a CPU, {targets:,} targets, hidden size {hidden:,}, {vocabulary:,} words, float32:",
        table(("head", "ms", "of three products"), rows),
        f"`python -m benchmarks.engine_gpu head --device cpu`; {_on(found)}.",
    ]
