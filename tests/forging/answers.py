"""Forgeries of the answers: invented, edited, chosen, or given to other questions."""

import json
from pathlib import Path

from tests.forging.catalogue import forgery
from tests.forging.folder import (
    answers_of,
    edited,
    lines_of,
    put,
    put_answers,
    put_lines,
    read,
    rebuild_scores,
    rebuild_scores_told,
    right_answer,
)
from tests.forging.sealing import reseal
from tests.program import ROOT

ANSWERS = "answers"


def _finish(folder: Path) -> None:
    rebuild_scores(folder)
    rebuild_scores_told(folder)
    reseal(folder)


@forgery("all answers after training invented, and right", group=ANSWERS, level="L2")
def forge_predictions(folder: Path) -> None:
    answers = answers_of(folder, "after")
    put_answers(folder, "after", [one | {"output": right_answer(one), "ended": "tag"} for one in answers])
    _finish(folder)


@forgery("a third of the answers after training invented, and right", group=ANSWERS, level="L2")
def forge_some_predictions(folder: Path) -> None:
    answers = answers_of(folder, "after")
    for one in answers[::3]:
        one |= {"output": right_answer(one), "ended": "tag"}
    put_answers(folder, "after", answers)
    _finish(folder)


@forgery("the answers before training made empty", group=ANSWERS, level="L4")
def forge_answers_before(folder: Path) -> None:
    answers = answers_of(folder, "before")
    put_answers(folder, "before", [one | {"output": "No.", "ended": "stop"} for one in answers])
    _finish(folder)


@forgery("the answers before and after training in each other's place", group=ANSWERS, level="L2")
def forge_swapped_sides(folder: Path) -> None:
    before, after = answers_of(folder, "before"), answers_of(folder, "after")
    put_answers(folder, "before", after)
    put_answers(folder, "after", before)
    _finish(folder)


@forgery("a better score in eval/after.json", group=ANSWERS)
def forge_score(folder: Path) -> None:
    with edited(folder / "eval" / "after.json") as scores:
        scores["accuracy"] = 0.99
    reseal(folder)


@forgery("a better score in result.json", group=ANSWERS)
def forge_score_of_the_result(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["scores"]["after"]["accuracy"] = 0.99
    reseal(folder)


@forgery("a better score in eval_summary.json", group=ANSWERS)
def forge_summary(folder: Path) -> None:
    with edited(folder / "eval_summary.json") as summary:
        summary["after"]["accuracy"] = 0.99
    reseal(folder)


@forgery("a p-value in eval_summary.json made small", group=ANSWERS)
def forge_p_value(folder: Path) -> None:
    with edited(folder / "eval_summary.json") as summary:
        summary["comparison"]["mcnemar"]["p_value"] = 0.001
    reseal(folder)


@forgery("one wrong answer judged right", group=ANSWERS)
def forge_verdict(folder: Path) -> None:
    answers = answers_of(folder, "after")
    next(one for one in answers if not one["strict"])["strict"] = True
    put_lines(folder / "eval" / "predictions-after.jsonl", answers)
    _finish(folder)


@forgery("questions with wrong answers left out on both sides", group=ANSWERS)
def forge_fewer_questions(folder: Path) -> None:
    kept = {one["id"] for one in answers_of(folder, "after")[5:]}
    for when in ("before", "after"):
        put_answers(folder, when, [one for one in answers_of(folder, when) if one["id"] in kept])
    _finish(folder)


@forgery("the expected answers made to fit the outputs", group=ANSWERS)
def forge_expected_answers(folder: Path) -> None:
    wanted = {
        one["id"]: one["output"].split()[-1] if one["output"].split() else "0" for one in answers_of(folder, "after")
    }
    for when in ("before", "after"):
        put_answers(folder, when, [one | {"expected": wanted[one["id"]]} for one in answers_of(folder, when)])
    _finish(folder)


@forgery("the questions those that the model was trained on", group=ANSWERS)
def forge_trained_questions(folder: Path) -> None:
    key = read(folder / "precommit.json")["dataset"]["key"]
    lines = (ROOT / "datasets" / key / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
    trained = [str(json.loads(line).get("prompt", "")) for line in lines]
    for when in ("before", "after"):
        answers = answers_of(folder, when)
        put_answers(folder, when, [one | {"prompt": trained[at]} for at, one in enumerate(answers)])
    _finish(folder)


@forgery("questions asked twice", group=ANSWERS)
def forge_repeated_questions(folder: Path) -> None:
    for when in ("before", "after"):
        answers = answers_of(folder, when)
        put_answers(folder, when, [answers[0] | {"id": one["id"]} for one in answers])
    _finish(folder)


@forgery("another hash of the eval set, or one where there was none", group=ANSWERS)
def forge_evalset(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        was = committed.get("evalset", {"key": "eval-reasoning-v1", "items": len(answers_of(folder, "after"))})
        committed["evalset"] = was | {"sha256": "5ca1ab1e" * 8}
    reseal(folder)


@forgery("an answer added to samples.md", group=ANSWERS)
def forge_samples(folder: Path) -> None:
    text = (folder / "samples.md").read_text(encoding="utf-8")
    put(folder / "samples.md", text + "\nIt also proved the Riemann hypothesis.\n")
    reseal(folder)


@forgery("no answers at all, though config.yaml asks for them", group=ANSWERS)
def forge_no_answers(folder: Path) -> None:
    sums = folder / "run-SHA256SUMS"
    gone = [
        f"eval/{name}" for name in ("predictions-before.jsonl", "predictions-after.jsonl", "before.json", "after.json")
    ]
    gone += ["eval_summary.json", "samples.md"]
    for name in gone:
        (folder / name).unlink()
    put(sums, "".join(f"{line}\n" for line in sums.read_text().splitlines() if line.split("  ")[1] not in gone))
    with edited(folder / "result.json") as result:
        del result["scores"]
    reseal(folder)


@forgery("an answer longer than the run let the model write", group=ANSWERS)
def forge_long_answer(folder: Path) -> None:
    answers = answers_of(folder, "after")
    answers[0] |= {"output": right_answer(answers[0]) + " and so on" * 3000, "ended": "length"}
    put_answers(folder, "after", answers)
    _finish(folder)


@forgery("held-out losses of fewer targets than before", group=ANSWERS)
def forge_heldout_targets(folder: Path) -> None:
    path = folder / "eval" / "heldout.jsonl"
    lines = lines_of(path)
    lines[-1]["target_tokens"] //= 2
    put_lines(path, lines)
    reseal(folder)
