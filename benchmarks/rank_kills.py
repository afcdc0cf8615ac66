"""`python -m benchmarks.rank_kills --trials 34 --nproc 2`: kill -9 of random ranks at random moments under `train --nproc`.

`--launcher torchrun` and `--launcher ray` do the same under a torchrun of one's own and under Ray Train on two nodes of this
computer, by a Python that has ray (`--python`).

A trial is one run with `--max-restarts`, of which a rank is killed up to three times. It must end by itself with the metrics,
the last checkpoint and the final model of an undisturbed run, byte for byte, but for seconds and memory. Each trial is a line of
`benchmarks/results/rank_kills.jsonl`, by (launcher, nproc, seed, trial): the command continues after those that are there.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results" / "rank_kills.jsonl"
RAY = Path(__file__).parents[1] / "recipes" / "launch" / "ray_train.py"
Start = Callable[[Path], "subprocess.Popen[bytes]"]
STEPS, SAVED_EVERY, KILLS = 60, 3, 3
TIMED = ("seconds", "peak_bytes", "prev")
"""Of a line of metrics: what a clock or an allocator gives, and the hash of the line before."""
RUN = (
    "demo", "--device", "cpu", "--max-steps", STEPS, "--set", f"training.save_steps={SAVED_EVERY}", "--set",
    "evaluation.enabled=false", "--set", "training.per_device_train_batch_size=2", "--set", "training.compile=false",
)  # fmt: skip
TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=int(sys.argv[1]) - 1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
"""
"""A Ray cluster that ends with its stdin."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=34)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launcher", choices=["nproc", "torchrun", "ray"], default="nproc")
    parser.add_argument("--python", default=sys.executable, help="that has tunix-rt and the launcher")
    parser.add_argument("--kills", type=int, default=KILLS, help="of a trial, at most")
    parser.add_argument("--folder", type=Path, help="for runs; those with a problem stay")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="rank-kills-"))
    done = {(one["launcher"], one["nproc"], one["seed"], one["trial"]) for one in recorded()}
    expected, problems = undisturbed(folder, options.nproc), 0
    for trial in range(options.trials):
        which = {"launcher": options.launcher, "nproc": options.nproc, "seed": options.seed, "trial": trial}
        if tuple(which.values()) in done:
            continue
        run = folder / "-".join(map(str, which.values()))
        with launcher(options.launcher, options.nproc, options.python, options.kills) as start:
            result = killed(run, start, options.nproc, options.kills, random.Random(f"{options.seed}/{trial}"))
        identical = result.pop("facts") == expected
        problems += not identical
        line = {**which, **result, "identical": identical}
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
        with launcher("nproc", nproc, sys.executable, 0) as start:
            start(run).wait()
    return facts(run)


def killed(run: Path, start: Start, nproc: int, most: int, draw: random.Random) -> dict[str, Any]:
    """Kill a random rank after a random number of new steps and a random moment, up to `most` times."""
    process, kills = start(run), []
    for _ in range(most):
        after, moment, rank = (
            steps_of(run) + draw.randint(0, STEPS // (most + 1)),
            draw.random(),
            draw.randrange(nproc),
        )
        while process.poll() is None and (steps_of(run) < after or len(ranks_of(run)) < nproc):
            time.sleep(0.1)
        time.sleep(moment)
        pid = ranks_of(run).get(rank)
        if pid is None or process.poll() is not None:
            break
        before = steps_of(run)
        os.kill(pid, signal.SIGKILL)
        kills.append({"rank": rank, "step": before, "saved": newest(run)})
        while process.poll() is None and ranks_of(run).get(rank) in (pid, None):  # until it is started again
            time.sleep(0.1)
    code = process.wait()
    return {"exit_code": code, "kills": kills, "facts": facts(run)}


@contextlib.contextmanager
def launcher(name: str, nproc: int, python: str, restarts: int) -> Iterator[Start]:
    """A function that starts a run with a launcher. A cluster ends with the block."""
    words, environment = [str(word) for word in RUN], dict(os.environ)
    ranks = {
        "nproc": [python, "-m", "tunix_rt", "train", *words, f"--nproc={nproc}", f"--max-restarts={restarts}"],
        "torchrun": [
            python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}",
            f"--max-restarts={restarts}", "-m", "tunix_rt", "train", *words, "--resume",
        ],
        "ray": [python, str(RAY), "--workers", str(nproc), "--max-failures", str(restarts), "--", *words],
    }  # fmt: skip

    def start(run: Path) -> subprocess.Popen[bytes]:
        run.parent.mkdir(parents=True, exist_ok=True)
        with run.with_suffix(".log").open("ab") as log:
            return subprocess.Popen([*ranks[name], "--output", str(run)], env=environment, stdout=log, stderr=log)

    if name == "torchrun":
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if name != "ray":
        yield start
        return
    command = [python, "-c", TWO_NODES, str(nproc)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        environment["RAY_ADDRESS"] = cluster.stdout.readline().strip()
        yield start
        cluster.stdin.close()


def ranks_of(run: Path) -> dict[int, int]:
    """Process ids of the ranks of a run, by rank, whoever started them."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "tunix_rt" in words[1:4] and str(run) in words and "RANK" in (environment := process.environ()):
                found[int(environment["RANK"])] = process.pid
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
