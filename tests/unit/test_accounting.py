"""What is measured of each phase of a run, and what is said of a limit."""

import logging
import mmap
from types import SimpleNamespace

import pytest

from tunix_rt.config.load import build_config, find_config, load_config
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.memory_meter import PhasePeak, RiseMeter
from tunix_rt.errors import Preempted
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.calibration import seen_errors
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.shape import shape_of
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.journal import RunJournal
from tunix_rt.runs.schemas import MemoryReport
from tunix_rt.storage import read_json
from tunix_rt.train import device, preflight
from tunix_rt.train.device import within_limit
from tunix_rt.train.memory_report import Phases, explaining_oom, report_memory, write_memory_report
from tunix_rt.train.preflight import settle_settings

MIB, GIB = 2**20, 2**30


def pages(size: int) -> mmap.mmap:
    """So many bytes of the system, each page touched: the heap of a process that had room from before would not rise."""
    taken = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        taken[page] = 1
    return taken


def test_each_phase_of_a_process_has_its_own_peak_and_the_process_keeps_the_highest():
    meter = RiseMeter()
    pages(96 * MIB).close()
    first = meter.take_peak()
    if not first.alone:
        pytest.skip("this kernel keeps no peak that can begin anew")
    pages(48 * MIB).close()
    second = meter.take_peak()
    assert first.used_bytes >= 95 * MIB and 47 * MIB <= second.used_bytes < first.used_bytes
    assert meter.peak_bytes() == first.used_bytes


def test_where_no_peak_can_begin_anew_it_is_the_highest_up_to_now(monkeypatch):
    monkeypatch.setattr("tunix_rt.engines.memory_meter._reset_kernel_peak", lambda: False)
    meter = RiseMeter()
    held = pages(64 * MIB)
    first = meter.take_peak()
    held.close()
    assert not first.alone and meter.take_peak().used_bytes == first.used_bytes >= 63 * MIB


def test_a_phase_that_comes_again_keeps_the_higher_of_each_figure():
    told = [
        PhasePeak(used_bytes=used, measure="bytes", alone=True, reserved_bytes=held) for used, held in ((5, 9), (7, 8))
    ]
    engine = SimpleNamespace(take_peak=iter([*told, PhasePeak(used_bytes=1, measure="bytes", alone=False)]).__next__)
    phases = Phases()
    for name in ("steps", "steps", "export"):
        phases.end(engine, name)
    assert phases.peaks["steps"] == PhasePeak(used_bytes=7, measure="bytes", alone=True, reserved_bytes=9)
    assert phases.peaks["export"].reserved_bytes is None and phases.measured_bytes == 7
    assert Phases().measured_bytes == 0


# --- memory.json ------------------------------------------------------------------------------------------------------

WORDS = "bytes"


def planned(device: str = "cpu", backend: str = "torch", devices: int = 1):
    settings = {"model": {"weights": "random"}, "data": {"max_length": 128}, "training": {"backend": backend}}
    shape = shape_of(resolve_model("tiny-gemma3", weights="random").config)
    return predict_run(shape, build_config(settings, "a test"), device=device, devices=devices)


def measured(*phases: tuple[str, int], alone: bool = True, measure: str = WORDS) -> Phases:
    found = Phases()
    for name, used in phases:
        peak = PhasePeak(used_bytes=used, measure=measure, alone=alone)
        found.end(SimpleNamespace(take_peak=lambda peak=peak: peak), name)
    return found


def sizes(plan, *names: str) -> int:
    return max(phase.total_bytes for phase in plan.phases if phase.name in names)


def written(folder, plan, phases: Phases, status: str = "completed"):
    report = RunJournal(run=RunDir(folder), continued=bool(phases.earlier))
    assert write_memory_report(report, plan, phases, status) == report.result.memory.measured_bytes
    return read_json(report.run.memory)


STEP = ("recording", "forward", "loss", "backward", "update")


@pytest.mark.parametrize(("device", "alone"), [("cpu", True), ("cpu", False), ("cuda", False)])
def test_where_phases_cannot_be_told_apart_both_figures_are_those_up_to_their_end(tmp_path, device, alone):
    """What a phase of a CPU has freed is still in the heap in the next: a small one after a large one is not itself small."""
    plan = planned(device)
    phases = measured(
        ("load", 10), ("generation", 70), ("first_step", 90), ("export", 85), ("generation", 60), alone=alone
    )
    told = written(tmp_path, plan, phases)
    assert told["measured_as"] == f"{WORDS}; up to the end of each phase"
    assert {name: phase["measured_bytes"] for name, phase in told["phases"].items()} == {
        "load": 10, "generation": 90, "first_step": 90, "export": 90,
    }  # fmt: skip
    foretold = {name: phase["predicted_bytes"] for name, phase in told["phases"].items()}
    assert foretold["load"] == sizes(plan, "load")
    assert foretold["first_step"] == sizes(plan, "load", "generation", *STEP)
    assert foretold["export"] == foretold["generation"] == sizes(plan, "load", "generation", "save", *STEP)
    assert all(
        phase["error"] == phase["predicted_bytes"] / phase["measured_bytes"] - 1 for phase in told["phases"].values()
    )


def test_where_each_phase_has_its_own_peak_it_is_held_against_its_own_prediction(tmp_path):
    plan = planned("cuda")
    told = written(tmp_path, plan, measured(("load", 10), ("first_step", 90), ("export", 30)))
    assert told["measured_as"] == f"{WORDS}; in each phase"
    assert [told["phases"][name]["measured_bytes"] for name in ("load", "first_step", "export")] == [10, 90, 30]
    assert told["phases"]["export"]["predicted_bytes"] == sizes(plan, "save")


@pytest.mark.parametrize(("device", "shared"), [("cpu", 2), ("cuda", 1)])
def test_the_figure_of_the_compiler_is_the_prediction_and_a_lower_bound_has_no_error(
    tmp_path, caplog, monkeypatch, device, shared
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    plan, phases = planned(device, "jax", devices=2), measured(("load", GIB), ("first_step", 4 * GIB), alone=False)
    journal = RunJournal(run=RunDir(tmp_path), continued=False)
    context = SimpleNamespace(plan=plan, config=None, journal=journal, phases=phases)
    report_memory(context)  # type: ignore[arg-type]
    bound = read_json(journal.run.memory)
    assert bound["predicted_bytes"] == plan.peak_bytes and "error" not in bound["phases"]["first_step"]
    phases.step_parts = {"state and batch": GIB, "temporaries": GIB}
    report_memory(context)  # type: ignore[arg-type]
    told = read_json(journal.run.memory)
    assert told["predicted_bytes"] == told["phases"]["first_step"]["predicted_bytes"] == shared * 2 * GIB
    assert told["error"] == told["phases"]["first_step"]["error"] == shared / 2 - 1
    assert told["predicted_parts"]["phases"][0] == bound["predicted_parts"]["phases"][0], "load"
    assert journal.result.memory.predicted_bytes == shared * 2 * GIB and seen_errors() == []
    assert told.keys() == bound.keys() and MemoryReport.model_validate_json(journal.run.memory.read_bytes())
    assert caplog.messages == [
        f"Memory: at least {plan.peak_bytes / GIB:.3f} GiB expected, measured 4.000 GiB",
        f"Memory: predicted {shared * 2}.000 GiB, measured 4.000 GiB (prediction {50 * shared - 100:+.1f} %)",
    ]


def test_a_continued_run_keeps_of_each_phase_what_was_highest_in_any_process(tmp_path):
    plan = planned("cuda")
    first = written(tmp_path, plan, measured(("load", 10), ("generation", 95), ("first_step", 90)), "preempted")
    assert first["status"] == "preempted" and first["measured_bytes"] == 95
    later = measured(("load", 12), ("resume", 40), ("first_step", 80), ("export", 30))
    later.take_up(RunDir(tmp_path).memory)
    whole = written(tmp_path, plan, later)
    assert (whole["status"], whole["measured_bytes"]) == ("completed", 95)
    assert {name: phase["measured_bytes"] for name, phase in whole["phases"].items()} == {
        "load": 12, "generation": 95, "first_step": 90, "resume": 40, "export": 30,
    }  # fmt: skip
    assert whole["phases"]["generation"] == first["phases"]["generation"]


def test_what_was_measured_in_another_way_or_is_damaged_is_left_out_and_said(tmp_path, caplog):
    plan = planned("cuda")
    written(tmp_path, plan, measured(("load", 1000), measure="other bytes"))
    elsewhere = measured(("load", 12))
    elsewhere.before_bytes = 999
    elsewhere.take_up(RunDir(tmp_path).memory)
    told = written(tmp_path, plan, elsewhere)
    assert told["measured_bytes"] == 12 and "measured_bytes_before" not in told
    assert "measured another quantity (other bytes; in each phase)" in caplog.messages[0]
    RunDir(tmp_path).memory.write_text('{"phases": {"load": 7}}')
    damaged = measured(("load", 12))
    damaged.take_up(RunDir(tmp_path).memory)
    assert damaged.earlier == {} and "is corrupt" in caplog.messages[1]
    Phases().take_up(tmp_path / "no such file")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("error", "kept"), [(Preempted("stopped", fix="go on"), ["interrupted"]), (RuntimeError("a defect"), [])]
)
def test_what_was_under_way_when_a_run_was_stopped_is_measured_but_after_a_defect_no_engine_is_asked(error, kept):
    phases = Phases()
    engine = SimpleNamespace(take_peak=lambda: PhasePeak(used_bytes=5, measure=WORDS, alone=True))
    with pytest.raises(type(error)), explaining_oom(SimpleNamespace(phases=phases), engine):  # type: ignore[arg-type]
        raise error
    assert list(phases.peaks) == kept


# --- a limit, a speed -------------------------------------------------------------------------------------------------


def test_the_speed_that_is_told_of_a_cpu_is_by_its_measured_rate(monkeypatch, caplog):
    """Not by the rates that order settings: they are of no CPU."""
    caplog.set_level(logging.INFO)
    asked = ["data.max_length=128", "training.per_device_train_batch_size=16", "training.memory=auto"]
    config = load_config(find_config("smoke_tiny"), overrides=asked)
    shape = shape_of(resolve_model(config.model.model_name_or_path, weights="random").config)
    told = []
    for rate in (1e10, 1e12):
        monkeypatch.setattr(preflight, "rate_under_load", lambda rate=rate: rate)
        _, fitting = settle_settings(SimpleNamespace(continued=False), config, shape, of("cpu", 0.25))  # type: ignore[arg-type]
        told.append(fitting["predicted_tokens_per_second"])
    assert 1 < told[1] / told[0] < 100
    assert f"{told[0]:,.0f} tokens/s predicted" in caplog.text and f"{told[1]:,.0f} tokens/s predicted" in caplog.text


def of(kind: str, free_gib: float) -> DeviceChoice:
    free = int(free_gib * GIB)
    return DeviceChoice(device=kind, kind="a device", count=1, memory_bytes=80 * GIB, free_bytes=free, reason="")


def limited(gib: float | None):
    return build_config({"training": {"memory_limit_gib": gib}}, "a test").training


@pytest.mark.parametrize(
    ("kind", "said"), [("cuda", "the allocator enforces it"), ("cpu", "on a CPU"), ("tpu", "on a TPU")]
)
def test_what_may_be_taken_is_the_less_of_free_and_limit_and_what_holds_the_run_to_it_is_said(kind, said, caplog):
    caplog.set_level(logging.INFO)
    assert within_limit(of(kind, 10), limited(None)).free_bytes == 10 * GIB and not caplog.messages
    assert within_limit(of(kind, 10), limited(4)).free_bytes == 4 * GIB
    assert within_limit(of(kind, 3), limited(4)).free_bytes == 3 * GIB
    assert all(said in one for one in caplog.messages) and len(caplog.messages) == 2


def test_the_share_of_a_device_leaves_room_for_its_context():
    assert device.memory_share(limited(None), of("cuda", 80)) is None
    assert device.memory_share(limited(8.5), of("cuda", 80)) == 0.1
    assert device.memory_share(limited(0.1), of("cuda", 80)) == 0
