"""The PyTorch engine: the loop.

`load` and the loss are in `model.py`, the optimizers in `optim.py`, checkpoints in `state.py`, the finished
model in `save.py`, answers in `generate.py`. The loop yields one `Step` per optimizer update and knows no files.
"""

import contextlib
import gc
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, StepBatch, collate
from tunix_rt.doctor.nvidia import driver_version
from tunix_rt.doctor.probe import cpu_facts
from tunix_rt.engines.base import Step
from tunix_rt.engines.profile.trace import BACKWARD, BATCH, OPTIMIZER
from tunix_rt.engines.schedule import learning_rate
from tunix_rt.engines.torch.chunked_loss import kernel_unable
from tunix_rt.engines.torch.compile import compile_layers, layers_of, record_layers
from tunix_rt.engines.torch.generate import generate
from tunix_rt.engines.torch.logits import last_logits, release, room_beside, tensor_hashes, token_gaps
from tunix_rt.engines.torch.model import Engine, LossScale, free_bytes, load, load_to_ask, memory_is_named, summed_loss
from tunix_rt.engines.torch.optim import Optimizer, has_kernels, kernels_know
from tunix_rt.engines.torch.prefetch import PlacedStep, placed_steps
from tunix_rt.engines.torch.profile import region
from tunix_rt.engines.torch.save import (
    await_copy,
    host_has_room,
    restore_state,
    round_weights,
    save,
    snapshot,
    snapshot_bytes,
    write_direct,
)
from tunix_rt.errors import HardwareError, InputError, TunixError
from tunix_rt.plan.compile_policy import Compiling, choose_compiling, to_be_recorded

__all__ = [
    "free_bytes", "generate", "heldout_loss", "host_has_room", "last_logits", "load", "load_to_ask", "machine_facts",
    "make_optimizer", "optimizer_steps", "prepare_steps", "release", "restore_state", "room_beside", "round_weights", "save",
    "snapshot", "snapshot_bytes", "summed_loss", "tensor_hashes", "token_gaps", "write_direct",
]  # fmt: skip

logger = logging.getLogger(__name__)


# --- the loop --------------------------------------------------------------------------------------------------------


def make_optimizer(engine: Engine, training: Training) -> Optimizer:
    """The optimizer over every trained parameter; matrices are decayed, vectors (norms, biases) are not."""
    return Optimizer(
        {name: parameter for name, parameter in engine.model.named_parameters() if parameter.requires_grad},
        kind=training.optim,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_epsilon,
        weight_decay=training.weight_decay,
        seed=training.seed,
        stochastic_rounding=engine.recipe.rounding == "stochastic",
    )


def optimizer_steps(
    engine: Engine,
    optimizer: Optimizer,
    batch_of: Callable[[int], StepBatch],
    training: Training,
    *,
    first: int,
    total: int,
) -> Iterator[Step]:
    """Train steps `first` to `total`, yielding after each. Everything random is a function of (seed, step)."""
    prepare_steps(engine, batch_of, training, total=total)
    take_step = _step_in_backward if engine.recipe.in_backward else _whole_step
    placing = engine.placing(training=True)
    with (
        _little_garbage(engine),
        contextlib.closing(placed_steps(batch_of, placing, first=first, total=total)) as batches,
    ):
        for step, ready in batches:
            started = time.perf_counter()
            rate = learning_rate(step, total=total, training=training)
            if not engine.model.training:
                engine.model.train()
            optimizer.begin(step, rate)
            with memory_is_named(f"step {step}"), engine.kernels():
                with region(BATCH):
                    placed = ready()
                    placed.wait()
                mean_loss, norm = take_step(engine, optimizer, placed, training, step)
            if step == first:
                _assert_on_device(engine, optimizer)
            yield Step(
                step=step,
                loss=mean_loss,
                lr=rate,
                grad_norm=norm,
                target_tokens=placed.batch.target_tokens,
                tokens=placed.batch.tokens,
                seconds=time.perf_counter() - started,
                peak_bytes=engine.peak_bytes(),
                batch=placed.batch.sha256,
            )
    if engine.recorded:  # gradients lie in its memory
        engine.model.zero_grad(set_to_none=True)
        engine.recorded = None


def prepare_steps(
    engine: Engine, batch_of: Callable[[int], StepBatch], training: Training, *, total: int, longest_row: int = 0,
    as_before: str | None = None, planned: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """Make the layers ready for the steps of a run, once; which code computes them, as a checkpoint writes it down.

    They are compiled where it is asked for or pays: for the first batch of the run, wherever it is continued, with rows as
    long as the longest there is. A run that is continued has its layers `as_before`; another those that were `planned`."""
    if not engine.prepared:
        engine.prepared = True
        recompute_layers(engine)
        batch = batch_of(1)
        sample = batch.micro_batches[0]
        choice = _compiling(engine, training, batch, total=total, as_before=as_before, planned=planned)
        torch.manual_seed(_seed_of(training.seed, 0))
        compile_layers(engine, choice, sample, longest_row=longest_row)
        told = as_before or planned
        if engine.compiled and (told == "recorded" if told else _to_be_recorded(engine, training, batch.tokens)):
            record_layers(engine, sample)
    table = engine.model.get_output_embeddings().weight
    softcap = getattr(engine.model.config, "final_logit_softcapping", None)
    plain_head = kernel_unable(table.device, engine.compute, len(table), softcap)
    by_kernel = kernels_know(engine.recipe.optimizer, engine.recipe.weights)
    return {
        "layers": "recorded" if engine.recorded else "compiled" if engine.compiled else "plain",
        "head": "plain" if plain_head else "kernel",
        "update": "kernel" if by_kernel and has_kernels(table.device) else "plain",
    }


def _compiling(
    engine: Engine, training: Training, batch: StepBatch, *, total: int, as_before: str | None, planned: str | None
) -> Compiling:
    """Whether to compile the layers. Those of a continued run must be what they were."""
    asked, sample = training.compile, batch.micro_batches[0]
    if as_before is not None and asked == "auto":
        asked = as_before != "plain"
    on_gpu = engine.device.type == "cuda"
    choice = choose_compiling(
        asked,
        device=engine.device.type,
        device_name=torch.cuda.get_device_name(engine.device) if on_gpu else None,
        parameters=engine.parameters,
        tokens=batch.tokens,
        steps=total,
        packed=int((sample.positions == 0).sum()) > len(sample.positions),
        adapters=engine.recipe.frozen is not None,
        capability=torch.cuda.get_device_capability(engine.device) if on_gpu else None,
    )
    if asked == "auto" and planned is not None and choice.wanted != (planned != "plain"):
        return Compiling(wanted=not choice.wanted, required=False, why="the memory of the run is planned for it")
    return choice


def _to_be_recorded(engine: Engine, training: Training, tokens: int) -> bool:
    """As the plan foretells it."""
    return to_be_recorded(
        engine.recipe,
        device=engine.device.type,
        device_name=torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None,
        flex=engine.attention.name == "flex",
        accumulation=training.gradient_accumulation_steps,
        parameters=engine.parameters,
        layers=len(layers_of(engine.model)),
        tokens=tokens,
    )


@contextlib.contextmanager
def _little_garbage(engine: Engine) -> Iterator[None]:
    """Python's garbage collector leaves alone what is there before the first step: a million objects, each of which it would
    walk through again and again while a GPU waits."""
    if engine.device.type != "cuda":
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def recompute_layers(engine: Engine) -> None:
    """Let the first layers be computed again in the backward pass; the last `kept_layers` keep their activations."""
    layers = layers_of(engine.model)
    kept = engine.recipe.kept_layers(len(layers))
    if engine.recipe.kept_share == 1.0:
        return
    if not layers:
        raise InputError(
            f"{engine.source.name}: its layers cannot be computed again in the backward pass",
            fix="set training.gradient_checkpointing: false",
        )
    engine.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers[len(layers) - kept :]:
        layer.gradient_checkpointing = False
    logger.info(
        "Recomputation: %d of %d layers are computed again in the backward pass", len(layers) - kept, len(layers)
    )


def _whole_step(
    engine: Engine, optimizer: Optimizer, placed: PlacedStep, training: Training, step: int
) -> tuple[float, float]:
    """All gradients, their global norm, then the update. Returns the mean loss and the norm before clipping.

    A GPU is waited for once, at the end: it clips by itself, and leaves an update out whose gradients are not finite."""
    if engine.loss_scale is not None:
        return _scaled_step(engine, optimizer, placed, training, step, engine.loss_scale)
    total = _gradients(engine, placed, training, step, 1.0)
    with region(OPTIMIZER):
        norm = _global_norm(engine)
    await_copy(engine)
    limit = training.max_grad_norm
    scale = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else None
    sound: torch.Tensor | None = torch.isfinite(total) & torch.isfinite(norm)
    if engine.device.type == "cpu":  # nothing is waited for there, and whole passes over the gradients are saved
        _refuse_nonfinite(step, *torch.stack([total, norm]).tolist())
        scale, sound = (None if scale is None or scale == 1 else scale), None
    with region(OPTIMIZER):
        optimizer.step(scale=scale, sound=sound)
    engine.model.zero_grad(set_to_none=True)
    mean_loss, found = torch.stack([total, norm]).tolist()
    _refuse_nonfinite(step, mean_loss, found)
    return mean_loss, found


def _scaled_step(
    engine: Engine, optimizer: Optimizer, placed: PlacedStep, training: Training, step: int, scaled: LossScale
) -> tuple[float, float]:
    """The same in float16, with the loss multiplied: where gradients overflow they are computed again with less."""
    while True:
        multiplied = scaled.value
        total = _gradients(engine, placed, training, step, multiplied)
        mean_loss, found = torch.stack([total / multiplied, _global_norm(engine) / multiplied]).tolist()
        if not math.isfinite(mean_loss) or math.isfinite(found) or multiplied <= 1:
            break
        scaled.overflowed()
        engine.model.zero_grad(set_to_none=True)
        logger.info(
            "step %d: float16 gradients overflowed; computed again with the loss multiplied by %g instead of %g",
            step, scaled.value, multiplied,
        )  # fmt: skip
    _refuse_nonfinite(step, mean_loss, found)
    await_copy(engine)
    limit = training.max_grad_norm
    factor = (min(1.0, limit / (found + 1e-6)) if limit else 1.0) / multiplied
    with region(OPTIMIZER):
        optimizer.step(scale=torch.tensor(factor, device=engine.device, dtype=torch.float64))
    engine.model.zero_grad(set_to_none=True)
    scaled.held()
    return mean_loss, found


def _gradients(engine: Engine, placed: PlacedStep, training: Training, step: int, multiplied: float) -> torch.Tensor:
    """Backward passes of every micro-batch; the mean loss over all targets of the step, times `multiplied`."""
    torch.manual_seed(_seed_of(training.seed, step))
    total = torch.zeros((), device=engine.device, dtype=torch.float64)
    for micro in placed.micro_batches:
        # The mean over all targets of the step, not of the micro-batch: accumulation must not change the loss.
        loss = summed_loss(engine, micro, scale=multiplied / placed.batch.target_tokens)
        with region(BACKWARD):
            loss.backward()
        total += loss.detach()
    return total


def _global_norm(engine: Engine) -> torch.Tensor:
    """Of all gradients, in float64. Each is summed in at least float32: that of bfloat16 would be a bfloat16 number."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in engine.model.parameters():
        if parameter.grad is not None:
            by_type.setdefault(parameter.dtype, []).append(parameter.grad)
    norms = [
        norm.double()
        for dtype, gradients in by_type.items()
        for norm in torch._foreach_norm(gradients, 2, torch.float64 if dtype == torch.float64 else torch.float32)
    ]
    return torch.linalg.vector_norm(torch.stack(norms))


def _step_in_backward(
    engine: Engine, optimizer: Optimizer, placed: PlacedStep, training: Training, step: int
) -> tuple[float, float]:
    """Each tensor is updated as soon as its gradient is complete, clipped by its own norm, and the gradient dropped.

    The first tensors have been updated when a later gradient turns out not to be finite: nothing after it is, and the run
    stops without keeping any of it.
    """
    await_copy(engine)
    torch.manual_seed(_seed_of(training.seed, step))
    (micro,) = placed.micro_batches
    loss = summed_loss(engine, micro, scale=1 / placed.batch.target_tokens)
    norms: list[torch.Tensor] = []
    sounds: list[torch.Tensor] = []
    sound = torch.isfinite(loss.detach())

    def update(parameter: torch.nn.Parameter) -> None:
        nonlocal sound
        with region(OPTIMIZER):
            norm, sound = optimizer.update_clipped(parameter, limit=training.max_grad_norm or None, sound=sound)
        norms.append(norm)
        sounds.append(sound)
        parameter.grad = None

    tables = engine.tables
    others = [p for p in engine.model.parameters() if p.requires_grad and not any(p is table for table in tables)]
    hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in others]
    try:
        with region(BACKWARD):
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    for table in tables:
        update(table)
    total = torch.stack(norms).square().sum().sqrt()
    mean_loss, norm, updated = torch.stack([loss.detach(), total, torch.stack(sounds).sum().double()]).tolist()
    done = f"; {updated:.0f} of {len(norms)} tensors have been updated in this process, none of it is kept"
    _refuse_nonfinite(step, mean_loss, norm, done=done if updated else "")
    return mean_loss, norm


def _seed_of(seed: int, step: int) -> int:
    """A seed for one step. Mixed down to 32 bits, because torch's CPU generator ignores the higher ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big")


def _refuse_nonfinite(step: int, loss: float, norm: float, *, done: str = "") -> None:
    """Stop before the update; `done` says what of it was done in the backward pass already."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TunixError(
            f"step {step}: loss {loss}, gradient norm {norm}; stopped {'within' if done else 'before'} the update{done}",
            fix="lower training.learning_rate, or look at the rows of this step; the last checkpoint is intact",
        )


def _assert_on_device(engine: Engine, optimizer: Optimizer) -> None:
    """After the first step: parameters, buffers and optimizer state live where the log says they do.

    A parameter that the optimizer keeps nothing for was not trained, and is named as well.
    """
    named = dict(engine.model.named_parameters())
    found = {**named, **dict(engine.model.named_buffers())}
    for name, parameter in named.items():
        kept = optimizer.state_of(parameter) if parameter.requires_grad else {}
        if parameter.requires_grad and not kept:
            raise HardwareError(f"the optimizer keeps no state of {name} after the first step", fix=_DEFECT)
        found |= {f"{slot} of {name}": value for slot, value in kept.items()}
    asked = torch.empty(0, device=engine.device).device  # `cuda` with its number
    strays = sorted(f"{name} on {tensor.device}" for name, tensor in found.items() if tensor.device != asked)
    if strays:
        raise HardwareError(
            f"asked for {asked}, but after the first step {len(strays)} of {len(found)} tensors live elsewhere: "
            + ", ".join(strays[:3]),
            fix=_DEFECT,
        )


_DEFECT = "this is a defect of the engine; please report it with training_log.txt and doctor.json"


def heldout_loss(engine: Engine, rows: Sequence[Row], *, batch_size: int, pad_id: int) -> tuple[float, int]:
    """Mean loss over the target tokens of `rows`, and their number. Nothing is trained."""
    engine.model.eval()
    total, targets = 0.0, 0
    with torch.no_grad(), memory_is_named("the held-out loss"), engine.kernels():
        for start in range(0, len(rows), batch_size):
            micro = collate(rows[start : start + batch_size], pad_id=pad_id)
            total += summed_loss(engine, micro).item()
            targets += micro.targets
    return total / targets, targets


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def machine_facts(engine: Engine) -> dict[str, Any]:
    """What decides the bits of a step beside its inputs; two runs where all of it agrees give the same."""
    facts = {
        "backend": "torch",
        "device": engine.device.type,
        **cpu_facts(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "deterministic": engine.deterministic,
        "devices": 1,
    }
    if engine.device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(engine.device)
        told = {
            "name": torch.cuda.get_device_name(engine.device),
            "capability": f"{major}.{minor}",
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),
        }
        facts["gpu"] = {name: value for name, value in told.items() if value is not None}
    return facts
