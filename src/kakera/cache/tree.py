"""PageTree: which complete pages exist, by their keys (`keys.py`). One node a page, one root for all salts, since a
first page's key depends on its salt. Matching a prompt of 262,144 tokens is 4,096 look-ups, about a millisecond.

Along any path come first pages on the device, then pages on the host, then nothing. Nodes in use (`users`) and all
their ancestors are on the device. So eviction takes device leaves, the coldest first, and never breaks a path.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kakera.cache.keys import PageKey

Kind = Literal["system", "branch", "message", "rolling", "rest", "grid"]

_REMEMBERED = 65_536  # removed nodes remembered to tell "evicted" from "never seen"


class Node:
    """One page: on the device or on the host. `depth` pages end with it; `top` is its ancestor of depth 1."""

    __slots__ = (
        "checkpoint",
        "checkpoints_below",
        "children",
        "depth",
        "device",
        "device_children",
        "host",
        "key",
        "lost_checkpoint",
        "parent",
        "sink",
        "stamp",
        "top",
        "users",
    )

    def __init__(self, parent: Node | None, key: PageKey) -> None:
        self.parent = parent
        self.key = key
        self.depth: int = parent.depth + 1 if parent else 0
        self.top: Node = parent.top if parent and parent.depth else self
        self.children: dict[PageKey, Node] = {}
        self.device: int | None = None
        self.host: int | None = None
        self.users = 0
        self.device_children = 0
        self.stamp = 0
        self.checkpoint: Checkpoint | None = None  # published, at this node's end
        self.lost_checkpoint = False  # there was one; it was evicted
        self.sink: Sink | None = None  # depth 1 only
        self.checkpoints_below = 0  # depth 1 only: published records in the subtree, this node's included


@dataclass(eq=False)
class Checkpoint:
    """The state after `position` tokens, stored by the runner under `id`. `node` is None while reserved."""

    id: int
    position: int
    kind: Kind
    node: Node | None = None
    pins: int = 0
    credit: int = 0
    used_at: int = 0


@dataclass(eq=False)
class Sink:
    """The 16-bit first page that all checkpoints below one child of a root share."""

    id: int


class PageTree:
    """`unlocked` counts device pages that no request uses: all of them can be evicted, tails first."""

    def __init__(self) -> None:
        self.root = Node(None, PageKey(b"", b""))
        self._leaves: list[tuple[int, int, Node]] = []  # heap of eviction candidates; stale entries are skipped
        self._removed: dict[bytes, None] = {}  # by hash, the oldest first
        self._clock = 0
        self._order = 0  # breaks ties in the heap
        self.unlocked = 0
        self.size = 0

    def walk(self, keys: Sequence[PageKey], limit: int) -> list[Node]:
        """The nodes of the longest known prefix of `keys[:limit]`."""
        path: list[Node] = []
        node: Node | None = self.root
        for key in islice(keys, limit):
            node = node.children.get(key) if node else None
            if node is None:
                break
            path.append(node)
        return path

    def holds(self, node: Node) -> bool:
        """Whether a node that somebody remembers is still here."""
        return node.parent is not None and node.parent.children.get(node.key) is node

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def add(self, parent: Node, key: PageKey) -> Node:
        node = Node(parent, key)
        parent.children[key] = node
        self.size += 1
        self._removed.pop(key.hash, None)
        return node

    def remove(self, node: Node) -> None:
        """Take out a node that has no children and no device page."""
        assert node.parent is not None and not node.children and node.device is None
        del node.parent.children[node.key]
        self.size -= 1
        self._removed[node.key.hash] = None
        if len(self._removed) > _REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def was_removed(self, key: PageKey) -> bool:
        """True if there was such a page. It explains a miss and decides nothing."""
        return key.hash in self._removed

    def lock(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.users == 0 and node.device is not None:
                self.unlocked -= 1
            node.users += 1

    def unlock(self, nodes: Iterable[Node]) -> None:
        self._clock += 1
        for node in nodes:
            node.users -= 1
            node.stamp = self._clock
            if node.users == 0 and node.device is not None:
                self.unlocked += 1
                self._offer(node)

    def place(self, node: Node, page: int | None) -> None:
        """Give a node a device page, or take it away."""
        assert node.parent is not None and (node.device is None) != (page is None)
        change = 1 if page is not None else -1
        node.device = page
        node.parent.device_children += change
        if node.users == 0:
            self.unlocked += change
        self._offer(node)
        self._offer(node.parent)

    def coldest(self) -> Node:
        """The least recently used device leaf that nobody uses. Raises IndexError if `unlocked` is 0."""
        while True:
            stamp, _, node = heapq.heappop(self._leaves)
            if node.stamp == stamp and _is_free_leaf(node):
                return node

    def _offer(self, node: Node) -> None:
        if not _is_free_leaf(node):
            return
        if len(self._leaves) > 2 * self.size + 64:
            live = {id(n): (stamp, order, n) for stamp, order, n in self._leaves if n.stamp == stamp}
            self._leaves = [entry for entry in live.values() if _is_free_leaf(entry[2])]
            heapq.heapify(self._leaves)
        self._order += 1
        heapq.heappush(self._leaves, (node.stamp, self._order, node))


def _is_free_leaf(node: Node) -> bool:
    return node.device is not None and node.users == 0 and node.device_children == 0
