"""Runs that do not fit, with what the solver proposes first, under a cap on the allocator: does it fit, and how fast is it?

    python -m benchmarks.solver_cases [--workers N] [--only TEXT]... --output FILE
    python -m benchmarks.solver_cases --order --output FILE       the three predicted to be fastest, of two of them, in turn
    python -m benchmarks.solver_cases --auto --output FILE        Gemma-1 2B as `memory: auto` takes it, under several caps
    python -m benchmarks.solver_cases --device cpu --output FILE  tries this code with a small model, without a cap

Each case has a process of its own: random weights in the exact shape of a preset, three optimizer steps, a held-out loss, a
generation, then some timed steps. The allocator may take the cap less what the plan leaves to the CUDA context. Several workers
share the GPU: their speed is not that of a run alone. Writes raw JSON after every case.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory_on_gpu import Pool, Worker
from tunix_rt.config.load import with_settings
from tunix_rt.config.settings import RunConfig
from tunix_rt.models.resolve import resolve_model
from tunix_rt.plan.fit import predict_run, verdict
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.shape import shape_of
from tunix_rt.plan.sizes import ModelShape
from tunix_rt.plan.solver import Proposal, faster, solve
from tunix_rt.plan.speed import Rates, rates_for, rates_of, step_time

ROOT = Path(__file__).parents[1]
GIB = 2**30
TIMED, WARM_UP = 2, 1
ORDER_TIMED, ORDER_WARM_UP = 8, 3
IN_ORDER = (
    "gemma-2b 8x1024 in 24 GiB, bfloat16 weights, compiled",
    "gemma-2b 8x1024 in 24 GiB, bfloat16 products",
    "gemma-3-1b 8x1024 in 12 GiB, bfloat16 weights, compiled",
)
"""Cases of which the three predicted-fastest are timed."""
APART = 1.03
"""They are taken so far apart: smaller differences are not predicted."""
NARROW = {"dtype": "bfloat16"}
LEAN = {"dtype": "bfloat16", "master_dtype": "bfloat16"}


def cases() -> list[tuple[str, str, dict[str, Any], float]]:
    """Name, preset, settings and cap in GiB. None of them fits as it is written."""

    def case(preset: str, rows: int, length: int, cap: float, *, compiled: bool = False, **training: Any) -> Any:
        settings = {
            "model": {"weights": "random"},
            "data": {"max_length": length},
            "training": {"per_device_train_batch_size": rows, "compile": compiled, **training},
            "evaluation": {"per_device_eval_batch_size": rows, "max_new_tokens": 16},
        }
        kind = (
            {"bfloat16": "bfloat16 weights", None: "bfloat16 products"}[training.get("master_dtype")]
            if training
            else ""
        )
        name = f"{preset} {rows}x{length} in {cap:g} GiB" + (f", {kind}" if kind else "")
        return name + (", compiled" if compiled else ""), preset, settings, cap

    return [
        case("gpt2", 16, 1024, 4),
        case("gpt2", 32, 512, 3),
        case("gpt2", 16, 1024, 4, **NARROW),
        case("gpt2", 16, 1024, 3, **LEAN, compiled=True),
        case("smollm2-135m", 8, 2048, 6),
        case("smollm2-135m", 16, 1024, 4, **NARROW),
        case("smollm2-135m", 4, 4096, 3, **NARROW),
        case("smollm2-135m", 16, 1024, 3, **LEAN, compiled=True),
        case("gemma-3-270m", 8, 1024, 6),
        case("gemma-3-270m", 16, 512, 5, **NARROW),
        case("gemma-3-270m", 4, 2048, 4, **NARROW),
        case("gemma-3-270m", 16, 1024, 6, **LEAN, compiled=True),
        case("gemma-3-1b", 8, 1024, 16, **NARROW),
        case("gemma-3-1b", 4, 2048, 12),
        case("gemma-3-1b", 8, 512, 8, **NARROW),
        case("gemma-3-1b", 8, 1024, 12, **LEAN, compiled=True),
        case("gemma-2b", 8, 1024, 24, **NARROW),
        case("gemma-2b", 4, 2048, 16, **NARROW),
        case("gemma-2b", 8, 512, 12),
        case("gemma-2b", 8, 1024, 24, **LEAN, compiled=True),
    ]


def small_cases() -> list[tuple[str, str, dict[str, Any], float]]:
    """For a CPU, to try this code."""
    settings = {
        "model": {"weights": "random"},
        "data": {"max_length": 128},
        "training": {"per_device_train_batch_size": 8, "device": "cpu"},
        "evaluation": {"per_device_eval_batch_size": 4, "max_new_tokens": 4},
    }
    return [("tiny-gemma3 8x128 in 0.2 GiB", "tiny-gemma3", settings, 0.2)]


# --- what is proposed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """A device with so much memory."""

    device: str
    kind: str
    free_bytes: int
    capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A case, the device it is to fit, and what the solver makes of it."""

    name: str
    preset: str
    config: RunConfig
    cap: Capped
    plan: MemoryPlan
    proposals: list[Proposal]


KIND = "NVIDIA H200"
H200 = rates_of(989, 66.9, 4800)


def solved(
    case: tuple[str, str, dict[str, Any], float], device: str, capability: tuple[int, int] | None, rates: Rates
) -> Solved:
    name, preset, settings, cap_gib = case
    config, shape = RunConfig.model_validate(settings), shape_named(preset)
    cap = Capped(device=device, kind=KIND, free_bytes=int(cap_gib * GIB), capability=capability)
    plan = predict_run(shape, config, device=device, capability=capability, device_name=KIND)
    if verdict(plan, cap).fits:
        raise SystemExit(f"{name}: fits as it is written, and shows nothing")
    return Solved(
        name=name, preset=preset, config=config, cap=cap, plan=plan, proposals=solve(plan, cap, shape, config, rates)
    )


def shape_named(preset: str) -> ModelShape:
    return shape_of(resolve_model(preset, weights="random").config)


def job_of(one: Solved, proposal: Proposal, *, timed: int, warm_up: int, capped: bool) -> dict[str, Any]:
    """What a child is told."""
    cap_bytes = one.cap.free_bytes - proposal.plan.context_bytes if capped else None
    settings = with_settings(one.config, proposal.settings).model_dump()
    spec = {"name": one.name, "preset": one.preset, "settings": settings}
    return {"name": one.name, "spec": spec, "cap_bytes": cap_bytes, "timed": timed, "warm_up": warm_up}


def beside(one: Solved, proposal: Proposal, measured: dict[str, Any]) -> dict[str, Any]:
    """The prediction and what was measured."""
    peaks = [size for part, size in measured.get("measured_bytes", {}).items() if part != "load"]
    peaks += [measured["timed_peak_bytes"]] if "timed_peak_bytes" in measured else []
    return {
        "name": one.name,
        "cap_gib": one.cap.free_bytes / GIB,
        "predicted_as_written_bytes": one.plan.peak_bytes,
        "settings": proposal.settings,
        "line": proposal.line,
        "level": proposal.level,
        "predicted_bytes": proposal.plan.peak_bytes,
        "predicted_tokens_per_second": round(proposal.time.tokens_per_second, 1),
        "fits": "failed" not in measured,
        "peak_bytes": max(peaks) if peaks else None,
        **measured,
    }


# --- one case, in a process of its own -------------------------------------------------------------------------------


def measured(job: dict[str, Any], device: str) -> dict[str, Any]:
    """What a worker of `memory_on_gpu` does with a job."""
    from benchmarks.memory_on_gpu import measure

    found: dict[str, Any] = {}
    if not job.get("only_time"):
        found = measure(job["spec"], device, job["cap_bytes"])
    return found | timed_steps(job, device)


def timed_steps(job: dict[str, Any], device: str) -> dict[str, Any]:
    """Seconds of single steps behind a warm-up, under the same cap, on rows of random tokens."""
    import torch

    from benchmarks.engine_gpu import start_afresh
    from benchmarks.memory_prediction import random_data
    from tunix_rt.engines.torch import loop as engine_of

    config = RunConfig.model_validate(job["spec"]["settings"])
    training = config.training
    start_afresh()
    if device == "cuda" and job["cap_bytes"] is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(job["cap_bytes"] / total)
    source = resolve_model(job["spec"]["preset"], weights="random")
    _, batch_of = random_data(config, shape_of(source.config).vocab)
    steps = job["warm_up"] + job["timed"]
    engine = engine_of.load(source, device=device, training=training)
    code = engine_of.prepare_steps(engine, batch_of, training, total=steps)
    optimizer = engine_of.make_optimizer(engine, training)
    taken = list(engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=steps))
    seconds = [step.seconds for step in taken[job["warm_up"] :]]
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    return {
        "timed_peak_bytes": engine.peak_bytes(),
        "timed_reserved_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "step_seconds": [step.seconds for step in taken],
        "tokens_per_second": round(rows * config.data.max_length / statistics.median(seconds), 1),
        "layers": code["layers"],
    }


# --- many cases ------------------------------------------------------------------------------------------------------


def first_proposals(todo: list[Solved], options: argparse.Namespace, about: dict[str, Any]) -> None:
    """The first proposal of every case; written down as they end."""
    by_name = {one.name: one for one in todo}
    results: list[dict[str, Any]] = [
        {"name": one.name, "fits": False, "failed": "nothing is proposed"} for one in todo if not one.proposals
    ]
    capped = options.device == "cuda"
    jobs = [job_of(one, one.proposals[0], timed=TIMED, warm_up=WARM_UP, capped=capped) for one in todo if one.proposals]

    def done(job: dict[str, Any], answer: dict[str, Any], seconds: float) -> None:
        one = by_name[job["name"]]
        results.append(beside(one, one.proposals[0], answer) | {"seconds": round(seconds, 1)})
        _write(options.output, {"about": about, "workers": options.workers, "cases": results})
        print(_line(results[-1]), flush=True)

    needed = {one.name: one.cap.free_bytes for one in todo}
    Pool(options.device, options.workers, options.room_gib * GIB).run(jobs, needed, done)
    print(f"{sum(one['fits'] for one in results)} of {len(results)} fit")


def fastest_of(proposals: list[Proposal], count: int = 3) -> list[Proposal]:
    """The predicted-fastest, each slower than the one before by what the prediction can tell apart."""
    chosen: list[Proposal] = []
    for one in sorted(proposals, key=lambda one: (-one.time.tokens_per_second, one.rank)):
        if not chosen or chosen[-1].time.tokens_per_second >= APART * one.time.tokens_per_second:
            chosen.append(one)
    return chosen[:count]


def in_order(todo: list[Solved], options: argparse.Namespace, about: dict[str, Any]) -> None:
    """The three predicted to be fastest, one after the other: are they in that order?"""
    results, worker = [], Worker(options.device)
    for one in todo:
        fastest = fastest_of(one.proposals)
        found = []
        for proposal in fastest:
            job = job_of(one, proposal, timed=ORDER_TIMED, warm_up=ORDER_WARM_UP, capped=options.device == "cuda")
            found.append(beside(one, proposal, worker.ask(job | {"only_time": True})))
            print(_line(found[-1]), flush=True)
        speeds = [each.get("tokens_per_second", 0.0) for each in found]
        results.append({"name": one.name, "proposals": found, "in_order": speeds == sorted(speeds, reverse=True)})
        _write(options.output, {"about": about, "cases": results})
        print(f"{one.name}: {'in' if results[-1]['in_order'] else 'not in'} the predicted order", flush=True)


AUTO_CAPS = (8, 12, 16, 24, 32, 80)
AUTO = {
    "model": {"weights": "random"},
    "data": {"max_length": 1024},
    "training": {"per_device_train_batch_size": 4, "dtype": "bfloat16", "compile": True},
}
"""Gemma-1 2B with AdamW, weights in float32."""


def automatic(capability: tuple[int, int] | None, options: argparse.Namespace, about: dict[str, Any]) -> None:
    """Gemma-1 2B with what `memory: auto` settles on under each cap, one after the other."""
    results, worker, config, shape = [], Worker("cuda"), RunConfig.model_validate(AUTO), shape_named("gemma-2b")
    for gib in AUTO_CAPS:
        cap = Capped(device="cuda", kind=KIND, free_bytes=gib * GIB, capability=capability)
        plan = predict_run(shape, config, device="cuda", capability=capability, device_name=KIND)
        fits = verdict(plan, cap).fits
        proposals = (faster if fits else solve)(plan, cap, shape, config, H200)
        one = Solved(
            name=f"gemma-2b 4x1024 in {gib} GiB",
            preset="gemma-2b",
            config=config,
            cap=cap,
            plan=plan,
            proposals=proposals,
        )
        if not proposals and not fits:
            found: dict[str, Any] = {"name": one.name, "fits": False, "failed": "nothing is proposed"}
        else:
            best = proposals[0] if proposals else as_written(one, H200)
            job = job_of(one, best, timed=ORDER_TIMED, warm_up=ORDER_WARM_UP, capped=True)
            found = beside(one, best, worker.ask(job | {"only_time": True}))
        results.append(found)
        _write(options.output, {"about": about, "written": AUTO, "cases": results})
        print(_line(found), flush=True)
    worker.close()


def as_written(one: Solved, rates: Rates) -> Proposal:
    time = step_time(
        shape_named(one.preset), one.config, rates, device="cuda", capability=one.cap.capability, layers=one.plan.layers,
    )  # fmt: skip
    return Proposal(settings={}, plan=one.plan, time=time, level=0, costs=(), line="as written")


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _line(found: dict[str, Any]) -> str:
    if "line" not in found:
        return f"{found['name']}: {found['failed']}"
    peak = f"{found['peak_bytes'] / GIB:.2f} GiB" if found["peak_bytes"] else "no peak"
    speed = f", {found['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in found else ""
    said = f"does not run ({found['failed']})" if "failed" in found else f"fits, {peak}{speed}"
    foretold = f"{found['predicted_bytes'] / GIB:.2f} GiB, {found['predicted_tokens_per_second']:,.0f} tokens/s"
    return f"{found['name']}: {said}; predicted {foretold}; {found['line']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
    parser.add_argument("--only", action="append", help="cases whose name holds this text")
    parser.add_argument("--order", action="store_true", help="time the three predicted-fastest of two cases")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the code")
    parser.add_argument("--auto", action="store_true", help="Gemma-1 2B as `memory: auto` takes it, under several caps")
    parser.add_argument("--room-gib", type=float, default=128.0, help="of the GPU, for all workers together")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.output is None:
        parser.error("--output FILE is needed")
    capability, about, rates = _device(options.device)
    if options.auto:
        automatic(capability, options, about)
        return
    chosen = cases() if options.device == "cuda" else small_cases()
    if options.order and options.device == "cuda":
        chosen = [one for one in chosen if one[0] in IN_ORDER]
    if options.only:
        chosen = [one for one in chosen if any(text in one[0] for text in options.only)]
    todo = [solved(one, options.device, capability, rates) for one in chosen]
    (in_order if options.order else first_proposals)(todo, options, about)


def _device(device: str) -> tuple[tuple[int, int] | None, dict[str, Any], Rates]:
    """Its capability, what is written down of it, and its rates. The GPU is asked by a child: this process leaves it alone."""
    if device == "cpu":
        return None, {"device": "cpu"}, rates_for(Capped(device="cpu", kind="cpu", free_bytes=0, capability=None))
    told = "[torch.cuda.get_device_name(), *torch.cuda.get_device_capability(), torch.__version__]"
    asked = f"import torch, json; print(json.dumps({told}))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    name, major, minor, version = json.loads(done.stdout)
    return (major, minor), {"device": name, "torch": version}, H200


if __name__ == "__main__":
    main()
