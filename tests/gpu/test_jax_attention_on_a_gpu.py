"""cuDNN's attention of the JAX engine against masks of tokens x tokens: what it gives, and its gradients.

jax has a process of its own, which takes only what it needs of the GPU: torch holds some in this one.
"""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.program import environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax"),
]

TOLERANCE = 0.01
"""Of the root mean square of the difference, in that of the exact result: several times the rounding to bfloat16."""
TOKENS = 512
FEW, MANY = [0, 100, 101, 400], list(range(0, TOKENS, 16))
"""Where examples begin. A row of 512 tokens may have 16 of them; 32 are computed row by row."""
CASES = {
    f"heads of {size}, {'a window' if window else 'no window'}, {heads} over {shared}, {name}": {
        "size": size, "window": window, "heads": heads, "shared": shared, "starts": starts,
    }
    for size in (256, 64)
    for window in (None, 70)
    for heads, shared in ((4, 4), (4, 1))
    for name, starts in {"few examples": [FEW, [0]], "a row of many": [FEW, MANY]}.items()
}  # fmt: skip

CHILD = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from tunix_rt.engines.jax import attention as jax_attention
from tunix_rt.engines.jax.architecture import architecture_of
from tunix_rt.engines.jax.model import exact_attention

told = json.loads(sys.stdin.read())
tokens = told["tokens"]


def rms(array):
    return float(jnp.sqrt(jnp.mean(jnp.square(array.astype(jnp.float32)))))


def differences(size, window, heads, shared, starts):
    config = {
        "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": size, "query_pre_attn_scalar": size,
        "max_position_embeddings": tokens, "sliding_window": window or tokens,
        "layer_types": ["sliding_attention" if window else "full_attention"],
    }
    architecture = architecture_of(config)
    name, _, why = jax_attention.choose_attention("gpu", architecture, "bfloat16", tokens)
    if name != "cudnn":
        print(json.dumps({"unable": why}))
        sys.exit()
    places = np.arange(tokens)
    segments = jnp.asarray(np.stack([np.searchsorted(of, places, side="right") for of in starts]), jnp.int32)
    drawn = np.random.default_rng(0)
    counts = (heads, shared, shared, heads)
    *given, slope = (
        jnp.asarray(drawn.standard_normal((len(starts), tokens, of, size)), jnp.bfloat16) for of in counts
    )

    def found(attention, kind):
        def mixed(*heads):
            return attention(*heads, segments=segments, kind=jnp.int32(0), architecture=architecture)

        def both(*heads):
            value, back = jax.vjp(mixed, *heads)
            return value, *back(slope.astype(value.dtype))

        return jax.jit(both)(*(array.astype(kind) for array in given))

    with jax.default_matmul_precision("highest"):
        exact = found(exact_attention, jnp.float32)
    fast = found(jax_attention.attention_named("cudnn"), jnp.bfloat16)
    return {
        part: rms(one.astype(jnp.float32) - other.astype(jnp.float32)) / rms(other)
        for part, one, other in zip(("output", "query", "key", "value"), fast, exact, strict=True)
    }


print(json.dumps({case: differences(**of) for case, of in told["cases"].items()}))
"""


@pytest.fixture(scope="module")
def measured():
    """Case -> part -> the difference, as a share of the exact result."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps({"tokens": TOKENS, "cases": CASES}), cwd=ROOT,
        env=environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "unable" in found:
        pytest.skip(found["unable"])
    return found


@pytest.mark.parametrize("case", CASES)
def test_cudnn_gives_what_the_masks_give_and_its_gradients(measured, case):
    assert set(measured[case]) == {"output", "query", "key", "value"}
    for part, share in measured[case].items():
        assert share < TOLERANCE, f"{part}: {share:.4f} of the exact one"
