"""The JAX engine in process 0 of several: the functions of `loop.py`, which announce to all others what they compute.

Training and the held-out loss are computed by all. For generations and for the final model this process gathers the weights.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from tunix_rt.config.optimizers import learning_rate, total_at
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, StepBatch
from tunix_rt.engines.base import Step, StepShape
from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.engines.jax import loop
from tunix_rt.engines.jax.control import ORDERLY, Lead, address_of_lead
from tunix_rt.engines.jax.load import Engine
from tunix_rt.engines.jax.loop import (
    Optimizer,
    free_bytes,
    host_has_room,
    load_for_inference,
    machine_facts,
    prepare_steps,
    room_beside,
)
from tunix_rt.engines.jax.model import Batch
from tunix_rt.engines.jax.processes import exit_without_shutdown, free_port, gathered, join
from tunix_rt.engines.jax.save import Snapshot, state_bytes
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.ranks import world
from tunix_rt.storage import WrittenFile

__all__ = [
    "free_bytes", "generate", "heldout_loss", "host_has_room", "last_logits", "load", "load_for_inference", "machine_facts",
    "make_optimizer", "optimizer_steps", "prepare_steps", "release", "restore_state", "room_beside", "round_weights", "save",
    "snapshot", "snapshot_bytes", "tensor_hashes", "token_gaps", "write_direct",
]  # fmt: skip

_connected: list[Lead] = []
_compiled: dict[tuple[int, ...], Any] = {}
"""The loss of batches, by their shape."""


@contextmanager
def connected(lead: Lead) -> Iterator[None]:
    """`lead` announces what the functions of this module compute."""
    _connected.append(lead)
    try:
        yield
    except BaseException as error:
        exit_code = error.exit_code if isinstance(error, TunixError) else TunixError.exit_code
        if lead.failure is not None or exit_code not in ORDERLY:
            exit_without_shutdown(exit_code)
        raise
    finally:
        _connected.clear()
        _compiled.clear()


def _lead() -> Lead:
    return _connected[0]


def _ready() -> None:
    """Nothing is to be prepared; the others may still do what was announced before."""


# --- loading ----------------------------------------------------------------------------------------------------------


def load(
    source: ModelSource, *, device: str, training: Training, step: StepShape | None = None, implementation: str = "auto",
    attempt: bool = False,
) -> Engine:  # fmt: skip
    own, port = world(), free_port()
    given: dict[str, Any] = {
        "device": device, "training": training.model_dump(mode="json"), "implementation": implementation,
        "attempt": attempt, "coordinator": f"{address_of_lead()[0]}:{port}",
        "shape": None if step is None else {"rows": step.rows, "accumulation": step.accumulation, "tokens": step.tokens},
    }  # fmt: skip
    with _lead().computing("load", None, **given):
        join(given["coordinator"], own)
        _lead().leave = jax.distributed.shutdown
        return loop.load(
            source, device=device, training=training, step=step, implementation=implementation, attempt=attempt
        )


def make_optimizer(engine: Engine, training: Training) -> Optimizer:
    with _lead().computing("make_optimizer", prepare=_ready, training=training.model_dump(mode="json")):
        return loop.make_optimizer(engine, training)


def release(engine: Engine) -> None:
    with _lead().computing("release"):
        loop.release(engine)


# --- steps ------------------------------------------------------------------------------------------------------------


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
    """The steps of `loop.py`; the others get the batch of each before its update."""
    made: dict[int, StepBatch] = {}
    coming = iter(range(first, total + 1))

    def kept(step: int) -> StepBatch:
        made[step] = batch_of(step)
        return made[step]

    def announced() -> None:
        before_update()
        step = next(coming)
        batch = made.pop(step)
        rate = learning_rate(step, total=total_at(step, ends, total), training=training)
        arrays = loop.placing(engine).stacked(batch)._asdict()
        number = _lead().announce(
            "step", arrays, step=step, rate=rate, target_tokens=batch.target_tokens, meet=step == first
        )
        if step == first:
            _lead().meet(number)

    steps = loop.optimizer_steps(
        engine, optimizer, kept, training, first=first, total=total, before_update=announced, ends=ends
    )
    with contextlib.closing(steps):
        while True:
            with _lead().explained():
                step = next(steps, None)
            if step is None:
                return
            yield step


def heldout_loss(
    engine: Engine, rows: Sequence[Row], *, batch_size: int, pad_id: int,
    report: Callable[[int, str], None] = lambda done, note: None,
) -> tuple[float, int]:  # fmt: skip
    return loop.heldout_loss(engine, rows, batch_size=batch_size, pad_id=pad_id, report=report, loss=_loss)


def _loss(engine: Engine, batch: Batch) -> float:
    ready = list[Callable[[], float]]()
    with _lead().computing(
        "loss", batch._asdict(), prepare=lambda: ready.append(loop.prepared_loss(engine, batch, _compiled))
    ):
        return ready[0]()


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSnapshot:
    """The snapshots of all processes."""

    own: Snapshot
    number: int
    bytes: int

    def write(self, folder: Path) -> dict[str, WrittenFile]:
        """Each process writes its own files into `folder`. Those of the others, once all have."""
        _lead().send_all("write", number=self.number, folder=str(folder.absolute()))
        self.own.write(folder)
        return _lead().collect(self.number)


def snapshot(engine: Engine, optimizer: Optimizer) -> SharedSnapshot:
    with _lead().computing("snapshot") as number:
        return SharedSnapshot(own=loop.snapshot(engine, optimizer), number=number, bytes=state_bytes(engine, optimizer))


def snapshot_bytes(engine: Engine, optimizer: Optimizer) -> int:
    """Of all processes together."""
    return state_bytes(engine, optimizer)


def write_direct(engine: Engine, optimizer: Optimizer, folder: Path) -> dict[str, WrittenFile]:
    with _lead().computing("write", folder=str(folder.absolute())) as number:
        loop.write_direct(engine, optimizer, folder)
        return _lead().collect(number)


def restore_state(engine: Engine, optimizer: Optimizer, folder: Path, *, step: int) -> None:
    with _lead().computing("restore", folder=str(folder.absolute()), at=step):
        loop.restore_state(engine, optimizer, folder, step=step)


def round_weights(engine: Engine, dtype: str) -> None:
    with _lead().computing("round_weights", prepare=_ready, dtype=dtype):
        loop.round_weights(engine, dtype)


# --- with all weights in this process ---------------------------------------------------------------------------------


def _gathered(engine: Engine) -> Engine:
    with _lead().computing("gather", prepare=_ready):
        return jax.block_until_ready(gathered(engine))


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], *, decoding: Decoding, stop_ids: Sequence[int], pad_id: int,
    decode: Callable[[list[int]], str], batch_size_at: Callable[[int], int],
    on_tokens: Callable[[int, list[int]], bool] | None = None, logprobs: bool = False,
) -> Iterator[tuple[int, Answer]]:  # fmt: skip
    yield from loop.generate(
        _gathered(engine), prompts, decoding=decoding, stop_ids=stop_ids, pad_id=pad_id, decode=decode,
        batch_size_at=batch_size_at, on_tokens=on_tokens, logprobs=logprobs,
    )  # fmt: skip


def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    loop.save(
        _gathered(engine), folder, tokenizer_folder=tokenizer_folder, stop_ids=stop_ids, chat_template=chat_template
    )


def last_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    return loop.last_logits(_gathered(engine), prompts)


def token_gaps(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[list[float]]:
    return loop.token_gaps(_gathered(engine), prompts, answers, ends)


def tensor_hashes(engine: Engine) -> dict[str, list[Any]]:
    return loop.tensor_hashes(_gathered(engine))
