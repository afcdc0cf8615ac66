"""What `tunix-rt plan` prints: memory by part and phase, time, and the settings that would fit."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tunix_rt.cli.views import text
from tunix_rt.cli.views.cluster import cluster_lines
from tunix_rt.plan.answer import rate_range, rounded
from tunix_rt.progress import duration

if TYPE_CHECKING:
    from rich.table import Table

    from tunix_rt.engines.jax.aot import Verdict
    from tunix_rt.plan.cluster import Cluster
    from tunix_rt.plan.fit import Fit
    from tunix_rt.plan.memory import MemoryPlan
    from tunix_rt.plan.phases import Phase
    from tunix_rt.plan.report import Outlook
    from tunix_rt.plan.solver import Proposal
    from tunix_rt.plan.speed import StepTime
    from tunix_rt.plan.timing import RunTime

COLUMNS = 80
BAR_COLUMNS = 53
SMALLEST_SHARE = 0.004
"""Fraction of the peak: smaller parts are drawn together, as `other`."""
LEAST_SHOWN = 0.005 * 2**30
"""Bytes that are not 0.00 GiB."""
CPU_RATE = "      from the rate of this CPU, measured now under its current load"
_WORDS = {"kv_cache": "KV cache", "allocator_slack": "allocator"}
HOST_BOUND = "bound by launching kernels, not by the GPU: a larger batch gives more tokens/s"


def show_outlook(
    seen: "Outlook", run: "RunTime | None", *, exact: bool, disk: str, band: str = "", measured: bool = False,
    cluster: "Cluster | None" = None,
) -> None:  # fmt: skip
    """Everything about one device, or a `cluster` of GPUs. The steps of `run` are `exact`, or an upper bound."""
    text.show_lines(_verdict_lines(seen))
    peak = _judged_peak(seen)
    text.show_lines(["", f"memory at the peak ({peak.name}), in GiB; {text.gib(seen.fit.available_bytes)} free"])
    text.show(bars(peak, seen.fit, context_bytes=seen.plan.context_bytes, devices=seen.plan.devices))
    show_phases(seen)
    reload = [_reload_line(phase, seen.plan.device) for phase in seen.plan.phases if phase.name == "proof"]
    bound = CPU_RATE if measured else f"      {HOST_BOUND}" if seen.time.waits_for_host else ""
    times = [*time_lines(seen.time, run, exact=exact), bound]
    errors = f"on this device: {band}" if band else ""
    several = cluster_lines(cluster) if cluster else ()
    text.show_lines(line for line in (*reload, *times, *several, disk, seen.doubt, errors) if line)
    text.show_lines(_change_lines(seen))


def _verdict_lines(seen: "Outlook") -> Iterator[str]:
    plan, fit = seen.plan, seen.fit
    if seen.unable:
        yield f"does not run: {seen.target.name} {seen.unable}"
    verdict = "does not fit" if not fit.fits else "may fit, the compiler decides" if plan.lower_bound else "fits"
    predicted = f"at least {text.gib(fit.predicted_bytes)}" if plan.lower_bound else f"{text.gib(fit.predicted_bytes)}"
    without = f" without {' and '.join(map(_word, spare_parts(plan)))}" if gives_up(seen) else ""
    margin = f" (+ {text.gib(fit.safety_bytes)} margin)" if fit.safety_bytes else ""
    each = f", each of {plan.devices}" if plan.devices > 1 and plan.device != "cpu" else ""
    yield (
        f"{verdict}: {predicted} predicted{without}{margin} of {text.gib(fit.available_bytes)} free on "
        f"{seen.target.name}{each}"
    )
    left = "to spare" if fit.margin_bytes >= 0 else "too much"
    yield f"{text.gib(abs(fit.margin_bytes))} {left}; peak in phase: {_judged_peak(seen).name}"
    yield _work_line(seen)


def _work_line(seen: "Outlook") -> str:
    plan = seen.plan
    rows = f"{plan.rows:,} {'row' if plan.rows == 1 else 'rows'} of {plan.row_tokens:,} tokens"
    several = f" on {plan.devices:,} GPUs" if plan.devices > 1 and plan.device == "cuda" else ""
    return f"{plan.parameters:,} parameters, {plan.dtype}, {rows}{several}"


def gives_up(seen: "Outlook") -> bool:
    """Whether the verdict is about the run without its spare parts."""
    return seen.fit.predicted_bytes < seen.plan.peak_bytes


def _judged_peak(seen: "Outlook") -> "Phase":
    return seen.plan.least if gives_up(seen) else seen.plan.peak


def spare_parts(plan: "MemoryPlan") -> list[str]:
    from tunix_rt.plan.memory import SPARE

    used = [name for phase in plan.judged for name, size in phase.parts.items() if size]
    return [name for name in dict.fromkeys(used) if name in SPARE]


# --- memory -----------------------------------------------------------------------------------------------------------


def bars(phase: "Phase", fit: "Fit", *, context_bytes: int, devices: int = 1) -> "Table":
    """The parts of a phase, each drawn from where the one before it ends, on the scale of the free memory. What exceeds the
    free memory is red. Terminals that are not UTF-8 show the figures alone."""
    from rich.bar import Bar
    from rich.table import Table

    shown = {name: size for name, size in phase.parts.items() if size >= SMALLEST_SHARE * phase.total_bytes}
    parts = {_word(name): size for name, size in shown.items()}
    other = phase.total_bytes - sum(shown.values())
    context = "CUDA, NCCL" if devices > 1 else "CUDA context"
    parts |= {"other": other, context: context_bytes, "margin": fit.safety_bytes}
    available, total = fit.available_bytes, sum(parts.values())
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=16)
    table.add_column(justify="right", width=7)

    def add(name: str, size: int, begin: int, color: str | None) -> None:
        drawn = color is not None and text.encoding().startswith("utf")
        bar = Bar(max(available, total), begin, begin + size, width=BAR_COLUMNS, color=color or "default")
        table.add_row(name, f"{size / 2**30:.2f}", *([bar] if drawn else []))

    begin = 0
    for name, size in parts.items():
        if size >= LEAST_SHOWN:
            color = "red" if begin + size > available else "yellow" if name == "margin" else "cyan"
            add(name, size, begin, color)
        begin += size
    left = available - total
    add("to spare" if left >= 0 else "too much", abs(left), min(available, total), None if left >= 0 else "red")
    return table


def show_phases(seen: "Outlook") -> None:
    """A row for each phase: its total, the total without spare parts, and its parts."""
    plan, without, spare = seen.plan, gives_up(seen), spare_parts(seen.plan)
    total, least = ("total", "without * (judged)") if without else ("total (judged)", "without *")
    rows = []
    for phase in plan.judged:
        parts = [f"{_word(name)}{' *' * (name in spare)} {_mib(size)}" for name, size in phase.parts.items() if size]
        sizes = [phase.total_bytes, phase.total_bytes - sum(phase.parts.get(name, 0) for name in spare)]
        rows.append((phase.name, *map(_mib, sizes[: 2 if spare else 1]), ", ".join(parts)))
    numbers = (total, least) if spare else (total,)
    text.show_table(("phase", *numbers, "parts, in MiB"), rows, numbers=numbers, tight=True)
    if spare:
        text.show_lines([f"* dropped when memory is short{', as it is here' if without else ''}"])


def _word(part: str) -> str:
    return _WORDS.get(part, part.replace("_", " "))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _reload_line(reload: "Phase", device: str) -> str:
    child, elsewhere = reload.parts["fresh_process"], "" if device == "cpu" else "moves to the CPU or "
    return (
        f"reload check of the final model: {text.gib(reload.total_bytes)}, {text.gib(child)} of it in a fresh process; not "
        f"judged: if it does not fit, the check {elsewhere}is skipped with a warning"
    )


# --- time and disk ----------------------------------------------------------------------------------------------------


def time_lines(time: "StepTime", run: "RunTime | None", *, exact: bool) -> Iterator[str]:
    """The rate, and the duration of all steps if their number is known. Evaluation and compiling are not included."""
    each = f"{1000 * time.seconds:.0f} ms" if time.seconds < 0.95 else duration(time.seconds)
    rate = f"time: {rounded(time.tokens_per_second)} tokens/s ({rate_range(time)}), {each} a step of {time.tokens:,} tokens"
    if run is None:
        yield f"{rate}; the number of steps is known with the data"
        return
    yield rate
    low, high = (duration(3600 * hours) for hours in (run.hours_low, run.hours_high))
    yield f"      {'' if exact else 'at most '}{run.steps:,} steps, {run.tokens:,} tokens: {low} to {high} of training"


def disk_line(needed: int, free: int | None) -> str:
    if free is None:
        return f"disk: up to {text.gib(needed)} needed"
    verdict = "fits" if needed <= free else "does not fit: a run would be refused with exit code 8"
    return f"disk: up to {text.gib(needed)} needed, {text.gib(free)} free; {verdict}"


# --- what to change ---------------------------------------------------------------------------------------------------


def _change_lines(seen: "Outlook") -> Iterator[str]:
    if seen.runs and seen.faster:
        yield ""
        yield "faster, with nothing changed in the result but the order of additions:"
        yield from numbered(seen.faster, before=seen.time)
    if seen.runs:
        return
    yield ""
    if seen.proposals:
        may = "run" if seen.unable else "fit; the compiler decides" if seen.plan.lower_bound else "fit"
        yield f"what makes it {may}, the least change of the result first:"
        yield from numbered(seen.proposals)
    else:
        yield "nothing that keeps the rows of a step and their length makes it fit; what is left:"
        yield from (f"  - {line}" for line in seen.resorts)


def numbered(proposals: "Sequence[Proposal]", *, before: "StepTime | None" = None) -> Iterator[str]:
    """Memory, speed and costs of each, and under it the settings as a shell takes them."""
    for number, proposal in enumerate(proposals, start=1):
        gain = ""
        if before is not None:
            gain = f", {100 * (proposal.time.tokens_per_second / before.tokens_per_second - 1):+.0f} %"
        least = "at least " if proposal.plan.lower_bound else ""
        rate = rounded(proposal.time.tokens_per_second)
        size = f"{least}{text.gib(proposal.plan.least_bytes)}, {rate} tokens/s{gain}"
        yield f"  {number}. {'; '.join([size, *proposal.costs])}"
        yield from (f"     {line}" for line in shell_lines(proposal.line, COLUMNS - 5))


def shell_lines(line: str, columns: int) -> list[str]:
    """`--set a=b --set c=d` broken between settings, with backslashes."""
    words = line.split(" --set ")
    lines: list[str] = []
    for setting in [words[0], *(f"--set {word}" for word in words[1:])]:
        if lines and len(lines[-1]) + len(setting) + 3 <= columns:
            lines[-1] += f" {setting}"
        else:
            lines.append(setting)
    return [f"{one} \\" for one in lines[:-1]] + lines[-1:]


# --- the whole catalogue ----------------------------------------------------------------------------------------------


def show_all(seen: "Sequence[Outlook]", *, seconds: float, left_out: Iterable[str] = ()) -> None:
    """A row for each device, with the first change that it needs as a letter, and what the letters mean."""
    letters: dict[str, str] = {}
    rows = [_row(one, letters) for one in seen]
    numbers = ("GiB", "needs", "to spare", "tokens/s", "range")
    least = ", at least" if seen[0].plan.lower_bound else ""
    legend = f"GiB of one device, what the run needs of it{least}, and what stays to spare"
    text.show_lines([_work_line(seen[0]), legend])
    text.show_table(("device", "GiB", "runs", *numbers[1:]), rows, numbers=numbers, tight=True)
    text.show_lines([_tally(seen, seconds)])
    for line, letter in letters.items():
        first, *others = shell_lines(line, COLUMNS - 4)
        text.show_lines([f"{letter} = {first}", *(f"    {other}" for other in others)])
    text.show_lines([*_remarks(seen), *left_out])


def _remarks(seen: "Sequence[Outlook]") -> Iterator[str]:
    if seen[0].plan.lower_bound:
        yield "maybe: the least memory fits, and the compiler decides (see --exact)"
    if any(one.runs and one.time.waits_for_host for one in seen):
        yield "where tokens/s are equal:"
        yield f"  {HOST_BOUND}"
    if emulated := ", ".join(one.target.name for one in seen if one.unable):
        yield f"bfloat16 only by emulation, which no run takes: {emulated}"


def _tally(seen: "Sequence[Outlook]", seconds: float) -> str:
    counts = {
        "maybe" if seen[0].plan.lower_bound else "as it is": sum(one.runs for one in seen),
        "with a change": sum(bool(one.proposals) and not one.runs for one in seen),
    }
    never = len(seen) - sum(counts.values())
    words = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    return f"of {len(seen)} devices: {words or 'none'}{f', {never} not' if never else ''}; planned in {seconds:.1f} s"


def _row(seen: "Outlook", letters: dict[str, str]) -> tuple[str, ...]:
    """The figures of the run with its change, if it needs one and there is one."""
    target, proposal = seen.target, next(iter(seen.proposals), None)
    device = target.name, f"{target.memory_bytes / 2**30:.1f}"
    if seen.runs:
        runs = "maybe" if seen.plan.lower_bound else "as it is"
        return *device, runs, *_memory_cells(seen.fit), *_rate_cells(seen.time)
    if proposal is None:
        return *device, "no", *_memory_cells(seen.fit), "", ""
    letter = letters.setdefault(proposal.line, _letter(len(letters)))
    return *device, f"with {letter}", *_memory_cells(seen.fit_of(proposal)), *_rate_cells(proposal.time)


def _letter(number: int) -> str:
    """A to Z, then AA, AB and so on."""
    before = _letter(number // 26 - 1) if number >= 26 else ""
    return before + chr(ord("A") + number % 26)


def _memory_cells(fit: "Fit") -> tuple[str, str]:
    return f"{fit.predicted_bytes / 2**30:.1f}", f"{fit.margin_bytes / 2**30:.1f}"


def _rate_cells(time: "StepTime") -> tuple[str, str]:
    return rounded(time.tokens_per_second), rate_range(time).replace(" to ", "-")


# --- the compiler's verdict -------------------------------------------------------------------------------------------


def show_verdict(found: "Verdict", floor: "MemoryPlan", *, from_cache: bool) -> None:
    """The verdict of the TPU's compiler, what it compiled, and the bytes of one device by kind."""
    where = f"each of {found.devices} x {found.device_kind} ({found.topology})"
    of_usable = f" of {text.gib(found.usable)}" if found.usable else ""
    verdict = f"does not fit: refused for {where}"
    if found.memory is not None:
        verdict = f"fits: {text.gib(found.memory.peak)} at the peak{of_usable} on {where}"
    versions = f"jax {found.versions['jax']}, libtpu {found.versions['libtpu']}"
    lines = [
        verdict,
        f"{found.parameters:,} parameters, {found.replicas} data {'replica' if found.replicas == 1 else 'replicas'}, "
        f"{found.accumulation} x {found.rows} rows of {found.tokens} tokens a step",
        found.step,
        f"{versions}, compiled in {duration(found.seconds)}; no TPU was used, and speed is not predicted",
        "from the cache: this step was compiled before" if from_cache else "",
        f"without the compiler: at least {text.gib(floor.peak_bytes)}",
    ]
    text.show_lines(line for line in lines if line)
    if found.memory is not None:
        kinds = ("arguments", "outputs", "aliased", "temporaries", "code", "total", "peak")
        rows = [(kind, f"{getattr(found.memory, kind) / 2**30:.3f}") for kind in kinds]
        text.show_table(("GiB on a device", ""), rows, numbers=[""])
