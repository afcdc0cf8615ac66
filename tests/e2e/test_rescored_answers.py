"""What a run says of its answers is held against the answers: one real run, edited and hashed anew, so that only judging
its outputs again can find the edit."""

import json
import shutil

import pytest

from tests.program import tunix_rt
from tunix_rt.evidence.hashes import list_problems, write_hashes
from tunix_rt.rundir import RunDir, write_json, write_jsonl

SMALL = ["--max-steps", 2, "--set", "training.save_steps=2", "--set", "training.eval_steps=2"]
SMALL += ["--set", "evaluation.max_new_tokens=8", "--set", "evaluation.evalset=eval_v2"]
SCORES = ("eval/before.json", "eval/after.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = tunix_rt("train", "smoke_tiny", "--device", "cpu", "--output", folder, *SMALL)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluations") / "out"
    asking = ["--evalset", "eval_v2", "--limit", 4, "--device", "cpu", "--max-new-tokens", 4]
    done = tunix_rt("evaluate", "tiny-gemma3", "--against", "tiny-gemma3", "--output", folder, *asking)
    assert done.returncode == 0, done.stderr
    write_hashes(RunDir(folder))
    return folder


@pytest.fixture(autouse=True, scope="module")
def no_waiting_for_the_disk():
    """Durability is tested elsewhere; here it would be most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture
def copied(tmp_path):
    def copy(source):
        ignore = shutil.ignore_patterns("*.safetensors")
        return RunDir(shutil.copytree(source, tmp_path / "copy", ignore=ignore))

    return copy


def summary(**changed):
    """`...` takes a value out; a name with two underscores is one inside another."""

    def tamper(run):
        told = json.loads(run.eval_summary.read_text())
        for name, value in changed.items():
            inner, _, last = name.rpartition("__")
            place = told[inner] if inner else told
            place.pop(last) if value is ... else place.update({last: value})
        write_json(run.eval_summary, told)

    return tamper


def scores(**changed):
    """In the scores after training and where the summary repeats them."""

    def tamper(run):
        write_json(run.scores("after"), json.loads(run.scores("after").read_text()) | changed)
        told = json.loads(run.eval_summary.read_text())
        write_json(run.eval_summary, told | {"after": told["after"] | changed})

    return tamper


def answers(change, *whens):
    """Each answer, after training unless told otherwise, as `change` leaves it; None takes it out."""

    def tamper(run):
        for when in whens or ("after",):
            lines = [json.loads(line) for line in run.predictions(when).read_text().splitlines()]
            kept = [change(number, line) for number, line in enumerate(lines)]
            write_jsonl(run.predictions(when), [line for line in kept if line is not None])

    return tamper


def all_right(run):
    """The whole forgery: every verdict, and every figure that a reader would look at."""
    answers(lambda number, line: line | {"strict": True, "lenient": True, "well_formed": True})(run)
    full = {"accuracy": 1.0, "accuracy_lenient": 1.0, "format_rate": 1.0}
    scores(**full, correct=100, correct_lenient=100, well_formed=100)(run)
    result = json.loads(run.result.read_text())
    write_json(run.result, result | {"scores": result["scores"] | {"after": full}})


def one_section_better(run):
    section = {"items": 60, "correct": 60, "accuracy": 1.0, "accuracy_lenient": 1.0, "format_rate": 1.0}
    scores(by_section=json.loads(run.scores("after").read_text())["by_section"] | {"core": section})(run)


def a_run_without_answers(run):
    shutil.rmtree(run.root / "eval")
    run.eval_summary.unlink()
    run.samples.unlink()
    result = json.loads(run.result.read_text())
    result.pop("scores")
    write_json(run.result, result)


def as_an_older_version(run):
    for when in ("before", "after"):
        told = json.loads(run.scores(when).read_text())
        write_json(run.scores(when), told | {"schema": "tunix-rt/scores/1"})
    run.eval_summary.unlink()


def other_tags(run):
    text = run.config.read_text()
    assert "answer_tag: answer" in text
    run.config.write_text(text.replace("answer_tag: answer", "answer_tag: reply"))


IN_SUMMARY = "eval_summary.json: "
TAMPERED = {
    "sentence": (summary(comparison__sentence="100 of 100 more answers right"), IN_SUMMARY + "comparison.sentence is"),
    "gain_points": (summary(comparison__gain_points=100.0), IN_SUMMARY + "comparison.gain_points is 100.0"),
    "interval": (summary(comparison__interval={"low": 0.9, "high": 1.0}), IN_SUMMARY + "comparison.interval.low is 0.9"),
    "mcnemar": (summary(comparison__mcnemar={"p_value": 1e-9}), IN_SUMMARY + "comparison.mcnemar.p_value is 1e-09"),
    "items": (summary(comparison__items=500), IN_SUMMARY + "comparison.items is 500"),
    "gained": (summary(comparison__gained=["ev2-001"]), IN_SUMMARY + "comparison.gained is not what"),
    "lost": (summary(comparison__lost=["ev2-001"]), IN_SUMMARY + "comparison.lost is not what"),
    "comparison removed": (summary(comparison=...), IN_SUMMARY + "comparison.sentence is missing"),
    "comparison null": (summary(comparison=None), IN_SUMMARY + "'comparison' is null"),
    "decoding null": (summary(decoding=None), IN_SUMMARY + "'decoding' is null"),
    "decoding": (summary(decoding__max_new_tokens=512), IN_SUMMARY + "decoding.max_new_tokens is 512"),
    "decoding's tokenizer": (summary(decoding__tokenizer="0" * 64), IN_SUMMARY + "decoding.tokenizer is"),
    "dtype null": (summary(dtype=None), IN_SUMMARY + "'dtype' is null"),
    "dtype": (summary(dtype="bfloat16"), IN_SUMMARY + "dtype is 'bfloat16'"),
    "models": (summary(models=["a-larger-model"]), IN_SUMMARY + "models is not what"),
    "weights": (summary(weights="random"), IN_SUMMARY + "weights is 'random'"),
    "evalset": (summary(evalset="gsm8k"), IN_SUMMARY + "evalset is 'gsm8k'"),
    "evalset_sha256": (summary(evalset_sha256="0" * 64), IN_SUMMARY + "evalset_sha256 is"),
    "questions": (summary(questions=1319), IN_SUMMARY + "questions is 1319"),
    "device": (summary(device="cuda"), IN_SUMMARY + "device is 'cuda'"),
    "schema": (summary(schema="whatever/9"), IN_SUMMARY + "schema is 'whatever/9'"),
    "a fact nobody gives": (summary(awards=3), IN_SUMMARY + "'awards' is said by no file"),
    "summary deleted": (lambda run: run.eval_summary.unlink(), "eval_summary.json is missing"),
    "summary no JSON": (lambda run: run.eval_summary.write_bytes(b"\xff"), IN_SUMMARY + "not UTF-8"),
    "by_section": (one_section_better, "eval/after.json: by_section.core.correct is 60"),
    "equations_right": (scores(equations_right=9999), "eval/after.json: equations_right is 9999"),
    "ended": (scores(ended={"stop": 100}), "eval/after.json: 'ended.stop' is said by no file"),
    "mean_reasoning_words": (scores(mean_reasoning_words=1e6), "eval/after.json: mean_reasoning_words is 1000000.0"),
    "scores' schema": (scores(schema="tunix-rt/scores/9"), "eval/after.json: schema is"),
    "verdicts": (all_right, "eval/predictions-after.jsonl:1: lenient is True, its output gives False"),
    "one verdict": (
        answers(lambda number, line: line | {"strict": True} if number == 7 else line),
        "eval/predictions-after.jsonl:8: strict is True, its output gives False",
    ),
    "a count": (answers(lambda number, line: line | {"equations": 7}), "eval/predictions-after.jsonl:1: equations is 7"),
    "ended of an answer": (answers(lambda number, line: line | {"ended": "well"}), ":1: ended is 'well', none of stop"),
    "expected": (
        answers(lambda number, line: line | {"expected": "0"}),
        "eval/predictions-after.jsonl: expected of 'ev2-001' is '0', eval/predictions-before.jsonl has",
    ),
    "prompt": (
        answers(lambda number, line: line | {"prompt": "?"}),
        "eval/predictions-after.jsonl: prompt of 'ev2-001' is '?', eval/predictions-before.jsonl has",
    ),
    "expected on both sides": (
        answers(lambda number, line: line | {"expected": "0"}, "before", "after"),
        "expected of 'ev2-001' is '0', the eval set eval_v2 has",
    ),
    "questions dropped": (answers(lambda number, line: line if number < 10 else None), "90 id(s) on one side only"),
    "questions dropped on both sides": (
        answers(lambda number, line: line if number < 10 else None, "before", "after"),
        "eval/predictions-after.jsonl has 10 answers, precommit.json 100 questions",
    ),
    "ids": (answers(lambda number, line: line | {"id": "ev2-001"}), "the id 'ev2-001' is given 100 times"),
    "a line that is no answer": (
        lambda run: run.predictions("after").write_bytes(b"\x00\n[]\n{}\n"),
        "eval/predictions-after.jsonl:2: not a JSON object",
    ),
    "no answer at all": (lambda run: run.predictions("after").write_bytes(b""), "jsonl: no answers"),
    "samples.md": (lambda run: run.samples.write_text("All right now.\n"), "samples.md is not what"),
    "samples.md deleted": (lambda run: run.samples.unlink(), "samples.md is missing"),
    "no evaluation": (a_run_without_answers, "eval/predictions-after.jsonl is missing: by config.yaml"),
    "an older version": (as_an_older_version, "eval/after.json: schema is 'tunix-rt/scores/1', the source of the run"),
    "the tags": (other_tags, "config.yaml: its hash is"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_what_the_answers_do_not_give_is_found_and_named(finished, copied, name):
    tamper, said = TAMPERED[name]
    run = copied(finished)
    write_hashes(run)
    assert list_problems(run.root) == []
    tamper(run)
    write_hashes(run)
    problems = list_problems(run.root)
    assert any(said in problem for problem in problems), problems


OF_EVALUATION = {
    "verdict": (
        lambda run: write_jsonl(
            run.predictions("answers"),
            [json.loads(line) | {"strict": True} for line in run.predictions("answers").read_text().splitlines()],
        ),
        "eval/predictions-answers.jsonl:1: strict is True, its output gives False",
    ),
    "sentence": (summary(comparison__sentence="better"), IN_SUMMARY + "comparison.sentence is 'better'"),
    "no models": (summary(models=None), IN_SUMMARY + "'models' is null"),
    "no dtype": (summary(dtype=...), IN_SUMMARY + "dtype is missing"),
    "comparison.md": (lambda run: (run.root / "comparison.md").write_text("better\n"), "comparison.md is not what"),
    "samples.md": (lambda run: run.samples.write_text("better\n"), "samples.md is not what"),
    "one side": (lambda run: run.predictions("base").unlink(), "eval/predictions-base.jsonl is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_EVALUATION)
def test_the_output_of_an_evaluation_is_held_to_its_answers_too(evaluated, copied, name):
    tamper, said = OF_EVALUATION[name]
    run = copied(evaluated)
    assert list_problems(run.root) == []
    tamper(run)
    write_hashes(run)
    problems = list_problems(run.root)
    assert any(said in problem for problem in problems), problems
