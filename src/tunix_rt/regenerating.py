"""Level L2: answers of the final model given again by the weights that are said to have given them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunix_rt.backends import Progress
from tunix_rt.errors import InputError
from tunix_rt.evidence.comparing import compare_answers, compare_gaps, same_answer
from tunix_rt.evidence.findings import Finding
from tunix_rt.evidence.machine_class import Class, Match, class_of
from tunix_rt.evidence.recorded import Recorded, read_predictions_of, read_recorded
from tunix_rt.evidence.segments import drawn_items, fresh_nonce
from tunix_rt.evidence.tolerances import TIES, texts_follow, tolerance_of
from tunix_rt.recompute.process import Answer, Source, compute, source_of
from tunix_rt.rundir import sha256_file, storage

LOADED = (".safetensors", ".json", ".jinja", ".bin", ".model", ".py")
"""Endings of files that decide what a model folder computes: none may be there that the run did not write."""

HERE = Source(root=None, same=False, words="the source here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerated:
    """How many of the answers that were asked for came out the same."""

    asked: int
    same: int
    share: float
    findings: tuple[Finding, ...]
    words: tuple[str, ...]
    seconds: float
    class_name: Class | None
    nonce: str
    followed: bool = False
    """Whether texts were followed, token by token; then `same` are those that could be."""


def regenerate(
    folder: Path,
    weights: Path,
    *,
    count: int = 50,
    nonce: str | None,
    progress: Progress,
    repository: Path | None = None,
) -> Regenerated:
    """Let the model in `weights` answer `count` questions again, drawn by `nonce`; all where there are no more.

    Weights that are not those of the run are a finding, and are not asked."""
    began = time.monotonic()
    recorded, nonce = read_recorded(folder), nonce or fresh_nonce()
    weights = _model_folder(weights)
    predictions = read_predictions_of(folder, "after")
    findings = [
        *_weights_findings(recorded, weights),
        *([_finding("answers", "the run has no answers of its final model to give again")] if not predictions else []),
    ]
    places = drawn_items([one["id"] for one in predictions], count=count, root=recorded.root, nonce=nonce)
    if findings:
        return _ended(recorded, 0, 0, findings, (), began, None, nonce)
    request = {"folder": str(folder.absolute()), "weights": str(weights.absolute()), "places": list(places)}
    threads = recorded.machines(recorded.total - 1, recorded.total)[-1].get("threads")
    how: dict[str, Any] = {"threads": threads, "jax": recorded.backend == "jax", "progress": progress}
    asked = [predictions[place] for place in places]
    opening = f"nonce {nonce}: {len(asked)} of {len(predictions)} answers of the final model were"
    with source_of(recorded, repository) as source:
        if not texts_follow("NEAR", recorded.compute):
            # Which class it is, the process says; where texts need not be the same, they are followed instead. Older sources
            # cannot, so the one here does: outside class SAME nothing hangs on the last bit.
            told = compute("gaps", request, source=HERE, total=len(places), **how)
            match = _class(recorded, told, source) if told.machine else None
            if match is None or told.failed or told.of("finding") or match.name != "SAME":
                return _followed(recorded, asked, told, match, (f"{opening} followed token by token",), began, nonce)
        told = compute("answers", request, source=source, total=len(places), **how)
    findings += _told_findings(told)
    if not told.of("answers"):
        return _ended(recorded, len(places), 0, findings, (source.words,), began, None, nonce)
    (answers,) = (line["answers"] for line in told.of("answers"))
    match = _class(recorded, told, source)
    tolerance = tolerance_of(match.name, recorded.compute)
    exact = match.name == "SAME"
    findings += compare_answers(
        asked, answers, tolerance, when="after", exact=exact, level="L2", check="regenerated-answers"
    )
    same = sum(same_answer(one, two) for one, two in zip(asked, answers, strict=True))
    words = (
        f"{opening} given again", source.words, _class_words(match, tolerance.texts),
        f"{same} of {len(asked)} have the same text",
    )  # fmt: skip
    return _ended(recorded, len(asked), same, findings, words, began, match.name, nonce)


def _followed(
    recorded: Recorded,
    asked: Sequence[Mapping[str, Any]],
    told: Answer,
    match: Match | None,
    words: tuple[str, ...],
    began: float,
    nonce: str,
) -> Regenerated:
    """Judged by how likely each token of the recorded texts is: of two that are nearly as likely, another machine may take
    the other, and goes on otherwise."""
    findings = _told_findings(told)
    if match is None or not told.of("gaps"):
        return _ended(recorded, len(asked), 0, findings, words, began, None, nonce)
    (gaps,) = (line["gaps"] for line in told.of("gaps"))
    most, share = TIES[match.name], tolerance_of(match.name, recorded.compute).texts
    findings += compare_gaps(asked, gaps, most=most, share=share)
    same = sum(gap <= most for gap in gaps)
    said = (
        f"class {match.name}, not exact ({'; '.join(match.reasons)}): in 16 bits near ties turn, so no text need come out the "
        f"same; in {share:.0%} of them every token must lie within {most:g} of the largest logit",
        f"{same} of {len(asked)} do; the largest gap is {max(gaps):.2g}",
    )  # fmt: skip
    ended = _ended(recorded, len(asked), same, findings, (*words, *said), began, match.name, nonce)
    return replace(ended, followed=True)


def _told_findings(told: Answer) -> list[Finding]:
    found = [_finding(str(line["check"]), str(line["problem"])) for line in told.of("finding")]
    return found + ([_finding("not-regenerated", told.failed)] if told.failed else [])


def _ended(
    recorded: Recorded,
    asked: int,
    same: int,
    findings: list[Finding],
    words: tuple[str, ...],
    began: float,
    class_name: Class | None,
    nonce: str,
) -> Regenerated:
    seconds = round(time.monotonic() - began, 3)
    if words:
        words = (*words, f"computed again in {seconds:.1f} s; the run took {recorded.seconds:.1f} s")
    return Regenerated(
        asked=asked, same=same, share=same / asked if asked else 0.0, findings=tuple(findings), words=words,
        seconds=seconds, class_name=class_name, nonce=nonce,
    )  # fmt: skip


def _finding(check: str, problem: str) -> Finding:
    return Finding(level="L2", check=check, problem=problem)


def _model_folder(weights: Path) -> Path:
    """The folder of the model; that of a whole run stands for its final model."""
    for folder in (weights, weights / "final_model"):
        if (folder / "config.json").is_file():
            return folder
    raise InputError(f"{weights} is no model folder", fix="point --weights at the final_model of the run")


def _weights_findings(recorded: Recorded, weights: Path) -> list[Finding]:
    """Every file of the final model must be there as it was hashed, and nothing else that is loaded."""
    if not recorded.final_model:
        return [_finding("weights", "the bundle has no hashes of a final model")]
    with storage(weights):
        here = {path.name for path in weights.iterdir() if path.name.endswith(LOADED)}
        other = [
            name
            for name, digest in recorded.final_model.items()
            if "/" in name or not (weights / name).is_file() or sha256_file(weights / name) != digest
        ]
    strange = sorted(here - recorded.final_model.keys())
    problems = [f"{', '.join(sorted(other)[:4])} are not what the run saved"] * bool(other)
    problems += [f"{', '.join(strange[:4])} are not of the run"] * bool(strange)
    return [_finding("weights", f"{weights}: {problem}") for problem in problems]


def _class(recorded: Recorded, told: Answer, source: Source) -> Match:
    """Of the process that ended the run, which gave the answers."""
    machine = recorded.machines(recorded.total - 1, recorded.total)[-1]
    match = class_of(machine, told.machine)
    if told.of("machine")[0].get("adapted"):
        match = match.at_most("NEAR", "the adapters stood beside the weights then, and are added to them in the folder")
    return match if source.same else match.at_most("NEAR", source.words)


def _class_words(match: Match, texts: float) -> str:
    if match.name == "SAME":
        return (
            "class SAME: the machine, its threads and its libraries are the recorded ones; every text must be the same"
        )
    return f"class {match.name} ({'; '.join(match.reasons)}): {texts:.0%} of the texts must be the same"
