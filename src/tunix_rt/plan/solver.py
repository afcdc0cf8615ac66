"""What to change so that a run fits a device, or goes faster on it: every combination of the settings that save memory.

Of those that fit, the best is the one that changes the result least, then the fastest. Settings that leave the result alone
come first: how the rows of a step are split, what is computed again, how many questions are asked at once. Five others change
it a little, and each has a weight; a combination's level is the sum of its weights. The rows of a step are kept. Fewer rows,
shorter rows and adapters are another training: they are last resorts, said in words of their own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, log
from typing import TypeVar

from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.knobs import (
    ACCUMULATION,
    ASKED,
    KEPT,
    ROWS,
    WEIGHTS,
    Settings,
    asked_at_once,
    can_run,
    changes_of_result,
    costs_of,
    differing,
    kept_shares,
    narrow_type,
    rows_of_step,
    rungs_of,
    runnable,
    set_line,
    splits,
    value_of,
    with_copied,
)
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.shape import ModelShape
from tunix_rt.plan.speed import Rates, StepTime, step_time
from tunix_rt.plan.target import Device, least_room, predict_as_run, verdict

T = TypeVar("T")
GIB = 2**30
SAME_SPEED = 0.01
"""Proposals that differ by less in their predicted speed are taken to be equally fast: then fewer settings win."""
WORTH_SAYING = 0.03
"""A change is offered as faster from here on: the prediction orders no smaller differences."""
OFFERED = 3
SHORTEST_ADVISED_ROW = 128
"""Rows are not advised to be shorter than this: most traces would no longer fit into one."""
ADVISED_RANK = 16
"""Of adapters, where nothing else fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings over those of a run, and what they come to."""

    settings: Settings
    """What differs, by dotted name."""
    plan: MemoryPlan
    time: StepTime
    level: int
    """How much the result changes; 0: not beyond the order of additions."""
    costs: tuple[str, ...]
    """What changes in the result, in words."""
    line: str
    """The settings, ready for the command line."""

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better. Last comes what makes the order one of its own: exact speed, then questions at once."""
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
    asked: RunConfig | None = None,
) -> list[Proposal]:
    """What fits the device, best first: one for every way to change the result and share that is computed again. Empty where
    nothing of this kind fits.

    `plan` is the prediction for `config`, whose known row lengths and devices count for the proposals too. `steps` are those
    of the whole run; where they are not known, it is taken to be long. Proposals are over what was `asked` for, where
    `config` already differs from it.
    """
    problem = _Problem(plan=plan, choice=choice, shape=shape, config=config, rates=rates, steps=steps, written=asked)
    tried = (rungs for rungs in rungs_of(config, choice) if _has_room(problem, rungs))
    found = [one for rungs in tried for one in _fitting(problem, rungs)]
    return sorted(found, key=lambda one: one.rank)


def faster(
    plan: MemoryPlan, choice: Device, shape: ModelShape, config: RunConfig, rates: Rates, *, steps: int | None = None
) -> list[Proposal]:
    """For a run that fits: what would be faster by at least 3 % and leave the result alone, fastest first."""
    problem = _Problem(plan=plan, choice=choice, shape=shape, config=config, rates=rates, steps=steps)
    now = problem.time_of(config, problem.plan_of(config)).tokens_per_second
    found = [one for one in _fitting(problem, {}) if one.time.tokens_per_second >= (1 + WORTH_SAYING) * now]
    return sorted(found, key=lambda one: one.rank)


def words_of(one: Proposal, verdict: str = "fits") -> str:
    """A proposal in one line: what to set, and in brackets what it comes to."""
    size, speed = (
        one.plan.least_bytes / GIB,
        float(f"{one.time.tokens_per_second:.2g}"),
    )  # no prediction has more digits
    what = "; ".join([verdict, *(one.costs or ("the result stays the same",))])
    return f"{one.line}  ({size:.2f} GiB, about {speed:,.0f} tokens/s: {what})"


def offered(proposals: list[Proposal], count: int = OFFERED) -> list[Proposal]:
    """The best, and of the others those that change more and are faster for it."""
    chosen: list[Proposal] = []
    for one in proposals:
        if not chosen or one.time.tokens_per_second >= (1 + WORTH_SAYING) * chosen[-1].time.tokens_per_second:
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
    """The configuration that settings are said over, where it is not `config`."""

    def rows_of(self, config: RunConfig) -> int:
        """Of a micro-batch on all devices. Of a run that began on another number of them there are as many as there were."""
        before, now = (one.training.per_device_train_batch_size for one in (self.config, config))
        return -(-self.plan.rows * now // before)

    def steps_of(self, config: RunConfig) -> int | None:
        """Of the whole run: with fewer rows in each there are more, unless their number is asked for."""
        if self.steps is None or config.training.max_steps is not None:
            return self.steps
        return ceil(self.steps * rows_of_step(self.config) / rows_of_step(config))

    def plan_of(self, config: RunConfig) -> MemoryPlan:
        """The prediction for the rows that the plan was made for: they may be known to be shorter than `data.max_length`."""
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
        return step_time(
            self.shape,
            config,
            self.rates,
            device=self.plan.device,
            devices=self.plan.devices,
            rows=self.rows_of(config),
            row_tokens=min(self.plan.row_tokens, config.data.max_length),
            target_share=self.plan.target_share,
            capability=self.choice.capability,
            layers=plan.layers,
        )

    def fitted(self, config: RunConfig) -> MemoryPlan | None:
        """The prediction where it fits."""
        plan = self.plan_of(config)
        return plan if verdict(plan, self.choice).fits else None

    def proposal(self, settings: Settings, plan: MemoryPlan, changed: RunConfig) -> Proposal:
        asked = self.written or self.config
        every = settings if asked is self.config else differing(asked, self.config) | settings
        said = {name: value for name, value in every.items() if value != value_of(asked, name)}
        return Proposal(
            settings=said,
            plan=plan,
            time=self.time_of(changed, plan),
            level=sum(WEIGHTS[rung] for rung in changes_of_result(asked, changed)),
            costs=tuple(costs_of(said, asked, changed)),
            line=set_line(said),
        )


# --- the search -------------------------------------------------------------------------------------------------------


def _has_room(problem: _Problem, rungs: Settings) -> bool:
    """Whether an engine honours it at all, and weights and optimizer alone have room: they are the same however rows are
    split and layers computed."""
    rows, often = splits(rows_of_step(problem.config))[0]
    changed = runnable(problem.config, rungs | {ROWS: rows, ACCUMULATION: often})
    if changed is None:
        return False
    plan = problem.plan_of(changed)
    state = max(phase.parts.get("weights", 0) + phase.parts.get("optimizer", 0) for phase in plan.judged)
    return state + plan.context_bytes <= problem.choice.free_bytes


def _fitting(problem: _Problem, rungs: Settings) -> Iterator[Proposal]:
    """Of one way to change the result, for every share that is computed again: the fastest split that fits, and the split as
    it is where that fits too."""
    now = problem.config.training
    every = splits(rows_of_step(problem.config))
    for share in kept_shares(problem.config):
        found: list[Proposal] = []
        settings: Settings = rungs | {KEPT: share}
        alone, several = [one for one in every if one[1] == 1], [one for one in every if one[1] > 1]
        for split in alone:
            found.extend(_at(problem, settings, split))
        if not found:
            found.extend(_first(several, partial(_at, problem, settings)))
        as_it_is = (now.per_device_train_batch_size, now.gradient_accumulation_steps)
        if found and found[0].settings.get(ROWS, as_it_is[0]) != as_it_is[0]:
            found.extend(_at(problem, settings, as_it_is))
        if found:
            best = min(found, key=lambda one: one.rank)
            if best.settings:
                yield best


def _first(many: Sequence[T], tried: Callable[[T], Iterable[Proposal]]) -> list[Proposal]:
    """What is found for the first of `many` for which anything is: by halving, for each needs no more than the one before.
    Often there is nothing even for the last, which is tried first."""
    found = list(tried(many[-1])) if many else []
    low, high = 0, len(many) - 1 if found else 0
    while low < high:
        middle = (low + high) // 2
        here = list(tried(many[middle]))
        low, high, found = (low, middle, here) if here else (middle + 1, high, found)
    return found


def _at(problem: _Problem, settings: Settings, split: tuple[int, int]) -> list[Proposal]:
    """The proposal for one split, with the most questions at once that fit: fewer need no more memory."""
    chosen: Settings = settings | {ROWS: split[0], ACCUMULATION: split[1]}
    asked = asked_at_once(problem.config)
    if len(asked) > 1 and not _with(problem, chosen | {ASKED: asked[-1]}):
        return []
    return _with(problem, chosen) or _first(asked[1:], lambda questions: _with(problem, chosen | {ASKED: questions}))


def _with(problem: _Problem, settings: Settings) -> list[Proposal]:
    """The proposal with `settings`, where it can be run and fits."""
    changed = runnable(problem.config, settings)
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
    asked: RunConfig | None = None,
) -> list[str]:
    """What is left where nothing fits, in words: fewer or shorter rows, with everything else that saves memory, as lines of
    `--set`; a smaller model; adapters. `steps` and `asked` are as `solve` has them."""
    problem = _Problem(plan=plan, choice=choice, shape=shape, config=config, rates=rates, steps=steps, written=asked)
    rows = rows_of_step(config)
    fewer = [count for count, _ in splits(rows) if count < rows]
    shorter = list(_shorter(config, plan.row_tokens))
    found = _first_that_fits(problem, [(count, None) for count in fewer])
    found += _first_that_fits(problem, [(rows, length) for length in shorter])
    if not found and fewer:
        found = _first_that_fits(problem, [(1, length) for length in shorter])
    lines = [words_of(one, "fits, but is another training") for one in found]
    adapters = [f"or, only then, {words_of(one)}" for one in _adapters(problem)]
    return [*lines, _smaller_model(problem), *adapters]


def _shorter(config: RunConfig, longest: int) -> Iterator[int]:
    """Row lengths below those there are."""
    length = config.data.max_length
    while length // 2 >= SHORTEST_ADVISED_ROW:
        length //= 2
        if length < longest:
            yield length


def _first_that_fits(problem: _Problem, sizes: list[tuple[int, int | None]]) -> list[Proposal]:
    """The best for the largest of steps of so many rows of such a length for which anything fits."""
    found = _first(sizes, lambda size: _smallest(problem, *size))
    return sorted(found, key=lambda one: one.rank)[:1]


def _smallest(problem: _Problem, rows: int, length: int | None) -> Iterator[Proposal]:
    """What fits of the least that a step of `rows` rows can do with: all of them or one at a time, every layer computed
    again, one question at once."""
    least: Settings = {KEPT: True} | ({ASKED: 1} if problem.config.evaluation.per_device_eval_batch_size else {})
    if length is not None:
        least["data.max_length"] = length
    every = splits(rows)
    for rungs, split in product(rungs_of(problem.config, problem.choice), {every[0], every[-1]}):
        yield from _with(problem, rungs | least | {ROWS: split[0], ACCUMULATION: split[1]})


def _smaller_model(problem: _Problem) -> str:
    """A smaller model or another device; with the least that training every parameter needs, where that is too much."""
    least, changed = min(_least_plans(problem), key=lambda found: least_room(found[0]))
    room, free, advice = (
        least_room(least),
        problem.choice.free_bytes,
        "use a smaller model or a device with more memory",
    )
    if room <= free:
        return advice
    asked = problem.written or problem.config
    with_all = [*costs_of(differing(asked, changed), asked, asked), f"one row of {least.row_tokens} tokens at a time"]
    parts = sorted(least.least.parts.items(), key=lambda part: -part[1])[:2]
    largest = " and ".join(f"{size / GIB:.2f} for {name.replace('_', ' ')}" for name, size in parts)
    return (
        f"{advice}: even with {', '.join(with_all)}, at least {room / GIB:.2f} GiB are needed to train "
        f"{problem.shape.parameters:,} parameters, {largest}; {(room - free) / GIB:.2f} GiB too much"
    )


def _least_plans(problem: _Problem) -> Iterator[tuple[MemoryPlan, RunConfig]]:
    """Predictions for one short row at a time, for every way to change the result."""
    least: Settings = {KEPT: True, ROWS: 1, ACCUMULATION: 1}
    least["data.max_length"] = min(problem.config.data.max_length, SHORTEST_ADVISED_ROW)
    if problem.config.evaluation.per_device_eval_batch_size:
        least[ASKED] = 1
    for rungs in rungs_of(problem.config, problem.choice):
        changed = with_copied(problem.config, rungs | least)
        if not rungs or can_run(changed):
            yield problem.plan_of(changed), changed


def _adapters(problem: _Problem) -> list[Proposal]:
    """Adapters, which are never mixed into the other advice: a row at a time, where that can be run and fits."""
    training = problem.config.training
    if training.lora_rank is not None:
        return []
    settings: Settings = {"training.lora_rank": ADVISED_RANK, KEPT: True, "training.optim_in_backward": False}
    rows, often = splits(rows_of_step(problem.config))[-1]
    settings |= {"training.stochastic_rounding": True, ROWS: rows, ACCUMULATION: often}
    if training.master_dtype == "bfloat16":
        settings["training.master_dtype"] = None
    if training.dtype in ("float32", "float64"):
        settings["training.dtype"] = narrow_type(problem.choice) or "float32"
    if problem.config.evaluation.per_device_eval_batch_size:
        settings[ASKED] = 1
    return _with(problem, settings)
