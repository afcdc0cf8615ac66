"""Logits of the next token, of a model with a static KV cache."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The lm_head on a GPU: logits in float32 also of 16-bit weights, as training computes them, in memory of their own."""

    weight: torch.Tensor
    """In the compute dtype."""
    divisor: float
    softcap: float | None
    out: torch.Tensor
    """[rows, vocabulary]"""

    @classmethod
    def of(cls, model: Any, compute: torch.dtype, rows: int) -> "Head":
        weight, config = model.get_output_embeddings().weight.detach(), model.config
        return cls(
            weight=weight.to(compute),
            divisor=getattr(config, "logits_scaling", None) or 1,  # of Granite
            softcap=getattr(config, "final_logit_softcapping", None),
            out=torch.empty(rows, len(weight), dtype=torch.float32, device=weight.device),
        )

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        wide = {} if self.weight.dtype == torch.float32 else {"out_dtype": torch.float32}
        with torch.autocast("cuda", enabled=False):
            torch.mm(hidden.to(self.weight.dtype), self.weight.t(), **wide, out=out)
        if self.divisor != 1:
            out.div_(self.divisor)
        return out if self.softcap is None else out.div_(self.softcap).tanh_().mul_(self.softcap)


def next_logits(
    model: Any, ids: torch.Tensor, positions: torch.Tensor, cache: Any, head: Head | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Logits of the token after each row of `ids`: by `head` into `out`, or by the model's own."""
    inputs = {
        "input_ids": ids,
        "position_ids": positions,
        "past_key_values": cache,
        "use_cache": True,
        "static_cache": cache,
    }
    if head is None:
        return model(**inputs, logits_to_keep=1).logits[:, -1]
    hidden = model.base_model(**inputs).last_hidden_state[:, -1]
    return head(hidden, torch.empty_like(head.out[: len(ids)]) if out is None else out)
