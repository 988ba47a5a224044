"""Fetching an image that a prompt names, where whoever serves has allowed it: from public addresses alone.

A prompt may be written by a stranger, so the server must not become his eyes in the network that it stands in. A name
is resolved once, every address that it has must be global, and the connection goes to the address that was looked at;
no redirect is followed, no proxy, cookie or password is used, what comes is bounded in bytes and seconds, and an error
says its kind and nothing of what was read.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from kakera.errors import RequestRefused, UsageError
from kakera.vision.decode import MOST_BYTES

CONNECT_SECONDS, ALL_SECONDS = 5.0, 10.0
PUBLIC = "public"
HEADERS = {"User-Agent": "kakera", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
PORTS = {"https": 443, "http": 80}
_HOST = re.compile(r"[\w-]+(\.[\w-]+)*|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f:.]*")  # no scheme, port, path or wildcard; or IPv6


@dataclass(frozen=True)
class Fetcher:
    """`hosts`: names that may be asked, in small letters; `public`: every name may, over https."""

    hosts: frozenset[str] = frozenset()
    public: bool = False

    @staticmethod
    def allowing(said: str) -> Fetcher:
        """Of `HOST,HOST` or `public`. Raises UsageError for what no URL's host can be, so that nothing would come."""
        names = frozenset(name.strip().lower().rstrip(".") for name in said.split(","))
        for name in names:
            if not _HOST.fullmatch(name):
                shown = f"{name!r} is no host" if name else "a name is missing"
                raise UsageError(
                    f"--image-urls {said}: {shown}; write such as pictures.example,other.example or public"
                )
        return Fetcher(names - {PUBLIC}, PUBLIC in names)

    def get(self, url: str) -> bytes:
        """Raises RequestRefused: 400 for what is not allowed, or does not come."""
        parts, host = self._checked(url)
        port, target = PORTS[parts.scheme], _target(parts)
        deadline = time.monotonic() + ALL_SECONDS
        try:
            over = _over(_connected(_addresses(host, port), port), parts.scheme, host)
            with contextlib.closing(over):
                ends = threading.Timer(max(0.0, deadline - time.monotonic()), _hang_up, (over,))  # however it drips
                ends.start()
                try:
                    data = _body(over, host, port, target)
                finally:
                    ends.cancel()
            if time.monotonic() < deadline:
                return data
            error: Exception = TimeoutError()
        except RequestRefused:
            raise
        except (OSError, http.client.HTTPException, ValueError) as failed:
            error = failed
        late = time.monotonic() >= deadline
        why = f"it takes more than {ALL_SECONDS:.0f} seconds" if late else type(error).__name__
        raise RequestRefused(f"the image could not be fetched ({why})")

    def _checked(self, url: str) -> tuple[SplitResult, str]:
        try:
            parts = urlsplit(url.strip())
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise RequestRefused("the URL of the image can not be read") from None
        if parts.scheme not in PORTS or not host:
            raise RequestRefused("images are fetched from https URLs, or sent as data URLs")
        if host not in self.hosts and not self.public:
            raise RequestRefused(f"images are not fetched from {host[:100]}: --image-urls does not name it")
        if parts.scheme == "http" and host not in self.hosts:
            raise RequestRefused("images are fetched over https, but from hosts that --image-urls names")
        if parts.username is not None or parts.password is not None:
            raise RequestRefused("a URL with a password is not fetched")
        if port not in (None, PORTS[parts.scheme]):
            raise RequestRefused(f"images are fetched from port {PORTS[parts.scheme]} alone")
        return parts, host


def _target(parts: SplitResult) -> str:
    """Raises RequestRefused for letters that no request line holds."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not target.isascii() or any(letter <= " " for letter in target):
        raise RequestRefused("the URL of the image can not be read: write it in ASCII, escaped with %")
    return target


def _addresses(host: str, port: int) -> list[str]:
    """Of a name, every one of which must be global: else whoever owns the name points it into this network."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        raise RequestRefused(f"the image could not be fetched: {host[:100]} has no address") from None
    if not found or not all(is_global(address) for address in found):
        raise RequestRefused("images are fetched from public addresses alone")
    return sorted(found, key=lambda address: ":" in address)


def is_global(address: str) -> bool:
    """Whether an address is one of the internet's, also where it wraps another one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and found in ipaddress.ip_network("64:ff9b::/96"):  # IPv4 behind a translator
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_global(str(inner))
    return found.is_global and not found.is_multicast and not found.is_reserved


def _connected(addresses: list[str], port: int) -> socket.socket:
    """To the first that answers. Raises OSError."""
    error: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_SECONDS)
        except OSError as failed:
            error = failed
    raise error


def _over(plain: socket.socket, scheme: str, host: str) -> socket.socket:
    """Before its handshake, if it has one: that may drip as well."""
    if scheme == "http":
        return plain
    context = ssl.create_default_context()
    return context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)


def _hang_up(over: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(over, socket.SHUT_RDWR)


def _body(over: socket.socket, host: str, port: int, target: str) -> bytes:
    if isinstance(over, ssl.SSLSocket):
        over.do_handshake()
    connection = http.client.HTTPConnection(host, port)
    connection.sock = over
    connection.request("GET", target, headers=HEADERS)
    response = connection.getresponse()
    if response.status != 200:
        moved = " (redirects are not followed)" if 300 <= response.status < 400 else ""
        raise RequestRefused(f"the image could not be fetched: the answer was {response.status}{moved}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RequestRefused("the image could not be fetched: it came compressed")
    data = response.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise RequestRefused(f"the image has more than {MOST_BYTES:,} bytes")
    return data
