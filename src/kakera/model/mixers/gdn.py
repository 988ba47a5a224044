"""Gated DeltaNet: the projections on all rows at once; what lies between them is a core's, plain or of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kakera.arch.blocks import GdnSpec
from kakera.arch.spec import ModelSpec
from kakera.kv.backend import Attention
from kakera.kv.batch import Batch, Kept, Span
from kakera.model.mixers.gdn_kernels import KernelCore
from kakera.model.mixers.gdn_plain import PlainCore
from kakera.model.state import StatePool
from kakera.model.weights import GdnWeights
from kakera.target.as_torch import name_of, target_of
from kakera.target.kernels import serves_gdn_step
from kakera.target.target import Target


class CorePass(Protocol):
    def run(self, layer: int, weights: GdnWeights, mixed_TX: Tensor) -> Tensor:
        """[T, V D] of mixed_TX, which holds q | k | v | z | b | a: convolution, gates, delta rule and gated norm.
        Updates the states and fills the spans' saves."""
        ...


class Core(Protocol):
    """Each sequence of a batch by its own state."""

    @property
    def capturable(self) -> bool: ...

    def plan(self, batch: Batch, states: StatePool) -> CorePass: ...

    def commit(self, layer: int, weights: GdnWeights, kept: Sequence[tuple[Kept, Tensor]], states: StatePool) -> None:
        """Take on states and columns of a layer by the tokens that stay, whose rows of mixed_TX stand beside each."""
        ...


class GatedDeltaNet:
    """The Gated DeltaNet layers of a model."""

    def __init__(self, layers: Sequence[GdnWeights], core: Core):
        self._layers, self._core = layers, core
        self.capturable = core.capturable

    def plan(self, batch: Batch, attention: Attention, states: StatePool) -> _Pass:
        held = tuple(span for span in batch.decode if span.held is not None)
        return _Pass(self._layers, self._core.plan(batch, states), batch.decode_tokens, held)

    def commit(self, kept: Sequence[Kept], states: StatePool) -> None:
        for layer, weights in enumerate(self._layers):
            rows = [(each, each.held.inputs[GdnSpec.kind][layer][: each.count]) for each in kept]
            self._core.commit(layer, weights, rows, states)


@dataclass(frozen=True)
class _Pass:
    layers: Sequence[GdnWeights]
    core: CorePass
    decode_tokens: int
    held: tuple[Span, ...]

    def run(self, layer: int, x_TH: Tensor) -> Tensor:
        weights = self.layers[layer]
        mixed_TX = weights.proj_in(x_TH, self.decode_tokens).contiguous()
        for span in self.held:
            assert span.held is not None
            span.held.inputs[GdnSpec.kind].append(mixed_TX[span.rows].clone())
        return weights.proj_out(self.core.run(layer, weights, mixed_TX), self.decode_tokens)


def build(spec: ModelSpec, layers: Sequence[GdnWeights], device: torch.device, dtype: torch.dtype) -> GatedDeltaNet:
    assert spec.gdn is not None
    return GatedDeltaNet(layers, core_for(spec.gdn, spec.rms_eps, target_of(device), dtype))


def core_for(spec: GdnSpec, eps: float, target: Target, dtype: torch.dtype) -> Core:
    """By kernels where there are some for activations of `dtype`."""
    kernels = target.has_cards and serves_gdn_step(spec, name_of(dtype))
    return KernelCore(spec, eps) if kernels else PlainCore(spec, eps)
