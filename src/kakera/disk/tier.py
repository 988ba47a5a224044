"""DiskTier: the log behind threads. What the engine asks of it takes no time and never fails: a bad disk is a miss.

One thread writes behind, a few read beside the computation. The engine learns of reads that have ended by `poll`. What
waits to be written is bounded in bytes; the day's writes are bounded too, because drives wear.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kakera.disk.log import DiskLog, NoRoom
from kakera.disk.record import Head, Kind, sum_of

log = logging.getLogger(__name__)
QUEUE_BYTES = 256 * 2**20
READERS = 4
DAY = 86400.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Draft:
    """A record to write. `parts` belong to the tier from now on."""

    kind: Kind
    key: bytes
    parent: bytes
    tokens: bytes
    position: int
    parts: tuple[memoryview, ...]

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True)
class Want:
    """A record to read into `parts`, if it has these `tokens` and this `position`."""

    kind: Kind
    key: bytes
    tokens: bytes
    position: int
    parts: tuple[memoryview, ...]


@dataclass(frozen=True)
class Purge:
    """All that was written or given before it goes."""


@dataclass(frozen=True)
class Done:
    """A read has ended: all parts are filled, or some hold anything."""

    job: int
    whole: bool


class DiskTier:
    """`write`, `read`, `poll`, `has` by one thread, the engine's. Nothing raises."""

    def __init__(
        self,
        disk: DiskLog,
        daily_bytes: int,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log, self.counters, self._clock = disk, Counter[str](), clock
        self._most, self._daily, self._written_at, self._bucket = queue_bytes, daily_bytes, clock(), 0.0
        self._queue: queue.SimpleQueue[Draft | Purge | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._queued = 0
        self._purges = 0  # in the queue
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="disk-read")
        self._reads: dict[int, list[Future[bool]]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._write_behind, name="disk-write", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """Bytes that may be given to `write` now: the queue's rest and the day's."""
        with self._mutex:
            return max(0, min(self._most - self._queued, self._daily - int(self._leaked())))

    @property
    def reading(self) -> bool:
        return bool(self._reads)

    def counted(self) -> dict[str, float]:
        """Counters, and what is there now."""
        with self._mutex:
            there = {
                "disk_bytes": self.log.bytes,
                "disk_records": len(self.log),
                "disk_written_bytes": self.log.written,
            }
            return {**self.counters, **there}

    def has(self, kind: Kind, key: bytes) -> bool:
        return self.log.find(kind, key) is not None

    def write(self, draft: Draft) -> None:
        """Later, in this order; a checkpoint only when all before it is on the disk."""
        with self._mutex:
            self._queued += draft.length
            self._bucket = self._leaked() + draft.length
            self._written_at = self._clock()
            self._idle.clear()
        self._queue.put(draft)

    def read(self, job: int, wants: Sequence[Want]) -> None:
        """Fill all parts; `poll` says when. `job`: a number of the caller's."""
        share = -(-len(wants) // (2 * READERS))
        parts = [wants[first : first + share] for first in range(0, len(wants), share)]
        self._reads[job] = [self._pool.submit(self._read, part) for part in parts]

    def poll(self) -> list[Done]:
        """Reads that have ended since the last call."""
        ended = [job for job, futures in self._reads.items() if all(future.done() for future in futures)]
        return [Done(job, all(future.result() for future in self._reads.pop(job))) for job in ended]

    def hurry(self) -> None:
        """From now on the day's bound is not heard."""
        self._daily = 2**62

    def purge(self) -> int:
        """Nothing is found from now on; the files go behind this. Returns their bytes."""
        with self._mutex:
            self._purges += 1
            self._idle.clear()
        self._queue.put(Purge())
        return self.log.hide()

    def settle(self, seconds: float) -> bool:
        """Wait until all that was given is on the disk; False if it was not within that time."""
        return self._idle.wait(seconds)

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits, for at most so long, and let another process write."""
        self._queue.put(None)
        self._thread.join(seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leaked(self) -> float:
        """What the day's budget has not forgotten yet."""
        return max(0.0, self._bucket - (self._clock() - self._written_at) / DAY * self._daily)

    # Threads

    def _read(self, wants: Sequence[Want]) -> bool:
        return all(self._read_one(want) for want in wants)

    def _read_one(self, want: Want) -> bool:
        place = self.log.find(want.kind, want.key)
        try:
            head = None if place is None else self.log.read(place, want.kind, want.key, want.parts)
        except Exception as error:
            self._fail("read", error)
            self.log.forget(want.kind, want.key, place)
            return False
        if head is None or (head.tokens, head.position) != (want.tokens, want.position):
            with self._mutex:
                self.counters["disk_read_failed"] += 1
            return False
        with self._mutex:
            self.counters["disk_read_bytes"] += head.length
        return True

    def _write_behind(self) -> None:
        dirty = False
        while (draft := self._queue.get()) is not None:
            if isinstance(draft, Purge):
                self._purge()
                dirty = False
                continue
            try:
                if self._purges:
                    continue
                if draft.kind is not Kind.PAGE and dirty:
                    self.log.sync()
                dirty = self._write_one(draft) or dirty
                if draft.kind is Kind.CHECKPOINT:
                    self.log.sync()
                    dirty = False
            except Exception as error:
                self._fail("write", error)
            finally:
                with self._mutex:
                    self._queued -= draft.length
                    self._rest()
        try:
            self.log.close()
        except OSError as error:
            self._fail("write", error)

    def _purge(self) -> None:
        try:
            self.log.purge()
        except OSError as error:
            self._fail("remove", error)
        with self._mutex:
            self._purges -= 1
            self._rest()

    def _rest(self) -> None:
        if self._queued == 0 and self._purges == 0:
            self._idle.set()

    def _write_one(self, draft: Draft) -> bool:
        total = sum_of(draft.parts, self.log.path.name)
        head = Head(draft.kind, draft.key, draft.parent, draft.tokens, draft.position, draft.length, total)
        if not self.log.append(head, draft.parts):
            return False
        with self._mutex:
            self.counters[f"disk_written: {draft.kind.name.lower()}"] += 1
        return True

    def _fail(self, what: str, error: Exception) -> None:
        """Counted always, said in the log once for each reason."""
        full = isinstance(error, NoRoom) or (isinstance(error, OSError) and error.errno in FULL)
        reason = "full" if full else type(error).__name__
        with self._mutex:
            self.counters["disk_read_failed" if what == "read" else f"disk_not_saved: {reason}"] += 1
            said = (what, reason) in self._warned
            self._warned.add((what, reason))
        if not said:
            log.warning("the disk cache could not %s: %s (requests go on without it)", what, error)
