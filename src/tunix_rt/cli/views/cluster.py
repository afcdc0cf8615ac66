"""What `tunix-rt plan` prints of several GPUs, beside the memory and the time of a step."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunix_rt.cli.views import text
from tunix_rt.progress import duration

if TYPE_CHECKING:
    from tunix_rt.plan.cluster import Cluster
    from tunix_rt.plan.network import Links


def cluster_lines(found: "Cluster") -> Iterator[str]:
    replicas = f"{found.replicas} replicas of {found.shards}" if found.replicas > 1 else "one replica (FSDP)"
    yield f"{found.ranks:,} GPUs: {replicas}; {_links(found.links)}"
    fewest = "no number of GPUs is enough" if found.fewest is None else f"{found.fewest:,}"
    yield f"fewest GPUs that fit, with the same rows on each: {fewest}"
    hidden = "hidden behind" if found.hidden else "longer than"
    yield (
        f"network: {_seconds(found.network_seconds)} a micro-batch, {hidden} {_seconds(found.computing_seconds)} of computing; "
        f"{found.tokens_to_hide:,} tokens on a GPU hide it, {found.tokens:,} are planned"
    )
    for one in found.choices if len(found.choices) > 1 else ():
        fits = "" if one.fits else ", does not fit"
        size = f"{_seconds(one.seconds)} a step, {text.gib(one.predicted_bytes)}{fits}"
        yield f"  training.data_replicas={one.data_replicas}: {size}"
    restart = found.restart
    yield (
        f"restart: repeats {duration(restart.repeated_seconds)} on average, then takes {duration(restart.start_low)} to "
        f"{duration(restart.start_high)}; each rank has {text.gib(restart.checkpoint_bytes)} of a checkpoint"
    )


def _links(links: "Links") -> str:
    kind = {"nvlink": "NVLink", "pcie": "PCIe"}[links.kind]
    inside = f"{kind} of {links.link_gb_s:g} GB/s{' (assumed)' if links.assumed else ''}" if links.gpus > 1 else ""
    across = f"{links.nodes:,} nodes with {links.network_gbit:,g} Gbit/s each" if links.nodes > 1 else ""
    return ", ".join(filter(None, [inside, across]))


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 0.95 else f"{seconds:.3g} s"
