"""Predicted peak memory of generation beside the measured one, on a GPU: models, batch sizes and lengths drawn at random.

    python -m benchmarks.generation_memory [--seed 25 --count 24] [--folder DIR]

A case is random weights in the exact shape of a preset, as a loaded model or as a training run has them (float32 weights,
bfloat16 compute), prompts of one length or of half of it to all of it, and answers that cannot end. Measured is the peak of
torch's allocator over two batches, the weights included. A second pass generates again with an allocator that gives out no more
than the prediction and the margin of the plan. Writes one JSON file.
"""

import argparse
import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_gpu import start_afresh
from tunix_rt.config.settings import Training
from tunix_rt.engines.decoding import Decoding
from tunix_rt.engines.torch import loop as backend
from tunix_rt.errors import DoesNotFitError
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.activations import Batch
from tunix_rt.plan.fit import CUDA_SAFETY_BYTES, CUDA_SAFETY_SHARE
from tunix_rt.plan.footprint import footprint_for_inference, footprint_of
from tunix_rt.plan.generation import generation_parts
from tunix_rt.plan.memory import CUDA_OVERHEAD_BYTES
from tunix_rt.plan.shape import shape_of

RESULTS = Path(__file__).parent / "results"
PRESETS_FOLDER = Path(__file__).parents[1] / "presets"
PRESETS = (
    "gemma-3-270m",
    "gemma-3-1b",
    "gemma-2-2b",
    "gemma-2b",
    "llama-3.2-1b",
    "smollm2-135m",
    "qwen-3-0.6b",
    "gpt2",
)
DTYPES = ("bfloat16", "bfloat16", "float32", "trained")


def drawn(seed: int, count: int) -> list[dict[str, Any]]:
    own, found = random.Random(seed), []
    for number in range(count):
        length = own.choice((16, 64, 128, 256, 512, 900))
        found.append(
            {
                "preset": PRESETS[number % len(PRESETS)], "dtype": own.choice(DTYPES), "length": length,
                "rows": own.choice([rows for rows in (1, 4, 16, 64, 128, 256, 512) if rows * length <= 2**17]),
                "new_tokens": own.choice((16, 40, 100)), "mixed": own.random() < 0.7,
            }
        )  # fmt: skip
    return found


def predicted_parts(case: Mapping[str, Any], capability: tuple[int, int]) -> dict[str, int]:
    """By the present code. All prompts are given twice; sorted by length, a batch of mixed ones has each of them twice."""
    config = json.loads((PRESETS_FOLDER / case["preset"] / "config.json").read_text(encoding="utf-8"))
    shape, trained = shape_of(config), case["dtype"] == "trained"
    run = (
        footprint_of(shape, Training(dtype="bfloat16"), "cuda")
        if trained
        else footprint_for_inference(shape, case["dtype"], "cuda")
    )
    batch = Batch(rows=case["rows"], length=case["length"], packed=False, device="cuda", capability=capability)
    parts = generation_parts(run, batch, case["new_tokens"], samples=2 if case["mixed"] and case["rows"] > 1 else 1)
    return {"weights": run.weights, "overhead": CUDA_OVERHEAD_BYTES // (1 if trained else 2), **parts}


def cap_of(predicted: int) -> int:
    return int(predicted * (1 + CUDA_SAFETY_SHARE) + CUDA_SAFETY_BYTES)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    source, trained = resolve_model(case["preset"], weights="random"), case["dtype"] == "trained"
    start_afresh()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0)
    shape = shape_of(source.config)
    if trained:
        engine = backend.load(source, device="cuda", training=Training(dtype="bfloat16"))
    else:
        engine = backend.load_for_inference(source, device="cuda", dtype=case["dtype"])
    own = torch.Generator().manual_seed(1)
    rows, length, new = case["rows"], case["length"], case["new_tokens"]
    lengths = torch.randint((length + 1) // 2, length + 1, (rows,), generator=own).tolist()
    lengths = [length, *lengths[1:]] if case["mixed"] else [length] * rows
    prompts = [torch.randint(3, shape.vocab, (one,), generator=own).tolist() for one in lengths]

    def generate() -> None:
        for _ in backend.generate(
            engine, prompts * 2, decoding=Decoding(max_new_tokens=new), stop_ids=[-2], pad_id=0, decode=str,
            batch_size_at=lambda longest: rows,
        ):  # fmt: skip
            pass

    parts = predicted_parts(case, torch.cuda.get_device_capability())
    predicted = sum(parts.values())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    generate()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    cap = cap_of(predicted)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
    torch.cuda.reset_peak_memory_stats()
    backend_warned = halvings()
    try:
        generate()
        fits = halvings() == backend_warned
    except DoesNotFitError:
        fits = False
    return {
        **case, "predicted_bytes": predicted, "parts": parts, "peak_bytes": peak, "reserved_bytes": reserved, "cap_bytes": cap,
        "reserved_under_the_cap": torch.cuda.max_memory_reserved(), "error": round(predicted / peak - 1, 4),
        "fits_under_the_cap": fits,
    }  # fmt: skip


HALVED: list[str] = []


def halvings() -> int:
    return len(HALVED)


def main() -> None:
    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            HALVED.append(record.getMessage())

    logging.getLogger("tunix_rt.engines.decoding").addHandler(Watch())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    asked = parser.parse_args()
    path, found = asked.folder / "generation_memory.json", []
    asked.folder.mkdir(parents=True, exist_ok=True)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": asked.seed}
    for case in drawn(asked.seed, asked.count):
        found.append(measure(case))
        one = found[-1]
        print(
            f"{one['preset']:>13} {one['dtype']:>8} {one['rows']:>3} x {one['length']:>3} + {one['new_tokens']:>3}: predicted "
            f"{one['predicted_bytes'] / 2**20:7.0f} MiB, peak {one['peak_bytes'] / 2**20:7.0f}, {one['error']:+.1%}, "
            f"reserved {one['reserved_bytes'] / 2**20:7.0f}, fits: {one['fits_under_the_cap']}",
            flush=True,
        )
        path.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
