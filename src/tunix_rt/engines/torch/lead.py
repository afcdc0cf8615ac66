"""The PyTorch engine of rank 0: each function of `loop.py` that needs every rank announces itself to the others first."""

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, StepBatch
from tunix_rt.engines.base import Step, StepShape
from tunix_rt.engines.decoding import Answer, Decoding
from tunix_rt.engines.torch import loop
from tunix_rt.engines.torch.loop import (
    free_bytes,
    host_has_room,
    load_for_inference,
    release,
    room_beside,
    snapshot_bytes,
)
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.optim import Optimizer
from tunix_rt.engines.torch.orders import Orders, open_store
from tunix_rt.engines.torch.save import Snapshot
from tunix_rt.engines.torch.watch import RESUME, Watch, is_of_connection
from tunix_rt.errors import ConfigError, HardwareError, TunixError
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.secrets import one_line
from tunix_rt.ranks import World
from tunix_rt.storage import WrittenFile

__all__ = [
    "free_bytes", "generate", "heldout_loss", "host_has_room", "last_logits", "load", "load_for_inference", "machine_facts",
    "make_optimizer", "optimizer_steps", "prepare_steps", "release", "restore_state", "room_beside", "round_weights", "save",
    "snapshot", "snapshot_bytes", "tensor_hashes", "token_gaps", "write_direct",
]  # fmt: skip

LOST_SECONDS = 3.0
"""Within which a rank that failed has reported why, or shows no sign of life."""
_open: list["Lead"] = []
"""Of this process, while it leads a run."""


@dataclass(frozen=True, slots=True)
class Lead:
    """Rank 0 of a run, and what it knows of the others."""

    orders: Orders
    watch: Watch


# --- the ranks of a run ----------------------------------------------------------------------------------------------


def meet(world: World, *, on_stop: Callable[[str], None], on_lost: Callable[[TunixError], None]) -> Lead:
    """Meet the other ranks. `on_stop` takes the name of a signal that one received, `on_lost` the error that names one that
    hangs."""
    store = open_store(world)
    lead = Lead(Orders(store, world), Watch(store, world, on_stop=on_stop, on_lost=on_lost))
    lead.watch.start()
    return lead


@contextlib.contextmanager
def connected(lead: Lead) -> Iterator[None]:
    """`lead` announces what the functions of this module compute. The other ranks end with the block and its exit code."""
    _open.append(lead)
    exit_code = 1
    try:
        yield
        exit_code = 0
    except TunixError as error:
        exit_code = error.exit_code
        raise
    finally:
        _open.clear()
        lead.watch.end()
        with contextlib.suppress(dist.DistError):  # the store ends with the launcher
            lead.orders.end(exit_code)


@contextlib.contextmanager
def ordered(call: str, what: str = "", **arguments: Any) -> Iterator[int]:
    """The block is executed by every rank at once: the others by their function `call`. Yields the number of the order."""
    lead = _open[0]
    number = lead.orders.announce(call, **arguments)
    with lead.watch.busy(what or call.replace("_", " "), number), _lost_ranks_named(lead):
        yield number


@contextlib.contextmanager
def _lost_ranks_named(lead: Lead) -> Iterator[None]:
    """Raise the error of a rank that ended in place of that of the connection to it."""
    try:
        yield
    except RuntimeError as error:
        if not is_of_connection(error):
            raise
        until = time.monotonic() + LOST_SECONDS
        while time.monotonic() < until:
            lead.orders.raise_failure()
            if (rank := lead.watch.silent()) is not None:
                lead.orders.broken = lead.watch.lost(rank, "was lost")
                raise lead.orders.broken from error
            time.sleep(0.1)
        lead.orders.broken = TunixError(f"the connection between the ranks broke: {one_line(error)}", fix=RESUME)
        raise lead.orders.broken from error


def start_group(device: str, orders: Orders) -> None:
    """Join the process group of all ranks, each with a device of its own."""
    world = orders.world
    if device == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise HardwareError(
                f"local rank {world.local_rank}: {world.host} has {torch.cuda.device_count()} visible GPU(s)",
                fix="start no more ranks on a host than it has GPUs: --nproc gpu",
            )
        torch.cuda.set_device(world.local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", store=dist.PrefixStore("group", orders.store), rank=world.rank,
            world_size=world.size, timeout=datetime.timedelta(days=1),  # `Watch` finds the rank that hangs, and names it
        )  # fmt: skip


# --- the functions of the engine -------------------------------------------------------------------------------------


def load(
    source: ModelSource, *, device: str, training: Training, step: StepShape | None = None, implementation: str = "auto",
    attempt: bool = False,
) -> Engine:  # fmt: skip
    how = {"device": device, "training": training.model_dump_json(), "implementation": implementation}
    with ordered("load", "loading the model", **how):
        start_group(device, _open[0].orders)
        return loop.load(source, device=device, training=training, step=step, implementation=implementation)


def make_optimizer(engine: Engine, training: Training) -> Optimizer:
    with ordered("make_optimizer"):
        return loop.make_optimizer(engine, training)


def prepare_steps(
    engine: Engine, batch_of: Callable[[int], StepBatch], training: Training, *, total: int, longest_row: int = 0,
    as_before: str | None = None, planned: str | None = None,
) -> dict[str, str]:  # fmt: skip
    how: dict[str, Any] = {"total": total, "longest_row": longest_row, "as_before": as_before, "planned": planned}
    with ordered("prepare_steps", "preparing the steps", **how):
        return loop.prepare_steps(engine, batch_of, training, **how)


def optimizer_steps(
    engine: Engine, optimizer: Optimizer, batch_of: Callable[[int], StepBatch], training: Training, *, first: int, total: int,
    before_update: Callable[[], None] = lambda: None, ends: Sequence[int] = (),
) -> Generator[Step, None, None]:  # fmt: skip
    with ordered("optimizer_steps", first=first, total=total, ends=list(ends)):
        steps = loop.optimizer_steps(
            engine, optimizer, batch_of, training, first=first, total=total, before_update=before_update, ends=ends
        )
    with contextlib.closing(steps):
        for step in range(first, total + 1):
            with ordered("step", f"step {step}"):
                taken = next(steps)
            yield taken


def heldout_loss(
    engine: Engine, rows: Sequence[Row], *, batch_size: int, pad_id: int,
    report: Callable[[int, str], None] = lambda done, note: None,
) -> tuple[float, int]:  # fmt: skip
    with ordered("heldout_loss", "the held-out loss", batch_size=batch_size):
        return loop.heldout_loss(engine, rows, batch_size=batch_size, pad_id=pad_id, report=report)


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], *, decoding: Decoding, stop_ids: Sequence[int], pad_id: int,
    decode: Callable[[list[int]], str], batch_size_at: Callable[[int], int],
    on_tokens: Callable[[int, list[int]], bool] | None = None, logprobs: bool = False,
) -> Iterator[tuple[int, Answer]]:  # fmt: skip
    """Every rank gathers the model, and generates for its share of the prompts. Where the order of prompts decides random
    numbers, or tokens are shown as they come, rank 0 generates alone."""
    sharding = engine.sharding
    assert sharding is not None
    lead = _open[0]
    alone = bool(decoding.temperature) or decoding.samples > 1 or on_tokens is not None or logprobs
    every = sharding.world.size if not alone else len(prompts) + 1
    shares = [[list(prompt) for prompt in prompts[rank::every]] for rank in range(sharding.world.size)]
    how: dict[str, Any] = {"decoding": asdict(decoding), "stop_ids": list(stop_ids), "pad_id": pad_id}
    size = batch_size_at(max(map(len, prompts), default=0))
    how |= {"shares": [] if alone else shares[1:], "batch_size": size}
    with contextlib.ExitStack() as ends:
        with ordered("generate", "gathering the model", **how) as number:
            ends.enter_context(sharding.whole_model())
        own = loop.generate(
            engine, prompts if alone else shares[0], decoding=decoding, stop_ids=stop_ids, pad_id=pad_id, decode=decode,
            batch_size_at=batch_size_at, on_tokens=on_tokens, logprobs=logprobs,
        )  # fmt: skip
        for place, answer in own:
            lead.orders.raise_failure()
            yield (place if alone else place * every), answer
    with lead.watch.awaiting(set(range(1, sharding.world.size))):
        for rank, answers in sorted(lead.orders.answers(f"answer/{number}").items()):
            yield from ((place * every + rank, Answer(**answer)) for place, answer in answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSnapshot:
    """A snapshot that every rank has of its own rows, and writes to files of its own."""

    own: Snapshot
    bytes: int
    number: int
    """Of the order."""
    orders: Orders

    def write(self, folder: Path) -> dict[str, WrittenFile]:
        self.orders.store.set(f"write/{self.number}", str(folder.resolve()))
        written = self.own.write(folder)
        for answer in self.orders.answers(f"wrote/{self.number}").values():
            written |= answer
        return written


def snapshot(engine: Engine, optimizer: Optimizer) -> RanksSnapshot:
    with ordered("snapshot", "a checkpoint") as number:
        own, whole = loop.snapshot(engine, optimizer), snapshot_bytes(engine, optimizer)
        return RanksSnapshot(own=own, bytes=whole, number=number, orders=_open[0].orders)


def write_direct(engine: Engine, optimizer: Optimizer, folder: Path) -> dict[str, WrittenFile]:
    with ordered("write_direct", "a checkpoint", folder=str(folder.resolve())) as number:
        written = loop.write_direct(engine, optimizer, folder)
        for answer in _open[0].orders.answers(f"answer/{number}").values():
            written |= answer
        return written


def restore_state(engine: Engine, optimizer: Optimizer, folder: Path, *, step: int) -> None:
    with ordered("restore_state", "restoring the checkpoint", folder=str(folder), step=step):
        loop.restore_state(engine, optimizer, folder, step=step)


def round_weights(engine: Engine, dtype: str) -> None:
    with ordered("round_weights", dtype=dtype):
        loop.round_weights(engine, dtype)


def save(
    engine: Engine, folder: Path, *, tokenizer_folder: Path, stop_ids: Sequence[int], chat_template: str | None = None
) -> None:
    with ordered("save", "saving the model"):
        loop.save(
            engine, folder, tokenizer_folder=tokenizer_folder, stop_ids=stop_ids, chat_template=chat_template
        )  # fmt: skip


def last_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    with _whole_model(engine):
        return loop.last_logits(engine, prompts)


def token_gaps(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[list[float]]:
    with _whole_model(engine):
        return loop.token_gaps(engine, prompts, answers, ends)


@contextlib.contextmanager
def _whole_model(engine: Engine) -> Iterator[None]:
    """Rank 0 has the whole model in the block."""
    assert engine.sharding is not None
    with contextlib.ExitStack() as ends:
        with ordered("gather", "gathering the model"):
            ends.enter_context(engine.sharding.whole_model())
        yield


def tensor_hashes(engine: Engine) -> dict[str, list[Any]]:
    with ordered("tensor_hashes", "hashing the model"):
        return loop.tensor_hashes(engine)


def machine_facts(engine: Engine) -> dict[str, Any]:
    return loop.machine_facts(engine)


# --- what the others report ------------------------------------------------------------------------------------------


def rank_facts(engine: Engine) -> list[dict[str, Any]]:
    """Rank, host, process, GPU and peak memory of every rank. ConfigError where they have other software or GPUs."""
    orders, watch = _open[0].orders, _open[0].watch
    with ordered("facts") as number, watch.awaiting(set(range(1, orders.world.size))):
        found = {0: facts_of(engine, orders.world), **orders.answers(f"answer/{number}")}
    for name in ("gpu", "versions"):
        if other := next((rank for rank in found if found[rank].get(name) != found[0].get(name)), None):
            raise ConfigError(
                f"rank {other} on {found[other]['host']} has {name} {found[other][name]}, rank 0 has {found[0][name]}",
                fix="use hosts with the same GPUs and the same versions of torch and transformers",
            )
    return [found[rank] for rank in sorted(found)]


def facts_of(engine: Engine, world: World) -> dict[str, Any]:
    """Where a rank computes, with what, and the most memory it had."""
    facts = {"rank": world.rank, "host": world.host, "pid": os.getpid(), "peak_bytes": engine.peak_bytes()}
    machine = loop.machine_facts(engine)
    if engine.device.type == "cuda":
        facts["uuid"] = f"GPU-{torch.cuda.get_device_properties(engine.device).uuid}"
        facts["gpu"] = machine["gpu"]
    return facts | {"versions": machine["versions"]}
