"""The work that the contenders of `benchmarks.speed` are given: packed rows, what they cost, and the device they run on."""

import gc
import importlib.metadata
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tunix_rt.config.load import load_config
from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.data.packing import IGNORED, MicroBatch, StepBatch, batch_of_step, steps_per_epoch
from tunix_rt.data.prepare import prepare
from tunix_rt.models.resolve import ModelSource, resolve_model
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.timing import step_flops
from tunix_rt.train.context import find_tokenizer

CONFIGS = Path(__file__).parent / "configs"
DENSE_SIZE = 8192
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every contender does: the same model, drawn from the same seed, and the same batches in the same order."""

    preset: str
    source: ModelSource
    config: RunConfig
    batches: tuple[StepBatch, ...]
    device: str
    warmup: int
    attention: str | None = None
    """What the loops of transformers attend with; None is sdpa, or eager where scores are soft-capped."""

    def batch(self, step: int) -> StepBatch:
        """Of step `step`, counted from 1. The first timed step gets the first batch."""
        return self.batches[(step - 1 - self.warmup) % len(self.batches)]

    @property
    def training(self) -> Training:
        return self.config.training

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.training.master_dtype or self.training.dtype)

    @property
    def shape(self) -> ModelShape:
        return shape_of(self.source.config)

    def facts(self) -> dict[str, Any]:
        first = self.batches[0]
        return {
            "preset": Path(self.preset).name,
            "parameters": self.shape.parameters,
            "micro_batches": len(first.micro_batches),
            "rows": first.micro_batches[0].ids.shape[0],
            "length": first.micro_batches[0].ids.shape[1],
            "batches": len(self.batches),
            "tokens": [batch.tokens for batch in self.batches],
            "target_tokens": [batch.target_tokens for batch in self.batches],
            "positions": [sum(micro.ids.size for micro in batch.micro_batches) for batch in self.batches],
            "examples": [sum(len(example_lengths(micro)) for micro in batch.micro_batches) for batch in self.batches],
            "tflop": [flops_of(self, batch) / 1e12 for batch in self.batches],
            "tflop_as_whole_rows": [flops_of(self, batch, whole_rows=True) / 1e12 for batch in self.batches],
        }


def make_job(
    preset: str,
    *,
    config_file: Path,
    data: str,
    tokenizer: str,
    device: str,
    rows: int,
    length: int,
    steps: int | None,
    warmup: int,
    changes: Sequence[str] = (),
    attention: str | None = None,
) -> Job:
    """The first `steps` batches of a dataset as the program makes them (None: a whole epoch), padded to `length`."""
    source = resolve_model(preset, weights="random")
    length = min(length, shape_of(source.config).max_positions)
    settings = {
        "model.model_name_or_path": preset, "model.tokenizer_name_or_path": tokenizer, "data.dataset": data,
        "data.max_length": length, "training.device": device, "training.seed": SEED,
        "training.per_device_train_batch_size": rows,
    }  # fmt: skip
    config = load_config(config_file, overrides=list(changes), flags=settings)
    found, facts = find_tokenizer(config)
    prepared = prepare(config, found, facts, lambda *said: None)
    print(f"{preset}: {prepared.describe()}", flush=True)
    training = config.training
    each = rows * training.gradient_accumulation_steps
    batches = tuple(
        widened(
            batch_of_step(
                prepared.rows, step, micro_batch_size=rows, accumulation=training.gradient_accumulation_steps, seed=SEED,
                pad_id=found.pad_id,
            ),
            length,
            found.pad_id,
        )
        for step in range(1, (steps or steps_per_epoch(len(prepared.rows), each)) + 1)
    )  # fmt: skip
    return Job(
        preset=preset, source=source, config=config, batches=batches, device=device, warmup=warmup, attention=attention
    )


def widened(batch: StepBatch, length: int, pad_id: int) -> StepBatch:
    """The batch with every row padded to `length`: a compiled loop of another program would compile each width anew."""
    return StepBatch(
        micro_batches=tuple(_widened(micro, length, pad_id) for micro in batch.micro_batches),
        target_tokens=batch.target_tokens,
        tokens=batch.tokens,
        sha256=batch.sha256,
    )


def _widened(micro: MicroBatch, length: int, pad_id: int) -> MicroBatch:
    more = length - micro.ids.shape[1]
    if more <= 0:
        return micro
    beside = ((0, 0), (0, more))
    after = np.tile(np.arange(more), (len(micro.ids), 1))  # an example of its own, of which no token is a target
    return MicroBatch(
        ids=np.pad(micro.ids, beside, constant_values=pad_id),
        labels=np.pad(micro.labels, beside, constant_values=IGNORED),
        positions=np.concatenate([micro.positions, after], axis=1),
    )


# --- what a step costs ------------------------------------------------------------------------------------------------


def real_lengths(micro: MicroBatch) -> list[int]:
    """Tokens of every row without its padding: an example ends with a target, its end of sequence."""
    width = micro.labels.shape[1]
    ends = [np.flatnonzero(row != IGNORED) for row in micro.labels]
    return [int(found[-1]) + 1 if len(found) else width for found in ends]


def example_lengths(micro: MicroBatch) -> list[int]:
    """Tokens of every example in a micro-batch."""
    found: list[int] = []
    for positions, length in zip(micro.positions, real_lengths(micro), strict=True):
        row = positions[:length]
        starts = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1] + 1]))
        found += np.diff(np.concatenate([starts, [length]])).tolist()
    return found


def flops_of(job: "Job", batch: StepBatch, *, whole_rows: bool = False) -> float:
    """Operations that a training step cannot do without, as the program counts them: padding and recomputation are none.

    Attention is counted inside each example; with `whole_rows` as if a row were one, which is how a speed is often quoted
    (3 % more for Gemma-1 2B and rows of 2,048 tokens).
    """
    micros = batch.micro_batches
    counted = step_flops(
        job.shape,
        recipe_of(job.training),
        lengths=[length for micro in micros for length in example_lengths(micro)],
        positions=sum(micro.ids.size for micro in micros),
        targets=batch.target_tokens,
    )
    if not whole_rows:
        return counted.model
    widths = [micro.ids.shape[1] for micro in micros for _ in micro.ids]
    rows = step_flops(job.shape, recipe_of(job.training), lengths=widths, positions=0, targets=0)
    return counted.layers + counted.head + rows.attention


# --- the device -------------------------------------------------------------------------------------------------------


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def start_afresh() -> None:
    """Let go of a model before; modules refer to themselves, so that only the collector frees them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory() -> dict[str, int]:
    """Peaks since `start_afresh`, and what the device itself says is taken; nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
    }


def dense_product(size: int = DENSE_SIZE, blocks: int = 8, each: int = 20) -> list[float]:
    """TFLOP/s of a plain bfloat16 product, block by block: what this device does at this hour when nothing else is asked."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        size, blocks, each = 512, 3, 2
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    found = []
    for block in range(blocks + 2):
        wait()
        started = time.perf_counter()
        for _ in range(each):
            torch.mm(left, right, out=out)
        wait()
        if block >= 2:
            found.append(2 * size**3 * each / (time.perf_counter() - started) / 1e12)
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def about() -> dict[str, Any]:
    """Everything a reader must know of the machine and of the versions."""
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "device": device.name if device else "cpu",
        "device_bytes": device.total_memory if device else None,
        "driver": _driver() if device else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: _version(name) for name in ("triton", "accelerate", "liger-kernel")},
        "threads": torch.get_num_threads(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    if not (program := shutil.which("nvidia-smi")):
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    return told.stdout.strip().splitlines()[0] if told.returncode == 0 and told.stdout.strip() else None
