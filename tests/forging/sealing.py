"""What a forger does after a change: everything that follows from the files is computed again, with the project's functions."""

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.forging.edits import Json, edited, lines_of, put, put_lines, read
from tunix_rt.errors import TunixError
from tunix_rt.evaluate.comparison import compare
from tunix_rt.evaluate.report import comparison_facts
from tunix_rt.evidence.facts import completed_run
from tunix_rt.evidence.manifest import manifest_of
from tunix_rt.runs.checksums import RUN_SUMS, SIGNATURE, SUMS, list_folder, parse_sums, sums_text
from tunix_rt.runs.ledger import state_hash
from tunix_rt.runs.record import MANIFEST, README, RunRecord
from tunix_rt.scoring.score import Prediction, score_predictions
from tunix_rt.storage import json_line, json_text, sha256_file, to_plain

BROKEN = (TunixError, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError)
"""From a file that a change left without its form: what follows from it stays as it was."""
OWN = (SUMS, RUN_SUMS, MANIFEST, README, SIGNATURE)


def reseal(folder: Path) -> None:
    """Everything that follows from the files of a bundle, of a run folder, and of the run in `cpu/`."""
    if (folder / "cpu").is_dir():
        reseal_run(folder / "cpu")
        reseal_sums(folder / "cpu")
    reseal_run(folder)
    if (folder / MANIFEST).is_file():
        reseal_run_sums(folder)
        reseal_manifest(folder)
    reseal_sums(folder)


def reseal_run(folder: Path) -> None:
    """Commitment, chain, states, checkpoints, result and scores. Each stays as it was where a file has lost its form."""
    for step in (_commit, _restate, _rechain, _end, _rescore):
        try:
            step(folder)
        except BROKEN:
            continue


def _commit(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["config_sha256"] = sha256_file(folder / "config.yaml")


def _restate(folder: Path) -> None:
    """The entries of the checkpoints that are there, and the state hash of each in the metrics."""
    with edited(folder / "checkpoints.json") as listed:
        for entry in listed["checkpoints"]:
            kept = folder / "checkpoints" / f"step-{entry['step']:06d}"
            if kept.is_dir():
                entry["files"] |= {
                    path.name: {"sha256": sha256_file(path), "bytes": path.stat().st_size}
                    for path in kept.iterdir()
                    if path.name != "MANIFEST.json"
                }
    states = _states(listed)
    lines = lines_of(folder / "metrics.jsonl")
    for line in lines:
        for step in line.get("states", {}).keys() & states.keys():
            line["states"][step] = states[step]
    put_lines(folder / "metrics.jsonl", lines)


def _states(listed: Json) -> dict[str, str]:
    return {
        str(entry["step"]): state_hash({name: file["sha256"] for name, file in entry["files"].items()})
        for entry in listed["checkpoints"]
    }


def _rechain(folder: Path) -> None:
    """`prev` of every line, and what checkpoints state about their line."""
    head = _head_of_run(folder)
    heads, lines = [head], []
    for line in lines_of(folder / "metrics.jsonl"):
        if (sampled := folder / "rollouts" / f"step-{line['step']:06d}.jsonl").is_file():
            line["rollouts"] = sha256_file(sampled)
        lines.append(json_line({**line, "prev": head}))
        heads.append(head := hashlib.sha256(lines[-1].rstrip("\n").encode()).hexdigest())
    put(folder / "metrics.jsonl", "".join(lines))
    with edited(folder / "checkpoints.json") as listed:
        for entry in listed["checkpoints"]:
            if entry["step"] < len(heads):
                entry["metrics_head"] = heads[entry["step"]]
                _reseal_checkpoint(folder / "checkpoints" / f"step-{entry['step']:06d}", entry)


def _head_of_run(folder: Path) -> str:
    return sha256_file(folder / "precommit.json")


def _reseal_checkpoint(kept: Path, entry: Json) -> None:
    if not kept.is_dir():
        return
    with edited(kept / "state.json") as state:
        state["metrics_head"] = entry["metrics_head"]
    entry["files"]["state.json"] = {
        "sha256": sha256_file(kept / "state.json"), "bytes": (kept / "state.json").stat().st_size,
    }  # fmt: skip
    with edited(kept / "MANIFEST.json") as manifest:
        manifest["files"] = entry["files"]
    entry["manifest_sha256"] = sha256_file(kept / "MANIFEST.json")


def _end(folder: Path) -> None:
    """What result.json states about the run, its last step and its checkpoints."""
    lines, listed = lines_of(folder / "metrics.jsonl"), read(folder / "checkpoints.json")
    data = (folder / "metrics.jsonl").read_bytes()
    last, steps = lines[-1], [entry["step"] for entry in listed["checkpoints"]]
    with edited(folder / "result.json") as result:
        result |= {"run_id": sha256_file(folder / "precommit.json"), "final_state": _states(listed)[str(steps[-1])]}
        result |= {"metrics_head": hashlib.sha256(data.split(b"\n")[-2]).hexdigest(), "final_loss": last["loss"]}
        result |= {"final_loss_hex": last["loss_hex"], "steps_completed": len(lines), "steps_planned": len(lines)}
        if (folder / "eval" / "heldout.jsonl").is_file() and "best_step" in result:
            saved = [line for line in lines_of(folder / "eval" / "heldout.jsonl") if line["step"] in steps]
            best = min(saved, key=lambda line: line["loss"])
            result |= {"best_step": best["step"], "best_heldout_loss": best["loss"]}


def _rescore(folder: Path) -> None:
    """Scores, summary and result as the answers give them."""
    if not (folder / "eval" / "predictions-after.jsonl").is_file():
        return
    sides = {
        when: [Prediction(**one) for one in lines_of(folder / "eval" / f"predictions-{when}.jsonl")]
        for when in ("before", "after")
    }
    scores: dict[str, Any] = {when: to_plain(score_predictions(side, when)) for when, side in sides.items()}
    for when, values in scores.items():
        put(folder / "eval" / f"{when}.json", json_text(values))
    comparison = to_plain(comparison_facts(compare(sides["before"], sides["after"])))
    with edited(folder / "eval_summary.json") as summary:
        comparison["sentence"] = summary["comparison"]["sentence"]  # prose, which nothing compares
        summary |= {**scores, "comparison": comparison, "questions": len(sides["after"])}
    with edited(folder / "result.json") as result:
        for when, values in scores.items():
            result["scores"][when] = {name: values[name] for name in result["scores"][when]}


# --- hashes and manifest ----------------------------------------------------------------------------------------------


def reseal_run_sums(folder: Path) -> None:
    """run-SHA256SUMS of a bundle: what is there as it is now, what is left out as the checkpoints' entries have it."""
    claimed, _ = parse_sums((folder / RUN_SUMS).read_bytes(), RUN_SUMS)
    there = {name for name in list_folder(folder).files if name not in OWN and not name.startswith("cpu/")}
    kept = {name: digest for name, digest in claimed.items() if name in there or _stays_out(folder, name)}
    digests = kept | {name: sha256_file(folder / name) for name in there}
    put(folder / RUN_SUMS, sums_text(digests | _entries(folder, digests)))


def _stays_out(folder: Path, name: str) -> bool:
    return name.startswith(("checkpoints/", "final_model/", "profile/trace"))


def _entries(folder: Path, digests: dict[str, str]) -> dict[str, str]:
    """Hashes of checkpoints that are left out, as checkpoints.json has them."""
    try:
        listed = read(folder / "checkpoints.json")["checkpoints"]
        claimed = {
            f"checkpoints/step-{entry['step']:06d}/{name}": digest
            for entry in listed
            for name, digest in (
                *((name, file["sha256"]) for name, file in entry["files"].items()),
                ("MANIFEST.json", entry["manifest_sha256"]),
            )
        }
    except BROKEN:
        return {}
    return {name: digest for name, digest in claimed.items() if name in digests and not (folder / name).is_file()}


def reseal_manifest(folder: Path) -> None:
    """run_manifest.json as the files give it, under the name and commit that it states."""
    try:
        stated = json.loads((folder / MANIFEST).read_bytes())
        run = completed_run(RunRecord(folder))
        cpu = completed_run(RunRecord(folder / "cpu", "cpu/")) if (folder / "cpu").is_dir() else None
        if run is not None:
            made = manifest_of(run, cpu, name=stated.get("run_id", ""), commit=stated.get("commit"))
            put(folder / MANIFEST, json_text(made))
    except BROKEN:
        return


def reseal_sums(folder: Path) -> None:
    """SHA256SUMS over everything that is there; in a run folder without its weights, theirs as they were."""
    claimed, _ = parse_sums((folder / SUMS).read_bytes()) if (folder / SUMS).is_file() else ({}, [])
    names = [name for name in list_folder(folder).files if name not in (SUMS, SIGNATURE)]
    bundle = (folder / MANIFEST).is_file()
    left = {} if bundle else {name: digest for name, digest in claimed.items() if _stays_out(folder, name)}
    put(folder / SUMS, sums_text(left | {name: sha256_file(folder / name) for name in names}))
