"""The planner's lower bound of a TPU step beside what the TPU's compiler needs: python -m benchmarks.plan_against_compiler

Needs `tunix-rt[tpu]`, no TPU. Each setting is compiled once, small models first, and written to
benchmarks/results/plan_against_compiler.json as soon as it is there, so an interrupted series resumes. Steps with the same
source, settings and versions are not compiled again. A compilation takes from half a minute to some minutes of one core.
`--only NAME` (repeatable) selects settings, `--refresh` updates the lower bounds and compiles nothing, `--list` prints the
results.

The settings `AT_THE_LIMIT` of a chip show which figure the compiler goes by: it accepts a step whose `total` exceeds the chip,
as long as its `peak` does not.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tunix_rt
from tunix_rt.config.load import build_config
from tunix_rt.config.settings import RunConfig
from tunix_rt.engines.jax.aot import STEP_SOURCES, Case, ChipMemory, ask_compiler, compiler_versions
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.jax_floor import predict_jax, row_length
from tunix_rt.plan.shape import shape_of
from tunix_rt.storage import json_text, sha256_text, write_text

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results/plan_against_compiler.json")
EIGHT, ONE = "v5e:2x4", "v5e:1x1"
UNDROPPED = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
"""GPT-2's own configuration asks for dropout, which the engine does not do."""
DECIDING = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "dtype", "master_dtype", "optim", "stochastic_rounding",
    "gradient_checkpointing", "max_grad_norm", "data_replicas", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "seed",
)  # fmt: skip
"""The settings that the step is made of (`engines/jax/step.py`). Others may come and go without another compilation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One training step: of a preset, on a topology, with so many rows on each chip."""

    preset: str
    rows: int
    tokens: int
    optim: str = "adamw"
    weights: str = "float32"
    compute: str = "bfloat16"
    recomputed: bool | float = True
    """As `training.gradient_checkpointing`."""
    accumulation: int = 1
    topology: str = EIGHT

    @property
    def name(self) -> str:
        """`gemma-2b 8x1024 adamw float32/bfloat16 full`, with what is not as in most."""
        kept = {True: "full", False: "none"}.get(self.recomputed, f"{self.recomputed:g}")
        said = f"{self.preset} {self.rows}x{self.tokens} {self.optim} {self.weights}/{self.compute} {kept}"
        said += f" accumulation {self.accumulation}" if self.accumulation > 1 else ""
        return said + (f" on {self.topology}" if self.topology != EIGHT else "")

    @property
    def devices(self) -> int:
        return 8 if self.topology == EIGHT else 1

    def config(self) -> RunConfig:
        training = {
            "backend": "jax",
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "dtype": self.compute,
            "optim": self.optim,
            "gradient_checkpointing": self.recomputed,
            **({"master_dtype": "bfloat16"} if self.weights == "bfloat16" else {}),
        }
        asked = {"training": training, "data": {"max_length": self.tokens}, "evaluation": {"enabled": False}}
        return build_config(asked, self.name)

    def model(self) -> dict[str, Any]:
        found = dict(resolve_model(self.preset, weights="random").config)
        return found | UNDROPPED if found["model_type"] == "gpt2" else found

    def case(self) -> Case:
        return Case(
            config=self.model(), training=self.config().training, tokens=row_length(self.tokens, "tpu"),
            topology=self.topology,
        )  # fmt: skip


SETTINGS = (
    Setting(preset="gemma-3-270m", rows=4, tokens=1024),
    Setting(preset="gemma-3-270m", rows=8, tokens=2048, recomputed=False),
    Setting(preset="gemma-3-270m", rows=2, tokens=512, recomputed=False, accumulation=2),
    Setting(preset="gemma-3-270m", rows=8, tokens=1024, optim="adafactor", weights="bfloat16", recomputed=0.5),
    Setting(preset="gemma-3-270m", rows=2, tokens=1024, compute="float32"),
    Setting(preset="gpt2", rows=4, tokens=1024),
    Setting(preset="gpt2", rows=2, tokens=512, recomputed=False),
    Setting(preset="gpt2", rows=4, tokens=512, optim="adafactor", weights="bfloat16", recomputed=0.5),
    Setting(preset="gemma-3-270m", rows=8, tokens=1024, topology=ONE),
    Setting(preset="gemma-3-270m", rows=2, tokens=512, recomputed=False, topology=ONE),
    Setting(preset="gemma-3-270m", rows=4, tokens=1024, recomputed=0.5, accumulation=2, topology=ONE),
    Setting(preset="gpt2", rows=4, tokens=512, topology=ONE),
    Setting(preset="llama-3.2-1b", rows=4, tokens=1024),
    Setting(preset="gemma-3-1b", rows=4, tokens=2048),
    Setting(preset="gemma-3-1b", rows=1, tokens=512, recomputed=False),
    Setting(preset="gemma-3-1b", rows=8, tokens=1024, recomputed=0.5),
    Setting(preset="gemma-3-1b", rows=2, tokens=2048, optim="adafactor", weights="bfloat16"),
    Setting(preset="gemma-3-1b", rows=4, tokens=1024, accumulation=2),
    Setting(preset="gemma-3-1b", rows=1, tokens=1024, weights="bfloat16", topology=ONE),
    Setting(preset="gemma-2b", rows=1, tokens=512),
    Setting(preset="gemma-2b", rows=8, tokens=1024),
    Setting(preset="gemma-2b", rows=1, tokens=1024, recomputed=False),
    Setting(preset="gemma-2b", rows=2, tokens=2048, optim="adafactor", recomputed=0.5),
    Setting(preset="gemma-2b", rows=1, tokens=2048, weights="bfloat16"),
    Setting(preset="gemma-2-2b", rows=1, tokens=1024),
    Setting(preset="gemma-2-2b", rows=2, tokens=512, recomputed=0.5),
    Setting(preset="gemma-2-2b", rows=1, tokens=2048, optim="adafactor", weights="bfloat16", recomputed=False),
)
AT_THE_LIMIT = tuple(
    Setting(preset="gemma-3-270m", rows=rows, tokens=512, recomputed=False, topology=ONE) for rows in (36, 40)
)
LAST_SEED = 20261116
DRAWN_LAST = tuple(
    Setting(
        preset=preset, rows=rows, tokens=tokens, optim=optim, weights=weights, recomputed=recomputed, topology=topology
    )
    for preset, rows, tokens, optim, weights, recomputed, topology in random.Random(LAST_SEED).sample(
        list(
            itertools.product(
                ("gpt2", "smollm2-135m", "llama-3.2-1b", "gemma-3-270m", "gemma-3-1b", "gemma-2-2b"),
                (1, 2, 3, 6),
                (384, 640, 1024),
                ("adamw", "adafactor"),
                ("float32", "bfloat16"),
                (True, 0.5, False),
                (EIGHT, EIGHT, ONE),
            )
        ),
        10,
    )
)
ALL = (*SETTINGS, *AT_THE_LIMIT, *DRAWN_LAST)


def lower_bound(setting: Setting) -> dict[str, int]:
    """The least memory of the step on one chip, by part."""
    plan = predict_jax(shape_of(setting.model()), setting.config(), device="tpu", devices=setting.devices)
    return dict(plan.peak.parts)


def step_hash(case: Case, versions: Mapping[str, str]) -> str:
    """Of everything that decides the compiled step: settings, versions and the sources that it is made of."""
    folder = Path(tunix_rt.__file__).parent
    sources = {name: sha256_text((folder / name).read_text(encoding="utf-8")) for name in STEP_SOURCES}
    training = case.training.model_dump()
    decided = {
        "config": dict(case.config),
        "training": {name: training[name] for name in DECIDING},
        "tokens": case.tokens,
        "topology": case.topology,
        "versions": dict(versions),
        "sources": sources,
    }
    return sha256_text(json.dumps(decided, sort_keys=True))[:32]


def recorded(root: Path) -> dict[str, Any]:
    """What was recorded: the name of a setting -> its entry, in the order of `ALL`."""
    file = root / RESULTS
    found = json.loads(file.read_text(encoding="utf-8"))["settings"] if file.is_file() else {}
    return {setting.name: found[setting.name] for setting in ALL if setting.name in found}


def entry_of(setting: Setting, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """The compiler's verdict on `setting`: the `known` one where the step is still the same."""
    case = setting.case()
    key = step_hash(case, compiler_versions())
    if known is not None and known["hash"] == key:
        return with_plan(setting, known)
    found = ask_compiler(case, say=lambda line: print(f"{setting.name}: {line}", file=sys.stderr, flush=True))
    said = {
        "setting": asdict(setting),
        "hash": key,
        "fits": found.fits,
        "verdict": asdict(found),
    }
    return with_plan(setting, said)


def with_plan(setting: Setting, entry: Mapping[str, Any]) -> dict[str, Any]:
    """`entry` with the lower bound as it is now, and its share of the compiler's `peak`, the most that is in use at once;
    `total` is all that `memory_analysis` lists."""
    parts, memory = lower_bound(setting), entry["verdict"]["memory"]
    needed = {} if memory is None else {"peak": memory["peak"], "total": ChipMemory(**memory).total}
    return {
        **{name: entry[name] for name in ("setting", "hash", "fits", "verdict")},
        "compiler_bytes": needed,
        "floor_bytes": sum(parts.values()),
        "floor_parts": parts,
        "floor_share": sum(parts.values()) / needed["peak"] if needed else None,
    }


def write(entries: Mapping[str, Any]) -> None:
    ordered = {setting.name: entries[setting.name] for setting in ALL if setting.name in entries}
    write_text(ROOT / RESULTS, json_text({"settings": ordered}))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The lower bound of a TPU step beside the compiler's figure.")
    parser.add_argument("--only", action="append", choices=[one.name for one in ALL], help="repeatable")
    parser.add_argument("--refresh", action="store_true", help="update the lower bounds, compile nothing")
    parser.add_argument("--list", action="store_true", help="show what is there, compile nothing")
    options = parser.parse_args(arguments)
    entries = recorded(ROOT)
    if options.refresh:
        entries = {one.name: with_plan(one, entries[one.name]) for one in ALL if one.name in entries}
        write(entries)
    for setting in ALL:
        if options.list or options.refresh:
            print(_line(setting.name, entries.get(setting.name)))
        elif not options.only or setting.name in options.only:
            try:
                entries[setting.name] = entry_of(setting, entries.get(setting.name))
            except TunixError as error:  # one that the compiler fails at does not stop the others
                print(f"{setting.name}: error: {error}", file=sys.stderr, flush=True)
                continue
            write(entries)
            print(_line(setting.name, entries[setting.name]), flush=True)
    return 0 if all(setting.name in entries for setting in ALL) else 1


def _line(name: str, entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return f"{name}: not compiled yet"
    floor = f"at least {entry['floor_bytes'] / 2**30:.3f} GiB"
    if not entry["fits"]:
        return f"{name}: refused by the compiler; {floor}"
    peak, total = (entry["compiler_bytes"][kind] / 2**30 for kind in ("peak", "total"))
    return f"{name}: compiler peak {peak:.3f}, total {total:.3f} GiB; {floor} ({100 * entry['floor_share']:.0f} % of the peak)"


if __name__ == "__main__":
    sys.exit(main())
