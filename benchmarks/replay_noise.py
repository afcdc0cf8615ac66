"""How far honest steps lie apart on machines that are not quite the same, and how far those of the smallest cheats.

    python -m benchmarks.replay_noise                   on a CPU; writes benchmarks/results/replay_noise.json
    python -m benchmarks.replay_noise --device cuda     on a GPU, against itself and the CPU; ... replay_noise_cuda.json

The shipped model is trained for some steps from the same state: as recorded, once more, on other threads, with other
instructions, by the other engine, on another device; then with each cheat (`benchmarks/replay_noise_worker.py`). Losses, gradient
norms, weights and greedy answers are compared with those of the reference. The tolerances in
`tunix_rt.evidence.replay.compare` come from these figures; the exit code is 1 where an honest variant lies outside them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.replay_noise_worker import CHEATS, OTHER_DROPOUT, OTHER_TYPE, Job
from tunix_rt.evidence.replay.compare import WIDE, loss_apart, relative, tolerance_of
from tunix_rt.evidence.replay.steps import distance

RESULTS = Path(__file__).parent / "results"
ONE_CORE = "one core"
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
OLDEST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
ONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TWO = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
XLA_AVX2 = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}


def jobs_on_a_cpu() -> list[dict[str, Any]]:
    """Each with the class that its honest steps are of, against the first of its group."""
    found: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        group = f"torch, {dtype}"
        one: dict[str, Any] = {"backend": "torch", "device": "cpu", "dtype": dtype}
        found += [
            {**one, "group": group, "class": "REFERENCE", "honest": "as recorded", "cheats": True, "env": TWO},
            {**one, "group": group, "class": "bitwise", "honest": "once more", "env": TWO},
            {**one, "group": group, "class": "same hardware", "honest": "1 thread, not 2", "env": ONE},
            {**one, "group": group, "class": "same hardware", "honest": "AVX2 instructions", "env": TWO | AVX2},
            {**one, "group": group, "class": "same hardware", "honest": "no vector instructions", "env": TWO | OLDEST},
        ]
        jax = {**one, "backend": "jax"}
        stand_in = {"class": "other hardware", "honest": "by the other engine"}  # other kernels for everything
        found.append({**jax, "group": group, **stand_in, "env": {}})
    one = {"backend": "torch", "device": "cpu", "dtype": "float32", "dropout": True, "group": "torch, dropout"}
    found += [
        {**one, "class": "REFERENCE", "honest": "as recorded", "cheats": True, "env": TWO},
        {**one, "class": "same hardware", "honest": "1 thread, not 2", "env": ONE},
    ]
    for dtype in ("float32", "bfloat16"):
        one = {"backend": "jax", "device": "cpu", "dtype": dtype, "group": f"jax, {dtype}"}
        found += [
            {**one, "class": "REFERENCE", "honest": "as recorded", "cheats": dtype == "float32", "env": {}},
            {**one, "class": "bitwise", "honest": "once more", "env": {}},
            {**one, "class": "same hardware", "honest": ONE_CORE, "env": {}},
            {**one, "class": "same hardware", "honest": "AVX2 instructions", "env": XLA_AVX2},
        ]
    return found


def jobs_on_a_gpu() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        one = {"backend": "torch", "device": "cuda", "dtype": dtype, "group": f"GPU, {dtype}"}
        found += [
            {**one, "class": "REFERENCE", "honest": "as recorded", "cheats": True, "env": {}},
            {**one, "class": "same hardware", "honest": "once more, not deterministic", "env": {}},
            {**one, "class": "same hardware", "honest": "deterministic kernels", "deterministic": True, "env": {}},
            {**one, "class": "other hardware", "honest": "on the CPU", "device": "cpu", "env": {}},
        ]
        sure = {**one, "deterministic": True, "group": f"GPU, deterministic, {dtype}"}
        found += [
            {**sure, "class": "REFERENCE", "honest": "as recorded", "env": {}},
            {**sure, "class": "bitwise", "honest": "once more", "env": {}},
        ]
    return found


def start(job: dict[str, Any], folder: Path, steps: int) -> "subprocess.Popen[bytes]":
    names = Job.__slots__
    asked = Job(**{name: job[name] for name in names if name in job and name != "cheats"}, folder=str(folder), steps=steps,
                cheats=job.get("cheats", False))  # fmt: skip
    request = folder.with_suffix(".json")
    request.write_text(json.dumps(asdict(asked)))
    pinned = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if job["honest"] == ONE_CORE else []
    command = [*pinned, sys.executable, "-m", "benchmarks.replay_noise_worker", str(request)]
    return subprocess.Popen(command, env={**os.environ, **job["env"], "HF_HUB_OFFLINE": "1"})


def measured(job: dict[str, Any], reference: Path, found: Path, variant: str, compute: str) -> dict[str, Any]:
    """The numbers of one variant against those of the reference of its group."""
    ours, theirs = (json.loads((folder / "told.json").read_text()) for folder in (reference, found))
    then = {step["step"]: step for step in theirs["steps"]}
    pairs = [(step, then[step["step"]]) for step in ours["steps"] if step["step"] in then]
    kind = "honest" if variant == job["honest"] else "cheat"
    name = job["class"] if kind == "honest" else "REFERENCE"
    weights = distance(
        reference / "first/model.safetensors", reference / "last/model.safetensors", found / "last/model.safetensors"
    )
    told = {
        "group": job["group"], "class": name, "kind": kind, "variant": variant, "compute": compute,
        "loss": max(loss_apart(one["loss"], two["loss"]) for one, two in pairs),
        "grad_norm": max(relative(one["grad_norm"], two["grad_norm"]) for one, two in pairs),
    }  # fmt: skip
    for part in ("texts", "texts_trained"):
        if part in theirs:
            told[part] = sum(a == b for a, b in zip(ours[part], theirs[part], strict=True)) / len(ours[part])
    return told if weights == float("inf") else told | {"weights": weights}


def outside(told: dict[str, Any]) -> list[str]:
    """What of an honest variant lies outside its tolerance."""
    name = told["class"]
    allowed = tolerance_of(name, told["compute"])
    wrong = [part for part in ("loss", "grad_norm", "weights") if told.get(part, 0.0) > getattr(allowed, part)]
    follow = name == "bitwise" or told["compute"] in WIDE  # in 16 bits near ties turn
    return wrong + ["texts"] * (follow and told["texts"] < allowed.texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    output = asked.output or RESULTS / ("replay_noise.json" if asked.device == "cpu" else "replay_noise_cuda.json")
    jobs = jobs_on_a_cpu() if asked.device == "cpu" else jobs_on_a_gpu()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / f"job-{number}" for number in range(len(jobs))]
        if asked.device == "cuda":  # many cores, and one GPU that small steps do not fill
            children = [start(job, folder, asked.steps) for job, folder in zip(jobs, folders, strict=True)]
            codes = [child.wait() for child in children]
        else:
            codes = [start(job, folder, asked.steps).wait() for job, folder in zip(jobs, folders, strict=True)]
        if any(codes):
            print(f"{sum(map(bool, codes))} of {len(codes)} processes failed", file=sys.stderr)
            return 2
        found = list(all_measured(jobs, folders))
        first = json.loads(next(folders[0].glob("as-recorded/told.json")).read_text())
    result = {
        "schema": "tunix-rt/replay-noise/1", "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": first["machine"], "steps": asked.steps, "seconds": round(time.monotonic() - began, 1), "variants": found,
    }  # fmt: skip
    output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return print_table(found)


def all_measured(jobs: list[dict[str, Any]], folders: list[Path]) -> Any:
    reference = Path()
    for job, folder in zip(jobs, folders, strict=True):
        variants = [job["honest"]]
        if job["class"] == "REFERENCE":
            reference = folder / "as-recorded"
            variants = [*CHEATS, OTHER_DROPOUT, OTHER_TYPE] if job.get("cheats") else []
        for variant in variants:
            place = folder / variant.replace(" ", "-").replace("%", "percent")
            if place.exists():
                yield measured(job, reference, place, variant, job["dtype"])


def print_table(found: list[dict[str, Any]]) -> int:
    wrong = 0
    for told in found:
        weights = f"{told['weights']:.1e}" if "weights" in told else "-"
        texts = f"  texts {told['texts']:.0%}, trained {told['texts_trained']:.0%}" if "texts" in told else ""
        said = ""
        if told["kind"] == "honest" and (names := outside(told)):
            said, wrong = f"  OUTSIDE: {', '.join(names)}", wrong + 1
        print(
            f"{told['group']:26} {told['class']:14} {told['kind']:6} {told['variant']:30} loss {told['loss']:.1e}  norm "
            f"{told['grad_norm']:.1e}  weights {weights}{texts}{said}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
