"""Runs and bundles for tests. No GPU is needed: a run on the CPU is dressed as one on a GPU, its files edited and hashed anew."""

import json
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

from tests.program import ROOT, tunix_rt
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.doctor.prove import PROOF_NAMES, Proof, Proved, cuda_check_text
from tunix_rt.doctor.verdict import Ask
from tunix_rt.doctor.words import env_info_text, platform_words, torch_version_text
from tunix_rt.errors import TunixError
from tunix_rt.evidence.claims import claims_of, read_run
from tunix_rt.evidence.hashes import parse_hashes, write_hashes
from tunix_rt.evidence.manifest import manifest_of
from tunix_rt.evidence.provenance import provenance_of
from tunix_rt.evidence.readme import readme_text
from tunix_rt.rundir import RunDir, sha256_file, sha256_text, to_plain, write_json, write_text

PID = 4711
UUID = "GPU-00000001-51f0-4c1d-9d3e-0f2a6b7c8d9e"
GPU = {"index": 0, "name": "NVIDIA H200", "uuid": UUID, "total_bytes": 150_754_820_096, "capability": [9, 0]}
NVIDIA = {"driver_version": "580.95.05", "driver_cuda": "13.0", "gpus": [GPU]}
TORCH = {"version": "2.13.0+cu130", "cuda_build": "13.0", "cuda_available": True}
CHOICE = {"device": "cuda", "kind": "NVIDIA H200", "count": 1, "memory_bytes": 150_754_820_096}
PROVEN = Proof(
    backend="torch", device="cuda", dtype="float32", head_size=64, pid=4712, seconds=1.0,
    results=tuple(Proved(name=name, ok=True, detail="held") for name in PROOF_NAMES),
    about={
        "torch": "2.13.0+cu130", "is_available": True, "name": "NVIDIA H200", "capability": [9, 0], "uuid": UUID,
    },
)  # fmt: skip
PROOF = to_plain(PROVEN)
FILES = {
    "env_info.txt": "ram: 135000000000 bytes\ndriver: 580.95.05\ndriver cuda: 13.0\ngpu 0: NVIDIA H200\n",
    "torch_version.txt": "torch: 2.13.0+cu130\ncuda build: 13.0\n",
    "cuda_check.txt": cuda_check_text(PROVEN),
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

JAX = {
    "version": "0.11.2", "jaxlib": "0.11.2", "asked_for": "cuda", "platform": "gpu", "devices": ["NVIDIA H200"],
    "plugins": {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2"},
}  # fmt: skip
JAX_CHECK = {"cause": "jax-plugin-lacks-architecture", "verdict": "pass"}
JAX_PROVEN = Proof(
    backend="jax", device="cuda", dtype="float32", head_size=64, pid=4712, seconds=1.0, results=PROVEN.results,
    about={
        "jax": "0.11.2", "jaxlib": "0.11.2", "platform": "gpu", "name": "NVIDIA H200", "devices": 1,
        "capability": [9, 0], "bytes_limit": 138_000_000_000,
    },
)  # fmt: skip
"""As `backends/jax_proofs.py` tells it: without a uuid."""
JAX_FILES = FILES | {
    "env_info.txt": FILES["env_info.txt"] + "jax: 0.11.2\n",
    "torch_version.txt": "torch: not installed\n",
    "cuda_check.txt": cuda_check_text(JAX_PROVEN),
}


def git(repo: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(repo), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def make_repository(root: Path) -> Path:
    """A repository with the source that makes the run, so that nobody's edit of the working tree comes between."""
    ignore = shutil.ignore_patterns("__pycache__", "packaged")
    shutil.copytree(ROOT / "src" / "tunix_rt", root / "src" / "tunix_rt", ignore=ignore)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "source")
    return root


def collect(run, output, repo, *more) -> subprocess.CompletedProcess[str]:
    return tunix_rt("evidence", "collect", run, "--to", output, "--repository", repo, *more)


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def memory_samples(last: int, **changed) -> list[dict]:
    """What a run of `last` steps says of the GPU's memory."""
    first = {"step": 1, "pid": PID, "used_bytes": 3_000_000_000, "by": "nvml"}
    return [first | changed, first | {"step": last, "used_bytes": 2_000_000_000} | changed]


def edit_json(path: Path, **changed) -> None:
    """Set the top-level values of a JSON file; `...` takes one out."""
    told = json.loads(path.read_text()) | changed
    write_json(path, {name: value for name, value in told.items() if value is not ...})


def edit_text(path: Path, old: str, new: str) -> None:
    """Put `new` in place of every `old`, of which there must be one."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def dress_as_cuda(source: Path, folder: Path, *, backend: str = "torch") -> Path:
    """A copy of the CPU run `source` whose files say that it ran ten times as fast on a GPU, chained and hashed anew."""
    shutil.copytree(source, folder)
    run = RunDir(folder)
    with_jax, told = backend == "jax", json.loads(run.doctor.read_text())
    facts = told["facts"] | {"nvidia": NVIDIA} | ({"jax": JAX, "torch": None} if with_jax else {"torch": TORCH})
    seen = facts_from_json(facts)
    checks = to_plain(judge(seen, Ask(device="cuda", backend=backend, dtype="float32")))
    proof = to_plain(JAX_PROVEN) if with_jax else PROOF
    edit_json(run.doctor, facts=facts, checks=checks, choice=CHOICE, proof=proof)
    for name, text in (JAX_FILES if with_jax else FILES).items():
        if name != "training_log.txt":
            write_text(folder / name, text)
    write_text(run.env_info, env_info_text(seen))
    write_text(run.torch_version, torch_version_text(seen))
    dress_doctor(run, backend)
    log = run.log.read_text()
    log = log.replace("Using device: cpu", "Using device: cuda").replace("device=cpu", "device=cuda")
    log = "".join(line for line in log.splitlines(keepends=True) if " INFO Compile: " not in line)
    last, stamp = len(run.metrics.read_text().splitlines()), log.splitlines()[-1][:21]
    log += f"{stamp}INFO Proof on cuda in float32: held (1.0 s)\n"
    for one in memory_samples(last):
        where = f"{one['used_bytes'] / 2**30:.3f} GiB under our process id {PID} (NVML, after step {one['step']})"
        log += f"{stamp}INFO GPU memory: {where}\n"
    write_text(run.log, log)
    dress_processes(run, {"jax": "0.11.2", "jaxlib": "0.11.2"} if with_jax else {})
    edit_text(run.config, "device: cpu", "device: cuda")
    edit_json(run.precommit, device="cuda")
    if with_jax:
        versions = json.loads(run.precommit.read_text())["versions"]
        edit_json(run.precommit, versions=versions | {"jax": "0.11.2", "jaxlib": "0.11.2"})
    faster = re.compile(r'"seconds": ([^,]+)')
    write_text(run.metrics, faster.sub(lambda took: f'"seconds": {float(took[1]) / 10!r}', run.metrics.read_text()))
    if run.eval_summary.exists():
        edit_json(run.eval_summary, device="cuda")
    at = json.loads(run.result.read_text())["finished"]
    edit_json(run.result, device="cuda", gpu_memory=memory_samples(len(run.metrics.read_text().splitlines()), at=at))
    smi = folder / "nvidia_smi.txt"
    drawn = f"{datetime.fromisoformat(at):%a %b %d %H:%M:%S %Y}"
    write_text(smi, smi.read_text().replace("\n\n", f"\n\n{drawn}\n", 1))
    dress_words(folder)
    chain(run)
    write_hashes(run)
    return folder


def dress_words(folder: Path) -> None:
    """What the log says of the computer and of its steps, as the other files now have it."""
    from tests.forging.folder import rebuild_log, swap_line  # which takes the edits of JSON from here

    told = json.loads((folder / "doctor.json").read_text())
    kind, count, size = (told["choice"][name] for name in ("kind", "count", "memory_bytes"))
    memory = f"memory {size / 2**30:.1f} GiB, {size / 2**30:.1f} GiB free"
    log = folder / "training_log.txt"
    swap_line(log, "Platform: .*", f"Platform: {platform_words(facts_from_json(told['facts']))}")
    swap_line(log, "Device kind: .*", f"Device kind: {kind}; count {count}; {memory}")
    rebuild_log(folder)


def dress_doctor(run: RunDir, backend: str) -> None:
    """Verdicts and texts as the doctor gives them of the facts made up."""
    told = json.loads(run.doctor.read_text())
    facts = facts_from_json(told["facts"])
    edit_json(run.doctor, checks=to_plain(judge(facts, Ask(device="cuda", backend=backend, dtype="float32"))))
    write_text(run.env_info, env_info_text(facts))
    write_text(run.torch_version, torch_version_text(facts))


def dress_processes(run: RunDir, versions: dict[str, str]) -> None:
    """The processes of a run as those that trained on the GPU above."""
    told = json.loads(run.processes.read_text())
    for process in told["processes"]:
        machine = process["machine"]
        gpu = {
            "name": GPU["name"],
            "capability": "9.0",
            "driver": NVIDIA["driver_version"],
            "cuda": "13.0",
            "cudnn": "91900",
        }
        process |= {"pid": PID, "machine": machine | {"device": "cuda", "gpu": gpu}}
        process["machine"]["versions"] = machine["versions"] | versions
    write_json(run.processes, told)


def chain(run: RunDir) -> None:
    """Tie the configuration, the metrics and the result to the precommitment again, whatever their lines hold."""
    edit_json(run.precommit, config_sha256=sha256_file(run.config))
    prev = run_id = sha256_file(run.precommit)
    lines, heads = [], [prev]
    for line in run.metrics.read_text().splitlines():
        lines.append(re.sub(r'"prev": "\w+"', f'"prev": "{prev}"', line))
        prev = sha256_text(lines[-1])
        heads.append(prev)
    write_text(run.metrics, "".join(f"{line}\n" for line in lines))
    edit_json(run.result, metrics_head=prev, run_id=run_id)
    if run.checkpoint_list.exists():
        told = json.loads(run.checkpoint_list.read_text())
        for entry in told["checkpoints"]:
            entry["metrics_head"] = heads[min(entry["step"], len(lines))]
        write_json(run.checkpoint_list, told)


def reseal(bundle: Path, *, chained: bool = True) -> None:
    """What a forger does after an edit: every chain, hash, figure and word of the bundle made anew, as far as it goes."""
    folders = [folder for folder in (bundle, bundle / "cpu") if folder.is_dir()]
    for folder in folders:
        if chained:
            chain(RunDir(folder))
        hashes = folder / "run-SHA256SUMS"
        lines = [line.split("  ", 1) for line in hashes.read_text().splitlines()]
        digests = {
            name: digest if not (folder / name).exists() else sha256_file(folder / name) for digest, name in lines
        }
        write_text(hashes, "".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    says = json.loads((bundle / "bundle.json").read_text())
    try:
        runs = [read_run(folder) for folder in folders]
        says |= claims_of(*runs, *[None] * (2 - len(folders)))
        write_json(bundle / "bundle.json", says)
        write_json(bundle / "run_manifest.json", manifest_of(runs[0], says, "forged"))
        write_text(bundle / "README.md", readme_text(says))
        ended, _ = parse_hashes((bundle / "run-SHA256SUMS").read_bytes())
        write_json(bundle / "provenance.intoto.json", provenance_of(runs[0], says, ended, "forged"))
    except (TunixError, ArithmeticError, ValueError, TypeError, KeyError):
        pass  # what cannot be computed stays as it was told
    write_hashes(RunDir(bundle))
