"""The weights of a model as frozen records, linears that read the same input fused into one matrix.

Norm scales are float32 with the family's one added, decay and conv weights float32; the rest has the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.plan.spec import GdnSpec, ModelSpec
from kakera.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True)
class MlpWeights:
    gate_up_OI: Tensor  # gate | up
    down_OI: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    in_OI: Tensor  # q | k | v | output gate (if gated), each head by head
    out_OI: Tensor
    q_scale_D: Tensor
    k_scale_D: Tensor


@dataclass(frozen=True)
class GdnWeights:
    in_OI: Tensor  # q | k | v (convolved together) | z | b | a
    out_OI: Tensor
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
    fc_OI: Tensor  # [H, 2 H]: embedding | hidden
    layer: LayerWeights
    scale_H: Tensor


@dataclass(frozen=True)
class ModelWeights:
    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    scale_H: Tensor
    head_VH: Tensor  # the embedding itself if tied
    mtp: MtpWeights | None


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> ModelWeights:
    """Read and decode every tensor of the text model. Raises CheckpointError naming what is missing or misshaped."""
    return _Loader(checkpoint, dtype, device).model(progress)


@dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def model(self, progress: Progress | None) -> ModelWeights:
        spec = self.spec
        embedding_VH = self.checkpoint.embedding("model.embed_tokens", spec.vocab, spec.hidden, self.dtype, self.device)
        layers: list[LayerWeights] = []
        for i in range(len(spec.layers)):
            layers.append(self.layer(f"model.layers.{i}", spec.layers[i] == "gdn"))
            if progress is not None:
                progress(i + 1, len(spec.layers))
        tied = spec.tied and not self.checkpoint.has("lm_head")
        return ModelWeights(
            embedding_VH=embedding_VH,
            layers=tuple(layers),
            scale_H=self.norm("model.norm"),
            head_VH=embedding_VH if tied else self.linear("lm_head", spec.vocab, spec.hidden),
            mtp=self.mtp() if spec.mtp_layers and self.checkpoint.has("mtp.fc") else None,
        )

    def layer(self, name: str, gdn: bool) -> LayerWeights:
        return LayerWeights(
            input_scale_H=self.norm(f"{name}.input_layernorm"),
            mixer=self.gdn(f"{name}.linear_attn") if gdn else self.attention(f"{name}.self_attn"),
            post_scale_H=self.norm(f"{name}.post_attention_layernorm"),
            mlp=self.mlp(f"{name}.mlp"),
        )

    def mlp(self, name: str) -> MlpWeights:
        hidden, inner = self.spec.hidden, self.spec.intermediate
        gate, up = (self.linear(f"{name}.{part}_proj", inner, hidden) for part in ("gate", "up"))
        return MlpWeights(torch.cat([gate, up]), self.linear(f"{name}.down_proj", hidden, inner))

    def attention(self, name: str) -> AttentionWeights:
        spec = self.spec
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        q = self.linear(f"{name}.q_proj", width * (2 if spec.gated else 1), spec.hidden)
        k, v = (self.linear(f"{name}.{part}_proj", kv_width, spec.hidden) for part in ("k", "v"))
        parts = [q, k, v]
        if spec.gated:  # stored per head: head_dim rows of query, then head_dim rows of gate
            query, gate = q.view(spec.heads, 2, spec.head_dim, spec.hidden).unbind(1)
            parts = [query.reshape(width, -1), k, v, gate.reshape(width, -1)]
        return AttentionWeights(
            in_OI=torch.cat(parts),
            out_OI=self.linear(f"{name}.o_proj", spec.hidden, width),
            q_scale_D=self.norm(f"{name}.q_norm", spec.head_dim),
            k_scale_D=self.norm(f"{name}.k_norm", spec.head_dim),
        )

    def gdn(self, name: str) -> GdnWeights:
        gdn = self.spec.gdn
        assert isinstance(gdn, GdnSpec)
        values = gdn.v_heads * gdn.v_dim
        rows = {"qkv": gdn.conv_channels, "z": values, "b": gdn.v_heads, "a": gdn.v_heads}
        parts = [self.linear(f"{name}.in_proj_{part}", count, self.spec.hidden) for part, count in rows.items()]
        conv_C1K = self.float32(f"{name}.conv1d.weight", gdn.conv_channels, 1, gdn.conv_taps)
        return GdnWeights(
            in_OI=torch.cat(parts),
            out_OI=self.linear(f"{name}.out_proj", self.spec.hidden, values),
            conv_KC=conv_C1K[:, 0].t().contiguous(),
            rate_V=-self.float32(f"{name}.A_log", gdn.v_heads).exp(),
            dt_bias_V=self.float32(f"{name}.dt_bias", gdn.v_heads),
            scale_D=self.float32(f"{name}.norm.weight", gdn.v_dim),
        )

    def mtp(self) -> MtpWeights:
        return MtpWeights(
            embedding_scale_H=self.norm("mtp.pre_fc_norm_embedding"),
            hidden_scale_H=self.norm("mtp.pre_fc_norm_hidden"),
            fc_OI=self.linear("mtp.fc", self.spec.hidden, 2 * self.spec.hidden),
            layer=self.layer("mtp.layers.0", gdn=False),
            scale_H=self.norm("mtp.norm"),
        )

    def linear(self, name: str, out_channels: int, in_channels: int) -> Tensor:
        return self.checkpoint.linear(name, out_channels, in_channels, self.dtype, self.device)

    def norm(self, name: str, channels: int | None = None) -> Tensor:
        return self.float32(f"{name}.weight", channels or self.spec.hidden) + self.spec.norm_offset

    def float32(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.tensor(name, shape, torch.float32, self.device)
