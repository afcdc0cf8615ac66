"""What a model of the PyTorch engine holds and says, to be compared with what others make of the folder it is saved in."""

import gc
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunix_rt.engines.torch import reload as torch_reload
from tunix_rt.engines.torch.model import Engine, memory_is_named
from tunix_rt.engines.torch.save import saved_weights


def last_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Logits of the token after each prompt, [prompts, vocabulary], computed as the engine computes answers."""
    return torch.stack([logits[-1].cpu() for logits in _last_of(engine, [(prompt, 1) for prompt in prompts])]).numpy()


def token_gaps(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[list[float]]:
    """How far the logit of each token of an answer lies below the largest in its place; last, the best of `ends` after it."""
    found = []
    both = list(zip(prompts, answers, strict=True))
    rows = _last_of(engine, [([*prompt, *answer], len(answer) + 1) for prompt, answer in both])
    for (_, answer), logits in zip(both, rows, strict=True):
        largest = logits.amax(dim=1)
        ours = logits[:-1].gather(1, torch.tensor(answer, dtype=torch.long, device=logits.device)[:, None])[:, 0]
        end = logits[-1, torch.tensor(ends, device=logits.device)].amax()
        found.append([*(largest[:-1] - ours).tolist(), float(largest[-1] - end)])
    return found


def _last_of(engine: Engine, rows: Sequence[tuple[Sequence[int], int]]) -> Iterator[torch.Tensor]:
    """Logits [so many, vocabulary] in the last places of each row of tokens, on the device."""
    engine.model.eval()
    can_keep = "logits_to_keep" in inspect.signature(engine.model.forward).parameters
    for tokens, kept in rows:
        ids = torch.tensor([tokens], device=engine.device)
        attending, named = engine.attending(engine.attention.generating), memory_is_named("the last look at the model")
        with torch.no_grad(), named, attending, engine.kernels(), engine.computing():
            fewer = {"logits_to_keep": kept} if can_keep else {}
            logits = engine.model(input_ids=ids, use_cache=False, **fewer).logits[0, -kept:].float()
        yield logits


def tensor_hashes(engine: Engine) -> dict[str, list[Any]]:
    """Type, shape and SHA-256 of every tensor as `save` writes it."""
    return torch_reload.tensor_hashes(saved_weights(engine) or engine.model.state_dict())


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
