"""HybridModel: the text model of the Qwen3.5 family, and Qwen3 as its case without Gated DeltaNet and gates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kakera.model.attention import full_attention
from kakera.model.batch import Batch
from kakera.model.gdn import gated_delta_net, routes_of
from kakera.model.mlp import mlp
from kakera.model.state import StatePool
from kakera.model.weights import AttentionWeights, ModelWeights, Progress, load_weights
from kakera.ops.fused import add_rms_norm
from kakera.ops.heads import ProjectedHeads
from kakera.ops.norm import rms_norm
from kakera.ops.rotary import Rotary
from kakera.plan.spec import ModelSpec
from kakera.weights.checkpoint import Checkpoint


class KeyValues(Protocol):
    """What the model asks of a KV cache; `layer` counts the full-attention layers."""

    def attend_heads(self, layer: int, batch: Batch, heads: ProjectedHeads) -> Tensor: ...


class HybridModel:
    def __init__(self, spec: ModelSpec, weights: ModelWeights):
        self.spec = spec
        self.weights = weights

    @staticmethod
    def load(
        path: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        progress: Progress | None = None,
        *,
        escha_bias: bool = False,
        draft: bool = False,
    ) -> HybridModel:
        """Read a model directory; `escha_bias` as in `Checkpoint.open`, `draft`: its draft layer too, if it has one.
        Raises CheckpointError."""
        checkpoint = Checkpoint.open(path, escha_bias=escha_bias)
        return HybridModel(
            checkpoint.spec, load_weights(checkpoint, dtype, torch.device(device), progress, draft=draft)
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KeyValues, states: StatePool) -> Tensor:
        """Run the batch and return float32 logits [R, vocabulary] of `batch.logit_rows`."""
        return self.logits(self.hidden(batch, kv, states)[batch.logit_rows])

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: KeyValues, states: StatePool) -> Tensor:
        """Hidden states after the final norm, [T, H]. Writes the batch's keys, values and states, fills its saves.

        On a CPU the values of prefill rows have the same bits whatever else is in the batch and wherever the prompt
        was cut (at multiples of 64).
        """
        rotary = Rotary.at(batch.positions_T, self.spec.rotary_dim, self.spec.rope_theta)
        x_TH = self.weights.embedding(batch.tokens_T)
        routes = routes_of(batch, self.spec.gdn, self.spec.rms_eps, x_TH.dtype)
        layers, eps = self.weights.layers, self.spec.rms_eps
        # each sum has its norm beside it, which on a GPU is one launch: the norm in front of the next block
        scales = [scale for layer in layers for scale in (layer.input_scale_H, layer.post_scale_H)]
        scales.append(self.weights.scale_H)
        normed_TH = rms_norm(x_TH, scales[0], eps)
        gdn = full = 0
        for i, layer in enumerate(layers):
            if isinstance(layer.mixer, AttentionWeights):
                mixed_TH = self._attend(layer.mixer, normed_TH, rotary, full, batch, kv)
                full += 1
            else:
                assert self.spec.gdn is not None
                mixed_TH = gated_delta_net(layer.mixer, self.spec.gdn, eps, normed_TH, gdn, routes, states)
                gdn += 1
            x_TH, normed_TH = add_rms_norm(x_TH, mixed_TH, scales[2 * i + 1], eps)
            x_TH, normed_TH = add_rms_norm(x_TH, mlp(layer.mlp, normed_TH, batch.decode_rows), scales[2 * i + 2], eps)
        hidden_TH = normed_TH
        _save_hidden(batch, hidden_TH)
        return hidden_TH

    @torch.inference_mode()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The head over post-norm hidden states: float32 [R, vocabulary], vocabulary contiguous."""
        return self.weights.head(hidden_RH, fast_rows=len(hidden_RH)).float().contiguous()

    def _attend(
        self, weights: AttentionWeights, x_TH: Tensor, rotary: Rotary, layer: int, batch: Batch, kv: KeyValues
    ) -> Tensor:
        attend = partial(kv.attend_heads, layer, batch)
        return full_attention(weights, self.spec, x_TH, rotary, attend, batch.decode_rows)


def _save_hidden(batch: Batch, hidden_TH: Tensor) -> None:
    """Each checkpoint carries the hidden state of the last token before it."""
    for span in batch.spans:
        for save in span.saves:
            if save.into.hidden_H is not None:
                save.into.hidden_H.copy_(hidden_TH[span.offset + save.position - 1 - span.start])
