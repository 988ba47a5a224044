"""Lease: everything that one running request holds in the cache, in one place, so that giving it back is one call."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from kakera.cache.tree import Checkpoint, Node, Sink


@dataclass(eq=False)
class Lease:
    """`pages[i]` is the device page of positions 64 i .. 64 i + 63.

    `path` are the locked tree nodes of the pages completed so far: the tree owns those. The pages after them belong
    to this request alone, which writes them.
    """

    slot: int
    path: list[Node]
    pages: array[int]
    sent: int = 0  # first entries of `pages` that are in the slot's table where plans are carried out
    restored: Checkpoint | None = None  # pinned until the restoring step is committed
    rolling: Checkpoint | None = None  # the newest one, pinned while the request runs
    reserved: list[Checkpoint] = field(default_factory=list)  # being saved by the plan in flight
    sink: Sink | None = None  # being saved by the plan in flight

    def send(self, count: int) -> tuple[int, tuple[int, ...]]:
        """The table's first `count` entries go out with a plan: how many are there already, and those behind them."""
        known = min(self.sent, count)
        self.sent = max(self.sent, count)
        return known, tuple(self.pages[known:count])

    def move(self, moved: Mapping[int, int]) -> None:
        """Pages have got other ids; the table's entries go out again from the first of them on."""
        changed = [i for i, page in enumerate(self.pages) if page in moved]
        for i in changed:
            self.pages[i] = moved[self.pages[i]]
        self.sent = min([self.sent, *changed])

    @property
    def owned(self) -> array[int]:
        return self.pages[len(self.path) :]

    def pins(self) -> list[Checkpoint]:
        return [record for record in (self.restored, self.rolling) if record is not None]
