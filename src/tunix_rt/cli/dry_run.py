"""`tunix-rt train --dry-run`: what can refuse a run before its weights are loaded, without a run folder."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.plan.answer import PlanTarget

FEW_STEPS = 20
FEW = "; so few barely change a model: more epochs, shorter rows (data.max_length) or a higher learning rate change it more"
NOT_CHECKED = "not checked: whether the weights are complete, and the kernels of the device"


def check_and_show(config: "RunConfig", output: Path | None, on: str | None, *, as_json: bool) -> None:
    """Print what the run would train, or raise the error with which it would be refused. Writes the cache of tokens alone."""
    from tunix_rt.cli.plan_targets import resolve_target
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.models.secrets import refuse_addresses, refuse_secrets
    from tunix_rt.runs.folder import model_of_run

    refuse_addresses(config.model_dump())
    refuse_secrets(config.model_dump())
    refuse_settings(config, output)
    name = model_of_run(config.model.model_name_or_path or "")
    config = config.model_copy(update={"model": config.model.model_copy(update={"model_name_or_path": name})})
    chosen = resolve_target(on, config)
    with watching() as progress:
        found = facts_of(config, output, chosen, progress)
    if as_json:
        text.show_json({"schema": "tunix-rt/dry-run/1", **found})
        return
    steps, free = found["steps"], text.gib(found["available_bytes"])
    few = FEW if steps < FEW_STEPS and config.training.max_steps is None else ""
    text.show_lines([
        "This run would begin; nothing was written.",
        f"  model    {found['model']}, {found['parameters']:,} parameters, on {found['device']}",
        f"  data     {found['data']}",
        f"  steps    {steps:,} of {found['rows_per_step']:,} rows{few}",
        f"  memory   {found['verdict']}: {text.gib(found['predicted_bytes'])} predicted, {free} available",
        f"  disk     up to {text.gib(found['disk_bytes'])}",
        *[f"  setting  {name}={value} (training.memory: auto)" for name, value in found["chosen"].items()],
        NOT_CHECKED,
    ])  # fmt: skip


def facts_of(
    config: "RunConfig", output: Path | None, chosen: "PlanTarget", progress: Callable[..., None]
) -> dict[str, Any]:
    """The checks in the order of a run: memory at the longest length, data, memory of the rows there are, disk."""
    from tunix_rt.cli.plan import refuse
    from tunix_rt.data.prepare import prepare
    from tunix_rt.models.resolve import refuse_unavailable
    from tunix_rt.plan.answer import answer
    from tunix_rt.plan.report import refuse_if_too_big
    from tunix_rt.plan.run import plan_run
    from tunix_rt.plan.timing import rate_under_load
    from tunix_rt.progress import phase
    from tunix_rt.storage import require_space
    from tunix_rt.train.context import find_tokenizer
    from tunix_rt.train.plan_inputs import find_architecture
    from tunix_rt.train.preflight import row_facts

    target = chosen.target
    with phase("plan"):
        rate = rate_under_load() if chosen.here and target.device == "cpu" else None
        source, shape = find_architecture(config)
        settled = plan_run(config, shape, target, cpu_flops=rate)
        refuse(answer(settled.config, chosen, model=source.name, shape=shape).outlook, listed=False)
        refuse_unavailable(source.name, revision=config.model.revision, weights=config.model.weights)
    with phase("read the data"):
        data = prepare(settled.config, *find_tokenizer(settled.config), progress)
    rows = row_facts(data, packing=settled.config.data.packing)
    planned = plan_run(settled.config, shape, target, rows, settle=False)
    refuse_if_too_big(planned.memory, target, shape, settled.config, steps=planned.steps)
    if output is not None and chosen.here:
        require_space(output, planned.disk_bytes, what="the run", keep=config.training.save_total_limit)
    return {
        "model": source.name, "parameters": shape.parameters, "device": target.name, "data": data.describe(),
        "rows": len(data.rows), "steps": planned.steps, "rows_per_step": planned.rows_per_step, "verdict": planned.verdict,
        "predicted_bytes": planned.memory.peak_bytes, "available_bytes": planned.fit.available_bytes,
        "disk_bytes": planned.disk_bytes, "chosen": dict(settled.fitting["chosen"]) if settled.fitting else {},
    }  # fmt: skip


def refuse_settings(config: "RunConfig", output: Path | None) -> None:
    """The ConfigError of settings without which no run begins, of a package that is missing, and of a folder that contains
    another run or files that no run writes."""
    from tunix_rt.config.capabilities import refuse_unsupported
    from tunix_rt.config.conflicts import require_runnable
    from tunix_rt.runs.folder import RunDir
    from tunix_rt.train.preflight import require_peft
    from tunix_rt.train.resume import refuse_occupied
    from tunix_rt.train.trackers import require_trackers

    require_runnable(config)
    refuse_unsupported(config.training, implementation=config.model.implementation)
    require_trackers(config)
    require_peft(config)
    if output is None:
        return
    run = RunDir(output)
    if output.is_dir() and (run.holds_work() or not run.holds_a_run()):  # a refused run is no obstacle
        run.refuse_links()
        refuse_occupied(run, config)
