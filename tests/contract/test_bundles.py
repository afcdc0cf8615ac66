"""The bundles in submission_runs: each holds what the contract names, verifies, and was made from a commit of this repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.program import ROOT, environment, tunix_rt
from tunix_rt.errors import ConfigError, EvidenceError
from tunix_rt.evidence.bundle import bundle_problems
from tunix_rt.evidence.claims import SCHEMA
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.evidence.packaging import package
from tunix_rt.evidence.source import find_commit
from tunix_rt.evidence.verifying import examine
from tunix_rt.rundir import RunDir

BUNDLES = sorted(path.parent for path in (ROOT / "submission_runs").glob("*/bundle.json"))
GPU_FILES = ("env_info.txt", "torch_version.txt", "cuda_check.txt", "training_log.txt", "nvidia_smi.txt", "README.md")
DONE = (
    "`torch.cuda.is_available()` returned `True`", "The GPU was explicitly detected", "Training ran on `device=cuda`",
    "GPU memory was allocated", "The evidence is saved", "No silent CPU fallback",
)  # fmt: skip


MILESTONES = {"m40": ("cuda", "torch", 50), "m39": ("cuda", "jax", 300), "m39_cpu": ("cpu", "torch", 20)}
"""Device, engine and steps of each milestone. Its first bundle stays; the newest is what counts."""


def newest(milestone: str) -> Path:
    """The bundle of that name with the highest version."""
    versions = {int(path.name.removeprefix(f"{milestone}_v")): path for path in BUNDLES
                if re.fullmatch(rf"{milestone}_v\d+", path.name)}  # fmt: skip
    return versions[max(versions)]


@pytest.mark.parametrize("milestone", MILESTONES)
def test_a_milestone_is_recorded_by_this_version_and_on_the_device_it_names(milestone):
    assert ROOT / "submission_runs" / f"{milestone}_v1" in BUNDLES
    says = json.loads((newest(milestone) / "bundle.json").read_text(encoding="utf-8"))
    assert says["schema"] == SCHEMA
    device, backend, steps = MILESTONES[milestone]
    assert (says["device"], says["backend"]) == (device, backend) and says["steps_completed"] >= steps


@pytest.mark.parametrize("bundle", BUNDLES, ids=lambda path: path.name)
def test_a_bundle_verifies(bundle):
    examined = examine(bundle)
    assert examined.findings == ()
    told = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    assert any(":" not in one for one in examined.unmade) == (told["schema"] != "tunix-rt/bundle/3")


def test_an_older_bundle_says_which_checks_cannot_be_made_and_what_its_level_means():
    done = tunix_rt("evidence", "verify", ROOT / "submission_runs" / "m39_v1")
    assert done.returncode == 0, done.stderr
    older, verdict, commit, hardware = done.stdout.splitlines()
    assert older.startswith("an older bundle: 7 of ") and "rows, batch-order" in older
    assert verdict.endswith("level L1 (consistent); not regenerated, not replayed")
    assert (commit, hardware) == ("commit: not looked up; add --repository CLONE", "hardware: self-reported")


def test_verifying_a_bundle_loads_neither_torch_nor_jax():
    asked = "import sys; from pathlib import Path; from tunix_rt.evidence.verifying import findings_of; "
    asked += f"assert findings_of(Path({str(BUNDLES[0])!r})) == []; "
    asked += "print(sorted({'torch', 'jax', 'transformers', 'safetensors'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", asked], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_a_bundle_from_before_the_manifest_verifies_without_one_and_takes_none(tmp_path):
    folder = shutil.copytree(ROOT / "submission_runs" / "m40_v1", tmp_path / "copy")
    assert json.loads((folder / "bundle.json").read_text(encoding="utf-8"))["schema"] == "tunix-rt/bundle/1"
    assert bundle_problems(folder) == []
    assert "an older bundle: 8 of " in examine(folder).words and "manifest" in examine(folder).unmade
    (folder / "run_manifest.json").write_text("{}\n")
    write_hashes(RunDir(folder))
    assert bundle_problems(folder) == ["not of the run: run_manifest.json"]


@pytest.mark.parametrize("bundle", [ROOT / "submission_runs" / "m40_v1", newest("m40")], ids=lambda path: path.name)
def test_the_gpu_bundle_has_every_file_and_every_point_of_the_definition_of_done(bundle):
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


@pytest.fixture
def clone(tmp_path):
    """As much of the repository as a package is made of."""
    for name in ("README.md", "LICENSE", "tunix-rt.md"):
        (tmp_path / "clone").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    for name in ("training/configs", "notebooks", "submission_runs/m40_v1"):
        shutil.copytree(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


def test_a_package_is_the_same_bytes_twice_whenever_and_by_whomever_its_files_were_written(clone, tmp_path):
    first = package(clone, tmp_path / "one.zip")
    os.utime(clone / "README.md", (0, 0))
    (clone / "README.md").chmod(0o600)
    second = package(clone, tmp_path / "two.zip")
    assert first.sha256 == second.sha256 and first.bundles == ("m40_v1",)
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        names = archive.namelist()
    assert names == sorted(names) and len(names) == first.files
    assert {"README.md", "submission_runs/m40_v1/bundle.json"} <= set(names)
    with pytest.raises(ConfigError, match="exists"):
        package(clone, tmp_path / "one.zip")


def test_nothing_is_packed_while_a_bundle_does_not_verify(clone, tmp_path):
    with (clone / "submission_runs" / "m40_v1" / "training_log.txt").open("a") as log:
        log.write("2026-11-15T10:55:38Z INFO accuracy 100 %\n")
    with pytest.raises(EvidenceError, match=r"changed: training_log\.txt"):
        package(clone, tmp_path / "one.zip")
    assert list(tmp_path.glob("*.zip")) == [] and list(tmp_path.glob(".*")) == []
