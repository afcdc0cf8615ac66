"""Try every scripted forgery on good bundles, with every level of the verifier: python -m benchmarks.forgeries [--write]

Each starts from a copy of a bundle of a run here, of what passes for one of a GPU, or of a committed one of a real GPU: static
checks first; where they accept it and the run was made here, answers are generated again from the weights (L2), segments
replayed (L3), and last the whole run (L4), until one finds it. `--only NAME` tries those named; `--static` stops
after the static checks. What came out is written to benchmarks/results/forgeries.json.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.forging.bases import base_bundle, copy_of, make_good_bundle
from tests.forging.catalogue import Base, Forgery, all_forgeries
from tests.program import ROOT
from tunix_rt.errors import TunixError
from tunix_rt.evidence.findings import Finding
from tunix_rt.evidence.verifying import findings_of

RESULTS = ROOT / "benchmarks" / "results" / "forgeries.json"
NONCE = "the verifier's"

Findings = Sequence[Finding]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--keep", type=Path, help="folder for the good bundle, used again if it is there")
    asked = parser.parse_args()
    chosen = [one for one in all_forgeries() if not asked.only or one.name in asked.only]
    with tempfile.TemporaryDirectory(prefix="forgeries-") as scratch:
        good = make_good_bundle((asked.keep or Path(scratch) / "good").absolute())
        found = [
            _tried(one, base, good, Path(scratch) / f"{one.name}-{base}", static=asked.static)
            for one in chosen
            for base in one.bases
        ]
    unlike = [f"{one['name']} on {one['base']}" for one in found if one["rejected_at"] != one["expected_at"]]
    if asked.write:
        told = {"schema": "tunix-rt/forgeries/2", "nonce": NONCE, "forgeries": found}
        RESULTS.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(chosen)} forgeries, {len(found)} trials; not as written down: {', '.join(unlike) or 'none'}")
    return 1 if unlike and not asked.static else 0


def _tried(forgery: Forgery, base: Base, good: Path, folder: Path, *, static: bool) -> dict[str, Any]:
    """What the verifier says of one forgery of that bundle, level by level until one rejects it."""
    copy_of(base_bundle(base, good), folder)
    forgery.forge(folder)
    began, tried = time.monotonic(), []
    told: dict[str, Any] = {
        "name": forgery.name, "what": forgery.what, "group": forgery.group, "base": base,
        "expected_at": forgery.level, "rejected_at": "missed", "checks": [], "problem": "",
    }  # fmt: skip
    for level, ask in _levels(base, good, folder, static=static):
        tried.append(level)
        if findings := ask():
            told |= {"rejected_at": level, "checks": sorted({one.check for one in findings})}
            told["problem"] = findings[0].problem[:200]
            break
    told |= {"tried": tried, "seconds": round(time.monotonic() - began, 2)}
    if told["rejected_at"] == "missed" and forgery.why:
        told["why"] = forgery.why
    print(f"{forgery.name} on {base}: {told['rejected_at']} {', '.join(told['checks'])}", flush=True)
    return told


def _levels(base: Base, good: Path, folder: Path, *, static: bool) -> Iterator[tuple[str, Callable[[], Findings]]]:
    repository = good.parent / "repository" if base == "cpu" else None
    yield "L1", lambda: findings_of(folder, repository)
    if static or base != "cpu":
        return
    from tunix_rt.regenerating import regenerate
    from tunix_rt.replaying import replay

    def silent(*_: object) -> None:
        return None

    def again() -> Findings:
        return regenerate(folder, good.parent / "run" / "final_model", nonce=NONCE, progress=silent).findings

    def replayed(*, whole: bool) -> Findings:
        return replay(
            folder, repository=repository, model=None, count=3, nonce=NONCE, whole=whole, progress=silent
        ).findings

    yield "L2", lambda: _told_as_finding("L2", again)
    yield "L3", lambda: _told_as_finding("L3", lambda: replayed(whole=False))
    yield "L4", lambda: _told_as_finding("L4", lambda: replayed(whole=True))


def _told_as_finding(level: Any, ask: Callable[[], Findings]) -> Findings:
    """A refusal to go on (data or model that are not as told) is a rejection too: the bundle does not reach the level."""
    try:
        return ask()
    except TunixError as error:
        return [Finding(level=level, check=f"refused-{type(error).__name__}", problem=error.problem)]


if __name__ == "__main__":
    sys.exit(main())
