"""`tunix-rt train --nproc N`: the same command on N ranks of this computer, by torchrun, with the exit code of the run."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click

from tunix_rt.errors import Preempted
from tunix_rt.ranks import EXIT_FILE, NAMES

GRACE_SECONDS = 300
"""That torchrun leaves the ranks to save what they have, where the configuration gives no grace period."""
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, restarted ranks read the addresses of those before them from torchrun's store, and most restarts fail."""


def launch(arguments: Sequence[str], nproc: str, max_restarts: int, grace_seconds: float | None) -> int:
    """Run `tunix-rt` with these `arguments` on `nproc` ranks. Returns the exit code of the run; 1 where ranks died, and were
    not started again or not often enough."""
    from tunix_rt.doctor.probe import cores

    grace, ranks = GRACE_SECONDS if grace_seconds is None else grace_seconds, count_ranks(nproc)
    with tempfile.TemporaryDirectory(prefix="tunix-rt-ranks-") as folder:
        file = Path(folder) / "exit_code"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            f"--max-restarts={max_restarts}", "-m", "tunix_rt", *arguments,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in NAMES}
        environment |= VARIABLES | {EXIT_FILE: str(file), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace))}
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
        # In a session of its own: Ctrl-C would reach every rank from the terminal, and a second time from torchrun.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        stopped = _forwarding(process)
        code = process.wait()
        recorded = int(file.read_text()) if file.exists() else code
        if stopped:
            return recorded or Preempted.exit_code * (code != 0)
        return recorded if code == 0 else 1


def count_ranks(nproc: str) -> int:
    """The number of ranks; a HardwareError for `gpu` without a GPU that torch can use."""
    if nproc.isdecimal():
        return int(nproc)
    from tunix_rt.doctor.facts import Ask, visible_gpus
    from tunix_rt.doctor.probe import gather_facts
    from tunix_rt.doctor.selection import choose_device

    facts = gather_facts(backend="torch", device="cuda")
    choose_device(Ask(device="cuda"), facts)
    return len(visible_gpus(facts))


def _forwarding(process: subprocess.Popen[bytes]) -> list[int]:
    """Pass signals on to torchrun, which passes them on to the ranks. Returns those received so far."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, receive)
    return received


def without_launch(arguments: Sequence[str]) -> list[str]:
    """The arguments of a rank: without --nproc and --max-restarts."""
    kept, skipped = [], False
    for one in arguments:
        name, equals, _ = one.partition("=")
        if skipped:
            skipped = False
        elif name in ("--nproc", "--max-restarts"):
            skipped = not equals
        else:
            kept.append(one)
    return kept


class Ranks(click.ParamType):  # type: ignore[type-arg]
    """A number of ranks, or `gpu`: one for each visible GPU."""

    name = "ranks"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value != "gpu" and not (value.isdecimal() and 1 <= int(value) <= 1024):
            self.fail(f"{value!r} is no number of ranks: write 8, or gpu for one for each visible GPU", param, ctx)
        return value
