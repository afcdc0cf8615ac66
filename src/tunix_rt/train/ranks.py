"""A run on several ranks: rank 0 leads the others through the pipeline, every other one follows."""

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.prepare import prepare
from tunix_rt.engines.base import Engine, leading, load_follower, load_lead
from tunix_rt.errors import ConfigError, InputError, StorageError, TunixError
from tunix_rt.ranks import VISIBLE_SECONDS, World, world
from tunix_rt.runs.ledger import note_ranks
from tunix_rt.storage import storage
from tunix_rt.train.commitment import settled_config
from tunix_rt.train.context import RunContext, find_model, tokenizer_of
from tunix_rt.train.loop import batches_of
from tunix_rt.train.preemption import Preemption

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Ranks:
    """The ranks that this process leads; a single one without a launcher."""

    world: World
    orders: Any = None
    """`engines.torch.orders.Orders`"""
    stop: Preemption | None = None
    """Of the run in progress."""

    def received(self, name: str) -> None:
        """Another rank was sent signal `name`: it stops the run."""
        if self.stop is not None:
            self.stop.request(name)

    def lost(self, error: TunixError) -> None:
        """A rank hangs: `error` is the ending of the run, and of this process."""
        if self.stop is not None:
            self.stop.abandon(error)


@contextlib.contextmanager
def ranks_of(config: RunConfig, *, profile: int = 0) -> Iterator[Ranks]:
    """Meet the other ranks of an engine that shards over ranks; they end with the block."""
    ranks, backend = Ranks(world=world()), config.training.backend
    if ranks.world.size == 1 or not CAPABILITIES[backend].ranks:
        yield ranks
        return
    refuse_for_ranks(config, ranks.world, profile=profile)
    lead = load_lead(backend).meet(ranks.world, on_stop=ranks.received, on_lost=ranks.lost)
    with leading(backend, lead):
        ranks.orders = lead.orders
        _refuse_other_configs(ranks.orders, config)
        yield ranks


def refuse_for_ranks(config: RunConfig, here: World, *, profile: int = 0) -> None:
    """ConfigError for what a run on several ranks does not support."""
    training = config.training
    if profile:
        raise ConfigError(
            f"--profile {profile}: only a run on one device is profiled", fix="leave it out, or start one process"
        )
    if training.load_in_4bit:
        raise ConfigError(
            f"training.load_in_4bit: {here.size} ranks shard their weights, in 16 bits or more",
            fix="leave it out, or start one process",
        )
    if training.memory == "auto":
        raise ConfigError(
            f"training.memory: auto does not choose settings for {here.size} ranks", fix="leave it out above one rank"
        )
    if here.size % training.data_replicas and training.resume_from_checkpoint is None:
        raise ConfigError(
            f"training.data_replicas: {training.data_replicas} does not divide the {here.size} ranks",
            fix="set it to a divisor of their number, or leave it out",
        )
    if (
        int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        raise ConfigError(
            "torchrun --max-restarts: restarted ranks would read the addresses of those before them",
            fix="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun, or use --nproc with --max-restarts",
        )


def _refuse_other_configs(orders: Any, config: RunConfig) -> None:
    """ConfigError that names a setting in which another rank differs."""
    ours = _settings(config)
    for rank in range(1, orders.world.size):
        theirs = json.loads(orders.store.get(f"greeting/{rank}"))
        differing = [name for name in ours if theirs.get(name) != ours[name]]
        if differing:
            name = differing[0]
            raise ConfigError(
                f"rank {rank} has {name}: {theirs.get(name)!r}, rank 0 has {ours[name]!r}",
                fix="start every rank with the same configuration and the same flags",
            )


def _settings(config: RunConfig) -> dict[str, Any]:
    """Of a run, by dotted name."""
    sections = json.loads(settled_config(config).model_dump_json())
    return {f"{section}.{name}": value for section, inner in sections.items() for name, value in inner.items()}


# --- rank 0 ----------------------------------------------------------------------------------------------------------


def announce_run(ranks: Ranks, context: RunContext) -> None:
    """Let every rank prepare the data of the run, which it must find in the same files."""
    if ranks.orders is None:
        return
    marker, token = context.run.root / ".shared.staged", secrets.token_hex(8)
    with storage(marker):
        marker.write_text(token)
    today = context.data.style.template.today
    try:
        number = ranks.orders.announce(
            "run", config=context.config.model_dump_json(), rows=context.batch.rows, folder=str(context.run.root.resolve()),
            token=token, today=None if today is None else today.isoformat(), merkle_root=context.data.merkle_root,
        )  # fmt: skip
        ranks.orders.answers(f"answer/{number}", lambda: context.stop.check(context.start.saved_state, starting=True))
    finally:
        marker.unlink(missing_ok=True)
    logger.info("Ranks: %d", ranks.world.size)


def record_ranks(ranks: Ranks, context: RunContext, engine: Engine) -> None:
    """The host, the GPU and the peak memory so far of every rank, in `processes.json`."""
    if ranks.orders is not None:
        note_ranks(context.run, load_lead(context.config.training.backend).rank_facts(engine))


# --- the others ------------------------------------------------------------------------------------------------------


def follow(config: RunConfig) -> None:
    """Serve rank 0 until it ends this process."""
    here = world()
    logging.basicConfig(level=logging.WARNING, format=f"rank {here.rank} on {here.host}: %(message)s")
    refuse_for_ranks(config, here)
    load_follower(config.training.backend).follow(
        here, {"config": json.dumps(_settings(config))}, lambda: find_model(config)[0], _prepared
    )  # fmt: skip


def _prepared(
    *, config: str, rows: int, folder: str, token: str, today: str | None, merkle_root: str
) -> Any:  # `engines.torch.follow.Inputs`
    """The data of the run, as rank 0 has it."""
    settings = RunConfig.model_validate_json(config)
    _require_shared(Path(folder), token)
    model, shape = find_model(settings)
    tokenizer, facts = tokenizer_of(settings, model, shape)
    day = None if today is None else date.fromisoformat(today)
    data = prepare(settings, tokenizer, facts, lambda *_: None, today=day)
    if data.merkle_root != merkle_root:
        raise InputError(
            f"{data.dataset.key} gives other rows here than on rank 0",
            fix="give every host the same files of data and model",
        )
    return load_follower(settings.training.backend).Inputs(
        batch_of=batches_of(settings, data, tokenizer.pad_id, rows), heldout_rows=data.heldout_rows, pad_id=tokenizer.pad_id,
        decode=tokenizer.decode,
    )  # fmt: skip


def _require_shared(folder: Path, token: str) -> None:
    """StorageError unless the file that rank 0 wrote into `folder` appears here."""
    until = time.monotonic() + VISIBLE_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if (folder / ".shared.staged").read_text() == token:
                return
        time.sleep(0.2)
    raise StorageError(
        f"{folder}: a file that rank 0 has written does not appear here within {VISIBLE_SECONDS:.0f} s",
        fix="give --output a folder that every host shares",
    )
