"""`tunix-rt evidence`: what a reviewer runs over a folder that someone else made, and what makes such a folder."""

from pathlib import Path

import click

from tunix_rt.cli import text
from tunix_rt.errors import ConfigError, EvidenceError


@click.group()
def evidence() -> None:
    """Collect what a run left behind, and check it."""


@evidence.command()
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder of the bundle; must not exist.")
@click.option(
    "--cpu-run",
    type=click.Path(path_type=Path),
    help="The same configuration run on the CPU; required for a GPU run of PyTorch.",
)
@click.option("--run-id", metavar="NAME", help="Name of the run in run_manifest.json [that of the bundle's folder].")
@click.option(
    "--repository", type=click.Path(path_type=Path), default=Path(), help="Clone with the commit of the run [here]."
)
@click.option("--json", "as_json", is_flag=True, help="Print bundle.json to standard output.")
def collect(
    folder: Path, output: Path, cpu_run: Path | None, run_id: str | None, repository: Path, as_json: bool
) -> None:
    """Make a bundle of the completed run in RUN: its facts without its weights, a README, and hashes.

    A run that does not verify, lacks a file its device must leave, or comes from uncommitted source is refused (exit 6).
    A run brought home from another machine may lack its weights.
    """
    from tunix_rt.evidence.bundle import collect

    made = collect(folder, output, cpu_folder=cpu_run, repository=repository, run_id=run_id)
    for place in made.places:
        click.echo(text.printable(f"warning: a path of the machine in {place}"), err=True)
    if as_json:
        text.show_json(made.says)
        return
    speeds = made.says["tokens_per_second"]
    against = f", {speeds['ratio']:.2f} times the CPU" if "ratio" in speeds else ""
    text.show_lines(
        [
            f"Bundle: {output}  (tunix-rt evidence verify {output})",
            f"{made.says['steps_completed']} steps on {made.says['device']}, final loss {made.says['final_loss']:.4f}, "
            f"{speeds['device']:,.1f} tokens/s{against}",
            f"commit {made.says['commit']}",
            f"left out, by hash: {len(made.says['left_out'])} files of weights, checkpoints and charts",
        ]
    )


@evidence.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--repository", type=click.Path(path_type=Path), help="Clone to look the commit of a bundle up in.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(folder: Path, repository: Path | None, as_json: bool) -> None:
    """Check the run or bundle in DIR against its hashes and against itself; exit 6 if anything is wrong.

    The hashes of all files, the chain through the metrics, the result, and the answers judged again must agree; of a
    bundle also what bundle.json, run_manifest.json and its README say, which is computed again, and with --repository the
    commit. That shows a folder consistent with itself; nothing is replayed.
    """
    from tunix_rt.evidence.bundle import bundle_problems, is_bundle
    from tunix_rt.evidence.hashes import MEANING, list_problems

    bundle = is_bundle(folder)
    if repository is not None and not bundle:
        raise ConfigError(f"{folder} is no bundle, and names no commit", fix="leave --repository out")
    problems = bundle_problems(folder, repository) if bundle else list_problems(folder)
    told: dict[str, object] = {
        "schema": "tunix-rt/verification/1",
        "folder": str(folder),
        "verified": not problems,
        "meaning": MEANING if not problems else "not consistent with itself",
        "problems": problems,
    }
    if as_json:
        text.show_json(told | ({"commit_looked_up": repository is not None} if bundle else {}))
    elif problems:
        text.show_lines(problems)
    else:
        looked_up = f"found in {repository}" if repository else "not looked up; add --repository CLONE"
        text.show_lines([f"{folder}: {MEANING}", *([f"commit: {looked_up}"] if bundle else [])])
    if problems:
        raise EvidenceError(
            f"{folder} does not verify: {len(problems)} problem(s)",
            fix="ask whoever made the run for an untouched copy, or run it again",
        )
