"""The process of one experiment tracker: reads lines of JSON from standard input and logs them with the tracker's own library.

    python -P -m tunix_rt.train.tracker_worker        started by train/trackers.py

The first line names the tracker; every other is `{"step": N, "values": {NAME: NUMBER}}`. A value that the store has from an
earlier process of the run is dropped. The end of the input is the end of the run.
"""

import json
import os
import signal
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

END_SECONDS = 120.0
"""For a library to write everything after the end of the run; then this process ends."""


class Store(Protocol):
    """A tracker's library."""

    @abstractmethod
    def last(self) -> dict[str, int]:
        """The last step of every name that an earlier process has logged."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, about: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer

        self._folder = about["folder"]
        self._last = self._read()
        self._writer = Writer(self._folder)

    def _read(self) -> dict[str, int]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(self._folder, size_guidance={"scalars": 1, "tensors": 1})
        events.Reload()
        tags = events.Tags()
        found = {name: events.Tensors(name)[-1].step for name in tags["tensors"]}
        return found | {name: events.Scalars(name)[-1].step for name in tags["scalars"]}

    def last(self) -> dict[str, int]:
        return self._last

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Has no reader for a store that is not uploaded yet: the last steps are in a file beside it."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        import wandb

        self._steps = Path(about["folder"], "last_steps.json")
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or about["project"], name=about["run"], id=about["id"], resume="allow",
            mode="offline" if about["offline"] else None, dir=Path(about["folder"]).parent, config=about["settings"],
            settings=quiet,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        self._last = self.last()

    def last(self) -> dict[str, int]:
        return json.loads(self._steps.read_text(encoding="utf-8")) if self._steps.is_file() else {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})
        self._last |= dict.fromkeys(values, step)
        staged = self._steps.with_suffix(".staged")
        staged.write_text(json.dumps(self._last), encoding="utf-8")
        staged.replace(self._steps)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    def __init__(self, about: Mapping[str, Any]) -> None:
        folder = Path(about["folder"])
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        mine = folder / "mlflow_run_id"
        if mine.is_file():
            self._id = mine.read_text(encoding="utf-8").strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or about["project"]
        known = self._client.get_experiment_by_name(name)
        local = None if os.environ.get("MLFLOW_TRACKING_URI") else (folder / "artifacts").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifact_location=local)
        self._id = self._client.create_run(experiment, run_name=about["run"]).info.run_id
        mine.write_text(self._id, encoding="utf-8")
        for section, settings in about["settings"].items():
            for key, value in settings.items():
                self._client.log_param(self._id, f"{section}.{key}", str(value)[:500])

    def last(self) -> dict[str, int]:
        names = self._client.get_run(self._id).data.metrics
        return {name: max(one.step for one in self._client.get_metric_history(self._id, name)) for name in names}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    def __init__(self, about: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", about["folder"])
        import trackio

        self._project, self._name = about["project"], f"{about['run']}-{about['id']}"
        self._run = trackio.init(
            project=self._project, name=self._name, config=about["settings"], resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def last(self) -> dict[str, int]:
        from trackio.sqlite_storage import SQLiteStorage

        found: dict[str, int] = {}
        for row in SQLiteStorage.get_logs(self._project, self._name):
            for name in row.keys() - {"step", "timestamp"}:
                found[name] = max(found.get(name, -1), int(row["step"]))
        return found

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


STORES: Mapping[str, Callable[[Mapping[str, Any]], Store]] = {
    "tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio,
}  # fmt: skip
"""By the names of `training.report_to`."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the run decides when it ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    about = json.loads(sys.stdin.readline())
    store = STORES[about["tracker"]](about)
    last = store.last()
    for line in sys.stdin:
        if not line.endswith("\n"):  # the run was killed while it wrote
            break
        sent = json.loads(line)
        step = sent["step"]
        if new := {name: value for name, value in sent["values"].items() if last.get(name, -1) < step}:
            store.log(step, new)
            last |= dict.fromkeys(new, step)
    limit = threading.Timer(END_SECONDS, lambda: os._exit(1))
    limit.daemon = True
    limit.start()
    store.close()


if __name__ == "__main__":
    main()
