"""The figures in docs/concepts/beyond-one-gpu.md: what the planner predicts now for 1 to 1,024 GPUs, beside what was counted."""

import json
from pathlib import Path
from typing import Any

from benchmarks import memory_of_ranks_on_gpu
from benchmarks.memory_of_ranks import plan_of, predicted_bytes
from docs.markdown import replaced, table
from docs.solver_pages import RESULTS, gib, read, shape_named
from tunix_rt.accelerators import nodes
from tunix_rt.config.settings import RunConfig
from tunix_rt.plan import fsdp
from tunix_rt.plan.answer import Answer, PlanTarget, answer
from tunix_rt.plan.memory import predict
from tunix_rt.plan.target import several, target_named

PAGE = Path("docs/concepts/beyond-one-gpu.md")
MODEL = "llama-3.1-8b"
RECORDED, DRAWN, THOUSAND = "memory_ranks_h200.json", "memory_ranks_drawn.json", "memory_ranks_1024.json"
ENGINE, OVERHEAD, KILLS = "memory_ranks_cuda.json", "speed_fsdp.json", "rank_kills.jsonl"
LAUNCHERS = {"nproc": "`--nproc`", "torchrun": "torchrun", "ray": "Ray Train, two nodes"}
FULL = {"dtype": "bfloat16", "master_dtype": "bfloat16", "gradient_checkpointing": True}


def page(root: Path) -> str:
    text = (root / PAGE).read_text(encoding="utf-8")
    blocks = {
        "recorded": recorded_block(root),
        "engine": engine_block(root),
        "drawn": drawn_block(root),
        "scale": scale_block(),
        "thousand": thousand_block(root),
        "hide": hide_block(),
        "kills": kills_block(root),
    }
    for name, block in blocks.items():
        text = replaced(text, name, block, PAGE)
    return text


def nodes_table() -> str:
    rows = [
        (
            f"`{node.id}`", node.name, f"{node.gpus}", f"{node.link_gb_s:g}",
            "" if node.network_gbit is None else f"{node.network_gbit:,g}", node.source,
        )
        for node in nodes()
    ]  # fmt: skip
    columns = ("`--on`", "node", "GPUs", "GB/s of a GPU to the others", "Gbit/s to other nodes", "source")
    return table(columns, rows)


def config(tokens: int, **training: object) -> RunConfig:
    """A row of so many tokens on each GPU, without generation."""
    settings = {**FULL, "per_device_train_batch_size": 1, **training}
    return RunConfig.model_validate({
        "data": {"max_length": tokens, "validation_fraction": 0}, "evaluation": {"enabled": False}, "training": settings,
    })  # fmt: skip


def planned(preset: str, count: int, tokens: int, *, gbit: float | None = None, replicas: int = 1) -> Answer:
    """On `count` nodes of eight H100."""
    on = several(target_named("8xh100"), gpus=None, nodes_=count, network_gbit=gbit)
    settings = config(tokens, data_replicas=replicas)
    return answer(settings, PlanTarget(target=on), model=preset, shape=shape_named(preset))


# --- memory -----------------------------------------------------------------------------------------------------------


def recorded_block(root: Path) -> str:
    found = read(root, RECORDED)
    rows, before = [], fsdp.REDUCED_WIDTH
    for case in found["cases"]:
        fsdp.REDUCED_WIDTH = case["reduce_bytes"]
        settings = config(case["tokens"], **{name: case[name] for name in ("gradient_checkpointing", "compile")})
        plan = predict(shape_named(case["preset"]), settings, device="cuda", capability=(9, 0), devices=case["world"])
        error = plan.peak_bytes / 2**30 / case["peak_gib"] - 1
        what = f"{'compiled' if case['compile'] else 'eager'}, {'' if case['gradient_checkpointing'] else 'not '}checkpointed"
        rows.append((
            case["preset"], f"{case['world']}, {case['group']}", f"{case['tokens']:,}", what,
            {2: "bfloat16", 4: "float32"}[case["reduce_bytes"]], gib(plan.peak_bytes), f"{case['peak_gib']:g}",
            f"{100 * error:+.2f} %",
        ))  # fmt: skip
    fsdp.REDUCED_WIDTH = before
    columns = ("model", "ranks", "tokens", "layers", "sums in", "predicted GiB", "measured GiB", "error")
    return f"{table(columns, rows)}\n\n{found['device']}; raw output in `{RESULTS / RECORDED}`."


def engine_block(root: Path) -> str:
    """The engine itself on one GPU, as one rank of many, and what sharding over a single rank costs."""
    found, rows = read(root, ENGINE), []
    for case in (case for case in found["cases"] if "failed" not in case):
        predicted = memory_of_ranks_on_gpu.predicted_bytes(case)
        error = f"{100 * (predicted / case['measured_bytes'] - 1):+.2f} %"
        model, words = case["name"].split(", ", 1)
        rows.append((model, words, case["group"], gib(predicted), gib(case["measured_bytes"]), error))
    failed = sum("failed" in case for case in found["cases"])
    (speed,) = read(root, OVERHEAD)["cases"]
    ours, fsdp_ = (
        max(one["tokens_per_second"] for one in speed["contenders"][name]["rounds"]) for name in ("ours", "fsdp")
    )
    return (
        f"{table(('model', 'case', 'group', 'predicted GiB', 'measured GiB', 'error'), rows)}\n\n"
        f"{found['about']['device']}, torch {found['about']['torch']}; `python -m benchmarks.memory_of_ranks_on_gpu`, raw output "
        f"in `{RESULTS / ENGINE}`. {failed} more cases, those with replicas, were not measured.\n\n"
        f"Sharded over a single rank, `{speed['preset']}` trains at {fsdp_:,.0f} tokens/s, without at {ours:,.0f}: "
        f"{100 * fsdp_ / ours:.1f} %. Raw output in `{RESULTS / OVERHEAD}`."
    )


def drawn_block(root: Path) -> str:
    found = read(root, DRAWN)["cases"]
    errors = sorted((abs(error_of(case)) for case in found), reverse=True)
    families, worlds = ({case[name] for case in found} for name in ("preset", "world"))
    return (
        f"{len(found)} drawn cases of {len(families)} models on {min(worlds)} to {max(worlds)} ranks: the largest error is "
        f"{100 * errors[0]:.2f} %, half are within {100 * errors[len(errors) // 2]:.2f} %. "
        f"`python -m benchmarks.memory_of_ranks --drawn 27 --count 28`; raw output in `{RESULTS / DRAWN}`."
    )


def error_of(case: dict[str, Any]) -> float:
    """Of what the code predicts now."""
    return predicted_bytes(plan_of(case)) / int(case["tracked_bytes"]) - 1


def kills_block(root: Path) -> str:
    """By launcher and number of ranks."""
    lines = [json.loads(line) for line in (root / RESULTS / KILLS).read_text(encoding="utf-8").splitlines()]
    rows = []
    for launcher, ranks in dict.fromkeys((one["launcher"], one["nproc"]) for one in lines):
        runs = [one for one in lines if (one["launcher"], one["nproc"]) == (launcher, ranks)]
        same = sum(one["identical"] and one["exit_code"] == 0 for one in runs)
        rows.append(
            (LAUNCHERS[launcher], f"{ranks}", f"{len(runs)}", f"{sum(len(one['kills']) for one in runs)}", f"{same}")
        )
    columns = ("launcher", "ranks", "runs", "ranks killed", "runs that ended by themselves, with the same files")
    return f"{table(columns, rows)}\n\n`python -m benchmarks.rank_kills`, raw output in `{RESULTS / KILLS}`."


# --- time -------------------------------------------------------------------------------------------------------------


def scale_block() -> str:
    """One row of 8,192 tokens on each GPU, in one replica, and in one for each node."""
    rows = []
    for count in (1, 2, 4, 16, 64, 128):
        for replicas in dict.fromkeys((1, count)):
            found = planned(MODEL, count, 8192, replicas=replicas)
            cluster, time = found.cluster, found.outlook.time
            assert cluster is not None
            rows.append((
                f"{cluster.ranks:,}", f"{cluster.replicas:,} x {cluster.shards:,}", gib(found.outlook.plan.peak_bytes),
                f"{time.tokens:,}", _milliseconds(cluster.computing_seconds), _milliseconds(cluster.network_seconds),
                f"{time.seconds:.2f} ({time.seconds_low:.2f} to {time.seconds_high:.2f})", f"{cluster.tokens_to_hide:,}",
                gib(cluster.restart.checkpoint_bytes),
            ))  # fmt: skip
    columns = (
        "GPUs", "replicas x shards", "GiB of a GPU", "tokens a step", "computing, ms", "messages, ms", "step, s",
        "tokens that hide them", "GiB of a checkpoint on a rank",
    )  # fmt: skip
    return table(columns, rows)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}"


def hide_block() -> str:
    """Tokens on a GPU that hide the network, by its bandwidth, on two nodes of eight H100."""
    rows = []
    for gbit in (3200, 400, 100, 25, 10, 1):
        cells = []
        for preset in ("gemma-3-1b", "gemma-2b", MODEL):
            cluster = planned(preset, 2, 8192, gbit=gbit).cluster
            assert cluster is not None
            cells.append(f"{cluster.network_seconds:.3g} s, {float(f'{cluster.tokens_to_hide:.2g}'):,.0f}")
        rows.append((f"{gbit:,}", *cells))
    return table(("Gbit/s of a node", "Gemma 3 1B", "Gemma 2B", "Llama 3.1 8B"), rows)


def thousand_block(root: Path) -> str:
    rows = []
    for case in read(root, THOUSAND)["cases"]:
        now, replicas = plan_of(case), case["settings"]["training"]["data_replicas"]
        rows.append((
            case["preset"], f"{case['world']:,}", f"{replicas}", gib(now.peak_bytes), gib(predicted_bytes(now)),
            gib(case["tracked_bytes"]), f"{100 * error_of(case):+.2f} %",
        ))  # fmt: skip
    columns = (
        "model", "ranks", "replicas", "GiB of a GPU", "of it counted", "counted by FSDPMemTracker", "error",
    )  # fmt: skip
    return (
        f"{table(columns, rows)}\n\nOptimizer states and the allowance for cuBLAS are not counted. "
        f"`python -m benchmarks.memory_of_ranks --whole`; raw output in `{RESULTS / THOUSAND}`."
    )
