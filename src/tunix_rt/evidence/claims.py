"""What a bundle says of a run, computed from the run's files alone, so that a reader can compute it again. What those
files must hold before it may be said is in `whole.py`."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tunix_rt.accelerators import accelerators_named
from tunix_rt.doctor.prove import PROOF_NAMES
from tunix_rt.errors import EvidenceError
from tunix_rt.evidence.bringing import to_bring
from tunix_rt.evidence.doubtful import parse_object, read_bytes, shown
from tunix_rt.rundir import RunDir
from tunix_rt.strict_yaml import read_yaml

SCHEMA = "tunix-rt/bundle/3"
SECOND_SCHEMA = "tunix-rt/bundle/2"
"""Of bundles of runs that did not yet note their rows, checkpoints and processes."""
OLDER_SCHEMA = "tunix-rt/bundle/1"
"""Of bundles that have no `run_manifest.json` either."""
SCHEMAS = (OLDER_SCHEMA, SECOND_SCHEMA, SCHEMA)
KINDS = {"cuda": "gpu", "cpu": "cpu"}
COUNTS_END = 2**63
UNTOUCHED = "ask for an untouched copy of the run"
AGAIN = "run again with this version of tunix-rt"

UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one run that a bundle speaks of, read."""

    folder: Path
    where: str = ""
    """Before the names of its files in what is said of them: `cpu/` for the second run of a bundle."""
    run_id: str
    config: Mapping[str, Any]
    doctor: Mapping[str, Any]
    precommit: Mapping[str, Any]
    result: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]

    def need(self, file: str, name: str, kind: type[Value]) -> Value:
        """The value under a dotted name of one of its files; see `require`."""
        files = {"config.yaml": self.config, "doctor.json": self.doctor, "precommit.json": self.precommit}
        return require(f"{self.where}{file}", files.get(file, self.result), name, kind)

    def fault(self, problem: str, fix: str = UNTOUCHED) -> EvidenceError:
        return EvidenceError(f"{self.where}{problem}", fix=fix)


def read_run(folder: Path, where: str = "") -> RunFiles:
    """The files of a run, or an EvidenceError that names the one that cannot be read or is of another run."""
    run = RunDir(folder)
    lines = _bytes(run.metrics, where).removesuffix(b"\n").split(b"\n")
    read = RunFiles(
        folder=folder,
        where=where,
        run_id=hashlib.sha256(_bytes(run.precommit, where)).hexdigest(),
        config=read_yaml(run.config),
        doctor=read_object(run.doctor, where),
        precommit=read_object(run.precommit, where),
        result=read_object(run.result, where),
        metrics=tuple(_object(line, f"{where}metrics.jsonl:{number}") for number, line in enumerate(lines, start=1)),
    )
    committed, config_sha256 = read.precommit, hashlib.sha256(_bytes(run.config, where)).hexdigest()
    for file, told, known in (
        ("result.json: run_id", read.result.get("run_id"), read.run_id),
        ("result.json: device", read.result.get("device"), committed.get("device")),
        ("config.yaml: its hash", config_sha256, committed.get("config_sha256")),
    ):
        if told != known:
            raise read.fault(f"{file} is {shown(told)}, precommit.json has {shown(known)}")
    return read


def read_object(path: Path, where: str = "") -> dict[str, Any]:
    return _object(_bytes(path, where), f"{where}{path.name}")


def _object(data: bytes, name: str) -> dict[str, Any]:
    found = parse_object(data)
    if isinstance(found, str):
        raise EvidenceError(f"{name}: {found}", fix=UNTOUCHED)
    return found


def _bytes(path: Path, where: str) -> bytes:
    data, unread = read_bytes(path)
    if data is None:
        raise EvidenceError(f"{where}{unread}", fix=UNTOUCHED)
    return data


def require(file: str, values: Mapping[str, Any], name: str, kind: type[Value]) -> Value:
    """The value under a dotted name. One that is missing, null, empty or a placeholder is an EvidenceError; so is a text
    of more than one line, or a number that no run can have."""
    found = value_at(values, name)
    if type(found) is not kind or found in ("", "unknown", "TODO", [], {}):
        raise EvidenceError(f"{file} does not tell {name}", fix=AGAIN)
    if isinstance(found, str) and UNPRINTED.search(found):
        raise EvidenceError(f"{file}: {name} is {shown(found)}, not a line of text", fix=UNTOUCHED)
    if isinstance(found, int | float) and not (math.isfinite(found) if isinstance(found, float) else _is_count(found)):
        raise EvidenceError(f"{file}: {name} is {shown(found)}, which no run can have", fix=UNTOUCHED)
    return found


def _is_count(value: int) -> bool:
    return 0 <= value < COUNTS_END


def value_at(values: Any, name: str) -> Any:
    """The value under a dotted name, or None."""
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


# --- the claims -------------------------------------------------------------------------------------------------------


def claims_of(run: RunFiles, cpu: RunFiles | None, schema: str = SCHEMA) -> dict[str, Any]:
    """Everything `bundle.json` says but the commit and the files left out."""
    device = run.need("result.json", "device", str)
    said: dict[str, Any] = {
        "schema": schema,
        "kind": KINDS[device],
        "run_id": run.run_id,
        "device": device,
        "backend": engine_of(run),
        "source_sha256": run.need("precommit.json", "source_sha256", str),
        **engine_versions(run),
        "model": without_place(run.need("precommit.json", "base_model.name", str)),
        "weights": run.need("precommit.json", "base_model.weights", str),
        "dataset": without_place(run.need("precommit.json", "dataset.key", str)),
        "steps_completed": run.need("result.json", "steps_completed", int),
        "resumed_from": run.need("result.json", "resumed_from", int),
        "final_loss": run.need("result.json", "final_loss", float),
        "host": _host(run),
        "tokens_per_second": {"device": tokens_per_second(run), "device_with_first_step": _speed(run, 1)},
    }
    if schema == SCHEMA:
        said |= _outcome(run)
    if device == "cuda":
        said |= {
            "gpu": gpu_of(run),
            **cuda_versions(run),
            "gpu_memory": gpu_memory(run),
            "proof": _proof(run),
        }
    if cpu is not None:
        said["cpu_run"] = {"run_id": cpu.run_id, **engine_versions(cpu), "host": _host(cpu)}
        speeds = said["tokens_per_second"]
        speeds |= {"cpu": tokens_per_second(cpu), "cpu_with_first_step": _speed(cpu, 1)}
        speeds["ratio"] = speeds["device"] / speeds["cpu"]
        if not math.isfinite(speeds["ratio"]):
            raise EvidenceError("metrics.jsonl: no GPU is that much faster than a CPU", fix=UNTOUCHED)
    return said


def _outcome(run: RunFiles) -> dict[str, Any]:
    """What came of it, how long it took, and what was brought to it: each where the run has it."""
    said: dict[str, Any] = {}
    if "seconds" in run.result:
        said["seconds"] = {
            "run": run.need("result.json", "seconds", float),
            "steps": sum(require("metrics.jsonl", step, "seconds", float) for step in run.metrics),
        }
    if scores := _scores(run):
        said["scores"] = scores
    if (path := RunDir(run.folder).heldout).is_file():
        lines = _bytes(path, run.where).removesuffix(b"\n").split(b"\n")
        ends = {"first": (1, lines[0]), "last": (len(lines), lines[-1])}
        said["heldout_loss"] = {
            name: _place_and_loss(_object(line, place := f"{run.where}eval/heldout.jsonl:{number}"), place)
            for name, (number, line) in ends.items()
        }
    if things := to_bring(run.precommit, run.config):
        said["to_bring"] = things
    return said


def _scores(run: RunFiles) -> dict[str, Any]:
    """Of the answers before and after training, as they are summed up."""
    path = RunDir(run.folder).eval_summary
    summary = read_object(path, run.where) if path.is_file() else {}
    where = f"{run.where}{path.name}"
    return {
        when: {
            **{name: require(where, summary, f"{when}.{name}", int) for name in ("items", "correct", "well_formed")},
            "accuracy": require(where, summary, f"{when}.accuracy", float),
        }
        for when in ("before", "after")
        if when in summary
    }


def _place_and_loss(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"step": require(where, line, "step", int), "loss": require(where, line, "loss", float)}


def engine_of(run: RunFiles) -> str:
    return run.need("config.yaml", "training.backend", str)


def engine_versions(run: RunFiles) -> dict[str, str]:
    """What computed, by name. The doctor and the precommitment of a run of JAX must agree on it."""
    if engine_of(run) != "jax":
        return {"torch": run.need("doctor.json", "facts.torch.version", str)}
    found = {name: run.need("precommit.json", f"versions.{name}", str) for name in ("jax", "jaxlib")}
    for name, fact in (("jax", "version"), ("jaxlib", "jaxlib")):
        if (told := run.need("doctor.json", f"facts.jax.{fact}", str)) != found[name]:
            raise run.fault(
                f"doctor.json: {name} is {shown(told)}, precommit.json has {shown(found[name])}",
                fix="run again, and leave the environment alone meanwhile",
            )
    return found


def cuda_versions(run: RunFiles) -> dict[str, Any]:
    """What ties the engine to CUDA: the version the wheel of torch was built with, or the plugin of jax, whose name has it."""
    if engine_of(run) != "jax":
        return {"cuda": run.need("doctor.json", "facts.torch.cuda_build", str)}
    installed = run.need("doctor.json", "facts.jax.plugins", dict)
    names = sorted(name for name in installed if re.fullmatch(r"jax-cuda\d+-(?:plugin|pjrt)", str(name)))
    if not any(name.endswith("-plugin") for name in names):
        raise run.fault("doctor.json does not tell a CUDA plugin in facts.jax.plugins", AGAIN)
    return {"cuda_plugin": {name: run.need("doctor.json", f"facts.jax.plugins.{name}", str) for name in names}}


def without_place(name: str) -> str:
    """A hub id or key as it is; of a folder that was named in full, its last part: where it lay is nobody's business."""
    return Path(name).name if name.startswith(("/", "~")) else name


def tokens_per_second(run: RunFiles) -> float:
    """Over all steps but the first, which also warms up."""
    if len(run.metrics) < 2:
        raise run.fault(
            f"metrics.jsonl has {len(run.metrics)} step(s); the speed is measured after the first, which also warms up",
            fix="run with training.max_steps of 2 or more",
        )
    return _speed(run, 2)


def _speed(run: RunFiles, first: int) -> float:
    """Tokens over seconds from the step `first` on. A step without time or tokens is an EvidenceError that names it."""
    tokens, seconds = 0, 0.0
    for number, step in enumerate(run.metrics[first - 1 :], start=first):
        where = f"{run.where}metrics.jsonl:{number}"
        took, trained = require(where, step, "seconds", float), require(where, step, "tokens", int)
        if took <= 0 or trained == 0:
            raise EvidenceError(f"{where}: {trained} tokens in {took} seconds is no step", fix=UNTOUCHED)
        tokens, seconds = tokens + trained, seconds + took
    if not 0 < tokens / seconds < math.inf:
        raise run.fault(f"metrics.jsonl: {tokens} tokens in {seconds} seconds is no speed")
    return tokens / seconds


def _host(run: RunFiles) -> dict[str, Any]:
    """A CPU that does not tell its name goes by its architecture."""
    named = value_at(run.doctor, "facts.host.cpu") not in (None, "", "unknown")
    return {
        "cpu": run.need("doctor.json", f"facts.host.{'cpu' if named else 'machine'}", str),
        "cpu_cores": run.need("doctor.json", "facts.host.cpu_cores", int),
        "memory_bytes": run.need("doctor.json", "facts.host.ram_total_bytes", int),
    }


# --- the GPU ----------------------------------------------------------------------------------------------------------


def gpu_of(run: RunFiles) -> dict[str, Any]:
    """The GPU of the proof: among those NVML listed, the one chosen, and what the catalogue knows under its name.

    JAX does not tell a uuid, and computes on all GPUs that it sees: theirs is `count`, and a uuid is there only where a
    single GPU has the name.
    """
    name = run.need("doctor.json", "proof.about.name", str)
    gpu, part, which = _gpu_of_jax(run, name) if engine_of(run) == "jax" else _gpu_of_torch(run)
    capability = require(f"{run.where}doctor.json: the GPU", gpu, "capability", list)
    if [type(number) for number in capability] != [int, int] or not all(map(_is_count, capability)):
        raise run.fault("doctor.json: the GPU's capability is not two numbers")
    published = sorted(
        {one.capability for one in accelerators_named(str(gpu.get("name"))) if one.capability is not None}
    )
    for what, told, wanted in (
        ("proof.about.name", name, [part.get("name")]),
        ("proof.about.name", name, run.need("doctor.json", "choice.kind", str).split(", ")),
        ("proof.about.capability", value_at(run.doctor, "proof.about.capability"), [capability]),
        (f"the compute capability of {shown(gpu.get('name'))}", tuple(capability), published or [tuple(capability)]),
    ):
        if told not in wanted:
            raise run.fault(f"doctor.json: {what} is {ascii(told)[:80]}, elsewhere {ascii(wanted)[:80]}", AGAIN)
    return {
        "name": name,
        **which,
        "compute_capability": ".".join(map(str, capability)),
        "memory_bytes": run.need("doctor.json", "choice.memory_bytes", int),
        "driver": run.need("doctor.json", "facts.nvidia.driver_version", str),
        "driver_cuda": run.need("doctor.json", "facts.nvidia.driver_cuda", str),
    }


Listed = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A GPU as NVML listed it, and what CUDA sees of it: itself, or one of its slices."""


def _gpu_of_torch(run: RunFiles) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
    uuid = run.need("doctor.json", "proof.about.uuid", str)
    for gpu, part in _listed(run):
        if _bare(part.get("uuid")) == _bare(uuid):
            return gpu, part, {"uuid": uuid}
    raise run.fault(f"doctor.json: the GPU of the proof, {uuid}, is not among facts.nvidia.gpus", AGAIN)


def _gpu_of_jax(run: RunFiles, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any], dict[str, Any]]:
    named = [(gpu, part) for gpu, part in _listed(run) if part.get("name") == name]
    if not named:
        raise run.fault(f"doctor.json: the GPU of the proof, {name}, is not among facts.nvidia.gpus", AGAIN)
    gpu, part = named[0]
    which: dict[str, Any] = {"count": run.need("precommit.json", "batch.devices", int)}
    if len(named) == 1:
        which["uuid"] = require(f"{run.where}doctor.json: the GPU", part, "uuid", str)
    return gpu, part, which


def _listed(run: RunFiles) -> Iterator[Listed]:
    for gpu in run.need("doctor.json", "facts.nvidia.gpus", list):
        slices = value_at(gpu, "slices")
        for part in [gpu, *slices] if isinstance(slices, list) else [gpu]:
            if isinstance(part, Mapping):
                yield gpu, part


def _bare(uuid: Any) -> str:
    """CUDA does not tell whether a uuid is that of a GPU or of a slice."""
    return str(uuid).removeprefix("GPU-").removeprefix("MIG-")


def gpu_memory(run: RunFiles) -> dict[str, Any]:
    """The largest sample taken under our process id; of the whole device only where NVML hides process ids.

    Each sample must hold what the allocator held at most up to its step, which `metrics.jsonl` tells: NVML's figure
    contains it. The peak of the whole run will not do, for what comes after training is sampled by nobody.
    """
    ours, device = memory_samples(run, "nvml"), memory_samples(run, "device")
    for sample in [*ours, *device]:
        step, used = sample["step"], sample["used_bytes"]
        if not run.need("result.json", "resumed_from", int) < step <= len(run.metrics):
            raise run.fault(
                f"result.json: gpu_memory has a sample after step {step}, in which nothing was trained", AGAIN
            )
        peak = require(f"{run.where}metrics.jsonl:{step}", run.metrics[step - 1], "peak_bytes", int)
        if not used >= peak > 0:
            raise run.fault(
                f"result.json: gpu_memory has {used} bytes after step {step}, where the allocator held {peak}",
                fix="run again; where NVML does not answer, `tunix-rt doctor` says why",
            )
    if len(run.metrics) not in {sample["step"] for sample in [*ours, *device]}:
        raise run.fault("result.json: no sample in gpu_memory is of the last step", AGAIN)
    largest = max(ours or device, key=lambda sample: sample["used_bytes"])
    return {"by": "nvml" if ours else "device", "samples": len(ours or device), **largest}


def memory_samples(run: RunFiles, by: str) -> list[dict[str, int]]:
    where, names = f"{run.where}result.json: gpu_memory", ("step", "pid", "used_bytes")
    listed = run.need("result.json", "gpu_memory", list)
    return [{name: require(where, one, name, int) for name in names} for one in listed if value_at(one, "by") == by]


def _proof(run: RunFiles) -> list[str]:
    """Names of what was proven on the device before training: all there is to prove, on this device, in this type."""
    proof = run.need("doctor.json", "proof", dict)
    results = run.need("doctor.json", "proof.results", list)
    names = [require(f"{run.where}doctor.json: proof.results", result, "name", str) for result in results]
    faults = [name for name, result in zip(names, results, strict=True) if result.get("ok") is not True]
    faults += [f"no {name}" for name in PROOF_NAMES if name not in names]
    faults += [f"{name} beyond what there is to prove" for name in names if names.count(name) > (name in PROOF_NAMES)]
    training = {name: run.need("config.yaml", f"training.{name}", str) for name in ("dtype", "backend")}
    for name, wanted in {"device": run.result.get("device"), **training}.items():
        if proof.get(name) != wanted:
            faults.append(f"{name} {shown(proof.get(name))}, the run's is {shown(wanted)}")
    if faults or proof.get("ok") is not True:
        raise run.fault(
            f"doctor.json: the device is not proven{': ' * bool(faults)}{', '.join(faults)}",
            fix="`tunix-rt doctor --prove` says why; then run again",
        )
    return names
