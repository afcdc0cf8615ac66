"""The arguments of Hugging Face's Trainer, which TRL and LLaMA-Factory take. Read from transformers 5.22 and 4.57."""

from typing import Any

from tunix_rt.config.dialects.rules import (
    Given,
    Table,
    Verdict,
    is_off,
    is_on,
    mapped,
    optimizer,
    read_by,
    refusal,
    refused,
    report_to,
    save_total_limit,
    scheduler,
    steps_or_share,
    warmup_ratio,
    warmup_steps,
    without,
)

NOT_WITHOUT_HELDOUT = "the held-out loss is computed at the end of training; training.eval_steps sets more"
CHECKPOINTS = "a checkpoint is saved every 10 minutes and at the end, unless training.save_steps is set"
RUN_FOLDER = "the run folder is given on the command line: --output DIR"
NEVER_RUN = "tunix-rt never runs code of a model repository, and the model type is not known here; leave the key out"
LAUNCH = "processes are those of the launch: --nproc, torchrun, or one"
OWN_FSDP = "above one process tunix-rt shards by FSDP with settings of its own"
NOT_UPLOADED = "nothing is uploaded: tunix-rt push does that afterwards"
SHARDING = "FSDP shards over all devices: leave the key out, and start with --nproc gpu (JAX: training.backend: jax)"


def remote_code(value: Any, given: Given) -> Verdict:
    """without effect where config.json of the model is here or its family known: remote code is never run; else refused"""
    return Verdict(note="off") if is_off(value) else refusal(NEVER_RUN)


REMOTE_CODE: Table = read_by(remote_code, "trust_remote_code")


def max_steps(value: Any, given: Given) -> Verdict:
    """`training.max_steps`; -1 is not set"""
    return Verdict(note="not set") if value in (-1, None) else Verdict({"training.max_steps": value})


def half(value: Any, given: Given) -> Verdict:
    """`training.dtype: bfloat16`, with float32 master weights"""
    return Verdict({"training.dtype": "bfloat16"}) if is_on(value) else Verdict(note="off")


def float16(value: Any, given: Given) -> Verdict:
    """`training.dtype: float16`, with float32 master weights"""
    return Verdict({"training.dtype": "float16"}) if is_on(value) else Verdict(note="off")


def cpu(value: Any, given: Given) -> Verdict:
    """`training.device: cpu`"""
    return Verdict({"training.device": "cpu"}) if is_on(value) else Verdict(note="off")


def resume(value: Any, given: Given) -> Verdict:
    """`training.resume_from_checkpoint`; a path is refused: a run resumes in its own folder"""
    if is_off(value):
        return Verdict(note="off")
    if isinstance(value, bool):
        return Verdict({"training.resume_from_checkpoint": "auto"})
    return refusal("a run resumes in its own folder: tunix-rt train FILE --output RUN --resume")


def save_steps(value: Any, given: Given) -> Verdict:
    """`training.save_steps` where `save_strategy` is steps, its default"""
    if str(given.get("save_strategy", "steps")) not in ("steps", "SaveStrategy.STEPS"):
        return Verdict(note=CHECKPOINTS)
    return steps_or_share("training.save_steps", CHECKPOINTS).read(value, given)


def grouped(value: Any, given: Given) -> Verdict:
    """`data.group_by_length`"""
    return Verdict({"data.group_by_length": True}) if is_on(value) else Verdict(note="off")


def sampling(value: Any, given: Given) -> Verdict:
    """`data.group_by_length` for `group_by_length`; `random` as here; any other strategy is refused"""
    if value in (None, "random"):
        return Verdict(note="as here")
    return grouped(True, given) if value == "group_by_length" else refusal("rows are shuffled: random")


TRAINER_ARGUMENTS: Table = {
    **mapped(
        per_device_train_batch_size="training.per_device_train_batch_size", num_train_epochs="training.num_train_epochs",
        learning_rate="training.learning_rate", weight_decay="training.weight_decay", adam_beta1="training.adam_beta1",
        adam_beta2="training.adam_beta2", adam_epsilon="training.adam_epsilon", max_grad_norm="training.max_grad_norm",
        gradient_accumulation_steps="training.gradient_accumulation_steps", seed="training.seed",
        data_seed="training.data_seed", gradient_checkpointing="training.gradient_checkpointing",
        full_determinism="training.deterministic", torch_compile="training.compile",
        per_device_eval_batch_size="evaluation.per_device_eval_batch_size",
    ),
    "logging_steps": steps_or_share("training.logging_steps", "metrics.jsonl has every step"),
    **read_by(max_steps, "max_steps"), **read_by(optimizer, "optim"), **read_by(scheduler, "lr_scheduler_type"),
    **read_by(warmup_steps, "warmup_steps"), **read_by(warmup_ratio, "warmup_ratio"), **read_by(half, "bf16"),
    **read_by(float16, "fp16"), **read_by(cpu, "use_cpu", "no_cuda"), **read_by(save_steps, "save_steps"),
    **read_by(save_total_limit, "save_total_limit"), **read_by(report_to, "report_to"),
    **read_by(resume, "resume_from_checkpoint"), **read_by(grouped, "group_by_length"),
    **read_by(sampling, "train_sampling_strategy"),
    **without(RUN_FOLDER, "output_dir overwrite_output_dir run_name logging_dir project"),
    **without("`tunix-rt train` trains, and evaluates before and after", "do_train do_eval do_predict prediction_loss_only"),
    **without(CHECKPOINTS, "save_strategy save_on_each_node save_only_model enable_jit_checkpoint"),
    **without("the held-out loss needs no option", "eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object "
              "eval_accumulation_steps include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval use_cache"),
    **without("every step is in metrics.jsonl", "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter "
              "include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica disable_tqdm "
              "trackio_space_id trackio_bucket_id trackio_static_space_id"),
    **without(NOT_UPLOADED, "push_to_hub hub_model_id hub_token hub_private_repo hub_strategy hub_always_push "
              "hub_revision"),
    **without("tokens are prepared once and kept in a cache", "dataloader_num_workers dataloader_pin_memory "
              "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
              "dataloader_in_order remove_unused_columns label_names length_column_name"),
    **without(LAUNCH, "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
              "ddp_backend ddp_timeout local_rank average_tokens_across_devices accelerator_config"),
    **without("matmuls of float32 have full precision; training.dtype: bfloat16 is the faster way", "tf32"),
    **without("the loss is chunked over the vocabulary in any case", "use_liger_kernel liger_kernel_config"),
    **without("the step is measured and planned in any case", "skip_memory_metrics torch_empty_cache_steps debug "
              "gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode save_safetensors"),
    **without("a resumed run continues at the exact step", "ignore_data_skip restore_callback_states_from_checkpoint"),
    **without("the checkpoint with the lowest held-out loss is kept: `tunix-rt export --best`",
              "load_best_model_at_end metric_for_best_model greater_is_better"),
    **refused(SHARDING, "fsdp deepspeed parallelism_config"),
    **without(OWN_FSDP, "fsdp_config fsdp_transformer_layer_cls_to_wrap"),
    **refused("leave it out: the loss is the cross-entropy of the target tokens", "label_smoothing_factor"),
    **refused("leave it out: embeddings are trained without noise", "neftune_noise_alpha"),
    **refused("`training.memory: auto` finds a batch size that fits before training", "auto_find_batch_size"),
    **refused("every row is trained once per epoch; the last step of an epoch has fewer", "dataloader_drop_last"),
    **refused("set learning rate and betas by their own keys", "optim_args optim_target_modules lr_scheduler_kwargs"),
}  # fmt: skip
"""By key."""
