"""Followers: the processes of all ranks but the first, as rank 0 starts, watches and ends them. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import combinations

from kakera.errors import KakeraError, RanksApart
from kakera.run.ranks.follower import Build
from kakera.run.ranks.meeting import memory_bytes
from kakera.run.ranks.memory import shared_memory
from kakera.run.ranks.messages import Built, CanNotBuild, decode_from_rank
from kakera.run.ranks.seat import Seat
from kakera.run.ranks.wire import BUILD, IDLE, STEP, TICK, Patience, Peer, Wire

log = logging.getLogger(__name__)
LAST_WORDS_SECONDS = 1.0  # for the step that a dead rank has left to say so itself
END_SECONDS = 2.0  # for a rank whose wire is cut to end by itself


def end_process(why: str) -> None:
    """What the death of a rank means for an engine's process: whoever waits for it hears of its end."""
    log.error("the engine ends: %s", why)
    time.sleep(LAST_WORDS_SECONDS)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(70)


class Followers:
    """Ranks 1 and on. To be made by the main thread: they die with the thread that started them."""

    def __init__(self, build: Build, ranks: int, on_death: Callable[[str], None] = end_process, segment_bytes: int = 0):
        """Start them; each builds what it needs while rank 0 builds its own. Raises KakeraError.

        `segment_bytes`: of memory that all ranks share for their cards, see `Meeting.segment`.
        `on_death`: called once by a thread when one has ended that was not told to, behind `meeting.abort`; not before
        `wait_built`, which then says why.
        """
        self._on_death, self._built, self._closing = on_death, False, False
        self._processes: list[subprocess.Popen[bytes]] = []
        self.wires: list[Wire] = []
        memory = shared_memory(memory_bytes(ranks))
        segment = shared_memory(segment_bytes) if segment_bytes else None
        shared = [memory] if segment is None else [memory, segment]
        ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
        for one, other in combinations(range(ranks), 2):
            ends[one][other], ends[other][one] = socket.socketpair()
        try:
            for rank in range(1, ranks):
                self._start(rank, [*shared, *(end.fileno() for end in ends[rank].values())])
            processes = (os.getpid(), *(process.pid for process in self._processes))
            for rank, wire in enumerate(self.wires, 1):
                seat = Seat(rank, processes, memory, {to: end.fileno() for to, end in ends[rank].items()}, segment)
                wire.send(pickle.dumps((seat, build)))
        except BaseException:
            self.close()
            for descriptor in shared:
                os.close(descriptor)
            raise
        finally:
            for end in (end for mine in ends[1:] for end in mine.values()):
                end.close()
        self.meeting = Seat(0, processes, memory, {to: end.detach() for to, end in ends[0].items()}, segment).meeting()
        os.close(memory)
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def wait_built(self) -> None:
        """Until all are warm: then they come to the first meeting. Raises what one says that can not be."""
        for wire in self.wires:
            answer = decode_from_rank(wire.receive(BUILD))
            if isinstance(answer, CanNotBuild):
                error = KakeraError(answer.message)
                error.exit_status = answer.exit_status
                raise error
            assert isinstance(answer, Built)
        self.meeting.terms = STEP
        self._built = True

    def close(self) -> None:
        """Cut their wires, and kill whoever does not end by that. Idempotent."""
        self._closing = True
        for wire in self.wires:
            wire.hang_up()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for wire in self.wires:
            wire.close()

    def _start(self, rank: int, descriptors: list[int]) -> None:
        mine, its = socket.socketpair()
        command = [sys.executable, "-P", "-m", "kakera.run.ranks.follower", str(its.fileno()), str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment, pass_fds=(its.fileno(), *descriptors)
            )
        except OSError as error:
            mine.close()
            raise KakeraError(f"rank {rank} can not be started: {error}") from None
        finally:
            its.close()
        self._processes.append(process)
        self.wires.append(Wire(mine, Peer(rank, process.pid)))

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """A step notices at once that a rank is gone, and one that is idle here."""
        peer = Peer(rank, process.pid)
        patience, why = Patience(peer, IDLE), ""
        while (status := process.poll()) is None and not why:
            time.sleep(IDLE.ticks * TICK)
            try:
                patience.look()
            except RanksApart as error:
                why = str(error)
        if self._closing:
            return
        how = f"by {signal.Signals(-status).name}" if status and status < 0 else f"with exit status {status}"
        why = why or f"{peer} ended {how}"
        self.meeting.abort(why)
        if self._built:
            self._on_death(why)
