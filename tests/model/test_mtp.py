"""The draft layer: optional, and causal over pairs of (next token, hidden state)."""

from dataclasses import replace

import pytest
import torch
from model_world import Harness

from kakera.errors import CheckpointError
from kakera.model.linear import Linear
from kakera.model.mtp import causal_attention, draft_hidden
from kakera.model.qwen3_5 import HybridModel
from kakera.model.weights import MtpWeights


@pytest.fixture
def drafting(tiny: HybridModel) -> HybridModel:
    """The tiny model with one of its own attention layers as draft layer."""
    torch.manual_seed(5)
    hidden = tiny.spec.hidden
    scale_H = 1 + 0.3 * torch.randn(hidden)
    layer = tiny.weights.layers[1]
    mtp = MtpWeights(scale_H, scale_H.flip(0), Linear(torch.randn(hidden, 2 * hidden) / 14), (layer,), scale_H)
    return HybridModel(tiny.spec, replace(tiny.weights, mtp=mtp))


def test_a_model_without_draft_layer_says_so(tiny: HybridModel, tokens: torch.Tensor):
    with pytest.raises(CheckpointError, match="no multi-token prediction layer"):
        draft_hidden(tiny, tokens[:4], torch.zeros(4, tiny.spec.hidden))


def test_later_pairs_do_not_change_earlier_drafts(drafting: HybridModel, tokens: torch.Tensor):
    hidden_NH = torch.randn(20, drafting.spec.hidden)
    whole = draft_hidden(drafting, tokens[1:21], hidden_NH)
    torch.testing.assert_close(draft_hidden(drafting, tokens[1:13], hidden_NH[:12]), whole[:12], rtol=0, atol=1e-5)


def test_embedding_comes_first_and_both_inputs_matter(drafting: HybridModel, tokens: torch.Tensor):
    mtp, H = drafting.weights.mtp, drafting.spec.hidden
    assert mtp is not None and isinstance(mtp.fc, Linear)
    embedding_only = replace(mtp, fc=Linear(torch.cat([mtp.fc.weight_OI[:, :H], torch.zeros(H, H)], dim=1)))
    blind = HybridModel(drafting.spec, replace(drafting.weights, mtp=embedding_only))
    a, b = torch.randn(2, 6, H)
    assert torch.equal(draft_hidden(blind, tokens[:6], a), draft_hidden(blind, tokens[:6], b))
    assert not torch.allclose(draft_hidden(blind, tokens[:6], a), draft_hidden(blind, tokens[6:12], a))
    assert not torch.allclose(draft_hidden(drafting, tokens[:6], a), draft_hidden(drafting, tokens[:6], b))


def test_causal_attention_equals_the_paged_cache(harness: Harness):
    from kakera.kv.batch import Batch, Span

    spec, count = harness.spec, 70
    q = torch.randn(count, spec.heads, spec.head_dim)
    k, v = torch.randn(2, count, spec.kv_heads, spec.head_dim)
    batch = Batch(
        torch.zeros(count, dtype=torch.int64),
        torch.arange(count),
        (),
        (Span(0, count, 0, 0, torch.tensor(harness.pages(0))),),
        torch.tensor([count - 1]),
    )
    expected = harness.kv.backend.plan(batch).attend(0, q, k, v)
    torch.testing.assert_close(causal_attention(q, k, v), expected, rtol=0, atol=1e-5)
