"""A disk that keeps token prefixes: it is slow, forgets, breaks and has no room, at random. It outlives drivers."""

from __future__ import annotations

import random
from collections import Counter

from fake_runner import FakeRunner, Prefix

from kakera.contract.step import DiskRecord, ReadRecords, WriteRecords

GARBAGE: Prefix = (-1,)


class FakeDisk:
    """As schedule/disk.py wants a tier. `faults`: how often what it does goes wrong."""

    def __init__(self, seed: int, faults: float = 0.1) -> None:
        self.rng, self.faults = random.Random(seed), faults
        self.kept: dict[tuple[str, bytes], Prefix] = {}
        self.counters: Counter[str] = Counter()
        self.hangs = False
        self.runner: FakeRunner | None = None
        self._jobs: dict[int, tuple[DiskRecord, ...]] = {}

    def restart(self, runner: FakeRunner) -> None:
        self.runner = runner
        self._jobs.clear()

    @property
    def room(self) -> int:
        return 0 if self._fails() else 2**30

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def has(self, kind: str, key: bytes) -> bool:
        if (kind, key) in self.kept and self._fails(0.05):
            del self.kept[kind, key]  # its segment has gone
        return (kind, key) in self.kept

    def poll(self) -> list[tuple[int, bool]]:
        ended = [job for job in self._jobs if not self.hangs and self.rng.random() < 0.3]
        return [(job, self._arrive(self._jobs.pop(job))) for job in ended]

    def hurry(self) -> None: ...

    def close(self, seconds: float) -> None: ...

    def carry_out(self, action: WriteRecords | ReadRecords) -> None:
        for record in action.records:
            place = self._place(record)
            if isinstance(action, ReadRecords):
                assert record.id not in place, "read over a record that was not dropped"
                place[record.id] = GARBAGE
                continue
            prefix = place[record.id]
            assert len(prefix) == record.position, "a record is written before it is whole"
            if not self._fails():
                held = self.kept.setdefault((record.kind, record.key), prefix)
                assert held == prefix, "one key, two prefixes"
        if isinstance(action, ReadRecords):
            self._jobs[action.job] = action.records

    def _arrive(self, records: tuple[DiskRecord, ...]) -> bool:
        found = [self.kept.get((record.kind, record.key)) for record in records]
        if None in found or self._fails():
            return False
        for record, prefix in zip(records, found, strict=True):
            assert prefix is not None and len(prefix) == record.position
            self._place(record)[record.id] = prefix
        return True

    def _place(self, record: DiskRecord) -> dict[int, Prefix]:
        assert self.runner is not None
        if record.kind == "page":
            return self.runner.pages if record.on_device else self.runner.host_pages
        return self.runner.checkpoints if record.kind == "checkpoint" else self.runner.sinks

    def _fails(self, share: float = 1.0) -> bool:
        return self.rng.random() < self.faults * share
