"""The held-out loss of a run's base model, before its first step, on a CPU: `python -m benchmarks.heldout_before RESULT_FOLDER`.

Reads the folder's config.yaml (`--model` and `--data` say where its model and data lie here), makes the same rows, and writes
heldout_before.json beside it.
"""

import argparse
import json
from pathlib import Path

from tunix_rt.config.load import load_config
from tunix_rt.data.prepare import prepare
from tunix_rt.engines.torch import loop as engine_of
from tunix_rt.models.resolve import resolve_model
from tunix_rt.train.context import find_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--data")
    options = parser.parse_args()
    flags = {"training.device": "cpu", "model.model_name_or_path": options.model, "data.dataset": options.data}
    config = load_config(options.folder / "config.yaml", flags=flags)
    tokenizer, facts = find_tokenizer(config)
    data = prepare(config, tokenizer, facts, lambda *said: None)
    source = resolve_model(config.model.model_name_or_path or "", weights=config.model.weights)
    engine = engine_of.load(source, device="cpu", training=config.training)
    loss, targets = engine_of.heldout_loss(engine, data.heldout_rows, batch_size=1, pad_id=tokenizer.pad_id)
    found = {"step": 0, "loss": loss, "target_tokens": targets, "device": "cpu", "dtype": config.training.dtype}
    (options.folder / "heldout_before.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"held-out loss {loss:.4f} over {targets:,} tokens before the first step")


if __name__ == "__main__":
    main()
