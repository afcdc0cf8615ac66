"""The figures in docs/concepts/memory-model.md: sums that a reader can redo, constants, and predicted beside measured.

Predictions are those of the code as it is now; what was measured is read from benchmarks/results. Nothing here asks a device.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import generation_memory, memory_on_gpu
from docs import family_pages, solver_pages
from docs.markdown import replaced, table
from docs.solver_pages import H200, HOPPER, RESULTS, assigned, gib, read, shape_named
from tunix_rt.config.settings import RunConfig
from tunix_rt.errors import TunixError
from tunix_rt.plan import fit as verdict
from tunix_rt.plan import footprint, generation, memory, phases
from tunix_rt.plan.fit import predict_run
from tunix_rt.plan.memory import MemoryPlan
from tunix_rt.plan.precision import loss_rows
from tunix_rt.plan.sizes import ModelShape

PAGE = Path("docs/concepts/memory-model.md")
ON_CPU = RESULTS / "memory_cpu.json"
ON_GPU = ("memory_cuda.json", "memory_cuda_again.json", "memory_cuda_capped.json", "memory_cuda_fresh.json")
"""A case that is in several counts as it was measured later."""
MIB = 2**20
EAGER_BAND = 0.016
"""No case whose layers are not compiled is further off, as a share of what was measured."""
COMPILED_BAND, COMPILED_BYTES = 0.035, 48 * MIB
"""The same of compiled ones, whichever is more: a compiler tries kernels out before the first step, with memory of its own."""


def page(root: Path) -> str:
    """The page with all its blocks."""
    text = (root / PAGE).read_text(encoding="utf-8")
    blocks = {
        "by-hand": by_hand_block(root),
        "constants": constants_block(),
        "speed-constants": solver_pages.constants_block(),
        "on-a-gpu": summary_block(root),
        "every-case": cases_block(root),
        "families": family_pages.block(root),
        "generation": generation_block(root),
        "proposals": solver_pages.proposals_block(root),
        "order": solver_pages.order_block(root),
        "auto": solver_pages.auto_block(root),
        "measured": cpu_block(root),
    }
    for name, block in blocks.items():
        text = replaced(text, name, block, PAGE)
    return text


def percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


# --- predicted beside measured, on a GPU ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A case that ran to its end: the present prediction and what the allocator gave out, in bytes by part."""

    case: Mapping[str, Any]
    plan: MemoryPlan
    predicted: dict[str, int]
    measured: dict[str, int]

    @property
    def kind(self) -> tuple[str, str]:
        return kind_of(self.case)

    @property
    def peak_bytes(self) -> int:
        return max(self.measured.values())

    @property
    def predicted_bytes(self) -> int:
        """Of the parts that were measured."""
        return max(self.predicted[part] for part in self.measured)

    @property
    def error(self) -> float:
        """Of the peak: below 0 the run took more than was predicted."""
        return self.predicted_bytes / self.peak_bytes - 1

    @property
    def in_band(self) -> bool:
        allowed = EAGER_BAND * self.peak_bytes
        if self.kind[0] == "compiled":
            allowed = max(COMPILED_BAND * self.peak_bytes, COMPILED_BYTES)
        return abs(self.predicted_bytes - self.peak_bytes) <= allowed

    def error_of(self, part: str) -> float:
        return self.predicted[part] / self.measured[part] - 1


def kind_of(case: Mapping[str, Any]) -> tuple[str, str]:
    """How its layers were computed, and who made it up."""
    compiled = "compiled" if case["settings"]["training"]["compile"] else "eager"
    return compiled, "drawn" if "drawn" in case else "written"


def gpu_cases(root: Path) -> list[dict[str, Any]]:
    """Every case that was measured and says something of today's engine, in the order of their kinds, models and sizes."""
    found = measured_last(root)
    ordered = sorted(
        (case for case in found.values() if not peaked_in_an_old_update(case)),
        key=lambda case: (case["preset"], case["name"]),
    )
    return sorted(ordered, key=lambda case: (kind_of(case)[0] != "eager", kind_of(case)[1] != "written"))


def measured_last(root: Path) -> dict[str, dict[str, Any]]:
    return {case["name"]: case for name in ON_GPU for case in read(root, name)["cases"]}


def peaked_in_an_old_update(case: Mapping[str, Any]) -> bool:
    """Whether it took most in temporaries of an update of 8-bit optimizer states without a kernel, which exists now."""
    phases = {name: parts for name, parts in case.get("predicted_parts", {}).items() if name not in memory.LEFT_OUT}
    totals = {name: sum(parts.values()) for name, parts in phases.items()}
    optimizer = RunConfig.model_validate(case["settings"]).training.optim
    eight_bit = optimizer == "adamw_8bit" and case.get("code", {}).get("update") == "plain"
    return eight_bit and bool(totals) and max(totals, key=lambda name: totals[name]) == "update"


def plan_of(case: Mapping[str, Any]) -> MemoryPlan:
    """What the code says of it now."""
    return predict_run(
        shape_named(case["preset"]), RunConfig.model_validate(case["settings"]), device="cuda", capability=HOPPER,
        device_name=H200, steps=memory_on_gpu.STEPS,
    )  # fmt: skip


def compared(case: Mapping[str, Any], plan: MemoryPlan | None = None) -> Compared:
    """`case` beside `plan`, or beside the prediction of the present code. Making ready belongs to the steps. What answers took
    with a cache that grew says nothing of today's (`generation_block`)."""
    plan = plan or plan_of(case)
    totals = {phase.name: phase.total_bytes for phase in plan.phases}
    predicted = {
        part: max(totals[name] for name in names if name in totals) for part, names in memory_on_gpu.PARTS.items()
    }
    measured = {part: size for part, size in case["measured_bytes"].items() if part != "prepare"}
    measured["steps"] = max(measured["steps"], case["measured_bytes"]["prepare"])
    if "decode" not in case:
        del measured["answers"]
    if case["settings"]["data"]["max_length"] > shape_named(case["preset"]).max_positions:
        del measured["held-out"]  # the benchmark's row of several examples; a run's is one, which has no more positions
    return Compared(case=case, plan=plan, predicted={"load": totals["load"], **predicted}, measured=measured)


def ran(cases: Iterable[Mapping[str, Any]]) -> list[Compared]:
    return [compared(case) for case in cases if "failed" not in case]


def summary_block(root: Path) -> str:
    cases = gpu_cases(root)
    rows = []
    for kind in dict.fromkeys(map(kind_of, cases)):
        mine = [case for case in cases if kind_of(case) == kind]
        errors = [one.error for one in ran(mine)]
        rows.append((
            ", ".join(kind), f"{len(mine)}", f"{100 * statistics.median(map(abs, errors)):.2f} %",
            percent(max(0.0, *errors)), percent(min(0.0, *errors)), f"{len(errors)} of {len(mine)}",
        ))  # fmt: skip
    columns = ("cases", "how many", "median error", "largest above", "largest below", "ran in the requested memory")
    about = read(root, ON_GPU[0])["about"]
    said = f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}"
    raw = " and ".join(f"`{RESULTS / name}`" for name in ON_GPU)
    lines = [
        _outside(ran(cases)),
        _caps(cases),
        *(_failure(case, cases) for case in failures(root)),
        *_left_out(cases),
        *_outdated(root),
        f"{said}; raw output in {raw}.",
    ]
    return "\n\n".join([table(columns, rows), *lines])


def _outside(found: list[Compared]) -> str:
    """The stated band, and what lies outside of it."""
    beyond = [one for one in found if not one.in_band]
    named = "; ".join(
        f"`{one.case['preset']}` {_size(one.case)}, {_settings(one.case)}: {percent(one.error)}, with the predicted peak in the "
        f"phase `{one.plan.peak_phase}`"
        for one in beyond
    )
    band = f"{100 * EAGER_BAND:g} % eager; {100 * COMPILED_BAND:g} % or {COMPILED_BYTES // MIB} MiB compiled, whichever is more"
    within = f"{len(found) - len(beyond)} of the {len(found)} that ran lie within it"
    return f"Stated band: {band}. {within}{', not: ' + named if beyond else ''}."


def _caps(cases: list[dict[str, Any]]) -> str:
    """Whether what ran under a cap says something of the plan as it is now, and how each draw went."""
    found = ran(cases)
    same = sum(verdict.least_room(one.plan) - one.plan.context_bytes == one.case["cap_bytes"] for one in found)
    draws = [
        [case for case in cases if case.get("drawn") == seed]
        for seed in sorted({case.get("drawn", 0) for case in cases} - {0})
    ]
    counts = ", ".join(f"{len(draw) - len(failed(draw))} of {len(draw)}" for draw in draws)
    return (
        "The cap was the least memory that the plan of that moment requested; the plan of today requests the same to the byte "
        f"in {same} of the {len(found)} cases that ran. Of the draws, one after the other, {counts} ran."
    )


def failed(cases: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [case for case in cases if "failed" in case]


def failures(root: Path) -> list[Mapping[str, Any]]:
    """Every measurement in which a case ran out of memory, whatever became of the case later; but not with a cache that grew."""
    found = failed(case for name in ON_GPU for case in read(root, name)["cases"])
    return [case for case in found if "decode" in case or "in generation" not in case["failed"]]


def _failure(case: Mapping[str, Any], cases: Iterable[Mapping[str, Any]]) -> str:
    plan = plan_of(case)
    later = [one for one in ran(cases) if one.case["name"] == case["name"]]
    shown = (
        f"Measured again under the cap of the corrected plan, {later[0].case['cap_bytes'] / MIB:,.0f} MiB, it ran"
        if later
        else "It was not run again, so that this would be enough is not shown"
    )
    return (
        f"Once said to fit, and did not run: `{case['preset']}` {_size(case)}, {_settings(case)}. It ran out of memory while it "
        f"answered, with {case['peak_bytes'] / MIB:,.0f} MiB given out under a cap of {case['cap_bytes'] / MIB:,.0f} MiB. The "
        f"code as it is now predicts {plan.peak_bytes / MIB:,.0f} MiB and requests "
        f"{(verdict.least_room(plan) - plan.context_bytes) / MIB:,.0f} MiB. {shown}."
    )


def _left_out(cases: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Written cases that were not measured under a cap."""
    known = {case["name"] for case in cases}
    missing = [f"`{case['name']}`" for case in memory_on_gpu.cases() if case["name"] not in known]
    if missing:
        yield f"Of the written cases, without a measurement under a cap: {', '.join(missing)}."


def _outdated(root: Path) -> Iterator[str]:
    names = [f"`{name}`" for name, case in measured_last(root).items() if peaked_in_an_old_update(case)]
    if names:
        yield (
            "Left out, because they took most in temporaries of updates of moments in 8 bits, which have a kernel now and none: "
            f"{', '.join(names)}."
        )


def _size(case: Mapping[str, Any]) -> str:
    settings = case["settings"]
    return f"{settings['training']['per_device_train_batch_size']} x {settings['data']['max_length']}"


def _settings(case: Mapping[str, Any]) -> str:
    """What makes a drawn case; the name that a written one was given."""
    if "drawn" not in case:
        return str(case["name"].split(" ", 2)[2].removeprefix("compiled, "))
    training = case["settings"]["training"]
    kept = training["gradient_checkpointing"]
    words = [f"{training.get('dtype', 'float32')} products"]
    adapted = "lora_rank" in training
    words += [f"LoRA {training['lora_rank']}" if adapted else f"{training.get('master_dtype', 'float32')} weights"]
    words += [training["optim"] + (" in backward" if training.get("optim_in_backward") else "")]
    words += ["recomputed" if kept is True else f"{kept:g} kept"] if kept else []
    times = training.get("gradient_accumulation_steps", 1)
    words += [f"accumulation {times}"] if times > 1 else []
    words += [] if case["settings"]["data"].get("packing", True) else ["unpacked"]
    return ", ".join(words)


def cases_block(root: Path) -> str:
    rows = []
    for case in gpu_cases(root):
        start = (case["preset"], _size(case), _settings(case), ", ".join(kind_of(case)))
        if "failed" in case:
            plan = plan_of(case)
            rows.append((*start, gib(plan.peak_bytes), "out of memory", "", "", gib(case["cap_bytes"])))
            continue
        one = compared(case)
        heldout = percent(one.error_of("held-out")) if "held-out" in one.measured else ""
        layers = f" ({case['code']['layers']})" if case["code"]["layers"] == "recorded" else ""
        rows.append((
            *start[:3], start[3] + layers, gib(one.predicted_bytes), gib(one.peak_bytes), percent(one.error), heldout,
            gib(case["cap_bytes"]),
        ))  # fmt: skip
    columns = (
        "model", "rows x tokens", "settings", "kind", "predicted GiB", "measured GiB", "error", "held-out", "cap GiB",
    )  # fmt: skip
    return table(columns, rows)


def generation_block(root: Path) -> str:
    """Peaks of generation, from `python -m benchmarks.generation_memory`."""
    found = read(root, "generation_memory.json")
    rows, errors = [], []
    for case in found["cases"]:
        predicted = sum(generation_memory.predicted_parts(case, HOPPER).values())
        errors.append(predicted / case["peak_bytes"] - 1)
        rows.append((
            case["preset"], {"trained": "bfloat16 compute, float32 weights"}.get(case["dtype"], case["dtype"]),
            f"{case['rows']} x {case['length']}{' at most' if case['mixed'] else ''}", str(case["new_tokens"]),
            gib(predicted), gib(case["peak_bytes"]), percent(errors[-1]),
        ))  # fmt: skip
    fits = sum(case["fits_under_the_cap"] for case in found["cases"])
    columns = ("model", "dtype", "prompts x tokens", "new tokens", "predicted GiB", "measured GiB", "error")
    about = found["about"]
    return (
        f"{len(rows)} cases drawn by seed {about['seed']}, {about['device']}, torch {about['torch']}: median error "
        f"{100 * statistics.median(map(abs, errors)):.2f} %, largest {100 * max(map(abs, errors)):.2f} %. {fits} of {len(rows)} "
        f"ran again with no more memory than the plan requested.\n\n{table(columns, rows)}"
    )


# --- a sum by hand ----------------------------------------------------------------------------------------------------

Term = tuple[str, tuple[int, ...]]
"""What it is, and the factors of its bytes."""
BY_HAND = "gemma-2b 8x1024 bfloat16 AdamW"


def by_hand_block(root: Path) -> str:
    """The peak of one run, counted here a second time, term by term; an error where the planner counts otherwise."""
    case = next(case for case in gpu_cases(root) if case["name"] == BY_HAND)
    shape = shape_named(case["preset"])
    training = case["settings"]["training"]
    tokens = training["per_device_train_batch_size"] * case["settings"]["data"]["max_length"]
    parts = [
        f"Gemma 2B: {shape.layers} layers, hidden size {shape.hidden:,}, inner size {shape.ffn:,}, {shape.heads} heads of "
        f"{shape.head_dim} and {shape.kv_heads} for keys and values, {shape.vocab:,} words, {shape.parameters:,} parameters. "
        f"{_size(case)} tokens are {tokens:,}. An element of bfloat16 is 2 bytes, of float32 4.",
    ]
    for compiled in (False, True):
        settings = case["settings"] | {"training": training | {"compile": compiled}}
        plan = plan_of(case | {"settings": settings})
        parts += _sum_by_hand(shape, tokens, plan, compiled)
    measured = compared(case).peak_bytes
    parts.append(f"Measured of the plain one: {measured:,} bytes, {percent(plan_of(case).peak_bytes / measured - 1)}.")
    return "\n\n".join(parts)


def _sum_by_hand(shape: ModelShape, tokens: int, plan: MemoryPlan, compiled: bool) -> Iterator[str]:
    layer, rest = _kept(shape, tokens, compiled), _beside(shape, tokens)
    in_layer = sum(prod(factors) for _, factors in layer)
    terms = [*rest[:3], (f"kept by {shape.layers} layers", (shape.layers, in_layer)), *rest[3:]]
    total = sum(prod(factors) for _, factors in terms)
    words = "Layers that are compiled" if compiled else "Plain layers"
    if (plan.peak_phase, plan.peak_bytes) != ("loss", total):
        raise TunixError(
            f"{words}: by hand the loss comes to {total:,} bytes, by the planner {plan.peak_phase} to {plan.peak_bytes:,}",
            fix="count again in docs/memory_pages.py, and in the words around the block",
        )
    yield f"**{words}**, each keeping:"
    yield _terms([*layer, ("one layer", (in_layer,))])
    yield "and at the peak, which is in the loss, when all layers have kept theirs:"
    yield _terms([*terms, (f"together, {gib(total)} GiB", (total,))])


def _terms(terms: Iterable[Term]) -> str:
    rows = [
        (words, " x ".join(f"{factor:,}" for factor in factors) if len(factors) > 1 else "", f"{prod(factors):,}")
        for words, factors in terms
    ]
    return table(("what", "elements x bytes", "bytes"), rows)


def _kept(shape: ModelShape, tokens: int, compiled: bool) -> list[Term]:
    """By one layer of Gemma 1 with bfloat16 weights on a modern GPU."""
    stream, inner = (tokens, shape.hidden, 2), (tokens, shape.ffn, 2)
    query, kv = (tokens, shape.query_size, 2), (tokens, shape.kv_size, 2)
    roots: Term = ("roots of a norm, in float32", (tokens, 4))
    attention: list[Term] = [
        ("query", query),
        ("key", kv),
        ("value", kv),
        ("result of attention", query),
        ("sums of the softmax, a number for each head", (tokens, shape.heads, 4)),
    ]
    if compiled:
        return [
            ("input of the layer", stream), roots, ("normed input of attention", stream), *attention,
            ("what attention adds to the input", stream), roots, ("normed input of the MLP", stream),
            ("gate, up, and what goes into the last product", (3, *inner)),
        ]  # fmt: skip
    wide = (tokens, shape.hidden, 4)
    norm: list[Term] = [
        ("input of a norm, in float32", wide),
        ("the same normed, in float32, for its weights", wide),
        roots,
    ]
    return [
        *norm, ("normed input of attention", stream), *attention,
        *norm, ("normed input of the MLP", stream),
        ("gate, activated gate, up, and what goes into the last product", (4, *inner)),
    ]  # fmt: skip


def _beside(shape: ModelShape, tokens: int) -> list[Term]:
    """All that is there with what layers keep: first what is there for the whole step."""
    stream = (tokens, shape.hidden, 2)
    return [
        ("weights in bfloat16", (shape.parameters, 2)),
        ("two moments of AdamW in float32", (2, shape.parameters, 4)),
        ("gradient of the table, in the type of the weights", (shape.vocab, shape.hidden, 2)),
        ("sine and cosine of the positions, for all layers", (2, tokens, shape.head_dim, 2)),
        ("last norm: its input and the same normed, in float32", (2, tokens, shape.hidden, 4)),
        ("last norm: roots", (tokens, 4)),
        ("last norm: its result", stream),
        ("states of the targets, and their gradient", (2, *stream)),
        (f"logits of {loss_rows(tokens):,} targets at a time, in float32", (loss_rows(tokens), shape.vocab, 4)),
        ("workspaces of cuBLAS", (2, memory.CUDA_OVERHEAD_BYTES // 2)),
    ]


# --- constants --------------------------------------------------------------------------------------------------------

FITTED: dict[str, tuple[str, str, str]] = {
    "CUDA_SAFETY_SHARE": ("GPU", "chosen", "of the prediction, in addition: what lies in pieces that cannot be given out"),
    "CUDA_SAFETY_BYTES": ("GPU", "chosen", "requested in addition, whatever the prediction"),
    "SAFETY_SHARE": ("CPU", "chosen", "of the prediction, requested in addition"),
    "TRACED_SAFETY_SHARE": ("CPU and GPU", "chosen", "of the prediction of a traced model, requested in addition"),
    "CPU_OVERHEAD_BYTES": ("CPU", "fitted", "thread pools, code that the first step loads, buffers of libraries"),
    "KEPT_SLACK": ("CPU", "fitted", "of what layers keep in the heap, lost between its blocks"),
    "ACCUMULATED_SLACK": ("CPU", "fitted", "of the same, more, where gradients of earlier micro-batches lie between"),
    "ADAPTED_SLACK": ("CPU", "fitted", "of the same, more, where temporaries of adapters do"),
    "RECOMPUTED_SLACK": ("CPU", "fitted", "of what one layer keeps, lost where layers are computed again"),
    "UPDATED_SLACK": ("CPU", "fitted", "of the temporaries of updates in the backward pass, lost"),
    "UPDATED_SLACK_BYTES": ("CPU", "fitted", "beyond so many of them no more is"),
    "EVALUATION_SLACK": ("CPU", "fitted", "of one layer and the head without gradients, lost"),
}  # fmt: skip
"""All constants of the PyTorch engine's memory that a verdict hangs on and that nothing but measurements decides."""
KNOWN = {
    "CUDA_CONTEXT_BYTES": "an allowance for the CUDA context, which no allocator counts",
    "CUDA_OVERHEAD_BYTES": "workspaces that torch gives cuBLAS on a Hopper GPU, for each of two threads; smaller elsewhere",
    "RECORDING_OVERHEAD_BYTES": "the same for each of two streams, where layers run as CUDA graphs",
    "HEAP_BLOCK_BYTES": "glibc serves larger blocks by themselves",
    "PUBLISHED_BYTES": "of an element of a file of pretrained weights",
    "PROOF_SPARE_BYTES": "for the process that proves the final model; no run is refused for it",
    "TABLE_SLICE_ROWS": "rows of the lm_head gradient that the engine computes at a time",
    "UPDATE_ELEMENTS": "elements of a tensor that the engine updates at a time",
    "GRAPH_WORKSPACE_BYTES": "the workspace of cuBLAS on the stream where decode steps are captured",
}
"""Constants that stand for a fact, or decide nothing."""
MODULES: tuple[ModuleType, ...] = (memory, footprint, phases, generation, verdict)


def values_in(module: ModuleType) -> dict[str, float]:
    """The numbers that a module defines for itself, by name; MIB and GIB are none."""
    made = {name for names, _ in assigned(module) for name in names}
    found = {name: getattr(module, name) for name in sorted(made)}
    return {name: value for name, value in found.items() if type(value) in (int, float) and name not in ("MIB", "GIB")}


def constants_block() -> str:
    values = {name: value for module in MODULES for name, value in values_in(module).items()}
    rows = [
        (words, f"`{name}`", _value(name, values[name]), device, origin)
        for name, (device, origin, words) in FITTED.items()
    ]
    facts = "; ".join(f"`{name}`, {_value(name, values[name])}: {words}" for name, words in KNOWN.items())
    return (
        table(("what it stands for", "name", "value", "on a", "how it came about"), rows)
        + f"\n\n{len(rows)} in all. Facts, and what decides no verdict: {facts}."
    )


def _value(name: str, value: float) -> str:
    return f"{value / MIB:,.0f} MiB" if name.endswith("_BYTES") and value >= MIB else f"{value:g}"


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def cpu_block(root: Path) -> str:
    """Every case of the memory benchmark: predicted beside measured, and whether the constants had it in view."""
    recorded = json.loads((root / ON_CPU).read_text(encoding="utf-8"))
    rows = [
        (
            case["name"],
            f"{case['predicted_bytes'] / MIB:,.0f}",
            f"{case['measured_bytes'] / MIB:,.0f}",
            f"{100 * (case['predicted_bytes'] / case['measured_bytes'] - 1):+.1f} %",
            "yes" if case["fitted"] else "no",
        )
        for case in recorded["cases"]
    ]
    machine = recorded["machine"]
    return (
        table(("case: model, rows x tokens", "predicted MiB", "measured MiB", "error", "fitted"), rows)
        + f"\n\n{len(rows)} cases on {machine['cores']} cores, {' '.join(machine['libc'])}; raw output in `{ON_CPU}`."
    )
