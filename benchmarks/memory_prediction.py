"""Predicted peak memory beside the measured one, on this CPU, with the real engine.

    python benchmarks/memory_prediction.py [--only NAME]... [--output FILE]

Each case runs in a fresh process: load random weights, some optimizer steps on rows of full length whose every token is a
target, one held-out loss, one checkpoint, one generation. Measured is the rise of the peak resident memory since before
the load, as the engine's own meter reads it from the kernel. Writes raw JSON and prints the table.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from tunix_rt.config import RunConfig  # noqa: E402
from tunix_rt.plan.fit import measure_rate, training_flops_per_token  # noqa: E402
from tunix_rt.plan.memory import predict  # noqa: E402
from tunix_rt.plan.shape import shape_of  # noqa: E402

CHILD_SECONDS = 300

TINY = {
    "model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 48, "sliding_window": 512,
    "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 6, "n_positions": 1024}
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 32_000, "hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma", "vocab_size": 16_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 2048,
}  # fmt: skip


def case(
    name: str, model: dict[str, Any], rows: int, length: int, *, fitted: bool = True, **more: Any
) -> dict[str, Any]:
    """`fitted`: the constants of the planner were chosen with this case in view; the others are the test of them."""
    settings: dict[str, Any] = {
        "model": {"weights": "random"},
        "data": {"max_length": length, "packing": more.get("packing", True)},
        "training": {
            "per_device_train_batch_size": rows,
            "gradient_checkpointing": more.get("checkpointing", False),
            "gradient_accumulation_steps": more.get("accumulation", 1),
            "dtype": more.get("dtype", "float32"),
        },
        "evaluation": {"per_device_eval_batch_size": more.get("eval_rows", rows), "max_new_tokens": 16},
    }
    return {"name": name, "model": model, "settings": settings, "steps": more.get("steps", 6), "fitted": fitted}


CASES = [
    case("tiny 1x8", TINY, 1, 8),
    case("tiny 8x128", TINY, 8, 128),
    case("tiny 16x256", TINY, 16, 256),
    case("tiny 2x1024", TINY, 2, 1024),
    case("tiny 8x256 checkpointing", TINY, 8, 256, checkpointing=True),
    case("tiny 2x64 eval 64", TINY, 2, 64, eval_rows=64),
    case("tiny 8x128 float64", TINY, 8, 128, dtype="float64", fitted=False),
    case("llama 1x8", LLAMA, 1, 8),
    case("llama 4x256", LLAMA, 4, 256),
    case("llama 4x256 checkpointing", LLAMA, 4, 256, checkpointing=True),
    case("llama 4x256 accumulation 2", LLAMA, 4, 256, accumulation=2, steps=4),
    case("llama 4x256 unpacked", LLAMA, 4, 256, packing=False),
    case("llama 2x1024", LLAMA, 2, 1024, steps=4),
    case("llama 1x256 eval 16", LLAMA, 1, 256, eval_rows=16),
    case("gpt2 1x8", GPT2, 1, 8, steps=4),
    case("gpt2 2x256", GPT2, 2, 256, steps=4),
    case("gpt2 2x256 checkpointing", GPT2, 2, 256, checkpointing=True, steps=3),
    case("gpt2 1x512", GPT2, 1, 512, steps=4, fitted=False),
    case("qwen3 3x384", QWEN3, 3, 384, steps=4, fitted=False),
    case("gemma2 4x192", GEMMA2, 4, 192, fitted=False),
    case("gemma 2x512", GEMMA, 2, 512, steps=4, fitted=False),
]


# --- in the child ----------------------------------------------------------------------------------------------------


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes after training and after everything, from a real run of the engine."""
    import numpy as np

    from tunix_rt.backends import torch_backend as engine_of
    from tunix_rt.data.pack import Row, StepBatch, collate
    from tunix_rt.models import ModelSource

    config = RunConfig.model_validate(spec["settings"])
    training, length = config.training, config.data.max_length
    random = np.random.default_rng(0)
    vocabulary = spec["model"]["vocab_size"]

    def row() -> Row:
        half = length // 2 if config.data.packing else length
        positions = np.concatenate([np.arange(half), np.arange(length - half)]).astype(np.int32)
        ids = random.integers(1, vocabulary, length).astype(np.int32)
        return Row(ids=ids, trained=np.ones(length, dtype=bool), positions=positions)

    def batch_of(step: int) -> StepBatch:
        rows = training.per_device_train_batch_size
        micro = tuple(
            collate([row() for _ in range(rows)], pad_id=0) for _ in range(training.gradient_accumulation_steps)
        )
        targets = sum(batch.targets for batch in micro)
        return StepBatch(
            micro_batches=micro, target_tokens=targets, tokens=rows * length * len(micro), sha256=str(step)
        )

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(spec["model"]))
        source = ModelSource(
            name=spec["name"], folder=Path(folder), revision="local", weights="random", config=spec["model"]
        )
        engine = engine_of.load(source, device="cpu", dtype=training.dtype, seed=0)
        optimizer = engine_of.make_optimizer(engine, training)
        steps = list(engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=spec["steps"]))
        after_training = engine.peak_bytes()
        rows = config.evaluation.per_device_eval_batch_size
        engine_of.heldout_loss(engine, [row() for _ in range(rows)], batch_size=rows, pad_id=0)
        engine_of.save_state(engine, optimizer, Path(folder))
        prompts = [list(map(int, row().ids)) for _ in range(rows)]
        answers = engine_of.generate(
            engine, prompts, max_new_tokens=config.evaluation.max_new_tokens, batch_size=rows, stop_ids=[0], pad_id=0
        )
        started = time.perf_counter()
        _ = list(answers)
        answering = time.perf_counter() - started
    seconds = statistics.median(step.seconds for step in steps[1:])
    flops = steps[-1].tokens * training_flops_per_token(shape_of(spec["model"]), config)
    return {
        "parameters": engine.parameters,
        "peak_bytes_by_step": [step.peak_bytes for step in steps],
        "after_training_bytes": after_training,
        "measured_bytes": engine.peak_bytes(),
        "step_seconds": round(seconds, 4),
        "step_flops_per_second": round(flops / seconds),
        "layer_call_seconds": round(answering / config.evaluation.max_new_tokens / shape_of(spec["model"]).layers, 5),
        "versions": engine_of.versions(),
    }


# --- in the parent ---------------------------------------------------------------------------------------------------


def run_case(spec: dict[str, Any], rate: float) -> dict[str, Any]:
    """One case in a fresh process, beside its prediction."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait do not burn the cores of others
    child = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(spec)],
        capture_output=True, text=True, timeout=CHILD_SECONDS, env=environment, check=False,
    )  # fmt: skip
    if child.returncode != 0:
        raise RuntimeError(f"{spec['name']}: {child.stderr[-2000:]}")
    measured = json.loads(child.stdout.strip().splitlines()[-1])
    config = RunConfig.model_validate(spec["settings"])
    plan = predict(shape_of(spec["model"]), config, device="cpu")
    return {
        **spec,
        **measured,
        "predicted_bytes": plan.peak_bytes,
        "predicted_phase": plan.peak_phase,
        "predicted_parts": plan.peak.parts,
        "rate_share": round(measured["step_flops_per_second"] / rate, 3),
        "error": round(plan.peak_bytes / measured["measured_bytes"] - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[spec["name"] for spec in CASES], help="run this case alone")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "memory_cpu.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(json.loads(arguments.child))))
        return
    started = time.perf_counter()
    rate = max(measure_rate() for _ in range(10))  # of the cores when nobody else holds them
    results = []
    print(f"{'case':28} {'parameters':>12} {'predicted MiB':>14} {'measured MiB':>13} {'error':>7}  rate share")
    for spec in CASES:
        if arguments.only and spec["name"] not in arguments.only:
            continue
        result = run_case(spec, rate)
        results.append(result)
        predicted, measured = result["predicted_bytes"] / 2**20, result["measured_bytes"] / 2**20
        print(
            f"{result['name']:28} {result['parameters']:12,} {predicted:14.1f} {measured:13.1f} "
            f"{100 * result['error']:+6.1f}%  {result['rate_share']:.2f}{'' if result['fitted'] else '  (not fitted)'}",
            flush=True,
        )
    worst = max(results, key=lambda result: abs(result["error"]))
    print(f"worst: {100 * worst['error']:+.1f}% ({worst['name']}); {time.perf_counter() - started:.0f} s in all")
    machine = {
        "os": platform.platform(),
        "libc": platform.libc_ver(),
        "cores": os.cpu_count(),
        "flops_per_second": rate,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
