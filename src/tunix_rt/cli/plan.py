"""`tunix-rt plan`: does it fit, how long will it take, and what to change; before anything is loaded."""

import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunix_rt.cli.plan_targets import PlanTarget
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.models.resolve import ModelSource
    from tunix_rt.plan.report import Outlook
    from tunix_rt.plan.shape import ModelShape
    from tunix_rt.plan.solver import Proposal

ALL = "all"


@click.command()
@click.argument("config", required=False)
@click.option("--model", help="Local folder, run, GGUF file, shipped model, hub id, or a preset.")
@click.option("--weights", help="pretrained or random.")
@click.option("--device", help="auto, cpu, cuda (gpu) or tpu.")
@click.option("--backend", help="torch or jax.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.")
@click.option(
    "--on", metavar="NAME", help="Another device: rtx5090, h200, 8gb, tpu-v5e-8, a facts.json of the doctor, or all."
)
@click.option(
    "--exact", is_flag=True, help="Compile with the TPU's own compiler, for the JAX engine; no TPU is needed."
)
@click.option("--topology", metavar="v5e:2x4", help="The same for chips in this arrangement.")
@click.option("--time-limit", type=click.FloatRange(min=1), metavar="SECONDS", help="Of the compiler; default 1800.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(config: str | None, overrides: tuple[str, ...], as_json: bool, **named: Any) -> None:
    """Predict peak memory, time and disk of a run of CONFIG, and whether it fits. Exit 5 when it does not.

    Without --on, on the device of this computer with its free memory; a named device is assumed to be idle. For the JAX
    engine the prediction is a lower bound, and the compiler decides. The plan reports a disk that is too small, and still exits
    with 0; a run would end with exit code 8.
    """
    from tunix_rt.cli.plan_targets import device_flag, exact_topology, refuse_exact, resolve_target, run_topology
    from tunix_rt.config.load import find_config, load_config
    from tunix_rt.errors import ConfigError

    started = time.perf_counter()
    flags = {
        "model.model_name_or_path": named["model"],
        "model.weights": named["weights"],
        "training.device": named["device"],
        "training.backend": named["backend"],
    }
    settings = load_config(find_config(config) if config else None, overrides=overrides, flags=flags)
    if not settings.model.model_name_or_path:
        raise ConfigError("no model is named", fix="set model.model_name_or_path, or give --model")
    refuse_unrunnable(settings)
    on, topology = named["on"], named["topology"]
    if on and on.strip().casefold() == ALL:
        on = ALL
    refuse_options_together(on, topology, exact=named["exact"])
    if named["exact"]:
        refuse_exact(settings)
    if on == ALL:
        source, shape = _model(settings)
        plan_all(settings, source, shape, as_json=as_json, started=started, flag=device_flag(named["device"], settings))
        return
    target = None if topology else resolve_target(on, settings, flag=device_flag(named["device"], settings))
    if target and named["exact"]:
        topology = exact_topology(target.target)
    if topology:
        run_topology(settings, topology, as_json, limit_seconds=named["time_limit"])
    elif target:
        source, shape = _model(settings)
        plan_one(settings, target, source, shape, as_json=as_json)


def refuse_options_together(on: str | None, topology: str | None, *, exact: bool) -> None:
    from tunix_rt.errors import ConfigError

    if topology and on:
        fix = "keep one: --exact --on tpu-v5e-8, or --topology v5e:2x4"
        raise ConfigError(f"--topology {topology} and --on {on} both name a device", fix=fix)
    if exact and on == ALL:
        raise ConfigError("--exact compiles for one device, which takes minutes", fix="name it: --exact --on tpu-v5e-8")


def refuse_unrunnable(settings: "RunConfig") -> None:
    """Refuse settings that `train` refuses in combination, or as addresses. Dataset, model and engine need not exist yet."""
    from tunix_rt.config.settings import require_runnable
    from tunix_rt.models.secrets import refuse_addresses

    refuse_addresses(settings.model_dump())
    model = settings.model.model_copy(update={"model_name_or_path": settings.model.model_name_or_path or "any"})
    data = settings.data.model_copy(update={"dataset": settings.data.dataset or "any"})
    require_runnable(settings.model_copy(update={"model": model, "data": data}))


def _model(settings: "RunConfig") -> "tuple[ModelSource, ModelShape]":
    """Only config.json is read, so a model without its weights can be planned."""
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.engines.base import refuse_unsupported_model
    from tunix_rt.models.resolve import resolve_architecture
    from tunix_rt.plan.trace import shape_of_any
    from tunix_rt.runs.folder import model_of_run

    name = model_of_run(settings.model.model_name_or_path or "")
    with watching():
        source = resolve_architecture(name, revision=settings.model.revision)
        refuse_unsupported_model(source, settings.training.backend)
        return source, shape_of_any(source, settings.training)


# --- one device -------------------------------------------------------------------------------------------------------


def plan_one(
    settings: "RunConfig", target: "PlanTarget", source: "ModelSource", shape: "ModelShape", *, as_json: bool
) -> None:
    """Print the plan; then raise the HardwareError or DoesNotFitError of a run that would be refused."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.plan import disk_line, show_outlook
    from tunix_rt.plan.calibration import band
    from tunix_rt.plan.precision import recipe_of
    from tunix_rt.plan.report import look, measured_here, whole_run
    from tunix_rt.plan.timing import disk_needed_bytes

    seen = look(shape, settings, target.target)
    measured = target.here and seen.target.device == "cpu"
    if measured:
        seen = measured_here(seen, shape, settings)
    run = whole_run(settings, seen)
    exact = settings.training.max_steps is not None or not settings.data.packing
    disk, free = disk_needed_bytes(shape, settings), target.disk_free_bytes
    training, plan = settings.training, seen.plan
    alike: dict[str, Any] = {
        "layers": plan.layers,
        "recipe": recipe_of(training).describe(),
        "parameters": plan.parameters,
    }
    known = band(target.kind, training.backend, **alike) if target.kind else None
    if as_json:
        value = {"schema": "tunix-rt/plan-answer/1", "model": source.name, "shape": shape, **outlook_json(seen)}
        value |= {"run": run, "steps_exact": exact if run else None, "disk_bytes": disk, "disk_free_bytes": free}
        value |= {"seen_errors": known, "disk_fits": None if free is None else disk <= free}
        show_whole_json(value)
    else:
        shown = known.describe() if known else ""
        show_outlook(seen, run, exact=exact, disk=disk_line(disk, free), band=shown, measured=measured)
        text.show_lines(filter(None, [settings.data.beyond_positions(shape.max_positions)]))
    refuse(seen, listed=not as_json)


def refuse(seen: "Outlook", *, listed: bool) -> None:
    """Raise the error of `train`. Parts and changes are not repeated where they are `listed` already."""
    from tunix_rt.cli.views import text
    from tunix_rt.errors import DoesNotFitError, HardwareError

    fix = "\n       ".join([proposal.line for proposal in seen.proposals][:1] or seen.resorts)
    if listed and fix:
        fix = "add the settings of 1. above" if seen.proposals else "one of the changes above"
    if seen.unable:
        fix = fix or "use a GPU of compute capability 8.0 or above"
        raise HardwareError(f"{seen.target.name} {seen.unable}", fix=fix, cause="bf16-emulated")
    if not seen.fit.fits:
        too_much = text.gib(-seen.fit.margin_bytes)
        raise DoesNotFitError(f"does not fit on {seen.target.name}: {too_much} too much", fix=fix)


def show_whole_json(value: dict[str, Any]) -> None:
    """`value` on stdout with all of its keys; unknown values are null."""
    import json

    from tunix_rt.storage import to_plain

    print(json.dumps(to_plain(value), indent=2, allow_nan=False, ensure_ascii=True))


def outlook_json(seen: "Outlook") -> dict[str, Any]:
    """One device as JSON. Proposals and last resorts contain the advice of the verdict."""
    from dataclasses import asdict

    def listed(proposals: "Sequence[Proposal]") -> list[dict[str, Any]]:
        return [
            {name: getattr(one, name) for name in ("line", "settings", "costs", "level")}
            | {"predicted_bytes": one.plan.least_bytes, "tokens_per_second": one.time.tokens_per_second}
            for one in proposals
        ]

    return {
        "device": seen.target,
        "runs": seen.runs,
        "unable": seen.unable or None,
        "compiler_decides": bool(seen.doubt),
        "memory": seen.plan,
        "fit": {name: figure for name, figure in asdict(seen.fit).items() if name != "advice"},
        "time": seen.time,
        "proposals": listed(seen.proposals),
        "faster": listed(seen.faster),
        "last_resorts": seen.resorts,
    }


# --- the catalogue ----------------------------------------------------------------------------------------------------


def plan_all(
    settings: "RunConfig",
    source: "ModelSource",
    shape: "ModelShape",
    *,
    as_json: bool,
    started: float,
    flag: str | None,
) -> None:
    """Print which devices of the catalogue run it. No error if none does."""
    from tunix_rt.cli.plan_targets import check_device
    from tunix_rt.cli.views.plan import show_all
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.config.capabilities import capabilities_of
    from tunix_rt.plan.report import look
    from tunix_rt.plan.target import all_targets
    from tunix_rt.progress import phase

    kinds = tuple(device for device in capabilities_of(settings.training).devices if device != "cpu")
    check_device(ALL, kinds, settings, flag=flag)
    targets = [target for target in all_targets() if target.device in ((flag,) if flag else kinds)]
    with watching(), phase("plan"):
        seen = [look(shape, settings, target) for target in targets]
    seconds = time.perf_counter() - started
    if as_json:
        value = {"schema": "tunix-rt/plan-all/1", "model": source.name, "shape": shape, "seconds": seconds}
        show_whole_json(value | {"devices": [outlook_json(one) for one in seen]})
        return
    left_out = [] if "tpu" in kinds else ["TPUs are for the JAX engine: --backend jax --on all"]
    show_all(seen, seconds=seconds, left_out=left_out)
