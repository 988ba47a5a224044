"""The sd_notify protocol: what a service tells its supervisor, as datagrams. Without a supervisor nothing is sent."""

from __future__ import annotations

import os
import socket


class Notifier:
    """`address`: path of a datagram socket; a leading @ means the abstract namespace. None: nobody listens."""

    def __init__(self, address: str | None):
        self._address = "\0" + address[1:] if address and address.startswith("@") else address

    @staticmethod
    def from_environment() -> Notifier:
        """Takes NOTIFY_SOCKET out of the environment, so that no child speaks for this process."""
        return Notifier(os.environ.pop("NOTIFY_SOCKET", None))

    def send(self, *assignments: str) -> None:
        """Such as "READY=1". A supervisor that is gone or busy is no reason to fail."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.sendto("\n".join(assignments).encode(), self._address)
            except OSError:
                return
