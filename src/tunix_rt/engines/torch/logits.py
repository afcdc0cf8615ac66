"""Logits, hashes and memory of a model of the PyTorch engine, to compare it with a saved folder that transformers loads."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunix_rt.engines.failures import memory_errors_named
from tunix_rt.engines.torch import reload as torch_reload
from tunix_rt.engines.torch.generate import free_memory
from tunix_rt.engines.torch.model import Engine
from tunix_rt.engines.torch.save import saved_weights, whole_weights


def last_logits(engine: Engine, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Logits of the token after each prompt, [prompts, vocabulary], computed as the engine computes answers."""
    return torch.stack([logits[-1].cpu() for logits in _last_of(engine, [(prompt, 1) for prompt in prompts])]).numpy()


def token_gaps(
    engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], ends: Sequence[int]
) -> list[list[float]]:
    """How far the logit of each token of an answer is below the largest at its position; last, that of the best of `ends`."""
    gaps = []
    both = list(zip(prompts, answers, strict=True))
    rows = _last_of(engine, [([*prompt, *answer], len(answer) + 1) for prompt, answer in both])
    for (_, answer), logits in zip(both, rows, strict=True):
        largest = logits.amax(dim=1)
        ours = logits[:-1].gather(1, torch.tensor(answer, dtype=torch.long, device=logits.device)[:, None])[:, 0]
        end = logits[-1, torch.tensor(ends, device=logits.device)].amax()
        gaps.append([*(largest[:-1] - ours).tolist(), float(largest[-1] - end)])
    return gaps


def _last_of(engine: Engine, rows: Sequence[tuple[Sequence[int], int]]) -> Iterator[torch.Tensor]:
    """Logits [positions, vocabulary] at the last positions of each row of tokens, on the device."""
    engine.model.eval()
    can_keep = "logits_to_keep" in inspect.signature(engine.model.forward).parameters
    for tokens, kept in rows:
        ids = torch.tensor([tokens], device=engine.device)
        attending, named = (
            engine.attending(engine.attention.generating),
            memory_errors_named("the logits of the final model"),
        )
        with torch.no_grad(), named, attending, engine.kernels(), engine.computing():
            options = {"logits_to_keep": kept} if can_keep else {}
            logits = engine.model(input_ids=ids, use_cache=False, **options).logits[0, -kept:].float()
        yield logits


def tensor_hashes(engine: Engine) -> dict[str, list[Any]]:
    """dtype, shape and SHA-256 of every tensor as `save` writes it. Above one rank every rank calls it, and rank 0 has them."""
    if engine.sharding is not None:
        return {name: torch_reload.tensor_hash(one) for name, one in whole_weights(engine, engine.sharding)}
    return torch_reload.tensor_hashes(saved_weights(engine) or engine.model.state_dict())


def room_beside(engine: Engine) -> int:
    """Memory of the engine's GPU that another process can allocate, after unused memory of the allocator is released; on a CPU,
    whose memory is read elsewhere, 0."""
    if engine.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(engine.device)[0])


def release(engine: Engine) -> None:
    """Free the memory of the model. The engine cannot be used afterwards."""
    engine.model = None
    free_memory(engine)
