"""Levels L0 and L1 of a run, a bundle or the output of an evaluation: everything that can be checked without a model. Neither
torch nor jax is loaded, and nothing raises for what the folder contains; a run of another format is an InputError."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.evidence.checks import CHECKS, may_stay_out
from tunix_rt.evidence.data_checks import accuracy_of, answer_problems, answered_in, data_problems
from tunix_rt.evidence.facts import Claim, Finding, Inputs, Label, Level, Run, completed_run, level_of, missing_files
from tunix_rt.evidence.manifest import companion_problems, manifest_problems
from tunix_rt.runs.checksums import RUN_SUMS, SUMS, few, is_leftover, is_weights, list_folder, shown, sums_problems
from tunix_rt.runs.record import MANIFEST, README, RunRecord, require_format

BROKEN = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What a value within its schema can still do to a function that computes with it."""
OWN = {SUMS, RUN_SUMS, MANIFEST, README}


@dataclass(slots=True, kw_only=True)
class Examination:
    """What was found, and the facts that later levels work on."""

    record: RunRecord
    run: Run | None = None
    cpu: Run | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    passed: list[Level] = field(default_factory=list)

    @property
    def level(self) -> Level:
        return level_of(self.findings, self.passed)

    def check(self, level: Level, name: str, problems: Callable[[], Iterable[str]]) -> None:
        """Run one check. One that cannot be computed from what the files contain is a finding too."""
        try:
            self.findings += [Finding(level=level, check=name, problem=problem) for problem in few(problems())]
        except TunixError as error:
            self.findings += [
                Finding(level=level, check=name, problem=line.strip()) for line in error.problem.splitlines()[:9]
            ]
        except BROKEN as error:
            problem = f"cannot be computed from these files: {type(error).__name__}: {shown(str(error))}"
            self.findings.append(Finding(level=level, check=name, problem=problem))


def examine(
    folder: Path, *, inputs: Inputs | None = None, weights: Path | None = None, may_lack_weights: bool = False
) -> Examination:
    """All checks of L0, then those of L1 if L0 found nothing. `weights` is the folder of the weights, if not `folder`."""
    done, inputs = Examination(record=RunRecord(folder)), inputs or Inputs()
    record = done.record
    done.check("L0", "folder", lambda: record.listing.problems)
    if not done.findings:
        require_format(record)
        _check_files(done, record, weights or folder, may_lack_weights=may_lack_weights)
    if done.findings:
        return done
    done.passed.append("L0")
    left = [name for name in record.listing.outside if not is_leftover(name)]
    done.notes += [f"not part of the run: {', '.join(left[:5])}"] if left else []
    done.run = completed_run(record)
    if done.run is None and not record.is_evaluation:
        status = record.result.status if record.result else "unfinished"
        done.notes.append(f"the run is {status}, not completed: L1 needs a completed run")
        return done
    _check_consistency(done, inputs)
    if not done.findings:
        done.passed.append("L1")
        done.claims = claims_of(done.run, inputs) if done.run else []
    return done


CHANGED = "the files above changed while the run went on; final_model is complete, train again for evidence"
GPU_FACTS = (
    "final_model is complete; for evidence, train where `tunix-rt doctor --prove` passes and NVML reports GPU memory"
)


def require_verified(folder: Path) -> None:
    """Raise EvidenceError if L0 or L1, which `evidence verify` requires too, finds a problem in a run that has just ended. Its
    weights, which it hashed itself, are not read again."""
    try:
        found = examine(folder, weights=folder / "nowhere", may_lack_weights=True).findings
    except TunixError as error:  # another format: precommit.json is no longer the one that the run wrote
        found = [Finding(level="L0", check="schema", problem=error.problem)]
    if found:
        listed = "\n".join(f"  {one.level} {one.check}: {one.problem}" for one in found[:9])
        fix = (
            GPU_FACTS if {one.check for one in found} == {"gpu"} else CHANGED
        )  # the facts of this machine, or the files
        raise EvidenceError(f"{folder} does not verify\n{listed}", fix=fix)


def _check_files(done: Examination, record: RunRecord, weights: Path, *, may_lack_weights: bool) -> None:
    done.check("L0", "schema", record.schema_problems)
    if done.findings:
        return
    if record.is_bundle:
        done.check("L0", "copies", lambda: _copy_problems(record))
        if inner := _inner(record):
            _check_files(done, inner, inner.root, may_lack_weights=True)
    elif SUMS not in record:
        done.check("L0", "hashes", lambda: [f"{record.where}{SUMS}: missing, so nothing can be checked"])
    done.check("L0", "hashes", lambda: _hash_problems(record, weights, may_lack_weights=may_lack_weights))
    if record.result is not None and record.result.status == "completed":
        done.check("L0", "files", lambda: missing_files(record))


def _inner(record: RunRecord) -> RunRecord | None:
    """The run on the CPU in a bundle, where it has one."""
    inside = any(name.startswith("cpu/") for name in record.listing.files)
    return RunRecord(record.root / "cpu", "cpu/") if inside else None


def _hash_problems(record: RunRecord, weights: Path, *, may_lack_weights: bool) -> Iterator[str]:
    """Every file against SHA256SUMS. A run that was brought home from another machine may lack its weights."""
    lack = [name for name in record.sums if may_stay_out(name)] if may_lack_weights else []
    together = record.root == weights
    for root, heavy in ((record.root, False), (weights, True))[: 1 if together else 2]:
        there = record.listing.files if root == record.root else list_folder(root).files
        present = {name for name in there if together or is_weights(name) == heavy}
        hashes = {name: digest for name, digest in record.sums.items() if together or is_weights(name) == heavy}
        yield from (f"{record.where}{one}" for one in sums_problems(root, present, hashes, may_lack=lack))


def _copy_problems(record: RunRecord) -> Iterator[str]:
    """The files of a bundle are those that the run ended with, and its own."""
    ended, present = record.run_sums, record.sums
    for name in sorted(OWN - {SUMS} - present.keys()):
        yield f"{name}: missing"
    for name in sorted(ended.keys() - present.keys()):
        if not may_stay_out(name):
            yield f"{name}: missing, though the run had it"
    for name in sorted(present.keys() - OWN):
        if not name.startswith("cpu/") and ended.get(name) != present[name]:
            yield f"{name}: not as the run left it"


def _check_consistency(done: Examination, inputs: Inputs) -> None:
    record, run = done.record, done.run
    if run is not None:
        for name, check in CHECKS.items():
            done.check("L1", name, lambda check=check: check(run))  # type: ignore[misc]
        done.check("L1", "data", lambda: data_problems(run, inputs))
    answered = answered_in(record, run)
    if answered is not None:
        done.check("L1", "answers", lambda: answer_problems(answered))
    if run is None or not record.is_bundle:
        return
    if inner := _inner(record):
        cpu = done.cpu = completed_run(inner)
        done.check("L1", "cpu-run", lambda: companion_problems(run, cpu))
        for name, check in CHECKS.items() if cpu is not None else ():
            done.check("L1", name, lambda check=check: check(cpu))  # type: ignore[misc]
    done.check("L1", "manifest", lambda: manifest_problems(run, done.cpu))


# --- claims -----------------------------------------------------------------------------------------------------------


def claims_of(run: Run, inputs: Inputs) -> list[Claim]:
    """The claims of the run, as far as L1 checks them."""
    committed, result, model = run.commitment, run.result, run.commitment.base_model
    after = run.record.scores("after") if run.answered else None
    machine = run.record.processes[-1].machine
    tokens, seconds = (sum(getattr(line, name) for line in run.metrics[1:]) for name in ("tokens", "seconds"))
    measured = (result.memory.measured_bytes or 0) if result.memory else 0
    questions = "the held-out questions" if committed.evalset is None else committed.evalset.key
    answers: tuple[Label, str] = ("self-reported", f"recorded answers to {questions}") if after else ("not checked", "")
    data, base = inputs.dataset(committed.dataset.sha256) or (), inputs.base_model(model.files, model.weights)
    rows: list[tuple[str, str, Label, str]] = [
        ("loss", f"{result.final_loss:.6f}", "self-reported", "the metrics chain is intact"),
        ("accuracy", accuracy_of(after) if after else "not evaluated", *answers),
        ("steps", str(run.total), "consistent", "from settings, seed and rows; batches and learning rates of every step"),
        ("dataset", *_looked_up(committed.dataset.key, ", ".join(data) or None, option="--data FILE")),
        ("base model", *_looked_up(model.name, base, f" ({model.weights} weights)", option="--model DIR")),
        ("commit", f"source {committed.source_sha256[:12]}", "self-reported", "no repository was named (--repository CLONE)"),
        ("device", f"{machine.device} ({machine.gpu.name if machine.gpu else machine.cpu})", "self-reported", ""),
        ("speed", f"{tokens / max(seconds, 1e-9):,.1f} tokens/s after the first step", "self-reported", ""),
        ("memory", f"{measured / 2**30:.2f} GiB", "self-reported", ""),
        ("time", f"{result.seconds:,.1f} s", "self-reported", ""),
        ("signer", "none", "not checked", "--signed-by KEY"),
    ]  # fmt: skip
    if run.config.training.samples:
        count = sum(line.trained_rollouts or 0 for line in run.metrics)
        gap = max((line.logprob_gap or 0.0 for line in run.metrics), default=0.0)
        weighed = "rewards, advantages and weights, from the recorded texts and ids"
        rows += [
            ("rollouts", f"{count:,} trained", "recomputed", weighed),
            (
                "sampling",
                "temperature 1",
                "not checked",
                "that the model drew these tokens: --segments draws them again",
            ),
            ("log-probability gap", f"{gap:.2g} at most", "self-reported", "sampler against update"),
        ]
    return [Claim(name=name, value=value, label=label, how=how) for name, value, label, how in rows]


def _looked_up(recorded: str, found: str | None, more: str = "", *, option: str) -> tuple[str, Label, str]:
    """A recorded name is self-reported; a file with the hash has the name that it has here."""
    if found is None:
        return recorded + more, "self-reported", f"no file with its hash was given ({option})"
    each = (path.rstrip("/").removesuffix("/dataset.jsonl").rpartition("/")[2] for path in found.split(", "))
    name = ", ".join(each)
    return name + more, "consistent", f"by its hash; recorded as {recorded}"
