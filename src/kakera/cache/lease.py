"""Lease: everything that one running request holds in the cache, in one place, so that giving it back is one call."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kakera.cache.tree import Checkpoint, Node, Sink


@dataclass(eq=False)
class Lease:
    """`pages[i]` is the device page of positions 64 i .. 64 i + 63.

    `path` are the locked tree nodes of the pages completed so far: the tree owns those. The pages after them belong
    to this request alone, which writes them.
    """

    salt: bytes
    slot: int
    path: list[Node]
    pages: array[int]  # packed: a step's page table is a copy of its first entries, 12 KB at 192K tokens
    restored: Checkpoint | None = None  # pinned until the restoring step is committed
    rolling: Checkpoint | None = None  # the newest one, pinned while the request runs
    reserved: list[Checkpoint] = field(default_factory=list)  # being saved by the plan in flight
    sink: Sink | None = None  # being saved by the plan in flight

    @property
    def owned(self) -> array[int]:
        return self.pages[len(self.path) :]

    def pins(self) -> list[Checkpoint]:
        return [record for record in (self.restored, self.rolling) if record is not None]
