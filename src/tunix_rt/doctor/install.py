"""Create and verify the environment that `environment.py` plans, with a log and a report beside it. An environment that is
not ready is removed. No other environment is touched.
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
from tunix_rt.doctor.selftest import run_selftest, selftest_problem
from tunix_rt.doctor.wheels import INDEX_BASE, Wheel
from tunix_rt.errors import ConfigError, HardwareError, Preempted, StorageError, TunixError
from tunix_rt.storage import storage, to_plain, write_json

SCHEMA = "tunix-rt/environment/1"
CHECK_SECONDS = 180
NOT_FOR_CHILDREN = (
    "PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTORCH_NVML_BASED_CUDA_CHECK",
)  # fmt: skip
"""Variables that would add other packages to the new environment, install its packages elsewhere, or let torch detect the
GPU through NVML instead of CUDA."""

Print = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    step: str
    command: str
    exit_code: int | None
    """None: it timed out, or did not start."""
    seconds: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    wheel: str
    index: str
    """Where pip looked; a `find-links` in the settings of pip may have had it too."""
    cuda: str
    ran: tuple[Ran, ...]
    failure: Failure | None
    versions: Mapping[str, str]
    proof: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReport:
    """The content of `<path>.json`. The first failure is the cause; the others are those of the fallback."""

    schema: str = SCHEMA
    status: str
    """ready, refused (nothing was installed) or failed."""
    device: str
    path: str
    kind: str | None = None
    cause: str | None = None
    problem: str | None = None
    fix: str | None = None
    attempts: tuple[Attempt, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    proof: Any = None


def log_of(path: Path | str) -> Path:
    return Path(f"{path}.log")


def report_of(path: Path | str) -> Path:
    return Path(f"{path}.json")


def check_path(path: Path) -> None:
    """ConfigError if `path` exists, or is the environment of this process."""
    if os.path.realpath(path) == os.path.realpath(sys.prefix):
        raise ConfigError(f"{path} is the environment that tunix-rt runs in", fix="choose another --path")
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists", fix="choose another --path")
    if not path.absolute().parent.is_dir():
        problem = f"the folder {path.absolute().parent} does not exist"
        raise ConfigError(problem, fix="create it, or choose another --path")
    for beside in (log_of(path), report_of(path)):
        with storage(beside, fix="choose another --path"):
            if os.path.lexists(beside) and not (beside.is_file() and SCHEMA.encode() in beside.read_bytes()):
                problem = f"{beside} is not of `env create` and would be overwritten"
                raise ConfigError(problem, fix="choose another --path")


# --- creation ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """Runs commands and keeps their output."""

    path: Path
    say: Print

    def write(self, text: str) -> None:
        with storage(self.path, fix="free space or permissions there"), self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def run(self, step: Step, *, seconds: float | None = None) -> tuple[Ran, str]:
        """How the command ended, and the end of its output. It and its children end with us, or after `seconds`."""
        self.write(f"\n$ {step.line}\n")
        begin = self.path.stat().st_size
        with self.path.open("ab") as file:
            ended = run_into(
                step.command, file, seconds=seconds, environment=child_environment(os.environ),
                pulse=lambda passed: self.say(f"  {passed:.0f} s"),
            )  # fmt: skip
        silent = self.path.stat().st_size == begin
        if ended.code is None or ended.code < 0 or (ended.code > 0 and silent):  # else its own output has the reason
            self.write(f"{step.name} {ended.words}\n")
        with self.path.open("rb") as file:
            output = last_text(file, begin)
        seconds_taken, words = round(ended.seconds, 1), last_words(output)
        return Ran(step=step.name, command=step.line, exit_code=ended.code, seconds=seconds_taken, words=words), output


def child_environment(ours: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in ours.items() if name not in NOT_FOR_CHILDREN}
    return {**kept, "PYTHONNOUSERSITE": "1"}


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP as KeyboardInterrupt, so that each removes an incomplete environment; a second one is ignored.

    A signal that is ignored stays so, as under `nohup`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in names}
    handled = {number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def stop(*_: object) -> None:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        for number in handled:
            signal.signal(number, stop)
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def create_environment(
    facts: Facts, *, device: str, path: Path, index_base: str = INDEX_BASE, say: Print = lambda line: None
) -> EnvironmentReport:
    """Create and verify the environment at `path`, and write the report beside it. `path` is removed unless it is `ready`."""
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
        with _signals_as_interrupt():
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
    """One wheel, from an empty folder to the self-test; the folder is removed unless all of it succeeds."""
    ran: list[Ran] = []
    seen: dict[str, Any] = {"versions": {}, "proof": None}
    done = False
    with storage(plan.path, fix="choose another --path"):
        plan.path.mkdir()  # it is new, so it may be removed below
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
    log.say(f"creating {plan.path}")
    done, output = _keep(ran, log.run(venv))
    if done.exit_code != 0:
        problem = f"{sys.executable} cannot create a virtual environment ({last_words(output)})"
        fix = "install its venv package (Debian, Ubuntu: apt install python3-venv)"
        return Failure(step="venv", kind="environment", cause="venv-failed", problem=problem, fix=fix)
    log.say(f"installing {wheel.requirement}")
    done, output = _keep(ran, log.run(install))
    if done.exit_code != 0:
        return judge_install(output, "wheel", wheel.requirement)
    done, output = _keep(ran, log.run(check, seconds=CHECK_SECONDS))
    torch, failure = judge_quick_check(output, done.exit_code, plan.device, facts)
    seen["versions"] = {"python": facts.host.python, "torch": torch.version, "cuda": torch.cuda_build or "none"}
    if failure is not None:
        return failure
    log.say("installing tunix-rt with its training dependencies")
    done, output = _keep(ran, log.run(packages))
    if done.exit_code != 0:
        return judge_install(output, "packages", "tunix-rt with its dependencies")
    log.say(f"running the kernel self-test on {plan.device}")
    done, output = _keep(ran, log.run(check, seconds=CHECK_SECONDS))
    after, failure = judge_quick_check(output, done.exit_code, plan.device, facts)
    if failure is None and (after.version, after.cuda_build) != (torch.version, torch.cuda_build):
        known = {"step": "packages", "kind": "environment", "cause": "torch-changed", "fix": "see the log"}
        failure = Failure(problem=f"the other packages changed torch {torch.version} to {after.version}", **known)
    if failure is None:
        seen["proof"], failure = _self_test(plan.python, plan.device)
        ran.append(_record_self_test(proof, log, seen["proof"], failure))
    return failure


def _keep(ran: list[Ran], result: tuple[Ran, str]) -> tuple[Ran, str]:
    ran.append(result[0])
    return result


def _self_test(python: Path, device: str) -> tuple[Any, Failure | None]:
    """The kernel self-test of this Python on the device, as plain values, and what failed."""
    proof = run_selftest(
        backend="torch", device=device, dtype=DTYPE, head_size=HEAD_SIZE, python=str(python.absolute()),
        environment=child_environment(os.environ),
    )  # fmt: skip
    wrong = selftest_problem(proof)
    if wrong is None:
        return _finite(to_plain(proof)), None
    problem, fix = wrong
    return _finite(to_plain(proof)), Failure(step="proof", kind="proof", cause="proof-failed", problem=problem, fix=fix)


def _finite(value: Any) -> Any:
    """Plain values without NaN and infinity, which JSON lacks and a failed self-test may have."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _record_self_test(step: Step, log: _Log, proof: Any, failure: Failure | None) -> Ran:
    log.write(f"\n$ {step.line}\n{json.dumps(proof, indent=1)}\n")
    words, code = ("passed", 0) if failure is None else (failure.problem, 1)
    seconds = round(proof["seconds"], 1)
    return Ran(step=step.name, command=step.line, exit_code=code, seconds=seconds, words=words)


def verify_environment(python: Path, *, device: str, facts: Facts, log: Path) -> tuple[Torch, Any, Failure | None]:
    """Quick check and kernel self-test with the Python of an existing environment: its torch, the self-test, what failed.

    The path is made absolute, not resolved: a plain name would be searched in PATH, and the link selects the environment.
    """
    python = python.absolute()
    ran, output = _Log(path=log, say=lambda line: None).run(
        Step(name="check", command=quick_check(str(python), device)), seconds=CHECK_SECONDS
    )
    torch, failure = judge_quick_check(output, ran.exit_code, device, facts)
    if failure is not None:
        return torch, None, failure
    proof, failure = _self_test(python, device)
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
    write_json(report_of(report.path), report)
    return report


def error_of(report: EnvironmentReport) -> TunixError | None:
    """The error of a report that is not `ready`; it names the report, and the log if there is one."""
    if report.status == "ready":
        return None
    kept = f"report: {report_of(report.path)}" + (f", log: {log_of(report.path)}" if report.status == "failed" else "")
    problem, fix = f"{report.problem} [{report.kind}: {report.cause}]", f"{report.fix}; {kept}"
    if report.kind == "storage":
        return StorageError(problem, fix=fix)
    if report.kind == "stopped":
        return Preempted(f"{problem}; the incomplete {report.path} was removed", fix=fix)
    return HardwareError(problem, fix=fix, cause=report.cause or "")
