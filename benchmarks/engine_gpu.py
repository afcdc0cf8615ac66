"""What the PyTorch engine needs and reaches: the smallest memory, the loss head, and what rounding does to a curve.

    python -m benchmarks.engine_gpu memory --cap-gib 7.5       Gemma-1 2B, 1 x 1024, every parameter, inside a cap
    python -m benchmarks.engine_gpu head                       time, memory and error of loss heads, side by side
    python -m benchmarks.engine_gpu curves --tokenizer DIR --data train.jsonl    the same setting against float32 AdamW
    python -m benchmarks.engine_gpu rounding --model NAME --data NAME --device cpu   float32, bfloat16 rounded both ways

Each writes benchmarks/results/engine_NAME.json. Weights are those of a model folder, or random in the exact shape of a
preset; random tokens are never zeros. Times are medians after a warm-up, with the device synchronised.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from tunix_rt.config.load import build_config
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.data.packing import Row, StepBatch, batch_of_step, collate
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch.chunked_loss import head_loss
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.precision import loss_rows

RESULTS = Path(__file__).parent / "results"
GIB = 2**30

SMALLEST = {
    "dtype": "bfloat16", "master_dtype": "bfloat16", "optim": "adafactor", "optim_in_backward": True,
    "gradient_checkpointing": True, "per_device_train_batch_size": 1,
}  # fmt: skip


def about() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "device": device.name if device else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
    }


def write(name: str, found: Any) -> None:
    path = RESULTS / f"engine_{name}.json"
    path.write_text(json.dumps({"about": about(), **found}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}", flush=True)


def start_afresh() -> None:
    """Let go of an engine before; modules refer to themselves, so that only the collector frees them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- the smallest memory ----------------------------------------------------------------------------------------------


def random_batch(rows: int, length: int, vocabulary: int, step: int) -> StepBatch:
    chance = np.random.Generator(np.random.PCG64(step))
    made = [
        Row(
            ids=chance.integers(1, vocabulary, length).astype(np.int32),
            trained=np.ones(length, dtype=np.bool_),
            positions=np.arange(length, dtype=np.int32),
        )
        for _ in range(rows)
    ]
    micro = collate(made, pad_id=0)
    return StepBatch(micro_batches=(micro,), target_tokens=micro.targets, tokens=rows * length, sha256=str(step))


def measure(preset: str, training: Training, *, length: int, steps: int) -> dict[str, Any]:
    """Peak memory and speed of `steps` steps of random tokens; the median leaves the first three out."""
    rows = training.per_device_train_batch_size
    source = resolve_model(preset, weights="random")
    start_afresh()
    engine = engine_of.load(source, device="cuda", training=training)
    loaded = torch.cuda.max_memory_allocated()
    optimizer = engine_of.make_optimizer(engine, training)
    vocabulary = engine.model.config.vocab_size
    batches = partial(random_batch, rows, length, vocabulary)
    taken = list(engine_of.optimizer_steps(engine, optimizer, batches, training, first=1, total=steps))
    seconds = statistics.median(step.seconds for step in taken[3:])
    found = {
        "preset": preset,
        "rows": rows,
        "length": length,
        "settings": {k: v for k, v in training.model_dump().items() if v != Training.model_fields[k].default},
        "attention": engine.attention.name,
        "loss_rows": loss_rows(rows * (length - 1)),
        "parameters": engine.parameters,
        "steps": steps,
        "losses": [step.loss for step in taken],
        "step_seconds": seconds,
        "tokens_per_second": rows * length / seconds,
        "loaded_bytes": loaded,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    print(
        f"{preset} {rows}x{length}: {found['tokens_per_second']:,.0f} tokens/s, peak "
        f"{found['peak_allocated_bytes'] / GIB:.3f} GiB allocated, {found['peak_reserved_bytes'] / GIB:.3f} reserved, "
        f"{loaded / GIB:.3f} when loaded, loss {taken[0].loss:.3f} -> {taken[-1].loss:.3f}",
        flush=True,
    )
    del engine, optimizer
    return found


def memory(options: argparse.Namespace) -> None:
    if options.cap_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap_gib * GIB / total)
    cases = [measure(options.preset, Training(**SMALLEST, seed=1), length=1024, steps=options.steps)]
    write("memory", {"cap_gib": options.cap_gib, "cases": cases})


# --- the loss head ----------------------------------------------------------------------------------------------------


def plain(states: torch.Tensor, table: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((states @ table.t()).float(), targets)


def ours(states: torch.Tensor, table: torch.Tensor, targets: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    return head_loss(states, table, targets, scale=1 / len(targets), compute=states.dtype, rows=rows)


def candidates() -> dict[str, Callable[..., torch.Tensor]]:
    found: dict[str, Callable[..., torch.Tensor]] = {"plain torch": plain, "tunix-rt": ours}
    for rows in (128, 256, 512, 1024, 2048, 4096) if torch.cuda.is_available() else ():
        found[f"tunix-rt, {rows} rows"] = partial(ours, rows=rows)
    if hasattr(F, "linear_cross_entropy"):
        from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

        found["torch linear_cross_entropy"] = lambda s, w, t: F.linear_cross_entropy(
            s, w, t, options=LinearCrossEntropyOptions()
        )
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except ImportError:
        return found
    found["Liger (Triton)"] = lambda s, w, t: Liger.apply(s, w, t)[0]
    return found


def products(states: torch.Tensor, table: torch.Tensor) -> None:
    """The three products that no head can do without, in the chunks of the plain one."""
    logits = states @ table.t()
    _ = logits @ table
    _ = logits.t() @ states


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], repeats: int = 7) -> float:
    taken = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])


def rise_of(once: Callable[[], None], *leaves: torch.Tensor) -> int:
    """Bytes by which the allocator's peak rises over what was there before; the first call compiles and warms up."""
    once()
    wait()
    for leaf in leaves:
        leaf.grad = None
    start_afresh()
    before = torch.cuda.memory_allocated()
    once()
    return torch.cuda.max_memory_allocated() - before


def head(options: argparse.Namespace) -> None:
    device = options.device
    targets_count, hidden, vocabulary = (8192, 2048, 256_000) if device == "cuda" else (1024, 512, 50_257)
    generator = torch.Generator(device).manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    draw = {"device": device, "generator": generator, "dtype": kind}
    table = torch.nn.Parameter(torch.randn(vocabulary, hidden, **draw) / math.sqrt(hidden))
    states = torch.randn(targets_count, hidden, **draw).requires_grad_()
    targets = torch.randint(vocabulary, (targets_count,), device=device, generator=generator)
    gradients = kind.itemsize * (table.numel() + states.numel())
    floor = seconds_of(lambda: products(states.detach(), table.detach()))
    found = {"shape": [targets_count, hidden, vocabulary], "gradient_bytes": gradients, "three_products_seconds": floor}
    found["heads"] = []
    for name, function in candidates().items():

        def once(function: Callable[..., torch.Tensor] = function) -> None:
            states.grad = table.grad = None
            function(states, table, targets).backward()

        try:
            rise = rise_of(once, states, table) if device == "cuda" else 0
            taken = seconds_of(once)
        except (RuntimeError, ImportError, TypeError) as error:
            found["heads"].append({"name": name, "error": str(error).splitlines()[0][:200]})
            print(f"{name:28s} {str(error).splitlines()[0][:120]}", flush=True)
            continue
        case = {"name": name, "seconds": taken, "rise_bytes": rise}
        case |= {"times_the_products": taken / floor, "times_the_gradients": rise / gradients}
        found["heads"].append(case)
        print(
            f"{name:28s} {1000 * taken:7.1f} ms = {taken / floor:.2f} x products, "
            f"{rise / GIB:.2f} GiB = {rise / gradients:.2f} x gradients",
            flush=True,
        )
    write("head" if device == "cuda" else "head_cpu", found)


# --- curves -----------------------------------------------------------------------------------------------------------


def gsm8k_rows(config: RunConfig) -> tuple[Any, int]:
    """The rows of a GSM8K file as the program makes them, and the id they are padded with."""
    from tunix_rt.data.prepare import prepare
    from tunix_rt.train.context import find_tokenizer

    tokenizer, facts = find_tokenizer(config)
    prepared = prepare(config, tokenizer, facts, lambda *said: None)
    print(prepared.describe(), flush=True)
    return prepared, tokenizer.pad_id


def train(config: RunConfig, prepared: Any, pad_id: int, *, weights: str, steps: int, compare: bool) -> dict[str, Any]:
    training = config.training
    source = resolve_model(config.model.model_name_or_path or "", weights=weights)
    start_afresh()
    engine = engine_of.load(source, device=training.device, training=training)
    first = {n: p.detach().clone() for n, p in engine.model.named_parameters()} if compare else {}
    optimizer = engine_of.make_optimizer(engine, training)
    batches = partial(
        batch_of_step, prepared.rows, micro_batch_size=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps, seed=training.seed, pad_id=pad_id,
    )  # fmt: skip
    taken = list(engine_of.optimizer_steps(engine, optimizer, batches, training, first=1, total=steps))
    found: dict[str, Any] = {
        "settings": {k: v for k, v in training.model_dump().items() if v != Training.model_fields[k].default},
        "losses": [step.loss for step in taken],
        "grad_norms": [step.grad_norm for step in taken],
        "mean_of_last_20": statistics.fmean(step.loss for step in taken[-20:]),
        "step_seconds": statistics.median(step.seconds for step in taken[3:]),
        "tokens_per_step": statistics.fmean(step.tokens for step in taken),
        "peak_bytes": engine.peak_bytes(),
    }
    if prepared.heldout_rows:
        found["heldout_loss"], _ = engine_of.heldout_loss(engine, prepared.heldout_rows, batch_size=4, pad_id=pad_id)
    if compare:
        moved = sum(int((first[n] != p).sum()) for n, p in engine.model.named_parameters())
        found["share_of_weights_moved"] = moved / engine.parameters
    return found


def say(name: str, found: dict[str, Any]) -> None:
    moved = f", moved {found['share_of_weights_moved']:.1%}" if "share_of_weights_moved" in found else ""
    held = f", held-out {found['heldout_loss']:.4f}" if "heldout_loss" in found else ""
    print(
        f"{name:24s} loss {found['losses'][0]:.4f} -> {found['mean_of_last_20']:.4f}{held}{moved}, "
        f"{found['peak_bytes'] / GIB:.2f} GiB, {found['tokens_per_step'] / found['step_seconds']:,.0f} tokens/s",
        flush=True,
    )


def configured(
    options: argparse.Namespace, model: str, tokenizer: str | None, length: int, **training: Any
) -> RunConfig:
    raw = {
        "model": {"model_name_or_path": model, "tokenizer_name_or_path": tokenizer},
        "data": {"dataset": options.data, "max_length": length, "on_overflow": "drop"},
        "training": {
            "device": options.device,
            "seed": 1,
            "weight_decay": 0.0,
            "lr_scheduler_type": "linear",
            **training,
        },
        "evaluation": {"enabled": False},
    }
    return build_config(raw, "benchmark")


def curves(options: argparse.Namespace) -> None:
    """Gemma-1 2B from random weights: the smallest memory against plain float32 AdamW, on the same rows."""
    plain = {"dtype": "float32", "learning_rate": options.adamw_rate, "per_device_train_batch_size": 1}
    settings = {"float32 AdamW": plain}
    for rate in options.adafactor_rate:
        settings[f"smallest, rate {rate:g}"] = SMALLEST | {"learning_rate": rate}
    found: dict[str, Any] = {}
    for name, training in settings.items():
        config = configured(options, options.preset, options.tokenizer, 1024, warmup_steps=20, **training)
        prepared, pad_id = gsm8k_rows(config)
        found[name] = train(config, prepared, pad_id, weights="random", steps=options.steps, compare=False)
        found[name]["beside_float32"] = found[name]["mean_of_last_20"] / found["float32 AdamW"]["mean_of_last_20"] - 1
        say(name, found[name])
        print(f"  at the end {found[name]['beside_float32']:+.2%} beside float32 AdamW", flush=True)
    write("curves", {"preset": options.preset, "steps": options.steps, "runs": found})


def rounding(options: argparse.Namespace) -> None:
    """A real model: float32 throughout, bfloat16 weights rounded stochastically, and to nearest."""
    narrow = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
    settings = {
        "float32": {"dtype": "float32"},
        "float32 master, bfloat16": {"dtype": "bfloat16"},
        "bfloat16 stochastic": narrow,
        "bfloat16 nearest": narrow | {"stochastic_rounding": False},
        "bfloat16 stochastic, 8-bit": narrow | {"optim": "adamw_8bit"},
    }
    found: dict[str, Any] = {}
    for name, training in settings.items():
        asked = {
            "learning_rate": options.rate,
            "per_device_train_batch_size": options.rows,
            "warmup_steps": 20,
            **training,
        }
        config = configured(options, options.model, None, options.length, **asked)
        prepared, pad_id = gsm8k_rows(config)
        found[name] = train(config, prepared, pad_id, weights="pretrained", steps=options.steps, compare=True)
        say(name, found[name])
    asked = {"model": Path(options.model).name, "data": Path(options.data).name, "rate": options.rate}
    asked |= {"device": options.device, "rows": options.rows, "length": options.length, "steps": options.steps}
    write("rounding", asked | {"runs": found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["memory", "head", "curves", "rounding"])
    parser.add_argument("--preset", default="gemma-2b")
    parser.add_argument("--model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--data")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--cap-gib", type=float, default=7.5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--adafactor-rate", type=float, nargs="+", default=[1e-4])
    parser.add_argument("--adamw-rate", type=float, default=1e-4)
    options = parser.parse_args()
    {"memory": memory, "head": head, "curves": curves, "rounding": rounding}[options.which](options)


if __name__ == "__main__":
    main()
