"""`run_manifest.json` of a bundle: one flat account of the run for programs, with its settings. It holds no null: a setting
left open is named apart."""

import json
from collections.abc import Mapping
from typing import Any

from tunix_rt.errors import ConfigError
from tunix_rt.evidence.claims import AGAIN, UNPRINTED, UNTOUCHED, RunFiles, require
from tunix_rt.evidence.doubtful import nulls, shown

MANIFEST = "run_manifest.json"
MANIFEST_SCHEMA = "tunix-rt/run-manifest/1"
LONGEST_NAME = 100
NO_NAMES = ("unknown", "todo", "tbd", "none", "null", "n/a", "placeholder")

_SAID = (
    "commit", "source_sha256", "backend", "device", "model", "weights", "dataset", "steps_completed", "resumed_from",
    "final_loss",
)  # fmt: skip


def manifest_of(run: RunFiles, says: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    """The manifest under the name `run_id`, from what `bundle.json` says and from the run's settings and versions."""
    settings, left_open = settings_of(run)
    return {
        "schema": MANIFEST_SCHEMA,
        "run_id": run_id,
        "precommit_sha256": says["run_id"],
        **{name: says[name] for name in _SAID},
        "versions": _versions(run, says),
        "hardware": _hardware(says),
        "configuration": settings,
        **({"configuration_left_open": left_open} if left_open else {}),
        "tokens_per_second": says["tokens_per_second"]["device"],
    }


def fault_of_name(run_id: Any) -> str | None:
    """Why `run_id` names no run; None for one that does."""
    if not isinstance(run_id, str) or not run_id.strip() or run_id != run_id.strip() or UNPRINTED.search(run_id):
        return f"run_id is {shown(run_id)}, not a line of text"
    if len(run_id) > LONGEST_NAME:
        return f"run_id has {len(run_id)} letters, {LONGEST_NAME} are the most"
    return f"run_id is {shown(run_id)}, a placeholder" if run_id.casefold() in NO_NAMES else None


def require_name(run_id: str) -> str:
    if fault := fault_of_name(run_id):
        raise ConfigError(f"--run-id: {fault}", fix="name the run in one short line: --run-id m39-local-cpu-proof")
    return run_id


def _versions(run: RunFiles, says: Mapping[str, Any]) -> dict[str, str]:
    """Of everything that computed; on a GPU also of what ties it to CUDA."""
    found = {name: str(says[name]) for name in ("torch", "jax", "jaxlib", "cuda") if name in says}
    found |= says.get("cuda_plugin", {})
    for name in run.need("precommit.json", "versions", dict):
        version = require(f"{run.where}precommit.json: versions", run.precommit["versions"], str(name), str)
        if UNPRINTED.search(str(name)) or version == "not installed":
            raise run.fault(f"precommit.json: the version of {shown(name)} is {shown(version)}", AGAIN)
        found.setdefault(str(name), version)
    return found


def _hardware(says: Mapping[str, Any]) -> dict[str, Any]:
    """Name and memory of the device; of a run on the CPU, the host's."""
    host = says["host"]
    if says["device"] == "cuda":
        return {**says["gpu"], "host": host}
    return {"name": host["cpu"], "cpu_cores": host["cpu_cores"], "memory_bytes": host["memory_bytes"]}


def settings_of(run: RunFiles) -> tuple[dict[str, Any], list[str]]:
    """`config.yaml` as JSON has it, without the settings left open, and their dotted names."""
    try:
        plain = json.loads(json.dumps(run.config, allow_nan=False))
        return _without_nulls(plain), nulls(plain)
    except (TypeError, ValueError, RecursionError) as error:  # a date, say, or something that is no number
        raise run.fault(f"config.yaml: its settings are none that JSON can have ({error})", UNTOUCHED) from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value if inner is not None] if isinstance(value, list) else value
