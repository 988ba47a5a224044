"""Multi-token prediction: the draft layer of the family, over whole sequences (the reference) and over pages.

Slot j takes the embedding of token j and the post-norm hidden state of token j - 1, in that order, and predicts token
j + 1; before token 0 stands a zero hidden state. So a slot depends on nothing behind it, and a page of slots is a
function of its own prefix like every other page. Embedding and head are the target model's own. More than one draft:
the layer is applied again, to its guess and its own output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kakera.errors import CheckpointError
from kakera.kv.backend import Attention, AttentionPass
from kakera.kv.batch import Batch, Span
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.model.weights import MtpWeights
from kakera.ops.heads import ProjectedHeads
from kakera.ops.norm import rms_norm


@torch.inference_mode()
def draft_hidden(model: HybridModel, tokens_N: Tensor, hidden_NH: Tensor) -> Tensor:
    """Post-norm hidden states [N, H] of the draft layer in the slots 1 .. N; `model.logits` of row i scores token
    i + 2. Slot 0 is left out: the layer was trained without it.

    tokens_N: the tokens 1 .. N of the sequence; hidden_NH: the target's post-norm hidden states of tokens 0 .. N - 1.
    Raises CheckpointError if the model has no draft layer.
    """
    positions_N = torch.arange(1, 1 + len(tokens_N), device=tokens_N.device)
    batch = Batch(tokens_N, positions_N, (), (Span(0, len(tokens_N), 1, 0, positions_N[:0]),), positions_N[:0])
    return _run(model, batch, hidden_NH, _WholeSequence())


@torch.inference_mode()
def draft_pass(model: HybridModel, batch: Batch, before_TH: Tensor, attention: Attention) -> Tensor:
    """Post-norm hidden states [T, H] of the draft layer for a batch's tokens, whose keys and values are stored behind
    those of the model's layers; before_TH: of the token before each, the target's, or of a guess the draft layer's own.
    Fills the windows of the spans' saves. Raises as `draft_hidden`."""
    return _run(model, batch, before_TH, _Behind(attention, len(model.spec.full_layers)))


def _run(model: HybridModel, batch: Batch, before_TH: Tensor, attention: Attention) -> Tensor:
    weights = model.weights.mtp
    if weights is None or model.draft is None:
        raise CheckpointError("this model directory has no multi-token prediction layer (mtp.* tensors)")
    embedding_TH = model.weights.embedding(batch.tokens_T)
    x_TH = _pair(weights, embedding_TH, before_TH, model.spec.rms_eps, batch.decode_tokens)
    states = StatePool(model.spec, 0, batch.device)  # a draft layer has none
    return model.draft.run(x_TH, batch, attention, states)


@dataclass(frozen=True)
class _Behind:
    """Attention whose layers are counted from `first` on."""

    attention: Attention
    first: int

    def plan(self, batch: Batch) -> AttentionPass:
        return _BehindPass(self.attention.plan(batch), self.first)


@dataclass(frozen=True)
class _BehindPass:
    inner: AttentionPass
    first: int

    def run(self, layer: int, heads: ProjectedHeads) -> Tensor:
        return self.inner.run(self.first + layer, heads)


class _WholeSequence:
    """Attention over the batch itself, with nothing kept."""

    def plan(self, batch: Batch) -> _WholeSequence:
        return self

    def run(self, layer: int, heads: ProjectedHeads) -> Tensor:
        return heads.gated(causal_attention(*heads.turned()))


def causal_attention(q_NQD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
    """Attention of a whole sequence over itself, [N, Q, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NQD, k_NKD, v_NKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _pair(weights: MtpWeights, embedding_NH: Tensor, hidden_NH: Tensor, eps: float, decode_tokens: int) -> Tensor:
    embedding_NH = rms_norm(embedding_NH, weights.embedding_scale_H, eps)
    hidden_NH = rms_norm(hidden_NH, weights.hidden_scale_H, eps)
    return weights.fc(torch.cat([embedding_NH, hidden_NH], dim=1), decode_tokens)
