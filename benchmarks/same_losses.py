"""The losses of 300 steps on a GPU: kernels and compiled layers against the plain operations that define them.

    python -m benchmarks.same_losses            writes benchmarks/results/same_losses.json; exit 1 where they differ by more
                                                than three times the noise

Plain: no kernel of ours, nothing compiled, which is what the engine computed before it had them. The noise is that of the
plain operations against themselves: the same steps with half the rows in twice the micro-batches, the same sum in another
order. Weights are kept in float32: bfloat16 ones are rounded by random numbers of their own in either case.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.engine_gpu import about
from tunix_rt.config.load import build_config
from tunix_rt.data.packing import batch_of_step
from tunix_rt.data.prepare import prepare
from tunix_rt.engines.torch import chunked_loss as torch_head
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch import optim_rules
from tunix_rt.models.resolve import resolve_model
from tunix_rt.train.context import find_tokenizer

RESULTS = Path(__file__).parent / "results"
STEPS, LENGTH, ROWS = 300, 512, 8
TIMES_THE_NOISE = 3.0


@contextlib.contextmanager
def plain_operations() -> Iterator[None]:
    with (
        mock.patch.object(torch_head, "kernel_unable", lambda *asked: "left out to compare"),
        mock.patch.object(optim_rules, "triton_kernels", lambda device: None),
    ):
        yield


def losses(device: str, *, rows: int, accumulation: int, compiled: bool) -> list[float]:
    training = {
        "device": device, "dtype": "bfloat16" if device == "cuda" else "float32", "learning_rate": 3e-4, "warmup_steps": 20,
        "seed": 1, "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation, "compile": compiled,
    }  # fmt: skip
    raw = {
        "model": {"model_name_or_path": "tiny-gemma3"},
        "data": {"dataset": "dev-reasoning-v2", "max_length": LENGTH},
        "training": training,
        "evaluation": {"enabled": False},
    }
    config = build_config(raw, "benchmark")
    tokenizer, facts = find_tokenizer(config)
    prepared = prepare(config, tokenizer, facts, lambda *said: None)
    engine = engine_of.load(resolve_model("tiny-gemma3"), device=device, training=config.training)
    optimizer = engine_of.make_optimizer(engine, config.training)
    batches = partial(
        batch_of_step, prepared.rows, micro_batch_size=rows, accumulation=accumulation, seed=1, pad_id=tokenizer.pad_id
    )
    steps = engine_of.optimizer_steps(engine, optimizer, batches, config.training, first=1, total=STEPS)
    return [step.loss for step in steps]


def difference(one: list[float], other: list[float]) -> dict[str, float]:
    """Largest and mean relative difference of two curves, and that of the means of their last 50 steps."""
    apart = [abs(a - b) / a for a, b in zip(one, other, strict=True)]
    ends = [statistics.fmean(curve[-50:]) for curve in (one, other)]
    return {"largest": max(apart), "mean": statistics.fmean(apart), "at_the_end": ends[1] / ends[0] - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULTS / "same_losses.json")
    options = parser.parse_args()
    take = partial(losses, options.device)
    with plain_operations():
        plain = take(rows=ROWS, accumulation=1, compiled=False)
        halves = take(rows=ROWS // 2, accumulation=2, compiled=False)
    now = take(rows=ROWS, accumulation=1, compiled=True)
    found: dict[str, Any] = {
        "about": about(),
        "noise": difference(plain, halves),
        "kernels and compiled layers": difference(plain, now),
        "losses": {"plain": plain, "plain, two micro-batches": halves, "kernels and compiled layers": now},
    }
    found["same"] = found["kernels and compiled layers"]["mean"] <= TIMES_THE_NOISE * found["noise"]["mean"]
    options.output.write_text(json.dumps(found) + "\n", encoding="utf-8")
    for name in ("noise", "kernels and compiled layers"):
        print(f"{name:28s} " + ", ".join(f"{key} {value:+.4%}" for key, value in found[name].items()), flush=True)
    print(f"loss {plain[0]:.4f} -> {plain[-1]:.4f} plain, {now[-1]:.4f} now; torch {torch.__version__}")
    if not found["same"]:
        raise SystemExit(f"the mean difference is more than {TIMES_THE_NOISE:g} times the noise")


if __name__ == "__main__":
    main()
