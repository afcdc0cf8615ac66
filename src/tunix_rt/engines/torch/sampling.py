"""The choice of the next token in the PyTorch engine: greedy or by Gumbel-max sampling."""

import torch

from tunix_rt.engines.decoding import Decoding, random_bits, uniform

DRAWN_AT_ONCE = 4 * 2**20
"""Logits that are sampled at once: noise and sort order of a logit take some 60 bytes."""


def choose(
    logits: torch.Tensor, decoding: Decoding, keys: torch.Tensor | None, logprobs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row; with a key for each row a sampled one, a few rows at a time. With `logprobs` its
    log-probability and its distance from the runner-up, [rows, 2]."""
    if keys is None and not logprobs:
        return logits.argmax(dim=-1), logits.new_empty(0)
    rows = max(1, DRAWN_AT_ONCE // logits.shape[-1])
    parts = []
    for some, of in zip(logits.split(rows), [None] * len(logits) if keys is None else keys.split(rows), strict=False):
        by = some if of is None else _noisy(some, of, decoding)
        chosen, scores = by.argmax(dim=-1), logits.new_empty(0)
        if logprobs:
            best = by.topk(2, dim=-1).values.double()
            logprob = some.double().log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
            scores = torch.stack([logprob, best[:, 0] - best[:, 1]], dim=1)
        parts.append((chosen, scores))
    return torch.cat([chosen for chosen, _ in parts]), torch.cat([scores for _, scores in parts])


def _noisy(logits: torch.Tensor, keys: torch.Tensor, decoding: Decoding) -> torch.Tensor:
    """Scores whose largest is that of the sampled token (Gumbel-max sampling). Sampling by cumulative probabilities would change
    with the last bits of all of them, which depend on the batch of a row."""
    scores = logits.double()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / decoding.temperature
    if decoding.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = torch.softmax(ordered, dim=-1)
        beyond = probabilities.cumsum(dim=-1) - probabilities >= decoding.top_p
        scores = torch.empty_like(scores).scatter_(-1, order, ordered.masked_fill_(beyond, -torch.inf))
    return scores + _gumbel(keys, scores.shape[-1])


def _gumbel(keys: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers of the standard Gumbel distribution for each key."""
    bits = random_bits(keys.unsqueeze(1), torch.arange(count, device=keys.device))
    return uniform(bits.double()).log_().neg_().log_().neg_()
