"""HostBudget: one number of host bytes shared by checkpoints, sinks and demoted pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kakera.plan.plan import Plan
from kakera.plan.store_sizes import StoreSizes

Tier = Literal["checkpoint", "sink", "page"]


@dataclass(frozen=True)
class CacheSizes:
    """What the cache may hand out. `pages` are device pages; the rest are bytes (a record's size, all ranks alike)."""

    pages: int
    host_bytes: int
    checkpoint_bytes: int
    sink_bytes: int
    page_bytes: int
    windowed: bool  # pages are lossy: a hit needs the 16-bit sink too

    @staticmethod
    def of(plan: Plan) -> CacheSizes:
        """To the byte on a CPU, in whole blocks of a GPU's store."""
        store = StoreSizes.of_plan(plan)
        block = store.block
        return CacheSizes(
            pages=plan.pages,
            host_bytes=store.blocks * block,
            checkpoint_bytes=store.checkpoint * block,
            sink_bytes=store.sink * block,
            page_bytes=store.page * block,
            windowed=plan.kv.windowed,
        )

    @property
    def can_save(self) -> bool:
        """False if host memory can not hold even one checkpoint: then nothing is ever restored."""
        return self.checkpoint_bytes + (self.sink_bytes if self.windowed else 0) <= self.host_bytes


class HostBudget:
    """Counts the records of each tier and the bytes that they take together."""

    def __init__(self, sizes: CacheSizes) -> None:
        self.limit = sizes.host_bytes
        self.used = 0
        self.bytes: dict[Tier, int] = {
            "checkpoint": sizes.checkpoint_bytes,
            "sink": sizes.sink_bytes,
            "page": sizes.page_bytes,
        }
        self.counts: dict[Tier, int] = {"checkpoint": 0, "sink": 0, "page": 0}

    def fits(self, *tiers: Tier) -> bool:
        """True if one record of each of these tiers can be added."""
        return self.used + sum(self.bytes[tier] for tier in tiers) <= self.limit

    def by_tier(self) -> dict[str, int]:
        """Bytes in use, tier by tier."""
        return {tier: count * self.bytes[tier] for tier, count in self.counts.items()}

    def take(self, tier: Tier) -> None:
        self.counts[tier] += 1
        self.used += self.bytes[tier]

    def give(self, tier: Tier) -> None:
        self.counts[tier] -= 1
        self.used -= self.bytes[tier]
