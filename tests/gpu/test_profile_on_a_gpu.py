"""Where the time of a step goes on a real NVIDIA GPU: every kernel is known, and the parts add up to the step."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.conftest import SHIPPED
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines import step_time as parts
from tunix_rt.engines.step_time import breakdown
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.engines.torch.profile import dense_product, profiled
from tunix_rt.engines.trace import read_trace
from tunix_rt.models.resolve import resolve_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]

VOCABULARY, LENGTH, ROWS = 32_768, 1024, 4
_GEMMA = {
    "model_type": "gemma", "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_GEMMA2 = {
    **_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 256,
}  # fmt: skip
_NARROW = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
CASES = {
    "gemma": (_GEMMA, _NARROW),
    "gemma, least memory": (_GEMMA, {**_NARROW, "optim_in_backward": True, "gradient_checkpointing": True}),
    "gemma2": (_GEMMA2, _NARROW),
    "gemma, float32": (_GEMMA, {"dtype": "float32"}),
}


def taken(folder, config, settings, record=None):
    """Losses of ten steps, and the engine that took them; `record` wraps the steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    draw = np.random.default_rng(4)
    examples = [
        Example(ids=draw.integers(3, VOCABULARY, size, dtype=np.int32), trained=np.ones(size, dtype=np.bool_))
        for size in draw.integers(100, 600, 200).tolist()
    ]
    rows = make_rows(examples, max_length=LENGTH, packing=True)
    training = Training(seed=3, lr_scheduler_type="constant", **settings)
    engine = engine_of.load(resolve_model(str(folder), weights="random"), device="cuda", training=training)
    optimizer = engine_of.make_optimizer(engine, training)
    batch = partial(batch_of_step, rows, micro_batch_size=ROWS, accumulation=1, seed=5, pad_id=0)
    steps = engine_of.optimizer_steps(engine, optimizer, batch, training, first=1, total=10)
    return [step.loss for step in (record(engine, steps) if record else steps)], engine


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_of_a_step_is_known_and_the_parts_sum_to_the_step(case, tmp_path):
    trace, products = tmp_path / "trace.json.gz", []

    def record(engine, steps):
        done = partial(lambda: products.append((engine.peak_bytes(), dense_product(engine), engine.peak_bytes())))
        return profiled(steps, engine, trace, passed=5, count=3, done=done)

    losses, _ = taken(tmp_path / "model", *CASES[case], record)
    plain, _ = taken(tmp_path / "model", *CASES[case])
    assert losses == pytest.approx(plain, rel=1e-2), "recording changes no result"
    assert not torch.autograd.profiler._is_profiler_enabled
    found = breakdown(read_trace(trace))
    told = "\n".join(
        f"{part.milliseconds:8.3f} ms {100 * part.share:5.1f} % {part.calls:6.0f}  {part.name}  "
        + ", ".join(f"{one.name} {one.milliseconds:.3f}" for one in part.largest)
        for part in found.parts
    )
    print(f"\n{case}: {found.milliseconds:.3f} ms a step\n{told}\n{products}")
    assert found.on_gpu and found.steps == 3
    assert math.fsum(part.milliseconds for part in found.parts) == pytest.approx(found.milliseconds, rel=1e-9), told
    unknown = math.fsum(part.milliseconds for part in found.parts if part.name.startswith(parts.OTHER))
    busy = found.milliseconds - math.fsum(part.milliseconds for part in found.parts if part.name == parts.WAITED)
    assert unknown < 0.02 * busy, told
    shares = {part.name: part.milliseconds for part in found.parts}
    for part in (
        parts.LAYER_MATMULS, parts.HEAD_MATMULS, parts.HEAD_REST, parts.ATTENTION, parts.ELEMENTWISE, parts.UPDATE,
        parts.LOOKUP,
    ):  # fmt: skip
        assert shares.get(part, 0) > 0, f"{part} took no time\n{told}"
    ((before, product, after),) = products
    assert abs(before - after) <= 2**20, "the plain product leaves the peak memory as it was"
    assert product.tflops > 10 and product.size == 8192, product


def test_the_plain_product_leaves_the_peak_memory_of_a_tiny_model_as_it_was():
    engine = engine_of.load_for_inference(resolve_model("tiny-gemma3"), device="cuda", dtype="bfloat16")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    grown = torch.empty(2**24, dtype=torch.uint8, device="cuda")
    del grown
    before = engine.peak_bytes()
    assert dense_product(engine).size == 8192
    assert abs(engine.peak_bytes() - before) <= 2**20, (before, engine.peak_bytes())
