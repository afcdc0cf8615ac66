"""Every setting of a run: `RunConfig`. Names are the ones Hugging Face users type; one typed line with its sentence each."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from tunix_rt.config.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Count = Annotated[int, Field(ge=1, le=10**9)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SAVE_MINUTES = 10.0
"""Of training, between checkpoints, where neither `save_minutes` nor `save_steps` is set."""


def _none_for(*spellings: object) -> BeforeValidator:
    """Spellings of "not set" in other trainers (`max_steps: -1` in Hugging Face's arguments)."""
    return BeforeValidator(lambda value: None if value in spellings else value)


def _same_as(table: Mapping[str, str]) -> BeforeValidator:
    """Aliases of a value: `gpu` is `cuda`, `adamw_torch` is `adamw`."""
    return BeforeValidator(lambda value: table.get(value.lower(), value.lower()) if isinstance(value, str) else value)


def _seconds(value: object) -> object:
    """A duration (`2h30m`, `90m`, `45s`) in seconds; any other value unchanged."""
    if not isinstance(value, str) or not (match := re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", value.strip())):
        return value
    parts = [int(part or 0) for part in match.groups()]
    return parts[0] * 3600 + parts[1] * 60 + parts[2] if value.strip() else value


def _only_one(value: object) -> object:
    """A list of one name is that name."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _trackers(value: object) -> object:
    """A list of names without `none`, one name as it is; one message for a name that is none."""
    given = value if isinstance(value, list | tuple) else [value]
    for name in given:
        if name not in ("none", *get_args(TrackerName)):
            expected = ", ".join(f"'{one}'" for one in ("none", *get_args(TrackerName)))
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": f"{expected}, or a list"}
            )
    return _only_one([name for name in given if name != "none"] or "none")


def _refuse_0_and_1(value: object) -> object:
    """1 would be converted to true, which saves no activations, where 0.99 saves nearly all."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value in (0, 1):
        raise ValueError("write true to checkpoint every layer, false for none, or the fraction saved, between 0 and 1")
    return value


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversions(cls, value: Any, info: ValidationInfo) -> Any:
        """`seed: yes` would become 1, and no file or tokenizer takes half a surrogate pair."""
        if isinstance(value, bool) and not cls._takes_bool(info.field_name or "", value):
            raise ValueError("not a true/false setting")
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("a NUL or half of a surrogate pair in the text")
        return value

    @classmethod
    def _takes_bool(cls, name: str, value: bool) -> bool:
        """Whether the annotation has `bool`, or a validator of the field converts it (`resume_from_checkpoint: true`)."""
        field = cls.model_fields[name]
        converters: list[Any] = [one.func for one in field.metadata if isinstance(one, BeforeValidator)]
        return bool in (field.annotation, *get_args(field.annotation)) or any(f(value) is not value for f in converters)


class Model(Section):
    model_name_or_path: str | None = None
    """Hub id, local folder, or the name of a model shipped with tunix-rt (`tiny-gemma3`). There is no default model."""
    revision: str = "main"
    """Branch, tag or commit of a hub model; resolved to a commit before loading."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` keeps architecture and size and draws the weights from the seed; never evidence of learning."""
    tokenizer_name_or_path: str | None = None
    """Folder with `tokenizer.json`, if it is not the model's."""
    implementation: Literal["auto", "tunix"] = "auto"
    """Model code of the JAX engine: `auto` is tunix-rt's own, `tunix` that of google-tunix."""


Weight = Annotated[float, Field(gt=0, le=10**6, strict=True)]


class Data(Section):
    dataset: Annotated[
        str
        | Annotated[tuple[str, ...], Field(min_length=2)]
        | Annotated[dict[str, Weight], Field(min_length=2)]
        | None,
        BeforeValidator(_only_one),
    ] = None
    """Key of a dataset (`datasets/<key>`), a file or folder, or a dataset of the Hugging Face hub (`owner/name:CONFIG/SPLIT`,
    `owner/name@COMMIT:PATH`), fetched into its cache; or a list of them, read in that order; or several with
    weights, `{a.jsonl: 3, b.jsonl: 1}`: the share of each in the rows of an epoch."""
    validation: str | None = None
    """A dataset, named like `dataset`, that is held out whole; then none of `dataset` is."""
    columns: dict[str, str] | None = None
    """Columns under other names: `{question: Problem, answer: Solution}`. Case never matters."""
    max_examples: Count | None = None
    """Read the first N records of `dataset` only."""
    skip_bad: bool = False
    """Leave out records that validation refuses one by one, and count them in the log; else they end the run."""
    format: Literal["auto", "trace", "prompt_completion", "messages", "sharegpt", "alpaca", "gsm8k", "text"] = "auto"
    """Format of a record; `auto` infers it from the keys, and refuses a record that matches two."""
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 1024
    """Tokens in a row, prompt and completion together."""
    on_overflow: Literal["error", "drop", "truncate"] = "error"
    """What to do with a trace longer than `max_length`; dropped and truncated traces are counted in the log."""
    packing: bool = True
    """Pack several traces into a row; none attends to its neighbours."""
    group_by_length: bool = False
    """Without packing: rows of similar length share a step, and need little padding."""
    completion_only_loss: bool = True
    """Train on reasoning, answer and end-of-sequence; the question is masked."""
    system_instruction: str | None = None
    """System prompt in training and evaluation: the template's system turn, or a line before the prompt."""
    chat_template: Literal["auto", "tokenizer", "gemma", "chatml", "plain"] = "auto"
    """How turns become text; `auto` is the tokenizer's own template where it has one, else `plain`."""
    reasoning_tag: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")] = "reasoning"
    """Name of the tags around the steps of a trace: `<reasoning>` and `</reasoning>`."""
    answer_tag: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")] = "answer"
    """Name of the tags around its final answer."""
    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of the traces held out of training, for the held-out loss; not used with `validation`."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # a mapping has no hash, and plans are cached by their settings

    @property
    def names(self) -> tuple[str, ...]:
        """Every name in `dataset`."""
        return (self.dataset,) if isinstance(self.dataset, str) else tuple(self.dataset or ())

    @property
    def weights(self) -> tuple[float, ...]:
        """Of each name; empty where they have none."""
        return tuple(self.dataset.values()) if isinstance(self.dataset, dict) else ()

    @property
    def key(self) -> str | None:
        """The name of the whole dataset, as runs record it."""
        return ", ".join(self.names) or None

    @property
    def holds_out(self) -> bool:
        return bool(self.validation or self.validation_fraction)

    def beyond_positions(self, positions: int) -> str | None:
        """The sentence for a `max_length` that no example can have; None where the model has as many positions."""
        if self.max_length <= positions:
            return None
        if self.packing:
            return (
                f"rows are packed to {self.max_length:,} tokens (data.max_length); "
                f"each example in them may have {positions:,}, the positions of the model"
            )
        return (
            f"data.max_length is {self.max_length:,}, and the model has {positions:,} positions: "
            f"an example may have {positions:,} tokens; set data.max_length={positions}"
        )


class Rollouts(Section):
    """The rollouts of a step of reinforcement learning: sampled at temperature 1 from the weights that the step trains."""

    prompts: Annotated[int, Field(ge=1, le=65_536)] = 32
    samples: Annotated[int, Field(ge=2, le=4096)] = 8
    max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 256
    advantage: Literal["mean", "std", "rloo"] = "mean"
    on_alarm: Literal["stop", "continue"] = "stop"


class Training(Section):
    backend: Literal["torch", "jax"] = "torch"
    """The engine."""
    method: Literal["sft", "grpo", "rft"] = "sft"
    """`grpo` trains the model on its own rollouts by their advantage, `rft` on the right ones alone. One update for each batch of
    rollouts, temperature 1: what is trained is what was sampled, so there is no ratio, clip, KL term, top-p or top-k to set."""
    rollouts: Rollouts | None = None
    """Of each step of `grpo` or `rft`: `{prompts: 32, samples: 8, max_new_tokens: 256, advantage: mean}`. The advantage of one is
    its reward less the `mean` of its prompt's, also over their deviation (`std`), or less that of the others (`rloo`). Where
    held-out questions say that the reward is gamed, the run stops after that evaluation, or goes on with `on_alarm: continue`."""
    device: Annotated[Literal["auto", "cpu", "cuda", "tpu"], _same_as({"gpu": "cuda"})] = "auto"
    """A device that is missing is an error, never a fallback. `gpu` is an alias of `cuda`."""
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"],
        _same_as(DTYPE_ALIASES),
    ] = "float32"
    """Compute dtype. With a 16-bit one the weights are kept in `master_dtype`."""
    master_dtype: Annotated[
        Literal["float32", "bfloat16"] | None, _same_as({"bf16": "bfloat16", "fp32": "float32"})
    ] = None
    """dtype of the master weights, which the optimizer updates. Default: float32, in a float64 run float64."""
    stochastic_rounding: bool = True
    """Stochastic rounding of bfloat16 weights, so that small updates are not lost."""
    optim: Annotated[
        OptimizerName,
        _same_as({"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw_8bit"}),
    ] = "adamw"
    """The optimizer; `adamw_8bit` has 8-bit optimizer states, `adafactor` a factored second moment and no first."""
    optim_in_backward: bool = False
    """Update each parameter in the backward pass and free its gradient; gradients are clipped per tensor, not globally."""
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 2e-5
    """Highest learning rate of the schedule."""
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Shape of the learning rate after warm-up; a pure function of the step."""
    warmup_steps: Annotated[float, Field(ge=0, le=10**9)] = 0
    """Steps of linear warm-up, a whole number; a value below 1 is a share of all steps."""
    warmup_from_zero: bool = False
    """Warm-up starts at 0, as in transformers: the first step changes nothing. Else at one part of the full rate."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) are not decayed."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.999
    """Decay of the second moment."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Annotated[float, Field(ge=0, le=10**6)] = 1.0
    """Gradient clipping: global norm (per tensor with `optim_in_backward`); 0 turns it off."""
    num_train_epochs: Annotated[float, Field(gt=0, le=10**6)] = 3.0
    """Passes over the rows; fractions allowed."""
    max_steps: Annotated[Count | None, _none_for(-1)] = None
    """Optimizer steps; when set, wins over `num_train_epochs`."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Rows in one forward pass, on each device."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Forward passes in one optimizer step; does not change the loss."""
    data_replicas: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Data-parallel replicas; the state is sharded over the devices of each (FSDP)."""
    gradient_checkpointing: Annotated[bool | Annotated[float, Field(gt=0, lt=1)], BeforeValidator(_refuse_0_and_1)] = (
        False
    )
    """Activation checkpointing: `true` for every layer, a number for the fraction of activations saved."""
    lora_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Train LoRA adapters of this rank instead of every parameter. Never chosen automatically."""
    lora_alpha: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Adapters are scaled by `lora_alpha / lora_rank`. Default: twice `lora_rank`."""
    lora_target_modules: Annotated[str, Field(max_length=1000)] | Annotated[tuple[str, ...], Field(min_length=1)] = (
        "all-linear"
    )
    """Modules with an adapter: a list of names (`[q_proj, v_proj]`), one regular expression that matches whole module names, or
    `all-linear`, every projection of every layer."""
    lora_dropout: Fraction = 0.0
    """Dropout of the inputs of adapters during training; a pure function of seed, step and micro-batch."""
    load_in_4bit: bool = False
    """QLoRA: the projections of the layers are kept in 4 bits (NF4, double quantization), frozen beside their adapters."""
    memory: Literal["as_written", "auto"] = "as_written"
    """`auto`: if the run does not fit, or others are faster, use the best settings that the planner finds. Rows per step,
    lengths and trained parameters do not change."""
    memory_limit_gib: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Most device memory the run may use: enforced by the allocator on a GPU, by the plan elsewhere."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the layers: faster, with less memory, after half a minute; `auto`: on a GPU, if the run is long enough."""
    deterministic: bool = False
    """Use only deterministic kernels; slower on a GPU."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: dropout, random weights, and the order of the rows unless `data_seed` is set."""
    data_seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Seed of the order of the rows and of the held-out choice."""
    eval_steps: Count | None = None
    """Held-out loss every N steps (and at the end)."""
    patience: Count | None = None
    """Stop early after N evaluations in a row without a lower held-out loss. Default: never. Needs `eval_steps`."""
    save_steps: Count | None = None
    """Checkpoint every N steps (and at the end)."""
    save_minutes: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Checkpoint after N minutes of training, less often where saving would take more than 2 % of the time. Default: 10, unless
    `save_steps` is set."""
    save_total_limit: Annotated[int, Field(ge=2, le=10**6)] = 2
    """Checkpoints kept besides the one with the lowest held-out loss; at least two, because the newest may be corrupt."""
    save_dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, _same_as(DTYPE_ALIASES)] = None
    """dtype of the weights in `final_model`. Default: as trained. They are rounded before the evaluation after training."""
    time_budget: Annotated[Annotated[float, Field(gt=0, le=10**9)] | None, BeforeValidator(_seconds)] = None
    """Save and stop before this much time has passed since the program started: seconds, or `2h30m`."""
    grace_seconds: Annotated[float, Field(ge=1, le=3600)] | None = None
    """Time to save after SIGTERM. A save that takes longer is abandoned, and the log names the last checkpoint. Default: 25, or
    what the measured step and save times need, if that is more. Ctrl-C has no limit."""
    logging_steps: Count = 10
    """A line in the text log every N steps; `metrics.jsonl` has every step."""
    resume_from_checkpoint: Annotated[
        Literal["auto"] | None,
        BeforeValidator(lambda value: "auto" if value is True else None if value is False else value),
    ] = None
    """`auto` (or true) resumes the run in the output folder from its newest checkpoint that verifies."""
    report_to: Annotated[
        Literal["none"] | TrackerName | Annotated[tuple[TrackerName, ...], Field(min_length=2)],
        BeforeValidator(_trackers),
    ] = "none"
    """Experiment trackers, besides `metrics.jsonl`: one, or a list. A tracker that fails never stops a run."""

    @field_validator("warmup_steps")
    @classmethod
    def _whole_unless_a_share(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("a number of steps must be whole; below 1 it is a fraction of all steps")
        return value

    @property
    def samples(self) -> bool:
        """Whether the model is trained on its own rollouts."""
        return self.method != "sft"

    @property
    def stops_on_alarm(self) -> bool:
        return self.rollouts is not None and self.rollouts.on_alarm == "stop"

    def rows_per_step(self, micro_batch: int) -> int:
        """Rows of the dataset in a step of micro-batches of `micro_batch` rows; of rollouts a row is a question."""
        return self.rollouts.prompts if self.rollouts else micro_batch * self.gradient_accumulation_steps

    @property
    def resolved_data_seed(self) -> int:
        """The seed of the row order and of the held-out split: `data_seed`, or `seed` where it is not set."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def trackers(self) -> tuple[str, ...]:
        """Every tracker of `report_to` once."""
        named = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        return tuple(dict.fromkeys(name for name in named if name != "none"))


class Evaluation(Section):
    enabled: bool | Literal["along"] = True
    """Generate answers before and after training and score them; `along` also generates the first three every
    `training.eval_steps`, into `eval/samples.jsonl`."""
    evalset: str | None = None
    """Key of an eval set (`evalsets/<key>.jsonl`) or its path. Default: the held-out traces."""
    max_new_tokens: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Most tokens of an answer."""
    per_device_eval_batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Batch size of generation and of the held-out loss. Default: up to 64, as many as need no more memory than a training
    step."""

    @property
    def samples_during_training(self) -> int:
        """Questions that are answered every `training.eval_steps`."""
        return 3 if self.enabled == "along" else 0


class RunConfig(Section):
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
