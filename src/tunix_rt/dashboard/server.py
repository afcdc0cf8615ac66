"""Serve the pages on this computer until Ctrl-C."""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunix_rt.errors import ConfigError

HEAD_SECONDS = 10.0
"""For the head of a request and for its body, from the first byte or from the answer before. uvicorn has no such limit."""
MOST_CONNECTIONS = 600
"""More are answered with 503. Slow clients hold theirs until the deadline."""
MOST_HEAD_BYTES = 48 * 1024


class Timed(H11Protocol):
    """Closes a connection on which no whole request arrives in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._expire)

    def _expire(self) -> None:
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting or self.cycle.more_body:
            self.transport.abort()
        else:  # an answer is being made; look again
            self._deadline = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._expire)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._deadline.cancel()
        if not self.transport.is_closing():
            self._deadline = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, at a free port where `port` is 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        problem = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        raise ConfigError(problem, fix="choose another --port, or leave it out") from error
    return made


def serve(app: ASGIApp, bound: socket.socket, ready: Callable[[], None], close: Callable[[], None]) -> None:
    """Answer until SIGINT or SIGTERM, which end the process. `ready` is called once requests are answered, `close` last."""
    config = uvicorn.Config(
        app, http=Timed, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        date_header=False, proxy_headers=False, limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=int(HEAD_SECONDS),
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
    )  # fmt: skip
    _Server(config, ready, close).run(sockets=[bound])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], close: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._close = ready, close

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """At once: a page that is being made may take many seconds more, and has nothing to save."""
        self._close()
        os._exit(0)
