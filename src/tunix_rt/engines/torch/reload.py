"""A written model folder as others see it: `python -P -m tunix_rt.engines.torch.reload REQUEST ANSWER`.

A program of its own that loads each folder of the request with plain transformers and writes down what came of it. Nothing of
our loader, our attention or our generation is imported: what is right only with them is not right.
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
"""Words of torch and of the libraries below it."""


def main(request: Path, answer: Path) -> None:
    """One entry for each folder of `request` into `answer`; logits, in float32, beside it as `logits-NUMBER.npy`."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    threading.Thread(target=_end_with, args=(asked["parent"],), daemon=True).start()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    unable = _cannot_use(asked["device"])
    found = [
        {"unable": unable} if unable else _seen(asked, folder, answer.with_name(f"logits-{at}.npy"))
        for at, folder in enumerate(asked["folders"])
    ]
    answer.write_text(json.dumps(found), encoding="utf-8")


def _end_with(parent: int) -> None:
    """Nobody waits for the answer once the program that asked is gone."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _cannot_use(device: str) -> str | None:
    """Why this process cannot compute there, or None: a GPU may be for one process alone, or have no room for another."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError as error:
        return _one_line(error)
    return None


def _seen(asked: dict[str, Any], folder: str, logits: Path) -> dict[str, Any]:
    try:
        return _tokens_of(asked, folder) | _answers_of(asked, folder, logits)
    except Exception as error:  # noqa: BLE001  a damaged folder may raise anything, and what it says is the answer
        said = _one_line(error)
        lacks_memory = isinstance(error, RuntimeError | MemoryError) and any(words in said for words in NO_MEMORY)
        return {"unable": said} if lacks_memory else {"error": f"{type(error).__name__}: {said}"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _tokens_of(asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """What the tokenizer of the folder makes of the texts and of the conversation."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    found: dict[str, Any] = {
        "vocabulary": tokenizer.get_vocab(),
        "texts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked["texts"]],
        "texts_as_given": [tokenizer(text)["input_ids"] for text in asked["texts"]],
        "chat_template_sha256": None if template is None else hashlib.sha256(template.encode()).hexdigest(),
    }
    if template is not None and asked["conversation"] is not None:
        found["conversation"] = _written(tokenizer, asked["conversation"])
    return found


def _written(tokenizer: Any, conversation: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001  a template is a program from outside
        return f"{type(error).__name__}: {_one_line(error)}"


def _answers_of(asked: dict[str, Any], folder: str, logits: Path) -> dict[str, Any]:
    """What the model of the folder is made of, and what it says. Its type is the one that the folder itself names."""
    model, info = _load(asked, folder, "auto")
    own = model.generation_config
    found: dict[str, Any] = {
        "loading": {kind: sorted(map(str, names)) for kind, names in info.items() if names},
        "tensors": tensor_hashes(model.state_dict()),
        "eos_token_id": own.eos_token_id,
    }
    if asked["weights"]:  # from the file: buffers that `to` would widen were computed in the narrow type
        del model
        model, _ = _load(asked, folder, asked["weights"])
    if asked["compute"]:
        model = model.to(getattr(torch, asked["compute"]))
    model = model.to(asked["device"]).eval()
    # Greedy, whatever else the folder asks for when text is drawn; it ends where the folder says.
    pad = own.pad_token_id if own.pad_token_id is not None else asked["pad_id"]
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=asked["new_tokens"], eos_token_id=own.eos_token_id, pad_token_id=pad
    )
    cast = contextlib.nullcontext()
    if asked["autocast"]:
        cast = torch.autocast(torch.device(asked["device"]).type, dtype=getattr(torch, asked["autocast"]))
    last, greedy = [], []
    with torch.no_grad(), cast:
        for prompt in asked["prompts"]:
            ids = torch.tensor([prompt], device=asked["device"])
            last.append(model(input_ids=ids, use_cache=False).logits[0, -1].float().cpu())
            greedy.append(_greedy(model, ids))
    np.save(logits, torch.stack(last).numpy())
    return found | {"greedy": greedy, "logits": logits.name}


def _load(asked: dict[str, Any], folder: str, dtype: str) -> tuple[Any, dict[str, Any]]:
    kinds = {"attn_implementation": asked["attention"]} if asked["attention"] else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
        output_loading_info=True, **kinds,
    )  # fmt: skip


def _greedy(model: Any, ids: torch.Tensor) -> dict[str, list[Any]]:
    """New tokens, and for each by how much the logit of the likeliest was above the second."""
    made = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True
    )
    best = [step[0].float().topk(2).values for step in made.logits]
    return {
        "ids": made.sequences[0, ids.shape[1] :].tolist(),
        "margins": [float(first - second) for first, second in best],
    }


def tensor_hashes(tensors: Any) -> dict[str, list[Any]]:
    """Type, shape and SHA-256 of each tensor, by name; one at a time through the host."""
    return {name: _hash(tensor) for name, tensor in tensors.items()}


def _hash(tensor: torch.Tensor) -> list[Any]:
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    digest = hashlib.sha256(values.numpy().data).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
