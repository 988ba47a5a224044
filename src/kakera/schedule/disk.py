"""DiskWork: when a prefix is read from the disk, and when a conversation is written to it.

Read for a request that waits, if that is quicker than computing. Written when a conversation has paused: its newest
checkpoint and the pages before it, a little a step, so that the streams of others keep their pace. An agent at work
makes a checkpoint of 95 MB a turn; only the last one before a pause is worth a drive's wear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol

from kakera.cache.disk import Catalogue, Export, depth_on_disk
from kakera.cache.prefix import PrefixCache
from kakera.cache.tree import Checkpoint, Node
from kakera.contract.grid import PAGE
from kakera.schedule.admission import Admission
from kakera.schedule.sequence import Sequence

PAUSE_SECONDS = 30.0
LOOK_AHEAD = 8  # waiting requests that are read for
BUSY_BYTES = 2**21  # of pages at once beside others
BUSY_SECONDS = 0.1  # between these: on a card each ends what ran ahead, 1.3 ms of a decode step
IDLE_BYTES = 64 * 2**20
FIRST_BYTES_A_SECOND = 1e9  # of a disk that nothing was read from yet
_WEIGHT = 0.25  # of the newest measurement
QUEUE_SECONDS = 0.005  # between looks at a queue that is full
PATIENCE_SECONDS = 10.0  # for a read, and four times what it should take: a drive that hangs holds nobody
MOST_NOTICED = 4096  # checkpoints that wait for their pause
_SEEN = 64  # nodes below a checkpoint that are looked through for a newer one


class Tier(Catalogue, Protocol):
    """The disk, as the scheduler sees it: `disk/tier.py` behind `run/store/disk.py`."""

    @property
    def room(self) -> int:
        """Bytes that may be written now."""
        ...

    @property
    def busy(self) -> bool:
        """Something is being read."""
        ...

    @property
    def counters(self) -> Mapping[str, float]: ...

    def poll(self) -> list[tuple[int, bool]]:
        """(job, whether all is whole) of reads that have ended."""
        ...

    def hurry(self) -> None:
        """The end is near: the day's bound is not heard any more."""
        ...

    def purge(self) -> int:
        """Forget all records, those that wait to be written, too; returns their bytes on the disk."""
        ...

    def close(self, seconds: float) -> None:
        """Write what waits, for at most so long."""
        ...


class DiskWork:
    """One for a scheduler. `token_seconds`: of prefill as measured, 0 before."""

    def __init__(
        self,
        tier: Tier,
        cache: PrefixCache,
        admission: Admission,
        token_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier, self.cache, self.admission, self.clock = tier, cache, admission, clock
        self._token_seconds = token_seconds
        self._speed = FIRST_BYTES_A_SECOND
        self._begun: dict[int, tuple[float, int, int]] = {}  # when, bytes, tokens
        self._touched: dict[int, tuple[Checkpoint, float]] = {}  # the oldest first
        self._shared: dict[int, Checkpoint] = {}  # used a second time: not of one conversation only
        self._export: Export | None = None
        self._next_at = float("-inf")  # beside others
        cache.on_touch = self._touch

    @property
    def busy(self) -> bool:
        """The engine should ask again soon, even if it has nothing to compute."""
        return self.tier.busy or (self._export is not None and self._room() > 0)

    def _touch(self, record: Checkpoint, restored: bool) -> None:
        self._touched.pop(record.id, None)
        self._touched[record.id] = record, self.clock()
        if restored and record.kind in ("system", "branch"):
            self._shared[record.id] = record
        for noticed in (self._touched, self._shared):
            if len(noticed) > MOST_NOTICED:
                del noticed[next(iter(noticed))]
                self.cache.counters["disk_not_saved: behind"] += 1

    # Reading

    def read(self, waiting: Iterable[Sequence]) -> None:
        """Take in what has come, and begin to read for those that wait."""
        ended = dict(self.tier.poll())
        for job, whole in ended.items():
            self._end(job, whole)
        for sequence in islice((each for each in waiting if not each.paused), LOOK_AHEAD):
            if sequence.fetching and (sequence.fetching not in self._begun or self._is_late(sequence.fetching)):
                sequence.fetching = 0
            if not sequence.asked_disk and sequence.cached and not sequence.wants_echo:
                sequence.asked_disk = True
                sequence.fetching = self._same(sequence) or self._begin(sequence)

    def _same(self, sequence: Sequence) -> int:
        """The import under way of a prefix of this request."""
        live = self.cache.imports.live.items()
        jobs = (job for job, begun in live if sequence.keys[: begun.depth] == begun.keys)
        return next((job for job in jobs if not self._is_late(job)), 0)

    def _begin(self, sequence: Sequence) -> int:
        cache, sizes = self.cache, self.cache.sizes
        if any(self._is_late(job) for job in self._begun):
            return 0
        depth = depth_on_disk(cache.tree, self.tier, sequence.keys, len(sequence.tokens), sizes.windowed)
        match = self.admission.match(sequence)
        tokens = depth * PAGE - match.position
        if tokens <= 0:
            return 0
        count = (depth - match.kv_position // PAGE) * sizes.page_bytes + sizes.checkpoint_bytes
        if count / self._speed > tokens * self._token_seconds() > 0:
            cache.counters["disk_slower_than_prefill"] += 1
            return 0
        begun = cache.imports.begin(sequence.keys, depth, match.checkpoint)
        if begun is None:
            return 0
        self._begun[begun.job] = self.clock(), count, tokens
        return begun.job

    def _is_late(self, job: int) -> bool:
        """Whoever waits for it goes on without; what comes later is kept."""
        began, count, _ = self._begun[job]
        return self.clock() - began > PATIENCE_SECONDS + 4 * count / self._speed

    def _end(self, job: int, whole: bool) -> None:
        began, count, tokens = self._begun.pop(job)
        if self.cache.imports.end(job, whole):
            self.cache.gains += 1
            self.cache.counters["disk_hits"] += 1
            self.cache.counters["disk_hit_tokens"] += tokens
        if whole and (seconds := self.clock() - began) > 0:
            self._speed += _WEIGHT * (count / seconds - self._speed)

    # Writing

    def purge(self) -> int:
        """As Tier.purge. What running requests hold may be written again when they pause."""
        self._export = None  # its first pages are gone
        return self.tier.purge()

    def write(self, idle: bool) -> None:
        """Have a little more of a paused conversation written, if there is one."""
        if not idle and self.clock() < self._next_at:
            return
        if self._export is None:
            self._export = self._paused()
        self._write_some(IDLE_BYTES if idle else BUSY_BYTES)
        self._next_at = self.clock() + BUSY_SECONDS

    def write_all(self, seconds: float) -> Iterator[None]:
        """The newest checkpoint of each conversation, the most recent first, for at most so long. Yields whenever
        actions are to be carried out."""
        self.tier.hurry()
        end = self.clock() + seconds
        records = [record for record, _ in reversed(self._touched.values())]
        records += [self._export.record] if self._export is not None else []
        for record in [*records, *self._shared.values()]:
            wanted = self._is_newest(record) or (record.id in self._shared and self._is_missing(record))
            self._export = Export(record) if wanted else None
            while self._export is not None and self.clock() < end:
                if self._room() == 0:
                    time.sleep(QUEUE_SECONDS)
                self._write_some(IDLE_BYTES)
                yield

    def _write_some(self, most: int) -> None:
        room = self._room()
        if self._export is None or room <= 0:
            return
        pages = max(1, min(most, room) // max(1, self.cache.sizes.page_bytes))
        if (action := self._export.step(self.cache.tree, self.tier, pages)) is not None:
            self.cache.send(action)
        if self._export.done:
            self._export = None

    def _room(self) -> int:
        """Bytes of pages that may be written now, so that sink and checkpoint find room behind them."""
        sizes = self.cache.sizes
        room = self.tier.room - sizes.checkpoint_bytes - sizes.sink_bytes
        return room if room >= sizes.page_bytes else 0

    def _paused(self) -> Export | None:
        """What several conversations begin with, else the one that has paused the longest, if it is not on the disk."""
        now = self.clock()
        while self._shared:
            record = self._shared.pop(next(iter(self._shared)))
            if self._is_missing(record):
                return Export(record)
        for number, (record, at) in list(self._touched.items()):
            if now - at < PAUSE_SECONDS:
                return None
            del self._touched[number]
            if _in_use(record):
                self._touched[number] = record, now  # its pause has not begun
            elif self._is_newest(record):
                return Export(record)
        return None

    def _is_newest(self, record: Checkpoint) -> bool:
        """Published, in nobody's use, not on the disk, and no conversation goes on behind it."""
        if record.node is None or record.kind == "grid" or _in_use(record):
            return False
        return self._is_missing(record) and not _goes_on(record.node)

    def _is_missing(self, record: Checkpoint) -> bool:
        return record.node is not None and not self.tier.has("checkpoint", record.node.key.hash)


def _in_use(record: Checkpoint) -> bool:
    return record.pins > 0 or (record.node is not None and record.node.users > 0)


def _goes_on(node: Node) -> bool:
    """A checkpoint stands below: that one is newer."""
    below = list(node.children.values())
    for each in below:
        if each.checkpoint is not None:
            return True
        if len(below) < _SEEN:
            below.extend(each.children.values())
    return False
