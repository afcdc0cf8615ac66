"""`tunix-rt evidence`: what a reviewer runs over a run folder that someone else made."""

from pathlib import Path

import click

from tunix_rt.cli import text
from tunix_rt.errors import EvidenceError


@click.group()
def evidence() -> None:
    """Check what a run left behind."""


@evidence.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(folder: Path, as_json: bool) -> None:
    """Check the run in DIR against its hashes and against itself; exit 6 if anything is wrong.

    The hashes of all files, the chain through the metrics, the result and the scores must agree. That shows a folder
    consistent with itself; nothing is replayed.
    """
    from tunix_rt.evidence.hashes import MEANING, list_problems

    problems = list_problems(folder)
    if as_json:
        text.show_json(
            {
                "schema": "tunix-rt/verification/1",
                "folder": str(folder),
                "verified": not problems,
                "meaning": MEANING if not problems else "not consistent with itself",
                "problems": problems,
            }
        )
    elif problems:
        text.show_lines(problems)
    else:
        text.show_lines([f"{folder}: {MEANING}"])
    if problems:
        raise EvidenceError(
            f"{folder} does not verify: {len(problems)} problem(s)",
            fix="ask whoever made the run for an untouched copy, or run it again",
        )
