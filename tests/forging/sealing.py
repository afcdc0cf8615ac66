"""After an edit: the chain, the hashes and all that a bundle says of itself, made anew with the program's own functions."""

import hashlib
import re
from pathlib import Path
from typing import Any

from tests.forging.folder import edited, lines_of, metrics_of, put, read
from tunix_rt.errors import TunixError
from tunix_rt.evidence.agreeing import schema_of
from tunix_rt.evidence.claims import SCHEMA, claims_of, read_run
from tunix_rt.evidence.manifest import MANIFEST, manifest_of
from tunix_rt.evidence.provenance import PROVENANCE, provenance_of
from tunix_rt.evidence.readme import readme_text
from tunix_rt.rundir import json_text, sha256_file

NOT_LISTED = ("SHA256SUMS",)


def reseal(folder: Path, *, ending: bool = True, heads: bool = True) -> None:
    """Everything that follows from the files of the run. Without `ending` what `result.json` says of the last step stays as
    it was typed; without `heads` so does what `checkpoints.json` says of the chain."""
    for run in (folder, folder / "cpu"):
        if (run / "precommit.json").is_file():
            _rechain(run, ending=ending, heads=heads)
    reseal_run_sums(folder)
    rebuild_claims(folder)
    reseal_sums(folder)


def _rechain(run: Path, *, ending: bool, heads: bool) -> None:
    with edited(run / "precommit.json") as committed:
        committed["config_sha256"] = sha256_file(run / "config.yaml")
    prev = run_id = sha256_file(run / "precommit.json")
    lines, head_after = [], {}
    for number, line in enumerate((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(), start=1):
        lines.append(re.sub(r'"prev": "\w+"', f'"prev": "{prev}"', line))
        prev = head_after[number] = hashlib.sha256(lines[-1].encode()).hexdigest()
    put(run / "metrics.jsonl", "".join(f"{line}\n" for line in lines))
    with edited(run / "result.json") as result:
        result |= {"metrics_head": prev, "run_id": run_id}
        if ending:
            last = metrics_of(run)[-1]
            result |= {"final_loss": last["loss"], "final_loss_hex": last["loss_hex"]}
            result |= {"steps_completed": len(lines), "steps_planned": len(lines)}
            if (run / "eval" / "heldout.jsonl").is_file() and "best_step" in result:
                best = min(lines_of(run / "eval" / "heldout.jsonl"), key=lambda one: one["loss"])
                result |= {"best_heldout_loss": best["loss"], "best_step": best["step"]}
    if heads:
        _rehead_checkpoints(run, head_after)


def _rehead_checkpoints(run: Path, heads: dict[int, str]) -> None:
    """What the list of checkpoints says of the chain; and where a checkpoint is in the bundle, its own files."""
    if not (run / "checkpoints.json").is_file():
        return
    with edited(run / "checkpoints.json") as told:
        for one in told["checkpoints"]:
            one["metrics_head"] = heads.get(one["step"], one["metrics_head"])
            kept = run / "checkpoints" / f"step-{one['step']:06d}"
            if kept.is_dir():
                one |= _reseal_checkpoint(kept, one["metrics_head"])


def _reseal_checkpoint(kept: Path, head: str) -> dict[str, Any]:
    with edited(kept / "state.json") as state:
        state["metrics_head"] = head
    files = {
        path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(kept.iterdir())
        if path.name != "MANIFEST.json"
    }
    with edited(kept / "MANIFEST.json") as manifest:
        manifest["files"] = files
    return {"manifest_sha256": sha256_file(kept / "MANIFEST.json"), "files": files}


def reseal_run_sums(folder: Path) -> None:
    """`run-SHA256SUMS` of the run, and of the one on the CPU where there is one."""
    for run in (folder, folder / "cpu"):
        if (run / "precommit.json").is_file():
            _rehash_run(run)


def _rehash_run(run: Path) -> None:
    """Files that are here by what they are now; the others keep the hash that is told."""
    sums = run / "run-SHA256SUMS"
    told = _listed(sums)
    now = {name: sha256_file(run / name) if (run / name).is_file() else digest for name, digest in told.items()}
    put(sums, "".join(f"{digest}  {name}\n" for name, digest in sorted(now.items())))


def _listed(sums: Path) -> dict[str, str]:
    """Name -> hash."""
    lines = [line.split("  ", 1) for line in sums.read_text(encoding="utf-8").splitlines()]
    return {name: digest for digest, name in lines}


def set_run_hash(folder: Path, name: str, digest: str) -> None:
    """Another hash for a file of the run that is not in the bundle."""
    sums = folder / "run-SHA256SUMS"
    text, count = re.subn(rf"(?m)^\w{{64}}  {re.escape(name)}$", f"{digest}  {name}", sums.read_text(encoding="utf-8"))
    assert count == 1, f"{sums.name} does not list {name}"
    put(sums, text)


def rebuild_claims(folder: Path) -> None:
    """What the program would write of these files, where it would write anything; else all stays as it was told."""
    says = read(folder / "bundle.json")
    schema = schema_of(says)
    try:
        run = read_run(folder)
        cpu = read_run(folder / "cpu", "cpu/") if (folder / "cpu").is_dir() else None
        ended = _listed(folder / "run-SHA256SUMS")
        left_out = {name: digest for name, digest in ended.items() if not (folder / name).exists()}
        whole = claims_of(run, cpu, schema) | {"commit": says["commit"], "left_out": left_out}
        put(folder / "bundle.json", json_text(whole))
        put(folder / "README.md", readme_text(whole))
        name = read(folder / MANIFEST)["run_id"] if (folder / MANIFEST).is_file() else ""
        if name:
            put(folder / MANIFEST, json_text(manifest_of(run, whole, name)))
        if schema == SCHEMA:
            put(folder / PROVENANCE, json_text(provenance_of(run, whole, ended, name)))
    except (TunixError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, OSError):
        return  # what cannot be computed stays as it was told


def reseal_sums(folder: Path) -> None:
    """`SHA256SUMS` over the files that are there."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path.name not in NOT_LISTED
    )
    put(folder / "SHA256SUMS", "".join(f"{sha256_file(folder / name)}  {name}\n" for name in names))


def retell(folder: Path, file: str, **told: Any) -> None:
    """Values of one of the bundle's own files typed over, and only the last hashes made anew."""
    value = read(folder / file) | told
    put(folder / file, json_text(value))
    reseal_sums(folder)
