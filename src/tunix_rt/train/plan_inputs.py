"""The model and the device of a plan, for `tunix-rt plan` and for the dashboard. Neither torch nor jax is imported."""

from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.doctor.facts import Ask, Facts
from tunix_rt.doctor.selection import choose_device, with_virtual_devices
from tunix_rt.engines.base import refuse_unsupported_model
from tunix_rt.errors import HardwareError
from tunix_rt.models.resolve import ModelSource, resolve_architecture
from tunix_rt.plan.answer import PlanTarget
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.target import target_here
from tunix_rt.plan.trace import shape_of_any
from tunix_rt.runs.folder import model_of_run

HERE = "here"


def find_architecture(config: RunConfig) -> tuple[ModelSource, ModelShape]:
    """Only config.json is read, so a model without its weights can be planned."""
    source = resolve_architecture(model_of_run(config.model.model_name_or_path or ""), revision=config.model.revision)
    return source, trained_shape(source, config.training)


def trained_shape(source: ModelSource, training: Training) -> ModelShape:
    """The shape of a model that the engine of `training` supports; InputError for another."""
    refuse_unsupported_model(source, training.backend)
    return shape_of_any(source, training)


def target_of_facts(facts: Facts, config: RunConfig, *, where: str = HERE) -> PlanTarget:
    """The device that the settings choose on a computer with these facts."""
    try:
        choice = choose_device(Ask(device=config.training.device, backend=None), facts)  # planning needs no engine
    except HardwareError as error:
        other = "or name the device to plan for: --on rtx5090, --on all"
        raise HardwareError(error.problem, fix=f"{error.fix}; {other}", cause=error.cause) from error
    if where == HERE:
        choice = with_virtual_devices(choice, config.training.backend)
    target, free = target_here(choice, where=where), facts.host.disk_free_bytes
    return PlanTarget(target=target, kind=choice.kind, disk_free_bytes=free, here=where == HERE)
