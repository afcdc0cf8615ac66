"""What XLA needs for a step, beside the lower bound of the plan: run in a process of its own by test_jax_memory_bound.py.

    python -m tests.invariant.jax_memory_side CASE...

A case is FAMILY,ROWS,LENGTH,ACCUMULATION,DTYPE,MASTER,OPTIM,CHECKPOINTING; one line of JSON for each.
"""

import json
import sys

import jax

from tunix_rt.config.load import build_config
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.jax.load import compiled_parts
from tunix_rt.engines.jax.mesh import make_mesh, rows_for
from tunix_rt.engines.jax.step import compile_step, step_plan
from tunix_rt.plan.jax_floor import predict_jax
from tunix_rt.plan.shape import shape_of

GEMMA = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
WINDOWED = GEMMA | {"sliding_window": 128, "query_pre_attn_scalar": 64}
FAMILIES = {
    "gemma": GEMMA | {"model_type": "gemma"},
    "gemma2": WINDOWED | {"model_type": "gemma2"},
    "gemma3": WINDOWED | {"model_type": "gemma3_text"},
    "llama": GEMMA | {"model_type": "llama", "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192, "n_positions": 1024,
        "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0,
    },
}  # fmt: skip


def compared(case: str) -> dict[str, object]:
    family, rows, length, accumulation, dtype, master, optim, recomputed = case.split(",")
    settings = {
        "backend": "jax", "per_device_train_batch_size": int(rows), "gradient_accumulation_steps": int(accumulation),
        "dtype": dtype, "optim": optim, "gradient_checkpointing": {"none": False, "all": True}.get(recomputed, 0.5),
    }  # fmt: skip
    settings |= {} if master == "-" else {"master_dtype": master}
    config = build_config({"training": settings, "data": {"max_length": int(length)}}, "case")
    mesh, model = make_mesh(), FAMILIES[family]
    together = rows_for(mesh, int(rows) * mesh.size)
    plan = step_plan(architecture_of(model), config.training, platform="cpu", rows=together, tokens=int(length))
    needed = sum(compiled_parts(compile_step(plan, mesh, together, int(length))).values())
    predicted = predict_jax(shape_of(model), config, device="cpu", devices=len(jax.devices()))
    return {"case": case, "needed": needed, "floor": predicted.peak_bytes // mesh.size}


if __name__ == "__main__":
    for one in sys.argv[1:]:
        print(json.dumps(compared(one)), flush=True)
