"""CardWatch: looks at the card's free memory between steps, and says what to give back and what to take again.

The decisions are `schedule/lending.py`'s; the memory is that of `kv/pool.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kakera.contract.grid import PAGE
from kakera.run.interface import Runner
from kakera.schedule.lending import LendingRule, Reading
from kakera.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5  # between looks: one is a call of the driver, some 20 us


class CardWatch:
    """`free`: bytes of the card that nobody has, beyond what this engine may still take. `hold`: see PagePool.hold.
    Both are called between steps only."""

    def __init__(
        self,
        rule: LendingRule,
        free: Callable[[], int],
        hold: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._rule, self._free, self._hold, self._clock = rule, free, hold, clock
        self._now = rule.whole
        self._looked_at = float("-inf")

    def follow(self, scheduler: Scheduler, runner: Runner) -> None:
        """Look, if it is time; give back pages that running requests do not hold, or have some again. Said in the log
        once a change."""
        at = self._clock()
        if at - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = at
        reading, before = Reading(self._free(), at), self._now.pages
        self._now = wanted = self._rule.decide(self._now, reading)
        if wanted.pages == before:
            return
        pages = wanted.pages if wanted.pages < before else max(before, self._hold(wanted.pages))
        there, plan = scheduler.resize(pages)  # more than wanted if running requests hold them
        runner.execute(plan)
        if there < before:
            self._hold(there)
        self._now = self._rule.using(there)
        scheduler.admit_up_to(self._now.slots)
        if there != before:
            self._say(before, reading.free)

    def _say(self, before: int, free: int) -> None:
        pool, there = self._rule.pool, self._now.pages
        lent = pool.freed(there)
        if there < before:
            log.warning(
                "others need the card's memory (%.2f GB were free, %.2f are to be): %d of %d KV pages, %.2f GB, are "
                "given back until it is free again; requests under %d tokens run, longer ones wait",
                *(free / 1e9, self._rule.margin / 1e9, pool.pages - there, pool.pages, lent / 1e9, there * PAGE),
            )
        elif there == pool.pages:
            log.warning("the card's memory is free again: all %d KV pages are in use again", pool.pages)
        else:
            log.warning(
                "some of the card's memory is free again: %d of %d KV pages, %.2f GB, are still given back",
                *(pool.pages - there, pool.pages, lent / 1e9),
            )
