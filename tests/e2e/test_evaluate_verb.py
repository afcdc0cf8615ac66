"""`tunix-rt evaluate`, `compare` and `generate`: what they print, what they write, and what they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.chain_model import write_chain_model
from tests.conftest import write_small_model
from tests.program import tunix_rt
from tests.tables import parametrize
from tunix_rt.cli.main import cli

SAID = "<reasoning>3 < 4</reasoning><answer>80</answer>"
ASKED = '"id": "a", "prompt": "1 + 1?", "section": "all"'
QUESTIONS = [
    {"id": "q-1", "prompt": "What is 40 + 40?", "answer": "80"},
    {"id": "q-2", "prompt": "What is 3 + 4?", "answer": "7"},
    {"id": "q-3", "prompt": "What is 8 times 10?", "answer": "80"},
]


def ask(*arguments: object, verb: str = "evaluate") -> Result:
    """The program within this process, where its own process is not what is tested."""
    asked = [verb, *map(str, arguments), *([] if verb == "compare" else ["--device", "cpu"])]
    return CliRunner(env={"HF_HUB_OFFLINE": "1"}).invoke(cli, asked)


def refused(done: Result, exit_code: int) -> str:
    assert done.exit_code == exit_code, (done.output, done.exception)
    assert "error: " in done.stderr and "  fix: " in done.stderr
    return done.stderr


def succeeded(done: Result) -> str:
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_questions(path: Path, *more: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"section": "all", **item}) + "\n" for item in [*QUESTIONS, *more]))
    return path


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions") / "mine.jsonl")


@pytest.fixture(scope="module")
def eighty(tmp_path_factory) -> Path:
    """A model that answers every question with 80, in tags."""
    return write_chain_model(tmp_path_factory.mktemp("models") / "eighty", {"\n": SAID})


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> Path:
    """A model that never stops."""
    return write_chain_model(tmp_path_factory.mktemp("models") / "endless", {"\n": "xyz..."})


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """A model with weights on disk that were drawn and never trained."""
    import torch
    import transformers

    folder = write_small_model("llama", tmp_path_factory.mktemp("models") / "drawn")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, questions, eighty) -> tuple[Result, Path]:
    output = tmp_path_factory.mktemp("evaluated") / "eighty"
    return ask(eighty, "--evalset", questions, "--output", output), output


@pytest.fixture(scope="module")
def against(tmp_path_factory, questions, eighty, drawn) -> tuple[Result, Path]:
    output = tmp_path_factory.mktemp("evaluated") / "both"
    return ask(eighty, "--evalset", questions, "--against", drawn, "--output", output), output


# --- evaluate --------------------------------------------------------------------------------------------------------


def test_the_json_of_an_evaluation_is_alone_on_stdout_and_is_what_is_written(tmp_path):
    done = tunix_rt(
        "evaluate", "tiny-gemma3", "--evalset", "eval_v2", "--limit", 3, "--max-new-tokens", 12, "--device", "cpu",
        "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "out" / "eval_summary.json").read_text())
    assert summary["questions"] == summary["answers"]["items"] == 3 and summary["models"] == ["tiny-gemma3"]
    assert "Using device: cpu" in done.stderr and "Model: tiny-gemma3" in done.stderr
    assert "evaluate answers: 3 of 3" in done.stderr
    predictions = lines(tmp_path / "out" / "eval" / "predictions-answers.jsonl")
    assert [item["ended"] for item in predictions] == ["length"] * 3
    assert all(item["id"].startswith("ev2-") and item["output"] for item in predictions)


def test_the_table_says_how_many_answers_were_right(evaluated):
    done, output = evaluated
    rows = {line.split("  ")[0].strip(): line for line in succeeded(done).splitlines()}
    assert "mine.jsonl: all 3 questions" in done.stdout and f"Predictions: {output}" in done.stdout.replace("\n", "")
    assert rows["accuracy, strict"].endswith("66.7 % ") and rows["well-formed"].endswith("100.0 % ")
    assert rows["ended by itself"].endswith("100.0 % ")


def test_the_summary_has_scores_and_settings_and_nothing_that_is_not_known(evaluated):
    text = (evaluated[1] / "eval_summary.json").read_text()
    summary = json.loads(text)
    assert "null" not in text and "NaN" not in text
    assert summary["schema"] == "tunix-rt/eval-summary/1"
    scores = summary["answers"]
    assert (scores["items"], scores["correct"], scores["correct_lenient"], scores["well_formed"]) == (3, 2, 2, 3)
    assert scores["accuracy"] == pytest.approx(2 / 3) and scores["ended"] == {"stop": 3}
    assert scores == json.loads((evaluated[1] / "eval" / "answers.json").read_text())
    assert summary["device"] == "cpu" and summary["dtype"] == "float32" and summary["weights"] == "pretrained"
    asked = summary["decoding"]
    assert (asked["max_new_tokens"], asked["temperature"], asked["closing"]) == (256, 0, "</answer>")
    assert {len(summary["evalset_sha256"]), len(asked["style"]), len(asked["tokenizer"])} == {64}


def test_an_output_that_is_not_empty_is_refused_and_left_as_it_was(evaluated, questions, eighty):
    before = {path: path.read_bytes() for path in evaluated[1].rglob("*") if path.is_file()}
    words = refused(ask(eighty, "--evalset", questions, "--output", evaluated[1]), 2)
    assert "is not empty" in words and "--output" in words
    assert {path: path.read_bytes() for path in evaluated[1].rglob("*") if path.is_file()} == before


def test_two_models_are_asked_the_same_and_compared_question_by_question(against, eighty, drawn):
    done, output = against
    said = " ".join(succeeded(done).split())
    assert f"{eighty} against {drawn}: 2 of 3 more answers right; none got worse" in said
    assert "+66.7" in said
    summary = json.loads((output / "eval_summary.json").read_text())
    assert summary["models"] == [str(drawn), str(eighty)]
    assert summary["base"]["correct"] == 0 and summary["answers"]["correct"] == 2
    assert summary["comparison"]["gained"] == ["q-1", "q-3"] and summary["comparison"]["lost"] == []
    base, answers = (lines(output / "eval" / f"predictions-{when}.jsonl") for when in ("base", "answers"))
    assert [item["prompt"] for item in base] == [item["prompt"] for item in answers]
    assert {item["output"] for item in answers} == {SAID} and not {item["output"] for item in base} & {SAID}


def test_samples_and_the_comparison_are_written_for_a_person_to_read_where_there_are_two(against, evaluated):
    samples, page = ((against[1] / name).read_text() for name in ("samples.md", "comparison.md"))
    assert "## Gained: 2 of 3" in samples and SAID in samples and "What is 40 + 40?" in samples
    assert "## Gained: 2 of 3" in page and "` q-1 `, ` q-3 `" in page and "## Lost: 0 of 3" in page
    assert not (evaluated[1] / "samples.md").exists() and not (evaluated[1] / "comparison.md").exists()


# --- compare ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weaker(tmp_path_factory, questions, endless) -> Path:
    """The answers of the model that never stops, in a folder of the same name as the other's."""
    output = tmp_path_factory.mktemp("weaker") / "eighty"
    succeeded(ask(endless, "--evalset", questions, "--output", output))
    return output


def test_two_evaluations_are_compared_and_folders_of_one_name_are_told_apart(weaker, evaluated):
    said = " ".join(succeeded(ask(weaker, evaluated[1], verb="compare")).split())
    assert f"{evaluated[1]} against {weaker}: 2 of 3 more answers right" in said
    assert "gained: q-1, q-3" in said and "lost: none" in said
    back = json.loads(succeeded(ask(evaluated[1], weaker, "--json", verb="compare")))
    assert back["comparison"]["lost"] == ["q-1", "q-3"] and back["comparison"]["gain_points"] == pytest.approx(-200 / 3)
    assert back["first"]["correct"] == 2 and back["second"]["correct"] == 0


def test_an_evaluation_of_two_models_is_compared_by_itself(against, eighty, drawn):
    said = " ".join(succeeded(ask(against[1], verb="compare")).split())
    assert f"{eighty} against {drawn}: 2 of 3 more answers right" in said


def test_answers_that_were_asked_for_otherwise_are_not_compared(tmp_path, evaluated, eighty, questions):
    succeeded(ask(eighty, "--evalset", questions, "--output", tmp_path / "out", "--max-new-tokens", 64))
    words = refused(ask(evaluated[1], tmp_path / "out", verb="compare"), 6)
    assert "max_new_tokens is 256 in eighty, 64 in out" in words


def test_another_type_of_numbers_is_remarked_on_under_the_table(tmp_path, evaluated, eighty, questions):
    narrow = tmp_path / "narrow"
    succeeded(ask(eighty, "--evalset", questions, "--output", narrow, "--dtype", "bfloat16"))
    words = "computed differently: dtype is float32 in eighty, bfloat16 in narrow."
    assert words in " ".join(succeeded(ask(evaluated[1], narrow, verb="compare")).split())
    (remark,) = json.loads(succeeded(ask(evaluated[1], narrow, "--json", verb="compare")))["remarks"]
    assert remark.startswith(words)
    assert "computed differently" not in succeeded(ask(evaluated[1], evaluated[1], verb="compare"))


@pytest.mark.slow
def test_a_run_is_compared_with_its_base_and_answers_the_same_when_evaluated_again(tmp_path, questions):
    run, again = tmp_path / "run", tmp_path / "again"
    done = tunix_rt(
        "train", "smoke_tiny", "--output", run, "--device", "cpu", "--max-steps", 2,
        "--set", "training.save_steps=2", "--set", f"evaluation.evalset={questions}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "as many answers right as before" in " ".join(succeeded(ask(run, verb="compare")).split())
    succeeded(ask(run, "--evalset", questions, "--max-new-tokens", 32, "--output", again))
    assert lines(again / "eval" / "predictions-answers.jsonl") == lines(run / "eval" / "predictions-after.jsonl")
    assert "again against run: as many answers right" in " ".join(succeeded(ask(run, again, verb="compare")).split())


# --- outcomes that are not usual -------------------------------------------------------------------------------------


def test_random_weights_are_requested_and_warned_of(questions, small_model):
    done = ask(small_model("gemma3"), "--evalset", questions, "--weights", "random", "--max-new-tokens", 4, "--json")
    assert json.loads(succeeded(done))["weights"] == "random"
    assert "The weights are random: these generations do not describe the pretrained model" in done.stderr

    assert "--weights random" in refused(ask(small_model("gemma3"), "--evalset", questions), 3)


def test_a_model_that_never_stops_is_cut_and_the_table_says_so(questions, endless, tmp_path):
    done = ask(endless, "--evalset", questions, "--max-new-tokens", 6, "--output", tmp_path / "out")
    (row,) = [line for line in succeeded(done).splitlines() if line.strip().startswith("ended by itself")]
    assert row.endswith(" 0.0 % ")
    found = lines(tmp_path / "out" / "eval" / "predictions-answers.jsonl")
    assert [(item["output"], item["ended"]) for item in found] == [("xyzxyz", "length")] * 3


def test_answers_that_take_too_long_are_cut_and_it_is_counted(questions, endless):
    summary = json.loads(succeeded(ask(endless, "--evalset", questions, "--max-seconds", 1e-6, "--json")))
    assert summary["answers"]["ended"] == {"time": 3} and summary["decoding"]["max_seconds"] == 1e-6


def test_a_question_beyond_the_last_position_gets_no_answer_and_the_others_do(tmp_path, eighty):
    long = {"id": "long", "prompt": "word " * 300, "answer": "80"}
    path = write_questions(tmp_path / "long.jsonl", long)
    succeeded(ask(eighty, "--evalset", path, "--output", tmp_path / "out"))
    found = {item["id"]: item for item in lines(tmp_path / "out" / "eval" / "predictions-answers.jsonl")}
    assert (found["long"]["output"], found["long"]["ended"], found["long"]["strict"]) == ("", "context", False)
    assert [found[item["id"]]["output"] for item in QUESTIONS] == [SAID] * 3


@parametrize("content", "words")
def test_an_eval_set_that_cannot_be_scored_is_refused_before_a_model_is_loaded(tmp_path, content, words):
    (tmp_path / "mine.jsonl").write_text(content)
    done = ask("tiny-gemma3", "--evalset", tmp_path / "mine.jsonl", "--output", tmp_path / "out")
    assert words in refused(done, 3) and "Model: " not in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_eval_set_that_is_not_there_is_refused_with_those_that_are():
    words = refused(ask("tiny-gemma3", "--evalset", "eval_v9"), 3)
    assert "'eval_v9'" in words and "eval_v2" in words


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this computer has an NVIDIA GPU")
@pytest.mark.parametrize("device", ["cuda", "gpu"])
def test_a_device_that_is_not_there_is_refused_and_no_other_is_taken(questions, device):
    done = CliRunner().invoke(cli, ["evaluate", "tiny-gemma3", "--evalset", str(questions), "--device", device])
    assert "no GPU present" in refused(done, 4) and not done.stdout


@pytest.mark.parametrize("verb", ["evaluate", "generate"])
def test_a_setting_that_is_not_about_prompts_is_refused(verb, questions):
    asked = ["--evalset", questions] if verb == "evaluate" else ["Why?"]
    words = refused(ask("tiny-gemma3", *asked, "--set", "training.learning_rate=1", verb=verb), 2)
    assert "training.learning_rate=1" in words and "data.system_instruction" in words


def test_a_run_without_a_final_model_is_refused(tmp_path, questions):
    (tmp_path / "config.yaml").write_text("model:\n  model_name_or_path: tiny-gemma3\n")
    assert "has no final model" in refused(ask(tmp_path, "--evalset", questions), 3)


def test_a_run_is_evaluated_with_its_own_questions_unless_others_are_named(tmp_path, eighty, questions):
    """Those of its eval set, or the held-out ones whose predictions it has."""
    run = tmp_path / "run"
    succeeded(ask(eighty, "--evalset", questions, "--output", run))
    shutil.copytree(eighty, run / "final_model")
    (run / "config.yaml").write_text("model:\n  model_name_or_path: tiny-gemma3\n")
    assert "has no questions of its own" in refused(ask(run), 3)
    (run / "eval" / "predictions-answers.jsonl").rename(run / "eval" / "predictions-before.jsonl")
    assert f"held out of {run}: all 3 questions" in succeeded(ask(run))
    with (run / "config.yaml").open("a") as file:
        file.write(f"evaluation:\n  evalset: {questions}\n")
    assert f"{questions}: all 3 questions" in succeeded(ask(run, "--output", tmp_path / "again"))
    summary = json.loads((tmp_path / "again" / "eval_summary.json").read_text())
    assert summary["evalset"] == str(questions)


def test_a_run_is_asked_with_the_tokenizer_beside_its_model_unless_another_is_named(tmp_path, eighty):
    (tmp_path / "config.yaml").write_text("model:\n  model_name_or_path: tiny-gemma3\n")
    shutil.copytree(eighty, tmp_path / "final_model")
    assert succeeded(ask(tmp_path, "How many?", verb="generate")) == "3 < 4\n80\n"
    other = ["--set", "model.tokenizer_name_or_path=./nowhere"]
    assert "nowhere" in refused(ask(tmp_path, "How many?", *other, verb="generate"), 3)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Path:
    """A model whose embedding ends before the tags of the tokenizer, which has a special token beyond it too."""
    folder = write_small_model("llama", tmp_path_factory.mktemp("models") / "narrow")
    config, tokens = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 765}))
    image = next(token for token in tokens["added_tokens"] if token["special"])
    tokens["added_tokens"].append(image | {"id": 769, "content": "<image_soft_token>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    return folder


def test_a_special_token_beyond_the_embedding_does_not_matter_until_a_prompt_has_it(narrow, questions):
    how = ["--weights", "random", "--max-new-tokens", 4]
    succeeded(ask(narrow, "--evalset", questions, *how))
    succeeded(ask(narrow, "What is 3 + 4?", *how, verb="generate"))
    settings = ["--set", "data.system_instruction=Answer in <answer> tags."]
    for done in (
        ask(narrow, "--evalset", questions, *how, *settings),
        ask(narrow, "What is <answer>?", *how, verb="generate"),
    ):
        words = refused(done, 3)
        assert "the vocabulary has 765 tokens, and a prompt has token 767" in words
        assert "model.tokenizer_name_or_path" in words


# --- generate --------------------------------------------------------------------------------------------------------


def test_the_answer_is_alone_on_stdout_and_the_log_on_stderr(eighty):
    done = ask(eighty, "How many?", verb="generate")
    assert succeeded(done) == "3 < 4\n80\n"
    assert "Using device: cpu" in done.stderr and "Model: " in done.stderr


def test_one_answer_as_json_has_its_parts(eighty, endless):
    found = json.loads(succeeded(ask(eighty, "How many?", "--json", verb="generate")))
    assert found["text"] == SAID and (found["reasoning"], found["answer"]) == ("3 < 4", "80")
    assert found["ended"] == "stop" and found["tokens"] == 10 and found["decoding"]["max_new_tokens"] == 256
    cut = json.loads(succeeded(ask(endless, "How many?", "--json", "--max-new-tokens", 4, verb="generate")))
    assert (cut["text"], cut["ended"], cut["tokens"]) == ("xyzx", "length", 4)
    assert "reasoning" not in cut and "answer" not in cut


def test_an_answer_that_was_cut_off_says_so_beside_it(endless):
    done = ask(endless, "How many?", "--max-new-tokens", 4, verb="generate")
    assert succeeded(done) == "xyzx\n" and "(cut off at --max-new-tokens)" in done.stderr
    full = ask(endless, "How many?", "--max-new-tokens", 300, verb="generate")
    assert "the context is full" in full.stderr and len(succeeded(full)) > 200


def test_an_empty_generation_is_reported(tmp_path):
    silent = write_chain_model(tmp_path / "silent", {"\n": ""})
    done = ask(silent, "How many?", verb="generate")
    assert succeeded(done).strip() == "" and "the generation is empty" in done.stderr


def test_two_models_answer_side_by_side(eighty, endless):
    said = succeeded(ask(eighty, "How many?", "--against", endless, "--max-new-tokens", 9, verb="generate"))
    heading, answers = (next(line for line in said.splitlines() if words in line) for words in ("endless", "xyzxyz"))
    assert heading.index("endless") < heading.index("eighty")
    assert "3 < 4" in answers, "a sign that is no tag does not break the line"
    both = json.loads(
        succeeded(ask(eighty, "How?", "--against", endless, "--max-new-tokens", 3, "--json", verb="generate"))
    )
    assert [answer["model"] for answer in both["answers"]] == [str(endless), str(eighty)]


def test_a_drawn_answer_depends_on_its_seed_alone():
    def drawn(seed: int) -> str:
        how = ["--temperature", 1.5, "--seed", seed, "--max-new-tokens", 16]
        return succeeded(ask("tiny-gemma3", "Tell me.", *how, verb="generate"))

    assert drawn(1) == drawn(1) != drawn(4)  # the model is sure of its first words: few seeds change them


def test_a_question_that_fills_the_model_or_is_no_text_is_refused(eighty):
    words = refused(ask(eighty, "word " * 300, verb="generate"), 3)
    assert "the model has 256 positions" in words and "shorten it" in words

    assert "not valid UTF-8" in refused(ask(eighty, "a\udc80b", verb="generate"), 3)


def test_a_model_with_another_tokenizer_is_refused_before_anything_is_generated(tmp_path, questions, eighty):
    """It would be given numbers that mean other words to it, and lose."""
    other = write_chain_model(tmp_path / "other", {"\n": SAID})
    table = json.loads((other / "tokenizer.json").read_text())
    first, second = list(table["model"]["vocab"])[5:7]
    vocabulary = table["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(table))
    for verb, arguments in (("evaluate", ["--evalset", questions]), ("generate", ["What is 9?"])):
        words = refused(ask(eighty, *arguments, "--against", other, verb=verb), 3)
        assert "have different tokenizers" in words and "answers" not in words.split("error:")[0]


def test_an_option_that_is_out_of_range_is_refused(questions, eighty):
    for option in ("--temperature", "--top-p", "--max-seconds"):
        done = ask(eighty, "--evalset", questions, option, "nan")
        assert done.exit_code == 2 and "is not a finite number" in done.stderr
    for verb, argument in (("evaluate", ["--evalset", questions, "--limit", 8]), ("generate", ["How many?"])):
        done = ask(eighty, *argument, "--seed", -3, verb=verb)
        assert done.exit_code == 2 and "--seed: -3 is not in the range" in done.stderr


def test_verdicts_that_do_not_follow_from_the_outputs_are_not_compared(tmp_path, evaluated):
    copy = tmp_path / "copy"
    shutil.copytree(evaluated[1], copy)
    path = copy / "eval" / "predictions-answers.jsonl"
    path.write_text(path.read_text().replace('"strict": false', '"strict": true'))
    words = refused(ask(evaluated[1], copy, verb="compare"), 6)
    assert "strict" in words and "follow from the outputs alone" in words


def test_what_cannot_be_compared_ends_with_the_exit_code_of_its_cause(tmp_path, evaluated):
    def compared(file: str, old: str, new: str, exit_code: int) -> str:
        shutil.copytree(evaluated[1], tmp_path / "copy", dirs_exist_ok=True)
        path = tmp_path / "copy" / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        return refused(ask(evaluated[1], path.parents[file.count("/")], verb="compare"), exit_code)

    answers = "eval/predictions-answers.jsonl"
    assert "has no predictions to compare" in refused(ask(evaluated[1], tmp_path, verb="compare"), 3)
    misspelt = refused(ask(evaluated[1], f"{evaluated[1]}x", verb="compare"), 3)
    assert "no such folder" in misspelt and f"did you mean `{evaluated[1]}`?" in misspelt
    assert "predictions-before.jsonl" in refused(ask(evaluated[1], verb="compare"), 3)
    assert "predictions-answers.jsonl:1: strict" in compared(answers, '"strict": true', '"strict": 1', 3)
    assert "decoding is missing" in compared("eval_summary.json", '"decoding"', '"settings"', 1)
    assert "have different questions" in compared(answers, '"id": "q-3"', '"id": "q-4"', 6)
    assert "'q-2' has another prompt or expected answer" in compared(answers, "What is 3 + 4?", "What is 3 + 5?", 6)
