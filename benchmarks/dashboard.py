"""CPU time of the dashboard's server: python -m benchmarks.dashboard runs | plan

`runs`: a folder of 1,000 runs (200 copies of each run of record, by hard links), served by `tunix-rt dashboard` in a fresh
process, five times: until the address is printed, until the list is answered for the first time, and once more with nothing
changed, whole and as the page's script polls it. `plan`: the page of every preset on every device, and of settings that do not
fit. CPU time is what the kernel counts for all threads of the process; compiled Python files are kept, as where it is
installed. Writes benchmarks/results/dashboard_{runs,plan}.json.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RECORD = ROOT / "submission_runs"
COPIES, STARTS, LOOKS = 200, 5, 15
PLANS = (
    "model=gemma-2b&on=rtx4090", "model=gemma-2b&on=rtx4090&batch_size=64&max_length=8192",
    "model=gemma-3-1b&on=rtx4090&max_length=32768", "model=gemma-7b&on=rtx4090", "model=gemma-7b&on=v5e&backend=tunix",
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

    def cpu_seconds(self) -> float:
        threads = Path(f"/proc/{self._child.pid}/task").iterdir()
        return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9

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
        server.get("plan?model=gemma-2b&on=rtx4090")
        for path in PLANS:
            taken = [server.get(f"plan?{path}")[0] for _ in range(LOOKS)]
            found[path] = {"median": statistics.median(taken), "most": max(taken)}
    return {"cpu_seconds": found}


def main(words: list[str]) -> None:
    if words not in (["runs"], ["plan"]):
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory(dir=ROOT) as scratch:
        found = (measure_runs if words == ["runs"] else measure_plan)(Path(scratch))
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    report = json.dumps({**machine, **found}, indent=1)
    (RESULTS / f"dashboard_{words[0]}.json").write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
