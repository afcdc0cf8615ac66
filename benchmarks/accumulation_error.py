"""How far off a step's gradient is because it is summed in bfloat16, micro-batch by micro-batch: python -m
benchmarks.accumulation_error

The tiny Gemma 3 on its own traces, one row in a micro-batch. The gradient that the engine hands to its optimizer is held
against the sum of the gradients of the same micro-batches, each taken alone and added up in float64: what is left is the
rounding of the sum, and nothing of the products'. Writes benchmarks/results/accumulation_cpu.json in about a minute.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

from docs import markdown
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import StepBatch, batch_of_step
from tunix_rt.data.prepare import prepare
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.models.resolve import resolve_model
from tunix_rt.train.context import find_tokenizer

RESULT = Path("benchmarks/results/accumulation_cpu.json")
COMMAND = "python -m benchmarks.accumulation_error"
MODEL, DATA, LENGTH, SEED = "tiny-gemma3", "dev-reasoning-v2", 256, 1
MICRO_BATCHES = (1, 2, 4, 8, 32, 256)
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16 weights": {"dtype": "bfloat16", "master_dtype": "bfloat16"},
    "float32 weights, products in bfloat16": {"dtype": "bfloat16"},  # the label in the recorded results
}

Gradients = dict[str, torch.Tensor]


def summed(engine: Any, batch: StepBatch, micro_batches: Any) -> Gradients:
    """What `.grad` holds after the backward passes of `micro_batches`, by parameter, in float64."""
    engine.model.zero_grad(set_to_none=True)
    for micro in micro_batches:
        engine_of.summed_loss(engine, micro, scale=1 / batch.target_tokens).backward()
    return {name: parameter.grad.double() for name, parameter in engine.model.named_parameters()}


def one_by_one(engine: Any, batch: StepBatch) -> Gradients:
    total: Gradients = {}
    for micro in batch.micro_batches:
        for name, gradient in summed(engine, batch, [micro]).items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def error(found: Gradients, right: Gradients) -> float:
    """Length of the difference over the length of what is right, over all parameters together."""
    off = math.fsum(float((found[name] - right[name]).square().sum()) for name in right)
    return math.sqrt(off / math.fsum(float(gradient.square().sum()) for gradient in right.values()))


def measure(kind: dict[str, Any], rows: Any, pad_id: int) -> dict[str, float]:
    engine = engine_of.load(resolve_model(MODEL), device="cpu", training=Training(seed=SEED, **kind))
    engine.model.train()
    found = {}
    for count in MICRO_BATCHES:
        batch = batch_of_step(rows, 1, micro_batch_size=1, accumulation=count, seed=SEED, pad_id=pad_id)
        assert len(batch.micro_batches) == count
        found[str(count)] = error(summed(engine, batch, batch.micro_batches), one_by_one(engine, batch))
        print(f"{kind}: {count} micro-batches, off by {found[str(count)]:.2e}", flush=True)
    return found


def block(root: Path) -> str:
    """What was measured as a table with a sentence, for a page."""
    found = json.loads((root / RESULT).read_text(encoding="utf-8"))
    rows = [
        (
            f"{count:,}",
            *(f"{errors[str(count)]:.1e}" if errors[str(count)] else "0" for errors in found["errors"].values()),
        )
        for count in MICRO_BATCHES
    ]
    said = (
        f"Length of the error over that of the gradient, all parameters of {found['model']} together, one row of up to "
        f"{found['length']} tokens in a micro-batch; raw output in `{RESULT}`, by `{COMMAND}`."
    )
    return f"{markdown.table(('micro-batches in a step', *found['errors']), rows)}\n\n{said}"


def main() -> None:
    raw = {
        "model": {"model_name_or_path": MODEL},
        "data": {"dataset": DATA, "max_length": LENGTH, "packing": False, "on_overflow": "drop"},
        "evaluation": {"enabled": False},
    }
    config = build_config(raw, "benchmark")
    tokenizer, facts = find_tokenizer(config)
    rows = prepare(config, tokenizer, facts, lambda *said: None).rows
    found = {
        "torch": torch.__version__,
        "model": MODEL,
        "data": DATA,
        "length": LENGTH,
        "errors": {name: measure(kind, rows, tokenizer.pad_id) for name, kind in KINDS.items()},
    }
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
