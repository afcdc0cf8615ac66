"""What is told in more than one file, and what follows from the facts of the doctor: whoever edits one file forgets another.

Texts are written anew where the module that writes them is the one the run had; a run of another version is held to the
figures alone.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt import assets
from tunix_rt.data.holding_out import MOST_ASKED
from tunix_rt.data.registry import KEY
from tunix_rt.doctor.checks import judge
from tunix_rt.doctor.facts import Facts, facts_from_json
from tunix_rt.doctor.prove import Proof, Proved, cuda_check_text
from tunix_rt.doctor.verdict import Ask
from tunix_rt.doctor.words import env_info_text, torch_version_text
from tunix_rt.evidence.claims import require, value_at, without_place
from tunix_rt.evidence.doubtful import read_bytes, shown
from tunix_rt.evidence.gathered import Noted, few
from tunix_rt.evidence.source import source_hash
from tunix_rt.rundir import RunDir, sha256_file

PLANNED = {
    "schema", "peak_bytes", "peak_bytes_at_max_length", "longest_row_tokens", "memory", "fit", "disk_bytes", "fitting",
    "memory_limit_bytes", "oom_attempt",
}  # fmt: skip
LONGEST_TOKEN = 256
"""Letters that one token can stand for; the longest of the usual vocabularies has 128."""
WRITES_WORDS, JUDGES = "doctor/words.py", "doctor/"
GATHERS = {f"doctor/{name}.py" for name in ("child", "gpu_memory", "nvidia", "probe")}
"""Modules of the doctor that look and do not judge."""


def _memory_file_problems(noted: Noted) -> Iterator[str]:
    """`memory.json` against the plan, and its own division. The result is asked elsewhere."""
    where = noted.run.where
    if noted.memory is None:
        return
    planned = value_at(noted.plan, "memory.peak_bytes")
    if (told := value_at(noted.memory, "predicted_bytes")) != planned and None not in (told, planned):
        yield f"{where}memory.json: predicted_bytes is {shown(told)}, plan.json has {shown(planned)}"
    for part in (noted.memory, *_objects(value_at(noted.memory, "phases"))):
        predicted, measured, error = (part.get(name) for name in ("predicted_bytes", "measured_bytes", "error"))
        if type(predicted) is not int or type(measured) is not int or measured <= 0 or error is None:
            continue
        if type(error) is not float or abs(error - (predicted / measured - 1)) > 1e-9:
            yield f"{where}memory.json: error is {shown(error)}, of {predicted:,} beside {measured:,} bytes"


def plan_problems(noted: Noted) -> Iterator[str]:
    """Each phase of the plan is the sum of its parts, the peak is that of its phase, and the account has the same."""
    yield from _memory_file_problems(noted)
    if extra := sorted(map(str, set(noted.plan or {}) - PLANNED)):
        yield f"{noted.run.where}plan.json: {shown(extra[0])}, which no plan has"
    where, phases = f"{noted.run.where}plan.json", list(_objects(value_at(noted.plan, "memory.phases")))
    for phase in phases:
        parts = phase.get("parts")
        if not isinstance(parts, Mapping) or sum(parts.values()) != phase.get("total_bytes"):
            yield f"{where}: the phase {shown(phase.get('name'))} is not the sum of its parts"
            return
    peak, named = (value_at(noted.plan, f"memory.{name}") for name in ("peak_bytes", "peak_phase"))
    if phases and peak not in [phase["total_bytes"] for phase in phases if phase.get("name") == named]:
        yield f"{where}: peak_bytes is {shown(peak)}, the phase {shown(named)} has another sum"
    if (told := value_at(noted.plan, "fit.predicted_bytes")) is not None and told != peak:
        yield f"{where}: fit.predicted_bytes is {shown(told)}, memory.peak_bytes {shown(peak)}"


def _objects(values: Any) -> Iterator[Mapping[str, Any]]:
    listed = values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ()
    yield from (one for one in listed if isinstance(one, Mapping))


def reload_problems(noted: Noted) -> Iterator[str]:
    """A final model that is said to be proven was within what is allowed."""
    told = noted.run.result.get("final_model")
    if isinstance(told, Mapping) and told.get("proven") is True:
        where = f"{noted.run.where}result.json: final_model"
        far, allowed = (require(where, told, name, float) for name in ("largest_logit_difference", "tolerance"))
        if not 0 <= far <= allowed:
            yield f"{where}: logits are {far:g} apart, {allowed:g} are allowed"


def data_problems(noted: Noted) -> Iterator[str]:
    """No more traces than the dataset has, where it is one that is shipped."""
    run, key = noted.run, noted.run.need("precommit.json", "dataset.key", str)
    told = sum(run.need("precommit.json", f"dataset.{name}", int) for name in ("traces", "heldout_traces"))
    if (held := _shipped_traces(key)) is not None and told > held:
        yield f"{run.where}precommit.json: {told:,} traces, the dataset {key} has {held:,}"


def dataset_not_shipped(noted: Noted) -> str:
    """Why nothing can be looked up in the dataset; empty where it can."""
    key = value_at(noted.run.precommit, "dataset.key")
    if isinstance(key, str) and _shipped_traces(key) is not None:
        return ""
    return f"the dataset {_named(key)} does not come with tunix-rt"


def model_not_shipped(noted: Noted) -> str:
    """Why the model cannot be looked up; empty where it can, and where its weights were drawn at random."""
    name = value_at(noted.run.precommit, "base_model.name")
    if value_at(noted.run.precommit, "base_model.weights") == "random":
        return ""
    if isinstance(name, str) and KEY.fullmatch(name) and (assets.shipped_folder("models") / name).is_dir():
        return ""
    return f"the model {_named(name)} does not come with tunix-rt"


def _named(name: Any) -> str:
    """A name that may be hostile, without its place, in one short printable line."""
    return shown(without_place(str(name)))[1:-1]


@lru_cache(maxsize=8)
def _shipped_traces(key: str) -> int | None:
    if not KEY.fullmatch(key):
        return None
    path = assets.shipped_folder("datasets") / key / "dataset.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else None


def base_model_problems(noted: Noted) -> Iterator[str]:
    """Pretrained weights have hashes, random ones have none; a model that is shipped has the hashes it ships with."""
    run, where = noted.run, f"{noted.run.where}precommit.json"
    files = run.need("precommit.json", "base_model.files", dict)
    weights = run.need("precommit.json", "base_model.weights", str)
    with_hashes = any(str(name).endswith((".safetensors", ".gguf")) for name in files)
    if with_hashes != (weights == "pretrained"):
        yield f"{where}: {shown(weights)} weights {'with' if with_hashes else 'without'} the hash of a file of weights"
    name = run.need("precommit.json", "base_model.name", str)
    folder = assets.shipped_folder("models") / name
    if KEY.fullmatch(name) and folder.is_dir():
        for file, digest in files.items():
            if _shipped_hash(folder / Path(str(file)).name) != digest:
                yield f"{where}: {shown(file)} of {name} is not the one shipped"


@lru_cache(maxsize=64)
def _shipped_hash(path: Path) -> str:
    """Of a shipped file; empty where there is none. What is shipped does not change while we look."""
    return sha256_file(path) if path.is_file() else ""


def host_memory_problems(noted: Noted) -> Iterator[str]:
    """On the CPU no step holds more than the host has."""
    run = noted.run
    if run.result.get("device") != "cpu":
        return
    most = run.need("doctor.json", "facts.host.ram_total_bytes", int)
    for number, line in enumerate(run.metrics, start=1):
        if (peak := require(f"{run.where}metrics.jsonl:{number}", line, "peak_bytes", int)) > most:
            yield f"{run.where}metrics.jsonl:{number}: peak_bytes is {peak:,}, the host has {most:,}"
            return


def length_problems(noted: Noted) -> Iterator[str]:
    """No output is longer than so many tokens can be."""
    run = noted.run
    most = value_at(run.config, "evaluation.max_new_tokens")
    for when in ("before", "after"):
        data = read_bytes(RunDir(run.folder).predictions(when))[0]
        if data is None or type(most) is not int:
            continue
        lengths = (len(str(json.loads(line).get("output", ""))) for line in data.splitlines())
        over = (number for number, length in enumerate(lengths, start=1) if length > most * LONGEST_TOKEN)
        file = f"{run.where}eval/predictions-{when}.jsonl"
        yield from few((f"{file}:{number}: longer than {most} tokens can be" for number in over), file)


def question_problems(noted: Noted) -> Iterator[str]:
    """As many questions as were committed to: all of the eval set, or of the held-out traces no more than there are,
    numbered without a gap. That the log says the same number is asked there."""
    run = noted.run
    wanted = value_at(run.precommit, "evalset.items")
    held = value_at(run.precommit, "dataset.heldout_traces")
    for when in ("before", "after"):
        data = read_bytes(RunDir(run.folder).predictions(when))[0]
        if data is None:
            continue
        asked = [json.loads(line).get("id") for line in data.splitlines()]
        file = f"{run.where}eval/predictions-{when}.jsonl"
        if type(wanted) is int:
            if len(asked) != wanted:
                yield f"{file}: {len(asked):,} questions, precommit.json has {wanted:,}"
        elif "evalset" not in run.precommit:
            if type(held) is int and len(asked) > min(held, MOST_ASKED):
                yield f"{file}: {len(asked):,} questions, {held:,} traces were held out"
            if asked != [f"heldout-{number}" for number in range(1, len(asked) + 1)]:
                yield f"{file}: the held-out questions are not numbered one after the other: some were left out"


# --- what the doctor found --------------------------------------------------------------------------------------------


def doctor_problems(noted: Noted) -> Iterator[str]:
    """Its verdicts and texts, given again by its facts."""
    run, where = noted.run, noted.run.where
    facts = facts_from_json(run.need("doctor.json", "facts", dict))
    yield from _host_lines(noted, facts)
    if _had(noted, WRITES_WORDS):
        texts = {"env_info.txt": env_info_text(facts), "torch_version.txt": torch_version_text(facts)}
        for name, text in texts.items():
            if read_bytes(run.folder / name)[0] != text.encode("utf-8", "surrogatepass"):
                yield f"{where}{name} is not what the facts of doctor.json give"
    if isinstance(proof := run.doctor.get("proof"), Mapping) and run.result.get("device") == "cuda":
        yield from _proof_text_problems(noted, proof)
    if _had(noted, JUDGES):
        training = {name: run.need("config.yaml", f"training.{name}", str) for name in ("device", "backend", "dtype")}
        given = [(check.cause, check.verdict) for check in judge(facts, Ask(**training))]
        told = [(value_at(one, "cause"), value_at(one, "verdict")) for one in run.need("doctor.json", "checks", list)]
        if told != given:
            odd = sorted({str(one[0]) for one in set(told) ^ set(given)}) or ["their order"]
            yield f"{where}doctor.json: its facts give other verdicts: {', '.join(odd)[:80]}"


def _proof_text_problems(noted: Noted, proof: Mapping[str, Any]) -> Iterator[str]:
    """`cuda_check.txt`, line for line as the proof in the report gives it, whose figures are sorted by name."""
    results = tuple(Proved(**one) for one in proof["results"])
    told = {name: proof[name] for name in ("backend", "device", "dtype", "head_size", "about", "pid", "seconds")}
    text = cuda_check_text(Proof(**told, results=results, problem=proof.get("problem")))
    data = read_bytes(noted.run.folder / "cuda_check.txt")[0]
    if data is not None and sorted(data.split(b"\n")) != sorted(text.encode("utf-8", "surrogatepass").split(b"\n")):
        yield f"{noted.run.where}cuda_check.txt is not what the proof in doctor.json gives"


def _host_lines(noted: Noted, facts: Facts) -> Iterator[str]:
    text = (read_bytes(noted.run.folder / "env_info.txt")[0] or b"").decode("utf-8", "replace")
    for line in (f"cpu: {facts.host.cpu}, {facts.host.cpu_cores} cores", f"ram: {facts.host.ram_total_bytes} bytes"):
        if line not in text.split("\n"):
            yield f"{noted.run.where}env_info.txt lacks {shown(line)}, which doctor.json gives"


def _had(noted: Noted, prefix: str) -> bool:
    """Whether the run had the modules under `prefix` that are here now."""
    source = noted.run.precommit.get("source_files")
    mine = {name: digest for name, digest in _ours().items() if name.startswith(prefix) and name not in GATHERS}
    return isinstance(source, Mapping) and all(source.get(name) == digest for name, digest in mine.items())


@lru_cache(maxsize=1)
def _ours() -> dict[str, str]:
    return source_hash(Path(tunix_rt.__file__).parent)[1]
