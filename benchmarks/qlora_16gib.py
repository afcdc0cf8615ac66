"""QLoRA of a model of 12B parameters under a cap of 16 GiB, through `tunix-rt train`: trained, merged, reloaded by transformers.

    python -m benchmarks.qlora_16gib --into FOLDER --base FOLDER [--preset gemma-3-12b] [--cap-gib 16] [--output FILE]

The base model has random weights in the exact shape of the preset. Another process draws them on the GPU and saves them, which
takes seconds; the run reads them on the host, and only the projections in 4 bits, the embedding and the adapters reach the
GPU. It merges its adapters in float32 and reloads the final model in a fresh process, which compares
tensors, logits and greedy tokens. Writes one JSON, also of a run that is still under way or has failed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.memory_on_gpu import device_facts
from tunix_rt.models.resolve import resolve_model, resolve_tokenizer

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


def make_base(preset: str, folder: Path, device: str) -> None:
    """A checkpoint in bfloat16, in a process of its own."""
    code = """
import sys, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with torch.device(sys.argv[3]):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[2])
"""
    source = resolve_model(preset, weights="random")
    subprocess.run([sys.executable, "-c", code, source.folder, folder, device], check=True)
    for file in resolve_tokenizer("tiny-gemma3").glob("*token*"):
        shutil.copy(file, folder)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = {"training.memory_limit_gib": options.cap_gib, "training.dtype": "bfloat16"}
    return {
        "model.tokenizer_name_or_path": "tiny-gemma3", "data.max_length": options.length, "data.on_overflow": "drop",
        "data.completion_only_loss": "false", "data.validation_fraction": 0, "training.lora_rank": 16,
        "training.load_in_4bit": "true", "training.gradient_checkpointing": "true", "training.learning_rate": 2e-4,
        "training.per_device_train_batch_size": 1, "training.logging_steps": 1, "evaluation.enabled": "false",
        **(on_gpu if options.device == "cuda" else {}),
    }  # fmt: skip


def command(options: argparse.Namespace, run: Path) -> list[str]:
    words = ["train", "--model", str(options.base), "--data", "dev-reasoning-v2"]
    words += ["--device", options.device, "--max-steps", str(options.steps), "--output", str(run)]
    changes = [word for key, value in settings(options).items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "tunix_rt", *words, *changes]


def found(run: Path) -> dict[str, Any]:
    """What the run folder has by now."""
    result: dict[str, Any] = {}
    for name in ("memory.json", "result.json", "plan.json"):
        if (run / name).is_file():
            result[name.removesuffix(".json")] = json.loads((run / name).read_text(encoding="utf-8"))
    if (run / "metrics.jsonl").is_file():
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        result["steps"] = [
            {key: json.loads(line)[key] for key in ("step", "loss", "tokens", "seconds", "peak_bytes")}
            for line in lines
        ]
    if (run / "training_log.txt").is_file():
        result["log"] = (run / "training_log.txt").read_text(encoding="utf-8").splitlines()[-200:]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="of the run; with 48 GB of space for 12B parameters")
    parser.add_argument(
        "--base", type=Path, required=True, help="of the model; made if it is absent; 24 GB of 12B parameters"
    )
    parser.add_argument("--preset", default="gemma-3-12b")
    parser.add_argument("--cap-gib", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the code")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "qlora_16gib.json")
    options = parser.parse_args()
    run, began = options.into / "run", time.monotonic()
    about = {"preset": options.preset, "cap_gib": options.cap_gib, "length": options.length, **device_facts()}
    about |= {name: version(name) for name in ("peft", "bitsandbytes")}

    def write(**more: Any) -> dict[str, Any]:
        whole = {"about": about, "seconds": round(time.monotonic() - began, 1), **more, **found(run)}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        return whole

    options.into.mkdir(parents=True, exist_ok=True)
    if not (options.base / "config.json").is_file():
        make_base(options.preset, options.base, options.device)
        write()
    with (options.into / "stderr.txt").open("w") as errors:
        child = subprocess.Popen(command(options, run), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        while child.poll() is None:
            write()
            time.sleep(5)
    last = (options.into / "stderr.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    whole = write(exit_code=child.returncode, **({"stderr": last} if child.returncode else {}))
    peak = max((step["peak_bytes"] for step in whole.get("steps", [])), default=0)
    print(f"exit code {child.returncode}, peak {peak / GIB:.3f} GiB, {whole['seconds']:.0f} s")
    print(json.dumps(whole.get("result", {}).get("final_model")), *(last if child.returncode else []), sep="\n")
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
