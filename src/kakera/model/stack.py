"""Stack: layers one behind the other around a residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.kv.backend import Attention
from kakera.kv.batch import Batch, Kept
from kakera.model.kinds import KINDS
from kakera.model.residual import RULES
from kakera.model.state import StatePool
from kakera.model.weights import LayerWeights, SiteWeights
from kakera.ops.exchange import Exchange


class Stack:
    """`spec`: of what this rank holds; `finish`: what the residual rule ends with."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[LayerWeights],
        finish: Tensor,
        device: torch.device,
        dtype: torch.dtype,
        exchange: Exchange,
    ):
        sites = [site for layer in layers for site in layer]
        of_kind: dict[str, list[SiteWeights]] = {}
        self._order: list[tuple[str, int]] = []  # kind, number among the blocks of the kind
        for site in sites:
            alike = of_kind.setdefault(site.kind, [])
            self._order.append((site.kind, len(alike)))
            alike.append(site)
        self._blocks = {
            kind: KINDS[kind].build(spec, [site.block for site in alike], device, dtype)
            for kind, alike in of_kind.items()
        }
        self._rule, self._eps = RULES[spec.residual.kind], spec.rms_eps
        self._reads, self._finish, self._exchange = tuple(site.read for site in sites), finish, exchange

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a pass of decode rows, as far as the layers go: plain operations ask the
        host here and there."""
        return all(blocks.capturable for blocks in self._blocks.values())

    def run(self, x_TH: Tensor, batch: Batch, attention: Attention, states: StatePool) -> Tensor:
        """Embeddings [T, H] through all layers and the finish."""
        passes = {kind: blocks.plan(batch, attention, states) for kind, blocks in self._blocks.items()}
        stream = self._rule.begin(x_TH, self._reads, self._finish, self._eps, self._exchange)
        for kind, number in self._order:
            stream.write(passes[kind].run(number, stream.read()))
        return stream.finish()

    def commit(self, kept: Sequence[Kept], states: StatePool) -> None:
        """See Blocks.commit."""
        for blocks in self._blocks.values():
            blocks.commit(kept, states)
