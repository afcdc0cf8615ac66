"""The pure half of a replay: which steps are taken again, how alike two machines are, what counts as the same."""

import json
import math
import struct

import numpy as np
import pytest

from docs import replay_pages
from tests.program import ROOT as REPOSITORY
from tunix_rt import replaying
from tunix_rt.doctor.child import Ended
from tunix_rt.errors import DoesNotFitError, EvidenceError, HardwareError
from tunix_rt.evidence.comparing import compare_answers, compare_gaps, compare_heldout, compare_states, compare_steps
from tunix_rt.evidence.machine_class import Match, class_of, worst
from tunix_rt.evidence.segments import (
    Segment,
    all_segments,
    choose_segments,
    drawn_items,
    fresh_nonce,
    passes_over,
)
from tunix_rt.evidence.tolerances import (
    EXACT,
    FACTOR,
    MEASURED_STEPS,
    TIES,
    TOLERANCES,
    grown,
    texts_follow,
    tolerance_of,
)
from tunix_rt.recompute.distance import distance
from tunix_rt.recompute.process import _refuse_the_machine

ROOT = "ab" * 32
CPU = {
    "backend": "torch", "device": "cpu", "cpu": "some", "cpu_flags_sha256": "1" * 64, "cpu_capability": "AVX512",
    "threads": 2, "python": "3.12.1", "versions": {"torch": "2.11.0", "transformers": "5.22"}, "deterministic": False,
    "devices": 1,
}  # fmt: skip
GPU = CPU | {
    "device": "cuda", "deterministic": True,
    "gpu": {"name": "NVIDIA H200", "capability": "9.0", "driver": "580.1", "cuda": "13.0", "cudnn": "91000"},
}  # fmt: skip
LINE = {
    "step": 1, "loss": 2.5, "loss_hex": (2.5).hex(), "lr": 1e-4, "grad_norm": 3.0, "tokens": 100, "target_tokens": 60,
    "batch": "c" * 64, "seconds": 0.1,
}  # fmt: skip


def exactly(step):
    return EXACT


def segments(*pairs):
    return tuple(Segment(start=start, stop=stop) for start, stop in pairs)


# --- which steps ------------------------------------------------------------------------------------------------------


def test_a_run_is_cut_at_its_checkpoints_and_every_step_is_in_one_part():
    assert all_segments([3, 6, 9], 9) == list(segments((0, 3), (3, 6), (6, 9)))
    assert all_segments([3, 6], 8) == list(segments((0, 3), (3, 6), (6, 8)))
    assert all_segments([], 5) == list(segments((0, 5)))
    assert all_segments([-1, 0, 7, 99], 7) == list(segments((0, 7)))  # what a forger lists besides


def test_the_first_and_the_last_part_are_always_taken_again_whatever_the_nonce():
    for count in (1, 2, 3, 5):
        for number in range(20):
            chosen = choose_segments(range(10, 200, 10), 200, count=count, root=ROOT, nonce=str(number))
            assert chosen[0].start == 0 and chosen[-1].stop == 200 and len(chosen) == max(2, count)
            assert list(chosen) == sorted(chosen)


def test_the_choice_between_is_repeated_by_the_same_nonce_and_unlike_with_another_bundle_or_nonce():
    asked = {"count": 4, "root": ROOT, "nonce": "n"}
    steps = range(10, 1000, 10)
    chosen = choose_segments(steps, 1000, **asked)
    assert chosen == choose_segments(steps, 1000, **asked)
    assert chosen != choose_segments(steps, 1000, **asked | {"nonce": "m"})
    assert chosen != choose_segments(steps, 1000, **asked | {"root": "cd" * 32})
    assert len(fresh_nonce()) == 32 and fresh_nonce() != fresh_nonce()


def test_every_part_is_drawn_by_some_nonce():
    drawn = {
        one.stop
        for number in range(200)
        for one in choose_segments(range(10, 100, 10), 100, count=3, root=ROOT, nonce=str(number))
    }
    assert drawn == set(range(10, 101, 10))


def test_a_part_whose_checkpoint_is_not_at_hand_is_reached_from_an_earlier_one_or_from_the_start():
    chosen = segments((0, 10), (40, 50), (90, 100))
    assert passes_over(chosen, {10, 40, 90}) == chosen
    assert passes_over(chosen, {20, 90}) == segments((0, 10), (20, 50), (90, 100))
    assert passes_over(chosen, {45}) == segments((0, 100))
    assert passes_over(chosen, ()) == segments((0, 100))


def test_items_are_drawn_by_the_nonce_and_all_are_taken_where_there_are_few():
    ids = [f"q{number}" for number in range(300)]
    drawn = drawn_items(ids, count=50, root=ROOT, nonce="n")
    assert len(set(drawn)) == 50 and drawn == drawn_items(ids, count=50, root=ROOT, nonce="n")
    assert drawn != drawn_items(ids, count=50, root=ROOT, nonce="m")
    assert drawn_items(ids[:7], count=50, root=ROOT, nonce="n") == tuple(range(7))
    assert len(drawn_items(["same"] * 60, count=50, root=ROOT, nonce="n")) == 50


# --- how alike --------------------------------------------------------------------------------------------------------


def test_the_same_machine_is_class_same_whatever_its_python():
    assert class_of(CPU, CPU | {"python": "3.13.0", "cpu": "renamed"}).name == "SAME"
    assert class_of(GPU, GPU | {"threads": 64, "cpu_flags_sha256": "2" * 64}).name == "SAME"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"threads": 1}, "2 then, 1 now"),
        ({"cpu_flags_sha256": "2" * 64}, "instructions differ"),
        ({"cpu_capability": "AVX2"}, "AVX512 then, AVX2 now"),
        ({"versions": {"torch": "2.12.0", "transformers": "5.22"}}, "torch 2.11.0 then, 2.12.0 now"),
        ({"devices": 4}, "1 then, 4 now"),
    ],
)
def test_another_thread_count_instruction_or_version_is_near_and_named(changed, named):
    match = class_of(CPU, CPU | changed)
    assert match.name == "NEAR" and len(match.reasons) == 1 and named in match.reasons[0]


def test_a_gpu_is_same_only_with_deterministic_steps_and_the_same_driver():
    loose = GPU | {"deterministic": False}
    match = class_of(loose, loose)
    assert match.name == "NEAR" and "not deterministic" in match.reasons[0]
    assert class_of(GPU, GPU | {"gpu": GPU["gpu"] | {"driver": "590.2"}}).name == "NEAR"


def test_other_hardware_is_cross_and_named():
    for recorded, here in ((GPU, CPU), (CPU, GPU), (GPU, GPU | {"gpu": GPU["gpu"] | {"name": "NVIDIA L4"}})):
        match = class_of(recorded, here)
        assert match.name == "CROSS" and match.reasons
    assert "cuda" in class_of(GPU, CPU).reasons[0]


def test_what_a_run_does_not_say_keeps_it_from_being_same():
    told = class_of({"device": "cpu", "backend": "torch"}, CPU)
    assert told.name == "NEAR" and any("not recorded" in reason for reason in told.reasons)
    for name in ("threads", "versions", "cpu_flags_sha256", "devices"):
        assert class_of({key: value for key, value in CPU.items() if key != name}, CPU).name == "NEAR"
    assert class_of(CPU | {"threads": "\x1b[2J" + "2" * 500}, CPU).reasons[0].isprintable()
    assert worst(["SAME", "CROSS", "NEAR"]) == "CROSS" and worst([]) == "SAME"


def test_a_jax_run_has_no_capability_to_tell_and_may_still_be_same():
    jax = {name: value for name, value in CPU.items() if name != "cpu_capability"} | {"backend": "jax"}
    assert class_of(jax, jax).name == "SAME"


# --- what counts as the same ------------------------------------------------------------------------------------------


def checks(line, again, *, name="SAME"):
    tolerance = tolerance_of(name, "float32")
    found = compare_steps({1: line}, [again], lambda step: tolerance, exact=name == "SAME", level="L3")
    return [finding.check for finding in found.findings]


def test_the_same_step_has_no_finding_in_any_class():
    assert checks(LINE, LINE) == checks(LINE, LINE, name="NEAR") == checks(LINE, LINE, name="CROSS") == []


@pytest.mark.parametrize(
    ("changed", "check"),
    [
        ({"loss": math.nextafter(2.5, 3), "loss_hex": math.nextafter(2.5, 3).hex()}, "replay-loss"),
        ({"loss": 2.4}, "replay-loss"),  # its hexadecimal twin was left
        ({"loss_hex": (2.4).hex()}, "replay-loss"),
        ({"grad_norm": math.nextafter(3.0, 4)}, "replay-grad-norm"),
        ({"lr": math.nextafter(1e-4, 1)}, "replay-learning-rate"),
        ({"batch": "d" * 64}, "replay-batch"),
        ({"tokens": 101}, "replay-tokens"),
        ({"target_tokens": 59}, "replay-tokens"),
    ],
)
def test_in_class_same_the_last_bit_of_anything_is_a_finding(changed, check):
    assert checks(LINE | changed, LINE) == [check]


def test_outside_same_rounding_passes_and_more_does_not():
    for name in ("NEAR", "CROSS"):
        allowed = tolerance_of(name, "float32")
        for part, check in (("loss", "replay-loss"), ("grad_norm", "replay-grad-norm")):
            near, far = (LINE[part] * (1 + times * getattr(allowed, part)) for times in (0.9, 1.1))
            assert checks(LINE | {part: near}, LINE, name=name) == []
            assert checks(LINE | {part: far}, LINE, name=name) == [check]
        assert checks(LINE | {"loss": math.inf}, LINE, name=name) == ["replay-loss"]
        assert checks(LINE | {"lr": 1.001e-4}, LINE, name=name) == ["replay-learning-rate"]
        assert checks(LINE | {"batch": "d" * 64}, LINE, name=name) == ["replay-batch"]


def test_many_steps_that_differ_are_one_finding_that_names_the_first_and_counts_the_rest():
    recorded = {step: LINE | {"step": step, "loss": 9.0} for step in range(1, 8)}
    again = [LINE | {"step": step} for step in range(1, 9)]
    found = compare_steps(recorded, again, exactly, exact=True, level="L4").findings
    assert [one.check for one in found] == ["replay-loss", "replay-steps"] and {one.level for one in found} == {"L4"}
    assert (
        found[0].problem.startswith("step 1: 9.0 is recorded, 2.5 comes out here") and "4 more of 8" in found[0].problem
    )


def test_a_held_out_loss_is_held_to_the_same_rule():
    line = {"step": 3, "loss": 1.5, "loss_hex": (1.5).hex(), "target_tokens": 10}
    other = line | {"loss": 1.6, "loss_hex": (1.6).hex()}
    rule = {"exact": True, "level": "L3"}
    assert compare_heldout({3: line}, [line], exactly, **rule) == ()
    assert [one.check for one in compare_heldout({3: other}, [line], exactly, **rule)] == ["held-out"]
    assert compare_heldout({3: line | {"target_tokens": 9}}, [line], exactly, **rule)


def test_states_are_compared_by_hash_in_same_and_by_distance_elsewhere():
    recorded = {3: {"model.safetensors": "a", "optimizer.safetensors": "b"}}
    same = {"step": 3, "files": {"model.safetensors": "a", "optimizer.safetensors": "b"}}
    other = same | {"files": {"model.safetensors": "x", "optimizer.safetensors": "b"}, "apart": 0.5}
    near = tolerance_of("NEAR", "float32")
    assert not compare_states(recorded, [same], exactly, exact=True, level="L3").findings
    (finding,) = compare_states(recorded, [other], exactly, exact=True, level="L3").findings
    assert finding.check == "replay-checkpoint" and "model.safetensors" in finding.problem
    assert compare_states(recorded, [other], lambda step: near, exact=False, level="L3").findings
    assert not compare_states(
        recorded, [other | {"apart": near.weights / 2}], lambda step: near, exact=False, level="L3"
    ).findings
    assert compare_states(recorded, [other | {"apart": math.nan}], lambda step: near, exact=False, level="L3").findings
    unseen = compare_states(recorded, [same], lambda step: near, exact=False, level="L3")
    assert not unseen.findings and "not compared" in unseen.words


def test_answers_must_be_the_same_texts_all_in_same_most_elsewhere():
    asked = [{"id": str(n), "prompt": "p", "output": "o", "ended": "stop"} for n in range(100)]
    one = [asked[0] | {"output": "x"}, *asked[1:]]
    three = [one_asked | {"output": "x"} if n < 3 else one_asked for n, one_asked in enumerate(asked)]
    near = tolerance_of("NEAR", "float32")
    rule = {"when": "after", "level": "L2"}
    assert compare_answers(asked, asked, EXACT, exact=True, **rule) == ()
    assert compare_answers(asked, one, EXACT, exact=True, **rule)
    assert compare_answers(asked, one, near, exact=False, **rule) == ()
    assert compare_answers(asked, three, near, exact=False, **rule)
    assert compare_answers(asked, asked[1:], near, exact=False, **rule)
    assert compare_answers(asked, [asked[0] | {"ended": "length"}, *asked[1:]], EXACT, exact=True, **rule)


def test_followed_answers_may_have_near_ties_and_few_of_them_more():
    asked = [{"id": str(n)} for n in range(50)]
    rule = {"most": 0.5, "share": 0.98}
    assert compare_gaps(asked, [0.5] * 50, **rule) == compare_gaps(asked, [9.0] + [0.1] * 49, **rule) == ()
    for far in (0.51, math.inf, math.nan):
        (finding,) = compare_gaps(asked, [0.0] * 48 + [far] * 2, **rule)
        assert (finding.level, finding.check) == ("L2", "followed-answers")
        assert finding.problem.startswith(
            "after: 2 of 50 answers have tokens that these weights do not give, first '48'"
        )


def test_tolerances_widen_with_the_distance_of_the_machines_and_of_the_types():
    for compute in ("float32", "bfloat16"):
        near, cross = TOLERANCES["NEAR", compute], TOLERANCES["CROSS", compute]
        for part in ("loss", "grad_norm", "weights"):
            assert 0 < getattr(near, part) <= getattr(cross, part)
    assert TOLERANCES["NEAR", "float32"].loss < TOLERANCES["NEAR", "bfloat16"].loss
    assert tolerance_of("SAME", "bfloat16") == EXACT
    assert texts_follow("SAME", "bfloat16") and texts_follow("CROSS", "float32") and not texts_follow("NEAR", "float16")
    assert tolerance_of("NEAR", "float16") == tolerance_of("NEAR", "bfloat16")


def test_every_tolerance_is_a_multiple_of_the_noise_that_is_committed_of_a_cpu_and_of_a_gpu():
    pairs = replay_pages.measured(REPOSITORY)
    assert {one["steps"] for one in pairs if one["on"] == "CPU"} == {MEASURED_STEPS}
    honest = [one for one in pairs if one["kind"] == "honest"]
    for (name, compute), allowed in TOLERANCES.items():
        for device in ("CPU", "GPU"):
            found = [one for one in honest if (one["class"], one["compute"], one["on"]) == (name, compute, device)]
            assert found
            for part in ("loss", "grad_norm", "weights"):
                assert getattr(allowed, part) >= FACTOR * max(one.get(part, 0.0) for one in found), (name, device, part)
            assert not texts_follow(name, compute) or min(one["texts"] for one in found) >= allowed.texts
    same = [one for one in honest if one["class"] == "SAME"]
    assert {one["on"] for one in same} == {"CPU", "GPU"}
    assert all(one[part] == 0 for one in same for part in ("loss", "grad_norm", "weights"))


def test_near_ties_are_allowed_a_multiple_of_the_honest_gaps_that_are_committed():
    for file in replay_pages.GAPS.values():
        pairs = json.loads((REPOSITORY / file).read_text())["pairs"]
        for name, limit in TIES.items():
            gaps = [gap for one in pairs if one["kind"] == name for gap in one["largest_gaps"]]
            assert gaps and limit >= FACTOR * max(gaps)


def test_a_cheat_is_held_to_what_is_allowed_at_its_last_step_and_without_weights_to_the_rest():
    allowed = tolerance_of("NEAR", "float32")
    cheat = {
        "compute": "float32",
        "steps": MEASURED_STEPS,
        "loss": 0.0,
        "grad_norm": 0.0,
        "weights": 1.5 * allowed.weights,
    }
    assert replay_pages.caught(cheat, allowed, weights=True)
    assert not replay_pages.caught(cheat, allowed, weights=False)
    assert not replay_pages.caught(cheat | {"steps": 2 * MEASURED_STEPS}, allowed, weights=True)


@pytest.mark.parametrize(
    ("ended", "failed", "error"),
    [
        (Ended(code=-9, words="was ended by SIGKILL", pid=7, seconds=1.0), "killed", DoesNotFitError),
        (Ended(code=1, words="ended with code 1", pid=7, seconds=1.0), "torch.OutOfMemoryError: CUDA", DoesNotFitError),
        (Ended(code=-11, words="was ended by SIGSEGV", pid=7, seconds=1.0), "crashed", HardwareError),
        (Ended(code=None, words="could not be started", pid=0, seconds=0.0), "not started", HardwareError),
    ],
)
def test_a_process_that_the_machine_ended_says_nothing_about_the_run(ended, failed, error):
    with pytest.raises(error, match="could not be tried here"):
        _refuse_the_machine(ended, failed)
    _refuse_the_machine(Ended(code=1, words="ended with code 1", pid=7, seconds=1.0), "KeyError: 'what it was given'")


def test_the_words_tell_what_is_allowed_at_the_end_of_the_longest_stretch():
    match = Match(name="CROSS", reasons=("recorded on cuda, computed again on cpu",))
    first, last = (replaying._class_words(match, "bfloat16", steps) for steps in (10, 302))
    assert "after 10 steps losses must lie within 12 %" in first and "times what is allowed" not in first
    assert "after 302 steps losses must lie within 24 %, gradient norms within 170 %" in last
    assert "2 times what is allowed of the first 16 steps" in last


def test_what_is_allowed_grows_with_the_steps_since_the_start_up_to_a_limit():
    near = tolerance_of("NEAR", "float32")
    assert grown(near, "float32", 1) == grown(near, "float32", MEASURED_STEPS) == near
    assert grown(near, "float32", 2 * MEASURED_STEPS).loss == pytest.approx(2 * near.loss)
    assert grown(near, "float32", 10**6).loss == pytest.approx(10 * near.loss)
    assert grown(near, "bfloat16", 10**6).weights == pytest.approx(2 * near.weights)
    assert grown(EXACT, "float32", 10**6) == EXACT


# --- weights ----------------------------------------------------------------------------------------------------------


def write_tensors(path, dtype, **tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_a_distance_is_a_share_of_the_way_the_weights_went(tmp_path):
    zeros = np.zeros(5, dtype=np.float32)
    first = write_tensors(tmp_path / "a", "F32", w=zeros, v=zeros)
    there = write_tensors(tmp_path / "b", "F32", w=zeros + 4, v=zeros)
    here = write_tensors(tmp_path / "c", "F32", w=zeros + 4, v=zeros + 1)
    assert distance(first, there, there) == 0
    assert distance(first, there, here) == pytest.approx(0.25)
    assert distance(first, first, here) == math.inf
    assert distance(first, there, write_tensors(tmp_path / "d", "F32", w=zeros)) == math.inf


def test_a_distance_reads_bfloat16_and_refuses_what_it_does_not_know(tmp_path):
    def bfloat16(values):
        return (np.asarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)

    first, there, here = (
        write_tensors(tmp_path / name, "BF16", w=bfloat16([value, -value])) for name, value in zip("abc", (1, 3, 2), strict=True)
    )  # fmt: skip
    assert distance(first, there, here) == pytest.approx(0.5)
    with pytest.raises(EvidenceError, match="I8"):
        distance(*[write_tensors(tmp_path / "odd", "I8", w=np.zeros(2, dtype=np.int8))] * 3)
