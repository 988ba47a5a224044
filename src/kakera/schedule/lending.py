"""Which pages and slots are in use on a card that others use too: pure decisions over readings of its free memory.

A game or a browser takes memory that the plan left free. Before the margin is gone the last pages of the pool are given
back; they come back when the memory has been free for a while. What comes back leaves the whole margin free, and
nothing goes before half of it is lost: between the two nothing changes, so a card that is just full does not waver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kakera.plan.page_pool import PoolShape

STEADY_SECONDS = 10.0  # for which there has to be room before pages come back
LEAST_TOKENS = 8192  # of pages that stay whatever others take: short requests go on
STEP = 16  # pages come back all that are left, or no fewer than one in so many: each change is a line in the log


@dataclass(frozen=True)
class Reading:
    """Bytes of the card that are free beyond what this engine's plan still counts on, and when (seconds)."""

    free: int
    at: float


@dataclass(frozen=True)
class InUse:
    """The first `pages` pages, and at most `slots` running requests. `roomy_since`: since when more could be used."""

    pages: int
    slots: int
    roomy_since: float | None = None


@dataclass(frozen=True)
class LendingRule:
    """`pool` and `slots` of the plan; `margin`: bytes of the card that are to stay free; `least`: pages that stay."""

    pool: PoolShape
    slots: int
    margin: int
    least: int

    @property
    def whole(self) -> InUse:
        return self.using(self.pool.pages)

    def using(self, pages: int) -> InUse:
        """Slots in proportion: as many requests share each page as before, so that they do not drive each other out."""
        return InUse(pages, max(1, -(-self.slots * pages // self.pool.pages)))

    def decide(self, now: InUse, reading: Reading) -> InUse:
        """What is to be used from now on. Fewer pages only if that frees memory."""
        pool, freed = self.pool, self.pool.freed(now.pages)
        if reading.free < self.margin // 2:
            missing = self.margin - reading.free
            pages = pool.most_kept(freed + missing, min(self.least, now.pages), now.pages)
            return self.using(pages) if pool.freed(pages) > freed else replace(now, roomy_since=None)
        if now.pages == pool.pages:
            return now
        spare = reading.free - self.margin
        pages = pool.most_kept(max(0, freed - spare), now.pages, pool.pages) if spare >= 0 else now.pages
        if pages < min(pool.pages, now.pages + -(-pool.pages // STEP)):
            return replace(now, roomy_since=None)
        since = reading.at if now.roomy_since is None else now.roomy_since
        return self.using(pages) if reading.at - since >= STEADY_SECONDS else replace(now, roomy_since=since)
