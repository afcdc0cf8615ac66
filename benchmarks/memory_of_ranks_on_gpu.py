"""Predicted peak memory of one rank beside the peak of the CUDA allocator, with the real engine on one GPU.

    python -m benchmarks.memory_of_ranks_on_gpu [--drawn SEED] [--count N] [--pairs N] [--workers N] [--output FILE]

A case is three optimizer steps on random tokens by rank 0 of 8 or 64 ranks: a fake process group sends nothing, so losses mean
nothing, but every tensor of the rank is allocated and every kernel runs. `--pairs` adds cases of two real ranks that share the
GPU and talk over gloo, whose copies are added to the plan. Models have their published sizes with fewer layers,
or all of them. Peaks do not depend on other processes, so that several cases run at once. What the file has is kept.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.memory_of_ranks import case_of, drawn, model_config
from benchmarks.memory_on_gpu import GIB, STEPS, device_facts, source_of
from benchmarks.memory_prediction import random_data
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.shape import shape_of

RESULTS = Path(__file__).parent / "results" / "memory_ranks_cuda.json"
FAKE_WORLDS = (8, 64)
WHOLE = (("gemma-2b", 8), ("gemma-2b", 64), ("gemma-3-1b", 8), ("llama-3.2-1b", 64))
"""Presets with all their layers, and ranks; the second of each pair is compiled."""
ADAPTED = (("llama-3.2-1b", 8), ("gemma-3-1b", 64))
SECONDS = 150


def cases(seed: int, count: int, pairs: int) -> list[dict[str, Any]]:
    """`count` cases of a fake process group, whole models first, `pairs` of two real ranks, and some with adapters."""
    whole = [
        case_of(preset, world=world, layers=0, gradient_checkpointing=True, compile=number % 2 == 1)
        for number, (preset, world) in enumerate(WHOLE)
    ]
    fake = itertools.chain(whole, (case for case in drawn(seed) if case["world"] in FAKE_WORLDS))
    real = (case for case in drawn(seed + 1) if case["world"] == 2)
    return [
        *({**case, "group": "fake"} for case in itertools.islice(fake, count)),
        *({**case, "group": "gloo"} for case in itertools.islice(real, pairs)),
        *(case_of(preset, world=world, lora_rank=16) | {"group": "fake"} for preset, world in ADAPTED),
    ]


def plan_of(case: dict[str, Any]) -> MemoryPlan:
    return predict_run(
        shape_of(model_config(case)), RunConfig.model_validate(case["settings"]), device="cuda", capability=(9, 0),
        device_name="NVIDIA H200", devices=case["world"], steps=STEPS,
    )  # fmt: skip


def predicted_bytes(case: dict[str, Any]) -> int:
    """The peak of the plan. Gloo reduces and scatters a copy of its input, which NCCL does not make: it is added where it is
    largest, at the gradients outside the layers, whose sum is not yet rounded then."""
    plan = plan_of(case)
    if case["group"] != "gloo":
        return plan.peak_bytes
    parts = {phase.name: phase.parts for phase in plan.phases}
    reduce, lm_head = parts["reduce"], parts["loss"]["unreduced"]
    ours = sum(reduce.values()) - reduce["unreduced"] + lm_head * (not model_config(case)["tie_word_embeddings"])
    return max(plan.peak_bytes, ours + reduce["reducing"] + reduce["reducing"] // case["world"])


# --- a rank, in a process of its own ---------------------------------------------------------------------------------


def peak_of(case: dict[str, Any], rank: int, port: int, device: str) -> dict[str, Any]:
    """Peak bytes of the steps of `rank`, without loading: random weights are drawn whole before they are sharded."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tunix_rt.engines.torch import loop as engine_of

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case["world"]), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if case["group"] == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["world"])
        engine_of.refuse_nonfinite = lambda *_, **__: None  # weights of other ranks are whatever lies in memory
    else:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=case["world"])
    config = RunConfig.model_validate(case["settings"])
    training = config.training
    each = training.per_device_train_batch_size
    everywhere = training.model_copy(update={"per_device_train_batch_size": each * case["world"]})
    engine = engine_of.load(source_of(case | {"config": model_config(case)}), device=device, training=training)
    _, batch_of = random_data(config.model_copy(update={"training": everywhere}), engine.vocabulary)
    optimizer = engine_of.make_optimizer(engine, training)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    code = engine_of.prepare_steps(engine, batch_of, training, total=STEPS)
    for _ in engine_of.optimizer_steps(engine, optimizer, batch_of, training, first=1, total=STEPS):
        pass
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {"measured_bytes": engine.peak_bytes(), "reserved_bytes": reserved, "code": code}


def answer_into(end: Any, case: dict[str, Any], rank: int, port: int, device: str) -> None:
    try:
        end.send(peak_of(case, rank, port, device))
    except Exception as error:  # noqa: BLE001  reported in the result of the case
        end.send({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def measured(case: dict[str, Any], device: str) -> dict[str, Any]:
    """The rank with the largest peak. All real ranks run here, of a fake group rank 0."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began, ranks = time.monotonic(), []
    for rank in range(1 if case["group"] == "fake" else case["world"]):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=answer_into, args=(theirs, case, rank, port, device))
        process.start()
        theirs.close()
        ranks.append((process, mine))
    answers = []
    for process, end in ranks:
        left = SECONDS - (time.monotonic() - began)
        try:
            answers.append(end.recv() if end.poll(max(0, left)) else {"failed": f"no answer within {SECONDS} s"})
        except EOFError:
            answers.append({"failed": "the process ended without an answer"})
        process.join(1)
        process.kill()
    failed = [one for one in answers if "failed" in one]
    return failed[0] if failed else max(answers, key=lambda one: int(one["measured_bytes"]))


def beside(case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    whole = {**case, **found, "predicted_bytes": predicted_bytes(case)}
    if "failed" in found:
        return whole
    return whole | {"error": round(whole["predicted_bytes"] / found["measured_bytes"] - 1, 5)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=2027, metavar="SEED")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tries the code")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["benchmarks.memory_of_ranks_on_gpu", "tunix_rt.engines.torch.loop"])
    known = json.loads(options.output.read_text(encoding="utf-8"))["cases"] if options.output.is_file() else []
    results = [case for case in known if "failed" not in case]
    done = {case["name"] for case in results}
    writing = threading.Lock()

    def measure(case: dict[str, Any]) -> None:
        one = beside(case, measured(case, options.device))
        with writing:
            results.append(one)
            about = {"drawn": options.drawn, "steps": STEPS, **device_facts()}
            options.output.write_text(json.dumps({"about": about, "cases": results}, indent=1) + "\n", encoding="utf-8")
        gib = f"{one['predicted_bytes'] / GIB:8.3f} {one.get('measured_bytes', 0) / GIB:8.3f}"
        print(gib, one.get("failed") or f"{100 * one['error']:+6.2f} %", one["group"], one["name"], flush=True)

    waiting = [case for case in cases(options.drawn, options.count, options.pairs) if case["name"] not in done]
    with ThreadPoolExecutor(options.workers) as threads:
        list(threads.map(measure, waiting))
    good = [abs(one["error"]) for one in results if "error" in one]
    print(
        f"{len(results)} cases, {len(results) - len(good)} failed; the largest error is {100 * max(good, default=0):.2f} %"
    )
    return int(len(good) < len(results))


if __name__ == "__main__":
    sys.exit(main())
