"""Makes and verifies the environment that `environment.py` planned, and leaves a log and a report beside it. Unless it is
ready nothing else is left. No other environment is touched.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.doctor.child_process import last_text, run_into
from tunix_rt.doctor.environment import (
    DTYPE,
    HEAD_SIZE,
    LAST_RESORT,
    EnvironmentPlan,
    Failure,
    Step,
    judge_install,
    judge_quick_check,
    last_words,
    next_wheel,
    plan_environment,
    quick_check,
    why_refused,
    without_password,
)
from tunix_rt.doctor.facts import Facts, Torch
from tunix_rt.doctor.selftest import proof_problem, prove
from tunix_rt.doctor.wheels import INDEX_BASE, Wheel
from tunix_rt.errors import ConfigError, HardwareError, Preempted, StorageError, TunixError
from tunix_rt.storage import storage, to_plain, write_json

SCHEMA = "tunix-rt/environment/1"
CHECK_SECONDS = 180
NOT_FOR_CHILDREN = (
    "PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip
"""Variables that would bring other packages into the new environment, put its packages elsewhere, or let torch ask the
driver instead of CUDA whether there is a GPU."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    step: str
    command: str
    exit_code: int | None
    """None: it was ended when its time was over, or could not be started."""
    seconds: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    wheel: str
    index: str
    """Where it was asked for; a `find-links` of pip's own settings may have had it too."""
    cuda: str
    ran: tuple[Ran, ...]
    failure: Failure | None
    versions: Mapping[str, str]
    proof: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport:
    """How it went; what `<path>.json` holds. The first failure is the cause: what came after was its stand-in."""

    schema: str = SCHEMA
    status: str
    """ready, refused (nothing was begun) or failed."""
    device: str
    path: str
    kind: str | None = None
    cause: str | None = None
    problem: str | None = None
    fix: str | None = None
    attempts: tuple[Attempt, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    proof: Any = None

    @property
    def log_path(self) -> Path:
        return log_of(Path(self.path))

    @property
    def report_path(self) -> Path:
        return report_of(Path(self.path))


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.log")


def report_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def check_path(path: Path) -> None:
    """A ConfigError for a place that is taken, first of all by the environment we run in."""
    if os.path.realpath(path) == os.path.realpath(sys.prefix):
        raise ConfigError(f"{path} is the environment that tunix-rt runs in", fix="choose another --path")
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists", fix="choose another --path")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"the folder {path.absolute().parent} does not exist", fix="make it, or choose another --path"
        )
    for beside in (log_of(path), report_of(path)):
        with storage(beside, fix="choose another --path"):
            if os.path.lexists(beside) and not (beside.is_file() and SCHEMA.encode() in beside.read_bytes()):
                raise ConfigError(f"{beside} would be overwritten, and is not ours", fix="choose another --path")


# --- making it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """Runs commands and keeps everything they print."""

    path: Path
    say: Say

    def write(self, words: str) -> None:
        with storage(self.path, fix="free space or permissions there"), self.path.open("a", encoding="utf-8") as file:
            file.write(words)

    def run(self, step: Step, *, seconds: float | None = None) -> tuple[Ran, str]:
        """What became of the command, and the end of what it said. It and its children end with us, or when the time is over."""
        self.write(f"\n$ {step.line}\n")
        begin = self.path.stat().st_size
        with self.path.open("ab") as file:
            ended = run_into(
                step.command, file, seconds=seconds, environment=child_environment(os.environ),
                pulse=lambda passed: self.say(f"  {passed:.0f} s"),
            )  # fmt: skip
        silent = self.path.stat().st_size == begin
        if ended.code is None or ended.code < 0 or (ended.code > 0 and silent):  # else its last words are its own
            self.write(f"{step.name} {ended.words}\n")
        with self.path.open("rb") as file:
            said = last_text(file, begin)
        seconds_taken, words = round(ended.seconds, 1), last_words(said)
        return Ran(step=step.name, command=step.line, exit_code=ended.code, seconds=seconds_taken, words=words), said


def child_environment(ours: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in ours.items() if name not in NOT_FOR_CHILDREN}
    return {**kept, "PYTHONNOUSERSITE": "1"}


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP as KeyboardInterrupt, so that all leave nothing half-made behind; a second one does not disturb it.

    A signal that is ignored stays so: `nohup` asks for that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in names}
    heard = {number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def stop(*_: object) -> None:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        for number in heard:
            signal.signal(number, stop)
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def create_environment(
    facts: Facts, *, device: str, path: Path, index_base: str = INDEX_BASE, say: Say = lambda words: None
) -> EnvironmentReport:
    """Make and verify the environment at `path`, and write the report beside it. Unless it is `ready`, `path` is gone."""
    check_path(path)
    refusal = why_refused(facts, device)
    if refusal is not None:
        return _written(EnvironmentReport(status="refused", device=device, path=str(path), **_cause(refusal)))
    plan = plan_environment(facts, device, path, index_base)
    log = _Log(path=log_of(path), say=say)
    with storage(log.path):
        log.path.write_text(f"{SCHEMA}: env create --device {device} --path {path}: {plan.reason}\n", encoding="utf-8")
    attempts: list[Attempt] = []
    try:
        with _ended_like_ctrl_c():
            wheel: Wheel | None = plan.wheels[0]
            while wheel is not None and len(attempts) < 2:
                attempts.append(_attempt(plan, wheel, facts, log))
                failure = attempts[-1].failure
                if failure is None:
                    break
                say(f"failed ({failure.kind}): {failure.problem}")
                wheel = next_wheel(plan.wheels, wheel, step=failure.step, kind=failure.kind)
    except KeyboardInterrupt:
        stopped = Failure(
            step="stopped", kind="stopped", cause="signal", problem="stopped by a signal", fix="run the command again"
        )
        ended = EnvironmentReport(status="failed", device=device, path=str(path), **_cause(stopped))
        return _written(replace(ended, attempts=tuple(attempts)))
    return _written(_report(plan, attempts))


def _attempt(plan: EnvironmentPlan, wheel: Wheel, facts: Facts, log: _Log) -> Attempt:
    """One wheel from an empty folder to the proof; the folder goes unless all of it succeeds."""
    ran: list[Ran] = []
    seen: dict[str, Any] = {"versions": {}, "proof": None}
    failure: Failure | None = None
    done = False
    with storage(plan.path, fix="choose another --path"):
        plan.path.mkdir()  # not there before: what is removed below is ours
    try:
        failure = _install_and_verify(plan, wheel, facts, log, ran, seen)
        done = failure is None
    finally:
        if not done:
            with storage(plan.path, fix="remove it by hand"):
                shutil.rmtree(plan.path)
    index = without_password(f"{plan.index_base}/{wheel.index}") if wheel.index else "registry"
    return Attempt(wheel=wheel.requirement, index=index, cuda=wheel.cuda, ran=tuple(ran), failure=failure, **seen)


def _install_and_verify(
    plan: EnvironmentPlan, wheel: Wheel, facts: Facts, log: _Log, ran: list[Ran], seen: dict[str, Any]
) -> Failure | None:
    venv, install, check, packages, proof = plan.steps(wheel)
    log.say(f"making {plan.path}")
    done, said = _keep(ran, log.run(venv))
    if done.exit_code != 0:
        problem = f"{sys.executable} cannot make a virtual environment ({last_words(said)})"
        fix = "install its venv package (Debian, Ubuntu: apt install python3-venv)"
        return Failure(step="venv", kind="environment", cause="venv-failed", problem=problem, fix=fix)
    log.say(f"installing {wheel.requirement}")
    done, said = _keep(ran, log.run(install))
    if done.exit_code != 0:
        return judge_install(said, "wheel", wheel.requirement)
    done, said = _keep(ran, log.run(check, seconds=CHECK_SECONDS))
    torch, failure = judge_quick_check(said, done.exit_code, plan.device, facts)
    seen["versions"] = {"python": facts.host.python, "torch": torch.version, "cuda": torch.cuda_build or "none"}
    if failure is not None:
        return failure
    log.say("installing tunix-rt and what training needs")
    done, said = _keep(ran, log.run(packages))
    if done.exit_code != 0:
        return judge_install(said, "packages", "tunix-rt with its dependencies")
    log.say(f"proving it on {plan.device}")
    done, said = _keep(ran, log.run(check, seconds=CHECK_SECONDS))
    after, failure = judge_quick_check(said, done.exit_code, plan.device, facts)
    if failure is None and (after.version, after.cuda_build) != (torch.version, torch.cuda_build):
        problem = f"the other packages changed torch {torch.version} to {after.version}"
        failure = Failure(
            step="packages", kind="environment", cause="torch-changed", problem=problem, fix="see the log"
        )
    if failure is None:
        seen["proof"], failure = _proven(plan.python, plan.device)
        ran.append(_proof_ran(proof, log, seen["proof"], failure))
    return failure


def _keep(ran: list[Ran], result: tuple[Ran, str]) -> tuple[Ran, str]:
    ran.append(result[0])
    return result


def _proven(python: Path, device: str) -> tuple[Any, Failure | None]:
    """The proof that this Python computes rightly on the device, plain, and what is wrong with it."""
    with _environment_of_children():
        proof = prove(backend="torch", device=device, dtype=DTYPE, head_size=HEAD_SIZE, python=str(python.absolute()))
    wrong = proof_problem(proof)
    if wrong is None:
        return _finite(to_plain(proof)), None
    problem, fix = wrong
    return _finite(to_plain(proof)), Failure(step="proof", kind="proof", cause="proof-failed", problem=problem, fix=fix)


@contextlib.contextmanager
def _environment_of_children() -> Iterator[None]:
    """Our environment as a child shall inherit it; `prove` starts its own."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(child_environment(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _finite(value: Any) -> Any:
    """Plain values as JSON can hold them: a failed proof may have NaN among its figures."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _proof_ran(step: Step, log: _Log, proof: Any, failure: Failure | None) -> Ran:
    log.write(f"\n$ {step.line}\n{json.dumps(proof, indent=1)}\n")
    words, code = ("proven", 0) if failure is None else (failure.problem, 1)
    seconds = round(proof["seconds"], 1)
    return Ran(step=step.name, command=step.line, exit_code=code, seconds=seconds, words=words)


def verify_environment(python: Path, *, device: str, facts: Facts, log: Path) -> tuple[Torch, Any, Failure | None]:
    """Quick check and proof with the Python of an environment that is there: its torch, the proof, what is wrong.

    Made absolute, not resolved: a plain name would be looked for in PATH, and the link is what makes it this environment's.
    """
    python = python.absolute()
    ran, said = _Log(path=log, say=lambda words: None).run(
        Step(name="check", command=quick_check(str(python), device)), seconds=CHECK_SECONDS
    )
    torch, failure = judge_quick_check(said, ran.exit_code, device, facts)
    if failure is not None:
        return torch, None, failure
    proof, failure = _proven(python, device)
    return torch, proof, failure


# --- the report -------------------------------------------------------------------------------------------------------


def _report(plan: EnvironmentPlan, attempts: Sequence[Attempt]) -> EnvironmentReport:
    last = attempts[-1]
    known: dict[str, Any] = {"device": plan.device, "path": str(plan.path), "attempts": tuple(attempts)}
    if last.failure is None:
        versions = {**last.versions, "tunix-rt": tunix_rt.__version__}
        return EnvironmentReport(status="ready", versions=versions, proof=last.proof, **known)
    first = attempts[0].failure or last.failure
    tried = "; then ".join(f"{one.wheel}: {one.failure.problem}" for one in attempts if one.failure)
    fix = first.fix if plan.device == "cpu" or LAST_RESORT in first.fix else f"{first.fix}; {LAST_RESORT}"
    ended = replace(first, problem=f"no environment with a torch that works on {plan.device}: {tried}", fix=fix)
    return EnvironmentReport(status="failed", **known, **_cause(ended))


def _cause(failure: Failure) -> dict[str, Any]:
    return {"kind": failure.kind, "cause": failure.cause, "problem": failure.problem, "fix": failure.fix}


def _written(report: EnvironmentReport) -> EnvironmentReport:
    write_json(report.report_path, report)
    return report


def error_of(report: EnvironmentReport) -> TunixError | None:
    """The error a report that is not `ready` ends with; it names the report, and the log where there is one."""
    if report.status == "ready":
        return None
    kept = f"report: {report.report_path}" + (f", whole log: {report.log_path}" if report.status == "failed" else "")
    problem, fix = f"{report.problem} [{report.kind}: {report.cause}]", f"{report.fix}; {kept}"
    if report.kind == "storage":
        return StorageError(problem, fix=fix)
    if report.kind == "stopped":
        return Preempted(f"{problem}; the half-made {report.path} was removed", fix=fix)
    return HardwareError(problem, fix=fix, cause=report.cause or "")
