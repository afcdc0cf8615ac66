"""`python -m benchmarks.rank_kills --trials 34 --nproc 2`: kill -9 of random ranks at random moments under `train --nproc`.

A trial is one run with `--max-restarts`, of which a rank is killed up to three times. It must end by itself with the metrics,
the last checkpoint and the final model of an undisturbed run, byte for byte, but for seconds and memory. Each trial is a line of
`benchmarks/results/rank_kills.jsonl`, by (nproc, seed, trial): the command continues after those that are there.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results" / "rank_kills.jsonl"
STEPS, SAVED_EVERY, KILLS = 60, 3, 3
TIMED = ("seconds", "peak_bytes", "prev")
"""Of a line of metrics: what a clock or an allocator gives, and the hash of the line before."""
RUN = (
    "train", "demo", "--device", "cpu", "--max-steps", STEPS, "--set", f"training.save_steps={SAVED_EVERY}", "--set",
    "evaluation.enabled=false", "--set", "training.per_device_train_batch_size=2", "--set", "training.compile=false",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=34)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for runs; those with a problem stay")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="rank-kills-"))
    done = {(one["nproc"], one["seed"], one["trial"]) for one in recorded()}
    expected, problems = undisturbed(folder, options.nproc), 0
    for trial in range(options.trials):
        if (options.nproc, options.seed, trial) in done:
            continue
        result = killed(
            folder / f"trial-{options.seed}-{trial}", options.nproc, random.Random(f"{options.seed}/{trial}")
        )
        identical = result.pop("facts") == expected
        problems += not identical
        line = {"nproc": options.nproc, "seed": options.seed, "trial": trial, **result, "identical": identical}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
        print(json.dumps(line), flush=True)
    lines = recorded()
    kills = sum(len(one["kills"]) for one in lines)
    print(
        f"{kills} kills in {len(lines)} runs: {sum(one['identical'] for one in lines)} runs end as the undisturbed one"
    )
    return 1 if problems else 0


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def undisturbed(folder: Path, nproc: int) -> dict[str, str]:
    run = folder / f"undisturbed-{nproc}"
    if not (run / "SHA256SUMS").exists():
        start(run, nproc, restarts=0).wait()
    return facts(run)


def killed(run: Path, nproc: int, draw: random.Random) -> dict[str, Any]:
    """Kill a random rank after a random number of new steps and a random moment, up to `KILLS` times."""
    process, kills = start(run, nproc, restarts=KILLS), []
    for _ in range(KILLS):
        after, moment, rank = (
            steps_of(run) + draw.randint(0, STEPS // (KILLS + 1)),
            draw.random(),
            draw.randrange(nproc),
        )
        while process.poll() is None and (steps_of(run) < after or len(ranks_of(process)) < nproc):
            time.sleep(0.02)
        time.sleep(moment)
        pid = ranks_of(process).get(rank)
        if pid is None or process.poll() is not None:
            break
        before = steps_of(run)
        os.kill(pid, signal.SIGKILL)
        kills.append({"rank": rank, "step": before, "saved": newest(run)})
        while process.poll() is None and ranks_of(process).get(rank) in (pid, None):  # until it is started again
            time.sleep(0.02)
    code = process.wait()
    return {"exit_code": code, "kills": kills, "facts": facts(run)}


def start(run: Path, nproc: int, *, restarts: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tunix_rt", *map(str, RUN), "--output", str(run), "--nproc", str(nproc)]
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([*command, "--max-restarts", str(restarts)], stdout=log, stderr=log)


def ranks_of(process: subprocess.Popen[bytes]) -> dict[int, int]:
    """Process ids of the ranks, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
        try:
            environment = child.environ()
            if "RANK" in environment and child.cmdline()[1:4] == ["-u", "-m", "tunix_rt"]:
                found[int(environment["RANK"])] = child.pid
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def newest(run: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((int(one.name.removeprefix("step-")) for one in run.glob("checkpoints/step-*")), default=0)


def facts(run: Path) -> dict[str, str]:
    """Hashes of what must be equal: the metrics without times, the last checkpoint, the final model."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    plain = [{name: value for name, value in line.items() if name not in TIMED} for line in lines]
    files = [*run.glob(f"checkpoints/step-{STEPS:06d}/*.safetensors"), *run.glob("final_model/*.safetensors")]
    hashes = {str(one.relative_to(run)): hashlib.sha256(one.read_bytes()).hexdigest() for one in sorted(files)}
    return {"metrics": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest(), **hashes}


if __name__ == "__main__":
    sys.exit(main())
