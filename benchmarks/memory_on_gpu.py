"""Predicted peak memory beside the measured one, on a GPU, with the real engine: presets and settings crossed, and drawn.

    python -m benchmarks.memory_on_gpu [--drawn SEED --count N] [--limit] [--workers N] [--only TEXT]... [--output FILE]
    python -m benchmarks.memory_on_gpu --families SEED --count N --limit --output FILE      newer families, LoRA, traced models
    python -m benchmarks.memory_on_gpu --again --limit --output FILE        what failed there, by the plan of now

A case is random weights in the exact shape of a preset, three optimizer steps on packed rows of random tokens whose every token
is a target, one held-out loss, one generation. Measured is the peak of torch's allocator in each of these; predicted, without
the GPU, is the largest phase of the plan that belongs to it. With `--limit` the allocator may take no more than the least
memory into which the plan says that the case fits. Several processes share the GPU, since the peak of one does not depend on
the others; none is timed. `--drawn` adds cases by a random generator to the written ones; `--families` draws those of
`benchmarks.family_cases` and no others. Writes raw JSON after every case and prints the table. A case that the file already
has is not measured again, except by `--again`.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.family_cases import drawn_families, write_config
from benchmarks.memory_prediction import random_data
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import TunixError
from tunix_rt.models.resolve import ModelSource, resolve_model
from tunix_rt.plan.fit import least_room, predict_run
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.trace import shape_of_any

ROOT = Path(__file__).parents[1]
GIB = 2**30
STEPS = 3
CASE_SECONDS = 150
BFLOAT16 = {"dtype": "bfloat16", "master_dtype": "bfloat16"}
IN_BACKWARD = {**BFLOAT16, "optim": "adafactor", "optim_in_backward": True}
EAGER: dict[str, dict[str, Any]] = {
    "float32 AdamW": {},
    "bfloat16 AdamW": BFLOAT16,
    "bfloat16 products": {"dtype": "bfloat16"},
    "bfloat16 products, recomputed, accumulation": {
        "dtype": "bfloat16", "gradient_checkpointing": True, "gradient_accumulation_steps": 2,
    },
    "bfloat16 products, 8-bit, half recomputed": {
        "dtype": "bfloat16", "optim": "adamw_8bit", "gradient_checkpointing": 0.5,
    },
    "bfloat16 8-bit in backward": {**BFLOAT16, "optim": "adamw_8bit", "optim_in_backward": True},
    "bfloat16 Adafactor": {**BFLOAT16, "optim": "adafactor"},
    "smallest": {**IN_BACKWARD, "gradient_checkpointing": True},
    "LoRA in bfloat16": {"dtype": "bfloat16", "lora_rank": 16},
    "float16 AdamW": {"dtype": "float16"},
}  # fmt: skip
COMPILED: dict[str, dict[str, Any]] = {
    "bfloat16 AdamW": BFLOAT16,
    "bfloat16 products": {"dtype": "bfloat16"},
    "smallest": {**IN_BACKWARD, "gradient_checkpointing": True},
    "bfloat16 AdamW, half recomputed": {**BFLOAT16, "gradient_checkpointing": 0.5},
    "bfloat16 products, recomputed, accumulation": {
        "dtype": "bfloat16", "gradient_checkpointing": True, "gradient_accumulation_steps": 2,
    },
    "bfloat16 Adafactor in backward": IN_BACKWARD,
    "float32 AdamW": {},
}  # fmt: skip
SIZES = {
    "gemma-2b": [(1, 1024), (8, 1024), (4, 2048)],
    "gemma-2-2b": [(2, 1024), (1, 4096)],
    "gemma-3-1b": [(8, 512), (4, 2048)],
    "gemma-3-270m": [(16, 512), (4, 2048)],
    "llama-3.2-1b": [(4, 1024), (2, 4096)],
    "smollm2-135m": [(8, 1024), (16, 128)],
    "gpt2": [(8, 512), (16, 1024)],
}
"""Rows and tokens, taken in turn by the settings."""
EAGER_EACH, COMPILED_EACH = 4, 3
"""Settings of each preset: others for each, in turn."""
MODULES = (
    "gemma", "gemma2", "gemma3", "gemma4", "gpt2", "granite", "llama", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen3",
    "smollm3",
)  # fmt: skip
"""Of transformers, loaded before the processes of the cases are forked."""
OF_SPEC = ("name", "preset", "settings", "config", "drawn", "traced")
"""Keys of a case that are no results."""
PARTS = {
    "steps": ("compiling", "recording", "forward", "loss", "backward", "update"),
    "held-out": ("held-out loss",),
    "answers": ("generation",),
}


# --- the cases -------------------------------------------------------------------------------------------------------


def spec_of(preset: str, rows: int, length: int, recipe: str, training: dict[str, Any], **data: Any) -> dict[str, Any]:
    settings = {
        "model": {"weights": "random"},
        "data": {"max_length": length, **data},
        "training": {"per_device_train_batch_size": rows, "compile": False, **training},
        "evaluation": {"per_device_eval_batch_size": rows, "max_new_tokens": 16},
    }
    return {"name": f"{preset} {rows}x{length} {recipe}", "preset": preset, "settings": settings}


def cases() -> list[dict[str, Any]]:
    """Written by hand, to see every setting; the constants of the planner were chosen with these in view."""
    made = []
    for turn, (preset, sizes) in enumerate(SIZES.items()):
        for recipes, each, compiled in ((EAGER, EAGER_EACH, False), (COMPILED, COMPILED_EACH, True)):
            names = list(recipes)
            for index in range(each):
                name = names[(turn * each + index) % len(names)]
                rows, length = sizes[index % len(sizes)]
                words = f"{'compiled, ' if compiled else ''}{name}"
                made.append(spec_of(preset, rows, length, words, {**recipes[name], "compile": compiled}))
    return made


def drawn(seed: int, count: int, most_gib: float) -> list[dict[str, Any]]:
    """`count` cases by a random generator, no two alike, each predicted to need at most `most_gib`."""
    own, made = random.Random(seed), {}
    while len(made) < count:
        spec = _draw(own, compiled=len(made) % 5 < 2)
        if spec["name"] not in made and plan_of(spec).peak_bytes <= most_gib * GIB:
            made[spec["name"]] = spec
    return list(made.values())


def _draw(own: random.Random, *, compiled: bool) -> dict[str, Any]:
    preset = own.choice([*SIZES, "qwen-3-0.6b"])
    length = own.choice([128, 256, 512, 1024, 2048, 4096] if preset != "gpt2" else [128, 256, 512, 1024, 2048])
    rows = own.choice([rows for rows in (1, 2, 3, 4, 6, 8, 12, 16) if rows * length <= 16_384])
    training: dict[str, Any] = {"compile": compiled}
    training |= own.choice([{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16"}, BFLOAT16, BFLOAT16, {"dtype": "float16"}])
    training["optim"] = own.choice(["adamw", "adamw_8bit", "adafactor"])
    training["gradient_checkpointing"] = own.choice([False, False, 0.75, 0.5, 0.25, True])
    if training.get("dtype") != "float16" and own.random() < 0.25:
        training["optim_in_backward"] = True
    else:
        training["gradient_accumulation_steps"] = own.choice([1, 1, 1, 2, 3])
    if not compiled and own.random() < 0.12:
        training = {
            name: value for name, value in training.items() if name not in ("optim_in_backward", "master_dtype")
        }
        training["lora_rank"] = own.choice([8, 32])
    packed = compiled or own.random() > 0.12
    words = ", ".join(f"{name}={value}" for name, value in training.items())
    return spec_of(preset, rows, length, words + ("" if packed else ", unpacked"), training, packing=packed)


def plan_of(
    spec: dict[str, Any], capability: tuple[int, int] | None = None, device_name: str | None = None
) -> MemoryPlan:
    config = RunConfig.model_validate(spec["settings"])
    shape = shape_of_any(source_of(spec), config.training)
    return predict_run(shape, config, device="cuda", capability=capability, device_name=device_name, steps=STEPS)


def families(seed: int, count: int, most_gib: float, target: tuple[Any, ...]) -> dict[str, tuple[Any, MemoryPlan]]:
    """`count` cases of the newer families with their plans, each predicted to need at most `most_gib`. Plans are made by threads:
    each trace is a child process."""
    made: dict[str, tuple[Any, MemoryPlan]] = {}
    specs = drawn_families(seed)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        while len(made) < count:
            batch = list(itertools.islice(specs, count))
            planned = zip(batch, threads.map(lambda spec: _planned_or_not(spec, target), batch), strict=True)
            fitting = ((spec, plan) for spec, plan in planned if plan and plan.peak_bytes <= most_gib * GIB)
            made |= {spec["name"]: (spec, plan) for spec, plan in itertools.islice(fitting, count - len(made))}
    return made


def _planned_or_not(spec: dict[str, Any], target: tuple[Any, ...]) -> MemoryPlan | None:
    try:
        return plan_of(spec, *target)
    except TunixError as error:
        print(f"{spec['name']}: refused: {error.problem}", flush=True)
        return None


def source_of(spec: dict[str, Any]) -> ModelSource:
    """The model of a case, with random weights: a preset, or one with a configuration of its own."""
    if "config" not in spec:
        return resolve_model(spec["preset"], weights="random")
    key = hashlib.sha256(json.dumps(spec["config"], sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / "tunix-rt-memory-on-gpu" / key
    if not (folder / "config.json").is_file():
        write_config(spec, folder)
    return resolve_model(str(folder), weights="random")


# --- one case, in a process of its own or after others ---------------------------------------------------------------


def measure(spec: dict[str, Any], device: str, cap_bytes: int | None = None) -> dict[str, Any]:
    """Peak bytes of the parts of a run; on a CPU, which only tries the code, the peak so far."""
    import torch

    from benchmarks.engine_gpu import start_afresh
    from tunix_rt.engines.decoding import Decoding
    from tunix_rt.engines.torch import loop as engine_of

    config = RunConfig.model_validate(spec["settings"])
    training, rows = config.training, config.evaluation.per_device_eval_batch_size
    source = source_of(spec)
    start_afresh()
    if device == "cuda":
        share = 1.0 if cap_bytes is None else cap_bytes / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, int] = {}
    reserved: dict[str, int] = {}
    engine = engine_of.load(source, device=device, training=training)

    def peak(part: str) -> None:
        found[part] = engine.peak_bytes()
        if device == "cuda":
            reserved[part] = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()

    peak("load")
    if not engine.support.packing:  # as a run without packing then reads its data
        config = config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})
    row, batch_of = random_data(config, engine.vocabulary)
    code = engine_of.prepare_steps(engine, batch_of, training, total=STEPS)
    peak("prepare")
    optimizer = engine_of.make_optimizer(engine, training)
    for _ in engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=STEPS):
        pass
    peak("steps")
    kept = _kept(engine, batch_of) if spec.get("kept") else []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    engine_of.heldout_loss(engine, [row() for _ in range(rows)], batch_size=rows, pad_id=0)
    peak("held-out")
    del optimizer  # as a run lets it go before it answers
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    prompts = [row().ids.tolist()[: config.data.max_length] for _ in range(rows)]
    asked: dict[str, Any] = {
        "decoding": Decoding(max_new_tokens=config.evaluation.max_new_tokens),
        "batch_size_at": lambda length: rows,
        "decode": str,
        "stop_ids": [0],
        "pad_id": 0,
    }
    for _ in engine_of.generate(engine, prompts, **asked):
        pass
    peak("answers")
    return {
        "measured_bytes": found,
        "reserved_bytes": reserved,
        "code": code,
        "attention": engine.attention.name,
        "support": dataclasses.asdict(engine.support),
        "kept": kept,
    }


def _kept(engine: Any, batch_of: Any) -> list[Any]:
    """Shapes, types and bytes of the tensors that the last layer of a training step keeps, its weights left out."""
    import torch

    from tunix_rt.engines.torch.compile import layers_of
    from tunix_rt.engines.torch.model import summed_loss

    weights = {one.untyped_storage().data_ptr() for one in engine.model.parameters()}
    storages: dict[int, list[Any]] = {}
    layer = layers_of(engine.model)[-1]
    forward = layer.forward

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = [list(tensor.shape), str(tensor.dtype)[6:], storage.nbytes()]
        return tensor

    def watched(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    layer.forward = watched
    graph, engine.cuda_graph = engine.cuda_graph, None
    try:
        engine.model.train()
        with engine.kernels():
            summed_loss(engine, engine.placing(training=True)(batch_of(1).micro_batches[0]), scale=1.0)
    finally:
        layer.forward, engine.cuda_graph = forward, graph
        engine.model.zero_grad(set_to_none=True)
    return list(storages.values())


def beside_prediction(spec: dict[str, Any], measured: dict[str, Any], plan: MemoryPlan) -> dict[str, Any]:
    """The largest phase of the plan for each part, and for the whole beside the largest of the parts."""
    totals = {phase.name: phase.total_bytes for phase in plan.phases}
    predicted = {part: max(totals[name] for name in names if name in totals) for part, names in PARTS.items()}
    found = measured["measured_bytes"]
    training = max(found["steps"], found["prepare"])
    peak = max(training, found["held-out"], found["answers"])
    parts = {"steps": training, "held-out": found["held-out"], "answers": found["answers"]}
    return {
        **spec,
        **measured,
        "predicted_bytes": predicted,
        "predicted_parts": {phase.name: phase.parts for phase in plan.phases},
        "predicted_total": plan.peak_bytes,
        "peak_bytes": peak,
        "error": round(plan.peak_bytes / peak - 1, 5),
        "errors": {part: round(predicted[part] / parts[part] - 1, 5) for part in PARTS},
    }


def work(device: str) -> None:
    """Measure what comes as lines of JSON, and answer with one for each. Every case has a process of its own, forked from one
    that has the libraries loaded and knows nothing of the GPU."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whether there is a GPU is to be seen without touching it
    import torch._inductor.compile_fx  # noqa: F401

    import benchmarks.engine_gpu  # noqa: F401
    import tunix_rt.engines.torch.loop  # noqa: F401

    for family in MODULES:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                out.write(json.dumps(_answer(json.loads(line), device)))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as back:
            said = back.read()
        _, status = os.waitpid(child, 0)
        answers.write(
            (said or json.dumps({"failed": f"the process ended with {status}", "out_of_memory": False})) + "\n"
        )
        answers.flush()


def _answer(spec: dict[str, Any], device: str) -> dict[str, Any]:
    import torch

    try:
        if "timed" in spec:
            from benchmarks.solver_cases import measured

            return measured(spec, device)
        return measure(spec, device, spec.pop("cap_bytes", None))
    except (RuntimeError, ValueError, OSError, TunixError) as error:  # told to the parent, by name
        memory = isinstance(error, torch.OutOfMemoryError) or any(
            words in str(error) for words in ("out of memory", "no memory")
        )
        answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "out_of_memory": memory}
        return answer | ({"peak_bytes": torch.cuda.max_memory_allocated()} if memory and device == "cuda" else {})


# --- many cases ------------------------------------------------------------------------------------------------------


class Worker:
    """A process that measures one case after the other."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._child: subprocess.Popen[str] | None = None

    def ask(self, spec: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            command = [sys.executable, "-m", "benchmarks.memory_on_gpu", "--worker", "--device", self._device]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
            )
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(spec) + "\n")
        child.stdin.flush()
        timer = threading.Timer(CASE_SECONDS, child.kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if line:
            return dict(json.loads(line))
        child.wait()
        self._child = None
        return {"failed": f"the process ended with {child.returncode}", "out_of_memory": False}

    def close(self) -> None:
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            self._child.wait()


class Pool:
    """Workers that share the GPU: a case is begun when what all running ones need leaves room for it."""

    def __init__(self, device: str, workers: int, room_bytes: float) -> None:
        self._turn = threading.Condition()
        self._free = room_bytes
        self._device = device
        self._workers = workers

    def run(self, specs: list[dict[str, Any]], needed: dict[str, int], done: Callable[..., None]) -> None:
        """Call `done(spec, answer, seconds)` for each, in any order; what is taken out of `specs` meanwhile is not begun."""
        specs.sort(key=lambda spec: -needed[spec["name"]])
        with ThreadPoolExecutor(self._workers) as threads:
            for thread in [threads.submit(self._serve, specs, needed, done) for _ in range(self._workers)]:
                thread.result()

    def _serve(self, waiting: list[dict[str, Any]], needed: dict[str, int], done: Callable[..., None]) -> None:
        worker = Worker(self._device)
        while (spec := self._next(waiting, needed)) is not None:
            started = time.perf_counter()
            answer = worker.ask(spec)
            with self._turn:
                self._free += needed[spec["name"]]
                self._turn.notify_all()
                done(spec, answer, time.perf_counter() - started)
        worker.close()

    def _next(self, waiting: list[dict[str, Any]], needed: dict[str, int]) -> dict[str, Any] | None:
        with self._turn:
            while waiting:
                spec = next((one for one in waiting if needed[one["name"]] <= self._free), None)
                if spec is not None:
                    waiting.remove(spec)
                    self._free -= needed[spec["name"]]
                    return spec
                self._turn.wait()
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="of the written ones, those whose name holds this text")
    parser.add_argument("--drawn", type=int, metavar="SEED", help="random cases besides the written ones")
    parser.add_argument("--families", type=int, metavar="SEED", help="cases of newer families, drawn, and no others")
    parser.add_argument("--count", type=int, default=30, help="how many are drawn")
    parser.add_argument("--again", action="store_true", help="the cases of the file that failed, and no others")
    parser.add_argument("--limit", action="store_true", help="under a cap: the least memory the plan says it fits into")
    parser.add_argument("--kept", action="store_true", help="note what the last layer keeps, tensor by tensor")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--most-gib", type=float, default=60.0, help="predicted, of a drawn case")
    parser.add_argument("--room-gib", type=float, default=128.0, help="of the GPU, for all workers together")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="no case begins later")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the code")
    parser.add_argument("--capability", type=int, nargs=2, default=(9, 0), help="of the GPU")
    parser.add_argument("--device-name", default="NVIDIA H200", help="as torch calls the GPU")
    parser.add_argument(
        "--replan", action="store_true", help="measure nothing: note what is predicted now of traced cases"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "memory_cuda.json")
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.device)
        return
    if arguments.replan:
        replan(arguments.output, (tuple(arguments.capability), arguments.device_name))
        return
    began = time.perf_counter()
    before = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.is_file() else {"cases": []}
    plans, specs = _planned(arguments, before["cases"])
    for spec in specs:
        spec["kept"] = arguments.kept
        if arguments.limit:
            plan = plans[spec["name"]]
            spec["cap_bytes"] = least_room(plan) - plan.context_bytes
    results = {case["name"]: case for case in before["cases"]}
    retried = {
        name for name, case in results.items() if "failed" in case and (arguments.again or not case["out_of_memory"])
    }
    specs = [spec for spec in specs if spec["name"] not in results.keys() - retried]
    print(f"{len(plans)} cases, {len(specs)} of them to be measured; planned in {time.perf_counter() - began:.0f} s")
    print(f"{'case':78} {'predicted':>9} {'measured':>8} {'error':>8}   steps, held-out, answers", flush=True)

    def done(spec: dict[str, Any], answer: dict[str, Any], seconds: float) -> None:
        plan, words = plans[spec["name"]], spec["name"][:78]
        if "failed" in answer:
            result = {**spec, **answer, "predicted_total": plan.peak_bytes}
            print(f"{words:78} {plan.peak_bytes / GIB:9.3f} FAILED {answer['failed']}", flush=True)
        else:
            result = beside_prediction(spec, answer, plan)
            parts = " ".join(f"{100 * error:+7.2f}%" for error in result["errors"].values())
            print(
                f"{words:78} {plan.peak_bytes / GIB:9.3f} {result['peak_bytes'] / GIB:8.3f} {100 * result['error']:+7.2f}%  "
                f"{parts} {answer['code']['layers'][:4]} {seconds:.0f} s", flush=True,
            )  # fmt: skip
        results[result["name"]] = result | {"seconds": round(seconds, 1)}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        seeds = {name: getattr(arguments, name) for name in ("workers", "drawn", "families", "limit")}
        about = before.get("about", {}) | {name: value for name, value in seeds.items() if value} | device_facts()
        arguments.output.write_text(json.dumps({"about": about, "cases": [*results.values()]}, indent=1) + "\n")
        if time.perf_counter() - began > arguments.budget:
            left.clear()

    left = list(specs)
    # A process holds a context and pieces besides what is predicted.
    needed = {name: int(1.15 * plan.peak_bytes) + GIB for name, plan in plans.items()}
    Pool(arguments.device, arguments.workers, arguments.room_gib * GIB).run(left, needed, done)
    good = [result for result in results.values() if "error" in result]
    if good:
        worst = max(good, key=lambda result: abs(result["error"]))
        print(
            f"{len(results)} cases, {len(results) - len(good)} failed, worst {100 * worst['error']:+.2f}% ({worst['name']})"
        )


def replan(file: Path, target: tuple[Any, ...]) -> None:
    """Beside every traced case of the file: what it is predicted to need by the code and the packages of now."""
    whole = json.loads(file.read_text(encoding="utf-8"))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    for case in whole["cases"]:
        if case.get("traced"):
            plan = plan_of(case, *target)
            asked = least_room(plan) - plan.context_bytes
            case["replanned"] = {"predicted_total": plan.peak_bytes, "asked_bytes": asked, **versions}
    file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _planned(
    arguments: argparse.Namespace, before: list[dict[str, Any]]
) -> tuple[dict[str, MemoryPlan], list[dict[str, Any]]]:
    """The plans of the cases by name, and the cases."""
    target = (tuple(arguments.capability), arguments.device_name)
    if arguments.again:
        specs = [{key: case[key] for key in OF_SPEC if key in case} for case in before if "failed" in case]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            planned = threads.map(lambda spec: plan_of(spec, *target), specs)
            return {spec["name"]: plan for spec, plan in zip(specs, planned, strict=True)}, specs
    if arguments.families is not None:
        made = families(arguments.families, arguments.count, arguments.most_gib, target)
        return (
            {name: plan for name, (_, plan) in made.items()},
            [spec | {"drawn": arguments.families} for spec, _ in made.values()],
        )
    specs = [spec for spec in cases() if not arguments.only or any(text in spec["name"] for text in arguments.only)]
    if arguments.drawn is not None:
        specs += [
            spec | {"drawn": arguments.drawn} for spec in drawn(arguments.drawn, arguments.count, arguments.most_gib)
        ]
    return {spec["name"]: plan_of(spec, *target) for spec in specs}, specs


def device_facts() -> dict[str, Any]:
    import importlib.metadata

    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    if shutil.which("nvidia-smi") is None:
        return found | {"device": "none"}
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return found | {"device": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}


if __name__ == "__main__":
    main()
