"""Profiling of training steps: regions of a trace, the trace of a few steps, and the matmul speed of the device.

`engines/trace.py` reads the trace, without torch.
"""

import contextlib
import gzip
import itertools
import logging
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from tunix_rt.engines.base import Step
from tunix_rt.engines.step_time import DenseMatmul
from tunix_rt.engines.trace import STEP
from tunix_rt.storage import storage

if TYPE_CHECKING:  # model.py imports `region`
    from tunix_rt.engines.torch.model import Engine

logger = logging.getLogger(__name__)

LARGEST_MATMUL = {"cuda": 8192, "cpu": 1024}
MATMUL_SECONDS = {"cuda": 0.1, "cpu": 0.2}


def region(name: str) -> contextlib.AbstractContextManager[object]:
    """Marks a region of a trace, under one of the names in `engines/trace.py`. Does nothing without a profiler.

    Regions may be nested; the innermost counts. What a thread of the backward pass launches belongs to the region of the main
    thread at that time.
    """
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return record_function(name)


def profiled(
    steps: Generator[Step, None, None],
    engine: "Engine",
    trace: Path,
    *,
    passed: int,
    count: int,
    done: Callable[[], None],
) -> Generator[Step, None, None]:
    """`steps`, of which `count` after the first `passed` are recorded into `trace` (gzipped); then `done` is called.

    The last step before them warms the profiler up. In any case the profiler is stopped and `steps` is closed at the end.
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
    """torch's profiler: allocated on entry, recording from `start()` to `finish()`, and off on exit."""

    def __init__(self, engine: "Engine") -> None:
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
        self._synchronize()  # excludes kernels that were launched before
        self._profiler.start_trace()
        self._records = True

    def finish(self, trace: Path) -> None:
        """Write the trace, and free it."""
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
        if not self._records:  # torch stops only a profiler that was started
            profiler.start_trace()
        profiler.stop_trace()
        return profiler

    def _synchronize(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)


# --- matmul speed ----------------------------------------------------------------------------------------------------


def dense_product(engine: "Engine") -> DenseMatmul | None:
    """The speed of a large square matmul on this device in the compute dtype; None without the memory for it.

    It has its own random generator, and on a GPU restores the recorded peak memory to within a MiB: no result of the run
    depends on it.
    """
    device = engine.device.type
    before = torch.cuda.max_memory_allocated(engine.device) if device == "cuda" else 0
    for size in (LARGEST_MATMUL[device], LARGEST_MATMUL[device] // 2, LARGEST_MATMUL[device] // 4):
        try:
            seconds = _matmul_seconds(engine, size)
        except torch.OutOfMemoryError:
            continue
        finally:
            if device == "cuda":
                _restore_peak(engine.device, before)
        name = torch.cuda.get_device_name(engine.device) if device == "cuda" else "the CPU"
        return DenseMatmul(device=name, size=size, dtype=engine.recipe.compute, tflops=2 * size**3 / seconds / 1e12)
    return None


def _matmul_seconds(engine: "Engine", size: int) -> float:
    """Of one matmul, in the fastest of five series that take `MATMUL_SECONDS` together: other processes may use the device."""
    from torch.utils.benchmark import Timer

    generator = torch.Generator(engine.device).manual_seed(0)
    left, right = (
        torch.empty(size, size, device=engine.device, dtype=engine.compute).normal_(generator=generator)
        for _ in range(2)
    )
    matrices = {"left": left, "right": right, "product": torch.empty_like(left)}
    timer = Timer("torch.mm(left, right, out=product)", globals=matrices, num_threads=torch.get_num_threads())
    each = max(1, round(MATMUL_SECONDS[engine.device.type] / 5 / timer.timeit(1).mean))
    return min(timer.timeit(each).mean for _ in range(5))


def _restore_peak(device: torch.device, peak_bytes: int) -> None:
    """Set the recorded peak of the allocator, which a small model does not reach again, to `peak_bytes`."""
    if torch.cuda.max_memory_allocated(device) <= peak_bytes:
        return
    torch.cuda.reset_peak_memory_stats(device)
    missing = peak_bytes - torch.cuda.memory_allocated(device)
    if missing > 0:
        try:
            torch.empty(missing, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # fragmented memory: the peak is then that of what follows
            logger.warning("Peak memory could not be restored after profiling and is counted from here on")
