"""Who may ask, as the command line says it: API keys, names of this host, pages of other sites.

A server on loopback is in reach of every page that its user's browser shows. A page of another origin can post to it
without reading the answer, and with a name that it lets resolve to 127.0.0.1 (DNS rebinding) it could read as well.
Both are told apart from our own page by headers that scripts can not set.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from kakera.errors import RequestRefused, UsageError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(:[0-9]{0,5})?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+")


@dataclass(frozen=True)
class Access:
    """`keys`: one of them is needed, if there are any. `hosts`: names that Host may have; empty takes every name.
    `origins`: those of pages elsewhere that may use this server from a browser. `cache_per_key`: what one key has sent
    is not found in the prefix cache by another."""

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    cache_per_key: bool = False

    @classmethod
    def when_bound(
        cls,
        address: str,
        *,
        keys: tuple[str, ...] = (),
        allowed_hosts: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
        cache_per_key: bool = False,
    ) -> Access:
        """Host is checked on loopback, where no other name is meant, and elsewhere if names are given: which names
        lead to an address in a network can not be known. Raises UsageError for what is no host or no origin."""
        if cache_per_key and not keys:
            raise UsageError("--cache-per-key: there are no keys; give them with --api-key-file")
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise UsageError(f"--cors-origin {origin}: write it as browsers do, such as http://localhost:3000")
        for name in allowed_hosts:
            if "/" in name or not host_name(name):
                raise UsageError(f"--allowed-host {name}: write a name or an address, such as ai.example.com")
        names = tuple(host_name(name) for name in allowed_hosts)
        checked = bool(names) or is_loopback(address)
        return cls(keys, (*LOOPBACK_NAMES, host_name(address), *names) if checked else (), origins, cache_per_key)

    def check_operator(self, address: str) -> None:
        """Whoever stops the server or lends its card has a key, or is on this machine. Raises RequestRefused (403)."""
        if not (self.keys or is_loopback(address)):
            text = "a server without keys obeys its own machine only; start it with --api-key-file"
            raise RequestRefused(text, status=403, code="key_needed")


def is_loopback(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return False  # uvicorn will say that it can not listen there
    return ipaddress.ip_address(found).is_loopback


def host_name(host: str) -> str:
    """Without port, brackets and the root's dot: "[::1]:30000" is "::1". What is no host stays as it is, so that it is
    nobody's name: "[::1].evil.com" is not ours."""
    host = host.lower()
    if written := HOST.fullmatch(host):
        return written["address"] or written["name"].removesuffix(".")
    return host


OPEN = Access()
