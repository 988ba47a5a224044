"""A real server process on a free port, for as long as a `with` block runs."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import psutil

from kakera.bench.memory import MemoryTable, compare_total
from kakera.errors import EngineDied
from kakera.plan.plan import Plan, Wishes
from kakera.run.process.engine_process import die_with_parent
from kakera.target.devices import device_bytes_used

START_SECONDS = 300
STOP_SECONDS = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def flags(wishes: Wishes) -> list[str]:
    """The memory options as the command line spells them; those left at their default are left out."""
    found: list[str] = []
    for field in fields(wishes):
        value = getattr(wishes, field.name)
        if value != field.default and field.name != "drafts":
            found += ["--" + field.name.replace("_", "-"), str(value)]
    return found


def serving(wishes: Wishes) -> list[str]:
    """The same for a server, which guesses by itself unless it is told what."""
    return [*flags(wishes), "--drafts", str(wishes.drafts or "off")]


class ServerProcess:
    """`kakera serve MODEL OPTIONS` in a process of its own. `url` answers once the block is entered.

    `on_wait(seconds)` is called while it starts. Raises EngineDied with the end of its log if it does not come up.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str] = (),
        on_wait: Callable[[float], None] = lambda _: None,
        port: int | None = None,
    ):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "kakera.cli", "serve", model, "--port", str(self.port), *options]
        self.on_wait = on_wait

    def __enter__(self) -> ServerProcess:
        self._before = device_bytes_used()
        self._log = tempfile.NamedTemporaryFile("w+b", prefix="kakera-bench-", suffix=".log")
        # who kills us must not leave a server behind that holds a card
        ends_with_us = functools.partial(die_with_parent, os.getpid(), signal.SIGTERM)
        self._process = subprocess.Popen(
            self.command, stdout=self._log, stderr=subprocess.STDOUT, preexec_fn=ends_with_us
        )
        began = time.monotonic()
        try:
            while not self._ready():
                waited = time.monotonic() - began
                if self._process.poll() is not None:
                    raise EngineDied(f"the server ended with status {self._process.returncode}:\n{self._tail()}")
                if waited > START_SECONDS:
                    raise EngineDied(f"the server was not ready after {START_SECONDS} s:\n{self._tail()}")
                self.on_wait(waited)
                time.sleep(0.1)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def get(self, path: str) -> str:
        """Body of a GET request, for /metrics and the like."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return bytes(answer.read()).decode()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Its exit status, if it ends by itself within that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def memory(self, plan: Plan) -> MemoryTable:
        """Its plan beside what it holds now. Others on the same cards must not have taken any memory since it began."""
        if plan.target.has_cards:
            rows = [row for row in plan.rows if row.place == "device"]
            return compare_total(rows, device_bytes_used() - self._before, "as the driver counts")
        server = psutil.Process(self.pid)
        resident = sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))
        return compare_total(plan.rows, resident, "resident sets of its processes; pages never written are not in it")

    def log(self) -> str:
        """All that it has printed."""
        return Path(self._log.name).read_text(errors="replace")

    def _ready(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _tail(self) -> str:
        return "\n".join(self.log().splitlines()[-15:])
