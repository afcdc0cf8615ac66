"""The chunked loss head and the lean lookup, held against plain float64 autograd on the same numbers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tunix_rt.engines.torch.chunked_loss import _product_type, head_loss, lean_lookup

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance of neighbouring numbers around 1."""


@dataclass(frozen=True, kw_only=True)
class HeadErrors:
    """How far off, as shares: the loss of itself, gradients of the largest element of their row (tokens of the vocabulary
    whose gradient is far below the others' are held to a thousandth of the largest row)."""

    loss: float
    states: float
    table: float
    lookup: float | None


def head_errors(
    *, vocabulary: int, hidden: int, targets: int, weights: torch.dtype, compute: torch.dtype, softcap: float | None,
    tied: bool, device: str, micro_batches: int = 1, rows: int | None = None, seed: int = 0,
) -> HeadErrors:  # fmt: skip
    """One or several micro-batches through lookup and head, against float64.

    Both sides start from states rounded to `compute`, and from a table rounded as the products have it. float16 has its
    loss multiplied, as in a run.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw = {"device": device, "dtype": torch.float64, "generator": generator}
    embedding = torch.nn.Embedding(vocabulary, hidden, device=device, dtype=weights)
    head = embedding if tied else torch.nn.Embedding(vocabulary, hidden, device=device, dtype=weights)
    with torch.no_grad():
        for module in {id(m): m for m in (embedding, head)}.values():
            module.weight.copy_(torch.randn(vocabulary, hidden, **draw) * (3 if softcap else 1) / hidden**0.5)
    assert lean_lookup(embedding)
    # Few different tokens: some come many times, as in text.
    ids = torch.randint(
        min(vocabulary, max(2, targets // 8)), (micro_batches, targets), device=device, generator=generator
    )
    goal = torch.randint(vocabulary, (micro_batches, targets), device=device, generator=generator)
    scale = (2.0**15 if compute == torch.float16 else 1.0) / (targets * micro_batches)
    noise = (torch.randn(micro_batches, targets, hidden, **draw)).to(compute)

    total, states_gradients = 0.0, []
    for at in range(micro_batches):
        states = (embedding(ids[at]).to(compute) + noise[at]).requires_grad_()
        states.retain_grad()
        loss = head_loss(states, head.weight, goal[at], scale=scale, softcap=softcap, compute=compute, rows=rows)
        loss.backward()
        total += loss.item()
        states_gradients.append(states.grad.double())

    wide_embedding = embedding.weight.detach().double().requires_grad_()
    wide_head = wide_embedding if tied else head.weight.detach().double().requires_grad_()
    table = _same_value(wide_head, head.weight.detach().to(_product_type(compute, states.device)).double())
    want, want_states = 0.0, []
    for at in range(micro_batches):
        states = (F.embedding(ids[at], wide_embedding).to(compute).double() + noise[at].double()).to(compute).double()
        states = _same_value(F.embedding(ids[at], wide_embedding) + noise[at].double(), states)
        states.retain_grad()
        logits = states @ table.T
        logits = torch.tanh(logits / softcap) * softcap if softcap else logits
        loss = F.cross_entropy(logits, goal[at], reduction="sum") * scale
        loss.backward(retain_graph=True)  # the table is shared
        want += loss.item()
        want_states.append(states.grad)
    rows_off = torch.cat([_off(got, right) for got, right in zip(states_gradients, want_states, strict=True)])
    return HeadErrors(
        loss=abs(total - want) / want,
        states=rows_off.max().item(),
        table=_off(head.weight.grad.double(), wide_head.grad).max().item(),
        lookup=None if tied else _off(embedding.weight.grad.double(), wide_embedding.grad).max().item(),
    )


def _same_value(differentiable: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, with the gradient of `differentiable`: both sides start from states of the same bits."""
    return differentiable + (value - differentiable).detach()


def _off(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Error of each row as a share of its largest element, or of a thousandth of the largest row's."""
    assert torch.isfinite(got).all()
    size = want.abs().amax(1)
    return (got - want).abs().amax(1) / size.clamp(min=size.max() / 1000)
