"""`tunix-rt evidence`: collect a run into a bundle, sign it, verify it, pack it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tunix_rt.cli.main import Group
from tunix_rt.cli.views import text
from tunix_rt.errors import ConfigError, EvidenceError, InputError

if TYPE_CHECKING:
    from tunix_rt.evidence.facts import Level, Verdict

FOLDER = click.Path(path_type=Path)


@click.group(cls=Group)
def evidence() -> None:
    """Collect a run into a bundle, sign it, verify it, pack it."""


@evidence.command()
@click.argument("folder", metavar="RUN", type=FOLDER)
@click.option("--to", "to", type=FOLDER, required=True, help="Folder of the bundle; must not exist.")
@click.option("--cpu-run", type=FOLDER, help="The same configuration run on the CPU, for a GPU run's speed.")
@click.option("--without-cpu-run", is_flag=True, help="A PyTorch GPU run without one; the README states it.")
@click.option("--with-checkpoints", is_flag=True, help="Include the checkpoints that a replay can begin from.")
@click.option("--with-model", is_flag=True, help="Include the final model.")
@click.option(
    "--checkpoint-mib", type=click.IntRange(min=1), default=64, show_default=True, help="Most that these two may take."
)
@click.option("--run-id", metavar="NAME", help="Name of the run in run_manifest.json [that of the bundle's folder].")
@click.option("--repository", type=FOLDER, help="Clone with the commit of the run [the installed wheel, else here].")
@click.option("--json", "as_json", is_flag=True, help="Print run_manifest.json.")
def collect(
    folder: Path, to: Path, cpu_run: Path | None, without_cpu_run: bool,
    with_checkpoints: bool, with_model: bool, checkpoint_mib: int, run_id: str | None, repository: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a bundle of the completed run in RUN: its facts without its weights, a README, and hashes.

    A run that is not consistent, lacks a file its device must leave, or comes from uncommitted source is refused (exit 6).
    A run that was copied from another machine may lack its weights.
    """
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.evidence.collect import Extras, collect
    from tunix_rt.runs.source import require_repository

    if repository is not None:
        require_repository(repository)
    extras = Extras(checkpoints=with_checkpoints, model=with_model, most_mib=checkpoint_mib)
    with watching():
        made = collect(
            folder, to, cpu_folder=cpu_run, repository=repository, run_id=run_id, without_cpu=without_cpu_run, extras=extras
        )  # fmt: skip
    for place in made.places:
        click.echo(text.printable(f"warning: a path of the machine in {place}"), err=True)
    if as_json:
        text.show_json(made.manifest)
        return
    manifest = made.manifest
    speeds = manifest["tokens_per_second"]
    against = f", {speeds['ratio']:.2f} times the CPU" if "ratio" in speeds else ""
    text.show_lines([
        f"Bundle: {to}  (tunix-rt evidence verify {to})",
        f"{manifest['steps_completed']} steps on {manifest['device']}, final loss {manifest['final_loss']:.4f}, "
        f"{speeds['device']:,.1f} tokens/s{against}",
        f"commit {manifest['commit']}",
        f"left out, by hash: {len(manifest.get('left_out', {}))} files of weights and checkpoints",
    ])  # fmt: skip


# --- verify -----------------------------------------------------------------------------------------------------------


class _Segments(click.ParamType):  # type: ignore[type-arg]
    name = "N|all"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | Literal["all"]:
        if value == "all" or (isinstance(value, str) and value.isdecimal() and int(value) > 0):
            return "all" if value == "all" else int(value)
        self.fail(f"{value!r} is neither a number above 0 nor `all`", param, ctx)


@evidence.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--require", "required", type=click.Choice(["L0", "L1", "L2", "L3", "L4"]), default="L1", show_default=True,
    help="Level below which the exit code is 6: readable, consistent, regenerated, replayed, reproduced.",
)  # fmt: skip
@click.option("--repository", type=FOLDER, help="Clone in which to look up the source of the run.")
@click.option("--ref", "refs", multiple=True, help="Branch or tag of that clone to look in [the one checked out].")
@click.option("--source", metavar="REF", help="Compute with the recorded source, from a commit reachable from REF.")
@click.option("--weights", type=FOLDER, help="The final model (L2) [that in the bundle].")
@click.option("--model", metavar="DIR", help="The base model, if it does not ship with tunix-rt.")
@click.option("--tokenizer", metavar="DIR", help="The tokenizer, if it is not that of --model.")
@click.option("--data", metavar="FILE", multiple=True, help="Dataset or eval set, found by its hash.")
@click.option("--segments", type=_Segments(), help="Segments to draw and replay (L3) [3 or more].")
@click.option("--nonce", metavar="TEXT", help="Decides the draw [random; printed, so that it can be repeated].")
@click.option("--signed-by", type=FOLDER, help="Public key or allowed-signers file that must have signed the bundle.")
@click.option("--time-limit", type=click.FloatRange(min=1), help="Seconds that computing may take [24 hours].")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the verdict as Markdown.")
def verify(folder: Path, required: "Level", as_json: bool, as_markdown: bool, **given: Any) -> None:
    """Verify the run or bundle in DIR: a table of claims, all findings, and a level; exit 6 below the required one.

    \b
    L0  readable: closed schemas, hashes, sizes
    L1  consistent: everything that follows from recorded facts was computed again
    L2  regenerated: the weights give these answers
    L3  replayed: drawn segments and the end of the run give the recorded states
    L4  reproduced: the whole run, answers before and after included

    Untrusted input is read in a process with limits, and always by the code that is installed here. README.md, logs and other
    prose are hashed, not read: trust the claims below, not the prose.
    """
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.evidence.facts import Inputs
    from tunix_rt.evidence.verify import MAX_COMPUTE_SECONDS, Options, verify
    from tunix_rt.runs.source import require_repository

    _require_folder(folder)
    _refuse_unused(required, given)
    if given["repository"] is not None:
        require_repository(given["repository"])
    inputs = Inputs(data=given.pop("data"), model=given.pop("model"), tokenizer=given.pop("tokenizer"))
    limit = given.pop("time_limit") or MAX_COMPUTE_SECONDS
    with watching() as progress:
        verdict = verify(folder, required, Options(inputs=inputs, time_limit=limit, **given), progress)
    if as_json:
        text.show_json({"ok": verdict.ok, "meaning": verdict.describe(), **asdict(verdict)})
    else:
        (_show_markdown if as_markdown else _show)(verdict)
    if not verdict.ok:
        failed = f"{len(verdict.findings)} finding(s)" if verdict.findings else "see the notes for what is missing"
        problem = f"{folder} is at level {verdict.level}, required is {required}: {failed}"
        raise EvidenceError(problem, fix="docs/reference/bundle.md explains levels and checks")


def _require_folder(folder: Path) -> None:
    """A mistyped name, or the parent folder, is an InputError, not a finding."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder", fix="name the folder of a run or of a bundle")
    if not any((folder / name).exists() for name in ("run_manifest.json", "SHA256SUMS", "precommit.json")):
        from tunix_rt.runs.index import run_folders

        bundles = sorted(place.parent for place in folder.glob("*/run_manifest.json"))
        runs = sorted(
            run_folders(folder), key=lambda run: (not (run / "final_model").is_dir(), run)
        )  # complete ones first
        if inside := list(dict.fromkeys([*bundles, *runs])):
            named = ", ".join(map(str, inside[:10])) + (" ..." if len(inside) > 10 else "")
            fix = f"tunix-rt evidence verify {inside[0]}"
            raise InputError(f"{folder} contains {len(inside)} run(s) or bundle(s), name one: {named}", fix=fix)


def _refuse_unused(required: str, given: dict[str, Any]) -> None:
    """Refuse an option that has no effect."""
    replays = given["segments"] is not None or required in ("L3", "L4")
    computes = replays or required == "L2" or given["weights"] is not None
    for name, used, fix in (
        ("segments", required != "L4", "L4 takes all of them; leave --segments out"),
        ("nonce", replays and required != "L4", "add --require L3, or leave --nonce out"),
        ("model", computes, "add --require L2, L3 or L4"),
        ("tokenizer", computes, "add --require L2, L3 or L4"),
        ("source", computes, "add --require L2, L3 or L4"),
        ("refs", given["repository"] is not None, "add --repository CLONE"),
    ):
        if given[name] and not used:
            raise ConfigError(f"--{name.removesuffix('s') if name == 'refs' else name} has no effect here", fix=fix)


def _show(verdict: "Verdict") -> None:
    text.show_lines([*(f"{one.level} {one.check}: {one.problem}" for one in verdict.findings), *verdict.notes])
    if verdict.claims:
        rows = [(one.name, " ".join(one.value.split()), one.label, one.how) for one in verdict.claims]
        text.show_table(("claim", "value", "label", "how"), rows)
    text.show_lines([f"{verdict.folder}: {verdict.describe()}"])


def _show_markdown(verdict: "Verdict") -> None:
    rows = [f"| {' | '.join(map(_escaped, (one.name, one.value, one.label, one.how)))} |" for one in verdict.claims]
    table = ["| claim | value | label | how |", "|---|---|---|---|", *rows, ""] if rows else []
    found = [f"- **{one.level} {one.check}**: {_escaped(one.problem)}" for one in verdict.findings]
    notes = [f"- {_escaped(one)}" for one in verdict.notes]
    text.show_lines([f"**{_escaped(verdict.describe())}**", "", *table, *found, *notes])


def _escaped(value: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>|#!" else letter for letter in value)


# --- sign, package ----------------------------------------------------------------------------------------------------


@evidence.command()
@click.argument("bundle", metavar="BUNDLE", type=FOLDER)
@click.option("--key", type=FOLDER, required=True, help="Private OpenSSH key.")
@click.option("--overwrite", is_flag=True, help="Replace a signature that is there.")
def sign(bundle: Path, key: Path, overwrite: bool) -> None:
    """Sign BUNDLE with an OpenSSH key (ssh-keygen -Y sign) into SHA256SUMS.sig. One that is not consistent is not signed."""
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.evidence.sign import sign
    from tunix_rt.evidence.verify import verify

    _require_folder(bundle)
    with watching():
        verdict = verify(bundle)
    if not verdict.ok:
        fix = f"tunix-rt evidence verify {bundle} lists the findings"
        raise EvidenceError(f"{bundle}: {verdict.describe()}", fix=fix)
    text.show_lines([f"Signature: {sign(bundle, key, overwrite=overwrite)}"])


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
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.evidence.collect import package

    with watching():
        made = package(repository, to)
    if as_json:
        text.show_json(asdict(made) | {"path": str(made.path)})
        return
    size = f"{made.files} files, {made.bytes:,} bytes, {len(made.bundles)} bundles, all verified"
    text.show_lines([f"{made.path}: {size}", f"sha256 {made.sha256}"])
