"""From a GPU to the host store while the card computes: device staging, a side stream, pinned staging, a thread.

A checkpoint of the 27B is 95 MB. Copied where it arises it holds up the streams for 60 ms; here the layers fill a
staging place on the device, and the rest goes on beside the next steps. Whoever wants it back early waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from kakera.model.batch import CheckpointTensors
from kakera.run.store import CheckpointShape, HostStore, tensors_of, with_tensors

ALIGNED = 256  # bytes, of tensors behind each other in pinned memory


@dataclass
class _Pinned:
    """Host memory that a copy engine can write. `free`: the thread's last job with it."""

    bytes_B: Tensor
    free: Future[None] | None = None


@dataclass
class _Staged:
    """A place on the device. `sent`: when it may be filled again."""

    tensors: CheckpointTensors
    sent: torch.cuda.Event | None = None


class Offload:
    """Sends checkpoints, sinks and pages to `store`. One thread of the engine calls all methods."""

    def __init__(self, shape: CheckpointShape, store: HostStore, places: int):
        """`places`: checkpoints that the layers of a step may fill; so many lie on the device and in pinned memory."""
        self._store = store
        self._staged = [_Staged(shape.empty(0)) for _ in range(places)]
        checkpoint = sum(_padded(tensor) for tensor in tensors_of(self._staged[0].tensors))
        self._size = max(checkpoint, 2 * shape.kv.page_bytes(shape.spec), shape.kv.window_page_bytes(shape.spec))
        pinned = [torch.empty(self._size, dtype=torch.uint8, pin_memory=True) for _ in range(places)]
        self._next_staged, self._next_pinned = cycle(self._staged), cycle([_Pinned(bytes_B) for bytes_B in pinned])
        self._device = shape.device
        self._stream = torch.cuda.Stream(shape.device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "offload")
        self._pending: dict[tuple[str, int], Future[None]] = {}

    def stage(self, position: int) -> CheckpointTensors:
        """Tensors of the device for the layers to fill, until `send_checkpoint`; pages of the window that lie before
        position 0 hold anything finite."""
        staged = next(self._next_staged)
        if staged.sent is not None:
            torch.cuda.current_stream(self._device).wait_event(staged.sent)
        staged.tensors.position = position
        return staged.tensors

    def send_checkpoint(self, checkpoint: int, tensors: CheckpointTensors) -> None:
        """Of `stage`, filled by what is on the current stream."""
        staged = next(place for place in self._staged if place.tensors is tensors)
        position = tensors.position

        def keep(views: list[Tensor]) -> None:
            copies = [view.clone() for view in views]
            self._store.keep_checkpoint(checkpoint, with_tensors(tensors, position, copies))

        staged.sent = self._send([("checkpoint", checkpoint)], tensors_of(tensors), keep)

    def send_sink(self, sink: int, tensor: Tensor) -> None:
        self._send([("sink", sink)], [tensor], lambda views: self._store.keep_sink(sink, views[0].clone()))

    def send_pages(self, ids: Sequence[int], read: Callable[[int, int], tuple[Tensor, ...]]) -> None:
        """`read(first, end)` gives the pages of ids[first:end] as KVCache.read_pages does."""
        one = sum(_padded(tensor) for tensor in read(0, 1))
        at_once = max(1, self._size // one)
        for first in range(0, len(ids), at_once):
            part = ids[first : first + at_once]

            def keep(views: list[Tensor], part: Sequence[int] = part) -> None:
                self._store.keep_pages(part, tuple(views))  # which copies page by page

            self._send([("page", page) for page in part], read(first, first + len(part)), keep)

    def wait_for(self, kind: str, ids: Sequence[int]) -> None:
        """Until these are in the store. Raises what went wrong with them."""
        for key in [(kind, i) for i in ids]:
            if (job := self._pending.pop(key, None)) is not None:
                job.result()

    def settle(self, kind: str, ids: Sequence[int]) -> None:
        """Until the copies of these are over, well or not: what is to be dropped need not have arrived."""
        for key in [(kind, i) for i in ids]:
            if (job := self._pending.pop(key, None)) is not None:
                job.exception()

    def _send(
        self, keys: list[tuple[str, int]], tensors: Sequence[Tensor], keep: Callable[[list[Tensor]], None]
    ) -> torch.cuda.Event:
        """Queue the copy; returns when it has left the device, as an event."""
        pinned = next(self._next_pinned)
        if pinned.free is not None:
            pinned.free.exception()  # waits; what went wrong is told to who wants that record, not to whom comes next
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        views = _views(pinned.bytes_B, tensors)
        with torch.cuda.stream(self._stream):
            _copy(tensors, views)
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record(self._stream)

        def finish(source: Sequence[Tensor] = tensors) -> None:  # holds the device's tensors until they are copied
            sent.synchronize()
            keep(views)

        pinned.free = self._thread.submit(finish)
        self._pending = {key: job for key, job in self._pending.items() if not job.done() or job.exception()}
        self._pending |= dict.fromkeys(keys, pinned.free)
        return sent


def _copy(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    for tensor, view in zip(tensors, views, strict=True):
        view.copy_(tensor, non_blocking=True)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _views(bytes_B: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Places for copies of the tensors, one behind the other."""
    views, begin = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        views.append(bytes_B[begin : begin + size].view(tensor.dtype).view(tensor.shape))
        begin += _padded(tensor)
    return views
