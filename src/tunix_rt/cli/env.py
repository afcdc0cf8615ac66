"""`tunix-rt env`: a separate environment with a torch that fits this computer."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunix_rt.cli.views import text

if TYPE_CHECKING:
    from tunix_rt.doctor.environment import EnvironmentPlan
    from tunix_rt.doctor.facts import Facts
    from tunix_rt.doctor.install import EnvironmentReport
    from tunix_rt.doctor.wheels import Wheel

FOLDERS = {"cuda": Path(".venv-gpu"), "cpu": Path(".venv-cpu")}
_device = click.option(
    "--device", required=True, type=click.Choice(["cuda", "cpu"]), help="Device of torch in the environment."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


@click.group()
def env() -> None:
    """Create an environment with a torch that fits this computer, or verify one."""


@env.command()
@_device
@click.option("--path", type=click.Path(path_type=Path), help="Folder of the environment [.venv-gpu or .venv-cpu].")
@click.option("--dry-run", is_flag=True, help="Print the verdict and the commands; create nothing.")
@click.option("--facts", "facts_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Facts of another computer (`tunix-rt doctor --facts-only`), for a dry run.")  # fmt: skip
@click.option("--wheel-index", metavar="URL", help="Mirror of PyTorch's wheel index, with its folders cu130, cpu ...")
@_json
def create(
    device: str, path: Path | None, dry_run: bool, facts_file: Path | None, wheel_index: str | None, as_json: bool
) -> None:
    """Install the torch that fits driver and GPU into a new environment, and run the kernel self-test there.

    If that wheel fails, one fallback is tried; a GPU never gets a torch without CUDA. A log and a report are written
    beside the environment. Exit 4 if no torch fits or works; an incomplete environment is removed.
    """
    from tunix_rt.doctor.environment import plan_environment, why_refused
    from tunix_rt.doctor.install import SCHEMA, check_path, create_environment, error_of
    from tunix_rt.doctor.wheels import INDEX_BASE
    from tunix_rt.errors import ConfigError, HardwareError, StorageError
    from tunix_rt.storage import to_plain

    if facts_file and not dry_run:
        raise ConfigError("--facts describes another computer", fix="add --dry-run, or leave --facts out")
    path, base = path or FOLDERS[device], (wheel_index or INDEX_BASE).rstrip("/")
    check_path(path)
    facts = _facts(facts_file, path)
    if dry_run:
        refusal = why_refused(facts, device)
        if refusal is not None:
            if as_json:
                words = {"kind": refusal.kind, "cause": refusal.cause, "problem": refusal.problem, "fix": refusal.fix}
                text.show_json({"schema": SCHEMA, "status": "refused", **words})
            problem = f"{refusal.problem} [{refusal.kind}: {refusal.cause}]"
            raise (StorageError if refusal.kind == "storage" else HardwareError)(problem, fix=refusal.fix)
        plan = plan_environment(facts, device, path, base)
        _show_plan(plan, as_json=as_json)
        return
    report = create_environment(facts, device=device, path=path, index_base=base, say=_say)
    if as_json:
        text.show_json(to_plain(report))
    elif report.status == "ready":
        text.show_lines(_ready_lines(report))
    if error := error_of(report):
        raise error


@env.command()
@_device
@click.option("--path", type=click.Path(path_type=Path), help="The environment [.venv-gpu or .venv-cpu].")
@click.option(
    "--python", "python_file", type=click.Path(path_type=Path), metavar="EXE", help="Its Python, instead of --path."
)
@_json
def verify(device: str, path: Path | None, python_file: Path | None, as_json: bool) -> None:
    """Check the build of torch in an environment, run one kernel, then the kernel self-test. Exit 4 if one fails."""
    import tempfile

    from tunix_rt.doctor.environment import python_in
    from tunix_rt.doctor.install import verify_environment
    from tunix_rt.errors import ConfigError, HardwareError
    from tunix_rt.storage import to_plain

    if path and python_file:
        raise ConfigError("--path and --python exclude each other", fix="leave one of them out")
    facts = _facts(None, Path())
    python = python_file or python_in(path or FOLDERS[device], facts.host.system)
    if not python.is_file():
        raise ConfigError(
            f"{python}: no such file", fix=f"create it: tunix-rt env create --device {device}; or name another"
        )
    with tempfile.TemporaryDirectory(prefix="tunix-rt-") as folder:
        torch, proof, failure = verify_environment(python, device=device, facts=facts, log=Path(folder, "log"))
    if as_json:
        text.show_json(to_plain({"ready": failure is None, "torch": torch, "proof": proof, "failure": failure}))
    elif failure is None:
        text.show_lines(
            [f"ready: {python}, torch {torch.version}, CUDA {torch.cuda_build or 'none'}; self-test passed on {device}"]
        )
    if failure is not None:
        problem = f"{python} is not ready for {device}: {failure.problem} [{failure.kind}: {failure.cause}]"
        raise HardwareError(problem, fix=failure.fix, cause=failure.cause)


def _facts(file: Path | None, path: Path) -> "Facts":
    from tunix_rt.doctor.facts import read_facts
    from tunix_rt.doctor.probe import gather_facts

    if file:
        return read_facts(file)
    return gather_facts(path, device="cpu")  # the torch of this environment need not be started


def _say(words: str) -> None:
    print(text.printable(words), file=sys.stderr, flush=True)


def _show_plan(plan: "EnvironmentPlan", *, as_json: bool) -> None:
    from tunix_rt.doctor.environment import next_wheel

    chosen = plan.wheels[0]
    unavailable = next_wheel(plan.wheels, chosen, step="wheel")
    unusable = next_wheel(plan.wheels, chosen, step="check")
    lines = [step.line for step in plan.steps(chosen)]
    if as_json:
        text.show_json(
            {
                "device": plan.device, "path": str(plan.path), "reason": plan.reason, "commands": lines,
                "if_it_cannot_be_had": unavailable and _pip_words(unavailable, plan),
                "if_it_cannot_compute": unusable and _pip_words(unusable, plan),
            }
        )  # fmt: skip
        return
    cuda = f", CUDA {chosen.cuda}" if plan.device == "cuda" else ""
    text.show_lines([f"would create {plan.path} with torch {chosen.torch}{cuda} ({plan.reason})"])
    text.show_lines(f"{number}. {line}" for number, line in enumerate(lines, 1))
    for failure, other in (("is not available", unavailable), ("does not compute here", unusable)):
        then = f"the same with {_pip_words(other, plan)}" if other else "it fails with a report"
        text.show_lines([f"if that wheel {failure}: {then}"])


def _pip_words(wheel: "Wheel", plan: "EnvironmentPlan") -> str:
    from tunix_rt.doctor.environment import without_password
    from tunix_rt.doctor.wheels import pip_arguments

    return without_password(" ".join(pip_arguments(wheel, plan.index_base)))


def _ready_lines(report: "EnvironmentReport") -> list[str]:
    versions = report.versions
    return [
        f"ready: {report.path} with torch {versions['torch']}, CUDA {versions['cuda']}; self-test passed on {report.device}",
        f"  use it: {report.path}/bin/tunix-rt"
        if sys.platform != "win32"
        else f"  use it: {report.path}\\Scripts\\tunix-rt",
        f"  report: {report.report_path}, log: {report.log_path}",
    ]
