"""The memory of one step of any causal language model: `python -P -m tunix_rt.engines.torch.tracer REQUEST RESULT`.

The model is built of fake tensors, which have shapes and no memory. A forward and a backward pass of two lengths give what
autograd saves, and what is alive at the peak of a layer: in bytes per token, per token and length, and of the weights that
autocast casts, which have the same size for any length.
"""

import inspect
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import moe

from tunix_rt.engines.torch.head_check import other_head
from tunix_rt.engines.torch.model import text_config, without_cache

LENGTHS = (128, 256)


class Bytes(NamedTuple):
    """Of tensors of tokens, and of weights that autocast casts."""

    tokens: int = 0
    casts: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":  # type: ignore[override]
        return Bytes(self.tokens + other.tokens, self.casts + other.casts)

    def __sub__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.tokens - other.tokens, self.casts - other.casts)


def main(request_file: Path, result_file: Path) -> None:
    request = json.loads(request_file.read_text(encoding="utf-8"))
    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.from_pretrained(request["folder"], trust_remote_code=False, local_files_only=True)
    config = text_config(config)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"no causal language model takes a {type(config).__name__}")
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # its auxiliary loss is refused by name when the model is loaded
    kinds = {name: getattr(torch, request[name]) for name in ("weights", "compute")}
    with FakeTensorMode(allow_non_fake_inputs=True), _kernels():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=kinds["weights"]).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (request["adapters"] and ".experts." in name))  # experts have no adapters
        found = described(model)
        casting = {"dtype": kinds["compute"], "enabled": kinds["compute"] != kinds["weights"]}
        measured = measure_both(model, found["takes_positions"], casting)
        with torch.autocast("cpu", **casting):
            found["own_logits"] = other_head(model, torch.zeros((1, LENGTHS[0]), dtype=torch.long)) is not None
    result = found | {"costs": {name: _by_length(*(one[name] for one in measured)) for name in measured[0]}}
    result_file.write_text(json.dumps(result), encoding="utf-8")


def described(model: Any) -> dict[str, Any]:
    """Parameters by layer, vocabulary, positions and head of a model."""
    config, layers = model.config, layers_of(model)
    place = {id(parameter): number for number, layer in enumerate(layers) for parameter in layer.parameters()}
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    there = getattr(config, "num_local_experts", None)
    there = there or getattr(config, "num_experts", None) or getattr(config, "n_routed_experts", None)
    return {
        "model_type": config.model_type,
        "parameters": [[list(one.shape), place.get(id(one), -1)] for one in model.parameters()],
        "expert_parameters": sum(parameter.numel() for parameter in experts),
        "active_experts": chosen / there if chosen and there else 1.0,
        "layers": max(1, len(layers)),
        "hidden": int(table.weight.shape[1]),
        "vocab": int(table.weight.shape[0]),
        "tied": head is not None and head.weight is table.weight,
        "positions": next(
            (value for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
             if isinstance(value := getattr(config, name, None), int)), None,
        ),
        "heads": int(getattr(config, "num_attention_heads", None) or 1),
        "takes_positions": "position_ids" in inspect.signature(model.base_model.forward).parameters,
    }  # fmt: skip


def layers_of(model: Any) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, transformers.GradientCheckpointingLayer)]


def measure_both(model: Any, positions: bool, casting: dict[str, Any]) -> list[dict[str, Bytes]]:
    """At both lengths; without dropout where a layer is dropped by a drawn number, which a fake tensor does not have."""
    try:
        return [measure(model, length, positions, casting) for length in LENGTHS]
    except RuntimeError:
        model.eval()
        return [measure(model, length, positions, casting) for length in LENGTHS]


def measure(model: Any, length: int, positions: bool, casting: dict[str, Any]) -> dict[str, Bytes]:
    """Bytes of one row of `length` tokens: saved by a layer on average, once for all, and behind the last layer; alive at the
    peak of the forward and of the backward pass of a layer beside them. Autocast keeps its casts until it ends."""
    live, layers = _Live([*model.parameters(), *model.buffers()]), layers_of(model)
    starts, saved, forward = [], [], [Bytes()]

    def enter(*_: Any) -> None:
        starts.append(live.now)
        live.peak = live.now

    def leave(*_: Any) -> None:
        if torch.is_grad_enabled():
            saved.append(live.now - starts[-1])
        else:
            forward.append(live.peak - starts[-1])

    handles = [layer.register_forward_pre_hook(enter) for layer in layers]
    handles += [layer.register_forward_hook(leave) for layer in layers]
    looked_up: list[torch.Tensor] = []
    handles.append(model.get_input_embeddings().register_forward_hook(lambda *given: looked_up.append(given[2])))
    ids = torch.zeros((1, length), dtype=torch.long)
    more = {"position_ids": torch.arange(length)[None]} if positions else {}
    more |= without_cache(model.base_model)
    with live, torch.no_grad(), torch.autocast("cpu", **casting):
        model.base_model(input_ids=ids, **more)
    del looked_up[:], starts[:]
    with live, torch.autocast("cpu", **casting):
        output = model.base_model(input_ids=ids, **more)
        hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
        end = live.now
        live.peak = end
        torch.autograd.grad(hidden, looked_up[:1], torch.ones_like(hidden))
        backward = live.peak - end
    for handle in handles:
        handle.remove()
    whole = sum(saved, Bytes())
    layer = Bytes(whole.tokens // max(1, len(saved)), whole.casts // max(1, len(saved)))
    once = starts[0] if starts else Bytes()
    behind = end - (starts[-1] + saved[-1] if starts else Bytes())
    return {"saved": layer, "forward": max(forward, key=sum), "backward": backward, "once": once, "behind": behind}


def _by_length(short: Bytes, long: Bytes) -> list[float]:
    """Bytes per token, per token and length, and of casts, of a cost at the two lengths."""
    first, second = short.tokens / LENGTHS[0], long.tokens / LENGTHS[1]
    slope = (second - first) / (LENGTHS[1] - LENGTHS[0])
    return [first - slope * LENGTHS[0], slope, long.casts]


class _Live(TorchDispatchMode):
    """Counts the bytes of storages made within it that are alive; views of what was `there` before are none."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = Bytes()
        self.sizes: dict[int, Bytes] = {tensor.untyped_storage()._cdata: Bytes() for tensor in there}
        self.weights = {*self.sizes}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.sizes:
                    self.sizes[key] = Bytes(casts=storage.nbytes()) if cast else Bytes(tokens=storage.nbytes())
                    self.now += self.sizes[key]
                    self.peak = max(self.peak, self.now, key=sum)
                    weakref.finalize(storage, self._freed, key)
        return results

    def _freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key, Bytes())


@contextmanager
def _kernels() -> Iterator[None]:
    """Fake tensors have no fused attention: torch would compute the scores. Count what a fused kernel saves instead."""
    plain = functional.scaled_dot_product_attention

    def fused(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **more: Any) -> Any:
        if dropout_p > 0 or query.shape[-1] != value.shape[-1]:
            return plain(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **more)
        if query.shape[1] != key.shape[1]:
            key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        kernel: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        causal = bool(more.get("is_causal")) and attn_mask is None
        return kernel(query, key, value, 0.0, causal, attn_mask=attn_mask, scale=more.get("scale"))[0]

    functional.scaled_dot_product_attention = fused  # type: ignore[assignment]
    moe.ALL_EXPERTS_FUNCTIONS.register("grouped_mm", _experts)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def _experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Tensors of the sizes that a grouped matmul over experts has: a fake one takes bfloat16 alone, and a loop over experts
    depends on the data."""
    order = torch.sort(chosen.reshape(-1))[1]
    up = (module.gate_up_proj if module.has_gate else module.up_proj)[0]
    down = module.down_proj[0]
    if not module.is_transposed:
        up, down = up.t(), down.t()
    inner = hidden[order // chosen.shape[-1]] @ up
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    weighted = (inner @ down) * weights.reshape(-1)[order][:, None]
    return weighted[torch.argsort(order)].view(*chosen.shape, -1).sum(dim=1).to(hidden.dtype)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # noqa: BLE001  code of any model, and the parent shows one line
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
