"""`tunix-rt plan`: does it fit, how long will it take, and what to change; before anything is loaded."""

import time
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tunix_rt.config.settings import RunConfig
    from tunix_rt.models.resolve import ModelSource
    from tunix_rt.plan.answer import PlanTarget
    from tunix_rt.plan.report import Outlook
    from tunix_rt.plan.sizes import ModelShape

ALL = "all"


@click.command()
@click.argument("config", required=False)
@click.option("--model", help="Local folder, run, GGUF file, shipped model, hub id, or a preset.")
@click.option("--weights", help="pretrained or random.")
@click.option("--device", help="auto, cpu, cuda (gpu) or tpu.")
@click.option("--backend", help="torch or jax.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated.")
@click.option(
    "--on", metavar="NAME", help="Another device: rtx5090, 8gb, 8xh100, tpu-v5e-8, a facts.json of the doctor, or all."
)
@click.option("--gpus", type=click.IntRange(1, 1024), metavar="N", help="GPUs of each node, a rank on each.")
@click.option("--nodes", type=click.IntRange(1, 4096), metavar="N", help="Nodes with so many GPUs; default 1.")
@click.option("--network", metavar="400gbit", help="Bandwidth of a node to the others, all its adapters together.")
@click.option(
    "--exact", is_flag=True, help="Compile with the TPU's own compiler, for the JAX engine; no TPU is needed."
)
@click.option("--topology", metavar="v5e:2x4", help="The same for chips in this arrangement.")
@click.option("--time-limit", type=click.FloatRange(min=1), metavar="SECONDS", help="Of the compiler; default 1800.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(config: str | None, overrides: tuple[str, ...], as_json: bool, **named: Any) -> None:
    """Predict peak memory, time and disk of a run of CONFIG, and whether it fits. Exit 5 when it does not.

    Without --on, on the device of this computer with its free memory; a named device is assumed to be idle. With --gpus, or on
    a node of the catalogue, FSDP shards the run over GPUs, and the fullest of them counts. For the JAX engine the prediction is
    a lower bound, and the compiler decides. The plan reports a disk that is too small, and still exits with 0; a run would end
    with exit code 8.
    """
    from tunix_rt.cli.convert import show_conversion
    from tunix_rt.cli.plan_targets import (
        device_flag,
        exact_topology,
        is_node,
        on_several,
        refuse_exact,
        resolve_target,
        run_topology,
    )
    from tunix_rt.config.load import find_config, load_config
    from tunix_rt.errors import ConfigError
    from tunix_rt.plan.answer import refuse_unrunnable

    started = time.perf_counter()
    flags = {
        "model.model_name_or_path": named["model"],
        "model.weights": named["weights"],
        "training.device": named["device"],
        "training.backend": named["backend"],
    }
    path = find_config(config) if config else None
    settings = load_config(path, overrides=overrides, flags=flags, report=show_conversion)
    if not settings.model.model_name_or_path:
        raise ConfigError("no model is named", fix="set model.model_name_or_path, or give --model")
    on, topology = named["on"], named["topology"]
    shared = {name: named[name] for name in ("gpus", "nodes", "network") if named[name] is not None}
    refuse_unrunnable(settings, several=bool(shared) or is_node(on))
    if on and on.strip().casefold() == ALL:
        on = ALL
    refuse_options_together(on, topology, exact=named["exact"], shared=shared)
    if named["exact"]:
        refuse_exact(settings)
    if on == ALL:
        source, shape = _model(settings)
        plan_all(settings, source, shape, as_json=as_json, started=started, flag=device_flag(named["device"], settings))
        return
    target = None if topology else resolve_target(on, settings, flag=device_flag(named["device"], settings))
    target = on_several(target, settings, shared) if target else None
    if target and named["exact"]:
        topology = exact_topology(target.target)
    if topology:
        run_topology(settings, topology, as_json, limit_seconds=named["time_limit"])
    elif target:
        source, shape = _model(settings)
        plan_one(settings, target, source, shape, as_json=as_json)


def refuse_options_together(
    on: str | None, topology: str | None, *, exact: bool, shared: dict[str, Any] | None = None
) -> None:
    from tunix_rt.errors import ConfigError

    if shared and (topology or exact or on == ALL):
        other = "--topology" if topology else "--exact" if exact else "--on all"
        raise ConfigError(
            f"--{next(iter(shared))} and {other} cannot be combined",
            fix="name one kind of GPU: --on 8xh100, or --on h100-sxm --gpus 8",
        )
    if topology and on:
        fix = "keep one: --exact --on tpu-v5e-8, or --topology v5e:2x4"
        raise ConfigError(f"--topology {topology} and --on {on} both name a device", fix=fix)
    if exact and on == ALL:
        raise ConfigError("--exact compiles for one device, which takes minutes", fix="name it: --exact --on tpu-v5e-8")


def _model(settings: "RunConfig") -> "tuple[ModelSource, ModelShape]":
    """With its progress on the terminal."""
    from tunix_rt.cli.views.progress import watching
    from tunix_rt.train.plan_inputs import find_architecture

    with watching():
        return find_architecture(settings)


# --- one device -------------------------------------------------------------------------------------------------------


def plan_one(
    settings: "RunConfig", target: "PlanTarget", source: "ModelSource", shape: "ModelShape", *, as_json: bool
) -> None:
    """Print the plan; then raise the HardwareError or DoesNotFitError of a run that would be refused."""
    from tunix_rt.cli.views import text
    from tunix_rt.cli.views.plan import disk_line, show_outlook
    from tunix_rt.plan.answer import answer, json_of
    from tunix_rt.train.plan_inputs import described, has_other_parts

    found = answer(settings, target, model=source.name, shape=shape)
    seen, known = found.outlook, found.band
    if as_json:
        print(json_of(found.value()))
    else:
        disk, shown = disk_line(found.disk_bytes, found.disk_free_bytes), known.describe() if known else ""
        multimodal = has_other_parts(source, settings)
        text.show_lines(described(shape, multimodal=multimodal))
        show_outlook(
            seen,
            found.run,
            exact=found.steps_exact,
            disk=disk,
            band=shown,
            measured=found.measured,
            cluster=found.cluster,
        )
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
    from tunix_rt.plan.answer import catalogue, catalogue_kinds, catalogue_value, json_of
    from tunix_rt.progress import phase

    kinds = catalogue_kinds(settings)
    check_device(ALL, kinds, settings, flag=flag)
    with watching(), phase("plan"):
        seen = catalogue(settings, shape, (flag,) if flag else kinds)
    seconds = time.perf_counter() - started
    if as_json:
        print(json_of(catalogue_value(seen, model=source.name, shape=shape, seconds=seconds)))
        return
    left_out = [] if "tpu" in kinds else ["TPUs are for the JAX engine: --backend jax --on all"]
    show_all(seen, seconds=seconds, left_out=left_out)
