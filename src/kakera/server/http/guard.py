"""The gate before all routes: the Host and Origin that browsers send, and the API key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from kakera.errors import RequestRefused
from kakera.server.http.access import Access, host_name
from kakera.server.http.errors import Refusals, error_body

PRIORITY = b"x-kakera-priority"  # a header, so that every dialect has it and no body changes
READING = ("GET", "HEAD", "OPTIONS")


class Guard:
    """421 for a foreign Host, 403 for a foreign page that wants to change something, 401 for a missing key,
    which nobody needs for `open_paths`."""

    def __init__(self, app: ASGIApp, access: Access, open_paths: Collection[str], refusals: Refusals):
        self._app, self._access, self._open, self._refusals = app, access, open_paths, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the answer of a GET; uvicorn leaves its body out
        if scope["type"] == "http" and (refusal := self._refusal(scope, dict(scope["headers"]))):
            status, code, text = refusal
            await self._refusals.answer(scope, status, error_body(text, status, code))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        host = headers.get(b"host", b"").decode("latin-1")
        # no browser leaves Host out; HTTP/1.0 probes of load balancers do
        if host and self._access.hosts and host_name(host) not in self._access.hosts:
            name = host_name(host)[:100]
            return 421, "host_not_allowed", f"the host {name!r} is not served here; start with --allowed-host {name}"
        if self._access.keys:  # browsers add no key by themselves, so with keys a page elsewhere can do nothing
            if scope["path"] in self._open or valid_key(headers, self._access):
                return None
            text = "wrong or missing API key; send it as Authorization: Bearer KEY or as x-api-key: KEY"
            return 401, "invalid_api_key", text
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and scope["method"] not in READING and not self._ours(origin, host):
            shown = origin[:100]
            return 403, "origin_not_allowed", f"pages of {shown} may not ask here; start with --cors-origin {shown}"
        return None

    def _ours(self, origin: str, host: str) -> bool:
        """The scheme is left aside: a proxy may have ended TLS."""
        place = origin.partition("://")[2]
        return origin in self._access.origins or (bool(place) and place.lower() == host.lower())


def sent_keys(headers: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return bearer, headers.get(b"x-api-key", b"")


def valid_key(headers: dict[bytes, bytes], access: Access) -> bytes | None:
    """The bearer token or x-api-key that is one of the server's, compared in constant time; whatever else was sent."""
    keys = [key.encode() for key in access.keys]
    return next((given for given in sent_keys(headers) for key in keys if hmac.compare_digest(given, key)), None)


def client_of(scope: Scope, access: Access) -> str:
    """Who asks, as a name that says nothing and is the same in all requests: the key. Without keys the address with
    what programs say of themselves, so that those of one machine are told apart; whoever lies gains a turn, not more.
    """
    headers = dict(scope["headers"])
    bearer, api_key = sent_keys(headers)
    told = [valid_key(headers, access) or bearer or api_key]
    if not access.keys:
        address = scope["client"][0] if scope.get("client") else ""
        told += [address.encode(), headers.get(b"user-agent", b"")]
    return hashlib.blake2b(b"\0".join(told), digest_size=8).hexdigest()


def is_background(scope: Scope) -> bool:
    """Whether a request asks to give way to all others. Raises RequestRefused for a priority that does not exist."""
    given = dict(scope["headers"]).get(PRIORITY, b"normal").strip().lower()
    if given not in (b"normal", b"background"):
        raise RequestRefused(f"{PRIORITY.decode()} is {given[:100].decode('latin-1')!r}: send normal or background")
    return bool(given == b"background")
