"""The reader of the proof child: whatever the child does, an answer in words comes back in time."""

import json
import os
import sys
import time

import numpy as np
import pytest

from tunix_rt.backends.proof_samples import rounded
from tunix_rt.backends.proving import compare
from tunix_rt.doctor.prove import COMPUTED, Proof, Proved, cuda_check_text, proof_lines, proof_problem, run_child
from tunix_rt.rundir import to_plain

HELD = {"name": "product", "ok": True, "detail": "fine", "seconds": 0.5, "figures": {"largest error": 0.25}}
WRONG = {**HELD, "name": "loss", "ok": False, "detail": "loss[0] is 1, should be 2"}
BEGIN, HELD_LINE = json.dumps({"begun": "product"}), json.dumps({"proved": HELD})


def child(script: str, *, seconds: float = 20.0) -> Proof:
    """The proof by a child that runs `script`."""
    answer = run_child([sys.executable, "-S", "-E", "-c", script], seconds=seconds)
    return Proof(backend="torch", device="cuda", dtype="bfloat16", head_size=64, **answer)


def printing(*lines: str) -> str:
    return "".join(f"print({line!r}, flush=True)\n" for line in lines)


def test_a_whole_answer_is_read():
    about = json.dumps({"about": {"name": "NVIDIA H200", "capability": [9, 0]}})
    proof = child(printing(BEGIN, HELD_LINE, about, json.dumps({"done": ["product"]})))
    assert proof.ok and proof.problem is None and proof_problem(proof) is None
    assert proof.results == (Proved(**HELD),) and proof.about["capability"] == [9, 0] and proof.pid > 0
    assert to_plain(proof)["ok"] is True and json.loads(json.dumps(to_plain(proof)))["results"][0] == HELD


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
    assert time.monotonic() - started < 10
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


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV while proving product"),
        ("raise SystemExit(3)", "ended with exit code 3 while proving product"),
        ("import torch_that_is_not_there", "No module named 'torch_that_is_not_there'"),
        ("", "ended with exit code 0 while proving product"),
        ("print('Segmentation fault (core dumped)')", "printed 'Segmentation fault (core dumped)'"),
        ("print('[1, 2]')", "which is no answer"),
        ("print('{\"proved\": {\"name\": 1}}')", "which is no answer"),
        ("print('{\"done\": []}')", "exit code 0 while proving product"),
        ("print('{\"done\": [\"product\", \"loss\"]}')", "exit code 0 while proving product"),
        ("import sys; sys.stdout.buffer.write(bytes(range(128, 256)) * 50000)", "which is no answer"),
    ],
)  # fmt: skip
def test_a_child_that_gives_no_whole_answer_is_no_proof(script, words):
    proof = child(printing(BEGIN) + script)
    assert words in proof.problem and not proof.ok
    problem, fix = proof_problem(proof)
    assert words in problem and "tunix-rt doctor --device cuda --backend torch --prove" in fix


def test_a_held_answer_with_a_bad_end_is_no_proof():
    done = printing(BEGIN, HELD_LINE, json.dumps({"done": ["product"]}))
    assert "exit code 9" in child(done + "raise SystemExit(9)").problem
    assert "SIGABRT" in child(done + "import os; os.abort()").problem


def test_a_python_that_is_not_there_is_a_problem_not_a_crash(tmp_path):
    answer = run_child([str(tmp_path / "python"), "-c", ""], seconds=5)
    assert "cannot be started: No such file or directory" in answer["problem"]


def answered(*results: dict, **more) -> Proof:
    known = {"backend": "torch", "device": "cuda", "dtype": "bfloat16", "head_size": 256, "pid": 7, "seconds": 3.0}
    return Proof(**known | {"results": tuple(Proved(**result) for result in results)} | more)


def test_wrong_numbers_are_told_with_the_way_out():
    problem, fix = proof_problem(answered(HELD, WRONG))
    assert problem == "cuda failed the proof `loss` in bfloat16: loss[0] is 1, should be 2"
    assert "nvidia-smi -q -d ECC" in fix
    assert not answered().ok and proof_problem(answered()) is not None


def test_the_text_says_the_gpu_computed_only_when_it_did():
    whole = [{**HELD, "name": name} for name in ("device", "product", "placement")]
    about = {"torch": "2.13.0+cu130", "is_available": True, "name": "NVIDIA H200", "capability": [9, 0]}
    text = cuda_check_text(answered(*whole, about=about))
    for line in ("torch.__version__: 2.13.0+cu130", "torch.cuda.is_available(): True", "device name: NVIDIA H200",
                 "compute capability: (9, 0)", "    largest error: 0.25", COMPUTED):  # fmt: skip
        assert line in text.splitlines()
    for index in range(3):
        broken = [{**result, "ok": at != index} for at, result in enumerate(whole)]
        assert COMPUTED not in cuda_check_text(answered(*broken, about=about))
    assert COMPUTED not in cuda_check_text(answered(*whole, about=about, device="cpu"))


def test_speed_is_told_beside_what_is_published():
    speed = {**HELD, "name": "speed", "figures": {"tflops": 494.5, "gb_s": 4080.0}}
    assert "494.5 TFLOP/s of 989 published (50%), 4,080 GB/s" in "\n".join(proof_lines(answered(speed), (989.0, None)))
    assert "FAIL  loss[0] is 1" in "\n".join(proof_lines(answered(HELD, WRONG)))


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
