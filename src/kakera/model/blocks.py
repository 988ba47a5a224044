"""What a layer is made of, as the model calls it: all blocks of a kind are one object, laid out once for a batch
(`plan`) and run layer by layer, as attention backends are (`kv.backend`).

`mixers/` and `mlp/` hold the kinds, `kinds.py` the table of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kakera.kv.backend import Attention
from kakera.kv.batch import Batch, Kept
from kakera.model.state import StatePool


class BlockPass(Protocol):
    """One batch on its way through the blocks of a kind."""

    def run(self, layer: int, x_TH: Tensor) -> Tensor:
        """What the block writes, [T, H], of what it reads, x_TH [T, H]; `layer` counts the blocks of the kind. A mixer
        updates what the sequences keep, unless a span is held, and fills the spans' saves."""
        ...


class Blocks(Protocol):
    """The blocks of one kind of a model, in all its layers."""

    @property
    def capturable(self) -> bool:
        """Whether decode rows given as tensors (`Batch.singles`) make a pass that a CUDA graph can capture."""
        ...

    def plan(self, batch: Batch, attention: Attention, states: StatePool) -> BlockPass:
        """What is the same for all layers. Raises ValueError for spans that no plan makes."""
        ...

    def commit(self, kept: Sequence[Kept], states: StatePool) -> None:
        """Take on the states of held spans by their tokens that stay, all layers: to the bits of a step with these
        tokens alone. What has no states does nothing."""
        ...


class Mlp(Protocol):
    """The feed-forward block of one layer, flat over all rows."""

    def __call__(self, x_TH: Tensor, decode_tokens: int = 0) -> Tensor:
        """[T, H]; `decode_tokens` as in `kakera.ops.linear`."""
        ...


@dataclass(frozen=True)
class Flat:
    """Blocks that see every row by itself."""

    layers: Sequence[Mlp]
    capturable: bool = True

    def plan(self, batch: Batch, attention: Attention, states: StatePool) -> BlockPass:
        return _FlatPass(self.layers, batch.decode_tokens)

    def commit(self, kept: Sequence[Kept], states: StatePool) -> None:
        pass


@dataclass(frozen=True)
class _FlatPass:
    layers: Sequence[Mlp]
    decode_tokens: int

    def run(self, layer: int, x_TH: Tensor) -> Tensor:
        return self.layers[layer](x_TH, self.decode_tokens)
