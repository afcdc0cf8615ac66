"""What the engines support and what was measured of the JAX engine on a GPU, in docs/reference/jax-engine.md; its measurements
beside transformers and Tunix, in docs/reference/tunix.md. Read from the capabilities and from raw output."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from docs.markdown import replaced, table, with_block
from tunix_rt.config.capabilities import CAPABILITIES, unsupported
from tunix_rt.config.settings import Training
from tunix_rt.models.families import families_of

PAGE = Path("docs/reference/jax-engine.md")
RESULTS = Path("benchmarks/results")
PACKED, LOCAL = RESULTS / "jax_program_h200.txt", RESULTS / "jax_local_gpu_h200"
ALONE = {"products kept": RESULTS / "jax_speed.json", "nothing computed again": RESULTS / "jax_speed_none.json"}
TARGET = 0.9
"""Of the PyTorch engine's speed: what this engine was to reach on the same data."""
BUNDLE = Path("submission_runs/m39_v1")
TUNIX_PAGE, PARITY = Path("docs/reference/tunix.md"), RESULTS / "parity.json"
SIDES = {"ours": "our model, our step", "adapter": "Tunix's model, our step", "tunix": "Tunix alone"}
GIB = 2**30
_STEP = re.compile(r"^step (\d+)/\d+  loss ([\d.]+).*?([\d,]+) tokens/s  peak ([\d.]+) GiB", re.MULTILINE)
_COMPILED = re.compile(r"Compiled in ([\d.]+) s; the compiler asks for ([\d.]+) GiB")


def page(root: Path) -> str:
    text = with_block(root, PAGE, "measured", _measured(root))
    return replaced(text, "capabilities", _capabilities(), PAGE)


def _capabilities() -> str:
    """What each engine supports, and how the JAX engine refuses the rest, from the table that the program reads."""
    engines = CAPABILITIES.values()
    values = {
        "`training.device`": [one.devices for one in engines],
        "`training.dtype`": [one.dtypes for one in engines],
        "`training.optim`": [one.optimizers for one in engines],
        "`model.implementation`": [one.implementations for one in engines],
        "model families": [families_of(name) if one.own_models else () for name, one in CAPABILITIES.items()],
    }
    flags = {
        "LoRA (`training.lora_rank`)": "lora",
        "updates in the backward pass (`training.optim_in_backward`)": "optim_in_backward",
        "eager layers (`training.compile: false`)": "eager",
        "profiles of steps (`--profile`)": "profile",
        "models with dropout": "dropout",
        "sharded over ranks, one device each (`--nproc`)": "ranks",
        "sharded over all devices of a process": "multi_device",
        "sharded over processes with several devices each": "multi_process",
        "the whole step compiled before a weight is read": "compiles_whole_step",
    }
    rows = [
        (name, *(", ".join(f"`{one}`" for one in each) or "causal language models of transformers" for each in lists))
        for name, lists in values.items()
    ]
    rows += [(name, *("yes" if getattr(one, flag) else "no" for one in engines)) for name, flag in flags.items()]
    requests = Training(lora_rank=8, dtype="float16", optim="adamw_8bit", optim_in_backward=True, compile=False)
    refused = unsupported(requests, CAPABILITIES["jax"], profile_steps=3)
    return "\n\n".join([
        table(("", *(one.title for one in engines)), rows),
        "A setting that an engine does not support is refused by name, with an [exit code](exit-codes.md):",
        table(
            ("requested", "exit", "why", "fix"),
            [(f"`{one.setting}`", "2", one.problem.removeprefix(f"{one.setting}: "), one.fix) for one in refused],
        ),
    ])  # fmt: skip


def _measured(root: Path) -> str:
    torch = json.loads((root / RESULTS / "speed_program.json").read_text(encoding="utf-8"))
    torch_speed = torch["tokens_per_second"]
    alone = {words: json.loads((root / file).read_text(encoding="utf-8")) for words, file in ALONE.items()}
    best = max(found["tokens_per_second"] for found in alone.values()) / torch_speed
    rows = [
        _by_the_program(root, torch_speed),
        *(_by_the_engine(words, found, torch_speed) for words, found in alone.items()),
        _local(root),
    ]
    settings = alone["products kept"]["settings"]
    columns = ("run", "steps", "loss", "tokens/s, median", "peak GiB", "the compiler asked for", "of PyTorch's speed")
    files = ", ".join(f"`{file}`" for file in (PACKED, *ALONE.values()))
    return "\n\n".join(
        [
            table(columns, rows),
            f"The last column: on the same data, packed alike, the PyTorch engine made {torch_speed:,.0f} tokens/s with "
            f"{torch['peak_bytes'] / GIB:.1f} GiB ([speed](speed.md)). The target was {TARGET} times that; the best here is "
            f"{best:.2f}, so it was {'reached' if best >= TARGET else 'missed'}. The first row is `tunix-rt train`, ended from "
            "outside after its last step. The next two are the engine alone (`python -m benchmarks.jax_speed`), in the "
            "source of the last row, medians of "
            f"{settings['steps']} steps after {settings['warmup']}. One run each.",
            f"The last row is [`{BUNDLE.name}`](../../{BUNDLE}/README.md), a bundle: it ran to its end and its saved model was "
            "proven. The weights are random in every row, so the losses show that the engine learns its rows, and nothing of a "
            f"trained model. Raw output: {files}, `{LOCAL}/`. NVIDIA H200, jax 0.11.2.",
        ]
    )


def _by_the_program(root: Path, torch_speed: float) -> tuple[str, ...]:
    log = (root / PACKED).read_text(encoding="utf-8")
    steps = [
        (int(n), float(loss), int(speed.replace(",", "")), float(peak)) for n, loss, speed, peak in _STEP.findall(log)
    ]
    compiled = _COMPILED.search(log)
    if compiled is None:
        raise ValueError(f"{PACKED} has no line of the compiler")
    speed = statistics.median(step[2] for step in steps if step[0] > 5)
    return (
        "Gemma-1 2B, 8 x 2,048 packed tokens of GSM8K, AdamW, products kept", f"{len(steps)}",
        f"{steps[0][1]:.4f} -> {steps[-1][1]:.4f}", f"{speed:,.0f}", f"{max(step[3] for step in steps):.2f}", compiled[2],
        f"{speed / torch_speed:.2f}",
    )  # fmt: skip


def _by_the_engine(words: str, found: dict[str, Any], torch_speed: float) -> tuple[str, ...]:
    speed, losses = found["tokens_per_second"], found["losses"]
    return (
        f"the same, the engine alone, {words}", f"{len(losses)}", f"{losses[0]:.4f} -> {losses[-1]:.4f}", f"{speed:,.0f}",
        f"{found['peak_bytes'] / GIB:.2f}", "not written down", f"{speed / torch_speed:.2f}",
    )  # fmt: skip


def _local(root: Path) -> tuple[str, ...]:
    metrics = [json.loads(line) for line in (root / LOCAL / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speed = statistics.median(step["tokens"] / step["seconds"] for step in metrics[5:])
    return (
        "`submission_local_gpu.yaml`: Gemma-1 2B, 4 of 1 x 128, Adafactor, layers computed again", f"{len(metrics)}",
        f"{metrics[0]['loss']:.4f} -> {metrics[-1]['loss']:.4f}", f"{speed:,.0f}",
        f"{max(step['peak_bytes'] for step in metrics) / GIB:.2f}", _asked_for(root), "",
    )  # fmt: skip


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
