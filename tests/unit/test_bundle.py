"""What a bundle may say of a run, and what a run must hold before one is made of it."""

import copy
from dataclasses import replace

import pytest

from tests import bundles
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.doctor.prove import Proof, Proved, cuda_check_text
from tunix_rt.doctor.words import env_info_text, torch_version_text
from tunix_rt.errors import EvidenceError
from tunix_rt.evidence.claims import (
    RunFiles,
    claims_of,
    different_settings,
    gpu_memory,
    refuse_another_setup,
    require_content,
    tokens_per_second,
)
from tunix_rt.evidence.readme import readme_text
from tunix_rt.rundir import to_plain

HOST = {"cpu": "AMD EPYC", "cpu_cores": 16, "ram_total_bytes": 135_000_000_000, "machine": "x86_64"}
CONFIG = {"model": {"weights": "pretrained"}, "training": {"backend": "torch", "device": "cuda", "seed": 0}}
STEPS = tuple({"tokens": 1000, "seconds": seconds} for seconds in (4.0, 0.5, 0.25, 0.25))
CPU_STEPS = tuple({"tokens": 1000, "seconds": seconds} for seconds in (6.0, 5.0, 5.0, 5.0))
COMMIT = "c0ffee" + "0" * 34
LEFT_OUT = {"final_model/model.safetensors": "ab" * 32, "checkpoints/step-000004/state.json": "cd" * 32}


@pytest.fixture
def cuda(tmp_path):
    for name, text in bundles.FILES.items():
        (tmp_path / name).write_text(text)
    return RunFiles(
        folder=tmp_path,
        run_id="ef" * 32,
        config=CONFIG,
        doctor={
            "facts": {"host": HOST, "nvidia": bundles.NVIDIA, "torch": bundles.TORCH},
            "choice": bundles.CHOICE,
            "proof": bundles.PROOF,
        },
        precommit={
            "source_sha256": "12" * 32,
            "dataset": {"key": "dev-reasoning-v2", "sha256": "34" * 32, "merkle_root": "56" * 32},
            "base_model": {"name": "gpt2", "weights": "pretrained", "files": {"config.json": "78" * 32}},
            "tokenizer_sha256": "9a" * 32,
            "seeds": {"seed": 0},
        },
        result={
            "device": "cuda", "steps_completed": 4, "resumed_from": 0, "final_loss": 2.5, "gpu_memory": bundles.MEMORY,
        },
        metrics=STEPS,
    )  # fmt: skip


@pytest.fixture
def cpu(cuda, tmp_path):
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "env_info.txt").write_text("ram: 135000000000 bytes\n")
    (folder / "torch_version.txt").write_text("torch: 2.13.0+cpu\n")
    (folder / "training_log.txt").write_text("INFO Using device: cpu\nINFO Preflight: model=gpt2 device=cpu\n")
    return replace(
        cuda,
        folder=folder,
        run_id="fe" * 32,
        config=CONFIG | {"training": CONFIG["training"] | {"device": "cpu"}},
        doctor={"facts": {"host": HOST, "torch": {"version": "2.13.0+cpu"}}},
        result={"device": "cpu", "steps_completed": 4, "resumed_from": 0, "final_loss": 2.5},
        metrics=CPU_STEPS,
    )


def says(cuda, cpu, **changed):
    return claims_of(cuda, cpu) | {"commit": COMMIT, "left_out": LEFT_OUT} | changed


# --- what must be there -----------------------------------------------------------------------------------------------


def test_a_gpu_run_and_a_cpu_run_with_their_files_are_accepted(cuda, cpu):
    require_content(cuda)
    require_content(cpu)


def test_what_the_doctor_writes_of_a_gpu_is_what_a_bundle_asks_for(cuda):
    facts = facts_from_json(
        {
            "host": {**HOST, "ram_available_bytes": 1, "disk_free_bytes": 1},
            "nvidia": bundles.NVIDIA,
            "torch": bundles.TORCH,
        }
    )
    held = tuple(Proved(name=name, ok=True, detail="held") for name in ("device", "product", "placement"))
    about = {"torch": "2.13.0+cu130", "is_available": True, "name": "NVIDIA H200", "capability": [9, 0]}
    proof = Proof(
        backend="torch", device="cuda", dtype="float32", head_size=64, pid=1, seconds=1.0, results=held, about=about
    )  # fmt: skip
    (cuda.folder / "env_info.txt").write_text(env_info_text(facts))
    (cuda.folder / "torch_version.txt").write_text(torch_version_text(facts))
    (cuda.folder / "cuda_check.txt").write_text(cuda_check_text(proof))
    require_content(cuda)
    assert claims_of(replace(cuda, doctor={**cuda.doctor, "proof": to_plain(proof)}), None)["proof"] == [
        "device",
        "product",
        "placement",
    ]


@pytest.mark.parametrize("content", [None, "", " \n"])
@pytest.mark.parametrize("name", sorted(bundles.FILES))
def test_a_file_of_a_gpu_run_that_is_missing_or_empty_is_named(cuda, name, content):
    (cuda.folder / name).unlink()
    if content is not None:
        (cuda.folder / name).write_text(content)
    with pytest.raises(EvidenceError, match=f"{name} is {'missing' if content is None else 'empty'}"):
        require_content(cuda)


@pytest.mark.parametrize(
    ("name", "old", "new", "lacks"),
    [
        ("env_info.txt", "driver: 580.95.05", "driver: 580.95.051", "the driver's version"),
        ("env_info.txt", "driver cuda: 13.0", "driver cuda: unknown", "the CUDA version the driver reports"),
        ("torch_version.txt", "+cu130", "+cpu", "torch's version"),
        ("torch_version.txt", "13.0\n", "none\n", "the CUDA version of the wheel"),
        ("cuda_check.txt", "2.13.0", "2.12.0", "torch's version"),
        ("cuda_check.txt", "True", "False", "is_available True"),
        ("cuda_check.txt", "NVIDIA H200", "NVIDIA H100", "the device's name"),
        ("cuda_check.txt", "(9, 0)", "(12, 0)", "the compute capability"),
        ("cuda_check.txt", "GPU computation successful", "GPU computation failed", "the line `GPU computation"),
        ("training_log.txt", "Using device: cuda", "Using device: cpu", "the line `Using device: cuda`"),
        ("training_log.txt", " device=cuda ", " device=cpu ", "a line with `device=cuda`"),
        ("nvidia_smi.txt", "    4711 ", "    47110 ", "our process (4711)"),
        ("nvidia_smi.txt", "Driver Version: 580.95.05", "nvidia-smi is not installed here", "the driver's version"),
    ],
)
def test_a_file_of_a_gpu_run_without_its_content_is_named_with_what_it_lacks(cuda, name, old, new, lacks):
    path = cuda.folder / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(EvidenceError) as refused:
        require_content(cuda)
    assert f"{name} lacks {lacks}" in refused.value.problem and refused.value.exit_code == 6


@pytest.mark.parametrize(
    ("name", "old"),
    [("env_info.txt", "135000000000"), ("torch_version.txt", "2.13.0"), ("training_log.txt", "Using device: cpu")],
)
def test_a_file_of_a_cpu_run_without_its_content_is_named(cpu, name, old):
    path = cpu.folder / name
    path.write_text(path.read_text().replace(old, "none"))
    with pytest.raises(EvidenceError, match=f"{name} lacks "):
        require_content(cpu)


@pytest.mark.parametrize(
    "path",
    ["facts.nvidia.driver_version", "facts.nvidia.driver_cuda", "facts.torch.cuda_build", "choice.kind", "proof"],
)
@pytest.mark.parametrize("value", [None, "", "unknown"])
def test_a_fact_the_doctor_does_not_tell_is_named(cuda, path, value):
    doctor = copy.deepcopy(cuda.doctor)
    *parents, last = path.split(".")
    inner = doctor
    for part in parents:
        inner = inner[part]
    inner[last] = value
    with pytest.raises(EvidenceError, match=f"doctor.json does not tell {path}"):
        claims_of(replace(cuda, doctor=doctor), None)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ok": False}, "not proven"),
        ({"device": "cpu"}, "not proven"),
        ({"results": []}, "does not tell proof.results"),
        ({"results": [{"name": "product", "ok": True}, {"name": "loss", "ok": False}]}, "not proven: loss"),
    ],
)
def test_a_gpu_on_which_a_proof_did_not_hold_is_refused(cuda, changed, words):
    with pytest.raises(EvidenceError, match=words):
        claims_of(replace(cuda, doctor={**cuda.doctor, "proof": bundles.PROOF | changed}), None)


# --- memory of the GPU ------------------------------------------------------------------------------------------------


def with_memory(run, samples):
    return replace(run, result={**run.result, "gpu_memory": samples})


def test_the_largest_sample_under_our_process_id_is_told(cuda):
    assert gpu_memory(cuda) == {"by": "nvml", "samples": 2, "step": 1, "pid": 4711, "used_bytes": 3_000_000_000}


@pytest.mark.parametrize(
    "samples", [[], ["nvml"], [{"by": "nvml"}], [{"step": 1, "pid": 4711, "used_bytes": 0, "by": "nvml"}]]
)
def test_a_gpu_run_that_held_no_memory_is_refused(cuda, samples):
    with pytest.raises(EvidenceError, match="gpu_memory"):
        gpu_memory(with_memory(cuda, samples))


def test_where_process_ids_are_hidden_the_readme_says_so(cuda, cpu):
    hidden = with_memory(cuda, [{"step": 2, "pid": 4711, "used_bytes": 5, "by": "device"}])
    (cuda.folder / "nvidia_smi.txt").write_text("Driver Version: 580.95.05\n")
    require_content(hidden)
    text = readme_text(says(hidden, cpu))
    assert "NVML hides process ids" in text and "under our process id" not in text
    assert "GPU memory was allocated under our process id: 3,000,000,000 bytes" in readme_text(says(cuda, cpu))


# --- speed ------------------------------------------------------------------------------------------------------------


def test_speed_is_tokens_over_seconds_after_the_first_step_and_also_with_it(cuda, cpu):
    assert claims_of(cuda, cpu)["tokens_per_second"] == {
        "device": 3000.0,
        "device_with_first_step": 800.0,
        "cpu": 200.0,
        "cpu_with_first_step": 4000 / 21,
        "ratio": 15.0,
    }


def test_one_step_has_no_speed(cuda):
    with pytest.raises(EvidenceError, match="1 step"):
        tokens_per_second(replace(cuda, metrics=STEPS[:1]))


# --- the run on the CPU -----------------------------------------------------------------------------------------------


def test_only_the_device_may_differ(cuda, cpu):
    refuse_another_setup(cuda, cpu)
    assert different_settings(cuda.config, cpu.config) == []
    other = {"model": {"weights": "random"}, "training": {"device": "cpu", "seed": 1}, "data": {"packing": False}}
    assert different_settings(CONFIG, other) == ["data.packing", "model.weights", "training.backend", "training.seed"]
    with pytest.raises(EvidenceError, match=r"training\.seed differ"):
        refuse_another_setup(cuda, replace(cpu, config=CONFIG | {"training": CONFIG["training"] | {"seed": 1}}))


@pytest.mark.parametrize("name", ["source_sha256", "tokenizer_sha256", "dataset", "base_model", "seeds"])
def test_another_source_data_or_model_is_another_run(cuda, cpu, name):
    changed = {**cpu.precommit, name: "0" * 64}
    with pytest.raises(EvidenceError, match=rf"precommit\.json: {name}"):
        refuse_another_setup(cuda, replace(cpu, precommit=changed))


def test_a_run_on_a_gpu_is_not_compared_with_another_on_a_gpu(cuda):
    with pytest.raises(EvidenceError, match="not on the CPU"):
        refuse_another_setup(cuda, cuda)


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_answers_the_six_points_with_facts_and_files(cuda, cpu):
    text = readme_text(says(cuda, cpu))
    done = [line for line in text.splitlines() if line.startswith("- [x] ")]
    assert len(done) == 6
    for line, words, file in zip(
        done,
        ("is_available()` returned `True`", "NVIDIA H200, compute capability 9.0", "device=cuda", "process 4711",
         "evidence is saved", "product, attention"),
        ("cuda_check.txt", "env_info.txt", "training_log.txt", "nvidia_smi.txt", "SHA256SUMS", "doctor.json"),
        strict=True,
    ):  # fmt: skip
        assert words in line and f"`{file}`" in line
    assert "expected an RTX 5090, this is the GPU that was there" in done[1]
    assert "asserts that parameters, optimizer state and loss live on the device" in done[5]


def test_the_readme_has_the_figures_and_how_to_make_and_check_it_again(cuda, cpu):
    text = readme_text(says(cuda, cpu))
    for words in (
        "| PyTorch | 2.13.0+cu130 |", "| CUDA of the PyTorch wheel | 13.0 |", "| driver | 580.95.05 |",
        "| CUDA the driver reports | 13.0 |", "| GPU | NVIDIA H200 |", "| compute capability | 9.0 |",
        "| steps | 4 |", "| final loss | 2.5 |", "| tokens/s on NVIDIA H200 | 3,000.0 |",
        "(AMD EPYC, 16 cores, PyTorch 2.13.0+cpu) | 200.0 |", "| GPU against CPU | 15.00 times |",
        COMMIT, "tunix-rt train config.yaml --output RUN", "tunix-rt evidence verify .",
        "`final_model/model.safetensors` sha256 `" + "ab" * 32,
    ):  # fmt: skip
        assert words in text
    assert not any(word in text for word in ("None", "nan", "unknown", "TODO", "{", "random"))


def test_random_weights_are_said_loudly(cuda, cpu):
    text = readme_text(says(cuda, cpu, weights="random"))
    assert "no evidence of learning" in text.split("## What ran")[0]
    assert "tunix-rt train config.yaml --output RUN --weights random" in text


def test_a_cpu_bundle_tells_the_hosts_memory_and_nothing_of_a_gpu(cpu):
    text = readme_text(claims_of(cpu, None) | {"commit": COMMIT, "left_out": LEFT_OUT})
    assert "| memory of the host | 135,000,000,000 bytes (125.7 GiB) |" in text
    assert "GPU" not in text and "cuda" not in text
