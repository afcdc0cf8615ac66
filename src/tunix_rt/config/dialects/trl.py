"""Arguments of TRL's SFT: `trl sft --config FILE`, its command line, and a JSON of SFTConfig. Read from trl 1.16."""

import shlex
from typing import Any

from tunix_rt.config.dialects.rules import (
    IN_8_BIT,
    SPLIT,
    Given,
    Table,
    Verdict,
    dtype_name,
    files_of,
    four_bit,
    is_off,
    is_on,
    mapped,
    names_of,
    of_split,
    read_by,
    refusal,
    refused,
    without,
)
from tunix_rt.config.dialects.trainer_arguments import LAUNCH, REMOTE_CODE, TRAINER_ARGUMENTS
from tunix_rt.errors import ConfigError

TITLE = "TRL"
NO_PEFT = "`use_peft` is off: every parameter is trained"


def lora(setting: str, fallback: Any = None) -> Any:
    def read(value: Any, given: Given) -> Verdict:
        if not is_on(given.get("use_peft", False)):
            return Verdict(note=NO_PEFT)
        return Verdict({setting: value}) if value is not None else Verdict(note="not set")

    read.__doc__ = f"`{setting}` where `use_peft` is on"
    return read


def targets(value: Any, given: Given) -> Verdict:
    """`training.lora_target_modules` where `use_peft` is on"""
    if is_off(value) or not is_on(given.get("use_peft", False)):
        return Verdict(note=NO_PEFT if not is_on(given.get("use_peft", False)) else "not set")
    names = names_of(value)
    return Verdict({"training.lora_target_modules": "all-linear" if names == ["all-linear"] else names})


def peft(value: Any, given: Given) -> Verdict:
    """LoRA: `training.lora_rank`"""
    return Verdict({"training.lora_rank": given.get("lora_r", 16)}) if is_on(value) else Verdict(note="off")


def in_4_bit(value: Any, given: Given) -> Verdict:
    """`training.load_in_4bit` where `use_peft` is on"""
    peft, nested = (is_on(given.get(key, False)) for key in ("use_peft", "use_bnb_nested_quant"))
    return four_bit(value, lora=peft, nested=nested)


def max_length(value: Any, given: Given) -> Verdict:
    """`data.max_length`; longer examples are truncated"""
    if value is None:
        return refusal("name a length: every row has at most data.max_length tokens")
    return Verdict({"data.max_length": value})


def model_dtype(value: Any, given: Given) -> Verdict:
    """`training.master_dtype`, the dtype of the weights; with LoRA the frozen weights have `training.dtype`"""
    name, half = dtype_name(value), is_on(given.get("bf16", not is_on(given.get("fp16"))))
    if is_on(given.get("use_peft", False)) or name == "float32":
        return Verdict(
            note="adapters are float32, frozen weights have training.dtype" if name != "float32" else "as here"
        )
    if name == "bfloat16" and half:
        rounded = {"training.master_dtype": "bfloat16", "training.stochastic_rounding": False}
        return Verdict(rounded, "stochastic_rounding: true loses fewer small updates")
    return refusal("`dtype: float32` or `bfloat16` (with bf16: true) is the dtype of the trained weights")


def completion_only(value: Any, given: Given) -> Verdict:
    """`data.completion_only_loss`; without it, records of prompt and completion train the completion"""
    if value is None or is_on(given.get("assistant_only_loss", False)):
        return Verdict(note="by the format of the data" if value is None else "`assistant_only_loss` is on")
    return Verdict({"data.completion_only_loss": is_on(value)})


def assistant_only(value: Any, given: Given) -> Verdict:
    """`data.completion_only_loss: true`: every assistant turn is trained; off, conversations are trained whole"""
    return Verdict({"data.completion_only_loss": True}) if is_on(value) else Verdict(note="off")


def packing(value: Any, given: Given) -> Verdict:
    """`data.packing`; rows are packed with document boundaries, and examples are never split"""
    return Verdict({"data.packing": is_on(value)})


def packing_strategy(value: Any, given: Given) -> Verdict:
    """`bfd` as here; `bfd_split` and `wrapped` are refused: they split examples"""
    unused = not is_on(given.get("packing", False))
    if value in ("bfd", "ffd", None) or unused:
        return Verdict(note="packing is off" if unused else "as here")
    return refusal("examples are not split over rows: packing_strategy: bfd")


def evaluated(value: Any, given: Given) -> Verdict:
    """Refused unless `no`: the test split is named as `data.validation`"""
    if is_off(value):
        return Verdict(note="off")
    return refusal("name the held-out file, data.validation: owner/name:data/test-*, and training.eval_steps: N")


def dataset_name(value: Any, given: Given) -> Verdict:
    """`data.dataset`, with `dataset_train_split` for a dataset of the hub; a part of a split is refused"""
    if is_off(value):
        return Verdict(note="not set")
    name = of_split(str(value), given.get("dataset_train_split"))
    return Verdict({"data.dataset": name}) if name else refusal(f"`dataset_train_split`: {SPLIT}")


def train_split(value: Any, given: Given) -> Verdict:
    """A part of `data.dataset`: `owner/name:SPLIT`"""
    return Verdict(note="in data.dataset")


def mixture(value: Any, given: Given) -> Verdict:
    """`data.dataset`: `path` and `split` of each dataset; other keys of a mixture are refused"""
    if not isinstance(value, list) or not all(isinstance(one, dict) and one.get("path") for one in value):
        return Verdict(note="off") if is_off(value) else refusal("a list of datasets, each with a path")
    allowed = {"path", "split", "data_files"}
    other = sorted({key for one in value for key, inner in one.items() if inner is not None} - allowed)
    if other or not all(map(files_of, value)):
        return refusal(f"{', '.join(other) or 'split'} of a dataset: {SPLIT}")
    files = [name for one in value for name in files_of(one)]
    return Verdict({"data.dataset": files if len(files) > 1 else files[0]})


TABLE: Table = {
    **TRAINER_ARGUMENTS, **REMOTE_CODE,
    **mapped(model_name_or_path="model.model_name_or_path", model_revision="model.revision"),
    **read_by(dataset_name, "dataset_name"), **read_by(train_split, "dataset_train_split"),
    **read_by(max_length, "max_length", "max_seq_length"), **read_by(packing, "packing"), **read_by(peft, "use_peft"),
    **read_by(packing_strategy, "packing_strategy"), **read_by(model_dtype, "dtype", "torch_dtype"),
    **read_by(completion_only, "completion_only_loss"), **read_by(assistant_only, "assistant_only_loss"),
    **read_by(lora("training.lora_rank"), "lora_r"), **read_by(lora("training.lora_alpha"), "lora_alpha"),
    **read_by(lora("training.lora_dropout"), "lora_dropout"), **read_by(targets, "lora_target_modules"),
    **read_by(evaluated, "eval_strategy", "evaluation_strategy"),
    **read_by(mixture, "datasets"), **read_by(in_4_bit, "load_in_4bit"),
    **without("`eval_strategy` is off", "eval_steps dataset_test_split eval_packing"),
    **without("the fastest attention that passes its self-test is used", "attn_implementation padding_free pad_to_multiple_of"),
    **without("the tokenizer's own tokens are used", "pad_token"),
    **without("data is tokenized once, by as many processes as there are cores", "dataset_num_proc dataset_kwargs"),
    **without("rows are shuffled by training.data_seed in any case", "shuffle_dataset"),
    **without("4-bit weights always have double quantization, and are computed with in training.dtype",
              "use_bnb_nested_quant bnb_4bit_quant_storage bnb_4bit_compute_dtype"),
    **without(LAUNCH, "num_processes accelerate_config ignore_bias_buffers"),
    **without("causal language models are trained", "lora_task_type"),
    **refused("data.columns: {text: NAME}", "dataset_text_field", unless=("text",)),
    **refused("name the files: data.dataset: owner/name:CONFIG/train-*", "dataset_config"),
    **refused("files are read whole and kept as tokens on disk; leave it out", "dataset_streaming streaming"),
    **refused("the end of an example is truncated: keep_start", "truncation_mode", unless=("keep_start",)),
    **refused("the loss is the negative log-likelihood: nll", "loss_type", unless=("nll", "chunked_nll")),
    **refused("data.chat_template is tokenizer, gemma, chatml or plain", "chat_template_path"),
    **refused("the end-of-sequence token is the tokenizer's", "eos_token"),
    **refused("training.gradient_checkpointing: true needs the least memory", "activation_offloading"),
    **refused("write the keys at the top level (model_revision, dtype)", "model_init_kwargs"),
    **refused("leave it out: the auxiliary loss of the model's own code is used", "router_aux_loss_coef"),
    **refused(IN_8_BIT, "load_in_8bit"), **refused("bnb_4bit_quant_type: nf4", "bnb_4bit_quant_type", unless=("nf4",)),
    **refused("training.lora_target_modules names modules", "lora_target_parameters lora_modules_to_save"),
    **refused("adapters are plain LoRA, scaled by lora_alpha / lora_rank", "use_rslora use_dora"),
    **refused("set variables in the shell", "env"),
    **refused("data.validation_fraction: a fraction", "test_split_size"),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "data.packing": False, "data.on_overflow": "truncate", "data.validation_fraction": 0.0,
    "training.gradient_checkpointing": True, "data.completion_only_loss": True, "evaluation.enabled": False,
}  # fmt: skip
NOTES = {
    "data.completion_only_loss": "TRL trains conversations (messages) whole unless assistant_only_loss is on: set false for that",
}
"""Default -> what it cannot say."""
LORA_DEFAULTS: dict[str, Any] = {
    "training.lora_alpha": 32, "training.lora_dropout": 0.05, "training.lora_target_modules": ["q_proj", "v_proj"],
}  # fmt: skip


def implied(given: Given) -> dict[str, Any]:
    """Keys that have a default of their own, where they are absent."""
    return {} if {"bf16", "fp16"} & given.keys() else {"bf16": True}


def is_command(text: str) -> bool:
    words = text.split(maxsplit=2)
    return bool(words) and (words[0] in ("trl", "accelerate", "python", "python3") or words[0].startswith("--"))


def from_command(text: str, source: str) -> dict[str, Any]:
    """The arguments of `trl sft --key value --flag`, with `\\` before a line's end, as a mapping."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{source}: {str(error).lower()}", fix="close the quotes") from error
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    if words[0] == "trl" and words[1:2] != ["sft"]:
        raise ConfigError(
            f"{source}: `trl {' '.join(words[1:2])}`", fix="tunix-rt does supervised fine-tuning: trl sft"
        )
    given: dict[str, Any] = {}
    for word in words[first:]:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            if key in given:
                raise ConfigError(f"{source}: --{key} is given twice", fix="keep one of them")
            given[key] = [value] if equals else []
        else:
            given[key].append(word)
    return {key: True if not values else _value(values) for key, values in given.items()}


def _value(values: list[str]) -> Any:
    if len(values) > 1:
        return values
    known = {"true": True, "false": False, "none": None, "null": None}
    text = values[0]
    return known.get(text.lower(), int(text) if text.lstrip("-").isdigit() else text)
