"""Compares what was recomputed with what is recorded: findings, notes, and the recomputed value of each claim."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tunix_rt.evidence.data_checks import accuracy_of, judged_again
from tunix_rt.evidence.facts import Run
from tunix_rt.evidence.replay import compare
from tunix_rt.evidence.replay.compare import Match, Tolerance
from tunix_rt.evidence.replay.session import Regeneration
from tunix_rt.evidence.replay.steps import PassResult, Segment
from tunix_rt.runs.schemas import PredictionLine
from tunix_rt.scoring.score import Scores, score_predictions

WORDING = ("tokenizer_config.json", "special_tokens_map.json")
"""Files that a tokenizer folder may spell differently; the tokenizer itself is compared by its hash."""
VERSIONED = ("config.json", "generation_config.json")
"""Files in which transformers writes its own version."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Collected over all comparisons of one level."""

    problems: list[tuple[str, str]] = field(default_factory=list)
    """(check, problem)."""
    notes: list[str] = field(default_factory=list)
    recomputed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Claim -> its value as computed here, and how."""
    comparison: str = ""

    def add(self, check: str, *problems: str) -> None:
        self.problems += [(check, problem) for problem in problems if problem]


def match_of(run: Run, after: int, up_to: int, here: Mapping[str, Any], numerics: int) -> Match:
    """The compare.loosest match over the machines that took these steps."""
    matches = [compare.match_machines(machine, here) for machine in run.machines(after, up_to)]
    reasons = tuple(dict.fromkeys(reason for match in matches for reason in match.reasons))
    match = Match(name=compare.loosest(match.name for match in matches), reasons=reasons)
    if run.commitment.numerics != numerics:
        reason = f"numerics {run.commitment.numerics} recorded, {numerics} here; --source REF"
        return match.at_most("same hardware", reason)
    return match


# --- L2 ---------------------------------------------------------------------------------------------------------------


def judge_weights(run: Run, made: Regeneration, recorded: Sequence[PredictionLine], numerics: int) -> Outcome:
    """Answers and held-out loss of the given weights."""
    outcome, compute = Outcome(), run.config.training.dtype
    match = match_of(run, run.total - 1, run.total, made.machine, numerics)
    if made.adapted:
        match = match.at_most("same hardware", "adapters are merged into the weights")
    exact = match.name == "bitwise"
    outcome.comparison = match.describe()
    if made.answers:
        if exact:
            outcome.add("answers", compare.answers_problem("after", recorded, made.answers, texts=1.0))
        else:
            followed, most = [recorded[place] for place in made.gaps], compare.TIES[compare.precision(compute)]
            outcome.add("answers", compare.gaps_problem("after", followed, made.gaps.values(), most))
        same = len(recorded) - len(made.gaps)
        outcome.notes.append(
            f"answers: {same} of {len(recorded)} have the recorded text"
            + (f", {len(made.gaps)} were followed token by token" if made.gaps else "")
        )
        accuracy = accuracy_of(scores_here(run, recorded, made.answers))
        outcome.recomputed["accuracy"] = accuracy, "generated again by the given weights"
    if made.heldout is not None and run.record.heldout:
        line, tolerance = run.record.heldout[-1], _heldout_tolerance(run, match)
        outcome.add("held-out", compare.heldout_problem(line, *made.heldout, tolerance))
        why = f" before the weights were saved as {run.config.training.save_dtype}" if _is_rounded(run) else ""
        outcome.notes.append(f"held-out loss of the weights: {made.heldout[0]:.6f}, recorded {line.loss:.6f}{why}")
    return outcome


def _heldout_tolerance(run: Run, match: Match) -> float:
    tolerance = compare.tolerance_of(match.name, run.config.training.dtype).loss
    return max(tolerance, compare.ROUNDED_HELDOUT) if _is_rounded(run) else tolerance


def _is_rounded(run: Run) -> bool:
    """Whether the final model is saved in another dtype than it was trained in."""
    training = run.config.training
    kept = training.master_dtype or ("float64" if training.dtype == "float64" else "float32")
    return training.save_dtype not in (None, kept)


def scores_here(run: Run, recorded: Sequence[PredictionLine], answers: Sequence[Mapping[str, Any]]) -> Scores:
    """The scores of the answers that were generated here."""
    lines = [replace(one, output=two["output"], ended=two["ended"]) for one, two in zip(recorded, answers, strict=True)]
    return score_predictions([judged_again(line, run.tags) for line in lines], "after")


# --- L3, L4 -----------------------------------------------------------------------------------------------------------


def mostly_bit_equal(run: Run, passed: Sequence[PassResult]) -> bool:
    """Whether half of all losses or more are the recorded bits: then the machine gives them, whatever the record claims."""
    equal = [run.metrics[step.step - 1].loss_hex == step.loss.hex() for found in passed for step in found.steps]
    return len(equal) > 1 and 2 * sum(equal) >= len(equal)


def judge_pass(run: Run, found: PassResult, match: Match, *, strict: bool) -> Outcome:
    """The steps, states, held-out losses, final model and answers of one pass; `strict` compares bits whatever the match."""
    outcome, segment, compute = Outcome(), found.segment, run.config.training.dtype
    strict = strict or match.name == "bitwise"
    first = compare.tolerance_of("bitwise" if strict else match.name, compute)

    def allowed(step: int) -> Tolerance:
        return compare.grown(first, compute, step - segment.start)

    steps = compare.compare_steps(run.metrics, found.steps, allowed, exact=strict)
    outcome.add("steps", *steps.problems)
    if len(found.steps) < segment.steps:
        outcome.add("steps", f"{segment.describe()}: only {len(found.steps)} of {segment.steps} could be taken again")
    outcome.add("states", *_state_problems(run, found, allowed, strict=strict))
    for line in run.record.heldout:
        if line.step in found.heldout:
            tolerance = 0.0 if strict else allowed(max(line.step, 1)).loss
            outcome.add("held-out", compare.heldout_problem(line, *found.heldout[line.step], tolerance))
    if segment.stop == run.total:
        _judge_end(run, found, allowed(run.total), outcome, strict=strict)
    for when in found.answers:
        _judge_answers(run, when, found, match, outcome, strict=strict)
    differ = "differ" if steps.problems else "bit-equal" if strict else "within tolerance"
    bits = strict and match.name != "bitwise"
    outcome.comparison = match.describe() + "; most losses are bit-equal, so everything is compared bit by bit" * bits
    outcome.notes.append(
        f"{segment.describe()} from {_origin(segment)}: losses {differ}"
        + (f" (largest difference {steps.largest_loss:.1e})" if not strict else "")
        + f", {len(found.states if strict else found.distances)} of {len(found.states)} state(s) compared, "
        f"{len(found.heldout)} held-out loss(es)"
    )
    return outcome


def _origin(segment: Segment) -> str:
    return f"the recorded state of step {segment.start}" if segment.start else "the base model"


def _state_problems(run: Run, found: PassResult, allowed: compare.Allowed, *, strict: bool) -> Iterator[str]:
    recorded = {entry.step: entry.files for entry in run.record.checkpoints}
    for step, files in found.states.items():
        known = recorded[step]
        other = [name for name, digest in files.items() if name in known and known[name].sha256 != digest]
        if strict and other:
            yield f"state after step {step}: {' and '.join(other)} differ from the recorded hashes"
        elif (
            not (strict and files.keys() <= known.keys())
            and not found.distances.get(step, 0.0) <= allowed(step).weights
        ):
            yield f"state after step {step}: weights {found.distances[step]:.2g} of their update away from the recorded ones"


def _judge_end(run: Run, found: PassResult, tolerance: Tolerance, outcome: Outcome, *, strict: bool) -> None:
    """The final model is the last state."""
    recorded = run.final_model
    names = sorted(recorded.keys() | found.final_model.keys())
    wrong = []
    for name in (name for name in names if recorded.get(name) != found.final_model.get(name)):
        spelled = name in WORDING or (name in VERSIONED and not strict)
        near = ".safetensors" in name and not strict and name in recorded and name in found.final_model
        if not near and not (spelled and _same_config(run, name, found.final_config.get(name))):
            wrong.append(name)
    outcome.add("final-model", *(f"final_model/{name} is not what training gives here" for name in wrong))
    if not strict and found.final_distance is None:
        outcome.notes.append("final model: its weights were not given, so they were not compared")
    elif not strict and not (found.final_distance or 0.0) <= tolerance.weights:
        far = f"{found.final_distance:.2g} of its update"
        outcome.add("final-model", f"the final model is {far} away from the weights that training gives here")
    if found.steps:
        outcome.recomputed["loss"] = f"{found.steps[-1].loss:.6f}", f"trained again from {_origin(found.segment)}"


def _same_config(run: Run, name: str, here: bytes | None) -> bool:
    """Equal but for the version of transformers; a file that the bundle leaves out cannot be compared."""
    recorded = run.record.data(f"final_model/{name}", 2**20)
    if recorded is None or here is None:
        return recorded is None
    try:
        both = [json.loads(data) for data in (recorded, here)]
    except ValueError:
        return False
    return bool({**both[0], "transformers_version": 0} == {**both[1], "transformers_version": 0})


def _judge_answers(run: Run, when: str, found: PassResult, match: Match, outcome: Outcome, *, strict: bool) -> None:
    """In 16 bits on another machine texts turn at near ties: there the recorded texts are followed token by token."""
    compute, recorded = run.config.training.dtype, run.record.predictions(when)
    if strict or compute in compare.WIDE:
        texts = 1.0 if strict else compare.tolerance_of(match.name, compute).texts
        outcome.add("answers", compare.answers_problem(when, recorded, found.answers[when], texts=texts))
    else:
        most = compare.TIES["bfloat16"] if when == "before" else compare.REPLAYED_TIES
        followed = [recorded[place] for place in found.gaps[when]]
        outcome.add("answers", compare.gaps_problem(when, followed, found.gaps[when].values(), most))
    if when == "after":
        accuracy = accuracy_of(scores_here(run, recorded, found.answers[when]))
        outcome.recomputed["accuracy"] = accuracy, "generated again by the replayed final model"
