"""Axolotl's YAML: `axolotl train FILE`. Read from axolotl 0.19."""

from typing import Any

from tunix_rt.config.dialects.rules import (
    IN_8_BIT,
    SPLIT,
    Given,
    Table,
    Verdict,
    chat_template,
    files_of,
    four_bit,
    is_off,
    is_on,
    mapped,
    number,
    optimizer,
    read_by,
    refusal,
    refused,
    save_total_limit,
    scheduler,
    steps_or_share,
    trackers,
    warm_up,
    warmup_ratio,
    warmup_steps,
    without,
)
from tunix_rt.config.dialects.trainer_arguments import (
    CHECKPOINTS,
    LAUNCH,
    NOT_UPLOADED,
    NOT_WITHOUT_HELDOUT,
    OWN_FSDP,
    REMOTE_CODE,
    RUN_FOLDER,
    SHARDING,
    max_steps,
    resume,
)

TITLE = "Axolotl"
TEMPLATES = {"gemma": "gemma", "chatml": "chatml", "tokenizer_default": "tokenizer"}
NO_ADAPTER = "`adapter` is not set: every parameter is trained"
FORMATS = {
    "alpaca": "alpaca", "chat_template": "messages", "sharegpt": "sharegpt", "completion": "text",
    "gsm8k": "prompt_completion",
}  # fmt: skip
"""Type of a dataset, up to its first dot or colon -> our format."""
DATASET_KEYS = "path type data_files ds_type split field field_messages message_property_mappings message_field_role "\
    "message_field_content chat_template roles_to_train train_on_eos roles field_human field_model conversation"  # fmt: skip


def trained_parts(value: Any, given: Given) -> Verdict:
    """`data.completion_only_loss`, the opposite"""
    return Verdict({"data.completion_only_loss": not is_on(value)})


def _refusal_of(one: Any, given: Given) -> str:
    """Why a dataset of the list is refused; empty if it is not."""
    if not isinstance(one, dict) or not one.get("path"):
        return "each dataset is a mapping with a path"
    if other := sorted(key for key, inner in one.items() if key not in DATASET_KEYS.split() and not is_off(inner)):
        return f"{', '.join(other)} of a dataset: data.dataset names files and data.columns their columns"
    if not files_of(one):
        return SPLIT
    if not isinstance(one.get("type"), str) or _kind(one) not in FORMATS:
        return f"a dataset has the type {', '.join(FORMATS)}; other columns: data.columns: {{prompt: NAME, completion: NAME}}"
    if one.get("roles_to_train", ["assistant"]) not in (["assistant"], ["gpt"], ["assistant", "gpt"]):
        return "every assistant turn is trained: roles_to_train: [assistant]"
    if one.get("train_on_eos", "turn") not in ("turn", "all", "last"):
        return "the end of every trained turn is trained: train_on_eos: turn"
    return ""


def _kind(one: Any) -> str:
    return str(one["type"]).split(".")[0].split(":")[0]


def _format(one: Any) -> tuple[str, dict[str, str]]:
    """Format and columns of a dataset."""
    kind, names = FORMATS[_kind(one)], one.get("message_property_mappings") or {}
    role = names.get("role", one.get("message_field_role", "role"))
    column = one.get("field_messages", "messages")
    if kind == "messages" and role == "from":
        kind = "sharegpt"
    usual = {"messages": "messages", "sharegpt": "conversations", "text": "text"}.get(kind)
    theirs = one.get("field", "text") if kind == "text" else column
    wrong = kind == "sharegpt" and "field_messages" not in one
    return kind, {usual: theirs} if usual and usual != theirs and not wrong else {}


def datasets(value: Any, given: Given) -> Verdict:
    """`data.dataset`, `data.format`, `data.columns`: types alpaca, chat_template, sharegpt, completion, gsm8k"""
    if not isinstance(value, list) or not value:
        return refusal("a list of datasets, each with path and type")
    if wrong := next(filter(None, (_refusal_of(one, given) for one in value)), ""):
        return refusal(wrong)
    kinds = [_format(one) for one in value]
    if any(kind != kinds[0] for kind in kinds):
        return refusal(
            "the datasets of a run have one format and the same columns: import them first, tunix-rt data import"
        )
    (kind, columns), *_ = kinds
    files = [name for one in value for name in files_of(one)]
    settings: dict[str, Any] = {"data.dataset": files if len(files) > 1 else files[0], "data.format": kind}
    if own := {one["chat_template"] for one in value if one.get("chat_template")}:
        settings |= chat_template(str(sorted(own)[0]), TEMPLATES, "jinja alpaca metharme").settings
    note = "prompts are rendered by data.chat_template, without Axolotl's instruction text" if kind == "alpaca" else ""
    return Verdict(settings | ({"data.columns": columns} if columns else {}), note)


def special_tokens(value: Any, given: Given) -> Verdict:
    """without effect for `pad_token`: padding is never trained; other tokens are the tokenizer's own, and refused here"""
    if not isinstance(value, dict) or all(key == "pad_token" or is_off(token) for key, token in value.items()):
        return Verdict(note="off" if is_off(value) else "padding is never trained")
    return refusal("the special tokens are the tokenizer's own; leave out all but pad_token")


def held_out_files(value: Any, given: Given) -> Verdict:
    """`data.validation`: one dataset"""
    if is_off(value):
        return Verdict(note="not set")
    files = [name for one in value for name in files_of(one)]
    return Verdict({"data.validation": files[0]}) if len(files) == 1 else refusal("data.validation names one dataset")


def held_out(value: Any, given: Given) -> Verdict:
    """`data.validation_fraction`; a number of examples is refused"""
    share = number(value)
    return (
        Verdict({"data.validation_fraction": share}) if share < 1 else refusal("a fraction below 1, or data.validation")
    )


def template(value: Any, given: Given) -> Verdict:
    """`data.chat_template`; the template of a model family is the tokenizer's own"""
    return chat_template(str(value), TEMPLATES, "jinja alpaca metharme")


def brain_float(value: Any, given: Given) -> Verdict:
    """`training.dtype: bfloat16` and, unless LoRA is trained, `training.master_dtype: bfloat16`; `auto` counts as true"""
    if is_off(value):
        return Verdict(note="off")
    weights: dict[str, Any] = {"training.dtype": "bfloat16"}
    if is_off(given.get("adapter")):
        weights |= {"training.master_dtype": "bfloat16", "training.stochastic_rounding": False}
    return Verdict(weights, "bfloat16 is assumed where `auto` looks at the GPU" if value == "auto" else "")


def float16(value: Any, given: Given) -> Verdict:
    """`training.dtype: float16`; `auto` and false are off"""
    return Verdict({"training.dtype": "float16"}) if is_on(value) else Verdict(note="off")


def adapter(value: Any, given: Given) -> Verdict:
    """`lora` is `training.lora_rank`, `qlora` with `training.load_in_4bit`; any other adapter is refused"""
    if is_off(value):
        return Verdict(note="every parameter is trained")
    if value not in ("lora", "qlora"):
        return refusal("adapter: lora or qlora")
    return Verdict(
        {"training.lora_rank": given.get("lora_r", 8)} | ({"training.load_in_4bit": True} if value == "qlora" else {})
    )


def in_4_bit(value: Any, given: Given) -> Verdict:
    """`training.load_in_4bit` where `adapter` is set"""
    if not is_on(value) and given.get("adapter") == "qlora":
        return refusal("adapter: lora keeps the frozen weights in 16 bits")
    return four_bit(value, lora=not is_off(given.get("adapter")), nested=True)


def lora(setting: str) -> Any:
    def read(value: Any, given: Given) -> Verdict:
        if is_off(given.get("adapter")):
            return Verdict(note=NO_ADAPTER)
        return Verdict({setting: value}) if value is not None else Verdict(note="not set")

    read.__doc__ = f"`{setting}` where `adapter` is set"
    return read


def targets(value: Any, given: Given) -> Verdict:
    """`training.lora_target_modules`; `lora_target_linear` is all-linear"""
    if is_off(given.get("adapter")) or is_off(value):
        return Verdict(note=NO_ADAPTER if is_off(given.get("adapter")) else "not set")
    if is_on(given.get("lora_target_linear", False)):
        return Verdict({"training.lora_target_modules": "all-linear"})
    return Verdict({"training.lora_target_modules": value})


def eval_steps(value: Any, given: Given) -> Verdict:
    """`training.eval_steps` where examples are held out"""
    if is_off(given.get("val_set_size")) and is_off(given.get("test_datasets")):
        return Verdict(note="nothing is held out: `val_set_size` is 0")
    return steps_or_share("training.eval_steps", NOT_WITHOUT_HELDOUT).read(value, given)


def checkpointing(value: Any, given: Given) -> Verdict:
    """`training.gradient_checkpointing`; offload modes are refused"""
    if isinstance(value, str) and value not in ("true", "false"):
        return refusal("gradient_checkpointing: true")
    return Verdict({"training.gradient_checkpointing": is_on(value)})


def compiled(value: Any, given: Given) -> Verdict:
    """`training.compile`"""
    return Verdict({"training.compile": value if value == "auto" else is_on(value)})


def excess(value: Any, given: Given) -> Verdict:
    """`data.on_overflow`: drop, truncate; `raise` is error"""
    return Verdict({"data.on_overflow": "error" if value == "raise" else value or "drop"})


TRACKER_KEYS = {
    "use_tensorboard": "tensorboard", "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow",
    "mlflow_tracking_uri": "mlflow", "use_trackio": "trackio", "trackio_project_name": "trackio",
}  # fmt: skip
"""Key -> the tracker that it turns on."""


def used_trackers(value: Any, given: Given) -> Verdict:
    """`training.report_to`; project and address are the tracker's own environment variables"""
    used = dict.fromkeys(name for key, name in TRACKER_KEYS.items() if not is_off(given.get(key)))
    off = {name for key, name in TRACKER_KEYS.items() if key.startswith("use_") and given.get(key) is False}
    wanted = [name for name in used if name not in off]
    return trackers(wanted) if wanted and not is_off(value) else Verdict(note="off")


def patience(value: Any, given: Given) -> Verdict:
    """`training.patience`"""
    return Verdict(note="off") if is_off(value) else Verdict({"training.patience": value})


TABLE: Table = {
    **mapped(
        base_model="model.model_name_or_path", revision_of_model="model.revision", sequence_len="data.max_length",
        tokenizer_config="model.tokenizer_name_or_path", sample_packing="data.packing",
        micro_batch_size="training.per_device_train_batch_size", num_epochs="training.num_train_epochs",
        gradient_accumulation_steps="training.gradient_accumulation_steps", learning_rate="training.learning_rate",
        weight_decay="training.weight_decay", adam_beta1="training.adam_beta1", adam_beta2="training.adam_beta2",
        adam_epsilon="training.adam_epsilon", max_grad_norm="training.max_grad_norm", seed="training.seed",
        group_by_length="data.group_by_length", default_system_message="data.system_instruction",
        eval_batch_size="evaluation.per_device_eval_batch_size", logging_steps="training.logging_steps",
    ),
    **read_by(datasets, "datasets"), **read_by(held_out_files, "test_datasets"), **read_by(held_out, "val_set_size"),
    **read_by(special_tokens, "special_tokens"),
    **read_by(trained_parts, "train_on_inputs"), **read_by(template, "chat_template"), **read_by(optimizer, "optimizer"),
    **read_by(scheduler, "lr_scheduler"), **read_by(warmup_steps, "warmup_steps"), **read_by(max_steps, "max_steps"),
    **read_by(warmup_ratio, "warmup_ratio"), **read_by(brain_float, "bf16", "bfloat16"), **read_by(adapter, "adapter"),
    **read_by(in_4_bit, "load_in_4bit"), **REMOTE_CODE,
    **read_by(float16, "fp16", "float16"), **read_by(lora("training.lora_rank"), "lora_r"),
    **read_by(lora("training.lora_alpha"), "lora_alpha"), **read_by(lora("training.lora_dropout"), "lora_dropout"),
    **read_by(targets, "lora_target_modules", "lora_target_linear"), **read_by(eval_steps, "eval_steps"),
    **read_by(checkpointing, "gradient_checkpointing"), **read_by(compiled, "torch_compile"),
    **read_by(excess, "excess_length_strategy"), **read_by(patience, "early_stopping_patience"),
    **read_by(save_total_limit, "save_total_limit"), **read_by(resume, "resume_from_checkpoint"),
    "save_steps": steps_or_share("training.save_steps", CHECKPOINTS),
    **without(RUN_FOLDER, "output_dir auto_resume_from_checkpoints"),
    **without("the model's own config.json names its classes", "model_type type_of_model tokenizer_type base_model_config "
              "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
              "processor_type tokenizer_use_fast tokenizer_legacy"),
    **without(CHECKPOINTS, "saves_per_epoch save_strategy save_safetensors save_first_step save_only_model"),
    **without(NOT_WITHOUT_HELDOUT, "evals_per_epoch eval_strategy evaluation_strategy eval_sample_packing eval_table_size "
              "eval_max_new_tokens eval_sequence_len eval_causal_lm_metrics do_causal_lm_eval do_bench_eval"),
    **read_by(used_trackers, *TRACKER_KEYS),
    **without("every step is in metrics.jsonl; trackers take their own environment variables (WANDB_ENTITY, "
              "MLFLOW_TRACKING_URI)", "wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model wandb_mode "
              "mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace "
              "comet_project_name comet_experiment_key comet_mode comet_online "
              "trackio_run_name trackio_space_id use_otel_metrics include_tokens_per_second include_tkps"),
    **without("the fastest attention that passes its self-test is used", "flash_attention sdp_attention xformers_attention "
              "flex_attention eager_attention sage_attention attn_implementation flash_attn_cross_entropy flash_attn_rms_norm "
              "flash_attn_fuse_mlp flash_optimum sdpa_varlen batch_flattening"),
    **without("kernels are chosen and checked by tunix-rt", "lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
              "lora_embedding_kernel chunked_cross_entropy chunked_cross_entropy_num_chunks liger_rope liger_rms_norm "
              "liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_cross_entropy cut_cross_entropy "
              "tiled_mlp torch_compile_backend torch_compile_mode gradient_checkpointing_kwargs"),
    **without("tokens are prepared once and kept in a cache", "dataset_prepared_path dataset_processes dataset_num_proc "
              "dataset_keep_in_memory dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor "
              "remove_unused_columns pad_to_sequence_len pad_to_multiple_of sample_packing_group_size sample_packing_bin_size "
              "sample_packing_eff_est sample_packing_sequentially total_num_tokens shuffle_merged_datasets "
              "shuffle_before_merging_datasets multipack_real_batches"),
    **without("float32 is what remains without bf16 and fp16", "float32"),
    **without("matmuls of float32 have full precision; training.dtype: bfloat16 is the faster way", "tf32"),
    **without("`rl` is off", "trl vllm rl_beta dpo_beta orpo_alpha simpo_gamma cpo_alpha"),
    **without(LAUNCH, "ddp ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters "
              "local_rank world_size device device_map use_ray ray_num_workers"),
    **without(NOT_UPLOADED, "hub_model_id hub_strategy hub_revision push_dataset_to_hub hf_use_auth_token"),
    **without("memory is planned before training", "gc_steps gc_collect_steps torch_empty_cache_steps low_cpu_mem_usage "
              "gpu_memory_limit max_memory lora_on_cpu"),
    **without("the checkpoint with the lowest held-out loss is kept: `tunix-rt export --best`", "load_best_model_at_end "
              "metric_for_best_model greater_is_better"),
    **without("no effect on training", "strict debug profiler_steps generate_samples "
              "num_generation_samples gradio_title gradio_share gradio_max_new_tokens gradio_temperature"),
    **without(OWN_FSDP, "fsdp_config fsdp_version fsdp_final_state_dict_type"),
    **refused(SHARDING, "fsdp deepspeed deepcompile dp_shard_size dp_replicate_size tensor_parallel_size "
              "context_parallel_size sequence_parallel_degree", unless=(1,)),
    **refused(IN_8_BIT, "load_in_8bit gptq"),
    **refused("training.load_in_4bit is NF4 with double quantization, as Axolotl's default is", "bnb_config_kwargs"),
    **refused("tunix-rt does supervised fine-tuning; leave the key out", "rl reward_model process_reward_model"),
    **refused("training.patience counts every decrease of the held-out loss; leave the key out", "early_stopping_threshold"),
    **refused("training.patience ends a run by its held-out loss; leave the key out", "loss_watchdog_threshold"),
    **without("`loss_watchdog_threshold` is off", "loss_watchdog_patience"),
    **refused("every token attends to every token before it in its example; leave the key out", "s2_attention"),
    **refused("train plain text with type: completion", "pretraining_dataset streaming"),
    **refused("tunix-rt never runs code of a model repository; leave the key out", "plugins trainer_cls"),
    **refused("export the adapter merged first, then train that model", "lora_model_dir relora"),
    **refused("adapters are plain LoRA, scaled by lora_alpha / lora_rank", "peft_use_dora peft_use_rslora peft_init_lora_weights "
              "loraplus_lr_ratio peft_layers_to_transform peft_layers_pattern lora_fan_in_fan_out peft"),
    **refused("training.lora_target_modules names modules", "lora_modules_to_save lora_target_parameters"),
    **refused("the tokenizer is used as it is", "tokens added_tokens_overrides resize_token_embeddings_to_32x eot_tokens "
              "fix_untrained_tokens"),
    **refused("data.chat_template is tokenizer, gemma, chatml or plain", "chat_template_jinja chat_template_kwargs"),
    **refused("every parameter is trained, or LoRA adapters", "unfrozen_parameters lisa_n_layers"),
    **refused("leave it out: embeddings are trained without noise", "neftune_noise_alpha noisy_embedding_alpha"),
    **refused("set learning rate and betas by their own keys", "optim_args optim_target_modules lr_scheduler_kwargs "
              "cosine_min_lr_ratio cosine_constant_lr_ratio lr_groups lr_quadratic_warmup embedding_lr embedding_lr_scale "
              "adam_beta3 adam_epsilon2 lr_div_factor"),
    **refused("the model's own config.json is used", "overrides_of_model_config overrides_of_model_kwargs rope_scaling "
              "model_config"),
    **refused("training.dtype: bfloat16", "fp8 qat quantization"),
    **refused("training.gradient_checkpointing: true needs the least memory", "activation_offloading layer_offloading "
              "selective_checkpointing"),
    **refused("the loss is the cross-entropy of the target tokens", "use_eaft"),
    **refused("`training.memory: auto` finds a batch size that fits before training", "auto_find_batch_size"),
    **refused("micro_batch_size and gradient_accumulation_steps", "batch_size"),
    **refused("every row is trained once per epoch", "dataloader_drop_last curriculum_sampling"),
    **refused("select the records first, with tunix-rt data import", "dataset_exact_deduplication min_sample_len "
              "dataset_shard_num"),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "data.max_length": 512, "data.packing": False, "data.on_overflow": "drop", "data.validation_fraction": 0.0,
    "training.per_device_train_batch_size": 1, "training.num_train_epochs": 1.0, "training.lr_scheduler_type": "cosine",
    **warm_up(0.03), "evaluation.enabled": False,
}  # fmt: skip
LORA_DEFAULTS: dict[str, Any] = {}
NOTES = {"training.warmup_steps": "3 % of the steps; Axolotl has at most 100"}


def implied(given: Given) -> dict[str, Any]:
    """Keys that have a default of their own, where they are absent."""
    return {} if {"bf16", "bfloat16", "fp16", "float16", "float32"} & given.keys() else {"bf16": "auto"}
