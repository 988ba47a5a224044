"""Servers on this machine and a router before them, for as long as a `with` block runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kakera.bench.server import ServerProcess, free_port
from kakera.errors import KakeraError, UsageError

ROUTER_SECONDS = 90
LOGGED = re.compile(r"kakera\.requests: (\{.*\})$", re.MULTILINE)


@dataclass(frozen=True)
class Router:
    """How a router is started, told of one more server, and read.

    `command`: {python} has it installed, {port} and {spare} are free ports, {urls} is all servers, a word each. `add`:
    path and body of the POST that adds {url}. `credit`: what its log says of the tokens that a request is credited.
    """

    command: str
    add: tuple[str, str] | None = None
    credit: str = ""


ROUTERS = {
    "vllm-router": Router(
        "{python} -m vllm_router.launch_router --host 127.0.0.1 --port {port} --prometheus-port {spare} "
        "--log-level debug --health-check-interval-secs 2 --policy kv_aware "
        "--kv-aware-session-affinity-ttl-secs 3600 --worker-urls {urls}",
        ("/add_worker?url={url}", ""),
        r"KV prefix decision .*credited_prefix_tokens=(\d+)",
    ),
    "smg": Router(
        "{python} -m smg.launch_router --host 127.0.0.1 --port {port} --prometheus-port {spare} "
        "--health-check-interval-secs 2 --policy cache_aware --sticky-sessions --routing-key-headers x-session-id "
        "--worker-urls {urls}",
        ("/workers", '{{"url": "{url}"}}'),
    ),
}


def router_named(name: str, python: str, options: str) -> Router:
    """One that is known, with options of its own; or any, by its command. Raises UsageError."""
    known = ROUTERS.get(name)
    if known is None and "{urls}" not in name:
        names = ", ".join(ROUTERS)
        raise UsageError(f"--router {name}: choose {names}, or give a command with {{port}} and {{urls}} in it")
    known = known or Router(name)
    command = known.command.replace("{python}", shlex.quote(python))
    before, urls, after = command.partition("{urls}")
    return Router(f"{before.rstrip()} {urls}{after} {options}".strip(), known.add, known.credit)


def words_of(command: str, port: int, spare: int, urls: Sequence[str]) -> list[str]:
    words: list[str] = []
    for word in shlex.split(command):
        words += urls if word == "{urls}" else [word.format(port=port, spare=spare)]
    return words


class Worker(ServerProcess):
    """A server that tells what is cached, on ports that one in its place takes over."""

    def __init__(self, model: str, options: Sequence[str], name: str, before: Worker | None = None):
        self.name = name
        self.told: int = before.told if before else free_port_pair()
        told = ["--kv-events", f"tcp://127.0.0.1:{self.told}", "--served-name", "model"]
        super().__init__(model, [*options, *told], port=before.port if before else None)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait(10)

    def running(self) -> int:
        """Requests that it has now."""
        return int(json.loads(self.get("/v1/loads"))["aggregate"]["total_reqs"])

    def answered(self) -> list[str]:
        """Ids of the requests that it has ended, as its log has them."""
        return [json.loads(line)["id"] for line in LOGGED.findall(self.log()) if '"id"' in line]


class Fleet:
    """`size` servers, and a router if there is one; `url` is what clients talk to."""

    def __init__(self, model: str, options: Sequence[str], size: int, router: Router | None):
        self._model, self._options, self._router = model, options, router
        self._stack = contextlib.ExitStack()
        self.workers = [Worker(model, options, f"server {number}") for number in range(size)]
        self.live = list(self.workers)
        self.url = ""

    def __enter__(self) -> Fleet:
        with contextlib.ExitStack() as stack:
            for worker in self.workers:
                stack.enter_context(worker)
            self.url = stack.enter_context(self._routed()) if self._router else self.workers[0].url
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def home(self) -> dict[str, str]:
        """Which server has answered, by the answer's id."""
        return {id: worker.name for worker in self.workers for id in worker.answered()}

    def lose(self, worker: Worker) -> None:
        self.live.remove(worker)

    def start(self, name: str, before: Worker | None = None) -> Worker:
        """One more server, or one in the place of one that has ended."""
        worker = Worker(self._model, self._options, name, before)
        self._stack.enter_context(worker)
        self.workers.append(worker)
        self.live.append(worker)
        return worker

    def add(self, worker: Worker) -> None:
        """Tell the router of it. Raises KakeraError."""
        assert self._router and self._router.add
        path, body = (part.format(url=worker.url) for part in self._router.add)
        request = urllib.request.Request(self.url + path, body.encode(), {"content-type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=60).read()
        except urllib.error.HTTPError as error:
            raise KakeraError(f"the router refused {worker.url}: {error.code} {error.read().decode()}") from None

    def credits(self) -> list[int]:
        """Tokens that the router says it has credited, of each decision so far; none if it does not say."""
        if not self._router or not self._router.credit:
            return []
        return [int(found) for found in re.findall(self._router.credit, self._said())]

    @contextlib.contextmanager
    def _routed(self) -> Iterator[str]:
        """The router's address once it answers. Raises KakeraError."""
        assert self._router
        port = free_port()
        words = words_of(self._router.command, port, free_port(), [worker.url for worker in self.workers])
        with tempfile.NamedTemporaryFile("w+b", prefix="kakera-router-", suffix=".log") as self._log:
            try:
                process = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT)
            except OSError as error:
                raise KakeraError(f"{words[0]} could not be started: {error.strerror}") from None
            try:
                end = time.monotonic() + ROUTER_SECONDS
                while not _answers(url := f"http://127.0.0.1:{port}"):
                    if process.poll() is not None or time.monotonic() > end:
                        raise KakeraError("the router did not start:\n" + "\n".join(self._said().splitlines()[-15:]))
                    time.sleep(0.1)
                yield url
            finally:
                _stop(process)

    def _said(self) -> str:
        """The router's log, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", Path(self._log.name).read_text(errors="replace"))


def _answers(url: str) -> bool:
    """It takes a chat: its /health may be 200 before it has a server."""
    body = {"model": "model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=60).read()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port_pair() -> int:
    """The first of two neighbours."""
    while True:
        first = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", first + 1))
            return first
