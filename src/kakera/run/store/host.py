"""The host store: checkpoints, sinks and demoted pages under the ids that the cache chose, to and from a device.

Owns tensors, decides nothing: what is kept and what goes is the cache's business, and so is the byte budget. Here is
the plain store, which copies where it stands; a GPU's, `pinned.py`, copies beside the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kakera.arch.layout import Record
from kakera.contract.step import DiskRecord, Drop
from kakera.kv.batch import CheckpointTensors
from kakera.kv.store import KvStore
from kakera.model.state import StatePool
from kakera.target.as_torch import DTYPES

Parts = tuple[memoryview, ...]


@dataclass(frozen=True)
class CheckpointShape:
    """Allocates checkpoints of one model on one device."""

    record: Record
    device: torch.device

    def empty(self, position: int) -> CheckpointTensors:
        """Tensors for the state after `position` tokens, for the layers to fill."""
        # zeros: window pages before position 0 are never written and must not hold NaN
        made = (torch.zeros(p.shape, dtype=DTYPES[p.dtype], device=self.device) for p in self.record)
        return CheckpointTensors(position, dict(zip((part.name for part in self.record), made, strict=True)))


class Store(Protocol):
    """What the runner needs of a store. One thread of the engine calls all methods."""

    @property
    def checkpoints(self) -> Sized: ...

    @property
    def sinks(self) -> Sized: ...

    @property
    def pages(self) -> Sized: ...

    def new_checkpoint(self, position: int) -> CheckpointTensors:
        """Tensors of the device for the layers to fill, until `keep_checkpoint` or the end of the step."""
        ...

    def keep_checkpoint(self, checkpoint: int, tensors: CheckpointTensors) -> None:
        """Of `new_checkpoint`, filled by what has been computed or queued so far."""
        ...

    def keep_sink(self, sink: int, slot: int) -> None: ...

    def keep_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(device page, host page); the device pages may be written again at once."""
        ...

    def load(self, slot: int, checkpoint: int, sink: int | None) -> None:
        """Make the slot continue at a checkpoint. Raises KeyError if it is not here."""
        ...

    def load_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(host page, device page)."""
        ...

    def arrive(self) -> None:
        """What is computed from now on sees all that was loaded."""
        ...

    def drop(self, records: Drop) -> None:
        """Forget records; unknown ones are no error."""
        ...

    def copies(self, records: Sequence[DiskRecord]) -> list[Parts]:
        """The records' bytes, for whoever keeps them elsewhere; those of a kind are as long as `places` wants them."""
        ...

    def places(self, records: Sequence[DiskRecord]) -> list[Parts]:
        """New records that hold nothing yet, to be filled by another thread before anybody names them."""
        ...

    def bytes(self) -> int:
        """Held by records, as the cache counts them."""
        ...

    def reserved(self) -> int:
        """Bytes of host memory that are taken for records, used or not."""
        ...


class HostStore:
    """id -> tensors in host memory, copied when they are kept or loaded."""

    def __init__(self, shape: CheckpointShape, kv: KvStore, states: StatePool) -> None:
        self._shape, self._kv, self._states = shape, kv, states
        self.checkpoints: dict[int, CheckpointTensors] = {}
        self.sinks: dict[int, Tensor] = {}
        self.pages: dict[int, tuple[Tensor, ...]] = {}

    def new_checkpoint(self, position: int) -> CheckpointTensors:
        return self._shape.empty(position)

    def keep_checkpoint(self, checkpoint: int, tensors: CheckpointTensors) -> None:
        self.checkpoints[checkpoint] = _to_host(tensors)

    def keep_sink(self, sink: int, slot: int) -> None:
        self.sinks[sink] = self._kv.save_sink(slot).cpu()

    def keep_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        on_host = [tensor.cpu() for tensor in self._kv.read_pages([page for page, _ in pairs])]
        for i, (_, host) in enumerate(pairs):
            self.pages[host] = tuple(t[:, i].clone() for t in on_host)  # a view would keep the whole batch alive

    def load(self, slot: int, checkpoint: int, sink: int | None) -> None:
        tensors = self.checkpoints[checkpoint]
        self._states.load(slot, tensors)
        self._kv.load_window(slot, tensors)
        if sink is not None:
            self._kv.load_sink(slot, self.sinks[sink])

    def load_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        parts = zip(*(self.pages[host] for host, _ in pairs), strict=True)
        self._kv.write_pages([page for _, page in pairs], [torch.stack(part, 1) for part in parts])

    def arrive(self) -> None:
        """All has arrived."""

    def drop(self, records: Drop) -> None:
        for checkpoint in records.checkpoints:
            self.checkpoints.pop(checkpoint, None)
        for sink in records.sinks:
            self.sinks.pop(sink, None)
        for page in records.host_pages:
            self.pages.pop(page, None)

    def copies(self, records: Sequence[DiskRecord]) -> list[Parts]:
        on_device = [record.id for record in records if record.on_device]
        pages = iter(zip(*(t.cpu().unbind(1) for t in self._kv.read_pages(on_device)), strict=True))
        return [
            tuple(memory_of(t.clone(memory_format=torch.contiguous_format)) for t in self._tensors(record, pages))
            for record in records
        ]

    def places(self, records: Sequence[DiskRecord]) -> list[Parts]:
        empty = [t[:, 0].contiguous() for t in self._kv.read_pages([0])]
        for record in records:
            if record.kind == "page":
                self.pages[record.id] = tuple(torch.empty_like(t, device="cpu") for t in empty)
            elif record.kind == "sink":
                self.sinks[record.id] = torch.empty_like(self._kv.save_sink(0), device="cpu")
            else:
                self.checkpoints[record.id] = _to_host(self._shape.empty(record.position))
        return [tuple(memory_of(t) for t in self._tensors(record, iter(()))) for record in records]

    def _tensors(self, record: DiskRecord, pages: Iterator[tuple[Tensor, ...]]) -> Sequence[Tensor]:
        """Of a record, or the next of the device's pages."""
        match record.kind:
            case "page":
                return next(pages) if record.on_device else self.pages[record.id]
            case "sink":
                return [self.sinks[record.id]]
            case "checkpoint":
                return list(self.checkpoints[record.id].parts.values())

    def bytes(self) -> int:
        tensors = [t for checkpoint in self.checkpoints.values() for t in checkpoint.parts.values()]
        tensors += [*self.sinks.values(), *(t for page in self.pages.values() for t in page)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def reserved(self) -> int:
        return self.bytes()


def _to_host(checkpoint: CheckpointTensors) -> CheckpointTensors:
    """The tensors are the same if they are in host memory already (the CPU engine), else copies there."""
    return CheckpointTensors(checkpoint.position, {name: part.cpu() for name, part in checkpoint.parts.items()})


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, to read and to write."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs lack it
