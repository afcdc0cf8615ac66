"""Ray Train as a launcher: the command of a run on every worker, started again where one is lost.

    python recipes/launch/ray_train.py --workers 2 -- CONFIG --output /shared/runs/first

Ray places the workers and starts them again; each runs `tunix-rt train` in a process of its own, as torchrun does. The run folder
must be on storage that all nodes share.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer

STOPPED = 7
"""Exit code of a run that a signal or its time budget stopped: it is not started again."""


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def work(given: dict[str, list[str]]) -> None:
    """One rank of the run."""
    context = ray.train.get_context()
    own = [ray.util.get_node_ip_address(), free_port()] if context.get_world_rank() == 0 else None
    address, port = broadcast_from_rank_zero(own)
    place = {
        "RANK": context.get_world_rank(), "WORLD_SIZE": context.get_world_size(), "LOCAL_RANK": context.get_local_rank(),
        "MASTER_ADDR": address, "MASTER_PORT": port,
    }  # fmt: skip
    command = [sys.executable, "-m", "tunix_rt", "train", *given["arguments"], "--resume"]
    environment = os.environ | {name: str(value) for name, value in place.items()}
    code = subprocess.run(command, env=environment, cwd=given["folder"][0]).returncode
    if code not in (0, STOPPED):
        raise RuntimeError(f"rank {context.get_world_rank()} ended with exit code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run `tunix-rt train ARGUMENTS` on workers of Ray Train.")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpus-per-worker", type=float, default=0)
    parser.add_argument("--max-failures", type=int, default=3)
    parser.add_argument("--storage", default=None, help="Of Ray itself; shared by all nodes.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    arguments = [one for one in given.arguments if one != "--"]
    resources = {"CPU": 1.0} | ({"GPU": given.gpus_per_worker} if given.gpus_per_worker else {})
    trainer = TorchTrainer(
        work,
        torch_config=TorchConfig(backend="gloo"),  # of the workers; the ranks of the run choose their own
        train_loop_config={"arguments": arguments, "folder": [os.getcwd()]},
        scaling_config=ScalingConfig(
            num_workers=given.workers, use_gpu=given.gpus_per_worker > 0, resources_per_worker=resources,
            placement_strategy="SPREAD",
        ),
        run_config=RunConfig(storage_path=given.storage, failure_config=FailureConfig(max_failures=given.max_failures)),
    )  # fmt: skip
    trainer.fit()


if __name__ == "__main__":
    main()
