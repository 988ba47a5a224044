"""What must hold after a soak: nothing leaked, nothing broke, the model still says the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kakera.bench.figure import Figure

FILES_SLACK = 4  # open files of a process: a log rotation, an eventfd of a thread pool's growth
MEMORY_SLACK = 0.10  # of a process's resident memory: fragmentation of the allocator
REMEMBERED = 16_000_000  # bytes: the server keeps the ids and the text of the last two million tokens that it was sent
KEPT_FAULTS = 10


@dataclass(frozen=True)
class ProcessReading:
    name: str
    files: int  # open file descriptors
    resident: int  # bytes


@dataclass(frozen=True)
class Snapshot:
    """An idle server. `engine` as GET /v1/kakera/status has it; no `processes` if the server runs elsewhere."""

    engine: dict[str, Any]
    healthy: bool
    failed_requests: int  # that the engine ended with an error, since its start
    processes: tuple[ProcessReading, ...] = ()


@dataclass
class Tally:
    """What the clients saw, in bounded memory: the first faults in words, the others only counted."""

    sent: dict[str, int] = field(default_factory=dict)  # by kind
    left: int = 0  # requests that the client gave up
    refused: int = 0  # 4xx that were expected
    queue_full: int = 0  # 429
    server_errors: int = 0  # 5xx, broken connections, streams with an error or without an end
    unexpected: int = 0  # 4xx for a sound request, anything else for a bad one
    canaries: int = 0
    canaries_changed: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(self.sent.values())

    def count(self, kind: str) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + 1

    def note(self, fault: str) -> None:
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(fault)

    def count_status(self, status: int, bad: bool) -> bool:
        """Sort one answer by status; whether it was the expected one."""
        if status >= 500:
            self.server_errors += 1
            return False
        if status == 429:
            self.queue_full += 1
            return True
        expected = bad == (status >= 400)
        self.refused += expected and bad
        self.unexpected += not expected
        return expected


@dataclass
class Peak:
    """The most that was seen while traffic ran."""

    running: int = 0
    waiting: int = 0
    pages_held: int = 0  # by requests
    pages_filled: int = 0  # by requests or a cached prefix

    def see(self, engine: dict[str, Any]) -> None:
        held = engine["pages_total"] - engine.get("pages_lent", 0) - engine["pages_free"]
        self.running = max(self.running, engine["running"])
        self.waiting = max(self.waiting, engine["waiting"])
        self.pages_held = max(self.pages_held, held)
        self.pages_filled = max(self.pages_filled, held + engine["pages_cached"])


def idle(engine: dict[str, Any]) -> bool:
    """Whether nothing runs, waits or holds anything but cached prefixes."""
    return not (_busy(engine) or _held(engine, "pages") or _held(engine, "slots"))


def judge(before: Snapshot, after: Snapshot, tally: Tally, tracebacks: int, warm: bool = True) -> list[Figure]:
    """The checks as figures with bars. `before` is the idle server after its warm-up, `after` the one at the end.

    Memory is judged only if `before` was `warm`: in its first minute a sound process grows by what it loads late.
    """
    engine = after.engine

    def none(name: str, value: float, note: str = "") -> Figure:
        return Figure(name, value, "<=", 0, ".0f", note=note)

    return [
        none("requests still running or waiting", _busy(engine)),
        none("pages nobody can have", _held(engine, "pages"), f"of {engine['pages_total']}"),
        none("cached pages that are not free", max(0, engine["pages_cached"] - engine["pages_free"])),
        none("slots nobody can have", _held(engine, "slots"), f"of {engine['slots_total']}"),
        Figure(
            "host cache in use", engine["host_bytes_used"] / 1e6, "<=", engine["host_bytes_total"] / 1e6, ".1f", " MB"
        ),
        *_processes(before, after, warm),
        none("canary answers that differ", tally.canaries_changed, f"of {tally.canaries}"),
        Figure("canary answers", tally.canaries, ">=", 3, ".0f", note="before, during and after"),
        none("5xx, broken connections and streams", tally.server_errors),
        none("answers of an unexpected status", tally.unexpected),
        none("requests that the engine failed", after.failed_requests - before.failed_requests),
        none("tracebacks in the server's log", tracebacks),
        none("engine dead or hanging", not after.healthy),
    ]


def _busy(engine: dict[str, Any]) -> int:
    return int(engine["running"] + engine["waiting"])


def _held(engine: dict[str, Any], what: str) -> int:
    return int(engine[f"{what}_total"] - engine[f"{what}_free"])


def _processes(before: Snapshot, after: Snapshot, warm: bool) -> list[Figure]:
    """Growth of each process since `before`. Beside it, each may grow by its own cache."""
    grown_host = max(0, after.engine["host_bytes_used"] - before.engine["host_bytes_used"])
    caches = {"server": REMEMBERED, "engine": grown_host}
    now = {process.name: process for process in after.processes}
    figures = []
    for then in before.processes:
        last = now.get(then.name)
        files = last.files - then.files if last else float("nan")
        grown = (last.resident - then.resident) / 1e6 if last else float("nan")
        allowed = (MEMORY_SLACK * then.resident + caches.get(then.name, 0)) / 1e6
        figures.append(
            Figure(f"{then.name}: open files, grown by", files, "<=", FILES_SLACK, ".0f", note=f"from {then.files}")
        )
        if warm:
            name, note = f"{then.name}: resident, grown by", f"from {then.resident / 1e6:.0f} MB"
            figures.append(Figure(name, grown, "<=", allowed, ".1f", " MB", note))
    return figures
