"""The pure half of a replay: which steps are taken again, how alike two machines are, what counts as the same."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from docs import replay_pages
from tests.program import ROOT as REPOSITORY
from tunix_rt.engines.base import Step
from tunix_rt.errors import DoesNotFitError, EvidenceError, HardwareError
from tunix_rt.evidence.facts import LEVELS, Finding, Verdict, level_of
from tunix_rt.evidence.replay import compare, steps
from tunix_rt.evidence.replay.judge import Outcome, _judge_end, mostly_bit_equal
from tunix_rt.evidence.replay.steps import (
    PassResult,
    Segment,
    all_segments,
    chance_of_detection,
    distance,
    draw_segments,
    fresh_nonce,
    passes_over,
)
from tunix_rt.evidence.sandbox import Exit
from tunix_rt.evidence.verify import _not_finished
from tunix_rt.models.safetensors import join_files
from tunix_rt.runs.schemas import HeldoutLine, StepLine
from tunix_rt.runs.schemas_host import Machine
from tunix_rt.scoring.score import Prediction, judge

ROOT = "ab" * 32
CPU = {
    "backend": "torch", "device": "cpu", "cpu": "some", "cpu_flags_sha256": "1" * 64, "cpu_capability": "AVX512",
    "threads": 2, "python": "3.12.1", "versions": {"torch": "2.11.0", "transformers": "5.22"}, "deterministic": False,
    "devices": 1,
}  # fmt: skip
H200 = {"name": "NVIDIA H200", "capability": "9.0", "driver": "580.1", "cuda": "13.0", "cudnn": "91000"}
GPU = CPU | {"device": "cuda", "deterministic": True, "gpu": H200}
STEP = Step(
    step=1, loss=2.5, lr=1e-4, grad_norm=3.0, tokens=100, target_tokens=60, batch="c" * 64, seconds=0.1, peak_bytes=1
)


def segments(*pairs: tuple[int, int]) -> list[Segment]:
    return [Segment(start=start, stop=stop) for start, stop in pairs]


# --- which steps ------------------------------------------------------------------------------------------------------


def test_a_run_is_cut_at_its_checkpoints_and_every_step_is_in_one_segment() -> None:
    assert all_segments([4, 2, 6], 7) == segments((0, 2), (2, 4), (4, 6), (6, 7))
    assert all_segments([3], 3) == all_segments([], 3) == segments((0, 3))
    assert [one.describe() for one in segments((0, 2), (6, 7))] == ["steps 1 to 2", "step 7"]


def test_a_draw_is_repeated_by_its_nonce_and_another_with_another_nonce_or_bundle() -> None:
    of = all_segments(range(10, 1000, 10), 1000)
    drawn = draw_segments(of, 5, root=ROOT, nonce="x")
    assert len(set(drawn)) == 5 and list(drawn) == sorted(drawn)
    assert drawn == draw_segments(of, 5, root=ROOT, nonce="x")
    assert drawn != draw_segments(of, 5, root=ROOT, nonce="y")
    assert drawn != draw_segments(of, 5, root="cd" * 32, nonce="x")
    assert draw_segments(of, len(of) + 1, root=ROOT, nonce="x") == tuple(of)
    assert fresh_nonce() != fresh_nonce()


def frequencies(of: list[Segment], count: int, draws: int = 4000) -> list[float]:
    drawn = [draw_segments(of, count, root=ROOT, nonce=str(number)) for number in range(draws)]
    return [sum(segment in one for one in drawn) / draws for segment in of]


@pytest.mark.parametrize("count", [1, 3])
def test_segments_of_equal_length_are_drawn_alike_the_first_and_the_last_as_well(count: int) -> None:
    of = all_segments(range(5, 50, 5), 50)
    assert frequencies(of, count) == pytest.approx([count / 10] * 10, abs=0.03)


def test_a_segment_is_drawn_in_proportion_to_its_steps() -> None:
    of = segments((0, 1), (1, 3), (3, 10))
    assert frequencies(of, 1) == pytest.approx([0.1, 0.2, 0.7], abs=0.03)


@pytest.mark.parametrize(("ends", "count"), [([1, 2, 3, 4], 2), ([1, 3, 10], 1), ([1, 3, 10], 2), ([1, 3], 2)])
def test_the_stated_probability_is_at_most_how_often_any_segment_is_drawn(ends: list[int], count: int) -> None:
    of = all_segments(ends, ends[-1])
    stated, seen = chance_of_detection(of, count), min(frequencies(of, count))
    exact = count == 1 or len({one.steps for one in of}) == 1 or count >= len(of)
    assert stated == pytest.approx(seen, abs=0.04) if exact else 0 < stated <= seen + 0.02


def test_without_a_count_the_draw_has_three_segments_and_a_fifth_of_the_steps() -> None:
    """Whoever made the run chose how many checkpoints there are."""
    assert len(draw_segments(all_segments(range(10, 100, 10), 100), None, root="r", nonce="n")) == 3
    assert len(draw_segments(all_segments(range(1, 1000), 1000), None, root="r", nonce="n")) == 200
    assert len(draw_segments(all_segments([], 5), None, root="r", nonce="n")) == 1


def test_a_segment_without_its_checkpoint_begins_at_an_earlier_one_or_at_the_base_model() -> None:
    of = segments((2, 4), (6, 8), (8, 9))
    assert passes_over(of, {2, 6, 8}) == tuple(of)
    assert passes_over(of, {6}) == tuple(segments((0, 4), (6, 9)))
    assert passes_over(of, ()) == tuple(segments((0, 9)))


# --- how alike two machines are ---------------------------------------------------------------------------------------


def match(recorded: dict[str, Any], here: dict[str, Any]) -> compare.Match:
    return compare.match_machines(Machine.model_validate(recorded), here)


def test_the_same_machine_computes_the_same_bits_whatever_its_python() -> None:
    assert match(CPU, CPU | {"python": "3.11.0", "cpu": "by another name"}).name == "bitwise"
    assert match(GPU, GPU).name == "bitwise"


@pytest.mark.parametrize(
    ("recorded", "here", "reason"),
    [
        (CPU, {"threads": 4}, "threads 2 recorded, 4 here"),
        (CPU, {"cpu_flags_sha256": "2" * 64}, "another CPU instruction set"),
        (CPU, {"cpu_capability": "AVX2"}, "CPU kernels AVX512 recorded, AVX2 here"),
        (CPU, {"versions": {"torch": "2.12.0", "transformers": "5.22"}}, "torch 2.11.0 recorded, 2.12.0 here"),
        (CPU, {"versions": {"torch": "2.11.0"}}, "transformers 5.22 recorded, None here"),
        (GPU, {"gpu": H200 | {"driver": "590.0"}}, "GPU driver 580.1 recorded, 590.0 here"),
        (GPU | {"deterministic": False}, {}, "recorded without training.deterministic"),
        (CPU | {"device": "tpu"}, {}, "no bitwise comparison is known for tpu"),
    ],
)
def test_what_stands_against_bits_is_named(recorded: dict[str, Any], here: dict[str, Any], reason: str) -> None:
    found = match(recorded, recorded | here)
    assert found == compare.Match(name="same hardware", reasons=(reason,))
    assert found.describe() == f"within tolerance, not bitwise (same hardware: {reason})"


@pytest.mark.parametrize("here", [GPU, CPU | {"backend": "jax"}])
def test_another_device_or_engine_is_other_hardware(here: dict[str, Any]) -> None:
    assert match(CPU, here).name == match(here, CPU).name == "other hardware"
    assert match(GPU, GPU | {"gpu": H200 | {"name": "NVIDIA L4"}}).name == "other hardware"


def test_of_several_machines_the_least_alike_counts() -> None:
    assert compare.loosest(["bitwise", "other hardware", "same hardware"]) == "other hardware"
    assert compare.Match(name="other hardware").at_most("same hardware", "numerics").name == "other hardware"
    assert compare.Match(name="bitwise").at_most("same hardware", "numerics").reasons == ("numerics",)


# --- what counts as the same ------------------------------------------------------------------------------------------


def line_of(step: Step) -> StepLine:
    values = {name: value for name in Step.__slots__ if (value := getattr(step, name)) is not None}
    return StepLine.model_validate(values | {"loss_hex": step.loss.hex(), "prev": "0" * 64})


def problems(recorded: Step, here: Step, tolerance: Any = compare.EXACT) -> list[str]:
    exact = tolerance == compare.EXACT
    found = compare.compare_steps([line_of(recorded)], [here], lambda _: tolerance, exact=exact).problems
    return [one.partition(":")[0] for one in found]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"loss": math.nextafter(2.5, 3)}, "loss"),
        ({"grad_norm": math.nextafter(3.0, 4)}, "gradient norm"),
        ({"lr": math.nextafter(1e-4, 1)}, "lr"),
        ({"batch": "d" * 64}, "batch"),
        ({"tokens": 101}, "tokens"),
        ({"target_tokens": 61}, "target_tokens"),
    ],
)
def test_where_bits_are_compared_the_last_one_counts(changed: dict[str, Any], name: str) -> None:
    assert problems(STEP, STEP) == []
    assert problems(STEP, replace(STEP, **changed)) == [name]


def test_within_tolerance_rounding_passes_and_more_does_not() -> None:
    near = compare.TOLERANCES["same hardware", "float32"]
    assert (
        problems(
            STEP, replace(STEP, loss=2.5 * (1 + 0.9 * near.loss), grad_norm=3.0 * (1 + 0.9 * near.grad_norm)), near
        )
        == []
    )
    assert problems(STEP, replace(STEP, loss=2.5 * (1 + 1.1 * near.loss)), near) == ["loss"]
    assert problems(STEP, replace(STEP, grad_norm=3.0 * (1 + 1.1 * near.grad_norm)), near) == ["gradient norm"]
    assert problems(STEP, replace(STEP, loss=math.nan), near) == ["loss"]
    assert problems(STEP, replace(STEP, batch="d" * 64), near) == ["batch"]


def test_many_steps_that_differ_are_one_problem_that_names_the_first_and_counts_the_rest() -> None:
    steps = [replace(STEP, step=number) for number in range(1, 11)]
    other = [replace(one, loss=9.0) for one in steps]
    (problem,) = compare.compare_steps(list(map(line_of, steps)), other, lambda _: compare.EXACT, exact=True).problems
    assert problem.startswith("loss: step 1: 2.5 recorded, 9.0 here") and problem.endswith("and 7 more of 10")


def test_a_machine_that_gives_half_of_the_recorded_bits_is_held_to_all_of_them() -> None:
    steps = [replace(STEP, step=number) for number in (1, 2, 3, 4)]
    run = SimpleNamespace(metrics=list(map(line_of, steps)))
    other = [replace(one, loss=one.loss * (1 + 1e-15)) for one in steps]

    def held(again: list[Step]) -> bool:
        return mostly_bit_equal(run, [PassResult(segment=Segment(start=0, stop=4), steps=again)])  # type: ignore[arg-type]

    assert held(steps) and held([*steps[:2], *other[2:]])
    assert not held([steps[0], *other[1:]]) and not held(steps[:1])


def test_a_held_out_loss_is_held_to_its_tokens_and_its_tolerance() -> None:
    line = HeldoutLine(step=3, loss=2.0, loss_hex=(2.0).hex(), target_tokens=7)
    assert compare.heldout_problem(line, 2.0, 7, 0.0) == compare.heldout_problem(line, 2.01, 7, 0.01) == ""
    assert "after step 3: 2.0 recorded, 2.01 here" in compare.heldout_problem(line, 2.01, 7, 0.001)
    assert "tokens" in compare.heldout_problem(line, 2.0, 8, 1.0)


def answers(*outputs: str) -> list[Prediction]:
    return [judge(id=f"q{at}", prompt="?", expected="1", output=text, ended="stop") for at, text in enumerate(outputs)]


def test_answers_are_the_same_by_text_and_by_how_they_end() -> None:
    recorded = answers("a", "b", "c", "d")
    again = [{"output": one.output, "ended": "stop"} for one in recorded]
    assert compare.answers_problem("after", recorded, again, texts=1.0) == ""
    for changed in ({"output": "x"}, {"ended": "length"}):
        other = [again[0] | changed, *again[1:]]
        assert (
            compare.answers_problem("after", recorded, other, texts=1.0) == "answers after: 1 of 4 differ, first 'q0'"
        )
        assert compare.answers_problem("after", recorded, other, texts=0.75) == ""


def test_no_followed_answer_may_have_a_token_below_a_near_tie() -> None:
    recorded = answers("a", "b")
    assert compare.gaps_problem("after", recorded, [0.0, 0.4], 0.5) == ""
    assert "1 of 2 contain tokens that these weights do not give: 'q1' by 0.6" in compare.gaps_problem(
        "after", recorded, [0.0, 0.6], 0.5
    )
    assert compare.gaps_problem("after", recorded, [math.nan, math.inf], 0.5).startswith("answers after: 2 of 2")


# --- tolerances -------------------------------------------------------------------------------------------------------


def test_tolerances_widen_with_the_distance_of_the_machines_and_with_rounding() -> None:
    for compute in ("float32", "bfloat16"):
        near, far = compare.TOLERANCES["same hardware", compute], compare.TOLERANCES["other hardware", compute]
        assert all(0 < getattr(near, part) <= getattr(far, part) for part in replay_pages.PARTS)
    assert compare.TOLERANCES["same hardware", "float32"].loss < compare.TOLERANCES["same hardware", "bfloat16"].loss
    assert compare.tolerance_of("bitwise", "bfloat16") == compare.EXACT
    assert compare.tolerance_of("same hardware", "float16") == compare.tolerance_of("same hardware", "bfloat16")
    assert compare.tolerance_of("same hardware", "float64") == compare.tolerance_of("same hardware", "float32")


def test_every_tolerance_is_a_multiple_of_the_noise_that_was_measured_on_a_cpu_and_a_gpu() -> None:
    honest = [one for one in replay_pages.measured(REPOSITORY) if one["kind"] == "honest"]
    for (name, compute), allowed in compare.TOLERANCES.items():
        for device in ("CPU", "GPU"):
            found = [one for one in honest if (one["class"], one["compute"], one["on"]) == (name, compute, device)]
            assert found
            for part in replay_pages.PARTS:
                assert getattr(allowed, part) >= compare.FACTOR * max(one.get(part, 0.0) for one in found), (
                    name,
                    device,
                    part,
                )
            assert compute not in compare.WIDE or min(one["texts"] for one in found) >= allowed.texts
    same = [one for one in honest if one["class"] == "bitwise"]
    assert {one["on"] for one in same} == {"CPU", "GPU"}
    assert all(one[part] == 0 for one in same for part in replay_pages.PARTS)


def test_near_ties_are_a_multiple_of_the_gaps_that_were_measured() -> None:
    for file in replay_pages.GAPS.values():
        pairs = json.loads((REPOSITORY / file).read_text())["pairs"]
        for name in compare.COMPARISONS[1:]:
            gaps = [gap for one in pairs if one["kind"] == name for gap in one["largest_gaps"]]
            assert gaps and compare.TIES["bfloat16"] >= compare.FACTOR * max(gaps)


def test_a_tolerance_grows_with_the_steps_since_the_start_up_to_a_limit() -> None:
    near = compare.tolerance_of("same hardware", "float32")
    assert compare.grown(near, "float32", 1) == compare.grown(near, "float32", compare.MEASURED_STEPS) == near
    assert compare.grown(near, "float32", 2 * compare.MEASURED_STEPS).loss == pytest.approx(2 * near.loss)
    for compute, most in compare.MOST_GROWTH.items():
        assert compare.grown(near, compute, 10**6).weights == pytest.approx(most * near.weights)
    assert compare.grown(compare.EXACT, "float32", 10**6) == compare.EXACT


# --- weights ----------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, dtype: str, **tensors: npt.NDArray[Any]) -> Path:
    header, data = {}, b""
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def bfloat16(values: Any) -> npt.NDArray[np.uint16]:
    return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def test_a_distance_is_a_fraction_of_the_way_that_the_weights_went(tmp_path: Path) -> None:
    zeros = np.zeros(5, dtype=np.float32)
    first = write_tensors(tmp_path / "a", "F32", w=zeros, v=zeros)
    recorded = write_tensors(tmp_path / "b", "F32", w=zeros + 4, v=zeros)
    here = write_tensors(tmp_path / "c", "F32", w=zeros + 4, v=zeros + 1)
    assert distance(first, recorded, recorded) == 0
    assert distance(first, recorded, here) == pytest.approx(1 / math.sqrt(17))
    assert distance(first, here, first) == math.inf
    assert distance(first, recorded, write_tensors(tmp_path / "d", "F32", w=zeros)) == math.inf
    assert not distance(first, write_tensors(tmp_path / "e", "F32", w=zeros * math.nan, v=zeros), here) <= 1e9


def test_a_distance_spans_several_files_and_types(tmp_path: Path) -> None:
    """A model in shards of 16 bits against one file in float32."""
    one, two = np.ones(3, dtype=np.float32), np.full(4, 2.0, dtype=np.float32)
    first = write_tensors(tmp_path / "first" / "model.safetensors", "F32", w=0 * one, v=0 * two).parent
    here = write_tensors(tmp_path / "here" / "model.safetensors", "F32", w=one, v=two).parent
    write_tensors(tmp_path / "recorded" / "model-1-of-2.safetensors", "BF16", w=bfloat16(one))
    write_tensors(tmp_path / "recorded" / "model-2-of-2.safetensors", "BF16", v=bfloat16(two))
    assert distance(first, tmp_path / "recorded", here) == 0
    write_tensors(tmp_path / "recorded" / "model-2-of-2.safetensors", "F16", v=(1.5 * two).astype(np.float16))
    assert distance(first, tmp_path / "recorded", here) == pytest.approx(math.sqrt(4 / 19))
    write_tensors(tmp_path / "recorded" / "z.safetensors", "BF16", w=bfloat16(one))
    with pytest.raises(EvidenceError, match="in two files"):
        distance(first, tmp_path / "recorded", here)


def test_a_distance_is_the_same_however_many_ranks_wrote_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "PIECE", 7)
    draw = np.random.default_rng(0)
    first, recorded, here = (draw.normal(size=(11, 3)).astype(np.float32) for _ in range(3))
    sets = {"first": first, "recorded": recorded, "here": here}
    whole = [write_tensors(tmp_path / name / "model.safetensors", "F32", w=one) for name, one in sets.items()]
    expected = distance(*whole)
    whole[1].unlink()
    for rank, rows in enumerate(np.split(recorded, [4, 8]), start=1):
        write_tensors(whole[1].with_name(f"model-{rank:05d}-of-00003.safetensors"), "F32", w=rows)
    assert distance(*whole) == pytest.approx(expected, rel=1e-12)
    joined = tmp_path / "joined"
    join_files(sorted(whole[1].parent.iterdir()), joined)
    assert (
        joined.read_bytes()[-recorded.nbytes :] == recorded.tobytes()
        and distance(whole[0], joined, whole[2]) == expected
    )
    write_tensors(whole[1].with_name("model-00003-of-00003.safetensors"), "F32", w=recorded[:1, :2])
    with pytest.raises(EvidenceError, match="the file before it differs"):
        distance(*whole)


def test_weights_of_an_unknown_type_or_with_a_header_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="I8"):
        distance(*[write_tensors(tmp_path / "odd", "I8", w=np.zeros(2, dtype=np.int8))] * 3)
    (tmp_path / "long").write_bytes(struct.pack("<Q", 2**60))
    with pytest.raises(EvidenceError, match="not a safetensors file"):
        distance(*[tmp_path / "long"] * 3)


# --- the level --------------------------------------------------------------------------------------------------------


def test_the_level_is_the_highest_that_was_passed_below_every_finding() -> None:
    def finding(level: Any) -> Finding:
        return Finding(level=level, check="x", problem="y")

    assert level_of([], ["L0", "L1", "L3"]) == "L3"
    assert level_of([finding("L3"), finding("L4")], ["L0", "L1", "L2", "L4"]) == "L2"
    assert level_of([finding("L0")], []) == level_of([], []) == "none"
    for required in LEVELS[1:]:
        assert Verdict(folder="x", level="L2", required=required).ok is (required in ("L0", "L1", "L2"))
    failed = Verdict(folder="x", level="L2", required="L1", findings=(finding("L3"),))
    assert not failed.ok and failed.describe() == "FAILED at L3 (replayed), level L2 (regenerated)"


def ended(code: int | None, breach: str = "") -> Exit:
    return Exit(code=code, seconds=1.0, peak_bytes=1, breach=breach)


@pytest.mark.parametrize(
    ("code", "printed", "error"),
    [(-9, "", DoesNotFitError), (1, "torch.OutOfMemoryError: CUDA out of memory", DoesNotFitError), (-11, "", HardwareError)],
)  # fmt: skip
def test_a_process_that_the_machine_ended_says_nothing_about_the_run(code: int, printed: str, error: Any) -> None:
    with pytest.raises(error, match="could not be tried here"):
        _not_finished(ended(code), printed, prepared=True, level="L3")


@pytest.mark.parametrize(("code", "breach"), [(None, "60 s of wall-clock time"), (1, ""), (-11, "")])
def test_a_process_that_the_input_ended_is_a_finding(code: int | None, breach: str) -> None:
    (found,) = _not_finished(ended(code, breach), "ValueError: odd", prepared=False, level="L2")["findings"]
    assert (found["level"], found["check"]) == ("L2", "limits")
    assert breach in found["problem"] and found["problem"].startswith("preparing")


@pytest.mark.parametrize("strict", [False, True])
def test_a_file_that_training_does_not_write_into_the_final_model_is_found_in_every_class(strict: bool) -> None:
    """A second shard could hide foreign weights in the first."""
    run = SimpleNamespace(final_model={"model.safetensors": "a", "z.safetensors": "b"}, record=None)
    found = PassResult(segment=Segment(start=0, stop=4), final_model={"model.safetensors": "a"}, final_distance=0.0)
    outcome = Outcome()
    _judge_end(run, found, compare.EXACT, outcome, strict=strict)  # type: ignore[arg-type]
    assert outcome.problems == [("final-model", "final_model/z.safetensors is not what training gives here")]


def test_a_final_model_that_lies_too_far_from_the_replayed_one_is_found_where_bits_do_not_repeat() -> None:
    run = SimpleNamespace(final_model={"model.safetensors": "a"}, record=None)
    found = PassResult(segment=Segment(start=0, stop=4), final_model={"model.safetensors": "c"}, final_distance=0.5)
    near, far = Outcome(), Outcome()
    tolerance = compare.TOLERANCES["same hardware", "bfloat16"]
    _judge_end(run, replace(found, final_distance=0.1), tolerance, near, strict=False)  # type: ignore[arg-type]
    _judge_end(run, found, tolerance, far, strict=False)  # type: ignore[arg-type]
    assert near.problems == [] and [check for check, _ in far.problems] == ["final-model"]
