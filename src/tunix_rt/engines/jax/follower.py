"""The connection of every process but the first to process 0: see `control.py`."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy.typing as npt

from tunix_rt.engines.jax.channel import SILENT_SECONDS, Channel, Message
from tunix_rt.engines.jax.control import BEAT_SECONDS, CONNECT_SECONDS, COURTESY_SECONDS, SEE_LOGS, Doing, ended
from tunix_rt.errors import HardwareError, TunixError
from tunix_rt.progress import duration
from tunix_rt.ranks import process_exit_code, rank_timeout
from tunix_rt.storage import WrittenFile

logger = logging.getLogger(__name__)


class Follower:
    """Any other process. Its main thread takes `orders`; `write` is called in another thread, with the number of a snapshot and
    the folder to write it to."""

    def __init__(self, write: Callable[[int, str], None]) -> None:
        self._write, self._doing = write, Doing()
        self._orders: list[tuple[Message, dict[str, npt.NDArray[Any]]]] = []
        self._came, self._over = threading.Condition(), threading.Event()
        self._go = 0
        self.leaves = False
        """All processes leave jax together."""
        self.channel: Channel

    def connect(self, address: tuple[str, int], report: Mapping[str, Any]) -> None:
        """Report to the lead once it listens."""
        until = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                self.channel = Channel(socket.create_connection(address, timeout=SILENT_SECONDS))
                self.channel.send("report", report=report)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise HardwareError(
                        f"process 0 does not listen on {address[0]}:{address[1]}: {error.strerror or error}",
                        fix="start the same command in process 0, on the host MASTER_ADDR; its log has the cause",
                    ) from error
                time.sleep(0.2)
        for act in (self._listen, self._beat):
            threading.Thread(target=act, name=f"tunix-rt{act.__name__}", daemon=True).start()

    def orders(self) -> Iterator[tuple[Message, dict[str, npt.NDArray[Any]]]]:
        """What the lead announces, until the run ends. An ending with an error is raised."""
        while True:
            with self._came:
                while not self._orders:
                    self._came.wait(BEAT_SECONDS)  # a signal handler runs in between
                message, arrays = self._orders.pop(0)
            if message["kind"] == "end":
                self.leaves = message["leave"]
                if message["exit_code"]:
                    raise ended(f"process 0 ended: {message['problem']}", SEE_LOGS, message["exit_code"])
                return
            self._doing = Doing(number=message["number"], what=message["named"])
            yield message, arrays
            self._doing = Doing(number=message["number"], what=f"the end of {message['named']}", entered=True)

    def enter(self) -> None:
        """The computation of the current order begins."""
        self._doing = Doing(number=self._doing.number, what=self._doing.what, entered=True)
        self._report()

    def signal(self, name: str) -> None:
        """Hand a stop signal to the lead, which stops the run."""
        self.channel.send("signal", name=name)

    def fail(self, error: TunixError) -> None:
        self.channel.send("failed", problem=error.problem, fix=error.fix, exit_code=error.exit_code)

    def meet(self) -> None:
        """Be ready for the current order, and wait until all others are."""
        number = self._doing.number
        self.wrote(number, {})
        with self._came:
            while self._go < number:
                self._came.wait(BEAT_SECONDS)

    def wrote(self, number: int, files: Mapping[str, WrittenFile]) -> None:
        self.channel.send("wrote", number=number, files=files)

    def _report(self) -> None:
        doing = self._doing
        self.channel.send("beat", number=doing.number, what=doing.what, entered=doing.entered)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._report()
            except OSError:
                return  # the listener reports why

    def _listen(self) -> None:
        problem = "process 0 has ended"
        try:
            while True:
                message, arrays = self.channel.receive()
                if message["kind"] == "write":
                    given = message["number"], message["folder"]
                    threading.Thread(target=self._write, args=given, name="tunix-rt-save", daemon=True).start()
                elif message["kind"] != "beat":
                    with self._came:
                        if message["kind"] == "go":
                            self._go = message["number"]
                        else:
                            self._orders.append((message, arrays))
                        self._came.notify_all()
                if message["kind"] == "end":
                    break
        except TimeoutError:
            problem = f"process 0 has been silent for {duration(rank_timeout(SILENT_SECONDS))}"
        except (EOFError, OSError, ValueError) as error:
            logger.debug("the connection to process 0: %s", error)
        else:
            problem = ""
        self._leave(problem, message["exit_code"] if not problem else TunixError.exit_code)

    def _leave(self, problem: str, exit_code: int) -> None:
        """End the process: at once without a lead, before jax aborts it; else after the main thread had time to."""
        if not problem and self._over.wait(2 * COURTESY_SECONDS):
            return
        logger.error("%s\n  fix: %s", problem or "process 0 ended the run", SEE_LOGS)
        os._exit(process_exit_code(exit_code))

    def close(self) -> None:
        """The main thread ends by itself."""
        self._over.set()
        if hasattr(self, "channel"):
            self.channel.close()
