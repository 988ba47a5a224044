"""KVCache: the paged keys and values of all full-attention layers of one model, and attention over them."""

from __future__ import annotations

from dataclasses import replace

import torch

from kakera.arch.spec import ModelSpec
from kakera.kv.backend import AttentionBackend
from kakera.kv.plain.backend import PlainAttention
from kakera.kv.pool import MakeMapper, PagePool
from kakera.kv.rotation import Rotation
from kakera.kv.store import DenseStore, Int2Store, KvBytes, create_store, storage_bytes
from kakera.plan.kv_format import KvFormat
from kakera.target.as_torch import name_of, target_of
from kakera.target.kernels import serves_attention

LONGEST_SPAN = 8192  # tokens of a prefill span, where nobody says otherwise


class KVCache:
    """`store`: pages, 16-bit sinks and windows; `backend`: what a model computes attention with, chosen here once.

    A query at position q reads the key at position p in 16 bit if p < 64 or p // 64 >= q // 64 - R, and from INT2
    otherwise.
    """

    def __init__(
        self,
        spec: ModelSpec,
        fmt: KvFormat,
        pages: int,
        slots: int,
        rotation: Rotation | None = None,
        device: torch.device | str = "cpu",
        chunk: int = LONGEST_SPAN,
        dtype: torch.dtype = torch.bfloat16,
        mapper: MakeMapper | None = None,
    ):
        """`rotation` None: Hadamard for int2. Of a GPU's kernels `chunk`: tokens of the longest prefill span, which
        their scratch is for, and `dtype`: of the model's activations. `mapper`: see PagePool. Raises UsageError for a
        format and CheckpointError for a rotation that this model can not use."""
        pool = PagePool(pages, torch.device(device), mapper)
        self.store = create_store(spec, fmt, pool, slots, rotation)
        self.backend = _backend(spec, fmt, self.store, slots, chunk, dtype)

    def bytes(self) -> KvBytes:
        """What is held now, by purpose."""
        return replace(self.store.bytes(), scratch=storage_bytes(self.backend.scratch()))


def _backend(
    spec: ModelSpec, fmt: KvFormat, store: DenseStore | Int2Store, slots: int, chunk: int, dtype: torch.dtype
) -> AttentionBackend:
    turned = isinstance(store, Int2Store) and not store.rotation.hadamard_only
    served = serves_attention(spec.head_dim, spec.rotary_dim, fmt, turned, name_of(dtype))
    if target_of(store.device).has_cards and served:
        from kakera.kv.gpu.backend import GpuAttention  # Triton is there with CUDA builds of torch only

        return GpuAttention(spec, store, slots, chunk)
    return PlainAttention(spec, store)
