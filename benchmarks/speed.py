"""How fast the PyTorch engine trains, beside the loops that people run, on the same packed rows.

    python -m benchmarks.speed compare --data train.jsonl --tokenizer DIR    Gemma-1 2B, every contender in turn
    python -m benchmarks.speed compare --presets gemma-2-2b gpt2 --contenders ours compiled ...     other models
    python -m benchmarks.speed least-memory --data train.jsonl --tokenizer DIR     8 x 1024 tokens inside 8 GiB
    python -m benchmarks.speed epoch --tokenizer DIR                one epoch of dev-reasoning-v2, ours and the old way
    python -m benchmarks.speed program --data train.jsonl --tokenizer DIR          `tunix-rt train`, from its metrics.jsonl
    python -m benchmarks.speed start --data train.jsonl --tokenizer DIR            command to first step, cold and warm
    python -m benchmarks.speed cpu                                  a small model on two threads, as a ratio

Each writes benchmarks/results/speed_NAME.json with every raw value, after every measurement, so that what was measured
stays when the time is up; with `--resume` what the file has with the same settings is not measured again. In each round every
contender is built anew, warms up, is timed, and is freed. The plan of ours stands beside its peak.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import speed_program
from benchmarks.speed_contenders import CONTENDERS, WORDS, Clock, ours_steps, plain_steps
from benchmarks.speed_jobs import (
    CONFIGS,
    Job,
    about,
    dense_product,
    make_job,
    median,
    memory,
    start_afresh,
)
from tunix_rt.data.packing import IGNORED
from tunix_rt.engines.failures import is_out_of_memory
from tunix_rt.errors import DoesNotFitError
from tunix_rt.plan.fit import least_room, predict_run

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
FULL = CONFIGS / "gemma-1-2b-h200.yaml"
LEAST = CONFIGS / "gemma-1-2b-8gib.yaml"
OLD_WAY = (
    "training.optim=adafactor", "training.gradient_accumulation_steps=4", "data.packing=false", "data.on_overflow=truncate",
)  # fmt: skip
OLD_LENGTH = 128


# --- settings ---------------------------------------------------------------------------------------------------------


def compile_setting(asked: str | None) -> list[str]:
    """`training.compile` as it was asked for; None leaves that of the configuration."""
    return [] if asked is None else [f"training.compile={asked}"]


def changes_of(options: argparse.Namespace) -> list[str]:
    targets = [f"data.completion_only_loss={str(options.completion_only).lower()}"]
    narrow = ["training.dtype=float32", "training.master_dtype=null"] if options.device == "cpu" else []
    return [*targets, *narrow, *compile_setting(options.compile), *options.set]


def job_for(options: argparse.Namespace, preset: str, *, old: bool) -> Job:
    """The batches of a preset; with `old`, the predecessor's: the same examples, each in a row of its own."""
    return make_job(
        preset,
        config_file=options.config,
        data=options.data,
        tokenizer=options.tokenizer,
        device=options.device,
        rows=1 if old else options.rows,
        length=OLD_LENGTH if old else options.length,
        steps=options.steps,
        warmup=options.warmup,
        changes=[*changes_of(options), *(OLD_WAY if old else ())],
        attention=options.attention,
    )


def _without_folders(value: Any) -> Any:
    """A setting by its last name where it is a path: the folders of a machine say nothing to a reader."""
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    head, equals, tail = str(value).rpartition("=")
    return f"{head}{equals}{Path(tail).name}" if isinstance(value, str | Path) else value


class Record:
    """The file of one command: written again after every measurement."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        self.path = Path(options.output) if options.output else RESULTS / f"speed_{name}.json"
        kept = {name: _without_folders(value) for name, value in vars(options).items()}
        self.found: dict[str, Any] = {
            "about": about(),
            "settings": {k: v for k, v in kept.items() if k not in ("which", "output")},
        }
        self._ends = time.monotonic() + options.budget_seconds
        if options.resume and self.path.is_file():
            self._resume(json.loads(self.path.read_text(encoding="utf-8")))

    def _resume(self, before: dict[str, Any]) -> None:
        free = ("budget_seconds", "presets", "resume")
        one, other = ({k: v for k, v in of["settings"].items() if k not in free} for of in (before, self.found))
        if json.dumps(one) != json.dumps(other):
            raise SystemExit(f"{self.path}: measured with other settings; give another --output")
        self.found["cases"] = before["cases"]

    def case_of(self, made: dict[str, Any]) -> dict[str, Any]:
        """The case of this preset as far as it was measured, else the one that is `made`."""
        known = next((case for case in self.found["cases"] if case["preset"] == made["preset"]), None)
        if known is None:
            self.found["cases"].append(made)
        return known or made

    def out_of_time(self) -> bool:
        return time.monotonic() > self._ends

    def write(self, **more: Any) -> None:
        self.found |= more
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


# --- rounds -----------------------------------------------------------------------------------------------------------


def measure(contender: str, job: Job, steps: int) -> dict[str, Any]:
    """One contender, built, warmed up, timed and freed; or why it could not be measured, with the memory it had taken."""
    start_afresh()
    clock = Clock(job, steps)
    left = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    try:
        CONTENDERS[contender](job, clock)
        found = clock.found()
    except ImportError as error:
        found = {"skipped": f"{error.name or 'a package'} cannot be imported here"}
    except Exception as error:  # noqa: BLE001  one contender's defect must not cost the figures of the others
        if isinstance(error, DoesNotFitError) or (isinstance(error, RuntimeError) and is_out_of_memory(error)):
            found = {"out_of_memory": str(error).splitlines()[0][:300], **memory()}
        else:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}
    del clock
    start_afresh()
    return {**found, "allocated_before_bytes": left}


def rounds_of(jobs: dict[str, Job], options: argparse.Namespace, case: dict[str, Any], record: Record) -> None:
    """Every contender once in each round, in a turned order; the dense product before each round."""
    names = list(jobs)
    before = {name: case["contenders"][name]["rounds"] for name in names}
    gone = {name for name, rounds in before.items() if rounds and "seconds" not in rounds[-1]}
    for number in range(options.rounds):
        if all(name in gone or len(before[name]) > number for name in names):
            continue
        case["dense_tflops"].append(dense_product())
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in gone or len(before[name]) > number:
                continue
            if record.out_of_time():
                case["stopped"] = f"the time was up in round {number + 1}, before {name}"
                print(case["stopped"], flush=True)
                record.write()
                return
            found = measure(name, jobs[name], options.steps)
            case["contenders"][name]["rounds"].append(found)
            if "seconds" not in found:
                gone.add(name)
            print(f"  round {number + 1} {name:14s} {short(found)}", flush=True)
            record.write()


def short(found: dict[str, Any]) -> str:
    if "seconds" not in found:
        return "; ".join(f"{key}: {value}" for key, value in found.items() if not key.startswith("allocated"))
    peak = f", peak {found['peak_allocated_bytes'] / GIB:.2f} GiB" if "peak_allocated_bytes" in found else ""
    return (
        f"{found['tokens_per_second']:,.0f} tokens/s, loaded in {found['load_seconds']:.1f} s, first step "
        f"{found['first_step_seconds']:.1f} s, loss {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}{peak}"
    )


def summarise(case: dict[str, Any]) -> None:
    """Medians over the rounds of every contender, beside its raw values."""
    dense = [value for values in case["dense_tflops"] for value in values]
    case["dense_tflops_median"] = median(dense) if dense else None
    for kept in case["contenders"].values():
        rounds = [found for found in kept["rounds"] if "seconds" in found]
        if not rounds:
            continue
        kept["median"] = {
            key: median([found[key] for found in rounds])
            for key in ("tokens_per_second", "positions_per_second", "tflops", "load_seconds", "seconds")
        }
        kept["median"]["first_step_seconds"] = rounds[0]["first_step_seconds"]  # later rounds find the code compiled
        kept["median"]["share_of_dense"] = kept["median"]["tflops"] / case["dense_tflops_median"]
        for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
            if key in rounds[0]:
                kept["median"][key] = max(found[key] for found in rounds)


def show(case: dict[str, Any]) -> None:
    facts = next(iter(case["contenders"].values()))["job"]
    print(
        f"\n{facts['preset']}, {facts['rows']} x {facts['length']}; dense product {case['dense_tflops_median']:.0f} TFLOP/s"
    )
    print(
        f"{'':16s}{'tokens/s':>10s}{'TFLOP/s':>9s}{'of dense':>9s}{'GiB':>8s}{'reserved':>9s}{'1st step':>9s}{'ours':>7s}"
    )
    ours = case["contenders"].get("ours", {}).get("median")
    if "predicted_bytes" in case and ours and "peak_allocated_bytes" in ours:
        error = case["predicted_bytes"] / ours["peak_allocated_bytes"] - 1
        print(f"plan of ours: {case['predicted_bytes'] / GIB:.2f} GiB, {error:+.2%}")
    for name, kept in case["contenders"].items():
        if "median" not in kept:
            print(f"{name:16s}{short(kept['rounds'][-1]) if kept['rounds'] else 'not measured'}")
            continue
        said = kept["median"]
        times = f"{ours['tokens_per_second'] / said['tokens_per_second']:.2f}x" if ours else ""
        print(
            f"{name:16s}{said['tokens_per_second']:10,.0f}{said['tflops']:9.2f}{said['share_of_dense']:9.1%}"
            f"{said.get('peak_allocated_bytes', 0) / GIB:8.2f}{said.get('peak_reserved_bytes', 0) / GIB:9.2f}"
            f"{said['first_step_seconds']:8.1f}s{times:>7s}"
        )


def predicted(job: Job, options: argparse.Namespace) -> dict[str, int]:
    """The peak of a run of ours over these batches by its plan, and the least memory in which the plan says that it fits."""
    if options.device == "cpu":
        return {}
    micros = [micro for batch in job.batches for micro in batch.micro_batches]
    share = max(float((micro.labels != IGNORED).sum()) / micro.labels.size for micro in micros)
    plan = predict_run(
        job.shape, job.config, device=options.device, row_tokens=micros[0].ids.shape[1], target_share=share,
        capability=torch.cuda.get_device_capability(), device_name=torch.cuda.get_device_name(),
        steps=job.warmup + options.steps,
    )  # fmt: skip
    return {
        "predicted_bytes": plan.peak_bytes,
        "least_room_bytes": least_room(plan),
        "context_bytes": plan.context_bytes,
    }


def run_cases(options: argparse.Namespace, record: Record, presets: list[str]) -> int:
    """Every preset in turn; 1 when a figure of ours is missing."""
    record.write(cases=record.found.get("cases", []))
    for preset in presets:
        torch.compiler.reset()  # what was compiled for another model is of no use to this one
        made = {
            old: job_for(options, preset, old=old) for old in {name == "predecessor" for name in options.contenders}
        }
        jobs = {name: made[name == "predecessor"] for name in options.contenders}
        case: dict[str, Any] = {
            "preset": Path(preset).name,
            "dense_tflops": [],
            "contenders": {
                name: {"words": WORDS[name], "job": job.facts(), "rounds": []} for name, job in jobs.items()
            },
        }
        job = next(iter(jobs.values()))
        case["training"] = job.training.model_dump(exclude_defaults=True)
        case |= predicted(job, options)
        case = record.case_of(case)
        rounds_of(jobs, options, case, record)
        summarise(case)
        record.write()
    for case in record.found["cases"]:
        show(case)
    print(f"wrote {record.path.name}")
    return int(
        any("ours" in c["contenders"] and "median" not in c["contenders"]["ours"] for c in record.found["cases"])
    )


# --- commands ---------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    name = "compare" if options.presets == ["gemma-2b"] else "models"
    return run_cases(options, Record(options, name), options.presets)


def least_memory(options: argparse.Namespace) -> int:
    """Ours alone, with the settings of its configuration, under a cap on what the allocator may take."""
    options.contenders, options.config = ["ours"], options.config if options.config != FULL else LEAST
    if options.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap_gib * GIB / total)
    return run_cases(options, Record(options, "least_memory"), options.presets[:1])


def epoch(options: argparse.Namespace) -> None:
    """One epoch of dev-reasoning-v2: ours in large packed steps, ours with as many updates, and the predecessor's way."""
    record = Record(options, "epoch")
    record.write(runs={})
    preset = options.presets[0]
    old = {"rows": 1, "length": OLD_LENGTH, "changes": OLD_WAY}
    ways: dict[str, dict[str, Any]] = {
        "ours": {"rows": options.rows, "length": options.length, "changes": ()},
        "ours, as many updates": {"rows": 4, "length": OLD_LENGTH, "changes": ("data.packing=false", OLD_WAY[3])},
        "predecessor": old,
    }
    for name, way in ways.items():
        if name not in options.ways:
            continue
        contender = "predecessor" if name == "predecessor" else "ours"
        changes = [*changes_of(options), *way["changes"]]
        made = {"config_file": options.config, "data": "dev-reasoning-v2", "tokenizer": options.tokenizer}
        made |= {"device": options.device, "rows": way["rows"], "length": way["length"], "attention": options.attention}
        job = make_job(preset, **made, steps=None, warmup=1, changes=changes)
        steps = len(job.batches)
        # A whole epoch of ours is the warm-up: its last batch has a shape of its own, which is compiled for.
        job = replace(job, warmup=steps if name == "ours" else min(steps, options.warmup + 2))
        if record.out_of_time():
            record.found["stopped"] = f"the time was up before {name}"
            break
        torch.compiler.reset()  # or the next way would share code that serves the shapes of both
        found = measure(contender, job, steps)
        record.found["runs"][name] = {"job": job.facts(), "steps": steps, "warmup_steps": job.warmup, **found}
        print(f"{name:24s} {found.get('seconds', float('nan')):8.2f} s for {steps} updates; {short(found)}", flush=True)
        record.write()
    print(f"wrote {record.path.name}")


def cpu(options: argparse.Namespace) -> None:
    """Ours and the plain loop, step by step in turn, on two threads: a ratio that holds on any machine."""
    torch.set_num_threads(options.threads)
    options.device = "cpu"
    record = Record(options, "cpu")
    record.write(**cpu_ratio(options.steps, rows=options.rows, length=options.length))
    said = record.found
    took = {name: f"{1000 * seconds:.1f} ms" for name, seconds in said["median_seconds"].items()}
    print(
        f"ours {took['ours']}, plain {took['plain']}: {said['ratio']:.3f}; fastest steps {said['ratio_of_fastest']:.3f}"
    )
    print(f"wrote {record.path.name}")


def cpu_ratio(
    steps: int, *, rows: int = 2, length: int = 512, warmup: int = 3, changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Steps taken in turn by both on the same rows of dev-reasoning-v2, in float32: medians, fastest, and their ratios.

    Another program on the same cores slows whole stretches of steps, which the fastest step of each escapes.
    """
    plain = ["training.dtype=float32", "training.master_dtype=null", *compile_setting("false")]
    made = {"config_file": FULL, "data": "dev-reasoning-v2", "tokenizer": "tiny-gemma3", "device": "cpu"}
    job = make_job("tiny-gemma3", **made, rows=rows, length=length, steps=8, warmup=warmup, changes=[*plain, *changes])
    total = warmup + steps
    turns = {"ours": ours_steps(job, Clock(job, steps), total), "plain": plain_steps(job, Clock(job, steps))}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    losses: dict[str, list[float]] = {name: [] for name in turns}
    for step in range(total):
        for name in list(turns) if step % 2 else reversed(turns):
            began = time.perf_counter()
            losses[name].append(next(turns[name]))
            seconds[name].append(time.perf_counter() - began)
    medians = {name: median(taken[warmup:]) for name, taken in seconds.items()}
    fastest = {name: min(taken[warmup:]) for name, taken in seconds.items()}
    return {
        "job": job.facts(),
        "warmup": warmup,
        "threads": torch.get_num_threads(),
        "step_seconds": seconds,
        "losses": losses,
        "median_seconds": medians,
        "fastest_seconds": fastest,
        "ratio": medians["ours"] / medians["plain"],
        "ratio_of_fastest": fastest["ours"] / fastest["plain"],
    }


def program(options: argparse.Namespace) -> None:
    speed_program.program(options, Record(options, "program"), compile_setting(options.compile))


def start(options: argparse.Namespace) -> None:
    speed_program.start(options, Record(options, "start"), compile_setting(options.compile))


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "compare": compare, "least-memory": least_memory, "epoch": epoch, "program": program, "start": start, "cpu": cpu,
}  # fmt: skip
OWN_DEFAULTS = {
    "least-memory": {"length": 1024, "rounds": 2, "steps": 8}, "cpu": {"rows": 2, "length": 512, "steps": 20},
    "start": {"steps": 3},
}  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=COMMANDS)
    parser.add_argument(
        "config", nargs="?", type=Path, default=FULL, help="settings of ours; those of `program`, `start`"
    )
    parser.add_argument("--preset", "--presets", dest="presets", nargs="+", default=["gemma-2b"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME",
                        default=["ours", "eager", "compiled", "trainer", "liger"], help=", ".join(CONTENDERS))  # fmt: skip
    parser.add_argument("--rows", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--data", help="GSM8K's train.jsonl")
    parser.add_argument("--tokenizer", default="tiny-gemma3")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--completion-only", action="store_true", help="only completions are targets")
    parser.add_argument("--compile", choices=["auto", "true", "false"], help="of ours, instead of the configuration's")
    parser.add_argument("--attention", help="of transformers' loops, instead of sdpa")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for ours")
    parser.add_argument("--budget-seconds", type=float, default=3600.0, help="nothing new is begun after it")
    parser.add_argument("--resume", action="store_true", help="go on with the file of an earlier call")
    parser.add_argument("--cap-gib", type=float, default=8.0)
    parser.add_argument("--ways", nargs="+", default=["ours", "ours, as many updates", "predecessor"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", type=int, default=0, help="steps that `program` records")
    parser.add_argument(
        "--start-as", choices=["cold", "warm"], help="note the start of `program` in speed_start.json too"
    )
    parser.add_argument("--whole", action="store_true", help="let `program` save and end by itself")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--output")
    options = parser.parse_args(arguments)
    for name, value in (
        {"rows": 8, "length": 2048, "rounds": 3, "steps": 5} | OWN_DEFAULTS.get(options.which, {})
    ).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.data is None and options.which not in ("epoch", "cpu"):
        parser.error(f"{options.which} needs --data")
    if options.device == "cpu" and options.compile is None:
        options.compile = "false"
    return options


def main() -> int:
    options = parse()
    return COMMANDS[options.which](options) or 0


if __name__ == "__main__":
    sys.exit(main())
