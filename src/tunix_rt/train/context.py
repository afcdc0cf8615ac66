"""What a run has settled before its weights are loaded, and how its model, tokenizer and engine are opened."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tunix_rt.config.capabilities import CAPABILITIES
from tunix_rt.config.settings import RunConfig
from tunix_rt.data.prepare import ModelFacts, Prepared
from tunix_rt.data.tokenizer import Tokenizer, load_tokenizer
from tunix_rt.doctor.selection import DeviceChoice
from tunix_rt.engines.base import Backend, Engine, Step, StepShape, load_backend, refuse_unsupported_model
from tunix_rt.errors import HardwareError, TunixError
from tunix_rt.models.resolve import ModelSource, resolve_model, resolve_tokenizer
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.shape import Outline, outline_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.trace import shape_of_any
from tunix_rt.progress import Progress, phase
from tunix_rt.runs.folder import RunDir
from tunix_rt.runs.journal import RunJournal
from tunix_rt.runs.schemas import Batch
from tunix_rt.train.memory_report import Phases
from tunix_rt.train.preemption import Preemption
from tunix_rt.train.resume import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a process runs, beside the configuration: nothing here changes a result."""

    progress: Progress
    profile: int = 0
    """Steps to profile."""
    oom_attempt: bool = False
    """Continue where the plan predicts that the run does not fit."""
    on_step: Callable[[Step], None] = lambda step: None
    """Called after every step, once it is recorded. What it raises ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything that stages of a run share once it is planned and committed."""

    journal: RunJournal
    stop: Preemption
    options: Options
    config: RunConfig
    """As trained here: with the settings of `memory: auto`, and data replicas that divide the devices."""
    device: DeviceChoice
    gpus: frozenset[str]
    """UUIDs of the GPUs that this process uses."""
    model: ModelSource
    shape: ModelShape
    tokenizer: Tokenizer
    data: Prepared
    plan: MemoryPlan
    batch: Batch
    start: Start
    total: int
    """Steps of the whole run."""
    ends: tuple[int, ...] = ()
    """Steps that an extended run was planned for in turn, the last of them `total`."""
    phases: Phases = field(default_factory=Phases)
    """Peak memory measured so far."""

    @property
    def run(self) -> RunDir:
        return self.journal.run

    @property
    def all_saved(self) -> str:
        return f"all {self.journal.result.steps_completed} steps are saved"

    @property
    def backend(self) -> Backend:
        """The engine module."""
        return load_backend(self.config.training.backend)

    def step_shape(self) -> StepShape:
        return step_shape(self.config, self.data, self.batch)


def step_shape(config: RunConfig, data: Prepared, batch: Batch) -> StepShape:
    """The largest micro-batch of the run: no larger than the data, which a step takes whole if it has fewer rows."""
    rows = min(batch.rows, len(data.rows))
    most = config.training.gradient_accumulation_steps
    return StepShape(rows=rows, accumulation=min(most, -(-len(data.rows) // rows)), tokens=data.longest_row)


def find_model(config: RunConfig) -> tuple[ModelSource, ModelShape]:
    named = config.model
    model = resolve_model(named.model_name_or_path or "", revision=named.revision, weights=named.weights)
    refuse_unsupported_model(model, config.training.backend)
    return model, shape_of_any(model, config.training)


def find_tokenizer(config: RunConfig) -> tuple[Tokenizer, ModelFacts]:
    """The tokenizer of a configuration, and the facts about its model that the data stage needs. Loads no weights."""
    model = resolve_model(config.model.model_name_or_path or "", revision=config.model.revision, weights="random")
    return tokenizer_of(config, model, outline_of(model.config))


def tokenizer_of(config: RunConfig, model: ModelSource, shape: ModelShape | Outline) -> tuple[Tokenizer, ModelFacts]:
    named = config.model.tokenizer_name_or_path
    folder = resolve_tokenizer(named) if named else model.folder
    model_type = str(model.config["model_type"])
    facts = ModelFacts(vocabulary=shape.vocab, positions=shape.max_positions, model_type=model_type)
    return load_tokenizer(folder, model_type), facts


@phase("load the weights")
def load_engine(
    backend: Backend, model: ModelSource, shape: ModelShape, config: RunConfig, choice: DeviceChoice, step: StepShape, *,
    attempt: bool,
) -> Engine:  # fmt: skip
    """The model on its device. Refuses an engine that sees other devices or other parameters than were planned for."""
    engine = backend.load(
        model, device=choice.device, training=config.training, step=step, implementation=config.model.implementation,
        attempt=attempt,
    )  # fmt: skip
    if CAPABILITIES[config.training.backend].multi_device and len(engine.devices) != choice.count:
        raise HardwareError(
            f"the doctor counted {choice.count} x {choice.device}, the engine has {len(engine.devices)}",
            fix=f"run `tunix-rt doctor --backend {config.training.backend}`; a GPU masked for one is masked for both",
            cause="jax-sees-no-device",
        )
    if engine.parameters != shape.parameters:
        raise TunixError(
            f"the plan counted {shape.parameters:,} parameters, the loaded model has {engine.parameters:,}",
            fix="this is a defect of the planner; please report it with the model's config.json",
        )
    return engine
