"""Generated tokens per second at a GPU's full batch, beside transformers' `generate`, and the time of the draw alone.

    python -m benchmarks.decode_speed [--points NAME ...] [--rows 512 --prompt 128 --new 256] [--folder DIR]

A point is a preset with random weights, prompts of random tokens of one length, and answers that cannot end: each row is
computed to its last token. Timed are whole calls, prefill and reading included, after one call for warm-up and capture. Writes
one JSON file for each point, and leaves out those that are there: after a time limit the same command goes on.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tunix_rt.engines.decoding import Decoding
from tunix_rt.engines.torch import loop as backend
from tunix_rt.models.resolve import resolve_model

RESULTS = Path(__file__).parent / "results" / "decode"
POINTS = {
    "draw": ("draw", "", "", 1.0),
    "gemma-3-270m": ("ours", "gemma-3-270m", "bfloat16", 1.0),
    "gemma-3-270m-greedy": ("ours", "gemma-3-270m", "bfloat16", 0.0),
    "gemma-3-270m-float32": ("ours", "gemma-3-270m", "float32", 1.0),
    "gemma-3-1b": ("ours", "gemma-3-1b", "bfloat16", 1.0),
    "gemma-3-270m-transformers": ("theirs", "gemma-3-270m", "bfloat16", 1.0),
    "gemma-3-1b-transformers": ("theirs", "gemma-3-1b", "bfloat16", 1.0),
    "llama-3.2-1b": ("ours", "llama-3.2-1b", "bfloat16", 1.0),
    "gemma-3-270m-1-row": ("ours", "gemma-3-270m", "bfloat16", 1.0),
    "evaluation-float32": ("evaluation", "gemma-3-270m", "float32", 0.0),
    "evaluation-bfloat16": ("evaluation", "gemma-3-270m", "bfloat16", 0.0),
}
QUESTIONS = 1000
"""Of `evaluation`: prompts of 60 to 250 tokens, as GSM8K's are, and 128 new ones."""


def seconds_of(run: Callable[[], Any], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def generation(
    kind: str, preset: str, dtype: str, temperature: float, rows: int, prompt: int, new: int
) -> dict[str, Any]:
    engine = backend.load_for_inference(resolve_model(preset, weights="random"), device="cuda", dtype=dtype)
    drawn = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, engine.vocabulary, (rows, prompt), generator=drawn)
    given, new = prompts.tolist(), 128 if kind == "evaluation" else new
    if kind == "evaluation":
        lengths = torch.randint(60, 251, (QUESTIONS,), generator=drawn).tolist()
        given = [torch.randint(3, engine.vocabulary, (length,), generator=drawn).tolist() for length in lengths]

    def ours() -> None:
        answers = backend.generate(
            engine, given, decoding=Decoding(max_new_tokens=new, temperature=temperature), stop_ids=[-2],
            pad_id=0, decode=str, batch_size_at=lambda length: rows,
        )  # fmt: skip
        assert all(len(answer.ids) == new for _, answer in answers)

    def theirs() -> None:
        settings = transformers.GenerationConfig(
            max_new_tokens=new, do_sample=temperature > 0, temperature=temperature or None, top_k=0, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        ids = prompts.cuda()
        found = engine.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert found.shape == (rows, prompt + new)

    run = torch.no_grad()(theirs) if kind == "theirs" else ours
    first = seconds_of(run, 1)
    torch.cuda.reset_peak_memory_stats()
    found = seconds_of(run, 3)
    middle = sorted(found)[1]
    answers = QUESTIONS if kind == "evaluation" else rows
    return {
        "tokens_per_second": round(answers * new / middle), "ms_per_step": round(1e3 * middle / new, 3), "seconds": found,
        "first_call_seconds": first[0], "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
    }  # fmt: skip


def draw(rows: int, vocabulary: int = 262_144) -> dict[str, Any]:
    from triton.testing import do_bench

    from tunix_rt.engines.decoding import random_keys
    from tunix_rt.engines.torch.sampling import choose
    from tunix_rt.engines.torch.triton.decode import choose_next

    logits = torch.randn(rows, vocabulary, device="cuda")
    keys = torch.tensor([random_keys(0, row, 2) for row in range(rows)]).cuda()
    ids, tokens = (torch.zeros(rows, columns, device="cuda").long() for columns in (1, 2))
    scores, state = torch.zeros(rows, 2, 2, device="cuda").double(), torch.zeros(2, device="cuda").long()
    found = {}
    for name, of, scored in (("greedy", None, None), ("drawn", keys, None), ("drawn, scored", keys, scores)):
        found[name] = do_bench(
            lambda of=of, scored=scored: choose_next(
                logits, of, state, temperature=1.0 if of is not None else 0.0, ids=ids, tokens=tokens, scores=scored
            ),
            return_mode="median",
        )
    decoding = Decoding(max_new_tokens=2, temperature=1.0)
    found["by operators of torch"] = do_bench(lambda: choose(logits, decoding, keys[:, 0]), return_mode="median")
    return {"milliseconds": found, "vocabulary": vocabulary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="*", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    asked.folder.mkdir(parents=True, exist_ok=True)
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "prompt_tokens": asked.prompt, "new_tokens": asked.new,
    }  # fmt: skip
    for name in asked.points:
        path = asked.folder / f"{name}.json"
        if path.exists():
            continue
        kind, preset, dtype, temperature = POINTS[name]
        rows = 1 if name.endswith("1-row") else asked.rows
        found = (
            draw(rows)
            if kind == "draw"
            else generation(kind, preset, dtype, temperature, rows, asked.prompt, asked.new)
        )
        path.write_text(
            json.dumps({**about, "rows": rows, "dtype": dtype, "temperature": temperature, **found}, indent=1) + "\n"
        )
        print(name, json.dumps(found), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
