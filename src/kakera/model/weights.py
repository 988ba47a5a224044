"""The weights of a model as frozen records, linears that read the same input fused into one matrix.

Norm scales are float32 with the family's one added, decay and conv weights float32; the rest has the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.model.linear import Linear, Projection, fused
from kakera.model.parameters import Shapes, parameters
from kakera.plan.spec import ModelSpec
from kakera.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True)
class MlpWeights:
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class AttentionWeights:
    proj_in: Projection  # q | k | v | output gate (if gated), each head by head
    proj_out: Projection
    q_scale_D: Tensor
    k_scale_D: Tensor


@dataclass(frozen=True)
class GdnWeights:
    proj_in: Projection  # q | k | v (convolved together) | z | b | a
    proj_out: Projection
    conv_KC: Tensor  # float32 [taps, channels]
    rate_V: Tensor  # -exp(A_log), float32: g = rate softplus(a + dt_bias)
    dt_bias_V: Tensor  # float32
    scale_D: Tensor  # of the gated norm


@dataclass(frozen=True)
class LayerWeights:
    input_scale_H: Tensor
    mixer: GdnWeights | AttentionWeights
    post_scale_H: Tensor
    mlp: MlpWeights


@dataclass(frozen=True)
class MtpWeights:
    embedding_scale_H: Tensor
    hidden_scale_H: Tensor
    fc: Projection  # [H, 2 H]: embedding | hidden
    layer: LayerWeights
    scale_H: Tensor


@dataclass(frozen=True)
class ModelWeights:
    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    scale_H: Tensor
    head: Projection  # [vocabulary, H], the embedding itself if tied
    mtp: MtpWeights | None


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> ModelWeights:
    """Read and decode every tensor of the text model.

    Raises CheckpointError naming what is missing or not expected (before anything is read), misshaped or damaged.
    """
    draft = checkpoint.spec.mtp_layers > 0 and checkpoint.has("mtp.fc")
    shapes = parameters(checkpoint.spec, draft)
    checkpoint.check_complete(shapes)
    return _Loader(checkpoint, shapes, dtype, device).model(draft, progress)


@dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    shapes: Shapes
    dtype: torch.dtype
    device: torch.device

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def model(self, draft: bool, progress: Progress | None) -> ModelWeights:
        spec = self.spec
        embedding = self.linear("model.embed_tokens")
        layers: list[LayerWeights] = []
        for i in range(len(spec.layers)):
            layers.append(self.layer(f"model.layers.{i}", spec.layers[i] == "gdn"))
            if progress is not None:
                progress(i + 1, len(spec.layers))
        tied = spec.tied and not self.checkpoint.has("lm_head")
        return ModelWeights(
            embedding_VH=embedding.weight_OI,
            layers=tuple(layers),
            scale_H=self.norm("model.norm"),
            head=embedding if tied else self.linear("lm_head").packed(),
            mtp=self.mtp() if draft else None,
        )

    def layer(self, name: str, gdn: bool) -> LayerWeights:
        return LayerWeights(
            input_scale_H=self.norm(f"{name}.input_layernorm"),
            mixer=self.gdn(f"{name}.linear_attn") if gdn else self.attention(f"{name}.self_attn"),
            post_scale_H=self.norm(f"{name}.post_attention_layernorm"),
            mlp=self.mlp(f"{name}.mlp"),
        )

    def mlp(self, name: str) -> MlpWeights:
        return MlpWeights(
            gate_up=fused([self.linear(f"{name}.gate_proj"), self.linear(f"{name}.up_proj")]).packed(),
            down=self.linear(f"{name}.down_proj").packed(),
        )

    def attention(self, name: str) -> AttentionWeights:
        spec = self.spec
        q, k, v = parts = [self.linear(f"{name}.{part}_proj") for part in "qkv"]
        if spec.gated:  # stored per head: head_dim rows of query, then head_dim rows of gate
            rows = torch.arange(len(q.weight_OI), device=self.device).view(spec.heads, 2, spec.head_dim)
            parts = [q.rows(rows[:, 0].flatten()), k, v, q.rows(rows[:, 1].flatten())]
        return AttentionWeights(
            proj_in=fused(parts).packed(),
            proj_out=self.linear(f"{name}.o_proj").packed(),
            q_scale_D=self.norm(f"{name}.q_norm"),
            k_scale_D=self.norm(f"{name}.k_norm"),
        )

    def gdn(self, name: str) -> GdnWeights:
        return GdnWeights(
            proj_in=fused([self.linear(f"{name}.in_proj_{part}") for part in ("qkv", "z", "b", "a")]).packed(),
            proj_out=self.linear(f"{name}.out_proj").packed(),
            conv_KC=self.float32(f"{name}.conv1d.weight")[:, 0].t().contiguous(),
            rate_V=-self.float32(f"{name}.A_log").exp(),
            dt_bias_V=self.float32(f"{name}.dt_bias"),
            scale_D=self.float32(f"{name}.norm.weight"),
        )

    def mtp(self) -> MtpWeights:
        return MtpWeights(
            embedding_scale_H=self.norm("mtp.pre_fc_norm_embedding"),
            hidden_scale_H=self.norm("mtp.pre_fc_norm_hidden"),
            fc=self.linear("mtp.fc").packed(),
            layer=self.layer("mtp.layers.0", gdn=False),
            scale_H=self.norm("mtp.norm"),
        )

    def linear(self, name: str) -> Linear:
        out_channels, in_channels = self.shapes[name]
        return Linear(
            self.checkpoint.linear(name, out_channels, in_channels, self.dtype, self.device),
            self.checkpoint.bias(name, out_channels, self.dtype, self.device),
        )

    def norm(self, name: str) -> Tensor:
        return self.float32(f"{name}.weight") + self.spec.norm_offset

    def float32(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name, self.shapes[name], torch.float32, self.device)
