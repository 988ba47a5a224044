"""DiskRecords: records of the host store to the disk tier and back. What the scheduler sees of the disk, and what the
runner carries its actions out with. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping

from kakera.cache.host import Tier
from kakera.contract.step import ReadRecords, WriteRecords
from kakera.disk.record import Kind
from kakera.disk.tier import DiskTier, Draft, Want
from kakera.run.store.host import Store

KINDS = {"page": Kind.PAGE, "checkpoint": Kind.CHECKPOINT, "sink": Kind.SINK}


class DiskRecords:
    def __init__(self, store: Store, tier: DiskTier) -> None:
        self.store, self.tier = store, tier

    # For the scheduler

    @property
    def room(self) -> int:
        return self.tier.room

    @property
    def busy(self) -> bool:
        return self.tier.reading

    @property
    def counters(self) -> Mapping[str, float]:
        return self.tier.counted()

    def has(self, kind: Tier, key: bytes) -> bool:
        return self.tier.has(KINDS[kind], key)

    def poll(self) -> list[tuple[int, bool]]:
        return [(done.job, done.whole) for done in self.tier.poll()]

    def hurry(self) -> None:
        self.tier.hurry()

    def purge(self) -> int:
        return self.tier.purge()

    def close(self, seconds: float) -> None:
        self.tier.close(seconds)

    # For the runner

    def carry_out(self, action: WriteRecords | ReadRecords) -> None:
        if isinstance(action, WriteRecords):
            self._write(action)
        else:
            self._read(action)

    def _write(self, action: WriteRecords) -> None:
        for record, parts in zip(action.records, self.store.copies(action.records), strict=True):
            kind = KINDS[record.kind]
            self.tier.write(Draft(kind, record.key, record.parent, record.tokens, record.position, parts))

    def _read(self, action: ReadRecords) -> None:
        places = zip(action.records, self.store.places(action.records), strict=True)
        wants = [Want(KINDS[r.kind], r.key, r.tokens, r.position, parts) for r, parts in places]
        self.tier.read(action.job, wants)
