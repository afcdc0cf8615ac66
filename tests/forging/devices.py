"""Forgeries of the device: a run on the CPU told as one on a GPU, another GPU, another bundle's files, impossible figures."""

import re
from datetime import datetime, timedelta
from pathlib import Path

from tests.bundles import CHOICE, FILES, NVIDIA, PROOF, TORCH, memory_samples
from tests.forging.catalogue import ON_A_GPU, forgery
from tests.forging.folder import (
    configure,
    each_step,
    edited,
    metrics_of,
    put,
    read,
    rebuild_log,
    swap,
    swap_everywhere,
    swap_line,
)
from tests.forging.sealing import reseal
from tests.program import ROOT
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import facts_from_json
from tunix_rt.doctor.verdict import Ask
from tunix_rt.doctor.words import env_info_text, platform_words, torch_version_text
from tunix_rt.rundir import to_plain

GPU = "GPU"
SELF_REPORTED = (
    "every file that names the hardware is text that can be typed; only a replay on that GPU compares its bits, and a replay "
    "on a CPU is of class CROSS"
)


def _other_gpu_bundle(folder: Path) -> Path:
    """A committed bundle of another run on a GPU."""
    run_id = read(folder / "bundle.json")["run_id"]
    for told in sorted((ROOT / "submission_runs").glob("*/bundle.json")):
        says = read(told)
        if says["device"] == "cuda" and says["run_id"] != run_id:
            return told.parent
    raise AssertionError("there is one committed bundle of a GPU only")


def _borrowed(folder: Path, name: str) -> None:
    put(folder / name, (_other_gpu_bundle(folder) / name).read_bytes())
    reseal(folder)


# --- a run on the CPU -------------------------------------------------------------------------------------------------


def _relabel(folder: Path) -> None:
    configure(folder, "training", device="cuda")
    for name in ("precommit.json", "result.json", "eval_summary.json"):
        with edited(folder / name) as told:
            told["device"] = "cuda"


@forgery("a run on the CPU relabelled: device is cuda in every file that says it", group=GPU)
def forge_relabelled(folder: Path) -> None:
    _relabel(folder)
    swap(folder / "training_log.txt", "device: cpu", "device: cuda")
    swap(folder / "training_log.txt", "device=cpu", "device=cuda")
    reseal(folder)


@forgery("a run on the CPU relabelled, with a GPU's files and memory samples made up", group=GPU)
def forge_dressed_as_cuda(folder: Path) -> None:
    _dress(folder)
    reseal(folder)


@forgery(
    "a run on the CPU dressed as one on a GPU in every file, processes, times and process ids included", group=GPU,
    level="missed", why=SELF_REPORTED,
)  # fmt: skip
def forge_dressed_with_care(folder: Path) -> None:
    _dress(folder)
    dress_processes(folder)
    dress_doctor(folder)
    reseal(folder)


def _dress(folder: Path) -> None:
    _relabel(folder)
    swap(folder / "training_log.txt", "device: cpu", "device: cuda")
    swap(folder / "training_log.txt", "device=cpu", "device=cuda")
    with edited(folder / "doctor.json") as told:
        told["facts"] |= {"nvidia": NVIDIA, "torch": TORCH}
        told |= {"choice": CHOICE, "proof": PROOF}
    for name in ("env_info.txt", "torch_version.txt", "cuda_check.txt", "nvidia_smi.txt"):
        put(folder / name, FILES[name])
    sums = folder / "run-SHA256SUMS"
    added = "".join(f"{'0' * 64}  {name}\n" for name in ("cuda_check.txt", "nvidia_smi.txt"))
    put(sums, sums.read_text(encoding="utf-8") + added)
    each_step(folder, lambda line: line.update(seconds=line["seconds"] / 10))
    with edited(folder / "precommit.json") as committed:
        committed["versions"]["torch"] = TORCH["version"]
    with edited(folder / "result.json") as result:
        result["gpu_memory"] = memory_samples(len(metrics_of(folder)))
    rebuild_log(folder)


def dress_doctor(folder: Path) -> None:
    """Verdicts and texts as the facts made up give them."""
    with edited(folder / "doctor.json") as told:
        facts = facts_from_json(told["facts"])
        told["checks"] = to_plain(judge(facts, Ask(device="cuda", backend="torch", dtype="float32")))
    put(folder / "env_info.txt", env_info_text(facts))
    put(folder / "torch_version.txt", torch_version_text(facts))


def dress_processes(folder: Path) -> None:
    """What the processes recorded of the machine, as a GPU would have it; samples and nvidia-smi within the run's time."""
    pid = memory_samples(1)[0]["pid"]
    result = read(folder / "result.json")
    began, ended = (datetime.fromisoformat(result[name]) for name in ("started", "finished"))
    at = began + (ended - began) / 2
    with edited(folder / "processes.json") as told:
        one = told["processes"][0]
        one["pid"] = pid
        one["machine"] |= {"device": "cuda", "versions": one["machine"]["versions"] | {"torch": TORCH["version"]}}
        one["machine"]["gpu"] = {
            "name": "NVIDIA H200", "capability": "9.0", "driver": NVIDIA["driver_version"], "cuda": "13.0", "cudnn": 91900,
        }  # fmt: skip
    with edited(folder / "result.json") as told:
        told["gpu_memory"] = [one | {"at": at.isoformat(timespec="seconds")} for one in told["gpu_memory"]]
    text = (folder / "nvidia_smi.txt").read_text(encoding="utf-8")
    put(folder / "nvidia_smi.txt", text.replace("\n\n", f"\n\n{at:%a %b %d %H:%M:%S %Y}\n", 1))
    dress_log(folder, pid)


def dress_log(folder: Path, pid: int) -> None:
    """What the program says on a GPU: that the device was proven, and what NVML saw; nothing of a CPU that computes."""
    path = folder / "training_log.txt"
    told = read(folder / "doctor.json")
    kind, count, size = (told["choice"][name] for name in ("kind", "count", "memory_bytes"))
    swap_line(path, "Platform: .*", f"Platform: {platform_words(facts_from_json(told['facts']))}")
    memory = f"memory {size / 2**30:.1f} GiB, {size / 2**30:.1f} GiB free"
    swap_line(path, "Device kind: .*", f"Device kind: {kind}; count {count}; {memory}")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if " INFO Compile: " not in line]
    stamp = lines[-1][:21]
    lines.append(f"{stamp}INFO Proof on cuda in float32: held (1.0 s)")
    for one in read(folder / "result.json")["gpu_memory"]:
        held = f"{one['used_bytes'] / 2**30:.3f} GiB under our process id {pid}"
        lines.append(f"{stamp}INFO GPU memory: {held} (NVML, after step {one['step']})")
    put(path, "".join(f"{line}\n" for line in lines))


# --- a run on a GPU ---------------------------------------------------------------------------------------------------


@forgery("nvidia_smi.txt of another bundle", group=GPU, bases=ON_A_GPU)
def forge_borrowed_nvidia_smi(folder: Path) -> None:
    _borrowed(folder, "nvidia_smi.txt")


@forgery("cuda_check.txt of another bundle", group=GPU, bases=ON_A_GPU)
def forge_borrowed_cuda_check(folder: Path) -> None:
    _borrowed(folder, "cuda_check.txt")


@forgery("doctor.json of another bundle", group=GPU, bases=ON_A_GPU)
def forge_borrowed_doctor(folder: Path) -> None:
    _borrowed(folder, "doctor.json")


@forgery("env_info.txt of another bundle", group=GPU, bases=ON_A_GPU)
def forge_borrowed_env_info(folder: Path) -> None:
    _borrowed(folder, "env_info.txt")
    swap_line(folder / "env_info.txt", r"(?m)^cpu: .*$", "cpu: AMD EPYC 9965 192-Core Processor, 384 cores")
    reseal(folder)


@forgery("training_log.txt of another bundle", group=GPU, bases=ON_A_GPU)
def forge_borrowed_log(folder: Path) -> None:
    _borrowed(folder, "training_log.txt")


@forgery("memory.json of another bundle", group=GPU, bases=ON_A_GPU)
def forge_borrowed_memory(folder: Path) -> None:
    _borrowed(folder, "memory.json")


@forgery("another GPU in doctor.json only", group=GPU, bases=ON_A_GPU)
def forge_gpu_name(folder: Path) -> None:
    swap(folder / "doctor.json", "H200", "B200")
    reseal(folder)


@forgery("another GPU of another generation in every file", group=GPU, bases=ON_A_GPU)
def forge_newer_gpu(folder: Path) -> None:
    swap_everywhere(folder, "NVIDIA H200", "NVIDIA B200")
    reseal(folder)


@forgery("another GPU of the same generation in every file", group=GPU, bases=ON_A_GPU)
def forge_gpu_of_the_generation(folder: Path) -> None:
    swap_everywhere(folder, "NVIDIA H200", "NVIDIA H100 80GB HBM3")
    reseal(folder)


@forgery("another uuid of the GPU in doctor.json", group=GPU, bases=ON_A_GPU)
def forge_uuid(folder: Path) -> None:
    swap_line(folder / "doctor.json", r"GPU-[0-9a-f]{8}", "GPU-00c0ffee")
    reseal(folder)


@forgery("another driver in doctor.json", group=GPU, bases=ON_A_GPU)
def forge_driver(folder: Path) -> None:
    swap_line(folder / "doctor.json", r'("driver_version": )"[^"]+"', r'\1"999.99"')
    reseal(folder)


@forgery("memory samples under another process id", group=GPU, bases=ON_A_GPU)
def forge_process_id(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        for sample in result["gpu_memory"]:
            sample["pid"] += 1
    reseal(folder)


@forgery("memory samples larger than the GPU", group=GPU, bases=ON_A_GPU)
def forge_memory_above_the_gpu(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        for sample in result["gpu_memory"]:
            sample["used_bytes"] *= 10**3
    reseal(folder)


@forgery("memory samples smaller than what the allocator held", group=GPU, bases=ON_A_GPU)
def forge_memory_below_the_peak(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        for sample in result["gpu_memory"]:
            sample["used_bytes"] = 1000
    reseal(folder)


@forgery("peaks of the steps smaller than the parameters", group=GPU, bases=ON_A_GPU)
def forge_peaks(folder: Path) -> None:
    each_step(folder, lambda line: line.update(peak_bytes=1000))
    rebuild_log(folder)
    reseal(folder)


@forgery("peaks of the steps larger than the GPU's memory, and samples too", group=GPU, bases=ON_A_GPU)
def forge_peaks_above_the_gpu(folder: Path) -> None:
    each_step(folder, lambda line: line.update(peak_bytes=10**13))
    with edited(folder / "result.json") as result:
        for sample in result["gpu_memory"]:
            sample["used_bytes"] = 2 * 10**13
    rebuild_log(folder)
    reseal(folder)


@forgery("no memory samples", group=GPU, bases=ON_A_GPU)
def forge_no_samples(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["gpu_memory"] = []
    reseal(folder)


@forgery("memory samples of the first step only", group=GPU, bases=ON_A_GPU)
def forge_first_sample_only(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["gpu_memory"] = result["gpu_memory"][:1]
    reseal(folder)


@forgery("nvidia_smi.txt dated a year before the run", group=GPU, bases=ON_A_GPU)
def forge_old_nvidia_smi(folder: Path) -> None:
    swap_line(folder / "nvidia_smi.txt", r"(?m)^(\w{3} \w{3} +\d+ [\d:]+) \d{4}\s*$", r"\1 2025")
    reseal(folder)


@forgery("nvidia_smi.txt without our process", group=GPU, bases=ON_A_GPU)
def forge_nvidia_smi_without_process(folder: Path) -> None:
    path = folder / "nvidia_smi.txt"
    put(path, re.sub(r"(?m)^\|\s+\d+\s+N/A.*MiB \|$\n", "", path.read_text(encoding="utf-8")))
    reseal(folder)


@forgery("steps faster than the GPU's arithmetic", group=GPU, bases=ON_A_GPU)
def forge_speed_above_the_gpu(folder: Path) -> None:
    each_step(folder, lambda line: line.update(seconds=line["seconds"] / 10**6))
    rebuild_log(folder)
    reseal(folder)


@forgery("a failed proof of the device told as one that held", group=GPU, bases=ON_A_GPU)
def forge_proof(folder: Path) -> None:
    with edited(folder / "doctor.json") as told:
        told["proof"]["results"][1]["ok"] = False
    reseal(folder)


@forgery("a proof left out of doctor.json", group=GPU, bases=ON_A_GPU)
def forge_fewer_proofs(folder: Path) -> None:
    with edited(folder / "doctor.json") as told:
        del told["proof"]["results"][-1]
    reseal(folder)


@forgery("a failed check of the doctor taken out", group=GPU, bases=ON_A_GPU)
def forge_checks(folder: Path) -> None:
    with edited(folder / "doctor.json") as told:
        told["checks"] = told["checks"][:3]
    reseal(folder)


@forgery("the log says that it ran on the CPU", group=GPU, bases=ON_A_GPU)
def forge_log_of_a_cpu(folder: Path) -> None:
    swap(folder / "training_log.txt", "Using device: cuda", "Using device: cpu")
    reseal(folder)


@forgery("a GPU run told as one of a week later, in every file but nvidia_smi.txt", group=GPU, bases=ON_A_GPU)
def forge_later_run(folder: Path) -> None:
    def later(match: re.Match[str]) -> str:
        return (datetime.fromisoformat(match[0]) + timedelta(days=7)).strftime("%Y-%m-%dT%H:%M:%S")

    for name in ("precommit.json", "result.json", "training_log.txt", "processes.json"):
        path = folder / name
        if path.is_file():
            put(path, re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", later, path.read_text(encoding="utf-8")))
    reseal(folder)
