"""Mutate good bundles many times, one byte or one value each, and count what the verifier accepts: it must accept none.

    python -m benchmarks.mutations [--count 10000] [--seed 0] [--keep DIR] [--write]

The bundles: one of a short run here by each engine, and those in submission_runs that this version wrote.
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

from tests.forging.bases import copy_of, make_good_bundle, make_good_jax_bundle
from tests.forging.mutating import apply, mutations
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the good bundles, used again if they are there")
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {RESULTS.relative_to(ROOT)}")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        bundles = _bundles((asked.keep or Path(scratch)).absolute())
        jobs = _jobs(bundles, asked.count, asked.seed)
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
    for name, folder in found.items():
        if findings := findings_of(folder, None):
            raise SystemExit(f"{name} does not verify by itself: {findings[0]}")
    return found


Job = tuple[str, Path, int, int]


def _jobs(bundles: dict[str, Path], count: int, seed: int) -> list[Job]:
    """So many mutations of each bundle, in pieces that a process takes at a time."""
    share, piece = -(-count // len(bundles)), 100
    jobs, left = [], count
    for number, (name, folder) in enumerate(bundles.items()):
        mine = min(share, left)
        left -= mine
        for at in range(0, mine, piece):
            jobs.append((name, folder, min(piece, mine - at), seed * 1_000_003 + number * 10_007 + at))
    return jobs


def _mutated(job: Job, scratch: Path) -> list[dict[str, Any]]:
    """What became of each mutation of one piece."""
    name, bundle, count, seed = job
    found = []
    if not hasattr(rescore.judge, "cache_info"):  # a pure function, asked of the same answers each time
        rescore.judge = functools.lru_cache(maxsize=None)(rescore.judge)
    with tempfile.TemporaryDirectory(dir=scratch) as room:
        for number, mutation in enumerate(mutations(bundle, count, seed)):
            folder = Path(room) / str(number)
            _copy(bundle, folder)
            apply(mutation, folder)
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


def _copy(bundle: Path, folder: Path) -> None:
    try:
        copy_of(bundle, folder)
    except OSError:  # the repository lies on another volume: no links
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(bundle, folder)


def _told(found: list[list[dict[str, Any]]], bundles: list[str], seed: int, seconds: float) -> dict[str, Any]:
    ones = [one for piece in found for one in piece]
    told = [f"{one['bundle']}: {one['kind']}: {one['file']}: {one['how']}" for one in ones]
    return {
        "schema": "tunix-rt/mutations/1",
        "bundles": bundles,
        "seed": seed,
        "mutations": len(ones),
        "by_kind": dict(sorted(Counter(one["kind"] for one in ones).items())),
        "by_bundle": dict(sorted(Counter(one["bundle"] for one in ones).items())),
        "by_level": dict(sorted(Counter(one["level"] for one in ones).items())),
        "by_check": dict(sorted(Counter(check for one in ones for check in one["checks"]).items())),
        "accepted": [words for words, one in zip(told, ones, strict=True) if one["level"] == "accepted"],
        "crashed": [words for words, one in zip(told, ones, strict=True) if one["level"] == "crashed"],
        "slowest_seconds": round(max(one["seconds"] for one in ones), 3),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
