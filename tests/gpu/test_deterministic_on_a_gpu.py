"""Deterministic mode on a real NVIDIA GPU: two runs, and one that was interrupted, end in the same bits.

Each case is a process of its own, as a run is: cuBLAS reads its setting when it starts, and `load` has to be in time.

    python tests/gpu/test_deterministic_on_a_gpu.py CASE FOLDER DEVICE
"""

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import SHIPPED
from tests.program import ROOT, environment
from tunix_rt.config.settings import Training
from tunix_rt.data.packing import batch_of_step, make_rows
from tunix_rt.data.render import Example
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.models.resolve import resolve_model

pytestmark = pytest.mark.gpu

STEPS, STOP = 8, 3
VOCABULARY = 8192
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_SLIDES = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 256}
_GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64, **_SLIDES}
_GEMMA3 = {"model_type": "gemma3_text", "query_pre_attn_scalar": 64, **_SLIDES}
_NARROW = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
CASES = {
    "varlen": (_GEMMA3, _NARROW),
    "varlen-recomputed": (_GEMMA3, {**_NARROW, "gradient_checkpointing": 0.5}),
    "sdpa": ({"model_type": "llama"}, {"dtype": "float32"}),
    "flex": ({"model_type": "gemma2", **_GEMMA2}, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_runs_and_one_that_was_interrupted_end_in_the_same_bits(case, tmp_path):
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    surroundings = environment(PYTHONPATH=path)
    surroundings.pop("CUBLAS_WORKSPACE_CONFIG", None)
    done = subprocess.run(
        [sys.executable, __file__, case, str(tmp_path), "cuda"],
        cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["attention"] == case.split("-")[0] and found["tied"]
    first, again, resumed = found["deterministic"]
    assert again == first, "the same run once more"
    assert resumed == first, "interrupted in the middle and continued"
    assert first["losses"][-1] < first["losses"][0]
    times = found["milliseconds"]
    print(
        f"{case}: {times['deterministic']:.1f} ms a step, {times['plain']:.1f} ms without: "
        f"{100 * (times['deterministic'] / times['plain'] - 1):+.1f} %; "
        f"two plain runs {'are equal too' if found['plain'][0] == found['plain'][1] else 'differ'}"
    )


# --- in the process of a case ----------------------------------------------------------------------------------------


def write_model(case: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**_SIZES, **CASES[case][0]}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((SHIPPED / name).read_bytes())
    return folder


def drawn_rows(longest: int):
    """Packed examples in which a few tokens come very often: many gradients meet in one row of the table."""
    draw = np.random.default_rng(3)
    examples = []
    for size in draw.integers(longest // 16, longest // 2, 48).tolist():
        ids = 3 + np.minimum(draw.zipf(1.3, size), VOCABULARY - 4).astype(np.int32)
        examples.append(Example(ids=ids, trained=np.ones(size, dtype=np.bool_)))
    return make_rows(examples, max_length=longest, packing=True)


class Run:
    """A model of a case with its optimizer, as after `load`."""

    def __init__(self, case: str, folder: Path, device: str, *, deterministic: bool) -> None:
        self.training = Training(learning_rate=1e-3, deterministic=deterministic, seed=7, **CASES[case][1])
        source = resolve_model(str(folder), weights="random")
        self.engine = engine_of.load(source, device=device, training=self.training)
        self.optimizer = engine_of.make_optimizer(self.engine, self.training)
        rows = drawn_rows(1024 if device == "cuda" else 64)
        self.batches = partial(batch_of_step, rows, micro_batch_size=4, accumulation=2, seed=5, pad_id=0)

    def walk(self, *, first: int = 1, last: int = STEPS):
        steps = engine_of.optimizer_steps(
            self.engine, self.optimizer, self.batches, self.training, first=first, total=STEPS
        )
        return list(itertools.islice(steps, last - first + 1))

    def end(self, steps) -> dict[str, object]:
        """What must be equal: every loss and norm, and the bits of weights and optimizer."""
        content = hashlib.sha256()
        for name, tensor in sorted({**dict(self.engine.model.named_parameters()), **self.optimizer.tensors()}.items()):
            content.update(
                name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        return {
            "losses": [step.loss for step in steps],
            "norms": [step.grad_norm for step in steps],
            "bits": content.hexdigest(),
        }


def run_case(case: str, folder: Path, device: str) -> dict[str, object]:
    begin = partial(Run, case, write_model(case, folder / "model"), device)
    ends: dict[bool, list[dict[str, object]]] = {True: [], False: []}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for deterministic in (True, True, False, False):
        run = begin(deterministic=deterministic)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        steps = run.walk()
        ends[deterministic].append(run.end(steps))
        seconds[deterministic] += [step.seconds for step in steps[3:]]  # kernels are chosen and compiled in the first
    before = begin(deterministic=True)
    steps = before.walk(last=STOP)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    engine_of.write_direct(before.engine, before.optimizer, checkpoint)
    after = begin(deterministic=True)
    engine_of.restore_state(after.engine, after.optimizer, checkpoint, step=STOP)
    steps += after.walk(first=STOP + 1)
    model = after.engine.model
    return {
        "attention": after.engine.attention.name,
        "tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "deterministic": [*ends[True], after.end(steps)],
        "plain": ends[False],
        "milliseconds": {
            "deterministic": 1000 * statistics.median(seconds[True]),
            "plain": 1000 * statistics.median(seconds[False]),
        },
    }


if __name__ == "__main__":
    print(json.dumps(run_case(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
