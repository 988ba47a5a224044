"""The host store's contents: checkpoints, sinks and demoted pages under the ids that the cache chose.

Owns tensors, decides nothing: what is kept and what goes is the cache's business, and so is the byte budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from kakera.model.batch import CheckpointTensors
from kakera.plan.kv_format import PAGE_TOKENS, KvFormat
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
        """Uninitialised tensors for the state after `position` tokens, for the layers to fill."""
        spec, gdn = self.spec, self.spec.gdn
        layers, full = len(spec.gdn_layers), len(spec.full_layers)
        window = (full, self.kv.window_pages, spec.kv_heads, PAGE_TOKENS, spec.head_dim)

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


class HostStore:
    """id -> tensors in host memory."""

    def __init__(self) -> None:
        self.checkpoints: dict[int, CheckpointTensors] = {}
        self.sinks: dict[int, Tensor] = {}
        self.pages: dict[int, tuple[Tensor, ...]] = {}

    def keep_checkpoint(self, checkpoint: int, tensors: CheckpointTensors) -> None:
        self.checkpoints[checkpoint] = _to_host(tensors)

    def keep_sink(self, sink: int, sink_tensor: Tensor) -> None:
        self.sinks[sink] = sink_tensor.cpu()

    def keep_pages(self, ids: Sequence[int], tensors: tuple[Tensor, ...]) -> None:
        """`tensors` as KVCache.read_pages gives them: the page axis is dimension 1."""
        on_host = [t.cpu() for t in tensors]
        for i, page in enumerate(ids):
            self.pages[page] = tuple(t[:, i].clone() for t in on_host)  # a view would keep the whole batch alive

    def read_pages(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        """The inverse of keep_pages, in the order of `ids`."""
        return tuple(torch.stack(parts, 1) for parts in zip(*(self.pages[page] for page in ids), strict=True))

    def drop(self, checkpoints: tuple[int, ...], sinks: tuple[int, ...], pages: tuple[int, ...]) -> None:
        for checkpoint in checkpoints:
            self.checkpoints.pop(checkpoint, None)
        for sink in sinks:
            self.sinks.pop(sink, None)
        for page in pages:
            self.pages.pop(page, None)

    def bytes(self) -> int:
        """Bytes held, for tests that compare with the plan."""
        # lists: a thread may be putting something in
        tensors = [t for c in list(self.checkpoints.values()) for t in tensors_of(c)]
        tensors += [*self.sinks.values(), *(t for page in list(self.pages.values()) for t in page)]
        return sum(t.numel() * t.element_size() for t in tensors)


def tensors_of(checkpoint: CheckpointTensors) -> list[Tensor]:
    """Those that this kind of model and cache has, in a fixed order."""
    values = [getattr(checkpoint, f.name) for f in fields(checkpoint)]
    return [v for v in values if isinstance(v, Tensor)]


def with_tensors(like: CheckpointTensors, position: int, tensors: Sequence[Tensor]) -> CheckpointTensors:
    """A checkpoint of `tensors`, in the order of `tensors_of(like)`."""
    names = [f.name for f in fields(like) if isinstance(getattr(like, f.name), Tensor)]
    return replace(like, position=position, **dict(zip(names, tensors, strict=True)))


def _to_host(checkpoint: CheckpointTensors) -> CheckpointTensors:
    """The same object if it is in host memory already (the CPU engine), else a copy there."""
    moved = {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}
    moved = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in moved.items()}
    return replace(checkpoint, **moved)
