"""The PyTorch engine of every other rank: it executes the orders of rank 0, one after the other."""

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, StepBatch
from tunix_rt.engines.base import Step
from tunix_rt.engines.decoding import Decoding
from tunix_rt.engines.torch import loop
from tunix_rt.engines.torch.lead import facts_of, start_group
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.optim import Optimizer
from tunix_rt.engines.torch.orders import Orders, open_store
from tunix_rt.engines.torch.watch import RESUME, Watch, is_of_connection, pass_signals_on
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.ranks import World, wait_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a rank prepares by itself, as rank 0 does."""

    batch_of: Callable[[int], StepBatch]
    heldout_rows: Sequence[Row]
    pad_id: int
    decode: Callable[[list[int]], str]


class Follower:
    """The engine of this rank. Each method is an order, with the arguments that rank 0 announces."""

    def __init__(self, orders: Orders, watch: Watch, find_model: Callable[[], ModelSource]) -> None:
        self._orders, self._watch, self._find_model = orders, watch, find_model
        self.inputs: Inputs | None = None
        self._engine: Engine | None = None
        self._optimizer: Optimizer | None = None
        self._training: Training | None = None
        self._steps: Generator[Step, None, None] | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "rank 0 loads the model first"
        return self._engine

    @property
    def state(self) -> tuple[Engine, Optimizer]:
        assert self._optimizer is not None, "rank 0 makes the optimizer first"
        return self.engine, self._optimizer

    @property
    def prepared(self) -> tuple[Inputs, Training]:
        assert self.inputs is not None and self._training is not None, "rank 0 announces the run first"
        return self.inputs, self._training

    def load(self, device: str, training: str, implementation: str) -> None:
        start_group(device, self._orders)
        self._training = Training.model_validate_json(training)
        self._engine = loop.load(
            self._find_model(), device=device, training=self._training, implementation=implementation
        )  # fmt: skip

    def make_optimizer(self) -> None:
        _, training = self.prepared
        self._optimizer = loop.make_optimizer(self.engine, training)

    def prepare_steps(self, **how: Any) -> None:
        inputs, training = self.prepared
        loop.prepare_steps(self.engine, inputs.batch_of, training, **how)

    def optimizer_steps(self, **which: Any) -> None:
        inputs, training = self.prepared
        self._steps = loop.optimizer_steps(*self.state, inputs.batch_of, training, **which)

    def step(self) -> None:
        assert self._steps is not None
        next(self._steps)

    def heldout_loss(self, batch_size: int) -> None:
        inputs, _ = self.prepared
        loop.heldout_loss(self.engine, inputs.heldout_rows, batch_size=batch_size, pad_id=inputs.pad_id)

    def generate(
        self, shares: list[list[list[int]]], batch_size: int, decoding: dict[str, Any], stop_ids: list[int], pad_id: int
    ) -> None:
        inputs, _ = self.prepared

        def decode(ids: list[int]) -> str:
            self._watch.tick()
            return inputs.decode(ids)

        assert self.engine.sharding is not None
        with self.engine.sharding.whole_model():
            answers = loop.generate(
                self.engine, shares[self._orders.world.rank - 1] if shares else [], decoding=Decoding(**decoding),
                stop_ids=stop_ids, pad_id=pad_id, decode=decode, batch_size_at=lambda length: batch_size,
            )  # fmt: skip
            self._orders.answer([(place, asdict(answer)) for place, answer in answers])

    def snapshot(self) -> None:
        taken, number = loop.snapshot(*self.state), self._orders.number
        threading.Thread(target=self._write, args=(taken.write, number), name="tunix-rt-save", daemon=True).start()

    def _write(self, write: Callable[[Path], Any], number: int) -> None:
        """Write a snapshot once rank 0 has a folder for it."""
        try:
            folder = Path(self._orders.wait(f"write/{number}"))
            self._orders.answer(write(wait_for(folder)), f"wrote/{number}")
        except TunixError as error:
            self._orders.fail(error)
        except dist.DistError:  # rank 0 has ended
            return

    def write_direct(self, folder: str) -> None:
        self._orders.answer(loop.write_direct(*self.state, wait_for(Path(folder))))

    def restore_state(self, folder: str, step: int) -> None:
        loop.restore_state(*self.state, wait_for(Path(folder)), step=step)

    def round_weights(self, dtype: str) -> None:
        loop.round_weights(self.engine, dtype)

    def save(self) -> None:
        loop.save(self.engine, Path(), tokenizer_folder=Path(), stop_ids=())  # rank 0 writes it

    def tensor_hashes(self) -> None:
        loop.tensor_hashes(self.engine)

    def gather(self) -> None:
        assert self.engine.sharding is not None
        with self.engine.sharding.whole_model():
            pass

    def facts(self) -> None:
        self._orders.answer(facts_of(self.engine, self._orders.world))


def follow(
    world: World, greeting: dict[str, Any], find_model: Callable[[], ModelSource], prepare: Callable[..., Inputs]
) -> None:
    """Serve rank 0 until it ends this process. `prepare` takes the arguments with which it announces the run."""
    store = open_store(world)
    orders, watch = Orders(store, world), Watch(store, world)
    pass_signals_on(watch)
    watch.start()
    store.set(f"greeting/{world.rank}", greeting["config"])
    follower = Follower(orders, watch, find_model)
    try:
        while True:
            call, arguments = orders.next()
            act = partial(prepare, **arguments) if call == "run" else partial(getattr(follower, call), **arguments)
            with watch.busy(call.replace("_", " "), orders.number):
                found = act()
            if call == "run":
                follower.inputs = found
                orders.answer("ready")
    except TunixError as error:
        with contextlib.suppress(dist.DistError):
            orders.fail(error)
        raise
    except RuntimeError as error:
        if not is_of_connection(error):
            raise
        raise TunixError("the connection to the other ranks broke: one of them has ended", fix=RESUME) from error
