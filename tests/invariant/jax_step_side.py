"""The JAX side of test_jax_step.py, with eight virtual devices: `python -m tests.invariant.jax_step_side FAMILY TYPE STEPS WAY`.

Each WAY is walked from the same weights over the same rows. What was found is printed as JSON.
"""

import json
import sys

import jax
import numpy as np

from tunix_rt.config.settings import Training
from tunix_rt.engines.jax import mesh as jax_mesh
from tunix_rt.engines.jax import optim as jax_optim
from tunix_rt.engines.jax import step as jax_step
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.jax.model import Batch
from tunix_rt.engines.jax.weights import parameter_shapes

ROWS, TOKENS, VOCABULARY = 16, 24, 64
ROTARY = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
CONFIGS = {
    "gemma3": ROTARY | WINDOWS | {"model_type": "gemma3_text"},
    "gemma": ROTARY | {"model_type": "gemma"},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY + 1,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    }
    | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
DEVICES = {"one": (1, 1), "eight": (8, 1), "replicas": (8, 2), "accumulated": (8, 1), "again": (8, 1), "kept": (8, 1)}
SETTINGS = {"accumulated": {"gradient_accumulation_steps": 2}, "kept": {"gradient_checkpointing": False}}


class Walk:
    """Training from fixed weights, one step at a time."""

    def __init__(self, family, dtype, way, **settings):
        devices, replicas = DEVICES[way]
        self.architecture = architecture_of(CONFIGS[family])
        self.mesh = jax_mesh.make_mesh(jax.devices()[:devices], replicas=replicas)
        asked = {"dtype": dtype, "gradient_checkpointing": True, "weight_decay": 0.1} | SETTINGS.get(way, {}) | settings
        training = Training(**asked)
        self.rows = ROWS // training.gradient_accumulation_steps
        self.plan = jax_step.step_plan(self.architecture, training, platform="cpu", rows=self.rows, tokens=TOKENS)
        self.compiled = jax_step.compile_step(self.plan, self.mesh, self.rows, TOKENS)
        self.state = self.fresh()

    def fresh(self):
        drawn, place = np.random.default_rng(0), jax_step.abstract_state(self.plan, self.mesh)
        params = jax.tree.map(
            lambda shape: (0.2 * drawn.standard_normal(shape)).astype(self.plan.weights),
            parameter_shapes(self.architecture), is_leaf=lambda shape: isinstance(shape, tuple),
        )  # fmt: skip
        state = jax_step.State(params, jax_optim.init(params, self.plan.optim))
        return jax.device_put(state, jax.tree.map(lambda array: array.sharding, place))

    def batches(self, step):
        """Two examples in a row, and rows whose number of targets differs."""
        drawn, places = np.random.default_rng(step % 4), np.arange(TOKENS)
        ids = drawn.integers(1, VOCABULARY, (ROWS, TOKENS), dtype=np.int32)
        starts = drawn.integers(4, TOKENS - 4, (ROWS, 1))
        after = places >= starts
        weights = (drawn.random((ROWS, TOKENS)) < drawn.random((ROWS, 1))).astype(np.float32)
        batch = Batch(
            ids=ids, positions=np.where(after, places - starts, places).astype(np.int32),
            segments=after.astype(np.int32), targets=np.roll(ids, -1, axis=1), weights=weights,
        )  # fmt: skip
        cut = (self.plan.accumulation, self.rows, TOKENS)
        return jax.device_put(Batch(*(array.reshape(cut) for array in batch)), jax_mesh.batch_sharding(self.mesh))

    def step(self, step, **changed):
        batches = self.batches(step)._replace(**changed)
        given = {"step": step, "rate": 1e-3, "target_tokens": int(np.asarray(batches.weights).sum())}
        self.state, loss, norm = self.compiled(self.state, batches, **jax_step.numbers(self.plan, **given))
        return float(loss), float(norm)

    def curve(self, steps):
        return [self.step(step)[0] for step in range(1, steps + 1)]

    def host(self):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.state)]


def same(some, others):
    return all(one.tobytes() == other.tobytes() for one, other in zip(some, others, strict=True))


def parts(walk):
    """Of each array that is cut: what one device has of it."""
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(walk.state):
        held = {shard.data.size for shard in array.addressable_shards}
        found[jax.tree_util.keystr(path)] = [array.size, *sorted(held)]
    return found


def bytes_of(walk):
    memory = walk.compiled.memory_analysis()
    return [memory.argument_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes]


def unsound(walk):
    """Whether the state stays as it is when the loss is no number, and the loss and norm that come back."""
    before = walk.host()
    wrong = jax.device_put(np.full_like(walk.batches(1).ids, VOCABULARY), jax_mesh.batch_sharding(walk.mesh))
    loss, norm = walk.step(99, ids=wrong)
    return {"same": same(before, walk.host()), "loss": str(loss), "norm": str(norm)}


def seeded():
    """Whether a step of bfloat16 weights is the same again, and another with another seed or number."""
    ends, walks = {}, [Walk("gemma3", "bfloat16", "one", master_dtype="bfloat16", seed=seed) for seed in (0, 1)]
    for name, seed, step in (("first", 0, 1), ("again", 0, 1), ("seed", 1, 1), ("step", 0, 5)):
        walks[seed].state = walks[seed].fresh()
        walks[seed].step(step)
        ends[name] = walks[seed].host()
    return {name: same(ends["first"], ends[name]) for name in ("again", "seed", "step")}


def main(family, dtype, steps, *ways):
    found = {"curves": {}, "parts": {}, "bytes": {}}
    for way in ways:
        if way == "seeded":
            found["seeded"] = seeded()
            continue
        walk = Walk(family, dtype, way)
        found["curves"][way] = walk.curve(int(steps))
        found["parts"][way], found["bytes"][way] = parts(walk), bytes_of(walk)
        if way == "eight":
            found["unsound"] = unsound(walk)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
