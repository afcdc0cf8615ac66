"""`tunix-rt doctor`: whether a run works on this computer, what prevents it, and the command that repairs it."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunix_rt.cli.main import Dtype, Group
from tunix_rt.cli.views import text

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.doctor.environment import EnvironmentPlan
    from tunix_rt.doctor.facts import Ask, Check, Facts
    from tunix_rt.doctor.install import EnvironmentReport
    from tunix_rt.doctor.selection import DeviceChoice
    from tunix_rt.doctor.selftest import LinkTest, SelfTest
    from tunix_rt.doctor.wheels import Wheel

FILE = click.Path(path_type=Path)
DEVICES = click.Choice(["auto", "cpu", "cuda", "gpu", "tpu"])


@click.command()
@click.argument("config", required=False)
@click.option("--device", type=DEVICES, help="Device that the run would request.")
@click.option("--backend", type=click.Choice(["torch", "jax"]), help="Engine of the run.")
@click.option("--dtype", type=Dtype(), help="Compute dtype of the run.")
@click.option("--output", type=FILE, help="Output folder of the run, whose disk is checked.")
@click.option(
    "--prove", is_flag=True, help="Run the kernel self-test: compare kernels with float64, in a child process."
)
@click.option("--log", type=FILE, help="Find the cause in the log of a run on several GPUs or hosts.")
@click.option("--facts-only", is_flag=True, help="Print the facts as JSON, without a verdict.")
@click.option("--facts", "facts_file", type=FILE, help="Use the facts in this file.")
@click.option("--json", "as_json", is_flag=True, help="Print verdict, cause, checks, self-test and facts as JSON.")
def doctor(
    config: str | None, output: Path | None, prove: bool, log: Path | None, facts_only: bool, facts_file: Path | None,
    as_json: bool, **named: Any,
) -> None:  # fmt: skip
    """Check whether a run works on this computer; exit 4 with the cause if not.

    CONFIG (a YAML file or the name of a shipped one) sets device, engine, dtype and model; options override it. Settings
    that exclude each other are refused with exit 2, a model that is not available with exit 3; no weights are downloaded.
    --facts checks the facts of another computer (--facts-only).
    """
    from tunix_rt.errors import ConfigError, HardwareError, InputError, TunixError

    ask, settings = _requested(config, named)
    if facts_file is not None and (prove or facts_only):
        raise ConfigError(
            "--facts names a file; --prove and --facts-only need a computer", fix="leave out --prove and --facts-only"
        )
    facts = _facts(facts_file, output, backend=ask.backend or "torch", device=ask.device)
    if log is not None:
        from dataclasses import replace

        from tunix_rt.doctor.process_checks import known_lines

        facts = replace(facts, log=known_lines(log))
    if facts_only:
        from tunix_rt.storage import json_text

        text.show_lines(json_text(facts).splitlines())
        return
    choice: DeviceChoice | None = None
    proof: tuple[SelfTest, ...] = ()
    links: LinkTest | None = None
    refusal: TunixError | None = None
    try:
        from tunix_rt.cli.views.progress import watching
        from tunix_rt.doctor.selection import choose_device
        from tunix_rt.plan.answer import refuse_unrunnable

        if settings is not None:
            refuse_unrunnable(settings)
        choice = choose_device(ask, facts)
        if prove:
            with watching():
                proof, links = _prove(facts, ask, choice, settings)
        if settings is not None and facts_file is None:
            _refuse_missing_model(settings)
    except (ConfigError, HardwareError, InputError) as error:
        refusal = error
    _show(facts, ask, choice, proof, links, refusal, as_json=as_json)


def _requested(config: str | None, named: dict[str, Any]) -> "tuple[Ask, RunConfig | None]":
    """What the run requests, and its configuration, if one is named."""
    from tunix_rt.doctor.facts import Ask

    given = {name: value for name, value in named.items() if value is not None}
    if config is None:
        return Ask(**given), None
    from tunix_rt.config.load import find_config, load_config

    settings = load_config(find_config(config), overrides=(), flags={})
    training = settings.training
    return Ask(**{"device": training.device, "backend": training.backend, "dtype": training.dtype} | given), settings


def _refuse_missing_model(settings: "RunConfig") -> None:
    from tunix_rt.errors import InputError
    from tunix_rt.models.resolve import refuse_unavailable
    from tunix_rt.runs.folder import model_of_run

    model = settings.model
    if not model.model_name_or_path:
        return
    try:
        refuse_unavailable(model_of_run(model.model_name_or_path), revision=model.revision, weights=model.weights)
    except InputError as error:
        raise InputError(
            f"the device is ready, the model is not: {error.problem}", fix=f"for the run: {error.fix}"
        ) from None


def _facts(facts_file: Path | None, output: Path | None, **requested: Any) -> "Facts":
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.doctor.facts import read_facts
    from tunix_rt.doctor.probe import gather_facts

    if facts_file is not None:
        return read_facts(facts_file)
    with watching():
        return gather_facts(output, **requested)


def _prove(
    facts: "Facts", ask: "Ask", choice: "DeviceChoice", settings: "RunConfig | None"
) -> "tuple[tuple[SelfTest, ...], LinkTest | None]":
    """The kernel self-test of every device, and the connections between several GPUs."""
    from tunix_rt.doctor.facts import visible_gpus
    from tunix_rt.doctor.selection import set_environment
    from tunix_rt.doctor.selftest import run_links, run_selftests

    backend = ask.backend or "torch"
    set_environment(choice.device, backend)
    gpus = [gpu.uuid for gpu in visible_gpus(facts)] if choice.device == "cuda" else []
    proof = run_selftests(gpus, backend=backend, device=choice.device, dtype=ask.dtype, **_kernels(ask, settings))
    return proof, run_links() if len(gpus) > 1 and backend == "torch" else None


def _kernels(ask: "Ask", settings: "RunConfig | None") -> dict[str, Any]:
    """The step and the heads of the configured run; needs the small files of its model only."""
    from tunix_rt.models.resolve import resolve_model
    from tunix_rt.plan.trace import shape_of_any
    from tunix_rt.train.device import kernels_of, step_of

    if settings is None:
        return {}
    options = step_of(settings.training)
    if ask.dtype != settings.training.dtype:  # master weights of another compute dtype
        options["master_dtype"] = None
    if not settings.model.model_name_or_path:
        return options
    model = resolve_model(settings.model.model_name_or_path, revision=settings.model.revision, weights="random")
    return options | kernels_of(model.config, shape_of_any(model, settings.training))


def _wrong(proof: "Iterable[SelfTest]", links: "LinkTest | None") -> tuple[str, str] | None:
    """Problem and fix of the first self-test that failed."""
    from tunix_rt.doctor.selftest import selftest_problem

    failed = (problem for one in proof if (problem := selftest_problem(one)) is not None)
    if (first := next(failed, None)) is not None or links is None or links.failure is None:
        return first
    fix = "`nvidia-smi topo -m` shows the connections; NCCL_P2P_DISABLE=1 avoids peer access; a driver update may repair it"
    return f"the GPUs do not exchange data: {links.failure}", fix


def _show(
    facts: "Facts", ask: "Ask", choice: "DeviceChoice | None", proof: "tuple[SelfTest, ...]", links: "LinkTest | None",
    refusal: Any, *, as_json: bool,
) -> None:  # fmt: skip
    """The verdict first. A refusal exits here, because its message is part of the output."""
    from tunix_rt.accelerators import find_accelerator, peaks
    from tunix_rt.doctor.checks import KIND_OF, judge
    from tunix_rt.doctor.selection import summary_rows
    from tunix_rt.doctor.selftest import selftest_lines
    from tunix_rt.models.secrets import redacted
    from tunix_rt.storage import to_plain

    checks = judge(facts, ask)
    wrong = _wrong(proof, links)
    ready = choice is not None and wrong is None and refusal is None
    code = 0 if ready else refusal.exit_code if refusal else 4
    cause = str(getattr(refusal, "cause", ""))
    if as_json:
        problem = (refusal.problem, refusal.fix) if refusal else wrong
        report = {
            "schema": "tunix-rt/doctor/1",
            "verdict": "ready" if ready else "refused",
            "cause": cause or ("not-proven" if wrong else None),
            "kind": KIND_OF.get(cause) or ("hardware" if wrong else None),
            "problem": redacted(problem[0]) if problem else None,
            "fix": redacted(problem[1]) if problem else None,
            "asked": ask,
            "choice": choice,
            "proof": proof[0] if proof else None,
            **({"proofs": proof, "links": links} if len(proof) > 1 else {}),
            "checks": checks,
            "facts": facts,
        }
        text.show_json(to_plain(report))
    elif refusal and not cause:
        raise refusal
    else:
        shown: list[str] = []
        if proof and choice:
            known = find_accelerator(choice.kind, choice.memory_bytes)
            peak = peaks(known, ask.dtype) if known else (None, None)
            shown = [line for one in proof for line in selftest_lines(one, peak)] + (links.describe() if links else [])
        lines = verdict_lines(checks, choice if ready else None, ask.device, self_test=shown)
        if wrong:
            lines = [f"{_not_ready(ask.device)}: {wrong[0]}", f"  fix:  {wrong[1]}", *lines]
        text.show_lines([*lines, ""])
        text.show_facts(summary_rows(facts))
    if code:
        raise click.exceptions.Exit(code)


def verdict_lines(
    checks: "Iterable[Check]", choice: "DeviceChoice | None", requested: str, *, self_test: Iterable[str] = ()
) -> list[str]:
    """The verdict, the cause with its fix, the self-test, the warnings."""
    from tunix_rt.doctor.selection import describe_choice

    lines = [] if choice is None else [f"ready: {describe_choice(choice)}"]
    failures = [check for check in checks if check.verdict == "fail"]
    for check in failures[:1]:
        lines += [f"{_not_ready(requested)}: {check.why}", *_detail(check)]
    if len(failures) > 1:
        lines.append("  then: " + "; ".join(f"{check.why} [{check.cause}]" for check in failures[1:]))
    lines += self_test
    for check in checks:
        if check.verdict == "warn":
            lines += [f"warning: {check.why}", *_detail(check)]
    return lines


def _not_ready(requested: str) -> str:
    return "not ready" if requested == "auto" else f"not ready for {requested}"


def _detail(check: "Check") -> list[str]:
    from tunix_rt.doctor.checks import page_of

    return [f"  saw:  {check.saw}", f"  fix:  {check.fix}", f"  more: {page_of(check.cause)}"]


FOLDERS = {"cuda": Path(".venv-gpu"), "cpu": Path(".venv-cpu")}
_device = click.option(
    "--device", required=True, type=click.Choice(["cuda", "cpu"]), help="Device of torch in the environment."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


@click.group(cls=Group)
def env() -> None:
    """Create an environment with a torch that fits this computer, or verify one."""


@env.command()
@_device
@click.option("--path", type=FILE, help="Folder of the environment [.venv-gpu or .venv-cpu].")
@click.option("--dry-run", is_flag=True, help="Print the verdict and the commands; create nothing.")
@click.option("--facts", "facts_file", type=FILE, metavar="FILE",
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
    facts = _facts(facts_file, path, device="cpu")  # the torch of this environment need not be started
    if dry_run:
        refusal = why_refused(facts, device)
        if refusal is not None:
            if as_json:
                words = {"kind": refusal.kind, "cause": refusal.cause, "problem": refusal.problem, "fix": refusal.fix}
                text.show_json({"schema": SCHEMA, "status": "refused", **words})
            problem = f"{refusal.problem} [{refusal.kind}: {refusal.cause}]"
            raise (StorageError if refusal.kind == "storage" else HardwareError)(problem, fix=refusal.fix)
        _show_plan(plan_environment(facts, device, path, base), as_json=as_json)
        return
    report = create_environment(facts, device=device, path=path, index_base=base, say=text.show_note)
    if as_json:
        text.show_json(to_plain(report))
    elif report.status == "ready":
        text.show_lines(_ready_lines(report))
    if error := error_of(report):
        raise error


@env.command()
@_device
@click.option("--path", type=FILE, help="The environment [.venv-gpu or .venv-cpu].")
@click.option("--python", "python_file", type=FILE, metavar="EXE", help="Its Python, instead of --path.")
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
    facts = _facts(None, Path(), device="cpu")
    python = python_file or python_in(path or FOLDERS[device], facts.host.system)
    if not python.is_file():
        fix = f"create it: tunix-rt env create --device {device}; or name another"
        raise ConfigError(f"{python}: no such file", fix=fix)
    with tempfile.TemporaryDirectory(prefix="tunix-rt-") as folder:
        torch, proof, failure = verify_environment(python, device=device, facts=facts, log=Path(folder, "log"))
    if as_json:
        text.show_json(to_plain({"ready": failure is None, "torch": torch, "proof": proof, "failure": failure}))
    elif failure is None:
        versions = f"torch {torch.version}, CUDA {torch.cuda_build or 'none'}"
        text.show_lines([f"ready: {python}, {versions}; self-test passed on {device}"])
    if failure is not None:
        problem = f"{python} is not ready for {device}: {failure.problem} [{failure.kind}: {failure.cause}]"
        raise HardwareError(problem, fix=failure.fix, cause=failure.cause)


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
    from tunix_rt.doctor.install import log_of, report_of

    versions, program = report.versions, "/bin/tunix-rt" if sys.platform != "win32" else "\\Scripts\\tunix-rt"
    return [
        f"ready: {report.path} with torch {versions['torch']}, CUDA {versions['cuda']}; self-test passed on {report.device}",
        f"  use it: {report.path}{program}",
        f"  report: {report_of(report.path)}, log: {log_of(report.path)}",
    ]
