"""`run_manifest.json`: what a bundle states about its run, computed from the facts of the run and nothing else, so that whoever
verifies it computes it again. It contains no null: a setting left open is listed by name."""

import hashlib
import math
import operator
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from pydantic import ValidationError

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.evidence.checks import left_out
from tunix_rt.evidence.facts import Run
from tunix_rt.runs.checksums import SUMS, parse_object, shown
from tunix_rt.runs.record import MANIFEST
from tunix_rt.runs.schemas import Manifest, problems_of

PLACEHOLDERS = ("unknown", "todo", "tbd", "none", "null", "n/a", "placeholder")
SAME = ("source_sha256", "numerics", "dataset", "base_model", "tokenizer_sha256", "seeds", "evalset")
"""What the same run on the CPU committed to as well."""
OF_A_GPU = ("hardware.capability", "hardware.driver", "hardware.driver_cuda", "hardware.count", "gpu_memory")
WITH_A_CPU_RUN = ("tokens_per_second.cpu", "tokens_per_second.cpu_with_first_step", "tokens_per_second.ratio")


def manifest_of(run: Run, cpu: Run | None, *, name: str, commit: str | None) -> dict[str, Any]:
    """Everything that the bundle of `run` states under the name `name`. `cpu` is the same configuration on the CPU."""
    committed, result = run.commitment, run.result
    left_open: list[str] = []
    configuration = _without_nulls(run.config.model_dump(mode="json", exclude_unset=True), left_open)
    seconds = _total(run, 1)[1]
    stated = {
        "format": committed.format, "run_id": name, "precommit_sha256": run.run_id, "commit": commit,
        "source_sha256": committed.source_sha256, "numerics": committed.numerics,
        "backend": run.backend, "device": run.device,
        "model": without_place(committed.base_model.name), "weights": committed.base_model.weights,
        "dataset": without_place(committed.dataset.key),
        "steps_completed": result.steps_completed, "resumed_from": result.resumed_from or 0,
        "final_loss": result.final_loss, "heldout_loss": _heldout(run), "scores": _scores(run),
        "versions": _versions(run), "hardware": _hardware(run), "gpu_memory": _gpu_memory(run),
        "configuration": configuration, "configuration_left_open": sorted(left_open) or None,
        "tokens_per_second": _speeds(run, cpu),
        "seconds": {"run": result.seconds, "steps": seconds if math.isfinite(seconds) else None},
        "peak_bytes": max((line.peak_bytes for line in run.metrics), default=0),
        "inputs": _inputs(run), "left_out": left_out(run), "cpu_run": _cpu_run(cpu) if cpu else None,
    }  # fmt: skip
    return dict(_without_nulls(stated, []))


def manifest_problems(run: Run, cpu: Run | None) -> Iterator[str]:
    """How the run_manifest.json of the bundle differs from what its run gives under the same name and commit."""
    recorded = parse_object(run.record.data(MANIFEST) or b"")
    if isinstance(recorded, str):
        yield f"{MANIFEST}: {recorded}"
        return
    expected = manifest_of(run, cpu, name=recorded.get("run_id", ""), commit=recorded.get("commit"))
    yield from (f"{MANIFEST}: {problem}" for problem in incomplete(recorded))
    yield from (f"{MANIFEST}: {problem}" for problem in _differences(recorded, expected))


def companion_problems(run: Run, cpu: Run | None) -> Iterator[str]:
    """How the run that a GPU is compared with is not the same run on the CPU."""
    if cpu is None:
        yield "cpu/: not a completed run"
        return
    if cpu.device != "cpu":
        yield f"{cpu.where}result.json: ran on {cpu.device}, not on the CPU"
    ours, theirs = (one.config.model_dump(mode="json") for one in (run, cpu))
    ours["training"]["device"] = theirs["training"]["device"]
    yield from (f"{cpu.where}config.yaml: {problem}" for problem in _differences(theirs, ours))
    for name in SAME:
        if getattr(run.commitment, name) != getattr(cpu.commitment, name):
            yield f"{cpu.where}precommit.json: {name} is not that of the run on {run.device}"
    if not CAPABILITIES[run.backend].multi_device:  # else the batch depends on the visible devices
        steps = ([(line.batch, line.tokens, line.target_tokens) for line in one.metrics] for one in (run, cpu))
        if next(steps) != next(steps):
            yield f"{cpu.where}metrics.jsonl: other batches than on {run.device}"


def incomplete(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What a manifest lacks or cannot contain: `dotted.key: problem`."""
    try:
        found = Manifest.model_validate(manifest)
    except ValidationError as error:
        yield from problems_of(error)
        return
    if found.run_id.casefold() in PLACEHOLDERS:
        yield f"run_id: {shown(found.run_id)} is a placeholder"
    needed = (OF_A_GPU if found.device == "cuda" else ()) + (WITH_A_CPU_RUN if found.cpu_run else ())
    yield from (f"{name}: missing" for name in needed if operator.attrgetter(name)(found) is None)


def without_place(name: str) -> str:
    """A key, a hub id or a relative path as it is; of an absolute path its last part."""
    return os.path.basename(name.rstrip("/")) or name if name.startswith(("/", "~")) else name


def _differences(recorded: Any, expected: Any, name: str = "") -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(expected, dict):
        for key in sorted(recorded.keys() | expected.keys()):
            inner = f"{name}.{key}" if name else key
            if key not in recorded:
                yield f"{inner}: missing, the run has {shown(expected[key])}"
            elif key not in expected:
                yield f"{shown(inner)}: {shown(recorded[key])}, the run has none"
            else:
                yield from _differences(recorded[key], expected[key], inner)
    elif recorded != expected or type(recorded) is not type(expected):
        yield f"{name}: {shown(recorded)}, the run has {shown(expected)}"


def _without_nulls(value: Any, left_open: list[str], name: str = "") -> Any:
    """`value` without the nulls in its objects; adds their dotted names to `left_open`."""
    if not isinstance(value, dict):
        return value
    left_open += [f"{name}{key}" for key, inner in value.items() if inner is None]
    known = {key: inner for key, inner in value.items() if inner is not None}
    return {key: _without_nulls(inner, left_open, f"{name}{key}.") for key, inner in known.items()}


# --- the parts; a null in them is left out ----------------------------------------------------------------------------


def _heldout(run: Run) -> dict[str, Any] | None:
    lines = run.record.heldout
    ends = {"first": lines[0], "last": lines[-1]} if lines else {}
    return {name: {"step": line.step, "loss": line.loss} for name, line in ends.items()} or None


def _scores(run: Run) -> dict[str, Any] | None:
    both = {when: run.record.scores(when) for when in ("before", "after")}
    names = ("items", "correct", "well_formed", "accuracy")
    return {when: {name: getattr(one, name) for name in names} for when, one in both.items() if one} or None


def _speeds(run: Run, cpu: Run | None) -> dict[str, float | None]:
    """Tokens over seconds of all steps but the first, which also warms up; and with it."""
    found = {"device": _quotient(*_total(run, 2)), "device_with_first_step": _quotient(*_total(run, 1))}
    if cpu is not None:
        found |= {"cpu": _quotient(*_total(cpu, 2)), "cpu_with_first_step": _quotient(*_total(cpu, 1))}
        found["ratio"] = _quotient(found["device"], found["cpu"])
    return found


def _total(run: Run, first: int) -> tuple[int, float]:
    """Tokens and seconds from step `first` on. Added one by one: what `sum` gives for floats depends on the Python."""
    lines = run.metrics[first - 1 :]
    return sum(line.tokens for line in lines), reduce(operator.add, (line.seconds for line in lines), 0.0)


def _quotient(amount: float | None, by: float | None) -> float | None:
    value = amount / by if amount and by else math.inf
    return value if math.isfinite(value) else None


def _versions(run: Run) -> dict[str, str | None]:
    """Of the packages that computed; on a GPU also of what ties the engine to CUDA."""
    torch, jax = run.doctor.facts.torch, run.doctor.facts.jax
    found = {name: version for name, version in run.commitment.versions.items() if version != "not installed"}
    if run.device == "cuda" and run.backend == "torch" and torch is not None:
        return {**found, "cuda": torch.cuda_build}
    return {**found, **(jax.plugins if run.device != "cpu" and run.backend == "jax" and jax else {})}


def _host(run: Run) -> dict[str, Any]:
    """A CPU without a name goes by its architecture."""
    host = run.doctor.facts.host
    cpu = host.machine if host.cpu.casefold() in PLACEHOLDERS else host.cpu
    return {"cpu": cpu, "cpu_cores": host.cpu_cores, "memory_bytes": host.ram_total_bytes}


def _hardware(run: Run) -> dict[str, Any]:
    """The device, and the computer around it."""
    host, choice, proof = _host(run), run.doctor.choice, run.doctor.proof
    if run.device == "cpu" or choice is None:
        return {"name": host["cpu"], "memory_bytes": host["memory_bytes"], "host": host}
    about, nvidia, batch = proof.about if proof else None, run.doctor.facts.nvidia, run.commitment.batch
    capability = (about.capability if about else None) or choice.capability
    return {
        "name": (about.name if about else None) or choice.kind, "memory_bytes": choice.memory_bytes,
        "capability": ".".join(map(str, capability)) if capability else None,
        "driver": nvidia.driver_version, "driver_cuda": nvidia.driver_cuda,
        "count": batch.devices if batch else 1, "uuid": about.uuid if about else None, "host": host,
    }  # fmt: skip


def _gpu_memory(run: Run) -> dict[str, Any] | None:
    """The largest sample under the process id of the run; of the whole device where NVML hides process ids."""
    samples = run.result.gpu_memory or ()
    ours = [sample for sample in samples if sample.by == "nvml"] or list(samples)
    if not ours or run.device != "cuda":
        return None
    largest = max(ours, key=lambda sample: sample.used_bytes)
    return {"samples": len(ours), **{name: getattr(largest, name) for name in ("by", "step", "pid", "used_bytes")}}


def _inputs(run: Run) -> dict[str, Any]:
    """What the run was given, by name and hash."""
    committed = run.commitment
    sets = {"dataset": committed.dataset, "validation": committed.dataset.validation, "evalset": committed.evalset}
    named = {name: {"name": without_place(one.key), "sha256": one.sha256} for name, one in sets.items() if one}
    model = committed.base_model.model_dump(exclude={"weights"}) | {"name": without_place(committed.base_model.name)}
    return named | {"base_model": model, "tokenizer_sha256": committed.tokenizer_sha256}


def _cpu_run(cpu: Run) -> dict[str, Any]:
    sums = hashlib.sha256(cpu.record.data(SUMS) or b"").hexdigest()
    return {"precommit_sha256": cpu.run_id, "versions": _versions(cpu), "host": _host(cpu), "sums_sha256": sums}
