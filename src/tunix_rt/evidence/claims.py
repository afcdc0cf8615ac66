"""What a bundle says of a run, computed from the run's files alone, so that a reader can compute it again; and what those
files must hold before it may be said."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tunix_rt.errors import EvidenceError
from tunix_rt.evidence.hashes import parse_object, read_bytes, shown
from tunix_rt.rundir import RunDir
from tunix_rt.strict_yaml import read_yaml

SCHEMA = "tunix-rt/bundle/1"
KINDS = {"cuda": "gpu", "cpu": "cpu"}
COMPUTED = "GPU computation successful"

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one run that a bundle speaks of, read."""

    folder: Path
    run_id: str
    config: Mapping[str, Any]
    doctor: Mapping[str, Any]
    precommit: Mapping[str, Any]
    result: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]


def read_run(folder: Path) -> RunFiles:
    """The files of a run, or an EvidenceError that names the one that cannot be read or is of another run."""
    run = RunDir(folder)
    lines = _bytes(run.metrics).removesuffix(b"\n").split(b"\n")
    read = RunFiles(
        folder=folder,
        run_id=hashlib.sha256(_bytes(run.precommit)).hexdigest(),
        config=read_yaml(run.config),
        doctor=read_object(run.doctor),
        precommit=read_object(run.precommit),
        result=read_object(run.result),
        metrics=tuple(_object(line, f"metrics.jsonl:{number}") for number, line in enumerate(lines, start=1)),
    )
    committed, config_sha256 = read.precommit, hashlib.sha256(_bytes(run.config)).hexdigest()
    for file, told, known in (
        ("result.json: run_id", read.result.get("run_id"), read.run_id),
        ("result.json: device", read.result.get("device"), committed.get("device")),
        ("config.yaml: its hash", config_sha256, committed.get("config_sha256")),
    ):
        if told != known:
            raise EvidenceError(
                f"{file} is {shown(told)}, precommit.json has {shown(known)}",
                fix="ask for an untouched copy of the run",
            )
    return read


def read_object(path: Path) -> dict[str, Any]:
    return _object(_bytes(path), path.name)


def _object(data: bytes, name: str) -> dict[str, Any]:
    found = parse_object(data)
    if isinstance(found, str):
        raise EvidenceError(f"{name}: {found}", fix="ask for an untouched copy of the run")
    return found


def _bytes(path: Path) -> bytes:
    data, unread = read_bytes(path)
    if data is None:
        raise EvidenceError(unread, fix="ask for an untouched copy of the run")
    return data


def require(file: str, values: Mapping[str, Any], name: str, kind: type[Value]) -> Value:
    """The value under a dotted name. One that is missing, null, empty or a placeholder is an EvidenceError."""
    found = _at(values, name)
    if type(found) is not kind or found in ("", "unknown", "TODO", [], {}):
        raise EvidenceError(f"{file} does not tell {name}", fix="run again with this version of tunix-rt")
    return found


def _at(values: Any, name: str) -> Any:
    """The value under a dotted name, or None."""
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


# --- the claims -------------------------------------------------------------------------------------------------------


def claims_of(run: RunFiles, cpu: RunFiles | None) -> dict[str, Any]:
    """Everything `bundle.json` says but the commit and the files left out."""
    device = require("result.json", run.result, "device", str)
    said: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KINDS[device],
        "run_id": run.run_id,
        "device": device,
        "backend": require("config.yaml", run.config, "training.backend", str),
        "source_sha256": require("precommit.json", run.precommit, "source_sha256", str),
        "torch": require("doctor.json", run.doctor, "facts.torch.version", str),
        "model": _without_place(require("precommit.json", run.precommit, "base_model.name", str)),
        "weights": require("precommit.json", run.precommit, "base_model.weights", str),
        "dataset": _without_place(require("precommit.json", run.precommit, "dataset.key", str)),
        "steps_completed": require("result.json", run.result, "steps_completed", int),
        "resumed_from": require("result.json", run.result, "resumed_from", int),
        "final_loss": require("result.json", run.result, "final_loss", float),
        "host": _host(run),
        "tokens_per_second": {"device": tokens_per_second(run), "device_with_first_step": _speed(run.metrics)},
    }
    if device == "cuda":
        said |= {
            "gpu": _gpu(run),
            "cuda": require("doctor.json", run.doctor, "facts.torch.cuda_build", str),
            "gpu_memory": gpu_memory(run),
            "proof": _proof(run),
        }
    if cpu is not None:
        said["cpu_run"] = {
            "run_id": cpu.run_id,
            "torch": require("cpu/doctor.json", cpu.doctor, "facts.torch.version", str),
            "host": _host(cpu),
        }
        speeds = said["tokens_per_second"]
        speeds |= {"cpu": tokens_per_second(cpu), "cpu_with_first_step": _speed(cpu.metrics)}
        speeds["ratio"] = speeds["device"] / speeds["cpu"]
    return said


def _without_place(name: str) -> str:
    """A hub id or key as it is; of a folder that was named in full, its last part: where it lay is nobody's business."""
    return Path(name).name if name.startswith(("/", "~")) else name


def tokens_per_second(run: RunFiles) -> float:
    """Over all steps but the first, which also warms up."""
    if len(run.metrics) < 2:
        raise EvidenceError(
            f"metrics.jsonl has {len(run.metrics)} step(s); the speed is measured after the first, which also warms up",
            fix="run with training.max_steps of 2 or more",
        )
    return _speed(run.metrics[1:])


def _speed(steps: tuple[Mapping[str, Any], ...]) -> float:
    seconds = sum(require("metrics.jsonl", step, "seconds", float) for step in steps)
    if seconds <= 0:
        raise EvidenceError("metrics.jsonl: the steps took no time", fix="ask for an untouched copy of the run")
    return sum(require("metrics.jsonl", step, "tokens", int) for step in steps) / seconds


def _host(run: RunFiles) -> dict[str, Any]:
    """A CPU that does not tell its name goes by its architecture."""
    named = _at(run.doctor, "facts.host.cpu") not in (None, "", "unknown")
    return {
        "cpu": require("doctor.json", run.doctor, f"facts.host.{'cpu' if named else 'machine'}", str),
        "cpu_cores": require("doctor.json", run.doctor, "facts.host.cpu_cores", int),
        "memory_bytes": require("doctor.json", run.doctor, "facts.host.ram_total_bytes", int),
    }


def _gpu(run: RunFiles) -> dict[str, Any]:
    """The GPU that was chosen, among those NVML listed."""
    name = require("doctor.json", run.doctor, "choice.kind", str).split(", ")[0]  # several: a run takes the first
    listed = require("doctor.json", run.doctor, "facts.nvidia.gpus", list)
    gpu = next((gpu for gpu in listed if isinstance(gpu, Mapping) and gpu.get("name") == name), None)
    if gpu is None:
        raise EvidenceError(
            f"doctor.json: the device chosen, {shown(name)}, is not among facts.nvidia.gpus",
            fix="run again with this version of tunix-rt",
        )
    capability = require("doctor.json: the GPU", gpu, "capability", list)
    if [type(part) for part in capability] != [int, int]:
        raise EvidenceError("doctor.json: the GPU's capability is not two numbers", fix="ask for an untouched copy")
    return {
        "name": name,
        "compute_capability": ".".join(map(str, capability)),
        "memory_bytes": require("doctor.json", run.doctor, "choice.memory_bytes", int),
        "driver": require("doctor.json", run.doctor, "facts.nvidia.driver_version", str),
        "driver_cuda": require("doctor.json", run.doctor, "facts.nvidia.driver_cuda", str),
    }


def gpu_memory(run: RunFiles) -> dict[str, Any]:
    """The largest sample taken under our process id; of the whole device only where NVML hides process ids."""
    for by in ("nvml", "device"):
        if used := [sample for sample in _samples(run, by) if sample["used_bytes"] > 0]:
            return {"by": by, "samples": len(used), **max(used, key=lambda sample: sample["used_bytes"])}
    raise EvidenceError(
        "result.json: no sample in gpu_memory shows memory of the GPU in use",
        fix="run again; where NVML does not answer, `tunix-rt doctor` says why",
    )


def _samples(run: RunFiles, by: str) -> list[dict[str, int]]:
    where, names = "result.json: gpu_memory", ("step", "pid", "used_bytes")
    listed = require("result.json", run.result, "gpu_memory", list)
    return [{name: require(where, one, name, int) for name in names} for one in listed if _at(one, "by") == by]


def _proof(run: RunFiles) -> list[str]:
    """Names of what was proven on the device before training. One that did not hold is an EvidenceError."""
    proof = require("doctor.json", run.doctor, "proof", dict)
    results = require("doctor.json", run.doctor, "proof.results", list)
    names = [require("doctor.json: proof.results", result, "name", str) for result in results]
    failed = [name for name, result in zip(names, results, strict=True) if result.get("ok") is not True]
    if failed or proof.get("ok") is not True or proof.get("device") != run.result.get("device"):
        raise EvidenceError(
            f"doctor.json: the device is not proven{': ' * bool(failed)}{', '.join(failed)}",
            fix="`tunix-rt doctor --prove` says why; then run again",
        )
    return names


# --- what the files must hold -----------------------------------------------------------------------------------------


def require_content(run: RunFiles) -> None:
    """Refuse a run whose evidence files are missing, empty, or lack what they are there to show; all of it at once."""
    lacking = list(_lacking_cuda(run) if run.result.get("device") == "cuda" else _lacking_cpu(run))
    if lacking:
        raise EvidenceError(
            "the run's evidence is not whole\n" + "\n".join(f"  {line}" for line in lacking),
            fix="run again with this version of tunix-rt",
        )


def _lacking_cpu(run: RunFiles) -> Iterator[str]:
    facts = run.doctor
    yield from _lacks(run, "env_info.txt", {"the host's memory": r"(?im)^.*\b(ram|memory)\b.*[1-9].*$"})
    yield from _lacks(
        run, "torch_version.txt", {"torch's version": _word(require("doctor.json", facts, "facts.torch.version", str))}
    )
    yield from _lacks(run, "training_log.txt", _device_lines("cpu"))


def _lacking_cuda(run: RunFiles) -> Iterator[str]:
    gpu, torch = _gpu(run), require("doctor.json", run.doctor, "facts.torch.version", str)
    cuda = require("doctor.json", run.doctor, "facts.torch.cuda_build", str)
    major, minor = gpu["compute_capability"].split(".")
    driver = {"the driver's version": _word(gpu["driver"])}
    yield from _lacks(run, "env_info.txt", driver | {"the CUDA version the driver reports": _word(gpu["driver_cuda"])})
    yield from _lacks(
        run, "torch_version.txt", {"torch's version": _word(torch), "the CUDA version of the wheel": _word(cuda)}
    )
    yield from _lacks(
        run,
        "cuda_check.txt",
        {
            "torch's version": _word(torch),
            "is_available True": r"(?m)^.*\bis_available\b.*\bTrue\b.*$",
            "the device's name": _word(gpu["name"]),
            "the compute capability": rf"\({major}, *{minor}\)|{_word(f'{major}.{minor}')}|\bsm_{major}{minor}\b",
            f"the line `{COMPUTED}`": rf"(?m)^\s*{COMPUTED}\s*$",
        },
    )
    yield from _lacks(run, "training_log.txt", _device_lines("cuda"))
    wanted = dict(driver)
    if gpu_memory(run)["by"] == "nvml":  # elsewhere process ids are hidden, from nvidia-smi as well
        pids = sorted({sample["pid"] for sample in _samples(run, "nvml")})
        any_of = "|".join(_word(str(pid)) for pid in pids)
        # Not the line above the output in which we say which process is ours: nvidia-smi itself must list it.
        wanted[f"our process ({' or '.join(map(str, pids))})"] = rf"(?m)^(?!.*our process id).*(?:{any_of})"
    yield from _lacks(run, "nvidia_smi.txt", wanted)


def _device_lines(device: str) -> dict[str, str]:
    return {
        f"the line `Using device: {device}`": rf"(?m)^(?:.* )?Using device: {device}\s*$",
        f"a line with `device={device}`": rf"(?<!\w)device={device}(?!\S)",
    }


def _word(text: str) -> str:
    """A pattern for `text` that is not a piece of a longer number or name: 13.0 is not in 13.05."""
    return rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\d)"


def _lacks(run: RunFiles, name: str, wanted: Mapping[str, str]) -> Iterator[str]:
    data, unread = read_bytes(run.folder / name)
    if data is None:
        yield f"{unread}: it shows {', '.join(wanted)}"
    elif not data.strip():
        yield f"{name} is empty: it shows {', '.join(wanted)}"
    else:
        text = data.decode("utf-8", "replace")
        yield from (f"{name} lacks {what}" for what, pattern in wanted.items() if not re.search(pattern, text))


# --- two runs of one configuration ------------------------------------------------------------------------------------

SAME = (
    "source_sha256", "dataset.sha256", "dataset.merkle_root", "base_model.files", "base_model.weights",
    "tokenizer_sha256", "seeds",
)  # fmt: skip


def refuse_another_setup(run: RunFiles, cpu: RunFiles) -> None:
    """The run on the CPU must be this run on another device: same settings, source, data and model."""
    if cpu.result.get("device") != "cpu":
        raise EvidenceError(
            f"the run to compare with ran on {cpu.result.get('device')}, not on the CPU", fix="give a run on the CPU"
        )
    differ = [*different_settings(run.config, cpu.config), *_different_inputs(run.precommit, cpu.precommit)]
    if differ:
        raise EvidenceError(
            f"the run on the CPU is another run: {', '.join(differ)} differ(s)",
            fix="run the same configuration, of the same source, with --device cpu",
        )


def different_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Dotted names of the settings in which two configurations differ, but for the device."""
    ours, theirs = dict(_settings(one)), dict(_settings(other))
    names = sorted((ours.keys() | theirs.keys()) - {"training.device"})
    return [name for name in names if name not in ours or name not in theirs or ours[name] != theirs[name]]


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, settings in config.items():
        if isinstance(settings, Mapping):
            yield from ((f"{section}.{name}", value) for name, value in settings.items())
        else:
            yield section, settings


def _different_inputs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in SAME:
        if _at(one, name) is None or _at(one, name) != _at(other, name):
            yield f"precommit.json: {name}"
