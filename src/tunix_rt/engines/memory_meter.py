"""Peak memory of a phase of a run, and how a CPU measures it: by the rise of resident memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The peak memory of a phase of a run, as its engine measures it."""

    used_bytes: int
    measure: str
    """What the bytes are, in words."""
    alone: bool
    """Whether it is the peak of this phase; else the peak since the load, where the counter cannot be reset."""
    reserved_bytes: int | None = None
    """Peak of what the allocator reserved, used or not; None where it reports none."""

    def or_higher(self, other: PhasePeak) -> PhasePeak:
        """Of two phases of one kind, the higher peak; each figure by itself."""
        higher = max(self, other, key=lambda peak: peak.used_bytes)
        reserved = [one.reserved_bytes for one in (self, other) if one.reserved_bytes is not None]
        return replace(higher, reserved_bytes=max(reserved, default=None))


MEASURE = "rise of resident memory since before the load, with what was freed and not taken back"
"""The C library keeps places in its heap: what a step has freed is still there while a checkpoint is written."""
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class RiseMeter:
    """Measures the rise of resident memory. On Linux the kernel keeps the peak; elsewhere it is the highest value sampled."""

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
        """The rise since the last call; where the kernel keeps no peak, the highest since the start."""
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
