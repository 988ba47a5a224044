"""What the tree takes from the disk and gives to it: whole prefixes, each with the checkpoint that makes it a hit.

An import reserves places of the host store, is filled beside the computation, and enters the tree as a whole or not at
all. An export is a walk along a conversation that has paused, a few pages a step; whoever needs its pages meanwhile
takes them, and the walk ends. What is on the disk is asked of a `Catalogue`, and only the disk's owner knows more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kakera.cache.host import Tier
from kakera.cache.keys import PageKey
from kakera.cache.residency import Residency
from kakera.cache.tree import Checkpoint, Node, PageTree, Sink
from kakera.contract.grid import PAGE
from kakera.contract.step import DiskRecord, ReadRecords, WriteRecords


class Catalogue(Protocol):
    def has(self, kind: Tier, key: bytes) -> bool:
        """Whether the disk has such a record. It may be gone when it is read."""
        ...


def depth_on_disk(tree: PageTree, disk: Catalogue, keys: Sequence[PageKey], tokens: int, windowed: bool) -> int:
    """Pages of the longest prefix of a prompt of `tokens` tokens that tree and disk have together, up to a checkpoint
    on the disk; 0 if there is none."""
    limit = (tokens - 1) // PAGE
    path = tree.walk(keys, limit)
    depth = len(path)
    while depth < limit and disk.has("page", keys[depth].hash):
        depth += 1
    if depth == 0 or (windowed and path and path[0].sink is None and not disk.has("sink", keys[0].hash)):
        return 0
    if windowed and not path and not disk.has("sink", keys[0].hash):
        return 0
    return next((d for d in range(depth, 0, -1) if disk.has("checkpoint", keys[d - 1].hash)), 0)


@dataclass(eq=False)
class Import:
    """`pages`: host page ids by the number of their page. `base`: pinned while this is under way, because its host
    pages are what the imported ones stand on."""

    job: int
    keys: Sequence[PageKey]
    record: Checkpoint
    pages: dict[int, int] = field(default_factory=dict)
    sink: Sink | None = None
    base: Checkpoint | None = None

    @property
    def depth(self) -> int:
        return self.record.position // PAGE


class Imports:
    """Those under way, by job."""

    def __init__(self, places: Residency, windowed: bool) -> None:
        self._places, self._windowed = places, windowed
        self.live: dict[int, Import] = {}
        self._jobs = 0

    def begin(self, keys: Sequence[PageKey], depth: int, base: Checkpoint | None) -> Import | None:
        """Reserve host memory for what the tree lacks of the first `depth` pages, the checkpoint there and the sink,
        and have it read. None, and nothing was reserved, if that does not fit."""
        places = self._places
        path = places.tree.walk(keys, depth)
        needs_sink = self._windowed and (not path or path[0].sink is None)
        if base is not None:
            base.pins += 1
        missing = range(len(path), depth)
        tiers: list[Tier] = ["checkpoint"]
        tiers.extend("page" for _ in missing)
        tiers.extend("sink" for _ in range(needs_sink))
        if not places.free_host("message", *tiers) or len(places.tree.walk(keys, depth)) < len(path):
            if base is not None:
                base.pins -= 1
            return None
        for tier in tiers:
            places.host.take(tier)
        self._jobs += 1
        record = places.checkpoints.reserve(depth * PAGE, "message")
        pages = {i: places.host_ids.take() for i in missing}
        sink = Sink(places.checkpoints.next_id()) if needs_sink else None
        begun = self.live[self._jobs] = Import(self._jobs, keys[:depth], record, pages, sink, base)
        places.log.add(ReadRecords(begun.job, tuple(_wanted(begun))))
        return begun

    def end(self, job: int, whole: bool) -> bool:
        """All has been read, or not: into the tree, or away. False if nothing came of it."""
        ended = self.live.pop(job)
        if ended.base is not None:
            ended.base.pins -= 1
        node = self._plant(ended, whole)
        taken = node is not None and node.checkpoint is None
        if taken and node is not None:
            self._places.publish(ended.record, node)
        else:
            self._places.forget(ended.record)
        if ended.sink is not None:
            self._places.drop_sink(ended.sink)
        return taken

    def _plant(self, ended: Import, whole: bool) -> Node | None:
        """The node at its end, if the whole path and a sink are there now. What came for nothing is given back."""
        tree, path = self._places.tree, self._places.tree.walk(ended.keys, ended.depth)
        sink = ended.sink is not None or (path and path[0].sink is not None)
        complete = whole and (sink or not self._windowed)
        complete = complete and all(i in ended.pages for i in range(len(path), ended.depth))
        node = path[-1] if path else tree.root
        for i, page in sorted(ended.pages.items()):
            if complete and i >= len(path):
                node = tree.add(node, ended.keys[i])
                node.host = page
            else:
                self._places.give_host_page(page)
        ended.pages.clear()
        if complete and ended.sink is not None and node.top.sink is None:
            node.top.sink, ended.sink = ended.sink, None
        return node if complete else None


def _wanted(begun: Import) -> list[DiskRecord]:
    keys, end = begun.keys, begun.depth - 1
    records = [_record("page", page, keys, i) for i, page in begun.pages.items()]
    records.append(_record("checkpoint", begun.record.id, keys, end))
    if begun.sink is not None:
        records.append(_record("sink", begun.sink.id, keys, 0))
    return records


def _record(kind: Tier, number: int, keys: Sequence[PageKey], index: int, on_device: bool = False) -> DiskRecord:
    parent = keys[index - 1].hash if index else b""
    key = keys[index]
    return DiskRecord(kind, number, key.hash, parent.ljust(16, b"\0"), key.tokens, (index + 1) * PAGE, on_device)


class Export:
    """A walk from the root to a checkpoint: `step` yields what goes to the disk next, until it is `done`."""

    def __init__(self, record: Checkpoint) -> None:
        self.record = record
        self.done = False
        self._path: list[Node] = []
        node = record.node
        while node is not None and node.depth:
            self._path.append(node)
            node = node.parent
        self._path.reverse()
        self._next = 0

    def step(self, tree: PageTree, disk: Catalogue, pages: int) -> WriteRecords | None:
        """At most so many pages, and when all have gone the sink and the checkpoint. None if nothing is to be written
        now, or, with `done`, any more."""
        keys = [node.key for node in self._path]
        found: list[DiskRecord] = []
        while self._next < len(self._path) and len(found) < pages:
            node = self._path[self._next]
            if not tree.holds(node):
                break
            if not disk.has("page", node.key.hash):
                place, on_device = (node.host, False) if node.device is None else (node.device, True)
                assert place is not None
                found.append(_record("page", place, keys, self._next, on_device))
            self._next += 1
        self.done = self._next == len(self._path) or not tree.holds(self._path[self._next])
        if self._next == len(self._path) and self.record.node is self._path[-1]:
            sink = self._path[0].sink
            if sink is not None and not disk.has("sink", keys[0].hash):
                found.append(_record("sink", sink.id, keys, 0))
            found.append(_record("checkpoint", self.record.id, keys, len(keys) - 1))
        return WriteRecords(tuple(found)) if found else None
