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

from tunix_rt.backends.torch_borders import with_another_bound
from tunix_rt.backends.torch_model import Engine, memory_is_named, one_line, summed_loss
from tunix_rt.data.pack import MicroBatch
from tunix_rt.errors import HardwareError
from tunix_rt.plan.compiling import Compiling, compiled_length

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
