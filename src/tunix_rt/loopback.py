"""An HTTP server for this computer: which requests it answers, its limits, and its end on Ctrl-C."""

import asyncio
import contextlib
import gc
import logging
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunix_rt.errors import ConfigError

HEAD_SECONDS = 10.0
"""For the head of a request and for its body, from the first byte or from the answer before. uvicorn has no such limit."""
GRACE_SECONDS = 0.5
"""For the answers that end by themselves once the server is closed."""
MOST_CONNECTIONS = 600
"""More are answered with 503. Slow clients hold theirs until the deadline."""
MOST_HEAD_BYTES = 48 * 1024
MOST_HEADER_BYTES = 16 * 1024
MOST_PATH_BYTES = 26 * 1024
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

Headers = Sequence[tuple[bytes, bytes]]
_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?", re.ASCII)


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    status: int
    text: str


def refusal(method: str, path: bytes, headers: Headers, hosts: Sequence[str] = LOOPBACK) -> Refusal | None:
    """Why a request is not answered, by its head alone: it is too large, it is for another host, as after DNS rebinding, or it
    comes from a page of another site."""
    if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES or len(path) > MOST_PATH_BYTES:
        return Refusal(status=431, text="the head of the request is too large")
    if method not in ("GET", "HEAD", "POST"):
        return Refusal(status=405, text="only GET, HEAD and POST are answered")
    if not _is_host(values(headers, b"host"), hosts):
        return Refusal(status=403, text="another host name; open the address that tunix-rt printed")
    if not _is_from_here(method, headers):
        return Refusal(status=403, text="the request comes from a page of another site")
    return None


def values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def _is_host(given: list[str], hosts: Sequence[str]) -> bool:
    """Exactly one Host, whose name is one of `hosts`, at any port: a tunnel changes the port."""
    match = _HOST.fullmatch(given[0]) if len(given) == 1 else None
    return match is not None and match[1].lower() in hosts


def _is_from_here(method: str, headers: Headers) -> bool:
    """By the browser's own word. Programs without a browser send none. A link elsewhere may lead here, by GET and as a whole
    page: reading changes nothing, and the cookie does not come along."""
    site = values(headers, b"sec-fetch-site")
    if not site or site in (["same-origin"], ["none"]):
        return True
    navigates = values(headers, b"sec-fetch-mode") == ["navigate"]
    return method == "GET" and navigates and values(headers, b"sec-fetch-dest") == ["document"]


# --- the server -------------------------------------------------------------------------------------------------------


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
        raise ConfigError(problem, fix="choose another --port; 0 is any free one") from error
    return made


def serve(app: ASGIApp, bound: socket.socket, ready: Callable[[], None], close: Callable[[], None]) -> None:
    """Answer until SIGINT or SIGTERM, which end the process. `ready` is called once requests are answered, `close` last."""
    config = uvicorn.Config(
        app, http=Timed, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
        server_header=False, date_header=False, proxy_headers=False, limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=int(HEAD_SECONDS), h11_max_incomplete_event_size=MOST_HEAD_BYTES,
    )  # fmt: skip
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_is_ours)
    _Server(config, ready, close).run(sockets=[bound])


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error is not the client's, who broke HTTP while the answer to the request before was made."""
    return not (record.exc_info and isinstance(record.exc_info[1], h11.ProtocolError))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], close: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._close = ready, close

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what was imported stays; looking through it takes 40 ms of an answer now and then
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Soon: an answer that is being made may take many seconds more, and has nothing to save."""
        self._close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(super().shutdown(sockets), GRACE_SECONDS)
        os._exit(0)
