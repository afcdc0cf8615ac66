"""The adapters of a LoRA run as a folder that plain `peft` loads, written from the checkpoint and the settings of the run."""

import hashlib
import re
from pathlib import Path
from typing import Any

from tunix_rt.config.load import load_config
from tunix_rt.config.settings import Training
from tunix_rt.engines.checkpoint import MODEL, staged_model
from tunix_rt.errors import ConfigError, InputError
from tunix_rt.models.families import FAMILIES
from tunix_rt.models.resolve import ModelSource
from tunix_rt.models.safetensors import header_of, part_files, stored_tensors
from tunix_rt.plan.adapters import ALL_LINEAR, alpha_of
from tunix_rt.runs.folder import RunDir, no_final_model
from tunix_rt.runs.record import RunRecord
from tunix_rt.storage import storage, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_step(run: RunDir, step: int | None, *, best: bool) -> int | None:
    """The step whose adapters are exported: `step`, None for the best one, else the last of a complete run."""
    if load_config(run.config).training.lora_rank is None:
        raise ConfigError(
            f"--adapter: the run in {run.root} trained every parameter, training.lora_rank is not set",
            fix="remove --adapter: the whole model is exported",
        )
    if step is not None or best:
        return step
    result = RunRecord(run.root).result
    if result is None or result.steps_completed is None or not run.final_model.is_dir():
        raise no_final_model(run)
    return result.steps_completed


def write_adapter(
    folder: Path, *, checkpoint: Path, base: ModelSource, training: Training, tokenizer_folder: Path,
    chat_template: str | None,
) -> dict[str, list[Any]]:  # fmt: skip
    """Write configuration, weights and tokenizer. Returns dtype, shape and SHA-256 of each tensor by its name in the folder."""
    if base.multimodal:
        raise InputError(
            f"--adapter: {base.name} is multimodal, and its text model has other names there than in training",
            fix="remove --adapter: the model is exported with its adapters merged",
        )
    staging = staged_model(folder, tokenizer_folder=tokenizer_folder, chat_template=chat_template)
    with staging as staged, storage(staged):
        written = _write_weights(part_files(checkpoint, MODEL), staged / WEIGHTS)
        write_json(staged / CONFIG, _config(base, training, {name.split(".lora_")[0] for name in written}))
    return written


def _write_weights(files: list[Path], target: Path) -> dict[str, list[Any]]:
    """The tensors of a checkpoint, byte for byte, under the names of PEFT."""
    tensors, written = stored_tensors(files), {}
    names = {name: "base_model.model." + re.sub(r"\.(lora_[AB])\.default\.", r".\1.", name) for name in tensors}
    sizes = ((names[name], one.dtype, one.shape, one.size) for name, one in tensors.items())
    with target.open("wb") as file:
        file.write(header_of(sizes, {"format": "pt"})[0])
        for name, one in tensors.items():
            data = one.read()
            file.write(data)
            written[names[name]] = ["float32", list(one.shape), hashlib.sha256(data).hexdigest()]
    return written


def _config(base: ModelSource, training: Training, modules: set[str]) -> dict[str, Any]:
    """As `peft.LoraConfig` reads it; what is left out has its default there."""
    targets, model_type = training.lora_target_modules, str(base.config["model_type"])
    from_hub = base.revision not in ("local", "shipped", "preset")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": base.name if from_hub else str(base.folder),
        "revision": base.revision if from_hub else None,
        "r": training.lora_rank,
        "lora_alpha": alpha_of(training),
        "lora_dropout": training.lora_dropout,
        "target_modules": sorted({one.rpartition(".")[2] for one in modules}) if targets == ALL_LINEAR else targets,
        "fan_in_fan_out": model_type in FAMILIES and FAMILIES[model_type].layout == "gpt2",
        "bias": "none",
    }
