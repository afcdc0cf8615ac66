"""`tunix-rt plan`: does it fit, before anything is loaded."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tunix_rt.plan.fit import Fit
    from tunix_rt.plan.memory import MemoryPlan


@click.command()
@click.argument("config", required=False)
@click.option("--model", help="Hub id, local folder, or a shipped model.")
@click.option("--weights", help="pretrained or random.")
@click.option("--device", help="auto, cpu, cuda (gpu) or tpu.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(config: str | None, overrides: tuple[str, ...], as_json: bool, **named: Any) -> None:
    """Predict the peak memory of a run of CONFIG and whether it fits. Exit 5 when it does not."""
    from tunix_rt.cli import text
    from tunix_rt.config import find_config, load_config
    from tunix_rt.doctor.choose import choose_device
    from tunix_rt.doctor.probe import gather_facts
    from tunix_rt.doctor.verdict import Ask
    from tunix_rt.errors import ConfigError
    from tunix_rt.models import resolve_model
    from tunix_rt.plan.fit import disk_needed_bytes, judge, refuse_if_too_big
    from tunix_rt.plan.memory import predict
    from tunix_rt.plan.shape import shape_of
    from tunix_rt.rundir import to_plain

    flags = {
        "model.model_name_or_path": named["model"],
        "model.weights": named["weights"],
        "training.device": named["device"],
    }
    settings = load_config(find_config(config) if config else None, overrides=overrides, flags=flags)
    if not settings.model.model_name_or_path:
        raise ConfigError("no model is named", fix="set model.model_name_or_path, or give --model")
    facts = gather_facts()
    choice = choose_device(Ask(device=settings.training.device, backend=None), facts)  # planning needs no engine
    # Only config.json is read, so a model without its weights can be planned.
    source = resolve_model(settings.model.model_name_or_path, revision=settings.model.revision, weights="random")
    shape = shape_of(source.config)
    predicted = predict(shape, settings, device=choice.device)
    fit = judge(predicted, choice, shape, settings)
    disk = disk_needed_bytes(shape, settings)
    if as_json:
        value = {"model": source.name, "shape": shape, "memory": predicted, "fit": fit, "device": choice}
        text.show_json(to_plain(value | {"disk_bytes": disk, "disk_free_bytes": facts.host.disk_free_bytes}))
    else:
        _show(predicted, fit, choice.device, disk, facts.host.disk_free_bytes)
    refuse_if_too_big(predicted, choice, shape, settings)


def _show(predicted: "MemoryPlan", fit: "Fit", device: str, disk: int, disk_free: int) -> None:
    from tunix_rt.cli import text

    verdict = "fits" if fit.fits else "does not fit"
    text.show_lines([
        f"{verdict}: {text.gib(fit.predicted_bytes)} predicted (+ {text.gib(fit.safety_bytes)} margin) "
        f"of {text.gib(fit.available_bytes)} free on {device}",
        f"{predicted.parameters:,} parameters, {predicted.dtype}, {predicted.rows} rows of {predicted.row_tokens} tokens; "
        f"peak in phase: {predicted.peak_phase}",
    ])  # fmt: skip
    names = list(dict.fromkeys(name for phase in predicted.phases for name in phase.parts))
    rows = [
        (name, *(_mib(phase.parts.get(name, 0)) for phase in predicted.phases))
        for name in names
        if any(phase.parts.get(name) for phase in predicted.phases)
    ]
    phases = [phase.name for phase in predicted.phases]
    total = ("total", *(_mib(phase.total_bytes) for phase in predicted.phases))
    text.show_table(("MiB", *phases), [*rows, total], numbers=phases)
    text.show_lines([f"disk: up to {text.gib(disk)} of {text.gib(disk_free)} free"])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}" if size else ""
