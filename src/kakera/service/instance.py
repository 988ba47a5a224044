"""One server a card and a port: files that are locked as long as their holder lives, and say who that is.

The kernel drops a lock with its process, SIGKILL included, so no file is ever stale. Who holds it is written into it; a
record that is still there when the lock is free belongs to a server that had no orderly end.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from kakera.errors import UsageError


@dataclass(frozen=True)
class Holder:
    """`engine` is the engine's process id and `engine_started` its start (seconds since the epoch), once it has one."""

    pid: int
    address: str
    model: str
    engine: int | None = None
    engine_started: float = 0.0

    def __str__(self) -> str:
        return f"pid {self.pid}, which serves {self.model} on {self.address}"


class Claim:
    """Locks held by this process until `close` or its end. `left`: holders whose servers had no orderly end."""

    def __init__(self, holder: Holder, descriptors: list[int], left: tuple[Holder, ...]):
        self.left = left
        self._holder = holder
        self._descriptors = descriptors
        self._write(holder)

    def note_engine(self, pid: int) -> None:
        """For the next server: whose memory to wait for if this one is killed."""
        self._write(replace(self._holder, engine=pid, engine_started=psutil.Process(pid).create_time()))

    def close(self, *, orderly: bool) -> None:
        """Give the locks back. After an orderly end nothing is left to wait for."""
        if orderly:
            for descriptor in self._descriptors:
                os.truncate(descriptor, 0)
        _close(self._descriptors)

    def _write(self, holder: Holder) -> None:
        data = json.dumps(asdict(holder)).encode()
        for descriptor in self._descriptors:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, data, 0)


def resources(cards: int, port: int | None, visible: str | None) -> tuple[str, ...]:
    """Names of what a server needs for itself: its port, and its cards, counted as CUDA counts the `visible` ones. A
    batch has no port.

    A CPU is shared by whoever plans on it, as memory in use is counted by every plan.
    """
    names = visible.split(",")[:cards] if visible else [str(index) for index in range(cards)]
    return (*(f"port {port}" for _ in (port,) if port is not None), *(f"GPU {name.strip()}" for name in names))


def claim(names: Iterable[str], holder: Holder, directory: Path) -> Claim:
    """Lock every name or none. Raises UsageError naming the holder, OSError if `directory` can not be written."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptors: list[int] = []
    left: list[Holder] = []
    for name in names:
        descriptor = os.open(_path(directory, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        descriptors.append(descriptor)
        found = _read(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _close(descriptors)
            raise UsageError(_refusal(name, found)) from None
        if found and found not in left:
            left.append(found)
    return Claim(holder, descriptors, tuple(left))


def _path(directory: Path, name: str) -> Path:
    """With the host's name, as a home directory may be shared by several machines."""
    return directory / f"{socket.gethostname()}-{name.lower().replace(' ', '-').replace('/', '-')}.lock"


def _read(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # empty: an orderly end, or a holder of this instant
        return None


def _refusal(name: str, found: Holder | None) -> str:
    way = "try another --port" if name.startswith("port") else "choose other cards with CUDA_VISIBLE_DEVICES"
    who = str(found) if found else "a server that is just starting"
    stop = f"Stop it (kill {found.pid})" if found else "Wait for it"
    return f"{name} is held by {who}: is kakera running already? {stop}, or {way}"


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
