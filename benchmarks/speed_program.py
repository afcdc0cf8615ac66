"""`tunix-rt train` as a child process, timed from outside and by the metrics it writes."""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed_jobs import dense_product, flops_of, make_job, median, start_afresh
from tunix_rt.config.load import load_config
from tunix_rt.config.settings import RunConfig

GIB = 2**30
SETTLED = 5
"""Steps at the beginning that are left out of the median: compilation, and memory that is taken for the first time."""


def command(options: argparse.Namespace, output: Path, more: Sequence[str]) -> list[str]:
    settings = [f"data.dataset={options.data}", f"model.tokenizer_name_or_path={options.tokenizer}", *more]
    settings += [*_on_a_cpu(options), *options.set]
    said = [part for setting in settings for part in ("--set", setting)]
    line = [sys.executable, "-m", "tunix_rt", "train", str(options.config), "--output", str(output), *said]
    return [*line, "--profile", str(options.profile)] if options.profile else line


def _on_a_cpu(options: argparse.Namespace) -> list[str]:
    return (
        ["training.device=cpu", "training.dtype=float32", "training.master_dtype=null"]
        if options.device == "cpu"
        else []
    )


@contextlib.contextmanager
def running(line: list[str], environment: dict[str, str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The program, with everything it says in `log`; killed at the end when it still runs."""
    with log.open("wb") as said:
        child = subprocess.Popen(line, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def steps_seen(child: "subprocess.Popen[bytes]", metrics: Path, steps: int, limit: float) -> list[float]:
    """Seconds from now until each of the first `steps` lines of the metrics was there."""
    began, ends = time.perf_counter(), []
    while len(ends) < steps:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        now = time.perf_counter() - began
        ends += [now] * (lines - len(ends))
        if child.poll() is not None or now > limit:
            break
        time.sleep(0.01)
    return ends[:steps]


def records_of(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.exists():
        return []
    return [
        json.loads(line)
        for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]


def until_first_step(log: Path) -> list[str]:
    """What was said before the first step and with it; paths of this machine by their last names."""
    if not log.exists():
        return []
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [re.sub(r"(?<![^\s=])[^\s=]*/", "", line)[:200] for line in text.splitlines() if line.strip()]
    first = next((place for place, line in enumerate(lines) if "step 1/" in line), len(lines))
    return lines[: first + 1]


def compile_seconds(said: Sequence[str]) -> float | None:
    """What the program says its compiler took."""
    found = [re.search(r"Compiled in ([\d.]+) s", line) for line in said]
    return next((float(match[1]) for match in found if match), None)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def program(options: argparse.Namespace, record: Any, more: Sequence[str]) -> None:
    """Run a configuration once; the median of its steps after the first few is the figure."""
    changes = [*more, *_on_a_cpu(options), *options.set]
    config = load_config(options.config, overrides=changes)
    steps = config.training.max_steps or 1
    record.write(dense_tflops_before=dense_product())
    start_afresh()  # the program is to have the device to itself
    with tempfile.TemporaryDirectory(prefix="speed-program-") as folder:
        output, said = Path(folder) / "run", Path(folder) / "said.txt"
        with running(command(options, output, more), dict(os.environ), said) as child:
            ends = steps_seen(child, output / "metrics.jsonl", steps, options.budget_seconds)
            if options.whole and len(ends) == steps:
                child.wait(timeout=options.budget_seconds)
        taken = records_of(output / "metrics.jsonl")
        before = until_first_step(output / "training_log.txt")
        shown = until_first_step(said)
        if len(ends) < steps:
            print(tail(said), flush=True)
            record.found["error"] = f"{len(ends)} of {steps} steps were taken"
        profile = output / "profile" / "profile.json"
        if profile.exists():
            record.found["profile"] = json.loads(profile.read_text(encoding="utf-8"))
            print((output / "profile" / "profile.md").read_text(encoding="utf-8"), flush=True)
    found = program_figures(taken, ends)
    if options.start_as and ends and taken:
        note_start(
            record.path.with_name("speed_start.json"),
            options.start_as,
            record.found,
            ends,
            taken,
            before,
            shown,
        )
    found["ended"] = (
        "left to end by itself" if options.whole else "ended from outside after its last step, before it saved"
    )
    found |= {"before_the_first_step": before, "compile_seconds": compile_seconds(before)}
    record.write(**found, dense_tflops_after=dense_product())
    if "tokens_per_second" in found:
        dense = median([*record.found["dense_tflops_before"], *record.found["dense_tflops_after"]])
        tflops = found["tokens_per_second"] * flops_per_token(options, config, changes) / 1e12
        record.write(tflops=tflops, share_of_dense=tflops / dense)
        print(
            f"{options.config.stem}: {found['tokens_per_second']:,.0f} tokens/s, median of {len(taken) - SETTLED} steps, "
            f"{tflops:,.1f} TFLOP/s, {tflops / dense:.1%} of the dense product; peak {found['peak_bytes'] / GIB:.2f} GiB; first "
            f"step after {found['first_step_after_seconds']:.1f} s, itself {found['first_step_seconds']:.1f} s, compiling "
            f"{found['compile_seconds']} s; loss {taken[0]['loss']:.4f} -> {taken[-1]['loss']:.4f}"
        )
    print(f"wrote {record.path.name}")


def flops_per_token(options: argparse.Namespace, config: RunConfig, changes: Sequence[str]) -> float:
    """Of the program's data, by the batches of a few steps."""
    job = make_job(
        config.model.model_name_or_path or "", config_file=options.config, data=options.data, tokenizer=options.tokenizer,
        device=options.device, rows=config.training.per_device_train_batch_size, length=config.data.max_length, steps=20,
        warmup=1, changes=changes,
    )  # fmt: skip
    return sum(flops_of(job, batch) for batch in job.batches) / sum(batch.tokens for batch in job.batches)


def program_figures(taken: list[dict[str, Any]], ends: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "metrics": [{k: v for k, v in step.items() if k != "prev"} for step in taken],
        "seen_at": ends,
    }
    later = taken[SETTLED:]
    if not later:
        return found
    whole = (ends[len(taken) - 1] - ends[SETTLED - 1]) if len(ends) >= len(taken) else None
    return found | {
        "tokens_per_second": median([step["tokens"] / step["seconds"] for step in later]),
        "tokens_per_second_by_the_wall": sum(step["tokens"] for step in later) / whole if whole else None,
        "step_seconds": median([step["seconds"] for step in later]),
        "first_step_seconds": taken[0]["seconds"],
        "first_step_after_seconds": ends[0],
        "peak_bytes": max(step["peak_bytes"] for step in taken),
    }


def start_figures(
    ends: list[float], taken: list[dict[str, Any]], before: list[str], shown: list[str]
) -> dict[str, Any]:
    return {
        "first_step_after_seconds": ends[0], "seen_at": ends[:5], "first_step_seconds": taken[0]["seconds"],
        "before_the_first_step": before, "compile_seconds": compile_seconds(before), "shown": shown,
    }  # fmt: skip


def note_start(
    path: Path,
    name: str,
    found: dict[str, Any],
    ends: list[float],
    taken: list[dict[str, Any]],
    before: list[str],
    shown: list[str],
) -> None:
    """What `start` would write of this run, which was one anyway: `name` says whether the caches were cold or warm."""
    known = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.exists()
        else {"about": found["about"], "settings": found["settings"], "starts": {}}
    )
    known["starts"][name] = start_figures(ends, taken, before, shown)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def start(options: argparse.Namespace, record: Any, more: Sequence[str]) -> None:
    """Command to first step: with every cache empty, then with what the first run left there."""
    record.write(starts={})
    with tempfile.TemporaryDirectory(prefix="speed-start-") as folder:
        caches = {
            "XDG_CACHE_HOME": f"{folder}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }  # fmt: skip
        for name in ("cold", "warm"):
            output, said = Path(folder) / name, Path(folder) / f"{name}.txt"
            with running(command(options, output, more), os.environ | caches, said) as child:
                ends = steps_seen(child, output / "metrics.jsonl", options.steps, options.budget_seconds)
            taken = records_of(output / "metrics.jsonl")
            if not ends or not taken:
                print(tail(said), flush=True)
                record.found["starts"][name] = {"error": "no step was taken"}
                break
            before = until_first_step(output / "training_log.txt")
            record.found["starts"][name] = start_figures(ends, taken, before, until_first_step(said))
            print(
                f"{name}: first step after {ends[0]:.1f} s, itself {taken[0]['seconds']:.1f} s, compiling "
                f"{compile_seconds(before)} s",
                flush=True,
            )
            record.write()
    print(f"wrote {record.path.name}")
