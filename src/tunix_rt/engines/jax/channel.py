"""A connection between two processes of a JAX run: messages of JSON, with arrays as raw bytes."""

import json
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from tunix_rt.ranks import rank_timeout

SILENT_SECONDS = 60.0
"""Without a message, after which a process counts as stopped."""
LARGEST_MESSAGE = 2**32

Arrays = Mapping[str, npt.NDArray[Any]]
Message = dict[str, Any]


class Channel:
    """A connection. Messages are JSON, with arrays as raw bytes."""

    def __init__(self, connection: socket.socket, *, silent_seconds: float = SILENT_SECONDS) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._sending = connection, threading.Lock()
        self.allow_silence(silent_seconds)

    def allow_silence(self, seconds: float) -> None:
        self._connection.settimeout(rank_timeout(seconds))

    def send(self, kind: str, arrays: Arrays | None = None, **fields: Any) -> None:
        arrays = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        listed = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        head = json.dumps({"kind": kind, "arrays": listed, **fields}).encode()
        body = b"".join(array.tobytes() for array in arrays.values())
        with self._sending:
            self._connection.sendall(struct.pack("<QQ", len(head), len(body)) + head + body)

    def receive(self) -> tuple[Message, dict[str, npt.NDArray[Any]]]:
        """The next message. EOFError where the other process has ended, TimeoutError where it is silent."""
        sizes = struct.unpack("<QQ", self._exactly(16))
        if sum(sizes) > LARGEST_MESSAGE:
            raise EOFError("not a message of tunix-rt")
        message, body = json.loads(self._exactly(sizes[0])), self._exactly(sizes[1])
        arrays, at = {}, 0
        for name, dtype, shape in message.pop("arrays"):
            arrays[name] = np.frombuffer(body, dtype, int(np.prod(shape)), at).reshape(shape)
            at += arrays[name].nbytes
        return message, arrays

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            part = self._connection.recv(min(size - len(received), 2**20))
            if not part:
                raise EOFError("the connection ended")
            received += part
        return bytes(received)

    def close(self) -> None:
        with suppress(OSError):  # a thread may wait in `receive`; the other side may be gone
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
