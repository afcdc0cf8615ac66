"""Mutate good bundles many times, one byte or one value each, and count what the verifier accepts: it must accept none.

    python -m benchmarks.mutations [--count 10000] [--resealed 2000] [--seed 0] [--keep DIR] [--write]

The bundles: one of a short run here by each engine, and those in submission_runs that this version wrote, real ones of a GPU
among them. `--resealed` more have everything that follows from the changed value made anew, as a forger would; these are counted
apart, for some values are the run's own word and cannot be found out.
"""

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tests.forging.bases import REAL, copy_of, make_good_bundle, make_good_jax_bundle
from tests.forging.mutating import KINDS, RESEALED, apply, mutations
from tests.program import ROOT
from tunix_rt.evidence import rescore
from tunix_rt.evidence.claims import SCHEMA
from tunix_rt.evidence.verifying import findings_of

RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
LARGEST_BYTES = 20 * 2**20
"""Of a bundle that is taken: its files are read once per mutation."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--resealed", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the good bundles, used again if they are there")
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {RESULTS.relative_to(ROOT)}")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        bundles = _bundles((asked.keep or Path(scratch)).absolute())
        jobs = _jobs(bundles, asked.count, asked.seed, KINDS) + _jobs(bundles, asked.resealed, asked.seed, (RESEALED,))
        with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
            found = pool.map(partial(_mutated, scratch=Path(scratch)), jobs, chunksize=1)
    told = _told(found, list(bundles), asked.seed, time.monotonic() - began)
    print(json.dumps(told, indent=2))
    if asked.write:
        RESULTS.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if told["accepted"] or told["crashed"] else 0


def _bundles(scratch: Path) -> dict[str, Path]:
    """Name -> folder. Each verifies before anything is done to it."""
    found = {
        "torch on the CPU": make_good_bundle(scratch / "torch"),
        "JAX on the CPU": make_good_jax_bundle(scratch / "jax"),
    }
    for told in sorted((ROOT / "submission_runs").glob("*/bundle.json")):
        size = sum(path.stat().st_size for path in told.parent.rglob("*") if path.is_file())
        if json.loads(told.read_text(encoding="utf-8"))["schema"] == SCHEMA and size <= LARGEST_BYTES:
            found[told.parent.name] = told.parent
    if missing := set(REAL) - found.keys():
        raise SystemExit(f"not among the bundles: {', '.join(sorted(missing))}")
    for name, folder in found.items():
        if findings := findings_of(folder, None):
            raise SystemExit(f"{name} does not verify by itself: {findings[0]}")
    return found


Job = tuple[str, Path, int, int, tuple[str, ...]]


def _jobs(bundles: dict[str, Path], count: int, seed: int, kinds: tuple[str, ...]) -> list[Job]:
    """So many mutations of each bundle, in pieces that a process takes at a time."""
    share, piece = -(-count // len(bundles)), 100
    jobs, left = [], count
    for number, (name, folder) in enumerate(bundles.items()):
        mine = min(share, left)
        left -= mine
        for at in range(0, mine, piece):
            jobs.append((name, folder, min(piece, mine - at), seed * 1_000_003 + number * 10_007 + at, kinds))
    return jobs


def _mutated(job: Job, scratch: Path) -> list[dict[str, Any]]:
    """What became of each mutation of one piece. One that resealing undid is left out: there is nothing to find."""
    name, bundle, count, seed, kinds = job
    found = []
    if not hasattr(rescore.judge, "cache_info"):  # a pure function, asked of the same answers each time
        rescore.judge = functools.lru_cache(maxsize=None)(rescore.judge)
    with tempfile.TemporaryDirectory(dir=scratch) as room:
        for number, mutation in enumerate(mutations(bundle, count, seed, kinds)):
            folder = Path(room) / str(number)
            copy_of(bundle, folder)
            if not apply(mutation, folder):
                shutil.rmtree(folder)
                continue
            began = time.monotonic()
            one: dict[str, Any] = {"bundle": name, "kind": mutation.kind, "file": mutation.file, "how": mutation.how}
            try:
                findings = findings_of(folder, None)
                one["checks"] = sorted({finding.check for finding in findings})
                one["level"] = min((finding.level for finding in findings), default="accepted")
            except Exception:  # noqa: BLE001  whatever it is: a verifier that ends by it is what is looked for
                one["level"], one["checks"] = "crashed", [traceback.format_exc().splitlines()[-1]]
            one["seconds"] = time.monotonic() - began
            found.append(one)
            shutil.rmtree(folder)
    return found


def _told(found: list[list[dict[str, Any]]], bundles: list[str], seed: int, seconds: float) -> dict[str, Any]:
    every = [one for piece in found for one in piece]
    ones, resealed = ([one for one in every if (one["kind"] == RESEALED) == apart] for apart in (False, True))
    return {
        "schema": "tunix-rt/mutations/2",
        "bundles": bundles,
        "seed": seed,
        "mutations": len(ones),
        "by_kind": dict(sorted(Counter(one["kind"] for one in ones).items())),
        "by_bundle": dict(sorted(Counter(one["bundle"] for one in ones).items())),
        "by_level": dict(sorted(Counter(one["level"] for one in ones).items())),
        "by_check": dict(sorted(Counter(check for one in ones for check in one["checks"]).items())),
        "accepted": _words(ones, "accepted"),
        "crashed": _words(every, "crashed"),
        "resealed": {
            "mutations": len(resealed),
            "by_bundle": _shares(resealed, "bundle"),
            "by_file": _shares(resealed, "file"),
            "accepted": _words(resealed, "accepted"),
        },
        "slowest_seconds": round(max(one["seconds"] for one in every), 3),
        "seconds": round(seconds, 1),
    }


def _words(ones: list[dict[str, Any]], level: str) -> list[str]:
    return [f"{one['bundle']}: {one['kind']}: {one['file']}: {one['how']}" for one in ones if one["level"] == level]


def _shares(ones: list[dict[str, Any]], name: str) -> dict[str, dict[str, int]]:
    """How many were tried and accepted of each bundle or file."""
    tried = Counter(one[name] for one in ones)
    accepted = Counter(one[name] for one in ones if one["level"] == "accepted")
    return {key: {"tried": count, "accepted": accepted[key]} for key, count in sorted(tried.items())}


if __name__ == "__main__":
    sys.exit(main())
