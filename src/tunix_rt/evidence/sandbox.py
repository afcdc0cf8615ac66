"""A process with limits on time, memory and files, that ends with us.

The kernel enforces CPU time, address space, file size and open files (`launcher.py` sets them in the process itself). The
parent polls wall-clock time and resident memory, and kills the process group. SIGKILL of the parent kills the process too.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from tunix_rt.errors import HardwareError

LAUNCHER = Path(__file__).with_name("launcher.py")
Pulse = Callable[[float], "Limits | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: no limit. Seconds count from the start of the process."""

    wall_seconds: float
    cpu_seconds: int | None = None
    address_bytes: int | None = None
    """Virtual memory. torch and JAX reserve far more than they use: they need `resident_bytes`."""
    resident_bytes: int | None = None
    """Resident memory of the process and its descendants."""
    file_bytes: int | None = None
    """Size of each file it writes, redirected output included."""
    open_files: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    code: int | None
    """Exit code, negative for a signal. None: it was ended for `breach`."""
    seconds: float
    peak_bytes: int
    """Largest resident memory that was measured."""
    breach: str
    """The limit that it reached: `60 s of wall-clock time`, `1.0 GiB of memory`; empty: none."""


def run_limited(
    command: Sequence[str], *, limits: Limits, environment: Mapping[str, str], folder: Path, stdin: bytes,
    stdout: IO[bytes], stderr: IO[bytes], network: bool = True, pulse: Pulse = lambda _seconds: None,
) -> Exit:  # fmt: skip
    """Run `command` in `folder`. `pulse` is called with the elapsed seconds and may return new limits, of which
    `wall_seconds` and `resident_bytes` replace the present ones.

    OSError as from `subprocess` if the command cannot start; HardwareError if the kernel refuses a process without network.
    """
    ours, theirs = os.pipe()
    # The input is a file: a pipe would block us if nobody reads it.
    with open(ours, "rb") as status, open(theirs, "wb") as report, tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        options = _options(limits, status=theirs, network=network, lc_ctype="LC_CTYPE" in environment)
        started = time.monotonic()
        child = psutil.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), options, *command], stdin=given, stdout=stdout, stderr=stderr,
            env=environment, cwd=folder, start_new_session=True, pass_fds=(theirs,),
        )  # fmt: skip
        try:
            report.close()
            breach, peak = _watch(child, limits, started, pulse)
            cpu_seconds = sum(_attempt(child.cpu_times, (0.0, 0.0))[:2])  # Linux keeps it until the process is reaped
        finally:
            _kill(child)
        _refuse_failed_start(status.read().decode(), command[0])
    code = child.returncode or 0  # unknown where SIGCHLD is ignored
    breach = breach or _kernel_breach(limits, code, cpu_seconds)
    return Exit(code=None if breach else code, seconds=time.monotonic() - started, peak_bytes=peak, breach=breach)


def _options(limits: Limits, **options: object) -> str:
    address = limits.address_bytes if sys.platform == "linux" else None  # macOS has RLIMIT_AS by name and refuses it
    kernel = {"CPU": limits.cpu_seconds, "FSIZE": limits.file_bytes, "AS": address, "NOFILE": limits.open_files}
    given = {"RLIMIT_CORE": 0} | {f"RLIMIT_{name}": value for name, value in kernel.items() if value is not None}
    return json.dumps({"parent": os.getpid(), "limits": given, **options})


def _watch(child: psutil.Popen, limits: Limits, started: float, pulse: Pulse) -> tuple[str, int]:
    """Returns when the process has ended, or has to: the limit that it reached, and its largest resident memory.

    It does not reap the process: until then the number of its process group belongs to nobody else.
    """
    peak, due = 0, started
    while _attempt(child.status, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE:
        now = time.monotonic()
        if now >= due:
            resident = sum(_attempt(one.memory_info, (0,))[0] for one in (child, *_descendants(child)))
            # On a machine with thousands of processes measuring is slow: a tenth of the time at most.
            due = now + max(0.1, 10 * (time.monotonic() - now))
            peak = max(peak, resident)
            limits = pulse(now - started) or limits
            if limits.resident_bytes is not None and resident > limits.resident_bytes:
                return f"{_bytes(limits.resident_bytes)} of memory", peak
        if now - started >= limits.wall_seconds:
            return f"{limits.wall_seconds:g} s of wall-clock time", peak
        time.sleep(0.01)
    return "", peak


def _attempt(call: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return call()
    except (psutil.Error, ProcessLookupError, PermissionError):  # it has just ended
        return otherwise


def _descendants(child: psutil.Popen) -> list[psutil.Process]:
    return list(_attempt(lambda: child.children(recursive=True), []))


def _kill(child: psutil.Popen) -> None:
    """The process group, and the descendants that left it."""
    for one in _descendants(child):
        _attempt(one.kill, None)
    _attempt(lambda: os.killpg(child.pid, signal.SIGKILL), None)
    _attempt(lambda: child.wait(timeout=5.0), None)  # stuck in a driver: waiting longer would hang us as well


def _refuse_failed_start(report: str, program: str) -> None:
    stage, _, number = report.partition(" ")
    if stage == "start":
        raise OSError(int(number), os.strerror(int(number)), program)
    if stage == "network":
        raise HardwareError(
            f"a process without network cannot start: no network namespace ({os.strerror(int(number))})",
            fix="allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; Ubuntu: kernel.apparmor_restrict_"
            "unprivileged_userns=0; Docker: --security-opt seccomp=unconfined), or run on a machine that has them",
        )


def _kernel_breach(limits: Limits, code: int, used: float) -> str:
    """A process that ignores SIGXCPU gets SIGKILL, as from anyone: the CPU seconds that it used show which."""
    if (cpu := limits.cpu_seconds) and (code == -signal.SIGXCPU or (code == -signal.SIGKILL and used >= cpu)):
        return f"{cpu} s of CPU time"
    return f"{_bytes(limits.file_bytes)} in one file" if limits.file_bytes and code == -signal.SIGXFSZ else ""


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
