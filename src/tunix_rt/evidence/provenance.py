"""`provenance.intoto.json`: the run as an in-toto Statement with SLSA provenance, so that tools which know neither tunix-rt
nor its files can read what came from what. Plain JSON, not signed."""

from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.evidence.claims import RunFiles, require, without_place
from tunix_rt.evidence.gathered import moment
from tunix_rt.evidence.manifest import settings_of

PROVENANCE = "provenance.intoto.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:tunix-rt:train:1"
BYPRODUCTS = (
    "training_log.txt", "metrics.jsonl", "result.json", "eval/predictions-before.jsonl", "eval/predictions-after.jsonl",
)  # fmt: skip


def provenance_of(run: RunFiles, says: Mapping[str, Any], hashes: Mapping[str, str], name: str) -> dict[str, Any]:
    """The statement, from the run's files, what `bundle.json` says, the hashes the run ended with and the name it was given:
    said here too, so that it cannot be changed in the manifest alone."""
    version = run.need("precommit.json", "versions", dict).get("tunix-rt")
    created = moment("precommit.json", run.precommit, "created")
    started = min(created, moment("result.json", run.result, "started"))
    return {
        "_type": STATEMENT,
        "subject": [_file(name, hashes[name]) for name in sorted(hashes) if name.startswith("final_model/")],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": settings_of(run)[0],
                "internalParameters": {
                    "device": says["device"],
                    "run_id": name,
                    "seeds": run.need("precommit.json", "seeds", dict),
                },
                "resolvedDependencies": list(_inputs(run, says)),
            },
            "runDetails": {
                "builder": {"id": "urn:tunix-rt:program", "version": {"tunix-rt": version}},
                "metadata": {
                    "invocationId": run.run_id,
                    "startedOn": f"{started:%Y-%m-%dT%H:%M:%SZ}",
                    "finishedOn": f"{moment('result.json', run.result, 'finished'):%Y-%m-%dT%H:%M:%SZ}",
                },
                "byproducts": [_file(name, hashes[name]) for name in BYPRODUCTS if name in hashes],
            },
        },
    }


def _inputs(run: RunFiles, says: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Source, data, base model, tokenizer and eval set, by hash."""
    yield {
        "name": "source",
        "digest": {"gitCommit": says["commit"]},
        "annotations": {"source_sha256": says["source_sha256"]},
    }
    need = run.need
    yield {
        "name": f"dataset {says['dataset']}",
        "digest": {"sha256": need("precommit.json", "dataset.sha256", str)},
        "annotations": {"merkle_root": need("precommit.json", "dataset.merkle_root", str)},
    }
    files = need("precommit.json", "base_model.files", dict)
    for name in sorted(files):
        yield _file(f"base_model/{name}", require("precommit.json: base_model.files", {"it": files[name]}, "it", str))
    yield _file("tokenizer", need("precommit.json", "tokenizer_sha256", str))
    if "evalset" in run.precommit:
        key = need("precommit.json", "evalset.key", str)
        yield _file(f"evalset {without_place(key)}", need("precommit.json", "evalset.sha256", str))


def _file(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}
