"""An architecture of its own in one file: what a person adds to kakera, and nothing else.

Shiftnet: two Gated DeltaNet layers, then one of full attention, again and again. Its feed-forward block has two
matrices and a memory: down(relu(up (x_t + x_{t-1}))^2), where x_{t-1} is what the block read one token earlier. Its
draft layer is an ordinary one. Norms are stored as they multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kakera.arch.blocks import AttentionSpec, Block, GdnSpec, SwiGlu
from kakera.arch.config import Config
from kakera.arch.spec import OF_DRAFT, AddNorm, Draft, Layer, ModelSpec, Site
from kakera.arch.tensors import WHOLE, Kind, State, by_blocks, linear
from kakera.arch.tensors import Tensor as Declared
from kakera.kv.backend import Attention
from kakera.kv.batch import Batch, Kept
from kakera.model.kinds import BlockKind
from kakera.model.linear import LinearMap
from kakera.model.loader import Loader
from kakera.model.state import StatePool

MODEL_TYPE = "shiftnet"
NORM = AddNorm("scale")


# What it is


@dataclass(frozen=True)
class ShiftMlp:
    kind: ClassVar[str] = "shift_mlp"
    stream: ClassVar[bool] = False

    hidden: int
    width: int
    name: str = "mixer"

    @property
    def alive(self) -> int:
        return 2 * self.width

    def tensors(self, hidden: int) -> tuple[Declared, ...]:
        return (
            linear("up", self.width, hidden, Kind("shift.up", 60), by_blocks(0, self.width)),
            linear("down", hidden, self.width, Kind("shift.down", 30, escha=3), by_blocks(1, self.width)),
        )

    def states(self) -> tuple[State, ...]:
        return (State("last", (self.hidden,), "slot", "activation", "shift"),)

    def of_rank(self, rank: int, ranks: int) -> ShiftMlp:
        return ShiftMlp(self.hidden, self.width // ranks)


def declare(config: Config) -> ModelSpec:
    hidden, width = config.size("hidden_size"), config.size("intermediate_size")
    gdn = GdnSpec(config.size("gdn_heads"), 2 * config.size("gdn_heads"), 64, 64, 4)
    heads = config.size("num_attention_heads")
    full = AttentionSpec(heads, config.size("num_key_value_heads"), 64, 64, 1e4, gated=False, norms="scale")
    mixers: list[Block] = [gdn, gdn, full]
    count = config.size("num_hidden_layers")
    fc = linear("draft.join", hidden, 2 * hidden, OF_DRAFT, WHOLE)
    norms = (*NORM.read("draft.norm_embedding", hidden), *NORM.read("draft.norm_hidden", hidden))
    draft = Layer("draft.layer", (Site(full, "norm_a"), Site(SwiGlu(width), "norm_b")))
    layers = tuple(
        Layer(f"model.layers.{i}", (Site(mixers[i % 3], "norm_a"), Site(ShiftMlp(hidden, width), "norm_b")))
        for i in range(count)
    )
    own = Draft("post-norm", hidden, (*norms, fc), (draft,), "draft.norm", prefix="draft.")
    return ModelSpec.of(config, layers, NORM, own)


# How its own block is computed


@dataclass(frozen=True)
class Weights:
    up: LinearMap
    down: LinearMap


def load(loader: Loader, name: str, block: ShiftMlp) -> Weights:
    return Weights(loader.linears.projection([f"{name}.up"]), loader.linears.projection([f"{name}.down"]))


@dataclass(frozen=True)
class ShiftMlps:
    layers: Sequence[Weights]
    capturable: bool = False  # it walks over spans

    def plan(self, batch: Batch, attention: Attention, states: StatePool) -> _Pass:
        return _Pass(self.layers, batch, states.parts["last"])

    def commit(self, kept: Sequence[Kept], states: StatePool) -> None:
        for each in kept:
            for layer, rows_NH in enumerate(each.held.inputs["shift"]):
                states.parts["last"][layer, each.slot].copy_(rows_NH[each.count - 1])


@dataclass(frozen=True)
class _Pass:
    layers: Sequence[Weights]
    batch: Batch
    last_LSH: Tensor

    def run(self, layer: int, x_TH: Tensor) -> Tensor:
        before_TH = torch.empty_like(x_TH)
        for span in self.batch.spans:
            last_H, rows_NH = self.last_LSH[layer, span.slot], x_TH[span.rows]
            before_TH[span.rows] = torch.cat((last_H[None], rows_NH[:-1]))
            for save in span.saves:
                save.into.parts["last"][layer].copy_(rows_NH[save.position - 1 - span.start])
            if span.held is None:
                last_H.copy_(rows_NH[-1])
            else:
                span.held.inputs["shift"].append(rows_NH.clone())
        weights, tokens = self.layers[layer], self.batch.decode_tokens
        return weights.down(weights.up(x_TH + before_TH, tokens).relu().square(), tokens)


def build(spec: ModelSpec, layers: Sequence[Weights], device: torch.device, dtype: torch.dtype) -> ShiftMlps:
    return ShiftMlps(layers)


KIND = BlockKind(load, build)
