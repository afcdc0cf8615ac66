"""The answer of a plan: one value for `tunix-rt plan --json` and for the dashboard's planner page."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tunix_rt.config.capabilities import CAPABILITIES, capabilities_of
from tunix_rt.config.conflicts import require_runnable
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import ConfigError
from tunix_rt.models.secrets import refuse_addresses
from tunix_rt.plan.calibration import Band, SeenError, band_of, similar
from tunix_rt.plan.cluster import Cluster, cluster_of, refuse_cluster
from tunix_rt.plan.knobs import REPLICAS, with_copied
from tunix_rt.plan.precision import recipe_of
from tunix_rt.plan.report import Outlook, look, measured_here, steps_known, whole_run
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.solver import Proposal
from tunix_rt.plan.speed import StepTime
from tunix_rt.plan.target import Target, all_targets
from tunix_rt.plan.timing import RunTime, disk_needed_bytes
from tunix_rt.storage import to_plain

SCHEMA, ALL_SCHEMA = "tunix-rt/plan-answer/1", "tunix-rt/plan-all/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTarget:
    """A device. `kind` is the name under which runs on it are recorded; it and the disk are None for a catalogue entry."""

    target: Target
    kind: str | None = None
    disk_free_bytes: int | None = None
    here: bool = False
    """A device of this computer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan of a run on one device, or on several GPUs."""

    model: str
    shape: ModelShape
    outlook: Outlook
    run: RunTime | None
    steps_exact: bool
    """Else the steps of `run` are an upper bound."""
    disk_bytes: int
    disk_free_bytes: int | None
    similar: tuple[SeenError, ...]
    """Recorded runs like this one on this device."""
    measured: bool
    """The rate is that of this CPU, measured now."""
    cluster: Cluster | None = None
    """Of several GPUs."""

    @property
    def band(self) -> Band | None:
        return band_of(self.similar)

    def value(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        free, run = self.disk_free_bytes, self.run
        value = {"schema": SCHEMA, "model": self.model, "shape": self.shape, **outlook_value(self.outlook)}
        value |= {"run": run, "steps_exact": self.steps_exact if run else None}
        value |= {"disk_bytes": self.disk_bytes, "disk_free_bytes": free, "seen_errors": self.band}
        value |= {"active_parameters": self.shape.parameters - self.shape.idle_parameters}
        value |= {"disk_fits": None if free is None else self.disk_bytes <= free}
        return value | {"cluster": self.cluster}


def answer(settings: RunConfig, target: PlanTarget, *, model: str, shape: ModelShape) -> Answer:
    """The plan of `settings` for `model` on `target`."""
    training, seen = settings.training, look(shape, settings, target.target)
    measured = target.here and seen.target.device == "cpu"
    if measured:
        seen = measured_here(seen, shape, settings)
    alike: list[SeenError] = []
    if target.kind:
        known = {"layers": seen.plan.layers, "recipe": recipe_of(training).describe()}
        alike = similar(target.kind, training.backend, **known, parameters=seen.plan.parameters)
    return Answer(
        model=model,
        shape=shape,
        outlook=seen,
        run=whole_run(settings, seen),
        steps_exact=training.max_steps is not None or not settings.data.packing,
        disk_bytes=disk_needed_bytes(shape, settings),
        disk_free_bytes=target.disk_free_bytes,
        similar=tuple(alike),
        measured=measured,
        cluster=cluster_of(
            settings, shape, seen.target, seen.plan, seen.time, steps=steps_known(settings, seen.target)
        ),
    )


def outlook_value(seen: Outlook) -> dict[str, Any]:
    """One device as JSON. Proposals and last resorts contain the advice of the verdict."""
    return {
        "device": seen.target,
        "runs": seen.runs,
        "unable": seen.unable or None,
        "compiler_decides": bool(seen.doubt),
        "memory": seen.plan,
        "fit": {name: figure for name, figure in asdict(seen.fit).items() if name != "advice"},
        "time": seen.time,
        "proposals": _listed(seen.proposals),
        "faster": _listed(seen.faster),
        "last_resorts": seen.resorts,
    }


def _listed(proposals: Iterable[Proposal]) -> list[dict[str, Any]]:
    return [
        {name: getattr(one, name) for name in ("line", "settings", "costs", "level")}
        | {"predicted_bytes": one.plan.least_bytes, "tokens_per_second": one.time.tokens_per_second}
        for one in proposals
    ]


def json_of(value: Mapping[str, Any]) -> str:
    """`value` with all of its keys; unknown values are null."""
    return json.dumps(to_plain(value), indent=2, allow_nan=False, ensure_ascii=True)


# --- the catalogue ----------------------------------------------------------------------------------------------------


def catalogue_kinds(settings: RunConfig) -> tuple[str, ...]:
    """Kinds of accelerators that the engine of `settings` trains on."""
    return tuple(device for device in capabilities_of(settings.training).devices if device != "cpu")


def catalogue(settings: RunConfig, shape: ModelShape, kinds: tuple[str, ...], *, brief: bool = False) -> list[Outlook]:
    """The outlook for every device of these kinds in the catalogue; `brief` as for `look`."""
    return [look(shape, settings, target, brief=brief) for target in all_targets() if target.device in kinds]


def catalogue_value(seen: Iterable[Outlook], *, model: str, shape: ModelShape, seconds: float) -> dict[str, Any]:
    """What `plan --on all --json` prints."""
    value = {"schema": ALL_SCHEMA, "model": model, "shape": shape, "seconds": seconds}
    return value | {"devices": [outlook_value(one) for one in seen]}


# --- refusals ---------------------------------------------------------------------------------------------------------


def refuse_unrunnable(settings: RunConfig, *, several: bool = False) -> None:
    """Refuse settings that `train` refuses in combination, or as addresses. Dataset, model and engine need not exist yet.
    On `several` GPUs, replicas are not refused."""
    refuse_addresses(settings.model_dump())
    if several:
        settings = with_copied(settings, {REPLICAS: 1})
    model = settings.model.model_copy(update={"model_name_or_path": settings.model.model_name_or_path or "any"})
    data = settings.data.model_copy(update={"dataset": settings.data.dataset or "any"})
    require_runnable(settings.model_copy(update={"model": model, "data": data}))


def refuse_engine(target: Target, settings: RunConfig) -> None:
    """Refuse an engine that does not train on such a device, or not on several."""
    engine = capabilities_of(settings.training)
    if target.device not in engine.devices:
        able = [name for name, other in CAPABILITIES.items() if target.device in other.devices]
        raise ConfigError(
            f"--on {target.name}: the {engine.title} engine does not train on {target.device.upper()}s",
            fix=f"add --backend {' or '.join(able)}",
        )
    refuse_cluster(settings, target)


# --- figures ----------------------------------------------------------------------------------------------------------


def rounded(rate: float) -> str:
    """Two digits: a prediction of speed has no more."""
    return f"{float(f'{rate:.2g}'):,.0f}" if rate >= 9.95 else f"{rate:.1f}" if rate > 0 else "0"


def rate_range(time: StepTime) -> str:
    return f"{rounded(time.tokens / time.seconds_high)} to {rounded(time.tokens / time.seconds_low)}"
