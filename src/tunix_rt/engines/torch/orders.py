"""What rank 0 requests of the other ranks, and what they answer: JSON in the store of torch.distributed.

No GPU waits for an order, and no timeout runs while rank 0 tokenizes or scores; `watch.py` finds the rank that hangs.
"""

import datetime
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tunix_rt import errors
from tunix_rt.errors import ConfigError, TunixError
from tunix_rt.ranks import World

START_SECONDS = 300
"""Within which every rank must have started."""
KEPT_ORDERS = 1000


def open_store(world: World) -> dist.Store:
    """The store of all ranks, which rank 0 or the launcher hosts. Waits for every rank."""
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=START_SECONDS)))
    except (dist.DistError, RuntimeError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "address already in use" in str(error).lower():
            raise ConfigError(
                f"rank {world.rank}: MASTER_PORT: {place} is in use by another program",
                fix="set MASTER_PORT to a free port, or unset it and start with --nproc",
            ) from error
        raise ConfigError(
            f"rank {world.rank} of {world.size} on {world.host}: not every rank has met at {place} within {START_SECONDS} s",
            fix="start WORLD_SIZE processes, with a MASTER_ADDR that every host reaches",
        ) from error
    return dist.PrefixStore("tunix-rt", store)


class Orders:
    """Numbered calls from rank 0 to all others, and their answers."""

    def __init__(self, store: dist.Store, world: World) -> None:
        self.store, self.world = store, world
        self.number = 0
        self.broken: TunixError | None = None
        """Why no answer comes any more."""

    # --- rank 0

    def announce(self, call: str, **arguments: Any) -> int:
        self.number += 1
        self.store.set(f"order/{self.number}", json.dumps([call, arguments]))
        if self.number > KEPT_ORDERS:
            self.store.delete_key(f"order/{self.number - KEPT_ORDERS}")
        return self.number

    def answers(self, name: str, each: Callable[[], None] = lambda: None) -> dict[int, Any]:
        """The answers of the others under `name`, by rank. Calls `each` while it waits."""
        found: dict[int, Any] = {}
        while len(found) < self.world.size - 1:
            for rank in range(1, self.world.size):
                if rank not in found and self.store.check([key := f"{name}/{rank}"]):
                    found[rank] = json.loads(self.store.get(key))
                    self.store.delete_key(key)
            self.raise_failure()
            each()
            if len(found) < self.world.size - 1:
                time.sleep(0.02)
        return found

    def raise_failure(self) -> None:
        """Raise the error that ended another rank, if one did."""
        if self.broken is not None:
            raise self.broken
        for rank in range(1, self.world.size):
            if self.store.check([f"failed/{rank}"]):
                failure = json.loads(self.store.get(f"failed/{rank}"))
                raise _error_of(failure["exit_code"])(
                    f"rank {rank} on {failure['host']}: {failure['problem']}", fix=failure["fix"]
                )

    def end(self, exit_code: int) -> None:
        """The others end with this process, and with its exit code."""
        self.store.set("end", str(exit_code))
        until = time.monotonic() + 5
        while time.monotonic() < until and not all(self.store.check([f"ended/{r}"]) for r in range(1, self.world.size)):
            time.sleep(0.05)

    # --- the others

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next order, whenever it comes."""
        call, arguments = json.loads(self.wait(f"order/{self.number + 1}"))
        self.number += 1
        return call, arguments

    def answer(self, value: Any, name: str = "") -> None:
        """Answer the order in progress, or under another `name`."""
        self.store.set(f"{name or f'answer/{self.number}'}/{self.world.rank}", json.dumps(value))

    def wait(self, key: str) -> str:
        """The value that rank 0 sets, whenever it does. A wait of the store would print a warning for each timeout."""
        pause = 0.0002
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02)
        return self.store.get(key).decode()

    def fail(self, error: TunixError) -> None:
        failure = {"problem": error.problem, "fix": error.fix, "exit_code": error.exit_code, "host": self.world.host}
        self.store.set(f"failed/{self.world.rank}", json.dumps(failure))


def _error_of(exit_code: int) -> type[TunixError]:
    kinds = (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, TunixError))
    return next((kind for kind in kinds if kind.exit_code == exit_code), TunixError)
