"""Residency: what stays on the device and in the host store. Makes room, coldest and least worth first; brings back.

It owns what `PrefixCache` and itself both change: the tree, the pools, the host's budget, the log of actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kakera.cache.actions import ActionLog
from kakera.cache.announced import Announced
from kakera.cache.checkpoints import Checkpoints
from kakera.cache.host import CacheSizes, HostBudget, Tier
from kakera.cache.pages import IdPool
from kakera.cache.tree import Checkpoint, Kind, Node, PageTree, Sink
from kakera.contract.step import DemotePages, Drop, PromotePages


class Residency:
    def __init__(self, sizes: CacheSizes) -> None:
        self.tree = PageTree()
        self.checkpoints = Checkpoints()
        self.device = IdPool(sizes.pages)
        self.host = HostBudget(sizes)
        self.host_ids = IdPool(sizes.host_bytes // max(sizes.page_bytes, 1))
        self.counters: Counter[str] = Counter()
        self.log = ActionLog()
        self.announced: Announced | None = None

    def publish(self, record: Checkpoint, node: Node) -> None:
        """A reserved record is saved, and can be matched at this node's end from now on."""
        node.checkpoint, node.lost_checkpoint = record, False
        node.top.checkpoints_below += 1
        self.checkpoints.publish(record, node)
        if self.announced is not None:
            self.announced.gained(node)

    def place(self, node: Node, page: int | None) -> None:
        """As PageTree.place, of a page that stays."""
        self.tree.place(node, page)
        if self.announced is not None:
            self.announced.moved(node)

    # Room on the device

    def free_device(self, pages: int) -> None:
        while self.device.free < pages:
            self._evict(self.tree.coldest())

    def _evict(self, node: Node) -> None:
        """Demote a page that leads to a checkpoint, if host memory allows; drop it with all below it otherwise."""
        page = node.device
        assert page is not None
        if _leads_somewhere(node) and self.free_host("grid", "page") and _leads_somewhere(node):
            node.host = self.host_ids.take()
            self.host.take("page")
            self.place(node, None)
            self.log.add(DemotePages(((page, node.host),)))
            self.counters["pages_demoted"] += 1
        else:
            self._drop_subtree(node)
            self.counters["pages_evicted"] += 1
        self.device.give(page)

    def promote(self, nodes: Sequence[Node]) -> None:
        pairs: list[tuple[int, int]] = []
        for node in nodes:
            assert node.host is not None
            page = self.device.take()
            self.place(node, page)
            pairs.append((node.host, page))
        if pairs:
            self.log.add(PromotePages(tuple(pairs)))
            self.counters["pages_promoted"] += len(pairs)
        for node in nodes:
            self.drop_host_page(node)

    def _drop_subtree(self, node: Node) -> None:
        """Of a node that no request uses. An import from the disk may stand on a record there: it comes to nothing."""
        below = [node]
        for each in below:
            below.extend(each.children.values())
        for each in reversed(below):
            if each.checkpoint is not None:
                self._detach(each.checkpoint)
            if each.device is not None:
                self.tree.place(each, None)
            self.drop_host_page(each)
            self.tree.remove(each)

    # Room on the host

    def free_host(self, asking: Kind, *tiers: Tier) -> bool:
        while not self.host.fits(*tiers):
            record = self.checkpoints.victim(asking)
            if record is None:
                return False
            self.lose_checkpoint(record)
            self.counters["checkpoints_evicted"] += 1
        return True

    def lose_checkpoint(self, record: Checkpoint) -> None:
        """Drop one that somebody may miss, and remember that it was there."""
        assert record.node is not None
        record.node.lost_checkpoint = True
        self.drop_checkpoint(record)

    def drop_checkpoint(self, record: Checkpoint) -> None:
        """Release a published record, and the host pages that led to nothing else."""
        node = record.node
        assert node is not None and record.pins == 0
        self._detach(record)
        while node.parent is not None and node.device is None and node.users == 0 and not _leads_somewhere(node):
            parent = node.parent
            self.drop_host_page(node)
            self.tree.remove(node)
            node = parent

    def _detach(self, record: Checkpoint) -> None:
        node = record.node
        assert node is not None
        node.checkpoint = None
        if self.announced is not None:
            self.announced.lost(node)
        self.forget(record)
        top = node.top
        top.checkpoints_below -= 1
        if top.checkpoints_below == 0 and top.sink is not None:
            self.drop_sink(top.sink)
            top.sink = None

    def forget(self, record: Checkpoint) -> None:
        self.checkpoints.forget(record)
        self.host.give("checkpoint")
        self.log.add(Drop(checkpoints=(record.id,)))

    def drop_sink(self, sink: Sink) -> None:
        self.host.give("sink")
        self.log.add(Drop(sinks=(sink.id,)))

    def drop_host_page(self, node: Node) -> None:
        if node.host is not None:
            self.give_host_page(node.host)
            node.host = None

    def give_host_page(self, page: int) -> None:
        self.log.add(Drop(host_pages=(page,)))
        self.host_ids.give(page)
        self.host.give("page")


def _leads_somewhere(node: Node) -> bool:
    """A checkpoint stands at this node or below it: host-only nodes exist for no other reason."""
    return node.checkpoint is not None or bool(node.children)
