"""A real pseudo-terminal of a given width: what a program writes to it and when, and what a person then sees."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.program import ROOT, environment

LINES = 24
TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|([\r\n])|([^\x1b\r\n]+)|(\x1b.)")
RED = re.compile(r"\x1b\[(?:[\d;]*;)?(?:31|91|38;5;(?:1|9|12[4-7]|16[0-3]|19[6-9])|38;2;2\d\d;\d\d?;\d+)(?:;[\d;]*)?m")
"""Also the reds of 256 and of 16 million colours."""


@dataclass
class Screen:
    """The lines that a terminal shows, scrolled ones included: text, line breaks, cursor moves and erasures; other codes that
    change places are an error. Colours are kept per character."""

    columns: int
    lines: list[list[tuple[str, str]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: str = ""
    cursor_shown: bool = True

    def feed(self, text: str) -> "Screen":
        for codes, letter, control, plain, other in TOKEN.findall(text):
            if plain:
                for character in plain:
                    self._put(character)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._down()
            elif letter:
                self._code(codes, letter)
            assert not other, f"not an escape code of this reader: {other!r}"
        return self

    def _put(self, character: str) -> None:
        if self.column == self.columns:
            self.column = 0
            self._down()
        line = self.lines[self.row]
        line += [(" ", "")] * (self.column + 1 - len(line))
        line[self.column] = (character, self.style)
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([])

    def _code(self, codes: str, letter: str) -> None:
        number = int(codes) if codes.isdecimal() else 0
        if letter == "m":
            self.style = "" if codes in ("", "0") else codes
        elif letter == "A":
            self.row = max(0, self.row - max(1, number))
        elif letter == "B":
            self.row = min(len(self.lines) - 1, self.row + max(1, number))
        elif letter == "K":
            line = self.lines[self.row]
            self.lines[self.row] = [] if number == 2 else line[: self.column]
        elif letter in "hl" and codes == "?25":
            self.cursor_shown = letter == "h"
        else:
            raise AssertionError(f"escape code {codes!r} {letter!r}")

    @property
    def text(self) -> str:
        return "\n".join("".join(character for character, _ in line).rstrip() for line in self.lines).rstrip()


@dataclass
class Recorded:
    """The output of a program on a terminal, piece by piece with its time since the start."""

    columns: int
    pieces: list[tuple[float, str]] = field(default_factory=list)
    code: int | None = None

    @property
    def raw(self) -> str:
        return "".join(piece for _, piece in self.pieces)

    @property
    def screen(self) -> Screen:
        return Screen(self.columns).feed(self.raw)

    def red(self) -> list[str]:
        """Lines that contain red."""
        return [line for line in self.raw.splitlines() if RED.search(line)]

    def longest_silence(self, until: str | None = None, *, since: float = 0.0) -> float:
        """Seconds without output, up to the piece that contains `until`."""
        times = [since]
        for moment, piece in self.pieces:
            times.append(moment)
            if until is not None and until in piece:
                break
        return max(later - earlier for earlier, later in pairwise(times))


def in_terminal(
    arguments: Sequence[object],
    *,
    columns: int,
    cwd: Path = ROOT,
    seconds: float = 300,
    act: Callable[[Recorded, subprocess.Popen[bytes]], None] = lambda recorded, process: None,
    program: Sequence[str] = (sys.executable, "-m", "tunix_rt"),
    **extra: str,
) -> Recorded:
    """Run tunix-rt on a terminal of so many columns. `act` is called after each piece of output."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    kept = {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **extra}
    began, recorded = time.monotonic(), Recorded(columns)
    surroundings = {
        name: value for name, value in environment(**kept).items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    process = subprocess.Popen(
        [*program, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=surroundings,
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while time.monotonic() - began < seconds:
            ready, _, _ = select.select([master], [], [], 0.2)
            if not ready:
                if process.poll() is not None:
                    break
                continue
            try:
                piece = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            recorded.pieces.append((time.monotonic() - began, decoder.decode(piece)))
            act(recorded, process)
        recorded.code = process.wait(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
    return recorded
