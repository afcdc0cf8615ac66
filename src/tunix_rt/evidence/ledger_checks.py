"""Do the lists that a run kept of its rows and checkpoints agree with what it committed to and measured? Never raises.

Runs of versions that kept none have none, and are not faulted for it.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any

from tunix_rt.data.merkle import merkle_root
from tunix_rt.evidence.doubtful import parse_object, read_bytes, shown
from tunix_rt.ledgers import CHECKPOINTS_SCHEMA
from tunix_rt.rundir import RunDir, checkpoint_name

_HASH = re.compile(r"[0-9a-f]{64}")


def ledger_problems(run: RunDir) -> list[str]:
    """Every way `rows.jsonl` contradicts the precommitment, and `checkpoints.json` the metrics and the result."""
    problems = list(_row_problems(run)) if os.path.exists(run.rows) else []
    return problems + (list(_list_problems(run)) if os.path.exists(run.checkpoint_list) else [])


def _row_problems(run: RunDir) -> Iterator[str]:
    dataset = _object_in(run, "precommit.json").get("dataset")
    committed = dataset.get("merkle_root") if isinstance(dataset, dict) else None
    data, unread = read_bytes(run.rows)
    if data is None:
        yield unread
    elif committed is not None:  # without one the run has not begun
        lines = data.split(b"\n")[:-1] if data.endswith(b"\n") else data.split(b"\n")
        leaves = []
        for number, line in enumerate(lines):
            row = parse_object(line)
            digest = row.get("sha256") if isinstance(row, dict) else None
            if not isinstance(row, dict) or row.get("row") != number or not _is_hash(digest):
                yield f"rows.jsonl:{number + 1}: not row {number} with its hash"
                return
            leaves.append(bytes.fromhex(str(digest)))
        if merkle_root(leaves) != committed:
            yield "rows.jsonl: the rows are not those of the merkle_root in precommit.json"


def _list_problems(run: RunDir) -> Iterator[str]:
    told, result = _object_in(run, "checkpoints.json"), _object_in(run, "result.json")
    entries = told.get("checkpoints")
    if told.get("schema") != CHECKPOINTS_SCHEMA or not isinstance(entries, list):
        yield f"checkpoints.json: not a list of {CHECKPOINTS_SCHEMA}"
        return
    data, _ = read_bytes(run.metrics) if os.path.exists(run.metrics) else (b"", "")
    lines = (data or b"").split(b"\n")[:-1]
    before = 0
    for entry in entries:
        step = entry.get("step") if isinstance(entry, dict) else None
        if type(step) is not int or not before < step <= len(lines):
            yield f"checkpoints.json: step {shown(step)} after {before}, of {len(lines)} in metrics.jsonl"
            return
        before = step
        if entry.get("metrics_head") != hashlib.sha256(lines[step - 1]).hexdigest():
            yield f"checkpoints.json: step {step}: metrics_head is not the hash of its line in metrics.jsonl"
        manifest = run.checkpoints / checkpoint_name(step) / "MANIFEST.json"
        found, _ = read_bytes(manifest) if os.path.exists(manifest) else (None, "")
        if found is not None and hashlib.sha256(found).hexdigest() != entry.get("manifest_sha256"):
            yield f"checkpoints.json: step {step}: manifest_sha256 is not the hash of its MANIFEST.json"
    if result.get("status") == "completed" and before != len(lines):
        yield f"checkpoints.json ends at step {before}, the run at {len(lines)}"


def _object_in(run: RunDir, name: str) -> dict[str, Any]:
    """The object in a file of the run; empty where there is none, which others fault."""
    data, _ = read_bytes(run.root / name) if os.path.exists(run.root / name) else (None, "")
    found = parse_object(data) if data is not None else {}
    return found if isinstance(found, dict) else {}


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None
