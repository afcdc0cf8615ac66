"""What the ranks of a sharded step send, and how long that takes, as NCCL's rings send it.

In a ring each rank passes on all but its own part of a message, so a ring over several nodes enters each node once: what counts
there is the bandwidth of the node, all of its adapters together.
"""

from dataclasses import dataclass

from tunix_rt.accelerators import nodes
from tunix_rt.plan.fsdp import Rank

BUS_SHARE, LEAST_BUS_SHARE, MOST_BUS_SHARE = 0.7, 0.5, 0.94
"""Fraction of the published bandwidth that a collective reaches, and its range: 200 of 400 GB/s in an all-gather over 256 H100
(NVIDIA/nccl#1218) to 46 to 48 of 50 GB/s for an adapter (NVIDIA/nccl-tests#290). The first is a choice between them."""
RING_SECONDS = 8.4e-6
"""Time of a ring without steps, and below of one step of it: NCCL's own model (src/graph/tuning.cc, ring with Simple)."""
STEP_SECONDS = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 9.6e-6}
UNKNOWN_LINK, UNKNOWN_LINK_GB_S = "pcie", 16.0
"""Assumed between GPUs of one node, if the catalogue has no such node: PCIe 4.0 x16 through the memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The GPUs of a run and what connects them."""

    gpus: int
    """Of each node."""
    nodes: int = 1
    kind: str = UNKNOWN_LINK
    """Between the GPUs of a node: `nvlink` or `pcie`."""
    link_gb_s: float = UNKNOWN_LINK_GB_S
    """Of one GPU to the others of its node, in one direction."""
    network_gbit: float | None = None
    """Of one node to the others, in one direction, all its adapters together; None: not known."""
    assumed: bool = True
    """The catalogue has no such node."""

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def network_gb_s(self) -> float:
        return (self.network_gbit or 0) / 8

    def bandwidth(self, across: int, sharing: int = 1) -> float:
        """Bytes per second of a ring over `across` nodes, of which `sharing` pass each node."""
        within = self.link_gb_s * 1e9
        return within if across == 1 else min(within, self.network_gb_s * 1e9 / sharing)

    def waiting(self, members: int, across: int) -> float:
        """Seconds until the first byte has passed a ring of `members` on `across` nodes."""
        inside = (members - across) * STEP_SECONDS[self.kind]
        return RING_SECONDS + inside + (across - 1) * STEP_SECONDS["network"]


def links_of(accelerator: str | None, *, gpus: int, nodes_: int = 1, network_gbit: float | None = None) -> Links:
    """The links of `gpus` GPUs of this kind in each node: those of a node in the catalogue, or assumed ones."""
    node = next((one for one in nodes() if one.accelerator == accelerator and gpus <= one.gpus), None)
    if node is None:
        return Links(gpus=gpus, nodes=nodes_, network_gbit=network_gbit)
    published = network_gbit or (node.network_gbit and node.network_gbit * gpus / node.gpus)  # an adapter for each GPU
    return Links(
        gpus=gpus, nodes=nodes_, kind=node.link, link_gb_s=node.link_gb_s, network_gbit=published, assumed=False
    )  # fmt: skip


# --- a micro-batch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of the messages of one micro-batch in which a rank takes part."""

    gathered: int
    """Layers for the forward and for the backward pass, the rest once."""
    reduced: int
    all_reduced: int
    """Sums of shards between replicas."""
    gathers: int
    reductions: int


def traffic_of(run: Rank) -> Traffic:
    layers = run.groups
    trained = [group for group in (*layers, run.outside) if group.reducing]
    return Traffic(
        gathered=2 * sum(group.gathered for group in layers) + run.outside.gathered,
        reduced=sum(group.reducing for group in trained),
        all_reduced=sum(group.reduced for group in trained) if run.replicas > 1 else 0,
        gathers=2 * len(layers) + 1,
        reductions=len(trained),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkTime:
    """Seconds of the messages of one micro-batch."""

    seconds: float
    ends: float
    """Of the first and the last message, during which nothing is computed."""


def network_time(run: Rank, links: Links, share: float = BUS_SHARE) -> NetworkTime:
    """At this `share` of the published bandwidths."""
    traffic, shards = traffic_of(run), max(1, links.ranks // run.replicas)
    across = -(-shards // links.gpus)
    each = (shards - 1) / shards / (share * links.bandwidth(across))
    waiting = links.waiting(shards, across)
    seconds = (traffic.gathered + traffic.reduced) * each + (traffic.gathers + traffic.reductions) * waiting
    ends = (run.outside.gathered + run.groups[0].gathered + run.outside.reducing) * each + 3 * waiting
    if run.replicas > 1:
        spanned = min(run.replicas, links.nodes)
        passed = 2 * (run.replicas - 1) / run.replicas
        each = passed / (share * links.bandwidth(spanned, min(shards, links.gpus)))
        waiting = 2 * links.waiting(run.replicas, spanned)
        seconds += traffic.all_reduced * each + traffic.reductions * waiting
        ends += run.outside.reduced * each + waiting
    return NetworkTime(seconds=seconds, ends=ends)


def idle_seconds(
    run: Rank, links: Links, computing: float, fastest: float, micro_batches: int
) -> tuple[float, float, float]:
    """Seconds of a step in which a GPU waits for messages: at least, as predicted, at most. They pass while it computes a
    micro-batch, for `computing` seconds or `fastest` times that, but for the first and the last; at most none does."""
    least, predicted = network_time(run, links, MOST_BUS_SHARE), network_time(run, links)
    each = (
        max(least.ends, least.seconds - fastest * computing),
        max(predicted.ends, predicted.seconds - computing),
        network_time(run, links, LEAST_BUS_SHARE).seconds,
    )
    return each[0] * micro_batches, each[1] * micro_batches, each[2] * micro_batches
