"""torchtune's YAML of a fine-tuning recipe (`_component_`). Read from torchtune 0.6.1; its keys are dotted here."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunix_rt.config.dialects.rules import (
    FROZEN,
    SPLIT,
    Given,
    Table,
    Verdict,
    dtype_name,
    is_off,
    is_on,
    mapped,
    names_of,
    number,
    optimizer,
    read_by,
    refusal,
    refused,
    trackers,
    warmup_steps,
    without,
)
from tunix_rt.config.dialects.trainer_arguments import RUN_FOLDER

TITLE = "torchtune"
DATASETS = {"alpaca_dataset": "tatsu-lab/alpaca", "alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}
FORMATS = {
    "alpaca_dataset": "alpaca", "alpaca_cleaned_dataset": "alpaca", "instruct_dataset": "prompt_completion",
    "chat_dataset": "messages", "text_completion_dataset": "text",
}  # fmt: skip
MODULES = {"output_proj": "o_proj"}
MLP = ["gate_proj", "up_proj", "down_proj"]


def flattened(raw: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; references (`${batch_size}`) are replaced by `resolved`."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and value and key not in ("column_map",):
            yield from flattened(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys with `${name}` replaced by the value of that key, once."""
    flat = dict(flattened(raw))
    whole = re.compile(r"\$\{([\w.]+)\}")

    def value_of(value: Any) -> Any:
        if isinstance(value, str) and (alone := whole.fullmatch(value)):
            return flat.get(alone[1], value)
        return whole.sub(lambda one: str(flat.get(one[1], one[0])), value) if isinstance(value, str) else value

    return {key: value_of(value) for key, value in flat.items()}


def name_of(value: Any) -> str:
    return str(value).rsplit(".", 1)[-1]


def model(value: Any, given: Given) -> Verdict:
    """LoRA where its name starts with `lora_`, in 4 bits with `qlora_`. The checkpoint names the model"""
    name = name_of(value)
    if name.startswith(("dora_", "qdora_")):
        return refusal("adapters are plain LoRA: a model named lora_... or qlora_...")
    if not has_adapters(given):
        return Verdict(note="checkpointer.checkpoint_dir names the model")
    rank: dict[str, Any] = {"training.lora_rank": given.get("model.lora_rank", 8)}
    return Verdict(rank | ({"training.load_in_4bit": True} if name.startswith("qlora_") else {}))


def has_adapters(given: Given) -> bool:
    return name_of(given.get("model._component_", "")).startswith(("lora_", "qlora_"))


def in_4_bit(value: Any, given: Given) -> Verdict:
    """`training.load_in_4bit` of a `lora_` model; a `qlora_` model has it"""
    if not is_on(value):
        return Verdict(note="off")
    return Verdict({"training.load_in_4bit": True}) if has_adapters(given) else refusal(FROZEN)


def targets(value: Any, given: Given) -> Verdict:
    """`training.lora_target_modules`"""
    names = [MODULES.get(one, one) for one in given.get("model.lora_attn_modules") or []]
    names += MLP if is_on(given.get("model.apply_lora_to_mlp", False)) else []
    return Verdict({"training.lora_target_modules": names}) if names else Verdict(note="off")


def dataset(value: Any, given: Given) -> Verdict:
    """`data.dataset` and `data.format`: alpaca, instruct, chat and text_completion datasets; others are refused"""
    name = name_of(value)
    if name not in FORMATS:
        return refusal(f"datasets there are: {', '.join(FORMATS)}; or name the file: --data FILE")
    source = given.get("dataset.data_files") or given.get("dataset.source") or DATASETS.get(name)
    if source in ("json", "csv", "parquet", None):
        return refusal("name the file: dataset.data_files")
    style = given.get("dataset.conversation_style", "openai")
    kind = "sharegpt" if name == "chat_dataset" and style == "sharegpt" else FORMATS[name]
    files = names_of(source)
    columns = given.get("dataset.column_map") or {}
    if column := given.get("dataset.conversation_column", given.get("dataset.column")):
        columns = {{"messages": "messages", "sharegpt": "conversations", "text": "text"}.get(kind, "text"): column}
    ours = {{"input": "prompt", "output": "completion"}.get(own, own) if kind == "prompt_completion" else own: theirs
            for own, theirs in columns.items()}  # fmt: skip
    ours = {own: theirs for own, theirs in ours.items() if own != theirs}
    settings: dict[str, Any] = {"data.dataset": files if len(files) > 1 else files[0], "data.format": kind}
    if kind == "alpaca" and "dataset.train_on_input" not in given:
        settings["data.completion_only_loss"] = False  # the default of these two datasets
    return Verdict(settings | ({"data.columns": ours} if ours else {}))


def split(value: Any, given: Given) -> Verdict:
    """`train` as here; a part of a split is refused"""
    return Verdict(note="as here") if value in ("train", None) else refusal(SPLIT)


def train_on_input(value: Any, given: Given) -> Verdict:
    """`data.completion_only_loss`, the opposite"""
    return Verdict({"data.completion_only_loss": not is_on(value)})


def schedule(value: Any, given: Given) -> Verdict:
    """`training.lr_scheduler_type: cosine`; any other schedule is refused"""
    known = name_of(value) == "get_cosine_schedule_with_warmup"
    return (
        Verdict({"training.lr_scheduler_type": "cosine"})
        if known
        else refusal("get_cosine_schedule_with_warmup, or none")
    )


def betas(value: Any, given: Given) -> Verdict:
    """`training.adam_beta1`, `training.adam_beta2`"""
    return Verdict({"training.adam_beta1": value[0], "training.adam_beta2": value[1]})


def steps_per_epoch(value: Any, given: Given) -> Verdict:
    """`training.max_steps`: times `epochs`"""
    return (
        Verdict(note="not set")
        if value is None
        else Verdict({"training.max_steps": int(value) * int(given.get("epochs", 1))})
    )


def precision(value: Any, given: Given) -> Verdict:
    """`training.dtype`; unless LoRA is trained, the weights have it too: `training.master_dtype`"""
    name = dtype_name(value)
    lora = has_adapters(given)
    if name == "float16":
        return refusal("dtype: bf16 or fp32")
    master = (
        {"training.master_dtype": name, "training.stochastic_rounding": False}
        if name == "bfloat16" and not lora
        else {}
    )
    return Verdict({"training.dtype": name, **master})


def device(value: Any, given: Given) -> Verdict:
    """`training.device`"""
    return Verdict({"training.device": str(value).split(":")[0]})


def clip(value: Any, given: Given) -> Verdict:
    """`training.max_grad_norm`; null is 0, no clipping"""
    return Verdict({"training.max_grad_norm": 0 if value is None else number(value)})


def epochs(value: Any, given: Given) -> Verdict:
    """`training.num_train_epochs`; `max_steps_per_epoch` wins over it"""
    return Verdict({"training.num_train_epochs": number(value)})


def max_length(value: Any, given: Given) -> Verdict:
    """`data.max_length`"""
    return (
        Verdict(note="not set: data.max_length is the limit") if value is None else Verdict({"data.max_length": value})
    )


def prompt_template(value: Any, given: Given) -> Verdict:
    """without effect where it is the model family's: the tokenizer's chat template has it; any other is refused"""
    if is_off(value) or str(value).startswith("torchtune.models."):
        return Verdict(note="off" if is_off(value) else "the tokenizer's own chat template is used")
    return refusal("data.chat_template is tokenizer, gemma, chatml or plain; leave the key out")


def loss(value: Any, given: Given) -> Verdict:
    """without effect where it is a cross-entropy: the loss is that, chunked over the vocabulary; any other is refused"""
    if "crossentropy" in name_of(value).lower():
        return Verdict(note="as here, chunked over the vocabulary in any case")
    return Verdict(note="off") if is_off(value) else refusal("the loss is the cross-entropy of the target tokens")


def eval_steps(value: Any, given: Given) -> Verdict:
    """Refused unless null: held-out data is `data.validation`"""
    return Verdict(note="off") if is_off(value) else refusal("data.validation: FILE and training.eval_steps: N")


def metric_logger(value: Any, given: Given) -> Verdict:
    """`training.report_to` for WandBLogger and TensorBoardLogger; any other logger is without effect"""
    known = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}
    found = known.get(name_of(value))
    return trackers([found]) if found else Verdict(note="every step is in metrics.jsonl")


TABLE: Table = {
    **mapped(**{
        "checkpointer.checkpoint_dir": "model.model_name_or_path", "model.lora_alpha": "training.lora_alpha",
        "model.lora_dropout": "training.lora_dropout", "dataset.packed": "data.packing", "seed": "training.seed",
        "batch_size": "training.per_device_train_batch_size", "optimizer.lr": "training.learning_rate",
        "gradient_accumulation_steps": "training.gradient_accumulation_steps", "optimizer.eps": "training.adam_epsilon",
        "optimizer.weight_decay": "training.weight_decay",
        "optimizer_in_bwd": "training.optim_in_backward", "compile": "training.compile",
        "enable_activation_checkpointing": "training.gradient_checkpointing", "log_every_n_steps": "training.logging_steps",
        "dataset.new_system_prompt": "data.system_instruction", "batch_size_val": "evaluation.per_device_eval_batch_size",
    }),
    **read_by(model, "model._component_"), **read_by(in_4_bit, "model.quantize_base"),
    **read_by(targets, "model.lora_attn_modules", "model.apply_lora_to_mlp"),
    **read_by(dataset, "dataset._component_"), **read_by(split, "dataset.split"), **read_by(clip, "clip_grad_norm"),
    **read_by(train_on_input, "dataset.train_on_input"), **read_by(optimizer, "optimizer._component_"),
    **read_by(warmup_steps, "lr_scheduler.num_warmup_steps"),
    **read_by(schedule, "lr_scheduler._component_"), **read_by(betas, "optimizer.betas"), **read_by(device, "device"),
    **read_by(steps_per_epoch, "max_steps_per_epoch"), **read_by(precision, "dtype"), **read_by(epochs, "epochs"),
    **read_by(max_length, "tokenizer.max_seq_len"), **read_by(prompt_template, "tokenizer.prompt_template"),
    **read_by(loss, "loss._component_"), **read_by(eval_steps, "run_val_every_n_steps"),
    **without("read with the model or the dataset it belongs to", "model.lora_rank dataset.source dataset.data_files "
              "dataset.conversation_style dataset.conversation_column dataset.column_map dataset.column"),
    **without("the tokenizer.json of the model folder is used", "tokenizer._component_ tokenizer.path "
              "tokenizer.merges_file"),
    **without("model folders of transformers are read and written", "checkpointer._component_ checkpointer.checkpoint_files "
              "checkpointer.recipe_checkpoint checkpointer.adapter_checkpoint checkpointer.model_type "
              "checkpointer.checkpoint_files.filename_format checkpointer.checkpoint_files.max_filename "
              "checkpointer.safe_serialization save_adapter_weights_only epochs_to_save save_last_epoch_only"),
    **without(RUN_FOLDER, "output_dir checkpointer.output_dir log_dir"),
    **without("rows are shuffled by training.data_seed in any case", "shuffle"),
    **without("the loss is the cross-entropy, chunked over the vocabulary in any case", "loss.num_output_chunks "
              "loss.ignore_index"),
    **without("one fused update is used where it exists", "optimizer.fused optimizer.foreach"),
    **read_by(metric_logger, "metric_logger._component_"),
    **without("every step is in metrics.jsonl", "metric_logger.log_dir metric_logger.project "
              "metric_logger.name metric_logger.output_dir metric_logger.filename log_peak_memory_stats log_level"),
    **without("`tunix-rt train --profile N` profiles", "profiler._component_ profiler.enabled profiler.output_dir profiler.cpu "
              "profiler.cuda profiler.xpu profiler.profile_memory profiler.with_stack profiler.record_shapes "
              "profiler.with_flops profiler.wait_steps profiler.warmup_steps profiler.active_steps profiler.num_cycles"),
    **without("`run_val_every_n_steps` is off", "dataset_val._component_ dataset_val.split dataset_val.source "
              "dataset_val.data_files"),
    **without("names of the recipe's own", "recipe my_component model_name"),
    **refused("resume the run in its own folder: --resume", "resume_from_checkpoint"),
    **refused("training.lora_target_modules: [q_proj, v_proj]: the head has no adapter", "model.apply_lora_to_output"),
    **refused("quantization-aware training: a lora_ or qlora_ model", "quantizer._component_"),
    **refused("adapters are plain LoRA", "model.use_dora"),
    **refused("training.gradient_checkpointing: true needs the least memory", "enable_activation_offloading"),
    **refused("FSDP shards over all devices: leave the key out, and start with --nproc gpu (JAX: training.backend: jax)",
              "tensor_parallel_dim tensor_parallel_plan context_parallel_dim data_parallel_shard_dim "
              "data_parallel_replicate_dim fsdp_cpu_offload custom_sharded_layers", unless=(1, -1)),
    **refused("fine-tuning recipes of full or lora models", "teacher_model._component_ ref_checkpointer._component_ kd_ratio"),
    **refused("training.dtype: bfloat16", "enable_fp8_training fp8_recipe_name"),
    **refused("the loss is the mean over target tokens", "loss.label_smoothing"),
    **refused("set lr, betas, eps and weight_decay", "optimizer.amsgrad optimizer.maximize"),
    **refused("one cosine cycle", "lr_scheduler.num_cycles", unless=(0.5,)),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "data.packing": False, "data.validation_fraction": 0.0, "training.lr_scheduler_type": "constant",
    "training.weight_decay": 0.01, "training.max_grad_norm": 0.0, "evaluation.enabled": False,
}  # fmt: skip
LORA_DEFAULTS: dict[str, Any] = {}
NOTES: dict[str, str] = {}


def implied(given: Given) -> dict[str, Any]:
    return {}
