"""Whether the weight of the lm_head is all that turns hidden states into logits, as the chunked loss assumes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunix_rt.engines.torch.model import without_cache

KEEPING = ("_to_copy", "clone", "detach", "lift_fresh")
"""Operations that are no views and keep the numbers."""


def other_head(model: Any, ids: torch.Tensor) -> str | None:
    """What else of a forward pass of `ids` makes logits; None if nothing does.

    Scales and soft caps that the engine knows by their key of config.json are part of its chunked loss."""
    head, config = model.get_output_embeddings(), model.config
    inner = {id(parameter) for parameter in model.base_model.parameters()}
    own = (None if head is None else id(head.weight), *inner)
    more = [name for name, one in model.named_parameters() if id(one) not in own]
    if model.base_model is model:
        return "the model has no part without its lm_head"
    if not isinstance(head, torch.nn.Linear):
        return f"its lm_head is a {type(head).__name__}"
    if more or head.bias is not None:
        return f"its lm_head has {more[0] if more else 'a bias'} beside its weight"
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_scaling", None):
        return None
    made, entered, changes = [], [], _Changes()  # by the modules of the model, and what its lm_head is called with
    modules = [module for module in model.base_model.modules() if module is not head]
    handles = [one.register_forward_hook(lambda *given: made.extend(tree_leaves(given[2]))) for one in modules]
    handles += [head.register_forward_pre_hook(lambda _, given: entered.append(given[0]))]
    handles += [head.register_forward_hook(lambda *_: changes.found.clear())]
    try:
        with torch.no_grad(), changes:
            model(input_ids=ids, **without_cache(model))
    finally:
        for handle in handles:
            handle.remove()
    known = {one.untyped_storage()._cdata for one in made if isinstance(one, torch.Tensor)}
    if not entered or entered[0].untyped_storage()._cdata not in known:
        return "its last hidden states are changed before the lm_head"
    return f"its logits are changed behind the lm_head ({changes.found[0]})" if changes.found else None


class _Changes(TorchDispatchMode):
    """Names of the operations that make other numbers, not other views or dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket.__name__ not in KEEPING:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
