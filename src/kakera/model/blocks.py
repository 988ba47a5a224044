"""What a layer is made of, as the model calls it: a token mixer and a feed-forward block.

`mixers/` and `mlp/` hold the kinds. All mixers of a kind are one object, laid out once for a batch (`plan`) and run
layer by layer, as attention backends are (`kv.backend`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kakera.kv.backend import Attention
from kakera.kv.batch import Batch
from kakera.model.state import StatePool


class MixerPass(Protocol):
    """One batch on its way through the layers of a kind."""

    def run(self, layer: int, x_TH: Tensor) -> Tensor:
        """The mixed tokens [T, H] of normed x_TH [T, H]; `layer` counts the layers of the kind. Updates what the
        sequences keep, and fills the spans' saves."""
        ...


class Mixer(Protocol):
    """The token mixers of one kind of a model, all its layers."""

    @property
    def capturable(self) -> bool:
        """Whether decode rows given as tensors (`Batch.singles`) make a pass that a CUDA graph can capture."""
        ...

    def plan(self, batch: Batch, attention: Attention, states: StatePool) -> MixerPass:
        """What is the same for all layers. Raises ValueError for spans that no plan makes."""
        ...


class Mlp(Protocol):
    """The feed-forward block of one layer, flat over all rows."""

    def __call__(self, x_TH: Tensor, decode_tokens: int = 0) -> Tensor:
        """[T, H]; `decode_tokens` as in `kakera.ops.linear`."""
        ...
