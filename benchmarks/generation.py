"""Answers per second, against transformers' own batched `generate`, and whether both say the same.

    python -m benchmarks.generation --model DIR --questions train.jsonl --count 1000 --device cuda

Both are given the same prompts, the same cap of new tokens and the same type. Ours takes the batch that the memory at hand
allows, the other the batch sizes named; each is warmed up on a few prompts, and timed once over all of them. In float32
greedy answers must be the same token for token; where they are not, the difference of the two best logits is written
down. Writes benchmarks/results/generation_DEVICE.json after every type, so that a time limit loses only what is not measured.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tunix_rt.data.render import prompt_ids
from tunix_rt.engines.decoding import Decoding
from tunix_rt.evaluate.evalsets import load_evalset
from tunix_rt.evaluate.generate import stop_ids
from tunix_rt.inference import LoadedModel, inference_device, load_resolved, model_spec, resolve_spec

RESULTS = Path(__file__).parent / "results"

Prompts = Sequence[Sequence[int]]


def ours(model: LoadedModel, prompts: Prompts, new_tokens: int, rows: int | None) -> tuple[dict[int, list[int]], float]:
    began = time.perf_counter()
    found = model.backend.generate(
        model.engine,
        prompts,
        decoding=Decoding(max_new_tokens=new_tokens),
        stop_ids=stop_ids(model.tokenizer, model.style),
        pad_id=model.tokenizer.pad_id,
        decode=model.tokenizer.decode,
        batch_size_at=model.batch_size_at(new_tokens, rows),
    )
    answers = {index: answer.ids for index, answer in found}
    return answers, time.perf_counter() - began


def theirs(model: LoadedModel, prompts: Prompts, new_tokens: int, rows: int) -> tuple[dict[int, list[int]], float]:
    """transformers' `generate` over prompts sorted by length, padded on the left, as its documentation advises."""
    stops = stop_ids(model.tokenizer, model.style)
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=model.tokenizer.pad_id,
        use_cache=True,
    )
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    answers: dict[int, list[int]] = {}
    began = time.perf_counter()
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        width = max(len(prompts[index]) for index in chosen)
        ids = torch.full((len(chosen), width), model.tokenizer.pad_id)
        mask = torch.zeros((len(chosen), width), dtype=torch.long)
        for place, index in enumerate(chosen):
            ids[place, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[place, width - len(prompts[index]) :] = 1
        device = model.engine.device
        with torch.no_grad():
            output = model.engine.model.generate(
                ids.to(device), attention_mask=mask.to(device), generation_config=settings
            )
        for place, index in enumerate(chosen):
            fresh = output[place, width:].tolist()
            answers[index] = fresh[: next((at for at, token in enumerate(fresh) if token in stops), len(fresh))]
    return answers, time.perf_counter() - began


def margin(model: LoadedModel, prompt: Sequence[int], one: list[int], other: list[int]) -> float:
    """Difference of the two best logits where the answers part: what the choice between them hung on."""
    place = next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    ids = torch.tensor([[*prompt, *one[:place]]], device=model.engine.device)
    with torch.no_grad():
        best = model.engine.model(input_ids=ids, logits_to_keep=1).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def measure(model: LoadedModel, prompts: Prompts, new_tokens: int, batches: Sequence[int]) -> dict[str, Any]:
    ours(model, prompts[:8], 8, None)
    rows = model.batch_size_at(new_tokens)(max(map(len, prompts)))
    answers, seconds = ours(model, prompts, new_tokens, None)
    tokens = sum(map(len, answers.values()))
    print(f"{model.dtype}: ours, {rows} rows at once: {len(prompts) / seconds:.1f} answers/s", flush=True)
    found: dict[str, Any] = {
        "dtype": model.dtype, "rows": rows, "seconds": round(seconds, 2), "items_per_second": round(len(prompts) / seconds, 2),
        "tokens": tokens, "peak_gib": round(model.engine.peak_bytes() / 2**30, 3), "transformers": [],
    }  # fmt: skip
    for size in batches:
        theirs(model, prompts[:8], 8, 8)
        other, took = theirs(model, prompts, new_tokens, size)
        print(f"{model.dtype}: transformers, {size} rows at once: {len(prompts) / took:.1f} answers/s", flush=True)
        parted = [index for index in answers if answers[index] != other[index]]
        same_rows, at_same = ours(model, prompts, new_tokens, size)
        margins = sorted(margin(model, prompts[index], answers[index], other[index]) for index in parted[:50])
        beside = {
            "rows": size, "seconds": round(took, 2), "items_per_second": round(len(prompts) / took, 2),
            "ours_at_these_rows_items_per_second": round(len(prompts) / at_same, 2),
            "answers_that_differ": len(parted), "largest_margin_where_they_part": margins[-1] if margins else 0.0,
            "ours_differ_by_rows": sum(answers[index] != same_rows[index] for index in answers),
        }  # fmt: skip
        found["transformers"].append(beside)
        print(json.dumps(found["transformers"][-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", required=True, help="an eval set or dataset, as `tunix-rt evaluate` takes it")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    chosen = load_evalset(asked.questions, limit=asked.count, seed=0)
    path = asked.output or RESULTS / f"generation_{asked.device}.json"
    runs = []
    for dtype in asked.dtypes:
        choice, kind = inference_device(asked.device, dtype)
        model = load_resolved(resolve_spec(model_spec(asked.model), choice, kind))
        prompts = [prompt_ids(item.prompt, model.tokenizer, model.style) for item in chosen.items]
        room = model.shape.max_positions - asked.new_tokens  # beyond it ours ends an answer, and theirs goes on
        prompts = [prompt for prompt in prompts if len(prompt) <= room]
        runs.append(measure(model, prompts, asked.new_tokens, asked.batches))
        print(json.dumps({key: value for key, value in runs[-1].items() if key != "transformers"}), flush=True)
        about = {
            "model": Path(model.source.name).name, "parameters": model.shape.parameters, "questions": len(prompts),
            "max_new_tokens": asked.new_tokens,
            "device": torch.cuda.get_device_name() if asked.device == "cuda" else platform.processor() or "cpu",
            "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip
        path.write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}", flush=True)
        del model


if __name__ == "__main__":
    main()
