"""The lower bound of the JAX engine is below what XLA needs on a CPU, for every kind of step."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.program import ROOT, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax"),
]

ROUGH = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
CASES = {
    1: (
        "gemma3,4,256,1,float32,-,adamw,none", "gemma3,4,256,1,float32,-,adamw,all", "gemma2,2,512,1,bfloat16,-,adamw,share",
        "llama,8,128,2,bfloat16,bfloat16,adafactor,all", "gpt2,4,256,1,float32,-,adafactor,none",
        "gemma,1,64,1,bfloat16,bfloat16,adamw,all", "llama,1,64,4,float32,-,adafactor,all",
    ),
    8: (
        "gemma3,2,256,1,float32,-,adamw,all", "gemma,1,64,1,bfloat16,bfloat16,adafactor,all",
        "llama,2,128,2,bfloat16,-,adamw,none", "gpt2,1,64,1,float32,-,adamw,all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("devices", CASES)
def test_the_plan_is_a_lower_bound_of_what_the_compiler_needs(devices):
    flags = f"{ROUGH} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.invariant.jax_memory_side", *CASES[devices]],
        cwd=ROOT, env=environment(XLA_FLAGS=flags, JAX_PLATFORMS="cpu"), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["case"] for one in found] == list(CASES[devices])
    for one in found:
        assert 0.1 * one["needed"] < one["floor"] <= one["needed"], one
