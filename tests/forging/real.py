"""Forgeries of committed bundles of real runs on a GPU: what can be done to a run with its run on the CPU beside it, a long log,
NVML samples of a real driver and questions that are not shipped."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forging.catalogue import forgery
from tests.forging.devices import SELF_REPORTED
from tests.forging.folder import (
    answers_of,
    each_step,
    edited,
    lines_of,
    put,
    put_answers,
    put_lines,
    read,
    rebuild_scores,
    swap_everywhere,
    swap_line,
)
from tests.forging.sealing import reseal, set_run_hash

M40: tuple[Any, ...] = ("m40_v2",)
GEMMA: tuple[Any, ...] = ("gemma3_270m_gsm8k_v1",)
COMPARED, LOG, GPU, HELD_OUT, MACHINE, ANSWERS, FILES = (
    "run on the CPU", "log", "GPU", "held-out", "machine", "answers", "files",
)  # fmt: skip


def _each_line(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lines = lines_of(path)
    for line in lines:
        change(line)
    put_lines(path, lines)


# --- the run on the CPU -----------------------------------------------------------------------------------------------


@forgery(
    "a tenth of the tokens in the run on the CPU, so that the GPU seems ten times faster", group=COMPARED, bases=M40
)
def forge_slower_cpu(folder: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        line |= {name: max(1, line[name] // 10) for name in ("tokens", "target_tokens")}

    _each_line(folder / "cpu" / "metrics.jsonl", change)
    reseal(folder)


@forgery("other batches in the run on the CPU", group=COMPARED, bases=M40)
def forge_batches_of_the_cpu(folder: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        line["batch"] = hashlib.sha256(str(line["step"]).encode()).hexdigest()

    _each_line(folder / "cpu" / "metrics.jsonl", change)
    reseal(folder)


# --- lines of text: what is looked for, and what is put in its place --------------------------------------------------

TEXTS = {
    "smi_of_another_gpu": ("another GPU's name in nvidia_smi.txt", GPU, "nvidia_smi.txt", "NVIDIA H200", "Tesla T4   "),
    "smi_of_another_cuda": (
        "another CUDA version in nvidia_smi.txt", GPU, "nvidia_smi.txt", r"CUDA Version: [\d.]+", "CUDA Version: 11.2",
    ),
    "log_of_rates": ("learning rates in the log only", LOG, "training_log.txt", r"lr \S+  grad", "lr 9.99e-01  grad"),
    "log_of_speeds": (
        "speeds and norms in the log only", LOG, "training_log.txt", r"grad norm \S+  \S+ tokens/s  peak \S+ GiB",
        "grad norm 0.01  999,999 tokens/s  peak 139.00 GiB",
    ),
    "log_of_heldout": (
        "held-out losses in the log only", LOG, "training_log.txt", r"held-out loss \S+ over", "held-out loss 0.0100 over",
    ),
    "log_of_scores": ("scores in the log only", LOG, "training_log.txt", r"\d+ of 100 right", "97 of 100 right"),
    "log_of_another_gpu": (
        "another GPU in the log only", LOG, "training_log.txt", "Device kind: NVIDIA H200", "Device kind: NVIDIA RTX 5090",
    ),
    "log_of_a_version": (
        "another version in the log only", LOG, "training_log.txt", r"torch [\d.]+\S*, jax", "torch 1.0.0, jax",
    ),
    "cuda_check_of_more_memory": (
        "another size of the memory in cuda_check.txt", GPU, "cuda_check.txt", r"(total memory \(bytes\)): \d+",
        r"\1: 16000000000",
    ),
}  # fmt: skip


def _forge_text(name: str) -> None:
    what, group, file, pattern, new = TEXTS[name]

    def forge(folder: Path) -> None:
        swap_line(folder / file, pattern, new)
        reseal(folder)

    forge.__name__ = f"forge_{name}"
    forgery(what, group=group, bases=M40)(forge)


for _name in TEXTS:
    _forge_text(_name)


@forgery("the date and the header of nvidia-smi taken out", group=GPU, bases=M40)
def forge_smi_without_header(folder: Path) -> None:
    lines = (folder / "nvidia_smi.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    put(folder / "nvidia_smi.txt", "".join(lines[3:]))
    reseal(folder)


@forgery("a step told a second time in the log, with a smaller loss", group=LOG, bases=M40)
def forge_step_told_twice(folder: Path) -> None:
    path = folder / "training_log.txt"
    text = path.read_text(encoding="utf-8")
    found = re.search(r"(?m)^\S+ INFO step 10/50 .*\n", text)
    assert found
    put(path, text[: found.start()] + re.sub(r"loss \S+", "loss 0.0001", found[0]) + text[found.start() :])
    reseal(folder)


@forgery("another uuid of the GPU in every file", group=GPU, bases=M40, level="missed", why=SELF_REPORTED)
def forge_uuid_everywhere(folder: Path) -> None:
    uuid = read(folder / "bundle.json")["gpu"]["uuid"].removeprefix("GPU-")
    swap_everywhere(folder, uuid, "00c0ffee" + uuid[8:])
    reseal(folder)


# --- held-out losses --------------------------------------------------------------------------------------------------


@forgery("a best held-out loss that is not the least", group=HELD_OUT, bases=M40)
def forge_best_that_is_not(folder: Path) -> None:
    first = lines_of(folder / "eval" / "heldout.jsonl")[0]
    with edited(folder / "result.json") as result:
        result |= {"best_step": first["step"], "best_heldout_loss": first["loss"]}
    reseal(folder, ending=False)


@forgery("the best held-out loss left out", group=HELD_OUT, bases=M40)
def forge_no_best(folder: Path) -> None:
    _without_best(folder)
    reseal(folder)


def _without_best(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        for name in ("best_step", "best_heldout_loss"):
            result.pop(name)


@forgery("the held-out losses taken out", group=HELD_OUT, bases=M40)
def forge_no_heldout(folder: Path) -> None:
    _without_best(folder)
    (folder / "eval" / "heldout.jsonl").unlink()
    sums = folder / "run-SHA256SUMS"
    kept = [line for line in sums.read_text(encoding="utf-8").splitlines() if not line.endswith("  eval/heldout.jsonl")]
    put(sums, "".join(f"{line}\n" for line in kept))
    reseal(folder)


@forgery("more tokens under the held-out losses", group=HELD_OUT, bases=M40)
def forge_heldout_tokens(folder: Path) -> None:
    _each_line(folder / "eval" / "heldout.jsonl", lambda line: line.update(target_tokens=99_999))
    reseal(folder)


# --- processes, checkpoints, files ------------------------------------------------------------------------------------

MACHINES: dict[str, tuple[str, dict[str, Any]]] = {
    "process_on_another_cpu": ("another CPU in processes.json", {"cpu": "AMD EPYC 9999"}),
    "process_of_another_python": ("another Python in processes.json", {"python": "2.7.1"}),
    "process_on_eight_devices": ("eight devices in processes.json", {"devices": 8}),
    "process_made_deterministic": ("a deterministic run in processes.json only", {"deterministic": True}),
}


def _forge_machine(name: str) -> None:
    what, told = MACHINES[name]

    def forge(folder: Path) -> None:
        with edited(folder / "processes.json") as listed:
            listed["processes"][-1]["machine"] |= told
        reseal(folder)

    forge.__name__ = f"forge_{name}"
    forgery(what, group=MACHINE, bases=M40)(forge)


for _name in MACHINES:
    _forge_machine(_name)


@forgery("another cuDNN and CUDA in processes.json", group=MACHINE, bases=M40)
def forge_process_of_another_cuda(folder: Path) -> None:
    with edited(folder / "processes.json") as listed:
        listed["processes"][-1]["machine"]["gpu"] |= {"cudnn": "1", "cuda": "9.0"}
    reseal(folder)


@forgery("checkpoints of seven bytes", group="checkpoints", bases=M40)
def forge_small_checkpoints(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        for one in listed["checkpoints"]:
            for file in one["files"].values():
                file["bytes"] = 7
    reseal(folder)


@forgery("the same weights in two checkpoints", group="checkpoints", bases=M40)
def forge_same_checkpoints(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        first, second = listed["checkpoints"][:2]
        for name in ("model.safetensors", "optimizer.safetensors"):
            digest = second["files"][name]["sha256"] = first["files"][name]["sha256"]
            place = f"checkpoints/step-{second['step']:06d}/{name}"
            if place in (folder / "run-SHA256SUMS").read_text(encoding="utf-8"):
                set_run_hash(folder, place, digest)
    reseal(folder)


@forgery("a program among the files of the run", group=FILES, bases=M40)
def forge_program(folder: Path) -> None:
    put(folder / "sitecustomize.py", "print('hello')\n")
    sums = folder / "run-SHA256SUMS"
    lines = [*sums.read_text(encoding="utf-8").splitlines(), f"{'0' * 64}  sitecustomize.py"]
    put(sums, "".join(f"{line}\n" for line in sorted(lines, key=lambda line: line[66:])))
    reseal(folder)


@forgery("a word more in plan.json", group=FILES, bases=M40)
def forge_word_in_the_plan(folder: Path) -> None:
    with edited(folder / "plan.json") as told:
        told["opinion"] = "it fits well"
    reseal(folder)


# --- answers ----------------------------------------------------------------------------------------------------------


def _keep_answers(folder: Path, kept: set[str]) -> None:
    for when in ("before", "after"):
        put_answers(folder, when, [one for one in answers_of(folder, when) if one["id"] in kept])
    rebuild_scores(folder)
    reseal(folder)


@forgery("only the questions kept that were answered rightly", group=ANSWERS, bases=GEMMA)
def forge_picked_questions(folder: Path) -> None:
    _keep_answers(folder, {one["id"] for one in answers_of(folder, "after") if one["strict"]})


@forgery("the first twenty questions kept", group=ANSWERS, bases=GEMMA)
def forge_twenty_questions(folder: Path) -> None:
    _keep_answers(folder, {one["id"] for one in answers_of(folder, "after")[:20]})


@forgery("fewer traces held out than questions asked", group=ANSWERS, bases=GEMMA)
def forge_fewer_held_out(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["dataset"]["heldout_traces"] = 1
    swap_line(folder / "training_log.txt", r"[\d,]+ held out", "1 held out")
    reseal(folder)


@forgery("losses of every step lowered in metrics only, the log as it was", group="steps", bases=GEMMA)
def forge_losses_beside_the_log(folder: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        loss = line["loss"] * 0.5
        line |= {"loss": loss, "loss_hex": loss.hex()}

    each_step(folder, change)
    reseal(folder)
