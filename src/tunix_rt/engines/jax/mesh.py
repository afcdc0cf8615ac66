"""How the JAX engine lays its arrays over devices.

A mesh has two axes. Over `fsdp` parameters, gradients and optimizer state are cut, so that each device keeps its part; over
`data` they are copied. The rows of a batch are split over both. Devices may be those of a topology that is not present.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_rt.errors import ConfigError

DATA, FSDP = "data", "fsdp"
ROWS = (DATA, FSDP)
"""The axes over which rows are split."""
TABLES = ("embedding", "head")
"""Arrays whose first dimension is the vocabulary: by it they are cut where that goes, so that a device has whole rows."""


def make_mesh(devices: Sequence[Any] | None = None, *, replicas: int = 1) -> Mesh:
    """All of `devices` (of this process's platform, unless given): `replicas` copies of the state, each cut over the rest."""
    found = list(jax.devices() if devices is None else devices)
    if replicas < 1 or len(found) % replicas:
        raise ConfigError(
            f"training.data_replicas: {replicas} does not divide the {len(found)} devices",
            fix="choose one that does; 1 cuts the state over all of them",
        )
    laid_out = np.asarray(found, dtype=object).reshape(replicas, -1)
    return Mesh(laid_out, (DATA, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def parameter_shardings(mesh: Mesh, tree: Any) -> Any:
    """For every array of `tree` (or its shape), parameters or optimizer state, how it lies on the devices."""
    return jax.tree_util.tree_map_with_path(
        lambda path, array: NamedSharding(mesh, _cut(mesh, path, array.shape)), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of the micro-batches of a step, [accumulation, rows, tokens]."""
    return NamedSharding(mesh, PartitionSpec(None, ROWS, None))


def rows_for(mesh: Mesh, rows: int) -> int:
    """`rows` filled up to a multiple of the number of devices. Rows that are filled in have weight 0."""
    return -(-rows // mesh.size) * mesh.size


def is_of_layers(path: tuple[Any, ...]) -> bool:
    """Whether an array at `path` of a tree is stacked, its first dimension the layer: it lies in `layers` by its name. Of a
    model that has its layers apart, the number of a layer comes first."""
    keys = [getattr(part, "key", None) for part in path]
    return "layers" in keys[:-1] and isinstance(keys[keys.index("layers") + 1], str)


def cut_dimension(shape: tuple[int, ...], parts: int, *, first: int = 0, is_table: bool = False) -> int | None:
    """The dimension along which an array is cut into `parts`, from `first` on: the largest that they divide."""
    divisible = [
        dimension for dimension in range(first, len(shape)) if shape[dimension] and shape[dimension] % parts == 0
    ]
    if is_table and first in divisible:
        return first
    return max(divisible, key=lambda dimension: (shape[dimension], -dimension), default=None)


def _cut(mesh: Mesh, path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
    stacked = is_of_layers(path)
    is_table = bool(path) and getattr(path[-1], "key", None) in TABLES
    chosen = cut_dimension(shape, mesh.shape[FSDP], first=int(stacked), is_table=is_table)
    return PartitionSpec() if chosen is None else PartitionSpec(*(None,) * chosen, FSDP)
