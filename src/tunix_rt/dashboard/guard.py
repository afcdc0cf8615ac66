"""Who may ask, and how: checked before any page is looked up. Pure functions over the head of a request."""

import hmac
import secrets
from dataclasses import dataclass, field

from tunix_rt.loopback import LOOPBACK, Headers, Refusal, refusal, values

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


def new_key() -> str:
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Names under which this server answers, and the key that the printed address carries."""

    hosts: tuple[str, ...] = LOOPBACK
    key: str | None
    """None: whoever reaches the port may read."""
    port: int
    once: list[str] = field(default_factory=list)
    """Keys that are exchanged for the cookie a single time."""

    @property
    def cookie(self) -> str:
        """Its name has the port: cookies are shared by all ports of a host."""
        return f"{COOKIE}_{self.port}"

    def refusal(self, method: str, path: bytes, headers: Headers) -> Refusal | None:
        """Why the request is not answered; None where it may be, apart from its key."""
        if refused := refusal(method, path, headers, self.hosts):
            return refused
        if method == "POST" and not _is_action(headers):
            return Refusal(status=403, text="an action is sent by the page's own script, as JSON")
        return None

    def holds_key(self, headers: Headers) -> bool:
        """Whether the request has the cookie that the printed address was exchanged for."""
        return self.key is None or any(hmac.compare_digest(one, self.key) for one in self._cookies(headers))

    def _cookies(self, headers: Headers) -> list[str]:
        """Ours alone are parsed: other programs on this host set cookies in any form."""
        pairs = (one.strip().partition("=") for text in values(headers, b"cookie") for one in text.split(";"))
        return [value for name, _, value in pairs if name == self.cookie and value.isascii()]

    def is_key(self, given: str) -> bool:
        if self.key is None or not given.isascii():
            return False
        if used := [one for one in self.once if hmac.compare_digest(given, one)]:
            self.once.remove(used[0])
        return bool(used) or hmac.compare_digest(given, self.key)

    def set_cookie(self) -> str:
        return f"{self.cookie}={self.key}; HttpOnly; SameSite=Strict; Path=/"


def _is_action(headers: Headers) -> bool:
    kind = values(headers, b"content-type")
    return values(headers, TOKEN_HEADER.encode()) == ["1"] and kind == ["application/json"]
