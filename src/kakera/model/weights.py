"""The weights of a model as frozen records, linears that read the same input as one.

Norm scales are float32 with the family's one added, decay and conv weights float32; the rest has the model's dtype.
Each record of a block loads itself, `name` being that of its module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kakera.arch.blocks import AttentionSpec, GdnSpec, SwiGlu
from kakera.arch.moe import Moe
from kakera.model.linear import EmbeddingMap, LinearMap
from kakera.model.loader import Loader


@dataclass(frozen=True)
class MlpWeights:
    gate_up: LinearMap
    down: LinearMap

    @staticmethod
    def load(loader: Loader, name: str, block: SwiGlu) -> MlpWeights:
        return MlpWeights(
            gate_up=loader.linears.projection([f"{name}.gate_proj", f"{name}.up_proj"]),
            down=loader.linears.projection([f"{name}.down_proj"]),
        )


@dataclass(frozen=True)
class MoeWeights:
    gates: LinearMap  # rows of the router | the shared expert's gate
    experts: tuple[MlpWeights, ...]
    shared: MlpWeights

    @staticmethod
    def load(loader: Loader, name: str, block: Moe) -> MoeWeights:
        linears, stacks = loader.linears, (f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj")
        return MoeWeights(
            gates=linears.projection([f"{name}.gate", f"{name}.shared_expert_gate"]),
            experts=tuple(MlpWeights(*(linears.expert(each, i) for each in stacks)) for i in range(block.experts)),
            shared=MlpWeights.load(loader, f"{name}.shared_expert", SwiGlu(block.shared)),
        )


@dataclass(frozen=True)
class AttentionWeights:
    proj_in: LinearMap  # q | k | v | output gate (if gated), each head by head
    proj_out: LinearMap
    q_scale_D: Tensor
    k_scale_D: Tensor

    @staticmethod
    def load(loader: Loader, name: str, block: AttentionSpec) -> AttentionWeights:
        return AttentionWeights(
            proj_in=loader.linears.attention_input(name, block),
            proj_out=loader.linears.projection([f"{name}.o_proj"]),
            q_scale_D=loader.norm(f"{name}.q_norm"),
            k_scale_D=loader.norm(f"{name}.k_norm"),
        )


@dataclass(frozen=True)
class GdnWeights:
    proj_in: LinearMap  # q | k | v (convolved together) | z | b | a
    proj_out: LinearMap
    conv_KC: Tensor  # float32 [taps, channels]
    rate_V: Tensor  # -exp(A_log), float32: g = rate softplus(a + dt_bias)
    dt_bias_V: Tensor  # float32
    scale_D: Tensor  # of the gated norm

    @staticmethod
    def load(loader: Loader, name: str, block: GdnSpec) -> GdnWeights:
        return GdnWeights(
            proj_in=loader.linears.projection(
                [f"{name}.in_proj_qkv", f"{name}.in_proj_z"], tail=[f"{name}.in_proj_b", f"{name}.in_proj_a"]
            ),
            proj_out=loader.linears.projection([f"{name}.out_proj"]),
            conv_KC=loader.float32(f"{name}.conv1d.weight")[:, 0].t().contiguous(),
            rate_V=-loader.float32(f"{name}.A_log").exp(),
            dt_bias_V=loader.float32(f"{name}.dt_bias"),
            scale_D=loader.norm(f"{name}.norm"),
        )


@dataclass(frozen=True)
class SiteWeights:
    """A block where it stands. `read`: what the residual rule reads the stream with; `block`: a record of its kind."""

    kind: str
    read: Tensor
    block: Any


LayerWeights = tuple[SiteWeights, ...]


@dataclass(frozen=True)
class MtpWeights:
    embedding_scale_H: Tensor
    hidden_scale_H: Tensor
    fc: LinearMap  # [H, 2 H]: embedding | hidden
    layers: tuple[LayerWeights, ...]
    finish: Tensor


@dataclass(frozen=True)
class ModelWeights:
    embedding: EmbeddingMap
    layers: tuple[LayerWeights, ...]
    finish: Tensor  # of the residual rule
    head: LinearMap  # [vocabulary, H], the embedding itself if tied
    mtp: MtpWeights | None
