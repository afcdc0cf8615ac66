"""Ask the TPU's compiler about training steps, without a TPU, and keep what it says: python -m benchmarks.tpu_verdicts

Needs `tunix-rt[tpu]`. Every case is written to benchmarks/results/tpu_verdicts.json as soon as it is there; one that is already
there by the same source, settings and versions is not asked again. A refusal takes seconds, an acceptance minutes of one core.
`--only NAME` (repeatable) asks some of them, `--list` names them all and asks none.

No TPU run is made: what is recorded is memory, not speed.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunix_rt.config.load import load_config
from tunix_rt.engines.jax.aot import CHILD, Case, ask_compiler, case_hash, compiler_versions
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import resolve_model
from tunix_rt.storage import json_text, write_text

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results/tpu_verdicts.json")
M38, SUBMISSION = "training/configs/submission_tpu_m38.yaml", "training/configs/submission_tpu.yaml"
ONE_HOT, AS_PUBLISHED = "benchmarks.one_hot_step", "benchmarks.published_step"
JAX = {"training.backend": "jax", "training.device": "tpu"}
LARGE = {"training.dtype": "bfloat16", "training.gradient_checkpointing": "true"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One case: what it is called, and what it changes of a configuration."""

    name: str
    about: str
    config: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    preset: str = "gemma-2b"
    topology: str = "v5e:2x4"
    child: str = CHILD

    def case(self) -> Case:
        flags = {**JAX, **self.settings, "model.model_name_or_path": self.preset}
        loaded = load_config(
            ROOT / self.config if self.config else None, overrides=[f"{name}={value}" for name, value in flags.items()]
        )
        source = resolve_model(self.preset, weights="random")
        return Case(
            config=source.config, training=loaded.training, tokens=loaded.data.max_length, topology=self.topology,
            child=self.child,
        )  # fmt: skip


def _sized(rows: int, tokens: int, **training: str) -> dict[str, str]:
    return {
        **LARGE,
        "training.per_device_train_batch_size": str(rows),
        "data.max_length": str(tokens),
        **{f"training.{name}": value for name, value in training.items()},
    }


_AS_PUBLISHED = _sized(1, 64, gradient_checkpointing="false", master_dtype="bfloat16", stochastic_rounding="false")
CASES = (
    Asked(name="m38", about="reconstruction of M38: the whole state on every chip, float32 weights", config=M38),
    Asked(
        name="m38_bfloat16", about="the same with bfloat16 weights", config=M38,
        settings={"training.master_dtype": "bfloat16"},
    ),
    Asked(
        name="published_adamw", about="the predecessor's way on one chip, bfloat16, optax's AdamW", topology="v5e:1x1",
        settings=_AS_PUBLISHED, child=AS_PUBLISHED,
    ),
    Asked(
        name="published_adafactor", about="the predecessor's way on one chip, bfloat16, optax's Adafactor", topology="v5e:1x1",
        settings={**_AS_PUBLISHED, "training.optim": "adafactor"}, child=AS_PUBLISHED,
    ),
    Asked(name="submission", about="`submission_tpu.yaml`: the state cut over eight chips", config=SUBMISSION),
    Asked(
        name="submission_kept", about="the same, nothing computed again in the backward pass", config=SUBMISSION,
        settings={"training.gradient_checkpointing": "false"},
    ),
    Asked(name="gemma_2b", about="Gemma 2B, float32 weights, AdamW", settings=_sized(8, 1024)),
    Asked(name="gemma_2b_one_hot", about="the same with the loss of a one-hot table", settings=_sized(8, 1024), child=ONE_HOT),
    Asked(name="gemma_3_1b", about="Gemma 3 1B, float32 weights, AdamW", preset="gemma-3-1b", settings=_sized(4, 2048)),
    Asked(
        name="gemma_3_1b_one_hot", about="the same with the loss of a one-hot table", preset="gemma-3-1b",
        settings=_sized(4, 2048), child=ONE_HOT,
    ),
    Asked(
        name="one_chip_gemma_2b", about="one chip: Gemma 2B, bfloat16 weights, Adafactor", topology="v5e:1x1",
        settings=_sized(1, 512, master_dtype="bfloat16", optim="adafactor"),
    ),
    Asked(
        name="one_chip_gemma_2b_float32", about="one chip: Gemma 2B, float32 weights, Adafactor", topology="v5e:1x1",
        settings=_sized(1, 512, optim="adafactor"),
    ),
    Asked(
        name="one_chip_gemma_3_1b", about="one chip: Gemma 3 1B, bfloat16 weights, AdamW", preset="gemma-3-1b",
        topology="v5e:1x1", settings=_sized(1, 1024, master_dtype="bfloat16"),
    ),
    Asked(
        name="one_chip_gemma_3_270m", about="one chip: Gemma 3 270M, float32 weights, AdamW", preset="gemma-3-270m",
        topology="v5e:1x1", settings=_sized(8, 1024),
    ),
)  # fmt: skip


def recorded(root: Path) -> dict[str, Any]:
    """What was recorded: the name of a case -> its entry, in the order of `CASES`."""
    file = root / RESULTS
    found = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.is_file() else {}
    return {asked.name: found[asked.name] for asked in CASES if asked.name in found}


def ask(asked: Asked, known: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of one case: the `known` one where nothing has changed since."""
    case = asked.case()
    key = case_hash(case, compiler_versions())
    if known.get(asked.name, {}).get("hash") == key:
        return dict(known[asked.name])
    found = ask_compiler(case, say=lambda line: print(f"{asked.name}: {line}", file=sys.stderr, flush=True))
    return {
        "about": asked.about,
        "model": asked.preset,
        "config": asked.config,
        "settings": dict(asked.settings),
        "hash": key,
        "fits": found.fits,
        "total": None if found.memory is None else found.memory.total,
        "verdict": asdict(found),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask the TPU's compiler about training steps.")
    parser.add_argument(
        "--only", action="append", choices=[asked.name for asked in CASES], help="ask this one; repeatable"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and ask none")
    options = parser.parse_args(arguments)
    entries = recorded(ROOT)
    for asked in CASES:
        if options.list or (options.only and asked.name not in options.only):
            continue
        try:
            entries[asked.name] = ask(asked, entries)
        except TunixError as error:
            print(f"{asked.name}: error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
        ordered = {one.name: entries[one.name] for one in CASES if one.name in entries}
        write_text(ROOT / RESULTS, json_text({"cases": ordered}))
        print(_line(asked.name, entries[asked.name]), flush=True)
    if options.list:
        for asked in CASES:
            print(_line(asked.name, entries[asked.name]) if asked.name in entries else f"{asked.name}: not asked yet")
    return 0


def _line(name: str, entry: Mapping[str, Any]) -> str:
    verdict = entry["verdict"]
    if entry["fits"]:
        return f"{name}: fits, {entry['total'] / 2**30:.2f} GiB a chip (peak {verdict['memory']['peak'] / 2**30:.2f})"
    return (
        f"{name}: refused, {verdict['refusal']['needed'] / 2**30:.2f} GiB of {verdict['refusal']['usable'] / 2**30:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
