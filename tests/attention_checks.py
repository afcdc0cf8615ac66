"""Small models of every family, packed examples for them, and attention written out: what attention is held against."""

import itertools
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from tunix_rt.data.packing import IGNORED, collate, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines.torch.attention import attention_of, boundaries, register
from tunix_rt.plan.attention_kernels import torch_attention

VOCABULARY = 64
CAP = 2.0
"""Of the scores, where a family has one: low enough to bend most of them."""

_PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
_SLIDES = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"attn_logit_softcapping": CAP, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 20, **_SLIDES},
    "gemma3_text": {"query_pre_attn_scalar": 12, **_SLIDES},
    "llama": {},
    "qwen3": {"use_sliding_window": True, **_SLIDES},
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [0, 1], **_SLIDES},
    "mistral": {},
    "ministral": _SLIDES,
    "ministral3": {},
    "phi3": {},
    "olmo2": {},
    "olmo3": _SLIDES,
    "cwm": _SLIDES,
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "gemma4_text": {
        "global_head_dim": 16,
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
SLIDING = ("gemma2", "gemma3_text", "qwen3", "smollm3", "mistral", "ministral", "phi3", "olmo3", "cwm", "gemma4_text")


def choose_attention(**facts):
    """The attention of a run with these facts, as the engine chooses it before it tries the kernel."""
    return attention_of(*torch_attention(**facts))


def small_model(family, *, attention, window=4, head_dim=8, dtype=torch.float64, device="cpu", **more):
    """Two layers with weights from one seed, so that models of one family differ in their attention alone."""
    register()
    settings = _PLAIN | FAMILIES[family] | {"head_dim": head_dim} | more
    if family in SLIDING:
        settings["sliding_window"] = window
    if family == "gpt2":
        settings = {key: value for key, value in settings.items() if key not in ("head_dim", "num_key_value_heads")}
        settings["hidden_size"] = 4 * head_dim
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    return model.to(device=device, dtype=dtype)


def packed_and_alone(lengths=(5, 9, 1, 7, 12, 3, 6), *, width=16, seed=3):
    """Two micro-batches of the same examples: packed into padded rows, and one row for each."""
    draw = np.random.default_rng(seed)
    examples = [
        Example(ids=draw.integers(1, VOCABULARY, size, dtype=np.int32), trained=np.ones(size, dtype=np.bool_))
        for size in lengths
    ]
    packed = make_rows(examples, max_length=width, packing=True)
    assert 1 < len(packed) < len(examples)
    alone = [collate([row], pad_id=0) for row in make_rows(examples, max_length=width, packing=False)]
    return collate(packed, pad_id=0), alone


def packed_states(model, micro, attention, *, ids=None, casting=None):
    """Hidden states of packed rows, as the engine has them computed."""
    device = model.device
    ids, positions = (
        torch.from_numpy(part).to(device) for part in (micro.ids if ids is None else ids, micro.positions)
    )
    borders = boundaries(micro.positions, device, attention)
    with casting or nullcontext():
        return model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **borders).last_hidden_state


def states_alone(model, micro):
    """Hidden states of one example by itself, with nothing said about positions or borders."""
    return model.base_model(input_ids=torch.from_numpy(micro.ids).to(model.device), use_cache=False).last_hidden_state


def summed_loss(model, states, micro):
    logits = model.get_output_embeddings()(states[:, :-1])
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    labels = torch.from_numpy(micro.labels[:, 1:]).to(model.device)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def attend_alone(query, key, value, *, begins, longest, scale, before, softcap=None):
    """Causal attention over [tokens, heads, size], one example at a time, in the type of its inputs; `before` as in the
    kernel: how many earlier tokens a token sees."""
    cuts = begins.tolist()
    assert max(np.diff(cuts)) <= longest
    groups = query.shape[1] // key.shape[1]
    out = []
    for low, high in itertools.pairwise(cuts):
        q, k, v = (part[low:high].transpose(0, 1) for part in (query, key, value))
        k, v = (part.repeat_interleave(groups, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(high - low, device=query.device)
        unseen = place[None, :] > place[:, None]
        if before is not None:
            unseen |= place[None, :] < place[:, None] - before
        out.append(torch.softmax(scores.masked_fill(unseen, float("-inf")), dim=-1) @ v)
    return torch.cat(out, dim=1).transpose(0, 1)


class _Float64(TorchFunctionMode):
    """What transformers computes in float32 whatever the type of the model (norms, the softmax of eager attention)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float and args[0].dtype == torch.int64:  # positions, which meet float64 frequencies
            return args[0].double()
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float or (
                func is torch.Tensor.to and torch.float32 in (*args[1:], *kwargs.values())
            ):
                return args[0]
            if func is F.softmax and kwargs.get("dtype") == torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


@contextmanager
def float64():
    with _Float64():
        yield
