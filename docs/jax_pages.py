"""What was measured of the JAX engine: on a GPU, in docs/reference/jax-engine.md; beside transformers and Tunix, in
docs/reference/tunix.md. Read from raw output."""

import json
import re
import statistics
from pathlib import Path

from docs.markdown import table, with_block

PAGE = Path("docs/reference/jax-engine.md")
RESULTS = Path("benchmarks/results")
PACKED, LOCAL = RESULTS / "jax_program_h200.txt", RESULTS / "jax_local_gpu_h200"
TUNIX_PAGE, PARITY = Path("docs/reference/tunix.md"), RESULTS / "parity.json"
SIDES = {"ours": "our model, our step", "adapter": "Tunix's model, our step", "tunix": "Tunix alone"}
GIB = 2**30
_STEP = re.compile(r"^step (\d+)/\d+  loss ([\d.]+).*?([\d,]+) tokens/s  peak ([\d.]+) GiB", re.MULTILINE)
_COMPILED = re.compile(r"Compiled in ([\d.]+) s; the compiler asks for ([\d.]+) GiB")


def page(root: Path) -> str:
    return with_block(root, PAGE, "measured", _measured(root))


def _measured(root: Path) -> str:
    log = (root / PACKED).read_text(encoding="utf-8")
    steps = [
        (int(n), float(loss), int(speed.replace(",", "")), float(peak)) for n, loss, speed, peak in _STEP.findall(log)
    ]
    compiled = _COMPILED.search(log)
    program = json.loads((root / RESULTS / "speed_program.json").read_text(encoding="utf-8"))
    if compiled is None:
        raise ValueError(f"{PACKED} has no line of the compiler")
    speed = statistics.median(step[2] for step in steps if step[0] > 5)
    torch_speed = program["tokens_per_second"]
    metrics = [json.loads(line) for line in (root / LOCAL / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [
        ("Gemma-1 2B, 8 x 2,048 packed tokens of GSM8K, AdamW, products kept", f"{len(steps)}",
         f"{steps[0][1]:.4f} -> {steps[-1][1]:.4f}", f"{speed:,.0f}", f"{max(step[3] for step in steps):.2f}", compiled[2]),
        ("`submission_local_gpu.yaml`: Gemma-1 2B, 4 of 1 x 128, Adafactor, layers computed again", f"{len(metrics)}",
         f"{metrics[0]['loss']:.4f} -> {metrics[-1]['loss']:.4f}",
         f"{statistics.median(step['tokens'] / step['seconds'] for step in metrics[5:]):,.0f}",
         f"{max(step['peak_bytes'] for step in metrics) / GIB:.2f}", _asked_for(root)),
    ]  # fmt: skip
    return "\n\n".join(
        [
            table(("run", "steps", "loss", "tokens/s, median", "peak GiB", "the compiler asked for"), rows),
            f"On the data of the first row the PyTorch engine made {torch_speed:,.0f} tokens/s with "
            f"{program['peak_bytes'] / GIB:.1f} GiB: this engine {speed / torch_speed:.2f} times that. The weights are random in "
            "both rows, so the losses show that the engine learns its rows, and nothing of a trained model. Both runs were "
            "ended from outside, the first after its last step, the second while its saved model was being proven; the second "
            f"had completed its steps and its answers. Raw output: `{PACKED}`, `{LOCAL}/`. NVIDIA H200, jax 0.11.2.",
        ]
    )


def _asked_for(root: Path) -> str:
    found = _COMPILED.search((root / LOCAL / "training_log.txt").read_text(encoding="utf-8"))
    return found[2] if found else "not said"


def tunix_page(root: Path) -> str:
    """The differences of every side from transformers, model by model."""
    found = json.loads((root / PARITY).read_text(encoding="utf-8"))
    rows = []
    for model, sides in found["models"].items():
        for side, words in SIDES.items():
            said, read = sides[side], sides["exchanged"].get(side)
            far = [said["logits"][text]["of the largest logit"] for text in ("short", "long")]
            figures = [said["loss"], said["curve"], *far, *([max(read.values())] if read else [])]
            rows.append((model, words, *(f"{one:.0e}" for one in figures), *([] if read else [""])))
    columns = ("model", "side", "first loss", "20 steps", "logits, 35 tokens", "past the window", "read by")
    return with_block(root, TUNIX_PAGE, "parity", table(columns, rows))
