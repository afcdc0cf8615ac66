"""`tunix-rt env create`: which wheel, which commands, which other wheel, and what the words of a failed command mean."""

import json
import os
import re
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.conftest import ROOT
from tests.tables import parametrize
from tunix_rt.cli.main import cli
from tunix_rt.doctor import install as installing
from tunix_rt.doctor.environment import (
    judge_install,
    judge_quick_check,
    next_wheel,
    plan_environment,
    why_refused,
    without_password,
)
from tunix_rt.doctor.facts import DeviceNode, Facts, Gpu, Host, Nvidia, PciDevice
from tunix_rt.doctor.install import create_environment, error_of
from tunix_rt.doctor.wheels import fitting_wheels, why_no_wheel
from tunix_rt.doctor.wheels import main as wheels_main
from tunix_rt.storage import to_plain

GIB = 2**30
PIP = "-m pip install --disable-pip-version-check --no-input --retries 1 --timeout 30"
PYTORCH = "https://download.pytorch.org/whl"
GPUS = {"RTX 5090": (12, 0), "T4": (7, 5), "P100": (6, 0), "H200": (9, 0), "V100": (7, 0)}


def computer(gpu: str, driver: str, **host: object) -> Facts:
    """A Linux computer with one such GPU in which nothing is wrong."""
    size = {"total_bytes": 16 * GIB, "free_bytes": 15 * GIB}
    nodes = tuple(DeviceNode(path=f"/dev/{name}") for name in ("nvidia0", "nvidiactl", "nvidia-uvm"))
    return Facts(
        host=Host(**{"ram_total_bytes": 64 * GIB, "ram_available_bytes": 60 * GIB, "disk_free_bytes": 99 * GIB, **host}),
        nvidia=Nvidia(
            pci=(PciDevice(address="0000:01:00.0", vendor="0x10de", device="0x2335"),),
            module_version=driver, module_flavour="open", nodes=nodes, libcuda=("/usr/lib/libcuda.so.1",),
            driver_version=driver, driver_cuda="13.0",
            gpus=(Gpu(name=f"NVIDIA {gpu}", uuid="GPU-a", capability=GPUS[gpu], **size),),
        ),
    )  # fmt: skip


def dry_run(facts: Facts, folder: Path, *more: str) -> list[str]:
    file = folder / "facts.json"
    file.write_text(json.dumps(to_plain(facts)))
    path = folder / "new"
    asked = ["env", "create", "--device", "cuda", "--dry-run", "--facts", str(file), "--path", str(path), *more]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    assert list(folder.iterdir()) == [file]  # a dry run makes nothing
    return done.stdout.replace(f"{folder}/", "").replace(sys.executable, "python").splitlines()


@parametrize("gpu", "driver", "wheel", "cuda", "unhad", "useless")
def test_a_dry_run_prints_the_verdict_the_exact_commands_and_the_one_other_wheel(
    tmp_path, gpu, driver, wheel, cuda, unhad, useless
):
    def with_index(wheel: str) -> str:
        return f"{wheel} --index-url {PYTORCH}/{wheel.partition('+')[2]}" if "+" in wheel else wheel

    lines = dry_run(computer(gpu, driver), tmp_path)
    major, minor = GPUS[gpu]
    version = re.findall(r"2\.1\d\.\d", wheel)[0]
    why = f"NVIDIA {gpu}, compute capability {major}.{minor}; driver {driver}"
    assert lines[0] == f"would create new with torch {version}, CUDA {cuda} ({why})"
    assert lines[1] == "1. python -m venv new"
    assert lines[2] == f"2. new/bin/python {PIP} {with_index(wheel)}"
    assert re.match(r"3\. new/bin/python -P -c .*torch\.ones\(8, device=.*cuda", lines[3])
    assert lines[4] == f"4. new/bin/python {PIP} {wheel} -e '{ROOT}[training]' -c {ROOT}/constraints.txt"
    proof = "--device cuda --dtype float32 --head-size 64"
    assert lines[5] == f"5. new/bin/python -P -m tunix_rt.engines.selftest.torch {proof}"
    assert lines[6] == f"if that wheel is not available: the same with {with_index(unhad)}"
    then = f"the same with {with_index(useless)}" if useless else "it fails with a report"
    assert lines[7:] == [f"if that wheel does not compute here: {then}"]


def test_the_printed_check_is_a_command_that_runs(tmp_path):
    """As a shell would take it, but with this Python, whose torch has no CUDA: it says so, and fails on the kernel."""
    import subprocess

    python, *rest = shlex.split(dry_run(computer("H200", "580.95.05"), tmp_path)[3].removeprefix("3. "))
    assert python == "new/bin/python"
    done = subprocess.run([sys.executable, *rest], capture_output=True, text=True)
    assert '"cuda_build": null' in done.stdout
    assert done.returncode != 0 and "not compiled with CUDA" in done.stderr
    torch, failure = judge_quick_check(
        done.stdout + done.stderr, done.returncode, "cuda", computer("H200", "580.95.05")
    )
    assert torch.cuda_build is None
    assert (failure.step, failure.kind, failure.cause) == ("check", "wheel", "cpu-wheel")


def test_a_mirror_stands_in_for_the_index_and_its_password_is_not_shown(tmp_path):
    lines = dry_run(computer("H200", "580.95.05"), tmp_path, "--wheel-index", "https://me:secret@mirror.test/whl/")
    assert lines[2].endswith("--index-url https://****@mirror.test/whl/cu130")
    assert "secret" not in "".join(lines)
    assert without_password("a https://me:secret@mirror.test/x b") == "a https://****@mirror.test/x b"
    assert without_password("a https://me:se@cr@et@mirror.test/x@1 b") == "a https://****@mirror.test/x@1 b"


def no_gpu() -> Facts:
    return replace(computer("H200", "580.95.05"), nvidia=Nvidia(nvml_problem="NVMLError_LibraryNotFound: not found"))


@pytest.mark.parametrize(
    ("facts", "kind", "cause"),
    [
        (no_gpu(), "hardware", "no-gpu"),
        (computer("RTX 5090", "560.35.05"), "driver", "blackwell-driver"),
        (computer("T4", "470.57.02"), "driver", "no-wheel-fits"),
        (computer("V100", "590.10"), "driver", "no-wheel-fits"),
        (computer("V100", "580.95.05", machine="aarch64"), "wheel", "no-wheel-fits"),
        (computer("H200", "580.95.05", disk_free_bytes=11 * GIB), "storage", "low-disk"),
    ],
)
def test_what_is_in_the_way_is_told_before_anything_is_installed(facts, kind, cause):
    refusal = why_refused(facts, "cuda")
    assert (refusal.kind, refusal.cause) == (kind, cause)
    assert refusal.problem and refusal.fix
    assert why_refused(computer("H200", "580.95.05"), "cuda") is why_refused(no_gpu(), "cpu") is None


@parametrize("capabilities", "driver", "place", "found", "fix")
def test_a_wheel_is_put_on_no_driver_below_its_floor(capabilities, driver, place, found, fix):
    system, machine, wsl = place
    capabilities = [tuple(capability) for capability in capabilities]
    wheels = fitting_wheels(capabilities, driver, system, machine, wsl=wsl)
    assert (wheels[0].index if wheels else None) == found
    if not found:
        way = why_no_wheel(capabilities, driver, system, machine, wsl=wsl)[1]
        assert fix in way
        assert "branch 580" not in way or "newer" not in way


def test_the_set_up_knows_wsl_by_its_kernel(capsys):
    asked = ["526.86", "8.6\n8.6", "Linux", "x86_64"]
    assert wheels_main([*asked, "5.15.167.4-microsoft-standard-WSL2"]) == 4
    assert wheels_main([*asked, "6.8.0-45-generic"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "compute capability 8.6, NVIDIA driver 526.86: CUDA 12.6"


def test_the_cpu_gets_the_cpu_build_and_then_the_registrys():
    first, second = plan_environment(no_gpu(), "cpu", Path("new")).wheels
    assert (first.requirement, first.index) == ("torch==2.13.0+cpu", "cpu")
    assert (second.requirement, second.index) == ("torch==2.13.0", "")
    assert next_wheel((first, second), first, step="wheel") is second


def test_the_registrys_build_with_its_cuda_libraries_is_not_tried_where_the_disk_is_too_small():
    small = computer("T4", "580.95.05", disk_free_bytes=5 * GIB)
    plan = plan_environment(small, "cpu", Path("new"))
    assert [wheel.index for wheel in plan.wheels] == ["cpu"]
    assert "too little disk for the registry's build" in plan.reason
    assert (
        len(plan_environment(replace(small, host=replace(small.host, system="Windows")), "cpu", Path("x")).wheels) == 2
    )


@pytest.mark.parametrize(
    ("step", "kind"), [("venv", "environment"), ("packages", "network"), ("wheel", "storage"), ("wheel", "permissions")]
)
def test_no_other_wheel_is_tried_where_it_would_not_help(step, kind):
    wheels = plan_environment(computer("H200", "580.95.05"), "cuda", Path("new")).wheels
    assert next_wheel(wheels, wheels[0], step=step, kind=kind) is None


def test_no_wheel_of_the_table_for_a_gpu_is_without_cuda():
    for gpu in GPUS:
        for driver in ("550.54.15", "570.124.06", "580.95.05"):
            for wheel in plan_environment(computer(gpu, driver), "cuda", Path("new")).wheels:
                assert wheel.cuda and wheel.index != "cpu"


ARCHES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@parametrize("gpu", "answer", "after", "kind", "cause")
def test_a_wheel_that_was_had_counts_only_when_it_fits_and_computes(gpu, answer, after, kind, cause):
    whole = {
        "version": "2.13.0+cu130",
        "cuda_build": "13.0",
        "hip_build": None,
        "arch_list": ARCHES,
        "cuda_available": True,
    }
    said = after if answer is None else json.dumps({**whole, **answer}) + f"\n{after}\n"
    _, failure = judge_quick_check(said, 0 if after[:1].isdigit() else 1, "cuda", computer(gpu, "580.95.05"))
    assert (failure and failure.cause) == cause
    assert kind is None or failure.kind == kind


@parametrize("said", "kind")
def test_words_of_pip_are_told_apart(said, kind):
    failure = judge_install(said, "wheel", "torch==2.13.0+cu130")
    assert failure.kind == kind
    assert "ERROR:" in failure.problem


@pytest.mark.parametrize(
    "line",
    [
        '{"version": "2.13.0", "cuda_build": nonsense',
        '{"version": "2.13.0"}',
        '{"version": "2", "arch_list": 7, "cuda_build": null}',
        '{"version"' + "[" * 100_000,
    ],
)
def test_a_check_that_answers_nonsense_fails_in_words(line):
    _, failure = judge_quick_check(f"{line}\n8.0\n", 0, "cuda", computer("H200", "580.95.05"))
    assert failure.cause == "torch-broken"
    assert "malformed output of torch" in failure.problem and len(failure.problem) < 400


@parametrize("script", "words")
def test_a_python_that_ends_badly_is_told_with_its_ending(tmp_path, monkeypatch, script, words):
    """By its name alone too: it is not looked for in PATH."""
    monkeypatch.chdir(tmp_path)
    if "sleep" in (script or ""):
        monkeypatch.setattr(installing, "CHECK_SECONDS", 0.3)
    Path("py1").write_text(script or "")
    Path("py1").chmod(0o755 if script else 0o644)
    done = CliRunner().invoke(cli, ["env", "verify", "--device", "cpu", "--python", "./py1"])
    assert (done.exit_code, words in done.stderr) == (4, True), done.output


def test_the_python_of_an_environment_is_started_by_its_own_name(tmp_path, monkeypatch):
    """The link is what makes it the Python of that environment."""
    monkeypatch.chdir(tmp_path)
    Path("real").write_text('#!/bin/sh\necho "I am $0"; exit 1')
    Path("real").chmod(0o755)
    Path("py1").symlink_to("real")
    done = CliRunner().invoke(cli, ["env", "verify", "--device", "cpu", "--python", "py1"])
    assert f"I am {tmp_path}/py1" in done.stderr


def test_places_that_are_taken_are_refused(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mine.json").write_text('{"precious": 1}')
    taken = {
        tmp_path / "there": "exists", Path("/"): "exists", Path(".."): "exists", tmp_path / "dangling": "exists",
        tmp_path / "no" / "parent": "does not exist", tmp_path / "mine": "would be overwritten",
        Path(sys.prefix): "the environment that tunix-rt runs in",
    }  # fmt: skip
    for path, words in taken.items():
        done = CliRunner().invoke(cli, ["env", "create", "--device", "cpu", "--path", str(path)])
        assert (done.exit_code, words in done.stderr) == (2, True), done.output
        assert "remove" not in done.stderr
    assert (tmp_path / "mine.json").read_text() == '{"precious": 1}'


def test_a_refusal_leaves_its_report_and_nothing_else(tmp_path):
    report = create_environment(no_gpu(), device="cuda", path=tmp_path / "new")
    assert (report.status, report.kind, report.cause, report.attempts) == ("refused", "hardware", "no-gpu", ())
    assert [path.name for path in tmp_path.iterdir()] == ["new.json"]
    assert json.loads((tmp_path / "new.json").read_text()) == to_plain(report)
    error = error_of(report)
    assert (error.exit_code, error.cause, str(tmp_path / "new.json") in error.fix) == (4, "no-gpu", True)
    full = create_environment(computer("T4", "580.95.05", disk_free_bytes=GIB), device="cpu", path=tmp_path / "new")
    assert error_of(full).exit_code == 8


def test_a_signal_that_is_ignored_stays_so_and_a_second_one_does_not_disturb_the_end():
    """`nohup` ignores SIGHUP; an impatient user sends SIGINT twice."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    undisturbed = False
    try:
        with pytest.raises(KeyboardInterrupt), installing._signals_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                undisturbed = True
    finally:
        signal.signal(signal.SIGHUP, before[0])
    assert undisturbed and signal.getsignal(signal.SIGTERM) == before[1]


def test_facts_of_another_computer_are_for_a_dry_run_only(tmp_path):
    done = CliRunner().invoke(cli, ["env", "create", "--device", "cuda", "--facts", str(tmp_path / "facts.json")])
    assert (done.exit_code, "--dry-run" in done.stderr) == (2, True)


def test_a_refused_dry_run_ends_with_exit_4_and_the_cause(tmp_path):
    (tmp_path / "facts.json").write_text(json.dumps(to_plain(computer("RTX 5090", "560.35.05"))))
    asked = ["env", "create", "--device", "cuda", "--dry-run", "--facts", str(tmp_path / "facts.json")]
    done = CliRunner().invoke(cli, [*asked, "--path", str(tmp_path / "new")])
    assert (done.exit_code, "[driver: blackwell-driver]" in done.stderr) == (4, True)
    assert "570" in done.stderr
    done = CliRunner().invoke(cli, [*asked, "--path", str(tmp_path / "new"), "--json"])
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["schema"]) == (4, "tunix-rt/environment/1")
    assert (answer["status"], answer["kind"], answer["cause"]) == ("refused", "driver", "blackwell-driver")
    assert answer["problem"] and "570" in answer["fix"]


@pytest.mark.parametrize("text", [None, "{", '{"schema": 1}'])
def test_facts_that_cannot_be_read_are_refused_with_the_way_to_make_them(tmp_path, text):
    if text is not None:
        (tmp_path / "facts.json").write_text(text)
    asked = ["env", "create", "--device", "cuda", "--dry-run", "--facts", str(tmp_path / "facts.json")]
    done = CliRunner().invoke(cli, [*asked, "--path", str(tmp_path / "new")])
    assert (done.exit_code, "tunix-rt doctor --facts-only" in done.stderr) == (3, True), done.output
