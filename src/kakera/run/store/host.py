"""The host store: checkpoints, sinks and demoted pages under the ids that the cache chose, to and from a device.

Owns tensors, decides nothing: what is kept and what goes is the cache's business, and so is the byte budget. Here is
the plain store, which copies where it stands; a GPU's, `pinned_store.py`, copies beside the computation.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.contract.step import Drop
from kakera.kv.batch import CheckpointTensors
from kakera.kv.store import KvStore
from kakera.model.state import StatePool
from kakera.plan.kv_format import KvFormat
from kakera.plan.spec import ModelSpec

STATE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
WINDOW_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class CheckpointShape:
    """Allocates checkpoints of one model on one device."""

    spec: ModelSpec
    kv: KvFormat
    state_dtype: torch.dtype
    dtype: torch.dtype  # of activations: conv columns and the last hidden state
    device: torch.device

    def empty(self, position: int) -> CheckpointTensors:
        """Tensors for the state after `position` tokens, for the layers to fill."""
        spec, gdn = self.spec, self.spec.gdn
        layers, full = len(spec.gdn_layers), len(spec.full_layers)
        window = (full, self.kv.window_pages, spec.kv_heads, PAGE, spec.head_dim)

        def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            # zeros: window pages before position 0 are never written and must not hold NaN
            return torch.zeros(shape, dtype=dtype, device=self.device)

        state = conv = None
        if gdn is not None and layers:
            state = make((layers, gdn.v_heads, gdn.k_dim, gdn.v_dim), self.state_dtype)
            conv = make((layers, gdn.conv_taps - 1, gdn.conv_channels), self.dtype)
        return CheckpointTensors(
            position=position,
            state_LVKD=state,
            conv_LCW=conv,
            window_k=make(window, WINDOW_DTYPE) if self.kv.windowed else None,
            window_v=make(window, WINDOW_DTYPE) if self.kv.windowed else None,
            hidden_H=make((spec.hidden,), self.dtype),
        )


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
        tensors = [t for checkpoint in self.checkpoints.values() for t in tensors_of(checkpoint)]
        tensors += [*self.sinks.values(), *(t for page in self.pages.values() for t in page)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def reserved(self) -> int:
        return self.bytes()


def tensors_of(checkpoint: CheckpointTensors) -> list[Tensor]:
    """Those that this kind of model and cache has, in a fixed order."""
    values = [getattr(checkpoint, f.name) for f in fields(checkpoint)]
    return [v for v in values if isinstance(v, Tensor)]


def with_tensors(like: CheckpointTensors, tensors: Sequence[Tensor]) -> CheckpointTensors:
    """A checkpoint of `tensors`, in the order of `tensors_of(like)`."""
    names = [f.name for f in fields(like) if isinstance(getattr(like, f.name), Tensor)]
    return replace(like, **dict(zip(names, tensors, strict=True)))  # type: ignore[arg-type]


def _to_host(checkpoint: CheckpointTensors) -> CheckpointTensors:
    """The same object if it is in host memory already (the CPU engine), else a copy there."""
    return with_tensors(checkpoint, [tensor.cpu() for tensor in tensors_of(checkpoint)])
