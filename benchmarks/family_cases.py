"""Cases of `benchmarks.memory_on_gpu --families`: the newer families, LoRA, 4-bit base weights, and traced models.

Models that are too large to be loaded in seconds have fewer layers; everything else of them is as published.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix_rt.models.resolve import resolve_model
from tunix_rt.storage import json_text

ARCHITECTURES = Path(__file__).parent / "configs" / "architectures"
EXACT: dict[str, tuple[int, ...]] = {
    "gemma-4-e2b": (12, 20, 35), "gemma-4-e4b": (12, 24), "gemma-4-31b": (6,), "gemma-4-26b-a4b": (2, 3),
    "mistral-7b": (6, 12), "ministral-3-3b": (12, 26), "phi-4-mini": (12, 32), "phi-4": (4, 8), "olmo-2-1b": (16,),
    "olmo-3-7b": (8,), "granite-3.3-2b": (20, 40), "smollm3-3b": (16, 36), "gemma-3-4b": (12, 34), "qwen-3-4b": (12,),
}  # fmt: skip
"""Presets, and how many of their layers a case may have."""
TRACED: dict[str, dict[str, Any]] = {
    "qwen-3.5-0.8b": {}, "qwen-3.5-2b": {}, "gpt-oss-20b": {"num_hidden_layers": 2},
    "stablelm": {"num_hidden_layers": 16}, "starcoder2": {"num_hidden_layers": 12}, "olmoe": {"num_hidden_layers": 4},
    "gpt_neox": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 8192},
    "opt": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "ffn_dim": 8192, "word_embed_proj_dim": 2048,
    },
    "bloom": {"hidden_size": 1536, "n_layer": 24, "n_head": 16}, "cohere2": {"hidden_size": 2048, "num_hidden_layers": 8},
    "nemotron": {"num_hidden_layers": 6, "num_key_value_heads": 8}, "glm4": {"num_hidden_layers": 6},
    "mamba": {"hidden_size": 1536, "num_hidden_layers": 8}, "exaone4": {"num_hidden_layers": 6},
}  # fmt: skip
"""Published configurations, or model types with the defaults of their class, and what is changed."""
BFLOAT16 = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
TARGETS = ("all-linear", ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], r".*\.mlp\..*_proj")
FUSED_TARGETS = ("all-linear", ["qkv_proj", "o_proj"], r".*\.mlp\..*_proj")
KINDS = ("full", "full", "lora", "traced", "full", "4-bit", "lora", "traced", "4-bit", "full", "traced", "lora")
"""Taken in turn."""


def drawn_families(seed: int) -> Iterator[dict[str, Any]]:
    """Cases by a random generator without end; no two have one name."""
    own, turn, names = random.Random(seed), 0, set()
    traced = _in_turns(own, list(TRACED))
    exact = _in_turns(own, list(EXACT))
    while True:
        kind = KINDS[turn % len(KINDS)]
        spec = _traced(own, next(traced)) if kind == "traced" else _exact(own, next(exact), kind)
        if spec is not None and spec["name"] not in names:
            names.add(spec["name"])
            turn += 1
            yield spec


def _in_turns(own: random.Random, names: list[str]) -> Iterator[str]:
    """Every name once, shuffled, and again."""
    while True:
        own.shuffle(names)
        yield from names


def _exact(own: random.Random, preset: str, kind: str) -> dict[str, Any] | None:
    layers = own.choice(EXACT[preset])
    training = _full(own) if kind == "full" else _lora(own, preset, four_bit=kind == "4-bit")
    if preset == "gemma-4-26b-a4b" and kind == "4-bit":  # refused: experts are no linear layers
        return None
    training["compile"] = kind == "full" and not preset.startswith("gemma-4") and own.random() < 0.2
    source = resolve_model(preset, weights="random")
    config = shortened(dict(json.loads((source.folder / "config.json").read_text(encoding="utf-8"))), layers)
    return _spec(own, f"{preset}, {layers} layers" if config else preset, preset, config, training)


def _traced(own: random.Random, name: str) -> dict[str, Any]:
    file = ARCHITECTURES / name / "config.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"model_type": name}
    changes = dict(TRACED[name])
    config = shortened(known, changes.pop("num_hidden_layers", 0), always=True) | changes
    config.pop("dtype", None)
    training = _full(own) if own.random() < 0.75 else _lora(own, name, four_bit=False)
    return _spec(own, name, name, config, training | {"compile": False}, longest=2048) | {"traced": True}


def shortened(config: dict[str, Any], layers: int, *, always: bool = False) -> dict[str, Any]:
    """`config` with its first layers; empty, unless it is wanted `always`, where it has no more."""
    count = config.get("num_hidden_layers", 0)
    if not layers or count == layers:
        return config if always else {}
    lists = {key: value[:layers] for key, value in config.items() if isinstance(value, list) and len(value) == count}
    if shared := config.get("num_kv_shared_layers"):
        lists["num_kv_shared_layers"] = shared * layers // count
    if isinstance(config.get("pad_token_id"), list):
        del config["pad_token_id"]
    return {**config, **lists, "num_hidden_layers": layers}


def _full(own: random.Random) -> dict[str, Any]:
    training: dict[str, Any] = dict(own.choice([BFLOAT16, BFLOAT16, {"dtype": "bfloat16"}]))
    training["optim"] = own.choice(["adamw", "adamw_8bit", "adafactor"])
    training["gradient_checkpointing"] = own.choice([False, False, 0.5, True])
    if own.random() < 0.25:
        training["optim_in_backward"] = True
    else:
        training["gradient_accumulation_steps"] = own.choice([1, 1, 2])
    return training


def _lora(own: random.Random, preset: str, *, four_bit: bool) -> dict[str, Any]:
    targets = FUSED_TARGETS if preset.startswith("phi-4") else TARGETS
    training: dict[str, Any] = {
        "dtype": "bfloat16",
        "lora_rank": own.choice([8, 16, 64]),
        "lora_alpha": own.choice([8, 32]),
        "lora_target_modules": own.choice(targets) if preset in EXACT else "all-linear",
        "lora_dropout": own.choice([0.0, 0.0, 0.1]),
        "gradient_checkpointing": own.choice([False, 0.5, True]),
    }
    return training | ({"load_in_4bit": True} if four_bit else {})


def _spec(
    own: random.Random, title: str, preset: str, config: dict[str, Any], training: dict[str, Any], longest: int = 4096
) -> dict[str, Any]:
    length = own.choice([size for size in (256, 512, 1024, 2048, 4096) if size <= longest])
    rows = own.choice([rows for rows in (1, 2, 3, 4, 8) if rows * length <= 8192])
    packing = own.random() > 0.2 or training["compile"]
    words = ", ".join(f"{name}={value}" for name, value in training.items())
    spec: dict[str, Any] = {
        "name": f"{title} {rows}x{length} {words}" + ("" if packing else ", unpacked"),
        "preset": preset,
        "settings": {
            "model": {"weights": "random"},
            "data": {"max_length": length, "packing": packing},
            "training": {"per_device_train_batch_size": rows, **training},
            "evaluation": {"per_device_eval_batch_size": rows, "max_new_tokens": 8},
        },
    }
    return spec | ({"config": config} if config else {})


def write_config(spec: dict[str, Any], folder: Path) -> None:
    """The config.json of a case that has one of its own; its weights are random."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json_text(spec["config"]), encoding="utf-8")
