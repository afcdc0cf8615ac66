"""LLaMA-Factory's YAML: `llamafactory-cli train FILE`. Read from llamafactory 0.9.5."""

from typing import Any

from tunix_rt.config.dialects.rules import (
    IN_8_BIT,
    Given,
    Table,
    Verdict,
    chat_template,
    four_bit,
    is_off,
    is_on,
    is_path,
    mapped,
    names_of,
    number,
    read_by,
    refusal,
    refused,
    steps_or_share,
    without,
)
from tunix_rt.config.dialects.trainer_arguments import LAUNCH, NOT_WITHOUT_HELDOUT, REMOTE_CODE, TRAINER_ARGUMENTS

TITLE = "LLaMA-Factory"
TEMPLATES = {"gemma": "gemma", "gemma2": "gemma", "gemma3": "gemma", "chatml": "chatml"}
TEXTS = "alpaca default empty fewshot vicuna belle ziya original"
FULL = "`finetuning_type` is full: every parameter is trained"
OTHER_TUNING = "`finetuning_type: full` or `lora`"
NAMED = "dataset_info.json is not in `dataset_dir`, as seen from this folder; or name the file: --data FILE"


def stage(value: Any, given: Given) -> Verdict:
    """`sft` as here; any other stage is refused"""
    return Verdict(note="as here") if value == "sft" else refusal("tunix-rt does supervised fine-tuning: stage: sft")


def tuning(value: Any, given: Given) -> Verdict:
    """`lora` is `training.lora_rank`, `full` as here; freeze and oft are refused"""
    if value == "full":
        return Verdict(note="every parameter is trained, as here")
    return Verdict({"training.lora_rank": given.get("lora_rank", 8)}) if value == "lora" else refusal(OTHER_TUNING)


def lora(setting: str) -> Any:
    def read(value: Any, given: Given) -> Verdict:
        if given.get("finetuning_type", "lora") != "lora":
            return Verdict(note=FULL)
        return Verdict({setting: value}) if value is not None else Verdict(note="not set")

    read.__doc__ = f"`{setting}` where `finetuning_type` is lora"
    return read


def lora_target(value: Any, given: Given) -> Verdict:
    """`training.lora_target_modules`; `all` is all-linear"""
    names = names_of(value)
    return lora("training.lora_target_modules")("all-linear" if names == ["all"] else names, given)  # type: ignore[no-any-return]


def in_4_bit(value: Any, given: Given) -> Verdict:
    """`training.load_in_4bit` for 4 with LoRA; any other number of bits is refused"""
    if is_off(value) or value == 4:
        lora = given.get("finetuning_type", "lora") == "lora"
        return four_bit(value == 4, lora=lora, nested=is_on(given.get("double_quantization", True)))
    return refusal(IN_8_BIT)


def datasets(setting: str) -> Any:
    def read(value: Any, given: Given) -> Verdict:
        if is_off(value):
            return Verdict(note="not set")
        names = names_of(value)
        online = given.get("dataset_dir") == "ONLINE"
        if unknown := [name for name in names if not online and not is_path(name)]:
            return refusal(f"{', '.join(unknown)}: {NAMED}", instead=setting)
        return Verdict({setting: names if len(names) > 1 else names[0]})

    read.__doc__ = f"`{setting}`: files, and names that `dataset_dir`/dataset_info.json has; any other name is refused"
    return read


def template(value: Any, given: Given) -> Verdict:
    """`data.chat_template`; the template of a model family is the tokenizer's own"""
    return chat_template(str(value), TEMPLATES, TEXTS)


def packing(value: Any, given: Given) -> Verdict:
    """`data.packing`, with document boundaries as `neat_packing` has them"""
    if value is None:
        return Verdict(note="not set")
    near = is_on(value) and not is_on(given.get("neat_packing"))
    return Verdict({"data.packing": is_on(value)}, "no example attends to its neighbours" if near else "")


def neat_packing(value: Any, given: Given) -> Verdict:
    """`data.packing: true`"""
    return Verdict({"data.packing": True}) if is_on(value) else Verdict(note="off")


def train_on_prompt(value: Any, given: Given) -> Verdict:
    """`data.completion_only_loss`, the opposite"""
    return Verdict({"data.completion_only_loss": not is_on(value)})


def held_out(value: Any, given: Given) -> Verdict:
    """`data.validation_fraction`; a number of examples is refused"""
    share = number(value)
    return (
        Verdict({"data.validation_fraction": share}) if share < 1 else refusal("a fraction below 1, or data.validation")
    )


def has_held_out(given: Given) -> bool:
    return not is_off(given.get("val_size")) or not is_off(given.get("eval_dataset"))


def eval_steps(value: Any, given: Given) -> Verdict:
    """`training.eval_steps` where `eval_strategy` is steps and examples are held out"""
    if str(given.get("eval_strategy", given.get("evaluation_strategy", "no"))) != "steps" or not has_held_out(given):
        return Verdict(note="`eval_strategy` is not steps, or nothing is held out")
    return steps_or_share("training.eval_steps", NOT_WITHOUT_HELDOUT).read(value, given)


def pure_bf16(value: Any, given: Given) -> Verdict:
    """`training.dtype` and `training.master_dtype: bfloat16`; adapters stay float32"""
    if not is_on(value):
        return Verdict(note="off")
    weights = {"training.dtype": "bfloat16"}
    if given.get("finetuning_type", "lora") == "lora":
        return Verdict(weights, "adapters stay float32")
    return Verdict(weights | {"training.master_dtype": "bfloat16", "training.stochastic_rounding": False})


def no_checkpointing(value: Any, given: Given) -> Verdict:
    """`training.gradient_checkpointing`, the opposite"""
    return Verdict({"training.gradient_checkpointing": not is_on(value)})


def early_stopping(value: Any, given: Given) -> Verdict:
    """`training.patience`"""
    return Verdict(note="off") if is_off(value) else Verdict({"training.patience": value})


def random_weights(value: Any, given: Given) -> Verdict:
    """`model.weights: random`"""
    return Verdict({"model.weights": "random"}) if is_on(value) else Verdict(note="off")


TABLE: Table = {
    **TRAINER_ARGUMENTS,
    **mapped(
        model_name_or_path="model.model_name_or_path", model_revision="model.revision", cutoff_len="data.max_length",
        max_samples="data.max_examples", default_system="data.system_instruction",
    ),
    **read_by(stage, "stage"), **read_by(tuning, "finetuning_type"), **read_by(template, "template"),
    **read_by(lora("training.lora_rank"), "lora_rank"), **read_by(lora("training.lora_alpha"), "lora_alpha"),
    **read_by(lora("training.lora_dropout"), "lora_dropout"), **read_by(lora_target, "lora_target"),
    **read_by(datasets("data.dataset"), "dataset"), **read_by(datasets("data.validation"), "eval_dataset"),
    **read_by(packing, "packing"), **read_by(neat_packing, "neat_packing"),
    **read_by(train_on_prompt, "train_on_prompt"), **read_by(held_out, "val_size"), **read_by(eval_steps, "eval_steps"),
    **read_by(pure_bf16, "pure_bf16"), **read_by(no_checkpointing, "disable_gradient_checkpointing"),
    **read_by(in_4_bit, "quantization_bit"), **REMOTE_CODE,
    **read_by(early_stopping, "early_stopping_steps"), **read_by(random_weights, "train_from_scratch"),
    **without(NOT_WITHOUT_HELDOUT, "eval_strategy evaluation_strategy eval_on_each_dataset"),
    **without("dataset_info.json is read there", "dataset_dir"),
    **without("tokens are prepared once and kept in a cache", "overwrite_cache preprocessing_batch_size "
              "preprocessing_num_workers tokenized_path data_shared_file_system buffer_size cache_dir"),
    **without("loss curves: tunix-rt runs show RUN, tunix-rt dashboard", "plot_loss compute_accuracy "
              "include_effective_tokens_per_second print_param_status"),
    **without("the fastest attention that passes its self-test is used", "flash_attn block_diag_attn"),
    **without("kernels are chosen and checked by tunix-rt", "enable_liger_kernel use_unsloth use_unsloth_gc use_reentrant_gc "
              "use_v1_kernels use_kv_cache low_cpu_mem_usage use_fast_tokenizer upcast_lmhead_output"),
    **without("padding is never trained", "ignore_pad_token_for_loss"),
    **without("4-bit weights always have double quantization, and are on the device of training",
              "double_quantization quantization_device_map"),
    **without("keys of a hub are read from its own environment variables", "hf_hub_token ms_hub_token om_hub_token"),
    **without("generation is greedy, evaluation.max_new_tokens long", "predict_with_generate do_sample temperature top_p top_k "
              "num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens eval_num_beams infer_backend "
              "infer_dtype max_length generation_max_length generation_num_beams"),
    **without("metrics are in metrics.jsonl", "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode "
              "swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret"),
    **without("the text model alone is trained", "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps "
              "video_maxlen media_dir freeze_vision_tower freeze_multi_modal_projector"),
    **without("`tunix-rt export` writes the model", "export_dir export_size export_device export_legacy_format offload_folder"),
    **without(LAUNCH, "ray_num_workers ray_init_kwargs master_addr master_port"),
    **without("`tunix-rt train --profile N` profiles", "profiler_output_dir profiler_wait_steps profiler_warmup_steps "
              "profiler_active_steps profiler_repeat"),
    **without("Galore, Apollo and BAdam are off", "galore_target galore_rank apollo_target apollo_rank badam_mode "
              "galore_scale galore_update_interval apollo_scale apollo_update_interval badam_switch_mode"),
    **without("the stage is sft", "pref_beta pref_loss pref_ftx ppo_epochs"),
    **without("every layer is trained", "freeze_trainable_layers freeze_trainable_modules"),
    **refused("thinking is what the template and the data contain", "enable_thinking", unless=(True,)),
    **refused("datasets are read one after the other; for shares: data.dataset: {NAME: WEIGHT}",
              "mix_strategy interleave_probs", unless=("concat",)),
    **refused("files are read whole and kept as tokens on disk; leave it out", "streaming"),
    **refused("every assistant turn is trained; split conversations into records", "mask_history"),
    **refused("bitsandbytes quantizes as it loads: quantization_method: bnb", "quantization_method", unless=("bnb", "BNB")),
    **refused("quantization_type: nf4", "quantization_type", unless=("nf4",)),
    **refused("export the adapter merged first, then train that model", "adapter_name_or_path create_new_adapter"),
    **refused("adapters are plain LoRA, scaled by lora_alpha / lora_rank", "use_rslora use_dora pissa_init loraplus_lr_ratio "
              "additional_target use_llama_pro"),
    **refused("training.optim: adamw, adamw_8bit or adafactor", "use_galore use_apollo use_badam use_adam_mini use_muon"),
    **refused("the loss is the cross-entropy of the target tokens", "use_dft_loss use_asft_loss use_eaft_loss "
              "moe_aux_loss_coef"),
    **refused("the model is trained with its own attention and positions", "rope_scaling shift_attn mixture_of_depths"),
    **refused("the tokenizer is used as it is", "resize_vocab add_tokens add_special_tokens new_special_tokens_config "
              "split_special_tokens tool_format"),
    **refused("training.dtype: bfloat16", "fp8 upcast_layernorm"),
    **refused("rows are shuffled; a smaller dataset keeps an order: leave it out", "disable_shuffling"),
    **refused("the PyTorch engine runs transformers' models", "use_mca use_kt use_hyper_parallel"),
    **refused("`tunix-rt train --profile N` profiles", "enable_torch_profiler"),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "data.max_length": 2048, "data.packing": False, "data.on_overflow": "truncate", "data.validation_fraction": 0.0,
    "training.learning_rate": 5e-5, "training.gradient_checkpointing": True, "evaluation.enabled": False,
}  # fmt: skip
LORA_DEFAULTS: dict[str, Any] = {}
NOTES: dict[str, str] = {}


def implied(given: Given) -> dict[str, Any]:
    """Keys that have a default of their own, where they are absent."""
    return {} if "finetuning_type" in given else {"finetuning_type": "lora"}
