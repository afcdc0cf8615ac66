"""What a bundle may say of a run, and what a run must hold before one is made of it."""

import copy
from dataclasses import replace

import pytest

from tests import bundles
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.doctor.prove import PROOF_NAMES
from tunix_rt.doctor.words import env_info_text, torch_version_text
from tunix_rt.errors import EvidenceError
from tunix_rt.evidence.agreeing import different_settings, refuse_another_setup
from tunix_rt.evidence.bringing import quantised, to_bring
from tunix_rt.evidence.claims import RunFiles, claims_of, gpu_memory, tokens_per_second
from tunix_rt.evidence.manifest import fault_of_name, manifest_of
from tunix_rt.evidence.readme import readme_text
from tunix_rt.evidence.source import combined_hash
from tunix_rt.evidence.whole import require_whole
from tunix_rt.rundir import write_json

HOST = {"cpu": "AMD EPYC", "cpu_cores": 16, "ram_total_bytes": 135_000_000_000, "machine": "x86_64"}
TRAINING = {"backend": "torch", "device": "cuda", "dtype": "float32", "seed": 0}
CONFIG = {"model": {"weights": "pretrained"}, "training": TRAINING}
CHECKS = [{"cause": "no-gpu", "verdict": "pass"}, {"cause": "gpu-busy", "verdict": "warn"}]
PEAK = 1_500_000_000
STEPS = tuple({"tokens": 1000, "seconds": seconds, "peak_bytes": PEAK} for seconds in (4.0, 0.5, 0.25, 0.25))
CPU_STEPS = tuple(step | {"seconds": seconds} for step, seconds in zip(STEPS, (6.0, 5.0, 5.0, 5.0), strict=True))
SOURCE = {"cli/main.py": "ab" * 32, "errors.py": "cd" * 32}
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
            "checks": CHECKS,
            "choice": bundles.CHOICE,
            "proof": bundles.PROOF,
        },
        precommit={
            "source_sha256": combined_hash(SOURCE),
            "source_files": SOURCE,
            "dataset": {"key": "dev-reasoning-v2", "sha256": "34" * 32, "merkle_root": "56" * 32},
            "base_model": {"name": "gpt2", "weights": "pretrained", "files": {"config.json": "78" * 32}},
            "tokenizer_sha256": "9a" * 32,
            "seeds": {"seed": 0},
            "versions": {"torch": "2.13.0+cu130", "transformers": "5.22.0", "tunix-rt": "0.1.0"},
            "batch": {"rows": 4, "devices": 1},
        },
        result={
            "status": "completed", "device": "cuda", "steps_completed": 4, "resumed_from": 0, "final_loss": 2.5,
            "gpu_memory": bundles.memory_samples(4),
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
        config=CONFIG | {"training": TRAINING | {"device": "cpu"}},
        doctor={"facts": {"host": HOST, "torch": {"version": "2.13.0+cpu"}}, "checks": CHECKS},
        result={"status": "completed", "device": "cpu", "steps_completed": 4, "resumed_from": 0, "final_loss": 2.5},
        metrics=CPU_STEPS,
    )


@pytest.fixture
def jax(cuda):
    """A run of JAX on a GPU."""
    for name, text in bundles.JAX_FILES.items():
        (cuda.folder / name).write_text(text)
    facts = {"host": HOST, "nvidia": bundles.NVIDIA, "torch": None, "jax": bundles.JAX}
    proof = bundles.to_plain(bundles.JAX_PROVEN)
    return replace(
        cuda,
        config={**CONFIG, "training": TRAINING | {"backend": "jax"}},
        doctor={**cuda.doctor, "facts": facts, "checks": [*CHECKS, bundles.JAX_CHECK], "proof": proof},
        precommit={**cuda.precommit, "versions": {"jax": "0.11.2", "jaxlib": "0.11.2", "tunix-rt": "0.1.0"}},
    )


def says(cuda, cpu, **changed):
    return claims_of(cuda, cpu) | {"commit": COMMIT, "left_out": LEFT_OUT} | changed


# --- what must be there -----------------------------------------------------------------------------------------------


def test_a_gpu_run_and_a_cpu_run_with_their_files_are_accepted(cuda, cpu):
    require_whole(cuda)
    require_whole(cpu)


def test_what_the_doctor_writes_of_a_gpu_is_what_a_bundle_asks_for(cuda):
    facts = facts_from_json(
        {
            "host": {**HOST, "ram_available_bytes": 1, "disk_free_bytes": 1},
            "nvidia": bundles.NVIDIA,
            "torch": bundles.TORCH,
        }
    )
    (cuda.folder / "env_info.txt").write_text(env_info_text(facts))
    (cuda.folder / "torch_version.txt").write_text(torch_version_text(facts))
    require_whole(cuda)  # its cuda_check.txt is the doctor's own already
    assert claims_of(cuda, None)["proof"] == list(PROOF_NAMES)


@pytest.mark.parametrize("content", [None, "", " \n"])
@pytest.mark.parametrize("name", sorted(bundles.FILES))
def test_a_file_of_a_gpu_run_that_is_missing_or_empty_is_named(cuda, name, content):
    (cuda.folder / name).unlink()
    if content is not None:
        (cuda.folder / name).write_text(content)
    with pytest.raises(EvidenceError, match=f"{name} is {'missing' if content is None else 'empty'}"):
        require_whole(cuda)


@pytest.mark.parametrize(
    ("name", "old", "new", "lacks"),
    [
        ("env_info.txt", "driver: 580.95.05", "driver: 580.95.051", "the driver's version"),
        ("env_info.txt", "driver cuda: 13.0", "driver cuda: unknown", "the CUDA version the driver reports"),
        ("torch_version.txt", "+cu130", "+cpu", "torch's version"),
        ("torch_version.txt", "13.0\n", "none\n", "the CUDA version of the wheel"),
        ("cuda_check.txt", "2.13.0", "2.12.0", "torch's version"),
        ("cuda_check.txt", "True", "False", "a line with `torch.cuda.is_available(): True`"),
        ("cuda_check.txt", "GPU-00000001", "GPU-00000002", "the device's uuid"),
        ("cuda_check.txt", "NVIDIA H200", "NVIDIA H100", "the device's name"),
        ("cuda_check.txt", "(9, 0)", "(12, 0)", "the compute capability"),
        ("cuda_check.txt", "GPU computation successful", "GPU computation failed", "the line `GPU computation"),
        ("training_log.txt", "Using device: cuda", "Using device: cpu", "a line with `Using device: cuda`"),
        ("training_log.txt", " device=cuda ", " device=cpu ", "a line with `device=cuda`"),
        ("nvidia_smi.txt", "    4711 ", "    47110 ", "our process (4711)"),
        ("nvidia_smi.txt", "Driver Version: 580.95.05", "nvidia-smi is not installed here", "the driver's version"),
    ],
)
def test_a_file_of_a_gpu_run_without_its_content_is_named_with_what_it_lacks(cuda, name, old, new, lacks):
    bundles.edit_text(cuda.folder / name, old, new)
    with pytest.raises(EvidenceError) as refused:
        require_whole(cuda)
    assert f"{name} lacks {lacks}" in refused.value.problem and refused.value.exit_code == 6


@pytest.mark.parametrize(
    ("name", "old"),
    [("env_info.txt", "135000000000"), ("torch_version.txt", "2.13.0"), ("training_log.txt", "Using device: cpu")],
)
def test_a_file_of_a_cpu_run_without_its_content_is_named(cpu, name, old):
    bundles.edit_text(cpu.folder / name, old, "none")
    with pytest.raises(EvidenceError, match=f"{name} lacks "):
        require_whole(cpu)


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
        ({"ok": False}, "is not proven\n"),
        ({"device": "cpu"}, "not proven: device 'cpu', the run's is 'cuda'"),
        ({"dtype": "bfloat16"}, "not proven: dtype 'bfloat16', the run's is 'float32'"),
        ({"backend": "jax"}, "not proven: backend 'jax', the run's is 'torch'"),
        ({"results": []}, "does not tell proof.results"),
        ({"results": [*bundles.PROOF["results"][:-1], {"name": "speed", "ok": False}]}, "not proven: speed"),
        ({"results": bundles.PROOF["results"][1:]}, f"not proven: no {PROOF_NAMES[0]}"),
        ({"results": [*bundles.PROOF["results"], {"name": "luck", "ok": True}]}, "not proven: luck beyond"),
        ({"results": [*bundles.PROOF["results"], {"name": "speed", "ok": True}]}, "not proven: speed beyond"),
    ],
)
def test_a_gpu_on_which_a_proof_did_not_hold_is_refused(cuda, changed, words):
    with pytest.raises(EvidenceError, match=words):
        claims_of(replace(cuda, doctor={**cuda.doctor, "proof": bundles.PROOF | changed}), None)


@pytest.mark.parametrize(
    ("about", "gpu", "words"),
    [
        ({"name": "NVIDIA H100"}, {}, "proof.about.name is 'NVIDIA H100'"),
        ({"name": "NVIDIA H100"}, {"name": "NVIDIA H100"}, r"elsewhere \['NVIDIA H200'\]"),
        ({}, {"name": "NVIDIA H100"}, r"elsewhere \['NVIDIA H100'\]"),
        ({"capability": [9, 1]}, {}, "proof.about.capability"),
        ({"uuid": "GPU-1"}, {}, "GPU-1, is not among facts.nvidia.gpus"),
        ({"uuid": ...}, {}, "does not tell proof.about.uuid"),
        ({}, {"capability": [9]}, "not two numbers"),
        ({"capability": [12, 0]}, {"capability": [12, 0]}, "compute capability of 'NVIDIA H200' is"),
    ],
)
def test_a_gpu_that_proof_list_choice_and_catalogue_do_not_agree_on_is_refused(cuda, about, gpu, words):
    told = {name: value for name, value in (bundles.PROOF["about"] | about).items() if value is not ...}
    doctor = {**cuda.doctor, "proof": bundles.PROOF | {"about": told}}
    doctor["facts"] = cuda.doctor["facts"] | {"nvidia": bundles.NVIDIA | {"gpus": [bundles.GPU | gpu]}}
    with pytest.raises(EvidenceError, match=words):
        claims_of(replace(cuda, doctor=doctor), None)


def test_a_slice_of_a_gpu_and_a_gpu_the_catalogue_does_not_know_are_taken_as_told(cuda):
    name, uuid = "NVIDIA H200 MIG 2g.35gb", "7c1f1a52-0f5e-5a0b-8a55-2f6d3b9a4e10"
    gpus = [bundles.GPU | {"slices": [{"name": name, "uuid": f"MIG-{uuid}"}]}]
    about = bundles.PROOF["about"] | {"name": name, "uuid": f"GPU-{uuid}"}  # torch does not tell which it is
    doctor = {**cuda.doctor, "proof": bundles.PROOF | {"about": about}, "choice": bundles.CHOICE | {"kind": name}}
    doctor["facts"] = cuda.doctor["facts"] | {"nvidia": bundles.NVIDIA | {"gpus": gpus}}
    assert claims_of(replace(cuda, doctor=doctor), None)["gpu"]["name"] == name
    gpus[0] |= {"name": "NVIDIA H300", "capability": [13, 0], "slices": []}
    about |= {"name": "NVIDIA H300", "capability": [13, 0], "uuid": bundles.UUID}
    doctor["choice"] = bundles.CHOICE | {"kind": "Tesla T4, NVIDIA H300", "count": 2}
    assert claims_of(replace(cuda, doctor=doctor), None)["gpu"]["compute_capability"] == "13.0"


@pytest.mark.parametrize(
    ("file", "changed", "words"),
    [
        ("result", {"status": "preempted"}, "'preempted', not completed"),
        ("result", {"device": "tpu"}, "ran on 'tpu'"),
        ("config", {"training": TRAINING | {"backend": "flax"}}, "training.backend is flax"),
        ("config", {"training": TRAINING | {"backend": "jax"}}, "does not tell versions.jax"),
        ("doctor", {"checks": [*CHECKS, {"cause": "masked", "verdict": "fail"}]}, "the check 'masked' says 'fail'"),
        ("doctor", {"checks": []}, "does not tell checks"),
        ("precommit", {"source_files": SOURCE | {"errors.py": "ce" * 32}}, "not the hash of source_files"),
        ("precommit", {"source_files": {"\ud800.py": "ce" * 32}}, "not the hash of source_files"),
    ],
)
def test_a_run_that_is_not_whole_is_named_with_its_place(cpu, file, changed, words):
    told = replace(cpu, where="cpu/", **{file: {**getattr(cpu, file), **changed}})
    with pytest.raises(EvidenceError, match=words) as refused:
        require_whole(told)
    assert "cpu/" in refused.value.problem


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("training_log.txt", "INFO Using device: cpu"),
        ("training_log.txt", "INFO Preflight: model=tiny-gemma3 device=cpu"),
        ("cuda_check.txt", "torch.cuda.is_available(): False"),
        ("cuda_check.txt", "is_available: False"),
    ],
)
def test_a_file_that_also_says_otherwise_is_refused(cuda, name, line):
    with (cuda.folder / name).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(EvidenceError, match=f"{name} says otherwise than"):
        require_whole(cuda)


@pytest.mark.parametrize("name", ["training_log.txt", "cuda_check.txt"])
@pytest.mark.parametrize(
    "words",
    [
        "sm_120 is not compatible with the current PyTorch installation.",
        "Found GPU0 Tesla K80 which is of CUDA capability 3.7.",
        "this build does not include\n  kernels for this GPU",
        "PyTorch no longer supports this GPU because it is too old.",
    ],
)
def test_a_warning_of_an_unsupported_capability_is_refused(cuda, name, words):
    with (cuda.folder / name).open("a") as file:
        file.write(f"warning: {words}\n")
    with pytest.raises(EvidenceError, match=f"{name} warns of an unsupported compute capability"):
        require_whole(cuda)


@pytest.mark.parametrize("value", ["two\nlines", "sur\ud800rogate", "\u2028"])
def test_a_text_that_would_break_the_readme_is_refused(cuda, value):
    model = cuda.precommit["base_model"] | {"name": value}
    with pytest.raises(EvidenceError, match="not a line of text"):
        claims_of(replace(cuda, precommit={**cuda.precommit, "base_model": model}), None)


# --- memory of the GPU ------------------------------------------------------------------------------------------------


def with_memory(run, samples):
    return replace(run, result={**run.result, "gpu_memory": samples})


def test_the_largest_sample_under_our_process_id_is_told(cuda):
    assert gpu_memory(cuda) == {"by": "nvml", "samples": 2, "step": 1, "pid": 4711, "used_bytes": 3_000_000_000}


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "does not tell gpu_memory"),
        (["nvml"], "no sample in gpu_memory is of the last step"),
        ([{"by": "nvml"}], "does not tell step"),
        (bundles.memory_samples(3), "no sample in gpu_memory is of the last step"),
        (bundles.memory_samples(5), "after step 5, in which nothing was trained"),
        (bundles.memory_samples(4, used_bytes=PEAK - 1), "1499999999 bytes after step 1, where the allocator held"),
        (bundles.memory_samples(4, used_bytes=5, by="device"), "5 bytes after step 1, where the allocator held"),
        (bundles.memory_samples(4, used_bytes=10**400), "which no run can have"),
    ],
)
def test_memory_below_what_the_allocator_held_or_not_of_the_last_step_is_refused(cuda, samples, words):
    with pytest.raises(EvidenceError, match=words):
        gpu_memory(with_memory(cuda, samples))


def test_memory_of_a_process_that_only_finished_a_continued_run_is_refused(cuda):
    continued = replace(cuda, result={**cuda.result, "resumed_from": 4})
    with pytest.raises(EvidenceError, match="nothing was trained"):
        gpu_memory(continued)


def test_where_process_ids_are_hidden_the_readme_says_so(cuda, cpu):
    hidden = with_memory(cuda, bundles.memory_samples(4, used_bytes=PEAK, by="device"))
    (cuda.folder / "nvidia_smi.txt").write_text("Driver Version: 580.95.05\n")
    require_whole(hidden)
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


@pytest.mark.parametrize(
    "step",
    [
        {"seconds": float("inf")}, {"seconds": 0.0}, {"seconds": -1.0}, {"seconds": 5e-324}, {"seconds": 1.7e308},
        {"tokens": 0}, {"tokens": -1}, {"tokens": 2**63}, {"tokens": 10**400}, {"tokens": True},
    ],
)  # fmt: skip
def test_a_step_that_no_run_can_take_has_no_speed(cuda, cpu, step):
    metrics = (STEPS[0], *(one | step for one in STEPS[1:]))
    for run, other in ((replace(cuda, metrics=metrics), cpu), (cuda, replace(cpu, metrics=metrics))):
        with pytest.raises(EvidenceError, match=r"metrics\.jsonl"):
            claims_of(run, other)


def test_two_speeds_without_a_ratio_are_refused(cuda, cpu):
    fast, slow = (tuple(step | {"seconds": seconds} for step in STEPS) for seconds in (1e-300, 1e300))
    with pytest.raises(EvidenceError, match="that much faster"):
        claims_of(replace(cuda, metrics=fast), replace(cpu, metrics=slow))


def test_the_first_step_is_held_to_the_same(cuda, cpu):
    with pytest.raises(EvidenceError, match=r"cpu/metrics\.jsonl:1: 0 tokens in 6\.0 seconds is no step"):
        claims_of(cuda, replace(cpu, where="cpu/", metrics=(CPU_STEPS[0] | {"tokens": 0}, *CPU_STEPS[1:])))


def test_one_step_has_no_speed(cuda):
    with pytest.raises(EvidenceError, match="1 step"):
        tokens_per_second(replace(cuda, metrics=STEPS[:1]))


# --- the run on the CPU -----------------------------------------------------------------------------------------------


def test_only_the_device_may_differ(cuda, cpu):
    refuse_another_setup(cuda, cpu)
    assert different_settings(cuda.config, cpu.config) == []
    other = {
        "model": {"weights": "random"},
        "training": {"device": "cpu", "dtype": "float32", "seed": 1},
        "data": {"packing": False},
    }
    assert different_settings(CONFIG, other) == ["data.packing", "model.weights", "training.backend", "training.seed"]
    with pytest.raises(EvidenceError, match=r"training\.seed differ"):
        refuse_another_setup(cuda, replace(cpu, config=CONFIG | {"training": TRAINING | {"seed": 1}}))


@pytest.mark.parametrize("name", ["source_sha256", "tokenizer_sha256", "dataset", "base_model", "seeds"])
def test_another_source_data_or_model_is_another_run(cuda, cpu, name):
    changed = {**cpu.precommit, name: "0" * 64}
    with pytest.raises(EvidenceError, match=rf"precommit\.json: {name}"):
        refuse_another_setup(cuda, replace(cpu, precommit=changed))


def test_a_run_on_a_gpu_is_not_compared_with_another_on_a_gpu(cuda):
    with pytest.raises(EvidenceError, match="not on the CPU"):
        refuse_another_setup(cuda, cuda)


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_answers_the_points_of_the_milestone_with_facts_and_files(cuda, cpu):
    text = readme_text(says(cuda, cpu))
    done = [line for line in text.splitlines() if line.startswith("- [x] ")]
    for line, words, file in zip(
        done,
        ("is_available()` returned `True`", "NVIDIA H200, compute capability 9.0", "device=cuda",
         "No warnings about unsupported compute capability", "process 4711", "evidence is saved", "product, attention"),
        ("cuda_check.txt", "env_info.txt", "training_log.txt", "training_log.txt", "nvidia_smi.txt", "SHA256SUMS",
         "doctor.json"),
        strict=True,
    ):  # fmt: skip
        assert words in line and f"`{file}`" in line
    assert "expected an RTX 5090, this is the GPU that was there" in done[1]
    assert "asserts that parameters, optimizer state and loss live on the device" in done[6]


def test_the_readme_has_the_figures_and_how_to_make_and_check_it_again(cuda, cpu):
    text = readme_text(says(cuda, cpu))
    for words in (
        "| PyTorch | 2.13.0+cu130 |", "| CUDA of the PyTorch wheel | 13.0 |", "| driver | 580.95.05 |",
        "| CUDA the driver reports | 13.0 |", "| GPU | NVIDIA H200 |", "| compute capability | 9.0 |",
        "| steps | 4 |", "| final loss | 2.5 |", "| tokens/s on NVIDIA H200 | 3,000.0 |",
        "(AMD EPYC, 16 cores, PyTorch 2.13.0+cpu) | 200.0 |", "| GPU against CPU | 15.00 times |",
        "with it they are 800.0 tokens/s on the GPU and 190.5 on the CPU", "Which device computed is the run's own word",
        COMMIT, "tunix-rt train config.yaml --output RUN", "tunix-rt evidence verify . --repository CLONE",
        "`final_model/model.safetensors` sha256 `" + "ab" * 32,
    ):  # fmt: skip
        assert words in text
    assert not any(word in text for word in ("None", "nan", "unknown", "TODO", "{", "random"))


def test_random_weights_are_said_loudly(cuda, cpu):
    text = readme_text(says(cuda, cpu, weights="random"))
    assert "no evidence of learning" in text.split("## What ran")[0]
    assert "tunix-rt train config.yaml --output RUN --weights random" in text


OUTCOME = {
    "seconds": {"run": 220.4, "steps": 50.6},
    "scores": {
        "before": {"items": 374, "correct": 0, "well_formed": 0, "accuracy": 0.0},
        "after": {"items": 374, "correct": 32, "well_formed": 352, "accuracy": 32 / 374},
    },
    "heldout_loss": {"first": {"step": 0, "loss": 2.058}, "last": {"step": 302, "loss": 0.7057}},
}
BROUGHT = {
    "base_model": {
        "name": "small-q4_k_m.gguf", "revision": "local", "weights": "pretrained",
        "converted_from": f"small-q4_k_m.gguf sha256:{'1a' * 32}", "files": {"model.safetensors": "2b" * 32},
    },
    "dataset": {"key": "/data/own.jsonl", "sha256": "3c" * 32},
    "tokenizer_sha256": "4d" * 32,
}  # fmt: skip


def test_the_readme_tells_the_result_and_how_long_it_took(cuda, cpu):
    text = readme_text(says(cuda, cpu) | OUTCOME)
    for words in (
        "| answers that are right | 0 of 374 (0.0 %) | 32 of 374 (8.6 %) |", "| 0 of 374 | 352 of 374 |",
        "| loss on held-out data | 2.0580 (step 0) | 0.7057 (step 302) |", "The run took 220 s, 51 s of them in its steps",
        "A replay needs nothing but this folder and tunix-rt",
    ):  # fmt: skip
        assert words in text
    assert "First bring" not in text and "quantised" not in text


def test_the_result_is_taken_from_the_files_of_the_run(cuda):
    write_json(cuda.folder / "eval_summary.json", OUTCOME["scores"])
    (cuda.folder / "eval").mkdir()
    lines = [f'{{"loss": {loss}, "step": {step}}}\n' for step, loss in ((0, 2.058), (100, 0.9), (302, 0.7057))]
    (cuda.folder / "eval" / "heldout.jsonl").write_text("".join(lines))
    told = claims_of(replace(cuda, result=cuda.result | {"seconds": 9.5}), None)
    assert told["scores"] == OUTCOME["scores"] and told["heldout_loss"] == OUTCOME["heldout_loss"]
    assert told["seconds"] == {"run": 9.5, "steps": 5.0}
    older = claims_of(cuda, None, "tunix-rt/bundle/2")
    assert not {"scores", "heldout_loss", "seconds", "to_bring"} & older.keys()


def test_what_does_not_come_with_tunix_rt_is_listed_by_its_hashes(cuda, cpu):
    settings = {"model": {"tokenizer_name_or_path": "own-tokenizer"}}
    things = to_bring(BROUGHT, settings)
    assert [(thing["what"], thing["name"]) for thing in things] == [
        ("base model", "small-q4_k_m.gguf"), ("tokenizer", "own-tokenizer"), ("dataset", "own.jsonl"),
    ]  # fmt: skip
    text = readme_text(says(cuda, cpu) | OUTCOME | {"to_bring": things})
    for words in (
        f"- the dataset `own.jsonl` sha256 `{'3c' * 32}`", f"`small-q4_k_m.gguf` sha256 `{'1a' * 32}`", "4d" * 32,
        f"`model.safetensors` sha256 `{'2b' * 32}`", "converted from a quantised file (q4_k_m)", "--model MODEL",
    ):  # fmt: skip
        assert words in text
    assert "/data" not in text


def test_what_comes_with_tunix_rt_need_not_be_brought():
    shipped = {
        "base_model": {"name": "tiny-gemma3", "revision": "shipped", "files": {"model.safetensors": "1a" * 32}},
        "dataset": {"key": "dev-reasoning-v2", "sha256": "3c" * 32},
        "evalset": {"key": "eval_v2", "sha256": "5e" * 32},
    }
    assert to_bring(shipped, {"model": {"tokenizer_name_or_path": "tiny-gemma3"}}) == []
    assert to_bring(shipped, {"model": {"tokenizer_name_or_path": None}}) == []


@pytest.mark.parametrize(
    ("name", "form"), [("a-Q8_0", "Q8_0"), ("b.IQ2_XS", "IQ2_XS"), ("gemma-f16", ""), ("qwen-q", ""), ("x-bf16", "")]
)
def test_a_quantised_file_is_known_by_its_name(name, form):
    assert quantised({"converted_from": f"{name}.gguf sha256:{'1a' * 32}"}) == form


def test_a_cpu_bundle_tells_the_hosts_memory_and_nothing_of_a_gpu(cpu):
    text = readme_text(claims_of(cpu, None) | {"commit": COMMIT, "left_out": LEFT_OUT})
    assert "| memory of the host | 135,000,000,000 bytes (125.7 GiB) |" in text
    assert "GPU" not in text and "cuda" not in text


# --- a run of JAX -----------------------------------------------------------------------------------------------------


def test_a_gpu_run_of_jax_is_accepted_and_told_with_its_plugin_in_place_of_torch(jax):
    require_whole(jax)
    told = says(jax, None)
    assert {name: told[name] for name in ("backend", "jax", "jaxlib", "cuda_plugin")} == {
        "backend": "jax",
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "cuda_plugin": {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"},
    }
    assert told["gpu"]["uuid"] == bundles.UUID and told["gpu"]["count"] == 1
    assert not {"torch", "cuda", "cpu_run"} & told.keys() and "ratio" not in told["tokens_per_second"]


@pytest.mark.parametrize(
    ("name", "old", "new", "lacks"),
    [
        ("env_info.txt", "driver: 580.95.05", "driver: none", "the driver's version"),
        ("env_info.txt", "driver cuda: 13.0", "driver cuda: none", "the CUDA version the driver reports"),
        ("cuda_check.txt", "jax.__version__: 0.11.2", "jax.__version__: 0.11", "jax's version"),
        ("cuda_check.txt", "platform: gpu", "platform: cpu", r"a line with `jax\.devices\(\)\[0\]\.platform: gpu`"),
        ("cuda_check.txt", "NVIDIA H200", "NVIDIA H100", "the device's name"),
        ("cuda_check.txt", "(9, 0)", "(8, 0)", "the compute capability"),
        ("training_log.txt", "Using device: cuda", "Using device: cpu", "a line with `Using device: cuda`"),
        ("nvidia_smi.txt", "    4711 ", "    47110 ", r"our process \(4711\)"),
    ],
)
def test_a_file_of_a_gpu_run_of_jax_without_its_content_is_named(jax, name, old, new, lacks):
    path = jax.folder / name
    if "jax.__version__" in old:  # jaxlib has the same number
        path.write_text(path.read_text().replace("0.11.2", "0.11"))
    else:
        bundles.edit_text(path, old, new)
    with pytest.raises(EvidenceError, match=f"{name} lacks {lacks}"):
        require_whole(jax)


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ({"plugins": {}}, r"does not tell facts\.jax\.plugins"),
        ({"plugins": {"jax-rocm7-plugin": "0.11.2"}}, "does not tell a CUDA plugin"),
        ({"plugins": {"jax-cuda13-plugin": None}}, r"does not tell facts\.jax\.plugins\.jax-cuda13-plugin"),
        ({"jaxlib": "0.11.1"}, "jaxlib is '0.11.1', precommit.json has '0.11.2'"),
        ({"version": None}, r"does not tell facts\.jax\.version"),
    ],
)
def test_versions_of_jax_that_are_not_told_or_differ_are_refused(jax, fact, words):
    facts = jax.doctor["facts"] | {"jax": bundles.JAX | fact}
    with pytest.raises(EvidenceError, match=words):
        require_whole(replace(jax, doctor={**jax.doctor, "facts": facts}))


@pytest.mark.parametrize("checks", [CHECKS, [*CHECKS, bundles.JAX_CHECK | {"verdict": "skip"}]])
def test_a_plugin_that_was_not_judged_for_the_gpu_is_refused(jax, checks):
    with pytest.raises(EvidenceError, match="jax-plugin-lacks-architecture"):
        require_whole(replace(jax, doctor={**jax.doctor, "checks": checks}))


def test_of_several_gpus_of_one_name_jax_tells_the_number_and_no_uuid(jax):
    gpus = [bundles.GPU, bundles.GPU | {"index": 1, "uuid": "GPU-2"}]
    facts = jax.doctor["facts"] | {"nvidia": bundles.NVIDIA | {"gpus": gpus}}
    both = replace(
        jax, doctor={**jax.doctor, "facts": facts}, precommit={**jax.precommit, "batch": {"rows": 8, "devices": 2}}
    )
    told = says(both, None)
    assert "uuid" not in told["gpu"] and "| GPU | 2 x NVIDIA H200 |" in readme_text(told)


def test_the_readme_of_jax_says_nothing_of_torch_and_that_there_is_no_ratio(jax, cpu):
    text = readme_text(says(jax, None))
    for words in (
        "| JAX | 0.11.2 |", "| jaxlib | 0.11.2 |", "| CUDA plugin `jax-cuda13-plugin` | 0.11.2 |",
        "No run on the CPU was given to hold them against, so there is no ratio",
        "`_assert_on_devices` in `src/tunix_rt/backends/jax_backend.py`", 'pip install -e ".[jax]"',
        'pip install "jax[cuda13]==0.11.2"', "tunix-rt evidence collect ../reproduced --to ../NEW_BUNDLE\n",
        "JAX by default takes its share of the memory",
    ):  # fmt: skip
        assert words in text
    assert text.count("- [x] ") == 7
    assert not any(word in text for word in ("torch", "PyTorch", "None", "--cpu-run", "times"))
    sibling = replace(
        cpu,
        config={**CONFIG, "training": TRAINING | {"backend": "jax", "device": "cpu"}},
        doctor={"facts": {"host": HOST, "jax": bundles.JAX | {"plugins": {}}}, "checks": CHECKS},
        precommit=jax.precommit,
    )
    (sibling.folder / "env_info.txt").write_text("ram: 135000000000 bytes\njax: 0.11.2\n")
    require_whole(sibling)
    refuse_another_setup(jax, sibling)
    text = readme_text(says(jax, sibling))
    assert "(AMD EPYC, 16 cores, JAX 0.11.2) | 200.0 |" in text and "| GPU against CPU | 15.00 times |" in text


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_the_manifest_has_settings_hardware_and_versions_and_no_null(cuda, jax, cpu):
    open_ones = replace(cuda, config={"model": {"revision": None, "weights": "random"}, "training": TRAINING})
    told = manifest_of(open_ones, says(open_ones, cpu), "m1")
    assert (told["run_id"], told["commit"], told["tokens_per_second"]) == ("m1", COMMIT, 3000.0)
    assert told["configuration"] == {"model": {"weights": "random"}, "training": TRAINING}
    assert told["configuration_left_open"] == ["model.revision"]
    assert told["versions"] == {
        "torch": "2.13.0+cu130", "cuda": "13.0", "transformers": "5.22.0", "tunix-rt": "0.1.0",
    }  # fmt: skip
    assert (told["hardware"]["name"], told["hardware"]["memory_bytes"]) == ("NVIDIA H200", 150_754_820_096)
    of_jax = manifest_of(jax, says(jax, None), "m2")
    assert of_jax["versions"]["jax-cuda13-plugin"] == "0.11.2" and "configuration_left_open" not in of_jax
    on_cpu = manifest_of(cpu, says(cpu, None), "m3")
    assert on_cpu["hardware"] == {"name": "AMD EPYC", "cpu_cores": 16, "memory_bytes": 135_000_000_000}


def test_a_version_that_was_not_there_and_a_setting_json_cannot_have_are_refused(cuda, cpu):
    lacks = replace(cuda, precommit={**cuda.precommit, "versions": {"transformers": "not installed"}})
    with pytest.raises(EvidenceError, match="the version of 'transformers'"):
        manifest_of(lacks, says(lacks, cpu), "m1")
    for odd in (float("nan"), {1, 2}, b"bytes"):
        with pytest.raises(EvidenceError, match="none that JSON can have"):
            manifest_of(replace(cuda, config={**cuda.config, "data": {"odd": odd}}), says(cuda, cpu), "m1")


@pytest.mark.parametrize("name", ["", " ", "two\nlines", "m39 ", "TODO", "unknown", "x" * 101, None, 5])
def test_a_name_that_names_no_run_is_said_to_be_none(name):
    assert "run_id" in fault_of_name(name)
    assert fault_of_name("m39-local-cpu-proof") is None
