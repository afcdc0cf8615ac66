"""The PyTorch engine: the training loop, and the functions of `base.EngineModule`.

`load` is in `load.py`, the forward pass and the loss in `model.py`, optimizers in `optim.py`, checkpoints and the final model in
`save.py`, generation in `generate.py`. The loop yields one `Step` per optimizer update and reads no files.
"""

import contextlib
import gc
import hashlib
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import torch

from tunix_rt.config.optimizers import learning_rate, total_at
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, StepBatch, collate, share_of
from tunix_rt.engines.base import Step
from tunix_rt.engines.failures import REPORT_DEFECT, memory_errors_named, refuse_nonfinite
from tunix_rt.engines.on_policy import Agreement, agreement
from tunix_rt.engines.torch.chunked_loss import kernel_unable
from tunix_rt.engines.torch.compile import (
    capture_layers,
    captures,
    checkpoint_layers,
    compile_layers,
    compiling_of,
)
from tunix_rt.engines.torch.generate import generate
from tunix_rt.engines.torch.load import load, load_for_inference
from tunix_rt.engines.torch.logits import last_logits, release, room_beside, tensor_hashes, token_gaps
from tunix_rt.engines.torch.machine import machine_facts
from tunix_rt.engines.torch.model import Engine, LossScale, PlacedStep, free_bytes, placed_steps, summed_loss
from tunix_rt.engines.torch.optim import Optimizer
from tunix_rt.engines.torch.optim_rules import has_kernels
from tunix_rt.engines.torch.profile import region
from tunix_rt.engines.torch.save import (
    begin_update,
    host_has_room,
    restore_state,
    round_weights,
    save,
    snapshot,
    snapshot_bytes,
    write_direct,
)
from tunix_rt.engines.trace import BACKWARD, BATCH, OPTIMIZER
from tunix_rt.errors import HardwareError

__all__ = [
    "checkpoint_layers", "free_bytes", "generate", "heldout_loss", "host_has_room", "last_logits", "load",
    "load_for_inference", "machine_facts", "make_optimizer", "optimizer_steps", "prepare_steps", "release", "restore_state",
    "room_beside", "round_weights", "save", "snapshot", "snapshot_bytes", "summed_loss", "tensor_hashes", "token_gaps",
    "write_direct",
]  # fmt: skip

logger = logging.getLogger(__name__)


# --- the loop --------------------------------------------------------------------------------------------------------


def make_optimizer(engine: Engine, training: Training) -> Optimizer:
    """The optimizer of every trained parameter; weight decay applies to matrices, not to vectors (norms, biases)."""
    return Optimizer(
        engine.weights,
        kind=training.optim,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_epsilon,
        weight_decay=training.weight_decay,
        seed=training.seed,
        stochastic_rounding=engine.recipe.rounding == "stochastic",
        sharding=engine.sharding,
    )


def optimizer_steps(
    engine: Engine, optimizer: Optimizer, batch_of: Callable[[int], StepBatch], training: Training, *, first: int, total: int,
    before_update: Callable[[], None] = lambda: None, ends: Sequence[int] = (),
) -> Generator[Step, None, None]:  # fmt: skip
    """Train steps `first` to `total`, yielding after each. Everything random is a function of (seed, step). `before_update` is
    called once in each step, before it changes any weight."""
    engine.before_update = before_update
    prepare_steps(engine, batch_of, training, total=total)  # nothing is left to do if the caller has prepared them
    take_step = _step_in_backward if engine.recipe.in_backward else _step_after_backward
    placing = engine.placing(training=True)
    with (
        _garbage_frozen(engine),
        contextlib.closing(
            placed_steps(batch_of, placing, first=first, total=total, ahead=not training.samples)
        ) as batches,
    ):
        unchecked = True
        for step, ready in batches:
            started = time.perf_counter()
            lr = learning_rate(step, total=total_at(step, ends, total), training=training)
            optimizer.begin(step, lr)
            with memory_errors_named(f"step {step}"), engine.kernels():
                with region(BATCH):
                    placed = ready()
                    placed.wait()
                if not engine.model.training:
                    engine.model.train()
                if placed.micro_batches:
                    mean_loss, norm = take_step(engine, optimizer, placed, training, step)
                else:  # no rollout has an advantage: momentum alone would move the weights
                    begin_update(engine)
                    mean_loss = norm = 0.0
            if unchecked and placed.micro_batches:
                _assert_on_device(engine, optimizer)
                unchecked = False
            found = _agreement(engine, placed, step)
            yield Step(
                step=step,
                loss=mean_loss,
                lr=lr,
                grad_norm=norm,
                target_tokens=placed.batch.target_tokens,
                tokens=placed.batch.tokens,
                seconds=time.perf_counter() - started,
                peak_bytes=engine.peak_bytes(),
                batch=placed.batch.sha256,
                logprob_gap=found.logprob_gap if found else None,
                logprob_ratio=found.logprob_ratio if found else None,
            )
    if engine.cuda_graph:  # gradients are in its memory
        engine.model.zero_grad(set_to_none=True)
        engine.cuda_graph = None


def prepare_steps(
    engine: Engine, batch_of: Callable[[int], StepBatch], training: Training, *, total: int, longest_row: int = 0,
    as_before: str | None = None, planned: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """Compile the layers and capture them as a CUDA graph, once. Returns which implementation computes layers, head and update,
    which a checkpoint stores.

    Layers are compiled where it is configured or pays, for the shape of the first batch of the run, also in a resumed run, with
    rows as long as the longest. A resumed run computes its layers `as_before`, another one as `planned`."""
    if not engine.prepared:
        engine.prepared = True
        if engine.support.checkpointing:
            checkpoint_layers(engine)
        batch = batch_of(1)
        sample = batch.micro_batches[0]
        choice = compiling_of(engine, training, batch, total=total, as_before=as_before, planned=planned)
        torch.manual_seed(_seed_of(training.seed, 0))
        compile_layers(engine, choice, sample, longest_row=longest_row)
        known = as_before or planned
        if (
            engine.compiled
            and engine.sharding is None
            and (known == "recorded" if known else captures(engine, training, batch.tokens))
        ):
            capture_layers(engine, sample)
    lm_head = engine.model.get_output_embeddings().weight
    softcap = getattr(engine.model.config, "final_logit_softcapping", None)
    plain_head = kernel_unable(lm_head.device, engine.compute, len(lm_head), softcap)
    by_kernel = has_kernels(engine.recipe.optimizer, engine.recipe.weights, lm_head.device, engine.sharding)
    return {
        "layers": "recorded" if engine.cuda_graph else "compiled" if engine.compiled else "plain",
        "head": "plain" if plain_head else "kernel",
        "update": "kernel" if by_kernel else "plain",
    }


@contextlib.contextmanager
def _garbage_frozen(engine: Engine) -> Iterator[None]:
    """Exclude the objects that exist before the first step from garbage collection: it would traverse a million of them again
    and again while a GPU waits."""
    if engine.device.type != "cuda":
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _step_after_backward(
    engine: Engine, optimizer: Optimizer, placed: PlacedStep, training: Training, step: int
) -> tuple[float, float]:
    """All gradients, their global norm, then the update. Returns the mean loss and the norm before clipping.

    A GPU is synchronized once, at the end: it clips, and skips an update with gradients that are not finite, by itself."""
    if engine.loss_scale is not None:
        return _scaled_step(engine, optimizer, placed, training, step, engine.loss_scale)
    loss = _gradients(engine, placed, training, step, 1.0)
    _agreement(engine, placed, step)
    with region(OPTIMIZER):
        loss, norm = _of_all_ranks(engine, loss)
    begin_update(engine)
    limit = training.max_grad_norm
    clip = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else None
    finite: torch.Tensor | None = torch.isfinite(loss) & torch.isfinite(norm)
    if engine.device.type == "cpu":  # needs no synchronization, and saves passes over the gradients
        refuse_nonfinite(step, *torch.stack([loss, norm]).tolist())
        clip, finite = (None if clip is None or clip == 1 else clip), None
    with region(OPTIMIZER):
        optimizer.step(scale=clip, finite=finite)
    engine.clear_gradients()
    mean_loss, grad_norm = torch.stack([loss, norm]).tolist()
    refuse_nonfinite(step, mean_loss, grad_norm)
    return mean_loss, grad_norm


def _agreement(engine: Engine, placed: PlacedStep, step: int) -> Agreement | None:
    """With the sampler of the rows; None where they were not sampled."""
    losses = [micro.losses for micro in placed.micro_batches if micro.losses is not None]
    if not losses:
        return None
    return agreement(step, placed.batch, [one.cpu().numpy() for one in losses], engine.recipe.compute)


def _scaled_step(
    engine: Engine, optimizer: Optimizer, placed: PlacedStep, training: Training, step: int, loss_scale: LossScale
) -> tuple[float, float]:
    """The same in float16 with a scaled loss: where gradients overflow, they are recomputed with a smaller scale."""
    while True:
        factor = loss_scale.value
        loss = _gradients(engine, placed, training, step, factor)
        mean_loss, norm = (torch.stack(_of_all_ranks(engine, loss)) / factor).tolist()
        overflow = math.isfinite(mean_loss) and not math.isfinite(norm)
        if not overflow or factor <= 1:
            break
        loss_scale.overflowed()
        engine.clear_gradients()
        logger.info(
            "step %d: float16 gradients overflowed; recomputing them with loss scale %g instead of %g",
            step, loss_scale.value, factor,
        )  # fmt: skip
    refuse_nonfinite(step, mean_loss, norm)
    begin_update(engine)
    limit = training.max_grad_norm
    clip_and_unscale = (min(1.0, limit / (norm + 1e-6)) if limit else 1.0) / factor
    with region(OPTIMIZER):
        optimizer.step(scale=torch.tensor(clip_and_unscale, device=engine.device, dtype=torch.float64))
    engine.clear_gradients()
    loss_scale.held()
    return mean_loss, norm


def _gradients(engine: Engine, placed: PlacedStep, training: Training, step: int, scale: float) -> torch.Tensor:
    """Backward passes of every micro-batch; the mean loss over all targets of the step, times `scale`."""
    _seed_dropout(engine, training, step)
    total = torch.zeros((), device=engine.device, dtype=torch.float64)
    for micro in placed.micro_batches:
        # The mean over all targets of the step, not of the micro-batch: accumulation must not change the loss.
        loss = summed_loss(engine, micro, scale=scale / placed.batch.target_tokens)
        with region(BACKWARD):
            loss.backward()
        total += loss.detach()
    if engine.sharding is not None:
        engine.sharding.take_gradients()
        return total
    for parameter in _without_gradient(engine.model.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    return total


def _seed_dropout(engine: Engine, training: Training, step: int) -> None:
    """A rank draws for its own rows."""
    torch.manual_seed(_seed_of(training.seed, step) + (engine.sharding.world.rank if engine.sharding else 0))


def _without_gradient(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
    """Trained parameters without a gradient: of experts that no token of the step chose. Theirs is zero, as it is where all
    experts are one tensor."""
    return (parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None)


def _of_all_ranks(engine: Engine, loss: torch.Tensor) -> list[torch.Tensor]:
    """The loss and the norm of the gradients, of all ranks together: one message."""
    norm = _norm(engine)
    if engine.sharding is None:
        return [loss, norm]
    sums = engine.sharding.total_of_world(torch.stack([loss, norm.square()]))
    return [sums[0], (sums[1] / engine.sharding.replicas).sqrt()]  # every replica has the same gradients


def _norm(engine: Engine) -> torch.Tensor:
    """Of all gradients here, in float64. Each is summed in at least float32: the norm of a bfloat16 tensor would be bfloat16."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in engine.weights.values():
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
    """Update each tensor as soon as its gradient is complete, clipped by its own norm, and free the gradient.

    Where a gradient is not finite, the tensors before it are updated already and those after it are not; the run stops without
    saving any of it.
    """
    begin_update(engine)
    _seed_dropout(engine, training, step)
    (micro,) = placed.micro_batches  # gradient accumulation is refused with optim_in_backward
    loss = summed_loss(engine, micro, scale=1 / placed.batch.target_tokens)
    norms: list[torch.Tensor] = []
    updated_flags: list[torch.Tensor] = []
    mean = loss.detach() if engine.sharding is None else engine.sharding.total_of_world(loss.detach().clone())
    finite = torch.isfinite(mean)

    waiting = set(engine.weights.values())

    def update(parameter: torch.nn.Parameter) -> None:
        nonlocal finite
        waiting.discard(parameter)
        with region(OPTIMIZER):
            norm, finite = optimizer.update_clipped(parameter, limit=training.max_grad_norm or None, finite=finite)
        norms.append(norm)
        updated_flags.append(finite)
        parameter.grad = None

    # Tied ones get gradients from the loss head and the lookup: updated after both. FSDP2 sums all gradients after both.
    embeddings = engine.embeddings if engine.sharding is None else []
    others = [p for p in engine.weights.values() if not any(p is one for one in embeddings)]
    if engine.sharding is None:
        hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in others]
    else:
        hooks = engine.sharding.updated_in_backward(update)
    try:
        with region(BACKWARD):
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    for embedding in embeddings:
        update(embedding)
    for parameter in [p for p in others if p in waiting]:
        parameter.grad = torch.zeros_like(parameter)
        update(parameter)
    whole = torch.stack(norms).square().sum().sqrt()
    mean_loss, norm, updated = torch.stack([mean, whole, torch.stack(updated_flags).sum().double()]).tolist()
    done = f"; {updated:.0f} of {len(norms)} tensors are updated in this process, and none of them is saved"
    refuse_nonfinite(step, mean_loss, norm, updated=done if updated else "")
    return mean_loss, norm


def _seed_of(seed: int, step: int) -> int:
    """A seed for one step. Mixed down to 32 bits, because torch's CPU generator ignores the higher ones."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:4], "big")


def _assert_on_device(engine: Engine, optimizer: Optimizer) -> None:
    """After the first step: parameters, buffers and optimizer state are on the device of the run.

    A parameter without optimizer state was not trained, and is an error too.
    """
    tensors = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
    for name, parameter in engine.weights.items():
        state = optimizer.state_of(parameter)
        if not state:
            raise HardwareError(f"the optimizer has no state of {name} after the first step", fix=REPORT_DEFECT)
        tensors |= {f"{slot} of {name}": value for slot, value in state.items()}
    expected = torch.empty(0, device=engine.device).device  # `cuda` with its number
    strays = sorted(f"{name} on {tensor.device}" for name, tensor in tensors.items() if tensor.device != expected)
    if strays:
        raise HardwareError(
            f"the run is on {expected}, but after the first step {len(strays)} of {len(tensors)} tensors are elsewhere: "
            + ", ".join(strays[:3]),
            fix=REPORT_DEFECT,
        )


def heldout_loss(
    engine: Engine, rows: Sequence[Row], *, batch_size: int, pad_id: int,
    report: Callable[[int, str], None] = lambda done, note: None,
) -> tuple[float, int]:  # fmt: skip
    """See `base.EngineModule.heldout_loss`."""
    engine.model.eval()
    total, targets, sharding = 0.0, 0, engine.sharding
    together = batch_size * len(engine.devices)
    with torch.no_grad(), memory_errors_named("the held-out loss"), engine.kernels():
        for start in range(0, len(rows), together):
            micro = collate(rows[start : start + together], pad_id=pad_id)
            targets += micro.targets
            if sharding is not None:
                micro = share_of(micro, sharding.world.rank, sharding.world.size)
            total += summed_loss(engine, micro).item()
            report(min(start + together, len(rows)), "")
    if sharding is not None:
        sharding.reshard()
        total = sharding.total_of_world(torch.tensor(total, dtype=torch.float64, device=engine.device)).item()
    return total / targets, targets
