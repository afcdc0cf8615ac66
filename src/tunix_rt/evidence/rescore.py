"""The answers of a run, judged again: verdicts, scores, comparison, summary and samples must all come out of the outputs.

Nothing here raises for what it reads. That the model gave these outputs is the run's own word; only asking it again shows
that.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace

from tunix_rt.backends.decoding import CONTEXT, LENGTH, STOP, TAG, TIME
from tunix_rt.data.registry import KEY, find_evalset, read_items
from tunix_rt.errors import TunixError
from tunix_rt.evaluate.report import (
    NAMES,
    Comparison,
    Side,
    compare,
    compare_runs,
    comparison_markdown,
    samples_markdown,
    table,
)
from tunix_rt.evaluate.score import SCORES_SCHEMA, TAGS, Prediction, Scores, Tags, judge, score_predictions
from tunix_rt.evaluate.summary import summary_of
from tunix_rt.evidence.doubtful import nulls, parse_object, read_bytes, shown
from tunix_rt.evidence.told import (
    OLDER_SCHEMA,
    WITH_SUMMARY,
    Told,
    as_json,
    differences,
    evaluation_facts,
    object_in,
    other_version,
    part,
    run_facts,
)
from tunix_rt.rundir import RunDir

MOST_BYTES = 2**30
MOST_TOLD = 5
"""Lines of one file that are told of; the others are counted."""
BY_TAGS = ["strict", "well_formed"]
QUESTION = ("prompt", "expected", "section", "category", "difficulty")
ENDINGS = (STOP, TAG, LENGTH, TIME, CONTEXT, "unknown")
LEFT_OUT = "is null; what is not known is left out"

_TYPES = {field.name: field.type for field in fields(Prediction)}
_REQUIRED = {field.name for field in fields(Prediction) if field.default is MISSING}
_REQUIRED_SCORES = {
    field.name for field in fields(Scores) if field.default is MISSING and field.default_factory is MISSING
}
_ASKED = ("id", *QUESTION, "output", "ended")


def answer_problems(run: RunDir) -> list[str]:
    """Every way what a folder says of its answers contradicts the answers. A run that was not evaluated has none."""
    told = Told(run=run)
    sides, problems = [], [*_config_problems(told), *_absences(told)]
    for when in told.whens:
        if os.path.lexists(run.predictions(when)) or os.path.lexists(run.scores(when)):
            predictions, found = _read_side(told, when)
            problems += found
            if predictions:
                problems += [*_score_problems(told, when, predictions), *_set_problems(told, when, predictions)]
                sides.append(Side(name=when, predictions=predictions))
    problems += [*_result_problems(told, {side.name: side.predictions for side in sides}), *_said(told, sides)]
    return problems + other_version(told) if problems else []


def rejudged(predictions: Sequence[Prediction], tags: Tags = TAGS) -> list[str]:
    """A sentence for each verdict or count that the output beside it does not give. Answers by the first rules, which did not
    tell how an output `ended`, are held to their verdicts by the tags alone."""
    problems = []
    for one in predictions:
        names = BY_TAGS if one.ended == "unknown" else list(_TYPES)
        problems += [f"question {shown(one.id)}: {fault}" for fault in _verdict_faults(one, _judged(one, tags), names)]
    return problems


def _config_problems(told: Told) -> Iterator[str]:
    """The settings decide how answers are read, so they must be those the run committed to."""
    committed = told.precommit.get("config_sha256")
    data, unread = read_bytes(told.run.config)
    if committed is not None and data is None:
        yield unread
    elif committed is not None and (digest := hashlib.sha256(data or b"").hexdigest()) != committed:
        yield f"config.yaml: its hash is {shown(digest)}, precommit.json has {shown(committed)}"


def _absences(told: Told) -> Iterator[str]:
    """Answers that a completed run must have by its settings."""
    if told.whole and not told.alone and part(told.config, "evaluation").get("enabled") in (True, "along"):
        for when in told.whens:
            if not os.path.lexists(told.run.predictions(when)):
                yield f"eval/predictions-{when}.jsonl is missing: by config.yaml the run was evaluated"


# --- the answers ------------------------------------------------------------------------------------------------------


def _read_side(told: Told, when: str) -> tuple[list[Prediction], list[str]]:
    """The answers as they are judged now, none unless every line is one; and all that is wrong with the file."""
    path, file = told.run.predictions(when), f"eval/predictions-{when}.jsonl"
    if os.path.isfile(path) and (size := os.path.getsize(path)) > MOST_BYTES:
        return [], [f"{file} has {size:,} bytes, more than an evaluation writes"]
    data, unread = read_bytes(path)
    if data is None:
        return [], [f"eval/{unread}"]
    *lines, rest = data.split(b"\n")
    faults = ["the last line is torn"] if rest else [] if lines else ["no answers"]
    older = object_in(told.run.scores(when)).get("schema") == OLDER_SCHEMA
    judged, places, tags = [], [f"{file}: {fault}" for fault in faults], told.tags
    for number, line in enumerate(lines, start=1):
        answer, found = _judge_line(line, tags, older=older)
        places += [f"{file}:{number}: {fault}" for fault in found]
        if answer is not None:
            judged.append(answer)
    for key, count in Counter(one.id for one in judged).items():
        if count > 1:
            places.append(f"{file}: the id {shown(key)} is given {count} times")
            judged = []
    if len(places) > MOST_TOLD:
        places = [*places[:MOST_TOLD], f"{file}: {len(places) - MOST_TOLD:,} more of the kind"]
    return judged if len(judged) == len(lines) else [], places


def _judge_line(line: bytes, tags: Tags, *, older: bool) -> tuple[Prediction | None, list[str]]:
    """One answer judged now, and its faults. What the first rules found apart from the tags (`older`) is believed: they read
    some outputs otherwise."""
    found, required = parse_object(line), _REQUIRED if older else _TYPES.keys()
    if isinstance(found, str):
        return None, [found]
    faults = [f"without {name}" for name in sorted(required - found.keys())]
    faults += [f"{shown(name)} is nothing that an answer has" for name in sorted(found.keys() - _TYPES.keys())]
    faults += [
        f"{name} is {shown(value)}, no {getattr(_TYPES[name], '__name__', '')}"
        for name, value in sorted(found.items())
        if name in _TYPES and type(value) is not _TYPES[name]
    ]
    if not faults and found.get("ended", "unknown") not in ENDINGS:
        faults.append(f"ended is {shown(found['ended'])}, none of {', '.join(ENDINGS)}")
    if faults:
        return None, faults
    stored = Prediction(**found)
    given = _judged(stored, tags)
    if older:
        given = replace(given, lenient=stored.lenient or given.strict)
    return given, list(_verdict_faults(stored, given, sorted(found)))


def _verdict_faults(stored: Prediction, given: Prediction, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if getattr(stored, name) != getattr(given, name):
            yield f"{name} is {shown(getattr(stored, name))}, its output gives {shown(getattr(given, name))}"


def _judged(stored: Prediction, tags: Tags) -> Prediction:
    return judge(**{name: getattr(stored, name) for name in _ASKED}, tags=tags)


def _set_problems(told: Told, when: str, predictions: Sequence[Prediction]) -> Iterator[str]:
    """The questions against the eval set: how many it has, and what they are where one of that name and hash ships."""
    file, evalset = f"eval/predictions-{when}.jsonl", part(told.precommit, "evalset")
    if "items" in evalset and evalset["items"] != len(predictions):
        yield f"{file} has {len(predictions):,} answers, precommit.json {shown(evalset['items'])} questions"
    told_of = ("evalset", "evalset_sha256", told.summary) if told.alone else ("key", "sha256", evalset)
    key, digest = (told_of[2].get(name) for name in told_of[:2])
    known = _shipped(key, digest)
    for one in predictions if known else ():
        if one.id not in known:
            yield f"{file}: the eval set {key} has no question {shown(one.id)}"
            return
        for name, value in zip(QUESTION, known[one.id], strict=True):
            if (said := getattr(one, name)) != value and (name != "difficulty" or told.has_summary):
                yield f"{file}: {name} of {shown(one.id)} is {shown(said)}, the eval set {key} has {shown(value)}"
                return


def _shipped(key: object, digest: object) -> dict[str, tuple[str, ...]]:
    """The questions by id; none where no eval set of that name and hash is at hand."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        return {}
    try:
        found = find_evalset(key)
        items = read_items(found) if found.sha256 == digest else []
    except TunixError:
        return {}
    return {item.id: (item.prompt, item.answer, item.section, item.category, item.difficulty) for item in items}


# --- the scores -------------------------------------------------------------------------------------------------------


def _score_problems(told: Told, when: str, predictions: Sequence[Prediction]) -> list[str]:
    file = f"eval/{when}.json"
    scores = parse_object(read_bytes(told.run.scores(when))[0] or b"")
    if isinstance(scores, str):
        return [f"{file} is missing or is not JSON: {scores}"]
    given = as_json(score_predictions(predictions, when))
    if scores.get("schema") == OLDER_SCHEMA:
        if WITH_SUMMARY in part(told.precommit, "source_files"):
            return [f"{file}: schema is {OLDER_SCHEMA!r}, the source of the run writes {SCORES_SCHEMA!r}"]
        given = {name: value for name, value in given.items() if name in _REQUIRED_SCORES or name in scores}
        given["schema"] = OLDER_SCHEMA
    return differences(file, scores, given, "the predictions")


def _result_problems(told: Told, sides: Mapping[str, Sequence[Prediction]]) -> Iterator[str]:
    """The scores in `result.json`, in the fields it gives."""
    if not isinstance(told.result.get("scores", {}), dict):
        yield f"result.json: scores is {shown(told.result['scores'])}"
    for when, said in sorted(part(told.result, "scores").items()):
        if when not in NAMES or not isinstance(said, dict):
            yield f"result.json: scores.{when if when in NAMES else shown(when)} is nothing that a run is scored by"
        elif not os.path.lexists(told.run.predictions(when)):
            yield f"result.json: scores.{when} without eval/predictions-{when}.jsonl"
        elif when in sides:
            given = as_json(score_predictions(sides[when], when))
            kept = {name: value for name, value in given.items() if name in said}
            yield from (
                problem.replace("result.json: ", f"result.json: scores.{when}.", 1)
                for problem in differences("result.json", said, kept, "the predictions")
            )


# --- both sides -------------------------------------------------------------------------------------------------------


def _said(told: Told, sides: Sequence[Side]) -> list[str]:
    """What is said of all answers together: `eval_summary.json`, `samples.md`, and of an evaluation `comparison.md`."""
    problems = list(_pair_problems(sides)) if len(sides) == 2 else []
    last = told.whens[1]
    if problems or last not in [side.name for side in sides]:
        if not os.path.lexists(told.run.predictions(last)):
            files = (told.run.eval_summary, told.run.samples, told.run.root / "comparison.md")
            problems += [f"{one.name} without eval/predictions-{last}.jsonl" for one in files if os.path.lexists(one)]
        return problems
    if len(sides) == 1 and (not told.alone or os.path.lexists(told.run.predictions(told.whens[0]))):
        first = f"eval/predictions-{told.whens[0]}.jsonl"
        return [] if os.path.lexists(told.run.root / first) else [f"{first} is missing beside that of {last}"]
    scores = [score_predictions(side.predictions, side.name) for side in sides]
    if not told.has_summary:
        return []
    comparison = _compared(told, sides) if len(sides) == 2 else None
    problems = _summary_problems(told, scores, comparison)
    if comparison is not None:
        texts = {"samples.md": samples_markdown(sides[0].predictions, sides[1].predictions, comparison)}
        if told.alone:
            texts["comparison.md"] = comparison_markdown(comparison, table(*scores))
        problems += [problem for name, text in texts.items() for problem in _text_problems(told, name, text)]
    return problems


def _pair_problems(sides: Sequence[Side]) -> Iterator[str]:
    """Both were asked the same questions, in the same order, with the same expected answers."""
    first, second = sides
    files = [f"eval/predictions-{side.name}.jsonl" for side in sides]
    ids = [[one.id for one in side.predictions] for side in sides]
    if alone := sorted(set(ids[0]) ^ set(ids[1])):
        yield f"{files[0]} and {files[1]}: {len(alone):,} id(s) on one side only, first {shown(alone[0])}"
        return
    if ids[0] != ids[1]:
        yield f"{files[1]}: the questions are not in the order of {files[0]}"
    earlier = {one.id: one for one in first.predictions}
    for one in second.predictions:
        for name in QUESTION:
            if (value := getattr(one, name)) != (other := getattr(earlier[one.id], name)):
                yield f"{files[1]}: {name} of {shown(one.id)} is {shown(value)}, {files[0]} has {shown(other)}"
                return


def _compared(told: Told, sides: Sequence[Side]) -> Comparison:
    """As the run compared them; an evaluation names the models."""
    before, after = (side.predictions for side in sides)
    models = told.summary.get("models")
    if not told.alone or not isinstance(models, list) or len(models) != 2:
        return compare(before, after)
    return compare_runs(
        *(Side(name=str(name), predictions=one) for name, one in zip(models, (before, after), strict=True))
    )


def _summary_problems(told: Told, scores: Sequence[Scores], comparison: Comparison | None) -> list[str]:
    """`eval_summary.json` against the answers, and against what the run committed to."""
    file = told.run.eval_summary.name
    data, unread = read_bytes(told.run.eval_summary)
    if data is None:
        return [unread] if told.whole or os.path.lexists(told.run.eval_summary) else []
    summary = parse_object(data)
    if isinstance(summary, str):
        return [f"{file}: {summary}"]
    facts = evaluation_facts(summary, len(scores)) if told.alone else run_facts(told)
    facts["questions"] = scores[0].items
    given = as_json(summary_of(scores[0], scores[1] if comparison else None, comparison, **facts))
    without = [f"{file}: {shown(name)} {LEFT_OUT}" for name in nulls(summary)]
    return without + differences(file, summary, given, "the run's files", to_the_bit=False)


def _text_problems(told: Told, name: str, text: str) -> Iterator[str]:
    data, unread = read_bytes(told.run.root / name)
    if data is None:
        if told.whole or os.path.lexists(told.run.root / name):
            yield unread
    elif data != text.encode("utf-8", "surrogatepass"):
        yield f"{name} is not what this version of tunix-rt writes of these answers"
