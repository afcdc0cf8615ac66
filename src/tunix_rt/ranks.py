"""The ranks of a run: the processes that torchrun, srun or another launcher starts for it, and how they share a tensor.

World size and rank are facts of the launch, as the number of visible devices is. Rank 0, the lead, runs the pipeline; the
others, the followers, compute what it requests.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tunix_rt.errors import ConfigError, StorageError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process."""
TIMEOUT = "TUNIX_RT_RANK_TIMEOUT"
"""Variable of the environment: seconds after which a rank is given up that others wait for."""
VISIBLE_SECONDS = 30.0
"""For what rank 0 has written to be seen by another host: network file systems cache folders for a while."""
EXIT_FILE = "TUNIX_RT_EXIT_FILE"
"""Variable of the environment under --nproc: the file into which rank 0 writes the exit code of the run."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks of its run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    restarts: int = 0
    """How often torchrun has started this process again."""

    @property
    def is_lead(self) -> bool:
        return self.rank == 0

    @cached_property
    def host(self) -> str:
        return socket.gethostname()


ALONE = World()


def world(environment: Mapping[str, str] | None = None) -> World:
    """The world of this process, a single rank without a launcher. ConfigError where only some of the variables are set."""
    given = os.environ if environment is None else environment
    missing = [name for name in NAMES if not given.get(name)]
    if len(missing) == len(NAMES):
        return ALONE
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {given.get('WORLD_SIZE', 'not set')}, and {', '.join(missing)} is not set",
            fix="start the ranks with torchrun or --nproc, or unset the variables of torch.distributed",
        )
    numbers = {}
    for name in (*NAMES[:3], "TORCHELASTIC_RESTART_COUNT"):
        text = given.get(name, "0")
        if not text.isdecimal():
            raise ConfigError(f"{name} is {text!r}, not a number", fix="start the ranks with torchrun or --nproc")
        numbers[name] = int(text)
    rank, size, local_rank, restarts = numbers.values()
    if rank >= size:
        raise ConfigError(f"RANK is {rank}, and WORLD_SIZE is {size}", fix="start the ranks with torchrun or --nproc")
    return World(rank=rank, size=size, local_rank=local_rank, restarts=restarts)


def rank_timeout(otherwise: float) -> float:
    return float(os.environ.get(TIMEOUT) or otherwise)


def process_exit_code(code: int) -> int:
    """The exit code of this process. Under --nproc rank 0 leaves that of the run to the launcher, and what need not be tried
    again ends all ranks with 0, so that torchrun does not start them again."""
    path = os.environ.get(EXIT_FILE)
    if path is None or code == 1:  # a rank that was lost, or a defect
        return code
    if world().is_lead:
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(code))
    return 0


def wait_for(folder: Path) -> Path:
    """`folder`, once it is visible here: rank 0 may have made it on another host."""
    until = time.monotonic() + VISIBLE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > until:
            raise StorageError(
                f"{folder}, which rank 0 made, is not visible on {socket.gethostname()}",
                fix="give --output a folder that every host shares",
            )
        time.sleep(0.1)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows of a tensor that a rank has: `rows` rows of dimension 0 from `first` on. They are contiguous in the tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    first: int
    rows: int
    everywhere: bool = False
    """Every rank has the whole tensor."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Part":
        return cls(shape=shape, first=0, rows=shape[0] if shape else 0, everywhere=True)


def part_of(shape: tuple[int, ...], shard: int, shards: int) -> Part:
    """The part of shard number `shard`: equal numbers of rows, but for the last ones, which may have fewer or none."""
    each = -(-shape[0] // shards)
    first = min(shape[0], shard * each)
    return Part(shape=shape, first=first, rows=min(each, shape[0] - first))
