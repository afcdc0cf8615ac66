"""Batches of the JAX engine: every step in the compiled shape, sharded over the devices; on an accelerator the next batch is
prefetched while a step runs."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tunix_rt.config.optimizers import learning_rate, total_at
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import MicroBatch, Row, StepBatch, collate, filled_up
from tunix_rt.doctor.nvidia import driver_version
from tunix_rt.doctor.probe import cpu_facts
from tunix_rt.engines.base import Step, prefetched
from tunix_rt.engines.checkpoint import host_has_room
from tunix_rt.engines.failures import REPORT_DEFECT, memory_errors_named, refuse_nonfinite
from tunix_rt.engines.jax import optim as jax_optim
from tunix_rt.engines.jax.generate import generate
from tunix_rt.engines.jax.load import Engine, free_bytes, load, load_for_inference
from tunix_rt.engines.jax.logits import last_logits, release, room_beside, tensor_hashes, token_gaps
from tunix_rt.engines.jax.mesh import ROWS, batch_sharding, parameter_shardings, put, rows_for
from tunix_rt.engines.jax.model import Batch, batch_of
from tunix_rt.engines.jax.save import restore_state, round_weights, save, snapshot, snapshot_bytes, write_direct
from tunix_rt.engines.jax.step import State, numbers
from tunix_rt.errors import HardwareError, TunixError
from tunix_rt.plan.attention_kernels import CUDNN_TOKENS_PER_EXAMPLE
from tunix_rt.plan.jax_floor import row_length


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """The batch of one step, and its micro-batches on the devices, each [accumulation, rows, tokens]."""

    batch: StepBatch
    placed: Batch
    examples: int
    """The most that a row has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """The shape of all steps, and their devices."""

    mesh: Any
    accumulation: int
    rows: int
    tokens: int

    def __call__(self, batch: StepBatch) -> PlacedStep:
        stacked = self.stacked(batch)
        return PlacedStep(batch=batch, placed=self.put(stacked), examples=most_examples(stacked))

    def put(self, stacked: Batch) -> Batch:
        placed: Batch = put(stacked, batch_sharding(self.mesh))
        return placed

    def stacked(self, batch: StepBatch) -> Batch:
        """The stacked micro-batches. The last step of an epoch may have fewer, and is padded with some without a target."""
        filled = [filled_batch(micro, rows=self.rows, tokens=self.tokens) for micro in batch.micro_batches]
        if len(filled) > self.accumulation:
            raise TunixError(
                f"a step of {len(filled)} micro-batches, compiled for {self.accumulation}",
                fix=REPORT_DEFECT,
            )
        padding = filled[0]._replace(weights=np.zeros_like(filled[0].weights))
        filled += [padding] * (self.accumulation - len(filled))
        return Batch(*(np.stack(parts) for parts in zip(*filled, strict=True)))


def most_examples(batch: Batch) -> int:
    """The most examples that a row of `batch` has, padding counted as attention counts it."""
    return int((batch.segments[..., -1] - batch.segments[..., 0]).max()) + 1


def filled_batch(micro: MicroBatch, *, rows: int, tokens: int) -> Batch:
    """`micro` padded to `rows` x `tokens`. Padding is no target, and no token attends to it."""
    there, width = micro.ids.shape
    if there > rows or width > tokens:
        raise TunixError(
            f"a micro-batch of {there} x {width} tokens, compiled for {rows} x {tokens}",
            fix=REPORT_DEFECT,
        )
    return batch_of(filled_up(micro, (rows, tokens)))


__all__ = [
    "free_bytes", "generate", "heldout_loss", "host_has_room", "last_logits", "load", "load_for_inference", "machine_facts",
    "make_optimizer", "optimizer_steps", "prepare_steps", "release", "restore_state", "room_beside", "round_weights", "save",
    "snapshot", "snapshot_bytes", "summed_loss", "tensor_hashes", "token_gaps", "write_direct",
]  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Optimizer:
    """Optimizer states: by name of the state, then as the tree of the parameters."""

    state: dict[str, Any]
    done: int = 0
    """Steps taken."""


# --- the loop --------------------------------------------------------------------------------------------------------


def make_optimizer(engine: Engine, training: Training) -> Optimizer:
    """Zeros on the devices, sharded like the parameters."""
    optim = jax_optim.optim_of(training)
    init = partial(jax_optim.init, optim=optim)
    shapes = jax.eval_shape(init, engine.params)
    with memory_errors_named("the initialization of the optimizer"):
        state = jax.jit(init, out_shardings=parameter_shardings(engine.mesh, shapes))(engine.params)
        return Optimizer(state=jax.block_until_ready(state))


def optimizer_steps(
    engine: Engine,
    optimizer: Optimizer,
    batch_of: Callable[[int], StepBatch],
    training: Training,
    *,
    first: int,
    total: int,
    before_update: Callable[[], None] = lambda: None,
    ends: Sequence[int] = (),
) -> Generator[Step, None, None]:
    """Train steps `first` to `total`, yielding after each. Everything random is a function of (seed, step). `before_update` is
    called once in each step, before it donates the weights."""
    if first > total:
        return
    place = placing(engine)
    ahead, slow = engine.device != "cpu", False
    placed_steps = prefetched(lambda step: place(batch_of(step)), ahead=ahead, first=first, total=total)
    with contextlib.closing(placed_steps) as batches:
        for step, ready in batches:
            started = time.perf_counter()
            lr = learning_rate(step, total=total_at(step, ends, total), training=training)
            with memory_errors_named(f"step {step}"):
                placed = ready()
                slow = slow or _warns_of_many_examples(engine, step, placed.examples)
                before_update()
                loss, norm = take_step(engine, optimizer, placed.placed, step, lr, placed.batch.target_tokens)
            if step == first:
                _assert_on_devices(engine, optimizer)
            yield Step(
                step=step,
                loss=loss,
                lr=lr,
                grad_norm=norm,
                target_tokens=placed.batch.target_tokens,
                tokens=placed.batch.tokens,
                seconds=time.perf_counter() - started,
                peak_bytes=engine.peak_bytes(),
                batch=placed.batch.sha256,
            )


def placing(engine: Engine) -> Placing:
    """Of the batches of a training step."""
    return Placing(mesh=engine.mesh, accumulation=_plan(engine).accumulation, rows=engine.rows, tokens=engine.tokens)


def take_step(
    engine: Engine, optimizer: Optimizer, batches: Batch, step: int, lr: float, target_tokens: int
) -> tuple[float, float]:
    """The update of one step; its loss and norm, which synchronize. An update that is not finite is skipped on the devices, and
    an error."""
    arguments = numbers(_plan(engine), step=step, rate=lr, target_tokens=target_tokens)
    (engine.params, optimizer.state), loss, norm = engine.step(
        State(engine.params, optimizer.state), batches, **arguments
    )  # donates the state before
    optimizer.done = step
    mean_loss, grad_norm = float(loss), float(norm)
    refuse_nonfinite(step, mean_loss, grad_norm)
    return mean_loss, grad_norm


def _warns_of_many_examples(engine: Engine, step: int, examples: int) -> bool:
    """Warn of a row with more examples than cuDNN attention takes in a batch; whether it did."""
    most = max(2, engine.tokens // CUDNN_TOKENS_PER_EXAMPLE)
    if engine.attention.name != "cudnn" or examples <= most:
        return False
    logger.warning(
        "Step %d: a packed row has %d examples, cuDNN attention supports at most %d in %d tokens; such micro-batches are "
        "computed one row at a time (exact, slower)",
        step, examples, most, engine.tokens,
    )  # fmt: skip
    return True


def _plan(engine: Engine) -> Any:
    if engine.plan is None:
        raise TunixError("the model was loaded for inference and cannot be trained", fix=REPORT_DEFECT)
    return engine.plan


def prepare_steps(
    engine: Engine, batch_of: Callable[[int], StepBatch], training: Training, *, total: int, longest_row: int = 0,
    as_before: str | None = None, planned: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """Which kernels compute the steps, as a checkpoint records it. `load` has compiled the step, for rows as long as the longest.
    Nothing of it depends on the number of devices, which may change when a run is resumed."""
    plan = _plan(engine)
    return {"layers": "xla", "model": engine.implementation, "recomputed": plan.remat}


def _assert_on_devices(engine: Engine, optimizer: Optimizer) -> None:
    """After the first step: parameters and optimizer state are on the devices of the run."""
    expected = set(engine.devices)
    arrays = jax.tree_util.tree_leaves_with_path({"parameters": engine.params, "optimizer": optimizer.state})
    strays = [jax.tree_util.keystr(path) for path, array in arrays if set(array.devices()) != expected]
    if strays:
        raise HardwareError(
            f"the run is on {len(expected)} x {engine.device}, but after the first step {len(strays)} of {len(arrays)} arrays "
            f"are elsewhere: {', '.join(strays[:3])}",
            fix=REPORT_DEFECT,
        )


# --- without training ------------------------------------------------------------------------------------------------


def heldout_loss(
    engine: Engine, rows: Sequence[Row], *, batch_size: int, pad_id: int,
    report: Callable[[int, str], None] = lambda done, note: None, loss: Callable[[Engine, Batch], float] | None = None,
) -> tuple[float, int]:  # fmt: skip
    """See `base.EngineModule.heldout_loss`. `loss` computes that of a micro-batch."""
    loss = loss or batch_loss
    tokens = row_length(max(len(row.ids) for row in rows), engine.device)
    size = rows_for(engine.mesh, min(batch_size, len(rows)))
    total, targets = 0.0, 0
    with memory_errors_named("the held-out loss"):
        for start in range(0, len(rows), size):
            micro = collate(rows[start : start + size], pad_id=pad_id)
            total += loss(engine, filled_batch(micro, rows=size, tokens=tokens))
            targets += micro.targets
            report(min(start + size, len(rows)), "")
    return total / targets, targets


def summed_loss(engine: Engine, micro: MicroBatch, loss: Callable[[Engine, Batch], float] | None = None) -> float:
    """Cross entropy summed over the targets of `micro`."""
    rows, tokens = micro.ids.shape
    filled = filled_batch(micro, rows=rows_for(engine.mesh, rows), tokens=row_length(tokens, engine.device))
    return (loss or batch_loss)(engine, filled)


def batch_loss(engine: Engine, batch: Batch) -> float:
    """Cross entropy summed over the targets of `batch`, on the host."""
    placed = put(batch, NamedSharding(engine.mesh, PartitionSpec(ROWS, None)))
    loss, attention = engine.loss_function(batch.ids.shape[1])
    return float(_summed(engine.params, placed, loss, engine.architecture, engine.compute, attention))


def prepared_loss(engine: Engine, batch: Batch, compiled: dict[tuple[int, ...], Any]) -> Callable[[], float]:
    """A function that computes `batch_loss`, compiled for the shape of `batch`, unless `compiled` has it."""
    placed = put(batch, NamedSharding(engine.mesh, PartitionSpec(ROWS, None)))
    if (shape := batch.ids.shape) not in compiled:
        loss, attention = engine.loss_function(shape[1])
        lowered = _summed.lower(engine.params, placed, loss, engine.architecture, engine.compute, attention)
        compiled[shape] = lowered.compile()
    return lambda: float(compiled[shape](engine.params, placed))


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _summed(params: Any, batch: Batch, loss: Any, architecture: Any, compute: str, attention: Any) -> Any:
    return loss(params, batch, architecture, compute=compute, attention=attention)


# --- what decides the bits -------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__}


def machine_facts(engine: Engine) -> dict[str, Any]:
    """What decides the bits of a step beside its inputs; runs on machines with equal facts give equal bits."""
    facts: dict[str, Any] = {
        "backend": "jax",
        "device": engine.device,
        **cpu_facts(),
        "cpu_capability": _instruction_set(os.environ.get("XLA_FLAGS", "")),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "versions": versions(),
        "deterministic": engine.deterministic,
        "devices": len(engine.devices),
    }
    if engine.device == "cuda":
        gpu = {
            "name": engine.devices[0].device_kind,
            "capability": str(engine.devices[0].compute_capability),
            "driver": driver_version(),
            **_cuda_versions(),
        }
        facts["gpu"] = {name: value for name, value in gpu.items() if value is not None}
    return facts


def _instruction_set(flags: str) -> str:
    """What XLA compiles for: all that the CPU has, unless a flag limits it."""
    limit = re.search(r"--xla_cpu_max_isa=(\w+)", flags)
    return limit[1].upper() if limit else "native"


def _cuda_versions() -> dict[str, str]:
    """Of the libraries that jax has loaded, formatted as torch does."""
    from jax._src.lib import cuda_versions  # there is no public API

    if cuda_versions is None:
        return {}
    cuda = int(cuda_versions.cuda_runtime_get_version())
    return {"cuda": f"{cuda // 1000}.{cuda % 1000 // 10}", "cudnn": str(cuda_versions.cudnn_get_version())}
