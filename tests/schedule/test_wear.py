"""What a day of conversations writes to a drive: little more than the rule names, which is the newest checkpoint of a
conversation that pauses, and each page once. The scheduler is real and so is the log; records have the 27B's sizes."""

from __future__ import annotations

import heapq
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from driver import Driver, message_ends, prose
from fake_disk import FakeDisk

from kakera.cache.keys import page_keys
from kakera.contract.grid import PAGE
from kakera.contract.step import DiskRecord, ReadRecords, WriteRecords
from kakera.disk import segment
from kakera.disk.home import bytes_in
from kakera.disk.log import SEGMENT_BYTES, DiskLog
from kakera.disk.record import Head, Kind, padded, sum_of
from kakera.schedule.disk import PAUSE_SECONDS

KINDS = {"page": Kind.PAGE, "checkpoint": Kind.CHECKPOINT, "sink": Kind.SINK}
BYTES = {"page": 557_056, "checkpoint": 95_420_416, "sink": 4_194_304}
NAME = "k" * 32
ZEROS = bytearray(max(BYTES.values()))
PARTS = {kind: [memoryview(ZEROS)[:count]] for kind, count in BYTES.items()}
SUMS = {kind: sum_of(parts, NAME) for kind, parts in PARTS.items()}
SYSTEM = 192
GAPS = (2, 4, 8, 15, 120, 600, 3600)  # seconds: an agent at work, somebody who reads, somebody who is away
WEIGHTS = (6, 6, 4, 2, 1, 1, 1)


class LoggedDisk(FakeDisk):
    """A log on a file system behind the fake disk's prefixes: what is there is what the log has."""

    def __init__(self) -> None:
        super().__init__(0, faults=0.0)
        self.log: DiskLog | None = None  # another one in each life

    def has(self, kind: str, key: bytes) -> bool:
        if self.log.find(KINDS[kind], key) is None:
            self.kept.pop((kind, key), None)
            return False
        return True

    def carry_out(self, action: WriteRecords | ReadRecords) -> None:
        super().carry_out(action)
        if isinstance(action, WriteRecords):
            for record in action.records:
                length, total = BYTES[record.kind], SUMS[record.kind]
                head = Head(
                    KINDS[record.kind], record.key, record.parent, record.tokens, record.position, length, total
                )
                self.log.append(head, PARTS[record.kind])

    def _arrive(self, records: tuple[DiskRecord, ...]) -> bool:
        for record in records:
            place, kind = self.log.find(KINDS[record.kind], record.key), KINDS[record.kind]
            if place is None or self.log.read(place, kind, record.key, PARTS[record.kind]) is None:
                return False
        return super()._arrive(records)


@dataclass
class Rule:
    """What the rule names of what has happened: no bytes of heads, footers or copies, and nothing twice."""

    bytes: int = 0
    _there: set[tuple[str, bytes]] = field(default_factory=set)

    def paused(self, tokens: tuple[int, ...], depth: int) -> None:
        """The newest checkpoint, at `depth` pages, with the pages before it and the sink."""
        keys = page_keys(tokens[: depth * PAGE])
        named = [("page", key.hash) for key in keys] + [("checkpoint", keys[-1].hash), ("sink", keys[0].hash)]
        for kind, key in {*named} - self._there:
            self.bytes += padded(BYTES[kind])
            self._there.add((kind, key))


def live(disk: LoggedDisk, rule: Rule, rng: random.Random, said: list[tuple[int, ...]], turns: int) -> Driver:
    """One server's life: agents that go on with what they have `said`, each with its own pauses, and an orderly end."""
    driver = Driver(pages=400, slots=4, host=60, disk=disk)
    due = [(driver.clock.now + 3.0 * number, number, turns) for number in range(len(said))]
    while due:
        at, number, left = heapq.heappop(due)
        while driver.clock.now < at:
            driver.clock.now = min(at, driver.clock.now + 10.0)
            while driver.step():
                pass
        said[number] += prose(rng.randrange(20, 90), seed=rng.randrange(10**6))
        ends = message_ends(len(said[number]), system=SYSTEM)
        name = driver.submit(said[number], max_tokens=rng.randrange(1, 30), boundaries=ends)
        driver.run()
        depth = len(said[number]) // PAGE
        said[number] += tuple(driver.text[name])
        gap = rng.choices(GAPS, WEIGHTS)[0] if left > 1 else 3600
        if gap > PAUSE_SECONDS:
            rule.paused(said[number], depth)
        if left > 1:
            heapq.heappush(due, (driver.clock.now + gap, number, left - 1))
    rule.paused(prose(SYSTEM), SYSTEM // PAGE)  # what they begin with, at its second use
    driver.stop()
    return driver


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each write to a drive. Those of payloads are not made: an allocated file reads as zeros there."""
    counts: list[int] = []
    pwrite = os.pwrite

    def count(file: int, data: memoryview, offset: int) -> int:
        counts.append(len(data))
        return len(data) if getattr(data, "obj", None) is ZEROS else pwrite(file, data, offset)

    monkeypatch.setattr(segment.os, "pwrite", count)
    monkeypatch.setattr(segment.os, "fdatasync", lambda file: None)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("limit", [16 * 2**30, 5 * 2**28], ids=["room for all", "room for a part"])
def test_a_day_writes_little_more_than_the_rule_names(tmp_path: Path, written: list[int], limit: int) -> None:
    rng, rule, hits = random.Random(7), Rule(), 0.0
    disk, said = LoggedDisk(), [prose(SYSTEM)] * 4
    for _ in range(2):
        disk.log = log = DiskLog(tmp_path, NAME, {}, limit, 2 * SEGMENT_BYTES + SEGMENT_BYTES // 2)
        hits += live(disk, rule, rng, said, turns=10).cache.counters["disk_hits"]
        assert sum(written) >= log.written
        log.close()
        assert bytes_in(tmp_path) <= limit
    print(f"\n{sum(written) / 1e9:.2f} GB written, {rule.bytes / 1e9:.2f} GB by the rule, {hits:.0f} hits")
    assert hits >= 2 and 0.9 * rule.bytes < sum(written) <= 1.3 * rule.bytes
