"""Checkpoint records: their life, how much each is worth, and which one goes when host memory is short.

absent -> reserved (a plan in flight saves it) -> published (matchable, attached to a tree node) -> released.
A published record may be pinned: a request restores it, or decodes past it. What is reserved or pinned is not evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from kakera.cache.tree import Checkpoint, Kind, Node
from kakera.contract.grid import PAGE

# The order in which kinds are kept. Weights one apart are enough: see Checkpoints.victim.
WORTH: dict[Kind, int] = {"system": 5, "branch": 4, "message": 3, "rolling": 2, "rest": 2, "grid": 1}
_MODEST: tuple[Kind, ...] = ("grid", "rest")  # displace nothing that is worth more


class Checkpoints:
    """Registry of all records. Ids are never used twice, so a stale one can be noticed."""

    def __init__(self) -> None:
        self.reserved: dict[int, Checkpoint] = {}
        self.published: dict[int, Checkpoint] = {}
        self._next_id = 0
        self._clock = 0
        self._inflation = 0

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def reserve(self, position: int, kind: Kind) -> Checkpoint:
        record = Checkpoint(self.next_id(), position, kind)
        self.reserved[record.id] = record
        return record

    def publish(self, record: Checkpoint, node: Node) -> None:
        del self.reserved[record.id]
        self.published[record.id] = record
        record.node = node
        self.refresh(record)

    def forget(self, record: Checkpoint) -> None:
        self.reserved.pop(record.id, None)
        self.published.pop(record.id, None)
        record.node = None

    def refresh(self, record: Checkpoint) -> None:
        """Call for the one record that was used; its neighbours on the path earned nothing."""
        self._clock += 1
        record.used_at = self._clock
        record.credit = self._inflation + WORTH[record.kind]

    def victim(self, asking: Kind) -> Checkpoint | None:
        """The published, unpinned record worth least, or None.

        GreedyDual: a record's credit is its kind's worth plus the credit of the last victim at the time of its last
        use. So kinds go in order and the least recently used first within a kind, but no kind is immortal: last
        week's system prompt ages while today's answers come and go. A grid point or a rest never displaces a better
        record.
        """
        loose = (record for record in self.published.values() if record.pins == 0)
        least = min(loose, key=lambda record: (record.credit, record.used_at), default=None)
        if least is None or (asking in _MODEST and least.credit > self._inflation + WORTH[asking]):
            return None
        self._inflation = max(self._inflation, least.credit)
        return least


def least_needed(positions: Sequence[int], end: int, loose: Sequence[bool]) -> int | None:
    """Index of the position to give up so that the rest is dense near `end` and geometric further back.

    Without p[i], a prompt that leaves the path between p[i] and p[i+1] replays from p[i-1]: p[i] - p[i-1] tokens more.
    Prompts are taken to leave with a density of 1 / (distance from the end). The product of the two is least where
    the loss is least. Only indices marked `loose` may go.
    """
    edges = [0, *positions, end]

    def loss(i: int) -> float:
        before, here, after = edges[i : i + 3]
        return (here - before) * log((end - here + PAGE) / (end - after + PAGE))

    return min((i for i in range(len(positions)) if loose[i]), key=loss, default=None)
