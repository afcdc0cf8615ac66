"""The layers of a training step, launched by the host in one stroke: a CUDA graph of their forward pass, one of their backward.

A small model is computed faster than a host can launch it, kernel by kernel. What is recorded are the very kernels that the
compiled layers launch; the loss head and the optimizer, which have other sizes every time, are launched as before.
"""

import logging
import time
from typing import Any

import torch

from tunix_rt.backends.torch_batches import Placed
from tunix_rt.backends.torch_borders import LEAST_LENGTH
from tunix_rt.backends.torch_model import Engine, is_out_of_memory, one_line
from tunix_rt.data.pack import MicroBatch

logger = logging.getLogger(__name__)

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
