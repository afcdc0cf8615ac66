"""A run becomes a bundle, by the real program: from committed source, whole or not at all, and every byte accounted for.

There is no GPU here: where one is needed, a run on the CPU is dressed as one on a GPU (`tests/bundles.py`). The program
that refuses or collects it is the real one.
"""

import hashlib
import json
import re
import shutil
import subprocess

import pytest

from tests.bundles import dress_as_cuda, edit_json
from tests.program import ROOT, refused, tunix_rt
from tunix_rt.evidence.bundle import bundle_problems
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.rundir import RunDir, write_text

SMALL = ["--max-steps", 3, "--set", "training.save_steps=3", "--set", "training.eval_steps=3"]
SMALL += ["--set", "evaluation.max_new_tokens=4"]


def git(repo, *arguments):
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(repo), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A repository with the source that makes the run, so that nobody's edit of the working tree comes between."""
    root = tmp_path_factory.mktemp("repo")
    ignore = shutil.ignore_patterns("__pycache__", "packaged")
    shutil.copytree(ROOT / "src" / "tunix_rt", root / "src" / "tunix_rt", ignore=ignore)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "source")
    return root


@pytest.fixture(scope="module")
def run(repo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "cpu"
    done = tunix_rt(
        "train", "smoke_tiny", "--device", "cpu", "--output", folder, *SMALL, PYTHONPATH=str(repo / "src")
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def collect(run, output, repo, *more):
    return tunix_rt("evidence", "collect", run, "--output", output, "--repository", repo, *more)


@pytest.fixture(scope="module")
def bundle(run, repo, tmp_path_factory):
    output = tmp_path_factory.mktemp("bundles") / "new" / "v1"
    done = collect(run, output, repo)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def gpu_run(run, tmp_path_factory):
    return dress_as_cuda(run, tmp_path_factory.mktemp("dressed") / "cuda")


@pytest.fixture(scope="module")
def gpu_bundle(gpu_run, run, repo, tmp_path_factory):
    output = tmp_path_factory.mktemp("gpu-bundles") / "v1"
    done = collect(gpu_run, output, repo, "--cpu-run", run)
    assert done.returncode == 0, done.stderr
    return output


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_bundle_holds_the_facts_of_the_run_and_no_weights(bundle, run, repo):
    names = files_of(bundle)
    skipped = ("checkpoints/", "final_model/", "tensorboard/", ".lock")
    wanted = [name for name in files_of(run) if not name.startswith(skipped)]
    assert names == sorted([*wanted, "bundle.json", "README.md", "run-SHA256SUMS"])
    says = json.loads((bundle / "bundle.json").read_text())
    assert says["schema"] == "tunix-rt/bundle/1" and says["kind"] == "cpu" and says["device"] == "cpu"
    assert says["commit"] == git(repo, "rev-parse", "HEAD")
    weights = run / "final_model" / "model.safetensors"
    assert says["left_out"]["final_model/model.safetensors"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert set(says["left_out"]) == {name for name in files_of(run) if name.startswith(skipped[:3])}
    assert not re.search(r"/(tmp|root|home|work)/", (bundle / "README.md").read_text() + json.dumps(says))


def test_a_bundle_verifies(bundle, gpu_bundle):
    for folder in (bundle, gpu_bundle):
        done = tunix_rt("evidence", "verify", folder)
        assert (done.returncode, done.stdout) == (0, f"{folder}: consistent with itself; not replayed\n"), done.stdout


def test_a_gpu_bundle_holds_its_speed_against_the_cpu(gpu_bundle):
    says = json.loads((gpu_bundle / "bundle.json").read_text())
    assert says["tokens_per_second"]["ratio"] == pytest.approx(10)  # as the dressed run was made faster
    assert says["gpu"] == {
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "memory_bytes": 150_754_820_096,
        "driver": "580.95.05",
        "driver_cuda": "13.0",
    }
    assert "cpu/metrics.jsonl" in files_of(gpu_bundle) and "cpu/training_log.txt" in files_of(gpu_bundle)
    assert (gpu_bundle / "README.md").read_text().count("- [x] ") == 6


@pytest.mark.parametrize("which", ["bundle", "gpu_bundle"])
def test_a_changed_byte_in_any_file_of_a_bundle_is_found(which, request, tmp_path):
    folder = shutil.copytree(request.getfixturevalue(which), tmp_path / "copy")
    for name in files_of(folder):
        original = (folder / name).read_bytes()
        changed = bytearray(original)
        changed[len(changed) // 2] ^= 1
        (folder / name).write_bytes(changed)
        assert bundle_problems(folder), name
        (folder / name).write_bytes(original)
    assert bundle_problems(folder) == []


def test_no_garbage_in_place_of_a_file_causes_a_traceback_and_all_of_it_is_found(gpu_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    for name in files_of(folder):
        original = (folder / name).read_bytes()
        for garbage in (
            b"",
            b"\xff\x00\n{]\n",
            b"[1]\n",
            b"null\n",
            b'{"facts": [], "choice": 1, "proof": {"results": [1]}}\n',
        ):
            (folder / name).write_bytes(garbage)
            if name not in ("SHA256SUMS", "README.md"):
                write_hashes(RunDir(folder))
            assert bundle_problems(folder), (name, garbage)
            (folder / name).write_bytes(original)
            write_hashes(RunDir(folder))
    assert bundle_problems(folder) == []


def test_every_figure_of_a_bundle_is_computed_again_even_with_new_hashes(gpu_bundle, tmp_path):
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    original = json.loads((folder / "bundle.json").read_text())

    def found(says):
        write_text(folder / "bundle.json", json.dumps(says))
        write_hashes(RunDir(folder))
        return bundle_problems(folder)

    for name, value in original.items():
        for inner in value if isinstance(value, dict) else [None]:
            says = json.loads(json.dumps(original))
            holder, key = (says, name) if inner is None else (says[name], inner)
            holder[key] = 0.5
            assert any(name in problem for problem in found(says)), (name, inner)
            del holder[key]
            assert found(says), (name, inner)
    assert found(original | {"accuracy": 1.0}) == ["bundle.json: 'accuracy' is said by no file"]
    assert found(original) == []


@pytest.mark.parametrize(
    "name", ["training_log.txt", "cpu/metrics.jsonl", "config.yaml", "cpu/config.yaml", "extra.txt"]
)
def test_a_file_that_is_not_as_the_run_left_it_is_found_even_with_new_hashes(gpu_bundle, tmp_path, name):
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    with (folder / name).open("a") as file:
        file.write("\n")
    write_hashes(RunDir(folder))
    assert any(name in problem for problem in bundle_problems(folder))


def test_a_bundle_is_never_written_over_and_a_refusal_leaves_nothing(bundle, run, repo, tmp_path):
    before = {name: (bundle / name).read_bytes() for name in files_of(bundle)}
    assert "never written over" in refused(collect(run, bundle, repo), 2)
    assert {name: (bundle / name).read_bytes() for name in files_of(bundle)} == before
    assert "inside the run" in refused(collect(run, run / "bundle", repo), 2)
    assert "give a run folder" in refused(collect(bundle, tmp_path / "b", repo), 6)
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_uncommitted_source_is_refused(run, repo, tmp_path):
    other = shutil.copytree(repo, tmp_path / "other")
    shutil.rmtree(other / ".git")
    (other / "src" / "tunix_rt" / "errors.py").write_text("# another\n")
    git(other, "init", "-q")
    git(other, "add", "-A")
    git(other, "commit", "-q", "-m", "another source")
    words = refused(collect(run, tmp_path / "bundle", other), 6)
    assert "has the source this run was made from" in words and "commit that source" in words
    assert not (tmp_path / "bundle").exists()


def test_a_run_brought_home_may_lack_its_weights_and_nothing_else(run, repo, tmp_path):
    home = shutil.copytree(run, tmp_path / "home")
    for weights in home.rglob("*.safetensors"):
        weights.unlink()
    done = collect(home, tmp_path / "bundle", repo, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    readme = (tmp_path / "bundle" / "README.md").read_text()
    assert "Weights are not in the bundle; their hashes are" in readme
    assert "`checkpoints/step-000003/optimizer.safetensors`" in readme
    (home / "plan.json").unlink()
    (home / "samples.md").write_text("")
    words = refused(collect(home, tmp_path / "second", repo), 6)
    assert "missing: plan.json" in words and "changed: samples.md" in words and "safetensors" not in words


def test_places_of_the_machine_are_named_in_warnings(run, repo, tmp_path):
    home = shutil.copytree(run, tmp_path / "home")
    write_text(home / "samples.md", "first\nkept in /home/somebody/models\n")
    write_hashes(RunDir(home))
    done = collect(home, tmp_path / "bundle", repo)
    assert done.returncode == 0
    assert "warning: a path of the machine in samples.md:2: /home/somebody/models" in done.stderr


def test_a_gpu_run_needs_its_run_on_the_cpu_and_that_of_the_same_configuration(gpu_run, run, repo, tmp_path):
    words = refused(collect(gpu_run, tmp_path / "bundle", repo), 6)
    assert "same configuration on the CPU" in words and "--device cpu" in words and "--cpu-run" in words
    assert "leave --cpu-run out" in refused(collect(run, tmp_path / "bundle", repo, "--cpu-run", run), 2)
    other = shutil.copytree(run, tmp_path / "other")
    (other / "metrics.jsonl").write_text("")
    assert "does not verify" in refused(collect(gpu_run, tmp_path / "bundle", repo, "--cpu-run", other), 6)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda_check.txt", "cuda_check.txt is missing"),
        ("nvidia_smi.txt", "nvidia_smi.txt is missing"),
        ("result.json", "result.json does not tell gpu_memory"),
    ],
)
def test_a_gpu_run_without_its_evidence_is_refused(gpu_run, run, repo, tmp_path, name, words):
    folder = shutil.copytree(gpu_run, tmp_path / "cuda")
    if name == "result.json":
        edit_json(folder / name, gpu_memory=...)
    else:
        (folder / name).unlink()
    write_hashes(RunDir(folder))
    assert words in refused(collect(folder, tmp_path / "bundle", repo, "--cpu-run", run), 6)
    assert not (tmp_path / "bundle").exists()
