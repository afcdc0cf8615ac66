"""The interface of an engine: `EngineModule`, the functions of `engines/torch/loop.py` and `engines/jax/loop.py`, and
`Engine`, the loaded model that `load` returns. What an engine supports is data in `config/capabilities.py`.

mypy compares both engines with the interface (at the end of this file). Heavy libraries are imported below `engines` only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from tunix_rt.assets import cache_root
from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.engines.memory_meter import PhasePeak
from tunix_rt.errors import InputError
from tunix_rt.progress import phase

if TYPE_CHECKING:  # the planner reads this file without numpy and without a tokenizer
    import numpy as np
    import numpy.typing as npt

    from tunix_rt.config.settings import Training
    from tunix_rt.data.packing import Row, StepBatch
    from tunix_rt.engines.decoding import Answer, Decoding
    from tunix_rt.models.resolve import ModelSource
    from tunix_rt.plan.precision import Recipe
    from tunix_rt.storage import WrittenFile

NUMERICS: dict[str, int] = {"torch": 1, "jax": 1}
"""By engine. Raised only when its results change in their bits: a run is resumed and replayed by the same numerics alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer update. `loss` is the mean over the target tokens of the whole step."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    target_tokens: int
    tokens: int
    seconds: float
    peak_bytes: int
    batch: str
    logprob_gap: float | None = None
    """With rollouts, as `on_policy.Agreement` has it."""
    logprob_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The shape of a training step, for an engine that compiles it before it reads a weight."""

    rows: int
    """Of a micro-batch, all devices together."""
    accumulation: int
    """Micro-batches in a step."""
    tokens: int
    """Of the longest row."""


# --- the interface ---------------------------------------------------------------------------------------------------


class AttentionChoice(Protocol):
    """The attention kernel of an engine."""

    @property
    def name(self) -> str: ...
    @property
    def why(self) -> str: ...
    @property
    def generating(self) -> str:
        """What transformers calls the implementation that generations are compared with: sdpa or eager."""
        ...


class Engine(Protocol):
    """A loaded model on its devices."""

    @property
    def source(self) -> ModelSource: ...
    @property
    def parameters(self) -> int:
        """Of the model; LoRA adapters are not counted."""
        ...

    @property
    def recipe(self) -> Recipe: ...
    @property
    def attention(self) -> AttentionChoice: ...
    @property
    def device_type(self) -> str: ...  # cpu, cuda or tpu
    @property
    def devices(self) -> Sequence[object]: ...
    @property
    def runs_transformers(self) -> bool:
        """Whether transformers computes the model, so that a reloaded folder rounds as it does."""
        ...

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence; None where the model sets no limit."""
        ...

    @property
    def vocabulary(self) -> int: ...
    @property
    def packs(self) -> bool: ...  # a row may have several examples
    @property
    def saved_dtype(self) -> str | None:
        """Type in which `save` writes the weights, which `round_weights` rounded to it; None: as they are in memory."""
        ...

    @property
    def compiled_shape(self) -> tuple[int, int] | None:
        """Rows and tokens of the micro-batches that a training step is compiled for; None: it is not compiled."""
        ...

    def step_parts(self) -> Mapping[str, int]: ...  # what the compiler counts; empty where it has no analysis
    def peak_bytes(self) -> int:
        """Peak memory since the load: of the fullest device, or on a CPU the rise of resident memory."""
        ...

    def take_peak(self) -> PhasePeak:
        """Peak memory since the last call, where the counter can be reset."""
        ...


class Snapshot(Protocol):
    """A copy of weights and optimizer state in host memory. Written once."""

    @property
    def bytes(self) -> int: ...
    def write(self, folder: Path) -> Mapping[str, WrittenFile] | None:
        """Write the files of a checkpoint into `folder`; may be called from another thread. Returns those it hashed."""
        ...


E = TypeVar("E")
O = TypeVar("O")  # noqa: E741  the optimizer


class EngineModule(Protocol[E, O]):
    """The functions of an engine, whose loaded models are `E` and whose optimizers are `O`."""

    def load(
        self, source: ModelSource, *, device: str, training: Training, step: StepShape | None = None,
        implementation: str = "auto", attempt: bool = False,
    ) -> E:  # fmt: skip
        """The model for training. An engine that compiles whole steps compiles `step` before it reads a weight, and
        refuses one that does not fit, except in an `attempt`."""
        ...

    def load_for_inference(self, source: ModelSource, *, device: str, dtype: str, seed: int = 0) -> E:
        """The model with weights of type `dtype`; it cannot be trained."""
        ...

    def make_optimizer(self, engine: E, training: Training) -> O: ...
    def prepare_steps(
        self, engine: E, batch_of: Callable[[int], StepBatch], training: Training, *, total: int, longest_row: int = 0,
        as_before: str | None = None, planned: str | None = None,
    ) -> dict[str, str]:  # fmt: skip
        """Compile what is left to compile; which kernels compute the steps, as a checkpoint records it. A resumed run
        computes its layers `as_before`, another one as `planned`."""
        ...

    def optimizer_steps(
        self, engine: E, optimizer: O, batch_of: Callable[[int], StepBatch], training: Training, *, first: int, total: int,
        before_update: Callable[[], None] = ..., ends: Sequence[int] = ...,
    ) -> Generator[Step, None, None]:  # fmt: skip
        """Train steps `first` to `total`, yielding after each. Everything random is a function of (seed, step). `before_update`
        is called once in each step; until then the weights are those of the step before. `ends` are those of `total_at`."""
        ...

    def heldout_loss(
        self, engine: E, rows: Sequence[Row], *, batch_size: int, pad_id: int, report: Callable[[int, str], None] = ...
    ) -> tuple[float, int]:
        """Mean loss over the target tokens of `rows`, and their number. Calls `report` with the rows done so far."""
        ...

    def generate(
        self, engine: E, prompts: Sequence[Sequence[int]], *, decoding: Decoding, stop_ids: Sequence[int], pad_id: int,
        decode: Callable[[list[int]], str], batch_size_at: Callable[[int], int],
        on_tokens: Callable[[int, list[int]], bool] | None = None, logprobs: bool = False,
    ) -> Iterator[tuple[int, Answer]]:  # fmt: skip
        """(index, generation) as each ends, the longest prompts first. The index is that of the prompt; with several samples of
        each, `prompt * decoding.samples + sample`.

        `batch_size_at` gives the batch size for prompts of a length; it is halved where memory runs out. `on_tokens` is called
        with the tokens of a generation so far whenever there are new ones, and ends it by returning true; for a model type
        that transformers generates with, only at its end. With `logprobs`, log-probabilities are kept."""
        ...

    def snapshot(self, engine: E, optimizer: O) -> Snapshot: ...
    def snapshot_bytes(self, engine: E, optimizer: O) -> int:
        """Size of a checkpoint, which is the host memory that a snapshot takes."""
        ...

    def host_has_room(self, needed_bytes: int) -> bool: ...
    def write_direct(self, engine: E, optimizer: O, folder: Path) -> Mapping[str, WrittenFile] | None:
        """Write a checkpoint a block at a time, without a snapshot."""
        ...

    def restore_state(self, engine: E, optimizer: O, folder: Path, *, step: int) -> None:
        """Restore a verified checkpoint of `step`, bit for bit."""
        ...

    def round_weights(self, engine: E, dtype: str) -> None: ...
    def save(
        self,
        engine: E,
        folder: Path,
        *,
        tokenizer_folder: Path,
        stop_ids: Sequence[int],
        chat_template: str | None = None,
    ) -> None:
        """Write the model in Hugging Face layout, with its tokenizer. Replaces `folder` as a whole."""
        ...

    def last_logits(self, engine: E, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Logits of the token after each prompt, [prompts, vocabulary]."""
        ...

    def token_gaps(
        self, engine: E, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ends: Sequence[int]
    ) -> list[list[float]]:
        """How far the logit of each generated token is below the largest at its position; last, of the best of `ends`."""
        ...

    def tensor_hashes(self, engine: E) -> dict[str, list[Any]]:
        """dtype, shape and SHA-256 of every tensor as `save` writes it."""
        ...

    def free_bytes(self, engine: E) -> int:
        """Free memory on the fullest device of `engine`."""
        ...

    def room_beside(self, engine: E) -> int:
        """Free device memory that another process can allocate; 0 on a CPU."""
        ...

    def release(self, engine: E) -> None:
        """Free the memory of the model; `engine` cannot be used afterwards."""
        ...

    def machine_facts(self, engine: E) -> dict[str, Any]:
        """What decides the bits of a step beside its inputs."""
        ...


Backend: TypeAlias = EngineModule[Engine, object]
"""An engine chosen at run time. Its models and optimizers go back only into the module that made them."""


def load_backend(name: str) -> Backend:
    """The engine module for `training.backend`.

    OpenMP threads sleep while they wait, unless the user configured otherwise: spinning threads slow a small model down several
    times beside another busy program. Compiled code is cached across restarts, which PyTorch's default folder is not.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    folder = cache_root() / "compiled"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    module = f"tunix_rt.engines.{name}.{_PARTS.get(name, 'loop')}"
    with contextlib.nullcontext() if module in sys.modules else phase(f"import {name}"):
        return cast(Backend, importlib.import_module(module))


_PARTS: dict[str, str] = {}


@contextlib.contextmanager
def leading(name: str, lead: object) -> Iterator[None]:
    """In this block, `load_backend` gives the engine of the first of several processes, which `lead` connects."""
    with importlib.import_module(f"tunix_rt.engines.{name}.lead").connected(lead):
        _PARTS[name] = "lead"
        try:
            yield
        finally:
            del _PARTS[name]


def load_follower(name: str) -> Any:
    """The engine module of every process but the first."""
    return importlib.import_module(f"tunix_rt.engines.{name}.follow")


def load_lead(name: str) -> Any:
    """The engine module of the first of several processes."""
    return importlib.import_module(f"tunix_rt.engines.{name}.lead")


T = TypeVar("T")


def prefetched(
    make: Callable[[int], T], *, ahead: bool, first: int, total: int
) -> Generator[tuple[int, Callable[[], T]], None, None]:
    """(step, a function that returns `make(step)`) for steps `first` to `total`; with `ahead` a thread makes the next one."""
    if not ahead:
        yield from ((step, partial(make, step)) for step in range(first, total + 1))
        return
    with contextlib.ExitStack() as ends:
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        ends.callback(pool.shutdown, wait=True, cancel_futures=True)
        coming = pool.submit(make, first)
        for step in range(first, total + 1):
            now = coming
            if step < total:
                coming = pool.submit(make, step + 1)
            yield step, now.result


def refuse_unsupported_model(source: ModelSource, backend: str) -> None:
    """InputError for a model that the engine has no code for, or no dropout for. Reads its config.json alone."""
    if CAPABILITIES[backend].own_models:
        from tunix_rt.engines.jax.architecture import architecture_of

        refuse_dropout(source.name, architecture_of(source.config).dropout, source.config, backend)


def refuse_dropout(name: str, rate: float, config: Mapping[str, object], backend: str) -> None:
    engine = CAPABILITIES[backend]
    if rate > 0 and not engine.dropout:
        keys = [key for key, value in config.items() if ("dropout" in key or key.endswith("_pdrop")) and value]
        others = [name for name, other in CAPABILITIES.items() if other.dropout]
        raise InputError(
            f"{name}: config.json has dropout of {rate:g} ({', '.join(sorted(keys)) or 'by default'}), "
            f"which the {engine.title} engine does not support",
            fix=f"set it to 0 in a copy of the model's config.json, or set training.backend: {' or '.join(others)}",
        )


if TYPE_CHECKING:  # mypy compares each engine with the interface, function by function
    from tunix_rt.engines.jax import lead as jax_lead
    from tunix_rt.engines.jax import load as jax_load
    from tunix_rt.engines.jax import loop as jax_loop
    from tunix_rt.engines.torch import lead as torch_lead
    from tunix_rt.engines.torch import loop as torch_loop
    from tunix_rt.engines.torch import model as torch_model
    from tunix_rt.engines.torch import optim as torch_optim

    _torch: EngineModule[torch_model.Engine, torch_optim.Optimizer] = torch_loop
    _ranks: EngineModule[torch_model.Engine, torch_optim.Optimizer] = torch_lead
    _jax: EngineModule[jax_load.Engine, jax_loop.Optimizer] = jax_loop
    _jax_lead: EngineModule[jax_load.Engine, jax_loop.Optimizer] = jax_lead
    _torch_engine: type[Engine] = torch_model.Engine
    _jax_engine: type[Engine] = jax_load.Engine
