"""The host store of a GPU: records in blocks of pinned memory, copied by a side stream while the card computes.

A checkpoint of the 27B is 95 MB, the pages of 200K tokens are 1.7 GB. Copied where they arise they hold up every
stream. Here the layers fill a place on the device, and the copy engine takes it from there; on the way back it fills a
place, and a kernel beside the computation spreads it. All copies are in the order of one stream, so nothing on the host
ever waits for one: blocks that are given back may be given out at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kakera.cache.pages import IdPool
from kakera.contract.step import DiskRecord, Drop
from kakera.kv.batch import CheckpointTensors
from kakera.kv.store import KvStore
from kakera.model.state import StatePool
from kakera.plan.store_sizes import ALIGNED, StoreSizes
from kakera.run.store.host import CheckpointShape, Parts, memory_of
from kakera.run.store.side_stream import SideStream
from kakera.run.transfer import upload

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Record:
    """Blocks of the pinned memory, ascending. `position`: of a checkpoint."""

    blocks: tuple[int, ...]
    position: int = 0


@dataclass
class _Place:
    """Memory of the device for one record, or for as many pages [N, ...] as it has blocks: `bytes_B`, and views of it.
    `free`: when the computing stream may fill it again."""

    bytes_B: Tensor
    checkpoint: CheckpointTensors
    sink: Tensor
    pages: tuple[Tensor, ...]
    free: torch.cuda.Event | None = None


class PinnedStore:
    """A `Store`. In memory that is not pinned the same copies hold up the host, and nothing else changes."""

    def __init__(
        self,
        shape: CheckpointShape,
        kv: KvStore,
        states: StatePool,
        sizes: StoreSizes,
        segments_SB: Sequence[Tensor],
        places: int,
        side: SideStream,
    ):
        """`segments_SB`: of `pinned_segments`. `places`: checkpoints that the layers of one step may fill."""
        self._kv, self._states, self._sizes, self._side = kv, states, sizes, side
        self._device = shape.device
        self._places = [_place(shape, kv, sizes) for _ in range(places)]
        self._next = cycle(self._places)
        self._segments_SB = segments_SB
        self._free = IdPool(sizes.blocks)
        self._loaded: torch.cuda.Event | None = None
        self.checkpoints: dict[int, _Record] = {}
        self.sinks: dict[int, _Record] = {}
        self.pages: dict[int, _Record] = {}

    def new_checkpoint(self, position: int) -> CheckpointTensors:
        """Pages of the window that lie before position 0 hold anything: `KvStore.load_window` does not read them."""
        place = self._place_to_fill()
        place.checkpoint.position = position
        return place.checkpoint

    def keep_checkpoint(self, checkpoint: int, tensors: CheckpointTensors) -> None:
        place = next(place for place in self._places if place.checkpoint is tensors)
        record = self.checkpoints[checkpoint] = _Record(self._take(self._sizes.checkpoint), tensors.position)
        self._send(place, record.blocks)

    def keep_sink(self, sink: int, slot: int) -> None:
        place = self._place_to_fill()
        place.sink.copy_(self._kv.save_sink(slot))
        record = self.sinks[sink] = _Record(self._take(self._sizes.sink))
        self._send(place, record.blocks)

    def keep_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for part in self._by_place(pairs):
            place = self._place_to_fill()
            read = self._kv.read_pages(self._ids([page for page, _ in part]))
            for view, tensor in zip(place.pages, read, strict=True):
                view[: len(part)].copy_(tensor.movedim(1, 0))
            self.pages |= {host: _Record(self._take(1)) for _, host in part}
            self._send(place, self._page_blocks([host for _, host in part]))

    def load(self, slot: int, checkpoint: int, sink: int | None) -> None:
        record = self.checkpoints[checkpoint]

        def spread(place: _Place) -> None:
            place.checkpoint.position = record.position
            self._states.load(slot, place.checkpoint)
            self._kv.load_window(slot, place.checkpoint)

        self._fetch(record.blocks, spread)
        if sink is not None:
            self._fetch(self.sinks[sink].blocks, lambda place: self._kv.load_sink(slot, place.sink))

    def load_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for part in self._by_place(pairs):

            def spread(place: _Place, part: Sequence[tuple[int, int]] = part) -> None:
                ids = self._ids([page for _, page in part])
                self._kv.write_pages(ids, [view[: len(part)].movedim(0, 1) for view in place.pages])

            self._fetch(self._page_blocks([host for host, _ in part]), spread)

    def arrive(self) -> None:
        if self._loaded is not None:
            self._side.wait(self._loaded)
            self._loaded = None

    def drop(self, records: Drop) -> None:
        for kept, ids in (
            (self.checkpoints, records.checkpoints),
            (self.sinks, records.sinks),
            (self.pages, records.host_pages),
        ):
            for number in ids:
                if (record := kept.pop(number, None)) is not None:
                    for block in record.blocks:
                        self._free.give(block)

    def copies(self, records: Sequence[DiskRecord]) -> list[Parts]:
        """In whole blocks. What was sent has arrived when this returns, which is seldom a wait: the disk gets what has
        lain for long."""
        self._side.finish()
        on_device = [record.id for record in records if record.on_device]
        pages = iter([block for part in self._by_place(on_device) for block in self._device_blocks(part)])
        return [
            (next(pages),) if record.on_device else tuple(memory_of(t.clone()) for t in self._memory(record))
            for record in records
        ]

    def places(self, records: Sequence[DiskRecord]) -> list[Parts]:
        """Of blocks that were given back, copies may be under way: threads are not in the order of the stream."""
        self._side.finish()
        kept = {"page": self.pages, "sink": self.sinks, "checkpoint": self.checkpoints}
        counts = {"page": 1, "sink": self._sizes.sink, "checkpoint": self._sizes.checkpoint}
        for record in records:
            kept[record.kind][record.id] = _Record(self._take(counts[record.kind]), record.position)
        return [tuple(memory_of(t) for t in self._memory(record)) for record in records]

    def _memory(self, record: DiskRecord) -> list[Tensor]:
        kept = {"page": self.pages, "sink": self.sinks, "checkpoint": self.checkpoints}
        return [host_B for host_B, _, _ in self._host_runs(kept[record.kind][record.id].blocks)]

    def _device_blocks(self, ids: Sequence[int]) -> list[memoryview]:
        """Pages of the device as they would lie in blocks."""
        place = self._place_to_fill()
        for view, tensor in zip(place.pages, self._kv.read_pages(self._ids(ids)), strict=True):
            view[: len(ids)].copy_(tensor.movedim(1, 0))
        blocks_NB = place.bytes_B[: len(ids) * self._sizes.block].cpu().view(len(ids), -1)
        return [memory_of(block_B) for block_B in blocks_NB]

    def bytes(self) -> int:
        return len(self._free.held) * self._sizes.block

    def reserved(self) -> int:
        return self._sizes.pinned_bytes

    def _take(self, count: int) -> tuple[int, ...]:
        return tuple(sorted(self._free.take() for _ in range(count)))

    def _place_to_fill(self) -> _Place:
        """For the computing stream, which then sees all that was loaded: it may read what a load has written."""
        self.arrive()
        place = next(self._next)
        if place.free is not None:
            self._side.wait(place.free)
        return place

    def _send(self, place: _Place, blocks: Sequence[int]) -> None:
        """From the place to the blocks, in this order."""

        def copy() -> None:
            for host_B, device_B in self._runs(place, blocks):
                host_B.copy_(device_B, non_blocking=True)

        place.free = self._side.run(copy)

    def _fetch(self, blocks: Sequence[int], spread: Callable[[_Place], None]) -> None:
        place = next(self._next)

        def copy() -> None:
            for host_B, device_B in self._runs(place, blocks):
                device_B.copy_(host_B, non_blocking=True)
            spread(place)

        self._loaded = place.free = self._side.run(copy)

    def _runs(self, place: _Place, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Host and device memory of blocks that lie behind each other: a copy each."""
        return ((host_B, place.bytes_B[begin:end]) for host_B, begin, end in self._host_runs(blocks))

    def _host_runs(self, blocks: Sequence[int]) -> Iterator[tuple[Tensor, int, int]]:
        """Host memory of blocks that lie behind each other, and which bytes of the record it holds."""
        size, per = self._sizes.block, self._sizes.per_segment
        for _, run in groupby(enumerate(blocks), lambda item: (item[1] - item[0], item[1] // per)):
            (first, block), *rest = run
            count = 1 + len(rest)
            begin = block % per * size
            host_B = self._segments_SB[block // per][begin : begin + count * size]
            yield host_B, first * size, (first + count) * size

    def _by_place(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        """In parts whose pages fit a place."""
        most = self._sizes.place_bytes // self._sizes.block
        return (items[first : first + most] for first in range(0, len(items), most))

    def _page_blocks(self, hosts: Sequence[int]) -> list[int]:
        return [block for host in hosts for block in self.pages[host].blocks]

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return upload({"ids": np.array(ids, dtype=np.int64)}, self._device)["ids"]


def _place(shape: CheckpointShape, kv: KvStore, sizes: StoreSizes) -> _Place:
    bytes_B = torch.empty(sizes.place_bytes, dtype=torch.uint8, device=shape.device)
    empty, sink, pages = shape.empty(0).parts, kv.save_sink(0), kv.read_pages([0])
    checkpoint = CheckpointTensors(0, dict(zip(empty, _views(bytes_B, list(empty.values())), strict=True)))
    return _Place(bytes_B, checkpoint, _views(bytes_B, [sink])[0], _page_views(bytes_B.view(-1, sizes.block), pages))


def _page_views(bytes_NB: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[N, L, ...], a block for each page, for what `KvStore.read_pages` gave of one page."""
    views, begin = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        part_NB = bytes_NB[:, begin : begin + size]
        views.append(part_NB.view(tensor.dtype).view(-1, tensor.shape[0], *tensor.shape[2:]))
        begin += size
    return tuple(views)


def _views(bytes_B: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Places for copies of the tensors, one behind the other."""
    views, begin = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        views.append(bytes_B[begin : begin + size].view(tensor.dtype).view(tensor.shape))
        begin += -(-size // ALIGNED) * ALIGNED
    return views


def pinned_segments(sizes: StoreSizes, progress: Callable[[int, int], None]) -> list[Tensor]:
    """A store's memory: 1.6 GB a second, so better done beside something else. From where the machine gives no more
    pinned memory on, it is ordinary memory. `progress` gets (segments done, in all)."""
    pin, segments = torch.cuda.is_available(), sizes.segments
    made: list[Tensor] = []
    for done, blocks in enumerate(segments):
        try:
            made.append(torch.empty(blocks * sizes.block, dtype=torch.uint8, pin_memory=pin))
        except RuntimeError as error:
            log.warning(
                "%d of %d MB of the prefix cache's store are not pinned, because the machine gives no more (%s): "
                "copies to and from there hold up running streams for moments; a smaller --host-cache would not",
                sum(segments[done:]) * sizes.block // 10**6,
                sizes.blocks * sizes.block // 10**6,
                str(error).partition("\n")[0],  # what follows is about debugging kernels
            )
            pin = False
            made.append(torch.empty(blocks * sizes.block, dtype=torch.uint8))
        progress(done + 1, len(segments))
    return made
