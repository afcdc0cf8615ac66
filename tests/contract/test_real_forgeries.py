"""Forgeries of bundles that a real GPU made: one fact is changed, and everything that follows from it is made anew.

The base of the other GPU forgeries is a run on a CPU in disguise; here log, proof and samples are those of a card.
"""

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forging.bases import copy_of
from tests.forging.folder import (
    answers_of,
    each_step,
    edited,
    lines_of,
    put,
    put_answers,
    put_lines,
    rebuild_scores,
    swap,
    swap_line,
)
from tests.forging.sealing import _listed, reseal, set_run_hash
from tunix_rt.evidence import rescore
from tunix_rt.evidence.verifying import examine, findings_of

BUNDLES = Path(__file__).parents[2] / "submission_runs"
M40, GEMMA = "m40_v2", "gemma3_270m_gsm8k_v1"
LOG = "training_log.txt"


@pytest.fixture(scope="module", autouse=True)
def _judged_once():
    """The same answers are judged for every forgery; their judge is a pure function, so that once is enough."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rescore, "judge", functools.lru_cache(maxsize=None)(rescore.judge))
        yield


# --- the second run ---------------------------------------------------------------------------------------------------


def slower_cpu(folder: Path) -> None:
    lines = lines_of(folder / "cpu" / "metrics.jsonl")
    for line in lines:
        line["tokens"], line["target_tokens"] = max(2, line["tokens"] // 10), max(1, line["target_tokens"] // 10)
    put_lines(folder / "cpu" / "metrics.jsonl", lines)


def other_cpu_batches(folder: Path) -> None:
    lines = lines_of(folder / "cpu" / "metrics.jsonl")
    for line in lines:
        line["batch"] = hashlib.sha256(str(line["step"]).encode()).hexdigest()
    put_lines(folder / "cpu" / "metrics.jsonl", lines)


def cpu_with_more_memory_than_its_host(folder: Path) -> None:
    lines = lines_of(folder / "cpu" / "metrics.jsonl")
    for line in lines:
        line["peak_bytes"] = 2**50
    put_lines(folder / "cpu" / "metrics.jsonl", lines)


# --- files and questions ----------------------------------------------------------------------------------------------


def program_among_the_files(folder: Path) -> None:
    text = "import os\n"
    put(folder / "sitecustomize.py", text)
    listed = _listed(folder / "run-SHA256SUMS") | {"sitecustomize.py": hashlib.sha256(text.encode()).hexdigest()}
    put(folder / "run-SHA256SUMS", "".join(f"{digest}  {name}\n" for name, digest in sorted(listed.items())))


def only_the_right_answers(folder: Path) -> None:
    right = {one["id"] for one in answers_of(folder, "after") if one["strict"]}
    for when in ("before", "after"):
        put_answers(folder, when, [one for one in answers_of(folder, when) if one["id"] in right])
    rebuild_scores(folder)


def only_the_right_answers_also_in_the_log(folder: Path) -> None:
    only_the_right_answers(folder)
    swap_line(folder / LOG, r"(evaluate \w+: )\d+ of 374", r"\g<1>32 of 32")
    swap_line(folder / LOG, r"before: 0 of 374 right", "before: 0 of 32 right")
    swap_line(folder / LOG, r"after: 32 of 374 right(.*) \d+ % well", r"after: 32 of 32 right\g<1> 100 % well")


def fewer_questions_than_the_eval_set_has(folder: Path) -> None:
    for when in ("before", "after"):
        put_answers(folder, when, answers_of(folder, when)[:20])
    rebuild_scores(folder)
    swap_line(folder / LOG, r"(evaluate \w+: \d+) of 100", r"\g<1> of 20")


# --- the log ----------------------------------------------------------------------------------------------------------


def in_log(pattern: str, new: str) -> Callable[[Path], None]:
    return lambda folder: swap_line(folder / LOG, pattern, new)


def second_line_of_a_step(folder: Path) -> None:
    text = (folder / LOG).read_text(encoding="utf-8")
    found = re.search(r"(?m)^(\S+ INFO )step 10/50 .*\n", text)
    assert found
    line = f"{found[1]}step 10/50  loss 0.0001  lr 4.10e-05  grad norm 12.91  21,380 tokens/s  peak 2.16 GiB\n"
    put(folder / LOG, text[: found.start()] + line + text[found.start() :])


# --- what is in the result, the processes, the checkpoints ------------------------------------------------------------


def drop(folder: Path, name: str) -> None:
    (folder / name).unlink()
    listed = {one: digest for one, digest in _listed(folder / "run-SHA256SUMS").items() if one != name}
    put(folder / "run-SHA256SUMS", "".join(f"{digest}  {one}\n" for one, digest in sorted(listed.items())))


def another_best(folder: Path) -> None:
    first = lines_of(folder / "eval" / "heldout.jsonl")[1]
    with edited(folder / "result.json") as result:
        result |= {"best_step": first["step"], "best_heldout_loss": first["loss"]}


def without_best(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        del result["best_step"], result["best_heldout_loss"]


def without_heldout(folder: Path) -> None:
    drop(folder, "eval/heldout.jsonl")
    without_best(folder)


def more_heldout_tokens(folder: Path) -> None:
    lines = lines_of(folder / "eval" / "heldout.jsonl")
    put_lines(folder / "eval" / "heldout.jsonl", [line | {"target_tokens": 99_999} for line in lines])


def machine(**told: Any) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        with edited(folder / "processes.json") as processes:
            processes["processes"][0]["machine"] |= told

    return forge


def gpu(**told: Any) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        with edited(folder / "processes.json") as processes:
            processes["processes"][0]["machine"]["gpu"] |= told

    return forge


def small_checkpoints(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as told:
        for entry in told["checkpoints"]:
            entry["files"]["model.safetensors"]["bytes"] = 7


def same_weights_twice(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as told:
        first, second = told["checkpoints"][:2]
        for name in ("model.safetensors", "optimizer.safetensors"):
            second["files"][name]["sha256"] = first["files"][name]["sha256"]
            set_run_hash(folder, f"checkpoints/step-{second['step']:06d}/{name}", first["files"][name]["sha256"])


def without_the_head_of_nvidia_smi(folder: Path) -> None:
    lines = (folder / "nvidia_smi.txt").read_text(encoding="utf-8").split("\n")
    put(folder / "nvidia_smi.txt", "\n".join(lines[2:]))


def more_in_the_plan(folder: Path) -> None:
    with edited(folder / "plan.json") as plan:
        plan["verdict"] = "made up"


def in_file(file: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: swap(folder / file, old, new)


FORGERIES: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "cpu_tokens": (M40, "cpu-run", slower_cpu),
    "cpu_batches": (M40, "cpu-run", other_cpu_batches),
    "cpu_memory": (M40, "host-memory", cpu_with_more_memory_than_its_host),
    "cpu_env_info": (M40, "doctor", in_file("cpu/env_info.txt", " cores\n", "9 cores\n")),
    "program": (M40, "copies", program_among_the_files),
    "right_answers": (GEMMA, "log-facts", only_the_right_answers),
    "right_answers_and_log": (GEMMA, "questions", only_the_right_answers_also_in_the_log),
    "fewer_questions": (M40, "questions", fewer_questions_than_the_eval_set_has),
    "log_rate": (M40, "log-steps", in_log(r"lr \S+  grad", "lr 9.99e-01  grad")),
    "log_speed": (M40, "log-steps", in_log(r"\S+ tokens/s  peak", "999,999 tokens/s  peak")),
    "log_norm": (M40, "log-steps", in_log(r"grad norm \S+", "grad norm 0.01")),
    "log_peak": (M40, "log-steps", in_log(r"peak \S+ GiB", "peak 139.00 GiB")),
    "log_step_twice": (M40, "log-steps", second_line_of_a_step),
    "log_heldout": (M40, "log-facts", in_log(r"held-out loss \S+ over", "held-out loss 0.0100 over")),
    "log_scores": (M40, "log-facts", in_log("0 of 100 right", "97 of 100 right")),
    "log_no_scores": (M40, "log-facts", in_log(r"(?m)^.*Evaluation after.*\n", "")),
    "log_device": (M40, "log-facts", in_log("Device kind: NVIDIA H200", "Device kind: NVIDIA GeForce RTX 5090")),
    "log_torch": (M40, "log-facts", in_log(r"torch 2\.11\.0, jax", "torch 1.0.0, jax")),
    "log_proof": (M40, "log-facts", in_log("  product    ok  ", "  product    FAIL")),
    "best_not_lowest": (M40, "held-out", another_best),
    "no_best": (M40, "held-out", without_best),
    "no_heldout": (M40, "held-out", without_heldout),
    "heldout_tokens": (M40, "log-facts", more_heldout_tokens),
    "cpu_name": (M40, "processes", machine(cpu="AMD EPYC 9999")),
    "python": (M40, "processes", machine(python="2.7.1")),
    "devices": (M40, "processes", machine(devices=8)),
    "deterministic": (M40, "processes", machine(deterministic=True)),
    "cudnn": (M40, "processes", gpu(cudnn="1")),
    "cuda": (M40, "processes", gpu(cuda="9.0")),
    "gpu_name": (M40, "processes", gpu(name="NVIDIA A100-SXM4-80GB")),
    "smi_name": (M40, "nvidia-smi", in_file("nvidia_smi.txt", "NVIDIA H200", "Tesla T4   ")),
    "smi_cuda": (M40, "nvidia-smi", in_file("nvidia_smi.txt", "CUDA Version: 13.0", "CUDA Version: 11.2")),
    "smi_head": (M40, "nvidia-smi", without_the_head_of_nvidia_smi),
    "smi_date": (M40, "nvidia-smi", in_file("nvidia_smi.txt", "Mon Nov 16 05:12:28 2026", "")),
    "checkpoint_size": (M40, "checkpoints", small_checkpoints),
    "checkpoint_twice": (M40, "checkpoints", same_weights_twice),
    "cuda_check": (M40, "doctor", in_file("cuda_check.txt", "speed: ok, 50.98", "speed: ok, 9999.00")),
    "plan": (M40, "plan", more_in_the_plan),
}
TYPED = ("best_not_lowest",)
"""Of these, what the result says of its end stays as it was typed."""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_of_a_real_gpu_bundle_is_found_by_the_check_for_it(name, tmp_path):
    base, check, forge = FORGERIES[name]
    folder = copy_of(BUNDLES / base, tmp_path / "bundle")
    forge(folder)
    reseal(folder, ending=name not in TYPED)
    found = findings_of(folder)
    assert check in {one.check for one in found}, [one.problem for one in found]
    assert {one.level for one in found} == {"L1"}, [one.problem for one in found]


@pytest.mark.parametrize("base", [M40, GEMMA])
def test_sealing_a_real_bundle_anew_without_an_edit_is_accepted(base, tmp_path):
    """Else every forgery above would be found for the seal alone."""
    folder = copy_of(BUNDLES / base, tmp_path / "bundle")
    reseal(folder)
    assert findings_of(folder) == []


def test_what_cannot_be_looked_up_is_said_with_its_reason():
    examined = examine(BUNDLES / GEMMA)
    assert examined.findings == ()
    assert "overlap: the dataset gsm8k-train.jsonl does not come with tunix-rt" in examined.unmade
    assert "base-model: the model gemma-3-270m-q4_k_m.gguf does not come with tunix-rt" in examined.unmade
    assert "the dataset gsm8k-train.jsonl does not come with tunix-rt" in examined.words
    assert examine(BUNDLES / "demo_v1").words == ""


def test_a_gpu_of_which_nothing_is_published_is_said_not_to_be_held_to_its_peak(tmp_path, monkeypatch):
    from tunix_rt.evidence import physics

    monkeypatch.setattr(physics, "accelerators_named", lambda name: [])
    unmade = examine(BUNDLES / M40).unmade
    assert [one for one in unmade if one.startswith("flop-rate: ") and "NVIDIA H200" in one]
    assert [one for one in unmade if one.startswith("gpu-memory: ")]


def test_steps_that_compiled_again_do_not_make_a_gpu_too_slow(tmp_path):
    """The usual step counts, not the sum: a continuation compiles once more."""
    folder = copy_of(BUNDLES / M40, tmp_path / "bundle")
    each_step(folder, lambda line: line.update(seconds=600.0) if line["step"] == 30 else None)
    reseal(folder)
    assert "flop-rate" not in {one.check for one in findings_of(folder)}
