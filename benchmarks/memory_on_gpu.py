"""Predicted peak memory beside the measured one, on a GPU, with the real engine: presets and settings crossed.

    python -m benchmarks.memory_on_gpu [--only TEXT]... [--output FILE]

One process for all cases, each with an engine of its own: random weights in the exact shape of a preset, three optimizer steps
on packed rows of random tokens whose every token is a target, one held-out loss, one generation. Measured is the peak of
torch's allocator in each of these; predicted is the largest phase of the plan that belongs to it. The prediction is made
without the GPU. Writes raw JSON and prints the table.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_gpu import start_afresh
from benchmarks.memory_prediction import random_data
from tunix_rt.backends import torch_backend as engine_of
from tunix_rt.backends.decoding import Decoding
from tunix_rt.config import RunConfig
from tunix_rt.models import resolve_model
from tunix_rt.plan.memory import predict
from tunix_rt.plan.shape import shape_of

ROOT = Path(__file__).parents[1]
GIB = 2**30
STEPS = 3
BFLOAT16 = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
RECIPES: dict[str, dict[str, Any]] = {
    "float32 AdamW": {},
    "float32 AdamW, recomputed": {"gradient_checkpointing": True},
    "bfloat16 products": {"dtype": "bfloat16"},
    "bfloat16 products, recomputed, accumulation": {
        "dtype": "bfloat16", "gradient_checkpointing": True, "gradient_accumulation_steps": 2,
    },
    "bfloat16 products, 8-bit, half recomputed": {
        "dtype": "bfloat16", "optim": "adamw_8bit", "gradient_checkpointing": 0.5,
    },
    "bfloat16 AdamW": BFLOAT16,
    "bfloat16 8-bit in backward": {**BFLOAT16, "optim": "adamw_8bit", "optim_in_backward": True},
    "bfloat16 Adafactor": {**BFLOAT16, "optim": "adafactor"},
    "smallest": {**BFLOAT16, "optim": "adafactor", "optim_in_backward": True, "gradient_checkpointing": True},
    "LoRA in bfloat16": {"dtype": "bfloat16", "lora_rank": 16},
}  # fmt: skip
SIZES = {
    "gemma-2b": [(1, 1024), (4, 1024)],
    "gemma-3-1b": [(2, 1024), (2, 2048)],
    "gemma-3-270m": [(8, 512), (2, 2048)],
    "llama-3.2-1b": [(2, 1024), (1, 4096)],
    "qwen-3-0.6b": [(4, 1024), (2, 2048)],
    "smollm2-135m": [(8, 1024), (1, 256)],
    "gpt2": [(4, 512), (8, 512)],
}
"""Rows and tokens, taken in turn by the settings."""
PARTS = {"steps": ("forward", "loss", "backward", "update"), "held-out": ("held-out loss",), "answers": ("generation",)}


def cases() -> list[dict[str, Any]]:
    made = []
    for preset, sizes in SIZES.items():
        for index, (recipe, training) in enumerate(RECIPES.items()):
            rows, length = sizes[index % len(sizes)]
            settings = {
                "model": {"weights": "random"},
                "data": {"max_length": length},
                "training": {"per_device_train_batch_size": rows, **training},
                "evaluation": {"per_device_eval_batch_size": 2 * rows, "max_new_tokens": 16},
            }
            made.append({"name": f"{preset} {rows}x{length} {recipe}", "preset": preset, "settings": settings})
    return made


def measure(spec: dict[str, Any], device: str) -> dict[str, Any]:
    """Peak bytes of the parts of a run; on a CPU, which only tries the code, the peak so far."""
    config = RunConfig.model_validate(spec["settings"])
    training, rows = config.training, config.evaluation.per_device_eval_batch_size
    source = resolve_model(spec["preset"], weights="random")
    row, batch_of = random_data(config, shape_of(source.config).vocab)
    start_afresh()
    engine = engine_of.load(source, device=device, training=training)

    def peak() -> int:
        found = engine.peak_bytes()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return found

    found = {"load": peak()}
    optimizer = engine_of.make_optimizer(engine, training)
    for _ in engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=STEPS):
        pass
    found["steps"] = peak()
    engine_of.heldout_loss(engine, [row() for _ in range(rows)], batch_size=rows, pad_id=0)
    found["held-out"] = peak()
    prompts = [row().ids.tolist() for _ in range(rows)]
    asked: dict[str, Any] = {
        "decoding": Decoding(max_new_tokens=config.evaluation.max_new_tokens),
        "rows_at": lambda length: rows,
        "decode": str,
        "stop_ids": [0],
        "pad_id": 0,
    }
    for _ in engine_of.generate(engine, prompts, **asked):
        pass
    found["answers"] = peak()
    return {"measured_bytes": found, "attention": engine.attention.name, "parameters": engine.parameters}


def beside_prediction(
    spec: dict[str, Any], measured: dict[str, Any], capability: tuple[int, int] | None
) -> dict[str, Any]:
    config = RunConfig.model_validate(spec["settings"])
    shape = shape_of(resolve_model(spec["preset"], weights="random").config)
    plan = predict(shape, config, device="cuda", capability=capability)
    totals = {phase.name: phase.total_bytes for phase in plan.phases}
    predicted = {part: max(totals[name] for name in names) for part, names in PARTS.items()}
    peak = max(size for part, size in measured["measured_bytes"].items() if part != "load")
    return {
        **spec,
        **measured,
        "predicted_bytes": predicted,
        "predicted_parts": plan.peak.parts,
        "error": round(max(predicted.values()) / peak - 1, 5),
        "errors": {part: round(predicted[part] / measured["measured_bytes"][part] - 1, 5) for part in PARTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="cases whose name holds this text")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the code")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "memory_cuda.json")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    capability = torch.cuda.get_device_capability() if on_gpu else None
    about = {"device": torch.cuda.get_device_name() if on_gpu else "cpu", **engine_of.versions()}
    print(f"{'case':62} {'predicted':>9} {'measured':>9} {'error':>8}   steps, held-out, answers", flush=True)
    results = []
    for spec in cases():
        if arguments.only and not any(text in spec["name"] for text in arguments.only):
            continue
        started = time.perf_counter()
        result = beside_prediction(spec, measure(spec, arguments.device), capability)
        results.append(result | {"seconds": round(time.perf_counter() - started, 1)})
        peak = max(size for part, size in result["measured_bytes"].items() if part != "load")
        parts = " ".join(f"{100 * error:+7.2f}%" for error in result["errors"].values())
        print(
            f"{result['name']:62} {max(result['predicted_bytes'].values()) / GIB:9.3f} {peak / GIB:9.3f} "
            f"{100 * result['error']:+7.2f}%  {parts}",
            flush=True,
        )
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"about": about, "cases": results}, indent=1) + "\n")
    worst = max(results, key=lambda result: abs(result["error"]))
    print(f"{len(results)} cases, worst {100 * worst['error']:+.2f}% ({worst['name']})")


if __name__ == "__main__":
    main()
