"""What can be checked of a run or a bundle without running anything: every check by its name, all findings, and which
checks an older folder leaves room for. Nothing here raises for what it reads, and neither torch nor jax is loaded."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tunix_rt.errors import EvidenceError, TunixError
from tunix_rt.evidence.admitting import text_problems, unreadable
from tunix_rt.evidence.agreeing import (
    LEDGERS,
    RUN_HASHES,
    SAYS,
    canonical_problems,
    claim_problems,
    code_problems,
    commit_problems,
    copy_problems,
    form_problems,
    has_cpu_run,
    is_bundle,
    manifest_problems,
    own_files,
    provenance_problems,
    refuse_another_setup,
    refuse_other_batches,
    refuse_the_same_steps,
    schema_of,
    schema_problems,
)
from tunix_rt.evidence.claims import SCHEMA, SECOND_SCHEMA, UNTOUCHED, RunFiles, claims_of, read_object, read_run
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.findings import Finding, Level
from tunix_rt.evidence.gathered import Noted, gather
from tunix_rt.evidence.hashes import hash_problems, list_empty, list_uncovered, step_problems
from tunix_rt.evidence.ledger_checks import ledger_problems
from tunix_rt.evidence.log_facts import log_fact_problems
from tunix_rt.evidence.manifest import MANIFEST
from tunix_rt.evidence.overlapping import dataset_problems, overlap_problems
from tunix_rt.evidence.physics import (
    account_problems,
    memory_problems,
    parameter_problems,
    rate_problems,
    unpublished,
)
from tunix_rt.evidence.provenance import PROVENANCE
from tunix_rt.evidence.repeated import (
    base_model_problems,
    data_problems,
    dataset_not_shipped,
    doctor_problems,
    host_memory_problems,
    length_problems,
    model_not_shipped,
    plan_problems,
    question_problems,
    reload_problems,
)
from tunix_rt.evidence.rescore import answer_problems
from tunix_rt.evidence.resumed import checkpoint_problems, process_problems, resume_problems
from tunix_rt.evidence.steps import (
    batch_problems,
    count_problems,
    heldout_problems,
    learning_rate_problems,
    number_problems,
    row_problems,
    setting_problems,
)
from tunix_rt.evidence.strict import placeholder_problems
from tunix_rt.evidence.timing import (
    log_problems,
    log_step_problems,
    nvidia_smi_problems,
    order_problems,
    seconds_problems,
)
from tunix_rt.evidence.told import is_evaluation, object_in, part
from tunix_rt.evidence.unhashed import unhashed_problems
from tunix_rt.evidence.whole import require_whole, whole_problems
from tunix_rt.rundir import RunDir

Value = TypeVar("Value")

BROKEN = (
    OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip
"""What a file of another shape than we write can do to a function that computes with it. `ValueError` holds those of
Unicode, JSON and dates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question to the facts of a run. `needs` are those that older runs did not note; `on` the device it is for."""

    name: str
    ask: Callable[[Noted], Iterable[str]]
    needs: tuple[str, ...] = ()
    on: str = ""
    unable: Callable[[Noted], str] = lambda noted: ""
    """Why a part of it cannot be made for this run, in words; empty where all of it can."""


CHECKS = (
    Check(name="settings", ask=setting_problems),
    Check(name="figures", ask=number_problems),
    Check(name="steps", ask=count_problems),
    Check(name="learning-rate", ask=learning_rate_problems),
    Check(name="held-out", ask=heldout_problems),
    Check(name="rows", ask=row_problems, needs=("rows",)),
    Check(name="batch-order", ask=batch_problems, needs=("rows",)),
    Check(name="time-order", ask=order_problems),
    Check(name="step-time", ask=seconds_problems),
    Check(name="log", ask=log_problems),
    Check(name="log-steps", ask=log_step_problems),
    Check(name="log-facts", ask=log_fact_problems),
    Check(name="parameters", ask=parameter_problems),
    Check(name="flop-rate", ask=rate_problems, needs=("model",), unable=unpublished),
    Check(name="memory", ask=account_problems),
    Check(name="gpu-memory", ask=memory_problems, on="cuda", unable=unpublished),
    Check(name="nvidia-smi", ask=nvidia_smi_problems, on="cuda"),
    Check(name="processes", ask=process_problems, needs=("processes",)),
    Check(name="resumed", ask=resume_problems, needs=("processes", "checkpoints")),
    Check(name="checkpoints", ask=checkpoint_problems, needs=("processes", "checkpoints")),
    Check(name="dataset", ask=dataset_problems, unable=dataset_not_shipped),
    Check(name="overlap", ask=overlap_problems, unable=dataset_not_shipped),
    Check(name="traces", ask=data_problems, unable=dataset_not_shipped),
    Check(name="base-model", ask=base_model_problems, unable=model_not_shipped),
    Check(name="plan", ask=plan_problems),
    Check(name="host-memory", ask=host_memory_problems, on="cpu"),
    Check(name="final-model", ask=reload_problems),
    Check(name="answer-length", ask=length_problems),
    Check(name="questions", ask=question_problems),
    Check(name="doctor", ask=doctor_problems),
)
OF_CPU_RUN = (
    "settings",
    "figures",
    "steps",
    "learning-rate",
    "time-order",
    "step-time",
    "log",
    "log-steps",
    "log-facts",
    "batch-order",
    "flop-rate",
    "host-memory",
    "doctor",
)


EVERY_CHECK = (
    "readable", "hashes", "canonical", "text", "schema", "chain", "answers", "files", "copies", "evidence-files", "claims",
    "provenance", "manifest", "commit", "cpu-run", *(check.name for check in CHECKS),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The findings, and the checks that could not be made: by name where the folder is older, with the reason after a
    colon where what they need is not at hand."""

    findings: tuple[Finding, ...]
    unmade: tuple[str, ...] = ()
    kind: str = "folder"

    @property
    def words(self) -> str:
        """What could not be checked; empty where everything was."""
        older = [told for told in self.unmade if ":" not in told]
        reasons: dict[str, list[str]] = {}
        for told in self.unmade:
            name, _, reason = told.partition(": ")
            if reason:
                reasons.setdefault(reason, []).append(name)
        said = [f"{reason}: not or not wholly checked: {', '.join(names)}" for reason, names in reasons.items()]
        if older:
            count = f"{len(older)} of {len(EVERY_CHECK)} checks cannot be made"
            said.insert(0, f"an older {self.kind}: {count}: {', '.join(older)}")
        return "; ".join(said)


def findings_of(folder: Path, repository: Path | None = None) -> list[Finding]:
    """Every finding of the static checks; empty means level L1. The commit is looked up in `repository` alone."""
    return list(examine(folder, repository).findings)


def examine(folder: Path, repository: Path | None = None) -> Examined:
    """All static checks of a run, a bundle or the output of an evaluation. Never raises.

    What it says is computed again only once its files are those that were hashed.
    """
    asking, run = _Asking(), RunDir(folder)
    if not os.path.isdir(folder):
        asking.ask("L0", "readable", lambda: [f"{folder} is not a folder"])
    else:
        asking.ask("L0", "readable", lambda: unreadable(folder))
    if asking.findings:
        return asking.examined("folder")
    if not os.path.lexists(run.hashes):
        asking.ask("L0", "hashes", lambda: unhashed_problems(folder))
        return asking.examined("folder")
    bundle = is_bundle(folder)
    asking.ask("L0", "hashes", lambda: hash_problems(run))
    if bundle:
        asking.ask("L0", "hashes", lambda: [f"covered by no hash: {name}" for name in list_uncovered(folder)])
        asking.ask("L0", "hashes", lambda: [f"an empty folder: {name}" for name in list_empty(folder)])
    asking.ask("L0", "canonical", lambda: canonical_problems(run.hashes) if not asking.findings else ())
    if asking.findings:
        return asking.examined("bundle" if bundle else "run")
    if not is_evaluation(run):
        asking.ask("L1", "chain", lambda: step_problems(run))
    asking.ask("L1", "answers", lambda: answer_problems(run))
    if bundle:
        return _examine_bundle(asking, folder, repository)
    return asking.examined("evaluation") if is_evaluation(run) else _examine_run(asking, run)


class _Asking:
    """Puts one check after the other, and keeps what they find. A check that cannot be computed is a finding too."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.unmade: list[str] = []

    def ask(self, level: Level, check: str, ask: Callable[[], Iterable[str]]) -> None:
        def note_all() -> None:
            for problem in ask():
                self._note(level, check, problem)

        self.have(level, check, note_all)

    def have(self, level: Level, check: str, get: Callable[[], Value]) -> Value | None:
        """What `get` gives; None where the files do not hold it, which is a finding of `check`."""
        try:
            return get()
        except TunixError as error:
            for line in error.problem.splitlines():
                self._note(level, check, line.strip())
        except BROKEN as error:
            words = f"cannot be computed from what the files hold: {type(error).__name__}: {shown(str(error))}"
            self._note("L0", check, f"the check `{check}` {words}")
        return None

    def ask_all(self, noted: Noted, checks: Iterable[Check] = CHECKS) -> None:
        """Those that the device and the age of the run leave room for."""
        for check in checks:
            if check.on and noted.run.result.get("device") != check.on:
                continue
            if any(getattr(noted, name) is None for name in check.needs):
                self.unmade.append(check.name)
            else:
                if reason := self.have("L1", check.name, partial(check.unable, noted)):
                    self.unmade.append(f"{check.name}: {reason}")
                self.ask("L1", check.name, partial(check.ask, noted))

    def _note(self, level: Level, check: str, problem: str) -> None:
        if not any(known.problem == problem for known in self.findings):  # two checks may see one thing
            self.findings.append(Finding(level=level, check=check, problem=problem))

    def examined(self, kind: str) -> Examined:
        return Examined(findings=tuple(self.findings), unmade=tuple(dict.fromkeys(self.unmade)), kind=kind)


def _examine_run(asking: _Asking, run: RunDir) -> Examined:
    """What is completed is held to all that its version noted; what is not, to its hashes, its chain and its lists."""
    asking.ask("L1", "ledgers", lambda: ledger_problems(run))
    if asking.findings or not run.precommit.exists() or object_in(run.result).get("status") != "completed":
        return asking.examined("run")
    if not run.log.exists() or not run.metrics.exists():  # made by hand, or of a test
        return asking.examined("run")
    noted = asking.have("L1", "files", lambda: gather(read_run(run.root), run.hashes))
    if noted is not None:
        asking.ask("L1", "copies", lambda: code_problems(noted.hashes))
        asking.ask_all(noted)
        if LEDGERS in part(noted.run.precommit, "source_files"):
            asking.ask("L1", "files", lambda: _lacking(noted))
    return asking.examined("run")


def _examine_bundle(asking: _Asking, folder: Path, repository: Path | None) -> Examined:
    asking.ask("L0", "text", lambda: text_problems(folder))
    asking.ask("L0", "canonical", lambda: canonical_problems(folder / RUN_HASHES))
    asking.ask("L0", "canonical", lambda: form_problems(folder))
    says = asking.have("L0", "files", lambda: read_object(folder / SAYS))
    run = asking.have("L1", "files", lambda: read_run(folder))
    if says is None or run is None:
        return asking.examined("bundle")
    schema = schema_of(says)
    asking.ask("L0", "schema", lambda: placeholder_problems(folder, schema))
    asking.ask("L1", "schema", lambda: schema_problems(says, run))
    asking.ask("L1", "evidence-files", lambda: whole_problems(run))
    asking.ask("L1", "commit", lambda: commit_problems(says, repository))
    with_cpu = asking.have("L1", "copies", lambda: has_cpu_run(folder, run, schema))
    asking.ask("L1", "copies", lambda: copy_problems(folder, schema, with_cpu=bool(with_cpu)))
    cpu = asking.have("L1", "cpu-run", lambda: _cpu_run(folder, run)) if with_cpu else None
    if cpu is not None or not with_cpu:
        _ask_what_it_says(asking, folder, says, run, cpu)
    noted = asking.have("L1", "files", lambda: gather(run, folder / RUN_HASHES))
    if noted is not None:
        asking.ask_all(noted)
        if cpu is not None:
            _ask_cpu_run(asking, folder, cpu, noted)
        if schema == SCHEMA:
            asking.ask("L1", "files", lambda: _lacking(noted))
    asking.unmade += {SCHEMA: [], SECOND_SCHEMA: ["provenance"]}.get(schema, ["provenance", "manifest"])
    return asking.examined("bundle")


def _ask_what_it_says(asking: _Asking, folder: Path, says: dict[str, Any], run: RunFiles, cpu: RunFiles | None) -> None:
    """Its figures and words; and from them, once they are right, the files for programs. One that is missing is said
    already."""
    schema, before = schema_of(says), len(asking.findings)
    asking.ask("L1", "claims", lambda: claim_problems(folder, says, run, claims_of(run, cpu, schema)))
    if len(asking.findings) == before:
        for check, name, ask in (
            ("manifest", MANIFEST, manifest_problems),
            ("provenance", PROVENANCE, provenance_problems),
        ):
            if name in own_files(schema) and (folder / name).exists():
                asking.ask("L1", check, partial(ask, folder, says, run))


def _lacking(noted: Noted) -> Iterator[str]:
    """What every run of this version notes."""
    needed = {"rows": "rows.jsonl", "checkpoints": "checkpoints.json", "processes": "processes.json"}
    for name, file in (needed | {"model": "final_model/config.json"}).items():
        if getattr(noted, name) is None:
            yield f"{file} is missing: runs of this source write it"


def _cpu_run(folder: Path, run: RunFiles) -> RunFiles:
    """The second run of a bundle: whole, chained, and this run on another device."""
    if problems := [f"cpu/{problem}" for problem in step_problems(RunDir(folder / "cpu"))]:
        raise EvidenceError("\n".join(problems), fix=UNTOUCHED)
    cpu = read_run(folder / "cpu", "cpu/")
    require_whole(cpu)
    refuse_another_setup(run, cpu)
    refuse_the_same_steps(run, cpu)
    refuse_other_batches(run, cpu)
    return cpu


def _ask_cpu_run(asking: _Asking, folder: Path, cpu: RunFiles, beside: Noted) -> None:
    """Of the run on the CPU the bundle has less; what it has is held to the same. Its rows and the shape of its model are
    those of the run it stands beside: it committed to the same hash over the rows, and to the same model."""
    noted = asking.have("L1", "cpu-run", lambda: gather(cpu, folder / "cpu" / RUN_HASHES))
    if noted is not None:
        noted = replace(noted, rows=beside.rows, model=beside.model)
        asking.ask_all(noted, [check for check in CHECKS if check.name in OF_CPU_RUN])
