"""The commands of the founding documents for the JAX engine: written as they are, through a shell, on what is here.

No TPU run has been made by this project. With `--device cpu` and a small model the commands train; that they end with exit
code 4 and the cause where there is neither a TPU nor a GPU is in `test_contract.py`.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, put_into_hub_cache
from tests.forging.bases import ROUGH
from tests.program import environment
from tunix_rt.cli.train import script_config, script_options
from tunix_rt.config.load import load_config
from tunix_rt.errors import ConfigError

CONFIGS = ROOT / "training" / "configs"
ON_A_GPU = (
    "python training/run_train_jax.py --config training/configs/submission_local_gpu.yaml --dataset dev-reasoning-v2 "
    "--device gpu --output ./output/local_gpu_run"
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A working folder with what a clone has, and a `python` that is this one."""
    folder = tmp_path / "clone"
    (folder / "bin").mkdir(parents=True)
    for name in ("src", "training", "training_pt", "datasets", "evalsets", "models"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    return folder


def typed(command: str, clone: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """The command as a person types it. What a user's shell says of jax's platforms is left out."""
    clean = environment(HF_HUB_CACHE=str(clone.parent / "hub"), **extra)
    for name in set(clean) - set(extra):
        if name.startswith(("JAX_", "XLA_", "TPU_")):
            del clean[name]
    clean["PATH"] = f"{clone / 'bin'}{os.pathsep}{clean['PATH']}"
    return subprocess.run(["sh", "-c", command], cwd=clone, env=clean, capture_output=True, text=True, timeout=300)


# --- on the CPU -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_trains_on_the_cpu_a_model_that_lies_in_the_hub_cache_under_its_id(clone):
    """The command of the document for a GPU, its device and its length apart: bfloat16, Adafactor, recomputation."""
    commit = put_into_hub_cache("gemma", "google/gemma-2b", clone.parent / "hub")
    here = ON_A_GPU.replace("--device gpu", "--device cpu --smoke_steps 2 --set evaluation.enabled=false")
    done = typed(here, clone, XLA_FLAGS=ROUGH)
    assert done.returncode == 0, done.stderr
    output = clone / "output" / "local_gpu_run"
    log = (output / "training_log.txt").read_text()
    assert "Using device: cpu" in log
    assert f"Preflight: model=google/gemma-2b revision={commit}" in log
    result = json.loads((output / "result.json").read_text())
    assert (result["status"], result["steps_completed"]) == ("completed", 2)
    assert re.search(r"^  backend: jax$", (output / "config.yaml").read_text(), re.MULTILINE)


# --- what the scripts are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["training/run_train_jax.py", "training/train_jax.py"])
def test_a_script_is_the_torch_script_with_the_other_engine_and_nothing_else(script):
    ours, theirs = (ast.parse((ROOT / path).read_text()).body[1:] for path in (script, "training_pt/train.py"))
    assert [ast.unparse(node) for node in ours] == [
        ast.unparse(node).replace("run_script('torch')", "run_script('jax')") for node in theirs
    ]


def jax_config(config: Path | str, *flags: str):
    return script_config(script_options(["--config", str(config), "--output", "unused", *flags]), "jax")


def test_a_configuration_without_an_engine_gets_the_one_of_the_script(tmp_path):
    bare = CONFIGS / "submission_local_gpu.yaml"
    assert "backend" not in bare.read_text()
    assert jax_config(bare).training.backend == "jax"
    assert (
        script_config(script_options(["--config", str(bare), "--output", "unused"]), "torch").training.backend
        == "torch"
    )
    assert jax_config(CONFIGS / "submission_tpu.yaml") == load_config(CONFIGS / "submission_tpu.yaml")


@pytest.mark.parametrize("by", ["file", "smoke", "set"])
def test_a_configuration_that_names_the_other_engine_is_refused_by_name(tmp_path, by):
    named = tmp_path / "named.yaml"
    named.write_text("training:\n  backend: torch\n")
    bare = str(CONFIGS / "smoke_tiny.yaml")
    told = {
        "file": [str(named)], "smoke": [bare, "--smoke_config", str(named)], "set": [bare, "--set", "training.backend=torch"],
    }[by]  # fmt: skip
    with pytest.raises(ConfigError, match=r"training\.backend is torch") as caught:
        jax_config(*told)
    assert caught.value.exit_code == 2
    assert "training_pt/train.py" in caught.value.fix
    with pytest.raises(ConfigError, match=r"training\.backend is jax.*training_pt/train\.py runs the torch"):
        script_config(script_options(["--config", str(CONFIGS / "submission_tpu.yaml"), "--output", "unused"]), "torch")


def test_smoke_settings_apply_to_a_submission_only_when_asked_for():
    whole = load_config(CONFIGS / "submission_tpu.yaml")
    assert jax_config(CONFIGS / "submission_tpu.yaml") == whole
    smoked = jax_config(CONFIGS / "submission_tpu.yaml", "--smoke_config", str(CONFIGS / "smoke_tiny.yaml"))
    assert (smoked.model.model_name_or_path, smoked.training.max_steps) == ("tiny-gemma3", 6)
    assert (smoked.training.optim, smoked.training.backend) == (whole.training.optim, "jax")
    few = jax_config(CONFIGS / "submission_tpu.yaml", "--smoke_steps", "2")
    assert few == whole.model_copy(update={"training": whole.training.model_copy(update={"max_steps": 2})})
