"""How far the resident memory of this process has risen: the measured side of the plan on a CPU."""

from pathlib import Path

import psutil

from tunix_rt.backends import PhasePeak

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
