"""How fast the JAX engine trains on the rows of `benchmarks.speed`: the same model shape, packed rows, types and optimizer.

    python -m benchmarks.jax_speed --data train.jsonl --tokenizer DIR

Writes benchmarks/results/jax_speed.json: every step's seconds, what the compiler asked for, and the peak that was measured.
The engine alone, as `tunix-rt train --backend jax` uses it, without what the program does around its steps.
"""

import argparse
import importlib.metadata
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.speed_jobs import CONFIGS, make_job
from tunix_rt.engines.base import StepShape
from tunix_rt.engines.jax import loop as jax_backend

RESULTS = Path(__file__).parent / "results"
GIB = 2**30


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Steps after the warm-up, one by one: the loss is read after each."""
    job = make_job(
        options.preset, config_file=CONFIGS / "gemma-1-2b-h200.yaml", data=options.data, tokenizer=options.tokenizer,
        device=options.device, rows=options.rows, length=options.length, steps=options.steps, warmup=options.warmup,
        changes=["training.backend=jax", f"training.gradient_checkpointing={options.recompute}", *options.set],
    )  # fmt: skip
    began = time.perf_counter()
    shape = StepShape(rows=options.rows, tokens=options.length, accumulation=1)
    engine = jax_backend.load(job.source, device=options.device, training=job.training, step=shape)
    optimizer = jax_backend.make_optimizer(engine, job.training)
    loaded = time.perf_counter() - began
    total = options.warmup + options.steps
    taken = list(jax_backend.optimizer_steps(engine, optimizer, job.batch, job.training, first=1, total=total))
    seconds = [step.seconds for step in taken]
    timed = taken[options.warmup :]
    facts = job.facts()
    return {
        "about": {
            "device": engine.devices[0].device_kind, "attention": engine.attention.name,
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")},
        },
        "settings": {name: value for name, value in vars(options).items() if name not in ("data", "tokenizer", "output")},
        "recomputed": engine.plan.remat if engine.plan else None,
        "load_and_compile_seconds": loaded,
        "step_seconds": seconds,
        "losses": [step.loss for step in taken],
        "tokens": [step.tokens for step in taken],
        "tokens_per_second": statistics.median(step.tokens / step.seconds for step in timed),
        "tflops": statistics.median(
            facts["tflop"][place % len(facts["tflop"])] / step.seconds for place, step in enumerate(timed)
        ),
        "peak_bytes": max(step.peak_bytes for step in taken),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gemma-2b")
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", default="tiny-gemma3")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--recompute", default="0.5", help="training.gradient_checkpointing: true, false, or a share")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--output", default=str(RESULTS / "jax_speed.json"))
    options = parser.parse_args()
    found = measure(options)
    Path(options.output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['tflops']:.0f} TFLOP/s, peak {found['peak_bytes'] / GIB:.2f} GiB, "
        f"loaded and compiled in {found['load_and_compile_seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
