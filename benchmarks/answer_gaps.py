"""How far tokens of honest greedy answers lie below the likeliest ones on another machine, and how far those of forged ones.

    python -m benchmarks.answer_gaps        on a CPU; writes benchmarks/results/answer_gaps.json
    python -m benchmarks.answer_gaps --model tiny-gemma3 --output benchmarks/results/answer_gaps_base.json

A model, by default the one that the demo trains, answers questions in bfloat16 with several kinds of instructions and by both
engines. Every text is then followed by the others, token by token (`largest_gaps` in `tunix_rt.evidence.replay.session`); the
largest gap of each answer is kept. Forged texts are the same with the last number in them changed, the expected answer alone, the
answer to the next question, and those of the model before it was trained. `TIES` in `tunix_rt.evidence.replay.compare` comes
from these figures.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.replay_noise import AVX2, OLDEST, RESULTS, TWO

WAYS: dict[str, dict[str, Any]] = {
    "torch": {"backend": "torch", "env": TWO},
    "torch, AVX2": {"backend": "torch", "env": TWO | AVX2},
    "torch, no vectors": {"backend": "torch", "env": TWO | OLDEST},
    "jax": {"backend": "jax", "env": {}},
}
NEW_TOKENS, ROWS = 96, 16


def child(path: str) -> None:
    """Answer, or follow the texts that the request has."""
    from benchmarks.replay_noise_worker import Job, config_of
    from tunix_rt.data.prepare import prepare
    from tunix_rt.doctor.selection import set_environment
    from tunix_rt.engines.base import load_backend
    from tunix_rt.evaluate.generate import Questions, decoding_of, generate_predictions
    from tunix_rt.evidence.replay.session import largest_gaps
    from tunix_rt.models.resolve import resolve_model
    from tunix_rt.storage import to_plain
    from tunix_rt.train.context import find_tokenizer

    request = json.loads(Path(path).read_text())
    job = Job(
        backend=request["backend"], device="cpu", dtype="bfloat16", honest="", cheats=False, folder="", steps=1
    )  # fmt: skip
    set_environment("cpu", job.backend)
    config = config_of(job, "tiny-gemma3")
    tokenizer, facts = find_tokenizer(config)
    data = prepare(config, tokenizer, facts, lambda *_: None)
    backend = load_backend(job.backend)
    engine = backend.load(resolve_model(request["model"]), device="cpu", training=config.training)
    decoding = decoding_of(data.style, max_new_tokens=NEW_TOKENS)
    questions = Questions(items=data.items, tokenizer=tokenizer, style=data.style, decoding=decoding)
    told: Any
    if "texts" in request:
        told = {
            name: list(largest_gaps(backend, engine, questions, _by_place(lines), 2**20).values())
            for name, lines in request["texts"].items()
        }
    else:
        silent: dict[str, Any] = {"progress": lambda *_: None, "stop": lambda: None}
        given = generate_predictions(backend, engine, questions, what="", batch_size_at=lambda length: ROWS, **silent)
        told = [to_plain(answer) for answer in given]
    Path(path).with_suffix(".told").write_text(json.dumps(told))


def _by_place(lines: list[dict[str, Any]]) -> dict[int, Any]:
    from tunix_rt.scoring.score import Prediction

    return {place: Prediction(**line) for place, line in enumerate(lines)}


def trained(folder: Path) -> Path:
    """The model of the demo."""
    command = [
        sys.executable,
        "-m",
        "tunix_rt",
        "train",
        "training/configs/demo.yaml",
        "--device",
        "cpu",
        "--output",
        folder,
    ]
    subprocess.run([*map(str, command), "--set", "evaluation.enabled=false"], check=True)
    return folder / "final_model"


def asked(way: dict[str, Any], folder: Path, model: str, **more: Any) -> Any:
    path = folder / "request.json"
    path.write_text(json.dumps({"backend": way["backend"], "model": model, **more}))
    environment = {**os.environ, **way["env"], "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "benchmarks.answer_gaps", str(path)], check=True, env=environment)
    return json.loads(path.with_suffix(".told").read_text())


def with_another_number(line: dict[str, Any]) -> dict[str, Any]:
    """The last number of the text, which is its answer where it gives one, larger by 1."""
    found = list(re.finditer(r"\d+", line["output"]))
    if not found:
        return line | {"output": "7"}
    last, text = found[-1], line["output"]
    return line | {"output": f"{text[: last.start()]}{int(last.group()) + 1}{text[last.end() :]}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS / "answer_gaps.json")
    told = parser.parse_args()
    named = told.model
    began = time.monotonic()
    pairs = []
    with tempfile.TemporaryDirectory() as scratch:
        model = str(named or trained(Path(scratch) / "run"))
        written = {name: asked(way, Path(scratch), model) for name, way in WAYS.items()}
        first = written["torch"]
        forged = {
            "the last number larger by 1": [with_another_number(line) for line in first],
            "the expected answer alone": [line | {"output": f"<answer>{line['expected']}</answer>"} for line in first],
            "the text of the next question": [
                line | {part: other[part] for part in ("output", "ended")}
                for line, other in zip(first, first[1:] + first[:1], strict=True)
            ],
            "of the model before training": asked(WAYS["torch"], Path(scratch), "tiny-gemma3"),
        }
        for follower, way in WAYS.items():
            found = asked(way, Path(scratch), model, texts=written | forged)
            for name, gaps in found.items():
                honest = name in WAYS
                engines = {way["backend"], WAYS[name]["backend"]} if honest else set()
                kind = (
                    ("bitwise" if name == follower else "same hardware" if len(engines) == 1 else "other hardware")
                    if honest
                    else "forged"
                )
                same = [
                    one["output"] == two["output"]
                    for one, two in zip(written.get(name, first), written[follower], strict=True)
                ]
                pairs.append({"texts": name, "followed_by": follower, "kind": kind, "largest_gaps": gaps,
                              **({"same_texts": sum(same) / len(same)} if honest else {})})  # fmt: skip
    result = {"schema": "tunix-rt/answer-gaps/1", "measured": datetime.now(UTC).isoformat(timespec="seconds"),
              "new_tokens": NEW_TOKENS, "seconds": round(time.monotonic() - began, 1), "pairs": pairs}  # fmt: skip
    told.output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    for pair in pairs:
        gaps = sorted(pair["largest_gaps"])
        some = "  ".join(
            f"{share:.0%} {gaps[min(len(gaps) - 1, int(share * len(gaps)))]:.3f}" for share in (0.1, 0.5, 0.9, 0.98)
        )
        print(f"{pair['kind']:14} {pair['texts']:28} by {pair['followed_by']:18} same {pair.get('same_texts', 0):.0%}  {some}  "
              f"most {gaps[-1]:.3f} of {len(gaps)}")  # fmt: skip
    return 0


if __name__ == "__main__":
    child(sys.argv[1]) if sys.argv[1:] and sys.argv[1].endswith(".json") else sys.exit(main())
