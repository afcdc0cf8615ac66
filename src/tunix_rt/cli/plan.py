"""`tunix-rt plan`: does it fit, before anything is loaded."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tunix_rt.config import RunConfig
    from tunix_rt.plan.fit import Fit
    from tunix_rt.plan.memory import MemoryPlan, Phase


@click.command()
@click.argument("config", required=False)
@click.option("--model", help="Local folder, GGUF file, shipped model, hub id, or a preset.")
@click.option("--weights", help="pretrained or random.")
@click.option("--device", help="auto, cpu, cuda (gpu) or tpu.")
@click.option("--backend", help="torch or jax.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.")
@click.option("--topology", metavar="v5e:2x4", help="Ask the TPU's own compiler instead; no TPU is needed.")
@click.option(
    "--time-limit", type=click.FloatRange(min=1), metavar="SECONDS", help="For the compiler; 1800 unless said."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(config: str | None, overrides: tuple[str, ...], as_json: bool, **named: Any) -> None:
    """Predict the peak memory of a run of CONFIG and whether it fits. Exit 5 when it does not.

    The disk is judged too, in words alone: a run that finds too little room on it ends with exit code 8.
    """
    from tunix_rt.backends.jax_architecture import architecture_of
    from tunix_rt.cli import text
    from tunix_rt.cli.topology import run_topology
    from tunix_rt.config import find_config, load_config
    from tunix_rt.doctor.choose import choose_device, with_virtual_devices
    from tunix_rt.doctor.probe import gather_facts
    from tunix_rt.doctor.verdict import Ask
    from tunix_rt.errors import ConfigError
    from tunix_rt.models import resolve_model
    from tunix_rt.plan.fit import disk_needed_bytes, judge, left_to_the_compiler, refuse_if_too_big
    from tunix_rt.plan.jax_limits import refuse_dropout
    from tunix_rt.plan.prediction import predict_run
    from tunix_rt.plan.shape import shape_of
    from tunix_rt.rundir import to_plain

    flags = {
        "model.model_name_or_path": named["model"],
        "model.weights": named["weights"],
        "training.device": named["device"],
        "training.backend": named["backend"],
    }
    settings = load_config(find_config(config) if config else None, overrides=overrides, flags=flags)
    if not settings.model.model_name_or_path:
        raise ConfigError("no model is named", fix="set model.model_name_or_path, or give --model")
    refuse_what_no_run_takes(settings)
    if named["topology"]:
        run_topology(settings, named["topology"], as_json, limit_seconds=named["time_limit"])
        return
    facts = gather_facts()
    choice = choose_device(Ask(device=settings.training.device, backend=None), facts)  # planning needs no engine
    choice = with_virtual_devices(choice, settings.training.backend)
    # Only config.json is read, so a model without its weights can be planned.
    source = resolve_model(settings.model.model_name_or_path, revision=settings.model.revision, weights="random")
    shape = shape_of(source.config)
    if settings.training.backend == "jax":
        refuse_dropout(source.name, architecture_of(source.config).dropout, source.config)
    predicted = predict_run(shape, settings, device=choice.device, devices=choice.count, capability=choice.capability)
    fit = judge(predicted, choice, shape, settings)
    doubt = left_to_the_compiler(predicted, choice, settings)
    disk, disk_free = disk_needed_bytes(shape, settings), facts.host.disk_free_bytes
    if as_json:
        value = {"model": source.name, "shape": shape, "memory": predicted, "fit": fit, "device": choice}
        value |= {"disk_bytes": disk, "disk_free_bytes": disk_free, "disk_fits": disk <= disk_free}
        value |= {"compiler_decides": bool(doubt)}
        text.show_json(to_plain(value))
    else:
        _show_memory(predicted, fit, choice.device, decided=not doubt)
        text.show_lines([_disk_line(disk, disk_free), *([doubt] if doubt else [])])
    if not doubt:
        refuse_if_too_big(predicted, choice, shape, settings)


def refuse_what_no_run_takes(settings: "RunConfig") -> None:
    """Refuse settings that `train` would refuse together, or as addresses.

    Neither a dataset nor a model is asked for, nor the engine looked for: there may be none yet."""
    from tunix_rt.config import require_runnable
    from tunix_rt.models import refuse_addresses
    from tunix_rt.plan.jax_limits import refuse_for_jax

    refuse_addresses(settings.model_dump())
    model = settings.model.model_copy(update={"model_name_or_path": settings.model.model_name_or_path or "any"})
    data = settings.data.model_copy(update={"dataset": settings.data.dataset or "any"})
    require_runnable(settings.model_copy(update={"model": model, "data": data}))
    refuse_for_jax(settings)


def _show_memory(predicted: "MemoryPlan", fit: "Fit", device: str, *, decided: bool = True) -> None:
    """The verdict, `decided` or left to a compiler, then the parts of every phase; under them the totals, the one that was
    judged said to be so."""
    from tunix_rt.cli import text
    from tunix_rt.plan.memory import SPARE

    verdict = "fits" if fit.fits else "does not fit" if decided else "may not fit"
    gives_up = fit.predicted_bytes < predicted.peak_bytes  # judged without what a run can do without
    peak = predicted.least if gives_up else predicted.peak
    phases = predicted.judged
    names = list(dict.fromkeys(name for phase in phases for name in phase.parts if phase.parts[name]))
    spare = [name for name in names if name in SPARE]
    without = f" without {' and '.join(spare)}" if gives_up else ""
    each = f" of each of {predicted.devices} devices" if predicted.devices > 1 and device != "cpu" else ""
    text.show_lines([
        f"{verdict}: {text.gib(fit.predicted_bytes)} predicted{without} (+ {text.gib(fit.safety_bytes)} margin) "
        f"of {text.gib(fit.available_bytes)} free on {device}{each}",
        f"{predicted.parameters:,} parameters, {predicted.dtype}, {predicted.rows} rows of {predicted.row_tokens} tokens; "
        f"peak in phase: {peak.name}",
    ])  # fmt: skip
    rows = [
        (f"{name} *" if name in spare else name, *(_mib(phase.parts.get(name, 0)) for phase in phases))
        for name in (*(name for name in names if name not in spare), *spare)
    ]
    judged = " (judged)"
    rows.append((f"total{'' if gives_up else judged}", *(_mib(phase.total_bytes) for phase in phases)))
    if spare:
        least = (phase.total_bytes - sum(phase.parts.get(name, 0) for name in spare) for phase in phases)
        rows.append((f"total without *{judged if gives_up else ''}", *map(_mib, least)))
    text.show_table(("MiB", *(phase.name for phase in phases)), rows, numbers=[phase.name for phase in phases])
    if spare:
        text.show_lines([f"* given up when memory is short{', as it is here' if gives_up else ''}"])
    text.show_lines(_proof_line(phase, predicted.device) for phase in predicted.phases if phase.name == "proof")


def _proof_line(proof: "Phase", device: str) -> str:
    from tunix_rt.cli import text

    child, elsewhere = proof.parts["fresh_process"], "" if device == "cpu" else "done on the CPU, or "
    return (
        f"proof of the final model: {text.gib(proof.total_bytes)}, {text.gib(child)} of it in a fresh process that loads it once "
        f"more; not judged: without room for it the proof is {elsewhere}left out, which is said"
    )


def _disk_line(needed: int, free: int) -> str:
    from tunix_rt.cli import text

    verdict = "fits" if needed <= free else "does not fit: a run would be refused with exit code 8"
    return f"disk: up to {text.gib(needed)} needed, {text.gib(free)} free; {verdict}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size else ""
