"""What a model of the PyTorch engine holds and says, to be compared with what others make of the folder it is saved in."""

import gc
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunix_rt.backends import torch_reload
from tunix_rt.backends.torch_model import Engine, memory_is_named


def last_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Logits of the token after each prompt, [prompts, vocabulary], computed as the engine computes answers."""
    engine.model.eval()
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(engine.model.forward).parameters else {}
    attending = engine.attending(engine.attention.generating)
    found = []
    with torch.no_grad(), memory_is_named("the last look at the model"), attending, engine.kernels():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=engine.device)
            with engine.computing():
                found.append(engine.model(input_ids=ids, use_cache=False, **fewer).logits[0, -1].float().cpu())
    return torch.stack(found).numpy()


def tensor_hashes(engine: Engine) -> dict[str, list[Any]]:
    """Type, shape and SHA-256 of every tensor as `save` writes it. Adapters are added to their weights on the host."""
    if engine.recipe.frozen is None:
        return torch_reload.tensor_hashes(engine.model.state_dict())
    from tunix_rt.backends.torch_lora import merged_weights

    return torch_reload.tensor_hashes(merged_weights(engine.model))


def room_beside(engine: Engine) -> int:
    """Memory of the engine's GPU that another process can have; on a CPU, which is asked elsewhere, 0.

    What our allocator holds and nobody uses is given back first: another process cannot take it."""
    if engine.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(engine.device)[0])


def release(engine: Engine) -> None:
    """Let go of the model and of the memory it took. The engine is of no use afterwards."""
    engine.model = None
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
