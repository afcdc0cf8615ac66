"""Attacks that L1 cannot see, on real runs: what the verifier computes itself finds them. By number as in test_attacks.py.

One default test replays: test_bundles.py regenerates the answers of the demo bundle."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.bundles import collect
from tests.forging.bases import ASKED, STEPS, copy_of
from tests.forging.edits import Json, answer, each_line, edited, lines_of, put, put_lines, right_answer, set_loss
from tests.forging.sealing import reseal
from tests.program import tunix_rt
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.facts import Verdict
from tunix_rt.evidence.replay.steps import Segment, all_segments, draw_segments
from tunix_rt.evidence.verify import Options, verify
from tunix_rt.runs.record import RunRecord
from tunix_rt.storage import sha256_file

MODEL = "final_model/model.safetensors"
JUMP = Segment(start=3, stop=4)


def checks(verdict: Verdict) -> set[tuple[str, str]]:
    return {(one.level, one.check) for one in verdict.findings}


def set_threads(folder: Path) -> None:
    """Another machine, so that nothing is compared by its bits."""
    with edited(folder / "processes.json") as listed:
        for process in listed["processes"]:
            process["machine"]["threads"] = 3


def scale(path: Path, by: float) -> None:
    weights = {name: np.asarray(tensor * by, dtype=tensor.dtype) for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.slow
def test_c3_a_final_model_that_training_did_not_give_is_found_on_a_machine_claimed_to_be_another(
    tiny_replayable: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_replayable, tmp_path / "folder")
    set_threads(folder)
    scale(folder / MODEL, 1.05)
    reseal(folder)
    assert examine(folder).level == "L1"
    verdict = verify(folder, "L3", Options(segments=1, nonce="end"))
    assert ("L3", "final-model") in checks(verdict) and verdict.level == "L1" and not verdict.ok
    assert all(one.label != "recomputed" for one in verdict.claims)
    assert any("not bitwise (same hardware: threads 3 recorded" in note for note in verdict.notes)


# --- more real runs ---------------------------------------------------------------------------------------------


def train(folder: Path, *settings: object) -> Path:
    done = tunix_rt("train", "smoke_tiny", *STEPS, *ASKED, "--device", "cpu", "--output", folder, *settings)
    assert done.returncode == 0, done.stderr
    return folder


def bundle_of(run: Path, repo: Path, to: Path) -> Path:
    done = collect(run, to, repo, "--with-model", "--with-checkpoints")
    assert done.returncode == 0, done.stderr
    return to


def take_end(folder: Path, other: Path) -> None:
    """Final model, answers and last held-out loss of another run."""
    put(folder / MODEL, (other / MODEL).read_bytes())
    put(folder / "eval/predictions-after.jsonl", (other / "eval/predictions-after.jsonl").read_bytes())
    held = lines_of(folder / "eval/heldout.jsonl")
    set_loss(held[-1], lines_of(other / "eval/heldout.jsonl")[-1]["loss"])
    put_lines(folder / "eval/heldout.jsonl", held)


@pytest.fixture(scope="module")
def better(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained harder: its answers and its held-out loss are those of its weights."""
    return train(tmp_path_factory.mktemp("better") / "run", "--set", "training.learning_rate=3e-3")


@pytest.mark.slow
def test_c3_weights_and_answers_of_another_run_pass_l2_and_fail_l3(
    better: Path, tiny_replayable: Path, tmp_path: Path
) -> None:
    folder = copy_of(tiny_replayable, tmp_path / "folder")
    set_threads(folder)
    take_end(folder, better)
    reseal(folder)
    assert verify(folder, "L2").level == "L2", "the weights do give these answers"
    verdict = verify(folder, "L3", Options(segments=1, nonce="end"))
    assert ("L3", "final-model") in checks(verdict) and verdict.level == "L2"


@pytest.mark.slow
def test_c4_in_16_bits_a_reproduction_does_not_accept_them_either(tiny_repo: Path, tmp_path: Path) -> None:
    bf16 = ("--set", "training.dtype=bfloat16")
    source = {"PYTHONPATH": str(tiny_repo / "src")}
    runs = []
    for name, more in (("run", ()), ("better", ("--set", "training.learning_rate=3e-3"))):
        arguments = (
            "train",
            "smoke_tiny",
            *STEPS,
            *ASKED,
            *bf16,
            *more,
            "--device",
            "cpu",
            "--output",
            tmp_path / name,
        )
        done = tunix_rt(*arguments, **source)
        assert done.returncode == 0, done.stderr
        runs.append(tmp_path / name)
    folder = bundle_of(runs[0], tiny_repo, tmp_path / "bundle")
    set_threads(folder)
    take_end(folder, runs[1])

    def lower(line: Json) -> None:
        set_loss(line, line["loss"] * 0.93)
        line["grad_norm"] *= 0.16

    each_line(folder / "metrics.jsonl", lower)
    reseal(folder)
    assert examine(folder).level == "L1"
    assert ("L4", "final-model") in checks(verify(folder, "L4"))


@pytest.mark.slow
def test_h1_the_tokenizer_of_a_bundle_does_not_decode_its_answers(tiny_replayable: Path, tmp_path: Path) -> None:
    """A decoder that writes the right answer for each wrong one, beside honest weights."""
    folder = copy_of(tiny_replayable, tmp_path / "folder")
    before = {one["output"]: right_answer(one) for one in lines_of(folder / "eval/predictions-after.jsonl")}
    with edited(folder / "final_model/tokenizer.json") as tokenizer:
        replaces = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in before.items()]
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], {"type": "Fuse"}, *replaces]}
    answer(folder, right_answer)
    reseal(folder)
    assert examine(folder).level == "L1"
    assert checks(verify(folder, "L2")) == {("L2", "answers")}
    set_threads(folder)
    reseal(folder)
    found = checks(verify(folder, "L3", Options(segments=1, nonce="end")))
    assert {("L2", "answers"), ("L3", "answers"), ("L3", "final-model")} <= found


@pytest.mark.slow
def test_m5_an_eval_set_that_nobody_has_does_not_reach_l2(tiny_replayable: Path, tmp_path: Path) -> None:
    from tests.contract.test_attacks import ask

    folder = copy_of(tiny_replayable, tmp_path / "folder")
    answer(folder, lambda one: right_answer(one) if one["difficulty"] == "easy" else one["output"])
    ask(folder, "eval-v2-hard", "ab" * 32, lambda one: one["difficulty"] == "easy")
    reseal(folder)
    verdict = verify(folder, "L2")
    assert not verdict.ok and verdict.level == "L1" and verdict.findings == ()
    assert "answers: not checked, no eval set with the recorded hash was given" in verdict.notes
    verdict = verify(folder, "L3", Options(segments=1, nonce="end"))
    assert next(one for one in verdict.claims if one.name == "accuracy").label == "self-reported"


def jump(run: Path, to: Path, repo: Path) -> Path:
    """The run with other weights in its checkpoint of step 4, and everything after it honestly computed from there."""
    folder = Path(shutil.copytree(run, to))
    for name in ("result.json", "SHA256SUMS", "memory.json", "eval_summary.json", "samples.md"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints/step-000006")
    shutil.rmtree(folder / "final_model")
    scale(folder / "checkpoints/step-000004/model.safetensors", 1.1)
    with edited(folder / "checkpoints.json") as listed:
        listed["checkpoints"] = [one for one in listed["checkpoints"] if one["step"] <= 4]
    put_lines(folder / "metrics.jsonl", lines_of(folder / "metrics.jsonl")[:4])
    put_lines(
        folder / "eval/heldout.jsonl", [one for one in lines_of(folder / "eval/heldout.jsonl") if one["step"] <= 4]
    )
    for name in ("eval/predictions-after.jsonl", "eval/after.json"):
        (folder / name).unlink(missing_ok=True)
    reseal(folder)
    (folder / "SHA256SUMS").unlink()
    source = {"PYTHONPATH": str(repo / "src")}
    done = tunix_rt("train", folder / "config.yaml", "--output", folder, "--resume", **source)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_h2_a_jump_of_the_weights_is_found_whenever_its_segment_is_drawn(
    tiny_run: Path, tiny_repo: Path, tmp_path: Path
) -> None:
    folder = bundle_of(jump(tiny_run, tmp_path / "run", tiny_repo), tiny_repo, tmp_path / "bundle")
    verdict = verify(folder, "L3", Options(segments="all"))
    assert ("L3", "states") in checks(verdict) and verdict.level in ("L1", "L2")
    of = all_segments([entry.step for entry in RunRecord(folder).checkpoints], 6)
    root, nonces = sha256_file(folder / "SHA256SUMS"), list(map(str, range(100)))
    drawn = [JUMP in draw_segments(of, 1, root=root, nonce=nonce) for nonce in nonces]
    found, missed = (verify(folder, "L3", Options(segments=1, nonce=nonces[drawn.index(one)])) for one in (True, False))
    assert ("L3", "states") in checks(found) and missed.ok
    assert any("is found with probability at least 17 %" in note for note in missed.notes), (
        "the verdict states what it can miss"
    )
