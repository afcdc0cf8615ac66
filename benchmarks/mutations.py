"""Mutate good bundles, one byte or one value each, and count what `examine` accepts: python -m benchmarks.mutations --write

    --count 10000      without resealing: none may be accepted
    --resealed 2000    one value changed and everything sealed again: accepted only if the claims it touches are self-reported

The bundles: a short run by each engine, made here, and those of submission_runs up to 20 MiB. Bundles and finished chunks are
kept in .cache/mutations: an interrupted run resumes there, unless code or bundles have changed. The exit code is 1 for a defect.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docs import markdown
from tests.forging.bases import copy_of, make_good_bundle, make_good_jax_bundle
from tests.forging.mutating import RESEALED, UNSEALED, Mutation, apply, mutations, touched
from tests.program import ROOT
from tunix_rt.errors import TunixError
from tunix_rt.evidence import data_checks
from tunix_rt.evidence.examine import Examination, examine
from tunix_rt.runs.checksums import SUMS
from tunix_rt.runs.source import package_hash
from tunix_rt.storage import json_text, sha256_file

RESULTS = Path("benchmarks/results/mutations.json")
PLACE = ROOT / ".cache" / "mutations"
CHUNK = 100
MOST_BYTES = 20 * 2**20
LABELS = ("self-reported", "consistent", "recomputed", "not checked")
COMMAND = "scripts/mutations --write"
REMEMBERED = ((data_checks, "judge"), (data_checks, "_samples"))
"""Pure functions that get the same answers and traces for each mutation."""

Row = dict[str, Any]
Job = tuple[str, str, int, int, tuple[str, ...]]
"""Name of the bundle, its folder, number of mutations, seed, kinds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--resealed", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write the counts to {RESULTS}")
    options = parser.parse_args()
    began = time.monotonic()
    bundles = _bundles(PLACE)
    jobs = _jobs(bundles, options.count, options.seed, UNSEALED)
    jobs += _jobs(bundles, options.resealed, options.seed, (RESEALED,))
    rows = [row for chunk in _finished(jobs, bundles) for row in chunk]
    found = summary(rows, list(bundles), options.seed) | {"seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(found, indent=2))
    if options.write:
        (ROOT / RESULTS).write_text(json_text(found), encoding="utf-8")
    return 1 if found["defects"] else 0


def _bundles(place: Path) -> dict[str, Path]:
    """Name -> folder. Each verifies before anything is done to it."""
    fresh = place / _source()
    found = {"torch": make_good_bundle(fresh / "torch"), "jax": make_good_jax_bundle(fresh / "jax")}
    for manifest in sorted((ROOT / "submission_runs").glob("*/run_manifest.json")):
        if sum(path.stat().st_size for path in manifest.parent.rglob("*") if path.is_file()) <= MOST_BYTES:
            found[manifest.parent.name] = manifest.parent
    good = {}
    for name, folder in found.items():
        try:
            examined = examine(folder)
        except TunixError as error:  # a run of another format
            print(f"{name} is left out: {error.problem}", file=sys.stderr)
            continue
        if examined.level != "L1":
            raise SystemExit(f"{name} does not verify by itself: {examined.findings[:1]}")
        good[name] = folder
    return good


def _jobs(bundles: Mapping[str, Path], count: int, seed: int, kinds: tuple[str, ...]) -> list[Job]:
    """An equal share of each bundle, in chunks."""
    jobs: list[Job] = []
    share, left = -(-count // len(bundles)), count
    for number, (name, folder) in enumerate(bundles.items()):
        mine = min(share, left)
        left -= mine
        for at in range(0, mine, CHUNK):
            jobs.append((name, str(folder), min(CHUNK, mine - at), seed * 10**9 + number * 10**6 + at, kinds))
    return jobs


def _finished(jobs: list[Job], bundles: Mapping[str, Path]) -> Iterator[list[Row]]:
    """The rows of every chunk; those of an interrupted run are read from its file."""
    roots = [_source(), *(sha256_file(folder / SUMS) for folder in bundles.values())]
    roots.append(hashlib.sha256(b"".join(path.read_bytes() for path in _own_code())).hexdigest())
    file = PLACE / f"{hashlib.sha256(json.dumps(roots).encode()).hexdigest()[:16]}.jsonl"
    kept = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("]]")] if file.exists() else []
    known = {json.dumps(job): rows for job, rows in kept}
    todo = [job for job in jobs if json.dumps(job) not in known]
    yield from (known[json.dumps(job)] for job in jobs if json.dumps(job) in known)
    done, total, began = sum(len(known[key]) for key in known), sum(job[2] for job in jobs), time.monotonic()
    with file.open("a", encoding="utf-8") as log, multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for job, rows in pool.imap_unordered(_mutated, todo):
            log.write(json.dumps([job, rows]) + "\n")
            log.flush()
            done += job[2]
            print(f"\r{done:,} of {total:,} mutations, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)
            yield rows
    print(file=sys.stderr)


def _source() -> str:
    return package_hash(ROOT / "src" / "tunix_rt")[0][:16]


def _own_code() -> list[Path]:
    return [Path(__file__), *sorted((ROOT / "tests" / "forging").glob("*.py"))]


def _mutated(job: Job) -> tuple[Job, list[Row]]:
    name, folder, count, seed, kinds = job
    remember_answers()
    original, rows = examine(Path(folder)), []
    with tempfile.TemporaryDirectory(prefix="mutations-", dir=PLACE) as scratch:
        for number, mutation in enumerate(mutations(Path(folder), count, seed, kinds)):
            copy = copy_of(Path(folder), Path(scratch) / str(number))
            row = {"bundle": name, "seed": seed, "number": number, "file": mutation.file, "kind": mutation.kind}
            rows.append(row | {"how": mutation.how} | outcome(mutation, copy, original))
            shutil.rmtree(copy)
    return job, rows


def remember_answers() -> None:
    for module, function in REMEMBERED:
        if not hasattr(getattr(module, function), "answers"):
            setattr(module, function, _remembering(getattr(module, function)))


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Settings with a mapping in them cannot be hashed; of a run, these functions read the settings of its data alone."""
    answers: dict[str, Any] = {}

    def answer(*given: Any, **named: Any) -> Any:
        key = repr(([one.config.data if hasattr(one, "config") else one for one in given], named))
        if key not in answers:
            answers[key] = function(*given, **named)
        return answers[key]

    vars(answer)["answers"] = answers
    return answer


def outcome(mutation: Mutation, folder: Path, original: Examination) -> Row:
    """What became of one mutation: undone, found (by which checks), accepted (touching which claims) or an error of ours."""
    began = time.monotonic()
    try:
        if not apply(mutation, folder):
            return {"outcome": "undone"}
        after = examine(folder)
    except TunixError as error:  # refused as a run of another format
        return {"outcome": "found", "checks": [f"refused, exit {error.exit_code}"]}
    except Exception:  # noqa: BLE001  whatever ends the verifier is what is looked for
        return {"outcome": "error", "how": traceback.format_exc().splitlines()[-1]}
    row: Row = {"seconds": round(time.monotonic() - began, 3)}
    if after.findings or after.level != original.level:
        return row | {"outcome": "found", "checks": sorted({finding.check for finding in after.findings})}
    claims = {claim.name: claim.label for claim in touched(original, after)}
    return row | {"outcome": "accepted", "claims": claims}


def is_defect(row: Row) -> bool:
    """Accepted without resealing, or with a claim that is more than self-reported; or no verdict at all."""
    if row["outcome"] == "accepted":
        return row["kind"] != RESEALED or any(label != "self-reported" for label in row["claims"].values())
    return bool(row["outcome"] == "error")


# --- what came of it --------------------------------------------------------------------------------------------------


def summary(rows: list[Row], bundles: list[str], seed: int) -> dict[str, Any]:
    unsealed = [row for row in rows if row["kind"] != RESEALED]
    resealed = [row for row in rows if row["kind"] == RESEALED and row["outcome"] != "undone"]
    labels = Counter(label for row in resealed for label in row.get("claims", {}).values())
    return {
        "schema": "tunix-rt/mutations/3",
        "bundles": bundles,
        "seed": seed,
        "unsealed": {
            "mutations": len(unsealed),
            "by_kind": _counts(row["kind"] for row in unsealed),
            "by_check": _counts(check for row in unsealed for check in row.get("checks", ())),
            "accepted": sum(row["outcome"] == "accepted" for row in unsealed),
        },
        "resealed": {
            "mutations": len(resealed),
            "undone": sum(row["kind"] == RESEALED for row in rows) - len(resealed),
            "accepted": sum(row["outcome"] == "accepted" for row in resealed),
            "accepted_without_touching_a_claim": sum(row.get("claims") == {} for row in resealed),
            "claims_touched_by_label": {label: labels[label] for label in LABELS},
            "claims_touched": _counts(name for row in resealed for name in row.get("claims", {})),
            "by_file": _by_file(resealed),
        },
        "defects": [row for row in rows if is_defect(row)],
        "slowest_seconds": max((row.get("seconds", 0.0) for row in rows), default=0.0),
    }


def _counts(names: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _by_file(rows: list[Row]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for row in rows:
        found.setdefault(row["file"], Counter())[row["outcome"]] += 1
    return {name: dict(sorted(counts.items())) for name, counts in sorted(found.items())}


def block(root: Path) -> str:
    """The counts, for docs/concepts/evidence.md."""
    found = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    unsealed, resealed = found["unsealed"], found["resealed"]
    kinds = ", ".join(f"{count:,} of one {kind}" for kind, count in unsealed["by_kind"].items())
    silent, labels = resealed["accepted_without_touching_a_claim"], resealed["claims_touched_by_label"]
    rows = [
        ("one byte or one value, hashes as they were", f"{unsealed['mutations']:,}", f"{unsealed['accepted']:,}", ""),
        (
            "one value, everything sealed again",
            f"{resealed['mutations']:,}",
            f"{resealed['accepted']:,}",
            f"none in {silent:,}; otherwise " + ", ".join(f"{count:,} {label}" for label, count in labels.items()),
        ),
    ]
    files = sorted(resealed["by_file"].items(), key=lambda one: -one[1].get("accepted", 0))[:6]
    most = ", ".join(f"`{name}` {counts.get('accepted', 0)} of {sum(counts.values())}" for name, counts in files)
    return (
        f"L1 against single mutations of {len(found['bundles'])} bundles ({', '.join(found['bundles'])}); {kinds}.\n\n"
        + markdown.table(("mutation", "tried", "accepted at L1", "claims touched by the accepted ones"), rows)
        + f"\n\nAccepted after sealing again, most in: {most}. These are values that only the run states, or that a replay "
        f"decides: losses, settings of the optimizer, generated texts, facts of the machine. Defects: {len(found['defects'])}. "
        f"The slowest verdict took {found['slowest_seconds']:.2f} s. `{COMMAND}`, seed {found['seed']}; counts by check and file "
        f"are in `{RESULTS}`."
    )


if __name__ == "__main__":
    sys.exit(main())
