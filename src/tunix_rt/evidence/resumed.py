"""The processes and checkpoints of a run: who took which steps, and what was saved where. A run that went on from a
checkpoint shows it in three places, which must agree."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from tunix_rt.evidence.claims import gpu_of, read_object, require, value_at
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import DIGEST, Noted, few
from tunix_rt.evidence.timing import RESUMED
from tunix_rt.rundir import RunDir, checkpoint_name

PROCESS = {"pid", "started", "first_step", "machine"}
ENTRY = {"step", "manifest_sha256", "metrics_head", "files"}
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
BYTES = {"float64": 8, "float32": 4}
"""Of a weight, by its type; the others are of two."""
LEAST_RATE = 1e-6
OF_PROOF = (("cuda", "cuda_build"), ("cudnn", "cudnn"))
"""Of the GPU of a machine, and where the proof tells it."""
WEIGHTS = ("model.safetensors", "optimizer.safetensors", "state.json")


def process_problems(noted: Noted) -> Iterator[str]:
    """Each process by itself: its versions are those committed to. The machine of the last is that of the doctor, whose
    report is of the last process: those before may have run on another."""
    processes = noted.processes or ()
    for number, process in enumerate(processes, start=1):
        where = f"{noted.run.where}processes.json: process {number}"
        if set(process) != PROCESS:
            yield f"{where} does not tell {', '.join(sorted(PROCESS ^ set(map(str, process))))[:80]}"
            continue
        if require(where, process, "pid", int) == 0 or require(where, process, "first_step", int) == 0:
            yield f"{where}: a process id or first step of 0"
        machine = require(where, process, "machine", dict)
        yield from (f"{where}: {fault}" for fault in _machine_faults(noted, where, machine))
        if number == len(processes):
            yield from (f"{where}: {fault}" for fault in _doctor_faults(noted, machine))


def _machine_faults(noted: Noted, where: str, machine: Mapping[str, Any]) -> Iterator[str]:
    run = noted.run
    wanted = {"backend": value_at(run.config, "training.backend"), "device": run.result.get("device")}
    for name, value in wanted.items():
        if machine.get(name) != value:
            yield f"{name} is {shown(machine.get(name))}, the run's is {shown(value)}"
    for name in ("cpu", "cpu_flags_sha256", "python"):
        require(f"{where}: machine", machine, name, str)
    if not DIGEST.fullmatch(machine["cpu_flags_sha256"]):
        yield f"cpu_flags_sha256 is {shown(machine['cpu_flags_sha256'])}"
    for name in ("threads", "devices"):
        if require(f"{where}: machine", machine, name, int) == 0:
            yield f"{name} is 0"
    if type(machine.get("deterministic")) is not bool:
        yield f"deterministic is {shown(machine.get('deterministic'))}"
    elif machine["deterministic"] is not value_at(run.config, "training.deterministic"):
        yield f"deterministic is {machine['deterministic']}, config.yaml says otherwise"
    committed = run.need("precommit.json", "versions", dict)
    for name, version in require(f"{where}: machine", machine, "versions", dict).items():
        if name in committed and _plain(version) != _plain(committed[name]):
            yield f"{shown(name)} is {shown(version)}, precommit.json has {shown(committed[name])}"
    if run.need("config.yaml", "training.backend", str) not in machine["versions"]:
        yield "the version of its engine is not told"
    if run.result.get("device") == "cuda":
        require(f"{where}: machine", machine, "gpu", dict)
    elif "gpu" in machine:
        yield "a GPU in a run on the CPU"


def _plain(version: Any) -> str:
    """The packaging of a wheel (`+cu130`) is told by some and not by others."""
    return str(version).partition("+")[0]


def _doctor_faults(noted: Noted, machine: Mapping[str, Any]) -> Iterator[str]:
    """The machine against the doctor's report of it. What either does not tell is not asked."""
    run = noted.run
    of_jax = value_at(run.config, "training.backend") == "jax"
    told = [
        ("cpu", machine.get("cpu"), value_at(run.doctor, "facts.host.cpu"), "doctor.json"),
        ("python", machine.get("python"), value_at(run.doctor, "facts.host.python"), "doctor.json"),
    ]
    if not of_jax or value_at(run.precommit, "batch.devices") is not None:
        devices = value_at(run.precommit, "batch.devices") if of_jax else 1
        told.append(("devices", machine.get("devices"), devices, "precommit.json" if of_jax else "PyTorch"))
    if run.result.get("device") == "cuda":
        gpu, known = machine.get("gpu", {}), gpu_of(run)
        for name, of_doctor in (("name", "name"), ("capability", "compute_capability"), ("driver", "driver")):
            if gpu.get(name) != known[of_doctor]:
                yield f"the GPU's {name} is {shown(gpu.get(name))}, doctor.json has {shown(known[of_doctor])}"
        if not of_jax:
            about = value_at(run.doctor, "proof.about")
            told += [(name, gpu.get(name), value_at(about, key), "the proof in doctor.json") for name, key in OF_PROOF]
    for name, here, there, file in told:
        if here is not None and there not in (None, "", "unknown") and str(here) != str(there):
            yield f"{name} is {shown(here)}, {file} has {shown(there)}"


def resume_problems(noted: Noted) -> Iterator[str]:
    """Where the last process went on, in the result, in the list of processes, among the checkpoints and in the log."""
    run, processes, step = noted.run, noted.processes or (), noted.resumed_from
    listed = {entry.get("step") for entry in noted.checkpoints or ()}
    told = [int(found[1]) for line in noted.log if line.at and (found := RESUMED.fullmatch(line.words))]
    firsts = [process.get("first_step") for process in processes]
    if firsts[-1:] != [step + 1]:
        yield f"{run.where}processes.json: the last process began at step {shown(firsts[-1:])}, result.json says {step}"
    if firsts[:1] != [1]:
        yield f"{run.where}processes.json: the first process began at step {shown(firsts[0])}"
    if step and len(processes) < 2:
        yield f"{run.where}result.json: resumed_from is {step}, processes.json has one process"
    for number, first in enumerate(firsts, start=1):
        # What a process took and a later one took again is dropped, with the checkpoint that it went on from.
        kept = not any(type(later) is int and type(first) is int and later <= first for later in firsts[number:])
        if kept and type(first) is int and first > 1 and first - 1 not in listed:
            yield f"{run.where}checkpoints.json: none at step {first - 1}, after which a process went on"
    if step and told[-1:] != [step]:
        yield f"{run.where}training_log.txt: no `Resumed from {checkpoint_name(step)}` in the last process"
    if extra := sorted(set(told) - {first - 1 for first in firsts if type(first) is int}):
        yield f"{run.where}training_log.txt: resumed from step {extra[0]}, where no process in processes.json began"
    pids = {process.get("pid") for process in processes[-1:]}
    samples = run.result.get("gpu_memory")
    for sample in samples if isinstance(samples, list) else ():
        if value_at(sample, "pid") not in pids:
            yield f"{run.where}result.json: gpu_memory of process {shown(value_at(sample, 'pid'))}, which trained nothing"
            return


def checkpoint_problems(noted: Noted) -> Iterator[str]:
    """Each entry against the chain of the metrics and the hashes of the run; all of them against what was due."""
    yield from few(_entry_problems(noted), f"{noted.run.where}checkpoints.json")
    yield from few(_weight_problems(noted), f"{noted.run.where}checkpoints.json")
    run, entries = noted.run, noted.checkpoints or ()
    steps = [require(f"{run.where}checkpoints.json", entry, "step", int) for entry in entries]
    total = noted.total
    if steps != sorted(set(steps)):
        yield f"{run.where}checkpoints.json: its steps do not ascend"
        return
    due = {total}
    for name in ("save_steps", "eval_steps"):
        every = value_at(run.config, f"training.{name}")
        due |= set(range(every, total, every)) if type(every) is int and every > 0 else set()
    stopped = {process["first_step"] - 1 for process in noted.processes or () if type(process["first_step"]) is int}
    missing, extra = sorted(due - set(steps)), sorted(set(steps) - due - stopped)
    if missing:
        yield f"{run.where}checkpoints.json: none at step {missing[0]}, where the settings make one"
    if extra:
        yield f"{run.where}checkpoints.json: one at step {extra[0]}, where nothing made it"


def _entry_problems(noted: Noted) -> Iterator[str]:
    chain = noted.chain
    for number, entry in enumerate(noted.checkpoints or (), start=1):
        where = f"{noted.run.where}checkpoints.json: entry {number}"
        if set(entry) != ENTRY:
            yield f"{where} does not tell {', '.join(sorted(ENTRY ^ set(map(str, entry))))[:80]}"
            continue
        step, files = require(where, entry, "step", int), require(where, entry, "files", dict)
        if not 0 < step < len(chain):
            yield f"{where}: step {step}, which was not taken"
            continue
        if entry["metrics_head"] != chain[step]:
            yield f"{where}: metrics_head is not the hash of line {step} of metrics.jsonl"
        if odd := sorted(str(name) for name in files if not PLAIN.fullmatch(str(name))):
            yield f"{where}: {shown(odd[0])} is no name of a file in a checkpoint"
        if lacking := sorted(set(WEIGHTS) - set(files)):
            yield f"{where}: without {', '.join(lacking)}"
        folder = f"checkpoints/{checkpoint_name(step)}/"
        digests = {"MANIFEST.json": entry["manifest_sha256"]}
        for name, facts in files.items():
            digests[str(name)] = value_at(facts, "sha256")
            if type(value_at(facts, "bytes")) is not int:
                yield f"{where}: {shown(name)} has no size"
        for name, digest in digests.items():
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                yield f"{where}: {shown(name)} has no hash"
            elif noted.hashes.get(f"{folder}{name}", digest) != digest:
                yield f"{where}: {shown(name)} has another hash than the run ended with"
        yield from (f"{where}: {fault}" for fault in _present_faults(noted, step, entry))
        there = {name for name in noted.hashes if name.startswith(folder)}
        if there and there != {f"{folder}{name}" for name in digests}:
            yield f"{where}: other files than the run ended with in {folder}"
    left = {
        f"checkpoints/{checkpoint_name(entry['step'])}/"
        for entry in noted.checkpoints or ()
        if type(entry.get("step")) is int
    }
    for name in noted.hashes:
        if name.startswith("checkpoints/") and name.rpartition("/")[0] + "/" not in left:
            yield f"{noted.run.where}checkpoints.json has no entry for {shown(name)}"
            return


def _weight_problems(noted: Noted) -> Iterator[str]:
    """A checkpoint has room for the weights, and holds others than the one before it. Of LoRA it holds the adapter alone."""
    run, where = noted.run, f"{noted.run.where}checkpoints.json"
    kept = value_at(run.config, "training.master_dtype") or value_at(run.config, "training.dtype")
    whole = value_at(run.config, "training.lora_rank") is None
    least = run.need("result.json", "parameters", int) * BYTES.get(str(kept), 2) if whole else 1
    entries = noted.checkpoints or ()
    for entry in entries:
        size = value_at(value_at(entry, "files").get("model.safetensors"), "bytes")
        if type(size) is int and size < least:
            yield f"{where}: {size:,} bytes of weights at step {shown(entry.get('step'))}, they take {least:,}"
    for first, second in pairwise(entries):
        digests = [value_at(one["files"].get("model.safetensors"), "sha256") for one in (first, second)]
        if digests[0] == digests[1] and _moved(noted, first["step"], second["step"]):
            yield f"{where}: the same weights at step {second['step']} as at step {first['step']}"


def _moved(noted: Noted, after: int, up_to: int) -> bool:
    """Whether a step must have changed the weights: Adam moves each by about its rate, unless that is lost in rounding."""
    adam = str(value_at(noted.run.config, "training.optim")).startswith("adam")
    return adam and any(line["lr"] >= LEAST_RATE and line["grad_norm"] > 0 for line in noted.run.metrics[after:up_to])


def _present_faults(noted: Noted, step: int, entry: Mapping[str, Any]) -> Iterator[str]:
    """Of a checkpoint that is in the folder: its state names the line of the metrics, its sizes are those listed."""
    folder = RunDir(noted.run.folder).checkpoints / checkpoint_name(step)
    if not (folder / "state.json").is_file():
        return
    state = read_object(folder / "state.json")
    if state.get("metrics_head") != entry["metrics_head"] or state.get("step") != step:
        yield f"state.json of {folder.name} is of another step"
    for name, facts in entry["files"].items():
        if name in WEIGHTS and (folder / name).is_file() and (folder / name).stat().st_size != value_at(facts, "bytes"):
            yield f"{name} of {folder.name} has another size"
