"""Runs for tests of bundles. No GPU is needed: a run on the CPU is dressed as one on a GPU, its files edited and hashed anew."""

import hashlib
import json
import shutil
from pathlib import Path

from tunix_rt.evidence.hashes import write_hashes
from tunix_rt.rundir import RunDir, json_line, sha256_file, sha256_text, write_json, write_text

PID = 4711
GPU = {"index": 0, "name": "NVIDIA H200", "total_bytes": 150_754_820_096, "capability": [9, 0]}
NVIDIA = {"driver_version": "580.95.05", "driver_cuda": "13.0", "gpus": [GPU]}
TORCH = {"version": "2.13.0+cu130", "cuda_build": "13.0", "cuda_available": True}
CHOICE = {"device": "cuda", "kind": "NVIDIA H200", "count": 1, "memory_bytes": 150_754_820_096}
PROOF = {"ok": True, "device": "cuda", "results": [{"name": "product", "ok": True}, {"name": "attention", "ok": True}]}
MEMORY = [
    {"step": 1, "pid": PID, "used_bytes": 3_000_000_000, "by": "nvml"},
    {"step": 3, "pid": PID, "used_bytes": 2_000_000_000, "by": "nvml"},
]
FILES = {
    "env_info.txt": "ram: 135000000000 bytes\ndriver: 580.95.05\ndriver cuda: 13.0\ngpu 0: NVIDIA H200\n",
    "torch_version.txt": "torch: 2.13.0+cu130\ncuda build: 13.0\n",
    "cuda_check.txt": (
        "torch.__version__: 2.13.0+cu130\ntorch.cuda.is_available(): True\ndevice: NVIDIA H200\ncapability: (9, 0)\n"
        "GPU computation successful\n"
    ),
    "training_log.txt": (
        "2026-11-15T09:20:41Z INFO Using device: cuda\n"
        "2026-11-15T09:20:41Z INFO Preflight: model=tiny-gemma3 device=cuda dtype=float32 weights=pretrained\n"
    ),
    "nvidia_smi.txt": (
        f"after step 1; our process id {PID}; NVML: 3000000000 bytes under our process id\n\n"
        "| NVIDIA-SMI    Driver Version: 580.95.05    CUDA Version: 13.0 |\n"
        f"|    0   N/A  N/A    {PID}      C   python    2861MiB |\n"
    ),
}


def edit_json(path: Path, **changed) -> None:
    """Set the top-level values of a JSON file; `...` takes one out."""
    told = json.loads(path.read_text()) | changed
    write_json(path, {name: value for name, value in told.items() if value is not ...})


def dress_as_cuda(source: Path, folder: Path, **result) -> Path:
    """A copy of the CPU run `source` whose files say that it ran on a GPU, chained and hashed anew."""
    shutil.copytree(source, folder)
    run = RunDir(folder)
    facts = json.loads(run.doctor.read_text())["facts"] | {"nvidia": NVIDIA, "torch": TORCH}
    edit_json(run.doctor, facts=facts, choice=CHOICE, proof=PROOF)
    for name, text in FILES.items():
        write_text(folder / name, text)
    write_text(run.config, run.config.read_text().replace("device: cpu", "device: cuda"))
    edit_json(run.precommit, device="cuda", config_sha256=sha256_file(run.config))
    chain(run, faster=10)
    edit_json(run.result, device="cuda", gpu_memory=MEMORY, **result)
    write_hashes(run)
    return folder


def chain(run: RunDir, *, faster: float = 1) -> None:
    """Tie metrics and result to the precommitment again."""
    prev, text = hashlib.sha256(run.precommit.read_bytes()).hexdigest(), ""
    run_id = prev
    for line in run.metrics.read_text().splitlines():
        step = json.loads(line)
        step |= {"prev": prev, "seconds": step["seconds"] / faster}
        text += json_line(step)
        prev = sha256_text(json_line(step).removesuffix("\n"))
    write_text(run.metrics, text)
    edit_json(run.result, metrics_head=prev, run_id=run_id)
