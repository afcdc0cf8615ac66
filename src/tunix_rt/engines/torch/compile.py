"""The layers of a model through torch.compile: one graph for all that are alike.

Compiled are the layers of a training step alone. Answers and the held-out loss have other shapes every time, and each would
be compiled again; they take the layers as they are.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tunix_rt.data.packing import MicroBatch
from tunix_rt.engines.torch.model import Engine, is_out_of_memory, memory_is_named, summed_loss
from tunix_rt.engines.torch.prefetch import Placed
from tunix_rt.engines.torch.varlen import LEAST_LENGTH, with_another_bound
from tunix_rt.errors import HardwareError
from tunix_rt.models.secrets import one_line
from tunix_rt.plan.compile_policy import Compiling, compiled_length

logger = logging.getLogger(__name__)


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The layers that are computed again for gradient checkpointing, and compiled one by one: of most models all."""
    return [module for module in model.modules() if isinstance(module, transformers.GradientCheckpointingLayer)]


def compile_layers(engine: Engine, choice: Compiling, sample: MicroBatch, *, longest_row: int) -> None:
    """Compile the layers of `engine` for batches like `sample`, if `choice` wants it, and say what became of it.

    Where the compiler fails, the layers stay as they are; that is an error if compiling was asked for by name.
    """
    layers = layers_of(engine.model)
    if engine.compiled:
        return
    if not choice.wanted or not layers:
        logger.info("Compile: no; %s", choice.why if layers else "the model's layers are not of a kind that can be")
        return
    logger.info(
        "Compile: yes; %s. The first time takes up to half a minute, later runs find it in %s", choice.why, cache_dir()
    )
    began, eager = time.monotonic(), {layer: layer.forward for layer in layers}
    for layer in layers:
        layer.forward = _compiled_in_training(layer.forward)
    engine.compiled_shape = shape_of_steps(sample, longest_row)
    try:
        with memory_is_named("the compiled step"), engine.kernels():
            _warm_up(engine, sample)
    except compiler_errors() as error:
        for layer, forward in eager.items():
            layer.forward = forward
        engine.compiled_shape = None
        problem = f"the layers cannot be compiled here: {type(error).__name__}: {one_line(error)[:300]}"
        if choice.required:
            fix = "set training.compile: false; it is slower and differs in the last digits"
            raise HardwareError(problem, fix=fix) from error
        logger.warning("Compile: no after all; %s", problem)
        return
    logger.info("Compiled in %.1f s", time.monotonic() - began)


def shape_of_steps(sample: MicroBatch, longest_row: int) -> tuple[int, int]:
    """Rows and tokens that every micro-batch is filled up to: packed rows differ in their last few tokens, and the last batch
    of an epoch has fewer of them."""
    rows, tokens = sample.ids.shape
    return rows, compiled_length(max(tokens, longest_row))


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch's compiler raises where it, or what it needs, fails. Not every RuntimeError: a defect is none of it."""
    known = (TorchDynamoException, InductorError, ImportError, OSError, subprocess.SubprocessError)
    if importlib.util.find_spec("triton") is None:
        return known
    return (*known, importlib.import_module("triton.errors").TritonError)


def _compiled_in_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, compiled where gradients are wanted."""
    compiled = torch.compile(forward, fullgraph=True)

    @functools.wraps(forward)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return choose


def _warm_up(engine: Engine, sample: MicroBatch) -> None:
    """Passes forth and back, of which nothing is left. Gradients are dropped as they come: there may be no room for all.

    With two bounds of the examples' lengths where attention has one: code that is made for any comes with the second."""
    engine.model.train()
    placed, tables = engine.placing(training=True)(sample), engine.tables
    trained = [p for p in engine.model.parameters() if p.requires_grad and not any(p is table for table in tables)]
    hooks = [parameter.register_post_accumulate_grad_hook(_drop) for parameter in trained]
    try:
        with warnings.catch_warnings():
            # The compiler's own, as it traces.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            for borders in with_another_bound(placed.borders):
                summed_loss(engine, dataclasses.replace(placed, borders=borders)).backward()
                engine.model.zero_grad(set_to_none=True)  # of the tables: a step has no more of them than this
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
    finally:
        for hook in hooks:
            hook.remove()
        engine.model.zero_grad(set_to_none=True)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


EXAMPLES = 64
"""A multiple of so many examples is room for those of a micro-batch; there is room for twice as many as the first one has."""


def record_layers(engine: Engine, sample: MicroBatch) -> None:
    """Record the layers of `engine` for batches like `sample`. Where that fails they stay as they are, and the log says why."""
    began = time.monotonic()
    _allow_another_stream()
    # What is recorded lies in memory of its own: the allocator is to keep nothing for passes that are over.
    torch.cuda.empty_cache()
    try:
        with engine.kernels():
            engine.recorded = Recorded(engine, engine.placing(training=True)(sample))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        torch.cuda.synchronize(engine.device)
        logger.warning("Layers are launched kernel by kernel; they cannot be recorded: %s", one_line(error)[:300])
        return
    torch.cuda.empty_cache()
    logger.info("Recorded in %.1f s: the host launches all layers at once (CUDA graphs)", time.monotonic() - began)


def _allow_another_stream() -> None:
    """Gradients are handed over from the stream of the recording to that of the steps, which is meant: torch need not warn."""
    allow = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)  # since torch 2.10 or so
    if allow is not None:
        allow(False)


class Recorded:
    """Hidden states of a micro-batch by the recording. Memory of the batch, of what the layers keep, and of all gradients stays
    where it was when it was recorded: gradients are to be used up before the next pass."""

    def __init__(self, engine: Engine, sample: Placed) -> None:
        embedding = engine.model.get_input_embeddings()
        with torch.no_grad():
            embedded = embedding(sample.ids).requires_grad_()
        self._embedding, self._places = embedding, sample.ids.numel()
        begins = sample.borders.get("cu_seq_lens_q")
        self._begins: torch.Tensor | None = None
        if begins is not None:
            room = -(-2 * len(begins) // EXAMPLES) * EXAMPLES
            self._begins = begins.new_full((room,), self._places)
            self._set_begins(begins)
        tokens = sample.ids.shape[1]
        longest = max(LEAST_LENGTH, 1 << (tokens - 1).bit_length())
        inputs = (embedded, sample.positions.clone(), *(() if self._begins is None else (self._begins,)))
        # One pass before, on the stream of the recording; compiling has made others. Each beside the gradients of the last.
        self._body = torch.cuda.make_graphed_callables(
            _Body(engine, longest), inputs, num_warmup_iters=1, allow_unused_input=True
        )
        self._shape = sample.ids.shape

    def fits(self, placed: Placed) -> bool:
        """Whether there is room for as many examples as `placed` has: a function of the batch alone."""
        begins = placed.borders.get("cu_seq_lens_q")
        roomy = begins is None or (self._begins is not None and len(begins) <= len(self._begins))
        return roomy and placed.ids.shape == self._shape

    def __call__(self, placed: Placed) -> torch.Tensor:
        inputs = [self._embedding(placed.ids), placed.positions]
        if self._begins is not None:
            self._set_begins(placed.borders["cu_seq_lens_q"])
            inputs.append(self._begins)
        return self._body(*inputs)

    def _set_begins(self, begins: torch.Tensor) -> None:
        """Behind the last example stand some without a token."""
        assert self._begins is not None
        self._begins[len(begins) :] = self._places
        self._begins[: len(begins)].copy_(begins)


class _Body(torch.nn.Module):
    """A model between its lookup and its head, called with nothing but tensors."""

    def __init__(self, engine: Engine, longest: int) -> None:
        super().__init__()
        self._body = engine.model.base_model
        self._computing = engine.computing
        self._longest = longest

    def forward(self, embedded: torch.Tensor, positions: torch.Tensor, *begins: torch.Tensor) -> Any:
        borders = {"cu_seq_lens_q": begins[0], "max_length_q": self._longest} if begins else {}
        with self._computing(once=True):
            return self._body(
                inputs_embeds=embedded, position_ids=positions, use_cache=False, **borders
            ).last_hidden_state
