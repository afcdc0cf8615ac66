"""Predicted peak memory beside the measured one, on this CPU, with the real engine.

    python benchmarks/memory_prediction.py [--only NAME]... [--measured FILE] [--output FILE]

Each case runs in a fresh process: load random weights, some optimizer steps on rows of full length whose every token is a
target, one held-out loss, one checkpoint, one generation. In the cases named so, a copy of the state for a checkpoint is
there during the last step, as when it is being written in the background. Measured is the rise of the peak resident memory
since before the load, as the engine's own meter reads it from the kernel. Writes raw JSON and prints the table. With
`--measured`, what an earlier run has measured stands beside what the planner says now.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from tunix_rt.config.settings import RunConfig  # noqa: E402
from tunix_rt.engines.decoding import Decoding  # noqa: E402
from tunix_rt.plan.memory import predict  # noqa: E402
from tunix_rt.plan.shape import shape_of  # noqa: E402
from tunix_rt.plan.timing import measure_rate, training_flops_per_token  # noqa: E402

if TYPE_CHECKING:
    from tunix_rt.data.packing import Row, StepBatch

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
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 24_000, "hidden_size": 448, "intermediate_size": 1536, "num_hidden_layers": 7,
    "num_attention_heads": 7, "num_key_value_heads": 1, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma", "vocab_size": 16_000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 2048,
}  # fmt: skip


BFLOAT16 = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
SMALLEST = {**BFLOAT16, "optim": "adafactor", "optim_in_backward": True, "gradient_checkpointing": True}


def case(
    name: str, model: dict[str, Any], rows: int, length: int, *, fitted: bool = True, **more: Any
) -> dict[str, Any]:
    """`fitted`: the constants of the planner were chosen with this case in view; the others are the test of them."""
    training = {"per_device_train_batch_size": rows, **more.get("training", {})}
    settings: dict[str, Any] = {
        "model": {"weights": "random"},
        "data": {"max_length": length, "packing": more.get("packing", True)},
        "training": training | ({"save_steps": 1} if "checkpoint" in name else {}),
        "evaluation": {"per_device_eval_batch_size": more.get("eval_rows", rows), "max_new_tokens": 16},
    }
    return {"name": name, "model": model, "settings": settings, "steps": more.get("steps", 6), "fitted": fitted}


RECOMPUTED, HALF = {"gradient_checkpointing": True}, {"gradient_checkpointing": 0.5}
EIGHT_BIT, NARROW = {"optim": "adamw_8bit"}, {"dtype": "bfloat16"}
CASES = [
    case("tiny 1x8", TINY, 1, 8),
    case("tiny 8x128", TINY, 8, 128),
    case("tiny 16x256", TINY, 16, 256),
    case("tiny 2x1024", TINY, 2, 1024),
    case("tiny 8x256 recomputed", TINY, 8, 256, training=RECOMPUTED),
    case("tiny 2x64 eval 64", TINY, 2, 64, eval_rows=64),
    case("tiny 8x128 float64", TINY, 8, 128, training={"dtype": "float64"}, fitted=False),
    case("llama 1x8", LLAMA, 1, 8),
    case("llama 4x256", LLAMA, 4, 256),
    case("llama 4x256 recomputed", LLAMA, 4, 256, training=RECOMPUTED),
    case("llama 4x256 half recomputed", LLAMA, 4, 256, training=HALF),
    case("llama 4x256 accumulation 2", LLAMA, 4, 256, training={"gradient_accumulation_steps": 2}, steps=4),
    case("llama 4x256 unpacked", LLAMA, 4, 256, packing=False),
    case("llama 2x1024", LLAMA, 2, 1024, steps=4),
    case("llama 1x256 eval 16", LLAMA, 1, 256, eval_rows=16),
    case("llama 4x256 checkpoint", LLAMA, 4, 256, fitted=False),
    case("llama 4x256 adamw_8bit", LLAMA, 4, 256, training=EIGHT_BIT),
    case("llama 4x256 in backward", LLAMA, 4, 256, training={"optim_in_backward": True}),
    case("llama 4x256 products in bfloat16", LLAMA, 4, 256, training=NARROW),
    case("llama 4x256 LoRA", LLAMA, 4, 256, training={"lora_rank": 16}),
    case("llama 2x128 smallest", LLAMA, 2, 128, training=SMALLEST, steps=2, fitted=False),  # that of the tests
    case("gpt2 1x8", GPT2, 1, 8, steps=4),
    case("gpt2 2x256", GPT2, 2, 256, steps=4),
    case("gpt2 2x256 recomputed", GPT2, 2, 256, training=RECOMPUTED, steps=3),
    case("gpt2 1x512", GPT2, 1, 512, steps=4, fitted=False),
    case("qwen3 3x384", QWEN3, 3, 384, steps=4),
    case("qwen3 3x384 smallest", QWEN3, 3, 384, training=SMALLEST, steps=4),
    case("qwen2 3x256", QWEN2, 3, 256, steps=4, fitted=False),
    case("qwen2 3x256 half recomputed", QWEN2, 3, 256, training=HALF, steps=4, fitted=False),
    case("qwen2 3x256 adamw_8bit", QWEN2, 3, 256, training=EIGHT_BIT, steps=4, fitted=False),
    case("qwen2 3x256 products in bfloat16", QWEN2, 3, 256, training=NARROW, steps=4, fitted=False),
    case("qwen2 3x256 smallest", QWEN2, 3, 256, training=SMALLEST, steps=4),
    case("qwen2 3x256 LoRA", QWEN2, 3, 256, training={"lora_rank": 16}, steps=4, fitted=False),
    case("gemma2 4x192", GEMMA2, 4, 192, fitted=False),
    case("gemma 2x512", GEMMA, 2, 512, steps=4),
    case("gemma 2x512 smallest", GEMMA, 2, 512, training=SMALLEST, steps=4),
    case("gemma 2x512 bfloat16 adamw_8bit", GEMMA, 2, 512, training={**BFLOAT16, **EIGHT_BIT}, steps=4),
    case("gemma 2x512 checkpoint", GEMMA, 2, 512, steps=4, fitted=False),
]


# --- in the child ----------------------------------------------------------------------------------------------------


def random_data(config: RunConfig, vocabulary: int) -> tuple[Callable[[], "Row"], Callable[[int], "StepBatch"]]:
    """What makes a row of random tokens, all of them targets, two examples where rows are packed; and a step of such."""
    import numpy as np

    from tunix_rt.data.packing import Row, StepBatch, collate

    training, length, random = config.training, config.data.max_length, np.random.default_rng(0)

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

    return row, batch_of


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes after training and after everything, from a real run of the engine."""
    from tunix_rt.engines.torch import loop as engine_of
    from tunix_rt.engines.torch import machine
    from tunix_rt.models.resolve import ModelSource

    config = RunConfig.model_validate(spec["settings"])
    training = config.training
    row, batch_of = random_data(config, spec["model"]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(spec["model"]))
        source = ModelSource(
            name=spec["name"], folder=Path(folder), revision="local", weights="random", config=spec["model"]
        )
        engine = engine_of.load(source, device="cpu", training=training)
        optimizer = engine_of.make_optimizer(engine, training)
        steps, copies = [], []
        for step in engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=spec["steps"]):
            steps.append(step)
            if training.save_steps is not None and step.step == spec["steps"] - 1:
                copies.append(engine_of.snapshot(engine, optimizer))
        after_training = engine.peak_bytes()
        rows = config.evaluation.per_device_eval_batch_size
        engine_of.heldout_loss(engine, [row() for _ in range(rows)], batch_size=rows, pad_id=0)
        for copy in copies:
            copy.write(Path(folder))
        if not copies:
            engine_of.write_direct(engine, optimizer, Path(folder))
        prompts = [list(map(int, row().ids)) for _ in range(rows)]
        answers = engine_of.generate(
            engine, prompts, decoding=Decoding(max_new_tokens=config.evaluation.max_new_tokens), stop_ids=[0], pad_id=0,
            decode=str, batch_size_at=lambda length: rows,
        )  # fmt: skip
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
        "versions": machine.versions(),
    }


# --- in the parent ---------------------------------------------------------------------------------------------------


def run_case(spec: dict[str, Any]) -> dict[str, Any]:
    """What one case measures, in a fresh process."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait do not burn the cores of others
    child = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(spec)],
        capture_output=True, text=True, timeout=CHILD_SECONDS, env=environment, check=False,
    )  # fmt: skip
    if child.returncode != 0:
        raise RuntimeError(f"{spec['name']}: {child.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return measured


def beside_prediction(spec: dict[str, Any], measured: dict[str, Any], rate: float) -> dict[str, Any]:
    config = RunConfig.model_validate(spec["settings"])
    plan = predict(shape_of(spec["model"]), config, device="cpu")
    phase = plan.peak if config.training.save_steps is not None else plan.least
    return {
        **measured,
        **spec,
        "predicted_bytes": phase.total_bytes,
        "predicted_phase": phase.name,
        "predicted_parts": phase.parts,
        "rate_share": round(measured["step_flops_per_second"] / rate, 3),
        "error": round(phase.total_bytes / measured["measured_bytes"] - 1, 4),
    }


def show(result: dict[str, Any]) -> None:
    predicted, measured = result["predicted_bytes"] / 2**20, result["measured_bytes"] / 2**20
    print(
        f"{result['name']:34} {result['parameters']:12,} {predicted:14.1f} {measured:13.1f} "
        f"{100 * result['error']:+6.1f}%  {result['rate_share']:.2f}{'' if result['fitted'] else '  (not fitted)'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[spec["name"] for spec in CASES], help="run this case alone")
    parser.add_argument("--measured", type=Path, help="measure nothing; take it from this file")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "memory_cpu.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(json.loads(arguments.child))))
        return
    before = json.loads(arguments.measured.read_text()) if arguments.measured else {"cases": []}
    known = {case["name"]: case for case in before["cases"]}
    started = time.perf_counter()
    machine = before.get("machine") or {
        "os": platform.platform(),
        "libc": platform.libc_ver(),
        "cores": os.cpu_count(),
        "flops_per_second": max(measure_rate() for _ in range(10)),  # of the cores when nobody else holds them
    }
    results = []
    print(f"{'case':34} {'parameters':>12} {'predicted MiB':>14} {'measured MiB':>13} {'error':>7}  rate share")
    for spec in CASES:
        if (arguments.only and spec["name"] not in arguments.only) or (known and spec["name"] not in known):
            continue
        measured = known[spec["name"]] if known else run_case(spec)
        results.append(beside_prediction(spec, measured, machine["flops_per_second"]))
        show(results[-1])
    worst = max(results, key=lambda result: abs(result["error"]))
    print(f"worst: {100 * worst['error']:+.1f}% ({worst['name']}); {time.perf_counter() - started:.0f} s in all")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
