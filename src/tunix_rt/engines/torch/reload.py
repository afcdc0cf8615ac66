"""A saved model folder in plain transformers: `python -P -m tunix_rt.engines.torch.reload REQUEST RESULT`.

A separate program that loads each folder of the request and writes tensors, logits and greedy generations. It imports nothing of
our loader, attention or generation: a model must not depend on them.
"""

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In the messages of torch and CUDA libraries."""


def main(request_file: Path, result_file: Path) -> None:
    """One entry for each folder of the request into `result_file`; logits, in float32, beside it as `logits-NUMBER.npy`."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    threading.Thread(target=_end_with, args=(request["parent"],), daemon=True).start()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    unable = _cannot_use(request["device"])
    results = [
        {"unable": unable} if unable else _loaded(request, folder, result_file.with_name(f"logits-{at}.npy"))
        for at, folder in enumerate(request["folders"])
    ]
    result_file.write_text(json.dumps(results), encoding="utf-8")


def _end_with(parent: int) -> None:
    """Exit with the parent process, which waits for the result."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _cannot_use(device: str) -> str | None:
    """Why this process cannot use `device`, or None: a GPU may be exclusive to one process, or full."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError as error:
        return _one_line(error)
    return None


def _loaded(request: dict[str, Any], folder: str, logits: Path) -> dict[str, Any]:
    try:
        return _tokens_of(request, folder) | _outputs_of(request, folder, logits)
    except Exception as error:  # noqa: BLE001  a corrupt folder may raise anything, which is the result
        message = _one_line(error)
        lacks_memory = isinstance(error, RuntimeError | MemoryError) and any(text in message for text in NO_MEMORY)
        return {"unable": message} if lacks_memory else {"error": f"{type(error).__name__}: {message}"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _tokens_of(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Token ids of the texts and the formatted conversation, by the tokenizer of the folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    result: dict[str, Any] = {
        "vocabulary": tokenizer.get_vocab(),
        "texts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in request["texts"]],
        "texts_as_given": [tokenizer(text)["input_ids"] for text in request["texts"]],
        "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }
    if template is not None and request["conversation"] is not None:
        result["conversation"] = _formatted(tokenizer, request["conversation"])
    return result


def _formatted(tokenizer: Any, conversation: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001  a template is foreign code
        return f"{type(error).__name__}: {_one_line(error)}"


def _outputs_of(request: dict[str, Any], folder: str, logits: Path) -> dict[str, Any]:
    """Tensors, logits and greedy generations of the model of the folder, in the dtype of its config.json; or of its base model
    with the adapter of the folder, which has no eos_token_id."""
    base = request["base"]
    model, info = _load(request, base or folder, (base and request["weights"]) or "auto")
    own = model.generation_config
    ends = request["stop_ids"] if base else own.eos_token_id
    result: dict[str, Any] = {
        "loading": {kind: sorted(map(str, names)) for kind, names in info.items() if names},
        "tensors": tensor_hashes(_adapted(model, folder) if base else _text_tensors(model.state_dict())),
        "eos_token_id": ends,
    }
    if request["weights"] and not base:  # loaded again: `to` would cast buffers that were computed in the narrow dtype
        del model
        model, _ = _load(request, folder, request["weights"])
    if request["compute"]:
        model = model.to(getattr(torch, request["compute"]))
    model = model.to(request["device"]).eval()
    # Greedy, whatever sampling the folder configures; it ends at the eos_token_id of the folder.
    pad = own.pad_token_id if own.pad_token_id is not None else request["pad_id"]
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=request["new_tokens"], eos_token_id=ends, pad_token_id=pad
    )
    cast = contextlib.nullcontext()
    if request["autocast"]:
        cast = torch.autocast(torch.device(request["device"]).type, dtype=getattr(torch, request["autocast"]))
    last, greedy = [], []
    with torch.no_grad(), cast:
        for prompt in request["prompts"]:
            ids = torch.tensor([prompt], device=request["device"])
            last.append(model(input_ids=ids, use_cache=False).logits[0, -1].float().cpu())
            greedy.append(_greedy(model, ids))
    np.save(logits, torch.stack(last).numpy())
    return result | {"greedy": greedy, "logits": logits.name}


def _adapted(model: Any, folder: str) -> Any:
    """The tensors of the adapter of `folder`, which `peft` adds to `model` in place."""
    from peft import PeftModel, get_peft_model_state_dict

    return get_peft_model_state_dict(PeftModel.from_pretrained(model, folder))


def _text_tensors(tensors: Any) -> Any:
    """The tensors of the text model, by their names there; of a multimodal model the others are left out."""
    prefix = "model.language_model."
    found = {f"model.{name.removeprefix(prefix)}": one for name, one in tensors.items() if name.startswith(prefix)}
    return found | {"lm_head.weight": tensors["lm_head.weight"]} if found else tensors


def _load(request: dict[str, Any], folder: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    options = {"attn_implementation": request["attention"]} if request["attention"] else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
        output_loading_info=True, **options,
    )  # fmt: skip


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """`model.generate`; without a cache where the cache of the model does not work with it."""
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
    try:
        return model.generate(**given)
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError):
        return model.generate(**given, use_cache=False)


def _greedy(model: Any, ids: torch.Tensor) -> dict[str, list[Any]]:
    """New tokens, and for each the margin of the largest logit over the second."""
    output = generate(model, ids, return_dict_in_generate=True, output_logits=True)
    best = [step[0].float().topk(2).values for step in output.logits]
    return {
        "ids": output.sequences[0, ids.shape[1] :].tolist(),
        "margins": [float(first - second) for first, second in best],
    }


def tensor_hashes(tensors: Any) -> dict[str, list[Any]]:
    """dtype, shape and SHA-256 of each tensor, by name; one at a time through the host."""
    return {name: tensor_hash(tensor) for name, tensor in tensors.items()}


def tensor_hash(tensor: torch.Tensor) -> list[Any]:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    digest = hashlib.sha256(values.numpy().data).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
