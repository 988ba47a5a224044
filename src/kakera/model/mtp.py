"""Multi-token prediction: the draft layer of the family, over whole sequences.

Pair i takes the embedding of token i + 1 and the post-norm hidden state of token i, in that order, and predicts token
i + 2. Embedding and head are the target model's own. Only differences of positions matter, so pair i sits at
position i. More than one draft: the layer is applied again to its own output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kakera.errors import CheckpointError
from kakera.kv.batch import Batch, Span
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.model.weights import MtpWeights
from kakera.ops.heads import ProjectedHeads
from kakera.ops.norm import rms_norm


@torch.inference_mode()
def draft_hidden(model: HybridModel, tokens_N: Tensor, hidden_NH: Tensor) -> Tensor:
    """Post-norm hidden states [N, H] of the draft layer; `model.logits` of row i scores token i + 2.

    tokens_N: the tokens 1 .. N of the sequence; hidden_NH: the target's post-norm hidden states of tokens 0 .. N - 1.
    Raises CheckpointError if the model has no draft layer.
    """
    weights = model.weights.mtp
    if weights is None or model.draft is None:
        raise CheckpointError("this model directory has no multi-token prediction layer (mtp.* tensors)")
    x_NH = _pair(weights, model.weights.embedding(tokens_N), hidden_NH, model.spec.rms_eps)
    positions_N = torch.arange(len(tokens_N), device=tokens_N.device)
    batch = Batch(tokens_N, positions_N, (), (Span(0, len(tokens_N), 0, 0, positions_N[:0]),), positions_N[:0])
    states = StatePool(model.spec, 0, tokens_N.device)  # a draft layer has none
    return model.draft.run(x_NH, batch, _WholeSequence(), states)


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


def _pair(weights: MtpWeights, embedding_NH: Tensor, hidden_NH: Tensor, eps: float) -> Tensor:
    embedding_NH = rms_norm(embedding_NH, weights.embedding_scale_H, eps)
    hidden_NH = rms_norm(hidden_NH, weights.hidden_scale_H, eps)
    return weights.fc(torch.cat([embedding_NH, hidden_NH], dim=1))
