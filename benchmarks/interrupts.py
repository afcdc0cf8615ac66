"""Stop a run of long steps by a signal at random moments, resume it each time, and compare it with the uninterrupted one.

    python -m benchmarks.interrupts --model SmolLM2-135M-Instruct.Q4_1.gguf [--stops 10] [--seed 1] [--signal SIGINT] [--grace S]

Each process is stopped at a moment drawn from a seed, after at least one step of its own. Of each stop: how long the answer took,
how long the exit, its code, the steps finished before the signal and the step that was saved. Writes
benchmarks/results/interrupts_SIGNAL.json; a kept folder (`--folder`) is continued.
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
import threading
import time
from pathlib import Path
from typing import Any

from docs import markdown
from tests.program import ROOT, command, environment

RESULTS = Path(__file__).parent / "results"
SETTINGS = [
    "training.device=cpu", "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2",
    "training.logging_steps=1", "data.max_length=512", "data.validation_fraction=0", "evaluation.enabled=false",
]  # fmt: skip
STEPS_EACH = 2
"""That a process may take at most before it is stopped."""


def train(options: argparse.Namespace, output: Path, steps: int, *more: str) -> list[str]:
    settings = [*SETTINGS, *([f"training.grace_seconds={options.grace}"] if options.grace else [])]
    named = [word for setting in settings for word in ("--set", setting)]
    return command(
        "train",
        "--model",
        options.model,
        "--data",
        "dev-reasoning-v2",
        "--output",
        output,
        "--max-steps",
        steps,
        *named,
        *more,
    )


def finished_steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def stop_once(arguments: list[str], run: Path, after: int, delay: float, number: signal.Signals) -> dict[str, Any]:
    """Send `number` so many seconds after step `after` is finished; what happened."""
    with subprocess.Popen(
        arguments, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as program:
        answered: list[float] = []
        lines: list[str] = []

        def listen() -> None:
            for line in program.stderr or ():
                if line.startswith(f"{number.name}:"):
                    answered.append(time.monotonic())
                lines.append(line)

        listening = threading.Thread(target=listen)
        listening.start()
        while finished_steps(run) < after:
            if program.poll() is not None:
                raise SystemExit("the run ended by itself:\n" + "".join(lines[-20:]))
            time.sleep(0.05)
        time.sleep(delay)
        finished, began = finished_steps(run), time.monotonic()
        program.send_signal(number)
        program.wait()
        seconds = time.monotonic() - began
        listening.join()
    result = json.loads((run / "result.json").read_text())
    return {
        "delay": round(delay, 2), "finished_before": finished,
        "saved": max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0),
        "answer_seconds": round(answered[0] - began, 3) if answered else None, "exit_seconds": round(seconds, 2),
        "exit_code": program.returncode, "answer": next((line.strip() for line in lines if number.name in line), ""),
        "reason": result["reason"], "warned": [line.strip() for line in lines if "grace_seconds=" in line],
    }  # fmt: skip


def step_seconds(run: Path) -> float:
    """Of the longest step."""
    with (run / "metrics.jsonl").open() as lines:
        return max(json.loads(line)["seconds"] for line in lines)


def losses(run: Path) -> list[str]:
    return [json.loads(line)["loss_hex"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> str:
    with (run / "final_model" / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def complete(arguments: list[str], run: Path) -> None:
    if not (run / "final_model").exists():
        subprocess.run(arguments, env=environment(), cwd=ROOT, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signal", choices=("SIGINT", "SIGTERM"), default="SIGINT")
    parser.add_argument("--grace", type=float, help="training.grace_seconds")
    parser.add_argument("--folder", type=Path, help="kept, and continued where it exists")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="interrupts-"))).absolute()
    rng, number = random.Random(options.seed), signal.Signals[options.signal]
    steps, stops = 2 + options.stops * STEPS_EACH, []
    complete(train(options, folder / "whole", steps), folder / "whole")
    run = folder / "stopped"
    for _ in range(options.stops):
        after = max(2, finished_steps(run) + 1)
        more = ["--resume"] if (run / "precommit.json").exists() else []
        longest = step_seconds(run if more else folder / "whole")
        stops.append(stop_once(train(options, run, steps, *more), run, after, rng.uniform(0, longest), number))
        print(json.dumps(stops[-1]), flush=True)
    complete(train(options, run, steps, "--resume"), run)
    result = {
        "model": Path(options.model).name, "cores": os.cpu_count(), "seed": options.seed, "signal": options.signal,
        "grace_seconds": options.grace, "longest_step_seconds": round(step_seconds(run), 2), "steps": steps, "stops": stops,
        "steps_lost": sum(max(0, stop["finished_before"] - stop["saved"]) for stop in stops),
        "same_losses": losses(run) == losses(folder / "whole"), "same_weights": weights(run) == weights(folder / "whole"),
    }  # fmt: skip
    name = f"interrupts_{options.signal}{'' if options.grace is None else f'_{options.grace:g}s'}.json"
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    columns = ("delay", "finished_before", "saved", "answer_seconds", "exit_seconds", "exit_code")
    print(markdown.table(columns, [tuple(str(stop[one]) for one in columns) for stop in stops]))
    print({name: result[name] for name in ("longest_step_seconds", "steps_lost", "same_losses", "same_weights")})
    return 0 if result["same_weights"] and not result["steps_lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
