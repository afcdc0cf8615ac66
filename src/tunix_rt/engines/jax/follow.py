"""The JAX engine in every process but the first: it computes what process 0 announces, and writes the shards of its devices."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from tunix_rt.config.settings import Training
from tunix_rt.engines.base import StepShape
from tunix_rt.engines.checkpoint import MODEL, OPTIMIZER
from tunix_rt.engines.jax import loop
from tunix_rt.engines.jax.follower import Follower
from tunix_rt.engines.jax.model import Batch
from tunix_rt.engines.jax.processes import exit_without_shutdown, gathered, join
from tunix_rt.engines.jax.save import Snapshot, own_name
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.ranks import World, wait_for
from tunix_rt.storage import WrittenFile, settle_file, sha256_file, storage


@dataclass(slots=True, kw_only=True)
class Computation:
    """What a follower has loaded."""

    world: World
    source: ModelSource
    follower: Follower
    engine: Any = None
    optimizer: Any = None
    compiled: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """The loss of batches, by their shape."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    taken: threading.Condition = field(default_factory=threading.Condition)

    def compute(self, order: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """One announcement of process 0."""
        if order["what"] not in ("step", "loss"):
            self.follower.enter()
        ORDERS[order["what"]](self, order, arrays)

    def write_snapshot(self, number: int, folder: str) -> None:
        """In another thread, once the snapshot of that number is taken."""
        with self.taken:
            while number not in self.snapshots:
                self.taken.wait()
            snapshot = self.snapshots.pop(number)
        self._write(number, Path(folder), snapshot.write)

    def _write(self, number: int, folder: Path, write: Callable[[Path], None]) -> None:
        try:
            wait_for(folder)
            with storage(folder):
                write(folder)
                for path in (own := [folder / own_name(name) for name in (MODEL, OPTIMIZER)]):
                    settle_file(path)
                written = {path.name: WrittenFile(sha256=sha256_file(path), bytes=path.stat().st_size) for path in own}
        except TunixError as error:
            self.follower.fail(error)
            return
        self.follower.wrote(number, written)


@contextmanager
def computation(
    own: World, source: ModelSource
) -> Iterator[tuple[Follower, Callable[[Mapping[str, Any], Mapping[str, Any]], None]]]:
    """The connection of this process, and the function that computes an order."""
    follower = Follower(lambda number, folder: run.write_snapshot(number, folder))
    run = Computation(world=own, source=source, follower=follower)
    try:
        yield follower, run.compute
    except TunixError as error:
        if not follower.leaves:
            exit_without_shutdown(error.exit_code)
        raise
    finally:
        if follower.leaves:
            jax.distributed.shutdown()
        follower.close()


# --- one function for each announcement ---------------------------------------------------------------------------------


def _load(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    join(order["coordinator"], run.world)
    run.engine = loop.load(
        run.source, device=order["device"], training=Training.model_validate(order["training"]),
        step=None if order["shape"] is None else StepShape(**order["shape"]),
        implementation=order["implementation"], attempt=order["attempt"],
    )  # fmt: skip


def _make_optimizer(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    run.follower.meet()
    run.optimizer = loop.make_optimizer(run.engine, Training.model_validate(order["training"]))


def _step(run: Computation, order: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    batches = loop.placing(run.engine).put(Batch(**arrays))
    if order["meet"]:
        run.follower.meet()
    run.follower.enter()
    loop.take_step(run.engine, run.optimizer, batches, order["step"], order["rate"], order["target_tokens"])


def _loss(run: Computation, order: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    loss = loop.prepared_loss(run.engine, Batch(**arrays), run.compiled)
    run.follower.meet()
    run.follower.enter()
    loss()


def _snapshot(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    with run.taken:
        run.snapshots[order["number"]] = loop.snapshot(run.engine, run.optimizer)
        run.taken.notify_all()


def _write(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    run._write(order["number"], Path(order["folder"]), lambda to: loop.write_direct(run.engine, run.optimizer, to))


def _restore(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    wait_for(Path(order["folder"]))
    loop.restore_state(run.engine, run.optimizer, Path(order["folder"]), step=order["at"])


def _round_weights(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    run.follower.meet()
    loop.round_weights(run.engine, order["dtype"])


def _gather(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    run.follower.meet()
    jax.block_until_ready(gathered(run.engine).params)


def _release(run: Computation, order: Mapping[str, Any], _: Mapping[str, Any]) -> None:
    loop.release(run.engine)


ORDERS: Mapping[str, Callable[[Computation, Mapping[str, Any], Mapping[str, Any]], None]] = {
    "load": _load, "make_optimizer": _make_optimizer, "step": _step, "loss": _loss, "snapshot": _snapshot,
    "write": _write, "restore": _restore, "round_weights": _round_weights, "gather": _gather, "release": _release,
}  # fmt: skip
