import numpy as np
import pytest
import torch

from kakera.evaluate.forced import Forced
from kakera.evaluate.kld import divergence
from kakera.evaluate.ppl import perplexity, token_nll
from kakera.kv.cache import KVCache
from kakera.model.qwen3_5 import HybridModel
from kakera.model.state import StatePool
from kakera.plan.kv_format import KvFormat

WINDOWS = [tuple(torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(i)).tolist()) for i in range(2)]


@pytest.fixture(scope="module")
def model(tiny_model):
    return HybridModel.load(tiny_model)


def forced(model, codec, chunk=128):
    fmt = KvFormat(codec, group=64, window_pages=1)
    return Forced(model, KVCache(model.spec, fmt, 5, 1).backend, StatePool(model.spec, 1), chunk)


def logits(engine, tokens):
    return torch.cat([rows for _, rows in engine.logits(tokens)])


def test_perplexity_equals_the_direct_computation(model):
    direct = []
    for tokens in WINDOWS:
        logp = logits(forced(model, "fp32"), tokens).double().log_softmax(-1)
        direct.append(-logp[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
    found = perplexity(forced(model, "fp32"), WINDOWS)
    assert found.positions == 2 * 299
    assert found.nll.mean == pytest.approx(torch.cat(direct).mean().item(), abs=1e-5)
    assert found.perplexity == pytest.approx(np.exp(found.nll.mean))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int2"])
def test_the_chunk_changes_no_logit(model, codec):
    small, large = (logits(forced(model, codec, chunk), WINDOWS[0]) for chunk in (64, 320))
    assert torch.equal(small, large)


def test_costs_do_not_depend_on_what_was_measured_before(model):
    engine = forced(model, "int2")
    first = token_nll(engine, WINDOWS[0])
    token_nll(engine, WINDOWS[1])
    assert np.array_equal(token_nll(engine, WINDOWS[0]), first)


def test_a_model_does_not_diverge_from_itself(model):
    found = divergence(forced(model, "bf16"), forced(model, "bf16"), WINDOWS)
    assert (found.kld.mean, found.max, found.top1.mean, found.nll_delta.mean) == (0.0, 0.0, 1.0, 0.0)
    assert found.positions == 2 * 299


def test_divergence_equals_the_direct_computation(model):
    base, tested = forced(model, "fp32"), forced(model, "int2")
    found = divergence(base, tested, WINDOWS[:1])
    p, q = (logits(engine, WINDOWS[0])[:-1].double().log_softmax(-1) for engine in (base, tested))
    kld = (p.exp() * (p - q)).sum(-1)
    assert found.kld.mean == pytest.approx(kld.mean().item(), abs=1e-6)
    assert found.max == pytest.approx(kld.max().item(), abs=1e-5)
    assert found.top1.mean == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found.kld.mean > 0


def test_int2_diverges_only_where_a_key_left_the_window(model):
    """With a window of one page, the first 128 positions read everything in 16 bit: they equal bf16 up to rounding."""
    base, tested = forced(model, "bf16"), forced(model, "int2")
    p, q = (logits(engine, WINDOWS[0]).double().log_softmax(-1) for engine in (base, tested))
    kld = (p.exp() * (p - q)).sum(-1)
    assert kld[192:].mean() > 20 * kld[:128].mean()
