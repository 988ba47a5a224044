"""`kakera serve` as a supervisor starts it: a process of its own, with a socket for its notifications."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil

COMMAND = [sys.executable, "-m", "kakera.cli", "serve"]
START_SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Supervisor:
    """Receives sd_notify datagrams: (seconds since the start, assignments)."""

    def __init__(self, directory: Path):
        self.path = str(directory / "notify")
        self.heard: list[tuple[float, list[str]]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._began = time.monotonic()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            data = self._socket.recv(4096).decode()
            self.heard.append((time.monotonic() - self._began, data.splitlines()))

    def times(self, word: str) -> list[float]:
        return [when for when, words in self.heard if word in words]

    def wait_for(self, word: str, count: int = 1, seconds: float = START_SECONDS) -> None:
        end = time.monotonic() + seconds
        while len(self.times(word)) < count:
            assert time.monotonic() < end, self.heard
            time.sleep(0.02)

    def now(self) -> float:
        return time.monotonic() - self._began


class Served:
    """Use as a context manager; leaving it kills the process. Its state (locks) lies in `directory`.

    `log` is where stderr goes. `file_bytes`: what a file of the process may have, beyond which its disk looks full.
    `open_files`: the soft limit that it is started with.
    """

    def __init__(
        self,
        directory: Path,
        model: str,
        *options: str,
        port: int | None = None,
        log: Path | None = None,
        file_bytes: int | None = None,
        open_files: int | None = None,
        environment: dict[str, str] | None = None,
    ):
        self.port = port or free_port()
        self.supervisor = Supervisor(directory)
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(directory.parent),
            "NOTIFY_SOCKET": self.supervisor.path,
            **(environment or {}),
        }
        self.errors = log or directory / "stderr"

        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
            if open_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        with self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [*COMMAND, model, "--port", str(self.port), *options],
                stderr=stderr,
                env=self.environment,
                preexec_fn=limit,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30, verify=False)

    def __enter__(self) -> Served:
        end = time.monotonic() + START_SECONDS
        while not self.supervisor.times("READY=1"):
            assert self.process.poll() is None and time.monotonic() < end, self.errors.read_text()
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "spawn_main" in " ".join(child.cmdline()))

    def processor_seconds(self) -> float:
        """Of the server and its engine so far: what a start costs on a machine that is busy with other work."""
        used = [process.cpu_times() for process in (psutil.Process(self.process.pid), self.engine)]
        return sum(times.user + times.system for times in used)

    def second(self, model: str) -> subprocess.CompletedProcess[str]:
        """Another server on the same port, which can not start."""
        command = [*COMMAND, model, "--port", str(self.port)]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)

    def kill(self, sent: int = signal.SIGKILL) -> None:
        self.process.send_signal(sent)
        self.process.wait(timeout=30)


class Stream(threading.Thread):
    """A streaming request in a thread: its text so far and the error event at its end, if any."""

    def __init__(self, server: Served, prompt: str, tokens: int = 2000):
        super().__init__(daemon=True)
        self.text, self.error, self.cut_off = "", None, False
        self.began, self.first = time.monotonic(), 0.0
        self._server, self._body = server, {"prompt": prompt, "max_tokens": tokens, "stream": True}
        self.start()

    def run(self) -> None:
        try:
            with self._server.http.stream("POST", "/v1/completions", json=self._body) as response:
                for line in response.iter_lines():
                    self._take(line)
        except httpx.TransportError:
            self.cut_off = True

    def _take(self, line: str) -> None:
        if not line.strip() or line.endswith("[DONE]") or line.startswith(":"):
            return
        event = json.loads(line.removeprefix("data: "))
        self.error = event.get("error")
        if self.error is None:
            self.text += "".join(choice["text"] for choice in event["choices"])
            self.first = self.first or time.monotonic()

    def wait_for_text(self, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.text:
            assert self.is_alive() and time.monotonic() < end, (self.error, self._server.errors.read_text())
            time.sleep(0.005)


def gone(process: psutil.Process, seconds: float) -> bool:
    """A zombie is gone: in a container there may be no init that reaps it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
