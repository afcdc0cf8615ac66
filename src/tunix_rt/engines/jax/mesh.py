"""The device mesh of the JAX engine, and the sharding of its arrays.

A mesh has two axes. Parameters, gradients and optimizer state are sharded over `fsdp` and replicated over `data`; the rows of a
batch are sharded over both. Devices may be those of a topology that is not present.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tunix_rt.errors import ConfigError

DATA, FSDP = "data", "fsdp"
ROWS = (DATA, FSDP)
"""The axes over which rows are sharded."""
EMBEDDINGS = ("embedding", "head")
"""Arrays whose first dimension is the vocabulary: they are sharded along it where possible, so that a device has whole rows."""


def make_mesh(devices: Sequence[Any] | None = None, *, replicas: int = 1) -> Mesh:
    """All of `devices` (by default those of the process): `replicas` of the state, each sharded over the rest."""
    all_devices = list(jax.devices() if devices is None else devices)
    if replicas < 1 or len(all_devices) % replicas:
        raise ConfigError(
            f"training.data_replicas: {replicas} does not divide the {len(all_devices)} devices",
            fix="choose one that does; 1 shards the state over all of them",
        )
    grid = np.asarray(all_devices, dtype=object).reshape(replicas, -1)
    return Mesh(grid, (DATA, FSDP), axis_types=(AxisType.Auto, AxisType.Auto))


def parameter_shardings(mesh: Mesh, tree: Any) -> Any:
    """The sharding of every array of `tree` (or its shape), parameters or optimizer state."""
    return jax.tree_util.tree_map_with_path(
        lambda path, array: NamedSharding(mesh, _spec(mesh, path, array.shape)), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of the micro-batches of a step, [accumulation, rows, tokens]."""
    return NamedSharding(mesh, PartitionSpec(None, ROWS, None))


def rows_for(mesh: Mesh, rows: int) -> int:
    """`rows` padded to a multiple of the number of devices. Rows of padding have weight 0."""
    return -(-rows // mesh.size) * mesh.size


def put(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays on the devices of `sharding`. Of several processes, each places what its own devices hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda array: jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]), tree
    )


def is_of_layers(path: tuple[Any, ...]) -> bool:
    """Whether the array at `path` of a tree is stacked, with the layer as its first dimension: its name follows `layers`. In a
    tree of separate layers, the index of a layer does."""
    keys = [getattr(part, "key", None) for part in path]
    return "layers" in keys[:-1] and isinstance(keys[keys.index("layers") + 1], str)


def sharded_dimension(shape: tuple[int, ...], parts: int, *, first: int = 0, by_rows: bool = False) -> int | None:
    """The dimension, from `first` on, along which an array is sharded: the largest that `parts` divides; `by_rows` the first, if
    it does."""
    divisible = [
        dimension for dimension in range(first, len(shape)) if shape[dimension] and shape[dimension] % parts == 0
    ]
    if by_rows and first in divisible:
        return first
    return max(divisible, key=lambda dimension: (shape[dimension], -dimension), default=None)


def _spec(mesh: Mesh, path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
    stacked = is_of_layers(path)
    by_rows = jax.distributed.is_initialized() or (bool(path) and getattr(path[-1], "key", None) in EMBEDDINGS)
    chosen = sharded_dimension(shape, mesh.shape[FSDP], first=int(stacked), by_rows=by_rows)
    if jax.distributed.is_initialized() and chosen != int(stacked):
        return PartitionSpec()  # the files of a checkpoint have rows of a tensor
    return PartitionSpec() if chosen is None else PartitionSpec(*(None,) * chosen, FSDP)
