"""What `tunix-rt plan` prints: memory by part and phase, time, and the settings that would fit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tunix_rt.cli.views import text

if TYPE_CHECKING:
    from tunix_rt.plan.phases import Phase
    from tunix_rt.plan.target import Fit

if TYPE_CHECKING:
    from tunix_rt.plan.memory import MemoryPlan
    from tunix_rt.plan.phases import Phase
    from tunix_rt.plan.report import Outlook
    from tunix_rt.plan.solver import Proposal
    from tunix_rt.plan.speed import StepTime
    from tunix_rt.plan.target import Fit
    from tunix_rt.plan.timing import RunTime

COLUMNS = 80
NAME_COLUMNS, FIGURE_COLUMNS = 17, 8
SMALLEST_SHARE = 0.004
"""Of the peak: smaller parts are drawn together, as `other`."""
_FILLS, _ASCII_FILLS = ("█", "░"), ("#", ".")
SPARE, EXCESS = "to spare", "too much"
_STYLES = {"margin": "yellow", SPARE: "green", EXCESS: "red"}
_WORDS = {
    "loss_head": "loss head",
    "in_flight": "in flight",
    "kv_cache": "keys and values",
    "allocator_slack": "allocator",
}

Piece = tuple[str, str]


def bars(
    phase: "Phase", fit: "Fit", *, context_bytes: int, utf8: bool = True, columns: int = COLUMNS
) -> Iterator[list[Piece]]:
    """The lines, as (text, style) pieces, none longer than `columns`. The last is what stays
    to spare, or is too much."""
    parts = _parts(phase.parts, phase.total_bytes)
    if context_bytes:
        parts["CUDA itself"] = context_bytes
    parts["margin"] = fit.safety_bytes
    whole = max(fit.available_bytes, sum(parts.values()))
    room = columns - NAME_COLUMNS - FIGURE_COLUMNS - 2
    edge = _place(fit.available_bytes, whole, room)
    begins = 0
    for name, size in parts.items():
        ends = begins + size
        yield _line(name, size, _place(begins, whole, room), _place(ends, whole, room), edge=edge, utf8=utf8)
        begins = ends
    left = fit.available_bytes - begins
    if left >= 0:
        yield _line(SPARE, left, _place(begins, whole, room), room, edge=edge, utf8=utf8)
    else:
        yield _line(EXCESS, -left, edge, room, edge=edge, utf8=utf8)


def _parts(parts: Mapping[str, int], total: int) -> dict[str, int]:
    """Those that can be seen, in their order, and the others as one."""
    shown = {
        _WORDS.get(name, name.replace("_", " ")): size for name, size in parts.items() if size >= SMALLEST_SHARE * total
    }
    other = total - sum(shown.values())
    return shown | ({"other": other} if other > 0 else {})


def _place(size: int, whole: int, room: int) -> int:
    return round(room * size / whole) if whole else 0


def _line(name: str, size: int, begins: int, ends: int, *, edge: int, utf8: bool) -> list[Piece]:
    """Name, GiB, and the bar; what lies beyond what is free is red. A part that is too small for a column has half of one."""
    full, light = _FILLS if utf8 else _ASCII_FILLS
    fill = light if name in _STYLES else full
    sliver = "▏" if utf8 else "|"
    head = (f"{name:<{NAME_COLUMNS}}{size / 2**30:>{FIGURE_COLUMNS}.2f} ", "")
    if ends == begins:
        return [head, (" " * begins + (sliver if size else ""), _style(name))]
    within = max(0, min(ends, edge) - begins)
    beyond = ends - begins - within
    return [head, (" " * begins, ""), (fill * within, _style(name)), (fill * beyond, "red")]


def _style(name: str) -> str:
    return _STYLES.get(name, "cyan")


BUSY = "      by the rate of this CPU, measured just now and as busy as it was"


def show_outlook(
    seen: "Outlook", run: "RunTime | None", *, exact: bool, disk: str, band: str = "", measured: bool = False
) -> None:
    """Everything about one device, for a person. The steps of `run` are `exact`, or the most there can be."""
    from tunix_rt.cli.views.plan import bars

    text.show_lines(_verdict_lines(seen))
    peak = _judged_peak(seen)
    print()
    text.show_lines(
        [f"where the bytes go at the peak ({peak.name}), in GiB; {text.gib(seen.fit.available_bytes)} are free"]
    )
    utf8 = text.encoding().startswith("utf")
    text.show_pieces(bars(peak, seen.fit, context_bytes=seen.plan.context_bytes, utf8=utf8))
    show_phases(seen)
    proof = [_proof_line(phase, seen.plan.device) for phase in seen.plan.phases if phase.name == "proof"]
    times = [*time_lines(seen.time, run, exact=exact), BUSY if measured else ""]
    text.show_lines(line for line in (*proof, *times, disk, seen.doubt) if line)
    if band:
        text.show_lines([f"on this device: {band}"])
    text.show_lines(_change_lines(seen))


def _verdict_lines(seen: "Outlook") -> Iterator[str]:
    plan, fit = seen.plan, seen.fit
    if seen.unable:
        yield f"does not run: {seen.target.name} {seen.unable}"
    verdict = "fits" if fit.fits else "may not fit" if seen.doubt else "does not fit"
    spare = spare_parts(plan)
    without = f" without {' and '.join(spare)}" if gives_up(seen) else ""
    each = f", each of {plan.devices}" if plan.devices > 1 and plan.device != "cpu" else ""
    yield (
        f"{verdict}: {text.gib(fit.predicted_bytes)} predicted{without} (+ {text.gib(fit.safety_bytes)} margin) "
        f"of {text.gib(fit.available_bytes)} free on {seen.target.name}{each}"
    )
    left = "to spare" if fit.margin_bytes >= 0 else "too much"
    yield f"{text.gib(abs(fit.margin_bytes))} {left}; peak in phase: {_judged_peak(seen).name}"
    yield _work_words(seen)


def _work_words(seen: "Outlook") -> str:
    plan = seen.plan
    rows = f"{plan.rows:,} {'row' if plan.rows == 1 else 'rows'} of {plan.row_tokens:,} tokens"
    return f"{plan.parameters:,} parameters, {plan.dtype}, {rows}"


def gives_up(seen: "Outlook") -> bool:
    """Whether the verdict is over what is left without what a run can do without."""
    return seen.fit.predicted_bytes < seen.plan.peak_bytes


def _judged_peak(seen: "Outlook") -> "Phase":
    return seen.plan.least if gives_up(seen) else seen.plan.peak


def spare_parts(plan: "MemoryPlan") -> list[str]:
    from tunix_rt.plan.memory import SPARE

    return [name for name in _part_names(plan) if name in SPARE]


def _part_names(plan: "MemoryPlan") -> list[str]:
    return list(dict.fromkeys(name for phase in plan.judged for name in phase.parts if phase.parts[name]))


# --- the parts of every phase -----------------------------------------------------------------------------------------


def show_phases(seen: "Outlook") -> None:
    """A table of parts by phases, in as many pieces as the terminal needs; under each the totals, the judged one said so."""
    plan, without = seen.plan, gives_up(seen)
    spare = spare_parts(plan)
    for phases in _that_fit(plan.judged, text.width()):
        names = [name for name in _part_names(plan) if any(phase.parts.get(name) for phase in phases)]
        rows = [
            (f"{name} *" if name in spare else name, *(_mib(phase.parts.get(name, 0)) for phase in phases))
            for name in sorted(names, key=lambda name: name in spare)
        ]
        judged = " (judged)"
        rows.append((f"total{'' if without else judged}", *(_mib(phase.total_bytes) for phase in phases)))
        if spare:
            least = (phase.total_bytes - sum(phase.parts.get(name, 0) for name in spare) for phase in phases)
            rows.append((f"total without *{judged if without else ''}", *map(_mib, least)))
        text.show_table(("MiB", *(phase.name for phase in phases)), rows, numbers=[phase.name for phase in phases])
    if spare:
        text.show_lines([f"* given up when memory is short{', as it is here' if without else ''}"])


def _that_fit(phases: "Sequence[Phase]", columns: int) -> "Iterator[Sequence[Phase]]":
    """`phases` in groups whose table is no wider than `columns`."""
    first = len("total without * (judged)") + 2
    group: list[Phase] = []
    for phase in phases:
        if group and first + sum(_column(one) for one in (*group, phase)) > columns:
            yield group
            group = []
        group.append(phase)
    yield group


def _column(phase: "Phase") -> int:
    return max(len(phase.name), len(_mib(phase.total_bytes))) + 2


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size else ""


def _proof_line(proof: "Phase", device: str) -> str:
    child, elsewhere = proof.parts["fresh_process"], "" if device == "cpu" else "done on the CPU, or "
    return (
        f"proof of the final model: {text.gib(proof.total_bytes)}, {text.gib(child)} of it in a fresh process that loads it once "
        f"more; not judged: without room for it the proof is {elsewhere}left out, which is said"
    )


# --- time and disk ----------------------------------------------------------------------------------------------------


def time_lines(time: "StepTime", run: "RunTime | None", *, exact: bool) -> Iterator[str]:
    """The rate, and how long all steps take where their number is known. Evaluations and compiling are not in it."""
    each = f"{1000 * time.seconds:.0f} ms" if time.seconds < 0.95 else text.duration(time.seconds)
    rate = f"time: {rate_words(time)}, {each} a step of {time.tokens:,} tokens"
    if run is None:
        yield f"{rate}; how many steps is known with the data"
        return
    yield rate
    low, high = (text.duration(3600 * hours) for hours in (run.hours_low, run.hours_high))
    yield f"      {'' if exact else 'at most '}{run.steps:,} steps, {run.tokens:,} tokens: {low} to {high} of training"


def rate_words(time: "StepTime") -> str:
    return f"{rounded(time.tokens_per_second)} tokens/s ({rate_range(time)})"


def rate_range(time: "StepTime") -> str:
    return f"{rounded(time.tokens / time.seconds_high)} to {rounded(time.tokens / time.seconds_low)}"


def rounded(rate: float) -> str:
    """Two digits are all that a prediction of speed is good for."""
    if rate <= 0:
        return "0"
    digits = 1
    while rate >= 10 ** (digits + 1):
        digits += 1
    step = 10 ** max(0, digits - 1)
    return f"{round(rate / step) * step:,}" if rate >= 10 else f"{rate:.1f}"


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
        yield f"what makes it {'run' if seen.unable else 'fit'}, the least change of the result first:"
        yield from numbered(seen.proposals)
    else:
        yield "nothing that keeps the rows of a step and their length makes it fit; what is left:"
        yield from (f"  - {line}" for line in seen.resorts)


def numbered(proposals: "Sequence[Proposal]", *, before: "StepTime | None" = None) -> Iterator[str]:
    """What each comes to and costs, and under it the settings as a shell takes them."""
    for number, proposal in enumerate(proposals, start=1):
        gain = ""
        if before is not None:
            gain = f", {100 * (proposal.time.tokens_per_second / before.tokens_per_second - 1):+.0f} %"
        said = f"{text.gib(proposal.plan.least_bytes)}, {rounded(proposal.time.tokens_per_second)} tokens/s{gain}"
        yield f"  {number}. {'; '.join([said, *proposal.costs])}"
        yield from (f"     {line}" for line in shell_lines(proposal.line, COLUMNS - 5))


def shell_lines(line: str, columns: int) -> list[str]:
    """`--set a=b --set c=d` cut between settings, with the sign that lets a shell read on."""
    words = line.split(" --set ")
    settings = [words[0], *(f"--set {word}" for word in words[1:])]
    lines: list[str] = []
    for setting in settings:
        if lines and len(lines[-1]) + len(setting) + 3 <= columns:
            lines[-1] += f" {setting}"
        else:
            lines.append(setting)
    return [f"{one} \\" for one in lines[:-1]] + lines[-1:]


# --- the whole catalogue ----------------------------------------------------------------------------------------------


def show_all(seen: "Sequence[Outlook]", *, seconds: float, left_out: Iterable[str] = ()) -> None:
    """A line for each device, with the first change that is needed as a letter, and what the letters mean."""
    letters: dict[str, str] = {}
    rows = [_row(one, letters) for one in seen]
    numbers = ("GiB", "needs", "to spare", "tokens/s", "range")
    text.show_lines([_work_words(seen[0]), "GiB of one device, what the run needs of it, and what stays to spare"])
    text.show_table(("device", "GiB", "runs", *numbers[1:]), rows, numbers=numbers, tight=True)
    text.show_lines([_tally(seen, seconds)])
    for line, letter in letters.items():
        first, *others = shell_lines(line, COLUMNS - 4)
        text.show_lines([f"{letter} = {first}", *(f"    {other}" for other in others)])
    text.show_lines([*_remarks(seen), *left_out])


def _remarks(seen: "Sequence[Outlook]") -> Iterator[str]:
    if any(one.doubt and not one.proposals for one in seen):
        yield "perhaps: needs is an upper bound there, and the compiler decides"
    if emulated := ", ".join(one.target.name for one in seen if one.unable):
        yield f"bfloat16 only by emulation, which no run takes: {emulated}"


def _tally(seen: "Sequence[Outlook]", seconds: float) -> str:
    as_it_is = sum(one.runs for one in seen)
    changed = sum(bool(one.proposals) and not one.runs for one in seen)
    open_ = sum(bool(one.doubt) and not one.proposals for one in seen)
    counts = {"as it is": as_it_is, "with a change": changed, "perhaps": open_}
    never = len(seen) - sum(counts.values())
    said = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    return f"of {len(seen)} devices: {said or 'none'}{f', {never} not' if never else ''}; planned in {seconds:.1f} s"


def _row(seen: "Outlook", letters: dict[str, str]) -> tuple[str, ...]:
    """Figures are those of the run with the change, where one is needed and there is one."""
    target, proposal = seen.target, next(iter(seen.proposals), None)
    device = target.name, f"{target.memory_bytes / 2**30:.1f}"
    if seen.runs:
        return *device, "as it is", *_memory_cells(seen.fit), *_rate_cells(seen.time)
    if proposal is None:
        return *device, "perhaps" if seen.doubt else "no", *_memory_cells(seen.fit), "", ""
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
