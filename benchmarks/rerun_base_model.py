"""Make the base model again by its recipe and fine-tune both, three seeds each: is the shipped one reproducible?

    python -m benchmarks.rerun_base_model --device cuda        (one GPU, about six minutes)

Writes benchmarks/results/rerun_base_model.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "rerun_base_model.json"
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--again", type=Path, help="a model the recipe has just made; without it the recipe is run")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        again = options.again or Path(scratch) / "tiny-gemma3-again"
        if options.again is None:
            recipe = [sys.executable, "-m", "recipes.base_model.pretrain", "--device", options.device]
            subprocess.run([*recipe, "--out", str(again)], check=True)
        scores = {
            name: [_fine_tune(model, seed, options.device, Path(scratch)) for seed in SEEDS]
            for name, model in (("shipped", "tiny-gemma3"), ("again", str(again)))
        }
        means = {name: sum(s["accuracy"] for s in runs) / len(runs) for name, runs in scores.items()}
        report = {
            "shipped": json.loads(Path("models/tiny-gemma3/manifest.json").read_text()),
            "again": json.loads((again / "manifest.json").read_text()),
            "seeds": SEEDS,
            "scores": scores,
            "mean_accuracy": means,
            "difference_points": 100 * (means["again"] - means["shipped"]),
        }
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"scores": scores, "mean_accuracy": means, "difference_points": report["difference_points"]}))


def _fine_tune(model: str, seed: int, device: str, scratch: Path) -> dict[str, float]:
    """The demo's configuration on `model`; its scores after training."""
    output = scratch / f"{Path(model).name}-{seed}"
    command = [
        sys.executable, "-m", "tunix_rt", "train", "demo", "--model", model, "--output", str(output),
        "--device", device, "--set", f"training.seed={seed}", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout)["scores"]["after"])


if __name__ == "__main__":
    main()
