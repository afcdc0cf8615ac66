"""A run becomes a bundle, by the real program: from committed source, whole or not at all, and every byte accounted for.

There is no GPU here: where one is needed, a run on the CPU is dressed as one on a GPU (`tests/bundles.py`). The program
that refuses or collects it is the real one.
"""

import hashlib
import json
import re
import shutil

import pytest

from tests.bundles import (
    chain,
    collect,
    dress_as_cuda,
    edit_json,
    edit_text,
    files_of,
    git,
    memory_samples,
    reseal,
)
from tests.program import ROOT, refused, tunix_rt
from tunix_rt.evidence import bundle as bundles
from tunix_rt.evidence.bundle import bundle_problems
from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.rundir import RunDir, write_json, write_text

pytestmark = pytest.mark.usefixtures("judged_once", "unsynced")


@pytest.fixture
def unsynced(monkeypatch):
    """Nothing here is kept: there is no waiting for the disk in this process."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def repo(tiny_repo):
    return tiny_repo


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run


@pytest.fixture(scope="module")
def bundle(tiny_bundle):
    return tiny_bundle


@pytest.fixture(scope="module")
def gpu_run(run, tmp_path_factory):
    return dress_as_cuda(run, tmp_path_factory.mktemp("dressed") / "cuda")


@pytest.fixture(scope="module")
def gpu_bundle(gpu_run, run, repo, tmp_path_factory):
    output = tmp_path_factory.mktemp("gpu-bundles") / "v1"
    done = collect(gpu_run, output, repo, "--cpu-run", run)
    assert done.returncode == 0, done.stderr
    return output


def test_a_bundle_holds_the_facts_of_the_run_and_no_weights(bundle, run, repo):
    names = files_of(bundle)
    skipped = ("checkpoints/", "final_model/", "tensorboard/", ".lock")
    wanted = [name for name in files_of(run) if not name.startswith(skipped) or name == "final_model/config.json"]
    own = ["bundle.json", "run_manifest.json", "provenance.intoto.json", "README.md", "run-SHA256SUMS"]
    assert names == sorted([*wanted, *own])
    says = json.loads((bundle / "bundle.json").read_text())
    assert says["schema"] == "tunix-rt/bundle/3" and says["kind"] == "cpu" and says["device"] == "cpu"
    assert says["commit"] == git(repo, "rev-parse", "HEAD")
    weights = run / "final_model" / "model.safetensors"
    assert says["left_out"]["final_model/model.safetensors"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert set(says["left_out"]) == {name for name in files_of(run) if name.startswith(skipped[:3])} - set(names)
    assert not re.search(r"/(tmp|root|home|work)/", (bundle / "README.md").read_text() + json.dumps(says))


def test_a_bundle_verifies_and_says_whether_the_commit_was_looked_up(bundle, gpu_bundle, repo):
    for folder in (bundle, gpu_bundle):
        done = tunix_rt("evidence", "verify", folder)
        assert done.returncode == 0, done.stdout
        assert done.stdout.splitlines() == [
            f"{folder}: level L1 (consistent); not regenerated, not replayed",
            "commit: not looked up; add --repository CLONE",
            "hardware: self-reported",
        ]
    done = tunix_rt("evidence", "verify", bundle, "--repository", repo)
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, f"commit: found in {repo}")
    asked = json.loads(tunix_rt("evidence", "verify", bundle, "--json").stdout)
    assert asked["verified"] is True and asked["commit_looked_up"] is False
    assert (asked["level"], asked["hardware"], asked["findings"]) == ("L1", "self-reported", [])


def test_a_commit_that_is_not_the_one_of_the_source_is_found_in_a_repository(bundle, run, repo, tmp_path):
    folder = shutil.copytree(bundle, tmp_path / "copy")
    edit_text(folder / "bundle.json", git(repo, "rev-parse", "HEAD"), "c0ffee" + "0" * 34)
    reseal(folder)
    assert bundle_problems(folder) == []  # it agrees with itself
    (problem,) = bundle_problems(folder, repo)
    assert "commit is c0ffee" in problem and git(repo, "rev-parse", "HEAD") in problem
    (problem,) = bundle_problems(folder, tmp_path)
    assert "not a git repository" in problem
    assert "names no commit" in refused(tunix_rt("evidence", "verify", run, "--repository", repo), 2)


def test_the_page_about_bundles_names_every_key_and_every_file_of_the_cpu_run(gpu_bundle):
    page = (ROOT / "docs" / "reference" / "bundle.md").read_text(encoding="utf-8")
    says = json.loads((gpu_bundle / "bundle.json").read_text())
    manifest = json.loads((gpu_bundle / "run_manifest.json").read_text())
    keys, of_manifest = (
        dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page.split(f"## {name}")[1].split("\n## ")[0], flags=re.MULTILINE))
        for name in ("bundle.json", "run_manifest.json")
    )
    assert of_manifest.keys() == manifest.keys()
    assert keys.keys() == says.keys() | {
        "jax",
        "jaxlib",
        "cuda_plugin",
        "to_bring",
    }  # of the other engine; of what is not shipped
    for name in ("host", "tokens_per_second", "gpu", "gpu_memory", "cpu_run"):
        assert says[name].keys() <= set(re.findall(r"`(\w+)`", keys[name])), name
    (cpu,) = re.findall(r"^\| `cpu/` \| (.*) \|$", page, flags=re.MULTILINE)
    assert {f"cpu/{name}" for name in re.findall(r"`([^`]+)`", cpu)} == {
        name for name in files_of(gpu_bundle) if name.startswith("cpu/")
    }


def test_a_gpu_bundle_holds_its_speed_against_the_cpu(gpu_bundle):
    says = json.loads((gpu_bundle / "bundle.json").read_text())
    assert says["tokens_per_second"]["ratio"] == pytest.approx(10)  # as the dressed run was made faster
    assert says["gpu"] == {
        "name": "NVIDIA H200",
        "uuid": "GPU-00000001-51f0-4c1d-9d3e-0f2a6b7c8d9e",
        "compute_capability": "9.0",
        "memory_bytes": 150_754_820_096,
        "driver": "580.95.05",
        "driver_cuda": "13.0",
    }
    assert "cpu/metrics.jsonl" in files_of(gpu_bundle) and "cpu/training_log.txt" in files_of(gpu_bundle)
    assert "cpu/torch_version.txt" in files_of(gpu_bundle)
    assert (gpu_bundle / "README.md").read_text().count("- [x] ") == 7


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


GARBAGE = {
    "empty": b"",
    "not text": b"\xff\x00\n{]\n",
    "a list": b"[1]\n",
    "null": b"null\n",
    "other objects": b'{"facts": [], "choice": 1, "proof": {"results": [1]}}\n',
}


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.slow] * (one != "other objects")) for one in GARBAGE]
)
def test_no_garbage_in_place_of_a_file_causes_a_traceback_and_all_of_it_is_found(kind, gpu_bundle, tmp_path):
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    for name in files_of(folder):
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(GARBAGE[kind])
        if name != "SHA256SUMS":
            write_hashes(RunDir(folder))
        assert bundle_problems(folder), name
        (folder / name).write_bytes(original)
    write_hashes(RunDir(folder))
    assert bundle_problems(folder) == []


def test_every_figure_of_a_bundle_is_computed_again_even_with_new_hashes(gpu_bundle, tmp_path):
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    original = json.loads((folder / "bundle.json").read_text())

    def found(says):
        write_json(folder / "bundle.json", says)
        write_hashes(RunDir(folder))
        return bundle_problems(folder)

    for name, value in original.items():
        for inner in value if isinstance(value, dict) else [None]:
            says = json.loads(json.dumps(original))
            holder, key = (says, name) if inner is None else (says[name], inner)
            holder[key] = 0.5
            assert any(name in problem for problem in found(says)), (name, inner)
            if inner is None:
                del holder[key]
                assert found(says), name
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


@pytest.mark.parametrize("which", ["bundle", "gpu_bundle"])
@pytest.mark.parametrize("text", ["", "# Everything went well\n", "{} "], ids=["emptied", "forged", "a-letter-more"])
def test_a_readme_that_is_not_ours_or_missing_is_found_even_with_new_hashes(which, text, request, tmp_path):
    folder = shutil.copytree(request.getfixturevalue(which), tmp_path / "copy")
    readme = folder / "README.md"
    readme.write_text(text.replace("{}", readme.read_text()))
    write_hashes(RunDir(folder))
    assert bundle_problems(folder) == ["README.md is not what this version of tunix-rt writes of bundle.json"]
    readme.unlink()
    write_hashes(RunDir(folder))
    assert bundle_problems(folder) == ["missing: README.md"]


@pytest.mark.parametrize("name", [".staged-more/weights.bin", "cpu/.notes.staged", ".lock"])
def test_what_no_hash_covers_is_found(gpu_bundle, tmp_path, name):
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("hidden")
    assert bundle_problems(folder) == [f"covered by no hash: '{name.removesuffix('/weights.bin')}'"]


def first_step(name, value):
    return lambda path: path.write_text(re.sub(rf'("{name}": )[^,}}]+', rf"\g<1>{value}", path.read_text(), count=1))


def set_json(**changed):
    return lambda path: edit_json(path, **changed)


def swap(old, new):
    return lambda path: edit_text(path, old, new)


def append(text):
    return lambda path: path.write_text(path.read_text() + text)


def inner(place, **changed):
    """Set values of the object under a dotted name."""

    def edit(path):
        told = json.loads(path.read_text())
        found = told
        for part in place.split("."):
            found = found[int(part) if part.isdigit() else part]
        found |= changed
        write_text(path, json.dumps(told))

    return edit


FORGERIES = {
    "source": ("precommit.json", inner("source_files", **{"errors.py": "0" * 64}), "not the hash of source_files"),
    "cpu-source": (
        "cpu/precommit.json",
        inner("source_files", **{"errors.py": "0" * 64}),
        "cpu/precommit.json: source",
    ),
    "proof-dtype": ("doctor.json", inner("proof", dtype="bfloat16"), "not proven: dtype"),
    "proof-device": ("doctor.json", inner("proof", device="cpu"), "not proven: device"),
    "proof-partial": ("doctor.json", inner("proof", results=[{"name": "product", "ok": True}]), "not proven: no "),
    "gpu-name": ("doctor.json", swap("NVIDIA H200", "NVIDIA H100 PCIe"), "cuda_check.txt lacks the device's name"),
    "gpu-capability": ("doctor.json", inner("facts.nvidia.gpus.0", capability=[8, 0]), "proof.about.capability"),
    "gpu-uuid": ("doctor.json", inner("facts.nvidia.gpus.0", uuid="GPU-2"), "is not among facts.nvidia.gpus"),
    "failed-check": ("doctor.json", inner("checks.0", verdict="fail"), "says 'fail'"),
    "cpu-failed-check": ("cpu/doctor.json", inner("checks.0", verdict="fail"), "cpu/doctor.json: the check"),
    "backend": ("config.yaml", swap("backend: torch", "backend: jax"), "precommit.json does not tell batch.devices"),
    "status": ("result.json", set_json(status="preempted", exit_code=7), "'preempted', not completed"),
    "log": ("training_log.txt", swap("Using device: cuda", "Using: cuda"), "lacks a line with `Using device: cuda`"),
    "log-twice": ("training_log.txt", append("Using device: cpu\n"), "says otherwise than `Using device: cuda`"),
    "log-warning": ("training_log.txt", append("no longer supports this GPU\n"), "warns of an unsupported"),
    "check-twice": ("cuda_check.txt", append("torch.cuda.is_available(): False\n"), "says otherwise than `torch.cuda"),
    "memory": (
        "result.json",
        set_json(gpu_memory=memory_samples(6, used_bytes=5, by="device")),
        "5 bytes after step 1",
    ),
    "no-tokens": ("metrics.jsonl", first_step("tokens", 0), "targets in 0 tokens"),
    "no-end": ("metrics.jsonl", first_step("seconds", "1e999"), "metrics.jsonl:1: seconds is inf"),
    "huge": ("metrics.jsonl", first_step("tokens", 10**400), "metrics.jsonl:1: tokens is 1000"),
    "cpu-no-tokens": (
        "cpu/metrics.jsonl",
        swap('"tokens": ', '"tokens": 0, "were": '),
        "cpu/metrics.jsonl:1: tokens is 0, on the GPU",
    ),
    "cpu-no-end": ("cpu/metrics.jsonl", first_step("seconds", "1e999"), "cpu/metrics.jsonl:1: seconds is inf"),
    "cpu-huge": ("cpu/metrics.jsonl", first_step("tokens", 10**400), "cpu/metrics.jsonl:1: tokens is 1000"),
    "cpu-loss": ("cpu/metrics.jsonl", first_step("loss", 1.5), "cpu/metrics.jsonl:1: loss 1.5 is not loss_hex"),
    "cpu-status": (
        "cpu/result.json",
        set_json(status="preempted", exit_code=7),
        "cpu/result.json: the run is 'preempted'",
    ),
    "cpu-seed": ("cpu/config.yaml", swap("\n  seed: ", "\n  seed: 4"), "another run: training.seed differ"),
    "cpu-odd-key": ("cpu/config.yaml", append("1: 2\n"), "another run: 1 differ"),
    "cpu-data": ("cpu/precommit.json", inner("dataset", sha256="0" * 64), "precommit.json: dataset.sha256 differ"),
    "cpu-log": ("cpu/training_log.txt", append("Using device: cuda\n"), "cpu/training_log.txt says otherwise"),
    "nvidia-smi": ("nvidia_smi.txt", swap("3000000000 bytes", "3000000001 bytes"), "its first line is of no sample"),
    "nvidia-smi-memory": ("nvidia_smi.txt", swap("2861MiB", "9861MiB"), "no sample in result.json has about that"),
    "nvidia-smi-day": ("nvidia_smi.txt", append("Sun Nov 15 10:55:27 2020\n"), "nvidia_smi.txt is of 2020-11-15"),
    "sample-time": (
        "result.json",
        set_json(gpu_memory=memory_samples(6, at="2020-01-01T00:00:00+00:00")),
        "sample 1 of gpu_memory was taken 2020",
    ),
    "sample-pid": (
        "result.json",
        set_json(gpu_memory=memory_samples(6, pid=1, at="2026-11-16T00:00:00+00:00")),
        "of process 1, which trained nothing",
    ),
    "peak": ("metrics.jsonl", first_step("peak_bytes", 1), "peak_bytes is 1; the weights alone take"),
    "other-gpu": ("processes.json", swap("NVIDIA H200", "NVIDIA H100 PCIe"), "the GPU's name is 'NVIDIA H100 PCIe'"),
    "no-gpu": ("processes.json", swap('"device": "cuda"', '"device": "cpu"'), "device is 'cpu', the run's is 'cuda'"),
    "card": ("doctor.json", swap("150754820096", "85520809984"), "no NVIDIA H200 has 85,520,809,984 bytes"),
    "cpu-log-order": ("cpu/training_log.txt", append("2020-01-01T00:00:00Z INFO later\n"), "cpu/training_log.txt:"),
    "cpu-rate": ("cpu/metrics.jsonl", first_step("lr", 0.5), "cpu/metrics.jsonl:1: lr is 0.5"),
    "cpu-torch": ("cpu/torch_version.txt", lambda path: path.write_text(""), "cpu/torch_version.txt is empty"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_is_found_even_with_every_chain_hash_figure_and_word_made_anew(gpu_bundle, tmp_path, forgery):
    name, change, words = FORGERIES[forgery]
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    change(folder / name)
    reseal(folder)
    assert any(words in problem for problem in bundle_problems(folder)), bundle_problems(folder)


def test_a_gpu_that_the_catalogue_knows_otherwise_is_found(gpu_bundle, tmp_path):
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    for place in ("facts.nvidia.gpus.0", "proof.about"):
        inner(place, capability=[12, 0])(folder / "doctor.json")
    edit_text(folder / "cuda_check.txt", "(9, 0)", "(12, 0)")
    reseal(folder)
    words = "the compute capability of 'NVIDIA H200' is (12, 0), elsewhere [(9, 0)]"
    assert any(words in problem for problem in bundle_problems(folder))


@pytest.mark.parametrize("name", ["result.json", "cpu/result.json"])
def test_a_result_of_another_run_is_found(gpu_bundle, tmp_path, name):
    folder = shutil.copytree(gpu_bundle, tmp_path / "copy")
    edit_json(folder / name, run_id="0" * 64)
    reseal(folder, chained=False)
    assert any(f"{name}: run_id is" in problem for problem in bundle_problems(folder))


def test_a_device_that_is_no_name_and_a_figure_nested_otherwise_are_found_without_a_traceback(gpu_bundle, tmp_path):
    folder = shutil.copytree(gpu_bundle, tmp_path / "device")
    for name in ("precommit.json", "result.json", "eval_summary.json"):
        edit_json(folder / name, device=["cuda"])
    reseal(folder)
    assert any("does not tell device" in problem for problem in bundle_problems(folder))
    folder = shutil.copytree(gpu_bundle, tmp_path / "dotted")
    told = json.loads((folder / "bundle.json").read_text())
    speeds = {f"tokens_per_second.{name}": value for name, value in told.pop("tokens_per_second").items()}
    write_json(folder / "bundle.json", told | speeds)
    write_hashes(RunDir(folder))
    assert bundle_problems(folder) == ["bundle.json: not in the shape that tunix-rt writes"]


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
    assert "none of the newest 500 commits of" in words and "has the source this run was made from" in words
    assert "commit that source" in words
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
    assert "`checkpoints/step-000006/optimizer.safetensors`" in readme
    (home / "plan.json").unlink()
    (home / "samples.md").write_text("")
    words = refused(collect(home, tmp_path / "second", repo), 6)
    assert "missing: plan.json" in words and "changed: samples.md" in words and "safetensors" not in words


def test_places_of_the_machine_are_named_in_warnings(run, repo, tmp_path):
    home = shutil.copytree(run, tmp_path / "home")
    log = (home / "training_log.txt").read_text()
    write_text(home / "training_log.txt", f"{log}  kept in /home/somebody/models\n")
    write_hashes(RunDir(home))
    done = collect(home, tmp_path / "bundle", repo)
    assert done.returncode == 0
    last = len(log.splitlines()) + 1
    assert f"warning: a path of the machine in training_log.txt:{last}: /home/somebody/models" in done.stderr


def test_a_gpu_run_needs_its_run_on_the_cpu_and_that_of_the_same_configuration(gpu_run, run, repo, tmp_path):
    words = refused(collect(gpu_run, tmp_path / "bundle", repo), 6)
    assert "same configuration on the CPU" in words and "--device cpu" in words and "--cpu-run" in words
    assert "leave --cpu-run out" in refused(collect(run, tmp_path / "bundle", repo, "--cpu-run", run), 2)
    other = shutil.copytree(run, tmp_path / "other")
    (other / "metrics.jsonl").write_text("")
    assert "does not verify" in refused(collect(gpu_run, tmp_path / "bundle", repo, "--cpu-run", other), 6)
    another = shutil.copytree(run, tmp_path / "another")
    edit_text(another / "config.yaml", "\n  seed: ", "\n  seed: 4")
    chain(RunDir(another))
    write_hashes(RunDir(another))
    words = refused(collect(gpu_run, tmp_path / "bundle", repo, "--cpu-run", another), 6)
    assert "another run: training.seed" in words and "run the same configuration" in words
    unfinished = shutil.copytree(run, tmp_path / "unfinished")
    edit_json(unfinished / "result.json", status="preempted", exit_code=7)
    write_hashes(RunDir(unfinished))
    words = refused(collect(gpu_run, tmp_path / "bundle", repo, "--cpu-run", unfinished), 6)
    assert "'preempted', not completed" in words and "finish it with --resume" in words
    edit_json(unfinished / "result.json", status="completed", exit_code=0)
    write_text(unfinished / "torch_version.txt", "")
    write_hashes(RunDir(unfinished))
    words = refused(collect(gpu_run, tmp_path / "bundle", repo, "--cpu-run", unfinished), 6)
    assert "torch_version.txt is empty" in words and "run again with this version" in words
    assert not (tmp_path / "bundle").exists()


def test_a_collect_that_is_broken_off_leaves_nothing_not_even_the_folders_above(run, repo, tmp_path, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(bundles, "settle_files", interrupt)
    (tmp_path / "there").mkdir()
    with pytest.raises(KeyboardInterrupt):
        bundles.collect(run, tmp_path / "there" / "new" / "deep" / "v1", cpu_folder=None, repository=repo)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


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
