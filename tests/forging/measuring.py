"""Run the real program and measure it: wall-clock time and peak resident memory of its process tree."""

import tempfile
import time
from dataclasses import dataclass

import psutil

from tests.program import ROOT, command, environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    code: int
    seconds: float
    peak_bytes: int
    output: str


def measured(*arguments: object, seconds: float = 120.0) -> Measured:
    """The finished program; one that takes longer than `seconds` is killed and has code -9."""
    began, peak = time.monotonic(), 0
    with tempfile.TemporaryFile() as printed:
        process = psutil.Popen(command(*arguments), cwd=ROOT, env=environment(), stdout=printed, stderr=printed)
        while process.poll() is None:
            peak = max(peak, _resident(process))
            if time.monotonic() - began > seconds:
                for one in [*process.children(recursive=True), process]:
                    one.kill()
            time.sleep(0.02)
        printed.seek(0)
        output = printed.read().decode("utf-8", "replace")
    return Measured(code=process.returncode, seconds=time.monotonic() - began, peak_bytes=peak, output=output)


def _resident(process: psutil.Process) -> int:
    total = 0
    try:
        for one in [process, *process.children(recursive=True)]:
            total += one.memory_info().rss
    except psutil.Error:  # it has just ended
        return total
    return total
