"""Levels L2 to L4 of one prepared run: what is computed again, and how it compares."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tunix_rt.engines.base import NUMERICS
from tunix_rt.errors import EvidenceError, InputError, StorageError
from tunix_rt.evidence.data_checks import question_problems
from tunix_rt.evidence.facts import Finding, Level, Run
from tunix_rt.evidence.replay import steps
from tunix_rt.evidence.replay.judge import Outcome, judge_pass, judge_weights, match_of, mostly_bit_equal
from tunix_rt.evidence.replay.session import PreparedRun, open_session, regenerate
from tunix_rt.progress import Progress
from tunix_rt.runs.checksums import is_weights, sha256_below
from tunix_rt.runs.folder import checkpoint_name
from tunix_rt.runs.ledger import STATE, state_files
from tunix_rt.runs.schemas import PredictionLine
from tunix_rt.storage import sha256_file

LOADED = (".safetensors", ".json", ".jinja", ".bin", ".model", ".py")
"""Endings of files that decide what a model folder computes: none may be there that the run did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    run: Run
    prepared: PreparedRun
    weights: Path | None
    """The final model, given; None: not at hand."""
    weights_root: Path
    """The folder with the checkpoints of the run."""
    scratch: Path
    segments: int | Literal["all", "default"] | None
    """How many are drawn; None: no replay."""
    whole: bool
    root: str
    nonce: str
    progress: Progress


@dataclass(slots=True, kw_only=True)
class Results:
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    passed: list[Level] = field(default_factory=list)
    recomputed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Claim -> its value as computed here, empty where that is the recorded one, and how."""
    details: dict[str, Any] = field(default_factory=dict)

    def fail(self, level: Level, check: str, *problems: str) -> None:
        self.findings += [Finding(level=level, check=check, problem=problem) for problem in problems]

    def take(self, level: Level, outcome: Outcome) -> None:
        for check, problem in outcome.problems:
            self.fail(level, check, problem)
        self.notes += outcome.notes
        self.recomputed |= outcome.recomputed


def compute(work: Work) -> Results:
    made, items = Results(), work.prepared.items
    with_answers = work.run.answered and items is not None
    if with_answers and (problems := list(question_problems(work.run, items or ()))):
        made.fail("L2", "answers", *problems)
        return made
    if work.run.answered and not with_answers:
        made.notes.append("answers: not checked, no eval set with the recorded hash was given")
    if work.weights is not None:
        _weights(work, made, work.run.record.predictions("after") if with_answers else ())
    if work.segments is not None:
        _replay(work, made, with_answers=with_answers)
    return made


# --- L2 ---------------------------------------------------------------------------------------------------------------


def _weights(work: Work, made: Results, recorded: Sequence[PredictionLine]) -> None:
    assert work.weights is not None
    if problems := weights_problems(work.run, work.weights):
        made.fail("L2", "weights", *problems)
        return
    try:
        found = regenerate(work.prepared, work.weights, with_answers=bool(recorded))
    except (InputError, EvidenceError) as error:  # the files are the recorded ones, so this is about the run
        made.fail("L2", "weights", f"the final model cannot be loaded: {error.problem}")
        return
    outcome = judge_weights(work.run, found, recorded, NUMERICS[work.run.backend])
    made.take("L2", outcome)
    made.notes.append(f"L2 {outcome.comparison}")
    made.details["regenerated"] = {"comparison": outcome.comparison, "followed": len(found.gaps)}
    if recorded and not outcome.problems:
        made.passed.append("L2")


def weights_problems(run: Run, weights: Path) -> list[str]:
    """The folder has exactly the files of the recorded final model."""
    wanted = run.final_model
    here = {path.name for path in weights.iterdir() if path.name.endswith(LOADED)}
    problems = [f"{name}: not a file of the recorded final model" for name in sorted(here - wanted.keys())]
    for name, digest in wanted.items():
        try:
            if sha256_file(weights / name) != digest:
                problems.append(f"{name}: not the file that the run saved")
        except StorageError as error:
            if is_weights(f"final_model/{name}") or name == "config.json":
                problems.append(error.problem)
    return problems


# --- L3, L4 -----------------------------------------------------------------------------------------------------------


def _replay(work: Work, made: Results, *, with_answers: bool) -> None:
    """Take the drawn segments again, and the end of the run: the final loss and the final model hang on it."""
    run = work.run
    level: Level = "L4" if work.whole else "L3"
    of = steps.all_segments([entry.step for entry in run.record.checkpoints], run.total)
    count = len(of) if work.segments == "all" or work.whole else work.segments
    drawn = steps.draw_segments(of, count if isinstance(count, int) else None, root=work.root, nonce=work.nonce)
    states = {} if work.whole else _states(work, made)
    taken = steps.passes_over(sorted({*drawn, of[-1]}), states)
    _describe_draw(work, made, of, drawn, taken)
    session = open_session(work.prepared)
    if session.ends != run.ends:
        made.fail(level, "steps", f"{run.ends[0]} steps are recorded, settings and data give {session.ends[0]}")
        return
    here = session.backend.machine_facts(session.engine)
    wanted = steps.Measurements(
        checkpoints={entry.step for entry in run.record.checkpoints}, states=states,
        heldout={line.step for line in run.record.heldout}, before=work.whole and with_answers, after=with_answers,
        final_weights=work.weights,
    )  # fmt: skip
    matches = [match_of(run, one.start, one.stop, here, NUMERICS[run.backend]) for one in taken]
    if run.config.training.samples and any(match.name != "bitwise" for match in matches):
        made.notes.append(
            f"{level}: rollouts are drawn again bit for bit alone, on the software and hardware of the run: "
            + "; ".join(reason for match in matches for reason in match.reasons)
        )
        return
    passed = [steps.take_steps(session, one, wanted, scratch=work.scratch, progress=work.progress) for one in taken]
    strict = mostly_bit_equal(run, passed)
    comparisons = []
    for found, match in zip(passed, matches, strict=True):
        outcome = judge_pass(run, found, match, strict=strict)
        made.take(level, outcome)
        comparisons.append(outcome.comparison)
    made.notes += [f"{level} {one}" for one in dict.fromkeys(comparisons)]
    made.details["replayed"] = {
        "nonce": work.nonce, "segments": [[one.start, one.stop] for one in drawn], "of": len(of),
        "passes": [[one.start, one.stop] for one in taken], "comparison": list(dict.fromkeys(comparisons)),
    }  # fmt: skip
    made.recomputed["dataset"] = ("", "prepared again from the file with this hash")
    if not taken[0].start:
        made.recomputed["base model"] = ("", "trained again from the files with these hashes")
    if work.whole or work.segments == "all":
        made.recomputed["steps"] = (str(run.total), "all taken again")
    if not any(finding.level in ("L2", level) for finding in made.findings):
        made.passed.append(level)
        if run.config.training.samples:
            made.recomputed["sampling"] = ("", "the model drew the same tokens in the replayed steps")


def _states(work: Work, made: Results) -> dict[int, Path]:
    """Checkpoints in the folder with the recorded hashes."""
    found: dict[int, Path] = {}
    for entry in work.run.record.checkpoints:
        folder = f"checkpoints/{checkpoint_name(entry.step)}"
        if not (work.weights_root / folder).is_dir():
            continue
        try:
            names = (*state_files(entry.files), STATE)
            here = {name: sha256_below(work.weights_root, f"{folder}/{name}") for name in names}
            other = [name for name, digest in here.items() if digest != entry.files[name].sha256]
        except (OSError, KeyError) as error:
            made.notes.append(f"{folder} is not used: {error}")
            continue
        if other:
            made.fail("L3", "states", f"{folder}: {', '.join(other)} changed")
        else:
            found[entry.step] = work.weights_root / folder
    return found


def _describe_draw(
    work: Work,
    made: Results,
    of: Sequence[steps.Segment],
    drawn: Sequence[steps.Segment],
    taken: Sequence[steps.Segment],
) -> None:
    if work.whole:
        made.notes.append(f"the whole run: {work.run.total} steps from the base model")
        return
    taken_again, chance = sum(one.steps for one in drawn), 100 * steps.chance_of_detection(of, len(drawn))
    bound = "at least " * (len({one.steps for one in of}) > 1)
    named = ", ".join(one.describe() for one in drawn[:6]) + (" ..." if len(drawn) > 6 else "")
    made.notes.append(
        f"nonce {work.nonce}: {len(drawn)} of {len(of)} segments ({taken_again} of {work.run.total} steps): {named}; "
        f"a change inside one segment is found with probability {bound}{chance:.0f} %"
    )
    if list(taken) != list(drawn):
        made.notes.append(f"computed: {', '.join(one.describe() for one in taken)}; the end of the run is always taken")
