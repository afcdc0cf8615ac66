"""The engines. Each offers the same functions in the same order (`load`, `optimizer_steps`, `save`, `generate`); heavy
libraries are imported here and nowhere else."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tunix_rt.assets import cache_root
from tunix_rt.errors import TunixError

NUMERICS: dict[str, int] = {"torch": 1, "jax": 1}
"""By engine. Raised only when its results change in their bits: a run is resumed and replayed by the same numerics alone."""
Progress = Callable[[str, int, int, str], None]
"""Told as work goes on: (what, done, total, a note such as "loss 0.41, 4,512 tokens/s")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer update, as the engine saw it. `loss` is the mean over the target tokens of the whole step."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    target_tokens: int
    tokens: int
    seconds: float
    peak_bytes: int
    batch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The highest memory of a part of a run, as its engine measures it."""

    used_bytes: int
    measure: str
    """What the bytes are, in words."""
    alone: bool
    """Whether it is the peak of this part by itself; else the highest since the load, where no one can begin anew."""
    reserved_bytes: int | None = None
    """What the allocator held at most, given out or not; None where it does not tell."""

    def or_higher(self, other: "PhasePeak") -> "PhasePeak":
        """Of two parts of one kind, the higher peak; each figure by itself."""
        higher = max(self, other, key=lambda peak: peak.used_bytes)
        held = [one.reserved_bytes for one in (self, other) if one.reserved_bytes is not None]
        return replace(higher, reserved_bytes=max(held, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What an engine that compiles a whole step has to know of it before it loads a weight."""

    rows: int
    """Of a micro-batch, all devices together."""
    accumulation: int
    """Micro-batches in a step."""
    tokens: int
    """Of the longest row."""


def out_of_range(name: str, dtype: str) -> TunixError:
    """The error of `round_weights` where a weight is too large for `dtype`."""
    return TunixError(
        f"training.save_dtype: {name} has weights that are too large for {dtype}",
        fix="export the last checkpoint with `tunix-rt export`, or train with training.save_dtype: bfloat16",
    )


def load_backend(name: str) -> Any:
    """The engine module for `training.backend`.

    Threads are told to sleep while they wait, unless the user said otherwise: beside another busy program, threads that
    spin for each other slow a small model down several times. Compiled code is kept across runs: torch would put it where a
    computer forgets it when it starts again.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    if (folder := _folder_for_code()) is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
    return importlib.import_module(f"tunix_rt.engines.{name}.loop")


def _folder_for_code() -> str | None:
    """Where compiled code is kept; None where nothing can be written there, which torch's own place then makes up for."""
    folder = cache_root() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


MEASURE = "rise of resident memory since before the load, with what was freed and not taken back"
"""The C library keeps places in its heap: what a step has freed is still there while a checkpoint is written."""
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class RiseMeter:
    """Counts from its making. On Linux the kernel keeps the peak; elsewhere it is the highest value seen when asked."""

    def __init__(self) -> None:
        self._kernel_keeps_peak = _reset_kernel_peak()
        self._start = psutil.Process().memory_info().rss
        self._highest = self._start

    def peak_bytes(self) -> int:
        """Highest rise over the start, in bytes."""
        now = _kernel_peak() if self._kernel_keeps_peak else psutil.Process().memory_info().rss
        self._highest = max(self._highest, now)
        return self._highest - self._start

    def take_peak(self) -> PhasePeak:
        """The rise since this was last asked; where the kernel keeps no peak, the highest up to now."""
        if not self._kernel_keeps_peak:
            return PhasePeak(used_bytes=self.peak_bytes(), measure=MEASURE, alone=False)
        now = _kernel_peak()
        self._highest = max(self._highest, now)
        self._kernel_keeps_peak = _reset_kernel_peak()
        return PhasePeak(used_bytes=max(0, now - self._start), measure=MEASURE, alone=True)


def _reset_kernel_peak() -> bool:
    try:
        _CLEAR.write_text("5")  # documented in proc(5): 5 resets the peak resident set size
    except OSError:
        return False
    return _STATUS.exists()


def _kernel_peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
