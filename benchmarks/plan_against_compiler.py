"""The arithmetic plan of a TPU step beside what the TPU's compiler says of it: python -m benchmarks.plan_against_compiler

Needs `tunix-rt[tpu]`, no TPU. Each setting is compiled once, small models first, and written to
benchmarks/results/plan_against_compiler.json as soon as it is there, so a series that was stopped goes on where it was. What
was compiled before from the same source, settings and versions is not compiled again. A compilation takes from half a minute
to some minutes of one core. `--only NAME` (repeatable) takes some settings, `--refresh` writes the plan's side anew and
compiles nothing, `--list` shows what is there.

A third of the settings is held out: drawn by `HELD_OUT_SEED` before any of them was compiled. `SEEN` names those of them that
were known when a figure of `plan/tpu_step.py` was still changed: they count with the fitted ones. `DRAWN_LAST` was drawn by
`LAST_SEED` from a grid after the last change, and is judged whatever comes of it. The settings `AT_THE_LIMIT` of a chip show
which of the compiler's figures it goes by: it takes a step whose `total` is above what the chip has, as long as its `peak` is
not.
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
from tunix_rt.plan.jax_memory import predict_jax, row_length
from tunix_rt.plan.shape import shape_of
from tunix_rt.storage import json_text, sha256_text, write_text

ROOT = Path(__file__).parents[1]
RESULTS = Path("benchmarks/results/plan_against_compiler.json")
EIGHT, ONE = "v5e:2x4", "v5e:1x1"
HELD_OUT_SEED = 9
UNDROPPED = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
"""GPT-2's own configuration asks for dropout, which the engine does not do."""
PREDICTS_ONLY = ("plan/jax_memory.py", "plan/compile_policy.py", "plan/activations.py")
"""Of the sources that the program may hash for a verdict: what foretells the step and is no part of it."""
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
SEEN = frozenset(("gpt2 4x1024 adamw float32/bfloat16 full", "gpt2 4x512 adamw float32/bfloat16 full on v5e:1x1"))
"""Held out, and no longer unknown when the bytes of a score were set to 6 after `llama-3.2-1b`, which is fitted: 4 would have put
the first of them below the compiler."""
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


def held_out() -> frozenset[str]:
    """The names of a third of the settings, by the draw alone."""
    return frozenset(random.Random(HELD_OUT_SEED).sample([setting.name for setting in SETTINGS], len(SETTINGS) // 3))


def foretold(setting: Setting) -> dict[str, int]:
    """What the plan says of the step on one chip, in named parts."""
    plan = predict_jax(shape_of(setting.model()), setting.config(), device="tpu", devices=setting.devices)
    (step,) = [phase for phase in plan.phases if phase.name == "step"]
    return dict(step.parts)


def step_hash(case: Case, versions: Mapping[str, str]) -> str:
    """Of everything that decides the compiled step: settings, versions and the sources that it is made of."""
    folder = Path(tunix_rt.__file__).parent
    sources = {
        name: sha256_text((folder / name).read_text(encoding="utf-8"))
        for name in STEP_SOURCES
        if name not in PREDICTS_ONLY
    }
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


def group_of(setting: Setting) -> str:
    if setting in DRAWN_LAST:
        return "drawn last"
    if setting in AT_THE_LIMIT:
        return "at the limit"
    return "held out" if setting.name in held_out() - SEEN else "fitted"


def with_plan(setting: Setting, entry: Mapping[str, Any]) -> dict[str, Any]:
    """`entry` with what the plan says now, and its distance from the two figures of the compiler: `peak`, the most that is in
    use at once, and `total`, all that `memory_analysis` lists."""
    parts, memory = foretold(setting), entry["verdict"]["memory"]
    planned = sum(parts.values())
    asked = {} if memory is None else {"peak": memory["peak"], "total": ChipMemory(**memory).total}
    return {
        **{name: entry[name] for name in ("setting", "hash", "fits", "verdict")},
        "group": group_of(setting),
        "held_out": setting.name in held_out(),
        "seen": setting.name in SEEN,
        "compiler_bytes": asked,
        "plan_bytes": planned,
        "plan_parts": parts,
        "errors": {name: planned / size - 1 for name, size in asked.items()},
    }


def write(entries: Mapping[str, Any]) -> None:
    ordered = {setting.name: entries[setting.name] for setting in ALL if setting.name in entries}
    write_text(ROOT / RESULTS, json_text({"held_out_seed": HELD_OUT_SEED, "settings": ordered}))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The plan of a TPU step beside the compiler's verdict.")
    parser.add_argument("--only", action="append", choices=[one.name for one in ALL], help="repeatable")
    parser.add_argument("--refresh", action="store_true", help="write the plan's side anew, compile nothing")
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
    plan = f"plan {entry['plan_bytes'] / 2**30:.3f} GiB ({entry['group']})"
    if not entry["fits"]:
        return f"{name}: refused by the compiler; {plan}"
    said = (
        f"{name} {entry['compiler_bytes'][name] / 2**30:.3f} ({100 * entry['errors'][name]:+.1f} %)"
        for name in ("peak", "total")
    )
    return f"{name}: compiler {', '.join(said)}; {plan}"


if __name__ == "__main__":
    sys.exit(main())
