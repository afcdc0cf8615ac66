"""Causal language models that no row knows, trained by the program and by a plain loop of transformers.

    python -m benchmarks.any_model --into FOLDER [--seed 23] [--count 30] [--only NAME ...]

Draws model types from the auto-mapping of transformers by the seed, makes a tiny model with random weights of each, and trains
it for five steps: through `tunix-rt train`, and in a loop that passes one example at a time through the model and uses
torch's AdamW. Results append to FOLDER/any_model.jsonl, one line a model; a series that is started again goes on.
"""

import argparse
import dataclasses
import json
import random
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

STEPS, TOLERANCE = 5, 1e-5
LEARNING_RATE = 1e-3
SMALL: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.05, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256, "n_inner": 64, "d_model": 32, "d_inner": 64, "d_head": 8,
    "ffn_dim": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "num_layers": 2, "num_heads": 4,
    "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "embedding_size": 32, "d_ff": 64, "emb_dim": 32,
    "n_layers": 2, "n_heads": 4, "word_embed_proj_dim": 32, "decoder_ffn_size": 64, "rotary_dim": 4, "state_size": 8,
    "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "shared_expert_intermediate_size": 32,
    "time_step_rank": 4, "expand": 2, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "mamba_expand": 2, "attention_hidden_size": 32, "type_vocab_size": 2, "max_target_positions": 256,
    "moe_num_experts": 4, "moe_topk": 2, "moe_k": 2, "moe_num_shared_experts": 1, "max_seq_len": 256,
}  # fmt: skip
"""Sizes by the names that configuration classes have for them; each class takes those it knows."""
SPECIAL = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_cache": True,
    "is_decoder": True,
    "tie_word_embeddings": True,
    "forced_eos_token_id": None,
}


def mapped() -> list[str]:
    """Model types of causal language models in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def text_type(name: str) -> str:
    """The model type that is trained of `name`: of a multimodal model, that of its text model."""
    import transformers

    kind = transformers.CONFIG_MAPPING[name]
    inner = kind.sub_configs.get("text_config")
    if inner is None:
        return name
    found = (
        inner.model_type if inner is not transformers.AutoConfig else kind().get_text_config(decoder=True).model_type
    )
    return str(found)


def draw(seed: int, known: set[str], count: int) -> Iterator[tuple[str, str | None]]:
    """Model types in the order of the seed, until `count` are to be tried: (name, why it is not tried). A row that is added later
    moves no other type: it is not tried any more, and the next of the order is."""
    order = mapped()
    random.Random(seed).shuffle(order)
    tried: set[str] = set()
    for name in order:
        text = text_type(name)
        if name in known:
            yield name, "it has an exact row"
        elif text in known:
            yield name, f"multimodal: its text model {text} has an exact row"
        elif text in tried:
            yield name, f"multimodal: its text model {text} is tried"
        else:
            tried.add(text)
            yield (name, None) if text == name or text not in order else (text, None)
        if len(tried) == count:
            return


VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": None})
"""Sizes that do not fit every class together; the first with which a plain forward pass works is taken."""
OWN: dict[str, dict[str, Any]] = {
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 64},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "xmod": {"default_language": "en_XX", "languages": ("en_XX",)},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Sizes that one class alone has, or limits to one value."""


def tiny_config(name: str, changes: dict[str, Any]) -> Any:
    """A configuration of `name` with the sizes above; lists and flags of layers are left to the class. That of a multimodal model
    has a text model of these sizes, which is all that is loaded of it."""
    import transformers

    kind = transformers.CONFIG_MAPPING[name]
    if inner := kind.sub_configs.get("text_config") or kind.sub_configs.get("decoder"):
        return kind(**{"text_config" if "text_config" in kind.sub_configs else "decoder": _tiny(inner, name, changes)})
    return _tiny(kind, name, changes)


def _tiny(kind: Any, name: str, changes: dict[str, Any]) -> Any:
    fields, plain = {field.name for field in dataclasses.fields(kind)}, kind()
    sizes = SMALL | SPECIAL | changes | OWN.get(name, {})
    chosen = {key: value for key, value in sizes.items() if key in fields and (value is not None or key in SPECIAL)}
    chosen |= {
        key: 0.0 for key in fields if "drop" in key and key not in chosen and isinstance(getattr(plain, key, 0), float)
    }
    return kind(**chosen)


def make(name: str, folder: Path, root: Path) -> int:
    """A tiny model with random weights and a tokenizer; its parameters."""
    import torch
    import transformers

    from tunix_rt.engines.torch.model import text_config, without_cache

    model: Any = None
    for changes in VARIANTS:
        torch.manual_seed(0)
        try:
            config = tiny_config(name, changes)
            inner = text_config(config)
            build = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            _refuse_large(build, inner)
            model = build(inner).float()
            model(input_ids=torch.arange(3, 12)[None], **without_cache(model))
            break
        except Exception as error:  # sizes that do not fit each other
            if changes is VARIANTS[-1] and model is None:
                raise
            print(f"{name}: a plain forward pass fails with {changes}: {error}", file=sys.stderr)
    assert model is not None
    model.save_pretrained(folder)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "models" / "tiny-gemma3" / file, folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _refuse_large(build: Any, config: Any) -> None:
    """Sizes that no name above covers would fill the memory."""
    import torch

    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build(config).parameters())
    if count > 20_000_000:
        raise ValueError(f"{count:,} parameters: not tiny")


def settings(folder: Path, out: Path) -> list[str]:
    given = {
        "data.max_length": 128, "data.on_overflow": "drop", "training.learning_rate": LEARNING_RATE,
        "training.lr_scheduler_type": "constant",
        "training.per_device_train_batch_size": 3, "training.gradient_accumulation_steps": 2, "evaluation.enabled": "false",
        "data.validation_fraction": 0, "training.max_grad_norm": 1.0, "training.gradient_checkpointing": 0.5,
    }  # fmt: skip
    words = [
        "train",
        "--model",
        str(folder),
        "--data",
        "dev-reasoning-v2",
        "--device",
        "cpu",
        "--max-steps",
        str(STEPS),
    ]
    return [
        *words,
        "--output",
        str(out),
        *(word for key, value in given.items() for word in ("--set", f"{key}={value}")),
    ]


def plain_losses(folder: Path, out: Path) -> list[float]:
    """One example at a time through transformers, gradients of the token mean over the step, torch's AdamW."""
    import numpy as np
    import torch
    import transformers

    from tunix_rt.config.load import load_config
    from tunix_rt.data.packing import IGNORED
    from tunix_rt.data.prepare import prepare
    from tunix_rt.engines.torch.model import without_cache
    from tunix_rt.train.context import find_tokenizer
    from tunix_rt.train.loop import batches_of

    config = load_config(out / "config.yaml")
    tokenizer, facts = find_tokenizer(config)
    data = prepare(config, tokenizer, facts, lambda *_: None)
    batch_of = batches_of(config, data, tokenizer.pad_id, config.training.per_device_train_batch_size)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(1, STEPS + 1):
        batch, total = batch_of(step), 0.0
        for micro in batch.micro_batches:
            for ids, labels, positions in zip(micro.ids, micro.labels, micro.positions, strict=True):
                starts = [*np.flatnonzero(positions == 0).tolist(), len(ids)]
                for start, end in pairwise(starts):
                    targets = torch.from_numpy(labels[start + 1 : end])
                    if bool((targets == IGNORED).all()):
                        continue
                    inputs = {"input_ids": torch.from_numpy(ids[start:end])[None], **without_cache(model)}
                    logits = model(**inputs).logits[0, :-1].float()
                    loss = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
                    (loss / batch.target_tokens).backward()
                    total += float(loss.detach().double()) / batch.target_tokens
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def trial(name: str, into: Path, root: Path) -> dict[str, Any]:
    folder, out = into / name, into / f"{name}-run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    try:
        parameters = make(name, folder, root)
    except Exception as error:  # noqa: BLE001  the classes refuse sizes in ways of their own
        return {"name": name, "outcome": "not built", "why": f"{type(error).__name__}: {str(error)[:200]}"}
    done = subprocess.run(
        [sys.executable, "-m", "tunix_rt", *settings(folder, out)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )
    found: dict[str, Any] = {"name": name, "parameters": parameters, "exit_code": done.returncode}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "  fix:"))]
        crashed = "Traceback" in done.stderr
        return found | {
            "outcome": "crashed" if crashed else "refused",
            "why": (" ".join(lines)[:500] or done.stderr[-500:]).replace(f"{into}/", ""),
        }
    ours = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    log = (out / "training_log.txt").read_text()
    shown = [
        line.split(" INFO ", 1)[1]
        for line in log.splitlines()
        if any(f" INFO {what}:" in line for what in ("Packing", "Loss head", "Activation checkpointing", "Frozen"))
    ]
    try:
        plain = plain_losses(folder, out)
    except Exception as error:  # noqa: BLE001
        return found | {"outcome": "no plain loop", "why": f"{type(error).__name__}: {str(error)[:200]}"}
    off = max(abs(one - other) / abs(other) for one, other in zip(ours, plain, strict=True))
    memory = json.loads((out / "memory.json").read_text())
    return found | {"outcome": "trained" if off <= TOLERANCE else "differs", "largest_difference": off, "losses": ours,
                    "support": shown, "predicted_bytes": memory["predicted_bytes"], "measured_bytes": memory["measured_bytes"],
                    **{package: version(package) for package in ("torch", "transformers")}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    from tunix_rt.models.families import FAMILIES

    root, results = Path(__file__).resolve().parent.parent, args.into / "any_model.jsonl"
    args.into.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["name"] for line in results.read_text().splitlines()} if results.exists() else set()
    drawn = [(name, None) for name in args.only] if args.only else draw(args.seed, set(FAMILIES), args.count)
    for name, why in drawn:
        if name in done:
            continue
        try:
            found = {"name": name, "outcome": "not tried", "why": why} if why else trial(name, args.into, root)
        except Exception:  # noqa: BLE001
            found = {"name": name, "outcome": "failed", "why": traceback.format_exc()[-400:]}
        print(json.dumps({key: value for key, value in found.items() if key != "losses"}), flush=True)
        with results.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
