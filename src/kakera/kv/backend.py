"""What a model asks of attention over a KV cache, and what every way to compute it offers.

Two steps, as in flashinfer: `plan` lays a batch out once, `run` computes one layer of it. `plain/` and `gpu/` hold the
backends; another one, or another layout of pages, is one more class.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kakera.contract.grid import PAGE
from kakera.kv.batch import Batch
from kakera.ops.heads import ProjectedHeads


class AttentionPass(Protocol):
    """One batch on its way through the full-attention layers."""

    def run(self, layer: int, heads: ProjectedHeads) -> Tensor:
        """QK-norm and RoPE, store the batch's keys and values, attend and gate: [T, heads * D] in the projection's
        dtype. `layer` counts the full-attention layers. Fills the window of every save point."""
        ...


class Attention(Protocol):
    def plan(self, batch: Batch) -> AttentionPass:
        """Where its tokens go and what they read, the same for all layers. Raises ValueError for spans that no plan
        makes; nothing is stored yet."""
        ...


class AttentionBackend(Attention, Protocol):
    """Attention over one `KvStore`."""

    @property
    def capturable(self) -> bool:
        """Whether decode rows given as tensors (`Batch.singles`) make a pass that a CUDA graph can capture."""
        ...

    def prepare(self) -> None:
        """Do what the first calls would wait for (a GPU's library plans its kernels)."""
        ...

    def scratch(self) -> tuple[Tensor, ...]:
        """Working memory, of a size fixed at construction."""
        ...


def check_spans(batch: Batch) -> None:
    """What holds for every backend. Raises ValueError."""
    for span in batch.prefill:
        if span.start % PAGE:
            raise ValueError(f"a prefill segment starts at {span.start}, which is not a multiple of {PAGE}")
    if (longest := max((span.count for span in batch.decode), default=0)) > PAGE:
        raise ValueError(f"a decode row carries {longest} tokens; at most {PAGE} are allowed")
