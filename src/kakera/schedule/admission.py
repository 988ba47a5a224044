"""Admission: from the queue to a slot, as one transaction: match, pin, evict, promote, allocate, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from kakera.cache.match import Match
from kakera.cache.prefix import PrefixCache
from kakera.contract.grid import PAGE
from kakera.schedule.limits import Limits
from kakera.schedule.queue import WaitingQueue
from kakera.schedule.running import Running
from kakera.schedule.saves import choose_saves, image_ends
from kakera.schedule.sequence import Sequence

_LOOK_AHEAD = 32  # requests considered in a step: each costs a walk through the tree
_BRANCH_GAIN = 256  # tokens that a further checkpoint must spare the waiting request


class Admission:
    def __init__(self, limits: Limits, cache: PrefixCache, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.cache = cache
        self.clock = clock
        self.slots = limits.slots  # running requests at a time; fewer while others need the card
        self._refused: tuple[int, int] | None = None  # who did not fit, and the cache's gains then

    def admit(self, waiting: WaitingQueue, running: Running) -> Sequence | None:
        """Start requests in the queue's order while slots and pages last; whom they did not last for, if anybody.

        A request that does not fit blocks those behind it, or it might wait for ever; it is matched again only once
        the cache has gained something (0.4 ms for 1,500 shared pages, in every step of those that run). One that waits
        for another's checkpoint, for the disk, for its reader, or for memory that others of the card have, blocks
        nobody.
        """
        able = (each for each in waiting if not (each.paused or each.fetching or self.is_held_back(each)))
        for sequence in islice(able, _LOOK_AHEAD):
            full = running.slots.free == 0 or len(running) >= self.slots
            if full and (sequence.background or not running.background):
                return sequence
            if self._refused == (sequence.arrival, self.cache.gains):
                return sequence
            match = self.match(sequence)
            if self._is_worth_waiting(sequence, match, running):
                continue
            if full or not self._start(sequence, match, running):
                self._refused = sequence.arrival, self.cache.gains
                return sequence
            waiting.admit(sequence)
        return None

    def is_held_back(self, sequence: Sequence) -> bool:
        """It needs more pages than there are while others have some of the card's memory."""
        return self._pages(sequence) > self.cache.device.count

    def _pages(self, sequence: Sequence) -> int:
        """For all known tokens and one more, unless that is more than the whole pool."""
        return min(len(sequence.tokens) // PAGE + 1, self.limits.pages)

    def match(self, sequence: Sequence) -> Match:
        if sequence.wants_echo or not sequence.cached:
            return Match(reason="not used")
        return self.cache.match(sequence.keys, len(sequence.tokens))

    def _start(self, sequence: Sequence, match: Match, running: Running) -> bool:
        """Take a slot and pages.

        One page is left for each running request, or a preempted one comes back too early and is preempted again
        (eight requests of 600 to 1,000 tokens on 40 pages: three preemptions instead of five).
        """
        count = len(sequence.tokens)
        slot = running.slots.take()
        lease = self.cache.acquire(match, self._pages(sequence), slot, headroom=len(running))
        if lease is None:
            running.slots.give(slot)
            return False
        self._count(sequence, match)
        sequence.start(lease, match, self.clock())
        if sequence.cached and self.cache.can_save:
            boundaries = (*sequence.request.boundaries, *image_ends(sequence.request.images))
            sequence.saves = choose_saves(count, match.position, boundaries, match.kv_position, self.limits.grid)
        running.add(sequence)
        return True

    def _is_worth_waiting(self, sequence: Sequence, match: Match, running: Running) -> bool:
        """A running prefill is about to save a checkpoint on this request's path, deeper than what is cached.

        It is ahead on the same tokens, so waiting loses nothing. It ends when that prefill passes the point, or is
        preempted, or fails: the wait is bounded by work that would have to be done anyway. If the two part far behind
        the last save point, the other saves there too: a branch seen before it exists. Nobody waits for one in the
        background, which may stand still.
        """
        if sequence.wants_echo or not (sequence.cached and self.cache.can_save):
            return False
        limit = (len(sequence.tokens) - 1) // PAGE * PAGE
        for other in running.prefilling():
            if not other.cached or (other.background and not sequence.background):
                continue
            shared = min(limit, _shared_tokens(sequence, other))
            best = max((position for position, _ in other.saves if position <= shared), default=match.position)
            if shared - max(best, match.position, other.computed) >= _BRANCH_GAIN:
                other.add_save(shared, "branch")
                best = shared
            if best > match.position:
                return True
        return False

    def _count(self, sequence: Sequence, match: Match) -> None:
        counters = self.cache.counters
        counters["admissions"] += 1
        if sequence.admitted_at is None:
            counters["prompt_tokens"] += sequence.prompt_tokens
            counters["cached_tokens"] += match.position
            counters[f"miss: {match.reason}" if match.reason else "full_hits"] += 1


def _shared_tokens(one: Sequence, other: Sequence) -> int:
    """Tokens of the complete pages that two sequences have in common."""
    pairs = zip(one.keys, other.keys, strict=False)
    pages = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one.keys), len(other.keys)))
    return pages * PAGE
