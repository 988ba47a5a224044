"""Wire: messages between two ranks of a model, each a process, with waits that end when the other one does nothing.

How long a sound rank computes before it answers nobody knows: a loaded machine may take a minute for a step. So no
clock is read. Every now and then a wait looks at the process that is waited for: who has died is known at once by the
end of the stream; who is stopped, or sleeps and has used no processor look after look, hangs. A suspended machine has
no looks. No torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
from dataclasses import dataclass

import psutil

from kakera.errors import RanksApart

HEAD = struct.Struct("<I")  # a message's length
TICK = 0.1  # seconds
# It computes or waits for its turn, a page comes from a drive, a debugger holds it
SOUND = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True)
class Terms:
    """Of a wait: a look every so many ticks, and how many looks in a row the rank may have done nothing. `asleep`: to
    sleep is to do nothing."""

    ticks: int
    looks: int
    asleep: bool = True


STEP = Terms(1, 20)  # for what a rank computes
BUILD = Terms(5, 60)  # until it is warm: a driver, or a drive that wakes up, takes its time
IDLE = Terms(5, 4, asleep=False)  # for the next plan, which may come tomorrow


@dataclass(frozen=True)
class Peer:
    """Another rank's process."""

    rank: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def activity(self) -> tuple[str, float]:
        """Its status in psutil's words, and the seconds of processor that it has used, with all its threads."""
        try:
            process = psutil.Process(self.pid)
            times = process.cpu_times()
            return process.status(), times.user + times.system
        except psutil.Error:
            return psutil.STATUS_DEAD, 0.0

    def end(self) -> None:
        """It hangs: it can neither end by itself nor tell anybody that waits for it."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


class Patience:
    """Of one wait for a rank."""

    def __init__(self, peer: Peer, terms: Terms):
        self._peer, self._terms = peer, terms
        self._still = 0  # looks in a row at which it had done nothing
        self._used = -1.0

    def look(self) -> None:
        """Ends the rank when it has done nothing for too long, and raises RanksApart."""
        status, used = self._peer.activity()
        does = status in SOUND or (status == psutil.STATUS_SLEEPING and not self._terms.asleep)
        self._still, self._used = (0 if does or used != self._used else self._still + 1), used
        if self._still >= self._terms.looks:
            self._peer.end()
            seconds = self._terms.looks * self._terms.ticks * TICK
            raise RanksApart(f"{self._peer} did nothing for {seconds:.0f} seconds while it was waited for: {status}")


class Wire:
    """One end of a stream socket between two ranks. One thread sends and receives; `hang_up` is for any thread."""

    def __init__(self, end: socket.socket, peer: Peer):
        end.setblocking(False)
        self._end, self.peer = end, peer

    def send(self, data: bytes) -> None:
        """Raises RanksApart if the other end is gone or takes nothing."""
        left = memoryview(HEAD.pack(len(data)) + data)
        while left:
            self._wait(select.POLLOUT)
            try:
                left = left[self._end.send(left) :]
            except BlockingIOError:  # there is room, and not for so much
                continue
            except OSError:
                raise self._gone() from None

    def receive(self, terms: Terms = STEP) -> bytes:
        """The next message. Raises RanksApart if there will be none."""
        (length,) = HEAD.unpack(self._bytes(HEAD.size, terms))
        return self._bytes(length, STEP)

    def hang_up(self) -> None:
        """Both ends leave whatever they wait in. The other one still gets what was sent before."""
        with contextlib.suppress(OSError):  # it was gone first
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()

    def _bytes(self, count: int, terms: Terms) -> bytes:
        found = bytearray()
        while len(found) < count:
            self._wait(select.POLLIN, terms)
            try:
                piece = self._end.recv(count - len(found))
            except BlockingIOError:
                continue
            except OSError:
                piece = b""
            if not piece:
                raise self._gone()
            found += piece
        return bytes(found)

    def _wait(self, event: int, terms: Terms = STEP) -> None:
        poll, patience = select.poll(), Patience(self.peer, terms)
        poll.register(self._end, event)
        while not poll.poll(terms.ticks * TICK * 1000):
            patience.look()

    def _gone(self) -> RanksApart:
        return RanksApart(f"{self.peer} has ended")
