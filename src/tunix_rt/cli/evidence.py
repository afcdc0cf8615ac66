"""`tunix-rt evidence`: what a reviewer runs over a folder that someone else made, and what makes such a folder."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunix_rt.cli import text
from tunix_rt.errors import ConfigError, EvidenceError, InputError, TunixError

if TYPE_CHECKING:
    from tunix_rt.evidence.findings import Finding, Level

FOLDER = click.Path(path_type=Path)


@click.group()
def evidence() -> None:
    """Collect what a run left behind, check it, pack it."""


@evidence.command()
@click.argument("folder", metavar="RUN", type=FOLDER)
@click.option("--to", "to", type=FOLDER, help="Folder of the bundle; must not exist.")
@click.option("--output", "to_before", type=FOLDER, hidden=True)
@click.option("--cpu-run", type=FOLDER, help="The same configuration run on the CPU, for a GPU run's speed.")
@click.option("--without-cpu-run", is_flag=True, help="A GPU run of PyTorch without one; the README says so.")
@click.option(
    "--with-checkpoints",
    is_flag=True,
    help="Take along the checkpoints that a replay can begin from: all that are kept but the last step's.",
)
@click.option("--with-model", is_flag=True, help="Take the final model along.")
@click.option(
    "--checkpoint-mib", type=click.IntRange(min=1), default=64, show_default=True, help="Most that these two may take."
)
@click.option("--run-id", metavar="NAME", help="Name of the run in run_manifest.json [that of the bundle's folder].")
@click.option("--repository", type=FOLDER, default=Path(), help="Clone with the commit of the run [here].")
@click.option("--json", "as_json", is_flag=True, help="Print bundle.json to standard output.")
def collect(
    folder: Path,
    to: Path | None,
    to_before: Path | None,
    cpu_run: Path | None,
    without_cpu_run: bool,
    with_checkpoints: bool,
    with_model: bool,
    checkpoint_mib: int,
    run_id: str | None,
    repository: Path,
    as_json: bool,
) -> None:
    """Make a bundle of the completed run in RUN: its facts without its weights, a README, and hashes.

    A run that does not verify, lacks a file its device must leave, or comes from uncommitted source is refused (exit 6).
    A run brought home from another machine may lack its weights.
    """
    from tunix_rt.evidence.bundle import Extras, collect
    from tunix_rt.evidence.source import require_repository

    require_repository(repository)
    output = _one_target(to, to_before)
    extras = Extras(checkpoints=with_checkpoints, model=with_model, most_mib=checkpoint_mib)
    made = collect(
        folder, output, cpu_folder=cpu_run, repository=repository, run_id=run_id, without_cpu=without_cpu_run,
        extras=extras,
    )  # fmt: skip
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


def _one_target(to: Path | None, to_before: Path | None) -> Path:
    """`--output` is the older spelling; the two may agree, never differ."""
    if to is not None and to_before is not None and to != to_before:
        raise ConfigError("--to and --output name two folders", fix="give --to alone")
    if (output := to or to_before) is None:
        raise ConfigError("where the bundle goes is not said", fix="--to FOLDER")
    return output


# --- verify -----------------------------------------------------------------------------------------------------------

SELF_REPORTED = "self-reported"


@dataclass(slots=True, kw_only=True)
class _Verified:
    """What the checks said, one after the other."""

    findings: "list[Finding]"
    reached: "list[Level]" = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    untried: TunixError | None = None
    """What kept one of the strong checks from being tried here; it says nothing about the run."""


@evidence.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--require", "required", type=click.Choice(["L1", "L2", "L3", "L4"]), default="L1", show_default=True,
    help="Level below which the exit code is 6: consistent, regenerated, replayed, reproduced.",
)  # fmt: skip
@click.option("--repository", type=FOLDER, help="Clone to look the commit of a bundle up in.")
@click.option("--weights", type=FOLDER, help="The final model: random answers are generated again from it (L2).")
@click.option("--model", metavar="DIR", help="The base model to replay from; the embedded one needs none.")
@click.option("--segments", type=click.IntRange(min=2), help="Stretches of the run to take again (L3) [3].")
@click.option(
    "--nonce", metavar="TEXT", help="What chooses items and stretches [random; said, so that it can be repeated]."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def verify(
    folder: Path,
    required: "Level",
    repository: Path | None,
    weights: Path | None,
    model: str | None,
    segments: int | None,
    nonce: str | None,
    as_json: bool,
) -> None:
    """Check the run or bundle in DIR: all findings, and a verdict as a level; exit 6 below the required one.

    \b
    L0  malformed, or it contradicts itself
    L1  consistent: everything that can be computed again without running anything was
    L2  regenerated: random answers came out of the weights again (--weights)
    L3  replayed: stretches of the run, chosen by a nonce, were taken again
    L4  reproduced: the whole run was

    Up to L1 nothing is run and neither torch nor jax is loaded. Which device really computed is the run's own word.
    """
    from tunix_rt.evidence.agreeing import is_bundle
    from tunix_rt.evidence.findings import below, verdict_of
    from tunix_rt.evidence.verifying import examine

    _refuse_no_bundle(folder)
    bundle = is_bundle(folder)
    _refuse_what_cannot_be(folder, bundle, required, repository, weights)
    _refuse_what_is_not_used(required, weights, model, segments, nonce)
    examined = examine(folder, repository)
    done = _Verified(findings=list(examined.findings))
    done.words += [examined.words] if examined.words else []
    if verdict_of(done.findings) != "L0":
        if weights is not None:
            _try(done, "L2", lambda: _regenerate(done, folder, repository, weights, nonce))
        if segments is not None or required in ("L3", "L4"):
            whole = required == "L4"
            replay = partial(_replay, done, folder, repository, model, segments or 3, nonce, whole=whole)
            _try(done, "L4" if whole else "L3", replay)
    level = verdict_of(done.findings, done.reached)
    verified = not below(level, required) and done.untried is None
    told = _told(folder, done, level, required, verified) | (
        {"cannot": list(examined.unmade)} if examined.unmade else {}
    )
    if as_json:
        text.show_json(told | ({"commit_looked_up": repository is not None} if bundle else {}))
    else:
        text.show_lines(_lines(folder, done, level, repository if bundle else None, bundle=bundle))
    if done.untried is not None and not done.findings:
        raise done.untried
    if not verified:
        fix = "ask whoever made the run for an untouched copy, or run it again"
        if level != "L0":
            fix = "what was computed again is not what is recorded: try another nonce or machine, then ask whoever made the run"
        raise EvidenceError(
            f"{folder} is at level {level}, required is {required}: {len(done.findings)} problem(s)", fix=fix
        )


def _try(done: _Verified, level: "Level", check: Callable[[], None]) -> None:
    """What cannot be tried here is told with the rest, and is the error in the end where nothing worse was found."""
    try:
        check()
    except TunixError as error:
        done.untried = done.untried or error
        done.words.append(f"{level} could not be tried here: {error.problem.removeprefix('could not be tried here: ')}")
        done.told["untried"] = {**done.told.get("untried", {}), level: error.problem}


def _refuse_no_bundle(folder: Path) -> None:
    """A name mistyped, or the folder above, says nothing about anybody's run."""
    if not os.path.isdir(folder):
        kind = f"{folder} is not a folder" if os.path.lexists(folder) else f"{folder}: no such folder"
        raise InputError(kind, fix="name the folder of a run or of a bundle")
    from tunix_rt.evidence.agreeing import SAYS

    if any(os.path.lexists(folder / name) for name in (SAYS, "SHA256SUMS", "precommit.json")):
        return
    try:
        inside = sorted(place for place in folder.iterdir() if (place / SAYS).is_file())
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror or error}", fix="check the path") from error
    if inside:
        raise InputError(
            f"{folder} holds {len(inside)} bundle{'s' * (len(inside) > 1)}: name one",
            fix=f"tunix-rt evidence verify {inside[0]}",
        )


def _refuse_what_is_not_used(
    required: str, weights: Path | None, model: str | None, segments: int | None, nonce: str | None
) -> None:
    """An option that changes nothing would be taken for one that did."""
    replays = segments is not None or required in ("L3", "L4")
    if segments is not None and required == "L4":
        raise ConfigError("--segments: L4 takes the whole run again", fix="leave --segments out, or --require L3")
    if model is not None and not replays:
        raise ConfigError("--model: nothing is replayed", fix="add --require L3 or L4, or leave --model out")
    if nonce is not None and weights is None and (not replays or required == "L4"):
        why = "the whole run is taken again" if required == "L4" else "nothing is generated or replayed"
        raise ConfigError(
            f"--nonce: {why}, so there is nothing to choose", fix="add --require L3, or leave --nonce out"
        )


def _refuse_what_cannot_be(
    folder: Path, bundle: bool, required: str, repository: Path | None, weights: Path | None
) -> None:
    if repository is not None and not bundle:
        raise ConfigError(f"{folder} is no bundle, and names no commit", fix="leave --repository out")
    if required == "L2" and weights is None:
        raise ConfigError(
            "to generate answers again takes the weights", fix="--weights DIR, the final model of the run"
        )
    if repository is not None:
        from tunix_rt.evidence.agreeing import refuse_without_commit
        from tunix_rt.evidence.source import require_repository

        require_repository(repository)
        refuse_without_commit(folder, repository)


def _regenerate(done: _Verified, folder: Path, repository: Path | None, weights: Path, nonce: str | None) -> None:
    from tunix_rt.cli.watch import watching
    from tunix_rt.regenerating import regenerate

    with watching() as progress:
        made = regenerate(folder, weights, nonce=nonce, progress=progress, repository=repository)
    done.findings += made.findings
    done.words += made.words
    done.reached.append("L2")
    done.told["regenerated"] = {
        "asked": made.asked, "same": made.same, "share": made.share, "seconds": made.seconds,
        "class": made.class_name, "nonce": made.nonce, "followed": made.followed,
    }  # fmt: skip


def _replay(
    done: _Verified,
    folder: Path,
    repository: Path | None,
    model: str | None,
    count: int,
    nonce: str | None,
    *,
    whole: bool,
) -> None:
    from tunix_rt.cli.watch import watching
    from tunix_rt.replaying import replay
    from tunix_rt.rundir import to_plain

    with watching() as progress:
        made = replay(
            folder, repository=repository, model=model, count=count, nonce=nonce, whole=whole, progress=progress
        )
    done.findings += made.findings
    done.words += made.words
    done.reached.append("L4" if whole else "L3")
    done.told["replayed"] = {
        "class": made.class_name, "segments": to_plain(made.segments), "seconds": made.seconds,
        "recorded_seconds": made.recorded_seconds, "nonce": made.nonce,
    }  # fmt: skip


def _told(folder: Path, done: _Verified, level: "Level", required: str, verified: bool) -> dict[str, Any]:
    return {
        "schema": "tunix-rt/verification/2",
        "folder": str(folder),
        "level": level,
        "required": required,
        "verified": verified,
        "meaning": _verdict(level, done),
        "hardware": _hardware(done, level),
        "problems": [finding.problem for finding in done.findings],
        "findings": [
            {"level": one.level, "check": one.check, "problem": one.problem} for one in done.findings
        ],
        "words": done.words,
        **done.told,
    }  # fmt: skip


def _hardware(done: _Verified, level: "Level") -> str:
    """What is known of the device: the run's word, unless one of its kind gave the same bits again."""
    same = done.told.get("replayed", {}).get("class") == "SAME" and level in ("L3", "L4")
    return f"{SELF_REPORTED}; replayed here on one of its kind, to the bit" if same else SELF_REPORTED


def _verdict(level: "Level", done: _Verified) -> str:
    """`level L1 (consistent); not regenerated, not replayed`, `level L3 (replayed, class NEAR); not regenerated`."""
    from tunix_rt.evidence.findings import MEANINGS

    if level == "L0":
        return f"level L0 ({MEANINGS['L0']})"
    without = list(_without(done, ("L2",), "regenerated"))
    without += _without(done, ("L3", "L4"), "replayed")
    by = done.told.get({"L2": "regenerated", "L3": "replayed", "L4": "replayed"}.get(level, ""), {}).get("class")
    meaning = f"{MEANINGS[level]}, class {by}" if by else MEANINGS[level]
    return f"level {level} ({meaning}){'; ' * bool(without)}{', '.join(without)}"


def _without(done: _Verified, levels: Sequence[str], name: str) -> Iterator[str]:
    """Whether it was not done, or done and came out otherwise."""
    if not set(levels) & set(done.reached):
        yield f"not {name}"
    elif any(finding.level in levels for finding in done.findings):
        yield f"{name} otherwise than recorded"


def _lines(folder: Path, done: _Verified, level: "Level", repository: Path | None, *, bundle: bool) -> list[str]:
    found = [f"{finding.level} {finding.check}: {finding.problem}" for finding in done.findings]
    lines = [*found, *done.words, f"{folder}: {_verdict(level, done)}"]
    if bundle and level != "L0":
        looked_up = f"found in {repository}" if repository else "not looked up; add --repository CLONE"
        lines += [f"commit: {looked_up}", f"hardware: {_hardware(done, level)}"]
    return lines


# --- package ----------------------------------------------------------------------------------------------------------


@evidence.command()
@click.option(
    "--to", "to", type=FOLDER, default=Path("tunix-rt-evidence.zip"), show_default=True, help="The zip to make."
)
@click.option("--repository", type=FOLDER, default=Path(), help="Clone to pack [here].")
@click.option("--json", "as_json", is_flag=True, help="Print what was packed as JSON.")
def package(to: Path, repository: Path, as_json: bool) -> None:
    """Pack configurations, bundles, notebooks and README into one zip; the same files give the same bytes.

    Every bundle is verified before it is packed, and again after the zip was unpacked elsewhere.
    """
    from tunix_rt.evidence.packaging import package

    made = package(repository, to)
    if as_json:
        text.show_json(
            {
                "path": str(made.path), "sha256": made.sha256, "bytes": made.bytes, "files": made.files,
                "bundles": list(made.bundles),
            }
        )  # fmt: skip
        return
    text.show_lines(
        [
            f"{made.path}: {made.files} files, {made.bytes:,} bytes, {len(made.bundles)} bundles, all verified",
            f"sha256 {made.sha256}",
        ]
    )
