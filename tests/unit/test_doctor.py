"""The doctor: facts that survive a file, one check per cause, and a choice that never falls back."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tunix_rt.cli.main import cli
from tunix_rt.doctor import probe
from tunix_rt.doctor.checks import (
    _DRIVER_TROUBLES,
    CUDA_CHECKS,
    choose_device,
    enough_disk,
    enough_ram,
    fits,
    run_checks,
    visible_gpus,
    wheel_advice,
)
from tunix_rt.doctor.probe import Facts, Gpu, Torch, ask_torch, facts_from_json, gather_facts
from tunix_rt.doctor.words import device_lines, env_info_text, torch_version_text
from tunix_rt.errors import ConfigError, HardwareError
from tunix_rt.rundir import to_plain

GIB = 2**30
PYPI_ARCHES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
H200 = Gpu(index=0, name="NVIDIA H200", uuid="GPU-aa", total_bytes=140 * GIB, free_bytes=139 * GIB, capability=(9, 0))
RTX = Gpu(index=0, name="RTX 5090", uuid="GPU-bb", total_bytes=32 * GIB, free_bytes=31 * GIB, capability=(12, 0))
CUDA_TORCH = Torch(
    version="2.13.0+cu130", cuda_build="13.0", arch_list=PYPI_ARCHES, cuda_available=True, cuda_devices=1
)
CPU_ONLY = Facts(
    os="Linux-6.1-x86_64", python="3.11.9", cpu="A CPU", cpu_cores=2, ram_total_bytes=24 * GIB,
    ram_available_bytes=20 * GIB, disk_path="/data", disk_free_bytes=100 * GIB, visibility={},
    nvml_problem="NVMLError_LibraryNotFound: NVML Shared Library Not Found", torch=Torch(version="2.13.0+cpu"),
)  # fmt: skip
WITH_GPU = replace(
    CPU_ONLY, gpus=(H200,), nvidia_signs=("PCI device 0000:01:00.0",), nvml_problem=None, driver_version="580.95.05",
    driver_cuda="13.0", torch=CUDA_TORCH,
)  # fmt: skip
WITH_TPU = replace(CPU_ONLY, tpu_signs=("/dev/accel0", "TPU_WORKER_ID"), libtpu="0.0.51")


def test_facts_survive_a_json_file() -> None:
    for facts in (CPU_ONLY, WITH_GPU, WITH_TPU, gather_facts()):
        assert facts_from_json(json.loads(json.dumps(to_plain(facts)))) == facts


def test_the_facts_of_this_computer_are_plausible(tmp_path: Path) -> None:
    facts = gather_facts(tmp_path / "not" / "yet" / "made")
    assert 0 < facts.ram_available_bytes <= facts.ram_total_bytes
    assert facts.disk_path == str(tmp_path)
    assert facts.disk_free_bytes > 0
    assert facts.cpu_cores >= 1


def test_a_lower_limit_of_the_control_group_counts_as_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used, stat = tmp_path / "max", tmp_path / "current", tmp_path / "stat"
    limit.write_text("1073741824\n")
    used.write_text("73741824\n")
    monkeypatch.setattr(probe, "CGROUP_LIMITS", (tmp_path / "absent", limit))
    monkeypatch.setattr(probe, "CGROUP_USES", (used,))
    monkeypatch.setattr(probe, "CGROUP_STATS", (tmp_path / "absent", stat))
    assert probe._memory() == (1_073_741_824, 1_000_000_000)
    # Pages of files that nobody uses are given back when memory is asked for.
    stat.write_text("anon 5\nfile 60000000\ninactive_file 50000000\nactive_file 10000000\n")
    facts = gather_facts()
    assert (facts.ram_total_bytes, facts.ram_available_bytes) == (1_073_741_824, 1_050_000_000)
    stat.write_text("inactive_file 1\ntotal_inactive_file 40000000\n")  # version 1: with the groups below
    assert probe._memory()[1] == 1_040_000_000
    for damaged in ("", "nonsense", "inactive_file many"):
        stat.write_text(damaged)
        assert probe._memory()[1] == 1_000_000_000
    stat.write_text("inactive_file 99999999999\n")
    assert probe._memory()[1] == 1_073_741_824, "never more than the limit"
    limit.write_text("max\n")
    assert gather_facts().ram_total_bytes > 1_073_741_824


# --- torch in a child ------------------------------------------------------------------------------------------------


def test_the_torch_of_this_environment_answers_from_a_child() -> None:
    known = probe._installed_torch()
    assert known is not None
    asked = ask_torch(known, seconds=60)
    assert asked.problem is None
    assert asked.arch_list is not None
    assert asked.cuda_build == known.cuda_build, "metadata and torch itself name the same CUDA"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
        ("import os; os.abort()", "ended with code -6"),
        ("raise SystemExit('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open"),
        ("print('hello')", "answered 'hello'"),
        ("print('[1, 2]')", "answered '[1, 2]'"),
        ("pass", "answered ''"),
    ],
)
def test_a_torch_that_hangs_crashes_or_babbles_becomes_a_reason(script: str, words: str) -> None:
    asked = ask_torch(Torch(version="2.13.0"), script=script, seconds=0.5 if "sleep" in script else 20)
    assert asked.problem is not None
    assert words in asked.problem
    assert asked.cuda_available is None


def test_neither_doctor_nor_plan_imports_an_engine() -> None:
    code = (
        "import sys; from tunix_rt.doctor.probe import gather_facts; import tunix_rt.doctor.checks, tunix_rt.plan.fit\n"
        "gather_facts(); print(sorted({'torch', 'jax', 'transformers'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "[]"


# --- the rule that decides whether a wheel fits a GPU ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "arches", "cuda", "expected"),
    [
        ((12, 0), ("sm_50", "sm_80", "sm_90"), "12.6", False),  # RTX 5090 and a wheel of before
        ((12, 0), PYPI_ARCHES, "13.0", True),
        ((12, 1), PYPI_ARCHES, "13.0", True),  # GB10 runs sm_120
        ((8, 9), PYPI_ARCHES, "13.0", True),  # RTX 40 runs sm_86
        ((8, 0), ("sm_86",), "13.0", False),  # never a higher minor
        ((10, 3), PYPI_ARCHES, "13.0", True),  # B300 runs sm_100
        ((7, 0), PYPI_ARCHES, "13.0", False),
        ((8, 7), ("sm_80", "sm_86"), "13.0", False),  # Orin takes its own code only ...
        ((8, 7), ("sm_80", "sm_86"), "13.2", True),  # ... before CUDA 13.2
        ((8, 6), ("sm_87",), "13.0", False),
        ((11, 0), ("sm_101",), "12.9", True),  # renamed
        ((10, 1), ("sm_100",), "12.9", False),
        ((13, 0), ("compute_120",), "13.0", True),  # PTX
        ((9, 0), ("compute_120",), "13.0", False),
        ((9, 0), ("sm_90a", "nonsense"), "12.4", True),
        ((9, 0), (), "13.0", False),
    ],
)
def test_a_wheel_fits_by_major_and_minor(
    capability: tuple[int, int], arches: tuple[str, ...], cuda: str, expected: bool
) -> None:
    assert fits(capability, arches, cuda) is expected


# --- the choice ------------------------------------------------------------------------------------------------------


def test_a_gpu_that_fits_is_chosen_by_auto_cuda_and_gpu() -> None:
    for asked in ("auto", "cuda", "gpu"):
        choice = choose_device(asked, WITH_GPU)
        assert (choice.device, choice.kind, choice.count) == ("cuda", "NVIDIA H200", 1)
        assert (choice.memory_bytes, choice.free_bytes) == (140 * GIB, 139 * GIB)
        assert device_lines(choice, WITH_GPU)[-1] == "Using device: cuda"


def test_without_a_gpu_auto_is_the_cpu_and_says_why() -> None:
    choice = choose_device("auto", CPU_ONLY)
    assert (choice.device, choice.reason) == ("cpu", "no GPU present")
    assert (choice.memory_bytes, choice.free_bytes) == (24 * GIB, 20 * GIB)
    lines = device_lines(choice, CPU_ONLY)
    assert lines[-1] == "Using device: cpu"
    assert "A CPU; count 1; memory 24.0 GiB, 20.0 GiB free" in lines[1]


def test_asking_for_cuda_without_a_gpu_is_refused_with_a_way_out() -> None:
    with pytest.raises(HardwareError, match="no GPU present") as refused:
        choose_device("cuda", CPU_ONLY)
    assert refused.value.exit_code == 4
    assert "--device cpu" in refused.value.fix


OLD_WHEEL = replace(CUDA_TORCH, version="2.14.1+cu126", cuda_build="12.6", arch_list=("sm_50", "sm_80", "sm_90"))
UNUSABLE = {
    "for the CPU only": replace(WITH_GPU, torch=Torch(version="2.13.0+cpu", arch_list=(), cuda_available=False)),
    "masked by CUDA_VISIBLE_DEVICES": replace(WITH_GPU, visibility={"CUDA_VISIBLE_DEVICES": ""}),
    "no kernels for RTX 5090": replace(WITH_GPU, gpus=(RTX,), torch=OLD_WHEEL),
    "the driver is older than 580.65.06": replace(WITH_GPU, driver_version="570.86.10"),
    "the driver is older than 570.26": replace(
        WITH_GPU, gpus=(RTX,), driver_version="560.35.05", torch=replace(CUDA_TORCH, cuda_build="12.8")
    ),
    "torch engine cannot run": replace(WITH_GPU, torch=None),
    "torch does not start": replace(WITH_GPU, torch=Torch(version="2.13.0", cuda_build="13.0", problem="a hang")),
    "torch cannot initialise CUDA": replace(
        WITH_GPU, torch=replace(CUDA_TORCH, cuda_available=False, said="error 802")
    ),
    "the driver's library is not": replace(CPU_ONLY, nvidia_signs=("PCI device 0000:01:00.0",)),
    "updated under the running kernel": replace(
        WITH_GPU, gpus=(), nvml_problem="NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch."
    ),
    "the driver does not drive this GPU": replace(WITH_GPU, gpus=()),
    "failed to answer": replace(WITH_GPU, gpus=(), nvml_problem="NVMLError_Unknown: Unknown Error"),
}


@pytest.mark.parametrize("cause", UNUSABLE)
def test_a_gpu_that_is_there_but_unusable_is_refused_by_its_cause(cause: str) -> None:
    for asked in ("auto", "cuda"):
        with pytest.raises(HardwareError) as refused:
            choose_device(asked, UNUSABLE[cause])
        assert cause in refused.value.problem
        assert "--device cpu" in refused.value.fix
        assert refused.value.fix.partition("; or ask")[0], "a way out besides giving up the GPU"


def test_a_driver_that_does_not_work_is_refused_with_the_driver_and_the_cpu_as_ways_out() -> None:
    for trouble in (*_DRIVER_TROUBLES, "NVMLError_Unknown", None):
        facts = replace(WITH_GPU, gpus=(), nvml_problem=trouble and f"{trouble}: said NVML")
        for asked in ("auto", "cuda"):
            with pytest.raises(HardwareError) as refused:
                choose_device(asked, facts)
            assert "driver" in refused.value.fix
            assert "--device cpu" in refused.value.fix


@pytest.mark.parametrize("facts", [CPU_ONLY, WITH_GPU, WITH_TPU, *UNUSABLE.values()])
def test_the_cpu_works_wherever_torch_is_installed(facts: Facts) -> None:
    assert choose_device("cpu", replace(facts, torch=facts.torch or CUDA_TORCH)).device == "cpu"


@pytest.mark.parametrize("asked", ["cpu", "auto"])
def test_without_torch_there_is_no_device_for_the_torch_engine(asked: str) -> None:
    with pytest.raises(HardwareError, match="torch is not installed") as refused:
        choose_device(asked, replace(CPU_ONLY, torch=None))
    assert refused.value.exit_code == 4
    assert 'pip install "tunix-rt[torch]"' in refused.value.fix
    assert choose_device(asked, replace(CPU_ONLY, torch=None), "jax").device == "cpu"


def test_allocator_and_visibility_variables_do_not_touch_a_cpu_run() -> None:
    masked = replace(CPU_ONLY, visibility={"CUDA_VISIBLE_DEVICES": "7", "JAX_PLATFORMS": "cuda,cpu"})
    assert choose_device("cpu", masked) == choose_device("cpu", CPU_ONLY)
    assert choose_device("auto", masked) == choose_device("auto", CPU_ONLY)


def test_a_tpu_is_never_swapped_for_something_else() -> None:
    with pytest.raises(HardwareError, match="no TPU present") as refused:
        choose_device("tpu", CPU_ONLY)
    assert refused.value.exit_code == 4
    with pytest.raises(ConfigError, match=r"training\.device"):
        choose_device("tpu", WITH_TPU, "torch")
    assert "not used by the torch engine" in choose_device("auto", WITH_TPU, "torch").reason


def test_variables_alone_make_no_tpu() -> None:
    with pytest.raises(HardwareError, match="no TPU present"):
        choose_device("tpu", replace(CPU_ONLY, tpu_signs=("TPU_WORKER_ID",)))


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'npu'"):
        choose_device("npu", CPU_ONLY)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        (None, [0, 1]), ("", []), ("-1", []), ("1", [1]), ("1,0", [1, 0]), ("0,0", []), ("0,5,1", [0]), ("7", []),
        ("GPU-bb", [1]), ("GPU-b", [1]), ("GPU-zz", []), ("GPU-", []), ("MIG-aa", []), ("none", []), (" 1 ", [1]),
    ],
)  # fmt: skip
def test_a_mask_shows_what_cuda_would_show(mask: str | None, shown: list[int]) -> None:
    pair = (H200, replace(RTX, index=1))
    facts = replace(WITH_GPU, gpus=pair, visibility={} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert [gpu.index for gpu in visible_gpus(facts)] == shown


def test_two_gpus_offer_the_memory_of_the_smaller() -> None:
    choice = choose_device("auto", replace(WITH_GPU, gpus=(H200, replace(RTX, index=1))))
    assert (choice.count, choice.memory_bytes, choice.kind) == (2, 32 * GIB, "NVIDIA H200, RTX 5090")


@pytest.mark.parametrize(
    ("gpu", "driver", "words"),
    [
        (RTX, "580.95.05", "--torch-backend=cu130"),
        (RTX, "570.124.06", "--torch-backend=cu128"),
        (RTX, "550.54.15", "update the NVIDIA driver"),
        (replace(H200, capability=(6, 0)), "580.95.05", "--torch-backend=cu126"),
    ],
)
def test_the_advised_wheel_suits_gpu_and_driver(gpu: Gpu, driver: str, words: str) -> None:
    assert words in wheel_advice(replace(WITH_GPU, gpus=(gpu,), driver_version=driver))


def test_every_failing_check_tells_what_it_saw_why_and_what_to_do() -> None:
    failing = [check for facts in UNUSABLE.values() for check in run_checks(facts) if check.verdict == "fail"]
    assert {check.name for check in failing} == {check(WITH_GPU).name for check in CUDA_CHECKS}
    assert all(check.saw and check.why and check.fix for check in failing)
    assert not [check for check in run_checks(WITH_GPU) if check.verdict in ("fail", "warn")]


def test_little_disk_and_little_memory_are_warned_of() -> None:
    assert enough_disk(replace(CPU_ONLY, disk_free_bytes=GIB)).verdict == "warn"
    assert enough_ram(replace(CPU_ONLY, ram_available_bytes=GIB)).verdict == "warn"
    assert enough_disk(CPU_ONLY).verdict == enough_ram(CPU_ONLY).verdict == "pass"


# --- words -----------------------------------------------------------------------------------------------------------


def test_the_environment_file_holds_the_listed_facts_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TPU_SECRET", "tpu_secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    facts = gather_facts()
    written = env_info_text(facts) + torch_version_text(facts) + json.dumps(to_plain(facts))
    assert "secret" not in written
    assert "CUDA_VISIBLE_DEVICES: 0" in env_info_text(facts)
    assert "driver: 580.95.05\ndriver cuda: 13.0\ngpu 0: NVIDIA H200" in env_info_text(WITH_GPU)
    assert torch_version_text(WITH_GPU).startswith("torch: 2.13.0+cu130\ncuda build: 13.0\narchitectures: sm_75")
    assert torch_version_text(replace(WITH_GPU, torch=None)) == "torch: not installed\n"


def test_the_command_gives_its_verdict_first_and_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "gather_facts", lambda: CPU_ONLY)
    ready = CliRunner().invoke(cli, ["doctor"])
    assert (ready.exit_code, ready.stdout.splitlines()[0]) == (0, "ready: cpu (no GPU present)")
    assert "Using device: cpu" in ready.stdout.splitlines()
    refused = CliRunner().invoke(cli, ["doctor", "--device", "gpu"])
    assert refused.exit_code == 4
    assert refused.stdout.startswith("not ready: no GPU present")
    assert refused.stderr.startswith("error: no GPU present")


def test_the_json_is_printed_also_when_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "gather_facts", lambda: WITH_GPU)
    ready = CliRunner().invoke(cli, ["doctor", "--json"])
    assert json.loads(ready.stdout)["choice"]["device"] == "cuda"
    assert facts_from_json(json.loads(ready.stdout)["facts"]) == WITH_GPU
    monkeypatch.setattr(probe, "gather_facts", lambda: UNUSABLE["for the CPU only"])
    refused = CliRunner().invoke(cli, ["doctor", "--json"])
    said = json.loads(refused.stdout)
    assert refused.exit_code == 4
    assert "choice" not in said
    assert "--torch-backend=cu130" in said["refused"]["fix"]


def test_a_plan_needs_no_engine():
    assert choose_device("cpu", replace(CPU_ONLY, torch=None), None).device == "cpu"
    assert choose_device("cuda", replace(WITH_GPU, torch=None), None).device == "cuda"
