"""A run of the JAX engine becomes a bundle, by the real program. The one on a GPU is the one on the CPU, dressed.

By default the committed bundles of the engine are looked at, and `test_jax_train.py` collects the run it has; a run of its own
is trained for the slow tests.
"""

import importlib.util
import json
import shutil

import pytest

from tests.bundles import collect, dress_as_cuda, edit_json, edit_text, files_of, git, make_repository, reseal
from tests.program import ROOT, refused, tunix_rt
from tunix_rt.evidence.bundle import bundle_problems
from tunix_rt.evidence.doubtful import nulls
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.rundir import RunDir, write_json

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")

ROUGH = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SETTINGS = (
    "data.max_length=64", "data.on_overflow=drop", "data.validation_fraction=0.01", "training.save_steps=2",
    "training.per_device_train_batch_size=2", "evaluation.max_new_tokens=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    return make_repository(tmp_path_factory.mktemp("repo"))


@pytest.fixture(scope="module")
def run(repo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "jax"
    asked = ["--model", "tiny-gemma3", "--weights", "random", "--data", "dev-reasoning-v2", "--backend", "jax"]
    given = [part for setting in SETTINGS for part in ("--set", setting)]
    done = tunix_rt(
        "train", *asked, "--device", "cpu", "--max-steps", 2, *given, "--output", folder,
        PYTHONPATH=str(repo / "src"), XLA_FLAGS=ROUGH,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def bundle(run, repo, tmp_path_factory):
    output = tmp_path_factory.mktemp("bundles") / "v1"
    done = collect(run, output, repo, "--run-id", "m39-local-cpu-proof")
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def gpu_run(run, tmp_path_factory):
    return dress_as_cuda(run, tmp_path_factory.mktemp("dressed") / "cuda", backend="jax")


@pytest.mark.slow
def test_a_run_of_jax_on_the_cpu_is_collected_and_verifies(bundle, run, repo):
    assert tunix_rt("evidence", "verify", bundle, "--repository", repo).returncode == 0
    says = json.loads((bundle / "bundle.json").read_text())
    versions = json.loads((run / "precommit.json").read_text())["versions"]
    assert (says["jax"], says["jaxlib"]) == (versions["jax"], versions["jaxlib"]) and "torch" not in says
    readme = (bundle / "README.md").read_text()
    assert f"| JAX | {says['jax']} |" in readme and 'pip install -e ".[jax]"' in readme and "PyTorch" not in readme


@pytest.mark.slow
def test_the_manifest_tells_the_run_under_the_name_it_was_given(bundle, run, repo):
    told = json.loads((bundle / "run_manifest.json").read_text())
    result = json.loads((run / "result.json").read_text())
    host = json.loads((run / "doctor.json").read_text())["facts"]["host"]
    assert (told["schema"], told["run_id"]) == ("tunix-rt/run-manifest/1", "m39-local-cpu-proof")
    assert told["commit"] == git(repo, "rev-parse", "HEAD")
    assert (told["backend"], told["device"], told["model"], told["weights"], told["dataset"]) == (
        "jax", "cpu", "tiny-gemma3", "random", "dev-reasoning-v2",
    )  # fmt: skip
    assert (told["steps_completed"], told["final_loss"]) == (2, result["final_loss"])
    assert told["hardware"]["memory_bytes"] == host["ram_total_bytes"]
    assert told["configuration"]["data"]["max_length"] == 64 and told["configuration"]["training"]["max_steps"] == 2
    assert "training.data_seed" in told["configuration_left_open"]
    assert nulls(told) == []


def test_without_a_name_a_run_is_called_like_its_folder_and_a_placeholder_is_refused(tiny_run, tiny_repo, tmp_path):
    run, repo = tiny_run, tiny_repo
    assert collect(run, tmp_path / "m39_cpu_v1", repo).returncode == 0
    assert json.loads((tmp_path / "m39_cpu_v1" / "run_manifest.json").read_text())["run_id"] == "m39_cpu_v1"
    assert "a placeholder" in refused(collect(run, tmp_path / "second", repo, "--run-id", "TODO"), 2)
    assert not (tmp_path / "second").exists()


@pytest.mark.usefixtures("judged_once")
def test_every_figure_of_a_manifest_is_computed_again_even_with_new_hashes(tmp_path):
    folder = shutil.copytree(ROOT / "submission_runs" / "m39_cpu_v2", tmp_path / "copy")
    original = json.loads((folder / "run_manifest.json").read_text())

    def found(told):
        write_json(folder / "run_manifest.json", told)
        write_hashes(RunDir(folder))
        return bundle_problems(folder)

    for name in original:
        assert any(name in problem for problem in found(original | {name: None})), name
        assert any(name in problem for problem in found({k: v for k, v in original.items() if k != name})), name
    training = original["configuration"]["training"] | {"max_steps": 300}
    forged = original | {"configuration": original["configuration"] | {"training": training}}
    assert found(forged) == ["run_manifest.json: configuration.training.max_steps is 300, the files give 20"]
    assert found(original | {"accuracy": 1.0}) == ["run_manifest.json: 'accuracy' is said by no file"]
    [named] = found(original | {"run_id": "another-name"})  # somebody's choice, which the provenance repeats
    assert named.startswith("provenance.intoto.json: ") and "run_id" in named
    (folder / "run_manifest.json").unlink()
    write_hashes(RunDir(folder))
    assert bundle_problems(folder) == ["missing: run_manifest.json"]


@pytest.mark.slow
def test_a_gpu_run_of_jax_needs_no_run_on_the_cpu_and_says_so(gpu_run, repo, tmp_path):
    done = collect(gpu_run, tmp_path / "m39_v1", repo)
    assert done.returncode == 0, done.stderr
    assert bundle_problems(tmp_path / "m39_v1", repo) == []
    told = json.loads((tmp_path / "m39_v1" / "run_manifest.json").read_text())
    assert (told["hardware"]["name"], told["versions"]["jax-cuda13-plugin"]) == ("NVIDIA H200", "0.11.2")
    assert "so there is no ratio" in (tmp_path / "m39_v1" / "README.md").read_text()
    assert not any(name.startswith("cpu/") for name in files_of(tmp_path / "m39_v1"))


@pytest.mark.slow
def test_a_gpu_run_of_jax_is_held_against_its_run_on_the_cpu_where_one_is_given(gpu_run, run, repo, tmp_path):
    cpu = shutil.copytree(run, tmp_path / "cpu")
    folder = tmp_path / "m39_v1"
    done = collect(gpu_run, folder, repo, "--cpu-run", cpu)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "bundle.json").read_text())["tokens_per_second"]["ratio"] == pytest.approx(10)
    shutil.rmtree(folder / "cpu")
    write_hashes(RunDir(folder))
    assert any("cpu_run" in problem for problem in bundle_problems(folder))


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("cuda_check.txt", "platform: gpu", "platform: cpu", "cuda_check.txt lacks a line with `jax.devices()"),
        ("training_log.txt", "Using device: cuda", "Using device: cpu", "lacks a line with `Using device: cuda`"),
        ("doctor.json", "jax-cuda13", "jax-rocm7", "does not tell a CUDA plugin"),
        ("config.yaml", "backend: jax", "backend: torch", "does not tell proof.about.uuid"),
    ],
)
def test_a_forgery_of_a_gpu_run_of_jax_is_found(tmp_path, name, old, new, words):
    """Of a real one."""
    folder = shutil.copytree(ROOT / "submission_runs" / "m39_v2", tmp_path / "v1")
    edit_text(folder / name, old, new)
    reseal(folder)
    assert any(words in problem for problem in bundle_problems(folder)), bundle_problems(folder)


@pytest.mark.slow
def test_a_gpu_run_of_jax_without_nvidia_smi_is_refused(gpu_run, repo, tmp_path):
    folder = shutil.copytree(gpu_run, tmp_path / "cuda")
    (folder / "nvidia_smi.txt").unlink()
    edit_json(folder / "result.json", gpu_memory=...)
    write_hashes(RunDir(folder))
    assert "result.json does not tell gpu_memory" in refused(collect(folder, tmp_path / "bundle", repo), 6)
