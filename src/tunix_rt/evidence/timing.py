"""Times that must follow one another, and a log that must be one: what is out of order was not written as it happened.

Clocks of one computer are meant; that they show the right time is nobody's claim.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tunix_rt.evidence.claims import RunFiles, require, value_at
from tunix_rt.evidence.doubtful import shown
from tunix_rt.evidence.gathered import LogLine, Noted, few, moment
from tunix_rt.evidence.log_facts import BEGINS

SLACK = timedelta(seconds=3)
"""Times are written in whole seconds, by more than one thread; a clock that is set right moves a little."""
LONGEST = timedelta(hours=15)
"""nvidia-smi writes local time without its zone."""
STEP = re.compile(r"step (\d{1,9})/(\d{1,9})  loss (\d+\.\d{4})\b.*")
FIGURES = re.compile(STEP.pattern.removesuffix(".*") + r"  lr \S+  grad norm \S+  \S+ tokens/s  peak \S+ GiB")
"""As it is worded now; what an older version worded otherwise is held to its loss alone."""
RESUMED = re.compile(r"Resumed from step-(\d{6,9})")
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal, or turns its text around."""


def order_problems(noted: Noted) -> Iterator[str]:
    """Begun, committed, sampled, finished: in this order, and none of it in the future."""
    run, where = noted.run, noted.run.where
    created = moment(f"{where}precommit.json", run.precommit, "created")
    started, finished = (moment(f"{where}result.json", run.result, name) for name in ("started", "finished"))
    times: list[tuple[str, datetime]] = []
    if noted.processes is not None:
        begun = [
            moment(f"{where}processes.json: process {number}", one, "started")
            for number, one in enumerate(noted.processes, start=1)
        ]
        if abs(begun[-1] - started) > SLACK:
            yield f"{where}processes.json: the last process started {_at(begun[-1])}, by result.json {_at(started)}"
        both = [("processes.json: the first process started", begun[0]), ("precommit.json was created", created)]
        # A process that commits and is stopped before it trains is not listed; that the log reaches back so far is asked below.
        times += sorted(both, key=lambda one: one[1])
        times += [(f"processes.json: process {number} started", at) for number, at in enumerate(begun[1:], start=2)]
    else:
        of_first = noted.resumed_from == 0
        times += [("result.json: it started", started)] * of_first + [("precommit.json was created", created)]
    for number, sample in enumerate(_samples(run) if "gpu_memory" in run.result else (), start=1):
        if noted.processes is not None or "at" in sample:
            at = moment(f"{where}result.json: sample {number} of gpu_memory", sample, "at")
            times.append((f"result.json: sample {number} of gpu_memory was taken", at))
    times += [("result.json: it finished", finished), ("it is verified", datetime.now(UTC) + timedelta(days=1))]
    for (earlier, first), (later, second) in itertools.pairwise(times):
        if first > second + SLACK:
            yield f"{where}{earlier} {_at(first)}, after {later} {_at(second)}"


def _at(time: datetime) -> str:
    return time.isoformat(timespec="seconds")


def seconds_problems(noted: Noted) -> Iterator[str]:
    """The steps cannot have taken longer than the run."""
    run, where = noted.run, noted.run.where
    took = [
        require(f"{where}metrics.jsonl:{number}", line, "seconds", float)
        for number, line in enumerate(run.metrics, start=1)
    ]
    whole = run.need("result.json", "seconds", float)
    if sum(took) > whole + 1:
        yield f"{where}result.json: {whole:.1f} seconds, the steps alone took {sum(took):.1f}"
    started, finished = (moment(f"{where}result.json", run.result, name) for name in ("started", "finished"))
    wall = (finished - started + SLACK).total_seconds()
    if (last := sum(took[noted.resumed_from :])) > wall:
        yield f"{where}result.json: {last:.1f} seconds of steps between {_at(started)} and {_at(finished)}"
    if noted.resumed_from == 0 and whole > wall:
        yield f"{where}result.json: {whole:.1f} seconds between {_at(started)} and {_at(finished)}"


# --- the log ----------------------------------------------------------------------------------------------------------


def log_problems(noted: Noted) -> Iterator[str]:
    """Every line begins with its time, none before the line above it, or continues a warning, an error or a list."""
    yield from few(_line_problems(noted), f"{noted.run.where}training_log.txt")
    run, where = noted.run, noted.run.where
    stamped = [line.at for line in noted.log if line.at is not None]
    if not stamped:
        return
    created = moment(f"{where}precommit.json", run.precommit, "created")
    finished = moment(f"{where}result.json", run.result, "finished")
    for what, time in (("precommit.json was created", created), ("result.json: it finished", finished)):
        if not stamped[0] - SLACK <= time:
            yield f"{where}training_log.txt begins {_at(stamped[0])}, after {what} {_at(time)}"
    if stamped[-1] > finished + SLACK:
        yield f"{where}training_log.txt ends {_at(stamped[-1])}, after result.json: it finished {_at(finished)}"
    if created > stamped[-1] + SLACK:
        yield f"{where}training_log.txt ends {_at(stamped[-1])}, before precommit.json was created {_at(created)}"


def _line_problems(noted: Noted) -> Iterator[str]:
    name, latest, may_continue = f"{noted.run.where}training_log.txt", None, False
    for line in noted.log:
        where = f"{name}:{line.number}"
        if CONTROL.search(line.words):
            yield f"{where}: a control character"
        if line.at is None:
            if not may_continue and not (line.number > 1 and line.words[:1] in (" ", "\t")):
                yield f"{where}: no time at its beginning: {shown(line.words)}"
            continue
        may_continue = line.level in ("WARNING", "ERROR", "CRITICAL")
        if latest is not None and line.at < latest - SLACK:
            yield f"{where}: {_at(line.at)} after a line of {_at(latest)}"
        latest = line.at if latest is None else max(latest, line.at)


def log_step_problems(noted: Noted) -> Iterator[str]:
    """The steps that the log speaks of, against the metrics. Of a step that was taken again, the last line counts."""
    run, where = noted.run, f"{noted.run.where}training_log.txt"
    told = _steps_told(noted.log)
    every = run.need("config.yaml", "training.logging_steps", int)
    due = {1, noted.total, *range(every, noted.total, every)} if every else {1, noted.total}
    yield from few(
        (f"{where}: nothing of step {step}" for step in sorted(due - told.keys()) if step <= len(run.metrics)), where
    )
    yield from few(_otherwise_told(noted, told), where)
    yield from few(_told_twice(noted), where)
    last = {step: line for step, line in told.items() if noted.resumed_from < step <= len(run.metrics)}
    marks = sorted(last)
    for first, second in itertools.pairwise(marks):
        took = sum(float(line["seconds"]) for line in run.metrics[first:second])
        begun, ended = last[first].at, last[second].at
        if begun and ended and took > (ended - begun + SLACK).total_seconds():
            yield f"{where}: steps {first + 1} to {second} took {took:.1f} s by metrics.jsonl, {ended - begun} by the log"


def _steps_told(log: tuple[LogLine, ...]) -> dict[int, LogLine]:
    return {int(found[1]): line for line in log if line.at and (found := STEP.fullmatch(line.words))}


def _told_twice(noted: Noted) -> Iterator[str]:
    """A process takes each step once; only one that goes on from an earlier step takes it again."""
    seen: set[str] = set()
    for line in noted.log:
        if line.at and (BEGINS.fullmatch(line.words) or RESUMED.fullmatch(line.words)):
            seen = set()
        elif line.at and (found := STEP.fullmatch(line.words)):
            if found[1] in seen:
                yield f"{noted.run.where}training_log.txt:{line.number}: step {found[1]} for the second time in one process"
            seen.add(found[1])


def _otherwise_told(noted: Noted, told: Mapping[int, LogLine]) -> Iterator[str]:
    where = f"{noted.run.where}training_log.txt"
    for step, line in sorted(told.items()):
        found = STEP.fullmatch(line.words)
        if found is None or not 0 < step <= len(noted.run.metrics) or int(found[2]) != noted.total:
            yield f"{where}:{line.number}: step {step}, which metrics.jsonl has not"
            continue
        metrics = noted.run.metrics[step - 1]
        loss = require(f"{noted.run.where}metrics.jsonl:{step}", metrics, "loss", float)
        if found[3] != f"{loss:.4f}":
            yield f"{where}:{line.number}: the loss of step {step} is {found[3]}, metrics.jsonl has {loss:.4f}"
        elif FIGURES.fullmatch(line.words) and line.words != (words := _step_words(metrics, noted.total)):
            yield f"{where}:{line.number}: {shown(line.words)}, metrics.jsonl gives {shown(words)}"


def _step_words(line: Mapping[str, Any], total: int) -> str:
    """What the training loop logs of a step."""
    return (
        f"step {line['step']}/{total}  loss {line['loss']:.4f}  lr {line['lr']:.2e}  grad norm {line['grad_norm']:.2f}  "
        f"{line['tokens'] / line['seconds']:,.0f} tokens/s  peak {line['peak_bytes'] / 2**30:.2f} GiB"
    )


# --- nvidia-smi -------------------------------------------------------------------------------------------------------

HEADER = re.compile(r"after step (\d{1,9}); our process id (\d{1,9}); NVML: (\d{1,18}) bytes (.*)")
TOTAL = re.compile(r"MiB / +(\d{1,9})MiB")
CARD = re.compile(r"(?m)^\| +\d+ +(\S.*?) +(?:On|Off|N/A) +\|")
CUDA = re.compile(r"CUDA Version: +(\d+\.\d+)")
MIB = 2**20
NEAR_BYTES = 1024 * MIB
"""Between the sample and the drawing a step may go on."""
DRAWN = re.compile(r"[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4}")


def _samples(run: RunFiles) -> list[Mapping[str, Any]]:
    return [one for one in run.need("result.json", "gpu_memory", list) if isinstance(one, Mapping)]


def nvidia_smi_problems(noted: Noted) -> Iterator[str]:
    """`nvidia_smi.txt` is of this run: its first line is a sample of the result, its date a day of the run."""
    run, name = noted.run, f"{noted.run.where}nvidia_smi.txt"
    text = (run.folder / "nvidia_smi.txt").read_bytes().decode("utf-8", "replace")
    found = HEADER.match(text)
    samples = [(one.get("step"), one.get("pid"), one.get("used_bytes")) for one in _samples(run)]
    if found and tuple(map(int, found.groups()[:3])) not in samples:
        yield f"{name}: its first line is of no sample in result.json"
    if found is None and "NVML told nothing of it" not in text.split("\n", 1)[0]:
        yield f"{name}: its first line is not one that tunix-rt writes"
    if "NVIDIA-SMI" in text and not DRAWN.search(text):
        yield f"{name}: nvidia-smi drew it without a date"
    yield from _drawn_problems(run, name, text)
    started, finished = (moment(f"{run.where}result.json", run.result, one) for one in ("started", "finished"))
    for drawn in DRAWN.findall(text):
        try:
            at = datetime.strptime(drawn, "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC)
        except ValueError:
            yield f"{name}: {shown(drawn)} is no date"
            continue
        if not started - LONGEST <= at <= finished + LONGEST:
            yield f"{name} is of {_at(at)}, the run from {_at(started)} to {_at(finished)}"


def _drawn_problems(run: RunFiles, name: str, text: str) -> Iterator[str]:
    """The memory that nvidia-smi drew: of the card as NVML lists it, and under our process id about that of a sample."""
    gpus = run.need("doctor.json", "facts.nvidia.gpus", list)
    names = [str(value_at(gpu, "name")) for gpu in gpus]
    # A long name is cut, with dots in place of the rest; a slice goes by the name of its GPU.
    cards = [card.rstrip(". ") for card in CARD.findall(text)]
    if cards and not any(known.startswith(card) for card in cards for known in names):
        yield f"{name}: a {shown(cards[0])}, doctor.json has {shown(names[0] if names else None)}"
    cuda = value_at(run.doctor, "facts.nvidia.driver_cuda")
    for told in CUDA.findall(text):
        if cuda is not None and told != cuda:
            yield f"{name}: CUDA {told}, doctor.json has {shown(cuda)}"
    listed = [value_at(gpu, "total_bytes") for gpu in gpus]
    totals = [int(size) * MIB for size in TOTAL.findall(text)]
    if totals and not any(abs(size - total) <= 0.03 * size for size in listed if size for total in totals):
        yield f"{name}: a card of {totals[0]:,} bytes, which NVML does not list"
    for sample in _samples(run):
        row = re.search(rf"(?m)^\|.*\s{sample.get('pid')}\s.*\s(\d{{1,9}})MiB \|$", text)
        near = (
            [abs(int(row[1]) * MIB - int(one.get("used_bytes", 0))) <= NEAR_BYTES for one in _samples(run)]
            if row
            else []
        )
        if row and sample.get("by") == "nvml" and not any(near):
            yield f"{name}: process {sample.get('pid')} holds {row[1]} MiB, no sample in result.json has about that"
            return
