"""Run the demo and its controls as a user would, and keep the figures: python -m benchmarks.demo

The controls are the demo on other answers. `control`: every question gets the reasoning and answer of another row.
`control_final_answer`: the reasoning stays, only the final answer is another row's. `told_before`: the untrained model is
not asked but told the situation of each held-out question, and goes on by itself; counted is how often it reaches the
sentence that concludes the worked solution, word for word. Writes benchmarks/results/demo.json.
"""

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "demo.json"
DATASET = Path("datasets/dev-reasoning-v2/dataset.jsonl")


def shuffled(rows: list[dict], fields: tuple[str, ...]) -> list[dict]:
    """Each row with `fields` of another row; none keeps its own."""
    order = list(range(len(rows)))
    random.Random(7).shuffle(order)
    places = {order[i]: order[(i + 1) % len(order)] for i in range(len(order))}  # one cycle: nobody stays at home
    return [row | {field: rows[places[i]][field] for field in fields} for i, row in enumerate(rows)]


def told_before() -> dict[str, int]:
    """How many held-out situations the base model works out when they are told as a story. Some cannot be told apart
    from their question and are left out."""
    from recipes.base_model.corpus import _SENTENCE_END
    from recipes.dev_reasoning.generate import generate_rows
    from tunix_rt.config.settings import Training
    from tunix_rt.data.tokenizer import load_tokenizer
    from tunix_rt.engines.base import load_backend
    from tunix_rt.engines.decoding import Decoding
    from tunix_rt.models.resolve import resolve_model

    source = resolve_model("tiny-gemma3")
    tokenizer = load_tokenizer(source.folder)
    prompts, wanted = [], []
    for _, problem in generate_rows()[0]:
        told = [part for part in _SENTENCE_END.split(problem.prompt) if not part.endswith("?")]
        told = [part.partition(": ")[2] or part for part in told]
        if told:
            text = " ".join(part if part.endswith(".") else f"{part}." for part in told)
            prompts.append([*tokenizer.prefix, *tokenizer.encode(text)])
            conclusion = problem.steps[-1][1].removeprefix("So ")
            wanted.append(conclusion[0].upper() + conclusion[1:])
    backend = load_backend("torch")
    engine = backend.load(source, device="cpu", training=Training())
    told_on = backend.generate(
        engine, prompts, decoding=Decoding(max_new_tokens=64), stop_ids=[tokenizer.eos_id], pad_id=tokenizer.pad_id,
        decode=tokenizer.decode, batch_size_at=lambda length: 50,
    )  # fmt: skip
    right = sum(wanted[index] in tokenizer.decode(answer.ids) for index, answer in told_on)
    return {"situations": len(prompts), "worked_out": right}


def run_demo(output: Path, *extra: str) -> tuple[dict, float]:
    command = [
        sys.executable,
        "-m",
        "tunix_rt",
        "train",
        "demo",
        "--device",
        "cpu",
        "--output",
        str(output),
        "--json",
        *extra,
    ]
    started = time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout), time.monotonic() - started


def main() -> None:
    rows = [json.loads(line) for line in DATASET.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as scratch:
        result, seconds = run_demo(Path(scratch) / "demo")
        metrics = [json.loads(line) for line in (Path(scratch) / "demo" / "metrics.jsonl").read_text().splitlines()]
        controls = {}
        for name, fields in (("control", ("steps", "final_answer")), ("control_final_answer", ("final_answer",))):
            path = Path(scratch) / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in shuffled(rows, fields)), encoding="utf-8")
            controls[name] = run_demo(Path(scratch) / name, "--data", str(path))[0]["scores"]["after"]
    report = {
        "minutes": round(seconds / 60, 2),
        "before": result["scores"]["before"],
        "after": result["scores"]["after"],
        **controls,
        "told_before": told_before(),
        "predicted_bytes": result["memory"]["predicted_bytes"],
        "measured_bytes": result["memory"]["measured_bytes"],
        "tokens_per_second": round(sum(m["tokens"] for m in metrics) / sum(m["seconds"] for m in metrics)),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, no GPU",
    }
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
