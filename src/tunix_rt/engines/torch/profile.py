"""Where the time of a step goes: names for its parts in a trace, the recording of a few steps, and the device's own best.

The trace is read by `tunix_rt/profiling`, which knows no torch.
"""

import contextlib
import gzip
import itertools
import logging
import shutil
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function

from tunix_rt.engines.base import Step
from tunix_rt.engines.profile.table import DenseProduct
from tunix_rt.engines.profile.trace import BACKWARD, BATCH, FORWARD, HEAD, OPTIMIZER, STEP
from tunix_rt.storage import storage

__all__ = ["BACKWARD", "BATCH", "FORWARD", "HEAD", "OPTIMIZER", "dense_product", "profiled", "region"]

logger = logging.getLogger(__name__)

LARGEST_PRODUCT = {"cuda": 8192, "cpu": 1024}
PRODUCT_SECONDS = {"cuda": 0.1, "cpu": 0.2}


def region(name: str) -> contextlib.AbstractContextManager[object]:
    """Marks what runs inside in a trace, under one of the names above. Without a profiler it does nothing.

    Regions may be nested, the innermost counts. What a backward pass launches from a thread of its own belongs to the
    region that the main thread is in at that moment.
    """
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return record_function(name)


def profiled(
    steps: Generator[Step, None, None], engine: Any, trace: Path, *, passed: int, count: int, done: Callable[[], None]
) -> Generator[Step, None, None]:
    """`steps`, of which `count` are recorded into `trace` (gzipped) once `passed` went by; `done` is called when it is there.

    The last step that is passed warms the profiler up. However this ends, the profiler has stopped and `steps` is closed.
    """
    with contextlib.closing(steps):
        yield from itertools.islice(steps, max(0, passed - 1))
        with _Recording(engine) as recording:
            yield from itertools.islice(steps, min(1, passed))
            recording.start()
            for number in range(1, count + 1):
                with record_function(STEP):
                    step = next(steps)
                if number == count:
                    recording.finish(trace)
                    done()
                yield step
        yield from steps


class _Recording(contextlib.AbstractContextManager["_Recording"]):
    """torch's profiler: its buffers are made on entry, it records from `start()` to `finish()`, and is off on exit."""

    def __init__(self, engine: Any) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        self._device = engine.device if engine.device.type == "cuda" else None
        if self._device is not None:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler: Any = torch.profiler.profile(activities=kinds, acc_events=True)
        self._records = False

    def __enter__(self) -> "_Recording":
        self._profiler.prepare_trace()
        return self

    def start(self) -> None:
        self._synchronize()  # what was launched before is no part of the first step
        self._profiler.start_trace()
        self._records = True

    def finish(self, trace: Path) -> None:
        """Write what was recorded, and forget it."""
        self._synchronize()
        recorded = self._end()
        plain, packed = (trace.with_name(f".{trace.name}-{part}.staged") for part in ("plain", "packed"))
        with storage(trace):
            trace.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=4) as target:
                shutil.copyfileobj(source, target, 2**20)
            plain.unlink()
            packed.replace(trace)

    def __exit__(self, *raised: object) -> None:
        if self._profiler is not None:
            self._end()

    def _end(self) -> Any:
        profiler, self._profiler = self._profiler, None
        if not self._records:  # torch ends only what has begun
            profiler.start_trace()
        profiler.stop_trace()
        return profiler

    def _synchronize(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)


# --- the device's own best --------------------------------------------------------------------------------------------


def dense_product(engine: Any) -> DenseProduct | None:
    """How fast this device multiplies two large square matrices in the type of the products; None without the memory for it.

    Numbers are drawn from a generator of their own, and on a GPU the peak memory is afterwards what it was, to within a
    MiB: no result of the run knows that this was measured.
    """
    device = engine.device.type
    before = torch.cuda.max_memory_allocated(engine.device) if device == "cuda" else 0
    for size in (LARGEST_PRODUCT[device], LARGEST_PRODUCT[device] // 2, LARGEST_PRODUCT[device] // 4):
        try:
            seconds = _product_seconds(engine, size)
        except torch.OutOfMemoryError:
            continue
        finally:
            if device == "cuda":
                _put_back_peak(engine.device, before)
        name = torch.cuda.get_device_name(engine.device) if device == "cuda" else "the CPU"
        return DenseProduct(device=name, size=size, dtype=engine.recipe.compute, tflops=2 * size**3 / seconds / 1e12)
    return None


def _product_seconds(engine: Any, size: int) -> float:
    """Of one product, in the fastest of five series that take `PRODUCT_SECONDS` together: others may hold the device too."""
    generator = torch.Generator(engine.device).manual_seed(0)
    left, right = (
        torch.empty(size, size, device=engine.device, dtype=engine.compute).normal_(generator=generator)
        for _ in range(2)
    )
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    first = _timed(engine, lambda: torch.mm(left, right, out=product), 1)
    each = max(1, round(PRODUCT_SECONDS[engine.device.type] / 5 / first))
    return min(_timed(engine, lambda: torch.mm(left, right, out=product), each) for _ in range(5))


def _timed(engine: Any, call: Callable[[], object], times: int) -> float:
    """Seconds of one of `times` calls."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    started = time.perf_counter()
    for _ in range(times):
        call()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return (time.perf_counter() - started) / times


def _put_back_peak(device: torch.device, peak_bytes: int) -> None:
    """The allocator knows its highest mark only, which a small model does not reach again: set it to `peak_bytes` anew."""
    if torch.cuda.max_memory_allocated(device) <= peak_bytes:
        return
    torch.cuda.reset_peak_memory_stats(device)
    missing = peak_bytes - torch.cuda.memory_allocated(device)
    if missing > 0:
        try:
            torch.empty(missing, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # memory in pieces, none so large: the peak is then that of what follows
            logger.warning(
                "The peak memory of this run is counted from here on: it was not to be had in one piece again"
            )
