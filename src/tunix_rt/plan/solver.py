"""Settings with which a run fits a device, or is faster on it: a search over every combination that saves memory.

Of those that fit, the best changes the result least and is then the fastest. Settings that keep the result come first: how
the batch is split into micro-batches, activation checkpointing, the evaluation batch size. Five others change it a little;
each has a weight, and the level of a combination is the sum of its weights. The batch size of a step is kept. Smaller
batches, shorter rows and LoRA are another training: they are last resorts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from math import ceil, log
from typing import TypeVar

from tunix_rt.config.settings import RunConfig
from tunix_rt.plan import knobs
from tunix_rt.plan.fit import Device, least_room, predict_as_run, verdict
from tunix_rt.plan.memory import MemoryPlan, state_bytes
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.speed import Rates, StepTime, time_of_plan

T = TypeVar("T")
GIB = 2**30
SAME_SPEED = 0.01
"""Proposals whose predicted speeds differ by less count as equally fast: then fewer settings win."""
WORTH_OFFERING = 0.03
"""The least predicted speed-up that is offered: the prediction cannot order smaller differences."""
OFFERED = 3
SHORTEST_ADVISED_ROW = 128
"""Shorter rows are not advised: most traces would not fit into one."""
ADVISED_RANK = 16
"""LoRA rank, where nothing else fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Changed settings, with the memory and time of the changed run."""

    settings: knobs.Settings
    """By dotted name."""
    plan: MemoryPlan
    time: StepTime
    level: int
    """How much the result changes; 0: only the order of additions."""
    costs: tuple[str, ...]
    """What changes in the result."""
    line: str
    """The settings as command line options."""

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better. Exact speed and the evaluation batch size break ties."""
        speed = self.time.tokens_per_second
        steps = -round(log(speed) / log(1 + SAME_SPEED))
        return (self.level, steps, len(self.settings), -speed, -self.plan.eval_rows)


def solve(
    plan: MemoryPlan,
    choice: Device,
    shape: ModelShape,
    config: RunConfig,
    rates: Rates,
    *,
    steps: int | None = None,
    written: RunConfig | None = None,
    first: bool = False,
) -> list[Proposal]:
    """What fits the device, best first: one proposal for each way to change the result and each checkpointing fraction.
    Empty if nothing of this kind fits.

    `plan` is the prediction for `config`; its row lengths and devices apply to the proposals too. `steps` is the length of
    the whole run, assumed to be long if unknown. Proposals are changes of the `written` configuration, if `config` already
    differs from it. `first`: only the first that is found, to know whether there is any.
    """
    problem = _Problem(plan=plan, choice=choice, shape=shape, config=config, rates=rates, steps=steps, written=written)
    # A trace holds for one precision.
    ways = (rungs for rungs in knobs.rungs_of(config, choice) if shape.trace is None or "training.dtype" not in rungs)
    tried = (rungs for rungs in ways if _has_room(problem, rungs))
    found = (one for rungs in tried for one in _fitting(problem, rungs))
    return sorted(islice(found, 1 if first else None), key=lambda one: one.rank)


def faster(
    plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig, rates: Rates, *, steps: int | None = None
) -> list[Proposal]:
    """For a run that fits: what is predicted to be at least 3 % faster and keeps the result, fastest first. Empty where only
    the compiler knows what fits."""
    if plan.lower_bound:
        return []
    problem = _Problem(plan=plan, choice=choice, shape=shape, config=config, rates=rates, steps=steps)
    now = problem.time_of(config, problem.plan_of(config)).tokens_per_second
    found = [one for one in _fitting(problem, {}) if one.time.tokens_per_second >= (1 + WORTH_OFFERING) * now]
    return sorted(found, key=lambda one: one.rank)


def words_of(one: Proposal, verdict: str = "fits") -> str:
    """A proposal in one line: the settings, and in brackets its memory, speed and costs."""
    size = f"{one.plan.least_bytes / GIB:.2f} GiB"
    if one.plan.lower_bound:
        size, verdict = f"at least {size}", verdict.replace("fits", "may fit")
    speed = float(f"{one.time.tokens_per_second:.2g}")  # no prediction has more digits
    what = "; ".join([verdict, *(one.costs or ("the result stays the same",))])
    return f"{one.line}  ({size}, about {speed:,.0f} tokens/s: {what})"


def offered(proposals: list[Proposal], count: int = OFFERED) -> list[Proposal]:
    """The best, then those that change more and are faster for it."""
    chosen: list[Proposal] = []
    for one in proposals:
        if not chosen or one.time.tokens_per_second >= (1 + WORTH_OFFERING) * chosen[-1].time.tokens_per_second:
            chosen.append(one)
    return chosen[:count]


# --- one candidate ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    plan: MemoryPlan
    choice: Device
    shape: ModelShape
    config: RunConfig
    rates: Rates
    steps: int | None = None
    written: RunConfig | None = None
    """The configuration that proposals change, if it is not `config`."""

    @property
    def sharded(self) -> list[knobs.Settings]:
        """Ways to share a run on several ranks, the one as written first."""
        return knobs.replicas_of(self.config, self.choice, self.plan.devices)

    @property
    def least_state(self) -> knobs.Settings:
        """The one that needs the least memory."""
        return {knobs.REPLICAS: 1} if self.sharded[0] else {}

    def rows_of(self, config: RunConfig) -> int:
        """Of a micro-batch on all devices. A run that began on another number of devices keeps its rows."""
        before, now = (one.training.per_device_train_batch_size for one in (self.config, config))
        return -(-self.plan.rows * now // before)

    def steps_of(self, config: RunConfig) -> int | None:
        """Of the whole run: smaller batches need more steps, unless `max_steps` is set."""
        if self.steps is None or config.training.max_steps is not None:
            return self.steps
        return ceil(self.steps * knobs.rows_of_step(self.config) / knobs.rows_of_step(config))

    def plan_of(self, config: RunConfig) -> MemoryPlan:
        """The prediction for the rows of the plan, which may be known to be shorter than `data.max_length`."""
        return predict_as_run(
            self.shape,
            config,
            self.choice,
            devices=self.plan.devices,
            rows=self.rows_of(config),
            row_tokens=min(self.plan.row_tokens, config.data.max_length),
            target_share=self.plan.target_share,
            steps=self.steps_of(config),
        )

    def time_of(self, config: RunConfig, plan: MemoryPlan) -> StepTime:
        return time_of_plan(plan, self.shape, config, self.rates, self.choice)

    def fitted(self, config: RunConfig) -> MemoryPlan | None:
        """The prediction if it fits."""
        plan = self.plan_of(config)
        return plan if verdict(plan, self.choice).fits else None

    def proposal(self, settings: knobs.Settings, plan: MemoryPlan, changed: RunConfig) -> Proposal:
        written = self.written or self.config
        every = settings if written is self.config else knobs.differing(written, self.config) | settings
        changes = {name: value for name, value in every.items() if value != knobs.value_of(written, name)}
        return Proposal(
            settings=changes,
            plan=plan,
            time=self.time_of(changed, plan),
            level=sum(knobs.WEIGHTS[rung] for rung in knobs.changes_of_result(written, changed)),
            costs=tuple(knobs.costs_of(changes, written, changed)),
            line=knobs.set_line(changes),
        )


# --- the search -------------------------------------------------------------------------------------------------------


def _has_room(problem: _Problem, rungs: knobs.Settings) -> bool:
    """Whether the engine supports it, weights and optimizer states fit, and so does a step with full checkpointing: with all
    rows at once, or with the fewest and their gradients kept."""
    every, choice = knobs.splits(knobs.rows_of_step(problem.config)), problem.choice
    least = (
        rungs
        | problem.least_state
        | {knobs.CHECKPOINTING: True, knobs.EVAL_BATCH: knobs.eval_batch_sizes(problem.config)[-1]}
    )
    tried = ({knobs.ROWS: rows, knobs.ACCUMULATION: often} for rows, often in dict.fromkeys((every[-1], every[0])))
    runnable = [one for split in tried if (one := knobs.runnable(problem.config, least | split))]
    if not runnable or problem.plan.lower_bound:
        return bool(runnable)
    devices = problem.plan.devices
    state = state_bytes(problem.shape, runnable[0], choice.device, capability=choice.capability, devices=devices)
    return state + problem.plan.context_bytes <= choice.free_bytes and any(map(problem.fitted, runnable))


def _fitting(problem: _Problem, rungs: knobs.Settings) -> Iterator[Proposal]:
    """For one way to change the result, each number of replicas and each checkpointing fraction: the fastest split that fits,
    and the split as written if it fits too."""
    now = problem.config.training
    every = knobs.splits(knobs.rows_of_step(problem.config))
    for shared, fraction in product(problem.sharded, knobs.checkpointing_of(problem.config)):
        found: list[Proposal] = []
        settings: knobs.Settings = rungs | shared | {knobs.CHECKPOINTING: fraction}
        alone, several = [one for one in every if one[1] == 1], [one for one in every if one[1] > 1]
        for split in alone:
            found.extend(_at(problem, settings, split))
        if not found:
            found.extend(_first(several, partial(_at, problem, settings)))
        as_written = (now.per_device_train_batch_size, now.gradient_accumulation_steps)
        if found and found[0].settings.get(knobs.ROWS, as_written[0]) != as_written[0]:
            found.extend(_at(problem, settings, as_written))
        if found:
            best = min(found, key=lambda one: one.rank)
            if best.settings:
                yield best


def _first(many: Sequence[T], tried: Callable[[T], Iterable[Proposal]]) -> list[Proposal]:
    """The proposals for the first of `many` that has any, by bisection: each needs no more memory than the one before. Often
    even the last has none, so it is tried first."""
    found = list(tried(many[-1])) if many else []
    low, high = 0, len(many) - 1 if found else 0
    while low < high:
        middle = (low + high) // 2
        here = list(tried(many[middle]))
        low, high, found = (low, middle, here) if here else (middle + 1, high, found)
    return found


def _at(problem: _Problem, settings: knobs.Settings, split: tuple[int, int]) -> list[Proposal]:
    """The proposal for one split, with the largest evaluation batch that fits."""
    chosen: knobs.Settings = settings | {knobs.ROWS: split[0], knobs.ACCUMULATION: split[1]}
    sizes = knobs.eval_batch_sizes(problem.config)
    if len(sizes) > 1 and not _with(problem, chosen | {knobs.EVAL_BATCH: sizes[-1]}):
        return []
    return _with(problem, chosen) or _first(sizes[1:], lambda size: _with(problem, chosen | {knobs.EVAL_BATCH: size}))


def _with(problem: _Problem, settings: knobs.Settings) -> list[Proposal]:
    """The proposal with `settings`, if the engine supports it and it fits."""
    changed = knobs.runnable(problem.config, settings)
    plan = None if changed is None else problem.fitted(changed)
    return [] if changed is None or plan is None else [problem.proposal(settings, plan, changed)]


# --- last resorts -----------------------------------------------------------------------------------------------------


def last_resorts(
    plan: MemoryPlan,
    choice: Device,
    shape: ModelShape,
    config: RunConfig,
    rates: Rates,
    *,
    steps: int | None = None,
    written: RunConfig | None = None,
) -> list[str]:
    """Lines for a run that nothing above makes fit: smaller batches or shorter rows, with everything else that saves memory,
    as `--set` lines; a smaller model; LoRA. `steps` and `written` are as for `solve`."""
    problem = _Problem(plan=plan, choice=choice, shape=shape, config=config, rates=rates, steps=steps, written=written)
    rows = knobs.rows_of_step(config)
    fewer = [count for count, _ in knobs.splits(rows) if count < rows]
    shorter = list(_shorter(config, plan.row_tokens))
    found = _first_that_fits(problem, [(count, None) for count in fewer])
    found += _first_that_fits(problem, [(rows, length) for length in shorter])
    if not found and fewer:
        found = _first_that_fits(problem, [(1, length) for length in shorter])
    lines = [words_of(one, "fits, but is another training") for one in found]
    adapters = [f"or, only then, {words_of(one)}" for one in _lora(problem)]
    return [*_without_generation(problem), *lines, _smaller_model(problem), *adapters]


def _without_generation(problem: _Problem) -> list[str]:
    """On several ranks, a run that does not generate: each of them needs the whole model to."""
    if not problem.sharded[0] or not problem.config.evaluation.enabled:
        return []
    config, written = knobs.with_copied(problem.config, {knobs.EVALUATION: False}), problem.written or problem.config
    without = replace(problem, config=config, written=written)
    plan = without.plan_of(config)
    found = [without.proposal({}, plan, config)] if verdict(plan, problem.choice).fits else []
    found = found or solve(
        plan, problem.choice, problem.shape, config, problem.rates, steps=problem.steps, written=written
    )
    return [
        f"--set {knobs.EVALUATION}=false {one.line}".strip()
        + f"  ({one.plan.least_bytes / GIB:.2f} GiB: to generate, every GPU gathers the whole model; evaluate the final model)"
        for one in found[:1]
    ]


def _shorter(config: RunConfig, longest: int) -> Iterator[int]:
    """Row lengths below `longest`, each half of the one before."""
    length = config.data.max_length
    while length // 2 >= SHORTEST_ADVISED_ROW:
        length //= 2
        if length < longest:
            yield length


def _first_that_fits(problem: _Problem, sizes: list[tuple[int, int | None]]) -> list[Proposal]:
    """The best proposal for the first of `sizes`, rows of a step and their length, that has one."""
    found = _first(sizes, lambda size: _smallest(problem, *size))
    return sorted(found, key=lambda one: one.rank)[:1]


def _smallest(problem: _Problem, rows: int, length: int | None) -> Iterator[Proposal]:
    """What fits with the least memory for a step of `rows` rows: all of them or one at a time, full checkpointing, an
    evaluation batch of one."""
    least: knobs.Settings = {knobs.CHECKPOINTING: True} | problem.least_state
    if problem.config.evaluation.per_device_eval_batch_size:
        least[knobs.EVAL_BATCH] = 1
    if length is not None:
        least["data.max_length"] = length
    every = knobs.splits(rows)
    for rungs, split in product(knobs.rungs_of(problem.config, problem.choice), {every[0], every[-1]}):
        yield from _with(problem, rungs | least | {knobs.ROWS: split[0], knobs.ACCUMULATION: split[1]})


def _smaller_model(problem: _Problem) -> str:
    """A smaller model or a larger device, with the least memory that full training needs if that is too much."""
    least, changed = min(_least_plans(problem), key=lambda found: least_room(found[0]))
    room, free = least_room(least), problem.choice.free_bytes
    advice = "use a smaller model or a device with more memory"
    if room <= free:
        return advice
    written = problem.written or problem.config
    with_all = [
        *knobs.costs_of(knobs.differing(written, changed), written, written),
        f"one row of {least.row_tokens} tokens at a time",
    ]
    parts = sorted(least.least.parts.items(), key=lambda part: -part[1])[:2]
    largest = " and ".join(f"{size / GIB:.2f} for {name.replace('_', ' ')}" for name, size in parts)
    return (
        f"{advice}: even with {', '.join(with_all)}, at least {room / GIB:.2f} GiB are needed to train "
        f"{problem.shape.parameters:,} parameters, {largest}; {(room - free) / GIB:.2f} GiB too much"
    )


def _least_plans(problem: _Problem) -> Iterator[tuple[MemoryPlan, RunConfig]]:
    """Predictions for one short row at a time and each way to change the result."""
    least = {knobs.CHECKPOINTING: True, knobs.ROWS: 1, knobs.ACCUMULATION: 1} | problem.least_state
    least["data.max_length"] = min(problem.config.data.max_length, SHORTEST_ADVISED_ROW)
    if problem.sharded[0]:
        least[knobs.EVALUATION] = False
    if problem.config.evaluation.per_device_eval_batch_size:
        least[knobs.EVAL_BATCH] = 1
    for rungs in knobs.rungs_of(problem.config, problem.choice):
        changed = knobs.with_copied(problem.config, rungs | least)
        if not rungs or knobs.can_run(changed):
            yield problem.plan_of(changed), changed


def _lora(problem: _Problem) -> list[Proposal]:
    """LoRA, which is never part of another proposal: one row at a time, if the engine supports it and it fits."""
    training = problem.config.training
    if training.lora_rank is not None:
        return []
    settings: knobs.Settings = {"training.lora_rank": ADVISED_RANK, knobs.CHECKPOINTING: True}
    settings["training.optim_in_backward"] = False
    rows, often = knobs.splits(knobs.rows_of_step(problem.config))[-1]
    settings |= {"training.stochastic_rounding": True, knobs.ROWS: rows, knobs.ACCUMULATION: often}
    if training.master_dtype == "bfloat16":
        settings["training.master_dtype"] = None
    if training.dtype in ("float32", "float64"):
        settings["training.dtype"] = knobs.narrow_type(problem.choice) or "float32"
    if problem.config.evaluation.per_device_eval_batch_size:
        settings[knobs.EVAL_BATCH] = 1
    return _with(problem, settings)
