"""Where the time of a step goes, by part of the step.

Every moment of the recorded steps belongs to one part, so the parts add up to the step. On a GPU a moment belongs to the
kernel that runs in it, and the kernel to the part of the step that launched it; on a CPU to the innermost operation.
"""

import bisect
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from tunix_rt.engines.trace import (
    BACKWARD,
    BATCH,
    FORWARD,
    HEAD,
    OPTIMIZER,
    REGIONS,
    STEP,
    Span,
    Stretch,
    Trace,
    last_begun,
    region_of,
    stretches,
    under_way,
)
from tunix_rt.errors import InputError

LAYER_MATMULS = "matmuls of the layers"
HEAD_MATMULS = "loss head: matmuls"
HEAD_REST = "loss head: everything else"
ATTENTION = "attention"
ELEMENTWISE = "norms, activations, rotations and other element-wise work"
UPDATE = "optimizer"
LOOKUP = "embedding lookup"
COPIES = "copies between host and device"
OTHER = "other"
WAITED = "idle device"
BETWEEN = "Python between the operations"
"""Idle time on a CPU, where the program and the device are one."""

WHILE = {
    BATCH: "while the batch was prepared",
    FORWARD: "in the forward pass",
    HEAD: "in the loss head",
    BACKWARD: "in the backward pass",
    OPTIMIZER: "in the optimizer",
    STEP: "elsewhere in the step",
}
LARGEST_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Of a step: milliseconds, and how often it was called."""

    name: str
    milliseconds: float
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One line of the table, per step. `largest` are its three longest kernels; of idle time, what the program did meanwhile."""

    name: str
    milliseconds: float
    share: float
    calls: float
    largest: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The profiled steps, averaged. The milliseconds of `parts`, longest first, add up to `milliseconds`."""

    steps: int
    milliseconds: float
    on_gpu: bool
    parts: tuple[Part, ...]


class Work(NamedTuple):
    """Work on the device, and the part it belongs to. `moment` is when the program launched it."""

    start: float
    end: float
    moment: float
    name: str
    part: str
    calls: int


# --- attribution ------------------------------------------------------------------------------------------------------

_LOOKUPS = re.compile(r"^(_Lookup|aten::embedding|EmbeddingBackward)|fused_embedding")
_ATTENTION = re.compile(
    r"flash|fmha|sdpa|flex_attention|AttentionKernel|scaled_?dot_?product|soft_?max|aten::(b|baddb)mm", re.I
)
_PRODUCTS = re.compile(
    r"nvjet|gemm|xmma|cutlass|cublas|gemv|splitk|triton_mm|triton_tem_fused_\w*?mm_"
    r"|^aten::(_?mm|addmm|_?addmm_activation|_scaled_mm|mkldnn_linear|addmv|mv|dot)_?$",
    re.I,
)
_UPDATES = re.compile(r"adam|adafactor|foreach|multi_tensor_apply|vector_norm|LpNorm", re.I)
"""Outside of every region of the step: the norm of all gradients, which clipping needs."""
_ELEMENTWISE = re.compile(
    r"at::native|at_cuda|triton_|^aten::|cub::|thrust::|^Mem(cpy DtoD|set)|cpp_fused|CompiledFxGraph", re.I
)
_BOOKKEEPING = re.compile(
    r"^autograd::|^torch::autograd::|Backward\d*$|^_[A-Z]\w*$|^detach_?$"
    r"|^aten::(as_strided|_?reshape(_alias)?|view|view_as|_unsafe_view|t|transpose|permute|numpy_T|expand(_as)?|(un)?squeeze"
    r"|select|slice|narrow|split\w*|unbind|chunk|flatten|contiguous|detach_?|alias|empty\w*|resize_|set_|to|lift_fresh"
    r"|result_type|resolve_(conj|neg)|is_nonzero|item|_local_scalar_dense|linear|matmul)$"
)
"""Operations of a CPU that compute nothing. (`item` waits on a GPU only, where kernels are counted and not operations.)"""


@lru_cache(maxsize=2**16)  # a step repeats itself
def part_of(name: str, around: tuple[str, ...], *, kind: str = "kernel") -> str:
    """The part that a kernel or operation belongs to; `around` are the regions and operations it ran in or was launched in."""
    region = region_of(around)
    is_product = _PRODUCTS.search(name) is not None
    if kind == "gpu_memcpy" and "DtoD" not in name:
        return COPIES
    outside = region in (None, STEP)
    if region == OPTIMIZER or (outside and any(_UPDATES.search(one) for one in (name, *around))):
        return UPDATE
    if region == HEAD or "_HeadLoss" in around:
        return HEAD_MATMULS if is_product else HEAD_REST
    if any(_LOOKUPS.search(one) for one in (name, *around)):
        return LOOKUP
    if any(_ATTENTION.search(one) for one in (name, *around)):
        return ATTENTION
    if is_product:
        return LAYER_MATMULS
    return ELEMENTWISE if _ELEMENTWISE.search(name) else OTHER


# --- the sum ----------------------------------------------------------------------------------------------------------


def breakdown(trace: Trace) -> Breakdown:
    """Where the time of the profiled steps went. Work between two steps, such as an evaluation, is left out.

    A step begins when the program begins it, but not before the device has done the step before; it ends when the device
    has done what it asked for.
    """
    threads = {number: stretches(spans) for number, spans in trace.threads.items()}
    main, steps = _steps(trace)
    work = _kernels(trace, threads, threads[main]) if trace.kernels else _operations(threads)
    launched = partial(bisect.bisect_left, work, key=lambda one: one.moment)
    idle = BETWEEN if not trace.kernels else WAITED
    taken: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    reached, total = 0.0, 0.0
    for step in steps:
        asked = work[launched(step.start) : launched(step.end)]
        begin, end = max(step.start, reached), max([step.end, *(one.end for one in asked)])
        reached, total = end, total + end - begin
        tiles = _tiles(asked, begin)
        for one in asked:
            taken[one.part, one.name][1] += one.calls
        for start, until, one in tiles:
            taken[one.part, one.name][0] += until - start
        for start, until in _gaps(tiles, begin, end):
            for name, length in _meanwhile(threads[main], start, until):
                taken[idle, name][0] += length
    return Breakdown(
        steps=len(steps),
        milliseconds=total / len(steps) / 1e3,
        on_gpu=bool(trace.kernels),
        parts=_parts(taken, len(steps), total),
    )


def _steps(trace: Trace) -> tuple[int, list[Span]]:
    """The thread that takes the steps, and the steps."""
    for number, spans in trace.threads.items():
        if steps := sorted(span for span in spans if span.name == STEP):
            return number, steps
    raise InputError("the trace shows no step", fix="record it with `tunix-rt train --profile`")


def _kernels(trace: Trace, threads: Mapping[int, list[Stretch]], main: list[Stretch]) -> list[Work]:
    """Work of a GPU, in the order in which it was launched."""
    found: list[Work] = []
    for kernel in trace.kernels:
        moment, number = trace.launches.get(kernel.launch, (kernel.start, 0))
        around = under_way(threads.get(number, []), moment)
        if region_of(around) is None:  # a thread of the backward pass: the main thread waits for it in a region
            around = (*under_way(main, moment), *around)
        part = part_of(kernel.name, around, kind=kernel.kind)
        found.append(Work(kernel.start, kernel.end, moment, short_name(kernel.name), part, 1))
    return sorted(found, key=lambda one: one.moment)


def _operations(threads: Mapping[int, list[Stretch]]) -> list[Work]:
    """Work of a CPU: the time of operations without that of the operations in them."""
    found: list[Work] = []
    for thread in threads.values():
        counted: set[int] = set()
        for start, end, names in thread:
            name = names[-1]
            if _computes_nothing(name):
                continue
            calls = int(id(names) not in counted)  # one object for each call: it goes on after an operation in it
            counted.add(id(names))
            found.append(Work(start, end, start, name, part_of(name, names[:-1]), calls))
    return sorted(found, key=lambda one: one.moment)


@lru_cache(maxsize=2**12)
def _computes_nothing(name: str) -> bool:
    return name in REGIONS or _BOOKKEEPING.search(name) is not None


def _tiles(work: Sequence[Work], begin: float) -> list[tuple[float, float, Work]]:
    """The work side by side: where two overlap the time is the earlier's, and a copy has what nothing else takes."""
    found: list[tuple[float, float, Work]] = []
    reached = begin
    for one in sorted((one for one in work if one.part != COPIES), key=lambda one: one.start):
        if one.end > reached:
            found.append((max(one.start, reached), one.end, one))
            reached = one.end
    starts, busy, reached = [tile[0] for tile in found], list(found), begin
    for copy in sorted((one for one in work if one.part == COPIES), key=lambda one: one.start):
        start = max(copy.start, reached)
        reached = max(reached, copy.end)
        place = max(0, bisect.bisect_right(starts, start) - 1)
        while start < copy.end:
            tile = busy[place] if place < len(busy) else (math.inf, math.inf, copy)
            if tile[0] > start:
                found.append((start, min(copy.end, tile[0]), copy))
            start, place = max(start, tile[1]), place + 1
    return sorted(found, key=lambda tile: tile[0])


def _gaps(tiles: Sequence[tuple[float, float, Work]], begin: float, end: float) -> Iterator[tuple[float, float]]:
    reached = begin
    for start, until, _ in tiles:
        if start > reached:
            yield reached, start
        reached = max(reached, until)
    if end > reached:
        yield reached, end


def _meanwhile(main: list[Stretch], start: float, end: float) -> Iterator[tuple[str, float]]:
    """In which regions the program was from `start` to `end`, and for how long."""
    left = end - start
    for place in range(max(0, last_begun(main, start)), len(main)):
        if (one := main[place]).start >= end:
            break
        length = min(one.end, end) - max(one.start, start)
        region = region_of(one.names)
        if length > 0 and region is not None:
            yield WHILE[region], length
            left -= length
    if left > 0:
        yield "between two steps", left


def _parts(taken: Mapping[tuple[str, str], Sequence[float]], steps: int, total: float) -> tuple[Part, ...]:
    named: dict[str, list[Share]] = defaultdict(list)
    for (part, name), (length, calls) in taken.items():
        named[part].append(Share(name=name, milliseconds=length / steps / 1e3, calls=calls / steps))
    parts: list[Part] = []
    for part, shares in named.items():
        shares.sort(key=lambda one: -one.milliseconds)
        length = math.fsum(one.milliseconds for one in shares)
        parts.append(
            Part(
                name=f"{OTHER} (mostly {shares[0].name})" if part == OTHER else part,
                milliseconds=length,
                share=length * steps * 1e3 / total,
                calls=sum(one.calls for one in shares),
                largest=tuple(shares[:LARGEST_SHOWN]),
            )
        )
    return tuple(sorted(parts, key=lambda part: -part.milliseconds))


def short_name(name: str) -> str:
    """A kernel without its template arguments; of torch's own loops, with what they compute."""
    bare = name.removeprefix("void ")
    outer = re.split(r"[<(]", bare.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    outer = outer.removeprefix("at::native::").strip() or bare
    inner = re.findall(r"(\w+?)(?:_kernel_cuda|KernelImpl\w*|_cuda_impl|Functor\b|Ops\b)", bare)
    computed = next((word for word in inner if word not in outer and word not in ("CUDA", "Binary", "Unary")), "")
    return (f"{outer}: {computed}" if computed else outer)[:90]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMatmul:
    """A square matmul that was timed on the device of the run."""

    device: str
    size: int
    dtype: str
    tflops: float
