"""`kakera serve` as a user starts it: a process of its own, found by its port."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from typing import Any

import httpx

COMMAND = [sys.executable, "-m", "kakera.cli", "serve"]
START_SECONDS = 60


class CommandServer:
    """Use as a context manager, entered when it answers (`wait`); leaving it kills the process if it still runs."""

    def __init__(self, model: str, *options: str, port: int | None = None, wait: bool = True):
        self._wait = wait
        self.port = port or free_port()
        self.process = subprocess.Popen(
            [*COMMAND, model, "--port", str(self.port), "--log-level", "error", *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30, verify=False)

    def __enter__(self) -> CommandServer:
        if not self._wait:
            return self
        end = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "the server did not start in time"
            try:
                self.http.get("/health")
                return self
            except httpx.TransportError:
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr
        self.process.stderr.close()

    def chat(self, text: str, **more: Any) -> httpx.Response:
        more.setdefault("enable_thinking", False)
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **more})

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_port_pair() -> int:
    """The first of two neighbours."""
    while True:
        first = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", first + 1))
            return first
