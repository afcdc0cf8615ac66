"""Who may ask, and how: checked before any page is looked up. Pure functions over the head of a request."""

import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
MOST_HEADER_BYTES = 16 * 1024
MOST_PATH_BYTES = 26 * 1024
COOKIE = "tunix_rt"
TOKEN_HEADER = "x-tunix-rt"
"""Sent by the page's own script with every action. A page of another site cannot add it without asking, and is refused."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer. Pages are fetched again by their ETag, not from a cache on disk."""

Headers = Sequence[tuple[bytes, bytes]]
_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?", re.ASCII)


def new_key() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    status: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Names under which this server answers, and the key that the printed address carries."""

    hosts: tuple[str, ...] = LOOPBACK
    key: str | None
    """None: whoever reaches the port may read."""
    port: int

    @property
    def cookie(self) -> str:
        """Its name has the port: cookies are shared by all ports of a host."""
        return f"{COOKIE}_{self.port}"

    def refusal(self, method: str, path: bytes, headers: Headers) -> Refusal | None:
        """Why the request is not answered; None where it may be, apart from its key."""
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES or len(path) > MOST_PATH_BYTES:
            return Refusal(status=431, text="the head of the request is too large")
        if method not in ("GET", "HEAD", "POST"):
            return Refusal(status=405, text="only GET, HEAD and POST are answered")
        if not self._host_is_ours(_values(headers, b"host")):
            return Refusal(status=403, text="another host name; open the address that tunix-rt printed")
        if not _is_from_here(method, headers):
            return Refusal(status=403, text="the request comes from a page of another site")
        if method == "POST" and not _is_action(headers):
            return Refusal(status=403, text="an action is sent by the page's own script, as JSON")
        return None

    def _host_is_ours(self, given: list[str]) -> bool:
        """Exactly one Host, whose name is one of ours, at any port: a tunnel changes the port."""
        match = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        return match is not None and match[1].lower() in self.hosts

    def holds_key(self, headers: Headers) -> bool:
        """Whether the request has the cookie that the printed address was exchanged for."""
        return self.key is None or any(hmac.compare_digest(one, self.key) for one in self._cookies(headers))

    def _cookies(self, headers: Headers) -> list[str]:
        found = []
        for text in _values(headers, b"cookie"):
            try:
                morsel = SimpleCookie(text).get(self.cookie)
            except CookieError:
                continue
            if morsel is not None and morsel.value.isascii():
                found.append(morsel.value)
        return found

    def is_key(self, given: str) -> bool:
        return self.key is not None and given.isascii() and hmac.compare_digest(given, self.key)

    def set_cookie(self) -> str:
        return f"{self.cookie}={self.key}; HttpOnly; SameSite=Strict; Path=/"


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def _is_from_here(method: str, headers: Headers) -> bool:
    """By the browser's own word. Programs without a browser send none. A link elsewhere may lead here, by GET and as a whole
    page: reading changes nothing, and the cookie does not come along."""
    site = _values(headers, b"sec-fetch-site")
    if not site or site in (["same-origin"], ["none"]):
        return True
    navigates = _values(headers, b"sec-fetch-mode") == ["navigate"]
    return method == "GET" and navigates and _values(headers, b"sec-fetch-dest") == ["document"]


def _is_action(headers: Headers) -> bool:
    kind = _values(headers, b"content-type")
    return _values(headers, TOKEN_HEADER.encode()) == ["1"] and kind == ["application/json"]
