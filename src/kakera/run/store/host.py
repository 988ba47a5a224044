"""The host store: checkpoints, sinks and demoted pages under the ids that the cache chose, to and from a device.

Owns tensors, decides nothing: what is kept and what goes is the cache's business, and so is the byte budget. Here is
the plain store, which copies where it stands; a GPU's, `pinned_store.py`, copies beside the computation.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kakera.arch.layout import Record
from kakera.contract.step import Drop
from kakera.kv.batch import CheckpointTensors
from kakera.kv.store import KvStore
from kakera.model.state import StatePool
from kakera.target.as_torch import DTYPES


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

    def bytes(self) -> int:
        tensors = [t for checkpoint in self.checkpoints.values() for t in checkpoint.parts.values()]
        tensors += [*self.sinks.values(), *(t for page in self.pages.values() for t in page)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def reserved(self) -> int:
        return self.bytes()


def _to_host(checkpoint: CheckpointTensors) -> CheckpointTensors:
    """The tensors are the same if they are in host memory already (the CPU engine), else copies there."""
    return CheckpointTensors(checkpoint.position, {name: part.cpu() for name, part in checkpoint.parts.items()})
