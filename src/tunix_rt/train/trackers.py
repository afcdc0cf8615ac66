"""Experiment trackers (`training.report_to`): each in a process of its own, so that none can stop, slow or change a run.

A tracker gets the values of a step as one line of JSON through a pipe, and keeps its store below the run folder unless its own
environment variables name a server. `train/tracker_worker.py` is the other end.
"""

import contextlib
import importlib.util
import json
import logging
import netrc
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import urlsplit

from tunix_rt.config.settings import RunConfig
from tunix_rt.engines.base import Step
from tunix_rt.errors import ConfigError
from tunix_rt.models.secrets import redacted
from tunix_rt.runs.folder import TRACKER_FOLDERS, RunDir
from tunix_rt.scoring.score import Scores
from tunix_rt.storage import storage, write_text

logger = logging.getLogger(__name__)

WORKER = "tunix_rt.train.tracker_worker"
PROJECT = "tunix-rt"
MOST_WAITING_BYTES = 8 * 2**20
"""Lines that a tracker has not read yet; beyond, it is given up."""
LAST_WAIT_SECONDS = 30.0
"""For a tracker to finish after a completed run, and after one that stops."""
STOPPING_WAIT_SECONDS = 2.0


def require_trackers(config: RunConfig) -> None:
    """Refuse a tracker that is not installed, before anything that takes time."""
    for name in config.training.trackers:
        if importlib.util.find_spec(name) is None:
            fix = f"pip install 'tunix-rt[{name}]', or leave it out"
            raise ConfigError(f"training.report_to: {name} is not installed", fix=fix)


@dataclass(slots=True, kw_only=True)
class Tracker:
    """The pipe to one tracker. The first failure is logged, and the rest of the run is not sent."""

    name: str
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]
    waiting: bytearray = field(default_factory=bytearray)
    failed: bool = False

    def send(self, line: Mapping[str, Any]) -> None:
        """Write without blocking; what the pipe does not take waits for the next step."""
        if self.failed or self.process.stdin is None:
            return
        self.waiting += json.dumps(line).encode() + b"\n"
        try:
            del self.waiting[: os.write(self.process.stdin.fileno(), self.waiting)]
        except BlockingIOError:
            if len(self.waiting) > MOST_WAITING_BYTES:
                self._give_up(f"it has not read {len(self.waiting) / 2**20:.0f} MiB of metrics")
        except OSError:  # it has ended
            self._give_up(self._last_error())

    def close(self, seconds: float) -> None:
        """Send what waits, and wait for the tracker to finish. One that takes longer ends by itself."""
        if self.process.stdin is None or self.failed:
            return
        os.set_blocking(self.process.stdin.fileno(), len(self.waiting) < 2**16)  # as much as an empty pipe takes
        with contextlib.suppress(OSError):
            if self.waiting:
                os.write(self.process.stdin.fileno(), self.waiting)
        self.process.stdin.close()
        try:
            if self.process.wait(seconds):
                self._give_up(self._last_error())
        except subprocess.TimeoutExpired:
            logger.info("Tracker %s is still writing after %.0f s; it continues in the background", self.name, seconds)
        self.errors.close()

    def _last_error(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.errors.seek(0)
        lines = self.errors.read()[-10_000:].decode(errors="replace").strip().splitlines()
        return redacted(lines[-1][:300]) if lines else f"exit code {self.process.returncode}"

    def _give_up(self, why: str) -> None:
        self.failed = True
        self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.errors.close()
        logger.warning("Tracker %s has failed and gets no more metrics; the run continues: %s", self.name, why)


@dataclass(frozen=True, slots=True)
class Trackers:
    """Every tracker of a run."""

    open: Sequence[Tracker] = ()

    def step(self, step: Step) -> None:
        speed = step.tokens / step.seconds if step.seconds else 0.0
        values = {name: getattr(step, name) for name in ("loss", "lr", "grad_norm")} | {"tokens_per_second": speed}
        self._send(step.step, {f"train/{name}": value for name, value in values.items()})

    def heldout(self, step: int, loss: float) -> None:
        self._send(step, {"heldout/loss": loss})

    def scores(self, step: int, scores: Scores | None) -> None:
        if scores is not None:
            names = ("accuracy", "accuracy_lenient", "format_rate")
            self._send(step, {f"evaluation/{name}": getattr(scores, name) for name in names})

    def _send(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self.open:
            tracker.send({"step": step, "values": values})


NO_TRACKERS = Trackers()


@contextlib.contextmanager
def tracked(config: RunConfig, run: RunDir) -> Iterator[Trackers]:
    """The trackers of a run, closed however it ends. A resumed run continues the curves: a tracker drops what it has."""
    trackers = Trackers([_start(name, config, run) for name in config.training.trackers])
    seconds = STOPPING_WAIT_SECONDS
    try:
        yield trackers
        seconds = LAST_WAIT_SECONDS
    finally:
        for tracker in trackers.open:
            tracker.close(seconds)


def _start(name: str, config: RunConfig, run: RunDir) -> Tracker:
    folder = run.root / TRACKER_FOLDERS[name]
    with storage(folder):
        folder.mkdir(exist_ok=True)
        identity = folder / "run_id"
        if not identity.is_file():
            write_text(identity, uuid.uuid4().hex[:12])
        run_id = identity.read_text(encoding="utf-8").strip()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the tracker
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors,
        env=environment, cwd=folder, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    tracker = Tracker(name=name, process=process, errors=errors)
    offline = name == "wandb" and not _wandb_has_a_key()
    if offline:
        logger.info("Tracker wandb: no key here, writing offline; later: wandb sync %s", folder / "offline-run-*")
    tracker.send({
        "tracker": name, "folder": str(folder.absolute()), "run": run.root.absolute().name, "id": run_id, "project": PROJECT,
        "offline": offline, "settings": config.model_dump(mode="json"),
    })  # fmt: skip
    return tracker


def _wandb_has_a_key() -> bool:
    """Whether wandb would not ask for a key: its variables are set, or `wandb login` has written one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or None).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname in hosts
