"""A run becomes a bundle: from committed source, complete or not at all, and verified as a reader would. Bundles become a zip.

The runs are those that recorded bundles were made of.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.bundles import git
from tests.forging.bases import run_of
from tests.forging.edits import edited
from tests.forging.sealing import reseal_sums
from tests.program import ROOT, environment
from tunix_rt import assets
from tunix_rt.cli.main import cli
from tunix_rt.errors import ConfigError, EvidenceError, TunixError
from tunix_rt.evidence.collect import Extras, collect, package
from tunix_rt.evidence.examine import examine
from tunix_rt.runs.checksums import parse_sums
from tunix_rt.storage import write_text

pytestmark = pytest.mark.usefixtures("judged_once", "no_waiting_for_the_disk")

ALWAYS = ["README.md", "SHA256SUMS", "run-SHA256SUMS", "run_manifest.json"]


@pytest.fixture
def home(cpu_run, tmp_path):
    """A copy of the run, to edit."""
    return Path(shutil.copytree(cpu_run, tmp_path / "home"))


@pytest.fixture
def gpu_run(gpu_bundle, tmp_path):
    return run_of(gpu_bundle, tmp_path / "cuda")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["evidence", "collect", *map(str, arguments)])


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def manifest_in(folder: Path) -> dict:
    return json.loads((folder / "run_manifest.json").read_text())


@pytest.fixture
def made(source_repo, tmp_path):
    """Collect in this process; without `to`, into `bundle`."""

    def make(run, to="bundle", *, cpu=None, repository=source_repo, **more):
        return collect(run, tmp_path / to, cpu_folder=cpu, repository=repository, **more)

    return make


# --- what a bundle contains -------------------------------------------------------------------------------------------


def test_a_bundle_contains_the_facts_of_the_run_and_no_weights(cpu_run, source_repo, tmp_path):
    bundle = tmp_path / "m39_cpu_v1"
    done = invoke(cpu_run, "--to", bundle, "--repository", source_repo, "--json")
    assert done.exit_code == 0, done.output
    hashes, _ = parse_sums((cpu_run / "SHA256SUMS").read_bytes())
    facts = [name for name in hashes if not name.startswith(("checkpoints/", "final_model/"))]
    assert files_of(bundle) == sorted([*facts, "final_model/config.json", *ALWAYS])
    manifest = manifest_in(bundle)
    assert json.loads(done.stdout) == manifest and manifest["run_id"] == "m39_cpu_v1"
    assert manifest["commit"] == git(source_repo, "rev-parse", "HEAD")
    assert manifest["left_out"] == {name: digest for name, digest in hashes.items() if not (bundle / name).exists()}
    assert "final_model/model.safetensors" in manifest["left_out"]
    assert (bundle / "run-SHA256SUMS").read_bytes() == (cpu_run / "SHA256SUMS").read_bytes()
    assert not re.search(r"/(tmp|root|home|work)/", (bundle / "README.md").read_text() + json.dumps(manifest))
    assert examine(bundle).level == "L1"


def test_a_wheel_names_the_commit_it_was_built_from_for_runs_of_its_own_source_alone(
    tiny_run, cpu_run, made, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # no clone
    monkeypatch.setattr(assets, "_COMMIT", tmp_path / "commit.txt")
    (tmp_path / "commit.txt").write_text("a" * 40 + "\n")
    assert made(tiny_run, repository=None).manifest["commit"] == "a" * 40
    with pytest.raises(ConfigError, match="repository"):
        made(cpu_run, "older", repository=None)
    (tmp_path / "commit.txt").write_text((ROOT / "COMMIT").read_text())  # as in a clone
    with pytest.raises(ConfigError, match="repository"):
        made(tiny_run, "unknown", repository=None)


@pytest.mark.slow
def test_checkpoints_and_the_model_are_included_within_the_bytes_allowed(tiny_run, tiny_repo, made, tmp_path):
    with pytest.raises(EvidenceError, match=r"the limit is 1 MiB") as error:
        made(tiny_run, repository=tiny_repo, extras=Extras(checkpoints=True, most_mib=1))
    assert "--checkpoint-mib" in error.value.fix
    manifest = made(tiny_run, repository=tiny_repo, extras=Extras(checkpoints=True, model=True)).manifest
    names = set(files_of(tmp_path / "bundle"))
    assert {"checkpoints/step-000004/model.safetensors", "final_model/model.safetensors"} <= names
    assert {Path(name).parts[1] for name in manifest["left_out"]} == {"step-000006"}  # no replay starts there
    with (tmp_path / "bundle" / "final_model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert {finding.check for finding in examine(tmp_path / "bundle").findings} == {"hashes"}


def test_a_run_brought_home_may_lack_its_weights_and_nothing_else(home, made, tmp_path):
    for name in ("tensorboard/events", ".DS_Store"):  # of trackers and file managers
        write_text(home / name, "x")
    made(home, "first")
    assert not {"tensorboard/events", ".DS_Store"} & set(files_of(tmp_path / "first"))
    with pytest.raises(EvidenceError, match="lacks final_model/"):
        made(home, extras=Extras(model=True))
    (home / "plan.json").unlink()
    (home / "samples.md").write_text("")
    with pytest.raises(EvidenceError, match="does not verify") as error:
        made(home)
    assert "plan.json: missing" in error.value.problem and "samples.md: changed" in error.value.problem
    assert "safetensors" not in error.value.problem


# --- a GPU run and its run on the CPU ---------------------------------------------------------------------------------


def test_a_gpu_run_is_compared_with_the_same_configuration_on_the_cpu(gpu_run, gpu_bundle, made, tmp_path):
    with pytest.raises(EvidenceError, match="the same configuration on the CPU") as error:
        made(gpu_run)
    assert "--device cpu" in error.value.fix and "--without-cpu-run" in error.value.fix
    manifest, recorded = made(gpu_run, cpu=gpu_bundle / "cpu").manifest, manifest_in(gpu_bundle)
    named = ("run_id", "commit")
    assert manifest == recorded | {name: manifest[name] for name in named}, "the same run gives the same manifest"
    names = files_of(tmp_path / "bundle")
    assert {"cpu/SHA256SUMS", "cpu/training_log.txt", "cpu/metrics.jsonl", "cpu/config.yaml"} <= set(names)
    assert not any(name.endswith(".safetensors") for name in names)
    page, ratio = (tmp_path / "bundle" / "README.md").read_text(), manifest["tokens_per_second"]["ratio"]
    assert page.count("- [x] ") == 7 and ratio > 1 and f"GPU against CPU | {ratio:,.2f} times" in page
    assert "ratio" not in made(gpu_run, "alone", without_cpu=True).manifest["tokens_per_second"]
    shutil.rmtree(tmp_path / "bundle" / "cpu")
    assert examine(tmp_path / "bundle").findings


def test_another_run_on_the_cpu_is_refused(gpu_run, cpu_run, home, made, tmp_path):
    with pytest.raises(ConfigError, match="on the CPU"):
        made(cpu_run, cpu=home)
    with pytest.raises(EvidenceError, match=r"is another run\n  result\.json: ran on cuda"):
        made(gpu_run, cpu=gpu_run)
    with edited(home / "result.json") as result:
        result |= {"status": "preempted", "exit_code": 7}
    reseal_sums(home)
    with pytest.raises(EvidenceError, match="'preempted', not completed") as error:
        made(gpu_run, cpu=home)
    assert "--resume" in error.value.fix
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["cuda_check.txt", "nvidia_smi.txt", "gpu_memory"])
def test_a_gpu_run_without_its_evidence_is_refused(gpu_run, made, name):
    if name == "gpu_memory":
        with edited(gpu_run / "result.json") as result:
            del result["gpu_memory"]
    else:
        (gpu_run / name).unlink()
    reseal_sums(gpu_run)
    with pytest.raises(EvidenceError, match=f"{name}: missing|GPU memory"):
        made(gpu_run, without_cpu=True)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_bundle_is_never_overwritten_and_a_refusal_leaves_nothing(cpu_bundle, cpu_run, home, source_repo, tmp_path):
    def words(run, to, code, *more):
        done = invoke(run, "--to", to, "--repository", source_repo, *more)
        assert done.exit_code == code and "  fix: " in done.stderr, done.output
        return done.stderr

    before = {name: (cpu_bundle / name).read_bytes() for name in files_of(cpu_bundle)}
    assert "never overwritten" in words(cpu_run, cpu_bundle, 2)
    assert {name: (cpu_bundle / name).read_bytes() for name in files_of(cpu_bundle)} == before
    assert "inside the run" in words(home, home / "bundle", 2)
    assert "is a bundle" in words(cpu_bundle, tmp_path / "new" / "bundle", 6)
    assert "is a placeholder" in words(cpu_run, tmp_path / "new" / "bundle", 2, "--run-id", "TODO")
    assert list(tmp_path.iterdir()) == [home]


def test_a_run_from_uncommitted_source_is_refused(cpu_run, made, tmp_path):
    other = tmp_path / "other"
    write_text(other / "src" / "tunix_rt" / "errors.py", "# another\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "another source"]):
        git(other, *arguments)
    with pytest.raises(EvidenceError, match="has the source of this run") as error:
        made(cpu_run, repository=other)
    assert "commit that source" in error.value.fix and not (tmp_path / "bundle").exists()


def test_a_link_in_a_run_is_refused_unread(home, made, tmp_path):
    write_text(tmp_path / "private", "a secret of somebody")
    (home / "env_info.txt").unlink()
    (home / "env_info.txt").symlink_to(tmp_path / "private")
    with pytest.raises(EvidenceError, match=r"env_info\.txt: a symbolic link"):
        made(home)
    assert not (tmp_path / "bundle").exists()


def test_a_secret_is_never_collected_and_a_path_of_the_machine_is_reported(home, made, tmp_path):
    log, samples = ((home / name).read_text() for name in ("training_log.txt", "samples.md"))
    write_text(home / "training_log.txt", f"{log}models in /home/somebody/models\n")
    write_text(home / "samples.md", f"{samples}Her basic salary is 300.\n")
    reseal_sums(home)
    assert f"training_log.txt:{len(log.splitlines()) + 1}: /home/somebody/models" in made(home).places
    token = "hf_" + "a1" * 17
    write_text(home / "env_info.txt", f"ram: 8 GiB\nHF_TOKEN: {token}\n")
    reseal_sums(home)
    with pytest.raises(EvidenceError, match=r"env_info.txt:2 contains what looks like a token") as error:
        made(home, "second")
    assert token not in str(error.value) and not (tmp_path / "second").exists()


def test_a_collect_that_is_interrupted_leaves_no_file(home, made, tmp_path, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("tunix_rt.storage.settle_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made(home, "new/v1")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.slow
def test_the_command_in_the_readme_reproduces_the_run(tiny_bundle, tmp_path):
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    block = re.search(r"## Reproduce\n.*?```bash\n(.*?)```", (bundle / "README.md").read_text(), re.DOTALL)[1]
    program = tmp_path / "bin" / "tunix-rt"
    write_text(program, f'#!/bin/sh\nexec "{sys.executable}" -m tunix_rt "$@"\n')
    program.chmod(0o755)
    env = environment(PATH=f"{program.parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-ec", block], cwd=bundle, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    recorded, again = (
        [json.loads(line)["loss_hex"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (bundle, tmp_path / "reproduced")
    )
    assert again == recorded and examine(bundle).findings == []


# --- the zip ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(cpu_bundle, tmp_path):
    """As much of a repository as a package is made of."""
    root = tmp_path / "clone"
    for name in ("README.md", "LICENSE", "training/configs/a.yaml", "notebooks/a.ipynb", "notebooks/.DS_Store"):
        write_text(root / name, name)
    shutil.copytree(cpu_bundle, root / "submission_runs" / "v1")
    return root


def test_a_package_is_the_same_bytes_whenever_and_by_whomever_its_files_were_written(clone, tmp_path):
    first = package(clone, tmp_path / "one.zip")
    os.utime(clone / "README.md", (0, 0))
    (clone / "README.md").chmod(0o600)
    second = package(clone, tmp_path / "two.zip")
    assert first.sha256 == second.sha256 and first.bundles == ("v1",)
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.namelist() == sorted(set(files_of(clone)) - {"notebooks/.DS_Store"})
        assert archive.read("notebooks/a.ipynb") == b"notebooks/a.ipynb"
    with pytest.raises(ConfigError, match="exists"):
        package(clone, tmp_path / "one.zip")


def spoil(clone: Path, private: Path, how: str) -> None:
    if how == "changed bundle":
        with (clone / "submission_runs" / "v1" / "training_log.txt").open("a") as log:
            log.write("accuracy 100 %\n")
    elif how == "huge file":
        with (clone / "notebooks" / "big.ipynb").open("wb") as file:
            file.truncate(257 * 2**20)
    else:
        if (clone / how).exists():
            (clone / how).rename(private / "moved")
        (clone / how).symlink_to(private)


@pytest.mark.parametrize("how", ["LICENSE", "notebooks", "training", "notebooks/more", "changed bundle", "huge file"])
def test_nothing_is_packed_through_a_link_or_beside_a_bundle_that_does_not_verify(clone, tmp_path, how):
    write_text(tmp_path / "private" / "configs" / "key", "private")
    spoil(clone, tmp_path / "private", how)
    with pytest.raises(TunixError, match=r"symbolic link|changed|big\.ipynb: 269,484,032 bytes"):
        package(clone, tmp_path / "one.zip")
    assert list(tmp_path.glob("*.zip")) == [] and list(tmp_path.glob(".*")) == []
