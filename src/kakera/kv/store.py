"""The tensors of a KV cache, by name: pages of all requests, and for INT2 each slot's 16-bit rows and their frame.

The only owner. Backends read and write them layer by layer; run/ copies whole pages, windows and sinks to the host
store and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.contract.grid import PAGE
from kakera.errors import UsageError
from kakera.kv.batch import CheckpointTensors
from kakera.kv.codec import WINDOW_DTYPE
from kakera.kv.pool import PagePool
from kakera.kv.recent import RecentStore
from kakera.kv.rotation import Rotation
from kakera.plan.kv_format import KvFormat

DENSE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class KvBytes:
    """What a cache holds, in bytes. `pages`, `ring` + `sink` are what KvFormat predicts; scratch has a fixed size."""

    pages: int
    ring: int = 0
    sink: int = 0
    rotation: int = 0
    scratch: int = 0


class KvStore(ABC):
    """Pages of 64 tokens, all full-attention layers. What a slot holds beside them is a matter of its kind: windows and
    sinks of a kind without them are nothing, and saving or loading them does nothing."""

    pool: PagePool  # the memory of `page_tensors`
    dtype: torch.dtype  # keys and values are rounded to it before they are stored
    window_pages: int = 0  # R; 0: pages are exact

    @abstractmethod
    def page_tensors(self) -> tuple[Tensor, ...]:
        """The page axis is dimension 1 of each."""

    @abstractmethod
    def bytes(self) -> KvBytes:
        """What is held now, by purpose."""

    @property
    def device(self) -> torch.device:
        return self.page_tensors()[0].device

    def read_pages(self, ids: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        """Copies of pages, in the order of `page_tensors`, on the store's device. `ids` that lie there already, as
        int64, cost no wait."""
        index = torch.as_tensor(ids, dtype=torch.int64, device=self.device)
        return tuple(tensor.index_select(1, index) for tensor in self.page_tensors())

    def write_pages(self, ids: Sequence[int] | Tensor, pages: Sequence[Tensor]) -> None:
        """Put back what `read_pages` gave, under other ids if need be."""
        index = torch.as_tensor(ids, dtype=torch.int64, device=self.device)
        for tensor, values in zip(self.page_tensors(), pages, strict=True):
            tensor.index_copy_(1, index, values.to(self.device))

    def save_window(self, slot: int, checkpoint: CheckpointTensors) -> None:  # noqa: B027
        """Fill `checkpoint.window_k/v` with the R pages before its position, which must still be in the slot's ring:
        at most 64 tokens may have been stored since."""

    def load_window(self, slot: int, checkpoint: CheckpointTensors) -> None:  # noqa: B027
        """Make the slot continue at `checkpoint.position`."""

    def save_sink(self, slot: int) -> Tensor:
        """A copy of the slot's sink page, [full layers, 2 (K, V), kv_heads, 64, D] bf16; empty if there is none."""
        return torch.empty(0)

    def load_sink(self, slot: int, sink: Tensor) -> None:  # noqa: B027
        """Put a saved sink page into a slot."""


class DenseStore(KvStore):
    """Float32 or bfloat16 keys and values in the model's own frame: kv_LP2KND [L, P, 2 (K, V), kv_heads, 64, D]."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, pool: PagePool):
        self.dtype, self.pool = dtype, pool
        shape = (spec.kv_layers, pool.pages, 2, spec.kv_heads, PAGE, spec.head_dim)
        self.kv_LP2KND = pool.empty(shape, dtype)

    def page_tensors(self) -> tuple[Tensor, ...]:
        return (self.kv_LP2KND,)

    def bytes(self) -> KvBytes:
        return KvBytes(pages=storage_bytes(self.page_tensors()))


class Int2Store(KvStore):
    """2-bit pages, 16-bit sinks and windows, and the rotated frame that both live in.

    codes: uint8 [L, P, 2 (K, V), kv_heads, 64, D / 4]; parameters: fp16 [L, P, 2, kv_heads, 2 (scale, minimum), groups,
    64], contiguous over tokens; recent: ring and sink of each slot; rotation, and its centres_L2KD [L, 2, kv_heads, D]
    in float32. `rotation.graded`: codes are digits (`codec.encode_graded`).
    """

    dtype = WINDOW_DTYPE

    def __init__(self, spec: ModelSpec, fmt: KvFormat, pool: PagePool, slots: int, rotation: Rotation):
        layers, heads, dim = spec.kv_layers, spec.kv_heads, spec.head_dim
        self.group, self.window_pages, self.pool = fmt.group, fmt.window_pages, pool
        page = (layers, pool.pages, 2, heads)
        self.codes = pool.empty((*page, PAGE, dim // 4), torch.uint8)
        self.parameters = pool.empty((*page, 2, dim // fmt.group, PAGE), torch.float16)
        self.recent = RecentStore(spec, fmt, slots, pool.device)
        self.rotation = rotation.to(pool.device)
        self.centres_L2KD = torch.stack((self.rotation.k.centre_LKD, self.rotation.v.centre_LKD), 1)

    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.codes, self.parameters

    def save_window(self, slot: int, checkpoint: CheckpointTensors) -> None:
        self.recent.save_window(slot, checkpoint)

    def load_window(self, slot: int, checkpoint: CheckpointTensors) -> None:
        self.recent.load_window(slot, checkpoint)

    def save_sink(self, slot: int) -> Tensor:
        return self.recent.sink[:, slot].clone()

    def load_sink(self, slot: int, sink: Tensor) -> None:
        self.recent.sink[:, slot] = sink.to(self.device)

    def bytes(self) -> KvBytes:
        frames = (*self.rotation.k.tensors(), *self.rotation.v.tensors(), self.centres_L2KD)
        return KvBytes(
            pages=storage_bytes(self.page_tensors()),
            ring=storage_bytes((self.recent.ring,)),
            sink=storage_bytes((self.recent.sink,)),
            rotation=storage_bytes(frames),
        )


def create_store(
    spec: ModelSpec, fmt: KvFormat, pool: PagePool, slots: int, rotation: Rotation | None
) -> DenseStore | Int2Store:
    """`rotation` None: Hadamard for int2. Raises UsageError for a format and CheckpointError for a rotation that this
    model can not use."""
    fmt.check(spec.head_dim)
    if not fmt.windowed:
        if rotation is not None:
            raise UsageError(f"--rotation: the {fmt.codec} cache is exact and takes no rotation; use --kv int2")
        return DenseStore(spec, DENSE_DTYPES[fmt.codec], pool)
    rotation = rotation or Rotation.hadamard(spec)
    if rotation.graded and fmt.group * 2 != spec.head_dim:
        raise UsageError(f"--rotation: a graded rotation needs --kv-group {spec.head_dim // 2}, not {fmt.group}")
    rotation.check(spec)
    return Int2Store(spec, fmt, pool, slots, rotation)


def pages_to_rows(kv_P2KND: Tensor) -> Tensor:
    """[P, 2, K, 64, D] of any dtype to contiguous float32 [2, K, P * 64, D]."""
    pages, _, heads, _, dim = kv_P2KND.shape
    rows = torch.empty(2, heads, pages, PAGE, dim, device=kv_P2KND.device)
    return rows.copy_(kv_P2KND.permute(1, 2, 0, 3, 4)).flatten(2, 3)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of distinct storages: an expanded tensor counts what it takes, one shared by two names counts once."""
    storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
