"""PrefixCache: the one door to pages, tree and checkpoints. Decides, and logs actions for the runner to execute.

A request's life: match -> acquire -> per step (grow, reserve; after the step extend, publish or forfeit) -> release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kakera.cache.announced import Announced
from kakera.cache.checkpoints import WORTH, least_needed
from kakera.cache.disk import Imports
from kakera.cache.host import CacheSizes
from kakera.cache.keys import PageKey
from kakera.cache.lease import Lease
from kakera.cache.match import Match, find_match
from kakera.cache.residency import Residency
from kakera.cache.tree import Checkpoint, Kind, Node, Sink
from kakera.contract.events import Flushed
from kakera.contract.grid import PAGE
from kakera.contract.request import packed
from kakera.contract.step import Action, MovePages, ResetSlot, RestoreCheckpoint, SavePoint, SaveSink, SaveSlot

_RESTS = 4  # prompts that were left half computed, at most
_REST_GAIN = 4  # pages that a rest must spare whoever comes back: replaying fewer costs less than keeping it


class PrefixCache:
    """Not thread-safe. `per_path` caps the checkpoints between a root and any node (pinned and shared ones aside).

    `gains` counts what may let in a request that did not fit: pages given back or shared, checkpoints published.
    `on_touch` hears of checkpoints that are published, and (True) restored.
    """

    def __init__(self, sizes: CacheSizes, per_path: int = 16) -> None:
        self.sizes = sizes
        self.per_path = per_path
        self._residency = places = Residency(sizes)
        self.tree, self.checkpoints = places.tree, places.checkpoints
        self.device, self.host, self.host_ids = places.device, places.host, places.host_ids
        self.counters, self._log = places.counters, places.log
        self.imports = Imports(places, sizes.windowed)
        self.leases: set[Lease] = set()
        self.gains = 0
        self.on_touch: Callable[[Checkpoint, bool], None] = lambda record, restored: None

    def announce(self) -> Announced:
        """From now on somebody is told which pages can be hit. To be called while nothing is cached."""
        assert not self.tree.size
        self._residency.announced = Announced(self.tree)
        return self._residency.announced

    @property
    def available(self) -> int:
        """Device pages that can be had now: free ones and cached ones that nobody uses."""
        return self.device.free + self.tree.unlocked

    @property
    def can_save(self) -> bool:
        """As CacheSizes.can_save."""
        return self.sizes.can_save

    def take_actions(self) -> tuple[Action, ...]:
        """Actions decided since the last call; they go, in order, in front of the next forward pass."""
        return self._log.take()

    def send(self, action: Action) -> None:
        """An action of somebody else's, behind all that was decided before."""
        self._log.add(action)

    @property
    def has_actions(self) -> bool:
        return bool(self._log)

    def match(self, keys: Sequence[PageKey], tokens: int) -> Match:
        """What can be restored of a prompt of `tokens` tokens whose complete pages have `keys`. Changes nothing."""
        return find_match(self.tree, keys, tokens, self.sizes.windowed)

    # A request comes, grows, and goes

    def acquire(self, match: Match, pages: int, slot: int, headroom: int = 0) -> Lease | None:
        """Take `pages` pages and the match, and prepare the slot. None, and nothing has changed, if they do not fit.

        `headroom` pages must remain available for others. The match must be fresh.
        """
        held = match.path
        idle = sum(node.device is not None and node.users == 0 for node in held)
        asleep = [node for node in held if node.device is None]
        needed = pages - len(held) + len(asleep)
        if needed + headroom > self.available - idle:
            return None
        self.tree.lock(held)
        if match.checkpoint is not None:
            match.checkpoint.pins += 1
            self.checkpoints.refresh(match.checkpoint)
            self.on_touch(match.checkpoint, True)
        self._residency.free_device(needed)
        self._residency.promote(asleep)
        owned = [self.device.take() for _ in range(pages - len(held))]
        table = packed([node.device for node in held if node.device is not None] + owned)
        lease = Lease(slot, list(held), table, restored=match.checkpoint)
        self.leases.add(lease)
        self._prepare(lease, match.position)
        return lease

    def _prepare(self, lease: Lease, position: int) -> None:
        if lease.restored is None:
            self._log.add(ResetSlot(lease.slot))
            return
        sink = lease.path[0].sink if self.sizes.windowed else None
        self._log.add(RestoreCheckpoint(lease.slot, lease.restored.id, position, sink.id if sink else None))
        self.counters["checkpoints_restored"] += 1

    def grow(self, lease: Lease) -> bool:
        """One more page. False if every page is in use by a running request."""
        if self.available == 0:
            return False
        self._residency.free_device(1)
        lease.pages.append(self.device.take())
        return True

    def rest(self, lease: Lease) -> None:
        """Keep the state of a prompt that stops half computed between two steps (its client has gone, or it gives way
        to others): the same prompt goes on there. To be called before `release`."""
        known = next((node.depth for node in reversed(lease.path) if node.checkpoint is not None), 0)
        if len(lease.path) - known < _REST_GAIN or not self.can_save:
            return
        rests = [record for record in self.checkpoints.published.values() if record.kind == "rest"]
        if len(rests) >= _RESTS:
            oldest = min((r for r in rests if r.pins == 0), key=lambda record: record.used_at, default=None)
            if oldest is None:
                return
            self._residency.lose_checkpoint(oldest)
        for point in self.reserve(lease, [(len(lease.path) * PAGE, "rest")]):
            self._log.add(SaveSlot(lease.slot, point.checkpoint, point.position))
            if lease.sink is not None:
                self._log.add(SaveSink(lease.slot, lease.sink.id))
        self.publish(lease)

    def release(self, lease: Lease) -> None:
        """Give everything back; complete pages stay cached."""
        self.forfeit(lease)
        for record in lease.pins():
            record.pins -= 1
        self.tree.unlock(lease.path)
        for page in lease.owned:
            self.device.give(page)
        self.leases.remove(lease)
        self.gains += 1

    # A step is planned

    def reserve(self, lease: Lease, wanted: Iterable[tuple[int, Kind]]) -> tuple[SavePoint, ...]:
        """Host memory for checkpoints at these positions, best kind first; fewer if it is short.

        If one needs the sink of its root and there is none yet, the sink is reserved too: see `sink_actions`.
        """
        points: list[SavePoint] = []
        for position, kind in sorted(wanted, key=lambda save: (-WORTH[save[1]], -save[0])):
            if not (self._reserve_sink(lease, kind) and self._residency.free_host(kind, "checkpoint")):
                self.counters["checkpoints_not_saved"] += 1
                continue
            self.host.take("checkpoint")
            record = self.checkpoints.reserve(position, kind)
            lease.reserved.append(record)
            points.append(SavePoint(position, record.id))
        return tuple(sorted(points, key=lambda point: point.position))

    def sink_actions(self) -> tuple[Action, ...]:
        """Copies of slots' sink pages that must follow this step's forward pass, one for each reserved sink."""
        saves = [SaveSink(lease.slot, lease.sink.id) for lease in self.leases if lease.sink is not None]
        return tuple(sorted(saves, key=lambda save: save.slot))

    def _reserve_sink(self, lease: Lease, kind: Kind) -> bool:
        if not self.sizes.windowed or lease.sink is not None or (lease.path and lease.path[0].sink is not None):
            return True
        if not self._residency.free_host(kind, "sink", "checkpoint"):
            return False
        self.host.take("sink")
        lease.sink = Sink(self.checkpoints.next_id())
        return True

    # A step is committed

    def extend(self, lease: Lease, keys: Sequence[PageKey], complete: int) -> None:
        """Put the request's pages up to number `complete` into the tree: others can match them from now on.

        If the tree has such a page on the device already, the request goes on with that one and its own is free:
        equal tokens mean equal contents, which is what a prefix hit relies on anyway. Keeping both would hold twice
        the memory for as long as the request runs.

        The step that restored the request's checkpoint is over, so that one is no longer pinned.
        """
        if lease.restored is not None:
            lease.restored.pins -= 1
            lease.restored = None
        self.gains += complete > len(lease.path)
        for i in range(len(lease.path), complete):
            parent = lease.path[-1] if lease.path else self.tree.root
            node = parent.children.get(keys[i]) or self.tree.add(parent, keys[i])
            self.tree.lock((node,))
            lease.path.append(node)
            if node.device is None:
                self._residency.place(node, lease.pages[i])
                self._residency.drop_host_page(node)
            else:
                self.device.give(lease.pages[i])
                lease.pages[i] = node.device
                lease.sent = min(lease.sent, i)

    def publish(self, lease: Lease) -> None:
        """The step saved what was reserved: attach it to the nodes where the request stands, which must be extended."""
        for record in sorted(lease.reserved, key=lambda record: record.position):
            node = lease.path[record.position // PAGE - 1]
            if lease.sink is not None and node.top.sink is None:
                node.top.sink, lease.sink = lease.sink, None
            if node.checkpoint is not None:
                self._prefer(node.checkpoint, record.kind)
                self._residency.forget(record)
            elif self.sizes.windowed and node.top.sink is None:
                self._residency.forget(record)
            else:
                self._attach(lease, record, node)
        lease.reserved.clear()
        self._forfeit_sink(lease)

    def forfeit(self, lease: Lease) -> None:
        """The step failed, or the request ends: what was reserved is not to be trusted."""
        for record in lease.reserved:
            self._residency.forget(record)
        lease.reserved.clear()
        self._forfeit_sink(lease)

    def _attach(self, lease: Lease, record: Checkpoint, node: Node) -> None:
        self._residency.publish(record, node)
        self.on_touch(record, False)
        self.gains += 1
        self.counters["checkpoints_saved"] += 1
        if record.kind == "rolling":
            older, lease.rolling = lease.rolling, record
            record.pins += 1
            if older is not None:
                older.pins -= 1
                if older.pins == 0 and older.kind == "rolling":
                    self._residency.drop_checkpoint(older)
        self._thin_path(lease.path, node.depth)

    def _prefer(self, record: Checkpoint, kind: Kind) -> None:
        if WORTH[kind] > WORTH[record.kind]:
            record.kind = kind
            self.checkpoints.refresh(record)

    def _thin_path(self, path: Sequence[Node], depth: int) -> None:
        """`depth` nodes of the path end with a new record. There are far fewer records than nodes on long paths."""
        reached = (r for r in self.checkpoints.published.values() if r.position <= depth * PAGE)
        on_path = [r for r in reached if r.node is path[r.position // PAGE - 1]]
        *older, newest = sorted(on_path, key=lambda record: record.position)
        if len(older) < self.per_path:
            return
        index = least_needed([r.position for r in older], newest.position, [_is_loose(r) for r in older])
        if index is not None:
            self._residency.lose_checkpoint(older[index])
            self.counters["checkpoints_thinned"] += 1

    def flush(self) -> Flushed:
        """Forget every page and checkpoint that no request holds, without demoting anything."""
        bytes_before, pages = self.host.used, self.tree.unlocked
        loose = [record for record in self.checkpoints.published.values() if record.pins == 0]
        for record in loose:
            self._residency.drop_checkpoint(record)
        self._residency.free_device(self.device.free + pages)
        self.gains += 1
        return Flushed(pages, len(loose), bytes_before - self.host.used)

    def resize(self, pages: int, room: int = 0) -> int:
        """Use the device's first `pages` pages from now on, or as few more as running requests hold, with `room` more
        if there are; returns how many. Cached ones make way, the coldest first, to the host if they can; who lies
        behind moves to the front."""
        held = len(self.device.held) - self.tree.unlocked
        count = max(pages, min(held + room, self.device.count))
        self._residency.free_device(self.device.count - count)
        if moved := self.device.resize(count):
            for node in self.tree.nodes():
                if node.device is not None:
                    node.device = moved.get(node.device, node.device)
            for lease in self.leases:
                lease.move(moved)
            self._log.add(MovePages(tuple(moved.items())))
        self.gains += 1
        return count

    def demote(self) -> None:
        """Every page leaves the device: what leads to a checkpoint goes to the host, as far as that has room. Nobody
        may hold a lease."""
        assert not self.leases, "pages of running requests stay where they are"
        self._residency.free_device(self.device.count)

    def _forfeit_sink(self, lease: Lease) -> None:
        if lease.sink is not None:
            self._residency.drop_sink(lease.sink)
            lease.sink = None


def _is_loose(record: Checkpoint) -> bool:
    """May be thinned out: not in use, and not a place where several paths are known or expected to part."""
    parts = record.node is not None and len(record.node.children) > 1
    return record.pins == 0 and record.kind not in ("system", "branch") and not parts
