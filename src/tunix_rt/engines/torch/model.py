"""Batches of the PyTorch engine: micro-batches on the device with their document boundaries; on a GPU the next batch is
prefetched while a step runs."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from tunix_rt.data.packing import IGNORED, MicroBatch, StepBatch, filled_up, share_of
from tunix_rt.doctor.probe import host_facts
from tunix_rt.engines.base import prefetched
from tunix_rt.engines.memory_meter import PhasePeak, RiseMeter
from tunix_rt.engines.torch.attention import Attention, boundaries, kernels
from tunix_rt.engines.torch.chunked_loss import head_loss
from tunix_rt.engines.torch.profile import region
from tunix_rt.engines.torch.sharding import Sharding
from tunix_rt.engines.torch.varlen import on_device
from tunix_rt.engines.trace import FORWARD, HEAD
from tunix_rt.models.resolve import ModelSource
from tunix_rt.plan.precision import Recipe
from tunix_rt.ranks import ALONE, World

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A micro-batch on the device."""

    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    """Indices, over all rows, of the tokens that predict a target."""
    targets: torch.Tensor
    boundaries: dict[str, Any]
    """The document boundaries, as arguments of the attention."""
    weights: torch.Tensor | None = None
    """Of the loss of each target; None: all 1."""
    losses: torch.Tensor | None = None
    """Where sampled rows are compared with their sampler: the forward pass writes the loss of each target here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """How micro-batches are moved to the device."""

    device: torch.device
    attention: Attention
    windows: tuple[int, ...]
    least: tuple[int, int] = (0, 0)
    """Micro-batches are padded to so many rows and tokens: layers are compiled for one shape."""
    world: World = ALONE
    """Of each micro-batch, this rank takes its share of the rows."""

    def __call__(self, micro: MicroBatch) -> Placed:
        """Does not synchronize."""
        if self.world.size > 1:
            micro = share_of(micro, self.world.rank, self.world.size)
        micro = filled_up(micro, self.least)
        rows, tokens = (micro.labels[:, 1:] != IGNORED).nonzero()  # the hidden state at t predicts token t + 1
        places = rows * micro.ids.shape[1] + tokens
        arrays = (micro.ids, micro.positions, places, micro.labels[:, 1:][rows, tokens])
        ids, positions, places, targets = (on_device(self.device, array) for array in arrays)
        arguments = boundaries(micro.positions, self.device, self.attention, windows=self.windows)
        weights = None if micro.weights is None else on_device(self.device, micro.weights[:, 1:][rows, tokens])
        losses = None if micro.logprobs is None else torch.empty_like(targets, dtype=torch.float64)
        return Placed(
            ids=ids, positions=positions, places=places, targets=targets, boundaries=arguments, weights=weights,
            losses=losses,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStep:
    """The batch of one step, and its micro-batches on the device."""

    batch: StepBatch
    micro_batches: tuple[Placed, ...]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Order the next kernels after the copies; the host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


def placed_steps(
    batch_of: Callable[[int], StepBatch], placing: Placing, *, first: int, total: int, ahead: bool = True
) -> Generator[tuple[int, Callable[[], PlacedStep]], None, None]:
    """(step, a function that returns its batch) for steps `first` to `total`.

    On a GPU a thread makes and copies the next batch, if that may be done `ahead`. A batch must be referenced until its step is
    computed: its memory belongs to another stream."""
    stream = torch.cuda.Stream(placing.device) if placing.device.type == "cuda" else None
    make = partial(_placed, batch_of, placing, stream)
    return prefetched(make, ahead=ahead and stream is not None, first=first, total=total)


def _placed(
    batch_of: Callable[[int], StepBatch], placing: Placing, stream: torch.cuda.Stream | None, step: int
) -> PlacedStep:
    batch = batch_of(step)
    if stream is None:
        return PlacedStep(batch=batch, micro_batches=tuple(map(placing, batch.micro_batches)), copied=None)
    with torch.cuda.stream(stream):
        placed = tuple(map(placing, batch.micro_batches))
        return PlacedStep(batch=batch, micro_batches=placed, copied=stream.record_event())


ALLOCATED = "bytes that the CUDA allocator had given out"
HIGHEST_LOSS_SCALE = 2.0**24
STEPS_TO_GROW = 1000
"""Steps without an overflow after which the float16 loss scale is doubled."""


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The factor of a float16 loss. Part of a checkpoint: the next step depends on it."""

    value: float = 2.0**15
    steps: int = 0
    """Steps since it last changed."""

    def overflowed(self) -> None:
        self.value, self.steps = self.value / 2, 0

    def held(self) -> None:
        self.steps += 1
        if self.steps >= STEPS_TO_GROW and self.value < HIGHEST_LOSS_SCALE:
            self.value, self.steps = self.value * 2, 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"loss_scale": torch.tensor([self.value, self.steps], dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        value, steps = tensors["loss_scale"].tolist()
        self.value, self.steps = value, int(steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What a loaded model is known to support: a family with a row everything, another one what `support.py` has tried."""

    packing: bool = True
    chunked_head: bool = True
    checkpointing: bool = True


@dataclass(slots=True, kw_only=True)
class Engine:
    """A loaded model on its device. `meter` was started before the load."""

    model: Any
    source: ModelSource
    device: torch.device
    parameters: int
    """Of the model; with LoRA, adapters are not counted."""
    meter: RiseMeter
    recipe: Recipe
    attention: Attention
    support: Support = Support()
    deterministic: bool = False
    loss_scale: LossScale | None = None
    before_update: Callable[[], None] = lambda: None
    """Called once in each step, before its update."""
    pending_copy: Any = None
    """The event at the end of an asynchronous copy for a checkpoint; the next update waits for it."""
    prepared: bool = False
    """Whether `prepare_steps` has run."""
    compiled_shape: tuple[int, int] | None = None
    """Rows and tokens that the layers of a training step are compiled for; None: they are not compiled."""
    cuda_graph: Any = None
    """The `compile.CudaGraph` of the compiled layers; None: each kernel is launched by itself."""
    saved_dtype: str | None = None
    """Type in which `save` writes the weights, which are rounded to it; None: as they are in memory."""
    sharding: Sharding | None = None
    """Above one rank: how the parameters are shared. None: they are all here."""
    limit_bytes: int | None = None
    """The most that the CUDA allocator may reserve; None: no limit."""
    taken_bytes: int = 0
    """On CUDA the highest peak of the phases that `take_peak` returned, which resets the counter."""
    runs_transformers: ClassVar[bool] = True

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def devices(self) -> list[torch.device]:
        return [self.device] * (self.sharding.world.size if self.sharding else 1)

    @property
    def weights(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters as this process has and updates them."""
        if self.sharding is not None:
            return self.sharding.weights
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def through_root(self, compute: Callable[..., T], *arguments: Any) -> T:
        """`compute(*arguments)`; above one rank every rank calls it, and has the embeddings."""
        return compute(*arguments) if self.sharding is None else self.sharding.through_root(compute, *arguments)

    def clear_gradients(self) -> None:
        if self.sharding is not None:
            self.sharding.clear_gradients()
        self.model.zero_grad(set_to_none=True)

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence, where the model's configuration has a limit."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def arguments(self, placed: "Placed", model: Any) -> dict[str, Any]:
        """Arguments of the forward pass of `model`, this one or its base model. Rows of one example need no positions, and
        some models take none."""
        positions = {"position_ids": placed.positions} if self.support.packing else {}
        return {"input_ids": placed.ids, **positions, **without_cache(model), **placed.boundaries}

    @property
    def vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def packs(self) -> bool:
        return self.support.packing

    def step_parts(self) -> Mapping[str, int]:
        """Empty: kernels allocate as they run."""
        return {}

    def peak_bytes(self) -> int:
        """Peak memory since the load: of the CUDA allocator, or on a CPU the rise of resident memory."""
        if self.device.type == "cuda":
            # As max_memory_allocated reads it, without the hundred other figures: this runs after every step.
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            return max(self.taken_bytes, int(stats["allocated_bytes"]["all"]["peak"]))
        return self.meter.peak_bytes()

    def take_peak(self) -> PhasePeak:
        """Peak memory since the last call. Resets the counter, but for `peak_bytes`."""
        if self.device.type != "cuda":
            return self.meter.take_peak()
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        used, reserved = (int(stats[kind]["all"]["peak"]) for kind in ("allocated_bytes", "reserved_bytes"))
        self.taken_bytes = max(self.taken_bytes, used)
        torch.cuda.reset_peak_memory_stats(self.device)
        return PhasePeak(used_bytes=used, measure=ALLOCATED, alone=True, reserved_bytes=reserved)

    @property
    def compute(self) -> torch.dtype:
        return getattr(torch, self.recipe.compute)

    def computing(self, *, once: bool = False) -> torch.autocast:
        """Autocast to the compute dtype of the recipe.

        Casts of weights are cached until the end of the block; where every weight is used `once` in it, as in one forward
        pass, only as long as a matmul or its backward pass needs them."""
        return torch.autocast(self.device.type, dtype=self.compute, enabled=self.recipe.casts, cache_enabled=not once)

    def kernels(self) -> contextlib.AbstractContextManager[None]:
        """Restricts the attention kernels; around the backward pass too, which recomputes checkpointed layers."""
        return kernels(self.attention, deterministic=self.deterministic)

    @property
    def windows(self) -> tuple[int, ...]:
        window = getattr(self.model.config, "sliding_window", None)
        return (window,) if isinstance(window, int) else ()

    @property
    def compiled(self) -> bool:
        return self.compiled_shape is not None

    def placing(self, *, training: bool = False) -> Placing:
        """How micro-batches are laid out on the device; those of a training step in the compiled shape."""
        least = (self.compiled_shape if training else None) or (0, 0)
        world = self.sharding.world if training and self.sharding else ALONE
        return Placing(device=self.device, attention=self.attention, windows=self.windows, least=least, world=world)

    @contextlib.contextmanager
    def attending(self, implementation: str) -> Iterator[None]:
        """Another attention implementation within the block: generation has a KV cache, packed rows have none."""
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = implementation
        try:
            yield
        finally:
            self.model.config._attn_implementation = before

    @property
    def embeddings(self) -> list[torch.nn.Parameter]:
        """Trained embedding and lm_head weights, whose gradients are complete only at the end of the backward pass."""
        ends = (self.model.get_output_embeddings(), *embeddings_of(self.model))
        return list({id(end.weight): end.weight for end in ends if end.weight.requires_grad}.values())


def embeddings_of(model: Any) -> list[torch.nn.Embedding]:
    """The token embedding, and where layers have embeddings of their own (Gemma 4), theirs."""
    own = getattr(model.base_model, "embed_tokens_per_layer", None)
    return [model.get_input_embeddings(), *([] if own is None else [own])]


def free_bytes(engine: Engine) -> int:
    """Free memory on the engine's device. On a GPU unused memory of the allocator is free too."""
    if engine.device.type != "cuda":
        return host_facts().ram_available_bytes  # within the limit of a container
    free, _ = torch.cuda.mem_get_info(engine.device)
    held, used = torch.cuda.memory_reserved(engine.device), torch.cuda.memory_allocated(engine.device)
    if engine.limit_bytes is not None:
        free = min(free, max(0, engine.limit_bytes - held))
    return int(free + held - used)


def hidden_states(engine: Engine, micro: MicroBatch | Placed) -> torch.Tensor:
    """Hidden states of packed rows, [rows, tokens, hidden]; no token attends to another example."""
    placed = micro if isinstance(micro, Placed) else engine.placing()(micro)
    if engine.cuda_graph is not None and torch.is_grad_enabled() and engine.cuda_graph.fits(placed):
        with region(FORWARD):
            return engine.cuda_graph(placed)
    inner = engine.model.base_model
    with region(FORWARD), engine.computing(once=True):
        return inner(**engine.arguments(placed, inner)).last_hidden_state


def text_config(config: Any) -> Any:
    """The configuration that is trained: of a multimodal model, that of its text model. One of an encoder and a decoder stays
    whole, its causal model reads the keys of the decoder."""
    inner = config.get_text_config(decoder=True)
    return config if type(inner) is type(config) else inner


def without_cache(model: Any) -> dict[str, bool]:
    """Arguments that keep a model from making a KV cache."""
    forward = getattr(type(model), "forward", None)
    return {"use_cache": False} if forward is None or _has_cache(forward) else {}


@functools.cache
def _has_cache(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters
    wrapped = list(parameters) == ["self", "args", "kwargs"]  # as BART's decoder is
    return "use_cache" in parameters or wrapped


def summed_loss(engine: Engine, micro: MicroBatch | Placed, *, scale: float = 1.0) -> torch.Tensor:
    """Cross entropy summed over the targets, each times its weight, times `scale`, in float64. Call `backward()` on this very
    value. Logits are computed only for hidden states that predict a target. Above one rank, every rank calls it for its own rows.
    """
    placed = micro if isinstance(micro, Placed) else engine.placing()(micro)
    return engine.through_root(_summed_loss if engine.sharding is None else rank_loss, engine, placed, scale)


def rank_loss(engine: Engine, placed: Placed, scale: float) -> torch.Tensor:
    """`summed_loss` where the embeddings are gathered. A rank without targets gives them zeros, for FSDP2 to sum."""
    loss = _summed_loss(engine, placed, scale)
    if loss.requires_grad and not len(placed.targets):
        for weight in engine.embeddings:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return loss


def _summed_loss(engine: Engine, placed: Placed, scale: float) -> torch.Tensor:
    if not engine.support.chunked_head:
        return _loss_of_logits(engine, placed, scale)
    hidden = hidden_states(engine, placed).flatten(0, 1).index_select(0, placed.places)
    divisor = getattr(engine.model.config, "logits_scaling", None)  # of Granite
    with region(HEAD):
        return head_loss(
            hidden if divisor in (None, 1) else hidden / divisor,
            engine.model.get_output_embeddings().weight,
            placed.targets,
            scale=scale,
            softcap=getattr(engine.model.config, "final_logit_softcapping", None),
            compute=engine.compute,
            weights=placed.weights,
            losses=placed.losses,
        )


def _loss_of_logits(engine: Engine, placed: Placed, scale: float) -> torch.Tensor:
    """`summed_loss` from the logits of the whole model, all of them materialized."""
    with region(FORWARD), engine.computing(once=True):
        logits = engine.model(**engine.arguments(placed, engine.model)).logits
    with region(HEAD):
        chosen = logits.flatten(0, 1).index_select(0, placed.places)
        chosen = chosen.to(torch.float64 if chosen.dtype == torch.float64 else torch.float32)
        if placed.weights is None and placed.losses is None:
            return scale * torch.nn.functional.cross_entropy(chosen, placed.targets, reduction="sum").double()
        losses = torch.nn.functional.cross_entropy(chosen, placed.targets, reduction="none").double()
        if placed.losses is not None:
            placed.losses.copy_(losses.detach())
        return scale * (losses if placed.weights is None else losses * placed.weights).sum()
