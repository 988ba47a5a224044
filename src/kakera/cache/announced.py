"""Announced: the pages that a router may count on, and what has changed of that since it was last told.

A hybrid model resumes only where a checkpoint is. So a page is announced if and only if a published checkpoint stands
at its end or below it: a prompt that goes on to that checkpoint is a hit over all pages of the path. Announcing pages
as they complete would promise hits that nothing can resume.

Changes are a difference between what was told and what is, taken whenever there is room to tell it: a page that came
and went meanwhile is not mentioned, and nothing is lost by telling late.
"""

from __future__ import annotations

from collections.abc import Iterable

from kakera.cache.keys import is_unsalted
from kakera.cache.tree import Node, PageTree
from kakera.contract.cached import AllRemoved, CacheEvent, Medium, PagesRemoved, PagesStored


class Announced:
    """Hears of every checkpoint that is published or lost and of every page that moves. Prefixes under a salt, and
    those with images, are not announced: routers compare tokens, and would count them for requests of other salts or
    with other images."""

    def __init__(self, tree: PageTree) -> None:
        self._tree = tree
        self._ways: dict[bytes, int] = {}  # by page: its checkpoint and its children that lead to one, counted
        self._told: dict[bytes, Medium] = {}
        self._changed: dict[bytes, Node] = {}
        self._anew = False

    def gained(self, node: Node) -> None:
        """A checkpoint has been published at this node's end."""
        if not is_unsalted(node.top.key) or any(each.key.beside for each in _upwards(node)):
            return
        for each in _upwards(node):
            ways = self._ways.get(each.key.hash, 0)
            self._ways[each.key.hash] = ways + 1
            if ways:
                return
            self._changed[each.key.hash] = each

    def lost(self, node: Node) -> None:
        """The checkpoint at this node's end is gone."""
        if node.key.hash not in self._ways:
            return  # salted, or with images
        for each in _upwards(node):
            self._ways[each.key.hash] -= 1
            if self._ways[each.key.hash]:
                return
            del self._ways[each.key.hash]
            self._changed[each.key.hash] = each

    def moved(self, node: Node) -> None:
        """A page has come to the device or has left it."""
        if node.key.hash in self._ways:
            self._changed[node.key.hash] = node

    def again(self) -> None:
        """Whoever listens may have lost something: the next `take` tells everything."""
        self._anew = True
        self._told.clear()
        self._changed = {node.key.hash: node for node in self._tree.nodes() if node.key.hash in self._ways}

    def take(self) -> list[CacheEvent]:
        """What has changed. Parents are stored before their children, and a page that moves is stored at its new place
        before it is removed from its old one: it is never without an entry."""
        stored: list[Node] = []
        removed: dict[Medium, list[bytes]] = {"GPU": [], "CPU": []}
        for name, node in sorted(self._changed.items(), key=lambda changed: changed[1].depth):
            now, before = (_medium(node) if name in self._ways else None), self._told.get(name)
            if now == before:
                continue
            if before is not None:
                removed[before].append(name)
                del self._told[name]
            if now is not None:
                stored.append(node)
                self._told[name] = now
        self._changed = {}
        events: list[CacheEvent] = [AllRemoved()] if self._anew else []
        self._anew = False
        events.extend(_stored(chain) for chain in _chains(stored))
        events.extend(PagesRemoved(tuple(reversed(names)), medium) for medium, names in removed.items() if names)
        return events


def _upwards(node: Node) -> Iterable[Node]:
    """This node and its ancestors below the root."""
    while node.depth:
        yield node
        assert node.parent is not None
        node = node.parent


def _medium(node: Node) -> Medium:
    return "CPU" if node.device is None else "GPU"


def _chains(nodes: Iterable[Node]) -> list[list[Node]]:
    """Nodes, shallow ones first, as runs down one path in one medium; a run comes behind those that it grows from."""
    chains: list[list[Node]] = []
    ends: dict[tuple[bytes, Medium], list[Node]] = {}
    for node in nodes:
        assert node.parent is not None
        chain = ends.pop((node.parent.key.hash, _medium(node)), None)
        if chain is None:
            chains.append(chain := [])
        chain.append(node)
        ends[node.key.hash, _medium(node)] = chain
    return chains


def _stored(chain: list[Node]) -> PagesStored:
    parent = chain[0].parent
    assert parent is not None
    return PagesStored(
        hashes=tuple(node.key.hash for node in chain),
        parent=parent.key.hash if parent.depth else None,
        tokens=b"".join(node.key.tokens for node in chain),
        medium=_medium(chain[0]),
    )
