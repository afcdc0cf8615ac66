"""A run becomes a bundle: from committed source, complete or not at all, and verified as a reader would. Bundles become a zip.

There is no GPU here: where one is needed, the files of a CPU run are edited into those of a GPU run and hashed again.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.program import ROOT, environment, refused, tunix_rt
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.errors import ConfigError, EvidenceError, TunixError
from tunix_rt.evidence import collect as collecting
from tunix_rt.evidence.collect import Extras, collect
from tunix_rt.evidence.examine import examine
from tunix_rt.evidence.package import package
from tunix_rt.rundir import json_line, sha256_file, sha256_text, to_plain, write_json, write_text
from tunix_rt.runs.checksums import parse_sums, sums_text

ALWAYS = ["README.md", "SHA256SUMS", "run-SHA256SUMS", "run_manifest.json"]


@pytest.fixture(autouse=True)
def unsynced(monkeypatch):
    """Nothing here is kept: no waiting for the disk in this process."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def home(tiny_run, tmp_path):
    """A copy of the run without its weights, to edit."""
    return Path(shutil.copytree(tiny_run, tmp_path / "home", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture
def gpu_run(tiny_run, tmp_path):
    return dress_as_cuda(tiny_run, tmp_path / "cuda")


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def manifest_in(folder: Path) -> dict:
    return json.loads((folder / "run_manifest.json").read_text())


def reseal(folder: Path) -> None:
    """Hash the files of a run again, but keep the hashes of weights that are not there."""
    known, _ = parse_sums((folder / "SHA256SUMS").read_bytes())
    there = {name: sha256_file(folder / name) for name in files_of(folder) if name not in ("SHA256SUMS", ".lock")}
    write_text(
        folder / "SHA256SUMS", sums_text({name: digest for name, digest in known.items() if "safe" in name} | there)
    )


def edit(path: Path, **changed) -> dict:
    value = json.loads(path.read_text()) | changed
    write_json(path, {name: inner for name, inner in value.items() if inner is not ...})
    return value


def dress_as_cuda(run: Path, folder: Path) -> Path:
    """A copy of the CPU run with the files of a run on an H200 that was ten times as fast, chained and hashed again."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = (folder / "config.yaml").read_text()
    write_text(folder / "config.yaml", config.replace("device: cpu", "device: cuda"))
    edit(folder / "precommit.json", device="cuda", config_sha256=sha256_file(folder / "config.yaml"))
    facts = json.loads((ROOT / "tests" / "facts" / "h200-masked-empty.json").read_text())["facts"] | {"environment": {}}
    about = {"name": "NVIDIA H200", "capability": [9, 0], "uuid": "GPU-1"}
    tested = {"name": "product", "ok": True, "detail": "", "seconds": 0.1, "figures": {}}
    edit(
        folder / "doctor.json",
        facts=to_plain(facts_from_json(facts)),
        choice={
            "device": "cuda", "kind": "NVIDIA H200", "count": 1, "memory_bytes": 150_754_820_096, "free_bytes": 0,
            "reason": "asked for", "capability": [9, 0],
        },
        proof={
            "backend": "torch", "device": "cuda", "dtype": "float32", "head_size": 64, "results": [tested], "about": about,
            "pid": 4712, "seconds": 1.0, "problem": None, "ok": True,
        },
    )  # fmt: skip
    processes = json.loads((folder / "processes.json").read_text())["processes"]
    for process in processes:
        process["machine"] |= {"device": "cuda", "gpu": {"name": "NVIDIA H200", "capability": "9.0"}}
    edit(folder / "processes.json", processes=processes)
    lines, heads = [], [sha256_file(folder / "precommit.json")]
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        lines.append(json_line(step | {"prev": heads[-1], "seconds": step["seconds"] / 10}))
        heads.append(sha256_text(lines[-1].removesuffix("\n")))
    write_text(folder / "metrics.jsonl", "".join(lines))
    entries = json.loads((folder / "checkpoints.json").read_text())["checkpoints"]
    edit(folder / "checkpoints.json", checkpoints=[one | {"metrics_head": heads[one["step"]]} for one in entries])
    sample = {"step": 6, "pid": processes[0]["pid"], "used_bytes": 3_000_000_000, "by": "nvml"}
    at = json.loads((folder / "result.json").read_text())["finished"]
    edit(
        folder / "result.json", device="cuda", run_id=heads[0], metrics_head=heads[-1], gpu_memory=[sample | {"at": at}]
    )
    edit(folder / "eval_summary.json", device="cuda")
    for name in ("cuda_check.txt", "nvidia_smi.txt"):
        write_text(folder / name, "NVIDIA H200\n")
    reseal(folder)
    return folder


@pytest.fixture
def made(tiny_repo, tmp_path):
    """Collect in this process; without `to`, into `bundle`."""

    def make(run, to="bundle", *, cpu=None, **more):
        return collect(run, tmp_path / to, cpu_folder=cpu, repository=tiny_repo, **more)

    return make


# --- what a bundle contains -------------------------------------------------------------------------------------------


def test_a_bundle_contains_the_facts_of_the_run_and_no_weights(tiny_run, tiny_repo, tmp_path):
    done = tunix_rt(
        "evidence", "collect", tiny_run, "--to", tmp_path / "m39_cpu_v1", "--repository", tiny_repo, "--json"
    )
    assert done.returncode == 0, done.stderr
    bundle = tmp_path / "m39_cpu_v1"
    heavy = ("checkpoints/", "final_model/")
    facts = [name for name in files_of(tiny_run) if not name.startswith(heavy) and name not in (".lock", "SHA256SUMS")]
    assert files_of(bundle) == sorted([*facts, "final_model/config.json", *ALWAYS])
    manifest = manifest_in(bundle)
    assert json.loads(done.stdout) == manifest and manifest["run_id"] == "m39_cpu_v1"
    head = subprocess.run(["git", "-C", tiny_repo, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert manifest["commit"] == head.stdout.strip()
    weights = (tiny_run / "final_model" / "model.safetensors").read_bytes()
    assert manifest["left_out"]["final_model/model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert set(manifest["left_out"]) == {name for name in files_of(tiny_run) if name.startswith(heavy)} - set(
        files_of(bundle)
    )
    assert (bundle / "run-SHA256SUMS").read_bytes() == (tiny_run / "SHA256SUMS").read_bytes()
    assert not re.search(r"/(tmp|root|home|work)/", (bundle / "README.md").read_text() + json.dumps(manifest))
    verified = tunix_rt("evidence", "verify", bundle, "--repository", tiny_repo)
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_checkpoints_and_the_model_are_included_within_the_bytes_allowed(tiny_run, made, tmp_path):
    with pytest.raises(EvidenceError, match=r"the limit is 1 MiB") as error:
        made(tiny_run, extras=Extras(checkpoints=True, most_mib=1))
    assert "--checkpoint-mib" in error.value.fix
    manifest = made(tiny_run, extras=Extras(checkpoints=True, model=True)).manifest
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
    with pytest.raises(EvidenceError, match=r"lacks final_model/model\.safetensors"):
        made(home, extras=Extras(model=True))
    (home / "plan.json").unlink()
    (home / "samples.md").write_text("")
    with pytest.raises(EvidenceError, match="does not verify") as error:
        made(home)
    assert "plan.json: missing" in error.value.problem and "samples.md: changed" in error.value.problem
    assert "safetensors" not in error.value.problem


# --- a GPU run and its run on the CPU ---------------------------------------------------------------------------------


def test_a_gpu_run_is_compared_with_the_same_configuration_on_the_cpu(gpu_run, tiny_run, made, tmp_path):
    with pytest.raises(EvidenceError, match="the same configuration on the CPU") as error:
        made(gpu_run)
    assert "--device cpu" in error.value.fix and "--without-cpu-run" in error.value.fix
    manifest = made(gpu_run, cpu=tiny_run).manifest
    assert manifest["tokens_per_second"]["ratio"] == pytest.approx(10)
    assert manifest["hardware"]["name"] == "NVIDIA H200"
    names = files_of(tmp_path / "bundle")
    assert {"cpu/SHA256SUMS", "cpu/training_log.txt", "cpu/metrics.jsonl", "cpu/config.yaml"} <= set(names)
    assert not any(name.endswith(".safetensors") for name in names)
    page = (tmp_path / "bundle" / "README.md").read_text()
    assert page.count("- [x] ") == 7 and "GPU against CPU | 10.00 times" in page
    assert "ratio" not in made(gpu_run, "alone", without_cpu=True).manifest["tokens_per_second"]
    shutil.rmtree(tmp_path / "bundle" / "cpu")
    assert examine(tmp_path / "bundle").findings


def test_another_run_on_the_cpu_is_refused(gpu_run, tiny_run, home, made, tmp_path):
    with pytest.raises(ConfigError, match="on the CPU"):
        made(tiny_run, cpu=home)
    with pytest.raises(EvidenceError, match=r"is another run\n  result\.json: ran on cuda"):
        made(gpu_run, cpu=gpu_run)
    edit(home / "result.json", status="preempted", exit_code=7)
    reseal(home)
    with pytest.raises(EvidenceError, match="'preempted', not completed") as error:
        made(gpu_run, cpu=home)
    assert "--resume" in error.value.fix
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["cuda_check.txt", "nvidia_smi.txt", "gpu_memory"])
def test_a_gpu_run_without_its_evidence_is_refused(gpu_run, made, name):
    if name == "gpu_memory":
        edit(gpu_run / "result.json", gpu_memory=...)
    else:
        (gpu_run / name).unlink()
        sums = [line for line in (gpu_run / "SHA256SUMS").read_text().splitlines() if not line.endswith(name)]
        write_text(gpu_run / "SHA256SUMS", "".join(f"{line}\n" for line in sums))
    reseal(gpu_run)
    with pytest.raises(EvidenceError, match=f"{name}: missing|GPU memory"):
        made(gpu_run, without_cpu=True)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_bundle_is_never_overwritten_and_a_refusal_leaves_nothing(tiny_bundle, tiny_run, home, tiny_repo, tmp_path):
    def words(run, to, code, *more):
        return refused(tunix_rt("evidence", "collect", run, "--to", to, "--repository", tiny_repo, *more), code)

    before = {name: (tiny_bundle / name).read_bytes() for name in files_of(tiny_bundle)}
    assert "never overwritten" in words(tiny_run, tiny_bundle, 2)
    assert {name: (tiny_bundle / name).read_bytes() for name in files_of(tiny_bundle)} == before
    assert "inside the run" in words(home, home / "bundle", 2)
    assert "is a bundle" in words(tiny_bundle, tmp_path / "new" / "bundle", 6)
    assert "is a placeholder" in words(tiny_run, tmp_path / "new" / "bundle", 2, "--run-id", "TODO")
    assert list(tmp_path.iterdir()) == [home]


def test_a_run_from_uncommitted_source_is_refused(tiny_run, tmp_path):
    other = tmp_path / "other"
    write_text(other / "src" / "tunix_rt" / "errors.py", "# another\n")
    git = ["git", "-C", other, "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "another source"]):
        subprocess.run([*git, *arguments], check=True)
    with pytest.raises(EvidenceError, match="has the source of this run") as error:
        collect(tiny_run, tmp_path / "bundle", cpu_folder=None, repository=other)
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
    reseal(home)
    assert f"training_log.txt:{len(log.splitlines()) + 1}: /home/somebody/models" in made(home).places
    token = "hf_" + "a1" * 17
    write_text(home / "env_info.txt", f"ram: 8 GiB\nHF_TOKEN: {token}\n")
    reseal(home)
    with pytest.raises(EvidenceError, match=r"env_info.txt:2 contains what looks like a token") as error:
        made(home, "second")
    assert token not in str(error.value) and not (tmp_path / "second").exists()


def test_a_collect_that_is_interrupted_leaves_no_file(home, made, tmp_path, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(collecting, "settle_files", interrupt)
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
def clone(tiny_bundle, tmp_path):
    """As much of a repository as a package is made of."""
    root = tmp_path / "clone"
    for name in ("README.md", "LICENSE", "training/configs/a.yaml", "notebooks/a.ipynb", "notebooks/.DS_Store"):
        write_text(root / name, name)
    shutil.copytree(tiny_bundle, root / "submission_runs" / "v1")
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
