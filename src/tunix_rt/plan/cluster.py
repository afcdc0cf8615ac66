"""What a plan adds for several GPUs: the fewest that fit, whether the network is hidden, replicas, and the cost of a restart."""

from dataclasses import dataclass, replace
from math import ceil

from tunix_rt.config.capabilities import capabilities_of
from tunix_rt.config.settings import SAVE_MINUTES, RunConfig
from tunix_rt.errors import ConfigError
from tunix_rt.plan.fit import predict_as_run, verdict
from tunix_rt.plan.footprint import footprint_of
from tunix_rt.plan.fsdp import Rank
from tunix_rt.plan.knobs import REPLICAS, replicas_of, with_copied
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.network import Links, Traffic, network_time, traffic_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.speed import StepTime, rates_for, time_of_plan
from tunix_rt.plan.target import Target
from tunix_rt.plan.timing import LOADING_SECONDS, WRITTEN_BYTES_PER_SECOND

MOST_GPUS = 4096
"""Searched for the fewest that fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The run with another number of data-parallel replicas, everything else as written."""

    data_replicas: int
    predicted_bytes: int
    """Of the fullest GPU."""
    fits: bool
    seconds: float
    """Of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What it costs that a rank fails."""

    checkpoint_bytes: int
    """That each rank writes and reads."""
    repeated_seconds: float
    """Training since the last checkpoint, on average."""
    start_low: float
    """Seconds until the ranks train again, as a range."""
    start_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A run on several GPUs, one rank on each."""

    links: Links
    ranks: int
    replicas: int
    shards: int
    """Ranks of a replica."""
    fewest: int | None
    """GPUs on which the run fits, with the same rows on each and without replicas; None: not on any number."""
    traffic: Traffic
    network_seconds: float
    """Of the messages of a micro-batch."""
    computing_seconds: float
    """Of its computation."""
    tokens: int
    """Of a micro-batch on one GPU."""
    tokens_to_hide: int
    """As many take as long to compute as the messages take."""
    choices: tuple[Replicas, ...]
    """One replica, and one in each node; the number as written first."""
    restart: Restart

    @property
    def hidden(self) -> bool:
        return self.network_seconds <= self.computing_seconds


def refuse_cluster(config: RunConfig, target: Target) -> None:
    """Refuse what is not sharded over GPUs by torchrun."""
    training, links = config.training, target.links
    engine = capabilities_of(training)
    if links is None:
        return
    if engine.compiles_whole_step:
        raise ConfigError(
            f"--gpus {links.gpus}: the {engine.title} engine shards a run over the devices of one process",
            fix="leave out --backend, or name a slice of TPUs: --on tpu-v5e-8",
        )
    if target.device != "cuda":
        raise ConfigError(
            f"--gpus {links.gpus}: {target.name} is no GPU", fix="name the GPUs, as --on 8xh100 or --on h100-sxm"
        )
    if links.ranks % training.data_replicas:
        raise ConfigError(
            f"training.data_replicas: {training.data_replicas} does not divide the {links.ranks} ranks",
            fix="set it to a divisor of their number, or leave it out",
        )
    if training.load_in_4bit:
        raise ConfigError(
            "training.load_in_4bit: weights of 4 bits are not sharded",
            fix="leave it out: weights are sharded in 16 bits",
        )


def cluster_of(
    config: RunConfig, shape: ModelShape, target: Target, plan: MemoryPlan, time: StepTime, *, steps: int | None
) -> Cluster | None:
    """None for one device. `plan` and `time` are those of the run as written, `steps` its length."""
    links, training = target.links, config.training
    if links is None:
        return None
    run = Rank.of(footprint_of(shape, training, target.device), links.ranks, training.data_replicas)
    network = network_time(run, links)
    micro_batches = training.gradient_accumulation_steps
    computing = (time.seconds - time.parts["update"] - time.parts.get("network", 0.0)) / micro_batches
    fixed = time.parts["launches"] / micro_batches
    tokens = -(-plan.rows // plan.devices) * plan.row_tokens
    return Cluster(
        links=links,
        ranks=links.ranks,
        replicas=run.replicas,
        shards=links.ranks // run.replicas,
        fewest=_fewest(config, shape, target, steps),
        traffic=traffic_of(run),
        network_seconds=network.seconds,
        computing_seconds=computing,
        tokens=tokens,
        tokens_to_hide=ceil(tokens * max(0.0, network.seconds - fixed) / (computing - fixed)),
        choices=tuple(_choices(config, shape, target, steps)),
        restart=_restart(config, run, links, time),
    )


def _choices(config: RunConfig, shape: ModelShape, target: Target, steps: int | None) -> list[Replicas]:
    found, rates = [], rates_for(target)
    ranks = target.links.ranks if target.links else 1
    for settings in replicas_of(config, target, ranks):
        changed = with_copied(config, settings)
        plan = predict_as_run(shape, changed, target, devices=ranks, steps=steps)
        fit = verdict(plan, target)
        seconds = time_of_plan(plan, shape, changed, rates, target).seconds
        number = changed.training.data_replicas
        found.append(
            Replicas(data_replicas=number, predicted_bytes=fit.predicted_bytes, fits=fit.fits, seconds=seconds)
        )
    return found


def _fewest(config: RunConfig, shape: ModelShape, target: Target, steps: int | None) -> int | None:
    """By bisection. A single GPU has no buffers for messages. One GPU more may need a few MiB more on each, as shards are cut by
    rows: close to the limit, a smaller number may fit too."""
    config = with_copied(config, {REPLICAS: 1})

    def fits(ranks: int) -> bool:
        alone = replace(target, links=None) if ranks == 1 else target
        return verdict(predict_as_run(shape, config, alone, devices=ranks, steps=steps), target).fits

    if fits(1):
        return 1
    low, high = 2, MOST_GPUS
    if not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _restart(config: RunConfig, run: Rank, links: Links, time: StepTime) -> Restart:
    training = config.training
    between = 60 * (training.save_minutes or SAVE_MINUTES)
    if training.save_steps:
        by_steps = training.save_steps * time.seconds
        between = min(between, by_steps) if training.save_minutes else by_steps
    on_node = run.checkpoint * links.gpus
    low, high = (fixed + on_node / rate for fixed, rate in zip(LOADING_SECONDS, WRITTEN_BYTES_PER_SECOND, strict=True))
    return Restart(checkpoint_bytes=run.checkpoint, repeated_seconds=between / 2, start_low=low, start_high=high)
