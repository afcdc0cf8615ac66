"""The doctor's causes on a computer that has a GPU: each made for real, each named."""

import json
import os
import subprocess
import sys
import sysconfig

import pytest

from tests.program import ROOT, environment, tunix_rt

pytestmark = pytest.mark.gpu

HOLDER = """
import sys, torch
share = float(sys.argv[1])
free, total = torch.cuda.mem_get_info()
held = torch.empty(int(free * share), dtype=torch.uint8, device="cuda").fill_(1)
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""
WITHOUT_THIS_GPU = """
import sys
if any("_cuda_getArchFlags" in word for word in sys.orig_argv):
    import torch
    own = str(torch.cuda.get_device_capability(0)[0])
    flags = torch._C._cuda_getArchFlags()
    kept = " ".join(arch for arch in flags.split() if arch.split("_")[1][:-1] != own)
    assert kept != flags
    torch._C._cuda_getArchFlags = lambda: kept
"""


def doctor(*arguments, expected, **extra):
    done = tunix_rt("doctor", "--device", "cuda", "--json", *arguments, **extra)
    assert done.returncode == expected, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_verdict_has_driver_wheel_and_kernels():
    said = doctor(expected=0)
    assert said["choice"]["device"] == "cuda"
    nvidia = said["facts"]["nvidia"]
    assert nvidia["driver_version"] and nvidia["module_version"] and nvidia["gpus"][0]["uuid"].startswith("GPU-")
    assert not [check for check in said["checks"] if check["verdict"] == "fail"]


@pytest.mark.parametrize("mask", ["", "-1", "99", "0,0"])
def test_a_mask_is_named(mask):
    said = doctor(expected=4, CUDA_VISIBLE_DEVICES=mask)
    assert (said["cause"], said["kind"]) == ("masked", "masked")


def test_a_wheel_without_the_gpus_code_is_named(tmp_path):
    """The list that torch's own child prints is cut by a module that Python loads first."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_THIS_GPU)
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    said = doctor(expected=4, PYTHONPATH=path)
    assert (said["cause"], said["kind"]) == ("wheel-lacks-architecture", "wheel")
    assert "pip install" in said["fix"] and "--index-url" in said["fix"]


@pytest.mark.parametrize(("share", "exit_code", "verdict"), [("0.2", 0, "warn"), ("0.95", 4, "fail")])
def test_a_process_that_holds_the_gpu_is_named_with_its_pid(share, exit_code, verdict):
    command = [sys.executable, "-c", HOLDER, share]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            said = doctor(expected=exit_code)
        finally:
            holder.communicate("")
    (busy,) = [check for check in said["checks"] if check["cause"] == "gpu-busy"]
    assert busy["verdict"] == verdict and f"process {holder.pid}" in busy["saw"]


def test_jax_reaches_the_gpu_too():
    said = doctor("--backend", "jax", "--prove", expected=0)
    assert said["facts"]["jax"]["platform"] == "gpu"
    assert all(result["ok"] for result in said["proof"]["results"])


def test_an_environment_is_verified_with_kernels(tmp_path):
    """A new environment that borrows the packages of this one: what `env create` runs in the one it has made."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    installed = [path for path in map(os.path.abspath, sys.path) if os.path.isdir(path) and path not in standard]
    borrowed = [path for path in installed if not path.endswith("lib-dynload")]
    (packages / "borrowed.pth").write_text("\n".join([str(ROOT / "src"), *borrowed]) + "\n")
    python = tmp_path / "env" / "bin" / "python"
    probe = subprocess.run([python, "-c", "import pydantic"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"the packages of {sys.executable} have no pydantic, which tunix_rt needs: {probe.stderr[-200:]}")
    done = tunix_rt("env", "verify", "--path", tmp_path / "env", "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
