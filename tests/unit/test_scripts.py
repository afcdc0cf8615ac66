"""scripts/setup and scripts/demo: what they were told is honoured or refused, and no wheel is chosen by accident."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.tables import parametrize

PROGRAMS = ("awk", "bash", "cat", "dirname", "grep", "head", "sed", "sleep", "tail", "timeout", "tr", "true", "uname")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of a clone as the scripts look at before they install anything, and a folder `bin` of programs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src").symlink_to(ROOT / "src")
    for name in ("scripts/setup", "scripts/demo", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    # Nothing is fetched or set up here: no index is reached, and no virtual environment can be made.
    program(
        tmp_path / "bin" / "python3.11", f'case "$*" in *venv* | *whl*) exit 1;; *) exec {sys.executable} "$@";; esac'
    )
    # No other program is found, and so no nvidia-smi of this computer either.
    for name in PROGRAMS:
        if found := shutil.which(name):
            (tmp_path / "bin" / name).symlink_to(found)
    disk(tmp_path, free_gib=100)
    return tmp_path


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def gpu(clone: Path, *, driver: str, capability: str) -> None:
    """A nvidia-smi that does what is said when asked for the one, or for the other or both at once."""
    program(clone / "bin" / "nvidia-smi", f'case "$*" in *compute_cap*) {capability};; *) {driver};; esac')


def disk(clone: Path, *, free_gib: int) -> None:
    program(clone / "bin" / "df", f'echo "Filesystem"; echo "disk 1 1 {free_gib * 1024 * 1024} 1% /"')


def setup(clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(clone / "bin"), "HOME": str(clone), "http_proxy": "", **variables}
    return subprocess.run([clone / "scripts" / "setup"], env=environment, capture_output=True, text=True, timeout=60)


H100 = {"driver": "echo 580.95.05", "capability": "echo 9.0"}


@pytest.mark.parametrize("named", ["/nonexistent", "true"])
def test_a_python_that_was_named_and_does_not_serve_is_not_replaced_by_another(clone, named):
    ended = setup(clone, PYTHON=named)
    assert ended.returncode == 2
    assert f"PYTHON={named}" in ended.stderr
    assert "Setting up" not in ended.stderr


@pytest.mark.parametrize(
    "answer", ["exit 2", "echo '[N/A]'", "true", "echo 'Field \"compute_cap\" is not a valid field'"]
)
def test_a_gpu_that_does_not_tell_its_compute_capability_gets_no_wheel_at_all(clone, answer):
    gpu(clone, driver="echo 470.57.02", capability=answer)
    ended = setup(clone)
    assert ended.returncode == 4
    assert "compute capability" in ended.stderr
    assert "driver" in ended.stderr.partition("fix:")[2]
    assert "Setting up" not in ended.stderr


def test_a_driver_that_no_wheel_fits_is_refused_with_exit_4_and_the_driver_it_takes(clone):
    gpu(clone, driver="echo 470.57.02", capability="echo 8.0")
    ended = setup(clone)
    assert ended.returncode == 4
    assert "error: driver 470.57.02 is too old for every wheel with kernels for compute capability 8.0" in ended.stderr
    assert "fix: update the NVIDIA driver to 580.65.06 or newer" in ended.stderr
    assert "Setting up" not in ended.stderr


@parametrize("driver", "capability", "arguments")
def test_an_exact_torch_is_installed_and_nothing_chosen_by_accident(clone, driver, capability, arguments):
    """The Python of the `.venv` here says what it was given, and fails."""
    program(
        clone / "bin" / "python3.11", f'case "$*" in *venv*) ;; *whl*) exit 1;; *) exec {sys.executable} "$@";; esac'
    )
    (clone / ".venv" / "bin").mkdir(parents=True)
    program(clone / ".venv" / "bin" / "python", 'echo "GIVEN $*"; exit 1')
    if driver:
        gpu(clone, driver=f"echo {driver}", capability=f"echo {capability}")
    ended = setup(clone)
    assert ended.returncode == 1
    given = (clone / ".venv" / "setup.log").read_text().splitlines()
    assert given == [f"GIVEN -m pip --disable-pip-version-check --no-input install --quiet {arguments}"]


def test_the_pinned_versions_leave_torch_to_the_choice_of_a_wheel():
    pinned = [line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]]
    assert "torch" not in pinned and {"jax", "jaxlib", "transformers"} <= set(pinned)


@parametrize("broken")
def test_a_driver_that_is_broken_is_told_and_not_taken_for_none(clone, broken):
    gpu(clone, driver=broken, capability="echo 9.0")
    ended = setup(clone)
    assert ended.returncode == 4
    assert "nvidia-smi" in ended.stderr and "Setting up" not in ended.stderr
    said = broken.partition("'")[2].partition("'")[0]
    assert said in ended.stderr.partition("fix:")[0]
    assert "TUNIX_DEVICE=cpu scripts/setup" in ended.stderr.partition("fix:")[2]
    assert "Setting up" in setup(clone, TUNIX_DEVICE="cpu").stderr
    assert setup(clone, TUNIX_DEVICE="gpu").returncode == 2


def test_an_nvidia_smi_that_hangs_does_not_hang_the_set_up(clone):
    gpu(clone, driver="sleep 50", capability="sleep 50")
    (clone / "bin" / "timeout").unlink()
    program(
        clone / "bin" / "timeout", f'[ "$1 $2 $3" = "-k 5 20" ] && shift 3 && exec {shutil.which("timeout")} 0.2 "$@"'
    )
    ended = setup(clone)
    assert ended.returncode == 4
    assert "gives no answer within 20 s" in ended.stderr


@pytest.mark.parametrize("capability", ["12", "580", "12.0; echo '[N/A]'"])
def test_an_odd_compute_capability_is_told(clone, capability):
    gpu(clone, driver="echo 580.95.05; echo 580.95.05", capability=f"echo {capability}")
    ended = setup(clone)
    assert ended.returncode == 4
    odd = "[N/A]" if "N/A" in capability else capability
    assert f"error: nvidia-smi prints '{odd}' instead of a compute capability" in ended.stderr


def test_gpus_that_no_wheel_serves_together_are_told_with_the_way_to_use_one(clone):
    gpu(clone, driver="echo 580.95.05; echo 580.95.05", capability="echo 12.0; echo 6.0")
    ended = setup(clone)
    assert ended.returncode == 4
    assert "has kernels for compute capability 12.0, 6.0" in ended.stderr
    assert "CUDA_VISIBLE_DEVICES" in ended.stderr.partition("fix:")[2]


def python_whose_pip(clone: Path, *, dry_run: str, index: int = 1) -> None:
    """A Python whose pip reports `dry_run`; `index` 0: PyTorch's CPU index is reached."""
    cases = f"*dry-run*) {dry_run};; *venv*) exit 1;; *whl*) exit {index};;"
    program(clone / "bin" / "python3.11", f'case "$*" in {cases} *) exec {sys.executable} "$@";; esac')


def report(*names: str) -> str:
    return f"echo '{json.dumps({'install': [{'metadata': {'name': name}} for name in names]})}'"


def test_a_wheel_with_cuda_libraries_needs_more_disk_than_one_without(clone):
    disk(clone, free_gib=11)
    for answer in (report("torch", "nvidia-cublas"), report("torch", "cuda-toolkit"), "exit 1", "echo no report"):
        python_whose_pip(clone, dry_run=answer)
        ended = setup(clone)
        assert (ended.returncode, "needs about 12 GiB" in ended.stderr) == (8, True), answer
    disk(clone, free_gib=12)
    assert "Setting up" in setup(clone).stderr
    python_whose_pip(clone, dry_run=report("torch", "sympy"))
    disk(clone, free_gib=4)
    assert "Setting up" in setup(clone).stderr, "the registry's wheel brings no CUDA libraries"
    disk(clone, free_gib=3)
    assert "needs about 4 GiB" in setup(clone).stderr
    python_whose_pip(clone, dry_run="exit 1", index=0)
    assert "needs about 4 GiB" in setup(clone).stderr
    disk(clone, free_gib=4)
    assert "Setting up" in setup(clone).stderr
    gpu(clone, **H100)
    disk(clone, free_gib=11)
    python_whose_pip(clone, dry_run=report("torch", "nvidia-cublas"))
    assert "needs about 12 GiB" in setup(clone).stderr


def test_what_is_not_known_of_the_gpu_is_not_said():
    """A missing nvidia-smi shows that no driver works, not that no GPU is there."""
    text = (ROOT / "scripts" / "setup").read_text()
    assert "no NVIDIA GPU here" not in text
    assert text.count("no working NVIDIA driver here") == 1


def test_the_demo_passes_its_options_on_to_train(clone):
    program(clone / "scripts" / "setup", "exit 0")
    (clone / ".venv" / "bin").mkdir(parents=True)
    program(clone / ".venv" / "bin" / "tunix-rt", 'printf "%s\\n" "$@"')
    ended = subprocess.run(
        [clone / "scripts" / "demo", "--device", "cpu", "--set", "a.b=c d"], capture_output=True, text=True, check=True
    )
    demo = ["train", "training/configs/demo.yaml", "--output", "runs/demo"]
    assert ended.stdout.splitlines() == [*demo, "--device", "cpu", "--set", "a.b=c d"]
