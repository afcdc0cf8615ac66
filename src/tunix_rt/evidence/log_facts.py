"""What the log says in passing, against the files that say it on purpose. A line that a later version words otherwise is not
held to anything; on a GPU those must be there that only a GPU brings about."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.evidence.claims import memory_samples, value_at
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import Noted, few

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
PROVEN = re.compile(r"Proof on (?P<device>\w+) in \w+: held .*")


def log_fact_problems(noted: Noted) -> Iterator[str]:
    """Model, parameters, traces, rows, tokens and steps in the log; on a GPU also the proof and every sample of memory."""
    yield from few(_said_otherwise(noted), f"{noted.run.where}training_log.txt")
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


def _lacking_on_a_gpu(noted: Noted) -> Iterator[str]:
    run, said = noted.run, [line.words for line in noted.log]
    if not any(PROVEN.fullmatch(words) for words in said):
        yield f"{run.where}training_log.txt: no proof of the device that held"
    for sample in [*memory_samples(run, "nvml"), *memory_samples(run, "device")]:
        begins = f"GPU memory: {sample['used_bytes'] / GIB:.3f} GiB "
        ends = f" {sample['pid']} (NVML, after step {sample['step']})"
        if not any(words.startswith(begins) and words.endswith(ends) for words in said):
            yield f"{run.where}training_log.txt: nothing of the GPU's memory after step {sample['step']}, as result.json has it"
