"""Every setting of a run: `RunConfig`. Names are the ones Hugging Face users type; one typed line with its sentence each."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from tunix_rt.errors import ConfigError

Count = Annotated[int, Field(ge=1, le=10**9)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _none_for(*spellings: object) -> BeforeValidator:
    """Spellings that mean "not set" elsewhere (`max_steps: -1` in Hugging Face's arguments)."""
    return BeforeValidator(lambda value: None if value in spellings else value)


def _same_as(table: Mapping[str, str]) -> BeforeValidator:
    """Other words for a value: `gpu` is `cuda`, `adamw_torch` is `adamw`."""
    return BeforeValidator(lambda value: table.get(value.lower(), value.lower()) if isinstance(value, str) else value)


def _seconds(value: object) -> object:
    """A length of time as people write it, `2h30m`, `90m` or `45s`, in seconds; anything else as it is."""
    if not isinstance(value, str) or not (found := re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", value.strip())):
        return value
    parts = [int(part or 0) for part in found.groups()]
    return parts[0] * 3600 + parts[1] * 60 + parts[2] if value.strip() else value


def _not_an_end(value: object) -> object:
    """1 would be read as true, which keeps nothing, where 0.99 keeps nearly all."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value in (0, 1):
        raise ValueError("write true to compute every layer again, false to keep all, or a share between 0 and 1")
    return value


_TAKES_YES_OR_NO = frozenset(
    {
        "packing", "completion_only_loss", "gradient_checkpointing", "resume_from_checkpoint", "enabled",
        "stochastic_rounding", "optim_in_backward", "deterministic", "compile",
    }
)  # fmt: skip


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_it_says(cls, value: Any, info: ValidationInfo) -> Any:
        """`seed: yes` would be 1, and half a surrogate pair can be put into no file and no tokenizer."""
        if isinstance(value, bool) and info.field_name not in _TAKES_YES_OR_NO:
            raise ValueError("yes or no is not a value of this setting")
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("a NUL or half of a surrogate pair in the text")
        return value


class Model(Section):
    model_name_or_path: str | None = None
    """Hub id, local folder, or the name of a model shipped with tunix-rt (`tiny-gemma3`). There is no default model."""
    revision: str = "main"
    """Branch, tag or commit of a hub model; resolved to a commit before loading."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` keeps architecture and size and draws the weights from the seed; never evidence of learning."""
    tokenizer_name_or_path: str | None = None
    """Where `tokenizer.json` lies, if not beside the model."""
    implementation: Literal["auto", "tunix"] = "auto"
    """Whose code computes the model on the JAX engine: `auto` is tunix-rt's own, `tunix` that of google-tunix."""


class Data(Section):
    dataset: str | None = None
    """Key of a dataset (`datasets/<key>`), a file or folder, or the id of a Hugging Face dataset in the local cache."""
    format: Literal["auto", "trace", "prompt_completion", "messages", "sharegpt", "alpaca", "gsm8k"] = "auto"
    """How a record is read; `auto` takes the one reading that its keys allow, and refuses when there are two."""
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 1024
    """Tokens in a row, prompt and completion together."""
    on_overflow: Literal["error", "drop", "truncate"] = "error"
    """What becomes of a trace longer than `max_length`; what is dropped or cut is counted and said."""
    packing: bool = True
    """Several traces share a row; none of them sees its neighbours."""
    completion_only_loss: bool = True
    """Train on reasoning, answer and end-of-sequence; the question is masked."""
    system_instruction: str | None = None
    """Said before every prompt, in training and in evaluation: a line of its own, or the template's system turn."""
    chat_template: Literal["auto", "tokenizer", "gemma", "chatml", "plain"] = "auto"
    """How turns become text; `auto` is the tokenizer's own template where it has one, else `plain`."""
    reasoning_tag: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")] = "reasoning"
    """Name of the tags around the steps of a trace: `<reasoning>` and `</reasoning>`."""
    answer_tag: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")] = "answer"
    """Name of the tags around its final answer."""
    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of the traces held out of training, for the held-out loss."""


class Training(Section):
    backend: Literal["torch", "jax"] = "torch"
    """The engine."""
    device: Annotated[Literal["auto", "cpu", "cuda", "tpu"], _same_as({"gpu": "cuda"})] = "auto"
    """Asked for and not there is an error, never a fallback. `gpu` is another word for `cuda`."""
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"],
        _same_as({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}),
    ] = "float32"
    """Type of the arithmetic. The 16-bit ones keep their weights in `master_dtype`."""
    master_dtype: Annotated[
        Literal["float32", "bfloat16"] | None, _same_as({"bf16": "bfloat16", "fp32": "float32"})
    ] = None
    """Type in which weights are kept and updated: float32 unless said, and float64 in a float64 run."""
    stochastic_rounding: bool = True
    """Round updates of bfloat16 weights up or down at random, so that small ones are not lost."""
    optim: Annotated[
        Literal["adamw", "adamw_8bit", "adafactor"],
        _same_as({"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"}),
    ] = "adamw"
    """The optimizer; `adamw_8bit` keeps its moments in 8 bits, `adafactor` keeps rows and columns of the second alone."""
    optim_in_backward: bool = False
    """Update each tensor as soon as its gradient is there and drop it; clips each tensor by itself, not all together."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 2e-5
    """Highest learning rate of the schedule."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of the learning rate after warm-up; a pure function of the step."""
    warmup_steps: Annotated[float, Field(ge=0, le=10**9)] = 0
    """Steps of linear warm-up, a whole number; a value below 1 is a share of all steps."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) are not decayed."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.999
    """Decay of the second moment."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Annotated[float, Field(ge=0, le=10**6)] = 1.0
    """Gradients are scaled down to this global norm (each tensor's own when updated in backward); 0 leaves them alone."""
    num_train_epochs: Annotated[float, Field(gt=0, le=10**6)] = 3.0
    """Passes over the rows; fractions allowed."""
    max_steps: Annotated[Count | None, _none_for(-1)] = None
    """Optimizer steps; when set, wins over `num_train_epochs`."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Rows in one forward pass; on the JAX engine, of each device."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Forward passes in one optimizer step; does not change the loss."""
    data_replicas: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Copies of the whole state over which rows are split; the devices of a copy share it. For the JAX engine."""
    gradient_checkpointing: Annotated[bool | Annotated[float, Field(gt=0, lt=1)], BeforeValidator(_not_an_end)] = False
    """Recompute activations in the backward pass instead of keeping them: `true` all, a number the share that is kept."""
    lora_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Train adapters of this rank (LoRA) instead of every parameter: a remedy when those do not fit, never chosen for you."""
    memory: Literal["as_written", "auto"] = "as_written"
    """`auto`: where the run does not fit, or others are faster, take the settings that the planner finds best. Rows of a step,
    lengths and what is trained stay."""
    memory_limit_gib: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """The most that the run may take of its device; on a GPU its allocator is held to it, elsewhere the plan alone judges by
    it."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the layers: faster, with less memory, after half a minute; `auto` on a GPU where a run is long enough."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; costs some speed on a GPU."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: dropout, random weights, and the order of the rows unless `data_seed` is set."""
    data_seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed of the order of the rows and of the held-out choice."""
    eval_steps: Count | None = None
    """Held-out loss every so many steps (and at the end)."""
    save_steps: Count | None = None
    """Checkpoint every so many steps (and at the end)."""
    save_total_limit: Annotated[int, Field(ge=2, le=10**6)] = 2
    """Checkpoints kept besides the one with the lowest held-out loss; at least two, because the newest may be damaged."""
    save_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        _same_as({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}),
    ] = None
    """Type of the weights in `final_model`; unset: as they are kept. They are rounded before the evaluation after training."""
    time_budget: Annotated[Annotated[float, Field(gt=0, le=10**9)] | None, BeforeValidator(_seconds)] = None
    """Stop and save by itself before so much time has passed since the program began: seconds, or as `2h30m`."""
    grace_seconds: Annotated[float, Field(ge=1, le=3600)] = 25.0
    """Time to save and end after SIGTERM or SIGINT; what is not done by then is given up, and the last checkpoint named."""
    logging_steps: Count = 10
    """A line in the text log every so many steps; `metrics.jsonl` has every step."""
    resume_from_checkpoint: Annotated[
        Literal["auto"] | None,
        BeforeValidator(lambda value: "auto" if value is True else None if value is False else value),
    ] = None
    """`auto` (or true) continues the run in the output folder from its newest checkpoint that verifies."""
    report_to: Literal["none", "tensorboard"] = "none"
    """Where metrics go besides `metrics.jsonl`."""

    @field_validator("warmup_steps")
    @classmethod
    def _whole_unless_a_share(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("from 1 on a number of steps, which is whole")
        return value


class Evaluation(Section):
    enabled: bool | Literal["along"] = True
    """Generate answers before and after training and score them; `along` answers the first three questions every
    `training.eval_steps` too, into `eval/samples.jsonl`."""
    evalset: str | None = None
    """Key of an eval set (`evalsets/<key>.jsonl`) or its path; without one, the held-out traces are asked."""
    max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Longest answer."""
    per_device_eval_batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Questions answered at once; rows of one forward pass of the held-out loss. Unset: up to 64, as many as need no more
    memory than a training step."""

    @property
    def asked_along(self) -> int:
        """Questions that are answered while training goes on."""
        return 3 if self.enabled == "along" else 0


class RunConfig(Section):
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()


def require_runnable(config: RunConfig) -> None:
    """Refuse by name what no engine honours yet, and what a run cannot do without."""
    if not config.model.model_name_or_path:
        raise ConfigError("no model is named", fix="set model.model_name_or_path, or give --model")
    if config.model.revision == "flax":
        raise ConfigError(
            "model.revision: `flax` is a branch of msgpack weights, which are not read here",
            fix="set model.revision: main (safetensors)",
        )
    if not config.data.dataset:
        raise ConfigError("no dataset is named", fix="set data.dataset, or give --data")
    training = config.training
    asked = config.evaluation.asked_along and config.evaluation.evalset
    if training.eval_steps and not config.data.validation_fraction and not asked:
        raise ConfigError(
            "training.eval_steps: nothing is held out to measure, data.validation_fraction is 0",
            fix="set data.validation_fraction above 0, or leave training.eval_steps out",
        )
    if training.backend != "jax":
        _refuse_what_is_for_jax(config)
    for refused, problem, fix in _unfit(training):
        if refused:
            raise ConfigError(problem, fix=fix)


def _refuse_what_is_for_jax(config: RunConfig) -> None:
    """The PyTorch engine computes on one device, with models of transformers. What the JAX engine refuses is in
    `plan/jax_limits.py`."""
    if config.model.implementation != "auto":
        raise ConfigError(
            f"model.implementation: {config.model.implementation} is for the JAX engine",
            fix="set training.backend: jax, or leave model.implementation out",
        )
    if config.training.data_replicas != 1:
        raise ConfigError(
            f"training.data_replicas: {config.training.data_replicas} copies are for the JAX engine; this one has one device",
            fix="set training.backend: jax, or leave training.data_replicas out",
        )


def _default_of(name: str) -> Any:
    return Training.model_fields[name].default


def _unfit(training: Training) -> Iterator[tuple[bool, str, str]]:
    """Settings that are good by themselves and not together: (whether it is so, what, the way out)."""
    master, dtype = training.master_dtype, training.dtype
    yield (
        master == "bfloat16" and dtype != "bfloat16",
        f"training.master_dtype: weights in bfloat16 are of no use to arithmetic in {dtype}",
        "set training.dtype: bfloat16, or leave training.master_dtype out",
    )
    yield (
        master == "float32" and dtype == "float64",
        "training.master_dtype: a float64 run keeps its weights in float64",
        "leave training.master_dtype out",
    )
    yield (
        training.optim_in_backward and training.gradient_accumulation_steps > 1,
        "training.optim_in_backward: the gradients of several micro-batches have to be kept until the last",
        "set training.gradient_accumulation_steps: 1, or training.optim_in_backward: false",
    )
    yield (
        training.optim_in_backward and dtype == "float16",
        "training.optim_in_backward: a float16 step that overflows is computed again, which half an update forbids",
        "set training.dtype: bfloat16, or training.optim_in_backward: false",
    )
    yield (
        training.optim_in_backward and training.lora_rank is not None,
        "training.optim_in_backward: the gradients of adapters are small, there is nothing to save",
        "set training.optim_in_backward: false",
    )
    yield (
        training.lora_rank is not None and dtype == "float64",
        "training.lora_rank: adapters are trained in float32, which a float64 run is not",
        "set training.dtype: float32, or leave training.lora_rank out",
    )
    yield (
        master != "bfloat16" and not training.stochastic_rounding,
        "training.stochastic_rounding: only weights in bfloat16 are rounded, and these are not",
        "set training.master_dtype: bfloat16, or leave training.stochastic_rounding out",
    )
    yield (
        training.lora_rank is not None and training.save_dtype is not None,
        "training.save_dtype: a model with merged adapters is saved in float32, rounding would lose most of what they learned",
        "leave training.save_dtype out, and convert the final model with `tunix-rt export`",
    )
    unused = [n for n in ("adam_beta1", "adam_beta2", "adam_epsilon") if getattr(training, n) != _default_of(n)]
    yield (
        training.optim == "adafactor" and bool(unused),
        f"{', '.join(f'training.{name}' for name in unused)}: Adafactor has no such part",
        "leave it out, or set training.optim: adamw",
    )
    yield (
        training.lora_rank is not None and master == "bfloat16",
        "training.master_dtype: adapters are trained in float32; the frozen weights are kept in training.dtype anyway",
        "leave training.master_dtype out",
    )
