"""The bundles in submission_runs: each holds what the contract names, verifies, and was made from a commit of this repository."""

import json
import shutil
import subprocess

import pytest

from tests.program import ROOT, tunix_rt
from tunix_rt.evidence.bundle import bundle_problems
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.evidence.source import find_commit
from tunix_rt.rundir import RunDir

BUNDLES = sorted(path.parent for path in (ROOT / "submission_runs").glob("*/bundle.json"))
GPU_FILES = ("env_info.txt", "torch_version.txt", "cuda_check.txt", "training_log.txt", "nvidia_smi.txt", "README.md")
DONE = (
    "`torch.cuda.is_available()` returned `True`", "The GPU was explicitly detected", "Training ran on `device=cuda`",
    "GPU memory was allocated", "The evidence is saved", "No silent CPU fallback",
)  # fmt: skip


def test_the_milestone_of_the_gpu_is_recorded():
    assert ROOT / "submission_runs" / "m40_v1" in BUNDLES


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_a_bundle_verifies(bundle):
    done = tunix_rt("evidence", "verify", bundle)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_bundle_from_before_the_manifest_verifies_without_one_and_takes_none(tmp_path):
    folder = shutil.copytree(ROOT / "submission_runs" / "m40_v1", tmp_path / "copy")
    assert json.loads((folder / "bundle.json").read_text(encoding="utf-8"))["schema"] == "tunix-rt/bundle/1"
    assert bundle_problems(folder) == []
    (folder / "run_manifest.json").write_text("{}\n")
    write_hashes(RunDir(folder))
    assert bundle_problems(folder) == ["not of the run: run_manifest.json"]


def test_the_gpu_bundle_has_every_file_and_every_point_of_the_definition_of_done():
    bundle = ROOT / "submission_runs" / "m40_v1"
    assert all((bundle / name).stat().st_size > 50 for name in GPU_FILES)
    readme = (bundle / "README.md").read_text(encoding="utf-8")
    assert [point for point in DONE if f"- [x] {point}" not in readme] == []
    says = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    assert (says["device"], says["steps_completed"], says["weights"]) == ("cuda", 50, "random")
    assert "no evidence of learning" in readme


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_a_bundle_was_made_from_a_commit_of_this_repository(bundle):
    if subprocess.run(["git", "-C", ROOT, "rev-parse", "--git-dir"], capture_output=True).returncode:
        pytest.skip("this copy has no history")
    says = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    if subprocess.run(["git", "-C", ROOT, "cat-file", "-e", says["commit"]], capture_output=True).returncode:
        pytest.skip("the history here does not reach back to the bundle's commit")
    assert find_commit(says["source_sha256"], ROOT) == says["commit"]
