"""HybridModel: the text model of the Qwen3.5 family, and Qwen3 as its case without Gated DeltaNet and gates."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kakera.arch.spec import ModelSpec
from kakera.kv.backend import Attention
from kakera.kv.batch import Batch
from kakera.model.blocks import Mixer, Mlp
from kakera.model.mixers.full import FullAttention
from kakera.model.mixers.gdn import GatedDeltaNet, core_for
from kakera.model.mlp.dense import DenseMlp
from kakera.model.state import StatePool
from kakera.model.weights import AttentionWeights, GdnWeights, ModelWeights, Progress, load_weights
from kakera.ops.fused import add_rms_norm
from kakera.ops.norm import rms_norm
from kakera.weights.checkpoint import Checkpoint


class HybridModel:
    def __init__(self, spec: ModelSpec, weights: ModelWeights):
        self.spec = spec
        self.weights = weights
        self._mixers = _mixers(spec, weights)
        kinds = ["gdn" if layer.block("gdn") else "full" for layer in spec.layers]
        self._layers = tuple(
            _Layer(kind, kinds[:i].count(kind), DenseMlp(layer.mlp))
            for i, (kind, layer) in enumerate(zip(kinds, weights.layers, strict=True))
        )

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a pass of decode rows, as far as the model goes: plain operations ask the
        host here and there."""
        return all(mixer.capturable for mixer in self._mixers.values())

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
    def forward(self, batch: Batch, attention: Attention, states: StatePool) -> Tensor:
        """Run the batch and return float32 logits [R, vocabulary] of `batch.logit_rows`."""
        return self.logits(self.hidden(batch, attention, states)[batch.logit_rows])

    @torch.inference_mode()
    def hidden(self, batch: Batch, attention: Attention, states: StatePool) -> Tensor:
        """Hidden states after the final norm, [T, H]. Writes the batch's keys, values and states, fills its saves.

        On a CPU the values of prefill rows have the same bits whatever else is in the batch and wherever the prompt
        was cut (at multiples of 64).
        """
        eps = self.spec.rms_eps
        x_TH = self.weights.embedding(batch.tokens_T)
        passes = {kind: mixer.plan(batch, attention, states) for kind, mixer in self._mixers.items()}
        # each sum has its norm beside it, which on a GPU is one launch: the norm in front of the next block
        scales = [scale for layer in self.weights.layers for scale in (layer.input_scale_H, layer.post_scale_H)]
        scales.append(self.weights.scale_H)
        normed_TH = rms_norm(x_TH, scales[0], eps)
        for i, layer in enumerate(self._layers):
            mixed_TH = passes[layer.kind].run(layer.number, normed_TH)
            x_TH, normed_TH = add_rms_norm(x_TH, mixed_TH, scales[2 * i + 1], eps)
            x_TH, normed_TH = add_rms_norm(x_TH, layer.mlp(normed_TH, batch.decode_tokens), scales[2 * i + 2], eps)
        hidden_TH = normed_TH
        _save_hidden(batch, hidden_TH)
        return hidden_TH

    @torch.inference_mode()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The head over post-norm hidden states: float32 [R, vocabulary], vocabulary contiguous."""
        return self.weights.head(hidden_RH, decode_tokens=len(hidden_RH)).float().contiguous()


class _Layer(NamedTuple):
    """`number` counts the layers of the kind."""

    kind: str
    number: int
    mlp: Mlp


def _mixers(spec: ModelSpec, weights: ModelWeights) -> dict[str, Mixer]:
    """By kind of layer; which kernels compute them is decided here, once."""
    mixers: dict[str, Mixer] = {}
    mine = [layer.mixer for layer in weights.layers]
    if gdn := [mixer for mixer in mine if isinstance(mixer, GdnWeights)]:
        assert spec.gdn is not None
        table = weights.embedding
        mixers["gdn"] = GatedDeltaNet(gdn, core_for(spec.gdn, spec.rms_eps, table.device, table.dtype))
    if full := [mixer for mixer in mine if isinstance(mixer, AttentionWeights)]:
        mixers["full"] = FullAttention(spec, full)
    return mixers


def _save_hidden(batch: Batch, hidden_TH: Tensor) -> None:
    """Each checkpoint carries the hidden state of the last token before it."""
    for span in batch.spans:
        for save in span.saves:
            if save.into.hidden_H is not None:
                save.into.hidden_H.copy_(hidden_TH[span.offset + save.position - 1 - span.start])
