"""The reader of the proof child: whatever the child does, an answer in words comes back in time."""

import json
import os
import sys
import time

import numpy as np
import pytest

from tests.tables import parametrize
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import Training
from tunix_rt.doctor import selftest
from tunix_rt.doctor import selftest as proving_child
from tunix_rt.engines.selftest.cases import rounded
from tunix_rt.engines.selftest.runner import ALLOCATION, Setting, compare, device_memory, read_setting, resident_memory
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.shape import shape_of
from tunix_rt.storage import to_plain
from tunix_rt.train.device import kernels_of, step_of

HELD = {"name": "product", "ok": True, "detail": "fine", "seconds": 0.5, "figures": {"largest error": 0.25}}
WRONG = {**HELD, "name": "loss", "ok": False, "detail": "loss[0] is 1, should be 2"}
BEGIN, HELD_LINE = json.dumps({"begun": "product"}), json.dumps({"result": HELD})


def child(script: str, *, seconds: float = 20.0) -> selftest.SelfTest:
    """The proof by a child that runs `script`."""
    answer = selftest.run_child([sys.executable, "-S", "-E", "-c", script], seconds=seconds)
    return selftest.SelfTest(backend="torch", device="cuda", dtype="bfloat16", head_size=64, **answer)


def printing(*lines: str) -> str:
    return "".join(f"print({line!r}, flush=True)\n" for line in lines)


def test_a_whole_answer_is_read():
    about = json.dumps({"about": {"name": "NVIDIA H200", "capability": [9, 0]}})
    held = [{**HELD, "name": name} for name in selftest.CHECK_NAMES]
    lines = [json.dumps({"result": one}) for one in held]
    proof = child(printing(BEGIN, *lines, about, json.dumps({"done": selftest.CHECK_NAMES})))
    assert proof.ok and proof.problem is None and selftest.selftest_problem(proof) is None
    assert (
        proof.results == tuple(selftest.CheckResult(**one) for one in held)
        and proof.about["capability"] == [9, 0]
        and proof.pid > 0
    )
    assert to_plain(proof)["ok"] is True and json.loads(json.dumps(to_plain(proof)))["results"][1] == HELD


def test_an_answer_that_lacks_a_proof_is_none_and_the_missing_ones_are_named():
    proof = child(printing(BEGIN, HELD_LINE, json.dumps({"done": ["product"]})))
    problem, _ = selftest.selftest_problem(proof)
    assert not proof.ok and problem.endswith("not report device, attention, loss, optimizer, placement, memory, speed")
    for missing in selftest.CHECK_NAMES:
        others = [{**HELD, "name": name} for name in selftest.CHECK_NAMES if name != missing]
        assert answered(*others).problem == f"the child did not report {missing}" and not answered(*others).ok
    whole = [{**HELD, "name": name} for name in selftest.CHECK_NAMES]
    assert answered(*whole).ok and not answered(*whole[:-1], {**whole[-1], "ok": False}).ok


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", '"nan"', '"inf"', "1" + "0" * 400])
def test_a_number_that_no_report_can_hold_is_no_answer(number):
    figures = HELD_LINE.replace("0.25", number)
    seconds = HELD_LINE.replace("0.5", number)
    about = f'{{"about": {{"total_bytes": [{number}]}}}}'
    for line in (figures, seconds, *([] if number[0] in '"1' and number != "1e999" else [about])):
        answer = selftest.read_answer(line)
        assert "which is malformed" in answer["garbage"] and not answer["results"] and not answer["about"]


def test_a_child_that_hangs_is_killed_with_all_it_started(tmp_path):
    left = tmp_path / "pid"
    script = printing(BEGIN, HELD_LINE, json.dumps({"begun": "attention"})) + (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(left)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    proof = child(script, seconds=1.0)
    assert time.monotonic() - started < 40, "both sleep for a minute"
    assert proof.problem == "attention gave no answer within 1 s" and not proof.ok
    assert [result.name for result in proof.results] == ["product"]
    for _ in range(100):
        if not _alive(int(left.read_text())):
            return
        time.sleep(0.02)
    pytest.fail("the child's child outlived it")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@parametrize("script", "words")
def test_a_child_that_gives_no_whole_answer_is_no_proof(script, words):
    proof = child(printing(BEGIN) + script)
    assert words in proof.problem and not proof.ok
    problem, fix = selftest.selftest_problem(proof)
    assert words in problem and "tunix-rt doctor --device cuda --backend torch --prove" in fix


def test_a_held_answer_with_a_bad_end_is_no_proof():
    done = printing(BEGIN, HELD_LINE, json.dumps({"done": ["product"]}))
    assert "ended with code 9" in child(done + "raise SystemExit(9)").problem
    assert "SIGABRT" in child(done + "import os; os.abort()").problem


def asked_of_the_child(monkeypatch, **given) -> list[str]:
    """The arguments with which the child would be started."""
    asked: list[str] = []
    answer = {"results": (), "about": {}, "pid": 1, "seconds": 0.0, "problem": None}
    monkeypatch.setattr(proving_child, "run_child", lambda command, **_: asked.extend(command) or answer)
    selftest.run_selftest(backend="torch", device="cpu", **given)
    return asked[asked.index("tunix_rt.engines.selftest.torch") + 1 :]


def test_the_child_is_told_all_that_decides_the_kernels_and_nothing_that_is_as_usual(monkeypatch):
    plain = asked_of_the_child(monkeypatch, dtype="float32")
    assert plain == ["--device", "cpu", "--dtype", "float32", "--head-size", "64"]
    everything = {
        "dtype": "bfloat16", "master_dtype": "bfloat16", "optim": "adafactor", "deterministic": True, "head_size": 256,
        "query_heads": 4, "kv_heads": 1, "softcap": 30.0, "capped_scores": True, "scaling": 0.0625, "window": 512,
        "dropout": True,
    }  # fmt: skip
    assert everything.keys() == {name for name in Setting.__dataclass_fields__ if name != "device"}
    assert read_setting(asked_of_the_child(monkeypatch, **everything)) == Setting(device="cpu", **everything)
    for name, value in everything.items():
        one = {"dtype": "float32", name: value}
        assert read_setting(asked_of_the_child(monkeypatch, **one)) == Setting(device="cpu", **one)


@parametrize("model", "expected")
def test_a_model_says_which_kernels_it_needs(model, expected):
    config = resolve_model(model, weights="random").config
    assert expected.items() <= kernels_of(config, shape_of(config)).items()


@parametrize("config", "window", "dropout")
def test_what_a_configuration_leaves_out_of_windows_and_dropout_is_as_in_transformers(config, window, dropout):
    found = kernels_of(config, shape_of(config))
    assert (found["window"], found["dropout"]) == (window, dropout)


def test_settings_say_which_step_is_proven():
    training = build_config(
        {"training": {"dtype": "bf16", "master_dtype": "bf16", "optim": "adamw_bnb_8bit", "deterministic": True}},
        "test",
    ).training
    assert step_of(training) == {"master_dtype": "bfloat16", "optim": "adamw_8bit", "deterministic": True}
    assert Setting(device="cpu", dtype="bfloat16", **step_of(training)).weights == "bfloat16"
    assert Setting(device="cpu", dtype="float16", **step_of(Training())).weights == "float32"
    assert Setting(device="cpu", dtype="float64").weights == "float64"


def test_a_python_that_is_not_there_is_a_problem_not_a_crash(tmp_path):
    answer = selftest.run_child([str(tmp_path / "python"), "-c", ""], seconds=5)
    assert answer["problem"] == f"the child could not be started: {tmp_path / 'python'}: No such file or directory"


def answered(*results: dict, **more) -> selftest.SelfTest:
    known = {"backend": "torch", "device": "cuda", "dtype": "bfloat16", "head_size": 256, "pid": 7, "seconds": 3.0}
    return selftest.SelfTest(**known | {"results": tuple(selftest.CheckResult(**result) for result in results)} | more)


def test_wrong_numbers_are_told_with_the_way_out():
    problem, fix = selftest.selftest_problem(answered(HELD, WRONG))
    assert problem == "cuda failed the self-test check `loss` in bfloat16: loss[0] is 1, should be 2"
    assert "nvidia-smi -q -d ECC" in fix
    assert not answered().ok and selftest.selftest_problem(answered()) is not None


def test_the_text_says_the_gpu_computed_only_when_it_did():
    whole = [{**HELD, "name": name} for name in ("device", "product", "placement")]
    about = {"torch": "2.13.0+cu130", "is_available": True, "name": "NVIDIA H200", "capability": [9, 0]}
    text = selftest.cuda_check_text(answered(*whole, about=about))
    for line in ("torch.__version__: 2.13.0+cu130", "torch.cuda.is_available(): True", "device name: NVIDIA H200",
                 "compute capability: (9, 0)", "    largest error: 0.25", selftest.COMPUTED):  # fmt: skip
        assert line in text.splitlines()
    for index in range(3):
        broken = [{**result, "ok": at != index} for at, result in enumerate(whole)]
        assert selftest.COMPUTED not in selftest.cuda_check_text(answered(*broken, about=about))
    assert selftest.COMPUTED not in selftest.cuda_check_text(answered(*whole, about=about, device="cpu"))


def test_speed_is_told_beside_what_is_published():
    speed = {**HELD, "name": "speed", "figures": {"tflops": 494.5, "gb_s": 4080.0}}
    assert "494.5 TFLOP/s of 989 published (50%), 4,080 GB/s" in "\n".join(
        selftest.selftest_lines(answered(speed), (989.0, None))
    )
    assert "FAIL  loss[0] is 1" in "\n".join(selftest.selftest_lines(answered(HELD, WRONG)))


def test_one_wrong_element_among_millions_is_found_and_named():
    want = np.random.default_rng(0).standard_normal((2048, 2048))
    got = want.astype(np.float32)
    assert compare("product", got, want, relative=1e-6, absolute=1e-6).ok
    for value in (want[1234, 77] * 1.01 + 0.01, np.nan, np.inf):
        got[1234, 77] = value
        found = compare("product", got, want, relative=1e-6, absolute=1e-6)
        assert not found.ok and "product[1234, 77] is " in found.detail and "1 of 4,194,304" in found.detail
    assert not compare("product", got[:, :5], want, relative=1.0, absolute=1.0).ok


def test_samples_are_exact_in_the_type_of_the_run():
    drawn = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    short = rounded(drawn.copy(), "bfloat16")
    assert not (short.view(np.uint32) & 0xFFFF).any()
    assert np.abs(short - drawn).max() <= 2.0**-8 * np.abs(drawn).max()
    assert float(rounded(np.array([1 + 2.0**-8 + 2.0**-12]), "bfloat16")[0]) == 1 + 2.0**-7
    assert float(rounded(np.array([1 + 2.0**-8]), "bfloat16")[0]) == 1.0  # a tie goes to the even one


def test_a_row_is_judged_by_its_own_allowance():
    want = np.array([[100.0, 100.0], [0.01, 0.01], [0.0, 0.0]])
    allowed = np.array([[1.0], [1e-4], [0.0]])
    near = want + np.array([[0.9, 0], [0, 9e-5], [0, 0]])
    assert compare("rows", near, want, relative=0.0, absolute=allowed).ok
    for row, error in ((0, 1.1), (1, 1.1e-4), (2, 1e-30)):
        got = want.copy()
        got[row, 1] += error
        found = compare("rows", got, want, relative=0.0, absolute=allowed)
        assert found.ok is False and f"rows[{row}, 1]" in found.detail and "1 of 6" in found.detail


def test_memory_that_was_there_before_proves_nothing():
    """A context with its kernels alone may hold what is allocated."""
    taken = {"rise": 0, "counter": "memory in use on the device"}
    held = device_memory(ALLOCATION, before=600 << 20, after=(600 << 20) + ALLOCATION, **taken)
    assert held.ok and held.figures["seen_bytes"] == ALLOCATION and held.figures["under_our_pid"] == 1.0
    assert f"under process {os.getpid()}, 536,870,912 more than before" in held.detail
    assert not device_memory(ALLOCATION, before=600 << 20, after=600 << 20, **taken).ok
    assert not device_memory(ALLOCATION, before=0, after=ALLOCATION // 2, **taken).ok
    unlisted = {"before": None, "after": None, "counter": "NVML does not list our process; memory in use"}
    assert device_memory(ALLOCATION, rise=ALLOCATION, **unlisted).ok
    hollow = device_memory(ALLOCATION, rise=0, **unlisted)
    assert not hollow.ok and "NVML does not list our process" in hollow.detail and hollow.figures["under_our_pid"] == 0


def test_memory_that_is_not_taken_is_not_seen():
    assert not resident_memory(lambda size: None).ok
    assert not resident_memory(lambda size: np.ones(size // 2, dtype=np.uint8)).ok
    assert resident_memory(lambda size: np.ones(size, dtype=np.uint8)).ok
