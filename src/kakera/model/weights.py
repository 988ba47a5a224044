"""The weights of a model as frozen records, linears that read the same input as one.

Norm scales are float32 with the family's one added, decay and conv weights float32; the rest has the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.model.linear import EmbeddingMap, LinearMap
from kakera.model.reader import LinearReader, Tensors
from kakera.weights.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True)
class MlpWeights:
    gate_up: LinearMap
    down: LinearMap


@dataclass(frozen=True)
class AttentionWeights:
    proj_in: LinearMap  # q | k | v | output gate (if gated), each head by head
    proj_out: LinearMap
    q_scale_D: Tensor
    k_scale_D: Tensor


@dataclass(frozen=True)
class GdnWeights:
    proj_in: LinearMap  # q | k | v (convolved together) | z | b | a
    proj_out: LinearMap
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
    fc: LinearMap  # [H, 2 H]: embedding | hidden
    layer: LayerWeights
    scale_H: Tensor


@dataclass(frozen=True)
class ModelWeights:
    embedding: EmbeddingMap
    layers: tuple[LayerWeights, ...]
    scale_H: Tensor
    head: LinearMap  # [vocabulary, H], the embedding itself if tied
    mtp: MtpWeights | None


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    *,
    draft: bool = False,
) -> ModelWeights:
    """Read and decode every tensor of the text model; of its draft layer only on request, since serving has no use
    for it.

    Raises CheckpointError naming what is missing or not expected (before anything is read), misshaped or damaged.
    """
    declared = checkpoint.spec.draft
    draft = draft and declared is not None and checkpoint.has(declared.tensors[-1].name)
    tensors = checkpoint.spec.tensors(draft)
    checkpoint.check_complete(tensors)
    return _Loader(checkpoint, tensors, device, LinearReader.of(checkpoint, tensors, dtype, device)).model(
        draft, progress
    )


@dataclass(frozen=True)
class _Loader:
    checkpoint: Checkpoint
    tensors: Tensors
    device: torch.device
    linears: LinearReader

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def model(self, draft: bool, progress: Progress | None) -> ModelWeights:
        spec = self.spec
        embedding, head = self.linears.embedding_and_head()
        layers: list[LayerWeights] = []
        for i in range(len(spec.layers)):
            layers.append(self.layer(f"model.layers.{i}", spec.layers[i].block("gdn") is not None))
            if progress is not None:
                progress(i + 1, len(spec.layers))
        return ModelWeights(
            embedding=embedding,
            layers=tuple(layers),
            scale_H=self.norm("model.norm"),
            head=head,
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
            gate_up=self.linears.projection([f"{name}.gate_proj", f"{name}.up_proj"]),
            down=self.linears.projection([f"{name}.down_proj"]),
        )

    def attention(self, name: str) -> AttentionWeights:
        return AttentionWeights(
            proj_in=self.linears.attention_input(name),
            proj_out=self.linears.projection([f"{name}.o_proj"]),
            q_scale_D=self.norm(f"{name}.q_norm"),
            k_scale_D=self.norm(f"{name}.k_norm"),
        )

    def gdn(self, name: str) -> GdnWeights:
        return GdnWeights(
            proj_in=self.linears.projection(
                [f"{name}.in_proj_qkv", f"{name}.in_proj_z"], tail=[f"{name}.in_proj_b", f"{name}.in_proj_a"]
            ),
            proj_out=self.linears.projection([f"{name}.out_proj"]),
            conv_KC=self.float32(f"{name}.conv1d.weight")[:, 0].t().contiguous(),
            rate_V=-self.float32(f"{name}.A_log").exp(),
            dt_bias_V=self.float32(f"{name}.dt_bias"),
            scale_D=self.float32(f"{name}.norm.weight"),
        )

    def mtp(self) -> MtpWeights:
        return MtpWeights(
            embedding_scale_H=self.norm("mtp.pre_fc_norm_embedding"),
            hidden_scale_H=self.norm("mtp.pre_fc_norm_hidden"),
            fc=self.linears.projection(["mtp.fc"]),
            layer=self.layer("mtp.layers.0", gdn=False),
            scale_H=self.norm("mtp.norm"),
        )

    def norm(self, name: str) -> Tensor:
        declared = self.tensors[f"{name}.weight"]
        return self.float32(declared.name) + (1.0 if declared.values == "delta" else 0.0)

    def float32(self, name: str) -> Tensor:
        return self.checkpoint.tensor(name, self.tensors[name].shape, torch.float32, self.device)
