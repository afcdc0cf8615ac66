"""A child process that may hang, crash or print without end, run with limits.

It has no stdin, its own session, which is killed as a whole, and prints into files: its output does not fill our memory, and
a process that it leaves behind does not block us.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

MOST_READ = 1 << 20
"""Bytes of output that are read, from the end."""
MOST_PRINTED = 64 << 20
"""Bytes of output after which a child is killed: the files may be in RAM."""
PULSE_SECONDS = 20.0
NO_ANSWER = "gave no answer within"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended. `out` and `err` are the end of its output; `cut`: there was more."""

    code: int | None
    """None: it was killed, or did not start."""
    words: str
    """`ended with code 3`, `was ended by SIGSEGV`, `gave no answer within 30 s` ..."""
    pid: int
    """0: it did not start."""
    seconds: float
    out: str = ""
    err: str = ""
    cut: bool = False

    @property
    def last_error(self) -> str:
        """The last line on stderr, where Python and the engines name what went wrong."""
        return next(iter(self.err.strip().splitlines()[-1:]), "").strip()


def run_child(command: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run `command` for at most `seconds`, and read its output."""
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            ended = run_into(command, out, err, seconds=seconds, environment=environment)
            cut = os.fstat(out.fileno()).st_size > MOST_READ
            return replace(ended, out=last_text(out), err=last_text(err), cut=cut)
    except OSError as error:  # no space for the files
        return _not_started(command, error)


def run_into(
    command: Sequence[str],
    out: IO[bytes],
    err: IO[bytes] | None = None,
    *,
    seconds: float | None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    pulse: Callable[[float], None] | None = None,
) -> Ended:
    """Run `command` with its output in these files (in one, without `err`); `pulse` is called with the elapsed seconds.

    Its process group is killed in any case. A process that survives that, because it is stuck in a broken driver, is left
    to the system: waiting for it would hang us too.
    """
    started = time.monotonic()
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT if err is None else err,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        return _not_started(command, error)
    try:
        stopped = _wait(child, (out, err or out), started, seconds, pulse)
    finally:
        _kill_group(child)
    code = None if stopped else child.returncode
    words = stopped or ending(child.returncode)
    return Ended(code=code, words=words, pid=child.pid, seconds=time.monotonic() - started)


def last_text(file: IO[bytes], since: int = 0) -> str:
    """The end of the file, from `since` on."""
    file.seek(max(since, file.seek(0, os.SEEK_END) - MOST_READ))
    return file.read().decode("utf-8", errors="replace")


def ending(code: int) -> str:
    """`ended with code 3`, `was ended by SIGSEGV`."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _not_started(command: Sequence[str], error: OSError) -> Ended:
    words = f"could not be started: {command[0]}: {error.strerror or error}"
    return Ended(code=None, words=words, pid=0, seconds=0.0)


def _wait(
    child: "subprocess.Popen[bytes]",
    files: Sequence[IO[bytes]],
    started: float,
    seconds: float | None,
    pulse: Callable[[float], None] | None,
) -> str | None:
    """None if the child ended by itself, else why it has to be killed."""
    pause, pulses = 0.002, 1
    while not _has_ended(child):
        passed = time.monotonic() - started
        if seconds is not None and passed >= seconds:
            return f"{NO_ANSWER} {seconds:g} s"
        if any(os.fstat(file.fileno()).st_size > MOST_PRINTED for file in files):
            return f"printed more than {MOST_PRINTED >> 20} MiB"
        if pulse and passed >= pulses * PULSE_SECONDS:
            pulse(passed)
            pulses += 1
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return None


def _has_ended(child: "subprocess.Popen[bytes]") -> bool:
    """Without reaping it, where the system can: until then the id of its process group is not reused."""
    if not hasattr(os, "waitid"):
        return child.poll() is not None
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # SIGCHLD is ignored, so the system reaped it
        return True


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                child.kill()
            else:
                os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5.0)
