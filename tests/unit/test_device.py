"""The device contract of a run, with a proof and samples as a GPU would give them: the GPU itself is in tests/gpu."""

import json
import logging
import os
import sys
import types
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.unit.test_doctor import CPU_ONLY, WITH_GPU, masked
from tunix_rt.config.load import build_config
from tunix_rt.doctor.facts import Ask
from tunix_rt.doctor.nvidia import GpuMemory, gpu_memory, nvidia_smi_text
from tunix_rt.doctor.selection import choose_device
from tunix_rt.doctor.selftest import CHECK_NAMES, CheckResult, SelfTest
from tunix_rt.errors import HardwareError
from tunix_rt.models.resolve import ModelSource, resolve_model
from tunix_rt.plan.shape import shape_of
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.journal import RunJournal
from tunix_rt.train import device

NOON = "2026-01-01T12:00:00+00:00"
CONFIG = build_config({"model": {"model_name_or_path": "tiny-gemma3"}, "training": {"device": "cuda"}}, "test")
HELD = tuple(CheckResult(name=name, ok=True, detail="ok", figures={"tflops": 1.0, "gb_s": 1.0}) for name in CHECK_NAMES)


def proof(*results: CheckResult, problem: str | None = None) -> SelfTest:
    about = {"uuid": "GPU-aa", "torch": "2.13.0", "is_available": True}
    return SelfTest(
        backend="torch", device="cuda", dtype="float32", head_size=48, results=results, about=about, pid=7, seconds=1.0,
        problem=problem,
    )  # fmt: skip


def prove(monkeypatch: pytest.MonkeyPatch, report: RunJournal, answer: SelfTest) -> frozenset[str]:
    asked: dict[str, object] = {}
    monkeypatch.setattr(device, "run_selftest", lambda **given: asked.update(given) or answer)
    model: ModelSource = resolve_model("tiny-gemma3")
    shape = shape_of(model.config)
    uuids = device.check_kernels(report, CONFIG, model, shape, WITH_GPU, choose_device(Ask(), WITH_GPU))
    assert (asked["head_size"], asked["kv_heads"], asked["device"]) == (shape.head_dim, shape.kv_heads, "cuda")
    return uuids


def test_a_held_proof_is_written_down_and_names_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = RunJournal(run=RunDir(tmp_path), continued=False)
    assert prove(monkeypatch, report, proof(*HELD)) == {"GPU-aa"}
    assert json.loads((tmp_path / "doctor.json").read_text())["proof"]["ok"] is True
    assert "GPU computation successful" in (tmp_path / "cuda_check.txt").read_text()


def test_a_proof_that_fails_refuses_the_run_and_names_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = CheckResult(name="product", ok=False, detail="product[1, 2] is 3, should be 4")
    with pytest.raises(HardwareError, match=r"product\[1, 2\] is 3") as refused:
        prove(monkeypatch, RunJournal(run=RunDir(tmp_path), continued=False), proof(HELD[0], wrong, *HELD[2:]))
    assert (refused.value.exit_code, refused.value.cause) == (4, "not-proven")
    assert str(tmp_path / "doctor.json") in refused.value.fix
    assert "GPU computation successful" not in (tmp_path / "cuda_check.txt").read_text()


def test_a_refused_continuation_leaves_its_folder_alone_and_the_report_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    report = RunJournal(run=RunDir(tmp_path / "run"), continued=True)
    with pytest.raises(HardwareError) as refused:
        prove(monkeypatch, report, proof(*HELD[:2], problem="attention gave no answer within 120 s"))
    monkeypatch.setattr(device, "gather_facts", lambda *_, **__: masked(WITH_GPU, ""))
    beside = tmp_path / "run.refused-doctor.json"
    assert str(beside) in refused.value.fix
    assert "attention gave no answer" in json.loads(beside.read_text())["proof"]["problem"]
    with pytest.raises(HardwareError, match="masked"):
        device.settle_device(report, CONFIG)
    assert [check["cause"] for check in json.loads(beside.read_text())["checks"] if check["verdict"] == "fail"] == [
        "masked"
    ]
    assert list((tmp_path / "run").iterdir()) == []


def test_the_memory_of_the_gpu_is_read_after_the_first_and_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device, "gpu_memory", lambda step, _: GpuMemory(step=step, pid=7, used_bytes=step, by="nvml", at=NOON)
    )
    report = RunJournal(run=RunDir(tmp_path), continued=False)
    for step in (1, 3):
        device.sample_gpu(report, frozenset({"GPU-aa"}), step)
    assert [sample["step"] for sample in report.result.gpu_memory] == [1, 3]
    assert (tmp_path / "nvidia_smi.txt").read_text().startswith("after step 1; our process id ")
    assert report.warnings == []


def test_a_gpu_whose_memory_is_unknown_is_a_warning_from_the_first_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "gpu_memory", lambda step, _: None)
    report = RunJournal(run=RunDir(tmp_path), continued=False)
    device.sample_gpu(report, frozenset({"GPU-aa"}), 1)
    assert report.result.gpu_memory == [] and len(report.warnings) == 1
    assert "NVML reports none" in report.warnings[0] and "exit code 6" in report.warnings[0]


def stand_in_nvml(processes: list[tuple[int, int]]) -> types.ModuleType:
    """What of pynvml is used, with one GPU that these processes hold."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    nvml.nvmlDeviceGetMemoryInfo = lambda _: types.SimpleNamespace(used=9000)
    listed = [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: listed
    return nvml


@pytest.mark.parametrize(
    ("processes", "used", "by"), [([(1, 700), (os.getpid(), 500)], 500, "nvml"), ([(1, 700)], 9000, "device")]
)
def test_only_our_own_process_counts_and_hidden_ids_are_said(
    processes: list[tuple[int, int]], used: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in_nvml(processes))
    sample = gpu_memory(1, {"GPU-aa"})
    assert sample is not None
    assert sample == GpuMemory(step=1, pid=os.getpid(), used_bytes=used, by=by, at=sample.at)
    assert abs(datetime.now(UTC) - datetime.fromisoformat(sample.at)) < timedelta(seconds=10)
    said = nvidia_smi_text(sample, 1).splitlines()[0]
    assert f"{used} bytes" in said and ("hides process ids" in said) == (by == "device")


def test_a_warning_of_a_library_is_a_line_of_the_log(tmp_path: Path) -> None:
    report = RunJournal(run=RunDir(tmp_path), continued=False)
    package = logging.getLogger("tunix_rt")
    before, level = warnings.showwarning, package.level
    package.setLevel(logging.INFO)
    try:
        with report.logged(), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("a GPU with CUDA capability sm_120 is not compatible", UserWarning, stacklevel=1)
    finally:
        package.setLevel(level)
    assert (
        "UserWarning: a GPU with CUDA capability sm_120 is not compatible\n"
        in (tmp_path / "training_log.txt").read_text()
    )
    assert warnings.showwarning is before


def test_a_cpu_run_is_settled_without_a_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gather_facts", lambda *_, **__: CPU_ONLY)
    config = build_config({"training": {"device": "cpu"}}, "test")
    _, choice = device.settle_device(RunJournal(run=RunDir(tmp_path), continued=False), config)
    assert choice.device == "cpu" and set(json.loads((tmp_path / "doctor.json").read_text())) == {
        "facts",
        "checks",
        "choice",
    }
