"""What the log says in passing, against the files that say it on purpose. A line that a later version words otherwise is not
held to anything; on a GPU those must be there that only a GPU brings about."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.evidence.claims import memory_samples, require, value_at
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import LogLine, Noted, few
from tunix_rt.evidence.told import object_in
from tunix_rt.rundir import RunDir

GIB = 2**30
PREFLIGHT = re.compile(
    r"Preflight: model=(?P<model>.+?) .*?parameters=(?P<parameters>[\d,]+) device=(?P<device>\w+) dtype=(?P<dtype>\w+) "
    r"weights=(?P<weights>\w+).*"
)
DATA = re.compile(
    r"Data: .*: (?P<traces>[\d,]+) traces to train on, (?P<heldout>[\d,]+) held out; (?P<rows>[\d,]+) rows, "
    r"(?P<tokens>[\d,]+) tokens,.*"
)
STEPS = re.compile(r"Steps: (?P<steps>[\d,]+) of [\d,]+ rows.*")
ON_CPU = re.compile(r"Compile: .*\bon a CPU\b.*")
"""What the engine only says where it computes on a CPU."""
BEGINS = re.compile(r"tunix-rt \S+, run folder .*")
"""The first line of every process."""
HELDOUT = re.compile(r"step (\d{1,9})  held-out loss (\S+) over ([\d,]+) tokens")
ASKED = re.compile(r"evaluate (before|after): ([\d,]+) of ([\d,]+)\b.*")
SCORED = re.compile(
    r"Evaluation (before|after): (\d+) of (\d+) right by the tags \((\d+) leniently\), (\d+) % well-formed"
)
KIND = re.compile(r"Device kind: (.+); count (\d+); memory ([\d.]+) GiB, [\d.]+ GiB free")
VERSIONS = re.compile(r"\b(Python|torch|jax) ([^\s,]+)")
COUNTED = ("correct", "items", "correct_lenient")
PROOF_LINE = re.compile(r"  (\w+) +(ok|FAIL)  +(.*)")
PROVEN = re.compile(r"Proof on (?P<device>\w+) in \w+: held .*")


def log_fact_problems(noted: Noted) -> Iterator[str]:
    """Model, parameters, traces, rows, tokens and steps in the log; on a GPU also the proof and every sample of memory."""
    name = f"{noted.run.where}training_log.txt"
    yield from few(_said_otherwise(noted), name)
    yield from few((f"{name}{fault}" for fault in _measured_otherwise(noted)), name)
    yield from few((f"{name}{fault}" for fault in _asked_otherwise(noted)), name)
    yield from few((f"{name}{fault}" for fault in _machine_otherwise(noted)), name)
    if noted.run.result.get("device") == "cuda":
        yield from _lacking_on_a_gpu(noted)


def _said_otherwise(noted: Noted) -> Iterator[str]:
    run, wanted = noted.run, _wanted(noted)
    for line in noted.log:
        for pattern in (PREFLIGHT, DATA, STEPS, PROVEN):
            found = pattern.fullmatch(line.words)
            for name, told in (found.groupdict() if found else {}).items():
                value = wanted.get(name)
                plain = told.replace(",", "") if isinstance(value, int) else told
                if value is not None and plain != str(value):
                    yield f"{run.where}training_log.txt:{line.number}: {name} {shown(told)}, the run's are {shown(value)}"
        if run.result.get("device") == "cuda" and ON_CPU.fullmatch(line.words):
            yield f"{run.where}training_log.txt:{line.number}: it speaks of a CPU that computes"
        if run.result.get("device") == "cpu" and line.words.startswith("GPU memory: "):
            yield f"{run.where}training_log.txt:{line.number}: memory of a GPU in a run on the CPU"


def _wanted(noted: Noted) -> Mapping[str, Any]:
    committed, config = noted.run.precommit, noted.run.config
    return {
        "model": value_at(committed, "base_model.name"),
        "parameters": noted.run.result.get("parameters"),
        "device": noted.run.result.get("device"),
        "dtype": value_at(config, "training.dtype"),
        "weights": value_at(committed, "base_model.weights"),
        "traces": value_at(committed, "dataset.traces"),
        "heldout": value_at(committed, "dataset.heldout_traces"),
        "rows": value_at(committed, "dataset.rows"),
        "tokens": None if noted.rows is None else sum(row.tokens for row in noted.rows),
        "steps": noted.run.result.get("steps_planned"),
    }


def last_process(log: tuple[LogLine, ...]) -> tuple[LogLine, ...]:
    """The lines of the process that ended the run; all of them where none says that it begins."""
    begun = [place for place, line in enumerate(log) if line.at and BEGINS.fullmatch(line.words)]
    return log[begun[-1] :] if begun else log


def _measured_otherwise(noted: Noted) -> Iterator[str]:
    """The held-out losses. Of a step that was measured again, the last line counts."""
    if not noted.heldout:
        return  # a bundle has less of the run on the CPU; whether one was due is asked elsewhere
    known = {
        line.get("step"): (f"{require('', line, 'loss', float):.4f}", f"{require('', line, 'target_tokens', int):,}")
        for line in noted.heldout
    }
    told = {int(found[1]): (line, found) for line in noted.log if line.at and (found := HELDOUT.fullmatch(line.words))}
    for step, (line, found) in told.items():
        if step in known and found.groups()[1:] != known[step]:
            loss, tokens = known[step]
            yield f":{line.number}: {shown(found[0])}; eval/heldout.jsonl has {loss} over {tokens}"
        elif step not in known and step > noted.resumed_from:
            yield f":{line.number}: {shown(found[0])}, of which eval/heldout.jsonl has nothing"
    if noted.processes is not None:
        silent = [step for step in known if type(step) is int and step > noted.resumed_from and step not in told]
        yield from (f": nothing of the held-out loss after step {step}" for step in silent)


def _asked_otherwise(noted: Noted) -> Iterator[str]:
    """How many questions were asked and how many answered right, against the scores, which follow from the answers. Of an
    evaluation that was made again, the last line counts; how many questions there are, no process changes."""
    folder, scored = RunDir(noted.run.folder), {}
    scores = {when: object_in(folder.scores(when)) for when in ("before", "after") if folder.scores(when).is_file()}
    for line in noted.log:
        if line.at and (found := SCORED.fullmatch(line.words)):
            scored[found[1]] = (line, found)
        if line.at and (found := ASKED.fullmatch(line.words)) and found[1] in scores:
            items = scores[found[1]].get("items")
            if found[3].replace(",", "") != str(items):
                yield f":{line.number}: {found[3]} questions, eval/{found[1]}.json has {shown(items)}"
    for when, (line, found) in scored.items():
        if when in scores and line.words != _scored(when, scores[when]):
            yield f":{line.number}: {shown(found[0])}; eval/{when}.json says {shown(_scored(when, scores[when]))}"
        elif when not in scores and noted.rows is not None and not noted.run.where:
            yield f":{line.number}: {shown(found[0])}, without eval/{when}.json"
    if noted.processes is not None:
        yield from (f": nothing of the evaluation {when}" for when in sorted(scores.keys() - scored.keys()))


def _scored(when: str, scores: Mapping[str, Any]) -> str:
    """The line that the pipeline writes of its scores."""
    right, items, leniently = (require(f"eval/{when}.json", scores, name, int) for name in COUNTED)
    formed = 100 * require(f"eval/{when}.json", scores, "format_rate", float)
    return (
        f"Evaluation {when}: {right} of {items} right by the tags ({leniently} leniently), {formed:.0f} % well-formed"
    )


def _machine_otherwise(noted: Noted) -> Iterator[str]:
    """Device, versions and proof as the last process logged them, against the doctor's report, which is of that process."""
    run, doctor = noted.run, noted.run.doctor
    size = value_at(doctor, "choice.memory_bytes")
    kind = tuple(str(value_at(doctor, f"choice.{name}")) for name in ("kind", "count"))
    facts = {
        "Python": value_at(doctor, "facts.host.python"),
        "torch": value_at(doctor, "facts.torch.version"),
        "jax": value_at(doctor, "facts.jax.version"),
    }
    proven = {value_at(one, "name"): one for one in value_at(doctor, "proof.results") or () if isinstance(one, Mapping)}
    for line in last_process(noted.log):
        if not line.at:
            continue
        if found := KIND.fullmatch(line.words):
            wanted = (*kind, f"{size / GIB:.1f}") if isinstance(size, int) else ()
            if wanted and found.groups() != wanted:
                yield f":{line.number}: {shown(found[0])}; doctor.json has {shown(', '.join(wanted))}"
        elif line.words.startswith("Platform: "):
            for name, version in VERSIONS.findall(line.words):
                if version != facts[name]:
                    yield f":{line.number}: {name} {shown(version)}, doctor.json has {shown(facts[name])}"
        elif run.result.get("device") != "cpu" and (found := PROOF_LINE.fullmatch(line.words)) and found[1] in proven:
            result = proven[found[1]]
            detail = found[1] == "speed" or found[3] == str(result.get("detail")) or "~" in found[3]
            if (found[2] == "ok") is not (result.get("ok") is True) or not detail:
                yield f":{line.number}: {shown(line.words.strip())}, which is not the proof in doctor.json"


def _lacking_on_a_gpu(noted: Noted) -> Iterator[str]:
    run, said = noted.run, [line.words for line in noted.log]
    if not any(PROVEN.fullmatch(words) for words in said):
        yield f"{run.where}training_log.txt: no proof of the device that held"
    for sample in [*memory_samples(run, "nvml"), *memory_samples(run, "device")]:
        begins = f"GPU memory: {sample['used_bytes'] / GIB:.3f} GiB "
        ends = f" {sample['pid']} (NVML, after step {sample['step']})"
        if not any(words.startswith(begins) and words.endswith(ends) for words in said):
            yield f"{run.where}training_log.txt: nothing of the GPU's memory after step {sample['step']}, as result.json has it"
