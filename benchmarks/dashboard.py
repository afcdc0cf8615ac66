"""CPU time, delays and memory of the dashboard's server: python -m benchmarks.dashboard PART

`runs`: a folder of 1,000 runs (200 copies of each run of record, by hard links), served by `tunix-rt dashboard` in a fresh
process, five times: until the address is printed, until the list is answered for the first time, and once more with nothing
changed, whole and as the page's script polls it. `plan`: settings that were not planned before, of models and devices on which
they fit and do not fit, and the part with every device. `steps`: a run of a million steps, a thousand of them spikes: the first
picture in five fresh processes, the exact curves, ranges of them, and how many spikes the buckets contain. `start`: a fresh
process until its first page, and its end after Ctrl-C. `live`: steps written into a run folder, and when each of 20 clients that
poll as the page's script does has it. `attacks`: 12,000 hostile requests over sockets. CPU time is what the kernel counts for
all threads of the process; compiled Python files are kept, as where it is installed.
Writes benchmarks/results/dashboard_PART.json.
"""

import html
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tunix_rt.dashboard.charts import label
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.index import run_id

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RECORD = ROOT / "submission_runs"
COPIES, STARTS, LOOKS = 200, 5, 15
STEPS, SPIKES, TABS, UPDATES, POLL_SECONDS, ATTACKS = 1_000_000, 1000, 20, 60, 0.5, 12_000
PLANS = (
    "model=gemma-2b&on=rtx4090", "model=gemma-2b&on=rtx4090&training.per_device_train_batch_size=64",
    "model=gemma-3-1b&on=rtx4090&training.dtype=bfloat16", "model=gemma-4-31b&on=h200", "model=gemma-4-e4b&on=t4",
    "model=gemma-2b&on=tpu-v5e-8&training.backend=jax",
)  # fmt: skip


def thousand_runs(place: Path) -> Path:
    for run in sorted(path for path in RECORD.iterdir() if path.is_dir()):
        for number in range(COPIES):
            skipped = shutil.ignore_patterns("*.safetensors")
            shutil.copytree(run, place / f"{run.name}-{number:03}", copy_function=os.link, ignore=skipped)
    return place


class Server:
    """A `tunix-rt dashboard` without key, and its CPU time."""

    def __init__(self, folder: Path, compiled: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONPYCACHEPREFIX": str(compiled)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        words = [sys.executable, "-m", "tunix_rt", "dashboard", str(folder), "--no-open", "--no-key"]
        self._child = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._child.stdout is not None
        self.address = self._child.stdout.readline().split()[-1]
        self.start_seconds = self.cpu_seconds()

    @property
    def pid(self) -> int:
        return self._child.pid

    def cpu_seconds(self) -> float:
        return time.clock_gettime(~self._child.pid << 3 | 2)  # of all threads, also of those that have ended

    def get(self, path: str, **headers: str) -> tuple[float, str]:
        """CPU seconds for one answer, and its ETag."""
        before = self.cpu_seconds()
        request = urllib.request.Request(self.address + path, headers={"accept-encoding": "gzip", **headers})
        try:
            with urllib.request.urlopen(request) as answer:
                answer.read()
                etag = answer.headers["etag"]
        except urllib.error.HTTPError as error:
            if error.code != 304:
                raise
            etag = error.headers["etag"]
        time.sleep(0.05)
        return self.cpu_seconds() - before, etag

    def read(self, path: str) -> bytes:
        with urllib.request.urlopen(self.address + path) as answer:
            return bytes(answer.read())

    def stop(self) -> float:
        """Seconds from SIGINT to the end of the process."""
        begun = time.monotonic()
        self._child.send_signal(signal.SIGINT)
        self._child.wait()
        return time.monotonic() - begun

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        self._child.wait()


def measure_runs(place: Path) -> dict[str, Any]:
    runs, starts = thousand_runs(place / "runs"), []
    with Server(runs, place / "compiled") as server:  # compiles
        server.get("")
    for _ in range(STARTS):
        with Server(runs, place / "compiled") as server:
            first, _ = server.get("")
            whole = [server.get("")[0] for _ in range(LOOKS)]
            _, part = server.get("", Part="live")
            polled = [server.get("", Part="live", **{"If-None-Match": part})[0] for _ in range(LOOKS)]
            touched = runs / "m40_v1-000" / "result.json"
            text = touched.read_text()
            touched.unlink()
            touched.write_text(text)
            starts.append(
                {"start": server.start_seconds, "first_page": first, "together": server.start_seconds + first,
                 "warm_median": statistics.median(whole), "warm_most": max(whole),
                 "polled_median": statistics.median(polled), "one_changed": server.get("")[0]}
            )  # fmt: skip
    return {"runs": 5 * COPIES, "cpu_seconds": starts}


def measure_plan(place: Path) -> dict[str, Any]:
    found = {}
    with Server(RECORD, place / "compiled") as server:
        server.get("plan?model=gpt2&on=rtx4090")
        for path in PLANS:
            lengths = [512 + 16 * number for number in range(LOOKS)]
            answers = [server.get(f"plan?{path}&data.max_length={length}")[0] for length in lengths]
            last = f"plan?{path}&data.max_length={lengths[-1]}&devices=all"
            found[path] = {**spread(answers), "every_device": server.get(last, Part="devices")[0]}
    return {"cpu_seconds": found}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "most": max(values)}


def measure_steps(place: Path) -> dict[str, Any]:
    root, rng = place / "runs" / "million", random.Random(24)
    root.mkdir(parents=True)
    spikes = {step: rng.uniform(50, 1000) for step in rng.sample(range(1, STEPS + 1), SPIKES)}
    first = json.loads((RECORD / "m39_v1" / "metrics.jsonl").read_text().splitlines()[0])
    line = re.sub('"(%[^"]+)"', r"\1", json.dumps({**first, "step": "%(step)d", "loss": "%(loss)r"})) + "\n"
    with (root / "metrics.jsonl").open("w") as file:
        losses = ((step, spikes.get(step, 1 + rng.random())) for step in range(1, STEPS + 1))
        file.writelines(line % {"step": step, "loss": loss} for step, loss in losses)
    shutil.copytree(RECORD / "m39_v1", root.parent / "small")
    path, cpu, wall = f"runs/{run_id('million')}", [], []
    for _ in range(STARTS):
        with Server(root.parent, place / "compiled") as server:
            server.get(f"runs/{run_id('small')}")  # imports
            before, begun = server.cpu_seconds(), time.monotonic()
            server.read(path)
            wall.append(time.monotonic() - begun)
            cpu.append(server.cpu_seconds() - before)
            while b"are a sample" in (page := server.read(path)):
                time.sleep(POLL_SECONDS)
            exact = server.cpu_seconds() - before
            zooms = [server.get(f"{path}?from={100 * number + 1}&to={600_000 - number}")[0] for number in range(LOOKS)]
    return {
        "steps": STEPS, "first_picture": spread(cpu), "first_picture_wall": spread(wall), "exact": exact, "zoom": spread(zooms),
        "spikes": SPIKES, "spikes_shown": sum(is_shown(page.decode(), step, spikes) for step in spikes),
    }  # fmt: skip


def is_shown(page: str, step: int, spikes: dict[int, float]) -> bool:
    """Whether the bucket of `step` in the chart of the loss goes up to its loss, or to a higher one of the same bucket."""
    chart = html.unescape(page[page.index('id="chart-loss"') :])
    for bucket in re.search(r'data-points="(.*?)"', chart, re.DOTALL)[1].split("\n")[0].split("|")[1:]:  # type: ignore[index]
        _, where, value = bucket.split(";")
        low, _, high = where.replace(",", "").partition(" to ")
        if int(low) <= step <= int(high or low):
            highest = max(loss for other, loss in spikes.items() if int(low) <= other <= int(high or low))
            return value.endswith(f" to {label(highest)})")
    return False


def measure_start(place: Path) -> dict[str, Any]:
    found = []
    with Server(RECORD, place / "compiled") as server:  # compiles
        server.get("")
    for _ in range(STARTS):
        with Server(RECORD, place / "compiled") as server:
            page = server.get("")[0]
            found.append({"start": server.start_seconds, "together": server.start_seconds + page, "end": server.stop()})
    return {"cpu_seconds_and_seconds_to_end": found}


def measure_live(place: Path) -> dict[str, Any]:
    """Clients look every half second, each with the ETag of its last answer."""
    run = RunDir(Path(shutil.copytree(RECORD / "m39_v1", place / "runs" / "growing")))
    lines, rng = run.metrics.read_text().splitlines(keepends=True), random.Random(24)
    run.result.unlink()
    run.metrics.write_text("".join(lines[:5]))
    written: dict[int, float] = {}
    seen: list[dict[int, float]] = [{} for _ in range(TABS)]

    def look(tab: dict[int, float], address: str) -> None:
        etag = ""
        while len(written) < UPDATES or max(tab, default=0) < max(written):
            time.sleep(POLL_SECONDS)
            headers = {"Part": "live", "If-None-Match": etag} if etag else {"Part": "live"}
            try:
                with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
                    text, etag = answer.read().decode(), answer.headers["etag"]
            except urllib.error.HTTPError as error:
                if error.code != 304:
                    raise
                continue
            if shown := re.search(r"<dt>steps</dt><dd>(\d+)", text):
                tab.setdefault(int(shown[1]), time.monotonic())

    with run.locked(), Server(run.root.parent, place / "compiled") as server:
        address = f"{server.address}runs/{run_id('growing')}"
        tabs = [threading.Thread(target=look, args=(tab, address)) for tab in seen]
        for tab in tabs:
            tab.start()
        cpu, begun = server.cpu_seconds(), time.monotonic()
        for line in lines[5 : 5 + UPDATES]:
            with run.metrics.open("a") as file:
                file.write(line)
            written[json.loads(line)["step"]] = time.monotonic()
            time.sleep(rng.uniform(0.3, 1.5))
        share = (server.cpu_seconds() - cpu) / (time.monotonic() - begun)
        for tab in tabs:
            tab.join()
    late = sorted(
        min(moment for other, moment in tab.items() if other >= step) - since
        for tab in seen
        for step, since in written.items()
    )
    found = {"clients": TABS, "updates": UPDATES, "cpu_share": share, "delay_seconds": spread(late)}
    return {**found, "within_a_second": sum(one <= 1 for one in late) / len(late)}


def measure_attacks(place: Path) -> dict[str, Any]:
    from tests.contract.test_dashboard_app import SECRET, attack

    (place / "secret.txt").write_text(SECRET)
    shutil.copytree(RECORD / "m39_cpu_v1", place / "runs" / "one")
    with Server(place / "runs", place / "compiled") as server:
        begun, port = time.monotonic(), urllib.parse.urlsplit(server.address).port
        assert port is not None
        statuses = attack(port, run_id("one"), ATTACKS)
        seconds = time.monotonic() - begun
        server.get("")
        status = Path(f"/proc/{server.pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) // 1024
    return {
        "requests": ATTACKS,
        "seconds": seconds,
        "answers": dict(sorted(statuses.items())),
        "leaks": 0,
        "peak_mib": peak,
    }


def main(words: list[str]) -> None:
    parts = {
        "runs": measure_runs, "plan": measure_plan, "steps": measure_steps, "start": measure_start, "live": measure_live,
        "attacks": measure_attacks,
    }  # fmt: skip
    if len(words) != 1 or words[0] not in parts:
        raise SystemExit(__doc__)
    (ROOT / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as scratch:  # on the disk of the runs, for hard links
        found = parts[words[0]](Path(scratch))
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    report = json.dumps({**machine, **found}, indent=1)
    (RESULTS / f"dashboard_{words[0]}.json").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
