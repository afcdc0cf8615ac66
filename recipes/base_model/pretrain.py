"""Make `models/tiny-gemma3` from nothing: `python -m recipes.base_model.pretrain` (one GPU, minutes; a CPU works, slowly).

Corpus and tokenizer are pure functions of the seed. The loop is the product's own, `torch_backend.optimizer_steps`.
"""

import argparse
import hashlib
import json
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from recipes.base_model.corpus import closed_keys, documents
from recipes.base_model.tokenizer import SPECIAL, VOCABULARY, save_tokenizer, train_tokenizer
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import Row, StepBatch, batch_of_step
from tunix_rt.data.tokenizer import load_tokenizer
from tunix_rt.models.resolve import ModelSource

ROW_TOKENS = 256
DOCUMENTS_PER_SHARD = 5_000

# 2.9 M parameters: five gated layers of width 192, four query heads on one key-value head, four local layers to one global.
CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "query_pre_attn_scalar": 48,
    "max_position_embeddings": 512,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": SPECIAL.index("<bos>"),
    "eos_token_id": SPECIAL.index("<eos>"),
    "pad_token_id": SPECIAL.index("<pad>"),
    "dtype": "bfloat16",
}


def _shard(number: int, *, seed: int) -> list[str]:
    return list(documents(f"base/{seed}/{number}", DOCUMENTS_PER_SHARD, closed_keys()))


def _shard_rows(number: int, *, seed: int, folder: Path) -> list[Row]:
    """Documents laid end to end into rows of 256 tokens, positions restarting with each; the tail of a document is cut."""
    tokenizer = load_tokenizer(folder)
    rows: list[Row] = []
    ids: list[int] = []
    positions: list[int] = []
    for text in _shard(number, seed=seed):
        document = [*tokenizer.prefix, *tokenizer.encode(text), tokenizer.eos_id]
        ids += document
        positions += range(len(document))
        if len(ids) >= ROW_TOKENS:
            rows.append(
                Row(
                    ids=np.asarray(ids[:ROW_TOKENS], dtype=np.int32),
                    trained=np.ones(ROW_TOKENS, dtype=np.bool_),
                    positions=np.asarray(positions[:ROW_TOKENS], dtype=np.int32),
                )
            )
            ids, positions = [], []
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain the shipped base model.")
    parser.add_argument("--out", type=Path, default=Path("models/tiny-gemma3"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--rows-per-step", type=int, default=256)
    parser.add_argument("--shards", type=int, default=160, help="of 5,000 documents each")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    import torch
    from safetensors.torch import load_file, save_file

    from tunix_rt.engines.torch import loop as engine_of

    started = time.perf_counter()
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    with ProcessPoolExecutor() as pool:
        texts = pool.map(partial(_shard, seed=options.seed), range(min(8, options.shards)))
        save_tokenizer(train_tokenizer(text for shard in texts for text in shard), folder)
        shards = pool.map(partial(_shard_rows, seed=options.seed, folder=folder), range(options.shards))
        rows = [row for shard in shards for row in shard]
    print(f"{len(rows):,} rows of {ROW_TOKENS} tokens after {time.perf_counter() - started:.0f} s", flush=True)

    source = ModelSource(name="tiny-gemma3", folder=folder, revision="new", weights="random", config=CONFIG)
    training = Training(
        device=options.device, learning_rate=options.learning_rate, lr_scheduler_type="cosine", warmup_steps=200,
        weight_decay=0.1, adam_beta2=0.95, seed=options.seed, max_steps=options.steps,
    )  # fmt: skip

    engine = engine_of.load(source, device=options.device, training=training)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU that has it; the checks at load are made without

    def batch_of(step: int) -> StepBatch:
        return batch_of_step(
            rows, step, micro_batch_size=options.rows_per_step, accumulation=1, seed=options.seed, pad_id=0
        )

    optimizer = engine_of.make_optimizer(engine, training)
    losses: list[float] = []
    for step in engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=options.steps):
        losses.append(step.loss)
        if step.step % 100 == 0 or step.step == 1:
            print(f"step {step.step:5d}  loss {step.loss:.4f}  {step.tokens / step.seconds:,.0f} tokens/s", flush=True)

    engine_of.save(engine, folder.with_name(f"{folder.name}-full"), tokenizer_folder=folder)
    weights = load_file(folder.with_name(f"{folder.name}-full") / "model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    facts = {
        "parameters": engine.parameters,
        "rows": len(rows),
        "tokens_trained": options.steps * options.rows_per_step * ROW_TOKENS,
        "steps": options.steps,
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "final_loss": sum(losses[-50:]) / len(losses[-50:]),
        "seconds": round(time.perf_counter() - started),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "recipe": "python -m recipes.base_model.pretrain",
    }
    (folder / "manifest.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
