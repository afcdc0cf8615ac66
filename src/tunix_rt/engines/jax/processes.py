"""A JAX run on several processes: joining them, and the model on the devices of one."""

import atexit
import logging
import os
import socket
import sys
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from tunix_rt.engines.jax.load import Engine
from tunix_rt.engines.jax.mesh import FSDP, make_mesh, parameter_shardings
from tunix_rt.errors import HardwareError
from tunix_rt.models.secrets import one_line
from tunix_rt.ranks import World, process_exit_code

JOIN_SECONDS = 300


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def join(coordinator: str, world: World) -> None:
    """Make the devices of all processes those of jax. It must not take SIGTERM for itself: a run stops by its own handler."""
    jax.config.update("jax_enable_preemption_service", False)
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, num_processes=world.size, process_id=world.rank, cluster_detection_method="deactivate",
            initialization_timeout=JOIN_SECONDS, shutdown_timeout_seconds=10,
        )  # fmt: skip
    except RuntimeError as error:
        raise HardwareError(
            f"process {world.rank} of {world.size} did not join {coordinator}: {one_line(error)}",
            fix="open the ports between the hosts; a proxy in the environment may be in the way",
        ) from error


def gathered(engine: Engine) -> Engine:
    """The model with all its weights on the devices of this process. Every process calls it; the array is gathered by array."""
    own = make_mesh(engine.own_devices)
    grid = np.asarray(engine.devices, dtype=object).reshape(jax.process_count(), -1)
    each = Mesh(grid, ("process", FSDP), axis_types=(AxisType.Auto, AxisType.Auto))

    def gather(array: Any, sharding: NamedSharding) -> Any:
        copies = jax.jit(_same, out_shardings=NamedSharding(each, sharding.spec))(array)
        parts = [shard.data for shard in copies.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

    params = jax.tree.map(gather, engine.params, parameter_shardings(own, engine.params))
    return replace(engine, params=params, mesh=own, plan=None, step=None)


def _same(array: Any) -> Any:
    return array


def exit_without_shutdown(exit_code: int) -> None:
    """Let this process end with `exit_code` and without the shutdown of jax.distributed, which aborts if another one is gone."""

    def leave() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(process_exit_code(exit_code))

    if jax.distributed.is_initialized():
        atexit.register(leave)  # called before what jax has registered
