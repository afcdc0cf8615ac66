"""The TPU's own compiler, asked without a TPU: what it refuses, what it accepts, and that no variable of the user changes it.

The compiler is libtpu, of the extra `tpu`. A run on the CPU is held here too: variables of GPUs do not change its numbers.
"""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tunix_rt.config.load import load_config
from tunix_rt.config.settings import Training
from tunix_rt.engines.jax.aot import Case, ask_compiler

pytest.importorskip("jax")

# What the predecessor's script set, what GPU users set, and flags of XLA that are for GPUs.
FOREIGN = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.55", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "CUDA_VISIBLE_DEVICES": "3", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}  # fmt: skip
TINY = {
    "model_type": "gemma", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
ON_THE_CPU = """
import json, sys
import numpy as np, jax
from tunix_rt.engines.jax import optim as jax_optim, step as jax_step
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.jax.mesh import make_mesh
from tunix_rt.engines.jax.model import Batch
from tunix_rt.config.settings import Training
architecture, rows, tokens = architecture_of(json.loads(sys.argv[1])), 2, 32
plan = jax_step.step_plan(architecture, Training(), platform="cpu", rows=rows, tokens=tokens)
mesh, random = make_mesh(jax.devices()), np.random.default_rng(0)
params = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape, np.float32) / 8, jax_step.abstract_state(plan, mesh).params)
ids = random.integers(1, 512, (1, rows, tokens)).astype(np.int32)
places = np.broadcast_to(np.arange(tokens, dtype=np.int32), ids.shape)
batch = Batch(ids=ids, positions=places, segments=np.ones_like(ids), targets=ids, weights=np.ones(ids.shape, np.float32))
state = jax_step.State(params, jax_optim.init(params, plan.optim))
compiled, losses = jax_step.compile_step(plan, mesh, rows, tokens), []
for step in (1, 2):
    state, loss, norm = compiled(state, batch, **jax_step.numbers(plan, step=step, rate=1e-3, target_tokens=rows * tokens))
    losses += [float(loss).hex(), float(norm).hex()]
print(jax.default_backend(), *losses)
"""


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("libtpu is not installed: pip install 'tunix-rt[tpu]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


def test_the_setting_of_m38_is_refused_in_numbers(compiler):
    """The founding document's story, by the real compiler: a copy of the whole state on every chip does not go on it."""
    loaded = load_config(ROOT / "training" / "configs" / "submission_tpu_m38.yaml")
    config = json.loads((ROOT / "presets" / "gemma-2b" / "config.json").read_text())
    found = ask_compiler(
        Case(config=config, training=loaded.training, tokens=loaded.data.max_length, topology="v5e:2x4")
    )
    assert not found.fits
    assert found.parameters == 2_506_172_416
    assert (found.devices, found.replicas, found.rows, found.tokens) == (8, 8, 8, 64)
    assert found.refusal.usable == 15.75 * 2**30
    assert found.refusal.needed > 1.2 * found.refusal.usable
    assert "RESOURCE_EXHAUSTED" in found.refusal.message


@pytest.mark.slow  # the refusal asks the same compiler by default
def test_a_small_step_is_accepted_with_its_memory_by_kind_whatever_the_user_has_set(compiler, monkeypatch):
    case = Case(
        config=TINY, training=Training(per_device_train_batch_size=1, dtype="bfloat16"), tokens=128, topology="v5e:2x2"
    )
    plain = ask_compiler(case)
    for name, value in FOREIGN.items():
        monkeypatch.setenv(name, value)
    steered = ask_compiler(case, fresh=True)
    assert plain.fits and plain.memory == steered.memory
    assert (plain.devices, plain.device_kind) == (4, "TPU v5 lite")
    state = 3 * 4 * plain.parameters / 4  # weights and two moments in float32, a quarter of them on each chip
    assert state <= plain.memory.arguments <= 1.2 * state + 2**16
    assert plain.memory.aliased >= state  # the new state lies where the old one lay
    assert plain.memory.arguments < plain.memory.peak <= plain.memory.total < 2**25


@pytest.mark.slow
def test_what_steers_gpus_does_not_change_a_run_on_the_cpu():
    def heard(extra):
        environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src"), **extra}
        ended = subprocess.run(
            [sys.executable, "-c", ON_THE_CPU, json.dumps(TINY)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        return ended.stdout.split()

    plain = heard({})
    assert plain[0] == "cpu"
    assert heard(FOREIGN) == plain
