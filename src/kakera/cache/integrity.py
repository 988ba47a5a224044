"""check_integrity: the cache's invariants, asserted by counting everything again from the leaves up."""

from __future__ import annotations

from collections import Counter

from kakera.cache.prefix import PrefixCache
from kakera.cache.tree import Node
from kakera.contract.grid import PAGE


def check_integrity(cache: PrefixCache) -> None:
    """Assert every invariant of the room's README; slow, for tests."""
    nodes = list(cache.tree.nodes())
    _check_pages(cache, nodes)
    _check_users(cache, nodes)
    _check_paths(cache, nodes)
    _check_checkpoints(cache, nodes)
    _check_host_bytes(cache, nodes)


def _check_pages(cache: PrefixCache, nodes: list[Node]) -> None:
    """Every device page has exactly one owner: the free list, the tree, or one lease."""
    held = [node.device for node in nodes if node.device is not None]
    held += [page for lease in cache.leases for page in lease.owned]
    assert len(held) == len(set(held)), "a device page has two owners"
    assert set(held) == cache.device.held, "device pages leaked or were freed in use"
    hosted = [node.host for node in nodes if node.host is not None]
    hosted += [page for begun in cache.imports.live.values() for page in begun.pages.values()]
    assert len(hosted) == len(set(hosted)) and set(hosted) == cache.host_ids.held, "host pages do not balance"
    assert cache.tree.unlocked == sum(node.device is not None and node.users == 0 for node in nodes)
    assert cache.tree.size == len(nodes)


def _check_users(cache: PrefixCache, nodes: list[Node]) -> None:
    """Locks are the live requests' paths; a lease's table shows the tree's pages first, then its own."""
    users = Counter(id(node) for lease in cache.leases for node in lease.path)
    assert all(node.users == users.get(id(node), 0) for node in nodes), "locks without users, or users without locks"
    assert set(users) <= {id(node) for node in nodes}, "a request stands on a removed node"
    for lease in cache.leases:
        shared = [node.device for node in lease.path]
        assert lease.pages[: len(shared)].tolist() == shared, "a page table points astray"


def _check_paths(cache: PrefixCache, nodes: list[Node]) -> None:
    on_device = Counter(id(node.parent) for node in nodes if node.device is not None)
    for node in nodes:
        parent = node.parent
        assert parent is not None and parent.children[node.key] is node and node.depth == parent.depth + 1
        assert (node.device is None) != (node.host is None), "a node has exactly one place"
        assert node.device is None or parent.depth == 0 or parent.device is not None, "device pages form a prefix"
        assert node.device_children == on_device.get(id(node), 0)
        assert node.device is not None or node.children or node.checkpoint, "a host page that leads nowhere"
        assert node.users == 0 or node.device is not None, "a page in use is not on the device"


def _check_checkpoints(cache: PrefixCache, nodes: list[Node]) -> None:
    """Published records are attached where they say, pins are live users, and no root child has records but no sink."""
    attached = {node.checkpoint.id: node for node in nodes if node.checkpoint is not None}
    published = cache.checkpoints.published
    assert attached.keys() == published.keys(), "published records and tree nodes differ"
    pins = Counter(record.id for lease in cache.leases for record in lease.pins())
    pins.update(begun.base.id for begun in cache.imports.live.values() if begun.base is not None)
    for number, record in published.items():
        assert record.node is attached[number] and record.position == attached[number].depth * PAGE
        assert record.pins == pins[number], "pins are not the live users"
    below = Counter(id(node.top) for node in attached.values())
    for node in nodes:
        assert node.checkpoints_below == (below.get(id(node), 0) if node.depth == 1 else 0)
        expected = cache.sizes.windowed and node.depth == 1 and id(node) in below
        assert (node.sink is not None) == expected, "sinks exist exactly where checkpoints need them"
    reserved = {record.id for lease in cache.leases for record in lease.reserved}
    reserved |= {begun.record.id for begun in cache.imports.live.values()}
    assert reserved == cache.checkpoints.reserved.keys(), "reserved records leaked"


def _check_host_bytes(cache: PrefixCache, nodes: list[Node]) -> None:
    counts, imports = cache.host.counts, cache.imports.live.values()
    assert counts["page"] == sum(node.host is not None for node in nodes) + sum(len(each.pages) for each in imports)
    assert counts["checkpoint"] == len(cache.checkpoints.published) + len(cache.checkpoints.reserved)
    sinks = sum(node.sink is not None for node in nodes) + sum(lease.sink is not None for lease in cache.leases)
    sinks += sum(begun.sink is not None for begun in imports)
    assert counts["sink"] == sinks
    assert cache.host.used == sum(count * cache.host.bytes[tier] for tier, count in counts.items())
    assert cache.host.used <= cache.host.limit, "host budget exceeded"
