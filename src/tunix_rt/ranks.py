"""The ranks of a run: the processes that torchrun, srun or another launcher starts for it, and how they share a tensor.

World size and rank are facts of the launch, as the number of visible devices is. Rank 0, the lead, runs the pipeline; the
others, the followers, compute what it requests.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tunix_rt.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process."""


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
    if len(missing) == len(NAMES) or given.get("WORLD_SIZE", "1") == "1":
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


def refuse_ranks() -> None:
    """ConfigError for a run that a launcher starts on several ranks."""
    if (size := world().size) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {size}: a run has one process, and several would write into one folder",
            fix="start it without torchrun; training.backend: jax uses every visible device from one process",
        )


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
