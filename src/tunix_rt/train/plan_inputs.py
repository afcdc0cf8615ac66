"""The model and the device of a plan, for `tunix-rt plan` and for the dashboard. Neither torch nor jax is imported."""

from tunix_rt.config.settings import RunConfig, Training
from tunix_rt.doctor.facts import Ask, Facts
from tunix_rt.doctor.selection import choose_device, with_virtual_devices
from tunix_rt.engines.base import refuse_unsupported_model
from tunix_rt.errors import HardwareError, InputError
from tunix_rt.models.multimodal import text_config
from tunix_rt.models.resolve import ModelSource, resolve_architecture
from tunix_rt.plan.answer import PlanTarget
from tunix_rt.plan.fit import TRACED_SAFETY_SHARE
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.target import target_here
from tunix_rt.plan.trace import shape_of_any
from tunix_rt.runs.folder import model_of_run
from tunix_rt.storage import read_json

HERE = "here"


def find_architecture(config: RunConfig) -> tuple[ModelSource, ModelShape]:
    """Only config.json is read, so a model without its weights can be planned."""
    source = resolve_architecture(model_of_run(config.model.model_name_or_path or ""), revision=config.model.revision)
    return source, trained_shape(source, config.training)


def trained_shape(source: ModelSource, training: Training) -> ModelShape:
    """The shape of a model that the engine of `training` supports; InputError for another."""
    refuse_unsupported_model(source, training.backend)
    return shape_of_any(source, training)


def described(shape: ModelShape, *, multimodal: bool) -> list[str]:
    """What a plan and the log of a run state of a model: other parts than the text model, a traced plan, experts."""
    lines = []
    if multimodal:
        lines.append(
            "Multimodal checkpoint: the text model trains; vision and audio towers are not loaded, and saved unchanged"
        )
    if shape.trace is not None:
        lines.append(
            f"Plan: model_type {shape.model_type} has no exact plan; a step was traced by PyTorch, and {TRACED_SAFETY_SHARE:.0%} "
            "of the prediction is added to the margin"
        )
    if idle := shape.idle_parameters:
        active = f"{shape.parameters - idle:,} of {shape.parameters:,}"
        lines.append(f"Experts: {active} parameters are active for a token")
    return lines


def has_other_parts(source: ModelSource, config: RunConfig) -> bool:
    """Whether the model is the text model of a multimodal checkpoint, by its config.json alone."""
    whole = read_json(source.folder / "config.json", InputError, fix="fetch the model again")
    return config.model.weights == "pretrained" and isinstance(whole, dict) and text_config(whole) is not whole


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
