"""The contract, row by row: what the founding documents demand, through the command line, shell and files alone.

The docstring of each test begins with the rows it keeps. Rows that need a GPU or a TPU are kept up to the refusal here, and by
the recorded bundles for the rest; tests/gpu runs them on a GPU. One run on the CPU (row A3, as written) serves most rows.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, put_into_hub_cache, write_small_model
from tests.program import environment, refused

ROWS = {*(f"A{n}" for n in range(1, 7)), "B", *(f"C{n}" for n in range(1, 10)), *(f"D{n}" for n in range(1, 5)),
        *(f"E{n}" for n in range(1, 7)), *(f"F{n}" for n in range(1, 5))}  # fmt: skip

# What the contract fixes verbatim.
COMMANDS = {
    "A1": "python training_pt/train.py --config training/configs/submission_local_gpu_gpt2.yaml --output ./output/m40_gpu_run"
    " --dataset dev-reasoning-v2 --device cuda --max_steps 50",
    "A2": "python training/run_train_jax.py --config training/configs/submission_local_gpu.yaml --dataset dev-reasoning-v2"
    " --device gpu --output ./output/local_gpu_run",
    "A3": "python training_pt/train.py --config training/configs/submission_local_cpu_gpt2.yaml --output DIR"
    " --dataset dev-reasoning-v2 --device cpu",
    "A4": 'pip install -e ".[training]"',
    "A5": "tunix-rt doctor --device cuda --prove",
    "A6": "python training/run_train_jax.py --config training/configs/submission_tpu.yaml --dataset dev-reasoning-v2"
    " --device tpu --output DIR_TPU",
}
USING, PREFLIGHT, COMPUTED = "Using device: cuda", "device=cuda", "GPU computation successful"
LOUD = r"OVER 1B PARAMETERS ON A GPU: [\d,]+ parameters, [\d.]+ GiB predicted; the TPU configuration is submission_tpu\.yaml"
BLOCKED = "TPU execution blocked due to Gemma 256K vocab + 16GB HBM limit. See M38 audit."
NO_TPU_RUN = "No TPU run has been made by this project"
CPU_RUN_ID = "m39-local-cpu-proof"
BAD_CONFIG, BAD_INPUT, NO_DEVICE, TOO_BIG, BAD_EVIDENCE, STOPPED = 2, 3, 4, 5, 6, 7
CONFIGS = {  # row B: model, arithmetic
    "smoke_tiny": ("tiny-gemma3", "float32"), "submission_gemma_flax": ("google/gemma-2b", "bfloat16"),
    "submission_tpu": ("google/gemma-2b", "bfloat16"), "submission_local_gpu": ("google/gemma-2b", "bfloat16"),
    "submission_local_gpu_gpt2": ("gpt2", "float32"), "submission_local_cpu_gpt2": ("gpt2", "float32"),
    "submission_local": ("google/gemma-3-1b-it", "float32"),
}  # fmt: skip
FLAT = "device: gpu\nbatch_size: 1\nmax_seq_length: 128\ngradient_accumulation_steps: 4\ndtype: bfloat16\noptimizer: adafactor\n"
BUNDLES = {  # device, engine, least steps
    "m39_v1": ("cuda", "jax", 300), "m39_cpu_v1": ("cpu", "torch", 20), "m40_v1": ("cuda", "torch", 50),
    "demo_v1": ("cpu", "torch", 200), "gemma3_270m_gsm8k_v1": ("cuda", "torch", 300),
}  # fmt: skip
EVERY_BUNDLE = ("run_manifest.json", "eval_summary.json", "training_log.txt", "README.md", "SHA256SUMS")
OF_A_GPU = ("env_info.txt", "torch_version.txt", "cuda_check.txt", "training_log.txt", "nvidia_smi.txt", "README.md")
PLACEHOLDERS = {"", "unknown", "n/a", "nan", "null", "todo", "tbd", "placeholder", "fixme"}

# What GPU users set; it must change neither a TPU compile nor a run on the CPU (row C8).
FOREIGN = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.55", "CUDA_VISIBLE_DEVICES": "3",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}  # fmt: skip
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiling takes longest
WITHOUT_QUESTIONS = "--set evaluation.enabled=false"

without_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="a GPU is present; tests/gpu keeps these rows")
without_tpu = pytest.mark.skipif(
    any(Path(node).exists() for node in ("/dev/accel0", "/dev/vfio/0")), reason="a TPU is present"
)
each_bundle = pytest.mark.parametrize("name", BUNDLES)
each_gpu_bundle = pytest.mark.parametrize("name", [name for name, (device, *_) in BUNDLES.items() if device == "cuda"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Clone:
    """A clone with its own commit, and `python` and `tunix-rt` on the PATH of its shell."""

    root: Path
    hub: Path
    commit: str
    """Revision of the gpt2 in the hub cache."""

    def sh(self, command: str, *, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        variables = environment(HF_HUB_CACHE=str(self.hub), PYTHONPATH=str(self.root / "src")) | extra
        variables["PATH"] = f"{self.root / 'bin'}{os.pathsep}{variables['PATH']}"
        return subprocess.run(
            ["sh", "-c", command], cwd=cwd or self.root, env=variables, capture_output=True, text=True
        )

    def ok(self, command: str, *, code: int = 0, cwd: Path | None = None, **extra: str) -> str:
        done = self.sh(command, cwd=cwd, **extra)
        assert done.returncode == code, done.stderr
        return done.stdout

    def plan(self, arguments: str) -> dict[str, Any]:
        return json.loads(self.sh(f"tunix-rt plan {arguments} --json").stdout)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    folder = tmp_path_factory.mktemp("contract")
    root, hub = folder / "clone", folder / "hub"
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "packaged")
    for name in ("src/tunix_rt", "training", "training_pt"):
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("datasets", "evalsets", "models", "presets"):
        (root / name).symlink_to(ROOT / name)
    (root / "bin").mkdir()
    for name, run in (("python", sys.executable), ("tunix-rt", f"{sys.executable} -m tunix_rt")):
        (root / "bin" / name).write_text(f'#!/bin/sh\nexec {run} "$@"\n')
        (root / "bin" / name).chmod(0o755)
    identity = "-c user.name=test -c user.email=test@localhost -c commit.gpgsign=false"
    for command in ("init -q -b main", "add src", f"{identity} commit -q -m source"):
        subprocess.run(["git", "-C", root, *command.split()], check=True)
    return Clone(root=root, hub=hub, commit=put_into_hub_cache("gpt2", "gpt2", hub))


@pytest.fixture(scope="module")
def cpu_run(clone: Clone) -> Path:
    """Row A3 as written: 20 steps of a gpt2 with random weights from the hub cache."""
    clone.ok(COMMANDS["A3"])
    return clone.root / "DIR"


@pytest.fixture(scope="module")
def bundle(clone: Clone, cpu_run: Path) -> Path:
    clone.ok(f"tunix-rt evidence collect {cpu_run} --to new_bundle --repository . --run-id {CPU_RUN_ID}")
    return clone.root / "new_bundle"


@pytest.fixture(scope="module")
def reproduced(clone: Clone, bundle: Path) -> Path:
    """The command in the bundle's README, among variables for GPUs, interrupted after step 3 and resumed up to step 6."""
    written = re.findall(r"^tunix-rt train .*$", read(bundle / "README.md"), flags=re.MULTILINE)
    command = next(line for line in written if "--output ../" in line)
    for more in ("--stop-after 3", "--resume --stop-after 6"):
        clone.ok(f"{command} {WITHOUT_QUESTIONS} {more}", code=STOPPED, cwd=bundle, **FOREIGN)
    return bundle / re.search(r"--output (\S+)", command)[1]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def facts(path: Path) -> Any:
    return json.loads(read(path))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read(path).splitlines()]


def recorded(name: str) -> Path:
    return ROOT / "submission_runs" / name


def manifest_of(name: str) -> dict[str, Any]:
    return facts(recorded(name) / "run_manifest.json")


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def settings(folder: Path) -> dict[str, Any]:
    """Of a run, also of one that was refused: `section.name` to value."""
    sections = yaml.safe_load(read(folder / "config.yaml"))
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def computer(name: str, folder: Path, **torch: Any) -> Path:
    """Facts of another computer, as `tunix-rt doctor --facts-only` writes them."""
    seen = facts(ROOT / "tests" / "facts" / f"{name}.json")["facts"]
    seen["torch"] = seen["torch"] | torch
    (folder / "facts.json").write_text(json.dumps(seen))
    return folder / "facts.json"


# --- A, B: commands and configurations ---------------------------------------------------------------------------------


def refused_run(clone: Clone, command: str, words: str) -> Path:
    """The folder of a run that ended with exit 4 before training, after a look at what it left."""
    said = refused(clone.sh(command), NO_DEVICE)
    assert words in said
    folder = clone.root / re.search(r"--output (\S+)", command)[1]
    report = next(part for part in re.findall(r"\S+doctor\.json", said))
    assert facts(clone.root / report)["facts"], "the whole report is kept, and the error names its path"
    result = facts(folder / "result.json")
    assert (result["status"], result["exit_code"]) == ("refused", NO_DEVICE)
    assert not {path.name for path in folder.iterdir()} & {"metrics.jsonl", "checkpoints", "final_model", "eval"}
    assert "Using device" not in said
    return folder


@without_gpu
def test_a_gpu_that_is_not_there_refuses_the_gpu_commands_as_written_and_nothing_falls_back(clone):
    """A1, A2, C2, C6: exit 4, the path of the report, no training; `gpu` is resolved to `cuda`."""
    gpt2 = settings(refused_run(clone, COMMANDS["A1"], "no GPU present"))
    assert (gpt2["model.model_name_or_path"], gpt2["training.max_steps"]) == ("gpt2", 50)
    gemma = settings(refused_run(clone, COMMANDS["A2"], "no GPU present"))
    assert (gemma["training.backend"], gemma["training.device"]) == ("jax", "cuda")


def test_the_command_for_the_cpu_trains_as_written(clone, cpu_run):
    """A3, C1, C9: platform, device, count and memory in the first lines, then the preflight line."""
    assert facts(cpu_run / "result.json")["status"] == "completed"
    top = "\n".join(read(cpu_run / "training_log.txt").splitlines()[:8])
    assert re.search(r"Platform: .*\n.*Device kind: .*count 1.*memory [\d.]+ GiB", top) and "Using device: cpu" in top
    preflight = rf"Preflight: model=gpt2 revision={clone.commit} parameters=66,432 device=cpu dtype=float32"
    assert re.search(preflight, top)


def test_a_model_that_is_not_to_be_had_is_never_swapped(clone, tmp_path):
    """A3: exit 3, and the two ways on."""
    said = refused(clone.sh(COMMANDS["A3"].replace("DIR", "NONE"), HF_HUB_CACHE=str(tmp_path)), BAD_INPUT)
    assert "gpt2" in said and "local model folder" in said and "--weights random" in said


def test_the_extra_for_training_brings_the_pytorch_path_and_no_jax_and_leaves_torch_alone():
    """A4: by the metadata, and by what pip would install here, where a torch is."""
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    brought, waiting = [], ["tunix-rt[training]"]
    while waiting:
        own = re.fullmatch(r"tunix-rt\[(.+)\]", one := waiting.pop())
        waiting += [dependency for name in own[1].split(",") for dependency in extras[name]] if own else []
        brought += [] if own else [one]
    names = {re.match(r"[\w-]+", one)[0] for one in brought}
    assert {"torch", "transformers", "safetensors"} <= names and not names & {"jax", "jaxlib", "optax", "flax"}
    assert all(re.fullmatch(r"torch>=[\d.]+", one) for one in brought if one.startswith("torch")), (
        "no build, no upper pin"
    )
    assert COMMANDS["A4"] in read(ROOT / "tunix-rt.md")
    offline = ["--disable-pip-version-check", "--dry-run", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, f"{ROOT}[training]"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^Would install (.*)-[\d.]+$", done.stdout, flags=re.MULTILINE) == ["tunix-rt"]


@without_gpu
def test_the_gpu_verification_is_one_command_and_does_not_pass_without_a_gpu(clone):
    """A5: exit 4 here; the line and the 4096 x 4096 product are in the bundles of a GPU."""
    done = clone.sh(COMMANDS["A5"])
    assert done.returncode == NO_DEVICE and "no GPU present" in done.stdout + done.stderr
    assert COMPUTED not in done.stdout + done.stderr


@each_gpu_bundle
def test_a_recorded_gpu_computed_before_it_trained(name):
    """A5, A1, C1: a 4096 x 4096 product, the fixed lines, the device in the first lines of the log."""
    check, log = read(recorded(name) / "cuda_check.txt"), read(recorded(name) / "training_log.txt")
    assert COMPUTED in check and COMPUTED in log and "4096 x 4096" in check
    top = log.splitlines()[:8]
    assert sum(line.endswith(USING) for line in top) == 1
    assert sum("Preflight: " in line and f" {PREFLIGHT} " in line for line in top) == 1
    assert any("Device kind: " in line and "count " in line and "memory " in line for line in top)


@without_tpu
def test_the_tpu_command_runs_as_written_up_to_the_tpu_and_the_notebook_runs_it(clone):
    """A6, C2: exit 4 without a TPU; tests/e2e/test_kaggle_notebook.py runs the cells on eight virtual devices."""
    run = settings(refused_run(clone, COMMANDS["A6"], "no TPU present"))
    assert (run["training.backend"], run["training.device"], run["training.max_steps"]) == ("jax", "tpu", 300)
    cells = facts(ROOT / "notebooks" / "kaggle_tpu.ipynb")["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert all(f'"{word}"' in code for word in COMMANDS["A6"].split()[1:] if word != "DIR_TPU")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_loads_with_its_model_and_arithmetic(clone, name):
    """B: all seven files."""
    planned = clone.plan(f"training/configs/{name}.yaml --on h200")
    assert (planned["model"], planned["memory"]["dtype"]) == CONFIGS[name]


@without_gpu
@pytest.mark.parametrize("source", ["training/configs/submission_local_gpu.yaml", "flat.yaml"])
def test_the_memory_safe_settings_hold_in_the_file_and_in_the_flat_snippet_as_pasted(clone, source):
    """B: device gpu, batch 1, length 128, accumulation 4, bfloat16, adafactor; smoke steps apply when given."""
    (clone.root / "flat.yaml").write_text(FLAT)
    output = f"refused-{Path(source).stem}"
    given = f"python training_pt/train.py --config {source} --model gpt2 --dataset dev-reasoning-v2 --output {output}"
    run = settings(refused_run(clone, f"{given} --smoke_steps 3", "no GPU present"))
    wanted = {
        "training.device": "cuda", "training.per_device_train_batch_size": 1, "data.max_length": 128,
        "training.gradient_accumulation_steps": 4, "training.dtype": "bfloat16", "training.optim": "adafactor",
        "training.max_steps": 3,
    }  # fmt: skip
    assert wanted.items() <= run.items()
    assert "256 only if 128 passes" in read(ROOT / "training" / "configs" / "submission_local_gpu.yaml")


def test_the_branch_of_msgpack_weights_is_refused_with_the_revision_to_use(clone):
    """B: `revision: flax`."""
    (clone.root / "flax.yaml").write_text("model:\n  model_name_or_path: google/gemma-2b\n  revision: flax\n")
    said = refused(clone.sh("tunix-rt plan flax.yaml --on h200"), BAD_CONFIG)
    assert "flax" in said and "revision: main" in said


# --- C: hardware -------------------------------------------------------------------------------------------------------

CAUSES = {
    "rtx5090-torch26-cu124": "wheel", "rtx5090-cu128-driver565": "driver", "h200-masked-empty": "masked",
    "container-without-gpus-flag": "container", "nvidiactl-not-writable": "permissions",
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CAUSES.items())
def test_a_failure_is_classified_with_a_way_out(clone, tmp_path, name, kind):
    """C6, C3, C4: wheel limitation, driver, mask, container, permissions."""
    done = clone.sh(f"tunix-rt doctor --device cuda --json --facts {computer(name, tmp_path)}")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["kind"]) == (NO_DEVICE, "refused", kind)
    assert report["problem"] and report["fix"]


def test_a_driver_below_what_the_gpu_needs_stops_before_anything_is_installed(clone, tmp_path):
    """C3: an RTX 5090 with a driver from before CUDA 12.8."""
    old = computer("rtx5090-cu128-driver565", tmp_path)
    said = refused(clone.sh(f"tunix-rt env create --device cuda --dry-run --facts {old}"), NO_DEVICE)
    assert "driver 570 or newer" in said and "565.77" in said and "pip install" not in said


def test_a_warning_about_an_unsupported_capability_is_a_failure(clone, tmp_path):
    """C4: whatever else about the computer is in order."""
    command = "tunix-rt doctor --device cuda --json --facts {}"
    ready = json.loads(clone.ok(command.format(computer("rtx5090-ready", tmp_path))))
    assert ready["verdict"] != "refused"
    warned = (
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation."
    )
    report = json.loads(clone.ok(command.format(computer("rtx5090-ready", tmp_path, said=warned)), code=NO_DEVICE))
    assert report["kind"] == "wheel"


def test_an_environment_for_the_gpu_gets_the_right_wheel_one_fallback_and_never_one_for_the_cpu(clone, tmp_path):
    """C5: tests/e2e/test_env_create.py makes it, and lets both wheels fail."""
    said = clone.ok(
        f"tunix-rt env create --device cuda --dry-run --facts {computer('rtx5090-torch26-cu124', tmp_path)}"
    )
    assert ".venv-gpu" in said and "torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130" in said
    assert "torch==2.13.0+cu129" in said and "+cpu" not in said and "whl/cpu" not in said
    assert "from source" in read(ROOT / "docs" / "doctor" / "wheel-lacks-architecture.md")
    assert not (clone.root / ".venv-gpu").exists()


@each_gpu_bundle
def test_gpu_memory_was_allocated_under_our_process_id_and_no_capability_warning_was_given(name):
    """C7, C4: NVML and nvidia-smi agree on the process."""
    result = facts(recorded(name) / "result.json")
    pids = {sample["pid"] for sample in result["gpu_memory"]}
    assert len(pids) == 1 and all(
        sample["by"] == "nvml" and sample["used_bytes"] > 2**30 for sample in result["gpu_memory"]
    )
    assert f" {pids.pop()} " in read(recorded(name) / "nvidia_smi.txt").split("Processes:")[1]
    assert "is not compatible with the current PyTorch" not in read(recorded(name) / "training_log.txt")


@pytest.mark.slow
def test_variables_for_gpus_do_not_change_a_tpu_compile(clone, tmp_path):
    """C8: the TPU compiler needs no TPU; tests/invariant/test_tpu_compiler.py asks it for a smaller step."""
    if "libtpu" not in clone.ok("python -m pip list --disable-pip-version-check --format freeze"):
        pytest.skip("libtpu is not installed: pip install 'tunix-rt[tpu]'")
    model = clone.hub / "models--gpt2" / "snapshots" / clone.commit
    command = f"tunix-rt plan --model {model} --backend jax --device tpu --topology v5e:2x4 --json {WITHOUT_QUESTIONS}"
    command += " --set data.max_length=64 --set training.per_device_train_batch_size=1"
    caches = ({"XDG_CACHE_HOME": str(tmp_path / name)} for name in ("plain", "foreign"))
    plain = json.loads(clone.ok(command, **next(caches)))["verdict"]
    assert plain["devices"] == 8
    assert json.loads(clone.ok(command, **next(caches), **FOREIGN))["verdict"]["memory"] == plain["memory"]


# --- D: guardrails -----------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_fit_is_refused_before_weights_load_with_what_to_change(clone, tmp_path):
    """D1: exit 5; the model has no weights to load."""
    model = write_small_model("llama", tmp_path / "model")
    large = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 100, "vocab_size": 262144}
    (model / "config.json").write_text(json.dumps(facts(model / "config.json") | large))
    command = f"tunix-rt train smoke_tiny --model {model} --weights random --device cpu --output {tmp_path / 'run'}"
    assert re.search(r"GiB predicted.*weights", refused(clone.sh(command), TOO_BIG), re.DOTALL)
    assert facts(tmp_path / "run" / "result.json")["status"] == "refused"


def test_a_model_over_1b_on_a_gpu_trains_with_one_loud_line():
    """D2: parameters, predicted GiB, the TPU configuration."""
    assert len(re.findall(LOUD, read(recorded("m39_v1") / "training_log.txt"))) == 1
    assert not re.search(LOUD, read(recorded("m40_v1") / "training_log.txt"))


def test_lora_is_the_last_remedy_and_never_chosen_silently(clone):
    """D3: named where every parameter does not fit, and not before."""
    command = "submission_local_gpu --model gemma-2-2b --on"
    small, larger = clone.plan(f"{command} 7gb"), clone.plan(f"{command} 8gb")
    assert not small["fit"]["fits"] and not small["proposals"] and "training.lora_rank" in small["last_resorts"][-1]
    assert not larger["fit"]["fits"] and larger["proposals"] and "lora_rank" not in json.dumps(larger["proposals"])
    assert all(settings(recorded(name)).get("training.lora_rank") is None for name in BUNDLES)


def test_the_tpu_story_is_told_in_the_demanded_words_and_with_the_later_finding():
    """D4: the sentence, three lines after it, the audit, and no claim of a TPU run."""
    for name in ("configs/submission_tpu.yaml", "train_jax.py"):
        first, *finding, after = read(ROOT / "training" / name).splitlines()[:5]
        assert first == f"# {BLOCKED}" and finding[0].startswith("# Later finding:")
        assert all(line.startswith("# ") for line in finding) and not after.startswith("#")
        assert finding == read(ROOT / "training" / "configs" / "submission_tpu.yaml").splitlines()[1:4]
    audit = read(ROOT / "docs" / "decisions" / "m38-audit.md")
    assert all(words in audit for words in ("What was believed", "reconstruction", "`jax.jit`", "donation", "sharding"))
    pages = (
        "decisions/m38-audit", "decisions/gemma-choice", "guides/kaggle-tpu", "guides/tpu-submission",
        "reference/jax-engine",
    )  # fmt: skip
    for page in (ROOT / "tunix-rt.md", *(ROOT / "docs" / f"{page}.md" for page in pages)):
        assert NO_TPU_RUN in " ".join(read(page).split()), page


@pytest.mark.slow
def test_the_tpu_compiler_refuses_the_setting_of_m38_and_accepts_the_sharded_one(clone):
    """D4: verdicts of the real compiler for Gemma 2B on a v5e-8."""
    clone.ok("tunix-rt plan submission_tpu_m38 --topology v5e:2x4", code=TOO_BIG)
    clone.ok("tunix-rt plan submission_tpu --topology v5e:2x4")


# --- E: training -------------------------------------------------------------------------------------------------------


def test_the_pytorch_path_is_that_of_transformers_and_trained_in_bfloat16_on_a_gpu(cpu_run):
    """E1: `AutoModelForCausalLM` loads the result."""
    import transformers

    assert transformers.AutoModelForCausalLM.from_pretrained(cpu_run / "final_model").num_parameters() == 66_432
    run = settings(recorded("gemma3_270m_gsm8k_v1"))
    assert (run["training.backend"], run["training.dtype"]) == ("torch", "bfloat16")


@pytest.mark.slow
def test_mixed_precision_and_gradient_checkpointing_give_nearly_the_loss_of_float32(clone, cpu_run):
    """E1: both are settings."""
    mixed = "--set training.dtype=bfloat16 --set training.gradient_checkpointing=true --stop-after 2 --output mixed"
    clone.ok(f"tunix-rt train {cpu_run / 'config.yaml'} {WITHOUT_QUESTIONS} {mixed}", code=STOPPED)
    for one, other in zip(
        lines(clone.root / "mixed" / "metrics.jsonl"), lines(cpu_run / "metrics.jsonl")[:2], strict=True
    ):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02) and one["loss"] != other["loss"]


def test_the_jax_path_trained_gemma_2b_in_bfloat16_and_the_choice_is_written_down():
    """E2, E6: Gemma 2B or Gemma 3 1B, PyTorch yes or no, and the status of M36 to M40 with figures of the bundles."""
    run = manifest_of("m39_v1")["configuration"]
    assert (run["model"]["model_name_or_path"], run["training"]["dtype"]) == ("google/gemma-2b", "bfloat16")
    assert "**Gemma 2B for submission**" in read(ROOT / "docs" / "decisions" / "gemma-choice.md")
    decided = read(ROOT / "docs" / "decisions" / "pytorch.md")
    assert all(words in decided for words in ("**Yes**", "memory runs out", "debugging", "faster iteration"))
    status = read(ROOT / "tunix-rt.md")
    assert all(f"| M{number} |" in status for number in range(36, 41))
    for name in BUNDLES:
        row = next(line for line in status.splitlines() if line.startswith(f"| [{name}]"))
        assert f"{manifest_of(name)['final_loss']:.4f}" in row and str(manifest_of(name)["steps_completed"]) in row


@pytest.mark.slow
def test_tunix_trains_in_our_loop_and_loads_what_we_save():
    """E2: both directions, in the environment of google-tunix."""
    if not (ROOT / ".venv-tunix" / "bin" / "python").exists():
        pytest.skip("google-tunix is not installed: run scripts/tunix")
    subprocess.run([ROOT / "scripts" / "tunix"], check=True)


@each_bundle
def test_hundreds_of_steps_were_recorded_on_each_engine_with_finite_losses_at_every_step(name):
    """E3, F1: 300 steps with JAX on a GPU; 200 and 300 with PyTorch."""
    device, backend, least = BUNDLES[name]
    manifest, steps = manifest_of(name), lines(recorded(name) / "metrics.jsonl")
    assert (manifest["device"], manifest["backend"]) == (device, backend)
    assert len(steps) == manifest["steps_completed"] >= least
    assert [one["step"] for one in steps] == list(range(1, len(steps) + 1))
    assert all(0 < one["loss"] < 20 for one in steps) and manifest["final_loss"] == steps[-1]["loss"]


def test_an_interrupted_run_keeps_its_steps_and_resumes_exactly_whatever_is_set_for_gpus(cpu_run, reproduced):
    """E3, C8, F4: the README's command gives the losses of the run bit for bit, over an interruption."""
    whole, again = lines(cpu_run / "metrics.jsonl"), lines(reproduced / "metrics.jsonl")
    assert len(whole) == 20 and len(again) == 6
    for name in ("step", "loss_hex", "grad_norm", "lr", "batch"):
        assert [one[name] for one in again] == [one[name] for one in whole[:6]], name
    assert list((cpu_run / "checkpoints").glob("step-000020/model.safetensors"))
    assert "Using device: cpu" in read(reproduced / "training_log.txt")


def test_answers_are_sampled_before_and_after_training(cpu_run):
    """E4: to the same questions, and readable in samples.md."""
    before, after = (lines(cpu_run / "eval" / f"predictions-{when}.jsonl") for when in ("before", "after"))
    assert [one["id"] for one in before] == [one["id"] for one in after] and len(before) == 100
    assert before != after and read(cpu_run / "samples.md")


def test_both_engines_read_one_configuration_and_agree_on_the_loss(clone, cpu_run):
    """E5: same batches, losses within 1e-4; what JAX refuses stands in one table and is refused by name."""
    command = (
        f"tunix-rt train training/configs/submission_local_cpu_gpt2.yaml --backend jax {WITHOUT_QUESTIONS} --output jax"
    )
    clone.ok(f"{command} --stop-after 12", code=STOPPED, XLA_FLAGS=QUICK)
    pairs = list(zip(lines(clone.root / "jax" / "metrics.jsonl"), lines(cpu_run / "metrics.jsonl"), strict=False))
    assert len(pairs) == 12 and all(one["batch"] == other["batch"] for one, other in pairs)
    assert all(one["loss"] == pytest.approx(other["loss"], rel=1e-4) for one, other in pairs)
    table = read(ROOT / "docs" / "reference" / "jax-engine.md")
    for setting in ("training.lora_rank=4", "training.optim_in_backward=true"):
        name = setting.partition("=")[0]
        assert f"| `{name}` | {BAD_CONFIG} |" in table
        assert name in refused(clone.sh(f"{command}-refused --set {setting}"), BAD_CONFIG)


# --- F: evidence -------------------------------------------------------------------------------------------------------


@each_bundle
def test_a_recorded_bundle_is_complete_without_nulls_and_placeholders_and_verifies(clone, name):
    """F1, F3: commit, hardware, memory, configuration, steps and loss; `evidence verify` against this repository."""
    folder, manifest = recorded(name), manifest_of(name)
    assert all((folder / file).stat().st_size > 50 for file in EVERY_BUNDLE)
    assert not (folder / "bundle.json").exists(), "run_manifest.json is the one fact file"
    assert re.fullmatch(r"[0-9a-f]{40}", manifest["commit"])
    assert manifest["hardware"]["name"] and manifest["hardware"]["memory_bytes"] > 2**30
    assert manifest["steps_completed"] > 0 and manifest["final_loss"] > 0 and manifest["configuration"]["training"]
    for value in leaves(manifest):
        assert value is not None and str(value).strip().lower() not in PLACEHOLDERS
    assert (name == "m39_cpu_v1") == (manifest["run_id"] == CPU_RUN_ID)
    for file in set(OF_A_GPU) - set(EVERY_BUNDLE) - {"env_info.txt", "torch_version.txt"}:
        assert (folder / file).exists() == (manifest["device"] == "cuda"), f"{file} belongs to a GPU"
    has_commit = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", manifest["commit"]], capture_output=True)
    repository = f" --repository {ROOT}" if has_commit.returncode == 0 else ""  # a shallow clone lacks it
    clone.ok(f"tunix-rt evidence verify {folder}{repository}")


def test_the_gpu_milestone_has_its_files_and_a_readme_with_versions_gpu_and_speed():
    """F2: PyTorch and CUDA version, GPU, compute capability, tokens/s against the CPU."""
    folder, manifest = recorded("m40_v1"), manifest_of("m40_v1")
    assert all((folder / file).stat().st_size > 50 for file in OF_A_GPU)
    hardware, readme = manifest["hardware"], read(folder / "README.md")
    check = read(folder / "cuda_check.txt")
    cuda = re.search(r"torch\.version\.cuda: (\S+)", check)[1]
    assert "torch.cuda.is_available(): True" in check and f"device name: {hardware['name']}" in check
    assert "compute capability: (" in check and manifest["versions"]["torch"].split("+")[0] in check
    assert all(hardware[key] in read(folder / "env_info.txt") for key in ("driver", "driver_cuda"))
    assert manifest["versions"]["torch"].split("+")[0] in read(folder / "torch_version.txt")
    for words in (manifest["versions"]["torch"], cuda, hardware["name"], hardware["capability"], PREFLIGHT):
        assert words in readme
    assert re.search(r"tokens/s .*CPU", readme) and lines(folder / "cpu" / "metrics.jsonl")


def test_a_new_bundle_is_written_by_the_program_verifies_and_states_host_memory(clone, cpu_run, bundle):
    """F3, F1: hardware is what ran; the GPU files are absent on a CPU."""
    manifest, result = facts(bundle / "run_manifest.json"), facts(cpu_run / "result.json")
    assert (manifest["run_id"], manifest["device"]) == (CPU_RUN_ID, "cpu")
    assert (manifest["final_loss"], manifest["steps_completed"]) == (result["final_loss"], 20)
    assert 0 < manifest["hardware"]["memory_bytes"] <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert not {path.name for path in bundle.iterdir()} & {"cuda_check.txt", "nvidia_smi.txt"}
    clone.ok(f"tunix-rt evidence verify {bundle} --repository .")


@pytest.mark.parametrize("name", ["README.md", "metrics.jsonl"])
def test_evidence_typed_by_hand_does_not_verify(clone, bundle, tmp_path, name):
    """F3: exit 6 for one changed digit."""
    forged = shutil.copytree(bundle, tmp_path / "forged")
    figure = re.search(r"\d\.\d+", read(forged / name))[0]
    (forged / name).write_text(read(forged / name).replace(figure, f"{figure}1", 1), encoding="utf-8")
    done = clone.sh(f"tunix-rt evidence verify {forged}")
    assert refused(done, BAD_EVIDENCE) and name in done.stdout + done.stderr


def test_every_row_of_the_contract_has_a_test():
    tests = [value for name, value in globals().items() if name.startswith("test_") and value.__doc__]
    kept = {row for test in tests for row in test.__doc__.partition(":")[0].split(", ")}
    assert kept == ROWS
