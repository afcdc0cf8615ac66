"""One forgery for each check of L0 and L1: resealed as far as a forger can, and found by that check and no other."""

import ast
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forging import sealing
from tests.forging.bases import copy_of
from tests.forging.edits import Json, configure, each_line, edited, in_json, lines_of, put, put_lines
from tests.forging.sealing import reseal, reseal_sums
from tunix_rt.errors import EvidenceError
from tunix_rt.evidence import examine as examining
from tunix_rt.evidence.checks import CHECKS
from tunix_rt.evidence.examine import examine, require_verified

pytestmark = pytest.mark.usefixtures("judged_once")

Change = Callable[[Path], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgery:
    check: str
    change: Change
    seal: Change = reseal
    base: str = "bundle"


def line(file: str, number: int, change: Callable[[Json], object]) -> Change:
    def edit(folder: Path) -> None:
        lines = lines_of(folder / file)
        change(lines[number])
        put_lines(folder / file, lines)

    return edit


def unsealed(_folder: Path) -> None:
    """Nothing follows that a forger could compute."""


def rewire(folder: Path) -> None:
    """Sealed, but the first line does not follow from the commitment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealing, "_head_of_run", lambda folder: "0" * 64)
        reseal(folder)


def repeat_weights(listed: Json) -> None:
    first, second = listed["checkpoints"][:2]
    second["files"]["model.safetensors"] = first["files"]["model.safetensors"]


SAMPLED = "rollouts/step-000002.jsonl"


def sampled(change: Callable[[Json], object], *, every: bool = False) -> Change:
    """Change the first rollout of the second step, or every rollout of the run."""

    def edit(folder: Path) -> None:
        for file in sorted(folder.glob("rollouts/*.jsonl")) if every else [folder / SAMPLED]:
            lines = lines_of(file)
            for group in lines if every else lines[:1]:
                for one in group["rollouts"] if every else group["rollouts"][:1]:
                    change(one)
            put_lines(file, lines)

    return edit


FORGERIES = {
    "a link out of the folder": Forgery(
        check="folder", change=lambda folder: os.symlink("/etc/hostname", folder / "samples.txt"), seal=unsealed
    ),
    "a pipe in place of a file": Forgery(check="folder", change=lambda folder: os.mkfifo(folder / "x"), seal=unsealed),
    "a key that no run writes": Forgery(check="schema", change=in_json("result.json", lambda one: one.update(verified="L4"))),
    "a file that no run writes": Forgery(check="schema", change=lambda folder: put(folder / "eval/verified.json", "{}")),
    "one byte of a log": Forgery(
        check="hashes", change=lambda folder: put(folder / "training_log.txt", "all is well\n"), seal=unsealed
    ),
    "a log that the run did not end with": Forgery(
        check="copies", change=lambda folder: put(folder / "training_log.txt", "all is well\n"), seal=reseal_sums
    ),
    "a run without its log": Forgery(check="files", change=lambda folder: (folder / "training_log.txt").unlink()),
    "another seed than in the settings": Forgery(
        check="commitment", change=in_json("precommit.json", lambda one: one["seeds"].update(seed=7))
    ),
    "source files that do not give the source hash": Forgery(
        check="commitment", change=in_json("precommit.json", lambda one: one["source_files"].update({"x.py": "0" * 64}))
    ),
    "a smaller loss beside the recorded bits": Forgery(
        check="chain", change=line("metrics.jsonl", 2, lambda one: one.update(loss=0.5))
    ),
    "a chain that begins with another commitment": Forgery(check="chain", change=unsealed, seal=rewire),
    "more parameters than the model has": Forgery(
        check="result", change=in_json("result.json", lambda one: one.update(parameters=70_000_000_000))
    ),
    "a learning rate off the schedule": Forgery(
        check="schedule", change=line("metrics.jsonl", 3, lambda one: one.update(lr=one["lr"] * 1.001))
    ),
    "ten times the tokens": Forgery(
        check="batches", change=lambda folder: each_line(
            folder / "metrics.jsonl", lambda one: one.update(tokens=10 * one["tokens"])
        ),
    ),
    "a held-out loss over fewer tokens": Forgery(
        check="held-out", change=line("eval/heldout.jsonl", 2, lambda one: one.update(target_tokens=1))
    ),
    "weights that did not move": Forgery(check="checkpoints", change=in_json("checkpoints.json", repeat_weights)),
    "a chain without a state": Forgery(
        check="states", change=lambda folder: each_line(folder / "metrics.jsonl", lambda one: one.pop("states", None))
    ),
    "a process of another version": Forgery(
        check="processes",
        change=in_json("processes.json", lambda one: one["processes"][0]["machine"]["versions"].update(torch="9.9")),
    ),
    "a GPU whose self-test failed": Forgery(
        check="gpu", change=in_json("doctor.json", lambda one: one["proof"].update(ok=False)), base="gpu"
    ),
    "a GPU without memory in use": Forgery(
        check="gpu", base="gpu",
        change=in_json("result.json", lambda one: [sample.update(pid=1) for sample in one["gpu_memory"]]),
    ),
    "fewer traces than the dataset has": Forgery(
        check="data", change=in_json("precommit.json", lambda one: one["dataset"].update(traces=1))
    ),
    "a wrong answer counted as right": Forgery(
        check="answers", change=line("eval/predictions-after.jsonl", 5, lambda one: one.update(strict=True))
    ),
    "another eval set in the summary": Forgery(
        check="answers", change=in_json("eval_summary.json", lambda one: one.update(evalset="gsm8k"))
    ),
    "more tokens in the summary": Forgery(
        check="answers", change=in_json("eval_summary.json", lambda one: one["decoding"].update(max_new_tokens=512))
    ),
    "a CPU run with other settings": Forgery(
        check="cpu-run", change=lambda folder: configure(folder / "cpu", "training", weight_decay=0.5), base="gpu"
    ),
    "another speed in the manifest": Forgery(
        check="manifest", seal=reseal_sums,
        change=in_json("run_manifest.json", lambda one: one["tokens_per_second"].update(device=1e6)),
    ),
    "a reward for a wrong answer": Forgery(
        check="rollouts", base="rollouts", change=sampled(lambda one: one.update(reward=1.0 - one["reward"]))
    ),
    "advantages that are twice as large": Forgery(
        check="rollouts", base="rollouts", change=sampled(lambda one: one.update(advantage=2 * one["advantage"]), every=True)
    ),
    "tokens of a rollout that were not trained": Forgery(
        check="rollouts", base="rollouts", change=sampled(lambda one: one["ids"].reverse(), every=True)
    ),
    "a better text for the same tokens": Forgery(
        check="rollouts", base="rollouts", change=sampled(lambda one: one.update(output="<answer>0</answer>"), every=True)
    ),
    "the best of more samples": Forgery(
        check="rollouts", base="rollouts", change=line(SAMPLED, 0, lambda one: one["rollouts"].pop())
    ),
    "a group that is dropped": Forgery(
        check="rollouts", base="rollouts", change=lambda folder: put_lines(folder / SAMPLED, lines_of(folder / SAMPLED)[1:])
    ),
    "the rollouts of other questions": Forgery(
        check="rollouts", base="rollouts",
        change=lambda folder: put(folder / SAMPLED, (folder / "rollouts/step-000001.jsonl").read_text()),
    ),
    "a higher reward in the metrics": Forgery(
        check="rollouts", base="rollouts", change=line("metrics.jsonl", 2, lambda one: one.update(reward=0.99))
    ),
    "an alarm that is kept silent": Forgery(
        check="rollouts", base="rollouts",
        change=line("eval/along.jsonl", 1, lambda one: one.update(mean_output_chars=10 * one["mean_output_chars"])),
    ),
    "a step without its rollouts": Forgery(
        check="rollouts", base="rollouts", change=lambda folder: (folder / SAMPLED).unlink()
    ),
    "rollouts in a run on traces": Forgery(
        check="rollouts", change=line("metrics.jsonl", 2, lambda one: one.update(reward=0.5))
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(cpu_bundle: Path, gpu_bundle: Path, rollout_run: Path) -> dict[str, Path]:
    return {"bundle": cpu_bundle, "gpu": gpu_bundle, "rollouts": rollout_run}


@pytest.mark.parametrize(
    "base",
    [
        "cpu_bundle",
        "gpu_bundle",
        "cpu_run",
        "rollout_run",
        *(pytest.param(f"tiny_{name}", marks=pytest.mark.slow) for name in ("replayable", "run")),
    ],
)
def test_a_resealed_honest_folder_is_consistent(base: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Path = request.getfixturevalue(base)
    folder = copy_of(source, tmp_path / "folder")
    reseal(folder)
    examined = examine(folder, may_lack_weights=base == "cpu_run")
    assert (examined.level, examined.findings) == ("L1", [])
    names = [path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.name != ".lock"]
    assert all((folder / name).read_bytes() == (source / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_found_by_the_check_for_it(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    forgery = FORGERIES[name]
    folder = copy_of(bases[forgery.base], tmp_path / "folder")
    forgery.change(folder)
    forgery.seal(folder)
    examined = examine(folder)
    assert {one.check for one in examined.findings} == {forgery.check}, examined.findings
    assert all(one.problem.isprintable() for one in examined.findings)
    assert "L1" not in examined.passed


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("a GPU without memory in use", "train where `tunix-rt doctor --prove` passes and NVML reports GPU memory"),
        ("ten times the tokens", "the files above changed while the run went on"),
    ],
)
def test_a_run_that_does_not_verify_at_its_end_has_the_way_out_of_its_check(
    name: str, fix: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Facts that the machine did not give are no change of files; `evidence verify` accepts neither."""
    forgery = FORGERIES[name]
    folder = copy_of(bases[forgery.base], tmp_path / "folder")
    require_verified(folder)
    forgery.change(folder)
    forgery.seal(folder)
    with pytest.raises(EvidenceError, match=f"does not verify\n  L1 {forgery.check}: ") as refused:
        require_verified(folder)
    assert fix in refused.value.fix and "final_model is complete" in refused.value.fix


@pytest.mark.parametrize(
    ("firsts", "found"),
    [
        ((1, 11), set()),  # resumed on another machine from the checkpoint of step 10
        ((1, 16, 11), set()),  # the checkpoint of step 15 was corrupt, so the third process repeated its steps
        ((1, 16), {"processes"}),  # of step 15 there is no checkpoint
        ((2,), {"processes"}),
    ],
)
def test_a_process_resumes_from_a_listed_checkpoint_on_whatever_machine(
    firsts: tuple[int, ...], found: set[str], cpu_bundle: Path, tmp_path: Path
) -> None:
    folder = copy_of(cpu_bundle, tmp_path / "folder")
    with edited(folder / "processes.json") as listed:
        process = listed["processes"][0]
        other = process["machine"] | {"cpu": "another", "threads": 7}
        listed["processes"] = [process | {"first_step": first, "machine": other} for first in firsts[:-1]]
        listed["processes"].append(process | {"first_step": firsts[-1]})
    with edited(folder / "result.json") as result:
        result["resumed_from"] = firsts[-1] - 1
    reseal(folder)
    assert {one.check for one in examine(folder).findings} == found


def test_every_check_has_a_forgery() -> None:
    """Names in the table of checks, and those that `examine` passes literally."""
    calls = [
        node.args[1].value
        for node in ast.walk(ast.parse(inspect.getsource(examining)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "check"
        and isinstance(node.args[1], ast.Constant)
    ]
    assert len(calls) > 5
    assert {*CHECKS, *calls} == {forgery.check for forgery in FORGERIES.values()}


def test_a_run_recorded_before_a_setting_existed_keeps_its_level(cpu_bundle: Path, tmp_path: Path) -> None:
    """A later version may add optional keys: their absence is fine."""
    folder = copy_of(cpu_bundle, tmp_path / "older")
    config = (folder / "config.yaml").read_text(encoding="utf-8")
    put(folder / "config.yaml", config.replace("  save_dtype: null\n", ""))
    assert "save_dtype" not in (folder / "config.yaml").read_text(encoding="utf-8")
    reseal(folder)
    assert examine(folder).findings == []
