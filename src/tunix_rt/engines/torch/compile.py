"""The layers of a training step: activation checkpointing, torch.compile with one graph for all equal layers, CUDA graphs.

Generation and the held-out loss have a new shape every time, each of which would be compiled: they run eager layers.
"""

import dataclasses
import functools
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import MicroBatch, StepBatch
from tunix_rt.engines.failures import compiler_errors, is_out_of_memory, memory_errors_named
from tunix_rt.engines.torch.model import Engine, Placed, summed_loss
from tunix_rt.engines.torch.varlen import LEAST_LENGTH, with_another_bound
from tunix_rt.errors import HardwareError, InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.secrets import one_line
from tunix_rt.plan.compile_policy import Compiling, choose_compiling, compiled_length, to_be_recorded

logger = logging.getLogger(__name__)


class _AnotherLossError(Exception):
    """The compiler changed the result."""


COMPILED_TOLERANCE = 1e-2
"""Of the loss of compiled layers, relative to eager ones: fused operations round less often in 16 bits."""


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The layers that can be checkpointed, and are compiled one by one: of most models all."""
    return [module for module in model.modules() if isinstance(module, transformers.GradientCheckpointingLayer)]


def checkpoint_layers(engine: Engine) -> None:
    """Activation checkpointing of the first layers; the last `kept_layers` save their activations."""
    layers = layers_of(engine.model)
    kept = engine.recipe.kept_layers(len(layers))
    if engine.recipe.kept_share == 1.0:
        return
    if not layers:
        raise InputError(
            f"{engine.source.name}: the model does not support activation checkpointing",
            fix="set training.gradient_checkpointing: false",
        )
    engine.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers[len(layers) - kept :]:
        layer.gradient_checkpointing = False
    logger.info("Activation checkpointing: %d of %d layers", len(layers) - kept, len(layers))


def compile_layers(engine: Engine, choice: Compiling, sample: MicroBatch, *, longest_row: int) -> None:
    """Compile the layers of `engine` for batches like `sample`, if `choice` wants it.

    Where the compiler fails, the layers stay eager; that is an error if `training.compile: true` requires it.
    """
    layers = layers_of(engine.model)
    if engine.compiled:
        return
    if not choice.wanted or not layers:
        logger.info("Compile: no; %s", choice.why if layers else "the model's layers cannot be compiled")
        return
    logger.info(
        "Compile: yes; %s. The first time takes up to half a minute, later runs read the cache %s",
        choice.why,
        cache_dir(),
    )
    began, eager = time.monotonic(), {layer: layer.forward for layer in layers}
    expected = None if engine.model.config.model_type in FAMILIES else _loss(engine, sample)
    for layer in layers:
        layer.forward = _compiled_in_training(layer.forward)
    engine.compiled_shape = shape_of_steps(sample, longest_row, ranks=len(engine.devices))
    try:
        with memory_errors_named("the compiled step"), engine.kernels():
            _warm_up(engine, sample)
            if expected is not None and not torch.allclose(_loss(engine, sample), expected, rtol=COMPILED_TOLERANCE):
                raise _AnotherLossError("compiled layers give another loss than eager ones")
    except compiler_errors(
        TorchDynamoException, InductorError, _AnotherLossError
    ) as error:  # a RuntimeError may be a defect
        for layer, forward in eager.items():
            layer.forward = forward
        engine.compiled_shape = None
        problem = f"the layers cannot be compiled here: {type(error).__name__}: {one_line(error)}"
        if choice.required:
            fix = "set training.compile: false; it is slower and differs in the last digits"
            raise HardwareError(problem, fix=fix) from error
        logger.warning("Compile: failed, using eager layers; %s", problem)
        return
    logger.info("Compiled in %.1f s", time.monotonic() - began)


def _loss(engine: Engine, sample: MicroBatch) -> torch.Tensor:
    """Of a batch, without dropout, computed as a training step computes it."""
    engine.model.eval()
    with engine.kernels(), torch.enable_grad():
        loss = summed_loss(engine, engine.placing(training=True)(sample)).detach()
    engine.model.zero_grad(set_to_none=True)
    return loss


def shape_of_steps(sample: MicroBatch, longest_row: int, *, ranks: int = 1) -> tuple[int, int]:
    """Rows and tokens that each of the `ranks` pads its share of every micro-batch to: packed rows differ in their last few
    tokens, and the last batch of an epoch has fewer rows."""
    rows, tokens = sample.ids.shape
    return -(-rows // ranks), compiled_length(max(tokens, longest_row))


def _compiled_in_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, compiled where gradients are wanted."""
    compiled = torch.compile(forward, fullgraph=True)

    @functools.wraps(forward)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return choose


def _warm_up(engine: Engine, sample: MicroBatch) -> None:
    """Forward and backward passes that leave no gradients; each is freed at once, since all may not fit.

    Two passes where attention has a bound on example lengths: with the second bound the compiler makes it dynamic."""
    engine.model.train()
    placed, embeddings = engine.placing(training=True)(sample), engine.embeddings
    trained = [p for p in engine.model.parameters() if p.requires_grad and not any(p is one for one in embeddings)]
    hooks = [parameter.register_post_accumulate_grad_hook(_drop) for parameter in trained]
    try:
        with warnings.catch_warnings():
            # A warning of the compiler while it traces.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            for boundaries in with_another_bound(placed.boundaries):
                summed_loss(engine, dataclasses.replace(placed, boundaries=boundaries)).backward()
                engine.model.zero_grad(set_to_none=True)  # of the embeddings
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
    finally:
        for hook in hooks:
            hook.remove()
        engine.model.zero_grad(set_to_none=True)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


EXAMPLES = 64
"""A CUDA graph takes twice as many examples as its sample micro-batch has, rounded up to a multiple of this."""


def capture_layers(engine: Engine, sample: MicroBatch) -> None:
    """Capture the layers of `engine` as a CUDA graph for batches like `sample`; where that fails, kernels are launched one by
    one."""
    began = time.monotonic()
    # Gradients pass from the stream of the capture to that of the steps, which is intended: silence torch's warning.
    if warns := getattr(
        torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None
    ):  # since torch 2.10 or so
        warns(False)
    # A graph has its own memory pool: what the allocator caches for earlier passes is released first.
    torch.cuda.empty_cache()
    try:
        with engine.kernels():
            engine.cuda_graph = CudaGraph(engine, engine.placing(training=True)(sample))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        torch.cuda.synchronize(engine.device)
        logger.warning("CUDA graph: capture failed, launching kernels one by one: %s", one_line(error))
        return
    torch.cuda.empty_cache()
    logger.info("CUDA graph: captured in %.1f s; all layers are one launch", time.monotonic() - began)


class CudaGraph:
    """Hidden states of a micro-batch by a captured graph. Batch, activations and gradients have static addresses: gradients
    must be consumed before the next pass."""

    def __init__(self, engine: Engine, sample: Placed) -> None:
        embedding = engine.model.get_input_embeddings()
        with torch.no_grad():
            embedded = embedding(sample.ids).requires_grad_()
        self._embedding, self._places = embedding, sample.ids.numel()
        begins = sample.boundaries.get("cu_seq_lens_q")
        self._begins: torch.Tensor | None = None
        if begins is not None:
            room = -(-2 * len(begins) // EXAMPLES) * EXAMPLES
            self._begins = begins.new_full((room,), self._places)
            self._set_begins(begins)
        tokens = sample.ids.shape[1]
        longest = max(LEAST_LENGTH, 1 << (tokens - 1).bit_length())
        inputs = (embedded, sample.positions.clone(), *(() if self._begins is None else (self._begins,)))
        # One warm-up pass on the stream of the capture, besides those of the compiler.
        self._body = torch.cuda.make_graphed_callables(
            _Body(engine, longest), inputs, num_warmup_iters=1, allow_unused_input=True
        )
        self._shape = sample.ids.shape

    def fits(self, placed: Placed) -> bool:
        """Whether the graph takes as many examples as `placed` has: a function of the batch alone."""
        begins = placed.boundaries.get("cu_seq_lens_q")
        enough = begins is None or (self._begins is not None and len(begins) <= len(self._begins))
        return enough and placed.ids.shape == self._shape

    def __call__(self, placed: Placed) -> torch.Tensor:
        inputs = [self._embedding(placed.ids), placed.positions]
        if self._begins is not None:
            self._set_begins(placed.boundaries["cu_seq_lens_q"])
            inputs.append(self._begins)
        return self._body(*inputs)

    def _set_begins(self, begins: torch.Tensor) -> None:
        """Pads with empty examples."""
        assert self._begins is not None
        self._begins[len(begins) :] = self._places
        self._begins[: len(begins)].copy_(begins)


class _Body(torch.nn.Module):
    """A model between its embedding lookup and its lm_head, called with tensors only."""

    def __init__(self, engine: Engine, longest: int) -> None:
        super().__init__()
        self._body = engine.model.base_model
        self._computing = engine.computing
        self._longest = longest

    def forward(self, embedded: torch.Tensor, positions: torch.Tensor, *begins: torch.Tensor) -> Any:
        boundaries = {"cu_seq_lens_q": begins[0], "max_length_q": self._longest} if begins else {}
        with self._computing(once=True):
            return self._body(
                inputs_embeds=embedded, position_ids=positions, use_cache=False, **boundaries
            ).last_hidden_state


def compiling_of(
    engine: Engine, training: Training, batch: StepBatch, *, total: int, as_before: str | None, planned: str | None
) -> Compiling:
    """Whether to compile the layers. Those of a resumed run must be what they were."""
    setting, sample = training.compile, batch.micro_batches[0]
    if as_before is not None and setting == "auto":
        setting = as_before != "plain"
    on_gpu = engine.device.type == "cuda"
    choice = choose_compiling(
        setting,
        device=engine.device.type,
        device_name=torch.cuda.get_device_name(engine.device) if on_gpu else None,
        parameters=engine.parameters,
        tokens=batch.tokens,
        steps=total,
        packed=int((sample.positions == 0).sum()) > len(sample.positions),
        adapters=engine.recipe.frozen is not None,
        capability=torch.cuda.get_device_capability(engine.device) if on_gpu else None,
    )
    if engine.recipe.four_bit:
        return Compiling(wanted=False, required=False, why="its weights are unpacked for each matmul")
    if setting == "auto" and not _has_equal_layers(engine):
        return Compiling(wanted=False, required=False, why="for this family only with training.compile: true")
    if setting == "auto" and planned is not None and choice.wanted != (planned != "plain"):
        return Compiling(wanted=not choice.wanted, required=False, why="the memory plan of the run has it so")
    return choice


def _has_equal_layers(engine: Engine) -> bool:
    family = FAMILIES.get(engine.model.config.model_type)
    return family is not None and family.equal_layers


def captures(engine: Engine, training: Training, tokens: int) -> bool:
    """Whether the layers are captured as a CUDA graph, by the rule that the planner uses."""
    return to_be_recorded(
        engine.recipe,
        device=engine.device.type,
        device_name=torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else None,
        flex=engine.attention.name == "flex" or not _has_equal_layers(engine),
        accumulation=training.gradient_accumulation_steps,
        parameters=engine.parameters,
        layers=len(layers_of(engine.model)),
        tokens=tokens,
    )
